//! For how long a host is kept out of a job after it has failed.

use std::time::{Duration, Instant};

/// The shortest and the longest time out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first time out. Above zero.
    pub shortest: Duration,
    /// No time out is longer.
    pub longest: Duration,
}

impl Range {
    /// How many doublings lead to the longest time out: further ones would have to be forgiven without having been felt.
    fn steps(&self) -> u32 {
        let reaches = |step: &u32| self.shortest.saturating_mul(1 << step) >= self.longest;
        (0..31).find(reaches).unwrap_or(31)
    }
}

/// A host that has done well for so long gets the time out before the last one again.
const FORGIVEN_AFTER: Duration = Duration::from_secs(86_400);

/// The times out of one host: the shortest first, then twice the last one up to the longest, and one step less for each day
/// without a failure. Horovod's begin with two or three times the shortest, and never get shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cooldown {
    /// How many doublings the last time out had.
    step: u32,
    /// Until when the host is out. `None` with `failed`: for the whole job.
    until: Option<Instant>,
    failed_at: Option<Instant>,
}

impl Cooldown {
    /// The host has failed. Without a range it is out for the whole job. A host that is out already is not punished twice.
    pub fn fail(&mut self, range: Option<Range>, now: Instant) {
        if self.is_out(now) {
            return;
        }
        let Some(range) = range else {
            (self.until, self.failed_at) = (None, Some(now));
            return;
        };
        let step = match self.failed_at {
            None => 0,
            Some(before) => {
                let days = now.saturating_duration_since(before).as_secs() / FORGIVEN_AFTER.as_secs();
                (self.step + 1).saturating_sub(u32::try_from(days).unwrap_or(u32::MAX))
            }
        };
        self.step = step.min(range.steps());
        let out = range.shortest.saturating_mul(1 << self.step).min(range.longest);
        (self.until, self.failed_at) = (now.checked_add(out), Some(now));
    }

    /// Whether the host is out.
    pub fn is_out(&self, now: Instant) -> bool {
        match (self.failed_at, self.until) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(_), Some(until)) => now < until,
        }
    }

    /// When the host may come back. `None` if it is not out, or for the whole job.
    pub fn back_at(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const RANGE: Option<Range> = Some(Range { shortest: s(10), longest: s(60) });

    /// How long the host is out after each of these failures, each as soon as it is back.
    fn times_out(failures: usize) -> Vec<u64> {
        let (mut cooldown, mut now) = (Cooldown::default(), Instant::now());
        let mut times = Vec::new();
        for _ in 0..failures {
            cooldown.fail(RANGE, now);
            let back = cooldown.back_at(now).unwrap();
            times.push((back - now).as_secs());
            assert!(cooldown.is_out(back - s(1)) && !cooldown.is_out(back));
            now = back;
        }
        times
    }

    #[test]
    fn times_out_begin_with_the_shortest_and_double_up_to_the_longest() {
        assert_eq!(times_out(6), [10, 20, 40, 60, 60, 60]);
    }

    #[test]
    fn a_day_without_failures_takes_one_doubling_back() {
        let (mut cooldown, start) = (Cooldown::default(), Instant::now());
        for at in [0, 100, 200] {
            cooldown.fail(RANGE, start + s(at));
        }
        assert_eq!(cooldown.back_at(start + s(200)), Some(start + s(240)));
        // The next would be the fourth step. One day takes one step, two days take two.
        let mut later = cooldown.clone();
        later.fail(RANGE, start + s(200 + 86_400));
        assert_eq!(later.back_at(start + s(200 + 86_400)), Some(start + s(240 + 86_400)));
        let mut much_later = cooldown;
        let after = start + s(200 + 10 * 86_400);
        much_later.fail(RANGE, after);
        assert_eq!(much_later.back_at(after), Some(after + s(10)));
    }

    #[test]
    fn without_a_range_a_host_is_out_for_the_job() {
        let (mut cooldown, now) = (Cooldown::default(), Instant::now());
        assert!(!cooldown.is_out(now));
        cooldown.fail(None, now);
        assert!(cooldown.is_out(now + s(1_000_000)));
        assert_eq!(cooldown.back_at(now), None);
    }

    #[test]
    fn a_host_that_is_out_is_not_punished_twice() {
        let (mut cooldown, now) = (Cooldown::default(), Instant::now());
        cooldown.fail(RANGE, now);
        cooldown.fail(RANGE, now + s(5));
        assert_eq!(cooldown.back_at(now + s(5)), Some(now + s(10)));
    }
}
