//! Virtual time, the queue of events, and the random number generator.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Virtual time since the simulation began.
pub type Time = Duration;

/// When an event is due, and its number.
pub(super) type Key = (Time, u64);

/// Events in order of time. Events of one time are in the order in which they were added.
#[derive(Clone, Debug)]
pub struct Queue<E> {
    now: Time,
    sequence: u64,
    events: BTreeMap<Key, E>,
}

impl<E> Queue<E> {
    /// An empty queue at time zero.
    pub fn new() -> Self {
        Self { now: Time::ZERO, sequence: 0, events: BTreeMap::new() }
    }

    /// The time of the event taken last.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Add an event. An event in the past happens now.
    pub fn push(&mut self, at: Time, event: E) {
        self.sequence += 1;
        self.events.insert((at.max(self.now), self.sequence), event);
    }

    /// All pending events, in order.
    pub(super) fn pending(&self) -> impl Iterator<Item = (Key, &E)> {
        self.events.iter().map(|(key, event)| (*key, event))
    }

    /// Take an event out of order, at the present time.
    pub(super) fn take(&mut self, key: Key) -> Option<E> {
        self.events.remove(&key)
    }

    /// Move the clock.
    pub(super) fn advance(&mut self, to: Time) {
        self.now = self.now.max(to);
    }

    /// Take the next event if it happens no later than `until`; else move the clock there.
    pub fn pop(&mut self, until: Time) -> Option<E> {
        let next = self.events.first_key_value().map(|((at, _), _)| *at);
        if next.is_none_or(|at| at > until) {
            self.now = self.now.max(until);
            return None;
        }
        let ((at, _), event) = self.events.pop_first()?;
        self.now = self.now.max(at);
        Some(event)
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self::new()
    }
}

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

    /// A generator without randomness, for [`super::explore`]. It counts where any number will do, always returns the lowest of a range,
    /// and returns false for every chance.
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

/// A digest of a history (FNV-1a). Equal seeds must give equal digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Add bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl fmt::Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}
