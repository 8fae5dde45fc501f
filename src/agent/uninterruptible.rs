//! Workers in uninterruptible sleep, because a device or a file system hangs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::processes::state_of;

/// How often the states of workers are read, if a limit is set: the kernel does not announce such a sleep.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The workers that sleep, and since when.
#[derive(Debug, Default)]
pub(super) struct UninterruptibleWorkers {
    limit: Duration,
    /// When to look next. Set once, so that other events do not postpone it.
    look_at: Option<Instant>,
    since: BTreeMap<u32, Instant>,
}

/// A worker that has slept too long.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UninterruptibleWorker {
    pub local_rank: u32,
    pub pid: u32,
    pub slept: Duration,
}

impl UninterruptibleWorkers {
    /// `limit`: how long workers may sleep. Zero: no limit.
    pub fn new(limit: Duration) -> Self {
        Self { limit, look_at: None, since: BTreeMap::new() }
    }

    /// When to call [`look`](Self::look) next: the same instant until it has been called then.
    pub fn next_look(&mut self, now: Instant) -> Option<Instant> {
        (!self.limit.is_zero()).then(|| *self.look_at.get_or_insert(now + LOOK_INTERVAL))
    }

    /// Forget all workers: others run from now on.
    pub fn forget(&mut self) {
        self.since.clear();
    }

    /// Reads the states of these workers, process ids by local rank, if it is time. Returns those that have slept for the limit.
    pub fn look(&mut self, pids: &BTreeMap<u32, u32>, now: Instant) -> Vec<UninterruptibleWorker> {
        if self.look_at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.look_at = None;
        let asleep = pids.iter().filter(|(_, pid)| state_of(**pid) == Some('D'));
        self.take(&asleep.map(|(rank, pid)| (*rank, *pid)).collect(), now)
    }

    fn take(&mut self, asleep: &BTreeMap<u32, u32>, now: Instant) -> Vec<UninterruptibleWorker> {
        if self.limit.is_zero() {
            return Vec::new();
        }
        self.since.retain(|local_rank, _| asleep.contains_key(local_rank));
        let slept = |(&local_rank, &pid): (&u32, &u32)| {
            let slept = now - *self.since.entry(local_rank).or_insert(now);
            (slept >= self.limit).then_some(UninterruptibleWorker { local_rank, pid, slept })
        };
        asleep.iter().filter_map(slept).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_counts_from_the_look_that_found_it_asleep_and_anew_after_it_woke() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut uninterruptible = UninterruptibleWorkers::new(Duration::from_secs(3));
        let asleep = BTreeMap::from([(1, 70)]);
        assert_eq!(uninterruptible.take(&asleep, at(0)), []);
        assert_eq!(uninterruptible.take(&asleep, at(2)), []);
        assert_eq!(uninterruptible.take(&BTreeMap::new(), at(3)), []);
        assert_eq!(uninterruptible.take(&asleep, at(4)), []);
        let found = UninterruptibleWorker { local_rank: 1, pid: 70, slept: Duration::from_secs(3) };
        assert_eq!(uninterruptible.take(&asleep, at(7)), [found]);
    }

    #[test]
    fn events_do_not_postpone_a_look() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut uninterruptible = UninterruptibleWorkers::new(Duration::from_secs(3));
        for event in (0..1000).step_by(100) {
            assert_eq!(uninterruptible.next_look(at(event)), Some(at(1000)));
        }
        uninterruptible.look(&BTreeMap::new(), at(999));
        assert_eq!(uninterruptible.next_look(at(999)), Some(at(1000)), "it was too early");
        uninterruptible.look(&BTreeMap::new(), at(1000));
        assert_eq!(uninterruptible.next_look(at(1001)), Some(at(2001)));
    }

    #[test]
    fn without_a_limit_nobody_looks() {
        let now = Instant::now();
        assert_eq!(UninterruptibleWorkers::default().next_look(now), None);
        assert_eq!(UninterruptibleWorkers::default().take(&BTreeMap::from([(0, 7)]), now), []);
    }
}
