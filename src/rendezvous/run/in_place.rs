//! A change in place: the members' workers stop at one check, and live on into the next round.
//!
//! The members of a world can change in place if all of them attend: their workers are connected to their agents, and count their checks.
//! Then the members are not notified to stop when nodes wait to join. They run on until the newcomers' last call is over, or until one of
//! them asks to leave. What follows:
//!
//! 1. `Change` to all members. Their workers stop at their next check, and each member reports how many checks they have passed.
//! 2. `RaiseAt` to all members, with the first check that no worker has passed. Every worker stops there. The members join again, or leave.
//! 3. The round closes as soon as no member runs any more.
//!
//! Whatever interrupts the world meanwhile breaks the change off. The members learn it by a `Status`, and their workers go back to their
//! last commits. The same follows if not all members count within [`COUNT_WITHIN`], or come back within [`RETURN_WITHIN`] of the first.
//!
//! [`InPlace`] keeps the state of a change, and [`super::resize`] is the policy. [`super::resume`] has what follows for the workers of the
//! next world.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::{GATHER, NodeId, Resume, SAVE_WITHIN};

/// Time within which all members must have reported how far their workers are.
pub(super) const COUNT_WITHIN: Duration = Duration::from_secs(5);
/// Time within which all members must be back once the first one is. They stop at the same check.
pub(super) const RETURN_WITHIN: Duration = Duration::from_secs(30);

/// A member that asks to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaver {
    /// Why, in words.
    pub reason: String,
    /// Its machine is taken away later: until then further notices are waited for. `None`: it leaves now.
    pub not_before: Option<Instant>,
    /// Its machine is taken away, which is nobody's fault.
    pub taken_away: bool,
}

/// The state of changes in place, in the current round.
#[derive(Clone, Debug, Default)]
pub(super) struct InPlace {
    change: Option<PlannedChange>,
    /// How far the workers of each member are. A member may report it before a change begins here, if an earlier coordinator has
    /// notified it of the change.
    counts: BTreeMap<NodeId, u64>,
    /// Members that ask to leave.
    leaving: BTreeMap<NodeId, Leaver>,
    /// When a `CheckpointBy` was last sent to the members.
    checkpoint_pushed: Option<Instant>,
    /// The check at which the workers of each waiting node have stopped. Those of other nodes have gone back to their commits.
    stopped_at: BTreeMap<NodeId, u64>,
    /// How the workers of the current world have begun.
    resume: Option<Resume>,
    /// The global ranks of its workers that have lived on with the job's state, if any have and the others take it.
    survivors: BTreeSet<u32>,
    /// The current workers let the library make their process groups.
    without_group: bool,
    /// The current workers save at the check of a change.
    saves: bool,
    /// Members that leave and have saved. They stay until no other member needs their workers to save.
    saved: BTreeSet<NodeId>,
    /// When to look for the next step, if no event comes.
    due_at: Option<Instant>,
}

/// A change of which members were notified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedChange {
    pub flags: u8,
    pub reason: String,
    /// Workers may have got a check from an earlier coordinator, so that the change cannot be called off.
    pub firm: bool,
    pub phase: Phase,
}

/// How far a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Members report how far their workers are, until then at most.
    Counting { until: Instant },
    /// Members have got the check. `back_by`: when all must be back, once one is.
    Raising { check: u64, back_by: Option<Instant> },
}

impl InPlace {
    /// The workers of the current world let the library make their process groups.
    pub fn set_without_group(&mut self) {
        self.without_group = true;
    }

    /// The workers of the current world save at the check of a change.
    pub fn set_saves(&mut self) {
        self.saves = true;
    }

    /// A member that leaves has stopped its workers at the check.
    pub fn has_parked(&mut self, id: NodeId) {
        if self.saves {
            self.saved.insert(id);
        }
    }

    /// The members that leave and have saved. Taken once.
    pub fn take_saved(&mut self) -> BTreeSet<NodeId> {
        std::mem::take(&mut self.saved)
    }

    /// Time within which all members must be back once the first one is.
    pub fn return_within(&self) -> Duration {
        if self.saves { RETURN_WITHIN + SAVE_WITHIN } else { RETURN_WITHIN }
    }

    /// Whether they do, as far as is known.
    pub fn is_without_group(&self) -> bool {
        self.without_group
    }

    /// The change, if there is one.
    pub fn change(&self) -> Option<&PlannedChange> {
        self.change.as_ref()
    }

    /// Whether members were notified of a change that is not over.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// The check at which the members stop, once they have got it.
    pub fn check(&self) -> Option<u64> {
        match self.change.as_ref()?.phase {
            Phase::Raising { check, .. } => Some(check),
            Phase::Counting { .. } => None,
        }
    }

    /// Begin a change.
    pub fn begin(&mut self, change: PlannedChange) {
        self.change = Some(change);
    }

    /// A member reports how far its workers are. Returns the check at which all were to stop, if they have passed it.
    pub fn on_counted(&mut self, id: NodeId, count: u64) -> Option<u64> {
        match self.check() {
            Some(check) => Some(check).filter(|check| count >= *check),
            None => {
                self.counts.insert(id, count);
                None
            }
        }
    }

    /// Whether a change has begun that is not known here: a member has reported how far its workers are, or they have stopped at its check.
    pub fn has_begun_elsewhere(&self) -> bool {
        self.change.is_none() && !(self.counts.is_empty() && self.stopped_at.is_empty())
    }

    /// The members that have not reported how far their workers are.
    pub fn uncounted(&self, members: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        members.iter().filter(|id| !self.counts.contains_key(id)).copied().collect()
    }

    /// Whether all these members have reported how far their workers are.
    pub fn has_counts_of(&self, members: &BTreeSet<NodeId>) -> bool {
        // Most calls end here, so that a count costs the same in a large job as in a small one.
        self.counts.len() >= members.len() && members.iter().all(|id| self.counts.contains_key(id))
    }

    /// The check at which the members stop: the first one that no worker has passed. It is the one at which workers have stopped already,
    /// if any have.
    pub fn next_check(&self) -> u64 {
        let next = self.counts.values().max().map_or(1, |count| count.saturating_add(1));
        self.stopped_at.values().copied().max().unwrap_or_default().max(next)
    }

    /// The members stop at this check.
    pub fn raise(&mut self, check: u64) {
        if let Some(change) = &mut self.change {
            change.phase = Phase::Raising { check, back_by: None };
        }
    }

    /// When to look for the next step, if no event comes.
    pub fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// Wait for an event, until this instant at most. While members come back, it is the one by which all must be.
    pub fn wait(&mut self, until: Option<Instant>) {
        self.due_at = until;
        if let Some(PlannedChange { phase: Phase::Raising { back_by, .. }, .. }) = &mut self.change {
            *back_by = back_by.or(until);
        }
    }

    /// End the change: its reason is gone, and the members go on.
    pub fn call_off(&mut self) {
        self.change = None;
        self.counts.clear();
    }

    /// End the change: the members cannot stop together any more.
    pub fn break_off(&mut self) {
        let (stopped_at, resume) = (std::mem::take(&mut self.stopped_at), self.resume.take());
        let (survivors, saved) = (std::mem::take(&mut self.survivors), std::mem::take(&mut self.saved));
        let Self { without_group, saves, due_at, .. } = *self;
        // Members whose machines are taken away leave all the same.
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.retain(|_, leaver| leaver.taken_away);
        *self = Self { stopped_at, resume, survivors, without_group, saves, saved, due_at, leaving, ..Self::default() };
    }

    /// A node joins, whose workers have stopped at this check, if at any.
    pub fn stop_at(&mut self, id: NodeId, check: Option<u64>) {
        match check {
            Some(check) => self.stopped_at.insert(id, check),
            None => self.stopped_at.remove(&id),
        };
    }

    /// The workers of a member have stopped at the check, so those of the others do soon.
    pub fn someone_has_stopped(&mut self, now: Instant) {
        let back_by_then = now + self.return_within();
        if let Some(PlannedChange { phase: Phase::Raising { back_by, .. }, .. }) = &mut self.change {
            back_by.get_or_insert(back_by_then);
        }
    }

    /// Whether a node waits whose workers have stopped for the change.
    pub fn is_anyone_back(&self) -> bool {
        self.is_changing() && !self.stopped_at.is_empty()
    }

    /// The check at which the workers of a waiting node have stopped.
    pub fn stopped_at(&self, id: NodeId) -> Option<u64> {
        self.stopped_at.get(&id).copied()
    }

    /// A member asks to leave.
    pub fn announce(&mut self, id: NodeId, leaver: Leaver) {
        self.leaving.insert(id, leaver);
    }

    /// The members that ask to leave.
    pub fn leaving(&self) -> &BTreeMap<NodeId, Leaver> {
        &self.leaving
    }

    /// Whether a member leaves since its machine is taken away.
    pub fn is_taken_away(&self, id: NodeId) -> bool {
        self.leaving.get(&id).is_some_and(|leaver| leaver.taken_away)
    }

    /// When the world may change for those that leave: not before the first of them may, if all have a notice. `None`: nobody leaves.
    pub fn leaves_from(&self, now: Instant) -> Option<Instant> {
        self.leaving.values().map(|leaver| leaver.not_before.unwrap_or(now)).min()
    }

    /// Whether to send the members a `CheckpointBy` now: not within [`GATHER`] of the last one.
    pub fn pushes_checkpoint(&mut self, now: Instant) -> bool {
        let tells = self.checkpoint_pushed.is_none_or(|last| last + GATHER < now);
        if tells {
            self.checkpoint_pushed = Some(now);
        }
        tells
    }

    /// A node neither runs nor waits any more.
    pub fn forget(&mut self, id: NodeId) {
        self.counts.remove(&id);
        self.leaving.remove(&id);
        self.stopped_at.remove(&id);
    }

    /// Begin the time limits anew: this process was stalled.
    pub fn extend(&mut self, now: Instant) {
        let back_by_then = now + self.return_within();
        let limit = match self.change.as_mut().map(|change| &mut change.phase) {
            None => None,
            Some(Phase::Counting { until }) => {
                *until = now + COUNT_WITHIN;
                Some(*until)
            }
            Some(Phase::Raising { back_by, .. }) => {
                *back_by = back_by.map(|_| back_by_then);
                *back_by
            }
        };
        self.due_at = limit.or(self.due_at.map(|at| at.max(now)));
    }

    /// A round begins. `survivors`: the global ranks of the workers that live on in it with the job's state.
    pub fn begin_round(&mut self, resume: Option<Resume>, survivors: BTreeSet<u32>) {
        let survivors = if matches!(resume, Some(Resume::Continue { .. })) { survivors } else { BTreeSet::new() };
        *self = Self { resume, survivors, due_at: self.due_at, ..Self::default() };
    }

    /// Whether the worker of this global rank was new when the current world began, and takes the state of others that live on.
    pub fn is_new_worker(&self, global_rank: u32) -> bool {
        !self.survivors.is_empty() && !self.survivors.contains(&global_rank)
    }

    /// How the workers of the current world have begun. `None` if this coordinator did not form it.
    pub fn resume(&self) -> Option<&Resume> {
        self.resume.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_is_the_first_one_that_no_worker_has_passed() {
        for (counts, stopped, check) in [
            ([0, 0], None, 1),
            ([7, 9], None, 10),
            ([9, 7], Some(4), 10),
            ([3, 4], Some(12), 12),
            ([u64::MAX, 0], None, u64::MAX),
        ] {
            let mut part = InPlace::default();
            (1..).zip(counts).for_each(|(id, count)| assert_eq!(part.on_counted(NodeId(id), count), None));
            part.stop_at(NodeId(9), stopped);
            assert_eq!(part.next_check(), check, "{counts:?} {stopped:?}");
        }
    }

    #[test]
    fn a_node_that_is_gone_is_forgotten() {
        let mut part = InPlace::default();
        part.on_counted(NodeId(1), 4);
        part.announce(NodeId(1), Leaver { reason: "SIGTERM".to_owned(), not_before: None, taken_away: false });
        part.stop_at(NodeId(1), Some(5));
        assert!(part.has_begun_elsewhere());
        part.forget(NodeId(1));
        assert!(!part.has_begun_elsewhere() && part.leaving().is_empty());
    }
}
