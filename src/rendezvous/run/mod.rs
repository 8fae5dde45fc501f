//! One run: its nodes, its rounds and ranks, and every decision about them. Pure.
//!
//! [`Run::apply`] is the one decision function. This file takes an event to its step. Only it and the four files of events below
//! change parts.
//!
//! | file | events, and what follows from them |
//! |---|---|
//! | `join` | a node introduces itself, and asks to join; which node's settings the run uses |
//! | `leave` | a node withdraws, leaves, is lost or sent away; its workers finish; the coordinator's process ends |
//! | `failures` | workers fail, or the training hangs |
//! | `form` | what is decided after each event: a round closes, a world forms or changes in place, members are notified |
//!
//! | part | what it keeps, and its policies |
//! |---|---|
//! | `membership`, `node` | the nodes, with counters that keep each event's cost constant |
//! | `admission` | which agent has which address and rank or name; which nodes are refused |
//! | `hosts` | how often each host's nodes have left or failed first, and which hosts are kept out |
//! | `round` | the current world, why it must re-form, the job's restarts, how the rendezvous was closed |
//! | `budget` | with `restart_window`: what the job's restarts have brought, and whether there is another one |
//! | `recovery` | worlds formed before this coordinator restarted, and how far a node's claim to a rank in one is believed |
//! | `in_place`, `resize` | a change of the world that its workers live through, and its next step |
//! | `parts`, `ranks`, `resume` | no state: what policies read; the next world and its ranks; whose state its workers go on with |
//! | `standing`, `progress` | the decision about the next round, and that in words |
//! | `telemetry` | the events that were recorded, as far as later ones name them as causes; how far the training is |
//! | `durable` | conversion between a run and its state in a shared cell |
//! | [`snapshot`] | what the successor of a run's coordinator must know, and how it goes on |
//!
//! It is pure: it takes an event and the time, and returns messages and notes. A coordinator calls it for each of its runs. A
//! node over a shared cell calls it on the cell's content. [`Run::next_deadline`] says when to send [`Event::Tick`] at the latest;
//! an earlier tick does no harm.
//!
//! Only the clock of the process that decides says whether a node is alive. A node is lost `reconnect_grace` after its connection broke, or when
//! its lease ends in silence.

mod admission;
#[cfg(test)]
mod bench;
mod budget;
mod durable;
mod event;
mod failures;
mod form;
mod health;
mod hosts;
mod in_place;
mod join;
mod leave;
mod membership;
mod node;
mod parts;
mod progress;
pub mod ranks;
mod recovery;
mod resize;
mod resume;
mod round;
pub mod snapshot;
mod standing;
mod telemetry;

use std::time::{Duration, Instant};

use self::admission::Admission;
use self::budget::Budget;
use self::hosts::Hosts;
use self::in_place::InPlace;
use self::leave::is_from_keyboard;
use self::membership::Roster;
use self::node::Node;
use self::parts::Parts;
use self::recovery::Recovery;
use self::round::Current;
use self::telemetry::Trace;
use crate::events::journal::Reference;
use crate::events::record::{Kind, Loss, Number};
use crate::events::tally::Tally;
use crate::rendezvous::messages::bounds::tidy_verdict;
use crate::rendezvous::messages::message::{CoordinatorMessage, Join, NodeId, NodeMessage, Placed, Round, Verdict};
use crate::rendezvous::messages::settings::Settings;
use crate::wire::time::millis;

pub(in crate::rendezvous) use durable::{CELL_SESSION, Durable, LARGEST_NUMBER, MY_SESSION, Times};
pub use event::{CoordinatorInstance, Effect, Ends, Event, Reach, SessionId};
pub(in crate::rendezvous) use hosts::Departures;
pub use hosts::{Exclusion, Exclusions};
pub(in crate::rendezvous) use node::Origin;
pub use node::Status;
pub use progress::RunState;
pub(in crate::rendezvous) use round::Pace;
pub use standing::{Activity, Standing};
pub use telemetry::Interruptions;

/// One rendezvous: all nodes with one run id.
#[derive(Clone, Debug)]
pub struct Run {
    id: String,
    settings: Settings,
    roster: Roster,
    current: Current,
    pace: Pace,
    recovery: Recovery,
    admission: Admission,
    hosts: Hosts,
    budget: Budget,
    in_place: InPlace,
    /// When the next round closes, if nothing changes.
    closes_at: Option<Instant>,
    /// The node in the coordinator's own process.
    host: Option<(NodeId, CoordinatorInstance)>,
    /// The last decision that was logged.
    standing: Standing,
    trace: Trace,
    /// When the rendezvous was closed.
    closed_at: Option<Instant>,
    effects: Vec<Effect>,
}

impl Run {
    /// Create a run without nodes.
    pub fn new(id: impl Into<String>, settings: Settings) -> Self {
        Self {
            id: id.into(),
            settings,
            roster: Roster::default(),
            current: Current::default(),
            pace: Pace::default(),
            recovery: Recovery::default(),
            admission: Admission::default(),
            hosts: Hosts::default(),
            budget: Budget::default(),
            in_place: InPlace::default(),
            closes_at: None,
            host: None,
            standing: Standing::default(),
            trace: Trace::default(),
            closed_at: None,
            effects: Vec::new(),
        }
    }

    /// Create a run whose coordinator may have been restarted: members of a world that it does not know may still be running.
    pub fn recovering(id: impl Into<String>, settings: Settings, now: Instant) -> Self {
        let mut run = Self::new(id, settings);
        run.recovery.begin(run.settings.lease(), now);
        run
    }

    /// Decide what follows from an event.
    pub fn apply(&mut self, event: Event, now: Instant) -> Vec<Effect> {
        if self.apply_event(event, now) {
            self.decide(now);
        }
        if self.current.closed().is_some() {
            self.closed_at.get_or_insert(now);
        }
        std::mem::take(&mut self.effects)
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let let_in = self.hosts.next_release().filter(|_| self.current.closed().is_none());
        let round = [self.closes_at, self.recovery.members_until(), self.in_place.due_at()];
        round.into_iter().chain([self.roster.lost_by(), let_in]).flatten().min()
    }

    /// Whether this run equals a new run with its id, so that it can be forgotten.
    pub fn is_blank(&self) -> bool {
        let never_ran = self.round() == Round(0) && self.current.restart() == 0 && self.current.closed().is_none();
        never_ran
            && self.roster.is_empty()
            && self.admission.is_blank()
            && self.hosts.is_blank()
            && self.recovery.is_blank()
    }

    /// Apply an event to the state. Returns whether the event may change the decision.
    fn apply_event(&mut self, event: Event, now: Instant) -> bool {
        match event {
            Event::Hello { hello, session, reach, instance } => self.on_hello(&hello, session, reach, instance, now),
            Event::Message { node, session, message } => {
                self.roster.renew_lease(node, now);
                return self.on_message(node, session, message, now);
            }
            Event::Disconnected { node } => self.roster.disconnect(node, now),
            Event::Dead { node } => self.on_dead(node, now),
            Event::LeasesEnded { nodes } => {
                nodes.into_iter().for_each(|node| self.lose(node, Loss::Lease, "is lost: its lease ended", now));
            }
            Event::Tick => self.expire(|_| true, now),
            Event::TickWaiting => {
                self.expire(Node::waits, now);
                return false;
            }
            Event::Watched => {
                let (asked, round) = (self.trace.watch_mut().on_watched(&self.roster, now), self.round());
                asked.into_iter().for_each(|session| self.send(session, CoordinatorMessage::ReportStep { round }));
                return false;
            }
            Event::Seen { kind, node, text } => return self.on_seen(kind, node.as_deref(), text),
            Event::Hung { why, step } => return self.on_hung(&why, step, now),
            Event::Stalled { late } => {
                self.roster.renew_all_leases(now);
                self.in_place.extend(now);
                let text =
                    format!("this coordinator was stalled: its timer is {late:.1?} late, every lease is renewed");
                self.record(Kind::CoordinatorStoodStill { late_ms: millis(late) }, None, None, text);
                return false;
            }
            Event::GiveUp { why } => {
                self.note(why);
                self.roster.end_graces(now);
                self.expire(|_| true, now);
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
            NodeMessage::PhaseDurations { round, phase } => {
                self.on_phase(id, round, phase);
                return false;
            }
            NodeMessage::Progress { round, first } => {
                self.on_first_step(id, round, first);
                return false;
            }
            NodeMessage::Step { round, report } => {
                self.on_step(id, round, report, now);
                return false;
            }
            NodeMessage::Replay(replay) => {
                self.on_replay(id, *replay);
                return false;
            }
            NodeMessage::Observe(_) | NodeMessage::AskLook(_) | NodeMessage::Peer(_) => {
                self.end(session, "a node's session is no observer's and no other endpoint's".to_owned());
                return false;
            }
            // the coordinator's
            NodeMessage::View { .. }
            | NodeMessage::PySpy { .. }
            | NodeMessage::Looked { .. }
            | NodeMessage::Pace { .. } => return false,
            NodeMessage::Fenced => {
                self.emit(Effect::Tally(Tally::Fenced));
                return false;
            }
            NodeMessage::Heartbeat { rtt_us } => {
                if let Some(rtt_us) = rtt_us {
                    // A node gives up a coordinator that answers later than its lease.
                    self.emit(Effect::Tally(Tally::RoundTrip(
                        Duration::from_micros(rtt_us).min(self.settings.lease()),
                    )));
                }
                let waits = self.roster.get(id).and_then(|node| self.parts().waits(node, now));
                self.send(session, CoordinatorMessage::Heartbeat { waits });
                return false;
            }
            NodeMessage::Join(join) => self.on_join(id, session, join, now),
            NodeMessage::Withdraw => self.on_withdraw(id, session, now),
            NodeMessage::Leave { reason, signal } => return self.on_leave(id, session, &reason, signal, now),
            NodeMessage::Close(verdict) => self.close(tidy_verdict(&verdict), None),
            NodeMessage::Failed { round, failure } => self.on_failed(id, session, round, &failure, now),
            NodeMessage::Done { round } => self.on_done(id, session, round),
            NodeMessage::Attending { round } => self.on_attending(id, round),
            NodeMessage::NoProcessGroup { round } => self.on_no_process_group(id, round),
            NodeMessage::Saves { round } => self.on_saves(id, round),
            NodeMessage::Counted { round, count } => self.on_counted(id, session, round, count),
            NodeMessage::WillLeave { round, reason, signal } => {
                // The job ends with a host that is ended from the keyboard.
                let at_once = self.is_host(id) && signal.is_some_and(is_from_keyboard);
                self.on_will_leave(id, session, round, &reason, at_once);
            }
            NodeMessage::Parked { round } => self.on_parked(id, round, now),
            NodeMessage::Notice { round, left_ms, reason } => self.on_notice(id, round, left_ms, &reason, now),
        }
        true
    }

    /// The parts, for policies that read them.
    fn parts(&self) -> Parts<'_> {
        let Self { id, settings, roster, current, pace, recovery, in_place, hosts, closes_at, standing, .. } = self;
        let (pace, closes_at, standing) = (*pace, *closes_at, *standing);
        Parts { id, settings, roster, current, pace, recovery, in_place, hosts, closes_at, standing }
    }

    /// End a session for a reason that reconnecting would not change.
    pub(super) fn end(&mut self, session: SessionId, reason: String) {
        self.send(session, CoordinatorMessage::Ended { reason });
        self.effects.push(Effect::End { session });
    }

    /// Record an event. `node` is the name of the node that it is about. `text` is its line in the log.
    pub(super) fn record(
        &mut self,
        kind: Kind,
        node: Option<&str>,
        causes: impl IntoIterator<Item = Number>,
        text: impl Into<Option<String>>,
    ) -> Number {
        let at = (self.round(), self.restart());
        let record = self.trace.event(at, kind, node, causes, text.into());
        let number = record.number;
        self.emit(Effect::Record(record));
        number
    }

    /// Record what has no type of its own.
    pub(super) fn note(&mut self, text: String) {
        self.record(Kind::Note {}, None, None, text);
    }

    /// Record an event of a node. `what` follows its label in the log.
    pub(super) fn record_of(
        &mut self,
        id: NodeId,
        kind: Kind,
        causes: impl IntoIterator<Item = Number>,
        what: String,
    ) -> Number {
        let Some(node) = self.roster.get(id) else { return self.record(Kind::Note {}, None, causes, what) };
        let (name, text) = (node.name.clone(), format!("{} {what}", node.label()));
        self.record(kind, Some(&name), causes, text)
    }

    /// The event by which a member asked to leave, if one does.
    pub(super) fn leaver(&self) -> Option<Number> {
        self.trace.leaves().filter(|_| !self.in_place.leaving().is_empty())
    }

    pub(super) fn send(&mut self, session: SessionId, message: CoordinatorMessage) {
        self.effects.push(Effect::Send { session, message });
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Whether a node is a spare.
    pub(in crate::rendezvous) fn waits_as_spare(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(|node| self.parts().is_spare(node))
    }

    /// Whether a world that a node claims becomes the current one: this coordinator was restarted, and knows no running world.
    pub fn adopts(&self, placed: &Placed, now: Instant) -> bool {
        let none_runs = !self.current.has_formed() && self.roster.active().is_empty();
        none_runs && self.recovery.is_recovering(now) && !self.knows_world(placed) && placed.round > self.round()
    }

    /// Whether this coordinator knows the world that a node claims.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.recovery.knows_world(placed)
    }

    /// Whether members of a world that this coordinator does not know may still run.
    pub fn is_recovering(&self, now: Instant) -> bool {
        self.recovery.is_recovering(now)
    }

    /// Until when no round closes: members of a world that this coordinator did not form may still run, and have not reported.
    pub fn held_until(&self) -> Option<Instant> {
        self.parts().held_until()
    }

    /// The current decision.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Describe the next round: which nodes have joined, how many are missing, why it does not close, and when it will.
    pub fn progress(&self, now: Instant) -> String {
        self.parts().progress(now)
    }

    /// The message by which members learn whether the world must re-form, and why.
    pub(in crate::rendezvous) fn status(&self) -> CoordinatorMessage {
        self.parts().status()
    }

    /// The message by which a node learns that its world is over, for a reason outside the node.
    pub(in crate::rendezvous) fn over(&self, reason: String) -> CoordinatorMessage {
        self.parts().over(reason)
    }

    /// Whether a node was asked how far the training is, and has not answered yet.
    pub fn awaits_step(&self) -> bool {
        self.trace.watch().awaits_step()
    }

    /// The events of other nodes that those of this run may name as causes, by their numbers from 1. Over a shared cell alone.
    pub(in crate::rendezvous) fn references(&self) -> &[Reference] {
        self.trace.references()
    }

    /// The run's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The current round: number of the last one that completed.
    pub fn round(&self) -> Round {
        self.roster.round()
    }

    /// The job's restart number: the number of failures that were counted against its budget.
    pub fn restart(&self) -> u32 {
        self.current.restart()
    }

    /// The reason for which the world must re-form, or else the reason for which its round closed.
    pub fn reason(&self) -> Option<&str> {
        self.current.interrupted().or(self.current.world().map(|world| world.reason.as_str()))
    }

    /// The verdict with which the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.current.closed()
    }

    /// Whether a node is connected, or within its `reconnect_grace`.
    pub fn knows(&self, node: NodeId) -> bool {
        self.roster.knows(node)
    }

    /// Whether the run has no nodes.
    pub fn is_empty(&self) -> bool {
        self.roster.is_empty()
    }

    /// Number of connected nodes.
    pub fn connected(&self) -> usize {
        self.roster.counts().connected
    }

    /// The session of a node, while it is connected.
    pub fn session(&self, node: NodeId) -> Option<SessionId> {
        self.roster.get(node)?.session
    }

    /// All nodes with their status, and round and rank of their last assignment.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Status, Option<(Round, u32)>)> {
        self.roster.iter().map(|(id, node)| (id, &node.status, node.placed))
    }

    /// Time since a deadline passed that is about the silence of nodes.
    pub fn lateness(&self, now: Instant) -> Option<Duration> {
        let deadlines = [self.roster.lost_by(), self.in_place.due_at()];
        Some(now.saturating_duration_since(deadlines.into_iter().flatten().min()?))
    }

    /// Compare the counters of the nodes with a recount.
    ///
    /// # Errors
    /// Describes the difference.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        self.roster.check()
    }

    /// The nodes.
    pub(in crate::rendezvous) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The state, for observers.
    pub fn state(&self, now: Instant) -> RunState {
        let left = self.limit().map(|limit| self.budget.left(limit, now));
        RunState::of(self.parts(), &self.trace, left, now)
    }

    /// Why a node that asks to join is refused, if it belongs to another job than the nodes that are here.
    pub(in crate::rendezvous) fn another_job(&self, id: NodeId, join: &Join, now: Instant) -> Option<String> {
        self.parts().another_job(id, join, now)
    }

    /// When the next round closes, if nothing changes.
    pub(in crate::rendezvous) fn closes_at(&self) -> Option<Instant> {
        self.closes_at
    }

    /// Set the last decision that was logged, so that only a new one is logged.
    pub(in crate::rendezvous) fn resume(&mut self, standing: Standing) {
        self.standing = standing;
    }
}
