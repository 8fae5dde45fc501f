//! How long a node's parts of a recovery take: a stopwatch. Pure.

use std::time::{Duration, Instant};

use crate::events::record::Phase;

/// Measures from the order to stop, or from the first join, until the workers run again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stopwatch {
    /// When the part that is under way began.
    stop_since: Option<Instant>,
    join_since: Option<Instant>,
    placed_at: Option<Instant>,
    /// The parts that are over.
    stop: Option<Duration>,
    rendezvous: Option<Duration>,
}

impl Stopwatch {
    /// The workers are told to stop. A second order does not begin anew.
    pub fn stop_ordered(&mut self, now: Instant) {
        self.stop_since.get_or_insert(now);
    }

    /// Nothing is left of the workers.
    pub fn stopped(&mut self, now: Instant) {
        if let Some(since) = self.stop_since.take() {
            self.stop = Some(now.saturating_duration_since(since));
        }
    }

    /// A place is asked for.
    pub fn join_asked(&mut self, now: Instant) {
        self.join_since = Some(now);
    }

    /// There is a place.
    pub fn placed(&mut self, now: Instant) {
        self.placed_at = Some(now);
        if let Some(since) = self.join_since.take() {
            self.rendezvous = Some(now.saturating_duration_since(since));
        }
    }

    /// All workers were started: what each part has taken. The next recovery begins.
    pub fn started(&mut self, now: Instant) -> Phase {
        let Self { stop, rendezvous, placed_at, .. } = std::mem::take(self);
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Phase {
            stop_us: stop.map(us),
            rendezvous_us: rendezvous.map(us),
            start_us: placed_at.map(|since| us(now.saturating_duration_since(since))),
            ..Phase::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_measured_from_its_order_to_its_end() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut watch = Stopwatch::default();
        watch.join_asked(at(0));
        watch.placed(at(30));
        let first = Phase { rendezvous_us: Some(30_000), start_us: Some(5_000), ..Phase::default() };
        assert_eq!(watch.started(at(35)), first);
        watch.stop_ordered(at(1000));
        watch.stop_ordered(at(1500));
        watch.stopped(at(2000));
        watch.join_asked(at(2001));
        watch.placed(at(2011));
        let again = Phase { stop_us: Some(1_000_000), rendezvous_us: Some(10_000), ..Phase::default() };
        assert_eq!(watch.started(at(2011)), Phase { start_us: Some(0), ..again });
        assert_eq!(watch.started(at(3000)), Phase::default());
    }
}
