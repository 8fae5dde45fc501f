//! The lines of workers that show progress, as far as the agent reads them.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

use super::super::progress_log::ProgressPattern;
use crate::clock::monotonic_ns;

/// When a line of a worker showed progress last. The threads that copy output write it, the agent reads it.
#[derive(Debug)]
pub struct ProgressLog {
    pattern: ProgressPattern,
    /// On the system's monotonic clock; 0: never.
    last_ns: AtomicU64,
    matched: Notify,
}

impl ProgressLog {
    /// For the lines that match.
    pub fn new(pattern: ProgressPattern) -> Self {
        Self { pattern, last_ns: AtomicU64::new(0), matched: Notify::new() }
    }

    /// A worker has printed a line.
    pub(super) fn on_line(&self, line: &[u8]) {
        if self.pattern.matches(line) {
            self.last_ns.fetch_max(monotonic_ns(), Ordering::Relaxed);
            self.matched.notify_one();
        }
    }

    /// When a line matched last, in nanoseconds of the monotonic clock; 0: none has.
    pub fn last_ns(&self) -> u64 {
        self.last_ns.load(Ordering::Relaxed)
    }

    /// Wait until a line has matched after that time. One task may wait. May be dropped.
    pub async fn matched_after(&self, ns: u64) {
        while self.last_ns() <= ns {
            self.matched.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_for_a_line_that_matches_sees_it_once() {
        let log = ProgressLog::new("^step".parse().unwrap());
        log.on_line(b"loading\n");
        assert_eq!(log.last_ns(), 0);
        let (before, waited) = (monotonic_ns(), log.matched_after(0));
        log.on_line(b"step 1\n");
        waited.await;
        let seen = log.last_ns();
        assert!(seen >= before);
        let again = log.matched_after(seen);
        assert!(tokio::time::timeout(std::time::Duration::ZERO, again).await.is_err());
    }
}
