//! What a node says on its own: how its workers ended, that the job is over, and that it leaves. Part of [`super`].

use std::time::{Duration, Instant};

use super::backend::Counterpart;
use super::join::{Link, Report};
use super::{JoinError, LEFT, NodeCommand, NodeMachine};
use crate::events::record::Phase;
use crate::rendezvous::messages::bounds::{tidy_failure, tidy_verdict};
use crate::rendezvous::messages::message::{Failure, NodeMessage, Round, Stepped, Verdict};
use crate::wire::text::tidy;

/// How long a node whose workers have ended waits for a cell that is gone. A process that serves it may be started again.
const ENDS_ALONE_AFTER: Duration = Duration::from_secs(10);

impl NodeMachine {
    /// Report that a worker of `round` has failed. The report is repeated on each new connection until it is answered: the world
    /// must re-form, the job has ended, or the round was over already.
    pub fn report_failure(&mut self, round: Round, failure: Failure) {
        let failure = Box::new(tidy_failure(&failure, String::new()));
        self.tell(Report::Failed { round, failure });
    }

    /// Tell how long the parts of the recovery have taken that ended with `round`'s workers, if a coordinator is connected. It
    /// is not told again: nothing depends on it.
    pub fn took(&mut self, round: Round, phase: Phase, now: Instant) {
        self.started = Some((round, now));
        self.journal.tick(now);
        self.tell_took(round, phase);
    }

    /// The workers of `round` are being stopped, or leave their world.
    pub fn stopping(&mut self, round: Round) {
        self.stopping = Some(round);
    }

    /// As many workers of `round` as its world has are connected to their store, which this node serves.
    pub fn imported(&mut self, round: Round, now: Instant) {
        let Some((_, since)) = self.started.filter(|(started, _)| *started == round) else { return };
        self.journal.tick(now);
        let import = now.saturating_duration_since(since);
        self.view.imported = Some((round, import));
        let import_us = u64::try_from(import.as_micros()).ok();
        self.tell_took(round, Phase { import_us, ..Phase::default() });
    }

    fn tell_took(&mut self, round: Round, phase: Phase) {
        self.record_phase(phase);
        if self.has_coordinator() {
            self.commands.push(NodeCommand::Send(NodeMessage::Took { round, phase }));
        }
    }

    /// Tell this node's first step of `round`, as [`Self::took`] tells its phases.
    pub fn stepped(&mut self, round: Round, first: Stepped) {
        if self.has_coordinator() {
            self.commands.push(NodeCommand::Send(NodeMessage::Stepped { round, first }));
        }
    }

    /// Tell how far this node's workers of `round` are, because the view's `steps_asked` has changed.
    pub fn step(&mut self, round: Round, step: Option<u64>, step_time_us: Option<u64>) {
        if self.has_coordinator() {
            self.commands.push(NodeCommand::Send(NodeMessage::Step { round, step, step_time_us }));
        }
    }

    /// Report that all workers of `round` have succeeded. The view's `all_done` is set once those of all live members have.
    pub fn report_done(&mut self, round: Round) {
        self.tell(Report::Done { round });
    }

    /// The backend could not be reached. `gone`: somebody has answered that nobody serves it, or has ended the connection. Silence proves
    /// nothing: the others may go on.
    pub(in crate::rendezvous) fn on_backend_failed(&mut self, gone: bool, now: Instant) {
        self.gone_since = gone.then(|| self.gone_since.unwrap_or(now));
    }

    /// When this node ends without an answer to its report: its workers have ended, and the cell is gone, in which alone the job's end
    /// could be read. A coordinator, and etcd, may come back with what they know. It ends before a fence, which would forget the failure
    /// that it has reported.
    pub(super) fn ends_alone_at(&self) -> Option<Instant> {
        let since = self.gone_since.filter(|_| self.counterpart == Counterpart::Cell && !self.left)?;
        let waits = self.report.is_some() || self.closing.is_some();
        let waits = waits && self.joining.is_none() && self.view.failed.is_none();
        waits.then(|| self.fence_at().into_iter().fold(since + ENDS_ALONE_AFTER, Instant::min))
    }

    /// End alone if that is due.
    pub(in crate::rendezvous) fn end_alone_if_due(&mut self, now: Instant) {
        let Some((since, at)) = self.gone_since.zip(self.ends_alone_at()) else { return };
        if at <= now {
            let (name, why) = (self.counterpart.name(), &self.last_error);
            let text = format!(
                "{name} has been gone for {:.1?}, perhaps with the node that held it, and how the other nodes ended cannot \
                 be known: {why}",
                now.saturating_duration_since(since)
            );
            self.fail(JoinError::Connection(text));
        }
    }

    fn tell(&mut self, report: Report) {
        let over = self.left || self.view.closed.is_some() || self.view.failed.is_some();
        let current = self.hello.placed.is_some_and(|placed| placed.active && placed.round == report.round());
        if over || !current {
            return;
        }
        if matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(report.message()));
        }
        self.report = Some(report);
    }

    /// End the job on all nodes. The failure of a node that has never had a place does not: it concerns nobody else.
    pub fn close(&mut self, verdict: Verdict) {
        let concerns_nobody = verdict.is_failure() && self.hello.placed.is_none();
        if self.left || self.view.closed.is_some() || concerns_nobody {
            return;
        }
        let verdict = self.closing.get_or_insert_with(|| tidy_verdict(&verdict)).clone();
        if self.counterpart.vouches() {
            // The verdict is sent until a coordinator has it. Over a cell, the write may fail for good.
            self.view.closed = Some(verdict.clone());
        }
        if matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(NodeMessage::Close(verdict)));
        }
    }

    /// Leave the rendezvous. Nothing is sent or received afterwards. `signal` is the signal that ended the agent, if one did.
    pub fn leave(&mut self, reason: String, signal: Option<i32>) {
        if !self.left && matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(NodeMessage::Leave { reason: tidy(&reason), signal }));
        }
        self.left = true;
        self.resolve(Err(JoinError::Connection(LEFT.to_owned())));
    }
}
