//! What a signal means to the agent that handles it.

use std::collections::BTreeSet;

use super::Signal;

/// The signals that do not end an agent. All others that it handles do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meanings {
    /// Passed on to the workers.
    pub forwarded: BTreeSet<Signal>,
}

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// This node's part in the job ends.
    Ends,
    /// The workers get it, and go on.
    Forwarded,
}

impl Meanings {
    /// What this signal means.
    pub fn of(&self, signal: Signal) -> Meaning {
        if self.forwarded.contains(&signal) { Meaning::Forwarded } else { Meaning::Ends }
    }
}
