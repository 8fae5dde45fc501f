//! A change of the world that its workers live through, and a notice before it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::Round;

/// Until when the workers of a job are to save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointBy {
    /// The round.
    pub round: Round,
    /// After how many milliseconds the first of the machines is taken away.
    pub left_ms: u64,
    /// Which node leaves, and why, in words.
    pub reason: String,
}

/// How long workers may take to save at a check, before the world changes without them.
pub const SAVE_WITHIN: Duration = Duration::from_secs(600);

/// How long further notices are waited for after the first, and at most a third of its time, so that they are one change.
pub const GATHER: Duration = Duration::from_secs(10);

/// Most milliseconds of a notice that count: a day.
pub const LONGEST_NOTICE_MS: u64 = 24 * 3600 * 1000;

/// A change of the world that workers live through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldChange {
    /// The round that it ends.
    pub round: Round,
    /// [`REMOVED`], [`ADDED`], or both.
    pub flags: u8,
    /// Why, in words.
    pub reason: String,
}

/// In [`CoordinatorMessage::Change`](super::message::CoordinatorMessage::Change): nodes leave.
pub const REMOVED: u8 = 1;
/// In [`CoordinatorMessage::Change`](super::message::CoordinatorMessage::Change): nodes join.
pub const ADDED: u8 = 2;
/// In [`CoordinatorMessage::RaiseAt`](super::message::CoordinatorMessage::RaiseAt): a check that no worker reaches.
pub const NEVER: u64 = u64::MAX;
