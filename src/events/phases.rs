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

impl FirstStep {
    /// The parts that follow one another after the import, from times since the start. `formed_us`: when the workers had their process
    /// groups, and the state. What a node says may be out of order.
    pub fn parts(after_us: u64, import_us: u64, formed_us: [Option<u64>; 2]) -> Self {
        let mut since = import_us;
        let mut part = |until: u64| {
            let until = until.min(LONGEST_US);
            let took = until.saturating_sub(since);
            since = since.max(until);
            took
        };
        let [group_us, state_us] = formed_us.map(|until| until.map(&mut part));
        Self { group_us, state_us, first_step_us: part(after_us), ..Self::default() }
    }
}

/// A node's first step of a round, and how far it had come before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FirstStep {
    /// From the end of the import until the last of the node's workers had its process group, in microseconds. From the end of the start,
    /// if no import was reported.
    pub group_us: Option<u64>,
    /// From then until the last of them had the state of its world.
    pub state_us: Option<u64>,
    /// From then, or whatever was before, until the first step ended.
    pub first_step_us: u64,
    /// Number of that step, if the training script says where it is.
    pub step: Option<u64>,
    /// Number of the last step that this node's workers had made in an earlier round, if they had made one and said so.
    pub step_before: Option<u64>,
    /// Mean time of a step in that round, in microseconds.
    pub step_time_us: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_first_step_follow_one_another_whatever_a_node_says() {
        let parts = |after_us, import_us, formed_us| {
            let FirstStep { group_us, state_us, first_step_us, .. } = FirstStep::parts(after_us, import_us, formed_us);
            (group_us, state_us, first_step_us)
        };
        assert_eq!(parts(90, 20, [Some(30), Some(70)]), (Some(10), Some(40), 20));
        assert_eq!(parts(90, 20, [None, None]), (None, None, 70), "the script makes its own");
        assert_eq!(parts(90, 20, [None, Some(70)]), (None, Some(50), 20));
        assert_eq!(parts(90, 40, [Some(30), Some(20)]), (Some(0), Some(0), 50), "in no order");
        assert_eq!(parts(u64::MAX, 0, [Some(u64::MAX), None]), (Some(LONGEST_US), None, 0));
    }
}
