//! The next round: when it closes, what its world is, and when members are notified that the world re-forms.
//!
//! A round closes when no member of the last one is still running, at least `min_nodes` and `min_workers` wait, and one of these holds:
//!
//! - `max_nodes` or `max_workers` wait;
//! - all members of the last round are back, and no newcomer waits;
//! - some members are back, no more nodes wait than the last world had, and `settle_timeout` has passed;
//! - more nodes wait than the last world had, or no member is back, and `last_call_timeout` has passed.
//!
//! Members that can change in place are not notified when nodes wait to join: [`super::in_place`] has the rules. Once all of them
//! have stopped for a change, the round closes as soon as enough wait.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Run;
use super::event::Effect;
use super::in_place::{self, NextStep};
use super::node::{Node, Status};
use super::parts::Parts;
use super::ranks;
use super::recovery::Reports;
use super::resume::resume_of;
use super::roster::Roster;
use super::round::World;
use super::size::nodes;
use crate::events::record::{Kind, Why};
use crate::rendezvous::messages::message::{
    CoordinatorMessage, Generation, JoinWorkers, NEVER, NodeId, Placement, Resume, Round, Verdict,
};

impl Run {
    /// Close the round if it can close, and notify members if the world must re-form.
    pub(super) fn decide(&mut self, now: Instant) {
        self.closes_at = None;
        self.recovery.end_if_due(now);
        if self.current.closed().is_none() {
            self.rebind(now);
            self.advance(now);
        }
        // A decision is logged with its reason when it changes.
        let standing = self.parts().judge_standing();
        if standing != std::mem::replace(&mut self.standing, standing)
            && let Some(text) = self.parts().standing_text(standing)
        {
            let (next, nodes) = (self.parts().next_round().0, self.roster.waiting().len());
            self.record(Kind::RoundWaits { next, nodes }, None, self.trace.broken(), text);
        }
    }

    fn advance(&mut self, now: Instant) {
        self.advance_recovery(now);
        let let_in = self.hosts.release(now);
        self.apply_to_hosts(let_in, now);
        if self.close_if_all_done() {
            return;
        }
        self.advance_change(now);
        if self.close_if_out_of_resets() {
            return;
        }
        let parts = self.parts();
        if !parts.is_ready() {
            self.pace.ready_since = None;
        } else if !parts.awaits_connections() {
            self.pace.ready_since.get_or_insert(now);
        }
        match when_to_close(self.parts(), now) {
            Some(Closing { at, reason }) if at <= now => self.complete(&reason, now),
            Some(Closing { at, .. }) => self.closes_at = Some(at),
            None => {}
        }
        self.notify();
    }

    /// Continue to wait for members of a world that this coordinator did not form, or go on without them.
    fn advance_recovery(&mut self, now: Instant) {
        match self.parts().reports(now) {
            Reports::Awaited(until) => self.recovery.await_members(until),
            Reports::Complete(text) => {
                self.recovery.await_members(None);
                self.note(text);
            }
            Reports::Missing(reason) => {
                self.recovery.await_members(None);
                if !self.parts().is_all_done() {
                    let late = self.record(Kind::MembersMissing {}, None, None, None);
                    self.interrupt(&reason, Why::CoordinatorRestarted, late);
                }
            }
        }
    }

    /// Begin a change in place if it is due, and continue or break off the one that has begun.
    fn advance_change(&mut self, now: Instant) {
        self.in_place.wait(None);
        loop {
            if self.current.interrupted().is_some() || self.current.told() {
                return;
            }
            let round = self.round();
            match in_place::next_step(self.parts(), now) {
                NextStep::Wait(until) => return self.in_place.wait(until),
                NextStep::Begin(change) => {
                    let grows = self.parts().joinable() > 0;
                    let joined = self.first_newcomer().filter(|_| grows);
                    let causes = [self.leaver(), joined].into_iter().flatten();
                    let (flags, reason) = (change.flags, change.reason.clone());
                    self.record(
                        Kind::RoundChanges {},
                        None,
                        causes,
                        format!("round {round} changes in place: {reason}"),
                    );
                    self.in_place.begin(change);
                    self.notify_capable(&CoordinatorMessage::Change { round, flags, reason });
                }
                NextStep::Raise(check) => {
                    self.in_place.raise(check);
                    self.note(format!("the workers of round {round} stop at their check {check}"));
                    self.notify_capable(&CoordinatorMessage::RaiseAt { round, check });
                }
                NextStep::CallOff => {
                    let text = format!("round {round} goes on: no node waits to join or to leave any more");
                    self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), text);
                    self.notify_capable(&CoordinatorMessage::RaiseAt { round, check: NEVER });
                    return self.in_place.call_off();
                }
                NextStep::Interrupt(reason) => match self.leaver() {
                    Some(leaves) => return self.interrupt(&reason, Why::NodeLeft, leaves),
                    None => return self.fail_change(&reason),
                },
                NextStep::Fail(reason) => return self.fail_change(&reason),
            }
        }
    }

    /// The world re-forms, since the members cannot stop together.
    pub(super) fn fail_change(&mut self, reason: &str) {
        let cause = self.trace.broken().unwrap_or_else(|| self.record(Kind::RoundChanges {}, None, None, None));
        self.interrupt(reason, Why::ChangeFailed, cause);
    }

    /// Send this to all members that can change in place.
    fn notify_capable(&mut self, message: &CoordinatorMessage) {
        let members = self.roster.of(self.roster.active());
        let capable = members.filter(|(_, node)| node.in_place);
        let sessions: Vec<_> = capable.filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }

    /// Close the rendezvous if every live member of an undisturbed world has finished. Returns whether it did.
    pub(super) fn close_if_all_done(&mut self) -> bool {
        let done = self.parts().is_all_done();
        if done {
            let nodes = u32::try_from(self.roster.active().len()).unwrap_or(u32::MAX);
            self.close(Verdict::AllDone { round: self.round(), nodes }, self.trace.completed());
        }
        done
    }

    /// Close the rendezvous if the world must change and has changed as often as it may. Returns whether it did.
    fn close_if_out_of_resets(&mut self) -> bool {
        let change = self.in_place.change().map(|change| change.reason.as_str());
        let why = self.current.interrupted().or(change).filter(|_| self.current.world().is_some());
        let Some((limit, why)) = self.settings.rules.reset_limit.zip(why).filter(|_| !self.parts().has_resets_left())
        else {
            return false;
        };
        let cause = format!("{why}; no resets left: the world may change {limit} times (reset_limit)");
        let failure = self.current.failure().cloned().map(Box::new);
        self.close(Verdict::Failed { by: "the coordinator".to_owned(), cause, failure }, self.trace.broken());
        true
    }

    /// Form the next world.
    fn complete(&mut self, why_now: &str, now: Instant) {
        let NextWorld { world, members, resume, rank0, survive, warning } = next_world(self.parts(), why_now);
        let round = self.parts().next_round();
        warning.into_iter().for_each(|text| self.emit(Effect::Warn(text)));
        self.roster.begin_round(round, &members);
        let event = Kind::RoundCompleted {
            nodes: members.len(),
            workers: world.workers.as_ref().and_then(|workers| workers.first()).map(|ranks| ranks.world_size),
            rank0,
            in_place: survive,
        };
        let causes = self.trace.broken().or(self.trace.joined());
        let text = format!("round {round} is complete with {}: {}", nodes(members.len()), world.reason);
        self.record(event, None, causes, text);
        if survive {
            self.note(format!("round {round}: {resume}"));
        }
        self.in_place.begin_round(Some(resume));
        self.recovery.add_world(world.id);
        self.current.form(world);
        self.recovery.settle();
        self.hosts.await_loss(None);
        self.closes_at = None;
        self.pace.ready_since = None;
        self.pace.newcomer_since = (!self.roster.waiting().is_empty()).then_some(now);
        if self.settings.ranks_as_asked {
            // Every member has joined since its last workers ended or left their world, so no earlier connection is needed.
            self.emit(Effect::EmptyStore);
        }
        for (rank, id) in (0..).zip(members) {
            if let Some(session) = self.session(id) {
                self.send_place(session, rank);
            }
        }
    }

    /// The message by which a member of the current world gets its rank assignment. `None` if this coordinator did not form the world.
    pub(in crate::rendezvous) fn placement(&self, rank: u32) -> Option<CoordinatorMessage> {
        let world = self.current.world()?;
        let (master_addr, master_port) = world.master.clone()?;
        let node = world.members.get(&rank).and_then(|id| self.roster.get(*id));
        Some(CoordinatorMessage::Complete(Placement {
            round: self.round(),
            rank,
            world_size: world.size,
            world: world.id,
            master_addr,
            master_port,
            reason: world.reason.clone(),
            restart: world.restart,
            workers: world.workers.as_ref().and_then(|workers| workers.get(rank as usize)).copied(),
            host: self.host_seat(),
            local_world_size: self.parts().bounds().and_then(|_| world.local_world_size(rank)),
            resume: self.in_place.resume().filter(|_| node.is_some_and(|node| node.in_place)).cloned(),
            members: None,
        }))
    }

    /// Notify members if it has changed whether the world must re-form. Members that change in place learn it by that change.
    fn notify(&mut self) {
        // A member that reports to a restarted coordinator, at which others wait already, was not notified.
        let parts = self.parts();
        let someone_runs = !self.roster.active().is_empty();
        let must_re_form = someone_runs && parts.waiting_for_members() > 0 && !parts.changes_in_place();
        if !self.current.set_told(must_re_form) {
            return;
        }
        if must_re_form && self.current.interrupted().is_none() {
            let text = format!("members of round {} must stop: {}", self.round(), self.parts().why());
            self.record(Kind::RoundBroken { why: Why::NodesWait }, None, self.first_newcomer(), text);
        } else if someone_runs && self.current.interrupted().is_none() {
            self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), None);
        }
        let message = self.status();
        let sessions: Vec<_> = self.roster.of(self.roster.active()).filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }
}

/// When the next round closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Closing {
    pub at: Instant,
    /// Why then, in words.
    pub reason: String,
}

/// When the next round closes. `None`: members run, too few nodes wait, or the connection of one of them is broken.
pub(super) fn when_to_close(parts: Parts, now: Instant) -> Option<Closing> {
    if !parts.is_ready() || parts.awaits_connections() {
        return None;
    }
    let ready_since = parts.pace.ready_since.unwrap_or(now);
    let hold_until = parts.held_until().unwrap_or(ready_since);
    if let Some(reason) = parts.is_full_round() {
        return Some(Closing { at: ready_since.max(hold_until), reason });
    }
    if let Some(change) = parts.in_place.change() {
        let reason = format!("the world changed in place: {}", change.reason);
        return Some(Closing { at: ready_since.max(hold_until), reason });
    }
    let returning = parts.roster.counts().returning;
    if let Some(size) = parts.current.size().filter(|_| parts.shrinks()) {
        if returning == size {
            let reason = format!("all members of round {} are back", parts.round());
            return Some(Closing { at: ready_since, reason });
        }
        let settle = parts.settings.settle_timeout;
        let settled = (ready_since + settle).max(hold_until);
        let cause = parts.current.interrupted().unwrap_or("the world changed");
        let reason = format!("settled for {:.1} s (settle_timeout) after this: {cause}", settle.as_secs_f64());
        return Some(Closing { at: settled, reason });
    }
    let last_call = parts.settings.last_call_timeout;
    // Without any member of the last world, the last call is that of a first round.
    let grows = parts.current.world().is_some() && returning > 0;
    // A first round's last call begins when enough nodes wait. A growing round's begins with the first newcomer.
    let since = if grows { parts.pace.newcomer_since.unwrap_or(ready_since) } else { ready_since };
    let reason = format!("the last call of {:.1} s ended", last_call.as_secs_f64());
    Some(Closing { at: (since + last_call).max(hold_until), reason })
}

/// The next world, and what is recorded of it.
struct NextWorld {
    world: World,
    /// Its nodes, in the order of their ranks.
    members: Vec<NodeId>,
    /// How its workers begin.
    resume: Resume,
    /// The name of the node with rank 0.
    rank0: Option<String>,
    /// Whether workers of the last world live on.
    survive: bool,
    /// What is probably a mistake of the user's.
    warning: Option<String>,
}

/// The world of the waiting nodes.
fn next_world(parts: Parts, why_now: &str) -> NextWorld {
    let roster = parts.roster;
    let assignments = parts.next_members();
    let members: Vec<NodeId> = assignments.iter().map(|member| member.id).collect();
    let first = members.first().and_then(|id| roster.get(*id));
    let offered: Option<Vec<JoinWorkers>> = assignments.iter().map(|member| member.workers.clone()).collect();
    let workers = offered.map(|offered| ranks::assign_workers(&offered));
    let round = parts.next_round();
    let generation = Generation { round, world: world_id(round, &members) };
    let resume = resume_of(parts, &assignments, workers.as_deref(), generation);
    let began_with = match resume {
        Resume::Continue { generation, .. } => generation,
        Resume::Restart { .. } => generation,
    };
    let world = World {
        id: generation.world,
        size: members.len() as u32,
        master: first.and_then(|node| Some((reachable_addr(roster, node, &members), join(node)?.store_port))),
        reason: format!("{why_now}{}", roster.list(&members.iter().copied().collect())),
        members: (0..).zip(members.iter().copied()).collect(),
        restart: parts.current.restart(),
        workers,
        claimed_workers: None,
        began_with,
    };
    NextWorld {
        world,
        resume,
        rank0: first.map(|node| node.name.clone()),
        survive: members.iter().filter_map(|id| roster.get(*id)).any(has_survivors),
        warning: (!parts.current.has_formed()).then(|| warning_of_shared_hosts(roster, &members)).flatten(),
        members,
    }
}

/// A warning if members run on one host: most often one agent too many was started there, and each has started the workers of the
/// whole machine. Agents that a driver has started have their hosts' names, and are meant.
fn warning_of_shared_hosts(roster: &Roster, members: &[NodeId]) -> Option<String> {
    let mut by_host: BTreeMap<(String, &str), Vec<&Node>> = BTreeMap::new();
    for node in members.iter().filter_map(|id| roster.get(*id)).filter(|node| node.host_name.is_none()) {
        let host = node.name.rsplit_once(':').map_or(node.name.as_str(), |(host, _)| host);
        by_host.entry((node.addr(), host)).or_default().push(node);
    }
    let shared = by_host.into_iter().find(|(_, nodes)| nodes.len() > 1);
    let ((addr, host), nodes) = shared?;
    let slots = |node: &&Node| join(node).and_then(|join| Some(join.workers.as_ref()?.local_world_size.to_string()));
    let slots: Vec<String> = nodes.iter().take(8).filter_map(slots).collect();
    let workers = if slots.is_empty() { String::new() } else { format!(", with {} workers", slots.join(" + ")) };
    Some(format!(
        "{} agents of this job run on one machine, {addr} ({host}){workers}. If that is not meant, start one agent on each machine, by \
         `srun --ntasks-per-node=1` for example",
        nodes.len()
    ))
}

/// The address under which the other members reach `node`.
///
/// The coordinator may see a node on its own host under a loopback address, which nodes on other hosts cannot use. Then the
/// address is the one by which another member has reached the coordinator.
fn reachable_addr(roster: &Roster, node: &Node, members: &[NodeId]) -> String {
    if node.local_addr.is_none() && node.ends.is_some_and(|ends| ends.peer.is_loopback()) {
        let elsewhere = |id: &NodeId| roster.get(*id)?.ends.filter(|ends| !ends.peer.is_loopback());
        if let Some(ends) = members.iter().find_map(elsewhere) {
            return ends.local.to_string();
        }
    }
    node.addr()
}

/// Whether workers of a waiting node have survived the last round.
fn has_survivors(node: &Node) -> bool {
    let workers = join(node).and_then(|join| join.workers.as_ref());
    workers.is_some_and(|workers| !workers.survivors().is_empty())
}

/// The request of a waiting node.
pub(super) fn join(node: &Node) -> Option<&crate::rendezvous::messages::message::Join> {
    match &node.status {
        Status::Waiting { join, .. } => Some(join),
        _ => None,
    }
}

/// Digest (FNV-1a) of a world's round and members. The members' ids are random, so two worlds share a digest only if they have the
/// same members in the same round.
fn world_id(round: Round, members: &[NodeId]) -> u64 {
    let bytes = members.iter().flat_map(|id| id.0.to_le_bytes()).chain(round.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
