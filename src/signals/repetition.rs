//! Which signals are one. Pure.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A signal that comes within this time of the one before that counts is the same: `timeout` signals its child and then its group,
/// wrappers pass Ctrl-C on that the terminal has given to all, and systemd signals each process of a control group.
pub const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// When the last signal counted that is no repetition, in nanoseconds; 0: none has. Atomic, for signal handlers.
#[derive(Debug)]
pub(super) struct Repetition<'a>(&'a AtomicU64);

impl<'a> Repetition<'a> {
    /// Of a process.
    pub fn of(last: &'a AtomicU64) -> Self {
        Self(last)
    }

    /// Whether a signal that comes `now` repeats the one before. If not, it counts.
    pub fn repeats(&self, now: u64) -> bool {
        let counts = |last: u64| (last == 0 || now.saturating_sub(last) > SAME_SIGNAL.as_nanos() as u64).then_some(now);
        self.0.fetch_update(Relaxed, Relaxed, counts).is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_half_a_second_are_one_and_a_later_one_is_another() {
        let last = AtomicU64::new(0);
        let found = [3_000, 3_001, 3_499, 3_501, 3_900, 4_002].map(|ms| Repetition::of(&last).repeats(ms * 1_000_000));
        assert_eq!(found, [false, true, true, false, true, false]);
    }
}
