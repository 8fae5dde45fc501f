//! A set of ranks as runs of equal steps, since groups of a parallel training are: `0-7`, or every eighth.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Most runs of a set.
pub const RUNS_LIMIT: usize = 1024;
/// Most ranks of a set. A set that claims more is cut.
pub const RANKS_LIMIT: usize = 1 << 16;

/// Most parts of a set [in full](Ranks::in_full).
pub const PARTS_LIMIT: usize = 4096;

/// A set of ranks. Sets are equal if they were made of the same ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ranks(Vec<Run>);

/// `first`, `first + step`, and so on, `count` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Run {
    first: u32,
    step: u32,
    count: u32,
}

impl Run {
    fn iter(self) -> impl Iterator<Item = u32> {
        (0..self.count).map_while(move |at| at.checked_mul(self.step)?.checked_add(self.first))
    }
}

impl FromIterator<u32> for Ranks {
    /// The set of these ranks, in any order. More than [`RUNS_LIMIT`] runs or [`RANKS_LIMIT`] ranks are cut.
    fn from_iter<I: IntoIterator<Item = u32>>(ranks: I) -> Self {
        let mut ranks: Vec<_> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.truncate(RANKS_LIMIT);
        let mut runs = Vec::new();
        let mut rest = &ranks[..];
        while let Some(&first) = rest.first() {
            let step = rest.get(1).map_or(1, |second| second - first);
            let count = rest.windows(2).take_while(|pair| pair[1] - pair[0] == step).count() + 1;
            // Two ranks far apart are no run: the second may begin a longer one.
            let count = if count == 2 && step > 1 { 1 } else { count };
            let step = if count == 1 { 1 } else { step };
            runs.push(Run { first, step, count: count as u32 });
            rest = &rest[count..];
        }
        runs.truncate(RUNS_LIMIT);
        Self(runs)
    }
}

impl Ranks {
    /// The ranks, in the order in which they were sent. A set from a peer may name a rank twice.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().take(RUNS_LIMIT).flat_map(|run| run.iter()).take(RANKS_LIMIT)
    }

    /// Number of ranks.
    pub fn len(&self) -> usize {
        let counted = self.0.iter().take(RUNS_LIMIT).map(|run| u64::from(run.count)).sum::<u64>();
        usize::try_from(counted).unwrap_or(RANKS_LIMIT).min(RANKS_LIMIT)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this rank is one of them.
    pub fn contains(&self, rank: u32) -> bool {
        self.iter().any(|one| one == rank)
    }

    /// The lowest rank that was sent first.
    pub fn first(&self) -> Option<u32> {
        self.iter().next()
    }

    /// All ranks as `0-2,5`: never more than the first [`PARTS_LIMIT`] parts, which a variable of a process can hold.
    pub fn in_full(&self) -> String {
        let all = self.sorted();
        parts(&all).take(PARTS_LIMIT).map(shown).collect::<Vec<_>>().join(",")
    }

    fn sorted(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.iter().collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Keep the first so many runs.
    pub fn truncate(&mut self, runs: usize) {
        self.0.truncate(runs);
    }

    /// Check what a peer has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        if self.0.len() > RUNS_LIMIT {
            return Err(format!("a set of ranks has {} runs, must have at most {RUNS_LIMIT}", self.0.len()));
        }
        let total: u64 = self.0.iter().map(|run| u64::from(run.count)).sum();
        if total > RANKS_LIMIT as u64 {
            return Err(format!("a set has {total} ranks, must have at most {RANKS_LIMIT}"));
        }
        Ok(())
    }
}

impl fmt::Display for Ranks {
    /// `3`, `0-2,4-7`, `0,8,16`. Long sets end with the number of those that are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Most parts that are shown.
        const PARTS: usize = 8;
        let all = self.sorted();
        f.write_str(&parts(&all).take(PARTS).map(shown).collect::<Vec<_>>().join(","))?;
        match parts(&all).skip(PARTS).map(|part| part.len()).sum::<usize>() {
            0 => Ok(()),
            left => write!(f, " and {left} more"),
        }
    }
}

/// Ranks that follow one another, of a set in order.
fn parts(sorted: &[u32]) -> impl Iterator<Item = &[u32]> {
    sorted.chunk_by(|one, next| one + 1 == *next)
}

fn shown(part: &[u32]) -> String {
    match part {
        [first, _, .., last] if part.len() > 2 => format!("{first}-{last}"),
        few => few.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(ranks: &[u32]) -> Ranks {
        ranks.iter().copied().collect()
    }

    #[test]
    fn groups_of_a_parallel_training_are_one_run() {
        for ranks in [(0..4096).collect::<Vec<_>>(), (3..4096).step_by(8).collect(), vec![7]] {
            assert_eq!(set(&ranks).0.len(), 1);
            assert_eq!(set(&ranks).iter().collect::<Vec<_>>(), ranks);
        }
    }

    #[test]
    fn ranks_are_shown_as_runs_of_neighbours() {
        let shown = [
            (&[][..], ""),
            (&[3], "3"),
            (&[0, 1], "0,1"),
            (&[4, 5, 6, 7, 0, 1, 2], "0-2,4-7"),
            (&[0, 8, 16], "0,8,16"),
            (&[0, 2, 4, 6, 8, 10, 12, 14, 16, 17], "0,2,4,6,8,10,12,14 and 2 more"),
        ];
        for (ranks, text) in shown {
            assert_eq!(set(ranks).to_string(), text);
        }
    }

    #[test]
    fn a_set_that_claims_too_much_is_refused_and_costs_little() {
        let lie = Ranks(vec![Run { first: u32::MAX - 1, step: 1, count: u32::MAX }; 3]);
        assert!(lie.validate().unwrap_err().contains("at most 65536"));
        assert_eq!(lie.iter().count(), 6);
        assert_eq!(lie.len(), RANKS_LIMIT);
        assert!(Ranks(vec![Run { first: 0, step: 1, count: 1 }; RUNS_LIMIT + 1]).validate().is_err());
    }

    proptest! {
        #[test]
        fn a_set_has_the_ranks_that_it_was_made_of(ranks in proptest::collection::btree_set(0..500_u32, 0..200)) {
            let made: Ranks = ranks.iter().rev().copied().collect();
            prop_assert_eq!(made.iter().collect::<Vec<_>>(), ranks.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(made.len(), ranks.len());
            prop_assert_eq!(made.validate(), Ok(()));
        }
    }

    #[test]
    fn in_full_no_rank_is_left_out() {
        assert_eq!(set(&[3]).in_full(), "3");
        assert_eq!(set(&[5, 0, 1, 2]).in_full(), "0-2,5");
        assert_eq!(set(&(0..40).step_by(2).collect::<Vec<_>>()).in_full().matches(',').count(), 19);
        assert!(
            set(&(0..65_536).step_by(2).collect::<Vec<_>>()).in_full().len() < 32 << 10,
            "a variable has room for it"
        );
    }
}
