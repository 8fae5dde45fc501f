//! The decision function: [`Run::apply`].
//!
//! Pure: what has happened and what time it is go in, messages and notes come out. A coordinator calls it for each of its runs, and
//! a node over a shared cell calls it on what the cell holds. [`Run::next_deadline`] says when to send [`Event::Tick`] at the latest
//! (earlier is harmless).
//!
//! A round closes when nobody of the last one is still running, at least `min_nodes` wait, and one of these holds:
//! `max_nodes` wait; all members of the last round are back and nobody is new; a shrunken world has settled
//! (`settle_timeout`); a growing one, or one without survivors, has had its last call (`last_call_timeout`).
//!
//! Liveness is judged by the clock of the decider alone. A node whose connection broke is lost after its `reconnect_grace`, a
//! silent one after its lease.

use std::time::{Duration, Instant};

use super::admission::Admission;
use super::deadlines::{Deadline, Deadlines};
use super::event::{Effect, Event, Home, SessionId};
use super::node::{Node, Status};
use super::recovery::Recovery;
use super::roster::Roster;
use super::round::{Current, Pace};
use super::standing::Standing;
use crate::rendezvous::protocol::message::{CoordinatorMessage, NodeId, NodeMessage, Placed, Round, Verdict, Waits};
use crate::rendezvous::protocol::settings::{LAST_LOOK, Settings};
use crate::rendezvous::protocol::text::{tidy, tidy_verdict};

/// One rendezvous: all nodes with one run id.
#[derive(Clone, Debug)]
pub struct Run {
    pub(super) id: String,
    pub(super) settings: Settings,
    pub(super) roster: Roster,
    pub(super) current: Current,
    pub(super) pace: Pace,
    pub(super) recovery: Recovery,
    pub(super) admission: Admission,
    pub(super) deadlines: Deadlines,
    /// The node in the coordinator's own process.
    pub(super) host: Option<(NodeId, Home)>,
    /// What was decided last, as it was logged.
    pub(super) standing: Standing,
    effects: Vec<Effect>,
}

impl Run {
    /// A run nobody has joined yet.
    pub fn new(id: impl Into<String>, settings: Settings) -> Self {
        Self {
            id: id.into(),
            settings,
            roster: Roster::default(),
            current: Current::default(),
            pace: Pace::default(),
            recovery: Recovery::default(),
            admission: Admission::default(),
            deadlines: Deadlines::default(),
            host: None,
            standing: Standing::default(),
            effects: Vec::new(),
        }
    }

    /// A run whose coordinator may have been restarted: members of a world that it does not know may still be running.
    pub fn young(id: impl Into<String>, settings: Settings, now: Instant) -> Self {
        let mut run = Self::new(id, settings);
        run.recovery.be_young(run.settings.lease(), now);
        run
    }

    /// Decide what follows from an event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Effect> {
        if self.happens(event, now) {
            self.decide(now);
        }
        std::mem::take(&mut self.effects)
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Whether a new run of this name would be the same.
    pub fn is_blank(&self) -> bool {
        let never_ran = self.round() == Round(0) && self.current.restart() == 0 && self.current.closed().is_none();
        never_ran && self.roster.is_empty() && self.admission.is_blank() && self.recovery.is_blank()
    }

    /// Note what has happened. Whether a decision may follow from it.
    fn happens(&mut self, event: Event, now: Instant) -> bool {
        match event {
            Event::Hello { hello, session, reach, home } => self.on_hello(&hello, session, reach, home, now),
            Event::Message { node, session, message } => {
                self.roster.hear(node, now);
                return self.on_message(node, session, message, now);
            }
            Event::Disconnected { node } => {
                self.roster.disconnect(node, now);
                self.lose_no_later(node);
            }
            Event::LeaseEnded { node } => self.lose(node, "is lost: its lease ended", now),
            Event::Tick => self.expire(now),
            Event::Stalled { late } => {
                self.roster.hear_all(now);
                self.deadlines.set(Deadline::LoseNode, self.roster.next_lost_at());
                self.note(format!("this coordinator stood still: it is {late:.1?} late, and renews every lease"));
                return false;
            }
            Event::GiveUp { why } => {
                self.note(why);
                self.roster.end_graces();
                self.deadlines.set(Deadline::LoseNode, Some(now));
                self.expire(now);
            }
            Event::CoordinatorEnds { why, interrupts } => {
                self.on_coordinator_ends(&why, interrupts);
                return false;
            }
        }
        true
    }

    fn on_message(&mut self, id: NodeId, session: SessionId, message: NodeMessage, now: Instant) -> bool {
        match message {
            NodeMessage::Hello(_) => {
                self.end(session, "a second Hello on one session".to_owned());
                return false;
            }
            NodeMessage::Heartbeat => {
                let waits = self.roster.get(id).and_then(|node| self.waits(node, now));
                self.send(session, CoordinatorMessage::Heartbeat { waits });
                return false;
            }
            NodeMessage::Join(join) => {
                self.on_join(id, session, join, now);
                if self.roster.get(id).is_some_and(|node| self.is_spare(node)) {
                    let waits = Waits { progress: self.progress(now), spare: true };
                    self.send(session, CoordinatorMessage::Waits(waits));
                }
            }
            NodeMessage::Withdraw => {
                let progress = self.progress(now);
                self.send(session, CoordinatorMessage::Withdrawn { progress });
                let placed = self.roster.get(id).is_some_and(|node| node.status == Status::Active);
                self.stand_down(
                    id,
                    if placed { "gave up waiting just as the round completed" } else { "gave up waiting" },
                );
            }
            NodeMessage::Leave { reason, signal } => {
                let reason = tidy(&reason);
                self.note(format!("{} left: {reason}", self.roster.label(id)));
                if self.is_host(id) {
                    self.on_host_left(id, session, &reason, signal, now);
                    return false;
                }
                self.depart(id, &format!("left: {reason}"), now);
                self.remove(id);
                self.effects.push(Effect::End { session });
            }
            NodeMessage::Close(verdict) => self.close(tidy_verdict(&verdict)),
            NodeMessage::Failed { round, failure } => self.on_failed(id, session, round, &failure),
            NodeMessage::Done { round } => self.on_done(id, session, round),
        }
        true
    }

    /// A node no longer waits or runs. A running one interrupts the world, unless it has finished, or all others have.
    pub(super) fn stand_down(&mut self, id: NodeId, what: &str) {
        let Some(node) = self.roster.get(id) else { return };
        let reason = (node.status == Status::Active && !node.done).then(|| format!("{} {what}", node.label()));
        if node.waits() {
            self.note(format!("{} no longer waits: it {what}", node.label()));
        }
        self.roster.set_status(id, Status::Idle);
        if let Some(reason) = reason.filter(|_| !self.is_all_done()) {
            self.interrupt(&reason);
        }
        let newcomers_left = self.roster.waiting().len() > self.roster.counts().returning;
        if !newcomers_left {
            self.pace.newcomer_since = None;
        }
    }

    /// A node is gone. If it ran workers, that is remembered of its host.
    pub(super) fn depart(&mut self, id: NodeId, what: &str, now: Instant) {
        let open = self.current.closed().is_none();
        let running = self.roster.get(id).filter(|node| open && node.status == Status::Active && !node.done);
        if let Some(origin) = running.map(Node::origin) {
            self.admission.departures_mut().add(origin, &self.settings, now);
        }
        self.stand_down(id, what);
    }

    /// A node is forgotten, and its place is free.
    pub(super) fn remove(&mut self, id: NodeId) {
        self.admission.vacate(id, self.roster.get(id));
        self.roster.remove(id);
    }

    /// A node is lost.
    fn lose(&mut self, id: NodeId, what: &str, now: Instant) {
        let Some(node) = self.roster.get(id) else { return };
        self.note(format!("{} {what}", node.label()));
        self.depart(id, what, now);
        self.remove(id);
    }

    /// Give up the nodes whose time has run out, and find out when to look again.
    fn expire(&mut self, now: Instant) {
        if self.deadlines.get(Deadline::LoseNode).is_none_or(|at| now < at) {
            return;
        }
        for id in self.roster.lost(now) {
            let Some(node) = self.roster.get(id) else { continue };
            let session = node.session;
            let what = match session {
                None => format!("is lost: its connection ended {:.1} s ago", (now - node.heard_at).as_secs_f64()),
                Some(_) => format!("is lost: silent for {:.1} s", (node.lease + LAST_LOOK).as_secs_f64()),
            };
            self.lose(id, &what, now);
            self.effects.extend(session.map(|session| Effect::End { session }));
        }
        self.deadlines.set(Deadline::LoseNode, self.roster.next_lost_at());
    }

    /// Make sure that the next look for lost nodes is not after this node's time.
    pub(super) fn lose_no_later(&mut self, id: NodeId) {
        self.deadlines.no_later(Deadline::LoseNode, self.roster.get(id).map(Node::lost_at));
    }

    /// The current world must re-form. The first reason is kept.
    pub(super) fn interrupt(&mut self, reason: &str) {
        if self.current.interrupt(reason) {
            self.note(format!("round {} is interrupted: {reason}", self.round()));
        }
    }

    /// Nobody is admitted any more, and everybody is told.
    pub(super) fn close(&mut self, verdict: Verdict) {
        if self.current.closed().is_some() {
            return;
        }
        self.note(verdict.to_string());
        let told = |(_, node): (_, &Node)| Some((node.session?, self.is_spare(node)));
        let told: Vec<_> = self.roster.iter().filter_map(told).collect();
        for (session, spare) in told {
            self.send(session, CoordinatorMessage::Closed { verdict: verdict.clone(), spare });
        }
        self.current.close(verdict, self.is_full());
        self.deadlines.set(Deadline::CloseRound, None);
        self.deadlines.set(Deadline::EndRecall, None);
    }

    /// The session is over, for a reason that the node cannot mend by reconnecting.
    pub(super) fn end(&mut self, session: SessionId, reason: String) {
        self.send(session, CoordinatorMessage::Ended { reason });
        self.effects.push(Effect::End { session });
    }

    pub(super) fn send(&mut self, session: SessionId, message: CoordinatorMessage) {
        self.effects.push(Effect::Send { session, message });
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Say something to the operator.
    pub(super) fn note(&mut self, text: String) {
        self.effects.push(Effect::Note(text));
    }

    /// The number of the next round.
    pub(super) fn next_round(&self) -> Round {
        self.round().max(self.recovery.named()).next()
    }

    /// Whether members of a world that this coordinator did not form are given time to report.
    pub(super) fn recalls(&self) -> bool {
        self.deadlines.get(Deadline::EndRecall).is_some()
    }

    /// Members that run, and those that may still report that they do.
    fn running_count(&self) -> usize {
        match self.current.size().filter(|_| self.recalls()) {
            Some(size) => size.saturating_sub(self.roster.counts().returning),
            None => self.roster.active().len(),
        }
    }

    /// What `num_nodes_waiting()` is for members: above zero when the world must re-form.
    pub(in crate::rendezvous) fn waiting_for_members(&self) -> u32 {
        let waiting = u32::try_from(self.roster.waiting().len()).unwrap_or(u32::MAX);
        if self.current.interrupted().is_some() {
            waiting.max(1)
        } else if self.roster.counts().done > 0 {
            // The job is about to end: growing it would restart workers that have finished.
            0
        } else if self.running_count() < self.settings.max_nodes as usize {
            waiting
        } else {
            0
        }
    }

    /// Whether a waiting node is a spare: the job is full and undisturbed, or was so when it was closed.
    pub(in crate::rendezvous) fn is_spare(&self, node: &Node) -> bool {
        let full = match self.current.closed() {
            Some(_) => self.current.full_at_close(),
            None => self.is_full(),
        };
        full && node.waits()
    }

    /// Whether the world runs and needs nobody.
    pub(super) fn is_full(&self) -> bool {
        !self.roster.active().is_empty() && self.waiting_for_members() == 0
    }

    /// Whether every live member of an undisturbed world has finished.
    pub(super) fn is_all_done(&self) -> bool {
        let done = self.roster.counts().done;
        done > 0
            && done == self.roster.active().len()
            && self.current.interrupted().is_none()
            && !self.recalls()
            && self.current.closed().is_none()
    }

    /// Whether others have to ask for the same: a node is there that takes part, or a world of this coordinator's runs.
    pub(super) fn is_bound(&self) -> bool {
        self.roster.counts().present > 0 || (self.current.has_formed() && !self.roster.active().is_empty())
    }

    /// Whether a world that a node names becomes the current one: this coordinator was restarted, and knows of none that runs.
    pub fn takes_up(&self, placed: &Placed, now: Instant) -> bool {
        let none_runs = !self.current.has_formed() && self.roster.active().is_empty();
        none_runs && self.recovery.is_young(now) && !self.knows_world(placed) && placed.round > self.round()
    }

    /// Whether this coordinator knows the world that a node names.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.recovery.knows_world(placed)
    }

    /// Whether members of a world that this coordinator does not know may still run.
    pub fn is_young(&self, now: Instant) -> bool {
        self.recovery.is_young(now)
    }

    /// How the run is called.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The current round: number of the last one that completed.
    pub fn round(&self) -> Round {
        self.roster.round()
    }

    /// The job's restart number: how many failures have been taken from its budget.
    pub fn restart(&self) -> u32 {
        self.current.restart()
    }

    /// Why things stand as they do: why the world must re-form, or else why it was formed as it was.
    pub fn reason(&self) -> Option<&str> {
        self.current.interrupted().or(self.current.world().map(|world| world.reason.as_str()))
    }

    /// How the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.current.closed()
    }

    /// Whether a node is connected, or within its grace.
    pub fn knows(&self, node: NodeId) -> bool {
        self.roster.knows(node)
    }

    /// Whether nobody is here.
    pub fn is_empty(&self) -> bool {
        self.roster.is_empty()
    }

    /// Whether a node has named this capability.
    pub fn node_has(&self, node: NodeId, capability: &str) -> bool {
        self.roster.get(node).is_some_and(|node| node.capabilities.has(capability))
    }

    /// How many nodes are connected.
    pub fn connected(&self) -> usize {
        self.roster.counts().connected
    }

    /// The connection of a node.
    pub fn session(&self, node: NodeId) -> Option<SessionId> {
        self.roster.get(node)?.session
    }

    /// All nodes with their status and last place.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Status, Option<(Round, u32)>)> {
        self.roster.iter().map(|(id, node)| (id, &node.status, node.placed))
    }

    /// How late the look for lost nodes is.
    pub fn lateness(&self, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.deadlines.get(Deadline::LoseNode)?))
    }

    /// Compare what is counted of the nodes with a recount.
    ///
    /// # Errors
    /// What differs.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        self.roster.check()
    }
}
