//! When a run has to be looked at again although nothing happens: one table, a row for each cause.

use std::time::Instant;

/// Why a run has to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deadline {
    /// A node is lost unless it is heard of.
    LoseNode,
    /// The next round closes, if nothing changes.
    CloseRound,
    /// Members of a world that this coordinator did not form are no longer given time to report. Until then those that have
    /// reported run on undisturbed.
    EndRecall,
}

/// The instants, one for each [`Deadline`]. `None`: nothing of that kind is waited for.
#[derive(Clone, Debug, Default)]
pub(super) struct Deadlines([Option<Instant>; 3]);

impl Deadlines {
    pub fn get(&self, which: Deadline) -> Option<Instant> {
        self.0[which as usize]
    }

    pub fn set(&mut self, which: Deadline, at: Option<Instant>) {
        self.0[which as usize] = at;
    }

    /// Make sure that a deadline is not after `at`.
    pub fn no_later(&mut self, which: Deadline, at: Option<Instant>) {
        self.set(which, [self.get(which), at].into_iter().flatten().min());
    }

    /// The earliest of all.
    pub fn next(&self) -> Option<Instant> {
        self.0.iter().copied().flatten().min()
    }
}
