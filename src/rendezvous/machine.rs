//! The decision function of the rendezvous: what nodes say and what time it is go in, messages come out.
//!
//! Pure: no sockets, no clock. [`Machine`]'s `on_*` methods take what happened and `now`; [`Machine::take_commands`] gives what
//! to do about it; [`Machine::next_deadline`] says when to call [`Machine::on_tick`] at the latest (earlier is harmless).
//!
//! A round closes when nobody of the last one is still running, at least `min_nodes` wait, and one of these holds:
//! `max_nodes` wait; all members of the last round are back and nobody is new; a shrunken world has settled
//! (`settle_timeout`); a growing one, or one without survivors, has had its last call (`last_call_timeout`).
//!
//! Liveness is judged by this machine's clock alone. A node whose connection broke is lost after its `reconnect_grace`, a
//! silent one after its lease. A decider that finds its own tick late was stalled, and renews every lease before it judges.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::admission::{give_way, refusal, replace_older};
use super::decide::decide;
use super::members::{
    check_no_later_than, close, depart, expire, introduce, note, on_done, on_failed, on_join, readmit, stand_down,
    welcome,
};
use super::message::{CoordinatorMessage, Hello, NodeId, NodeMessage, Waits};
use super::state::{Ends, Node, Run, SessionId, Status};
use super::text::{tidy, tidy_verdict};

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
#[derive(Clone, Debug, Default)]
pub struct Machine {
    runs: BTreeMap<String, Run>,
    sessions: BTreeMap<SessionId, (String, NodeId)>,
    /// Runs that nobody is in any more: no event costs more because there are many.
    remembered: BTreeMap<String, Run>,
    /// Since when nobody has been in them.
    vacant: BTreeSet<(Instant, String)>,
    commands: Vec<Command>,
}

/// How late a tick may be before the machine takes itself to have been stalled.
const STALL: Duration = Duration::from_millis(500);
/// How long a run is remembered that nobody is in any more: a node that comes late still learns how the job ended, and one
/// that returns finds the number of its round. Longer than any node does without its coordinator by default
/// (`coordinator_timeout`, 300 s).
pub const VACANT_FOR: Duration = Duration::from_secs(3600);
/// How many such runs are remembered, the last ones: strangers may leave behind as many as they like.
pub const VACANT_RUNS: usize = 1000;

impl Machine {
    /// A coordinator that has heard of nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// A node introduced itself on a new connection.
    pub fn on_hello(&mut self, session: SessionId, hello: Hello, ends: Ends, now: Instant) {
        self.advance(now);
        self.recollect(&hello.run_id);
        let refusal = match hello.validate() {
            Err(reason) => Some(reason),
            Ok(()) => {
                if let Some(run) = self.runs.get_mut(&hello.run_id) {
                    for session in give_way(run, &hello, &mut self.commands) {
                        self.sessions.remove(&session);
                    }
                }
                let addr = Node::new(&hello, session, ends, now).addr();
                self.runs.get(&hello.run_id).and_then(|run| refusal(run, &hello, &addr, now))
            }
        };
        if let Some(reason) = refusal {
            self.send(session, CoordinatorMessage::Rejected { reason });
            self.commands.push(Command::End { session });
            self.leave_if_vacant(&hello.run_id, now);
            return;
        }

        let run = self
            .runs
            .entry(hello.run_id.clone())
            .or_insert_with(|| Run::new(hello.run_id.clone(), hello.settings.clone()));
        if run.nodes.is_empty() {
            run.settings = hello.settings.clone();
        }
        run.vacant_since = None;
        if let Some(old) = run.nodes.get(&hello.node).and_then(|node| node.session) {
            self.sessions.remove(&old);
            self.commands.push(Command::End { session: old });
        }
        self.sessions.insert(session, (hello.run_id.clone(), hello.node));
        if run.nodes.contains_key(&hello.node) {
            readmit(run, &hello, session, ends, now, &mut self.commands);
        } else {
            let newer = Node::new(&hello, session, ends, now);
            if let Some(older) = replace_older(run, hello.node, &newer, &mut self.commands) {
                self.sessions.remove(&older);
            }
            introduce(run, &hello, session, ends, now, &mut self.commands);
        }
        welcome(run, &hello, session, &mut self.commands);
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
        run.hear(id, now);
        let out = &mut self.commands;
        match message {
            NodeMessage::Hello(_) => {
                let reason = "a second Hello on one session".to_owned();
                out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason } });
                out.push(Command::End { session });
                return;
            }
            NodeMessage::Heartbeat => {
                let node = run.nodes.get(&id).filter(|node| matches!(node.status, Status::Waiting { .. }));
                let waits = node.map(|node| Waits { progress: run.progress(now), spare: run.is_spare(node) });
                out.push(Command::Send { session, message: CoordinatorMessage::Heartbeat { waits } });
                return;
            }
            NodeMessage::Join(join) => {
                on_join(run, id, session, join, now, out);
                if run.nodes.get(&id).is_some_and(|node| run.is_spare(node)) {
                    let message = CoordinatorMessage::Waits(Waits { progress: run.progress(now), spare: true });
                    out.push(Command::Send { session, message });
                }
            }
            NodeMessage::Withdraw => {
                let message = CoordinatorMessage::Withdrawn { progress: run.progress(now) };
                out.push(Command::Send { session, message });
                stand_down(run, id, "gave up waiting just as the round completed", out);
            }
            NodeMessage::Leave { reason } => {
                let reason = tidy(&reason);
                let label = run.nodes.get(&id).map(Node::label).unwrap_or_default();
                note(run, format!("{label} left: {reason}"), out);
                depart(run, id, &format!("left: {reason}"), now, out);
                run.remove(id);
                self.sessions.remove(&session);
                out.push(Command::End { session });
            }
            NodeMessage::Close(verdict) => close(run, tidy_verdict(&verdict), out),
            NodeMessage::Failed { round, failure } => on_failed(run, id, session, round, &failure, out),
            NodeMessage::Done { round } => on_done(run, id, session, round, out),
        }
        decide(run, now, &mut self.commands);
        self.leave_if_vacant(&run_id, now);
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
        let mut vacant = Vec::new();
        for run in self.runs.values_mut() {
            expire(run, now, &mut self.sessions, &mut self.commands);
            decide(run, now, &mut self.commands);
            if run.nodes.is_empty() {
                vacant.push(run.id.clone());
            }
        }
        vacant.iter().for_each(|run_id| self.leave_if_vacant(run_id, now));
        self.forget(now);
    }

    /// When to call [`Machine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let due = self.runs.values().flat_map(|run| [run.check_at, run.close_at, run.hold_until]).flatten();
        due.chain(self.vacant.first().map(|(since, _)| *since + VACANT_FOR)).min()
    }

    /// What to do now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// What is known of a run.
    pub fn run(&self, run_id: &str) -> Option<&Run> {
        self.runs.get(run_id).or_else(|| self.remembered.get(run_id))
    }

    /// How many runs are known: those that nodes are in, and those that are remembered.
    pub fn run_count(&self) -> usize {
        self.runs.len() + self.remembered.len()
    }

    /// How many sessions have introduced themselves and are connected.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// If nobody is in a run any more, it is only remembered. One that has nothing to remember is gone at once.
    fn leave_if_vacant(&mut self, run_id: &str, now: Instant) {
        let vacant = self.runs.get(run_id).is_some_and(|run| run.nodes.is_empty());
        let Some(mut run) = vacant.then(|| self.runs.remove(run_id)).flatten().filter(|run| !run.is_blank()) else {
            return;
        };
        let since = *run.vacant_since.get_or_insert(now);
        self.vacant.insert((since, run_id.to_owned()));
        self.remembered.insert(run_id.to_owned(), run);
        self.forget(now);
    }

    /// Somebody asks for a run that may only be remembered.
    fn recollect(&mut self, run_id: &str) {
        let Some(run) = self.remembered.remove(run_id) else { return };
        if let Some(since) = run.vacant_since {
            self.vacant.remove(&(since, run_id.to_owned()));
        }
        self.runs.insert(run_id.to_owned(), run);
    }

    /// Forget the runs that nobody has been in for long, and the oldest of those that are too many.
    fn forget(&mut self, now: Instant) {
        while let Some((since, _)) = self.vacant.first() {
            let (over, many) = (now >= *since + VACANT_FOR, self.vacant.len() > VACANT_RUNS);
            if !over && !many {
                return;
            }
            let Some((since, run_id)) = self.vacant.pop_first() else { return };
            self.remembered.remove(&run_id);
            let left = format!("nobody has been here for {:.0?}", now - since);
            let text = match over {
                true => format!("{left}: this run is forgotten"),
                false => format!("{left}, and {VACANT_RUNS} runs have been left since: this run is forgotten"),
            };
            self.commands.push(Command::Note { run_id, text });
        }
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
            let text = format!("this coordinator stood still: it is {late:.1?} late, and renews every lease");
            note(run, text, &mut self.commands);
        }
    }

    fn send(&mut self, session: SessionId, message: CoordinatorMessage) {
        self.commands.push(Command::Send { session, message });
    }
}
