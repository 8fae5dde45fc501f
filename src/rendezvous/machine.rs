//! The decision function of the rendezvous: what nodes say and what time it is go in, messages come out.
//!
//! Pure: no sockets, no clock. [`Machine`]'s `on_*` methods take what happened and `now`; [`Machine::take_commands`] gives what
//! to do about it; [`Machine::next_deadline`] says when to call [`Machine::on_tick`] at the latest (earlier is harmless).
//!
//! A round closes when nobody of the last one is still running, at least `min_nodes` wait, and one of these holds:
//! `max_nodes` wait; all members of the last round are back and nobody is new; a shrunken world has settled
//! (`settle_timeout`); a growing one has had its last call (`last_call_timeout`).
//!
//! Liveness is judged by this machine's clock alone. A node whose connection broke is lost after its `reconnect_grace`, a
//! silent one after its lease. A decider that finds its own tick late was stalled, and renews every lease before it judges.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::decide::{decide, placement, why};
use super::message::{CoordinatorMessage, Hello, Join, NodeId, NodeMessage, Verdict};
use super::state::{Ends, LAST_LOOK, Node, Run, SessionId, Status};

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a message.
    Send {
        /// To whom.
        session: SessionId,
        /// What.
        message: CoordinatorMessage,
    },
    /// Close the connection once everything sent to it has left.
    End {
        /// Whose.
        session: SessionId,
    },
    /// Tell the operator what was decided, and why.
    Note {
        /// Which run.
        run_id: String,
        /// In words.
        text: String,
    },
}

/// All runs of one coordinator.
#[derive(Debug, Default)]
pub struct Machine {
    runs: BTreeMap<String, Run>,
    sessions: BTreeMap<SessionId, (String, NodeId)>,
    commands: Vec<Command>,
}

/// How late a tick may be before the machine takes itself to have been stalled.
const STALL: Duration = Duration::from_millis(500);

impl Machine {
    /// A coordinator that has heard of nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// A node introduced itself on a new connection.
    pub fn on_hello(&mut self, session: SessionId, hello: Hello, ends: Ends, now: Instant) {
        self.advance(now);
        let refusal = match hello.settings.validate() {
            Err(reason) => Some(reason),
            Ok(()) if hello.run_id.is_empty() => Some("the run id is empty".to_owned()),
            Ok(()) => self.runs.get(&hello.run_id).and_then(|run| disagreement(run, &hello)),
        };
        if let Some(reason) = refusal {
            self.send(session, CoordinatorMessage::Rejected { reason });
            self.commands.push(Command::End { session });
            return;
        }

        let run = self
            .runs
            .entry(hello.run_id.clone())
            .or_insert_with(|| Run::new(hello.run_id.clone(), hello.settings.clone()));
        if let Some(old) = run.nodes.get(&hello.node).and_then(|node| node.session) {
            self.sessions.remove(&old);
            self.commands.push(Command::End { session: old });
        }
        self.sessions.insert(session, (hello.run_id.clone(), hello.node));
        let mut told = None;
        if run.nodes.contains_key(&hello.node) {
            readmit(run, &hello, session, ends, now, &mut self.commands);
        } else {
            told = introduce(run, &hello, session, ends, now, &mut self.commands);
        }
        if let Some(node) = run.nodes.get(&hello.node) {
            self.commands.push(Command::Send { session, message: CoordinatorMessage::Welcome { addr: node.addr() } });
            if let Some(verdict) = &run.closed {
                let message = CoordinatorMessage::Closed { verdict: verdict.clone(), spare: run.is_spare(node) };
                self.commands.push(Command::Send { session, message });
            } else if node.status == Status::Active && run.told {
                told = Some(CoordinatorMessage::Status { waiting: run.waiting_for_members(), reason: why(run) });
            }
        }
        if let Some(message) = told {
            self.commands.push(Command::Send { session, message });
        }
        check_no_later_than(run, hello.node);
        decide(run, now, &mut self.commands);
    }

    /// A node said something.
    pub fn on_message(&mut self, session: SessionId, message: NodeMessage, now: Instant) {
        self.advance(now);
        let Some((run_id, id)) = self.sessions.get(&session).cloned() else {
            return;
        };
        let Some(run) = self.runs.get_mut(&run_id) else { return };
        run.update(id, |node| node.map(|node| Node { heard_at: now, suspect: false, ..node }));
        let out = &mut self.commands;
        match message {
            NodeMessage::Hello(_) => {
                let reason = "a second Hello on one session".to_owned();
                out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason } });
                out.push(Command::End { session });
                return;
            }
            NodeMessage::Heartbeat => {
                let waits = run.nodes.get(&id).is_some_and(|node| matches!(node.status, Status::Waiting { .. }));
                let progress = waits.then(|| run.progress(now));
                out.push(Command::Send { session, message: CoordinatorMessage::Heartbeat { progress } });
                return;
            }
            NodeMessage::Join(join) => on_join(run, id, session, join, now, out),
            NodeMessage::Withdraw => {
                let message = CoordinatorMessage::Withdrawn { progress: run.progress(now) };
                out.push(Command::Send { session, message });
                stand_down(run, id, "gave up waiting just as the round completed", out);
            }
            NodeMessage::Leave { reason } => {
                let label = run.nodes.get(&id).map(Node::label).unwrap_or_default();
                note(run, format!("{label} left: {reason}"), out);
                stand_down(run, id, &format!("left: {reason}"), out);
                run.update(id, |_| None);
                self.sessions.remove(&session);
                out.push(Command::End { session });
            }
            NodeMessage::Close(verdict) => close(run, verdict, out),
        }
        decide(run, now, &mut self.commands);
    }

    /// A connection ended, for whatever reason. Connections that never said Hello may be reported too.
    pub fn on_disconnected(&mut self, session: SessionId, now: Instant) {
        self.advance(now);
        let Some((run_id, id)) = self.sessions.remove(&session) else {
            return;
        };
        let Some(run) = self.runs.get_mut(&run_id) else { return };
        run.update(id, |node| node.map(|node| Node { session: None, heard_at: now, ..node }));
        check_no_later_than(run, id);
        decide(run, now, &mut self.commands);
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.advance(now);
        for run in self.runs.values_mut() {
            expire(run, now, &mut self.sessions, &mut self.commands);
            decide(run, now, &mut self.commands);
        }
    }

    /// When to call [`Machine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.runs.values().flat_map(|run| [run.check_at, run.close_at]).flatten().min()
    }

    /// What to do now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// What is known of a run.
    pub fn run(&self, run_id: &str) -> Option<&Run> {
        self.runs.get(run_id)
    }

    /// How many sessions have introduced themselves and are connected.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Renew every lease if the last deadline passed long ago: it was this process that stood still, not the nodes.
    fn advance(&mut self, now: Instant) {
        for run in self.runs.values_mut() {
            let Some(late) = run.check_at.and_then(|at| now.checked_duration_since(at)).filter(|late| *late > STALL)
            else {
                continue;
            };
            for node in run.nodes.values_mut() {
                node.heard_at = now;
                node.suspect = false;
            }
            run.check_at = run.nodes.values().map(Node::lost_at).min();
            let text = format!("this coordinator stood still for {:.1} s: every lease is renewed", late.as_secs_f64());
            note(run, text, &mut self.commands);
        }
    }

    fn send(&mut self, session: SessionId, message: CoordinatorMessage) {
        self.commands.push(Command::Send { session, message });
    }
}

/// Why a node may not take part in a run that others opened.
fn disagreement(run: &Run, hello: &Hello) -> Option<String> {
    let (ours, theirs) = (&run.settings, &hello.settings);
    (ours.min_nodes != theirs.min_nodes || ours.max_nodes != theirs.max_nodes).then(|| {
        format!(
            "{} asks for {} to {} nodes, but run `{}` was opened for {} to {}: give every node the same `--nnodes`",
            hello.name, theirs.min_nodes, theirs.max_nodes, run.id, ours.min_nodes, ours.max_nodes
        )
    })
}

/// Take in a node never heard of, or one that was given up. Returns what it has to be told at once.
fn introduce(
    run: &mut Run,
    hello: &Hello,
    session: SessionId,
    ends: Ends,
    now: Instant,
    out: &mut Vec<Command>,
) -> Option<CoordinatorMessage> {
    let mut node = Node::new(hello, session, ends, now);
    let label = node.label();
    let mut told = None;
    if let Some(placed) = hello.placed {
        let known = placed.round <= run.round;
        run.recall(placed);
        node.placed = Some((placed.round, placed.rank));
        if placed.active && placed.round == run.round {
            node.status = Status::Active;
            let reason = if known {
                format!("{label} came back after it had been given up")
            } else {
                format!(
                    "{label} runs round {}, of which this coordinator knows nothing: it was restarted",
                    placed.round
                )
            };
            interrupt(run, reason, out);
            if !known {
                run.hold_until = Some(now + hello.settings.lease());
            }
        } else if placed.active {
            let reason = format!("round {} formed without this node, whose round {} is over", run.round, placed.round);
            told = Some(CoordinatorMessage::Status { waiting: 1, reason });
        }
    }
    run.update(hello.node, |_| Some(node));
    told
}

/// A node that was not given up has come back: it keeps its place, unless it says itself that it gave it up.
fn readmit(run: &mut Run, hello: &Hello, session: SessionId, ends: Ends, now: Instant, out: &mut Vec<Command>) {
    run.update(hello.node, |node| {
        node.map(|node| Node { status: node.status, placed: node.placed, ..Node::new(hello, session, ends, now) })
    });
    let runs = hello.placed.is_some_and(|placed| placed.active && placed.round == run.round);
    if !hello.joining && !runs {
        stand_down(run, hello.node, "gave up its place", out);
    }
}

fn on_join(run: &mut Run, id: NodeId, session: SessionId, join: Join, now: Instant, out: &mut Vec<Command>) {
    if let Some(verdict) = &run.closed {
        let message = CoordinatorMessage::Closed { verdict: verdict.clone(), spare: false };
        out.push(Command::Send { session, message });
        return;
    }
    let Some(node) = run.nodes.get(&id) else { return };
    let label = node.label();
    let mut arrival = None;
    match (&node.status, node.placed) {
        // The completion was lost with the connection it was sent on: this join belongs to a round that is over.
        (Status::Active, Some((round, rank))) if join.round < round => {
            if let Some(message) = placement(run, rank) {
                out.push(Command::Send { session, message });
                return;
            }
        }
        (Status::Active, _) => interrupt(run, format!("{label} starts its workers anew"), out),
        (Status::Waiting { arrival: first, .. }, _) => arrival = Some(*first),
        (Status::Idle, _) => {}
    }
    let first_time = arrival.is_none();
    let arrival = arrival.unwrap_or(run.arrivals);
    run.arrivals += 1;
    run.update(id, |node| node.map(|node| Node { status: Status::Waiting { join, arrival }, ..node }));
    let new = run.nodes.get(&id).is_some_and(|node| run.last_rank(node).is_none());
    if new {
        run.newcomer_since.get_or_insert(now);
    }
    if first_time {
        let (min, max) = (run.settings.min_nodes, run.settings.max_nodes);
        let known = run.waiting_count + run.active_count;
        let verb = if new { "joined" } else { "is back" };
        note(run, format!("{label} {verb} ({known} of {min} to {max} nodes)"), out);
    }
}

/// A node no longer waits or runs. A running one interrupts the world.
fn stand_down(run: &mut Run, id: NodeId, what: &str, out: &mut Vec<Command>) {
    let Some(node) = run.nodes.get(&id) else { return };
    if node.status == Status::Active {
        interrupt(run, format!("{} {what}", node.label()), out);
    }
    run.update(id, |node| node.map(|node| Node { status: Status::Idle, ..node }));
    let newcomers_left = run.waiting_count > run.returning_count;
    if !newcomers_left {
        run.newcomer_since = None;
    }
}

/// The current world must re-form. The first reason is kept.
fn interrupt(run: &mut Run, reason: String, out: &mut Vec<Command>) {
    if run.interrupted.is_none() && run.closed.is_none() {
        note(run, format!("round {} is interrupted: {reason}", run.round), out);
        run.interrupted = Some(reason);
    }
}

fn close(run: &mut Run, verdict: Verdict, out: &mut Vec<Command>) {
    if run.closed.is_some() {
        return;
    }
    note(run, verdict.to_string(), out);
    for node in run.nodes.values() {
        let Some(session) = node.session else { continue };
        let message = CoordinatorMessage::Closed { verdict: verdict.clone(), spare: run.is_spare(node) };
        out.push(Command::Send { session, message });
    }
    run.closed = Some(verdict);
    run.close_at = None;
}

/// Give up the nodes whose time has run out, and find out when to look again.
fn expire(run: &mut Run, now: Instant, sessions: &mut BTreeMap<SessionId, (String, NodeId)>, out: &mut Vec<Command>) {
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
        stand_down(run, id, &what, out);
        run.update(id, |_| None);
        if let Some(session) = session {
            sessions.remove(&session);
            out.push(Command::End { session });
        }
    }
    run.check_at = run.nodes.values().map(Node::lost_at).min();
}

/// Make sure that the next look for lost nodes is not after `id`'s time.
fn check_no_later_than(run: &mut Run, id: NodeId) {
    let due = run.nodes.get(&id).map(Node::lost_at);
    run.check_at = [run.check_at, due].into_iter().flatten().min();
}

/// Say something to the operator.
pub(super) fn note(run: &Run, text: String, out: &mut Vec<Command>) {
    out.push(Command::Note { run_id: run.id.clone(), text });
}
