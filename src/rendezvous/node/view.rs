//! The output of [`super::machine`]: commands for its driver, results of joins, and the view.

use std::time::{Duration, Instant};

use crate::rendezvous::protocol::message::{Failure, NodeMessage, Round, Verdict};

/// A command to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeCommand {
    /// Open a connection; answer with `on_connected` or `on_connect_failed`.
    Connect,
    /// Send this on the open connection.
    Send(NodeMessage),
    /// Drop the connection, if there is one. `on_disconnected` need not be called for it.
    Disconnect,
    /// Find out whether a c10d store listens at the endpoint; answer with `on_probed`.
    Probe,
}

/// A join failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The join timeout ended.
    #[error("no round completed within {after:.1?}: {progress}")]
    Timeout {
        /// Time waited.
        after: Duration,
        /// The nodes that had joined, and the number of missing ones.
        progress: String,
    },
    /// The coordinator could not be reached in that time, or stayed away too long.
    #[error("{0}")]
    Connection(String),
    /// The rendezvous is closed.
    #[error("the rendezvous is closed: {verdict}")]
    Closed {
        /// The verdict with which the job ended.
        verdict: Verdict,
        /// The job ended, and this node was a spare that was not needed.
        spare: bool,
    },
    /// Another join of this node is pending: it takes part in one round at a time.
    #[error("this node already waits for the next round, in another call")]
    Busy,
    /// The coordinator has rejected this node.
    #[error("the coordinator refused this node: {0}")]
    Rejected(String),
    /// The backend holds a state that this node cannot decode.
    #[error("{0}")]
    State(String),
}

/// The state of the rendezvous for a node that is or was in a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Above zero when the world must re-form.
    pub waiting: u32,
    /// The reason, in words.
    pub reason: String,
    /// The failure that is the cause, or that has ended the job.
    pub failure: Option<Failure>,
    /// The last round this node was placed in.
    pub round: Round,
    /// The job's restart number; that of the next round, when the world must re-form.
    pub restart: u32,
    /// The job is over: the workers of all live members have succeeded.
    pub all_done: bool,
    /// The reason, if this node has fenced itself: it was cut off for its whole lease and must stop its workers. `waiting` is then
    /// above zero, until it joins again.
    pub fenced: Option<String>,
    /// The verdict with which the job ended, if it was closed.
    pub closed: Option<Verdict>,
    /// The error, if this node can no longer take part.
    pub failed: Option<JoinError>,
    /// The address at which other nodes find this one, once known.
    pub addr: Option<String>,
    /// The instant from which on the coordinator has been out of reach, if it is.
    pub out_of_reach_since: Option<Instant>,
    /// The nodes whose workers still run, in the coordinator's words. Set while the workers of this node have succeeded.
    pub unfinished: Option<String>,
    /// The reason, if the coordinator has reported that its process ends. No world can form until a coordinator runs there again.
    pub stopped: Option<String>,
}
