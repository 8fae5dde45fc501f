//! Which worker each process of this node is.
//!
//! A process has a *slot* for its whole life: the number of its memory ([`crate::steps`]), and by which its group and its connections know
//! it. That is its local rank, unless a standby has taken the local rank of a worker that dies: the two live side by side for as long as
//! the kernel frees the memory of the one.

use std::collections::{BTreeMap, BTreeSet};

/// Whose a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The worker with this local rank.
    Worker(u32),
    /// A standby.
    Standby,
    /// A worker that dies, and whose local rank is another's now.
    Replaced,
}

/// The slots of a node.
#[derive(Debug)]
pub struct Slots {
    workers: u32,
    /// How many there are.
    count: u32,
    /// Those that are not of the worker with the local rank of the same number.
    held: BTreeMap<u32, Holder>,
}

impl Slots {
    /// For so many workers and standbys.
    pub fn new(workers: u32, standbys: u32) -> Self {
        // As many again for those whom standbys have replaced.
        Self { workers, count: workers.saturating_add(standbys.saturating_mul(2)), held: BTreeMap::new() }
    }

    /// How many slots there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whose this slot is, or was last.
    pub fn holder(&self, slot: u32) -> Holder {
        let own = match self.of(slot) {
            Some(of) if of == slot => Holder::Worker(slot),
            _ => Holder::Replaced,
        };
        self.held.get(&slot).copied().unwrap_or(own)
    }

    /// The slots of no worker.
    pub fn idle(&self) -> BTreeSet<u32> {
        let workers: BTreeSet<_> = (0..self.workers).filter_map(|local_rank| self.of(local_rank)).collect();
        (0..self.count).filter(|slot| !workers.contains(slot)).collect()
    }

    /// The slot of the worker with this local rank, if there is one.
    pub fn of(&self, local_rank: u32) -> Option<u32> {
        let moved = self.held.iter().find(|(_, holder)| **holder == Holder::Worker(local_rank));
        moved.map(|(slot, _)| *slot).or((!self.held.contains_key(&local_rank)).then_some(local_rank))
    }

    /// Free slots for workers that are started together, as [`Self::take`] finds each.
    pub fn take_all(&mut self, local_ranks: &[u32], used: &BTreeSet<u32>) -> Vec<u32> {
        let mut used = used.clone();
        let mut take = |local_rank: &u32| {
            let slot = self.take(*local_rank, &used);
            used.insert(slot);
            slot
        };
        local_ranks.iter().map(&mut take).collect()
    }

    /// A free slot for a worker that is started. `used`: those of processes of which anything is left.
    pub fn take(&mut self, local_rank: u32, used: &BTreeSet<u32>) -> u32 {
        let free = |slot: &u32| !used.contains(slot) && !self.held.contains_key(slot);
        let slot = Some(local_rank).filter(free).or_else(|| (0..self.count).find(free)).unwrap_or(local_rank);
        if slot != local_rank {
            self.held.insert(slot, Holder::Worker(local_rank));
        }
        slot
    }

    /// A free slot for a standby, rather none that has the number of a worker. All workers run.
    pub fn take_for_standby(&mut self, used: &BTreeSet<u32>) -> Option<u32> {
        let free = |slot: &u32| !used.contains(slot) && !self.held.contains_key(slot);
        let slot = (self.workers..self.count).chain(0..self.workers).find(free)?;
        self.held.insert(slot, Holder::Standby);
        Some(slot)
    }

    /// The standby in this slot is the worker with this local rank from now on. `used`: the slots of processes of which anything is left.
    pub fn call(&mut self, slot: u32, local_rank: u32, used: &BTreeSet<u32>) {
        let before = self.of(local_rank);
        if let Some(dying) = before.filter(|before| used.contains(before)) {
            self.held.insert(dying, Holder::Replaced);
        } else if let Some(before) = before {
            self.held.remove(&before);
        }
        self.held.insert(slot, Holder::Worker(local_rank));
    }

    /// Nothing is left of the process in this slot.
    pub fn free(&mut self, slot: u32) {
        self.held.remove(&slot);
    }

    /// Nothing is left of any process.
    pub fn clear(&mut self) {
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_the_local_rank_until_a_standby_takes_that() {
        let mut slots = Slots::new(2, 1);
        assert_eq!((slots.of(1), slots.holder(1)), (Some(1), Holder::Worker(1)));
        let standby = slots.take_for_standby(&[0, 1].into()).unwrap();
        assert_eq!((standby, slots.holder(standby)), (2, Holder::Standby));
        slots.call(standby, 1, &[0, 1, 2].into());
        assert_eq!((slots.of(1), slots.holder(1), slots.holder(2)), (Some(2), Holder::Replaced, Holder::Worker(1)));
        assert_eq!(slots.take_for_standby(&[0, 1, 2].into()), Some(3), "beside the one that dies");
        slots.free(1);
        assert_eq!(slots.holder(1), Holder::Replaced, "the end of its connection may be heard later");
        assert_eq!(slots.idle(), [1, 3].into());
        slots.call(3, 0, &[0, 2, 3].into());
        assert_eq!((slots.of(0), slots.of(1), slots.holder(0)), (Some(3), Some(2), Holder::Replaced));
        assert_eq!(slots.take_for_standby(&[0, 2, 3].into()), Some(1), "nobody's any more");
    }

    /// Nothing says once more that nothing is left of it.
    #[test]
    fn a_worker_of_which_nothing_is_left_keeps_no_slot() {
        let mut slots = Slots::new(1, 1);
        for _ in 0..5 {
            let own = slots.of(0).unwrap();
            let standby = slots.take_for_standby(&[own].into()).unwrap();
            slots.free(own); // it has ended before the standby is called
            slots.call(standby, 0, &[standby].into());
            assert_eq!(slots.of(0), Some(standby));
        }
    }

    #[test]
    fn a_worker_that_is_started_takes_no_slot_that_is_used() {
        let mut slots = Slots::new(2, 1);
        assert_eq!(slots.take(1, &[0].into()), 1);
        slots.call(2, 1, &[0, 1, 2].into());
        slots.free(2); // it has ended
        assert_eq!((slots.holder(1), slots.of(1)), (Holder::Replaced, None), "nobody has the local rank");
        assert_eq!(slots.take(1, &[0, 1].into()), 2);
        assert_eq!((slots.of(1), slots.holder(2)), (Some(2), Holder::Worker(1)));
    }

    #[test]
    fn there_are_slots_for_those_that_die_and_no_more() {
        let mut slots = Slots::new(1, 1);
        assert_eq!(slots.count(), 3);
        for (standby, used) in [(1, [0].as_slice()), (2, &[0, 1])] {
            assert_eq!(slots.take_for_standby(&used.iter().copied().collect()), Some(standby));
            slots.call(standby, 0, &[0, 1, 2].into());
        }
        assert_eq!(slots.take_for_standby(&[0, 1, 2].into()), None);
        slots.clear();
        assert_eq!(slots.of(0), Some(0));
    }
}
