//! The events that are kept: the last of each run, bounded in number and bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Most events that are kept of one run.
pub const RUN_EVENTS: usize = 4096;
/// Most bytes that are kept of one run.
pub const RUN_BYTES: usize = 4 << 20;
/// Most bytes that are kept of all runs.
pub const ALL_BYTES: usize = 64 << 20;

/// An event's line, with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The event's number.
    pub number: u64,
    /// Its line, without the end of the line.
    pub line: Arc<str>,
}

/// The last events of one run.
#[derive(Clone, Debug, Default)]
struct Ring {
    kept: VecDeque<Kept>,
    bytes: usize,
}

impl Ring {
    fn drop_oldest(&mut self) -> usize {
        let bytes = self.kept.pop_front().map_or(0, |kept| kept.line.len());
        self.bytes -= bytes;
        bytes
    }
}

/// The last events of all runs.
#[derive(Clone, Debug, Default)]
pub struct Rings {
    runs: BTreeMap<String, Ring>,
    bytes: usize,
    /// Events that were dropped to make room.
    dropped: u64,
}

impl Rings {
    /// Keep an event, and drop the oldest ones beyond the limits. Beyond that of all runs, the run with the most bytes loses its oldest.
    pub fn push(&mut self, run_id: &str, number: u64, line: Arc<str>) {
        let bytes = line.len();
        if !self.runs.contains_key(run_id) {
            self.runs.insert(run_id.to_owned(), Ring::default());
        }
        let Some(ring) = self.runs.get_mut(run_id) else { return };
        ring.kept.push_back(Kept { number, line });
        ring.bytes += bytes;
        self.bytes += bytes;
        while ring.kept.len() > 1 && (ring.kept.len() > RUN_EVENTS || ring.bytes > RUN_BYTES) {
            self.bytes -= ring.drop_oldest();
            self.dropped += 1;
        }
        while self.bytes > ALL_BYTES {
            let Some(largest) = self.runs.values_mut().max_by_key(|ring| ring.bytes) else { return };
            self.bytes -= largest.drop_oldest();
            self.dropped += 1;
        }
    }

    /// The events of a run after this number, the oldest first.
    pub fn after(&self, run_id: &str, number: u64) -> impl Iterator<Item = &Kept> {
        let kept = self.runs.get(run_id).map(|ring| &ring.kept);
        let from = kept.map_or(0, |kept| kept.partition_point(|event| event.number <= number));
        kept.into_iter().flat_map(move |kept| kept.range(from..))
    }

    /// Forget a run.
    pub fn forget(&mut self, run_id: &str) {
        if let Some(ring) = self.runs.remove(run_id) {
            self.bytes -= ring.bytes;
        }
    }

    /// Number of events that were dropped to make room.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(bytes: usize) -> Arc<str> {
        "x".repeat(bytes).into()
    }

    fn numbers(rings: &Rings, run: &str, after: u64) -> Vec<u64> {
        rings.after(run, after).map(|kept| kept.number).collect()
    }

    #[test]
    fn the_last_events_of_a_run_are_kept() {
        let mut rings = Rings::default();
        for number in 1..=1_000_000 {
            rings.push("job", number, line(10));
        }
        let kept = numbers(&rings, "job", 0);
        assert_eq!((kept.len(), kept.first(), kept.last()), (RUN_EVENTS, Some(&995_905), Some(&1_000_000)));
        assert_eq!(rings.dropped(), 1_000_000 - RUN_EVENTS as u64);
        assert_eq!(numbers(&rings, "job", 999_998), [999_999, 1_000_000]);
        assert!(numbers(&rings, "job", 1_000_000).is_empty() && numbers(&rings, "other", 0).is_empty());
        rings.forget("job");
        assert_eq!((numbers(&rings, "job", 0), rings.bytes), (vec![], 0));
    }

    #[test]
    fn bytes_are_bounded_for_each_run_and_for_all() {
        let mut rings = Rings::default();
        for number in 1..=100 {
            rings.push("loud", number, line(1 << 20));
        }
        assert_eq!(numbers(&rings, "loud", 0), [97, 98, 99, 100]);
        rings.push("quiet", 1, line(10));
        for run in 0..100 {
            for number in 1..=4 {
                rings.push(&format!("run{run}"), number, line(1 << 20));
            }
        }
        assert!(rings.bytes <= ALL_BYTES, "{}", rings.bytes);
        assert_eq!(rings.bytes, rings.runs.values().map(|ring| ring.bytes).sum::<usize>());
        assert_eq!(numbers(&rings, "quiet", 0), [1]);
        // One event may be larger than all that a run may keep.
        let mut rings = Rings::default();
        rings.push("huge", 1, line(RUN_BYTES + 1));
        assert_eq!(numbers(&rings, "huge", 0), [1]);
    }
}
