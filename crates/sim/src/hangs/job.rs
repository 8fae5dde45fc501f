//! Made-up jobs: how long their steps take, and what the rank that is waited for does in them. They are those of the prototype, with its
//! seeds.

use super::numpy::Generator;

/// What the awaited rank does for a time, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Part {
    /// It computes.
    Busy(f64),
    /// It waits for storage or the network.
    Idle(f64),
    /// It writes a checkpoint.
    Moving(f64),
    /// It evaluates: for so long, with a collective each so many seconds.
    Collectives(f64, f64),
}

impl Part {
    /// How long it takes.
    pub fn seconds(self) -> f64 {
        match self {
            Self::Busy(seconds) | Self::Idle(seconds) | Self::Moving(seconds) | Self::Collectives(seconds, _) => {
                seconds
            }
        }
    }
}

/// A job of a seed.
pub struct Job {
    /// Number of its steps.
    pub steps: usize,
    compute: Vec<f64>,
    stalls: Vec<f64>,
    evaluations: Vec<f64>,
    /// All ranks evaluate, in collectives that take so long. Otherwise rank 0 does, and the others wait.
    collectives: Option<Vec<f64>>,
    checkpoints: Vec<f64>,
    /// The part of a checkpoint in which nothing is written, and whether the rank waits then, instead of computing.
    silent: f64,
    is_silent_idle: bool,
    first: f64,
}

impl Job {
    /// The job of a seed. No stall is longer than `cap` seconds.
    pub fn new(seed: u32, cap: f64) -> Self {
        let mut dice = Generator::new(seed);
        let step = dice.uniform(0.05_f64.ln(), 30_f64.ln()).exp();
        let steps = 20_000_f64.min(86_400.0 / step) as usize;
        let sigma = dice.uniform(0.03, 0.3);
        let mut compute: Vec<_> = (0..steps).map(|_| step * dice.lognormal(sigma)).collect();
        let often = 10_f64.powf(dice.uniform(-4.0, -2.0));
        let tail = dice.uniform(1.2, 2.5);
        let stalled: Vec<_> = (0..steps).filter(|_| dice.random() < often).collect();
        let long: Vec<_> = stalled.iter().map(|_| step * (dice.pareto(tail) + 1.0)).collect();
        let mut stalls = vec![0.0; steps];
        for (at, long) in stalled.into_iter().zip(long) {
            stalls[at] = f64::min(long, cap * dice.uniform(0.5, 1.0));
        }
        if dice.random() < 0.3 {
            let longer = dice.uniform(1.2, 4.0);
            compute[steps / 2..].iter_mut().for_each(|it| *it *= longer);
        }
        let every = |dice: &mut Generator| dice.integers(50, 1500) as usize;
        let period = every(&mut dice);
        let length = step * dice.uniform(5.0, 100.0);
        let mut evaluations = vec![0.0; steps];
        evaluations.iter_mut().skip(period).step_by(period).for_each(|it| *it = length * dice.lognormal(0.2));
        let all_evaluate = dice.random() < 0.6;
        let mut checkpoints = vec![0.0; steps];
        let period = every(&mut dice);
        checkpoints.iter_mut().skip(period).step_by(period).for_each(|it| *it = 20.0 * step * dice.lognormal(0.3));
        let silent = dice.uniform(0.05, 0.5);
        let is_silent_idle = dice.random() < 0.5;
        let first = dice.uniform(5.0, 600.0);
        let collectives: Vec<_> = (0..steps).map(|_| step * 0.5 * dice.lognormal(0.3)).collect();
        let collectives = all_evaluate.then_some(collectives);
        Self { steps, compute, stalls, evaluations, collectives, checkpoints, silent, is_silent_idle, first }
    }

    /// The parts of a step.
    pub fn parts(&self, step: usize) -> impl Iterator<Item = Part> {
        let first = if step == 0 { self.first } else { 0.0 };
        let (evaluation, checkpoint) = (self.evaluations[step], self.checkpoints[step]);
        let evaluation = match &self.collectives {
            Some(each) => Part::Collectives(evaluation, each[step]),
            None => Part::Busy(evaluation),
        };
        let silent = checkpoint * self.silent;
        let silently = if self.is_silent_idle { Part::Idle(silent) } else { Part::Busy(silent) };
        let parts = [
            Part::Busy(self.compute[step] + first),
            Part::Idle(self.stalls[step]),
            evaluation,
            Part::Moving(checkpoint - silent),
            silently,
        ];
        parts.into_iter().filter(|part| part.seconds() > 0.0)
    }

    /// How long a step takes.
    pub fn seconds(&self, step: usize) -> f64 {
        let first = if step == 0 { self.first } else { 0.0 };
        self.compute[step] + first + self.stalls[step] + self.evaluations[step] + self.checkpoints[step]
    }

    /// How many alarms NVIDIA's resiliency extension would give: after five steps, each gap longer than five times the longest so far.
    pub fn alarms_of_nvrx(&self, shortest: f64) -> u32 {
        let (mut longest, mut alarms) = (0_f64, 0);
        for step in 0..self.steps {
            let gap = self.seconds(step);
            if step >= 7 && gap > f64::max(5.0 * longest, shortest) {
                alarms += 1;
            }
            if step > 5 {
                longest = longest.max(gap);
            }
        }
        alarms
    }
}
