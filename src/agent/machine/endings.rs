//! How an agent's work ends: the rendezvous was closed, this node was cut off, or a signal came. Part of [`super`].

use std::time::Instant;

use super::{AgentMachine, Next, Phase, SIGTERM, TOO_LATE, Way};
use crate::agent::command::Command;
use crate::agent::policy::Outcome;
use crate::rendezvous::messages::message::{EndClass, Verdict};
use crate::rendezvous::node::JoinError;

impl AgentMachine {
    /// The rendezvous was closed.
    pub fn on_closed(&mut self, verdict: Verdict) {
        match verdict {
            // `AllDone` includes this node's workers, so they have finished. Otherwise another node has declared success.
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => match &self.phase {
                Phase::Running { .. } | Phase::Stopping { over: false, way: Way::Raise { .. }, .. } => {
                    self.closed_well = true
                }
                Phase::Finishing { .. } => self.end(Outcome::Succeeded),
                Phase::Stopping { next: Next::Decide, .. } => self.fail_alone(TOO_LATE, EndClass::Program),
                // The answer to the join that follows is that this node is not needed.
                Phase::Preparing { .. } => self.stop(SIGTERM, Next::Join),
                Phase::Looking | Phase::Joining | Phase::Stopping { .. } | Phase::Ended => {}
            },
            Verdict::Stopped { .. } => {
                if matches!(self.phase, Phase::Looking | Phase::Joining | Phase::Ended) || self.ends_after_stop() {
                    return;
                }
                self.warn(format!("stopping all workers: the job was {verdict}"));
                self.end_after_stop(Outcome::NoPlacement(JoinError::Closed { verdict, spare: false }));
            }
            Verdict::Failed { cause: reason, failure, class, .. } => {
                match &mut self.phase {
                    Phase::Looking | Phase::Joining | Phase::Ended => return,
                    Phase::Stopping { next: Next::End(own), .. } => {
                        // The coordinator says whose failure was the first.
                        if failure.is_some() && matches!(**own, Outcome::Failed { .. }) {
                            **own = Outcome::Failed { cause: failure, reason, class };
                        }
                        return self.proceed();
                    }
                    _ => {}
                }
                let why = self.after_own_failure(&reason, failure.as_deref()).unwrap_or(&reason);
                self.warn(format!("the job has failed: {why}"));
                self.end_after_stop(Outcome::Failed { cause: failure, reason, class });
            }
        }
    }

    /// This node can no longer take part: the coordinator stayed away too long, or ended the session.
    pub fn on_cut_off(&mut self, error: JoinError) {
        match &self.phase {
            Phase::Joining => self.on_no_placement(error),
            // This node's workers have succeeded. It cannot judge the other nodes' workers.
            Phase::Finishing { .. } => {
                self.warn(format!("all workers of this node succeeded, and it ends without the others: {error}"));
                self.end(Outcome::Succeeded);
            }
            Phase::Ended | Phase::Stopping { next: Next::End(_), .. } => {}
            // A worker of this node has failed, and nobody can say any more whether it may be restarted.
            Phase::Stopping { next: Next::Decide, .. } if !matches!(error, JoinError::Rejected(_)) => {
                self.warn(format!("this node ends without the others: {error}"));
                self.fail_alone("a worker failed, and no restart could be agreed on", EndClass::Machine);
            }
            _ => {
                // The coordinator forms a world without a node that it has rejected, and does not wait.
                let kills = matches!(error, JoinError::Rejected(_)).then_some(Command::Kill);
                self.end_after_stop(Outcome::NoPlacement(error));
                self.commands.extend(kills);
            }
        }
    }

    /// This process got a signal to end. The second one kills the remaining workers at once.
    pub fn on_signal(&mut self, signal: i32, now: Instant) {
        match &self.phase {
            // Only what its workers have left can be there, if anything is.
            Phase::Ended => {
                let first = !std::mem::replace(&mut self.cuts_leftovers, true);
                let command = if first { Command::Stop(self.stop_policy(signal)) } else { Command::Kill };
                self.commands.push(command);
                return;
            }
            Phase::Stopping { next: Next::End(outcome), .. } if matches!(**outcome, Outcome::Signal(_)) => {
                self.commands.push(Command::Kill);
                return;
            }
            _ => {}
        }
        self.leave_by_signal(signal, now);
    }

    /// End, but not before the workers have.
    pub(super) fn end_after_stop(&mut self, outcome: Outcome) {
        if self.leaving.is_some() {
            return self.leave_now();
        }
        match &self.phase {
            Phase::Running { .. } | Phase::Preparing { .. } | Phase::Finishing { .. } => {
                self.stop(SIGTERM, Next::End(Box::new(outcome)));
            }
            Phase::Joining if self.has_parked() => self.stop(SIGTERM, Next::End(Box::new(outcome))),
            Phase::Stopping { .. } => self.go_on_with(Next::End(Box::new(outcome))),
            _ => self.end(outcome),
        }
    }

    pub(super) fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        let outcome = self.with_late_message(outcome);
        self.commands.push(Command::End(Box::new(outcome)));
    }
}
