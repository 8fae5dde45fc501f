//! The words of a worker's memory. Pure.
//!
//! The agent writes the number of the round. The worker writes all else, and may write anything: nothing that is read here is used
//! before it was compared with what is possible. No word depends on another one that is written at another time, so the agent need not
//! know whether the worker is about to write.

use std::ops::RangeInclusive;

/// Bytes of a worker's memory: the words, and the mutex that the worker holds while it lives ([`super::deaths`]).
pub const SLOT_BYTES: usize = 256;
/// Where the mutex is.
pub const MUTEX_AT: usize = 8 * WORDS;
/// Words of a worker's memory, each a `u64` in the machine's byte order.
pub const WORDS: usize = 10;

/// The agent's: number of the round whose first step it wants to hear of.
pub const ROUND: usize = 0;
/// The round whose first step the worker has reported.
pub const FIRST_ROUND: usize = 1;
/// Number of the first step in that round.
pub const FIRST: usize = 2;
/// When it ended.
pub const FIRST_NS: usize = 3;
/// Number of the last step.
pub const LAST: usize = 4;
/// When it ended.
pub const LAST_NS: usize = 5;
/// When the worker had its process group.
pub const GROUPED_NS: usize = 6;
/// When it had the state of its world.
pub const SYNCHRONISED_NS: usize = 7;
/// The lower half says what the numbers of steps mean: see [`Numbers`]. The upper half is the process that owns this memory.
pub const OWNER: usize = 8;
/// The lower half is 1 if the worker's process group uses NCCL, and `in_place` keeps workers of gloo alone: the worker is restarted when
/// the world changes. The upper half is the section of the training in which the worker is, 0 for none.
pub const STATE: usize = 9;
/// Of a worker's memory, the words that a round begins with. The last two stay: workers may live on in the next round.
pub const ROUND_WORDS: usize = OWNER;

/// Largest number of a step: the largest one that every reader of JSON reads exactly.
pub const LARGEST_STEP: u64 = (1 << 53) - 1;

/// What the numbers of a worker's steps mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Numbers {
    /// The training script has said where it is.
    Given = 0,
    /// The training script reports steps, which are counted from its start.
    FromStart = 1,
    /// It has reported none: an optimizer's steps are counted. They show that it goes on, and are no steps of anything else.
    OfOptimizer = 2,
}

/// A worker's memory, as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot([u64; WORDS]);

/// A worker's first step of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct First {
    /// Its number. `None`: the training script does not say it.
    pub step: Option<u64>,
    /// When it ended.
    pub at_ns: u64,
}

/// How far a worker has come in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Number of its last step. `None`: the training script does not say it.
    pub step: Option<u64>,
    /// Mean time from one step to the next one in microseconds, if there were two.
    pub step_time_us: Option<u64>,
}

/// The steps of a worker in a round, for whoever wants to know whether it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stepped {
    /// How many there were.
    pub steps: u64,
    /// When the first one ended.
    pub first_ns: u64,
    /// When the last one ended.
    pub last_ns: u64,
    /// Number of the last one. `None`: the training script does not say it.
    pub step: Option<u64>,
    /// They are steps of an optimizer: the training script has reported none.
    pub of_optimizer: bool,
}

impl Slot {
    /// The words that were read.
    pub fn of(bytes: &[u8; MUTEX_AT]) -> Self {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self(words)
    }

    /// The first words of a worker's memory before its first step of a round.
    pub fn blank(round: u64) -> [u8; 8 * ROUND_WORDS] {
        let mut bytes = [0; 8 * ROUND_WORDS];
        bytes[..8].copy_from_slice(&round.to_ne_bytes());
        bytes
    }

    /// The first step of a round, if the training script has reported one. `within`: the time in which it can have been.
    pub fn first(&self, round: u64, within: &RangeInclusive<u64>) -> Option<First> {
        let at_ns = self.first_ns(round, within).filter(|_| !is_of_optimizer(self.0[OWNER]))?;
        Some(First { step: self.number(FIRST), at_ns })
    }

    fn first_ns(&self, round: u64, within: &RangeInclusive<u64>) -> Option<u64> {
        Some(self.0[FIRST_NS]).filter(|at_ns| self.0[FIRST_ROUND] == round && within.contains(at_ns))
    }

    /// How far the worker has come in a round, if its training script has reported a step. `within`: the time in which that can have been.
    pub fn reached(&self, round: u64, within: &RangeInclusive<u64>) -> Option<Reached> {
        let first_ns = self.first(round, within)?.at_ns;
        let last_ns = Some(self.0[LAST_NS]).filter(|last_ns| within.contains(last_ns))?;
        let steps = self.0[LAST].checked_sub(self.0[FIRST]).filter(|steps| *steps > 0);
        let step_time_us = steps.zip(last_ns.checked_sub(first_ns)).map(|(steps, ns)| ns / 1000 / steps);
        Some(Reached { step: self.number(LAST), step_time_us })
    }

    /// The worker's steps in a round, if it has made one, or those of its optimizer. `within`: the time in which that can have been.
    pub fn stepped(&self, round: u64, within: &RangeInclusive<u64>) -> Option<Stepped> {
        let first_ns = self.first_ns(round, within)?;
        let last_ns = self.0[LAST_NS];
        if !(first_ns..=*within.end()).contains(&last_ns) {
            return None;
        }
        // A script that goes back to a checkpoint has a last step before its first one.
        let after = self.0[LAST].saturating_sub(self.0[FIRST]);
        let (step, of_optimizer) = (self.number(LAST), is_of_optimizer(self.0[OWNER]));
        Some(Stepped { steps: after.saturating_add(1), first_ns, last_ns, step, of_optimizer })
    }

    /// When the worker had its process group, and when the state of its world, if `elastic_rs.elastic` has made them. `within`: the time in
    /// which that can have been.
    pub fn formed(&self, within: &RangeInclusive<u64>) -> [Option<u64>; 2] {
        [GROUPED_NS, SYNCHRONISED_NS].map(|word| Some(self.0[word]).filter(|at_ns| within.contains(at_ns)))
    }

    /// Whether the worker is restarted when the world changes, because its process group uses NCCL.
    pub fn restarts_for_nccl(&self) -> bool {
        self.0[STATE] as u32 == 1
    }

    /// The section of the training in which the worker is, as a hash of its name.
    pub fn section(&self) -> Option<u32> {
        section(self.0[STATE])
    }

    /// A step's number, if it says where the training script is.
    fn number(&self, word: usize) -> Option<u64> {
        (self.0[OWNER] as u32 == Numbers::Given as u32 && self.0[word] <= LARGEST_STEP).then_some(self.0[word])
    }
}

/// The word [`OWNER`] of this process, whose steps have these numbers.
pub fn owned_by(pid: u32, numbers: Numbers) -> u64 {
    u64::from(pid) << 32 | numbers as u64
}

/// The process that owns the memory with this word [`OWNER`]; `None`: nobody does yet.
pub fn owner(word: u64) -> Option<u32> {
    u32::try_from(word >> 32).ok().filter(|pid| *pid > 0)
}

/// The word [`STATE`] with this section; the other half stays.
pub fn in_section(word: u64, section: u32) -> u64 {
    u64::from(section) << 32 | u64::from(word as u32)
}

/// The word [`STATE`] that says whether the worker is restarted; the other half stays.
pub fn restarting(word: u64, restarts: bool) -> u64 {
    word >> 32 << 32 | u64::from(restarts)
}

/// The section in this word [`STATE`], if there is one.
pub fn section(word: u64) -> Option<u32> {
    u32::try_from(word >> 32).ok().filter(|section| *section > 0)
}

/// Whether this word [`OWNER`] says that an optimizer's steps are counted.
pub fn is_of_optimizer(word: u64) -> bool {
    word as u32 == Numbers::OfOptimizer as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(words: [u64; WORDS]) -> Slot {
        let mut bytes = [0; MUTEX_AT];
        for (at, word) in words.iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        Slot::of(&bytes)
    }

    #[test]
    fn a_world_is_formed_within_its_round() {
        let within = 1_000..=9_000;
        let formed = |grouped, synchronised| slot([7, 0, 0, 0, 0, 0, grouped, synchronised, 0, 0]).formed(&within);
        assert_eq!((formed(1_000, 9_000), formed(0, 0)), ([Some(1_000), Some(9_000)], [None; 2]));
        assert_eq!(formed(999, u64::MAX), [None; 2], "whatever a worker writes");
    }

    #[test]
    fn a_round_is_measured_by_its_first_and_its_last_step() {
        let within = 1_000..=9_000_000;
        let words = [7, 7, 901, 1_000_000, 905, 9_000_000, 0, 0, 0, 0];
        assert_eq!(slot(words).first(7, &within), Some(First { step: Some(901), at_ns: 1_000_000 }));
        assert_eq!(slot(words).reached(7, &within), Some(Reached { step: Some(905), step_time_us: Some(2_000) }));
        let stepped = |step, of_optimizer| {
            Some(Stepped { steps: 5, first_ns: 1_000_000, last_ns: 9_000_000, step, of_optimizer })
        };
        assert_eq!(slot(words).stepped(7, &within), stepped(Some(905), false));
        assert_eq!(slot(words).stepped(8, &within), None, "of another round");
        let back = Stepped { steps: 1, first_ns: 1_000_000, last_ns: 1_000_001, step: Some(900), of_optimizer: false };
        assert_eq!(slot([7, 7, 901, 1_000_000, 900, 1_000_001, 0, 0, 0, 0]).stepped(7, &within), Some(back));
        assert_eq!(slot(words).first(8, &within), None, "of another round");
        assert_eq!(slot(words).first(7, &(2_000_000..=9_000_000)), None, "before its workers were placed");
        assert_eq!(slot(words).reached(7, &(1_000..=8_999_999)), None, "in the future");
        let one = [7, 7, 901, 1_000_000, 901, 1_000_000, 0, 0, 0, 0];
        assert_eq!(slot(one).reached(7, &within), Some(Reached { step: Some(901), step_time_us: None }));
        let counted = [7, 7, 1, 1_000_000, 5, 9_000_000, 0, 0, 1, 0];
        assert_eq!(slot(counted).first(7, &within).unwrap().step, None);
        assert_eq!(slot(counted).reached(7, &within), Some(Reached { step: None, step_time_us: Some(2_000) }));
        let of_optimizer = [7, 7, 901, 1_000_000, 905, 9_000_000, 0, 0, 2, 0];
        assert_eq!(slot(of_optimizer).stepped(7, &within), stepped(None, true), "it goes on");
        let reported = (slot(of_optimizer).first(7, &within), slot(of_optimizer).reached(7, &within));
        assert_eq!(reported, (None, None), "nobody has reported a step");
        let blank = slot([7, 0, 0, 0, 0, 0, 0, 0, owned_by(77, Numbers::FromStart), 0]);
        assert_eq!((blank.first(7, &within), blank.restarts_for_nccl()), (None, false));
        let written = [(0, false), (1, true), (2, false), (u64::MAX, false)];
        for (word, restarts) in written {
            assert_eq!(slot([7, 0, 0, 0, 0, 0, 0, 0, 0, word]).restarts_for_nccl(), restarts);
        }
        let both = restarting(in_section(0, 9), true);
        let seen = |word| (section(word), slot([7, 0, 0, 0, 0, 0, 0, 0, 0, word]).restarts_for_nccl());
        assert_eq!((seen(both), seen(in_section(both, 0))), ((Some(9), true), (None, true)));
        assert_eq!(seen(restarting(both, false)), (Some(9), false));
    }

    #[test]
    fn the_owner_stands_beside_how_its_steps_are_counted() {
        assert_eq!((owner(0), owner(1)), (None, None));
        for numbers in [Numbers::Given, Numbers::FromStart, Numbers::OfOptimizer] {
            let word = owned_by(u32::MAX, numbers);
            let seen = (owner(word), word as u32, is_of_optimizer(word));
            assert_eq!(seen, (Some(u32::MAX), numbers as u32, numbers == Numbers::OfOptimizer));
        }
        let within = 1_000..=9_000_000;
        let words = [7, 7, 901, 1_000_000, 905, 9_000_000, 0, 0, owned_by(4_194_303, Numbers::Given), 0];
        assert_eq!(slot(words).reached(7, &within).unwrap().step, Some(905));
    }

    proptest! {
        /// A worker may write anything.
        #[test]
        fn no_words_lead_to_impossible_numbers(
            words: [u64; WORDS], small in 0..3_u64, round in 0..3_u64, begin: u64, end: u64,
        ) {
            for words in [words, words.map(|word| word % 3), [round, round, small, begin, words[4], end, 0, 0, 0, 0]] {
                let within = begin..=end;
                if let Some(first) = slot(words).first(round, &within) {
                    prop_assert!(within.contains(&first.at_ns) && first.step.is_none_or(|step| step <= LARGEST_STEP));
                }
                if let Some(stepped) = slot(words).stepped(round, &within) {
                    prop_assert!(within.contains(&stepped.last_ns) && stepped.first_ns <= stepped.last_ns && stepped.steps > 0);
                }
                if let Some(reached) = slot(words).reached(round, &within) {
                    prop_assert!(reached.step.is_none_or(|step| step <= LARGEST_STEP));
                    prop_assert!(reached.step_time_us.is_none_or(|time| time <= (end - begin) / 1000));
                }
            }
        }
    }
}
