//! Starting the workers of a round. Part of [`super`].

use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use super::{ErrorFiles, Runner, Step, change_of};
use crate::agent::account::OomKills;
use crate::agent::slots::Holder;
use crate::agent::worker_group::WorkerGroup;
use crate::rendezvous::messages::message::Placement;
use crate::threads;
use crate::warm::Template;
use crate::workers::{Consoles, FilterOptions, Group, Origin, WorkerSpec, link_ranks};

/// How long a start may take to complete after an event that ends the round. Only a file system that hangs makes it take that
/// long.
pub const START_PATIENCE: Duration = Duration::from_secs(5);

/// Programs to start as the workers of a round.
#[derive(Debug)]
pub struct Programs<'a> {
    /// The workers.
    pub specs: Vec<WorkerSpec>,
    /// Files for lines that are kept apart.
    pub filters: FilterOptions,
    /// Where teed lines are shown.
    pub consoles: Consoles,
    /// Each worker's error file, by local rank.
    pub error_files: ErrorFiles,
    /// Workers are forked from it if possible.
    pub template: Option<&'a Template>,
}

/// What the front end starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Workers of a round.
    Round,
    /// Workers of the next round.
    Ahead,
    /// A standby in this slot.
    Standby(u32),
}

impl Runner {
    /// Wait until the requested start is no longer wanted, because the session or a signal has ended the round. Other events are
    /// acted on meanwhile. A front end waits for this beside everything that a start waits for before any worker runs, so that no
    /// worker is started for a job that has ended. May be dropped.
    pub async fn start_withdrawn(&mut self) {
        let asked = self.starts;
        loop {
            self.perform();
            if self.starts != asked || !self.steps.iter().any(|step| matches!(step, Step::Start(_))) {
                return;
            }
            self.turn().await;
        }
    }

    /// Carry out a start, from the moment when workers may run. `None`: the session reported a change for this agent, and the start
    /// was not complete [`START_PATIENCE`] later. The start is dropped then, which kills workers that run.
    ///
    /// A start is not interrupted at once: it takes milliseconds, and running workers should get their grace before they are killed.
    pub async fn while_starting<T>(&self, starting: impl Future<Output = T>) -> Option<T> {
        let patience_ends = async {
            change_of(self.session.as_deref(), self.seen.as_ref()).await;
            tokio::time::sleep(START_PATIENCE).await;
        };
        tokio::select! {
            biased;
            started = starting => Some(started),
            () = patience_ends => None,
        }
    }

    /// Wait until the fork server has loaded what these workers need, if there is one. False if the requested start is no longer wanted
    /// before that. May be dropped.
    pub async fn loaded(&mut self, template: Option<&Template>, specs: &[WorkerSpec]) -> bool {
        let Some(template) = template else { return true };
        tokio::select! {
            biased;
            () = self.start_withdrawn() => false,
            () = template.loaded(specs) => true,
        }
    }

    /// An answer to [`Step::Start`]: start these programs, but for those that have survived. Returns the process ids of those that were
    /// started by local rank. The result is empty if one could
    /// not be started, which is a failure of that worker like any other, and if the round ended before the start was complete.
    /// Dropping the future kills those that run, and leaves the step unanswered.
    pub async fn start(&mut self, programs: Programs<'_>) -> BTreeMap<u32, u32> {
        if self.starts_standby() {
            self.start_standby(programs).await;
            return BTreeMap::new();
        }
        let Programs { specs, mut filters, consoles, error_files, template } = programs;
        filters.progress = self.training.progress_log();
        let specs = self.prepare(specs);
        if specs.is_empty() {
            self.resumed(); // all workers have survived
            return BTreeMap::new();
        }
        let slots: Vec<_> = specs.iter().map(|spec| spec.local_rank).collect();
        let origin = self.origin(template);
        match self.while_starting(Group::start_from(origin, specs, filters, consoles)).await {
            Some(Ok(group)) => {
                let pids = self.by_local_rank(group.pids());
                let started = error_files.into_iter().filter(|(rank, _)| pids.contains_key(rank)).collect();
                self.started(group.into(), started);
                pids
            }
            Some(Err(error)) => {
                let failed = self.slots.holder(error.local_rank);
                self.change_slots(|all, _| slots.into_iter().for_each(|slot| all.free(slot)));
                let local_rank = if let Holder::Worker(local_rank) = failed { local_rank } else { error.local_rank };
                self.not_started(local_rank, &error.to_string());
                BTreeMap::new()
            }
            None => {
                self.change_slots(|all, _| slots.into_iter().for_each(|slot| all.free(slot)));
                BTreeMap::new()
            }
        }
    }

    /// Where workers come from.
    pub(super) fn origin(&self, template: Option<&Template>) -> Origin {
        Origin {
            forker: template.map(Template::forker),
            deadline: self.deadline.clone(),
            deaths: self.training.deaths(),
            leftovers: self.leftovers,
        }
    }

    /// Have the front end start something.
    pub(super) fn ask_for_start(&mut self, start: Start, placement: Box<Placement>) {
        self.start = start;
        self.starts += 1;
        self.steps.push_back(Step::Start(placement));
    }

    /// These run, beside those that run already.
    pub(super) fn add(&mut self, worker_group: WorkerGroup) {
        WorkerGroup::add(&mut self.worker_group, worker_group);
    }

    /// An answer to [`Step::Start`]: these workers run, beside those that have survived.
    pub fn started(&mut self, worker_group: WorkerGroup, error_files: ErrorFiles) {
        if self.start == Start::Ahead {
            return self.started_ahead(worker_group, error_files);
        }
        if self.worker_group.is_none() {
            self.error_files.clear();
        }
        self.error_files.extend(error_files);
        self.add(worker_group);
        self.resumed();
    }

    /// The round's workers are complete.
    fn resumed(&mut self) {
        self.start_answered();
        self.exits.clear();
        self.stderr_ends.clear();
        self.reported.clear();
        self.uninterruptible.forget();
        self.kills_before = OomKills::now();
        self.expect_workers();
        self.record_start();
        let phase = self.stopwatch.started(Instant::now());
        self.log_start(phase);
        self.training.started();
        if let Some(session) = &self.session {
            session.report_phases(self.machine.round(), phase);
        }
        self.name_logs();
        self.on_first_step(); // a worker may have been faster than its start
        self.machine.on_started();
        self.judge_own();
    }

    /// Give the folders of the workers' logs names by global rank.
    fn name_logs(&self) {
        let Some((Placement { round, workers: Some(ranks), .. }, _)) = &self.assignment else { return };
        let files: ErrorFiles =
            self.error_files.iter().map(|(local_rank, file)| (ranks.first_rank + local_rank, file.clone())).collect();
        if files.is_empty() {
            return;
        }
        let attempt = round.0.saturating_sub(1);
        // File systems may hang. Without a thread there are no names, which nothing needs.
        let _ = threads::spawn("log-folders".to_owned(), move || link_ranks(&files, attempt));
    }

    /// An answer to [`Step::Start`]: the worker `local_rank` cannot be started, and none runs.
    pub fn not_started(&mut self, local_rank: u32, reason: &str) {
        if self.starts_standby() {
            self.start_answered();
            return self.machine.on_standby_not_started(reason);
        }
        if self.start != Start::Ahead {
            self.exits.clear(); // they are of the round before
            if self.worker_group.is_none() {
                self.error_files.clear();
            }
        }
        self.start_answered();
        let failure = self.failure(local_rank, 0, ("a failure to start".to_owned(), 1), reason.to_owned());
        self.machine.on_worker_failed(failure, false, Instant::now());
    }
}
