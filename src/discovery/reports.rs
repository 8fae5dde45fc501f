//! An agent's reports: lines of its standard output, among those that its workers print.
//!
//! A report is a line with `elastic_rs-agent TOKEN ` and a JSON object. The driver draws the token for each agent, so that no output
//! of a worker is taken for a report. Text before the mark is the end of a worker's output that has no newline.

use memchr::memmem;
use serde::Deserialize;

/// Longest text that is taken over from an agent.
const LONGEST: usize = 256;

/// A report of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// It runs, and is about to read its job.
    Up {
        /// Version of its `elastic_rs`.
        version: String,
    },
    /// It can do what its command line says, and meets the others.
    Accepted,
    /// Its part has ended; as `elastic_rs.Launched.outcome` has it.
    Ended {
        /// `succeeded`, `not_needed`, `too_late`, `failed`, `unfit`, `no_placement`, `signal`, `taken_away`, `failed_here` (the first failure was a worker's of
        /// this agent); or of an agent that has got no job to end, `refused`, `lacks_script`, or `detached`: it runs on without the driver.
        outcome: String,
    },
}

/// Finds the reports of one agent in its output.
#[derive(Clone, Debug)]
pub struct ReportFilter {
    mark: Vec<u8>,
}

impl ReportFilter {
    /// The filter for the agent that was given this token.
    pub fn new(token: &str) -> Self {
        Self { mark: format!("elastic_rs-agent {token} ").into_bytes() }
    }

    /// Whether text that has no end of its line may be, or end with, the beginning of a report.
    pub fn may_begin(&self, text: &[u8]) -> bool {
        let longest = text.len().min(self.mark.len());
        memmem::find(text, &self.mark).is_some() || (1..=longest).any(|count| text.ends_with(&self.mark[..count]))
    }

    /// Split a line into workers' output and the report after it, if the report is valid. `None`: the line has no report.
    pub fn split<'a>(&self, line: &'a [u8]) -> Option<(&'a [u8], Option<Report>)> {
        let at = memmem::find(line, &self.mark)?;
        let report = serde_json::from_slice(line[at + self.mark.len()..].trim_ascii()).ok().map(bounded);
        Some((&line[..at], report))
    }
}

fn bounded(report: Report) -> Report {
    let cut = |text: String| text.chars().filter(|char| !char.is_control()).take(LONGEST).collect::<String>();
    match report {
        Report::Up { version } => Report::Up { version: cut(version) },
        Report::Accepted => Report::Accepted,
        Report::Ended { outcome } => Report::Ended { outcome: cut(outcome) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_with_the_token_are_reports() {
        let filter = ReportFilter::new("f00d");
        assert_eq!(filter.split(b"elastic_rs-agent cafe {\"ended\": {\"outcome\": \"failed\"}}\n"), None);
        assert_eq!(filter.split(b"loss 0.3\n"), None);
        let up = Report::Up { version: "1.0".to_owned() };
        let line = b"elastic_rs-agent f00d {\"up\": {\"version\": \"1.0\"}}\n";
        assert_eq!(filter.split(line), Some((&b""[..], Some(up))));
    }

    #[test]
    fn output_without_an_end_is_kept() {
        let line = b"loss 0.elastic_rs-agent f00d {\"ended\": {\"outcome\": \"succeeded\"}}\n";
        let ended = Report::Ended { outcome: "succeeded".to_owned() };
        assert_eq!(ReportFilter::new("f00d").split(line), Some((&b"loss 0."[..], Some(ended))));
    }

    #[test]
    fn junk_is_no_report_and_long_texts_are_cut() {
        let filter = ReportFilter::new("f00d");
        for junk in ["", "{", "{\"up\": 3}", "{\"left\": {}}", "\u{0}"] {
            assert_eq!(
                filter.split(format!("elastic_rs-agent f00d {junk}\n").as_bytes()),
                Some((&b""[..], None)),
                "{junk}"
            );
        }
        let long = format!("elastic_rs-agent f00d {{\"ended\": {{\"outcome\": \"{}\"}}}}\n", "x".repeat(5000));
        let Some((_, Some(Report::Ended { outcome }))) = filter.split(long.as_bytes()) else { panic!("no report") };
        assert_eq!(outcome.len(), LONGEST);
    }
}
