//! How often a server says the same thing in its log.
//!
//! Owns the count, and saying what was left out. A port scanner or a client in a loop must not fill a disk: of each kind of
//! record so many are written in a period of time, and then one that says how many more there were. Counters, where there
//! are any, are never bounded so.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{self, sleep_until};

/// The bound on one part's log, for tasks that share it. Dropping it says what was left out until then.
#[derive(Debug)]
pub(crate) struct BoundedLog {
    budget: Mutex<LogBudget>,
    /// A record was left out.
    left_out: Notify,
    say_left_out: fn(&'static str, u64),
}

impl BoundedLog {
    /// `say_left_out` writes the record that so many more of a kind were not written.
    pub(crate) fn new(period: Duration, say_left_out: fn(&'static str, u64)) -> Self {
        BoundedLog { budget: Mutex::new(LogBudget::new(period)), left_out: Notify::new(), say_left_out }
    }

    /// Whether one more record of this kind may be written.
    pub(crate) fn admits(&self, kind: &'static str) -> bool {
        let now = time::Instant::now().into_std();
        let (summaries, may) = {
            let mut budget = self.budget.lock();
            (budget.summaries(now), budget.admit(kind, now))
        };
        self.say(summaries);
        if !may {
            self.left_out.notify_one();
        }
        may
    }

    /// Says from time to time what was left out, also when nothing more happens. Never ends.
    pub(crate) async fn summarise(&self) {
        loop {
            let deadline = self.budget.lock().next_deadline();
            match deadline {
                None => self.left_out.notified().await,
                Some(deadline) => {
                    sleep_until(deadline.into()).await;
                    let summaries = self.budget.lock().summaries(time::Instant::now().into_std());
                    self.say(summaries);
                }
            }
        }
    }

    /// Says what was left out so far.
    pub(crate) fn end(&self) {
        let summaries = self.budget.lock().end();
        self.say(summaries);
    }

    fn say(&self, summaries: Vec<(&'static str, u64)>) {
        for (kind, count) in summaries {
            (self.say_left_out)(kind, count);
        }
    }
}

impl Drop for BoundedLog {
    fn drop(&mut self) {
        self.end();
    }
}

/// Counts records by kind within one period of time, which begins with the first of them.
///
/// For a part that runs on one thread and looks at the clock itself; [`BoundedLog`] is for the others.
#[derive(Debug)]
pub(crate) struct LogBudget {
    period: Duration,
    ends_at: Option<Instant>,
    seen: BTreeMap<&'static str, u64>,
}

impl LogBudget {
    pub(crate) fn new(period: Duration) -> Self {
        LogBudget { period, ends_at: None, seen: BTreeMap::new() }
    }

    /// Whether one more record of this kind may be written.
    pub(crate) fn admit(&mut self, kind: &'static str, now: Instant) -> bool {
        self.ends_at.get_or_insert(now + self.period);
        let seen = self.seen.entry(kind).or_default();
        *seen += 1;
        *seen <= RECORDS_PER_PERIOD
    }

    /// When [`summaries`](Self::summaries) has something to say; `None` if nothing was left out so far.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.ends_at.filter(|_| self.seen.values().any(|seen| *seen > RECORDS_PER_PERIOD))
    }

    /// If the period is over, ends it: each kind of which records were left out, and how many.
    pub(crate) fn summaries(&mut self, now: Instant) -> Vec<(&'static str, u64)> {
        if self.ends_at.is_none_or(|ends_at| now < ends_at) {
            return Vec::new();
        }
        self.end()
    }

    /// Ends the period early.
    pub(crate) fn end(&mut self) -> Vec<(&'static str, u64)> {
        self.ends_at = None;
        let seen = mem::take(&mut self.seen).into_iter();
        seen.filter(|(_, seen)| *seen > RECORDS_PER_PERIOD)
            .map(|(kind, seen)| (kind, seen - RECORDS_PER_PERIOD))
            .collect()
    }
}

/// Enough to see who it is and what they want.
const RECORDS_PER_PERIOD: u64 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(60);

    #[test]
    fn records_above_the_budget_become_one_number_for_each_kind() {
        let (mut budget, start) = (LogBudget::new(PERIOD), Instant::now());
        let admitted =
            |budget: &mut LogBudget, kind, count, now| (0..count).filter(|_| budget.admit(kind, now)).count();
        assert_eq!(admitted(&mut budget, "scan", 20, start), 20);
        assert_eq!(budget.next_deadline(), None, "nothing was left out");
        assert_eq!(admitted(&mut budget, "scan", 980, start + PERIOD / 2), 0);
        assert_eq!(admitted(&mut budget, "other", 1, start + PERIOD / 2), 1, "each kind has its own");
        assert_eq!(budget.next_deadline(), Some(start + PERIOD));
        assert_eq!(budget.summaries(start + PERIOD / 2), []);
        assert_eq!(budget.summaries(start + PERIOD), [("scan", 980)]);
        assert_eq!(budget.next_deadline(), None);
        assert_eq!(admitted(&mut budget, "scan", 21, start + PERIOD), 20, "a new period");
        assert_eq!(budget.end(), [("scan", 1)]);
        assert_eq!(budget.end(), []);
    }
}
