//! What an agent does about what happens to it: pure decisions, one loop for every front end.
//!
//! Events come in through `on_…`, [`AgentMachine::take_commands`] hands out what to do, and [`AgentMachine::next_deadline`] says when to
//! look at the clock. All workers of a node start and stop together. A round goes through these phases:
//!
//! ```text
//!             placed            all succeeded            all nodes done
//!   Joining ─────────▶ Running ───────────────▶ Finishing ─────────────▶ Ended
//!      ▲                  │ failure, interruption, signal │ interruption      ▲
//!      │                  ▼                               │                   │
//!      └────────────── Stopping ◀─── (nothing to stop) ───┘                   │
//!      ▲                  │ stopped; whether to restart is the coordinator's  │
//!      └── Deciding ◀─────┴───────────────────────────────────────────────────┘
//! ```

use std::collections::BTreeSet;
use std::mem;
use std::time::{Duration, Instant};

use super::policy::{Budget, Outcome, Policy};
use crate::process::{Signal, StopPolicy};
use crate::rendezvous::node::machine::JoinError;
use crate::rendezvous::protocol::message::{Failure, Placement, Round, Verdict};

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ask for a place in the next round; answer with `on_placed` or `on_no_place`.
    Join,
    /// Start all workers; answer with `on_start_failed` if one cannot be started.
    Start(Box<Placement>),
    /// Signal every worker's group, SIGKILL after the grace; answer with `on_stopped` when nothing is left of them.
    Stop(StopPolicy),
    /// End the stop under way with SIGKILL, now.
    Kill,
    /// Tell the coordinator that a worker failed.
    Report(Box<Failure>),
    /// Tell the coordinator that all workers of this node have succeeded.
    Done(Round),
    /// Say goodbye to the coordinator.
    Leave {
        /// Why, for the others.
        reason: String,
        /// The signal that ended this agent.
        signal: i32,
    },
    /// End the job for everybody.
    Close(Verdict),
    /// For the operator.
    Tell(String),
    /// The same, of what they did not ask for: workers that have to begin anew.
    Warn(String),
    /// There is nothing more to do.
    End(Box<Outcome>),
}

/// What the others are told of this node's going.
fn farewell(signal: i32) -> Command {
    Command::Leave { reason: format!("its agent got {}", Signal(signal)), signal }
}

/// SIGTERM's number, the same on every platform PyTorch's agent runs on.
const SIGTERM: i32 = 15;

/// How often a node that has finished says whom it waits for.
const TELL_EVERY: Duration = Duration::from_secs(30);

const TOO_LATE: &str = "a worker failed after the job had been declared a success";

#[derive(Clone, Debug)]
enum Phase {
    Joining,
    Running {
        left: BTreeSet<u32>,
    },
    Stopping(Next),
    /// Nothing runs. The coordinator has been told of a failure and has not answered.
    Deciding,
    /// All workers of this node have succeeded, those of other nodes have not.
    Finishing {
        since: Instant,
        until: Option<Instant>,
        /// When to name the unfinished nodes next.
        tell_at: Instant,
    },
    Ended,
}

/// What follows when nothing is left of the workers.
#[derive(Clone, Debug)]
enum Next {
    Join,
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
    first_failure: Option<Box<Failure>>,
    /// The job was declared a success while workers of this node still run: there is nobody left to wait for.
    closed_well: bool,
    /// The nodes whose workers still run, in the coordinator's words. Used while this node has finished.
    unfinished: Option<String>,
    commands: Vec<Command>,
}

impl AgentMachine {
    /// An agent that asks for its first place. `name` is how others' messages call it.
    pub fn new(policy: Policy, name: String) -> Self {
        Self {
            policy,
            name,
            phase: Phase::Joining,
            round: Round::default(),
            restarts: 0,
            first_failure: None,
            closed_well: false,
            unfinished: None,
            commands: vec![Command::Join],
        }
    }

    /// A round completed and this node is in it.
    pub fn on_placed(&mut self, placement: Placement) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        self.round = placement.round;
        if self.policy.budget == Budget::Job {
            self.restarts = placement.restart;
        }
        self.first_failure = None;
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

    /// A worker failed: it ended otherwise, or could not be started. Later ones of the same round are consequences.
    ///
    /// `hopeless`: starting it again on this node cannot help (it holds a device in uninterruptible sleep), so the job ends.
    pub fn on_worker_failed(&mut self, mut failure: Failure, hopeless: bool) {
        if !matches!(self.phase, Phase::Running { .. }) {
            return;
        }
        if hopeless {
            self.warn(format!("{failure}; a restart cannot help"));
            self.give_up(failure);
            return;
        }
        if self.closed_well {
            // No more is to be heard of a closed rendezvous, nor is there a round to begin anew in.
            failure.node.clone_from(&self.name);
            self.end_after_stop(Outcome::Failed { cause: Some(Box::new(failure)), reason: TOO_LATE.to_owned() });
            return;
        }
        self.first_failure = Some(Box::new(failure.clone()));
        match &mut self.policy.budget {
            Budget::Job => {
                self.commands.push(Command::Report(Box::new(failure)));
                self.stop(SIGTERM, Next::Decide);
            }
            Budget::Node(0) => {
                self.warn(format!("{failure}; no restarts left on this node"));
                self.give_up(failure);
            }
            Budget::Node(left) => {
                let before = *left; // as PyTorch counts them
                *left -= 1;
                self.restarts += 1;
                self.warn(format!(
                    "{failure}; restarting all workers; {before} attempts left; will restart worker group"
                ));
                self.stop(SIGTERM, Next::Join);
            }
        }
    }

    /// Nothing is left of the workers that were to be stopped.
    pub fn on_stopped(&mut self) {
        let Phase::Stopping(next) = &self.phase else { return };
        match next.clone() {
            Next::Join => self.join(),
            Next::Decide => self.phase = Phase::Deciding,
            Next::End(outcome) => self.end(*outcome),
        }
    }

    /// The world must re-form: nodes wait, a member was lost, a worker failed somewhere, or this node was out of reach too long.
    pub fn on_interrupted(&mut self, round: Round, reason: &str) {
        let restarting = "restarting all workers";
        self.join_anew(round, reason, (restarting, restarting, "starting all workers again"));
    }

    /// The world must re-form, and cannot until a coordinator runs again.
    pub fn on_host_gone(&mut self, round: Round, reason: &str) {
        let waiting = "waiting for another round";
        self.join_anew(round, reason, ("stopping all workers", waiting, waiting));
    }

    /// Join the next round. The three texts are for workers that run, that have been stopped, and that have succeeded.
    fn join_anew(&mut self, round: Round, reason: &str, (stopping, stopped, again): (&str, &str, &str)) {
        if round != self.round {
            return;
        }
        match &mut self.phase {
            Phase::Running { .. } => {
                self.warn(format!("{stopping}: {reason}"));
                self.stop(SIGTERM, Next::Join);
            }
            // The coordinator has counted the failure of this very node, or what came before it.
            Phase::Stopping(next) if matches!(next, Next::Decide) => {
                *next = Next::Join;
                self.warn(format!("{stopping}: {reason}"));
            }
            Phase::Deciding => {
                self.warn(format!("{stopped}: {reason}"));
                self.join();
            }
            Phase::Finishing { .. } => {
                self.warn(format!("{again}, though they had succeeded: {reason}"));
                self.join();
            }
            Phase::Joining | Phase::Stopping(_) | Phase::Ended => {}
        }
    }

    /// The rendezvous was closed.
    pub fn on_closed(&mut self, verdict: Verdict) {
        match verdict {
            // `AllDone` counts this node's workers too, so they have finished; otherwise somebody has said so.
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => match &self.phase {
                Phase::Running { .. } => self.closed_well = true,
                Phase::Finishing { .. } => self.end(Outcome::Succeeded),
                Phase::Stopping(Next::Decide) | Phase::Deciding => {
                    let cause = self.first_failure.take();
                    self.end_after_stop(Outcome::Failed { cause, reason: TOO_LATE.to_owned() });
                }
                // The join that follows says so.
                Phase::Joining | Phase::Stopping(_) | Phase::Ended => {}
            },
            Verdict::Stopped { .. } => {
                if matches!(self.phase, Phase::Joining | Phase::Ended | Phase::Stopping(Next::End(_))) {
                    return;
                }
                self.warn(format!("stopping all workers: the job was {verdict}"));
                self.end_after_stop(Outcome::NoPlace(JoinError::Closed { verdict, spare: false }));
            }
            Verdict::Failed { cause: reason, failure, .. } => {
                match &mut self.phase {
                    Phase::Joining | Phase::Ended => return,
                    Phase::Stopping(Next::End(own)) => {
                        // Whose failure was the first is the coordinator's to say.
                        if failure.is_some() && matches!(**own, Outcome::Failed { .. }) {
                            **own = Outcome::Failed { cause: failure, reason };
                        }
                        return;
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
            // The others' workers are not ours to judge: ours have succeeded.
            Phase::Finishing { .. } => self.end(Outcome::Succeeded),
            Phase::Ended | Phase::Stopping(Next::End(_)) => {}
            _ => self.end_after_stop(Outcome::NoPlace(error)),
        }
    }

    /// Without a coordinator: the other nodes have finished too, or are not waited for any longer.
    pub fn on_barrier_passed(&mut self) {
        if matches!(self.phase, Phase::Finishing { .. }) {
            self.end(Outcome::Succeeded);
        }
    }

    /// This process was told to end. The second time, what is left of the workers is killed at once.
    pub fn on_signal(&mut self, signal: i32) {
        if let Phase::Stopping(next) = &mut self.phase {
            if matches!(next, Next::End(outcome) if matches!(**outcome, Outcome::Signal(_))) {
                self.commands.push(Command::Kill);
                return;
            }
            *next = Next::End(Box::new(Outcome::Signal(signal)));
            self.commands.push(farewell(signal));
            return;
        }
        if matches!(self.phase, Phase::Ended) {
            return;
        }
        // At once: the others need not wait for our workers' goodbyes.
        self.commands.push(farewell(signal));
        if matches!(self.phase, Phase::Running { .. }) {
            self.stop(signal, Next::End(Box::new(Outcome::Signal(signal))));
        } else {
            self.end(Outcome::Signal(signal));
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
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
            _ => None,
        }
    }

    /// What to do now, in order.
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

    /// What a failure of a worker does to the others, whatever is said of it; `None` if they are not to run anyway. So the driver
    /// may begin before it knows what the worker said, and call [`AgentMachine::on_worker_failed`] then.
    pub fn stop_for_failure(&self) -> Option<StopPolicy> {
        self.is_running().then(|| self.stop_policy(SIGTERM))
    }

    /// Whether workers run or may run.
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    fn give_up(&mut self, mut failure: Failure) {
        // To others it would otherwise be "this node".
        failure.node.clone_from(&self.name);
        let cause = failure.to_string();
        let failure = Some(Box::new(failure));
        self.commands.push(Command::Close(Verdict::Failed {
            by: self.name.clone(),
            cause: cause.clone(),
            failure: failure.clone(),
        }));
        self.stop(SIGTERM, Next::End(Box::new(Outcome::Failed { cause: failure, reason: cause })));
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
        self.phase = Phase::Stopping(next);
    }

    /// End, but not before the workers have.
    fn end_after_stop(&mut self, outcome: Outcome) {
        match &mut self.phase {
            Phase::Running { .. } => self.stop(SIGTERM, Next::End(Box::new(outcome))),
            Phase::Stopping(next) => *next = Next::End(Box::new(outcome)),
            _ => self.end(outcome),
        }
    }

    fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        self.commands.push(Command::End(Box::new(outcome)));
    }

    fn warn(&mut self, text: String) {
        self.commands.push(Command::Warn(text));
    }

    fn tell(&mut self, text: String) {
        self.commands.push(Command::Tell(text));
    }
}
