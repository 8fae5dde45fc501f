//! For how long ranks may stand still. The limits learn from waits that ended by themselves, and outlive rounds.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::hang::view::Class;

/// Shortest limit of an idle wait.
pub const IDLE: Duration = Duration::from_secs(180);
/// The same, in steps.
const IDLE_STEPS: u32 = 20;
/// Shortest limit of a busy wait.
pub const BUSY: Duration = Duration::from_secs(600);
/// The same, in steps.
const BUSY_STEPS: u32 = 200;
/// Limit of a first step of which nothing is known.
pub const FIRST: Duration = Duration::from_secs(1800);
/// Shortest limit of a first step once one is known.
const KNOWN_FIRST: Duration = Duration::from_secs(600);
/// The same for all waits, in the longest that ended by itself.
const LONGEST: u32 = 3;
/// Most sections that have limits of their own.
pub const SECTIONS_LIMIT: usize = 64;

/// The name of a section of the training, as a hash.
pub type Section = u32;

/// Waits that ended by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Longest {
    idle: Duration,
    busy: Duration,
}

/// For how long ranks may stand still.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// `--hang-timeout`: instead of all others, once the training has begun.
    timeout: Option<Duration>,
    longest: Longest,
    sections: BTreeMap<Section, Longest>,
    first: Option<Duration>,
}

/// The limits of one wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Of the time in which the awaited rank has been idle.
    pub idle: Duration,
    /// Of all time without progress.
    pub total: Duration,
}

impl Limit {
    /// Twice the time.
    pub(super) fn twice(self) -> Self {
        Self { idle: self.idle.saturating_mul(2), total: self.total.saturating_mul(2) }
    }
}

impl Limits {
    /// Limits that have not learned anything.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, ..Self::default() }
    }

    /// The limits in a section of the training. `step_time`: the median time of a step, if it is known. `has_begun`: this round has seen
    /// a step or a collective. Before, workers load their programs and models, which takes any time.
    pub fn of(&self, section: Option<Section>, step_time: Option<Duration>, has_begun: bool) -> Limit {
        if let Some(timeout) = self.timeout.filter(|_| has_begun) {
            return Limit { idle: timeout, total: timeout };
        }
        let Some(step_time) = step_time else {
            let first = self.first.map_or(FIRST, |first| KNOWN_FIRST.max(first.saturating_mul(LONGEST)));
            return Limit { idle: first, total: first };
        };
        let longest = match section {
            Some(section) => self.sections.get(&section).copied().unwrap_or_default(),
            None => self.longest,
        };
        let limit = |shortest: Duration, steps: u32, longest: Duration| {
            shortest.max(step_time.saturating_mul(steps)).max(longest.saturating_mul(LONGEST))
        };
        Limit { idle: limit(IDLE, IDLE_STEPS, longest.idle), total: limit(BUSY, BUSY_STEPS, longest.busy) }
    }

    /// A wait has ended by itself.
    pub fn learn(&mut self, section: Option<Section>, class: Class, waited: Duration) {
        let longest = match section {
            None => &mut self.longest,
            Some(section) if self.sections.contains_key(&section) || self.sections.len() < SECTIONS_LIMIT => {
                self.sections.entry(section).or_default()
            }
            Some(_) => return,
        };
        match class {
            Class::Idle => longest.idle = longest.idle.max(waited),
            Class::Busy | Class::Moving => longest.busy = longest.busy.max(waited),
        }
    }

    /// The first step of a round was made.
    pub fn learn_first(&mut self, waited: Duration) {
        self.first = Some(self.first.map_or(waited, |first| first.max(waited)));
    }
}
