//! Counters of what was recorded, and of what is only counted. Pure.
//!
//! Every number is of a run, never of a node, a rank or a process: a job of a thousand nodes has as many series as one of two.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::families::{self, Family};
use super::open_metrics::{Histogram, OpenMetrics};
use super::record::{Kind, Loss, Number, Record};
use super::tally::{Refused, Tally};
use super::training::Training;

/// Most runs with metrics of their own. Later ones are counted together.
pub const RUNS: usize = 64;
/// What these are called together.
const OTHER: &str = "other";
/// Why a round ends whose workers may live on.
const CHANGES: &str = "changes";
/// The phases: those of [`Phase::parts`], and those of [`FirstStep`].
pub(crate) const PHASES: [&str; 8] =
    ["detect", "stop", "rendezvous", "start", "import", "group", "state", "first_step"];
/// Microseconds of each.
type PhasesUs = [u64; PHASES.len()];

/// What was counted of one run.
#[derive(Clone, Debug, Default, PartialEq)]
struct Counts {
    /// Rounds, by why the one before has ended.
    rounds: BTreeMap<&'static str, u64>,
    /// Failures that counted against the budget: workers that ended themselves, and those that a signal ended.
    restarts: [u64; 2],
    /// Connection, silence, lease, notice.
    lost: [u64; 4],
    left: u64,
    /// In the order of [`Refused::ALL`].
    refused: [u64; Refused::ALL.len()],
    fences: u64,
    /// First failures, and their consequences.
    exits: [u64; 2],
    hosts_out: u64,
    /// By kind, of which `hang::finding::Kind` has 13.
    hangs: BTreeMap<String, u64>,
    /// The longest of each phase in each round, added up, in microseconds.
    phases_us: PhasesUs,
    /// The longest of each in the current round.
    round_us: PhasesUs,
    /// How long the node had been silent that was lost last, or the training had stood still that hung last.
    silent: Option<(Number, u64)>,
    /// The longest such silence of the recovery under way, in microseconds.
    silent_us: u64,
    /// Since when the current round is broken or changes, and why.
    broken: Option<(Instant, &'static str)>,
    /// The current round follows another one.
    follows: bool,
    /// How long that recovery took until the round was complete, in microseconds.
    recovered_us: Option<u64>,
    recoveries: Histogram,
    /// Of each phase, as every node reports it.
    phases: [Histogram; PHASES.len()],
    training: Training,
}

/// What was counted of all runs.
#[derive(Clone, Debug)]
pub struct Metrics {
    runs: BTreeMap<String, Counts>,
    others: Counts,
    /// Heartbeats of all runs: they say how the network and this process are.
    round_trips: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { runs: BTreeMap::new(), others: Counts::default(), round_trips: Histogram::of_round_trips() }
    }
}

impl Metrics {
    /// Count an event.
    pub fn count(&mut self, run_id: &str, record: &Record, now: Instant) {
        if !self.runs.contains_key(run_id) && self.runs.len() < RUNS {
            self.runs.insert(run_id.to_owned(), Counts::default());
        }
        match self.runs.get_mut(run_id) {
            Some(counts) => counts.count(record, now),
            // Times of several runs cannot be separated, so only what is counted one by one is counted together.
            None if !matches!(
                record.kind,
                Kind::RoundBroken { .. }
                    | Kind::RoundChanges {}
                    | Kind::RoundCompleted { .. }
                    | Kind::Phase(_)
                    | Kind::FirstStep(_)
            ) =>
            {
                self.others.count(record, now);
            }
            None => {}
        }
    }

    /// Count what is not recorded.
    pub fn tally(&mut self, run_id: &str, tally: Tally) {
        // A run that nothing is recorded of has no label of its own: unauthenticated peers could name any number of them.
        let counts = self.runs.get_mut(run_id).unwrap_or(&mut self.others);
        match tally {
            Tally::Refused(why) => counts.refused[why as usize] += 1,
            Tally::Fenced => counts.fences += 1,
            Tally::RoundTrip(time) => self.round_trips.observe(time),
        }
    }

    /// The runs with metrics of their own.
    pub fn runs(&self) -> impl Iterator<Item = &str> {
        self.runs.keys().map(String::as_str)
    }

    /// All counts, each with the name of its run.
    fn all(&self) -> impl Iterator<Item = (&str, &Counts)> {
        let others = (self.others != Counts::default()).then_some((OTHER, &self.others));
        self.runs.iter().map(|(run, counts)| (run.as_str(), counts)).chain(others)
    }

    /// Forget a run.
    pub fn forget(&mut self, run_id: &str) {
        self.runs.remove(run_id);
    }

    /// Write all counters.
    pub fn write(&self, out: &mut OpenMetrics, now: Instant) {
        out.family(&families::ROUNDS);
        for (run, counts) in self.all() {
            for (why, count) in &counts.rounds {
                out.value(&families::ROUNDS, &[run, why], *count);
            }
        }
        out.family(&families::RESTARTS);
        for (run, counts) in self.all() {
            for (cause, count) in ["exit", "signal"].into_iter().zip(counts.restarts) {
                out.value(&families::RESTARTS, &[run, cause], count);
            }
        }
        out.family(&families::NODES_LOST);
        for (run, counts) in self.all() {
            for (how, count) in ["connection", "silence", "lease", "notice"].into_iter().zip(counts.lost) {
                out.value(&families::NODES_LOST, &[run, how], count);
            }
        }
        out.family(&families::NODES_LEFT);
        self.each(out, &families::NODES_LEFT, |counts| counts.left);
        out.family(&families::NODE_REFUSALS);
        for (run, counts) in self.all() {
            for (why, count) in Refused::ALL.into_iter().zip(counts.refused) {
                out.value(&families::NODE_REFUSALS, &[run, why.name()], count);
            }
        }
        out.family(&families::FENCES);
        self.each(out, &families::FENCES, |counts| counts.fences);
        out.family(&families::WORKER_EXITS);
        for (run, counts) in self.all() {
            for (kind, count) in ["first", "consequence"].into_iter().zip(counts.exits) {
                out.value(&families::WORKER_EXITS, &[run, kind], count);
            }
        }
        out.family(&families::HOSTS_PUT_OUT);
        self.each(out, &families::HOSTS_PUT_OUT, |counts| counts.hosts_out);
        out.family(&families::HANGS);
        for (run, counts) in self.all() {
            counts.hangs.iter().for_each(|(kind, count)| out.value(&families::HANGS, &[run, kind], *count));
        }
        out.family(&families::LOST_SECONDS);
        for (run, counts) in self.all() {
            for (phase, micros) in PHASES.into_iter().zip(counts.phases_us) {
                out.value(&families::LOST_SECONDS, &[run, phase], micros as f64 / 1e6);
            }
        }
        out.family(&families::RECOVERY_SECONDS);
        self.all().for_each(|(run, counts)| counts.recoveries.write(out, &families::RECOVERY_SECONDS, &[run]));
        out.family(&families::PHASE_SECONDS);
        for (run, counts) in self.all() {
            for (phase, histogram) in PHASES.into_iter().zip(&counts.phases).filter(|(_, it)| it.count() > 0) {
                histogram.write(out, &families::PHASE_SECONDS, &[run, phase]);
            }
        }
        out.family(&families::SLOWEST_PHASE_SECONDS);
        for (run, counts) in self.all() {
            for (phase, micros) in PHASES.into_iter().zip(counts.round_us).filter(|(_, micros)| *micros > 0) {
                out.value(&families::SLOWEST_PHASE_SECONDS, &[run, phase], micros as f64 / 1e6);
            }
        }
        out.family(&families::REDONE_STEPS);
        self.each(out, &families::REDONE_STEPS, |counts| counts.training.redone_steps());
        out.family(&families::GOODPUT_RATIO);
        for (run, counts) in self.all() {
            let goodput = counts.training.goodput(now);
            goodput.into_iter().for_each(|ratio| out.value(&families::GOODPUT_RATIO, &[run], ratio));
        }
        out.family(&families::HEARTBEAT_RTT_SECONDS);
        self.round_trips.write(out, &families::HEARTBEAT_RTT_SECONDS, &[]);
    }

    fn each(&self, out: &mut OpenMetrics, family: &Family, of: impl Fn(&Counts) -> u64) {
        self.all().for_each(|(run, counts)| out.value(family, &[run], of(counts)));
    }
}

impl Counts {
    fn count(&mut self, record: &Record, now: Instant) {
        self.training.count(&record.kind, now);
        match &record.kind {
            Kind::RoundBroken { why } => {
                let silent = self.silent.filter(|(lost, _)| record.causes.contains(lost));
                self.silent_us = self.silent_us.max(silent.map_or(0, |(_, micros)| micros));
                self.broken = Some(match self.broken {
                    Some((since, CHANGES)) => (since, why.name()),
                    Some(first) => first,
                    None => (now, why.name()),
                });
            }
            Kind::RoundChanges {} => self.broken = Some((now, CHANGES)),
            Kind::RoundGoesOn {} => self.broken = None,
            Kind::RoundCompleted { .. } => {
                self.round_us = [0; PHASES.len()];
                let broken = self.broken.take();
                let silent_us = std::mem::take(&mut self.silent_us);
                self.follows = broken.is_some();
                *self.rounds.entry(broken.map_or("first", |(_, why)| why)).or_default() += 1;
                self.recovered_us = None;
                if let Some((since, _)) = broken {
                    let lasted = now.saturating_duration_since(since);
                    self.recoveries.observe(lasted);
                    self.recovered_us = u64::try_from(lasted.as_micros()).ok();
                    self.observe_phases([silent_us, 0, 0, 0, 0, 0, 0, 0], now);
                }
            }
            Kind::Phase(phase) => {
                let [detect, stop, rendezvous, start, import] = phase.parts().map(Option::unwrap_or_default);
                // A spare may have waited for days before the world that it steps into was broken.
                let rendezvous = rendezvous.min(self.recovered_us.unwrap_or(u64::MAX));
                self.observe_phases([detect, stop, rendezvous, start, import, 0, 0, 0], now);
            }
            Kind::FirstStep(first) => {
                let [group, state] = [first.group_us, first.state_us].map(Option::unwrap_or_default);
                self.observe_phases([0, 0, 0, 0, 0, group, state, first.first_step_us], now);
            }
            Kind::WorkerExited(exit) => {
                self.exits[usize::from(!exit.first)] += 1;
                self.restarts[usize::from(exit.returncode < 0)] += u64::from(exit.counts);
            }
            Kind::NodeLost { how, silent_ms } => {
                let silent_us = silent_ms.unwrap_or(0).saturating_mul(1000);
                self.silent = Some((record.number, silent_us));
                if self.broken.is_some() {
                    self.silent_us = self.silent_us.max(silent_us);
                }
                let at = match how {
                    Loss::Connection => 0,
                    Loss::Silence => 1,
                    Loss::Lease => 2,
                    Loss::Notice => 3,
                };
                self.lost[at] += 1;
            }
            Kind::NodeLeft { .. } => self.left += 1,
            Kind::HostOut { .. } => self.hosts_out += 1,
            Kind::HangFound(hang) => {
                self.silent = Some((record.number, hang.still_ms.saturating_mul(1000)));
                *self.hangs.entry(hang.kind.clone()).or_default() += 1;
            }
            _ => {}
        }
    }

    /// A node has reported its phases, or some of them.
    fn observe_phases(&mut self, phases: PhasesUs, now: Instant) {
        for (at, micros) in phases.into_iter().enumerate().filter(|(_, micros)| *micros > 0) {
            self.phases[at].observe(Duration::from_micros(micros));
            let more = micros.saturating_sub(self.round_us[at]);
            self.round_us[at] += more;
            if !self.follows {
                continue; // nothing is lost by the first round
            }
            self.phases_us[at] = self.phases_us[at].saturating_add(more);
            if at == 0 {
                self.training.lose(Duration::from_micros(more), now);
            }
        }
    }
}

#[cfg(test)]
mod tests;
