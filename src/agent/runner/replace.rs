//! Workers that are started ahead of the round in which they get their places. Part of [`super`].

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{ErrorFiles, Runner, Start, Step};
use crate::agent::worker_group::WorkerGroup;
use crate::rendezvous::messages::message::Placement;
use crate::workers::WorkerExit;

/// Process ids, error files and exits of workers that were started ahead. The runner takes them over when the round begins. If the job ends
/// before that, the final report needs those of the workers that these replace.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Their process ids.
    pids: BTreeSet<u32>,
    error_files: ErrorFiles,
    exits: Vec<WorkerExit>,
}

impl Runner {
    /// Have missing workers started in the place that this node will probably get.
    pub(super) fn replace(&mut self, placement: Box<Placement>, missing: BTreeSet<u32>) {
        self.missing = missing;
        self.ask_for_start(Start::Ahead, placement);
    }

    /// These workers run, beside those that leave their world.
    pub(super) fn started_ahead(&mut self, worker_group: WorkerGroup, error_files: ErrorFiles) {
        self.start_answered();
        let pids = self.by_local_rank(worker_group.pids());
        let them: Vec<_> = pids.iter().map(|(rank, pid)| format!("local rank {rank} with pid {pid}")).collect();
        tracing::info!(
            target: "elastic_rs::agent",
            "{}{} is started again now, so that it is ready when the next round begins: {}",
            self.log_prefix(),
            self.entrypoint,
            them.join(", ")
        );
        self.ahead.pids.extend(pids.values());
        self.ahead.error_files.extend(error_files);
        self.add(worker_group);
        self.expect_workers();
        self.machine.on_started();
    }

    /// The process with this id is in the next round, and records its exceptions there.
    pub(super) fn note_ahead(&mut self, pid: u32, error_file: Option<(u32, PathBuf)>) {
        self.ahead.pids.insert(pid);
        self.ahead.error_files.extend(error_file);
    }

    /// A worker has ended.
    pub(super) fn note_exit(&mut self, exited: WorkerExit) {
        match self.ahead.pids.contains(&exited.pid) {
            true => self.ahead.exits.push(exited),
            false => self.exits.push(exited),
        }
    }

    /// The round of these workers begins.
    pub(super) fn take_over_ahead(&mut self) {
        let Ahead { error_files, exits, .. } = std::mem::take(&mut self.ahead);
        self.error_files.extend(error_files);
        self.exits.extend(exits);
    }

    /// The place for which workers are to be started, or this node's if none are.
    pub fn placement_to_start(&self) -> Option<&Placement> {
        let asked_for = self.steps.iter().find_map(|step| match step {
            Step::Start(placement) => Some(&**placement),
            _ => None,
        });
        asked_for.or(self.placement())
    }

    /// The number of restarts that workers get in their environment when they are started.
    pub fn restarts_for_workers(&self) -> u32 {
        match self.placement_to_start() {
            Some(placement) if self.start == Start::Ahead => placement.restart,
            _ => self.restarts(),
        }
    }
}
