//! How far the training is, while somebody watches: rank 0's node is asked, at most twice a second. No decision depends on it.

use std::time::{Duration, Instant};

use super::run::Run;
use crate::events::record::LONGEST_US;
use crate::rendezvous::protocol::capability::STEPS;
use crate::rendezvous::protocol::message::{CoordinatorMessage, LARGEST_STEP, NodeId, Round};

/// How often a node is asked at most.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// What is known of the steps of the current round.
#[derive(Clone, Copy, Default)]
pub(super) struct Watch {
    asked_at: Option<Instant>,
    told_at: Option<Instant>,
    /// Number of the last step.
    pub step: Option<u64>,
    /// Mean time of a step, in microseconds.
    pub step_time_us: Option<u64>,
}

impl Run {
    /// Somebody wants to know how far the training is. All workers make the same steps, so one node is asked.
    pub(super) fn on_watched(&mut self, now: Instant) {
        let asked = self.trace.watch.asked_at;
        if asked.is_some_and(|at| now.saturating_duration_since(at) < ASK_EVERY) {
            return;
        }
        let round = self.round();
        let mut members = self.roster.of(self.roster.active()).map(|(_, node)| node);
        let rank_0 = members.find(|node| node.placed == Some((round, 0)) && node.capabilities.has(STEPS));
        let session = rank_0.and_then(|node| node.session);
        drop(members);
        if let Some(session) = session {
            self.trace.watch.asked_at = Some(now);
            self.send(session, CoordinatorMessage::TellStep { round });
        }
    }

    /// A node tells how far its workers are.
    pub(super) fn on_step(&mut self, id: NodeId, round: Round, step: Option<u64>, us: Option<u64>, now: Instant) {
        if self.roster.get(id).is_some_and(|node| self.is_current(node, round)) {
            let watch = &mut self.trace.watch;
            (watch.told_at, watch.step) = (Some(now), step.map(|step| step.min(LARGEST_STEP)));
            watch.step_time_us = us.map(|us| us.min(LONGEST_US));
        }
    }

    /// Whether a node was asked how far the training is, and has not answered yet.
    pub fn awaits_step(&self) -> bool {
        self.trace.watch.asked_at > self.trace.watch.told_at
    }
}
