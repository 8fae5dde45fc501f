//! Rate limit for log records of one kind.
//!
//! Owns the counts and the summaries. A port scanner or a client in a loop must not fill a disk. So of each kind of record a
//! bounded number is written in a period of time, and then one record that says how many more there were. Counters of events
//! are never limited in this way.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::mem;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{self, sleep_until};

/// The rate limit of one component's log, for tasks that share it. Dropping it logs what was left out until then.
#[derive(Debug)]
pub(crate) struct BoundedLog {
    budget: Mutex<LogBudget>,
    /// Notified when a record was left out.
    left_out: Notify,
    log_left_out: fn(&str, u64),
}

impl BoundedLog {
    /// `log_left_out` writes the summary: the kind, and the number of records that were not written.
    pub(crate) fn new(period: Duration, log_left_out: fn(&str, u64)) -> Self {
        BoundedLog { budget: Mutex::new(LogBudget::new(period)), left_out: Notify::new(), log_left_out }
    }

    /// Whether one more record of this kind may be written.
    pub(crate) fn admits(&self, kind: &'static str) -> bool {
        self.admits_if(|budget, now| budget.admit(kind, now))
    }

    /// Whether a record of this kind that names this address may be written: one of each in a period, as long as there are not too many.
    pub(crate) fn admits_once(&self, kind: &'static str, address: IpAddr) -> bool {
        self.admits_if(|budget, now| budget.admit_once(kind, address, now))
    }

    /// The same for records that count twice: towards the limit of their kind, and towards the limit of all kinds that share
    /// `whole`.
    pub(crate) fn admits_both(&self, (kind, limit): (Cow<'static, str>, u64), whole: (&'static str, u64)) -> bool {
        self.admits_if(|budget, now| {
            budget.admit_up_to(limit, kind, now) && budget.admit_up_to(whole.1, whole.0.into(), now)
        })
    }

    fn admits_if(&self, admit: impl FnOnce(&mut LogBudget, Instant) -> bool) -> bool {
        let now = time::Instant::now().into_std();
        let (summaries, may) = {
            let mut budget = self.budget.lock();
            (budget.summaries(now), admit(&mut budget, now))
        };
        self.log(summaries);
        if !may {
            self.left_out.notify_one();
        }
        may
    }

    /// Logs at the end of each period what was left out, also when nothing more happens. Never ends.
    pub(crate) async fn summarise(&self) {
        loop {
            let deadline = self.budget.lock().next_deadline();
            match deadline {
                None => self.left_out.notified().await,
                Some(deadline) => {
                    sleep_until(deadline.into()).await;
                    let summaries = self.budget.lock().summaries(time::Instant::now().into_std());
                    self.log(summaries);
                }
            }
        }
    }

    /// Logs what was left out so far.
    pub(crate) fn end(&self) {
        let summaries = self.budget.lock().end();
        self.log(summaries);
    }

    fn log(&self, summaries: Vec<LeftOut>) {
        for (kind, count) in summaries {
            (self.log_left_out)(&kind, count);
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
/// For a component that runs on one thread and looks at the clock itself. [`BoundedLog`] is for the others.
#[derive(Debug)]
pub(crate) struct LogBudget {
    period: Duration,
    ends_at: Option<Instant>,
    seen: BTreeMap<Cow<'static, str>, Seen>,
}

/// A kind of record, and the number of its records that were not written.
pub(crate) type LeftOut = (Cow<'static, str>, u64);

#[derive(Debug, Default)]
struct Seen {
    written: u64,
    left_out: u64,
}

impl LogBudget {
    pub(crate) fn new(period: Duration) -> Self {
        LogBudget { period, ends_at: None, seen: BTreeMap::new() }
    }

    /// Whether one more record of this kind may be written.
    pub(crate) fn admit(&mut self, kind: &'static str, now: Instant) -> bool {
        self.admit_up_to(RECORDS_PER_PERIOD, kind.into(), now)
    }

    /// The same for a record that names this address.
    pub(crate) fn admit_once(&mut self, kind: &'static str, address: IpAddr, now: Instant) -> bool {
        self.admit_up_to(1, format!("{kind} {address}").into(), now) && self.admit(kind, now)
    }

    fn admit_up_to(&mut self, limit: u64, mut kind: Cow<'static, str>, now: Instant) -> bool {
        self.ends_at.get_or_insert(now + self.period);
        if self.seen.len() >= KINDS && !self.seen.contains_key(&kind) {
            kind = "others".into();
        }
        let seen = self.seen.entry(kind).or_default();
        let may = seen.written < limit;
        *(if may { &mut seen.written } else { &mut seen.left_out }) += 1;
        may
    }

    /// When [`summaries`](Self::summaries) is to be called; `None` if nothing was left out so far.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.ends_at.filter(|_| self.seen.values().any(|seen| seen.left_out > 0))
    }

    /// Ends the period if it is over. Returns each kind of which records were left out, and their number.
    pub(crate) fn summaries(&mut self, now: Instant) -> Vec<LeftOut> {
        if self.ends_at.is_none_or(|ends_at| now < ends_at) {
            return Vec::new();
        }
        self.end()
    }

    /// Ends the period early.
    pub(crate) fn end(&mut self) -> Vec<LeftOut> {
        self.ends_at = None;
        let seen = mem::take(&mut self.seen).into_iter();
        let mut kinds: Vec<_> =
            seen.map(|(kind, seen)| (kind, seen.left_out)).filter(|(_, left_out)| *left_out > 0).collect();
        if kinds.len() > SUMMARIES {
            kinds.sort_by_key(|(_, left_out)| std::cmp::Reverse(*left_out));
            let rest = kinds.split_off(SUMMARIES).into_iter().map(|(_, left_out)| left_out).sum();
            kinds.push(("others".into(), rest));
        }
        kinds
    }
}

/// Enough to identify a peer and what it does.
const RECORDS_PER_PERIOD: u64 = 20;
/// Kinds that are summarised one by one, those with the most records first. The others are added up.
const SUMMARIES: usize = 20;
/// Number of kinds that are counted one by one. Peers can invent kinds (runs, say), so further ones are counted together.
const KINDS: usize = 1_000;

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
        assert_eq!(budget.summaries(start + PERIOD), [("scan".into(), 980)]);
        assert_eq!(budget.next_deadline(), None);
        assert_eq!(admitted(&mut budget, "scan", 21, start + PERIOD), 20, "a new period");
        assert_eq!(budget.end(), [("scan".into(), 1)]);
        assert_eq!(budget.end(), []);
    }

    #[test]
    fn an_address_is_named_once_however_often_it_comes() {
        let (mut budget, now) = (LogBudget::new(PERIOD), Instant::now());
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        assert_eq!((0..1000).filter(|_| budget.admit_once("crowded", address(1), now)).count(), 1);
        assert!(budget.admit_once("crowded", address(2), now));
        assert_eq!((0..100).filter(|last| budget.admit_once("crowded", address(100 + last), now)).count(), 18);
        assert!(budget.end().contains(&("crowded 10.0.0.1".into(), 999)));
    }

    #[test]
    fn kinds_without_end_are_counted_together() {
        let (mut budget, start) = (LogBudget::new(PERIOD), Instant::now());
        let written = (0..5_000).filter(|n| budget.admit_up_to(3, format!("run {n}").into(), start)).count();
        assert_eq!(written, KINDS + 3, "each of its own, and three of the others");
        assert!(budget.admit_up_to(3, "run 7".into(), start), "who was there before is not crowded out");
        assert_eq!(budget.end(), [("others".into(), 3_997)]);
    }

    #[test]
    fn a_flood_of_kinds_has_few_summaries() {
        let (mut budget, start) = (LogBudget::new(PERIOD), Instant::now());
        for n in 0..900u64 {
            (0..n + 5).for_each(|_| {
                budget.admit_up_to(3, format!("run {n}").into(), start);
            });
        }
        let summaries = budget.end();
        assert_eq!(summaries.len(), SUMMARIES + 1);
        assert_eq!(summaries[0], ("run 899".into(), 901));
        assert_eq!(summaries.iter().map(|(_, count)| count).sum::<u64>(), (0..900).map(|n| n + 2).sum::<u64>());
    }
}
