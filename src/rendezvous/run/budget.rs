//! With `restart_window`: whether a job is restarted once more, and when.
//!
//! Without `restart_window` there are `max_restarts` in all, as PyTorch counts them. With it:
//!
//! - **A sliding budget.** Within the window there are `max_restarts` restarts after crashes, and as many after hangs. Losses of nodes
//!   have limits of their own (`host_failures`, `rejoin_limit`, `reset_limit`).
//! - **Progress gives back.** A restart no longer counts if its world made as many new steps as it had to repeat.
//! - **No progress ends the job.** [`MOST_IN_VAIN`] restarts in a row without a new step are enough.
//! - **The same fault.** One exception at one place of the program, [`SAME_FAULT`] times at the same step: on several hosts the program
//!   is the cause, on one host that host is.
//! - **New workers.** A worker that is new among others that go on, and fails before its world's first step, costs the job nothing. After
//!   [`NEW_WORKER_FAILURES`] of them on one host that host is at fault.
//! - **A bad start.** The same crash within [`SHORT`] of the start, twice in a row and before any step, ends the job. After different
//!   ones the next start waits from the third on, longer each time.
//!
//! Pure. The instants are those of the process that decides: a coordinator that is restarted has forgotten everything here. The successor of
//! one knows what [`Budget::kept`] has.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::hosts::check_host;
use super::node::Origin;
use crate::hosts::{is_recent, latest};
use crate::rendezvous::messages::message::{EndClass, Failure, LARGEST_STEP};
use crate::wire::text::{cut, plain};

/// Restarts in a row without a new step after which the job ends.
pub(super) const MOST_IN_VAIN: u32 = 3;
/// So many times the same fault at the same step show whose it is.
const SAME_FAULT: usize = 3;
/// Faults that are remembered.
const MOST_FAULTS: usize = 16;
/// So many failures of new workers within the window show that their host is at fault.
pub(super) const NEW_WORKER_FAILURES: usize = 3;
/// Failures of new workers that are remembered.
const MOST_NEW_WORKERS: usize = 1000;
/// A script that reports no steps is taken to have made one after this time.
const FIRST_STEP_WITHIN: Duration = Duration::from_secs(60);
/// A world that ends sooner had a bad start.
const SHORT: Duration = Duration::from_secs(10);
/// From this bad start in a row on, the next one waits.
const PAUSES_FROM: u32 = 3;
/// How long at first. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// How long at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Longest text that tells a fault from others, in bytes.
const SIGNATURE_BYTES: usize = 512;
/// Restarts, faults and failures of new workers of which a successor knows: the latest.
const RESTARTS_KEPT: usize = 64;
const FAULTS_KEPT: usize = 8;
const NEW_WORKERS_KEPT: usize = 24;

/// How many restarts a sliding budget allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    pub restarts: u32,
    pub window: Duration,
}

/// How many restarts are left in a sliding budget, for observers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Its length in seconds.
    pub window_s: u64,
    /// Restarts after crashes that are left within it.
    pub crashes: u32,
    /// Restarts after hangs.
    pub hangs: u32,
    /// Restarts in a row that brought no new step.
    pub in_vain: u32,
}

/// A failure that is to be judged.
#[derive(Debug)]
pub(super) struct Crash<'a> {
    pub failure: &'a Failure,
    /// The host of the worker.
    pub origin: Origin,
    /// The last step that is known of the whole world.
    pub step: Option<u64>,
    /// Whether the job can go on without that host.
    pub spares_host: bool,
}

/// What follows from an interruption.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// The workers are restarted.
    Restart {
        /// After this time.
        pause: Option<Duration>,
        /// Why the host is not used any more, if it is at fault.
        host_is_out: Option<String>,
    },
    /// The job ends.
    End {
        class: EndClass,
        /// Why, in words.
        why: String,
    },
}

/// What a fault is blamed on, and why, in words.
enum Culprit {
    Program(String),
    Host(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Fault {
    signature: String,
    step: u64,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Restart {
    Crash,
    Hang,
}

/// The job's restarts, and the faults and steps by which they are judged. `T`: an instant or, on the way to another process, a number of
/// milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Budget<T = Instant> {
    /// Restarts that count, the earliest first.
    counted: VecDeque<(T, Restart)>,
    /// The restart by which the current world began still counts, and is the last of them.
    is_restarted: bool,
    /// The furthest step of all worlds.
    furthest: Option<u64>,
    /// The first step of the current world.
    began: Option<u64>,
    /// A step of the current world was reported, with its number or without.
    has_stepped: bool,
    in_vain: u32,
    /// Bad starts in a row, and what the last one died of.
    bad_starts: u32,
    last_bad: Option<String>,
    faults: VecDeque<Fault>,
    /// Failures of new workers, the earliest first.
    new_workers: VecDeque<(T, Origin)>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            counted: VecDeque::new(),
            is_restarted: false,
            furthest: None,
            began: None,
            has_stepped: false,
            in_vain: 0,
            bad_starts: 0,
            last_bad: None,
            faults: VecDeque::new(),
            new_workers: VecDeque::new(),
        }
    }
}

impl<T> Budget<T> {
    /// The same, with its times as another kind of number.
    pub fn map<U>(self, of: &mut impl FnMut(T) -> U) -> Budget<U> {
        let Self { is_restarted, furthest, began, has_stepped, in_vain, bad_starts, last_bad, faults, .. } = self;
        let counted = self.counted.into_iter().map(|(at, kind)| (of(at), kind)).collect();
        let new_workers = self.new_workers.into_iter().map(|(at, host)| (of(at), host)).collect();
        Budget {
            counted,
            is_restarted,
            furthest,
            began,
            has_stepped,
            in_vain,
            bad_starts,
            last_bad,
            faults,
            new_workers,
        }
    }

    /// Check what another process has written, and reduce its texts to one safe line each.
    ///
    /// # Errors
    /// Names the value that is not allowed.
    pub fn validated(self) -> Result<Self, String> {
        for (what, count, most) in [
            ("restarts", self.counted.len(), RESTARTS_KEPT),
            ("faults", self.faults.len(), FAULTS_KEPT),
            ("failures of new workers", self.new_workers.len(), NEW_WORKERS_KEPT),
        ] {
            if count > most {
                return Err(format!("{count} {what} were sent, at most {most} may be"));
            }
        }
        let steps = self.faults.iter().map(|fault| fault.step).chain(self.furthest).chain(self.began);
        if let Some(step) = steps.max().filter(|step| *step > LARGEST_STEP) {
            return Err(format!("a step's number is {step}, must be at most {LARGEST_STEP}"));
        }
        let fault = |Fault { signature, step, origin }| {
            Ok(Fault { signature: tidy_signature(signature), step, origin: check_host(origin)? })
        };
        let new_worker = |(at, host)| Ok((at, check_host(host)?));
        Ok(Self {
            last_bad: self.last_bad.map(tidy_signature),
            faults: self.faults.into_iter().map(fault).collect::<Result<_, String>>()?,
            new_workers: self.new_workers.into_iter().map(new_worker).collect::<Result<_, String>>()?,
            ..self
        })
    }
}

impl Budget {
    /// What a successor must know.
    pub fn kept(&self) -> Self {
        Self {
            counted: latest(&self.counted, RESTARTS_KEPT),
            last_bad: self.last_bad.clone(),
            faults: latest(&self.faults, FAULTS_KEPT),
            new_workers: latest(&self.new_workers, NEW_WORKERS_KEPT),
            ..*self
        }
    }

    /// How many restarts are left.
    pub fn left(&self, limit: Limit, now: Instant) -> Left {
        let left = |kind| limit.restarts.saturating_sub(self.used(kind, limit, now));
        let (crashes, hangs) = (left(Restart::Crash), left(Restart::Hang));
        Left { window_s: limit.window.as_secs(), crashes, hangs, in_vain: self.in_vain }
    }

    fn used(&self, kind: Restart, limit: Limit, now: Instant) -> u32 {
        let recent = |(at, of): &&(Instant, Restart)| *of == kind && is_recent(*at, limit.window, now);
        u32::try_from(self.counted.iter().filter(recent).count()).unwrap_or(u32::MAX)
    }

    /// A new world begins.
    pub fn begin(&mut self) {
        (self.began, self.has_stepped) = (None, false);
    }

    /// A node tells the first step of the current world.
    pub fn on_first_step(&mut self, step: Option<u64>) {
        self.began = [self.began, bounded(step)].into_iter().flatten().min();
        self.has_stepped = true;
    }

    /// A worker has failed that was new when the current world began, among others that went on. If the world had made no step, that costs
    /// the job nothing. Returns how many such failures its host has had within the window then.
    pub fn on_new_worker(&mut self, failure: &Failure, host: &Origin, limit: Limit, now: Instant) -> Option<usize> {
        let reports_none = self.furthest.is_none() && failure.lived >= FIRST_STEP_WITHIN;
        if self.has_stepped || failure.step.is_some() || reports_none {
            return None;
        }
        self.new_workers.retain(|(at, _)| is_recent(*at, limit.window, now));
        if self.new_workers.len() == MOST_NEW_WORKERS {
            self.new_workers.pop_front();
        }
        self.new_workers.push_back((now, host.clone()));
        Some(self.new_workers.iter().filter(|(_, of)| of == host).count())
    }

    /// A worker has failed.
    pub fn on_crash(&mut self, run: &str, crash: &Crash<'_>, limit: Limit, now: Instant) -> Judgement {
        let Crash { failure, .. } = crash;
        let stepped = crash.step.is_some() || self.has_stepped;
        self.weigh(crash.step);
        let fault = signature(failure);
        let host_is_out = match self.same_fault(fault.as_deref(), crash) {
            Some(Culprit::Program(why)) => return Judgement::End { class: EndClass::Program, why },
            Some(Culprit::Host(why)) => Some(why),
            None => None,
        };
        let short = failure.lived < SHORT;
        let died_of = fault.unwrap_or_else(|| failure.exit.clone());
        if !short || stepped {
            (self.bad_starts, self.last_bad) = (0, None);
        } else {
            self.bad_starts = self.bad_starts.saturating_add(1);
            if self.last_bad.as_ref() == Some(&died_of) {
                let seconds = SHORT.as_secs();
                let why = format!(
                    "the same crash twice in a row within {seconds} s of the start, before any step: {died_of}"
                );
                return Judgement::End { class: EndClass::Program, why };
            }
            self.last_bad = Some(died_of);
        }
        if let Some(end) = self.end(Restart::Crash, limit, now) {
            return end;
        }
        self.count(Restart::Crash, limit, now);
        Judgement::Restart { pause: self.pause(run), host_is_out }
    }

    /// The training hangs, and was at this step.
    pub fn on_hang(&mut self, step: Option<u64>, limit: Limit, now: Instant) -> Judgement {
        self.weigh(step);
        if let Some(end) = self.end(Restart::Hang, limit, now) {
            return end;
        }
        self.count(Restart::Hang, limit, now);
        Judgement::Restart { pause: None, host_is_out: None }
    }

    /// The current world ends at this step: whether the restart by which it began was worth it.
    fn weigh(&mut self, step: Option<u64>) {
        let step = bounded(step);
        let Some(before) = self.furthest else {
            self.furthest = step;
            return;
        };
        match step {
            Some(step) if step > before => {
                self.furthest = Some(step);
                self.in_vain = 0;
                let repeated = self.began.map_or(0, |began| (before + 1).saturating_sub(began));
                if self.is_restarted && step - before >= repeated {
                    self.counted.pop_back();
                }
            }
            // Others may be further than the node that told its step, or told none.
            None if self.began.is_some() => {}
            Some(_) | None => self.in_vain = self.in_vain.saturating_add(self.is_restarted.into()),
        }
        self.is_restarted = false;
    }

    /// What the fault is blamed on once it has happened [`SAME_FAULT`] times at this step.
    fn same_fault(&mut self, signature: Option<&str>, crash: &Crash<'_>) -> Option<Culprit> {
        let (signature, step) = signature.zip(crash.failure.step)?;
        if self.faults.len() == MOST_FAULTS {
            self.faults.pop_front();
        }
        self.faults.push_back(Fault { signature: signature.to_owned(), step, origin: crash.origin.clone() });
        let same = |fault: &&Fault| fault.signature == signature && fault.step.abs_diff(step) <= 1;
        let hosts: Vec<&Origin> = self.faults.iter().filter(same).map(|fault| &fault.origin).collect();
        let count = hosts.len();
        let hosts: BTreeSet<&Origin> = hosts.into_iter().collect();
        if count < SAME_FAULT {
            return None;
        }
        let what = format!("{signature}, {count} times at step {step}");
        if hosts.len() > 1 {
            let hosts: Vec<_> = hosts.into_iter().map(ToString::to_string).collect();
            return Some(Culprit::Program(format!(
                "the program, not the machines: {what}, on {}",
                hosts.join(" and ")
            )));
        }
        // If the program is to blame after all, the same fault shows on another host next.
        crash.spares_host.then_some(Culprit::Host(what))
    }

    fn end(&self, kind: Restart, limit: Limit, now: Instant) -> Option<Judgement> {
        if self.in_vain >= MOST_IN_VAIN {
            let furthest = self.furthest.unwrap_or_default();
            let why = format!("{} restarts in a row brought no step after step {furthest}", self.in_vain);
            return Some(Judgement::End { class: EndClass::NoProgress, why });
        }
        let Limit { restarts, window } = limit;
        if self.used(kind, limit, now) < restarts {
            return None;
        }
        let (kind, class) = match kind {
            Restart::Crash => ("crashes", EndClass::Program),
            Restart::Hang => ("hangs", EndClass::NoProgress),
        };
        let window = window.as_secs();
        let why = format!("no restarts left: {restarts} after {kind} within {window} s (max_restarts, restart_window)");
        Some(Judgement::End { class, why })
    }

    fn count(&mut self, kind: Restart, limit: Limit, now: Instant) {
        self.counted.retain(|(at, _)| is_recent(*at, limit.window, now));
        self.counted.push_back((now, kind));
        self.is_restarted = true;
    }

    /// How long the next start waits. Jobs that fail together do not start together.
    fn pause(&self, run: &str) -> Option<Duration> {
        let doublings = self.bad_starts.checked_sub(PAUSES_FROM)?;
        let longest = FIRST_PAUSE.saturating_mul(1_u32.checked_shl(doublings.min(16)).unwrap_or(u32::MAX));
        let mut hasher = DefaultHasher::new();
        (run, self.bad_starts).hash(&mut hasher);
        let share = 0.5 + (hasher.finish() % 1024) as f64 / 2048.0;
        Some(longest.min(LONGEST_PAUSE).mul_f64(share))
    }
}

/// A worker's exception, and the innermost place of its traceback: `ValueError at train.py:88 in step`. `None`: its words have no traceback.
fn signature(failure: &Failure) -> Option<String> {
    let (first, lines) = failure.message.split_once('\n')?;
    let exception = first.split(':').next().unwrap_or(first).trim();
    let place = lines.lines().rev().find_map(|line| {
        let (file, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
        let (line, function) = rest.split_once(", in ").unwrap_or((rest, "?"));
        Some(format!("{}:{line} in {function}", file.rsplit('/').next().unwrap_or(file)))
    })?;
    Some(tidy_signature(format!("{exception} at {place}")))
}

/// One safe line that is short enough to be kept.
fn tidy_signature(text: String) -> String {
    cut(plain(text), SIGNATURE_BYTES)
}

/// A step's number, as far as it may be true.
fn bounded(step: Option<u64>) -> Option<u64> {
    step.map(|step| step.min(LARGEST_STEP))
}

#[cfg(test)]
mod tests;
