//! The agent's decisions: a pure state machine, one for every front end.
//!
//! Events come in through `on_…`. [`AgentMachine::take_commands`] returns what to do, and [`AgentMachine::next_deadline`] when to
//! call [`AgentMachine::on_tick`]. All workers of a node start and stop together, unless they change in place. A round goes through
//! these phases:
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
//! A newcomer to a running job starts its workers before it joins, if they can wait for their world: [`ahead`]. So do members with
//! workers that are missing: [`replace`], unless others wait for their places: [`standby`].
//!
//! [`stop`] has the stops and the step after each of them. [`first`] decides which failure was the first, and [`in_place`] which workers
//! survive the end of their world.

use std::collections::BTreeSet;
use std::mem;
use std::time::{Duration, Instant};

use super::command::Command;
use super::policy::{Budget, Outcome, Policy, SIGTERM};
use crate::rendezvous::messages::message::{Failure, Placement, Round, Survival, Verdict};
use crate::rendezvous::node::JoinError;

mod ahead;
mod endings;
mod first;
mod in_place;
mod notice;
mod replace;
mod standby;
mod stop;
mod worker_states;

pub use ahead::{LOOK_LIMIT, PREPARE_LIMIT};
use first::First;
pub use first::MESSAGE_LIMIT;
use in_place::SURVIVING;
pub use in_place::{PARK_LIMIT, RAISE_LIMIT};
use notice::Leaving;
pub use replace::REPLACE_LIMIT;
use standby::Standbys;
use stop::{Next, Way};
use worker_states::WorkerStates;

/// How long a node that got a signal waits until it knows at which check its workers may leave the world. They have the grace of a stop
/// to reach it.
pub const LEAVE_LIMIT: Duration = Duration::from_secs(5);

/// Why a failure counts for the job's end no more.
const TOO_LATE: &str = "a worker failed after the job had been declared a success";

/// As [`SIGTERM`], the same number on every platform PyTorch's agent runs on.
const SIGKILL: i32 = 9;

/// How often a node that has finished logs which nodes it waits for.
const REPORT_EVERY: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
enum Phase {
    /// It is asked whether a world runs.
    Looking,
    /// Workers were started, and reach the function that waits for their world. The node joins then.
    Preparing {
        since: Instant,
        /// When to log next that they have not.
        report_at: Instant,
    },
    Joining,
    Running {
        left: BTreeSet<u32>,
    },
    /// Workers are being stopped, or leave their world.
    Stopping {
        next: Next,
        /// Nothing is left of the workers, or all that are left wait for the next world.
        over: bool,
        way: Way,
    },
    /// All workers of this node have succeeded. Workers of other nodes still run.
    Finishing {
        since: Instant,
        until: Option<Instant>,
        /// When to name the unfinished nodes next.
        report_at: Instant,
    },
    Ended,
}

/// One agent. See the module's documentation.
#[derive(Clone, Debug)]
pub struct AgentMachine {
    policy: Policy,
    name: String,
    phase: Phase,
    /// This node's place in the world that it is in, or was in last. `None` before its first round.
    placement: Option<Box<Placement>>,
    /// Workers of this node in the current world.
    workers: u32,
    restarts: u32,
    first: Option<First>,
    /// The failure that ends the round, on whatever node, as the session reports it.
    pub(super) failure: Option<Box<Failure>>,
    /// The job was declared a success while workers of this node still run: no other node is left to wait for.
    closed_well: bool,
    /// The nodes whose workers still run, in the coordinator's words. Used while this node has finished.
    unfinished: Option<String>,
    /// The workers, as far as they can change in place.
    worker_states: WorkerStates,
    standbys: Standbys,
    /// What became of the last workers, as the next join says.
    survival: Survival,
    /// A parked worker that has ended since the join which brought it.
    lost: Option<Failure>,
    /// Workers that waited for a world are killed, and something may be left of them.
    dying: bool,
    /// There are other nodes in the round.
    in_company: bool,
    /// The coordinator forms worlds of workers that survive.
    resumes: bool,
    /// This node is about to leave.
    leaving: Option<Leaving>,
    /// When this machine is taken away, if a notice has come.
    taken_away: Option<Instant>,
    /// Its workers have been killed for that.
    killed: bool,
    /// This node may have had the state of a formed world: it was in one whose workers did not all come back without it.
    was_in_world: bool,
    /// This node has begun to start its workers for a world that ran, before it joined.
    prepared: bool,
    /// This machine is checked before the next join.
    checks: bool,
    /// Its work is over, and a signal has ended the time of what its workers have left.
    cuts_leftovers: bool,
    commands: Vec<Command>,
}

impl AgentMachine {
    /// An agent that joins its first round. `name` is its name in other nodes' messages.
    pub fn new(policy: Policy, name: String) -> Self {
        let mut agent = Self {
            workers: policy.workers,
            policy,
            name,
            phase: Phase::Looking,
            placement: None,
            restarts: 0,
            first: None,
            failure: None,
            closed_well: false,
            unfinished: None,
            worker_states: WorkerStates::default(),
            standbys: Standbys::default(),
            survival: Survival::New,
            lost: None,
            dying: false,
            in_company: false,
            resumes: false,
            leaving: None,
            taken_away: None,
            killed: false,
            was_in_world: false,
            prepared: false,
            checks: policy.checks_health,
            cuts_leftovers: false,
            commands: Vec::new(),
        };
        match policy.in_place {
            true => agent.commands.push(Command::Look),
            false => agent.join(),
        }
        agent
    }

    /// A round was completed, with this node in it.
    pub fn on_placed(&mut self, placement: Placement, now: Instant) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        let missed = self.placement.as_deref().is_some_and(|last| last.round.next() < placement.round);
        self.was_in_world |= !self.is_new() && !self.worker_states.brought_none_with_state(self.workers);
        self.placement = Some(Box::new(placement.clone()));
        self.workers = placement.workers_of(self.policy.workers);
        if self.policy.budget == Budget::Job {
            self.restarts = placement.restart;
        }
        self.first = None;
        self.in_company = placement.world_size > 1;
        self.resumes = placement.resume.is_some();
        if self.dying {
            let next = Next::Start(Box::new(placement));
            self.phase = Phase::Stopping { next, over: false, way: Way::Stop };
        } else {
            self.begin_world(placement, missed, now);
        }
    }

    /// The join ended without a rank.
    pub fn on_no_placement(&mut self, error: JoinError) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        let outcome = match error {
            JoinError::Closed { verdict: Verdict::Succeeded { .. } | Verdict::AllDone { .. }, spare }
                if spare || (self.prepared && self.is_new()) =>
            {
                Outcome::NotNeeded
            }
            JoinError::Closed { verdict: Verdict::Failed { cause, failure, class, .. }, .. } => {
                Outcome::Failed { cause: failure, reason: cause, class }
            }
            error => Outcome::NoPlacement(error),
        };
        self.end_after_stop(outcome);
    }

    /// A worker ended with exit code 0.
    pub fn on_worker_succeeded(&mut self, local_rank: u32, now: Instant) {
        if self.is_surplus(local_rank) {
            return;
        }
        self.ended(local_rank, true);
        self.stop_if_prepared_in_vain(local_rank);
        let (Phase::Running { left } | Phase::Stopping { over: false, way: Way::Raise { left, .. }, .. }) =
            &mut self.phase
        else {
            return;
        };
        left.remove(&local_rank);
        if !left.is_empty() {
            return;
        }
        if self.leaves_at_once() {
            return self.leave_now();
        }
        if self.closed_well {
            self.end(Outcome::Succeeded);
            return;
        }
        self.cancel_standby();
        self.commands.push(Command::Done(self.round()));
        self.use_whole_time();
        let limit = self.policy.exit_barrier_timeout;
        let at_most = limit.map_or_else(String::new, |limit| format!(" for up to {limit:.0?} (exit_barrier_timeout)"));
        self.log(format!("all workers of this node succeeded; waiting for those of the other nodes{at_most}"));
        self.unfinished = None;
        let until = limit.and_then(|limit| now.checked_add(limit));
        (self.worker_states.change, self.worker_states.raise_at) = (None, None);
        self.phase = Phase::Finishing { since: now, until, report_at: now + REPORT_EVERY };
    }

    /// The coordinator names the nodes whose workers still run.
    pub fn on_unfinished(&mut self, unfinished: &str) {
        self.unfinished = Some(unfinished.to_owned());
    }

    /// Nothing is left of the workers that were being stopped.
    pub fn on_stopped(&mut self) {
        self.dying = false;
        if let Phase::Stopping { over, .. } = &mut self.phase {
            *over = true;
            self.proceed();
        }
    }

    /// The world must re-form: nodes wait, a member was lost, a worker failed somewhere, or this node was cut off for too long.
    pub fn on_interrupted(&mut self, round: Round, reason: &str, now: Instant) {
        let restarting = "restarting all workers";
        self.join_anew(round, reason, (restarting, restarting, "starting all workers again"), now);
    }

    /// This node was cut off for its whole lease: the others may form a world without it. No worker of it may go on, wherever it is.
    pub fn on_fenced(&mut self, round: Round, reason: &str, now: Instant) {
        if round != self.round() || !(self.is_running() || self.parks()) {
            if matches!(self.phase, Phase::Stopping { over: false, .. }) {
                self.commands.push(Command::Kill); // those that are being stopped have no grace any more
            }
            return self.on_interrupted(round, reason, now);
        }
        match self.leaving {
            Some(_) => {
                self.warn(format!("stopping all workers: {reason}"));
                self.leave_now();
                self.commands.push(Command::Kill);
            }
            None => {
                self.warn(format!("restarting all workers: {reason}"));
                self.stop(SIGKILL, Next::Join);
            }
        }
    }

    /// This node was cut off for its whole lease while it waited for its place. The survivors that it has brought end: they hold the
    /// state of a world that may have gone on without them. Comes before [`Self::on_placed`].
    pub fn on_survivors_lost(&mut self, reason: &str) {
        if !matches!(self.phase, Phase::Joining) {
            return;
        }
        self.warn(format!("restarting all workers: {reason}"));
        if self.has_parked() {
            self.commands.push(Command::Kill);
            self.dying = true;
        }
        self.none_survives();
        self.forget_worker_states();
    }

    /// The world must re-form, and cannot until a coordinator runs again.
    pub fn on_host_gone(&mut self, round: Round, reason: &str, now: Instant) {
        let waiting = "waiting for another round";
        self.join_anew(round, reason, ("stopping all workers", waiting, waiting), now);
    }

    /// Join the next round. The three texts are for workers that run, that were stopped, and that have succeeded.
    fn join_anew(&mut self, round: Round, reason: &str, (stopping, stopped, again): (&str, &str, &str), now: Instant) {
        if round != self.round() {
            return;
        }
        match &self.phase {
            Phase::Running { .. } => {
                let does = if self.can_park() { SURVIVING } else { stopping };
                self.warn(format!("{does}: {reason}"));
                self.break_up(reason, self.failed_rank(), Next::Join, now);
            }
            // The coordinator has counted this node's failure, or an earlier one.
            Phase::Stopping { next: Next::Decide, over, way } => {
                let does = match (way, over) {
                    (Way::Stop, true) => stopped,
                    (Way::Stop, false) => stopping,
                    (Way::Park { .. } | Way::Raise { .. }, _) => SURVIVING,
                };
                match (self.after_own_failure(reason, self.failure.as_deref()), does) {
                    (None, _) => self.warn(format!("{does}: {reason}")),
                    (Some(""), SURVIVING) => {} // logged with the failure
                    (Some(""), _) => self.warn(does.to_owned()),
                    (Some(follows), SURVIVING) => self.warn(follows.to_owned()),
                    (Some(follows), _) => self.warn(format!("{does}: {follows}")),
                }
                self.go_on_with(Next::Join);
            }
            // The round that was to be started is over already.
            Phase::Stopping { next: Next::Start(_), .. } => self.go_on_with(Next::Join),
            // A failure somewhere: no worker waits for the check any more.
            Phase::Stopping { over: false, way: Way::Raise { .. }, .. } => {
                self.break_up(reason, self.failed_rank(), Next::Join, now)
            }
            // The workers of all nodes have saved, or no other node waits for them.
            Phase::Stopping { over: true, way: Way::Raise { .. }, .. } if self.leaving.is_some() => self.leave_now(),
            Phase::Finishing { .. } if self.leaving.is_some() => self.leave_now(),
            Phase::Finishing { .. } => {
                self.warn(format!("{again}, though they had succeeded: {reason}"));
                if self.can_park() {
                    self.break_up(reason, self.failed_rank(), Next::Join, now); // until nothing is left of them
                } else {
                    self.stop(SIGTERM, Next::Join); // what they have left
                }
            }
            Phase::Looking | Phase::Preparing { .. } | Phase::Joining | Phase::Stopping { .. } | Phase::Ended => {}
        }
    }

    /// Without a coordinator: the other nodes have finished too, or this node stops waiting for them.
    pub fn on_barrier_passed(&mut self) {
        if matches!(self.phase, Phase::Finishing { .. }) {
            self.end(Outcome::Succeeded);
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.give_up_message_if_due(now);
        self.give_up_late_workers(now);
        self.leave_if_due(now);
        self.kill_if_taken_away(now);
        self.look_after_preparation(now);
        self.stop_holding_join_up(now);
        let Phase::Finishing { since, until, report_at } = &mut self.phase else { return };
        let unfinished = self.unfinished.as_deref().unwrap_or("the coordinator has not named them");
        let waited = now.saturating_duration_since(*since);
        if until.is_some_and(|until| until <= now) {
            let text = format!(
                "the other nodes' workers have not finished within {waited:.0?} (exit_barrier_timeout): {unfinished}; this \
                 node's have, and it leaves"
            );
            self.warn(text);
            self.end(Outcome::Succeeded);
        } else if *report_at <= now {
            *report_at = now + REPORT_EVERY;
            let text = format!("this node has finished, and has waited {waited:.0?} for the others: {unfinished}");
            self.warn(text);
        }
    }

    /// When to call [`AgentMachine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let leave_at = self.leaving.as_ref().map(|leaving| leaving.until);
        match self.phase {
            Phase::Finishing { until, report_at, .. } => [until, Some(report_at), leave_at].into_iter().flatten().min(),
            Phase::Stopping { over: false, way: Way::Park { until, .. } | Way::Raise { until, .. }, .. } => {
                [Some(until), leave_at, self.message_until()].into_iter().flatten().min()
            }
            Phase::Stopping { over: true, way: Way::Raise { .. }, .. } => leave_at,
            Phase::Stopping { .. } => {
                [self.held_up_until(), self.message_until(), self.kill_at()].into_iter().flatten().min()
            }
            Phase::Running { .. } => leave_at,
            Phase::Preparing { report_at, .. } => Some(report_at),
            Phase::Looking | Phase::Joining | Phase::Ended => None,
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

    /// The round the workers belong to. Before this node's first round it is round 0.
    pub fn round(&self) -> Round {
        self.placement.as_deref().map_or_else(Round::default, |placement| placement.round)
    }

    /// Whether this node waits for its place in a round.
    pub fn is_joining(&self) -> bool {
        matches!(self.phase, Phase::Joining)
    }

    /// Whether workers run or may run.
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    fn join(&mut self) {
        if self.leaving.is_some() {
            return self.leave_now();
        }
        self.phase = Phase::Joining;
        if mem::take(&mut self.checks) {
            self.commands.push(Command::CheckHealth);
        }
        let survival = self.take_survival();
        self.commands.push(Command::Join { survival });
    }

    fn warn(&mut self, text: String) {
        self.commands.push(Command::Warn(text));
    }

    fn log(&mut self, text: String) {
        self.commands.push(Command::Log(text));
    }
}
