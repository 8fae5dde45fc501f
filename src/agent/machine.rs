//! The agent's decisions: a pure state machine, one for every front end.
//!
//! Events come in through `on_…`. [`AgentMachine::take_commands`] returns what to do, and [`AgentMachine::next_deadline`] when to
//! call [`AgentMachine::on_tick`]. All workers of a node start and stop together. A round goes through these phases:
//!
//! ```text
//!             placed            all succeeded            all nodes done
//!   Joining ─────────▶ Running ───────────────▶ Finishing ─────────────▶ Ended
//!      ▲                  │ failure, interruption, signal │ interruption      ▲
//!      │                  ▼                               │                   │
//!      │               Stopping ──────────────────────────┼───────────────────┘
//!      └──────────────────┴───────────────────────────────┘
//! ```
//!
//! The step after a stop is known before the stop, or decided during it: after a failure the coordinator says whether to restart.
//! [`first`] decides which failure was the first.

use std::collections::BTreeSet;
use std::mem;
use std::time::{Duration, Instant};

use super::command::Command;
use super::policy::{Budget, Outcome, Policy};
use crate::process::{Signal, StopPolicy};
use crate::rendezvous::node::machine::JoinError;
use crate::rendezvous::protocol::message::{Placement, Round, Verdict};

mod first;

use first::First;
pub use first::WORDS_LIMIT;

/// SIGTERM's number, the same on every platform PyTorch's agent runs on.
const SIGTERM: i32 = 15;

/// How often a node that has finished logs which nodes it waits for.
const TELL_EVERY: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
enum Phase {
    Joining,
    Running {
        left: BTreeSet<u32>,
    },
    /// Workers are being stopped.
    Stopping {
        next: Next,
        /// Nothing is left of the workers.
        over: bool,
    },
    /// All workers of this node have succeeded. Workers of other nodes still run.
    Finishing {
        since: Instant,
        until: Option<Instant>,
        /// When to name the unfinished nodes next.
        tell_at: Instant,
    },
    Ended,
}

/// The step after a stop, when nothing is left of the workers.
#[derive(Clone, Debug)]
enum Next {
    Join,
    /// The first failure decides. With [`Budget::Job`] the coordinator answers the report.
    Decide,
    End(Box<Outcome>),
}

/// One agent. See the module's documentation.
#[derive(Clone, Debug)]
pub struct AgentMachine {
    policy: Policy,
    name: String,
    phase: Phase,
    round: Round,
    restarts: u32,
    first: Option<First>,
    /// The job was declared a success while workers of this node still run: no other node is left to wait for.
    closed_well: bool,
    /// The nodes whose workers still run, in the coordinator's words. Used while this node has finished.
    unfinished: Option<String>,
    commands: Vec<Command>,
}

impl AgentMachine {
    /// An agent that joins its first round. `name` is its name in other nodes' messages.
    pub fn new(policy: Policy, name: String) -> Self {
        Self {
            policy,
            name,
            phase: Phase::Joining,
            round: Round::default(),
            restarts: 0,
            first: None,
            closed_well: false,
            unfinished: None,
            commands: vec![Command::Join],
        }
    }

    /// A round was completed, with this node in it.
    pub fn on_placed(&mut self, placement: Placement) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        self.round = placement.round;
        if self.policy.budget == Budget::Job {
            self.restarts = placement.restart;
        }
        self.first = None;
        self.phase = Phase::Running { left: (0..self.policy.workers).collect() };
        self.commands.push(Command::Start(Box::new(placement)));
    }

    /// The join ended without a place.
    pub fn on_no_place(&mut self, error: JoinError) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        let outcome = match error {
            JoinError::Closed { verdict: Verdict::Succeeded { .. } | Verdict::AllDone { .. }, spare: true } => {
                Outcome::NotNeeded
            }
            JoinError::Closed { verdict: Verdict::Failed { cause, failure, .. }, .. } => {
                Outcome::Failed { cause: failure, reason: cause }
            }
            error => Outcome::NoPlace(error),
        };
        self.end(outcome);
    }

    /// A worker ended with exit code 0.
    pub fn on_worker_succeeded(&mut self, local_rank: u32, now: Instant) {
        let Phase::Running { left } = &mut self.phase else { return };
        left.remove(&local_rank);
        if !left.is_empty() {
            return;
        }
        if self.closed_well {
            self.end(Outcome::Succeeded);
            return;
        }
        self.commands.push(Command::Done(self.round));
        let limit = self.policy.exit_barrier_timeout;
        let at_most = limit.map_or_else(String::new, |limit| format!(" for up to {limit:.0?} (exit_barrier_timeout)"));
        self.tell(format!("all workers of this node succeeded; waiting for those of the other nodes{at_most}"));
        self.unfinished = None;
        let until = limit.and_then(|limit| now.checked_add(limit));
        self.phase = Phase::Finishing { since: now, until, tell_at: now + TELL_EVERY };
    }

    /// The coordinator names the nodes whose workers still run.
    pub fn on_unfinished(&mut self, unfinished: &str) {
        self.unfinished = Some(unfinished.to_owned());
    }

    /// Nothing is left of the workers that were being stopped.
    pub fn on_stopped(&mut self) {
        if let Phase::Stopping { over, .. } = &mut self.phase {
            *over = true;
            self.proceed();
        }
    }

    /// The world must re-form: nodes wait, a member was lost, a worker failed somewhere, or this node was cut off for too long.
    pub fn on_interrupted(&mut self, round: Round, reason: &str) {
        let restarting = "restarting all workers";
        self.join_anew(round, reason, (restarting, restarting, "starting all workers again"));
    }

    /// The world must re-form, and cannot until a coordinator runs again.
    pub fn on_host_gone(&mut self, round: Round, reason: &str) {
        let waiting = "waiting for another round";
        self.join_anew(round, reason, ("stopping all workers", waiting, waiting));
    }

    /// Join the next round. The three texts are for workers that run, that were stopped, and that have succeeded.
    fn join_anew(&mut self, round: Round, reason: &str, (stopping, stopped, again): (&str, &str, &str)) {
        if round != self.round {
            return;
        }
        match &self.phase {
            Phase::Running { .. } => {
                self.warn(format!("{stopping}: {reason}"));
                self.stop(SIGTERM, Next::Join);
            }
            // The coordinator has counted this node's failure, or an earlier one.
            Phase::Stopping { next: Next::Decide, over } => {
                let does = if *over { stopped } else { stopping };
                self.warn(format!("{does}: {reason}"));
                self.go_on_with(Next::Join);
            }
            Phase::Finishing { .. } => {
                self.warn(format!("{again}, though they had succeeded: {reason}"));
                self.join();
            }
            Phase::Joining | Phase::Stopping { .. } | Phase::Ended => {}
        }
    }

    /// The rendezvous was closed.
    pub fn on_closed(&mut self, verdict: Verdict) {
        match verdict {
            // `AllDone` includes this node's workers, so they have finished. Otherwise another node has declared success.
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => match &self.phase {
                Phase::Running { .. } => self.closed_well = true,
                Phase::Finishing { .. } => self.end(Outcome::Succeeded),
                Phase::Stopping { next: Next::Decide, .. } => self.fail_too_late(),
                // The join that follows reports it.
                Phase::Joining | Phase::Stopping { .. } | Phase::Ended => {}
            },
            Verdict::Stopped { .. } => {
                if matches!(self.phase, Phase::Joining | Phase::Ended) || self.ends_after_stop() {
                    return;
                }
                self.warn(format!("stopping all workers: the job was {verdict}"));
                self.end_after_stop(Outcome::NoPlace(JoinError::Closed { verdict, spare: false }));
            }
            Verdict::Failed { cause: reason, failure, .. } => {
                match &mut self.phase {
                    Phase::Joining | Phase::Ended => return,
                    Phase::Stopping { next: Next::End(own), .. } => {
                        // The coordinator says whose failure was the first.
                        if failure.is_some() && matches!(**own, Outcome::Failed { .. }) {
                            **own = Outcome::Failed { cause: failure, reason };
                        }
                        return self.proceed();
                    }
                    _ => {}
                }
                self.warn(format!("the job has failed: {reason}"));
                self.end_after_stop(Outcome::Failed { cause: failure, reason });
            }
        }
    }

    /// This node can no longer take part: the coordinator stayed away too long, or ended the session.
    pub fn on_cut_off(&mut self, error: JoinError) {
        match &self.phase {
            Phase::Joining => self.on_no_place(error),
            // This node's workers have succeeded. It cannot judge the other nodes' workers.
            Phase::Finishing { .. } => self.end(Outcome::Succeeded),
            Phase::Ended | Phase::Stopping { next: Next::End(_), .. } => {}
            _ => self.end_after_stop(Outcome::NoPlace(error)),
        }
    }

    /// Without a coordinator: the other nodes have finished too, or this node stops waiting for them.
    pub fn on_barrier_passed(&mut self) {
        if matches!(self.phase, Phase::Finishing { .. }) {
            self.end(Outcome::Succeeded);
        }
    }

    /// This process got a signal to end. The second one kills the remaining workers at once.
    pub fn on_signal(&mut self, signal: i32) {
        match &self.phase {
            Phase::Ended => return,
            Phase::Stopping { next: Next::End(outcome), .. } if matches!(**outcome, Outcome::Signal(_)) => {
                self.commands.push(Command::Kill);
                return;
            }
            _ => {}
        }
        // At once: the other nodes need not wait for the stop of our workers.
        self.commands.push(Command::farewell(signal));
        if self.is_running() {
            self.stop(signal, Next::End(Box::new(Outcome::Signal(signal))));
        } else {
            self.end_after_stop(Outcome::Signal(signal));
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.give_up_words_if_due(now);
        let Phase::Finishing { since, until, tell_at } = &mut self.phase else { return };
        let unfinished = self.unfinished.as_deref().unwrap_or("the coordinator has not said whose");
        let waited = now.saturating_duration_since(*since);
        if until.is_some_and(|until| until <= now) {
            let text = format!(
                "the other nodes' workers have not finished within {waited:.0?} (exit_barrier_timeout): {unfinished}; this \
                 node's have, and it leaves"
            );
            self.warn(text);
            self.end(Outcome::Succeeded);
        } else if *tell_at <= now {
            *tell_at = now + TELL_EVERY;
            let text = format!("this node has finished and has waited for the others for {waited:.0?}: {unfinished}");
            self.warn(text);
        }
    }

    /// When to call [`AgentMachine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Finishing { until, tell_at, .. } => Some(until.map_or(tell_at, |until| until.min(tell_at))),
            Phase::Stopping { .. } => self.words_until(),
            Phase::Joining | Phase::Running { .. } | Phase::Ended => None,
        }
    }

    /// Returns what to do now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        mem::take(&mut self.commands)
    }

    /// How many restarts failures have cost: the job's with [`Budget::Job`], else this node's.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// The round the workers belong to.
    pub fn round(&self) -> Round {
        self.round
    }

    /// Whether workers run or may run.
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    fn join(&mut self) {
        self.phase = Phase::Joining;
        self.commands.push(Command::Join);
    }

    fn stop_policy(&self, signal: i32) -> StopPolicy {
        StopPolicy { signal: Signal(signal), grace: self.policy.grace, ..StopPolicy::default() }
    }

    fn stop(&mut self, signal: i32, next: Next) {
        self.commands.push(Command::Stop(self.stop_policy(signal)));
        self.phase = Phase::Stopping { next, over: false };
    }

    /// Whether this agent's end follows the stop under way.
    fn ends_after_stop(&self) -> bool {
        matches!(self.phase, Phase::Stopping { next: Next::End(_), .. })
    }

    /// What follows the stop under way.
    fn go_on_with(&mut self, follows: Next) {
        if let Phase::Stopping { next, .. } = &mut self.phase {
            *next = follows;
            self.proceed();
        }
    }

    /// Do what follows the stop, once that is over and it is known.
    fn proceed(&mut self) {
        let Phase::Stopping { next, over: true } = &self.phase else { return };
        match next {
            Next::Join => self.join(),
            Next::Decide => {}
            Next::End(outcome) if self.lacks_words(outcome) => {}
            Next::End(outcome) => {
                let outcome = (**outcome).clone();
                self.end(outcome);
            }
        }
    }

    /// End, but not before the workers have.
    fn end_after_stop(&mut self, outcome: Outcome) {
        match &self.phase {
            Phase::Running { .. } => self.stop(SIGTERM, Next::End(Box::new(outcome))),
            Phase::Stopping { .. } => self.go_on_with(Next::End(Box::new(outcome))),
            _ => self.end(outcome),
        }
    }

    fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        let outcome = self.with_late_words(outcome);
        self.commands.push(Command::End(Box::new(outcome)));
    }

    fn warn(&mut self, text: String) {
        self.commands.push(Command::Warn(text));
    }

    fn tell(&mut self, text: String) {
        self.commands.push(Command::Tell(text));
    }
}
