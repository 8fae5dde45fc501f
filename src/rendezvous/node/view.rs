//! The output of [`super]: commands for its driver, results of joins, and the view.

use std::time::{Duration, Instant};

use crate::rendezvous::messages::hang::HangNews;
use crate::rendezvous::messages::message::{
    CheckpointBy, EndClass, Failure, Look, NodeMessage, Round, Verdict, WorldChange,
};
use crate::wire::text::{DEFAULT_RUN_ID, duration_text};

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
        /// The coordinator, as `host:port`, if there is one.
        endpoint: Option<String>,
    },
    /// The coordinator could not be reached in that time, or stayed away too long.
    #[error("{text}")]
    Connection {
        /// What happened, in words.
        text: String,
        /// The coordinator, as `host:port`, if there is one and the connection with it is what failed.
        endpoint: Option<String>,
        /// How long it was waited for, if it was.
        elapsed: Option<Duration>,
    },
    /// The rendezvous is closed.
    #[error("the rendezvous is closed: {verdict}")]
    Closed {
        /// The verdict with which the job ended.
        verdict: Verdict,
        /// The job ended, and this node was a spare that was not needed.
        spare: bool,
    },
    /// The rendezvous was closed before this node came: its run id was used before, or it is late.
    #[error("{}", over_text(run_id, verdict, *ago, memory))]
    Over {
        /// The run id.
        run_id: String,
        /// The verdict with which the job ended.
        verdict: Verdict,
        /// How long ago it ended, if that is known.
        ago: Option<Duration>,
        /// Who remembers it, and for how long.
        memory: &'static str,
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

impl JoinError {
    /// A connection that failed on this node, or for a reason that names no coordinator.
    pub fn connection(text: impl Into<String>) -> Self {
        Self::Connection { text: text.into(), endpoint: None, elapsed: None }
    }

    /// The coordinator that this is about, as `host:port`.
    pub fn endpoint(&self) -> Option<&str> {
        match self {
            Self::Timeout { endpoint, .. } | Self::Connection { endpoint, .. } => endpoint.as_deref(),
            _ => None,
        }
    }

    /// How long the node had waited.
    pub fn elapsed(&self) -> Option<Duration> {
        match self {
            Self::Timeout { after, .. } => Some(*after),
            Self::Connection { elapsed, .. } => *elapsed,
            _ => None,
        }
    }

    /// Whose fault it was. `was_in_world`: the node had been a member of a round. Before that nobody knows: the command line may be wrong.
    pub fn class(&self, was_in_world: bool) -> Option<EndClass> {
        match self.verdict() {
            Some(verdict) => verdict.class(),
            None => was_in_world.then_some(EndClass::Machine),
        }
    }

    /// The round in which the job ended.
    pub fn round(&self) -> Option<Round> {
        self.verdict()?.round()
    }

    /// The global rank of the worker whose failure has ended the job.
    pub fn rank(&self) -> Option<u32> {
        self.verdict()?.rank()
    }

    fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::Closed { verdict, .. } | Self::Over { verdict, .. } => Some(verdict),
            _ => None,
        }
    }

    /// Whether the job had succeeded before this node could join.
    pub fn is_after_success(&self) -> bool {
        matches!(self, Self::Closed { verdict, .. } | Self::Over { verdict, .. } if !verdict.is_failure())
    }
}

/// The error of a node that came after its job had ended.
fn over_text(run_id: &str, verdict: &Verdict, ago: Option<Duration>, memory: &str) -> String {
    let when = ago.map_or_else(String::new, |time| format!(" {} ago", duration_text(time)));
    let how = if verdict.is_failure() { "failed" } else { "succeeded" };
    let name = match run_id {
        DEFAULT_RUN_ID => "This is the run id of every job that has none of its own: give a new job a --rdzv-id",
        _ => "A new job needs another --rdzv-id",
    };
    format!("the job with the run id `{run_id}` has {how}{when} ({verdict}): {memory}. {name}")
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
    /// The error of every join, if the rendezvous was closed before this node came.
    pub over: Option<JoinError>,
    /// The error, if this node can no longer take part.
    pub failed: Option<JoinError>,
    /// The address at which other nodes find this one, once known.
    pub addr: Option<String>,
    /// The instant from which on the coordinator has been out of reach, if it is.
    pub out_of_reach_since: Option<Instant>,
    /// The nodes whose workers still run, in the coordinator's words. Set while the workers of this node have succeeded.
    pub unfinished: Option<String>,
    /// The world changes, and this node's workers live through it: they are to count their checks. `waiting` is zero meanwhile. If it
    /// rises, the workers cannot stop together, and go back to their last commits.
    pub change: Option<WorldChange>,
    /// Number of that change, or of the last one, among those of this node. It rises.
    pub changes: u64,
    /// The round that ends, and the check at which all members' workers stop, once it is known. [`NEVER`](crate::rendezvous::messages::message::NEVER): the reason
    /// for the change is gone, and they go on.
    pub raise_at: Option<(Round, u64)>,
    /// A coordinator has welcomed this node, and its workers may survive a change of the world.
    pub in_place: bool,
    /// The coordinator is in this process.
    pub hosted: bool,
    /// The reason, if the coordinator has reported that its process ends. No world can form until a coordinator runs there again.
    pub stopped: Option<String>,
    /// How often somebody wanted to know how far this node's workers are.
    pub steps_asked: u64,
    /// How often somebody wanted to know where this node's workers stand, and the last time.
    pub looks_asked: u64,
    /// The last look that was asked for.
    pub look: Option<Look>,
    /// How often the coordinator has said that the training hangs or goes on, and the last time.
    pub hangs: u64,
    /// What it has said last.
    pub hang: Option<HangNews>,
    /// How often the coordinator has said that the workers are to save, since machines are taken away.
    pub notices: u64,
    /// What it has said of that last.
    pub checkpoint_by: Option<CheckpointBy>,
    /// How often the coordinator has asked for a check of this machine's health.
    pub checks_asked: u64,
    /// The round whose workers are all connected to their store, which this node serves, and how long after their start that was.
    pub imported: Option<(Round, Duration)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_join_names_the_round_or_the_worker_that_ended_the_job() {
        let closed = |verdict| JoinError::Closed { verdict, spare: false };
        let done = closed(Verdict::AllDone { round: Round(4), nodes: 2 });
        assert_eq!((done.round(), done.rank()), (Some(Round(4)), None));
        let failure = Box::new(Failure { global_rank: 3, ..Failure::example("node1") });
        let verdict = Verdict::Failed {
            by: "node0".into(),
            cause: "exit code 3".into(),
            failure: Some(failure),
            class: EndClass::Program,
        };
        let over = JoinError::Over { run_id: "job".into(), verdict: verdict.clone(), ago: None, memory: "" };
        for error in [closed(verdict), over] {
            assert_eq!((error.round(), error.rank(), error.elapsed()), (None, Some(3), None));
        }
        let refused = JoinError::connection("this node has left");
        assert_eq!((refused.endpoint(), refused.elapsed(), refused.rank()), (None, None, None));
    }
}
