//! What a worker has started, and what is left of it once the worker has ended well: an upload in the background, say. Pure.
//!
//! It may run on for the grace of a stop. Then it gets SIGTERM, [`END`] later SIGKILL, and its end is not waited for any longer than that of
//! a worker that was killed. What a worker that has failed, or that was stopped, has started is killed with it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::stop::{Command, StopPolicy, Stopping};

/// How long it may be silent about. Helpers that end with their parent take a moment, and are nobody's concern.
const REPORT_AFTER: Duration = Duration::from_millis(500);
/// Time between SIGTERM and SIGKILL.
const END: Duration = Duration::from_secs(5);

/// What is left of workers that have ended well.
#[derive(Debug)]
pub(super) struct Leftovers {
    /// How long it may run on. Zero: it is killed at once.
    grace: Duration,
    of: BTreeMap<u32, Stage>,
}

#[derive(Debug)]
enum Stage {
    /// It may run on until then. It is not logged before `report_at`.
    Runs {
        report_at: Option<Instant>,
        until: Instant,
    },
    Stops(Stopping),
}

/// What the driver does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Log what is left of a worker.
    Report { local_rank: u32 },
    /// The grace is over.
    ReportEnd { local_rank: u32 },
    /// As of a stop.
    Do(Command),
}

impl Leftovers {
    pub fn new(grace: Duration) -> Self {
        Self { grace, of: BTreeMap::new() }
    }

    /// How long it may run on.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// A worker has ended well, and something is left of it.
    pub fn begin(&mut self, local_rank: u32, now: Instant) -> Vec<Act> {
        if self.grace.is_zero() {
            return vec![Act::ReportEnd { local_rank }, Act::Do(Command::Kill { local_rank })];
        }
        let until = now + self.grace;
        self.of.insert(local_rank, Stage::Runs { report_at: Some(until.min(now + REPORT_AFTER)), until });
        Vec::new()
    }

    /// Nothing is left of a worker.
    pub fn on_gone(&mut self, local_rank: u32) {
        self.of.remove(&local_rank);
    }

    /// All workers are stopped, and what is left of each with them.
    pub fn forget(&mut self) {
        self.of.clear();
    }

    /// What is due at `now`. Calling early is harmless.
    pub fn poll(&mut self, now: Instant) -> Vec<Act> {
        let mut due = Vec::new();
        for (&local_rank, stage) in &mut self.of {
            if let Stage::Runs { report_at, until } = stage {
                if report_at.take_if(|at| *at <= now).is_some() {
                    due.push(Act::Report { local_rank });
                }
                if *until > now {
                    continue;
                }
                due.push(Act::ReportEnd { local_rank });
                let policy = StopPolicy { grace: END, ..StopPolicy::default() };
                let (stopping, commands) = Stopping::begin(policy, [local_rank], now);
                due.extend(commands.into_iter().map(Act::Do));
                *stage = Stage::Stops(stopping.without_dump());
            }
            if let Stage::Stops(stopping) = stage {
                due.extend(stopping.poll(now).into_iter().map(Act::Do));
            }
        }
        due
    }

    /// When to call [`poll`](Self::poll) next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let next = |stage: &Stage| match stage {
            Stage::Runs { report_at, until } => Some(report_at.unwrap_or(*until)),
            Stage::Stops(stopping) => stopping.next_deadline(),
        };
        self.of.values().filter_map(next).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::Signal;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn helpers_run_for_the_grace_then_get_sigterm_and_then_sigkill() {
        let now = Instant::now();
        let mut left = Leftovers::new(30 * SECOND);
        assert_eq!(left.begin(2, now), []);
        assert_eq!(left.poll(now), []);
        assert_eq!(left.next_deadline(), Some(now + REPORT_AFTER));
        assert_eq!(left.poll(now + SECOND), [Act::Report { local_rank: 2 }]);
        assert_eq!(left.next_deadline(), Some(now + 30 * SECOND));
        let signal = |signal| Act::Do(Command::Signal { local_rank: 2, signal });
        let expected = [Act::ReportEnd { local_rank: 2 }, signal(Signal::TERM), signal(Signal::CONT)];
        assert_eq!(left.poll(now + 30 * SECOND), expected);
        assert_eq!(left.next_deadline(), Some(now + 35 * SECOND));
        assert_eq!(left.poll(now + 35 * SECOND), [Act::Do(Command::Kill { local_rank: 2 })]);
        assert_eq!(left.poll(now + 40 * SECOND), [Act::Do(Command::Abandon { local_rank: 2 })]);
        assert_eq!(left.next_deadline(), None);
    }

    #[test]
    fn helpers_that_end_at_once_are_not_logged() {
        let now = Instant::now();
        let mut left = Leftovers::new(30 * SECOND);
        left.begin(0, now);
        left.on_gone(0);
        assert_eq!((left.poll(now + 60 * SECOND), left.next_deadline()), (Vec::new(), None));
    }

    #[test]
    fn without_grace_helpers_are_named_and_killed_at_once() {
        let mut left = Leftovers::new(Duration::ZERO);
        let expected = [Act::ReportEnd { local_rank: 1 }, Act::Do(Command::Kill { local_rank: 1 })];
        assert_eq!(left.begin(1, Instant::now()), expected);
        assert_eq!(left.next_deadline(), None);
    }
}
