//! For how long a host is kept out after it has failed: one rule, for the coordinator and for a driver of hosts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a host is out: `min` at first, twice as long each time, `max` at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cooldown {
    /// Above zero.
    pub min: Duration,
    /// At least `min`.
    pub max: Duration,
}

/// Time without a failure after which a host's next cool-down is half as long.
const FORGIVES_AFTER: Duration = Duration::from_secs(24 * 3600);

impl Cooldown {
    /// How long a host is out that was put out `before` times.
    fn lasts(self, before: u32) -> Duration {
        let doubled = 1_u32.checked_shl(before).and_then(|times| self.min.checked_mul(times));
        doubled.map_or(self.max, |lasts| lasts.min(self.max))
    }

    /// How many doublings lead to `max`. Further ones would have to be forgiven without having been felt.
    fn steps(self) -> u32 {
        (0..u32::BITS).find(|step| self.lasts(*step) == self.max).unwrap_or(u32::BITS)
    }
}

/// How often a host was put out. Horovod's number never falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimesOut(u32);

impl TimesOut {
    /// What is left of the number after a time without a failure: one less for each whole day.
    pub fn after(self, quiet: Duration) -> u32 {
        let forgiven = u32::try_from(quiet.as_secs() / FORGIVES_AFTER.as_secs()).unwrap_or(u32::MAX);
        self.0.saturating_sub(forgiven)
    }

    /// Put the host out once more, so long after its last failure. Returns for how long; `None`, without a cool-down: for the job.
    pub fn put_out(&mut self, quiet: Duration, cooldown: Option<Cooldown>) -> Option<Duration> {
        let before = self.after(quiet).min(cooldown.map_or(u32::MAX - 1, Cooldown::steps));
        self.0 = before + 1;
        cooldown.map(|cooldown| cooldown.lasts(before))
    }

    /// The host was put out once without its fault.
    pub fn take_back(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const DAY: u64 = 86_400;
    const RANGE: Option<Cooldown> = Some(Cooldown { min: s(10), max: s(60) });

    /// For how long a host is out that fails again after each of these times, in seconds.
    fn times_out(quiet: &[u64]) -> Vec<u64> {
        let mut times = TimesOut::default();
        quiet.iter().map(|quiet| times.put_out(s(*quiet), RANGE).unwrap().as_secs()).collect()
    }

    #[test]
    fn times_out_begin_with_the_shortest_and_double_up_to_the_longest() {
        assert_eq!(times_out(&[0; 6]), [10, 20, 40, 60, 60, 60]);
        let mut times = TimesOut::default();
        let long = Cooldown { min: Duration::from_millis(1), max: Duration::MAX };
        let lasts: Vec<_> = (0..40).map(|_| times.put_out(Duration::ZERO, Some(long)).unwrap()).collect();
        assert!(lasts.is_sorted() && lasts[31] == s(1 << 31) / 1000 && lasts[32] == Duration::MAX, "{lasts:?}");
    }

    #[test]
    fn a_day_without_failures_takes_one_doubling_back() {
        assert_eq!(times_out(&[0, 100, DAY - 1, DAY]), [10, 20, 40, 40]);
        assert_eq!(times_out(&[0, 100, 100, 2 * DAY]), [10, 20, 40, 20]);
        assert_eq!(times_out(&[0, 100, 100, 10 * DAY]), [10, 20, 40, 10]);
        // Doublings beyond the longest time are not counted, so that each day is felt.
        assert_eq!(times_out(&[0, 0, 0, 0, 0, 0, 2 * DAY]), [10, 20, 40, 60, 60, 60, 40]);
    }

    #[test]
    fn without_a_cool_down_a_host_is_out_for_the_job() {
        let mut times = TimesOut::default();
        assert_eq!(times.put_out(Duration::MAX, None), None);
        assert_eq!((times.after(s(DAY - 1)), times.after(s(DAY))), (1, 0));
    }

    #[test]
    fn a_time_out_without_a_fault_is_taken_back() {
        let mut times = TimesOut::default();
        times.put_out(Duration::ZERO, RANGE);
        times.put_out(Duration::ZERO, RANGE);
        times.take_back();
        assert_eq!(times.put_out(Duration::ZERO, RANGE), Some(s(20)));
    }
}
