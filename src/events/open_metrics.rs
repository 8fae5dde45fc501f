//! The text format OpenMetrics, and histograms. Pure.

use std::fmt::{Display, Write};
use std::time::Duration;

use super::families::Family;

/// Number of bounds of every histogram.
const BOUNDS: usize = 10;
/// Upper bounds for what takes seconds or minutes.
const SECONDS: [f64; BOUNDS] = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0];
/// Upper bounds for round trips, in seconds.
const ROUND_TRIPS: [f64; BOUNDS] = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];

/// How many took at most as long as each bound, and longer than the one before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Histogram {
    bounds: [f64; BOUNDS],
    counts: [u64; BOUNDS + 1],
    sum: Duration,
}

/// For what takes seconds or minutes.
impl Default for Histogram {
    fn default() -> Self {
        Self { bounds: SECONDS, counts: [0; BOUNDS + 1], sum: Duration::ZERO }
    }
}

impl Histogram {
    /// For round trips.
    pub fn of_round_trips() -> Self {
        Self { bounds: ROUND_TRIPS, ..Self::default() }
    }

    pub fn observe(&mut self, lasted: Duration) {
        self.counts[self.bounds.partition_point(|bound| *bound < lasted.as_secs_f64())] += 1;
        self.sum = self.sum.saturating_add(lasted);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Write it as a value of the family.
    pub fn write(&self, out: &mut OpenMetrics, family: &Family, labels: &[&str]) {
        let mut so_far = 0;
        let bounds = self.bounds.map(|bound| format!("{bound:?}"));
        for (bound, count) in bounds.iter().map(String::as_str).chain(["+Inf"]).zip(self.counts) {
            so_far += count;
            out.sample(family, "_bucket", (labels, Some(bound)), so_far);
        }
        out.sample(family, "_count", (labels, None), so_far);
        out.sample(family, "_sum", (labels, None), self.sum.as_secs_f64());
    }
}

/// A text in the format of OpenMetrics 1.0.
#[derive(Debug, Default)]
pub struct OpenMetrics(String);

impl OpenMetrics {
    /// Begin a family of series.
    pub fn family(&mut self, family: &Family) {
        let Family { name, kind, help, .. } = family;
        let _ = write!(self.0, "# TYPE elastic_rs_{name} {kind}\n# HELP elastic_rs_{name} {help}\n"); // a String takes all
    }

    /// Write a value of the family, with the values of its labels in their order.
    pub fn value(&mut self, family: &Family, labels: &[&str], value: impl Display) {
        self.sample(family, "", (labels, None), value);
    }

    /// Write a value of one of a family's series. `bound` is the label `le` of a histogram's bucket.
    fn sample(&mut self, family: &Family, part: &str, (labels, bound): (&[&str], Option<&str>), value: impl Display) {
        debug_assert_eq!(labels.len(), family.labels.len(), "labels of {}", family.name);
        let _ = write!(self.0, "{}{part}", family.series());
        let named = family.labels.iter().copied().zip(labels.iter().copied());
        let mut open = '{';
        for (label, text) in named.chain(bound.map(|bound| ("le", bound))) {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{open}{label}=\"{text}\"");
            open = ',';
        }
        let close = if open == ',' { "}" } else { "" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// The whole text.
    pub fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }
}
