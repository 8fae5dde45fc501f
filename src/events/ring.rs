//! The events that are kept: the last of each run, bounded in number and bytes.
//!
//! Events that explain (rounds, first failures, the coordinator's) and the many others have bounds of their own: a round of a thousand
//! nodes has thousands of joins and phases, and what a node repeats must not push out why a round was broken.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Most events that are kept of one run: as many that explain as others.
pub const RUN_EVENTS: usize = 4096;
/// Most bytes that are kept of one run, half of them of events that explain.
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

/// Events of one kind, the oldest first.
#[derive(Clone, Debug, Default)]
struct Tier {
    kept: VecDeque<Kept>,
    bytes: usize,
}

impl Tier {
    fn drop_oldest(&mut self) -> usize {
        let bytes = self.kept.pop_front().map_or(0, |kept| kept.line.len());
        self.bytes -= bytes;
        bytes
    }

    fn after(&self, number: u64) -> impl Iterator<Item = &Kept> {
        let from = self.kept.partition_point(|event| event.number <= number);
        self.kept.range(from..)
    }
}

/// The last events of one run: those that explain, and the others.
#[derive(Clone, Debug, Default)]
struct Ring {
    tiers: [Tier; 2],
    last: u64,
}

impl Ring {
    fn bytes(&self) -> usize {
        self.tiers.iter().map(|tier| tier.bytes).sum()
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
    /// Keep an event, and drop the oldest ones of its tier beyond the limits. Beyond that of all runs, the run with the most bytes loses
    /// its oldest.
    pub fn push(&mut self, run_id: &str, number: u64, explains: bool, line: Arc<str>) {
        let bytes = line.len();
        if !self.runs.contains_key(run_id) {
            self.runs.insert(run_id.to_owned(), Ring::default());
        }
        let Some(ring) = self.runs.get_mut(run_id) else { return };
        ring.last = number;
        let tier = &mut ring.tiers[usize::from(explains)];
        tier.kept.push_back(Kept { number, line });
        tier.bytes += bytes;
        self.bytes += bytes;
        while tier.kept.len() > 1 && (tier.kept.len() > RUN_EVENTS / 2 || tier.bytes > RUN_BYTES / 2) {
            self.bytes -= tier.drop_oldest();
            self.dropped += 1;
        }
        while self.bytes > ALL_BYTES {
            let Some(largest) = self.runs.values_mut().max_by_key(|ring| ring.bytes()) else { return };
            let [others, explaining] = &mut largest.tiers;
            let tier = if others.bytes > 0 { others } else { explaining };
            self.bytes -= tier.drop_oldest();
            self.dropped += 1;
        }
    }

    /// The events of a run after this number, in their order.
    pub fn after(&self, run_id: &str, number: u64) -> impl Iterator<Item = &Kept> {
        let tiers = self.runs.get(run_id).map(|ring| &ring.tiers);
        let [mut one, mut other] = [0, 1].map(|at| tiers.map(|tiers| tiers[at].after(number).peekable()));
        std::iter::from_fn(move || {
            let [first, second] =
                [&mut one, &mut other].map(|tier| tier.as_mut().and_then(|tier| tier.peek()).map(|kept| kept.number));
            match (first, second) {
                (Some(first), Some(second)) if second < first => other.as_mut()?.next(),
                (None, _) => other.as_mut()?.next(),
                (Some(_), _) => one.as_mut()?.next(),
            }
        })
    }

    /// All events, run by run, each with its run.
    pub fn all(&self) -> impl Iterator<Item = (&str, &Kept)> {
        self.runs.keys().flat_map(|run_id| self.after(run_id, 0).map(move |kept| (run_id.as_str(), kept)))
    }

    /// Number of the last event of a run.
    pub fn last(&self, run_id: &str) -> u64 {
        self.runs.get(run_id).map_or(0, |ring| ring.last)
    }

    /// Forget a run.
    pub fn forget(&mut self, run_id: &str) {
        if let Some(ring) = self.runs.remove(run_id) {
            self.bytes -= ring.bytes();
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
            rings.push("job", number, number % 100_000 == 1, line(10));
        }
        let kept = numbers(&rings, "job", 0);
        // What explains is not pushed out by the others.
        assert_eq!(
            kept[..11],
            [1, 100_001, 200_001, 300_001, 400_001, 500_001, 600_001, 700_001, 800_001, 900_001, 997_953]
        );
        assert_eq!((kept.len(), kept.last(), rings.last("job")), (10 + RUN_EVENTS / 2, Some(&1_000_000), 1_000_000));
        assert!(kept.is_sorted());
        assert_eq!(rings.dropped(), 1_000_000 - kept.len() as u64);
        assert_eq!(numbers(&rings, "job", 999_998), [999_999, 1_000_000]);
        assert!(numbers(&rings, "job", 1_000_000).is_empty() && numbers(&rings, "other", 0).is_empty());
        rings.forget("job");
        assert_eq!((numbers(&rings, "job", 0), rings.bytes), (vec![], 0));
    }

    #[test]
    fn bytes_are_bounded_for_each_run_and_for_all() {
        let mut rings = Rings::default();
        for number in 1..=100 {
            rings.push("loud", number, false, line(1 << 20));
        }
        assert_eq!(numbers(&rings, "loud", 0), [99, 100]);
        rings.push("quiet", 1, true, line(10));
        for run in 0..100 {
            for number in 1..=4 {
                rings.push(&format!("run{run}"), number, number % 2 == 0, line(1 << 20));
            }
        }
        assert!(rings.bytes <= ALL_BYTES, "{}", rings.bytes);
        assert_eq!(rings.bytes, rings.runs.values().map(Ring::bytes).sum::<usize>());
        assert_eq!(numbers(&rings, "quiet", 0), [1]);
        // One event may be larger than all that a run may keep.
        let mut rings = Rings::default();
        rings.push("huge", 1, true, line(RUN_BYTES + 1));
        assert_eq!(numbers(&rings, "huge", 0), [1]);
    }
}
