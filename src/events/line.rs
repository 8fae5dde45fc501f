//! An event as a line of JSON. `docs/reference/events.md` has the schema, which is made from [`Line`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::journal::id;
use super::record::{Kind, Record};
use crate::wire::time::micros;

/// The version of the schema. Grows when a meaning changes; fields and types are added without.
const VERSION: u32 = 1;

/// An event: what happened, and which events caused it. Fields and types are only added. Readers ignore those that they do not know.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Line<'a> {
    /// 1. Grows when a meaning changes.
    v: u32,
    /// The event's origin, and `order`. An origin is the incarnation of a coordinator with the run in it (`c…`), or a node (`n…`).
    id: &'a str,
    /// The origin's count of its events of the run, from 1, without gaps.
    order: u64,
    /// Ids of the events without which this one would not have happened, at most 4. Of one origin, each has a smaller `order`. Empty: a
    /// root. Over a shared cell also `@broken.ROUND`, `@completed.ROUND` and `@joined.NODE`: the last event before this one, of any
    /// node, by which that round was broken or completed, or that node asked for a rank.
    cause: &'a [String],
    /// The job's name (`--rdzv-id`).
    run: &'a str,
    /// The number of its round, when it happened.
    round: u64,
    /// The number of its restart, when it happened.
    restart: u32,
    #[serde(flatten)]
    kind: &'a Kind,
    /// Name of the node that it is about, `host:pid`, if it is about one.
    node: Option<&'a str>,
    /// Microseconds on the origin's clock since it started.
    mono_us: u64,
    /// Time of day there, as RFC 3339 has it. It is only shown: no order and no duration of one job comes from it.
    wall: String,
    /// The sentence in the log.
    text: Option<&'a str>,
}

/// A coordinator's event as a line, without its end. `origin` is the name of the coordinator's life, `since` the time on its clock, and
/// `wall` the time of day, which is only shown.
pub fn line(record: &Record, run_id: &str, origin: &str, since: Duration, wall: SystemTime) -> Arc<str> {
    let causes: Vec<_> = record.causes.iter().map(|number| id(origin, *number)).collect();
    line_with(record, &causes, run_id, origin, since, wall)
}

/// As [`line`], of an event whose causes may have other origins: these are their ids.
pub fn line_with(
    record: &Record,
    causes: &[String],
    run_id: &str,
    origin: &str,
    since: Duration,
    wall: SystemTime,
) -> Arc<str> {
    let line = Line {
        v: VERSION,
        id: &id(origin, record.number),
        order: record.number.0,
        cause: causes,
        run: run_id,
        round: record.round,
        restart: record.restart,
        kind: &record.kind,
        node: record.node.as_deref(),
        mono_us: micros(since),
        wall: humantime::format_rfc3339_millis(wall).to_string(),
        text: record.text.as_deref(),
    };
    // Nothing in it can fail: all keys are texts.
    serde_json::to_string(&line).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::events::record::{Exit, Number, Why};

    fn record(kind: Kind) -> Record {
        Record {
            number: Number(118),
            causes: vec![Number(117), Number(9)],
            round: 6,
            restart: 2,
            node: Some("n17:4711".to_owned()),
            kind,
            text: Some("a \"sentence\"".to_owned()),
        }
    }

    /// `ELASTIC_RS_WRITE=1`, as `make reference` sets it, writes the file.
    #[test]
    fn the_schema_in_the_documentation_is_that_of_the_program() {
        let schema = schemars::schema_for!(Line<'_>);
        let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/events.schema.json");
        if std::env::var_os("ELASTIC_RS_WRITE").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(written == text, "{} is not what the program writes: run `make reference`", file.display());
    }

    #[test]
    fn a_cause_has_one_name_in_events_and_metrics() {
        for why in Why::ALL {
            assert_eq!(serde_json::to_value(why).unwrap(), why.name());
        }
    }

    #[test]
    fn a_line_has_the_fields_of_the_schema() {
        let day = SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_308_528_250);
        let line = |kind| line(&record(kind), "job42", "c5e1", Duration::from_micros(81_230_112), day).to_string();
        assert_eq!(
            line(Kind::RoundBroken { why: Why::WorkerFailed }),
            "{\"v\":1,\"id\":\"c5e1.118\",\"order\":118,\"cause\":[\"c5e1.117\",\"c5e1.9\"],\"run\":\"job42\",\"round\":6,\
             \"restart\":2,\"type\":\"round.broken\",\"data\":{\"why\":\"worker.failed\"},\"node\":\"n17:4711\",\
             \"mono_us\":81230112,\"wall\":\"2026-11-22T00:48:48.250Z\",\"text\":\"a \\\"sentence\\\"\"}"
        );
        let exit = Exit {
            rank: 137,
            local_rank: 1,
            role: "default".to_owned(),
            pid: 4712,
            exit: "SIGKILL".to_owned(),
            returncode: -9,
            message: String::new(),
            first: true,
            counts: true,
        };
        let text = line(Kind::WorkerExited(Box::new(exit)));
        assert!(text.contains("\"type\":\"worker.exited\",\"data\":{\"rank\":137,\"local_rank\":1,"), "{text}");
        assert!(line(Kind::Note {}).contains("\"type\":\"note\",\"data\":{}"));
    }
}
