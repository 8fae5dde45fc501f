//! The deadlines of a run: one instant for each cause of an [`Event::Tick`](super::event::Event::Tick).

use std::time::Instant;

/// The cause of a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deadline {
    /// The first node is lost, unless it is heard from.
    LoseNode,
    /// The next round closes, if nothing changes.
    CloseRound,
    /// The time to report ends for members of a world that this coordinator did not form. Until then, members that have reported
    /// run on undisturbed.
    EndRecall,
    /// A change in place begins, or its time is over.
    Change,
}

/// The instants by [`Deadline`]. `None`: that deadline is not set.
#[derive(Clone, Debug, Default)]
pub(super) struct Deadlines([Option<Instant>; 4]);

impl Deadlines {
    pub fn get(&self, which: Deadline) -> Option<Instant> {
        self.0[which as usize]
    }

    pub fn set(&mut self, which: Deadline, at: Option<Instant>) {
        self.0[which as usize] = at;
    }

    /// Set a deadline to `at`, unless it is set to an earlier instant.
    pub fn no_later(&mut self, which: Deadline, at: Option<Instant>) {
        self.set(which, [self.get(which), at].into_iter().flatten().min());
    }

    /// The earliest of all.
    pub fn next(&self) -> Option<Instant> {
        self.0.iter().copied().flatten().min()
    }
}
