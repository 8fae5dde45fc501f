//! The steps of training that workers report, and when they make none. Part of [`super`].

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Runner;
use crate::agent::policy::AgentOptions;
use crate::clock::{instant_of, monotonic_ns};
use crate::hang::judge::Mode;
use crate::hang::judge::pace::{self, Change, Pace, Still};
use crate::rendezvous::messages::hang::{MovedReport, PaceReport, StillReport};
use crate::rendezvous::messages::message::{Progress, Round, StepReport};
use crate::rendezvous::node::session::Session;
use crate::steps::STEPS;
use crate::steps::board::Board;
use crate::steps::deaths::Deaths;
use crate::steps::slot::{Reached, Stepped};
use crate::wire::time::micros;
use crate::workers::ProgressLog;

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
    /// How fast the round's workers are, once they were all started. `None` as well if nobody looks for hangs.
    pace: Option<Pace>,
    /// They make no step, and the coordinator knows it.
    still: Option<Still>,
    judges: bool,
    /// The lines of workers that show progress, if there are such lines.
    progress_log: Option<Arc<ProgressLog>>,
    /// When the last line was printed that was taken for progress, or the last one before the round.
    line_ns: u64,
    /// Such a line was printed in this round.
    has_line: bool,
}

impl Training {
    pub(super) fn new(options: &AgentOptions, slots: u32, has_session: bool) -> Self {
        let open = || {
            Board::open(slots).inspect_err(|error| {
                let run_id = &options.workers.run_id;
                tracing::warn!(
                    "[{run_id}] steps of workers are not measured: the shared memory for them cannot be made: {error}"
                );
            })
        };
        let board = has_session.then(open).and_then(Result::ok);
        Self {
            board,
            round: Round(0),
            started_ns: None,
            reported: false,
            before: None,
            answered: 0,
            pace: None,
            still: None,
            judges: options.hang.mode != Mode::Off,
            progress_log: options.progress_log.clone().map(|pattern| Arc::new(ProgressLog::new(pattern))),
            line_ns: 0,
            has_line: false,
        }
    }

    /// Do not read the memory of these slots: no worker holds them.
    pub(super) fn set_idle(&mut self, idle: BTreeSet<u32>) {
        if let Some(board) = &mut self.board {
            board.set_idle(idle);
        }
    }

    /// By what the deaths of workers are known early.
    pub(super) fn deaths(&self) -> Option<Arc<Deaths>> {
        self.board.as_ref().map(Board::deaths)
    }

    /// A place is there. The workers of the round before have ended, or have left their world.
    pub(super) fn begin(&mut self, round: Round) {
        (self.line_ns, self.has_line) = (self.last_line_ns(), false);
        (self.round, self.started_ns, self.reported) = (round, None, false);
        (self.pace, self.still) = (None, None);
        let Some(board) = &mut self.board else { return };
        // A round without a step leaves what is known of an earlier one.
        self.before = board.reached().or(self.before);
        if let Err(error) = board.begin(round.0) {
            tracing::warn!("the steps of workers are not measured any more: {error}");
            self.board = None;
        }
    }

    /// All workers of the round run.
    pub(super) fn started(&mut self) {
        self.started_ns.get_or_insert_with(monotonic_ns);
        if self.pace.is_none() && self.judges && self.board.is_some() {
            self.pace = Some(Pace::new(Instant::now()));
        }
    }

    /// How long the workers of the round have run. Zero if not all of them were started.
    pub(super) fn lived(&self) -> Duration {
        self.started_ns.map_or(Duration::ZERO, |since| Duration::from_nanos(monotonic_ns().saturating_sub(since)))
    }

    /// The last step in this round of the worker that is furthest, if it says where it is.
    pub(super) fn step(&self) -> Option<u64> {
        self.board.as_ref()?.reached()?.step
    }

    /// Where the output of workers is looked at for progress.
    pub(super) fn progress_log(&self) -> Option<Arc<ProgressLog>> {
        self.progress_log.clone()
    }

    fn last_line_ns(&self) -> u64 {
        self.progress_log.as_ref().map_or(0, |log| log.last_ns())
    }

    /// When to call [`Runner::look_at_steps`].
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.pace.as_ref().map(Pace::next_look)
    }

    /// Read how far the workers are. Returns what the coordinator is to know of it.
    fn look(&mut self, now: Instant) -> Option<PaceReport> {
        let line_ns = self.last_line_ns();
        let (pace, board) = (self.pace.as_mut()?, self.board.as_ref()?);
        let stepped = board.stepped();
        // By one and the same origin: an old step that seems to be a microsecond younger at each look would be a new one.
        let at = |ns: u64| instant_of(ns).min(now);
        let reached = stepped.map(|Stepped { steps, first_ns, last_ns, .. }| pace::Reached {
            steps,
            first_at: at(first_ns),
            at: at(last_ns),
        });
        let is_new = line_ns > std::mem::replace(&mut self.line_ns, line_ns);
        self.has_line |= is_new;
        let has_stepped = stepped.is_some() || self.has_line;
        let moved = if is_new { pace.on_progress(at(line_ns)) } else { None };
        // Workers that have moved are looked at again at once if that is long ago.
        match moved.or_else(|| pace.on_look(reached, now)) {
            Some(Change::Still(still)) => self.still = Some(still),
            Some(Change::Moved(at, _)) => {
                self.still = None;
                let ago_us = micros(now.saturating_duration_since(at));
                return Some(PaceReport::Moved(MovedReport { ago_us, has_stepped }));
            }
            None => {}
        }
        // Said again at each look: the coordinator may be another one by now.
        let still = self.still?;
        Some(PaceReport::Still(StillReport {
            still_us: micros(now.saturating_duration_since(still.since)),
            step: stepped.and_then(|stepped| stepped.step),
            has_stepped,
            step_time_us: still.step_time.map(micros),
            is_counted: stepped.is_some_and(|stepped| stepped.of_optimizer),
            section: board.section(),
        }))
    }

    /// Wait until a worker says that it has made its first step of the round, unless the coordinator knows of one; or until a line
    /// shows progress of workers that stand still. May be dropped.
    pub(super) async fn rung(&self) {
        let stepped = async {
            match self.board.as_ref().filter(|_| !self.reported) {
                Some(board) => board.rung().await,
                None => pending().await,
            }
        };
        let printed = async {
            match self.progress_log.as_ref().filter(|_| self.still.is_some()) {
                Some(log) => log.matched_after(self.line_ns).await,
                None => pending().await,
            }
        };
        tokio::select! { () = stepped => {}, () = printed => {} }
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
        let since_start = |at_ns: u64| at_ns.saturating_sub(started_ns) / 1000;
        Some(Progress {
            after_us: since_start(first.at_ns),
            formed_us: self.board.as_ref()?.formed().map(|at_ns| at_ns.map(since_start)),
            step: first.step,
            before: before.and_then(|before| before.step),
            step_time_us: before.and_then(|before| before.step_time_us),
        })
    }
}

impl Runner {
    /// The variable by which the worker in this slot finds where to write its steps.
    pub fn steps_variable(&self, slot: u32) -> Option<(&'static str, String)> {
        Some((STEPS, self.training.board.as_ref()?.variable(slot)))
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

    /// Look whether the workers make steps, if it is time, and tell the coordinator if they do not.
    pub(super) fn look_at_steps(&mut self, now: Instant) {
        if self.training.next_look().is_some_and(|at| at <= now) {
            self.report_pace(now);
        }
    }

    /// Tell the coordinator if the workers make no step, or make steps again.
    fn report_pace(&mut self, now: Instant) {
        let Some(pace) = self.training.look(now) else { return };
        if matches!(pace, PaceReport::Moved(_)) {
            self.looking.forget();
        }
        if let Some(own) = &mut self.own_hangs {
            own.on_pace(self.training.round, pace, now);
            self.judge_own();
        } else if let Some(session) = &self.session {
            session.report_pace(self.training.round, pace);
        }
    }

    /// What [`Training::rung`] waits for may have happened.
    pub(super) fn on_rung(&mut self) {
        self.on_first_step();
        if self.training.last_line_ns() > self.training.line_ns {
            self.report_pace(Instant::now());
        }
    }

    /// A worker may have made the first step of the round on this node: report it to the coordinator.
    pub(super) fn on_first_step(&mut self) {
        let Some(first) = self.training.take_first() else { return };
        if let Some(session) = &self.session {
            session.report_first_step(self.training.round, first);
        }
        self.report_pace(Instant::now());
        self.log_recovery(None); // workers that make steps have imported all that they need
    }
}
