//! What a node reports on its own: how its workers of a round ended, and that the job is over. Part of [`super`].

use std::time::{Duration, Instant};

use crate::rendezvous::messages::bounds::tidy_verdict;
use crate::rendezvous::messages::message::{Failure, NodeMessage, Round, Verdict};

/// How long a node whose workers have ended waits for etcd, or for a backend of your own, that does not answer. It may be started
/// again.
const ENDS_ALONE_AFTER: Duration = Duration::from_secs(10);

/// How the workers of a round ended on a node. It is reported again on each new connection until it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RoundResult {
    Failed { round: Round, failure: Box<Failure> },
    Done { round: Round },
}

impl RoundResult {
    pub fn round(&self) -> Round {
        match self {
            Self::Failed { round, .. } | Self::Done { round } => *round,
        }
    }

    pub fn message(&self) -> NodeMessage {
        match self.clone() {
            Self::Failed { round, failure } => NodeMessage::Failed { round, failure },
            Self::Done { round } => NodeMessage::Done { round },
        }
    }
}

/// What this node reports of its workers.
#[derive(Clone, Debug, Default)]
pub(super) struct Reports {
    unanswered: Option<RoundResult>,
    /// The verdict with which this node ends the job, until the rendezvous is closed.
    closing: Option<Verdict>,
    /// The round whose workers were started last, and when.
    started: Option<(Round, Instant)>,
    /// The round whose workers have to end.
    stopping: Option<Round>,
}

impl Reports {
    /// The result that has no answer yet.
    pub fn unanswered(&self) -> Option<&RoundResult> {
        self.unanswered.as_ref()
    }

    /// Whether the workers have succeeded, and those of other nodes may still run.
    pub fn are_done(&self) -> bool {
        matches!(self.unanswered, Some(RoundResult::Done { .. }))
    }

    /// The verdict with which this node ends the job.
    pub fn closing(&self) -> Option<&Verdict> {
        self.closing.as_ref()
    }

    /// Whether this node waits for an answer to a report or to its verdict.
    pub fn wait(&self) -> bool {
        self.unanswered.is_some() || self.closing.is_some()
    }

    /// Report this until it is answered.
    pub fn keep(&mut self, result: RoundResult) {
        self.unanswered = Some(result);
    }

    /// The world must re-form, which answers a failure.
    pub fn on_broken(&mut self) {
        self.unanswered.take_if(|result| matches!(result, RoundResult::Failed { .. }));
    }

    /// Nobody needs the result any more.
    pub fn forget(&mut self) {
        self.unanswered = None;
    }

    /// The rendezvous is closed.
    pub fn on_closed(&mut self) {
        (self.unanswered, self.closing) = (None, None);
    }

    /// End the job with this verdict, or with the first one. Returns it.
    pub fn close(&mut self, verdict: &Verdict) -> Verdict {
        self.closing.get_or_insert_with(|| tidy_verdict(verdict)).clone()
    }

    /// The workers of `round` were started.
    pub fn on_started(&mut self, round: Round, now: Instant) {
        self.started = Some((round, now));
    }

    /// The workers of `round` are connected to their store. Returns how long after their start.
    pub fn import_time(&self, round: Round, now: Instant) -> Option<Duration> {
        let (_, since) = self.started.filter(|(started, _)| *started == round)?;
        Some(now.saturating_duration_since(since))
    }

    /// The workers of `round` are being stopped, or leave their world.
    pub fn on_stopping(&mut self, round: Round) {
        self.stopping = Some(round);
    }

    /// Whether the workers of `round` are being stopped.
    pub fn stops(&self, round: Round) -> bool {
        self.stopping == Some(round)
    }
}

/// When a node ends without an answer to its report: its workers have ended, and the cell is gone since then, in which alone the job's
/// end could be read. A coordinator, and etcd, may come back with what they know. It ends before a fence, which would forget the failure
/// that it has reported.
pub(super) fn ends_alone_at(gone_since: Instant, fence_at: Option<Instant>) -> Instant {
    fence_at.into_iter().fold(gone_since + ENDS_ALONE_AFTER, Instant::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> RoundResult {
        let failure = Failure::example("");
        RoundResult::Failed { round: Round(2), failure: Box::new(failure) }
    }

    #[test]
    fn a_result_waits_for_its_answer() {
        let done = RoundResult::Done { round: Round(2) };
        let answers = [
            ("the world must re-form", Reports::on_broken as fn(&mut Reports), [false, true]),
            ("the rendezvous is closed", Reports::on_closed, [false, false]),
            ("a join", Reports::forget, [false, false]),
        ];
        for (what, answer, waits) in answers {
            let found = [failed(), done.clone()].map(|result| {
                let mut reports = Reports::default();
                reports.keep(result.clone());
                assert_eq!((reports.unanswered(), reports.are_done()), (Some(&result), result == done));
                answer(&mut reports);
                reports.wait()
            });
            assert_eq!(found, waits, "{what}");
        }
    }

    #[test]
    fn the_first_verdict_stays_until_the_rendezvous_is_closed() {
        let verdict = |by: &str| Verdict::Succeeded { by: by.into() };
        let mut reports = Reports::default();
        assert_eq!([reports.close(&verdict("a")), reports.close(&verdict("b"))], [verdict("a"), verdict("a")]);
        assert_eq!((reports.closing(), reports.wait()), (Some(&verdict("a")), true));
        reports.on_closed();
        assert!(!reports.wait());
    }

    #[test]
    fn imports_count_from_the_start_of_the_same_round() {
        let begin = Instant::now();
        let mut reports = Reports::default();
        assert_eq!(reports.import_time(Round(2), begin), None);
        reports.on_started(Round(2), begin);
        let later = begin + Duration::from_secs(4);
        assert_eq!([1, 2].map(|round| reports.import_time(Round(round), later)), [None, Some(Duration::from_secs(4))]);
        reports.on_stopping(Round(2));
        assert_eq!([1, 2].map(|round| reports.stops(Round(round))), [false, true]);
    }

    #[test]
    fn a_node_ends_alone_before_its_fence() {
        let gone = Instant::now();
        for (fence, after) in [(None, 10), (Some(15), 10), (Some(4), 4)] {
            let fence = fence.map(|seconds| gone + Duration::from_secs(seconds));
            assert_eq!(ends_alone_at(gone, fence), gone + Duration::from_secs(after));
        }
    }
}
