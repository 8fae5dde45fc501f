//! What [`super::machine`] hands out: commands for its driver, how a join ended, and how things stand.

use std::time::{Duration, Instant};

use crate::rendezvous::protocol::message::{Failure, NodeMessage, Round, Verdict};

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeCommand {
    /// Open a connection; answer with `on_connected` or `on_connect_failed`.
    Connect,
    /// Send on the open connection.
    Send(NodeMessage),
    /// Drop the connection, if there is one; `on_disconnected` need not be called for it.
    Disconnect,
    /// Find out whether a c10d store listens at the endpoint; answer with `on_probed`.
    Probe,
}

/// Why a join did not end with a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The join timeout ended.
    #[error("no round completed within {after:.1?}: {progress}")]
    Timeout {
        /// How long was waited.
        after: Duration,
        /// Who was in, who was missing.
        progress: String,
    },
    /// The coordinator could not be reached in that time, or stayed away too long.
    #[error("{0}")]
    Connection(String),
    /// The rendezvous is closed.
    #[error("the rendezvous is closed: {verdict}")]
    Closed {
        /// How the job ended.
        verdict: Verdict,
        /// This node was a spare that was not needed.
        spare: bool,
    },
    /// Another join of this node is pending: it takes part in one round at a time.
    #[error("this node already waits for the next round, in another call")]
    Busy,
    /// The coordinator does not want this node.
    #[error("the coordinator refused this node: {0}")]
    Rejected(String),
    /// What a backend holds is not a state that this node understands.
    #[error("{0}")]
    State(String),
}

/// How things stand for a node that is in a world, or was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Above zero when the world must re-form.
    pub waiting: u32,
    /// Why, in words.
    pub reason: String,
    /// The failure because of which it must, or because of which the job has ended.
    pub failure: Option<Failure>,
    /// The last round this node was placed in.
    pub round: Round,
    /// The job's restart number; that of the next round, when the world must re-form.
    pub restart: u32,
    /// The workers of all live members have succeeded, and the job is over.
    pub all_done: bool,
    /// Why this node must stop its workers although nobody told it to: it was cut off for its whole lease. `waiting` is above
    /// zero then, until it joins again.
    pub fenced: Option<String>,
    /// How the job ended, if it was closed.
    pub closed: Option<Verdict>,
    /// Why this node can no longer take part, if so.
    pub failed: Option<JoinError>,
    /// The address under which others look for this node, once known.
    pub addr: Option<String>,
    /// Since when the coordinator has been out of reach, if it is.
    pub out_of_reach_since: Option<Instant>,
    /// While the workers of this node have succeeded, and those of others have not: whose, in the coordinator's words.
    pub unfinished: Option<String>,
    /// What ended the coordinator's process, if it has said so: no world can form until one runs there again.
    pub stopped: Option<String>,
}
