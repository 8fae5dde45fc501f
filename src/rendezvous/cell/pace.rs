//! The delays between a node's reads of the cell. Pure.

use std::time::{Duration, Instant};

/// Polling interval while a round forms. It doubles up to [`LOOK_LAST`] while nothing changes.
const LOOK_FIRST: Duration = Duration::from_millis(150);
/// Polling interval while a node runs or is a spare. PyTorch's nodes poll as often.
const LOOK_LAST: Duration = Duration::from_secs(1);

/// The results of the last reads and writes. They determine the next delay.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Reads in a row that found nothing new.
    quiet_looks: u32,
    /// Writes in a row that found another content.
    conflicts: u32,
    /// Number of times in a row that the cell was empty right after a write.
    unkept: u32,
    dice: u64,
}

impl Pace {
    /// `seed` differs between nodes, so that they do not act at the same instants.
    pub fn new(seed: u64) -> Self {
        Self { quiet_looks: 0, conflicts: 0, unkept: 0, dice: seed | 1 }
    }

    /// The node has a request: read often again.
    pub fn asked(&mut self) {
        self.quiet_looks = 0;
    }

    /// The cell's content was reported. `news`: it has changed.
    pub fn looked(&mut self, news: bool) {
        self.quiet_looks = if news { 0 } else { self.quiet_looks.saturating_add(1) };
    }

    /// A read succeeded.
    pub fn read(&mut self) {
        self.conflicts = 0;
    }

    /// A write succeeded.
    pub fn written(&mut self) {
        (self.conflicts, self.unkept) = (0, 0);
    }

    /// A write found another content. `empty`: it found none. Returns the delay before the next read. `None`: write again at once.
    pub fn conflict(&mut self, empty: bool) -> Option<Duration> {
        self.unkept = if empty { self.unkept.saturating_add(1) } else { 0 };
        self.conflicts = self.conflicts.saturating_add(1);
        if self.conflicts == 1 && self.unkept == 0 {
            return None;
        }
        let most = Duration::from_millis(10) * 2_u32.pow(self.conflicts.max(self.unkept).min(6));
        Some(most.mul_f64(self.draw()))
    }

    /// Whether the last write found another content.
    pub fn is_contended(&self) -> bool {
        self.conflicts > 0
    }

    /// Number of times in a row that the cell was empty right after a write.
    pub fn unkept(&self) -> u32 {
        self.unkept
    }

    /// When to read next. `forming`: this node waits for a round to complete. `closes_at`: when the round closes, if no state changes.
    pub fn next_look(&mut self, forming: bool, closes_at: Option<Instant>, now: Instant) -> Instant {
        let most = match forming {
            true => (LOOK_FIRST * 2_u32.pow(self.quiet_looks.min(10))).min(LOOK_LAST),
            false => LOOK_LAST,
        };
        let next = now + most.mul_f64(0.7 + 0.3 * self.draw());
        match closes_at {
            // All nodes expect the round to close then. A random delay lets the first node write before the others read.
            Some(at) => next.min(at + Duration::from_millis(30).mul_f64(self.draw())),
            None => next,
        }
    }

    /// A number from 0 to 1. It need not be very random.
    fn draw(&mut self) -> f64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_become_rarer_while_nothing_changes_and_never_miss_the_closing() {
        let now = Instant::now();
        let mut pace = Pace::new(7);
        let delay = |pace: &mut Pace, forming, closes_at| pace.next_look(forming, closes_at, now) - now;
        for (quiet, forming, most) in [(0, true, 150), (1, true, 300), (5, true, 1000), (0, false, 1000)] {
            pace.asked();
            (0..quiet).for_each(|_| pace.looked(false));
            let (found, most) = (delay(&mut pace, forming, None), Duration::from_millis(most));
            assert!(found >= most.mul_f64(0.7) && found <= most, "{quiet} {forming}: {found:?}");
        }
        let closes_at = Duration::from_millis(200);
        let found = delay(&mut pace, false, Some(now + closes_at));
        assert!(found >= closes_at && found <= closes_at + Duration::from_millis(30), "{found:?}");
    }

    #[test]
    fn a_conflict_is_followed_by_another_write_then_by_longer_and_longer_waits() {
        let mut pace = Pace::new(7);
        assert_eq!((pace.conflict(false), pace.is_contended()), (None, true));
        for most in [40, 80, 160, 320, 640, 640] {
            let wait = pace.conflict(false).expect("others write");
            assert!(wait <= Duration::from_millis(most), "{wait:?}");
        }
        pace.written();
        assert!(!pace.is_contended());
        assert_eq!((pace.conflict(true).is_some(), pace.unkept()), (true, 1), "the backend has kept nothing");
        assert_eq!((pace.conflict(false).is_some(), pace.unkept()), (true, 0));
    }
}
