//! A node's peer, a coordinator or a shared cell, and its name in messages.

use std::time::Duration;

use super::machine::NodeMachine;

/// A node's peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Counterpart {
    /// A coordinator. An answer renews the node's lease.
    Coordinator {
        /// Where it listens, as `host:port`.
        endpoint: String,
        /// How long a welcomed node goes on while the coordinator is out of reach.
        timeout: Duration,
    },
    /// A cell that all nodes share. A write of this node, or its lease at etcd, renews the node's lease: the transport calls
    /// [`NodeMachine::vouch`]. A backend that fails for one lease ends a pending join. By then a running node has fenced itself.
    Cell,
}

impl Counterpart {
    /// Its name in messages, with the endpoint.
    pub fn name(&self) -> String {
        match self {
            Self::Coordinator { endpoint, .. } => format!("the coordinator at {endpoint}"),
            Self::Cell => "the backend".to_owned(),
        }
    }

    /// Its place in messages, without the word `coordinator`.
    pub fn place(&self) -> &str {
        match self {
            Self::Coordinator { endpoint, .. } => endpoint,
            Self::Cell => "the backend",
        }
    }

    /// How long a welcomed node goes on while it is out of reach. `None`: without a limit, except for a pending join.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Coordinator { timeout, .. } => Some(*timeout),
            Self::Cell => None,
        }
    }

    /// Whether an answer renews the node's lease.
    pub fn vouches(&self) -> bool {
        matches!(self, Self::Coordinator { .. })
    }
}

impl NodeMachine {
    /// Why the counterpart is out of reach, as a sentence that names it.
    pub(super) fn why_out_of_reach(&self) -> String {
        let name = self.counterpart.name();
        match (&self.counterpart, &self.view.stopped) {
            (Counterpart::Cell, _) => format!("{name} fails: {}", self.last_error),
            (Counterpart::Coordinator { .. }, None) => format!("{name} is out of reach: {}", self.last_error),
            (Counterpart::Coordinator { .. }, Some(why)) => {
                format!("{name} was stopped: {why}; no world can form until a coordinator runs there again")
            }
        }
    }

    /// Why no answer has come yet.
    #[cfg(feature = "io")]
    pub(super) fn why_unanswered(&self) -> String {
        match self.view.out_of_reach_since {
            Some(_) => self.last_error.clone(),
            None => format!("{} does not answer", self.counterpart.place()),
        }
    }

    /// Why the counterpart is out of reach, for an error that names it already.
    pub(super) fn why_away(&self) -> String {
        match &self.view.stopped {
            None => self.last_error.clone(),
            Some(why) => format!("it was stopped ({why}), and has not come back: {}", self.last_error),
        }
    }

    /// Why this node stops its workers. `away`: the time since its lease was last renewed. `connected`: a connection is open.
    pub(super) fn why_fenced(&self, away: Duration, connected: bool) -> String {
        let lease = self.hello.settings.lease();
        match &self.counterpart {
            Counterpart::Coordinator { .. } => {
                let why = if connected { "its last messages were not answered" } else { self.last_error.as_str() };
                format!(
                    "this node has been cut off from {} for {away:.1?} (its lease is {lease:.1?}): {why}; it stops its workers, \
                     because the other nodes may go on without it (on_partition=stop)",
                    self.counterpart.name(),
                )
            }
            Counterpart::Cell => {
                format!("this node could not renew its lease of {lease:.1?} in the backend: {}", self.last_error)
            }
        }
    }
}
