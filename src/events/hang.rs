//! What an event says of a training that stands still.

use serde::Serialize;

/// A training that stands still, and who holds it up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Hang {
    /// What holds it up: `not_entered`, `stopped`, and so on.
    pub kind: String,
    /// It never goes on by itself.
    pub certain: bool,
    /// The ranks that are waited for: the first of them.
    pub ranks: Vec<u32>,
    /// The group of the collective in which the others wait.
    pub group: Option<String>,
    /// Its number in that group.
    pub seq: Option<u64>,
    /// Its operation.
    pub op: Option<String>,
    /// Where the first of these ranks stands: `FUNCTION FILE:LINE`.
    pub line: Option<String>,
    /// The call to the kernel in which it stands.
    pub call: Option<String>,
    /// Number of ranks that wait.
    pub waiting: usize,
    /// The time without progress, in milliseconds.
    pub still_ms: u64,
    /// The limit that is over, in milliseconds. `None`: it is certain, or only waits.
    pub limit_ms: Option<u64>,
    /// All of it in at most six lines.
    pub lines: Vec<String>,
}

/// Most ranks that [`Hang::ranks`] names.
pub const HANG_RANKS_LIMIT: usize = 64;
