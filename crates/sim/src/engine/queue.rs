//! Virtual time, and the queue of events.

use std::collections::BTreeMap;
use std::time::Duration;

/// Virtual time since the simulation began.
pub type Time = Duration;

/// When an event is due, and its number.
pub(crate) type Key = (Time, u64);

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
    pub(crate) fn pending(&self) -> impl Iterator<Item = (Key, &E)> {
        self.events.iter().map(|(key, event)| (*key, event))
    }

    /// Take an event out of order, at the present time.
    pub(crate) fn take(&mut self, key: Key) -> Option<E> {
        self.events.remove(&key)
    }

    /// Move the clock.
    pub(crate) fn advance(&mut self, to: Time) {
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
