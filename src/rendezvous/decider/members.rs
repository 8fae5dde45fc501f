//! What becomes of a node and its run when the node says something, or is not heard of. [`crate::rendezvous::coordinator::machine`] calls, then decides.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::rendezvous::protocol::settings::LAST_LOOK;

use super::admission::disagreement;
use super::claims::{apply_terms, believe, bind, differ, terms};
use super::decide::{placement, why};
use super::home::Home;
use super::state::{Ends, Node, Run, SessionId, Status};
use crate::rendezvous::coordinator::machine::Command;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Failure, Hello, Join, NodeId, Placed, Round, Verdict};
use crate::rendezvous::protocol::text::tidy_failure;

/// Take in a node never heard of, or one that was given up.
pub(in crate::rendezvous) fn introduce(
    run: &mut Run,
    hello: &Hello,
    session: SessionId,
    ends: Ends,
    home: Option<&Home>,
    now: Instant,
    out: &mut Vec<Command>,
) {
    let mut node = Node::new(hello, session, ends, now);
    if let Some(placed) = hello.placed {
        if run.takes_up(&placed, now) {
            bind(run, hello.node, &hello.settings, now, out);
            recall(run, placed, &node, now, out);
        }
        believe(run, placed, &mut node, hello, now, out);
        if node.placed.is_some() {
            run.hear_of_host(placed, home);
        }
        if node.status == Status::Active && run.hold_until.is_none() {
            let reason = format!("{} came back after it had been given up", node.label());
            interrupt(run, reason, out);
        }
    }
    apply_terms(run, &mut node);
    run.settle_in(hello.node, node);
}

/// A node knows of a round that this coordinator does not: it was restarted, and takes up what its nodes report.
fn recall(run: &mut Run, placed: Placed, node: &Node, now: Instant, out: &mut Vec<Command>) {
    let text = format!(
        "{} was placed in round {} of {} nodes, of which this coordinator knows nothing: it was restarted, and waits {:.1} s \
         for the others",
        node.label(),
        placed.round,
        placed.world_size,
        run.settings.lease().as_secs_f64()
    );
    note(run, text, out);
    for session in run.recall(placed, now + run.settings.lease()) {
        out.push(Command::Send {
            session,
            message: over(run, format!("round {} formed without this node", placed.round)),
        });
    }
}

/// Tell a node that has introduced itself all that it may have missed, whatever was sent on an earlier connection.
pub(in crate::rendezvous) fn welcome(run: &Run, hello: &Hello, session: SessionId, out: &mut Vec<Command>) {
    let Some(node) = run.nodes.get(&hello.node) else { return };
    let mut send = |message| out.push(Command::Send { session, message });
    send(CoordinatorMessage::Welcome { addr: node.addr(), hosted: run.is_host(hello.node) });
    if run.is_bound() && differ(&run.settings, &hello.settings) {
        send(terms(&run.settings));
    }
    if let Some(verdict) = &run.closed {
        send(CoordinatorMessage::Closed { verdict: verdict.clone(), spare: run.is_spare(node) });
        return;
    }
    let runs = hello.placed.filter(|placed| placed.active);
    match (&node.status, runs) {
        (Status::Active, _) => send(status(run)),
        (_, Some(placed)) => {
            send(over(
                run,
                format!("round {} formed without this node, whose round {} is over", run.round, placed.round),
            ));
        }
        _ => {}
    }
}

/// How things stand for members.
pub(in crate::rendezvous) fn status(run: &Run) -> CoordinatorMessage {
    let waiting = run.waiting_for_members();
    let reason = if waiting > 0 { why(run) } else { String::new() };
    CoordinatorMessage::Status { waiting, reason, restart: run.restart, failure: run.failure.clone() }
}

/// What a node is told whose world is over without its doing.
fn over(run: &Run, reason: String) -> CoordinatorMessage {
    CoordinatorMessage::Status { waiting: 1, reason, restart: run.restart, failure: None }
}

/// A node that was not given up has come back: it keeps its place, unless it says itself that it gave it up.
pub(in crate::rendezvous) fn readmit(
    run: &mut Run,
    hello: &Hello,
    session: SessionId,
    ends: Ends,
    now: Instant,
    out: &mut Vec<Command>,
) {
    let mut newer = Node::new(hello, session, ends, now);
    apply_terms(run, &mut newer);
    if let Some(Node { status, placed, done, .. }) = run.nodes.get(&hello.node).cloned() {
        run.resettle(hello.node, Node { status, placed, done, ..newer });
    }
    let runs = hello.placed.is_some_and(|placed| placed.active && placed.round == run.round);
    if !hello.joining && !runs {
        stand_down(run, hello.node, "gave up its place", out);
    }
}

pub(in crate::rendezvous) fn on_join(
    run: &mut Run,
    id: NodeId,
    session: SessionId,
    join: Join,
    now: Instant,
    out: &mut Vec<Command>,
) {
    if let Some(verdict) = &run.closed {
        let message = CoordinatorMessage::Closed { verdict: verdict.clone(), spare: false };
        out.push(Command::Send { session, message });
        return;
    }
    if let Err(reason) = join.validate() {
        out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason } });
        out.push(Command::End { session });
        return;
    }
    let Some(node) = run.nodes.get(&id) else { return };
    let (label, asked) = (node.label(), node.asked.clone());
    if let Some(reason) = disagreement(run, &node.name, &asked) {
        // It came before anybody had joined.
        out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason } });
        out.push(Command::End { session });
        return;
    }
    bind(run, id, &asked, now, out);
    let Some(node) = run.nodes.get(&id) else { return };
    let mut arrival = None;
    match (&node.status, node.placed) {
        // The completion was lost with the connection it was sent on: this join belongs to a round that is over.
        (Status::Active, Some((round, rank))) if join.round < round => {
            if let Some(message) = placement(run, rank) {
                out.push(Command::Send { session, message });
                // What was pushed meanwhile did not concern a node that waits: it is said again.
                out.push(Command::Send { session, message: status(run) });
                return;
            }
        }
        (Status::Active, _) => {
            // A member that comes because it was told to is not the cause.
            let reason = if run.told { why(run) } else { format!("{label} starts its workers anew") };
            interrupt(run, reason, out);
        }
        (Status::Waiting { arrival: first, .. }, _) => arrival = Some(*first),
        (Status::Idle, _) => {}
    }
    let first_time = arrival.is_none();
    let arrival = arrival.unwrap_or(run.arrivals);
    run.arrivals += 1;
    run.update(id, |node| node.map(|node| Node { status: Status::Waiting { join, arrival }, done: false, ..node }));
    let new = run.nodes.get(&id).is_some_and(|node| run.last_rank(node).is_none());
    if new {
        run.newcomer_since.get_or_insert(now);
    }
    if first_time {
        let known = run.waiting.len() + run.active.len();
        let verb = if new { "joined" } else { "is back" };
        note(run, format!("{label} {verb} ({known} of {} nodes)", run.settings.node_counts()), out);
    }
}

/// A worker of a node has failed. The first failure of a round is its cause; what follows from it, or from another
/// change that members have been told of, is not counted.
pub(in crate::rendezvous) fn on_failed(
    run: &mut Run,
    id: NodeId,
    session: SessionId,
    round: Round,
    failure: &Failure,
    out: &mut Vec<Command>,
) {
    let Some(node) = run.nodes.get(&id) else { return };
    if run.closed.is_some() {
        return;
    }
    if !is_current(run, node, round) {
        return stale(run, node, session, round, out);
    }
    let failure = tidy_failure(failure, node.label());
    if run.interrupted.is_some() || run.told {
        note(run, format!("{failure}; which follows from this: {}", why(run)), out);
        out.push(Command::Send { session, message: status(run) });
        return;
    }
    if let Some(gone) = run.active.iter().filter_map(|id| run.nodes.get(id)).find(|node| node.session.is_none()) {
        // Workers notice the end of their peers before the grace of the peers' agent is over.
        let reason = format!("{failure}; not counted, since the connection of {} has ended", gone.label());
        return interrupt_by(run, reason, Failure { counts: false, ..failure }, out);
    }
    if !failure.counts {
        return interrupt_by(run, failure.to_string(), failure, out);
    }
    match run.settings.max_restarts {
        Some(limit) if run.restart >= limit => {
            let restarts = if limit == 0 {
                "no restarts are allowed".to_owned()
            } else {
                format!("no restarts left: all {limit} restarts are used up")
            };
            let cause = format!("{failure}; {restarts} (max_restarts)");
            close(run, Verdict::Failed { by: failure.node.clone(), cause, failure: Some(Box::new(failure)) }, out);
        }
        limit => {
            run.restart = run.restart.saturating_add(1);
            let number = run.restart;
            // PyTorch's words, which logs are searched for. It counts the attempts before this one is taken.
            let of = limit
                .map_or_else(String::new, |limit| format!(" of {limit}; {}/{limit} attempts left", limit - number + 1));
            let reason = format!("{failure}; restart {number}{of}; will restart worker group");
            interrupt_by(run, reason, failure, out);
        }
    }
}

/// The workers of a node have all succeeded.
pub(in crate::rendezvous) fn on_done(
    run: &mut Run,
    id: NodeId,
    session: SessionId,
    round: Round,
    out: &mut Vec<Command>,
) {
    let Some(node) = run.nodes.get(&id) else { return };
    if run.closed.is_some() {
        return;
    }
    if !is_current(run, node, round) {
        return stale(run, node, session, round, out);
    }
    if !node.done {
        run.update(id, |node| node.map(|node| Node { done: true, ..node }));
        let (done, all) = (run.done_count, run.active.len());
        if done == 1 || done == all {
            note(run, format!("{done} of {all} live nodes of round {round} have finished"), out);
        }
    }
}

/// What a node reports belongs to a round that is over for it.
fn stale(run: &Run, node: &Node, session: SessionId, round: Round, out: &mut Vec<Command>) {
    let current = run.round;
    let text = format!(
        "what {} reports of round {round} changes nothing: it is over, the current one is {current}",
        node.label()
    );
    note(run, text, out);
    out.push(Command::Send { session, message: CoordinatorMessage::Stale { round, current } });
}

/// Whether a node runs workers of this round.
fn is_current(run: &Run, node: &Node, round: Round) -> bool {
    node.status == Status::Active && node.placed.is_some_and(|(placed, _)| placed == round) && round == run.round
}

/// A node no longer waits or runs. A running one interrupts the world, unless it has finished, or all others have.
pub(in crate::rendezvous) fn stand_down(run: &mut Run, id: NodeId, what: &str, out: &mut Vec<Command>) {
    let Some(node) = run.nodes.get(&id) else { return };
    let reason = (node.status == Status::Active && !node.done).then(|| format!("{} {what}", node.label()));
    if matches!(node.status, Status::Waiting { .. }) {
        note(run, format!("{} no longer waits: it {what}", node.label()), out);
    }
    run.update(id, |node| node.map(|node| Node { status: Status::Idle, done: false, ..node }));
    if let Some(reason) = reason.filter(|_| !run.is_all_done()) {
        interrupt(run, reason, out);
    }
    let newcomers_left = run.waiting.len() > run.returning_count;
    if !newcomers_left {
        run.newcomer_since = None;
    }
}

/// A node is gone. If it ran workers, that is remembered of its host.
pub(in crate::rendezvous) fn depart(run: &mut Run, id: NodeId, what: &str, now: Instant, out: &mut Vec<Command>) {
    let running = run.nodes.get(&id).filter(|node| node.status == Status::Active && !node.done && run.closed.is_none());
    if let Some(addr) = running.map(|node| node.ends.peer) {
        run.departures.add(addr, &run.settings, now);
    }
    stand_down(run, id, what, out);
}

/// The current world must re-form. The first reason is kept.
pub(in crate::rendezvous) fn interrupt(run: &mut Run, reason: String, out: &mut Vec<Command>) {
    if run.interrupted.is_none() && run.closed.is_none() {
        note(run, format!("round {} is interrupted: {reason}", run.round), out);
        run.interrupted = Some(reason);
    }
}

/// As [`interrupt`], by a failure.
fn interrupt_by(run: &mut Run, reason: String, failure: Failure, out: &mut Vec<Command>) {
    interrupt(run, reason, out);
    run.failure = Some(Box::new(failure));
}

pub(in crate::rendezvous) fn close(run: &mut Run, verdict: Verdict, out: &mut Vec<Command>) {
    if run.closed.is_some() {
        return;
    }
    note(run, verdict.to_string(), out);
    for node in run.nodes.values() {
        let Some(session) = node.session else { continue };
        let message = CoordinatorMessage::Closed { verdict: verdict.clone(), spare: run.is_spare(node) };
        out.push(Command::Send { session, message });
    }
    run.full_at_close = run.is_full();
    run.closed = Some(verdict);
    run.close_at = None;
    run.hold_until = None;
}

/// Give up the nodes whose time has run out, and find out when to look again.
pub(in crate::rendezvous) fn expire(
    run: &mut Run,
    now: Instant,
    sessions: &mut BTreeMap<SessionId, (String, NodeId)>,
    out: &mut Vec<Command>,
) {
    if run.check_at.is_none_or(|at| now < at) {
        return;
    }
    for node in run.nodes.values_mut() {
        if !node.suspect && node.session.is_some() && node.lost_at() <= now {
            // Judged only after a further `LAST_LOOK` in which the driver reads what has arrived.
            node.suspect = true;
            node.heard_at = now.checked_sub(node.lease).unwrap_or(now);
        }
    }
    let lost: Vec<_> = run.nodes.iter().filter(|(_, node)| node.lost_at() <= now).map(|(id, _)| *id).collect();
    for id in lost {
        let Some(node) = run.nodes.get(&id) else { continue };
        let (label, session) = (node.label(), node.session);
        let what = match session {
            None => format!("is lost: its connection ended {:.1} s ago", (now - node.heard_at).as_secs_f64()),
            Some(_) => format!("is lost: silent for {:.1} s", (node.lease + LAST_LOOK).as_secs_f64()),
        };
        note(run, format!("{label} {what}"), out);
        depart(run, id, &what, now, out);
        run.remove(id);
        if let Some(session) = session {
            sessions.remove(&session);
            out.push(Command::End { session });
        }
    }
    run.check_at = run.nodes.values().map(Node::lost_at).min();
}

/// Make sure that the next look for lost nodes is not after `id`'s time.
pub(in crate::rendezvous) fn check_no_later_than(run: &mut Run, id: NodeId) {
    let due = run.nodes.get(&id).map(Node::lost_at);
    run.check_at = [run.check_at, due].into_iter().flatten().min();
}

/// Say something to the operator.
pub(in crate::rendezvous) fn note(run: &Run, text: String, out: &mut Vec<Command>) {
    out.push(Command::Note { run_id: run.id.clone(), text });
}
