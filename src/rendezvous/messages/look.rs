//! A look at the workers of a run: an observer asks for it, the coordinator has all agents look, and each tells what it saw.

use serde::{Deserialize, Serialize};

use super::ids::Round;

/// An observer asks where the ranks of a run stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskLook {
    /// The run's id. `None`: the only run of this coordinator.
    pub run_id: Option<String>,
    /// The rank of which all is to be told. `None`: all ranks, in groups.
    pub rank: Option<u32>,
    /// `py-spy` is to look at that rank too.
    pub deep: bool,
}

/// The answer to [`AskLook`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookAnswer {
    /// The run's id.
    pub run_id: String,
    /// What was seen, as JSON.
    pub seen: String,
}

/// Why a node has not looked, in [`NodeMessage::Looked`](super::message::NodeMessage::Looked).
pub const ROUND_CHANGES: &str = "its round changes now: ask again";

/// Agents are to look at their workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// The round whose workers are meant.
    pub round: Round,
    /// Number of the look. A later one of the same coordinator has a higher number.
    pub number: u64,
    /// The rank at which `py-spy` is to look too.
    pub deep: Option<u32>,
}

/// Longest text of `py-spy`.
pub const PY_SPY_BYTES: usize = 32 << 10;
