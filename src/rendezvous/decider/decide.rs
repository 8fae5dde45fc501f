//! Whether the next round can close, what its world is, and what members are told. The rules are in [`crate::rendezvous::coordinator::machine`].

use std::time::Instant;

use crate::rendezvous::protocol::settings::LAST_LOOK;

use super::claims::bind_to_an_heir;
use super::members::{close, interrupt, note, status};
use super::ranks::{self, Candidate};
use super::state::{Node, Run, Status, World};
use crate::rendezvous::coordinator::machine::Command;
use crate::rendezvous::protocol::message::{CoordinatorMessage, JoinWorkers, NodeId, Placement, Round, Verdict};

/// Close the round if it can be closed, and tell members when the world must re-form.
pub(in crate::rendezvous) fn decide(run: &mut Run, now: Instant, out: &mut Vec<Command>) {
    run.close_at = None;
    run.young_until = run.young_until.filter(|until| now < *until);
    if run.closed.is_none() {
        bind_to_an_heir(run, now, out);
        advance(run, now, out);
    }
    // Each decision is logged with its reason, once: when it changes.
    let standing = run.judge_standing();
    if standing != std::mem::replace(&mut run.standing, standing)
        && let Some(text) = run.standing_text()
    {
        note(run, text, out);
    }
}

fn advance(run: &mut Run, now: Instant, out: &mut Vec<Command>) {
    end_hold(run, now, out);
    if close_if_all_done(run, out) {
        return;
    }
    let enough = run.waiting.len() >= run.settings.min_nodes as usize;
    if run.active.is_empty() && enough && run.unreachable_count == 0 {
        let ready_since = *run.ready_since.get_or_insert(now);
        match closing(run, ready_since) {
            (at, reason) if at <= now => complete(run, &reason, now, out),
            (at, _) => run.close_at = Some(at),
        }
    } else if !run.active.is_empty() || !enough {
        run.ready_since = None;
    }
    tell(run, out);
}

/// Every live member of an undisturbed world has finished: that is the job's end.
pub(in crate::rendezvous) fn close_if_all_done(run: &mut Run, out: &mut Vec<Command>) -> bool {
    let done = run.is_all_done();
    if done {
        let nodes = u32::try_from(run.active.len()).unwrap_or(u32::MAX);
        close(run, Verdict::AllDone { round: run.round, nodes }, out);
    }
    done
}

/// After a restart of this coordinator: stop waiting for members of the world it did not form, once all have reported or the
/// time for that is over.
fn end_hold(run: &mut Run, now: Instant, out: &mut Vec<Command>) {
    let (Some(until), Some(world)) = (run.hold_until, &run.world) else {
        return;
    };
    let (size, reported) = (world.size as usize, run.active.len() + run.returning_count);
    if reported >= size {
        run.hold_until = None;
        note(run, format!("all {size} members of round {} have reported", run.round), out);
    } else if until <= now {
        run.hold_until = None;
        if run.is_all_done() {
            return;
        }
        let reason = match run.gone_rank.filter(|_| reported + run.gone_count() >= size) {
            Some(rank) => {
                format!(
                    "node rank {rank} of round {} has ended with the coordinator that its process hosted",
                    run.round
                )
            }
            None => {
                let missing = format!("{} of {size} members of round {}", size - reported, run.round);
                format!("{missing} did not report to the restarted coordinator")
            }
        };
        interrupt(run, reason, out);
    } else if reported + run.gone_count() >= size && until > now + LAST_LOOK {
        // Nobody else is expected. Those who have finished say so right after they have reported.
        run.hold_until = Some(now + LAST_LOOK);
    }
}

/// When the next round closes, and why then. At least `min_nodes` wait and nobody runs.
fn closing(run: &Run, ready_since: Instant) -> (Instant, String) {
    let (waiting, max) = (run.waiting.len(), run.settings.max_nodes as usize);
    // Members of a world that this coordinator did not form may still run: it is not theirs to be replaced before they report.
    let hold_until = run.hold_until.max(run.strangers_until).unwrap_or(ready_since);
    if waiting >= max {
        return (ready_since.max(hold_until), format!("the maximum of {} is in", nodes(max)));
    }
    let last_size = run.world.as_ref().map(|world| world.size as usize);
    // Without any member of the last world this is a new beginning: others are to be expected.
    let survives = run.returning_count > 0;
    if let Some(size) = last_size.filter(|_| run.shrinks()) {
        if run.returning_count == size {
            return (ready_since, format!("all members of round {} are back", run.round));
        }
        let settle = run.settings.settle_timeout;
        let settled = (ready_since + settle).max(hold_until);
        let cause = run.interrupted.as_deref().unwrap_or("the world changed");
        return (settled, format!("settled for {:.1} s after {cause}", settle.as_secs_f64()));
    }
    let last_call = run.settings.last_call_timeout;
    // In the first round the last call begins when enough nodes are in; later ones grow from the newcomer on.
    let since = if last_size.is_some() && survives { run.newcomer_since.unwrap_or(ready_since) } else { ready_since };
    ((since + last_call).max(hold_until), format!("the last call of {:.1} s ended", last_call.as_secs_f64()))
}

impl Run {
    /// Whether the next world, with those who wait, is no larger than the last one and goes on from it.
    pub(in crate::rendezvous) fn shrinks(&self) -> bool {
        let last_size = self.world.as_ref().map(|world| world.size as usize);
        self.returning_count > 0 && last_size.is_some_and(|size| self.waiting.len() <= size)
    }
}

/// Form the next world.
fn complete(run: &mut Run, why_now: &str, now: Instant, out: &mut Vec<Command>) {
    let mut waiting: Vec<_> = run
        .nodes
        .iter()
        .filter_map(|(id, node)| match &node.status {
            Status::Waiting { join, arrival } => {
                let last_rank = run.last_rank(node);
                let order = (last_rank.is_none(), if last_rank.is_some() { 0 } else { *arrival });
                let last_rank = last_rank.filter(|_| !run.settings.ranks_as_asked);
                Some((order, Candidate { key: *id, last_rank, node_rank: join.node_rank, addr: node.addr() }))
            }
            _ => None,
        })
        .collect();
    // Members first, then newcomers as they came: that is who is in. Ranks are another matter.
    waiting.sort_by_key(|(order, _)| *order);
    waiting.truncate(run.settings.max_nodes as usize);
    let members = ranks::assign(waiting.into_iter().map(|(_, candidate)| candidate).collect());

    let master = members.first().and_then(|id| run.nodes.get(id)).and_then(|node| match &node.status {
        Status::Waiting { join, .. } => Some((reachable_addr(run, node, &members), join.store_port)),
        _ => None,
    });
    let brought: Option<Vec<_>> = members
        .iter()
        .map(|id| match run.nodes.get(id).map(|node| &node.status) {
            Some(Status::Waiting { join, .. }) => join.workers.clone(),
            _ => None,
        })
        .collect();
    let workers = brought.map(|brought: Vec<JoinWorkers>| ranks::assign_workers(&brought));
    run.round = run.next_round();
    for (rank, id) in members.iter().enumerate() {
        if let Some(node) = run.nodes.get_mut(id) {
            (node.status, node.done) = (Status::Active, false);
            node.placed = Some((run.round, rank as u32));
        }
    }
    run.recount();
    let list = run.list(&run.active);
    let reason = format!("{why_now}{list}");
    note(run, format!("round {} is complete with {}: {reason}", run.round, nodes(members.len())), out);
    let id = world_id(run.round, &members);
    run.worlds.insert(id);
    run.world = Some(World {
        id,
        size: members.len() as u32,
        master,
        reason,
        members: (0..).zip(members.iter().copied()).collect(),
        restart: run.restart,
        workers,
    });
    run.interrupted = None;
    run.failure = None;
    run.told = false;
    run.ready_since = None;
    run.hold_until = None;
    run.gone_rank = None;
    run.strangers_until = None;
    run.close_at = None;
    run.newcomer_since = (!run.waiting.is_empty()).then_some(now);
    for (rank, id) in members.iter().enumerate() {
        let session = run.nodes.get(id).and_then(|node| node.session);
        if let (Some(session), Some(message)) = (session, placement(run, rank as u32)) {
            out.push(Command::Send { session, message });
        }
    }
}

/// A number for the world of these members (FNV-1a). Their ids were drawn at random, so no other world has it; one of the same
/// members in the same round is the same for all that matters.
fn world_id(round: Round, members: &[NodeId]) -> u64 {
    let bytes = members.iter().flat_map(|id| id.0.to_le_bytes()).chain(round.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What a member of the current world is told of its place.
pub(in crate::rendezvous) fn placement(run: &Run, rank: u32) -> Option<CoordinatorMessage> {
    let world = run.world.as_ref()?;
    let (master_addr, master_port) = world.master.clone()?;
    Some(CoordinatorMessage::Complete(Placement {
        round: run.round,
        rank,
        world_size: world.size,
        world: world.id,
        master_addr,
        master_port,
        reason: world.reason.clone(),
        restart: world.restart,
        workers: world.workers.as_ref().and_then(|workers| workers.get(rank as usize)).copied(),
        host: run.host_seat(),
    }))
}

/// The address under which the other members reach `node`.
///
/// A node on the coordinator's own host may be seen under a loopback address, which is of no use to nodes elsewhere. They
/// have reached this very host, so the address they used is the one to give.
fn reachable_addr(run: &Run, node: &Node, members: &[NodeId]) -> String {
    if node.local_addr.is_none() && node.ends.peer.is_loopback() {
        let elsewhere = |id: &NodeId| run.nodes.get(id).map(|other| other.ends).filter(|ends| !ends.peer.is_loopback());
        if let Some(ends) = members.iter().find_map(elsewhere) {
            return ends.local.to_string();
        }
    }
    node.addr()
}

/// Tell members when what they should know has changed: from "nothing" to "the world must re-form", or back.
fn tell(run: &mut Run, out: &mut Vec<Command>) {
    let waiting = run.waiting_for_members();
    if (waiting > 0) == run.told {
        return;
    }
    run.told = waiting > 0;
    let message = status(run);
    for node in run.active.iter().filter_map(|id| run.nodes.get(id)) {
        if let Some(session) = node.session {
            out.push(Command::Send { session, message: message.clone() });
        }
    }
}

fn nodes(count: usize) -> String {
    if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") }
}

/// Why the world must re-form.
pub(in crate::rendezvous) fn why(run: &Run) -> String {
    let count = run.waiting.len();
    match &run.interrupted {
        Some(reason) => reason.clone(),
        None => format!(
            "{} to join{}; Detected {count} new nodes; will restart worker group", // PyTorch's words
            if count == 1 { "1 node waits".to_owned() } else { format!("{count} nodes wait") },
            run.list(&run.waiting)
        ),
    }
}
