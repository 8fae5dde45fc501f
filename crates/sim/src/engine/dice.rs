//! The random number generator.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The seeded generator. Its stream is the same on every platform.
#[derive(Clone, Debug)]
pub struct Dice(Source);

#[derive(Clone, Debug)]
enum Source {
    Seeded(Box<ChaCha8Rng>),
    /// Counts.
    Fixed(u64),
}

impl Dice {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Source::Seeded(Box::new(ChaCha8Rng::seed_from_u64(seed))))
    }

    /// A generator without randomness, for exhaustive exploration. It counts where any number will do, always returns the lowest of
    /// a range, and returns false for every chance.
    pub fn fixed() -> Self {
        Self(Source::Fixed(0))
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        match &mut self.0 {
            Source::Seeded(generator) => generator.next_u64(),
            Source::Fixed(count) => {
                *count += 1;
                *count
            }
        }
    }

    /// From `low` to `high`, both included. Slightly uneven, which does not matter here.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        if self.is_fixed() {
            return low;
        }
        low + self.number() % (high.saturating_sub(low) + 1)
    }

    /// True `percent` times in a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        !self.is_fixed() && self.between(0, 99) < percent
    }

    fn is_fixed(&self) -> bool {
        matches!(self.0, Source::Fixed(_))
    }

    /// From `low` to `high`, in microseconds.
    pub fn duration(&mut self, (low, high): (Duration, Duration)) -> Duration {
        if low == high {
            return low;
        }
        Duration::from_micros(self.between(low.as_micros() as u64, high.as_micros() as u64))
    }
}
