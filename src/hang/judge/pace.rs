//! When an agent looks at the steps of its workers, and when it says that they stand still. Pure.
//!
//! Nothing polls: after each look the next one is due when a step takes much longer than usual.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Shortest time without a step after which somebody looks.
pub const SHORTEST: Duration = Duration::from_secs(2);
/// The same while nobody knows how long a step takes.
pub const UNKNOWN: Duration = Duration::from_secs(10);
/// Most looks of which the time of a step is taken.
pub const LOOKS: usize = 64;
/// Number of steps from which on the time of a step is known.
pub const KNOWN_FROM: u64 = 3;

/// How far the workers are, as their memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Number of steps in this round.
    pub steps: u64,
    /// When the first one ended.
    pub first_at: Instant,
    /// When the last one ended.
    pub at: Instant,
}

/// A node's workers make no step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Still {
    /// Number of steps in this round.
    pub steps: u64,
    /// Since when.
    pub since: Instant,
    /// The median time of a step, from [`KNOWN_FROM`] steps on.
    pub step_time: Option<Duration>,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The workers stand still. Said once.
    Still(Still),
    /// They have moved since [`Change::Still`]: when, and after how long.
    Moved(Instant, Duration),
}

/// The pace of a node's workers.
#[derive(Clone, Debug)]
pub struct Pace {
    reached: Reached,
    /// The last progress: a step, or a line of a worker that shows some.
    progressed: Instant,
    /// Mean times of a step between two looks, the oldest first.
    times: VecDeque<Duration>,
    is_still: bool,
    looked: Instant,
}

impl Pace {
    /// Workers that are started now.
    pub fn new(now: Instant) -> Self {
        Self {
            reached: Reached { steps: 0, first_at: now, at: now },
            progressed: now,
            times: VecDeque::new(),
            is_still: false,
            looked: now,
        }
    }

    /// The median time of a step, if it is known.
    pub fn step_time(&self) -> Option<Duration> {
        let mut times: Vec<_> = self.times.iter().copied().collect();
        let middle = times.len() / 2;
        let is_known = self.reached.steps >= KNOWN_FROM && !times.is_empty();
        is_known.then(|| *times.select_nth_unstable(middle).1)
    }

    /// The time without a step after which they stand still.
    pub fn patience(&self) -> Duration {
        self.step_time().map_or(UNKNOWN, |time| SHORTEST.max(time.saturating_mul(3)))
    }

    /// When to look next.
    pub fn next_look(&self) -> Instant {
        let patience = self.patience();
        let mut due = self.progressed + patience;
        if self.reached.steps > 0 && self.step_time().is_none() {
            // Steps have begun: it is soon known how long one takes.
            due = due.min(self.looked + SHORTEST);
        }
        match due > self.looked {
            true => due,
            // They stand still: is that over?
            false if self.is_still => self.looked + patience,
            // They have moved, but that is long ago already.
            false => self.looked,
        }
    }

    /// A line of a worker has shown at this time that it goes on. It is no step: how long one takes is not known from it.
    pub fn on_progress(&mut self, at: Instant) -> Option<Change> {
        let waited = at.checked_duration_since(self.progressed).filter(|waited| !waited.is_zero())?;
        self.progressed = at;
        std::mem::take(&mut self.is_still).then_some(Change::Moved(at, waited))
    }

    /// A look at the workers' memory: how far they are, if they have made a step.
    pub fn on_look(&mut self, reached: Option<Reached>, now: Instant) -> Option<Change> {
        self.looked = now;
        if self.take(reached) {
            let moved = self.on_progress(self.reached.at);
            if moved.is_some() {
                return moved;
            }
        }
        let is_still = now.saturating_duration_since(self.progressed) >= self.patience();
        if !is_still || self.is_still {
            return None;
        }
        self.is_still = true;
        Some(Change::Still(Still { steps: self.reached.steps, since: self.progressed, step_time: self.step_time() }))
    }

    /// Take a reading. Returns whether there was a new step.
    fn take(&mut self, reached: Option<Reached>) -> bool {
        let is_new = |new: &Reached| new.at > self.reached.at || new.steps > self.reached.steps;
        let Some(new) = reached.filter(is_new) else { return false };
        if new.steps <= self.reached.steps || new.at < self.reached.at {
            // The script has gone back to an earlier step, or one worker has made a step that another one had made before.
            self.reached = new;
            return true;
        }
        let waited = new.at.saturating_duration_since(self.reached.at);
        // The first step is mostly the start of the program.
        let (steps, time) = match self.reached.steps {
            0 => (new.steps - 1, new.at.saturating_duration_since(new.first_at)),
            before => (new.steps - before, waited),
        };
        if let Some(mean) = time.checked_div(u32::try_from(steps).unwrap_or(u32::MAX)) {
            if self.times.len() == LOOKS {
                self.times.pop_front();
            }
            self.times.push_back(mean);
        }
        self.reached = new;
        true
    }
}
