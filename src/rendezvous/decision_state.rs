//! The part of a state by which later decisions are made.

use std::time::Instant;

/// A machine that also records and counts. Two states that differ in nothing else make the same decisions, and the simulator's explorer
/// hashes what they have in common.
pub trait DecisionState {
    /// This state, as if nothing had been recorded or counted before `now`.
    #[must_use]
    fn decision_state(&self, now: Instant) -> Self;
}
