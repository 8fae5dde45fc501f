//! Decides how this node's workers leave their world, and which step follows. Part of [`super`].
//!
//! Workers are stopped by signals, or they leave their world and wait for the next one ([`super::in_place`]). The next step may be known
//! before the stop, or decided during it: after a failure the coordinator says whether to restart. The machine takes the step when the
//! stop is over and the step is known.

use std::collections::BTreeSet;
use std::time::Instant;

use super::{AgentMachine, Phase, SIGTERM};
use crate::agent::command::Command;
use crate::agent::policy::Outcome;
use crate::rendezvous::messages::message::Placement;
use crate::signals::Signal;
use crate::workers::StopPolicy;

/// How workers leave their world.
#[derive(Clone, Debug)]
pub(super) enum Way {
    /// By signals: nothing is left of them.
    Stop,
    /// They were notified that it has ended, and leave it by themselves.
    Park {
        /// When the world ended.
        ended: Instant,
        /// When workers that are still in it are killed, or if `late`, when all workers are stopped.
        until: Instant,
        /// Workers that were still in it after [`super::PARK_LIMIT`] have been killed.
        late: bool,
    },
    /// They leave it at a check that all workers of the job agreed on, or finish their work before it.
    Raise {
        /// When workers that have not reached the check are notified that the world has ended.
        until: Instant,
        /// Workers that have not succeeded.
        left: BTreeSet<u32>,
    },
}

/// The step after a stop, when nothing is left of the workers.
#[derive(Clone, Debug)]
pub(super) enum Next {
    Join,
    /// Start all workers of a round that was completed already.
    Start(Box<Placement>),
    /// Not known yet: a failure has to be reported, and the coordinator answers whether the job is restarted. A node that counts its own
    /// restarts decides alone.
    Decide,
    End(Box<Outcome>),
}

impl AgentMachine {
    /// Stop all workers by this signal first. None of them survives.
    pub(super) fn stop(&mut self, signal: i32, next: Next) {
        self.dismiss_parked();
        self.commands.push(Command::Stop(self.stop_policy(signal)));
        self.none_survives();
        self.forget_worker_states();
        self.standbys.forget();
        self.phase = Phase::Stopping { next, over: false, way: Way::Stop };
    }

    pub(super) fn stop_policy(&self, signal: i32) -> StopPolicy {
        let (to, grace) = (self.policy.first_signal, self.policy.grace);
        StopPolicy { signal: Signal(signal), to, grace, ..StopPolicy::default() }
    }

    /// Whether this agent's end follows the stop under way.
    pub(super) fn ends_after_stop(&self) -> bool {
        matches!(self.phase, Phase::Stopping { next: Next::End(_), .. })
    }

    /// Change what follows the stop under way.
    pub(super) fn go_on_with(&mut self, follows: Next) {
        if let (Next::End(_), true) = (&follows, self.parks()) {
            return self.stop(SIGTERM, follows); // workers that wait for a world wait in vain
        }
        if let Phase::Stopping { next, .. } = &mut self.phase {
            *next = follows;
            self.proceed();
            self.start_missing_ahead();
        }
    }

    /// Take the next step if the stop is over and the step is known.
    pub(super) fn proceed(&mut self) {
        let Phase::Stopping { next, over: true, way } = &self.phase else { return };
        match next {
            Next::Join => match (way, &self.leaving) {
                (Way::Stop, _) => self.join(),
                // The workers have left their world at the check, and this agent leaves the job.
                (_, Some(_)) => {
                    self.commands.push(Command::Parked(self.round()));
                    // Those of other nodes may still save, and need them for it.
                    if !self.worker_states.saves {
                        self.leave_now();
                    }
                }
                // Workers are being started, and the next world waits for them.
                (_, None) if !self.worker_states.asked.is_empty() => {}
                (_, None) => {
                    self.parked_survive();
                    self.join();
                }
            },
            Next::Start(placement) => {
                let placement = (**placement).clone();
                self.start(placement);
            }
            Next::Decide => {}
            Next::End(outcome) if self.lacks_message(outcome) => {}
            Next::End(outcome) => {
                let outcome = (**outcome).clone();
                self.end(outcome);
            }
        }
    }
}
