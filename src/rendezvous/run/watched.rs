//! How far the training is, while somebody watches. No decision depends on it.
//!
//! Rank 0's node is asked, at most twice a second: all workers make the same steps. Whoever asks again soon after is told of nodes that
//! are behind, too, so all members are asked then, at most once a second. A node is behind if it has not reached the step that the
//! farthest one had told before it was asked. That it made a step later than others while answers were under way does not count.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Run;
use crate::events::record::LONGEST_US;
use crate::rendezvous::messages::message::{CoordinatorMessage, LARGEST_STEP, NodeId, Round};

/// How often a node is asked at most.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// How often all members are asked at most.
const ASK_ALL_EVERY: Duration = Duration::from_secs(1);
/// Whoever asks again within this time watches, and does not look once.
const WATCHES: Duration = Duration::from_secs(3);

/// What is known of the steps of the current round.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    asked_at: Option<Instant>,
    told_at: Option<Instant>,
    asked_all_at: Option<Instant>,
    /// The step that the farthest member had reached when all were asked last.
    goal: u64,
    /// The farthest step that any member has told.
    farthest: u64,
    /// By how many steps members were behind the goal. Others are not named.
    behind: BTreeMap<NodeId, u64>,
    /// Number of the last step.
    pub step: Option<u64>,
    /// Mean time of a step, in microseconds.
    pub step_time_us: Option<u64>,
}

impl Run {
    /// Somebody wants to know how far the training is.
    pub(super) fn on_watched(&mut self, now: Instant) {
        let ago = |at: Option<Instant>| at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
        let since = ago(self.trace.watch.asked_at);
        if since < ASK_EVERY {
            return;
        }
        let all = since < WATCHES && ago(self.trace.watch.asked_all_at) >= ASK_ALL_EVERY;
        let round = self.round();
        let members = self.roster.of(self.roster.active()).map(|(_, node)| node);
        let tell = members.filter(|node| {
            let rank = node.placed.filter(|(placed, _)| *placed == round).map(|(_, rank)| rank);
            node.tells_steps && rank.is_some_and(|rank| all || rank == 0)
        });
        let sessions: Vec<_> = tell.map(|node| (node.placed, node.session)).collect();
        let watch = &mut self.trace.watch;
        if sessions.iter().any(|asked| matches!(asked, (Some((_, 0)), Some(_)))) {
            watch.asked_at = Some(now);
        }
        if all {
            (watch.asked_all_at, watch.goal) = (Some(now), watch.farthest);
        }
        for session in sessions.into_iter().filter_map(|(_, session)| session) {
            self.send(session, CoordinatorMessage::TellStep { round });
        }
    }

    /// A node tells how far its workers are.
    pub(super) fn on_step(&mut self, id: NodeId, round: Round, step: Option<u64>, us: Option<u64>, now: Instant) {
        let Some(node) = self.roster.get(id).filter(|node| self.is_current(node, round)) else { return };
        let is_first = node.placed == Some((round, 0));
        let step = step.map(|step| step.min(LARGEST_STEP));
        let watch = &mut self.trace.watch;
        if is_first {
            (watch.told_at, watch.step) = (Some(now), step);
            watch.step_time_us = us.map(|us| us.min(LONGEST_US));
        }
        // A node whose workers tell no numbers is not known to be behind.
        match watch.goal.saturating_sub(step.unwrap_or(LARGEST_STEP)) {
            0 => drop(watch.behind.remove(&id)),
            steps => drop(watch.behind.insert(id, steps)),
        }
        watch.farthest = watch.farthest.max(step.unwrap_or(0));
    }

    /// The members that are behind, and by how many steps: most first, at most so many.
    pub(super) fn behind(&self, limit: usize) -> Vec<(&str, u64)> {
        let members = self.trace.watch.behind.iter();
        let mut behind: Vec<_> =
            members.filter_map(|(id, steps)| Some((self.roster.get(*id)?.name.as_str(), *steps))).collect();
        behind.sort_by_key(|(_, steps)| std::cmp::Reverse(*steps));
        behind.truncate(limit);
        behind
    }

    /// Whether a node was asked how far the training is, and has not answered yet.
    pub fn awaits_step(&self) -> bool {
        self.trace.watch.asked_at > self.trace.watch.told_at
    }
}
