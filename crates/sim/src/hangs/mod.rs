//! Trainings whose steps stall, and the judge of hangs: how often it gives a false alarm, and how late a true one.
//!
//! | part | what |
//! |---|---|
//! | [`job`] | made-up jobs, with the seeds of the prototype |
//! | [`numpy`] | numpy's generator, which these were drawn from |
//! | this file | a job in virtual time: the pace of its steps, views of two ranks, and the judge |

use std::time::{Duration, Instant};

use elastic_rs::hang::judge::pace::{Change, Pace, Reached};
use elastic_rs::hang::judge::{Effect, Judge, Options, Still};
use elastic_rs::hang::view::{Class, Entry, Gil, Group, Signature, State, View, WORLD};

pub mod job;
pub mod numpy;

use job::{Job, Part};

/// Longest stall that ends by itself, in seconds.
pub const CAP: f64 = 120.0;
/// How long the answers to a look take.
const ANSWER: Duration = Duration::from_millis(500);
const NODE: u128 = 7;
const ROUND: u64 = 1;

/// What became of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lived {
    /// Hangs that were found, and waits that were suspended.
    pub alarms: u32,
    /// Events that say who is waited for.
    pub waits: u32,
    /// Looks at all ranks.
    pub looks: u32,
    /// Restarts of the workers.
    pub restarts: u32,
    /// The rank that was named last.
    pub named: Option<u32>,
    /// Virtual hours.
    pub hours: f64,
    /// How long after the last step the hang was found, if there was one.
    pub delay: Option<Duration>,
}

/// Live through a job. At step `hangs_at` the awaited rank stops to do anything, for ever.
pub fn live(job: &Job, options: Options, hangs_at: Option<usize>) -> Lived {
    let start = Instant::now();
    let mut judge = Judge::new(options);
    judge.on_round(ROUND, [NODE], start);
    let mut run = Run {
        start,
        now: start,
        judge,
        pace: Pace::new(start),
        reached: None,
        began: 0.0,
        parts: Vec::new(),
        looked: None,
        answer: None,
        lived: Lived::default(),
    };
    for step in 0..job.steps {
        let hangs = hangs_at == Some(step);
        let seconds = if hangs { 86_400.0 } else { job.seconds(step) };
        run.parts.clear();
        match hangs {
            true => (run.lived.delay, run.parts) = (None, vec![Part::Idle(seconds)]),
            false => run.parts.extend(job.parts(step)),
        }
        let end = run.began + seconds;
        run.until(start + Duration::from_secs_f64(end), hangs);
        if hangs {
            break;
        }
        run.began = end;
        let at = start + Duration::from_secs_f64(end);
        let first_at = run.reached.map_or(at, |reached| reached.first_at);
        run.reached = Some(Reached { steps: step as u64 + 1, first_at, at });
    }
    run.lived.hours = run.began / 3600.0;
    run.lived
}

struct Run {
    start: Instant,
    now: Instant,
    judge: Judge,
    pace: Pace,
    reached: Option<Reached>,
    /// When the step began, in seconds from the start.
    began: f64,
    parts: Vec<Part>,
    /// When the last look was.
    looked: Option<Instant>,
    /// The look that is answered, and when.
    answer: Option<(u64, Instant)>,
    lived: Lived,
}

impl Run {
    /// Do what is due before that time. `once`: until a hang is found.
    fn until(&mut self, end: Instant, once: bool) {
        while !(once && self.lived.delay.is_some()) {
            let answered = self.answer.map(|(_, at)| at);
            let due = [Some(self.pace.next_look()), self.judge.next_deadline(), answered];
            let Some(at) = due.into_iter().flatten().min().filter(|at| *at < end) else { return };
            self.now = self.now.max(at);
            if let Some((look, _)) = self.answer.filter(|(_, at)| *at <= self.now) {
                self.answer = None;
                let views = self.views();
                self.judge.on_views(look, views, self.now);
            } else if self.pace.next_look() <= self.now {
                match self.pace.on_look(self.reached, self.now) {
                    Some(Change::Still(still)) => {
                        let has_stepped = still.steps > 0;
                        let still = Still {
                            round: ROUND,
                            since: still.since,
                            has_stepped,
                            step_time: still.step_time,
                            is_counted: false,
                            section: None,
                        };
                        self.judge.on_still(NODE, still, self.now);
                    }
                    Some(Change::Moved(at, _)) => {
                        self.looked = None;
                        self.judge.on_moved(NODE, ROUND, at, true, self.now);
                    }
                    None => {}
                }
            } else {
                self.judge.on_tick(self.now);
            }
            self.perform();
        }
    }

    fn perform(&mut self) {
        for effect in self.judge.take_effects() {
            match effect {
                Effect::Look(look) => {
                    self.lived.looks += 1;
                    self.answer = Some((look, self.now + ANSWER));
                }
                Effect::Waits { finding, .. } => {
                    self.lived.waits += 1;
                    self.lived.named = finding.ranks.first();
                }
                Effect::Found { .. } => {
                    self.lived.alarms += 1;
                    let last = self.reached.map_or(self.start, |reached| reached.at);
                    self.lived.delay = Some(self.now.saturating_duration_since(last));
                }
                Effect::Suspended => self.lived.alarms += 1,
                Effect::Restart { .. } => self.lived.restarts += 1,
                Effect::Over { .. } => {}
            }
        }
    }

    /// Views of two ranks: rank 1 waits in a collective that rank 0 has not entered.
    fn views(&mut self) -> Vec<View> {
        let now = self.seconds(self.now);
        let class = self.looked.map(|looked| self.class(self.seconds(looked), now));
        self.looked = Some(self.now);
        let steps = self.reached.map_or(0, |reached| reached.steps);
        // Collectives of an evaluation count as further ones of the step.
        let last = 1 + steps * 1_000_000 + self.entered(now);
        let view = |rank: u32, last: u64, is_pending: bool| {
            let entry = Entry { seq: last, at: 0, signature: 0 };
            let world = Group { name: WORLD.to_owned(), last, oldest: last, tail: vec![entry], ..Group::default() };
            View {
                pid: 100 + rank,
                state: State::Sleeping,
                gil: Gil::Free,
                answered: true,
                class: if rank == 0 { class } else { class.and(Some(Class::Idle)) },
                signatures: vec![Signature { op: "all_reduce".to_owned(), shape: "[8] Float".to_owned() }],
                groups: vec![Group { pending: if is_pending { vec![entry] } else { Vec::new() }, ..world }],
                ..View::new(rank, ROUND)
            }
        };
        vec![view(0, last, false), view(1, last + 1, true)]
    }

    fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.start).as_secs_f64()
    }

    /// The parts of this step, each with its begin and end.
    fn timeline(&self) -> impl Iterator<Item = (Part, f64, f64)> + '_ {
        self.parts.iter().scan(self.began, |at, part| {
            let from = *at;
            *at += part.seconds();
            Some((*part, from, *at))
        })
    }

    /// What the awaited rank did in a time.
    fn class(&self, from: f64, to: f64) -> Class {
        let (mut busy, mut moving) = (0.0, 0.0);
        for (part, begin, end) in self.timeline() {
            let here = f64::max(0.0, end.min(to) - begin.max(from));
            match part {
                Part::Busy(_) | Part::Collectives(..) => busy += here,
                Part::Moving(_) => moving += here,
                Part::Idle(_) => {}
            }
        }
        let time = f64::max(to - from, 1e-9);
        // Checkpoints are written at 100 MiB/s or more, and from 1 MiB/s on it counts.
        if moving / time >= 0.01 {
            Class::Moving
        } else if busy / time >= 0.1 {
            Class::Busy
        } else {
            Class::Idle
        }
    }

    /// How many collectives of this step the awaited rank has entered.
    fn entered(&self, now: f64) -> u64 {
        let entered = self.timeline().map(|(part, from, to)| match part {
            Part::Collectives(_, each) if now > from => ((now.min(to) - from) / each) as u64,
            _ => 0,
        });
        entered.sum()
    }
}
