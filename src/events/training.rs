//! What recoveries have cost a training that reports its steps. Pure.

use std::time::{Duration, Instant};

use super::record::{FirstStep, Kind};

/// Nanoseconds, each as often as there are workers.
type WorkerNs = u128;

/// The time in which no steps were made that count, of all workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Training {
    /// When the first step was made.
    since: Option<Instant>,
    closed: Option<Instant>,
    /// Workers of the last world, and of the one before. Nodes, if those do not report workers. 0: this coordinator has formed no world
    /// yet.
    workers: u32,
    workers_before: u32,
    /// Until when time is counted in `elapsed` and `idle`.
    counted_until: Option<Instant>,
    /// Since the first step.
    elapsed: WorkerNs,
    /// No step is made, after the first one: the world is broken, or its workers have just been started.
    is_idle: bool,
    /// Since that is so.
    idle: WorkerNs,
    /// The current round has made a step.
    made_step: bool,
    lost: WorkerNs,
    redone_steps: u64,
    redone: WorkerNs,
    round: Redone,
}

/// What is redone in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Redone {
    /// Number of the lowest first step.
    first: Option<u64>,
    /// Number of the highest step that was made before.
    before: Option<u64>,
    /// The longest mean time of a step before, in microseconds.
    step_time_us: u64,
    /// Since the first step of the training until this round's.
    at_most: Duration,
}

impl Redone {
    /// Number of steps that are made again.
    fn steps(&self) -> u64 {
        self.before.zip(self.first).map_or(0, |(before, first)| before.saturating_add(1).saturating_sub(first))
    }

    /// What they cost: never more than was there, whatever nodes report.
    fn time(&self) -> Duration {
        Duration::from_micros(self.steps().saturating_mul(self.step_time_us)).min(self.at_most)
    }
}

impl Training {
    /// Count an event.
    pub fn count(&mut self, kind: &Kind, now: Instant) {
        self.pass(now);
        match kind {
            Kind::RoundBroken { .. } | Kind::RoundChanges {} => self.is_idle = self.since.is_some(),
            Kind::RoundGoesOn {} if self.made_step => (self.is_idle, self.idle) = (false, 0),
            Kind::RoundCompleted { nodes, workers, .. } => {
                self.end_round();
                let nodes = u32::try_from(*nodes).unwrap_or(u32::MAX);
                self.form(workers.unwrap_or(nodes).max(1));
                self.made_step = false;
            }
            Kind::FirstStep(first) => self.on_step(first, now),
            Kind::RunClosed { .. } => self.closed = Some(now),
            _ => {}
        }
    }

    /// A world of so many workers is formed. If a coordinator that was restarted forms its first one, the world before, which it did not
    /// form, is taken to have been as large.
    fn form(&mut self, workers: u32) {
        if self.workers == 0 {
            let times = [&mut self.elapsed, &mut self.idle, &mut self.lost, &mut self.redone];
            times.into_iter().for_each(|time| *time *= WorkerNs::from(workers));
            self.workers = workers;
        }
        (self.workers_before, self.workers) = (self.workers, workers);
    }

    /// How often a moment counts.
    fn weight(&self) -> u32 {
        self.workers.max(1)
    }

    /// Count the time until now.
    fn pass(&mut self, now: Instant) {
        let Some(until) = self.counted_until.filter(|_| self.closed.is_none()) else { return };
        let time = worker_ns(now.saturating_duration_since(until), self.weight());
        self.elapsed += time;
        if self.is_idle {
            self.idle += time;
        }
        self.counted_until = Some(until.max(now));
    }

    fn on_step(&mut self, first: &FirstStep, now: Instant) {
        let since = *self.since.get_or_insert(now);
        self.counted_until.get_or_insert(now);
        self.made_step = true;
        self.lost += std::mem::take(&mut self.idle);
        self.is_idle = false;
        let round = &mut self.round;
        round.first = round.first.into_iter().chain(first.step).min();
        round.before = round.before.max(first.step_before);
        round.step_time_us = round.step_time_us.max(first.step_time_us.unwrap_or(0));
        round.at_most = now.saturating_duration_since(since);
    }

    fn end_round(&mut self) {
        self.redone_steps = self.redone_steps();
        self.redone += worker_ns(std::mem::take(&mut self.round).time(), self.weight());
    }

    /// A failure in the world before this one was known so long after it. That costs a training that has made steps, and never more than
    /// it lasts.
    pub fn lose(&mut self, time: Duration, now: Instant) {
        if let Some(since) = self.since {
            self.lost += worker_ns(time.min(now.saturating_duration_since(since)), self.workers_before);
        }
    }

    /// Number of steps that were made again.
    pub fn redone_steps(&self) -> u64 {
        self.redone_steps.saturating_add(self.round.steps())
    }

    /// The Goodput: share of wall time spent in steps that were not repeated. Each moment has the weight of the workers of its
    /// world. `None`: no step was reported.
    pub fn goodput(&self, now: Instant) -> Option<f64> {
        let mut until_now = self.clone();
        until_now.pass(now);
        let weight = until_now.weight();
        let Self { elapsed, lost, idle, redone, round, .. } = until_now;
        let lost = lost + idle + redone + worker_ns(round.time(), weight);
        (elapsed > 0).then(|| (1.0 - lost as f64 / elapsed as f64).max(0.0))
    }
}

fn worker_ns(time: Duration, workers: u32) -> WorkerNs {
    time.as_nanos() * WorkerNs::from(workers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::Why;

    fn completed() -> Kind {
        Kind::RoundCompleted { nodes: 2, workers: None, rank0: None, in_place: false }
    }

    fn broken() -> Kind {
        Kind::RoundBroken { why: Why::WorkerFailed }
    }

    fn first(step: Option<u64>, step_before: Option<u64>) -> Kind {
        let step_time_us = step_before.map(|_| 100_000);
        Kind::FirstStep(FirstStep { first_step_us: 1, step, step_before, step_time_us, ..FirstStep::default() })
    }

    #[test]
    fn goodput_is_what_is_left_of_recoveries_and_of_steps_made_again() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut training = Training::default();
        for (seconds, kind) in [
            (0, completed()),
            (20, first(Some(1), None)),
            (60, broken()),
            (62, completed()),
            (65, broken()), // before it made a step
            (66, completed()),
            (70, first(Some(351), Some(400))),
            (71, first(Some(352), Some(399))),
        ] {
            assert_eq!(training.goodput(at(seconds)).is_some(), seconds > 20);
            training.count(&kind, at(seconds));
        }
        // 10 s without steps, and steps 351 to 400 again, of 0.1 s each.
        assert_eq!(training.redone_steps(), 50);
        assert_eq!(training.goodput(at(120)), Some(0.85));
        training.lose(Duration::from_secs(5), at(120));
        assert_eq!(training.goodput(at(120)), Some(0.8));
        training.count(&broken(), at(120));
        assert_eq!(training.goodput(at(220)), Some(0.4), "nobody makes a step since then");
        training.count(&Kind::RoundGoesOn {}, at(220));
        assert_eq!(training.goodput(at(220)), Some(0.9), "it was not broken after all");
        training.count(&completed(), at(221));
        training.count(&first(None, Some(9)), at(222));
        assert_eq!(training.redone_steps(), 50, "nobody says where the training goes on");
    }

    /// Of nine workers one is on a node of its own. The others train on without it.
    #[test]
    fn each_moment_counts_as_often_as_there_are_workers() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let formed = |nodes, workers| Kind::RoundCompleted { nodes, workers, rank0: None, in_place: false };
        for (workers, expected) in [([Some(9), Some(8)], 1.0 - 98.0 / 890.0), ([None, None], 1.0 - 21.0 / 190.0)] {
            let mut training = Training::default();
            for (seconds, kind) in [
                (0, formed(2, workers[0])),
                (0, first(Some(1), None)),
                (80, broken()),
                (90, formed(1, workers[1])),
                (91, first(Some(2), None)),
            ] {
                training.count(&kind, at(seconds));
            }
            let goodput = training.goodput(at(100)).unwrap();
            assert!((goodput - expected).abs() < 1e-9, "{goodput}, not {expected}");
        }
    }

    /// Its workers have started under the coordinator before. Their world costs as much as the next one, which is as large.
    #[test]
    fn a_restarted_coordinator_counts_the_time_of_a_world_that_it_has_not_formed() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut training = Training::default();
        training.count(&first(Some(1), None), at(0));
        assert_eq!(training.goodput(at(10)), Some(1.0));
        training.count(&broken(), at(50));
        assert_eq!(training.goodput(at(100)), Some(0.5));
        training.count(&Kind::RoundCompleted { nodes: 2, workers: Some(16), rank0: None, in_place: false }, at(60));
        training.lose(Duration::from_secs(20), at(60));
        training.count(&first(Some(2), None), at(70));
        assert_eq!(training.goodput(at(100)), Some(0.6));
    }

    #[test]
    fn a_failure_before_the_first_step_costs_the_training_nothing() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut training = Training::default();
        training.count(&completed(), at(0));
        training.count(&broken(), at(60));
        training.count(&completed(), at(61));
        training.lose(Duration::from_secs(60), at(61)); // a node that was silent
        training.count(&first(Some(1), None), at(70));
        assert_eq!(training.goodput(at(80)), Some(1.0));
        training.lose(Duration::from_secs(u64::MAX), at(80));
        assert_eq!(training.goodput(at(110)), Some(0.75), "no longer than the training lasts");
    }

    #[test]
    fn a_node_that_lies_about_its_steps_costs_at_most_the_time_that_was_there() {
        let begin = Instant::now();
        let mut training = Training::default();
        for kind in [completed(), first(Some(0), None), completed()] {
            training.count(&kind, begin);
        }
        let lie = FirstStep {
            step: Some(0),
            step_before: Some(u64::MAX),
            step_time_us: Some(u64::MAX),
            ..FirstStep::default()
        };
        training.count(&Kind::FirstStep(lie), begin + Duration::from_secs(10));
        assert_eq!(training.redone_steps(), u64::MAX);
        assert_eq!(training.goodput(begin + Duration::from_secs(40)), Some(0.75));
    }
}
