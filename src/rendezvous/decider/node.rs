//! One node of a run, as the decider knows it.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::event::{Ends, Reach, SessionId};
use crate::rendezvous::protocol::capability::Capabilities;
use crate::rendezvous::protocol::message::{Hello, Join, Round};
use crate::rendezvous::protocol::settings::{LAST_LOOK, Settings};

/// What a node is doing. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Connected, has not asked to join, or has withdrawn.
    Idle,
    /// Waits for a place in the next round.
    Waiting {
        /// What it brought.
        join: Join,
        /// Order of arrival.
        arrival: u64,
    },
    /// Runs workers of the current round.
    Active,
}

/// Where a node comes from, for what is remembered of its host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::rendezvous) enum Origin {
    /// The address of its connection.
    Peer(IpAddr),
    /// The address that it gave itself, over a shared cell.
    Named(String),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Peer(addr) => addr.fmt(f),
            Self::Named(addr) => addr.fmt(f),
        }
    }
}

/// One node, connected or within its grace.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct Node {
    pub name: String,
    pub local_addr: Option<String>,
    /// The ends of its connection, in a coordinator.
    pub ends: Option<Ends>,
    /// Drawn by its process.
    pub process: u64,
    /// What it understands beyond this version's messages.
    pub capabilities: Capabilities,
    /// Rank the user gave it.
    pub node_rank: Option<u32>,
    /// What it asked for. What holds for it is the run's, once the run has nodes that take part.
    pub asked: Settings,
    pub lease: Duration,
    pub reconnect_grace: Duration,
    /// `None` while the connection is broken.
    pub session: Option<SessionId>,
    /// When something was last heard; for a broken connection, when it broke.
    pub heard_at: Instant,
    /// The lease has ended; one last look before the node is judged.
    pub suspect: bool,
    pub status: Status,
    /// Last place: round and rank.
    pub placed: Option<(Round, u32)>,
    /// Its workers of the current round have all succeeded.
    pub done: bool,
}

impl Node {
    /// Introduce a node. Nothing is known of its last round yet.
    pub fn new(hello: &Hello, session: SessionId, reach: Reach, now: Instant) -> Self {
        let ends = match reach {
            Reach::Connection(Ends { peer, local }) => {
                Some(Ends { peer: peer.to_canonical(), local: local.to_canonical() })
            }
            Reach::Cell => None,
        };
        Self {
            name: hello.name.clone(),
            local_addr: hello.local_addr.clone(),
            ends,
            process: hello.process,
            capabilities: hello.capabilities.clone(),
            node_rank: hello.node_rank,
            asked: hello.settings.clone(),
            lease: hello.settings.lease(),
            reconnect_grace: hello.settings.reconnect_grace,
            session: Some(session),
            heard_at: now,
            suspect: false,
            status: Status::Idle,
            placed: None,
            done: false,
        }
    }

    /// The address others use: the user's, else the one the coordinator sees.
    pub fn addr(&self) -> String {
        match (&self.local_addr, &self.ends) {
            (Some(addr), _) => addr.clone(),
            (None, Some(ends)) => ends.peer.to_string(),
            (None, None) => self.name.clone(),
        }
    }

    /// Where the node comes from.
    pub fn origin(&self) -> Origin {
        match &self.ends {
            Some(ends) => Origin::Peer(ends.peer),
            None => Origin::Named(self.addr()),
        }
    }

    /// How messages call the node: its address and its name.
    pub fn label(&self) -> String {
        format!("{} ({})", self.addr(), self.name)
    }

    /// Whether the node waits for a place in the next round.
    pub fn waits(&self) -> bool {
        matches!(self.status, Status::Waiting { .. })
    }

    /// When the node is lost unless it is heard of.
    pub fn lost_at(&self) -> Instant {
        match (self.session, self.suspect) {
            (None, _) => self.heard_at + self.reconnect_grace,
            (Some(_), false) => self.heard_at + self.lease,
            (Some(_), true) => self.heard_at + self.lease + LAST_LOOK,
        }
    }
}
