//! Workers that survive a change of the world: they change *in place*.
//!
//! A worker that uses `elastic_rs.elastic` is connected to its agent, so that it *attends*. When its world ends, it is notified and
//! *parks*: it leaves the world, and waits for the next one. Its node joins the next round with what its parked workers have
//! committed. Then the parked workers get their ranks in the new world, and only missing ones are started.
//!
//! - **After a failure** ([`AgentMachine::break_up`]) workers are notified at once. They go back to their last commit.
//! - **For a change of membership** all workers of the job leave their world at the same check, which the coordinator chooses
//!   ([`AgentMachine::on_change`], [`AgentMachine::on_raise_at`]). They keep what they have done since their last commit.
//!
//! Workers of one node survive together or not at all. They do not survive if one of them runs and has never attended, because its
//! program may not use the API. It is known to use it if it has the local rank of a worker that has attended, or if its world continues
//! another. Then one that does not attend, or does not any more, is killed, and counts as missing.

use std::time::{Duration, Instant};

use super::notice::{Leaving, WhyLeaving};
use super::worker_states::{WorkerState, WorkerStates};
use super::{AgentMachine, LEAVE_LIMIT, Next, Phase, SIGTERM, Way};
use crate::agent::command::Command;
use crate::agent::policy::Outcome;
use crate::channel::message::{HeldState, ToWorker};
use crate::rendezvous::messages::message::{Failure, NEVER, Placement, Resume, SAVE_WITHIN, Survival, WorldChange};

/// How long a worker may take to park once its world has ended: to break off what it does, and to restore its last commit.
pub const PARK_LIMIT: Duration = Duration::from_secs(30);
/// How long workers may take to reach the check at which the world changes: the step that they are in.
pub const RAISE_LIMIT: Duration = Duration::from_secs(300);

/// How long workers may take to leave their world at the check.
fn raise_limit(saves: bool) -> Duration {
    if saves { RAISE_LIMIT + SAVE_WITHIN } else { RAISE_LIMIT }
}

impl AgentMachine {
    /// A worker has connected. It learns its world now, and hears of the end of it.
    pub fn on_worker_attends(&mut self, local_rank: u32) {
        match self.worker_states.of.get(&local_rank) {
            Some(WorkerState::Started | WorkerState::Deaf) if self.is_preparing() => self.on_prepared(local_rank),
            Some(WorkerState::Ahead { .. }) => self.waits_ahead(local_rank, true),
            Some(WorkerState::Started | WorkerState::Deaf | WorkerState::Attends { .. }) => {
                self.send_placement(local_rank);
                self.report_if_all_attend();
            }
            _ => {}
        }
    }

    /// A worker lets the library make its process group, and so do the others: they run the same program.
    pub fn on_worker_without_process_group(&mut self) {
        self.worker_states.no_process_group = true;
        if self.is_running() {
            self.commands.push(Command::NoProcessGroup(self.round()));
        }
        self.start_standbys();
    }

    /// A worker's program does not live through a change, and neither does that of the others, which is the same.
    pub fn on_worker_saves(&mut self) {
        let known = std::mem::replace(&mut self.worker_states.saves, true);
        match &mut self.phase {
            Phase::Running { .. } => self.commands.push(Command::Saves(self.round())),
            // Its world has ended since it has connected.
            Phase::Stopping { over: false, way: Way::Park { .. }, next } => {
                let next = next.clone();
                self.stop(SIGTERM, next);
            }
            // The check was named before.
            Phase::Stopping { over: false, way: Way::Raise { until, .. }, .. } if !known => {
                *until += SAVE_WITHIN;
                self.commands.push(Command::Saves(self.round()));
            }
            _ => {}
        }
    }

    /// A worker has closed its connection. It ends, or has stopped to use the API.
    pub fn on_worker_deaf(&mut self, local_rank: u32) {
        if self.worker_states.is_ahead(local_rank) {
            return self.waits_ahead(local_rank, false);
        }
        let Some(worker_state) = self.worker_states.of.get_mut(&local_rank) else { return };
        if !matches!(worker_state, WorkerState::Attends { .. } | WorkerState::Parked { .. }) {
            return;
        }
        *worker_state = WorkerState::Deaf;
        // It cannot be notified of the next world. Before an agreed check it may have finished its work.
        if (self.parks() && !self.raises()) || matches!(self.phase, Phase::Joining) {
            self.commands.push(Command::KillWorker { local_rank });
        }
    }

    /// The workers run: those that were missing were started, and those that had parked got their ranks.
    pub fn on_started(&mut self) {
        if !self.worker_states.asked.is_empty() {
            return self.on_started_ahead();
        }
        let waits =
            |worker_state| matches!(worker_state, WorkerState::Parked { .. } | WorkerState::Ahead { waits: true });
        let waiting: Vec<_> = self.worker_states.which(waits).collect();
        let new =
            self.worker_states.of.values_mut().filter(|worker_state| {
                matches!(worker_state, WorkerState::Missing | WorkerState::Ahead { waits: false })
            });
        new.for_each(|worker_state| *worker_state = WorkerState::Started);
        waiting.into_iter().for_each(|local_rank| self.send_placement(local_rank));
        self.report_if_all_attend();
    }

    /// A worker is in the world from now on.
    fn send_placement(&mut self, local_rank: u32) {
        self.worker_states.of.insert(local_rank, WorkerState::Attends { counted: None });
        self.worker_states.users.insert(local_rank);
        self.commands.push(Command::SendPlacement { local_rank });
    }

    fn report_if_all_attend(&mut self) {
        if self.is_running() && self.worker_states.all_attend() {
            self.commands.push(Command::Attending(self.round()));
            if self.worker_states.no_process_group {
                self.commands.push(Command::NoProcessGroup(self.round()));
            }
            self.start_standbys();
        }
    }

    /// A worker has answered a change.
    pub fn on_worker_counted(&mut self, local_rank: u32, change: u64, count: u64) {
        if self.worker_states.change != Some(change) {
            return;
        }
        let Some(WorkerState::Attends { counted }) = self.worker_states.of.get_mut(&local_rank) else { return };
        *counted = Some(count);
        if let Some(count) = self.worker_states.counted().filter(|_| self.is_running()) {
            self.commands.push(Command::Counted { round: self.round(), count });
        }
    }

    /// A worker has left its world.
    pub fn on_worker_parked(&mut self, local_rank: u32, state: HeldState) {
        if let Some(worker_state @ WorkerState::Attends { .. }) = self.worker_states.of.get_mut(&local_rank) {
            *worker_state = WorkerState::Parked { state };
            self.look_at_parked();
        }
    }

    /// A worker has found that its world cannot be formed, or has waited for too long. Which worker is to blame turns out now: the one that
    /// does not leave that world is replaced, alone.
    pub fn on_worker_stuck(&mut self, failure: Failure, now: Instant) {
        let attends = matches!(self.worker_states.of.get(&failure.local_rank), Some(WorkerState::Attends { .. }));
        if attends && (self.is_running() || self.raises()) {
            self.on_worker_failed(failure, false, now);
        }
    }

    /// A worker's program has raised one of the library's exceptions itself, to go back to its last commit for example. The worker leaves
    /// its world, and lives. The others do as after a failure, which costs no restart. Where workers cannot survive it is refused, and the
    /// worker fails with the reason: restarts from the checkpoint that nothing counts would go on for ever.
    pub fn on_worker_raised(&mut self, failure: Failure, now: Instant) {
        let local_rank = failure.local_rank;
        if !self.is_running() || self.can_park() {
            return self.on_worker_stuck(Failure { counts: false, ..failure }, now);
        }
        let why = match self.resumes {
            true => "another worker of this node has not reached elastic.run or elastic.init yet",
            false => "this rendezvous cannot change the world in place",
        };
        let reason = format!("its script has raised {} itself, and {why}", failure.exit);
        self.commands.push(Command::Send { local_rank, message: Box::new(ToWorker::Refused { reason }) });
    }

    /// A worker's program cannot take the state that the others have. A node that has just come leaves: it cannot take part, and the
    /// others go on without it, at no restart. On a node that was in a world before, the worker's failure follows.
    pub fn on_worker_unfit(&mut self, failure: Failure) {
        let attends = matches!(self.worker_states.of.get(&failure.local_rank), Some(WorkerState::Attends { .. }));
        if !(attends && !self.was_in_world && self.is_running() && self.worker_states.continues) {
            return;
        }
        let reason = format!("its workers cannot take the state of the others: {}", failure.message);
        let failure = self.of_this_node(failure);
        let cause = failure.to_string();
        self.warn(format!("{cause}; this node leaves the job"));
        self.commands.push(Command::Leave { reason, signal: None });
        self.stop(SIGTERM, Next::End(Box::new(Outcome::Unfit { cause: Box::new(failure), reason: cause })));
    }

    /// Nothing is left of a worker.
    pub fn on_worker_gone(&mut self, local_rank: u32) {
        if let Some(worker_state) = self.worker_states.of.get_mut(&local_rank) {
            *worker_state = WorkerState::Missing;
            self.call_standbys(); // the join does not wait for those that are started
            self.look_at_parked();
            self.start_missing_ahead();
        }
    }

    pub(super) fn ended(&mut self, local_rank: u32, well: bool) {
        if let Some(worker_state) = self.worker_states.of.get_mut(&local_rank) {
            *worker_state = WorkerState::Ended { well };
        }
    }

    /// The coordinator prepares a change of membership, this node's `number`th: workers report how far they are.
    pub fn on_change(&mut self, number: u64, change: &WorldChange) {
        let WorldChange { round, flags, reason } = change;
        let known = self.worker_states.change.is_some_and(|known| known >= number);
        if *round != self.round() || known || !self.is_running() || !self.worker_states.all_attend() {
            return;
        }
        self.log(format!("the world is about to change: {reason}"));
        self.use_whole_time();
        self.worker_states.change = Some(number);
        self.worker_states.forget_counts();
        self.send_all(&ToWorker::Change { seq: number, flags: *flags, reason: reason.clone() });
    }

    /// All workers of the job leave their world at this check. [`NEVER`]: the reason for the change is gone, and they go on.
    pub fn on_raise_at(&mut self, number: u64, change: &WorldChange, check: u64, now: Instant) {
        if !self.is_running() || self.worker_states.change != Some(number) || self.worker_states.raise_at == Some(check)
        {
            return;
        }
        self.worker_states.raise_at = Some(check);
        self.send_all(&ToWorker::RaiseAt { seq: number, check });
        if check == NEVER {
            return;
        }
        let does = if self.worker_states.saves { "the workers save, and wait to be replaced" } else { SURVIVING };
        self.warn(format!("{does}: {}", change.reason));
        if let Some(Leaving { until, why: WhyLeaving::Signal(_) }) = &mut self.leaving {
            *until += self.policy.grace.saturating_sub(LEAVE_LIMIT);
        }
        self.cancel_standby();
        let Phase::Running { left } = &mut self.phase else { return };
        let until = now + raise_limit(self.worker_states.saves);
        let way = Way::Raise { until, left: std::mem::take(left) };
        self.phase = Phase::Stopping { next: Next::Join, over: false, way };
        self.kill_leftovers();
        self.look_at_parked();
    }

    /// The next world does not wait for what workers have left that have ended well.
    fn kill_leftovers(&mut self) {
        for local_rank in self
            .worker_states
            .which(|worker_state| worker_state == WorkerState::Ended { well: true })
            .collect::<Vec<_>>()
        {
            self.commands.push(Command::KillWorker { local_rank });
        }
    }

    fn send_all(&mut self, message: &ToWorker) {
        for local_rank in self.worker_states.attending() {
            self.commands.push(Command::Send { local_rank, message: Box::new(message.clone()) });
        }
    }

    /// The workers' world has ended. They park if they can, and are stopped if not.
    /// `rank` is the global rank of the worker whose failure is the cause, if one is.
    pub(super) fn break_up(&mut self, reason: &str, rank: Option<u32>, next: Next, now: Instant) {
        if self.leaving.is_some() {
            return self.leave_now();
        }
        if !self.can_park() {
            return self.stop(SIGTERM, next);
        }
        self.commands.push(Command::CancelStart);
        self.standbys.cancelled();
        self.send_all(&ToWorker::PeerFailed { reason: reason.to_owned(), rank });
        for local_rank in
            self.worker_states.which(|worker_state| matches!(worker_state, WorkerState::Started | WorkerState::Deaf))
        {
            self.commands.push(Command::KillWorker { local_rank });
        }
        self.kill_leftovers();
        self.phase =
            Phase::Stopping { next, over: false, way: Way::Park { ended: now, until: now + PARK_LIMIT, late: false } };
        self.look_at_parked();
        self.start_missing_ahead();
    }

    /// Whether every worker of this node attends.
    pub(super) fn all_attend(&self) -> bool {
        self.worker_states.all_attend()
    }

    /// Whether the end of the world need not be the end of the workers.
    pub(super) fn can_park(&self) -> bool {
        self.policy.in_place && self.resumes && !self.worker_states.saves && self.worker_states.can_park()
    }

    /// Workers that have saved wait for nothing else. A handler of their own for SIGTERM could keep them.
    pub(super) fn dismiss_parked(&mut self) {
        if !self.worker_states.saves {
            return;
        }
        let parked = self.worker_states.parked().into_iter().map(|survivor| survivor.local_rank);
        for local_rank in parked.collect::<Vec<_>>() {
            let reason = "it has saved, and is replaced".to_owned();
            self.commands.push(Command::Send { local_rank, message: Box::new(ToWorker::Refused { reason }) });
        }
    }

    /// Whether workers leave their world, and are not stopped.
    pub(super) fn parks(&self) -> bool {
        matches!(self.phase, Phase::Stopping { way: Way::Park { .. } | Way::Raise { .. }, .. })
    }

    /// Whether workers break off what they do, because their world has ended.
    pub fn leaves_world(&self) -> bool {
        matches!(self.phase, Phase::Stopping { over: false, way: Way::Park { .. }, .. })
    }

    /// Whether workers are about to leave their world without a failure.
    pub(super) fn raises(&self) -> bool {
        matches!(self.phase, Phase::Stopping { way: Way::Raise { .. }, .. })
    }

    /// Goes on once no worker is in a world any more.
    pub(super) fn look_at_parked(&mut self) {
        if !self.parks()
            || !self.worker_states.all_parked()
            || self.worker_states.any(|worker_state| matches!(worker_state, WorkerState::Ended { .. }))
        {
            return;
        }
        if let Phase::Stopping { over, .. } = &mut self.phase {
            *over = true;
            self.proceed();
        }
    }

    /// A worker does not leave its world: it has this collective, which does not end. It is replaced, alone.
    pub fn on_worker_hung(&mut self, local_rank: u32, collective: &str) {
        let attends = matches!(self.worker_states.of.get(&local_rank), Some(WorkerState::Attends { .. }));
        if attends && self.leaves_world() {
            self.warn(format!(
                "the worker with local rank {local_rank} is replaced: gloo does not end {collective} of its last world, though all \
                 connections have ended"
            ));
            self.commands.push(Command::KillWorker { local_rank });
        }
    }

    /// Whoever has not left its world in time is replaced, alone. If that does not end it, all workers are stopped.
    pub(super) fn give_up_late_workers(&mut self, now: Instant) {
        let Phase::Stopping { over: false, way, next } = &self.phase else { return };
        let next = next.clone();
        match *way {
            Way::Park { ended, until, late: false } if until <= now => {
                for local_rank in self.worker_states.attending() {
                    self.warn(format!(
                        "the worker with local rank {local_rank} has not left its world within {PARK_LIMIT:.0?}, and is replaced"
                    ));
                    self.commands.push(Command::KillWorker { local_rank });
                }
                self.phase = Phase::Stopping {
                    next,
                    over: false,
                    way: Way::Park { ended, until: now + PARK_LIMIT, late: true },
                };
            }
            Way::Park { until, late: true, .. } if until <= now => {
                self.warn("stopping all workers: one of them does not end".to_owned());
                self.stop(SIGTERM, next);
            }
            Way::Raise { until, .. } if until <= now => {
                let saves = self.worker_states.saves;
                let reached = if saves { "saved at" } else { "reached" };
                let reason = format!("workers have not {reached} the agreed check within {:.0?}", raise_limit(saves));
                self.warn(reason.clone());
                self.break_up(&reason, None, next, now);
            }
            _ => {}
        }
    }

    /// The workers that are left survive.
    pub(super) fn parked_survive(&mut self) {
        let survivors = self.worker_states.parked();
        let saved = self.worker_states.saves && survivors.len() == self.worker_states.of.len();
        self.survival = if saved { Survival::Saved } else { Survival::Attended(survivors) };
    }

    /// The workers are stopped, or have ended: none survives. Those of a node that has never had a rank are nobody's loss.
    pub(super) fn none_survives(&mut self) {
        // Workers may have been stopped before, and what became of them is known.
        if !self.worker_states.of.is_empty() {
            self.survival = if self.is_new() { Survival::New } else { self.worker_states.if_none_survives() };
        }
    }

    /// What the next join says of the last workers.
    pub(super) fn take_survival(&mut self) -> Survival {
        let survival = std::mem::take(&mut self.survival);
        self.worker_states.brought = match &survival {
            Survival::Attended(survivors) => survivors.clone(),
            _ => Vec::new(),
        };
        (self.worker_states.change, self.worker_states.raise_at) = (None, None);
        survival
    }

    /// The round was completed. Workers that were parked go on in it, or are stopped because those of another node were.
    ///
    /// `missed`: a round has formed without this node since its last one. If the workers of this one are all new, they begin from a
    /// checkpoint that those which wait here may have been too early to load.
    pub(super) fn begin_world(&mut self, placement: Placement, missed: bool, now: Instant) {
        let continues = match placement.resume {
            Some(Resume::Continue { survivors, .. }) => survivors > 0 || !missed,
            Some(Resume::Restart { .. }) | None => false,
        };
        let waits = |worker_state| matches!(worker_state, WorkerState::Parked { .. } | WorkerState::Ahead { .. });
        let replaces = self.worker_states.saves || !continues;
        if replaces && self.worker_states.any(waits) {
            let reason = match &placement.resume {
                _ if self.worker_states.saves => "they have saved",
                Some(Resume::Restart { reason }) => reason,
                Some(Resume::Continue { .. }) => {
                    "a round has formed without this node, and none of its workers is left"
                }
                None => "the coordinator was replaced by one that cannot change the world in place",
            };
            self.warn(format!("restarting all workers: {reason}"));
            return self.stop(SIGTERM, Next::Start(Box::new(placement)));
        }
        let lost = self.lost.take().filter(|failure| !self.is_surplus(failure.local_rank));
        let waiting: Vec<_> = self.worker_states.which(waits).collect();
        for local_rank in waiting {
            if self.is_surplus(local_rank) {
                self.log(format!("the worker with local rank {local_rank} has no rank in this round, and is stopped"));
                self.commands.push(Command::KillWorker { local_rank });
            }
        }
        self.start(placement);
        if let Some(failure) = lost {
            // The world counts on a worker that has died.
            self.worker_states.tried.insert(failure.local_rank);
            self.take_failure(failure, now);
        }
    }

    /// Whether a worker has no rank in the world that this node is in, or was in last. Nobody minds its end.
    pub(super) fn is_surplus(&self, local_rank: u32) -> bool {
        local_rank >= self.workers
    }

    /// Start the workers of a round that were not parked.
    pub(super) fn start(&mut self, placement: Placement) {
        let missing = self.worker_states.begin(self.workers, placement.resume.as_ref());
        self.phase = Phase::Running { left: (0..self.workers).collect() };
        self.commands.push(Command::Start { placement: Box::new(placement), missing });
    }

    /// A worker that had parked has ended.
    pub(super) fn is_brought(&self, local_rank: u32) -> bool {
        let mut brought = self.worker_states.brought.iter();
        matches!(self.phase, Phase::Joining) && brought.any(|survivor| survivor.local_rank == local_rank)
    }

    /// Whether workers that wait for a world have to be stopped before this agent ends.
    pub(super) fn has_parked(&self) -> bool {
        matches!(self.phase, Phase::Joining)
            && self.worker_states.any(|worker_state| worker_state != WorkerState::Missing)
    }

    /// Workers are stopped: none survives.
    pub(super) fn forget_worker_states(&mut self) {
        self.worker_states = WorkerStates {
            users: std::mem::take(&mut self.worker_states.users),
            saves: self.worker_states.saves,
            ..WorkerStates::default()
        };
        self.lost = None;
    }
}

/// What is logged when workers survive.
pub(super) const SURVIVING: &str = "the workers leave their world, and wait for the next";
