//! What a signal means to the agent that handles it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Signal;

/// The signals that do not end an agent. All others that it handles do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meanings {
    /// They say that this machine is taken away, and after how long.
    pub notices: BTreeMap<Signal, Duration>,
    /// Passed on to the workers.
    pub forwarded: BTreeSet<Signal>,
}

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// This node's part in the job ends.
    Ends,
    /// This machine is taken away after this time.
    Notice(Duration),
    /// The workers get it, and go on.
    Forwarded,
}

impl Meanings {
    /// What this signal means.
    pub fn of(&self, signal: Signal) -> Meaning {
        match self.notices.get(&signal) {
            Some(left) => Meaning::Notice(*left),
            None if self.forwarded.contains(&signal) => Meaning::Forwarded,
            None => Meaning::Ends,
        }
    }
}
