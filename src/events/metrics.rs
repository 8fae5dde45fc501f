//! Counters of what was recorded, and their text in the format of OpenMetrics. Pure.
//!
//! Every number is of a run, never of a node, a rank or a process: a job of a thousand nodes has as many series as one of two.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use super::record::{Kind, Loss, Number, Record};
use super::training::Training;

/// Most runs that are told apart. Later ones are counted together.
pub const RUNS: usize = 64;
/// What these are called together.
const OTHER: &str = "other";
/// Why a round ends whose workers may live on.
const CHANGES: &str = "changes";
/// Upper bounds of the histograms, in seconds.
const BOUNDS: [f64; 10] = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0];
/// The phases: those of [`Phase::parts`], and the first step.
pub(crate) const PHASES: [&str; 6] = ["detect", "stop", "rendezvous", "start", "import", "first_step"];
/// Microseconds of each.
type PhasesUs = [u64; PHASES.len()];

/// What was counted of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Rounds, by why the one before has ended.
    rounds: BTreeMap<&'static str, u64>,
    restarts: u64,
    /// Connection, silence, lease.
    lost: [u64; 3],
    left: u64,
    /// First failures, and their consequences.
    exits: [u64; 2],
    hosts_out: u64,
    /// The longest of each phase in each round, added up, in microseconds.
    phases_us: PhasesUs,
    /// The longest of each in the current round.
    round_us: PhasesUs,
    /// How long the node had been silent that was lost last.
    silent: Option<(Number, u64)>,
    /// The longest such silence of the recovery under way, in microseconds.
    silent_us: u64,
    /// Since when the current round is broken or changes, and why.
    broken: Option<(Instant, &'static str)>,
    /// The current round follows another one.
    follows: bool,
    recoveries: Histogram,
    /// Of each phase, as every node tells it.
    phases: [Histogram; PHASES.len()],
    training: Training,
}

/// How many took at most as long as each bound, and longer than the one before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Histogram {
    counts: [u64; BOUNDS.len() + 1],
    sum: Duration,
}

/// What was counted of all runs.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    runs: BTreeMap<String, Counts>,
    others: Counts,
}

impl Metrics {
    /// Count an event.
    pub fn count(&mut self, run_id: &str, record: &Record, now: Instant) {
        if !self.runs.contains_key(run_id) && self.runs.len() < RUNS {
            self.runs.insert(run_id.to_owned(), Counts::default());
        }
        match self.runs.get_mut(run_id) {
            Some(counts) => counts.count(record, now),
            // Times of several runs cannot be told apart, so only what is counted one by one is counted together.
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

    /// The runs that are told apart.
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
        out.family("rounds", "counter", "rounds that were completed, by why the one before was broken");
        for (run, counts) in self.all() {
            for (why, count) in &counts.rounds {
                out.value("rounds_total", &[("run", run), ("why", why)], *count);
            }
        }
        out.family("restarts", "counter", "failures of workers that counted against the job's budget");
        self.each(out, "restarts_total", |counts| counts.restarts);
        out.family("nodes_lost", "counter", "nodes that were not heard of any more");
        for (run, counts) in self.all() {
            for (how, count) in ["connection", "silence", "lease"].into_iter().zip(counts.lost) {
                out.value("nodes_lost_total", &[("run", run), ("how", how)], count);
            }
        }
        out.family("nodes_left", "counter", "nodes that said goodbye");
        self.each(out, "nodes_left_total", |counts| counts.left);
        out.family("worker_exits", "counter", "workers that failed: first in their round, or as a consequence");
        for (run, counts) in self.all() {
            for (kind, count) in ["first", "consequence"].into_iter().zip(counts.exits) {
                out.value("worker_exits_total", &[("run", run), ("kind", kind)], count);
            }
        }
        out.family("hosts_put_out", "counter", "times that a host was kept out of the job for its failures");
        self.each(out, "hosts_put_out_total", |counts| counts.hosts_out);
        out.family("lost_seconds", "counter", "the longest of each phase in each recovery, added up");
        for (run, counts) in self.all() {
            for (phase, micros) in PHASES.into_iter().zip(counts.phases_us) {
                out.value("lost_seconds_total", &[("run", run), ("phase", phase)], micros as f64 / 1e6);
            }
        }
        out.family("recovery_seconds", "histogram", "from the end of a round until the next one was complete");
        self.all().for_each(|(run, counts)| counts.recoveries.write(out, "recovery_seconds", &[("run", run)]));
        out.family("phase_seconds", "histogram", "phases of nodes, each as its node measured it");
        for (run, counts) in self.all() {
            for (phase, histogram) in PHASES.into_iter().zip(&counts.phases).filter(|(_, it)| it.count() > 0) {
                histogram.write(out, "phase_seconds", &[("run", run), ("phase", phase)]);
            }
        }
        out.family("slowest_phase_seconds", "gauge", "the longest of each phase when the current round was formed");
        for (run, counts) in self.all() {
            for (phase, micros) in PHASES.into_iter().zip(counts.round_us).filter(|(_, micros)| *micros > 0) {
                out.value("slowest_phase_seconds", &[("run", run), ("phase", phase)], micros as f64 / 1e6);
            }
        }
        out.family("redone_steps", "counter", "steps of training that were made again after a recovery");
        self.each(out, "redone_steps_total", |counts| counts.training.redone_steps());
        out.family(
            "goodput_ratio",
            "gauge",
            "part of the time since the first step in which steps were made that count",
        );
        for (run, counts) in self.all() {
            let goodput = counts.training.goodput(now);
            goodput.into_iter().for_each(|ratio| out.value("goodput_ratio", &[("run", run)], ratio));
        }
    }

    fn each(&self, out: &mut OpenMetrics, name: &str, of: impl Fn(&Counts) -> u64) {
        self.all().for_each(|(run, counts)| out.value(name, &[("run", run)], of(counts)));
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
                if let Some((since, _)) = broken {
                    self.recoveries.observe(now.saturating_duration_since(since));
                    self.took([silent_us, 0, 0, 0, 0, 0]);
                }
            }
            Kind::Phase(phase) => {
                let [detect, stop, rendezvous, start, import] = phase.parts().map(Option::unwrap_or_default);
                self.took([detect, stop, rendezvous, start, import, 0]);
            }
            Kind::FirstStep(first) => self.took([0, 0, 0, 0, 0, first.first_step_us]),
            Kind::WorkerExited(exit) => {
                self.exits[usize::from(!exit.first)] += 1;
                self.restarts += u64::from(exit.counts);
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
                };
                self.lost[at] += 1;
            }
            Kind::NodeLeft { .. } => self.left += 1,
            Kind::HostOut { .. } => self.hosts_out += 1,
            _ => {}
        }
    }

    /// A node has told its phases, or some of them.
    fn took(&mut self, phases: PhasesUs) {
        for (at, micros) in phases.into_iter().enumerate().filter(|(_, micros)| *micros > 0) {
            self.phases[at].observe(Duration::from_micros(micros));
            let more = micros.saturating_sub(self.round_us[at]);
            self.round_us[at] += more;
            if !self.follows {
                continue; // nothing is lost by the first round
            }
            self.phases_us[at] = self.phases_us[at].saturating_add(more);
            if at == 0 {
                self.training.lose(Duration::from_micros(more));
            }
        }
    }
}

impl Histogram {
    fn observe(&mut self, lasted: Duration) {
        self.counts[BOUNDS.partition_point(|bound| *bound < lasted.as_secs_f64())] += 1;
        self.sum = self.sum.saturating_add(lasted);
    }

    fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn write(&self, out: &mut OpenMetrics, name: &str, labels: &[(&str, &str)]) {
        let (bucket, mut so_far) = (format!("{name}_bucket"), 0);
        let bounds = BOUNDS.map(|bound| format!("{bound:?}"));
        for (bound, count) in bounds.iter().map(String::as_str).chain(["+Inf"]).zip(self.counts) {
            so_far += count;
            out.value(&bucket, &[labels, &[("le", bound)]].concat(), so_far);
        }
        out.value(&format!("{name}_count"), labels, so_far);
        out.value(&format!("{name}_sum"), labels, self.sum.as_secs_f64());
    }
}

/// A text in the format of OpenMetrics 1.0.
#[derive(Debug, Default)]
pub struct OpenMetrics(String);

impl OpenMetrics {
    /// Begin a family of series.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# TYPE elastic_rs_{name} {kind}\n# HELP elastic_rs_{name} {help}\n"); // a String takes all
    }

    /// Write a value of the family.
    pub fn value(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let _ = write!(self.0, "elastic_rs_{name}");
        for (at, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if at == 0 { '{' } else { ',' });
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// The whole text.
    pub fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::{Exit, FirstStep, Phase, Why};

    fn record(kind: Kind) -> Record {
        Record { number: Number(1), causes: Vec::new(), round: 1, restart: 0, node: None, kind, text: None }
    }

    fn completed() -> Kind {
        Kind::RoundCompleted { nodes: 2, workers: None, rank0: None, in_place: false }
    }

    fn exited(first: bool) -> Kind {
        let (role, exit, message) = ("r".into(), "SIGKILL".into(), String::new());
        let exit = Exit { rank: 1, local_rank: 1, role, pid: 7, exit, returncode: -9, message, first, counts: first };
        Kind::WorkerExited(Box::new(exit))
    }

    fn text(metrics: &Metrics) -> String {
        let mut out = OpenMetrics::default();
        metrics.write(&mut out, Instant::now());
        out.finish()
    }

    #[test]
    fn a_recovery_is_counted_by_its_reason_its_time_and_its_longest_phases() {
        let begin = Instant::now();
        let mut metrics = Metrics::default();
        let phase = |stop, start| Kind::Phase(Phase { stop_us: stop, start_us: start, ..Phase::default() });
        for (at_ms, kind) in [
            (0, completed()),
            (1, phase(None, Some(5_000))),
            (1000, exited(true)),
            (1000, Kind::RoundBroken { why: Why::WorkerFailed }),
            (1100, Kind::RoundBroken { why: Why::NodeLost }),
            (1100, exited(false)),
            (3000, completed()),
            (3010, phase(Some(900_000), Some(20_000))),
            (3020, phase(Some(1_200_000), Some(10_000))),
        ] {
            metrics.count("job", &record(kind), begin + Duration::from_millis(at_ms));
        }
        let text = text(&metrics);
        for line in [
            "elastic_rs_rounds_total{run=\"job\",why=\"first\"} 1",
            "elastic_rs_rounds_total{run=\"job\",why=\"worker.failed\"} 1",
            "elastic_rs_restarts_total{run=\"job\"} 1",
            "elastic_rs_worker_exits_total{run=\"job\",kind=\"first\"} 1",
            "elastic_rs_worker_exits_total{run=\"job\",kind=\"consequence\"} 1",
            "elastic_rs_lost_seconds_total{run=\"job\",phase=\"stop\"} 1.2",
            "elastic_rs_lost_seconds_total{run=\"job\",phase=\"start\"} 0.02",
            "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"1.0\"} 0",
            "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"3.0\"} 1",
            "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"+Inf\"} 1",
            "elastic_rs_recovery_seconds_sum{run=\"job\"} 2",
            "elastic_rs_phase_seconds_bucket{run=\"job\",phase=\"stop\",le=\"1.0\"} 1",
            "elastic_rs_phase_seconds_count{run=\"job\",phase=\"start\"} 3",
            "elastic_rs_slowest_phase_seconds{run=\"job\",phase=\"start\"} 0.02",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn a_lost_nodes_silence_and_the_first_step_are_parts_of_a_recovery() {
        let begin = Instant::now();
        let mut metrics = Metrics::default();
        let lost = |number, silent_ms| Record {
            number: Number(number),
            ..record(Kind::NodeLost { how: Loss::Silence, silent_ms: Some(silent_ms) })
        };
        let broken = Record { causes: vec![Number(8)], ..record(Kind::RoundBroken { why: Why::NodeLost }) };
        let step = |micros| record(Kind::FirstStep(FirstStep { first_step_us: micros, ..FirstStep::default() }));
        for event in [
            record(completed()),
            step(9_000_000), // of the first round, which recovers nothing
            lost(7, 99_000), // it had no place
            lost(8, 15_000),
            broken,
            lost(9, 16_000),
            record(completed()),
            step(400_000),
            step(500_000),
        ] {
            metrics.count("job", &event, begin);
        }
        let text = text(&metrics);
        for line in ["phase=\"detect\"} 16", "phase=\"first_step\"} 0.5"] {
            assert!(text.contains(&format!("elastic_rs_lost_seconds_total{{run=\"job\",{line}\n")), "{line}\n{text}");
        }
    }

    #[test]
    fn the_number_of_series_is_bounded_and_names_cannot_forge_lines() {
        let mut metrics = Metrics::default();
        let lost = || record(Kind::NodeLost { how: Loss::Silence, silent_ms: None });
        for run in 0..1000 {
            metrics.count(&format!("run{run:04}"), &lost(), Instant::now());
        }
        assert_eq!(metrics.runs.len(), RUNS);
        let line = format!("elastic_rs_nodes_lost_total{{run=\"other\",how=\"silence\"}} {}", 1000 - RUNS);
        assert!(text(&metrics).lines().any(|it| it == line));
        let mut metrics = Metrics::default();
        for run in 0..=RUNS {
            metrics.count(&run.to_string(), &record(exited(true)), Instant::now());
        }
        assert!(text(&metrics).contains("elastic_rs_worker_exits_total{run=\"other\",kind=\"first\"} 1\n"));
        let mut metrics = Metrics::default();
        metrics.count("a\"} 1\n\\", &lost(), Instant::now());
        let text = text(&metrics);
        assert!(text.contains("{run=\"a\\\"} 1\\n\\\\\",how=\"silence\"} 1\n"), "{text}");
    }

    /// Those of the run's state, which are not counted here, are 16 at most.
    #[test]
    fn a_run_that_has_seen_everything_has_at_most_150_series() {
        let mut metrics = Metrics::default();
        let all = Some(1_000);
        let phase = Phase { detect_us: all, stop_us: all, rendezvous_us: all, start_us: all, import_us: all };
        for why in Why::ALL {
            for kind in [
                completed(),
                Kind::Phase(phase),
                Kind::FirstStep(FirstStep { first_step_us: 1_000, ..FirstStep::default() }),
                Kind::RoundBroken { why },
            ] {
                metrics.count("job", &record(kind), Instant::now());
            }
        }
        for kind in [completed(), Kind::RoundChanges {}, completed(), Kind::Phase(phase)] {
            metrics.count("job", &record(kind), Instant::now());
        }
        let text = text(&metrics);
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        assert!((100..=134).contains(&series), "{series}\n{text}");
    }
}
