//! How long a node's parts of a recovery take: a stopwatch. Pure. Each part begins when the one before it ends.

use std::time::{Duration, Instant};

use crate::events::record::Phase;
use crate::wire::time::micros;

/// Measures from the order to stop, or from the first join, until the workers run again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stopwatch {
    /// When the part that is under way began.
    stop_since: Option<Instant>,
    join_since: Option<Instant>,
    placement_at: Option<Instant>,
    /// The parts that are over.
    detect: Option<Duration>,
    stop: Option<Duration>,
    rendezvous: Option<Duration>,
}

impl Stopwatch {
    /// A worker's failure is known, so long after it. Later failures follow from the first.
    pub fn detected(&mut self, after: Duration) {
        self.detect.get_or_insert(after);
    }

    /// The workers are asked to stop, or to leave their world. A second order does not begin anew.
    pub fn stop_ordered(&mut self, now: Instant) {
        self.stop_since.get_or_insert(now);
    }

    /// Nothing is left of the workers. If there is a place already, others are started in it now.
    pub fn stopped(&mut self, now: Instant) {
        if let Some(placement_at) = &mut self.placement_at {
            *placement_at = now;
            self.end_stop(now);
        }
    }

    /// A place is asked for. The workers have stopped, and what they said is known.
    pub fn join_asked(&mut self, now: Instant) {
        self.end_stop(now);
        self.join_since = Some(now);
    }

    fn end_stop(&mut self, now: Instant) {
        if let Some(since) = self.stop_since.take() {
            self.stop = Some(self.stop.unwrap_or_default() + now.saturating_duration_since(since));
        }
    }

    /// There is a place.
    pub fn placed(&mut self, now: Instant) {
        self.placement_at = Some(now);
        if let Some(since) = self.join_since.take() {
            self.rendezvous = Some(now.saturating_duration_since(since));
        }
    }

    /// All workers were started: what each part has taken. The next recovery begins.
    pub fn started(&mut self, now: Instant) -> Phase {
        let Self { detect, stop, rendezvous, placement_at, .. } = std::mem::take(self);
        Phase {
            detect_us: detect.map(micros),
            stop_us: stop.map(micros),
            rendezvous_us: rendezvous.map(micros),
            start_us: placement_at.map(|since| micros(now.saturating_duration_since(since))),
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
        watch.detected(Duration::from_millis(3));
        watch.stop_ordered(at(1000));
        watch.detected(Duration::from_millis(9));
        watch.stop_ordered(at(1500));
        watch.stopped(at(2000));
        watch.join_asked(at(2001));
        watch.placed(at(2011));
        let again = Phase {
            detect_us: Some(3_000),
            stop_us: Some(1_001_000),
            rendezvous_us: Some(10_000),
            start_us: Some(0),
            ..Phase::default()
        };
        assert_eq!(watch.started(at(2011)), again, "from the failure to the start without a gap");
        assert_eq!(watch.started(at(3000)), Phase::default());
    }

    /// Workers that had left their world cannot live on in the next one.
    #[test]
    fn workers_that_are_stopped_after_the_placement_was_given_stop_twice() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut watch = Stopwatch::default();
        watch.stop_ordered(at(0));
        watch.join_asked(at(100));
        watch.placed(at(120));
        watch.stop_ordered(at(120));
        watch.stopped(at(150));
        let phase = watch.started(at(155));
        assert_eq!((phase.stop_us, phase.rendezvous_us, phase.start_us), (Some(130_000), Some(20_000), Some(5_000)));
    }
}
