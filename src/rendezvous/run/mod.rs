//! One run: its nodes, its rounds and ranks, and every decision about them. Pure.
//!
//! [`Run::apply`] is the one decision function. A run is made of parts that keep their own state:
//!
//! | part | what it keeps |
//! |---|---|
//! | `roster`, `node` | the nodes, with counters that keep each event's cost constant |
//! | `round` | the current world, why it must re-form, the job's restarts, how the rendezvous was closed |
//! | `recovery` | worlds formed before this coordinator restarted, and how far a node's claim to a place in one is believed |
//! | `in_place` | a change of the world that its workers live through |
//! | `admission` | which agent holds which place |
//! | `hosts` | how often each host's nodes have left or failed first, and which hosts are kept out |
//! | `watched` | how far the training is, while somebody watches |
//! | `trace` | the events that were recorded, as far as later ones name them as causes |
//! //!
//! `parts` is what policies read: functions from parts to a value. The steps of a decision are methods of [`Run`], grouped by what triggers them:
//!
//! | file | step |
//! |---|---|
//! | `event` | events, the input; effects, the output |
//! | this one | dispatch of an event to its step; lost nodes; what members are told |
//! | `hello` | a node introduces itself: rejected, back, or new; which node's settings the run uses |
//! | `report`, `other_job` | a node asks for a place, or reports how its workers ended; a node of another job is refused |
//! | `leave` | a node withdraws, leaves, is lost or sent away; the process that hosts the coordinator ends |
//! //! //! | `form`, `size`, [`ranks`], `resume` | a round closes: when, with which nodes and how many workers, with which ranks, and whose workers live on |
//! | `members` | a member is told its place, and the one that serves the workers' store also from where the others connect |
//! | `durable` | conversion between a run and its state in a shared cell |
//! | `facts`, `snapshot` | what others ask about a run; its state for observers |
//! | `standing`, `progress` | the current decision, and its reason in words |
//!
//! It is pure: it takes an event and the time, and returns messages and notes. A coordinator calls it for each of its runs. A
//! node over a shared cell calls it on the cell's content. [`Run::next_deadline`] says when to send [`Event::Tick`] at the latest;
//! an earlier tick does no harm.
//!
//! Only the decider's clock decides whether a node is alive. A node is lost `reconnect_grace` after its connection broke, or when
//! its lease ends in silence.

mod admission;
#[cfg(test)]
mod bench;
mod durable;
mod event;
mod facts;
mod form;
mod hello;
mod hosts;
mod in_place;
mod leave;
mod members;
mod node;
mod other_job;
mod parts;
mod progress;
pub mod ranks;
mod recovery;
mod report;
mod resume;
mod roster;
mod round;
mod size;
mod snapshot;
mod standing;
mod trace;
mod watched;

use std::time::{Duration, Instant};

use self::admission::Admission;
use self::hosts::Hosts;
use self::in_place::InPlace;
use self::leave::is_from_keyboard;
use self::node::Node;
use self::parts::Parts;
use self::recovery::Recovery;
use self::roster::Roster;
use self::round::Current;
use self::trace::Trace;
use crate::events::record::{Ending, Kind, Loss, Number, Why};
use crate::events::tally::Tally;
#[cfg(feature = "sim")]
use crate::rendezvous::decision_state::DecisionState;
use crate::rendezvous::messages::bounds::tidy_verdict;
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeId, NodeMessage, Round, Verdict};
use crate::rendezvous::messages::settings::Settings;

pub(in crate::rendezvous) use durable::{CELL_SESSION, Durable, LARGEST_NUMBER, MY_SESSION, Times};
pub use event::{Effect, Ends, Event, Home, Reach, SessionId};
pub(in crate::rendezvous) use hosts::Departures;
pub use hosts::{Exclusion, Exclusions};
pub(in crate::rendezvous) use node::Origin;
pub use node::Status;
pub(in crate::rendezvous) use round::Pace;
pub use snapshot::{RunState, State};
pub use standing::Standing;

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
    in_place: InPlace,
    /// When the next round closes, if nothing changes.
    closes_at: Option<Instant>,
    /// The node in the coordinator's own process.
    host: Option<(NodeId, Home)>,
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
            Event::Hello { hello, session, reach, home } => self.on_hello(&hello, session, reach, home, now),
            Event::Message { node, session, message } => {
                self.roster.renew_lease(node, now);
                return self.on_message(node, session, message, now);
            }
            Event::Disconnected { node } => self.roster.disconnect(node, now),
            Event::LeasesEnded { nodes } => {
                nodes.into_iter().for_each(|node| self.lose(node, Loss::Lease, "is lost: its lease ended", now));
            }
            Event::Tick => self.expire(|_| true, now),
            Event::TickWaiting => {
                self.expire(Node::waits, now);
                return false;
            }
            Event::Watched => {
                self.on_watched(now);
                return false;
            }
            Event::Stalled { late } => {
                self.roster.renew_all_leases(now);
                self.in_place.extend(now);
                let late_ms = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
                let text =
                    format!("this coordinator was stalled: its timer is {late:.1?} late, every lease is renewed");
                self.record(Kind::CoordinatorStoodStill { late_ms }, None, None, text);
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
            NodeMessage::Took { round, phase } => {
                self.on_took(id, round, phase);
                return false;
            }
            NodeMessage::Stepped { round, first } => {
                self.on_stepped(id, round, first);
                return false;
            }
            NodeMessage::Step { round, step, step_time_us } => {
                self.on_step(id, round, step, step_time_us, now);
                return false;
            }
            NodeMessage::Recalled(recalled) => {
                self.on_recalled(id, *recalled);
                return false;
            }
            NodeMessage::Observe(_) => {
                self.end(session, "a node's session is no observer's".to_owned());
                return false;
            }
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
            NodeMessage::Groupless { round } => self.on_groupless(id, round),
            NodeMessage::Counted { round, count } => self.on_counted(id, session, round, count),
            NodeMessage::WillLeave { round, reason, signal } => {
                // The job ends with a host that is ended from the keyboard.
                let at_once = self.is_host(id) && signal.is_some_and(is_from_keyboard);
                self.on_will_leave(id, session, round, &reason, at_once);
            }
            NodeMessage::Parked { round } => self.on_parked(id, round, now),
        }
        true
    }

    /// The parts, for policies that read them.
    fn parts(&self) -> Parts<'_> {
        let Self { settings, roster, current, pace, recovery, in_place, hosts, closes_at, standing, .. } = self;
        let (pace, closes_at, standing) = (*pace, *closes_at, *standing);
        Parts { settings, roster, current, pace, recovery, in_place, hosts, closes_at, standing }
    }

    /// Mark that the current world must re-form, because of an event. The first reason is kept.
    pub(super) fn interrupt(&mut self, reason: &str, why: Why, cause: Number) {
        if self.current.interrupt(reason) {
            self.in_place.break_off();
            // A change in place that is broken off is a cause, too.
            let causes = [Some(cause), self.trace.broken().filter(|broken| *broken != cause)].into_iter().flatten();
            let text = format!("round {} is interrupted: {reason}", self.round());
            // Members that were told to re-form know already that their round is broken.
            let kind = if self.current.told() { Kind::Note {} } else { Kind::RoundBroken { why } };
            self.record(kind, None, causes, text);
        }
    }

    /// Close the rendezvous, and tell every connected node. No node is admitted afterwards. `cause`: the event for which it is closed.
    pub(super) fn close(&mut self, verdict: Verdict, cause: Option<Number>) {
        if self.current.closed().is_some() {
            return;
        }
        let how = match &verdict {
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => Ending::Succeeded,
            Verdict::Failed { .. } => Ending::Failed,
            Verdict::Stopped { .. } => Ending::Stopped,
        };
        self.record(Kind::RunClosed { verdict: how }, None, cause, verdict.to_string());
        let told = |(_, node): (_, &Node)| Some((node.session?, self.parts().is_spare(node)));
        let told: Vec<_> = self.roster.iter().filter_map(told).collect();
        for (session, spare) in told {
            self.send(session, CoordinatorMessage::Closed { verdict: verdict.clone(), spare });
        }
        self.current.close(verdict, self.parts().is_full());
        self.in_place.break_off();
        self.in_place.wait_for_nothing();
        self.closes_at = None;
        self.recovery.await_members(None);
    }

    /// End a session for a reason that reconnecting would not change.
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
}

#[cfg(feature = "sim")]
impl DecisionState for Run {
    fn decision_state(&self, _: Instant) -> Self {
        Self { trace: Trace::default(), ..self.clone() }
    }
}
