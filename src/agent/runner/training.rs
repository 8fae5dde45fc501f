//! The steps of training that workers report. Part of [`super`].

use std::future::pending;

use super::Runner;
use crate::agent::policy::AgentOptions;
use crate::clock::monotonic_ns;
use crate::rendezvous::messages::message::{Progress, Round, StepReport};
use crate::rendezvous::node::session::Session;
use crate::steps::STEPS;
use crate::steps::board::Board;
use crate::steps::slot::Reached;

/// What this node's workers report, and what of it was sent to the coordinator.
#[derive(Debug)]
pub(super) struct Training {
    /// `None`: there is no coordinator to report to, or there is no memory for it.
    board: Option<Board>,
    round: Round,
    /// When all workers of the round were started.
    started_ns: Option<u64>,
    /// The round's first step was reported.
    reported: bool,
    /// How far the workers had come before the round.
    before: Option<Reached>,
    /// How often somebody wanted to know how far they are, when that was answered last.
    answered: u64,
}

impl Training {
    pub(super) fn new(options: &AgentOptions, has_session: bool) -> Self {
        let open = || {
            Board::open(options.workers.local_world_size).inspect_err(|error| {
                let run_id = &options.workers.run_id;
                tracing::warn!(
                    "[{run_id}] steps of workers are not measured: the shared memory for them cannot be made: {error}"
                );
            })
        };
        let board = has_session.then(open).and_then(Result::ok);
        Self { board, round: Round(0), started_ns: None, reported: false, before: None, answered: 0 }
    }

    /// A place is there. The workers of the round before have ended, or have left their world.
    pub(super) fn begin(&mut self, round: Round) {
        let Some(board) = &mut self.board else { return };
        // A round without a step leaves what is known of an earlier one.
        self.before = board.reached().or(self.before);
        (self.round, self.started_ns, self.reported) = (round, None, false);
        if let Err(error) = board.begin(round.0) {
            tracing::warn!("the steps of workers are not measured any more: {error}");
            self.board = None;
        }
    }

    /// All workers of the round run.
    pub(super) fn started(&mut self) {
        self.started_ns.get_or_insert_with(monotonic_ns);
    }

    /// Wait until a worker says that it has made its first step of the round, unless the coordinator knows of one. May be dropped.
    pub(super) async fn rung(&self) {
        match self.board.as_ref().filter(|_| !self.reported) {
            Some(board) => board.rung().await,
            None => pending().await,
        }
    }

    /// Wait until somebody wants to know how far the workers are. Returns how often that was so. May be dropped.
    pub(super) async fn asked(&self, session: Option<&Session>) -> u64 {
        match session.filter(|_| self.board.is_some()) {
            Some(session) => session.view_when(|view| view.steps_asked != self.answered).await.steps_asked,
            None => pending().await,
        }
    }

    /// The first step of the round, once: when there has been one, and all workers were started.
    fn take_first(&mut self) -> Option<Progress> {
        let started_ns = self.started_ns.filter(|_| !self.reported)?;
        let first = self.board.as_ref()?.first()?;
        self.reported = true;
        let before = self.before.take();
        Some(Progress {
            after_us: first.at_ns.saturating_sub(started_ns) / 1000,
            step: first.step,
            before: before.and_then(|before| before.step),
            step_time_us: before.and_then(|before| before.step_time_us),
        })
    }
}

impl Runner {
    /// The variable by which a worker finds where to write its steps.
    pub fn steps_variable(&self, local_rank: u32) -> Option<(&'static str, String)> {
        Some((STEPS, self.training.board.as_ref()?.variable(local_rank)))
    }

    /// Somebody wants to know how far the workers are.
    pub(super) fn on_step_asked(&mut self, asked: u64) {
        self.training.answered = asked;
        let board = self.training.board.as_ref();
        let reached = board.and_then(Board::reached);
        if let Some(session) = &self.session {
            let report = StepReport {
                step: reached.and_then(|reached| reached.step),
                step_time_us: reached.and_then(|reached| reached.step_time_us),
                restarts_for_nccl: board.is_some_and(Board::restarts_for_nccl),
            };
            session.report_progress(self.training.round, report);
        }
    }

    /// A worker may have made the first step of the round on this node: report it to the coordinator.
    pub(super) fn on_first_step(&mut self) {
        let Some(first) = self.training.take_first() else { return };
        if let Some(session) = &self.session {
            session.report_first_step(self.training.round, first);
        }
        self.log_recovery(None); // workers that make steps have imported all that they need
    }
}
