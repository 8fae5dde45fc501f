//! What a node and the coordinator say to each other, version 1. Serialised with postcard ([`super::codec`]).
//!
//! A connection opens with [`MAGIC`] and [`PROTOCOL_VERSION`], then carries frames. The node's first frame is
//! [`NodeMessage::Hello`]; the coordinator answers with [`CoordinatorMessage::Welcome`] or [`CoordinatorMessage::Rejected`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::settings::Settings;

/// First bytes of a session's connection. `E` is no query code of c10d, so one look tells the two protocols apart.
pub const MAGIC: &[u8] = b"ELRZ";

/// Follows [`MAGIC`], as `u16` little-endian. Both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 1;

/// One agent's identity, drawn at random when its handler is made; it survives reconnects, not restarts of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u128);

/// Number of a completed round: 1 for the first. Never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Round(pub u64);

impl Round {
    /// The round after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// From node to coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeMessage {
    /// Who I am. First message of every connection.
    Hello(Box<Hello>),
    /// Put me into the next round. Answered by [`CoordinatorMessage::Complete`] when it has completed.
    Join(Join),
    /// I no longer wait (join timeout). Answered by [`CoordinatorMessage::Withdrawn`].
    Withdraw,
    /// I go, and will not come back. The rendezvous stays open.
    Leave {
        /// Why, for the others' logs.
        reason: String,
    },
    /// The job is over: nobody is admitted any more.
    Close(Verdict),
    /// I am here.
    Heartbeat,
}

/// Introduces a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Which job.
    pub run_id: String,
    /// Who.
    pub node: NodeId,
    /// How people know the node, for messages: `host:pid`.
    pub name: String,
    /// The address others should use, if the user gave one (`--local-addr`). Else the one the coordinator sees.
    pub local_addr: Option<String>,
    /// What the node asks for.
    pub settings: Settings,
    /// The last round this node was placed in, if any.
    pub placed: Option<Placed>,
    /// The node waits for its next place; its [`Join`] follows.
    pub joining: bool,
}

/// A node's account of the last round it was placed in; lets a coordinator that lost its memory take it up again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The round.
    pub round: Round,
    /// The node's rank in it.
    pub rank: u32,
    /// How many nodes it had.
    pub world_size: u32,
    /// Whether the node still belongs to it: it has not asked to join another.
    pub active: bool,
}

/// Asks for a place in the next round, and brings everything the others need to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The last round this node knows to have been placed in (0: none). An older one than the coordinator's record means that
    /// the completion was lost on the way, and it is sent again.
    pub round: Round,
    /// Port of the empty worker store this node holds ready, used if it becomes rank 0.
    pub store_port: u16,
    /// Rank the user asked for in the first round.
    pub node_rank: Option<u32>,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The workers finished.
    Succeeded {
        /// Node that said so.
        by: String,
    },
    /// A failure that no restart is left for: all others stop.
    Failed {
        /// Node that said so.
        by: String,
        /// What failed there, in words.
        cause: String,
    },
}

impl Verdict {
    /// The same in texts that can be passed on.
    pub(super) fn clipped(self) -> Self {
        match self {
            Self::Succeeded { by } => Self::Succeeded { by: clipped(by) },
            Self::Failed { by, cause } => Self::Failed { by: clipped(by), cause: clipped(cause) },
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Succeeded { by } => write!(f, "closed by {by}"),
            Self::Failed { by, cause } => write!(f, "closed by {by} after a failure: {cause}"),
        }
    }
}

/// From coordinator to node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoordinatorMessage {
    /// The node cannot take part. First variant, so that its encoding never changes with the version.
    Rejected {
        /// Why, and what would be accepted.
        reason: String,
    },
    /// The answer to an accepted [`Hello`].
    Welcome {
        /// The address under which others will look for this node.
        addr: String,
    },
    /// How things stand, pushed to running members when it changes.
    Status {
        /// Above zero when the world must re-form: nodes wait for a place, or a member was lost.
        waiting: u32,
        /// Why, in words.
        reason: String,
    },
    /// The round completed and this is the node's place in it.
    Complete(Placement),
    /// The answer to [`NodeMessage::Withdraw`].
    Withdrawn {
        /// Who was in, who was missing.
        progress: String,
    },
    /// The rendezvous is closed.
    Closed {
        /// How the job ended.
        verdict: Verdict,
        /// Whether this node was a spare: it waited beside a full job, which did not need it.
        spare: bool,
    },
    /// The session is over, for a reason the node cannot mend by reconnecting.
    Ended {
        /// Why.
        reason: String,
    },
    /// Answer to a heartbeat.
    Heartbeat {
        /// For a node that waits: who is in, who is missing, until when.
        progress: Option<String>,
    },
}

/// A node's place in a completed round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The round.
    pub round: Round,
    /// This node's rank.
    pub rank: u32,
    /// Number of nodes.
    pub world_size: u32,
    /// Address of rank 0.
    pub master_addr: String,
    /// Port of the round's empty worker store at rank 0.
    pub master_port: u16,
    /// Why the round closed when it did, and who is in it.
    pub reason: String,
}

/// Longest reason or cause that is passed on, in bytes. With the names beside it it stays far below what a frame may have.
const LONGEST_TEXT_BYTES: usize = 8 * 1024;

/// The beginning of a text that is longer than can be passed on.
pub(super) fn clipped(mut text: String) -> String {
    if text.len() > LONGEST_TEXT_BYTES {
        let end = (0..=LONGEST_TEXT_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
