//! What a job's coordinator and its nodes record: which events there were, and which caused which.
//!
//! - [`record`]: an event, as a run states it, and `phases`, `hang`: the durations and the hang in one. Pure.
//! - [`journal`]: the events of one node. Pure.
//! - [`ring`]: the events that are kept of each run. Pure.
//! - [`tally`]: what is counted but not recorded. Pure.
//! - [`families`]: the table of metrics: names, types, labels, help. Pure.
//! - [`metrics`]: counters of both, their text ([`open_metrics`]), and `training`: what recoveries have cost a training that reports its
//!   steps. Pure.
//! - [`line`]: an event as a line of JSON.
//! - [`file`]: a file of such lines.
//!
//! `docs/reference/events.md` is the schema, `docs/decisions/0088-the-coordinator-records-causes.md` has the reasons.

pub mod families;
#[cfg(feature = "io")]
pub mod file;
mod hang;
pub mod journal;
#[cfg(feature = "io")]
pub mod line;
pub mod metrics;
pub mod open_metrics;
mod phases;
pub mod record;
pub mod ring;
pub mod tally;
mod training;
