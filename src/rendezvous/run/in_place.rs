//! A change in place: the members' workers stop at one check, and live on into the next round.
//!
//! This part keeps the state of a change. [`super::changing`] has its steps, [`super::resume`] what follows for the workers of the next
//! world.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::{NodeId, Resume};

/// Time within which all members must have said how far their workers are.
pub(super) const COUNT_WITHIN: Duration = Duration::from_secs(5);
/// Time within which all members must be back once the first one is. They stop at the same check.
pub(super) const RETURN_WITHIN: Duration = Duration::from_secs(30);

/// The state of changes in place, in the current round.
#[derive(Clone, Debug, Default)]
pub(super) struct InPlace {
    change: Option<Change>,
    /// How far the workers of each member are. A member may say it before a change begins here, if it has heard of the change from an
    /// earlier coordinator.
    counts: BTreeMap<NodeId, u64>,
    /// Members that ask to leave, and why.
    leaving: BTreeMap<NodeId, String>,
    /// The check at which the workers of each waiting node have stopped. Those of other nodes have gone back to their commits.
    stopped_at: BTreeMap<NodeId, u64>,
    /// How the workers of the current world have begun.
    resume: Option<Resume>,
    /// The current workers let the library make their process groups.
    groupless: bool,
}

/// A change that members have been told of.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub flags: u8,
    pub reason: String,
    /// Workers may have been told a check by an earlier coordinator, so that the change cannot be called off.
    pub firm: bool,
    pub phase: Phase,
}

/// How far a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Members say how far their workers are, until then at most.
    Counting { until: Instant },
    /// Members have been told the check. `back_by`: when all must be back, once one is.
    Raising { check: u64, back_by: Option<Instant> },
}

impl InPlace {
    /// The workers of the current world let the library make their process groups.
    pub fn set_groupless(&mut self) {
        self.groupless = true;
    }

    /// Whether they do, as far as is known.
    pub fn is_groupless(&self) -> bool {
        self.groupless
    }

    /// The change, if there is one.
    pub fn change(&self) -> Option<&Change> {
        self.change.as_ref()
    }

    /// Whether members have been told of a change that is not over.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// The check at which the members stop, once they have been told.
    pub fn check(&self) -> Option<u64> {
        match self.change.as_ref()?.phase {
            Phase::Raising { check, .. } => Some(check),
            Phase::Counting { .. } => None,
        }
    }

    /// Begin a change.
    pub fn begin(&mut self, change: Change) {
        self.change = Some(change);
    }

    /// Record how far a member's workers are.
    pub fn count(&mut self, id: NodeId, count: u64) {
        self.counts.insert(id, count);
    }

    /// Whether a change has begun that is not known here: a member has said how far its workers are, or they have stopped at its check.
    pub fn has_begun_elsewhere(&self) -> bool {
        self.change.is_none() && !(self.counts.is_empty() && self.stopped_at.is_empty())
    }

    /// The members that have not said how far their workers are.
    pub fn uncounted(&self, members: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        members.iter().filter(|id| !self.counts.contains_key(id)).copied().collect()
    }

    /// Whether all these members have said how far their workers are.
    pub fn has_counts_of(&self, members: &BTreeSet<NodeId>) -> bool {
        // Most calls end here, so that a count costs the same in a large job as in a small one.
        self.counts.len() >= members.len() && members.iter().all(|id| self.counts.contains_key(id))
    }

    /// Choose the check: the first one that no worker has passed. It is the one at which workers have stopped already, if any have.
    pub fn raise(&mut self) -> Option<u64> {
        let next = self.counts.values().max().map_or(1, |count| count.saturating_add(1));
        let check = self.stopped_at.values().copied().max().unwrap_or_default().max(next);
        self.change.as_mut()?.phase = Phase::Raising { check, back_by: None };
        Some(check)
    }

    /// End the change: its reason is gone, and the members go on.
    pub fn call_off(&mut self) {
        self.change = None;
        self.counts.clear();
    }

    /// End the change: the members cannot stop together any more.
    pub fn break_off(&mut self) {
        let (stopped_at, resume) = (std::mem::take(&mut self.stopped_at), self.resume.take());
        *self = Self { stopped_at, resume, groupless: self.groupless, ..Self::default() };
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
        if let Some(Change { phase: Phase::Raising { back_by, .. }, .. }) = &mut self.change {
            back_by.get_or_insert(now + RETURN_WITHIN);
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
    pub fn announce(&mut self, id: NodeId, reason: String) {
        self.leaving.insert(id, reason);
    }

    /// The members that ask to leave, and why.
    pub fn leaving(&self) -> &BTreeMap<NodeId, String> {
        &self.leaving
    }

    /// A node neither runs nor waits any more.
    pub fn forget(&mut self, id: NodeId) {
        self.counts.remove(&id);
        self.leaving.remove(&id);
        self.stopped_at.remove(&id);
    }

    /// Begin the time limits anew: this process was stalled. Returns the next one.
    pub fn extend(&mut self, now: Instant) -> Option<Instant> {
        match &mut self.change.as_mut()?.phase {
            Phase::Counting { until } => {
                *until = now + COUNT_WITHIN;
                Some(*until)
            }
            Phase::Raising { back_by, .. } => {
                *back_by = back_by.map(|_| now + RETURN_WITHIN);
                *back_by
            }
        }
    }

    /// A round begins.
    pub fn begin_round(&mut self, resume: Option<Resume>) {
        *self = Self { resume, ..Self::default() };
    }

    /// How the workers of the current world have begun. `None` if this coordinator did not form it.
    pub fn resume(&self) -> Option<&Resume> {
        self.resume.as_ref()
    }
}
