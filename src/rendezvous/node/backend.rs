//! A node's peer, a coordinator or a shared cell, and its name in messages.

use std::time::Duration;

/// A node's peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Counterpart {
    /// A coordinator. An answer renews the node's lease.
    Coordinator {
        /// Its address, as `host:port`.
        endpoint: String,
        /// How long a welcomed node continues while the coordinator is out of reach.
        timeout: Duration,
    },
    /// A cell that all nodes share. A write of this node renews its lease: the transport calls `NodeMachine::vouch`. A backend that
    /// fails for one lease ends a pending join. By then a running node has fenced itself.
    Cell,
    /// The cell that etcd is. The node's lease there renews its lease here.
    Etcd {
        /// Its name in messages, with its endpoints.
        name: String,
        /// How long a welcomed node continues while etcd is out of reach.
        timeout: Duration,
    },
}

impl Counterpart {
    /// Its name in messages, with the endpoint.
    pub fn name(&self) -> String {
        match self {
            Self::Coordinator { endpoint, .. } => format!("the coordinator at {endpoint}"),
            Self::Cell => "the backend".to_owned(),
            Self::Etcd { name, .. } => name.clone(),
        }
    }

    /// Its place in messages, without the word `coordinator`.
    pub fn place(&self) -> &str {
        match self {
            Self::Coordinator { endpoint, .. } => endpoint,
            Self::Cell => "the backend",
            Self::Etcd { name, .. } => name,
        }
    }

    /// How long a welcomed node continues while the counterpart is out of reach. `None`: no limit, except for a pending join.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Coordinator { timeout, .. } | Self::Etcd { timeout, .. } => Some(*timeout),
            Self::Cell => None,
        }
    }

    /// How long it remembers a run that has ended, in words.
    pub fn memory(&self) -> &'static str {
        match self {
            Self::Coordinator { .. } => "a coordinator remembers that for an hour",
            Self::Cell => "the backend keeps that",
            Self::Etcd { .. } => "etcd keeps that for two hours, or until somebody deletes the run's keys",
        }
    }

    /// Time after which a waiting node first logs what it waits for. A coordinator's host may start a little later than other nodes;
    /// etcd was there before.
    pub fn silent_for(&self) -> Duration {
        match self {
            Self::Coordinator { .. } | Self::Cell => Duration::from_secs(3),
            Self::Etcd { .. } => Duration::from_secs(1),
        }
    }

    /// Whether an answer renews the node's lease.
    pub fn vouches(&self) -> bool {
        matches!(self, Self::Coordinator { .. })
    }
}
