//! This node leaves the job, and the others go on: it got a signal, or a notice that its machine is taken away. Part of [`super`].
//!
//! A notice says after how long. Workers that attend leave their world at a check that all agree on, as they do when another node joins.
//! Others run on for as long as they may: until the machine is taken away if they got a signal of the user's choice to save by, else
//! until their grace begins. Whichever comes first, the machine's end is the end of all workers, and the others do not wait for it.

use std::time::Instant;

use super::{AgentMachine, LEAVE_LIMIT, Next, Phase, SIGTERM, Way};
use crate::agent::command::{Command, farewell_reason};
use crate::agent::policy::Outcome;
use crate::rendezvous::messages::message::GATHER;

/// Why this node leaves.
#[derive(Clone, Debug)]
pub(super) enum WhyLeaving {
    /// This process got this signal.
    Signal(i32),
    /// This machine is taken away, in words.
    Notice(String),
}

/// This node waits for the check at which it may leave.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    pub why: WhyLeaving,
    /// It leaves without a check then.
    pub until: Instant,
}

impl WhyLeaving {
    fn signal(&self) -> i32 {
        match self {
            Self::Signal(signal) => *signal,
            Self::Notice(_) => SIGTERM,
        }
    }

    fn farewell(&self) -> Command {
        match self {
            Self::Signal(signal) => Command::Leave { reason: farewell_reason(*signal), signal: Some(*signal) },
            Self::Notice(reason) => Command::Leave { reason: reason.clone(), signal: None },
        }
    }
}

impl AgentMachine {
    /// This machine is taken away at `deadline`. `reason`: who says so, in words. Of several notices the earliest counts.
    pub fn on_notice(&mut self, deadline: Instant, reason: &str, now: Instant) {
        let earlier = self.taken_away.is_none_or(|known| deadline < known);
        if earlier {
            self.taken_away = Some(deadline);
        }
        let leaves = matches!(self.phase, Phase::Ended) || self.ends_after_stop() || self.leaves_at_once();
        if leaves || !earlier {
            return self.log(format!("{reason}, and leaves already"));
        }
        let why = WhyLeaving::Notice(reason.to_owned());
        match &self.phase {
            Phase::Running { .. } | Phase::Stopping { over: false, way: Way::Raise { .. }, .. } => {
                let left = deadline.saturating_duration_since(now);
                let saves = self.worker_states.saves;
                let attends = (saves || (self.can_park() && self.in_company)) && self.all_attend();
                // The others may be unable to change in place.
                let answer_by = now + GATHER.min(left / 3) + LEAVE_LIMIT;
                let until = match (self.raises(), attends) {
                    (true, _) => deadline,
                    (false, true) => self.last_stop(deadline, now).max(answer_by).min(deadline),
                    (false, false) => self.last_stop(deadline, now),
                };
                self.leaving = Some(Leaving { why, until });
                self.warn(format!("{reason}: this node leaves within {:.1} s", left.as_secs_f64()));
                self.commands.push(Command::Notice { round: self.round(), left, reason: reason.to_owned() });
            }
            // Its workers have succeeded: the others may have, too, by then.
            Phase::Finishing { .. } => self.leaving = Some(Leaving { why, until: deadline }),
            // It is in no world, and takes part in no new one.
            _ => {
                self.warn(format!("{reason}; this node leaves at once, since its workers are in no world"));
                self.leave(&why);
            }
        }
    }

    /// Whether a notice has come for this machine.
    pub fn is_taken_away(&self) -> bool {
        self.taken_away.is_some()
    }

    /// The coordinator does not know of the notice.
    pub fn on_notice_unsent(&mut self, now: Instant) {
        let until = self.taken_away.map(|deadline| self.last_stop(deadline, now));
        if let (Some(leaving), Some(until)) = (&mut self.leaving, until) {
            leaving.until = until;
        }
    }

    /// Workers leave their world by themselves, or have succeeded: they have the whole time of a notice.
    pub(super) fn use_whole_time(&mut self) {
        if let (Some(Leaving { why: WhyLeaving::Notice(_), until }), Some(deadline)) =
            (&mut self.leaving, self.taken_away)
        {
            *until = deadline;
        }
    }

    /// Until when workers that cannot leave their world by themselves run on.
    fn last_stop(&self, deadline: Instant, now: Instant) -> Instant {
        match self.policy.saves_by_signal {
            true => deadline,
            false => deadline.checked_sub(self.policy.grace).map_or(now, |begins| begins.max(now)),
        }
    }

    /// A signal ends this node's part.
    pub(super) fn leave_by_signal(&mut self, signal: i32, now: Instant) {
        let why = WhyLeaving::Signal(signal);
        if !self.leaves_in_place(signal) {
            return self.leave(&why);
        }
        self.leaving = Some(Leaving { why, until: now + LEAVE_LIMIT.min(self.policy.grace) });
        self.commands.push(Command::WillLeave { round: self.round(), signal });
    }

    /// Whether workers leave their world first, together with those of the other nodes.
    fn leaves_in_place(&self, signal: i32) -> bool {
        let leaves = signal == SIGTERM && self.is_running() && self.in_company && !self.leaves_at_once();
        leaves && self.policy.in_place && self.all_attend()
    }

    /// Whether this node leaves although its workers have succeeded: the process is to end.
    pub(super) fn leaves_at_once(&self) -> bool {
        matches!(&self.leaving, Some(Leaving { why: WhyLeaving::Signal(_), .. }))
    }

    /// Leave for the reason that is known.
    pub(super) fn leave_now(&mut self) {
        if let Some(Leaving { why, .. }) = self.leaving.take() {
            self.leave(&why);
        }
    }

    /// The other nodes need not wait for the stop of our workers.
    fn leave(&mut self, why: &WhyLeaving) {
        self.leaving = None;
        let signal = why.signal();
        self.commands.push(why.farewell());
        if self.is_running() {
            self.stop(signal, Next::End(Box::new(Outcome::Signal(signal))));
        } else {
            self.end_after_stop(Outcome::Signal(signal));
        }
    }

    /// The coordinator will not name a check at which this node may leave.
    pub fn on_leave_unanswered(&mut self) {
        if self.is_running() && self.leaves_at_once() {
            self.leave_now();
        }
    }

    /// Leaves without an agreed check, since there was none in time.
    pub(super) fn leave_if_due(&mut self, now: Instant) {
        let stays = self.is_running() || self.raises() || matches!(self.phase, Phase::Finishing { .. });
        if stays && self.leaving.as_ref().is_some_and(|leaving| leaving.until <= now) {
            self.leave_now();
        }
    }

    /// When workers that are being stopped are killed, since their machine goes.
    pub(super) fn kill_at(&self) -> Option<Instant> {
        let stops = matches!(self.phase, Phase::Stopping { over: false, way: Way::Stop, .. });
        self.taken_away.filter(|_| stops && !self.killed)
    }

    /// The machine's end is the end of the workers' grace.
    pub(super) fn kill_if_taken_away(&mut self, now: Instant) {
        if self.kill_at().is_some_and(|at| at <= now) {
            self.killed = true;
            self.commands.push(Command::Kill);
        }
    }
}
