//! One node of a run, as the run knows it.

use std::cmp::Ordering;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::event::{Ends, Reach, SessionId};
use crate::rendezvous::messages::message::{Health, Hello, INTERFACES_LIMIT, Join, Round};
use crate::rendezvous::messages::settings::{LAST_LOOK, Settings};

/// A node's part in the run. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Has not asked to join, or has withdrawn.
    Idle,
    /// Waits for the next round.
    Waiting {
        /// Its request.
        join: Join,
        /// Order of arrival.
        arrival: u64,
    },
    /// Runs workers of the current round.
    Active,
}

/// A node's host, for counting departures and failures by host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::rendezvous) enum Origin {
    /// The address of the node's connection.
    Peer(IpAddr),
    /// Over a shared cell: the address that the node states.
    Named(String),
    /// The name that the node gives its host, at the address of its connection. It distinguishes hosts behind one address.
    Host(String, IpAddr),
}

impl Origin {
    /// The address, and the name that its nodes give it.
    pub(super) fn parts(&self) -> (String, Option<String>) {
        match self {
            Self::Peer(addr) => (addr.to_string(), None),
            Self::Named(addr) => (addr.clone(), None),
            Self::Host(name, addr) => (addr.to_string(), Some(name.clone())),
        }
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Peer(addr) => addr.fmt(f),
            Self::Named(addr) => addr.fmt(f),
            Self::Host(name, addr) => write!(f, "{name} ({addr})"),
        }
    }
}

/// What a node's workers run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct Program {
    pub role: String,
    /// The name of their script, if the agent reports it.
    pub script: Option<String>,
}

/// One node, connected or within its `reconnect_grace`.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct Node {
    pub name: String,
    pub local_addr: Option<String>,
    /// The name that it gives its host.
    pub host_name: Option<String>,
    /// The ends of its connection. `None` over a shared cell.
    pub ends: Option<Ends>,
    /// The random number of its process ([`Hello::process`]).
    pub process: u64,
    /// Its workers may survive a change of the world.
    pub in_place: bool,
    /// It can be asked how far its workers are.
    pub reports_steps: bool,
    /// The addresses of its interfaces that peers elsewhere can see. `None`: it does not want to know from where members connect.
    pub interfaces: Option<Vec<IpAddr>>,
    /// The rank that the user gave it.
    pub node_rank: Option<u32>,
    /// The settings that it asked for. Once a connected node waits or runs, the run's settings apply instead.
    pub asked: Settings,
    pub lease: Duration,
    pub reconnect_grace: Duration,
    /// `None` while the connection is broken.
    pub session: Option<SessionId>,
    /// When its last message arrived, or when its connection broke.
    pub received_at: Instant,
    /// Its lease has ended. It is lost after a further [`LAST_LOOK`].
    pub suspect: bool,
    /// When its machine is taken away, if it has a notice: it stops its workers by then, whatever happens.
    pub gone_at: Option<Instant>,
    pub status: Status,
    /// Its host is out: while it waits, no round counts it.
    pub out: bool,
    /// Its health check runs, and no round counts it before that has ended.
    pub unchecked: bool,
    /// It has to check its machine again, and has not begun.
    pub rechecks: bool,
    /// Last rank assignment: round and rank.
    pub placed: Option<(Round, u32)>,
    /// Its workers of the current round have all succeeded.
    pub done: bool,
    /// Its workers of the current round are all connected to their agent, so that it can change in place.
    pub attending: bool,
    /// How many durations of its phases of the last recovery it has reported.
    pub phases_reported: u8,
    /// It has reported its first step of the current round.
    pub first_step_reported: bool,
    /// What its workers run, once it has asked to join.
    pub program: Option<Program>,
    /// When it first asked to join. Known only in a run without a name, and to a coordinator.
    pub joined_at: Option<Instant>,
}

impl Node {
    /// Make an idle node from its introduction. A claim to a rank is not evaluated here.
    pub fn new(hello: &Hello, session: SessionId, reach: Reach, now: Instant) -> Self {
        let ends = match reach {
            Reach::Connection(Ends { peer, local }) => {
                Some(Ends { peer: peer.to_canonical(), local: local.to_canonical() })
            }
            Reach::Cell => None,
        };
        // Nodes over a cell are sent nothing: they derive their messages from the state, which has no changes in place.
        let at_coordinator = ends.is_some();
        let interfaces = hello.interfaces.as_ref().filter(|_| at_coordinator);
        Self {
            name: hello.name.clone(),
            local_addr: hello.local_addr.clone(),
            host_name: hello.host_name.clone(),
            ends,
            process: hello.process,
            in_place: hello.in_place && at_coordinator,
            reports_steps: hello.reports_steps && at_coordinator,
            interfaces: interfaces.map(|addresses| visible(addresses)),
            node_rank: hello.node_rank,
            asked: hello.settings.clone(),
            lease: hello.settings.lease(),
            reconnect_grace: hello.settings.reconnect_grace,
            session: Some(session),
            received_at: now,
            suspect: false,
            gone_at: None,
            status: Status::Idle,
            out: false,
            placed: None,
            done: false,
            attending: false,
            unchecked: false,
            rechecks: false,
            phases_reported: 0,
            first_step_reported: false,
            program: None,
            joined_at: None,
        }
    }

    /// The node's address for other nodes: the one it states, else the one the coordinator sees.
    pub fn addr(&self) -> String {
        match (&self.local_addr, &self.ends) {
            (Some(addr), _) => addr.clone(),
            (None, Some(ends)) => ends.peer.to_string(),
            (None, None) => self.name.clone(),
        }
    }

    /// The node's host.
    pub fn origin(&self) -> Origin {
        match (&self.ends, &self.host_name) {
            (Some(ends), None) => Origin::Peer(ends.peer),
            (Some(ends), Some(name)) => Origin::Host(name.clone(), ends.peer),
            (None, _) => Origin::Named(self.addr()),
        }
    }

    /// The node's name in messages: its address, and its name in parentheses.
    pub fn label(&self) -> String {
        format!("{} ({})", self.addr(), self.name)
    }

    /// Whether the node waits for the next round.
    pub fn waits(&self) -> bool {
        matches!(self.status, Status::Waiting { .. }) && !self.out && !self.unchecked
    }

    /// Number of workers that the node offers for the next round.
    pub fn slots(&self) -> usize {
        match &self.status {
            Status::Waiting { join, .. } if self.waits() => {
                join.workers.as_ref().map_or(0, |workers| workers.local_world_size as usize)
            }
            _ => 0,
        }
    }

    /// Whether the node's last join says what the check of its machine has found.
    pub fn checks_health(&self) -> bool {
        match &self.status {
            Status::Waiting { join, .. } => matches!(join.health, Health::Well | Health::Ill(_)),
            _ => false,
        }
    }

    /// Whether the node waits until its host is let in again, or its health check has ended.
    pub fn is_kept_out(&self) -> bool {
        matches!(self.status, Status::Waiting { .. }) && (self.out || self.unchecked)
    }

    /// When the node is lost, unless a message of it arrives.
    pub fn lost_at(&self) -> Instant {
        let silent_at = match (self.session, self.suspect) {
            (None, _) => self.received_at + self.reconnect_grace,
            (Some(_), false) => self.received_at + self.lease,
            (Some(_), true) => self.received_at + self.lease + LAST_LOOK,
        };
        self.gone_at.map_or(silent_at, |gone_at| silent_at.min(gone_at + LAST_LOOK))
    }

    /// Whether its machine has been taken away, as its notice has said.
    pub fn is_gone(&self, now: Instant) -> bool {
        self.gone_at.is_some_and(|gone_at| gone_at + LAST_LOOK <= now)
    }
}

/// Compare texts in natural order: runs of digits by value, all else as text. `node9` comes before `node10`.
pub(super) fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    loop {
        match (a.first(), b.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let (number_a, rest_a) = split_number(a);
                let (number_b, rest_b) = split_number(b);
                let order = number_a.len().cmp(&number_b.len()).then_with(|| number_a.cmp(number_b));
                if order != Ordering::Equal {
                    return order;
                }
                (a, b) = (rest_a, rest_b);
            }
            (Some(x), Some(y)) if x != y => return x.cmp(y),
            _ => (a, b) = (&a[1..], &b[1..]),
        }
    }
}

/// Split a text into its leading digits, without leading zeros, and the rest.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let zeros = number.iter().position(|byte| *byte != b'0').unwrap_or(number.len());
    (&number[zeros..], rest)
}

/// The addresses of a node's interfaces that peers elsewhere can see, up to [`INTERFACES_LIMIT`].
fn visible(interfaces: &[IpAddr]) -> Vec<IpAddr> {
    let canonical = interfaces.iter().map(IpAddr::to_canonical).filter(|ip| may_connect_from(*ip));
    canonical.take(INTERFACES_LIMIT).collect()
}

/// Whether a peer elsewhere can have this address.
pub(super) fn may_connect_from(ip: IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_addresses_are_compared_by_value() {
        for (smaller, larger) in
            [("node9", "node10"), ("10.0.0.9", "10.0.0.100"), ("a", "a0"), ("n01", "n2"), ("a", "b"), ("n1a", "n1b")]
        {
            assert_eq!(natural_order(smaller, larger), Ordering::Less, "{smaller} {larger}");
            assert_eq!(natural_order(larger, smaller), Ordering::Greater, "{smaller} {larger}");
        }
        assert_eq!(natural_order("n07", "n7"), Ordering::Equal);
    }
}
