//! An event as a line of JSON. `docs/events.md` has the schema.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::journal::id;
use super::record::{Kind, Record};

/// The version of the schema. Grows when a meaning changes; fields and types are added without.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    id: &'a str,
    order: u64,
    cause: &'a [String],
    run: &'a str,
    round: u64,
    restart: u32,
    #[serde(flatten)]
    kind: &'a Kind,
    node: Option<&'a str>,
    mono_us: u64,
    wall: String,
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
        mono_us: u64::try_from(since.as_micros()).unwrap_or(u64::MAX),
        wall: humantime::format_rfc3339_millis(wall).to_string(),
        text: record.text.as_deref(),
    };
    // Nothing in it can fail: all keys are texts.
    serde_json::to_string(&line).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
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
