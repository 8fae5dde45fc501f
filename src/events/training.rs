//! What recoveries have cost a training that tells its steps. Pure.

use std::time::{Duration, Instant};

use super::record::{FirstStep, Kind};

/// The time in which no steps were made that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Training {
    /// When the first step was made.
    since: Option<Instant>,
    closed: Option<Instant>,
    /// Since when no step is made, after the first one: the world is broken, or its workers have just been started.
    idle_since: Option<Instant>,
    /// The current round has made a step.
    stepped: bool,
    lost: Duration,
    redone_steps: u64,
    redone: Duration,
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

    /// What they cost: never more than was there, whatever nodes tell.
    fn time(&self) -> Duration {
        Duration::from_micros(self.steps().saturating_mul(self.step_time_us)).min(self.at_most)
    }
}

impl Training {
    /// Count an event.
    pub fn count(&mut self, kind: &Kind, now: Instant) {
        match kind {
            Kind::RoundBroken { .. } | Kind::RoundChanges {} if self.since.is_some() => {
                self.idle_since.get_or_insert(now);
            }
            Kind::RoundGoesOn {} if self.stepped => self.idle_since = None,
            Kind::RoundCompleted { .. } => {
                self.end_round();
                self.stepped = false;
            }
            Kind::FirstStep(first) => self.on_step(first, now),
            Kind::RunClosed { .. } => self.closed = Some(now),
            _ => {}
        }
    }

    fn on_step(&mut self, first: &FirstStep, now: Instant) {
        let since = *self.since.get_or_insert(now);
        self.stepped = true;
        if let Some(idle_since) = self.idle_since.take() {
            self.lost += now.saturating_duration_since(idle_since);
        }
        let round = &mut self.round;
        round.first = round.first.into_iter().chain(first.step).min();
        round.before = round.before.max(first.step_before);
        round.step_time_us = round.step_time_us.max(first.step_time_us.unwrap_or(0));
        round.at_most = now.saturating_duration_since(since);
    }

    fn end_round(&mut self) {
        self.redone_steps = self.redone_steps();
        self.redone += std::mem::take(&mut self.round).time();
    }

    /// A failure was known so long after it. That costs a training that has made steps, and never more than it lasts.
    pub fn lose(&mut self, time: Duration, now: Instant) {
        if let Some(since) = self.since {
            self.lost += time.min(now.saturating_duration_since(since));
        }
    }

    /// Number of steps that were made again.
    pub fn redone_steps(&self) -> u64 {
        self.redone_steps.saturating_add(self.round.steps())
    }

    /// The part of the time since the first step in which steps were made that count. `None`: no step was told.
    pub fn goodput(&self, now: Instant) -> Option<f64> {
        let now = self.closed.unwrap_or(now);
        let elapsed = now.saturating_duration_since(self.since?);
        let idle = self.idle_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let lost = self.lost + idle + self.redone + self.round.time();
        (!elapsed.is_zero()).then(|| (1.0 - lost.as_secs_f64() / elapsed.as_secs_f64()).max(0.0))
    }
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
        Kind::FirstStep(FirstStep { first_step_us: 1, step, step_before, step_time_us })
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
        training.count(&Kind::RoundGoesOn {}, at(221));
        assert_eq!(training.goodput(at(220)), Some(0.9), "it was not broken after all");
        training.count(&completed(), at(221));
        training.count(&first(None, Some(9)), at(222));
        assert_eq!(training.redone_steps(), 50, "nobody says where the training goes on");
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
        training.count(&first(Some(0), None), begin);
        training.count(&completed(), begin);
        let lie =
            FirstStep { step: Some(0), step_before: Some(u64::MAX), step_time_us: Some(u64::MAX), first_step_us: 0 };
        training.count(&Kind::FirstStep(lie), begin + Duration::from_secs(10));
        assert_eq!(training.redone_steps(), u64::MAX);
        assert_eq!(training.goodput(begin + Duration::from_secs(40)), Some(0.75));
    }
}
