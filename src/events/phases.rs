//! How long the parts of a node's recovery have taken. Pure.

use serde::{Deserialize, Serialize};

/// Longest time that is believed of a node, in microseconds: a year.
pub const LONGEST_US: u64 = 366 * 24 * 3600 * 1_000_000;

/// How long the parts of a node's recovery have taken, in microseconds. A part that did not occur has no time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Phase {
    /// From the end of the first worker that failed on this node, until its agent knew.
    pub detect_us: Option<u64>,
    /// From the order to stop until nothing of the last round's workers was left.
    pub stop_us: Option<u64>,
    /// From the request for a rank until the rank was there.
    pub rendezvous_us: Option<u64>,
    /// From the rank until all workers were started.
    pub start_us: Option<u64>,
    /// From then until as many clients had connected to the workers' store as the world has workers. Rank 0's node measures it.
    pub import_us: Option<u64>,
}

impl Phase {
    /// The same with each part at most [`LONGEST_US`].
    #[must_use]
    pub fn bounded(self) -> Self {
        let Self { detect_us, stop_us, rendezvous_us, start_us, import_us } = self;
        let bounded = |micros: Option<u64>| micros.map(|micros| micros.min(LONGEST_US));
        Self {
            detect_us: bounded(detect_us),
            stop_us: bounded(stop_us),
            rendezvous_us: bounded(rendezvous_us),
            start_us: bounded(start_us),
            import_us: bounded(import_us),
        }
    }

    /// The parts in the order in which they follow one another.
    pub fn parts(&self) -> [Option<u64>; 5] {
        [self.detect_us, self.stop_us, self.rendezvous_us, self.start_us, self.import_us]
    }
}

/// A node's first step of a round, and how far it had come before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FirstStep {
    /// From the end of the import until the first step ended, in microseconds. From the end of the start, if no import was reported.
    pub first_step_us: u64,
    /// Number of that step, if the training script says where it is.
    pub step: Option<u64>,
    /// Number of the last step that this node's workers had made in an earlier round, if they had made one and said so.
    pub step_before: Option<u64>,
    /// Mean time of a step in that round, in microseconds.
    pub step_time_us: Option<u64>,
}
