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

use crate::rendezvous::protocol::settings::STALL;

use crate::rendezvous::decider::admission::{give_way, refusal, replace_older};
use crate::rendezvous::decider::claims::impossible;
use crate::rendezvous::decider::decide::decide;
use crate::rendezvous::decider::home::{Home, Leaving};
use crate::rendezvous::decider::members::{
    check_no_later_than, close, depart, expire, introduce, note, on_done, on_failed, on_join, readmit, stand_down,
    welcome,
};
use crate::rendezvous::decider::state::{Ends, Filed, Node, Run, SessionId};
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, NodeMessage, Waits};
use crate::rendezvous::protocol::text::{tidy, tidy_verdict};

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
    pub(in crate::rendezvous) runs: BTreeMap<String, Run>,
    pub(in crate::rendezvous) sessions: BTreeMap<SessionId, (String, NodeId)>,
    /// Runs that nobody is in any more: no event costs more because there are many.
    remembered: BTreeMap<String, Run>,
    /// Since when nobody has been in them.
    vacant: BTreeSet<(Instant, String)>,
    /// When to look at each run, the earliest first: no event costs more because there are many runs.
    due: BTreeSet<(Instant, String)>,
    /// Runs that have nodes and no connection: since when.
    deserted: BTreeSet<(Instant, String)>,
    pub(in crate::rendezvous) commands: Vec<Command>,
    /// The process that this coordinator is in, if it is known.
    pub(in crate::rendezvous) home: Option<Home>,
    /// That process ends.
    pub(in crate::rendezvous) leaving: Option<Leaving>,
}

/// How long a run is remembered that nobody is in any more: a node that comes late still learns how the job ended, and one
/// that returns finds the number of its round. Longer than any node does without its coordinator by default
/// (`coordinator_timeout`, 300 s).
pub const VACANT_FOR: Duration = Duration::from_secs(3600);
/// How many such runs are remembered, the last ones: strangers may leave behind as many as they like.
pub const VACANT_RUNS: usize = 1000;
/// How many runs may wait for nodes whose connections have all ended, the last ones. The nodes of older ones are given up before their
/// grace is over: strangers may leave behind as many as they like.
pub const DESERTED_RUNS: usize = 4000;

impl Machine {
    /// A coordinator that has heard of nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, in a process that is known.
    pub fn at_home(home: Home) -> Self {
        Self { home: Some(home), ..Self::default() }
    }

    /// A node introduced itself on a new connection.
    pub fn on_hello(&mut self, session: SessionId, hello: Hello, ends: Ends, now: Instant) {
        self.advance(now);
        if self.turns_away(session, &hello) {
            return;
        }
        self.recollect(&hello.run_id);
        let newer = Node::new(&hello, session, ends, now);
        let impossible = || impossible(self.runs.get(&hello.run_id), &hello);
        let refusal = match hello.validate().err().or_else(impossible) {
            Some(reason) => Some(reason),
            None => {
                if let Some(run) = self.runs.get_mut(&hello.run_id) {
                    for session in give_way(run, &hello, now, &mut self.commands) {
                        self.sessions.remove(&session);
                    }
                }
                self.runs.get(&hello.run_id).and_then(|run| refusal(run, &hello, &newer, now))
            }
        };
        if let Some(reason) = refusal {
            self.send(session, CoordinatorMessage::Rejected { reason });
            self.commands.push(Command::End { session });
            self.settle(&hello.run_id, now);
            return;
        }

        let run = self.runs.entry(hello.run_id.clone()).or_insert_with(|| {
            let mut run = Run::new(hello.run_id.clone(), hello.settings.clone());
            run.be_young(now);
            run
        });
        if run.nodes.is_empty() {
            run.adopt(&hello.settings);
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
            if let Some(older) = replace_older(run, hello.node, &newer, &mut self.commands) {
                self.sessions.remove(&older);
            }
            introduce(run, &hello, session, ends, self.home.as_ref(), now, &mut self.commands);
        }
        run.meet_host(&hello, self.home.as_ref());
        welcome(run, &hello, session, &mut self.commands);
        check_no_later_than(run, hello.node);
        decide(run, now, &mut self.commands);
        self.settle(&hello.run_id, now);
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
                let waits = run.nodes.get(&id).and_then(|node| run.waits(node, now));
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
            NodeMessage::Leave { reason, signal } => {
                let reason = tidy(&reason);
                let label = run.nodes.get(&id).map(Node::label).unwrap_or_default();
                note(run, format!("{label} left: {reason}"), out);
                if run.is_host(id) {
                    self.sessions.remove(&session);
                    out.push(Command::End { session });
                    self.on_host_left(&run_id, id, &reason, signal, now);
                    return;
                }
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
        self.settle(&run_id, now);
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
        self.settle(&run_id, now);
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.advance(now);
        let due: Vec<_> = self.due.iter().take_while(|(at, _)| *at <= now).map(|(_, run_id)| run_id.clone()).collect();
        due.iter().for_each(|run_id| self.look_at(run_id, now));
        self.forget(now);
    }

    /// Look at one run, as time has passed.
    fn look_at(&mut self, run_id: &str, now: Instant) {
        if let Some(run) = self.runs.get_mut(run_id) {
            expire(run, now, &mut self.sessions, &mut self.commands);
            decide(run, now, &mut self.commands);
        }
        self.settle(run_id, now);
    }

    /// When to call [`Machine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let due = self.due.first().map(|(at, _)| *at);
        due.into_iter().chain(self.vacant.first().map(|(since, _)| *since + VACANT_FOR)).min()
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

    /// Something has happened in a run: put it where it belongs.
    pub(in crate::rendezvous) fn settle(&mut self, run_id: &str, now: Instant) {
        self.file(run_id, now);
        self.leave_if_vacant(run_id, now);
        while self.deserted.len() > DESERTED_RUNS {
            let Some((_, run_id)) = self.deserted.first().cloned() else { return };
            self.give_up(&run_id, now);
        }
    }

    /// Keep the indexes of runs true.
    fn file(&mut self, run_id: &str, now: Instant) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let deserted = !run.nodes.is_empty() && run.connected_count == 0;
        let filed = match run.nodes.is_empty() {
            true => Filed::default(),
            false => Filed { due: run.due(), deserted: deserted.then(|| run.filed.deserted.unwrap_or(now)) },
        };
        let before = std::mem::replace(&mut run.filed, filed);
        refile(&mut self.due, before.due, filed.due, run_id);
        refile(&mut self.deserted, before.deserted, filed.deserted, run_id);
    }

    /// Too many runs wait for nodes to come back: nobody waits any longer for those of this one.
    fn give_up(&mut self, run_id: &str, now: Instant) {
        if let Some(run) = self.runs.get_mut(run_id) {
            let text = format!("{DESERTED_RUNS} runs have lost their connections since: its nodes are given up");
            note(run, text, &mut self.commands);
            run.nodes.values_mut().for_each(|node| node.reconnect_grace = Duration::ZERO);
            run.check_at = Some(now);
            expire(run, now, &mut self.sessions, &mut self.commands);
            decide(run, now, &mut self.commands);
        }
        self.file(run_id, now);
        self.leave_if_vacant(run_id, now);
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
        let is_late = |at: Instant| now.saturating_duration_since(at) > STALL;
        let late: Vec<_> =
            self.due.iter().take_while(|(at, _)| is_late(*at)).map(|(_, run_id)| run_id.clone()).collect();
        for run_id in late {
            let Some(run) = self.runs.get_mut(&run_id) else { continue };
            let Some(late) = run.check_at.filter(|at| is_late(*at)).map(|at| now - at) else { continue };
            for node in run.nodes.values_mut() {
                node.heard_at = now;
                node.suspect = false;
            }
            run.check_at = run.nodes.values().map(Node::lost_at).min();
            let text = format!("this coordinator stood still: it is {late:.1?} late, and renews every lease");
            note(run, text, &mut self.commands);
            self.file(&run_id, now);
        }
    }

    /// Compare the indexes of runs with the runs.
    ///
    /// # Errors
    /// Which differ.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        let of = |which: fn(&Run) -> Option<Instant>| -> BTreeSet<_> {
            self.runs.values().filter_map(|run| Some((which(run)?, run.id.clone()))).collect()
        };
        let deserted: BTreeSet<_> = self.deserted.iter().map(|(_, run_id)| run_id).collect();
        let without: BTreeSet<_> =
            self.runs.values().filter(|run| run.connected_count == 0).map(|run| &run.id).collect();
        if self.due == of(Run::due) && deserted == without {
            return Ok(());
        }
        Err(format!(
            "runs are due at {:?}, filed at {:?}; deserted {without:?}, filed {deserted:?}",
            of(Run::due),
            self.due
        ))
    }

    fn send(&mut self, session: SessionId, message: CoordinatorMessage) {
        self.commands.push(Command::Send { session, message });
    }
}

/// Move a run within an index.
fn refile(index: &mut BTreeSet<(Instant, String)>, before: Option<Instant>, now: Option<Instant>, run_id: &str) {
    if before == now {
        return;
    }
    if let Some(before) = before {
        index.remove(&(before, run_id.to_owned()));
    }
    if let Some(now) = now {
        index.insert((now, run_id.to_owned()));
    }
}
