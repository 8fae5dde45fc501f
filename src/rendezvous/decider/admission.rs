//! What decides who may come in: one agent to a place, whose settings the run has, and which hosts come and go without end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use super::node::{Node, Origin};
use crate::rendezvous::protocol::message::NodeId;
use crate::rendezvous::protocol::settings::Settings;

/// Agents that are remembered as replaced: a run has one for each that was started anew.
const MOST_REPLACED: usize = 10_000;
/// Hosts whose departures are remembered.
const MOST_ORIGINS: usize = 10_000;

/// What is remembered of those who came.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Admission {
    /// Which node holds which place, to find an agent that was started anew.
    places: BTreeMap<Place, NodeId>,
    /// Agents whose place is another's: they may not take it back. One for each agent that was started anew.
    replaced: BTreeSet<NodeId>,
    departures: Departures,
    /// The node whose settings the run has.
    bound_to: Option<NodeId>,
}

impl Admission {
    /// Whether nothing is remembered.
    pub fn is_blank(&self) -> bool {
        self.replaced.is_empty() && self.departures.0.is_empty()
    }

    /// A node has a place, and takes it from whoever had it.
    pub fn seat(&mut self, id: NodeId, node: &Node) {
        self.places.insert(Place::of(node), id);
    }

    /// A known node has introduced itself anew, perhaps at another place, which it takes unless another node has it.
    pub fn reseat(&mut self, id: NodeId, before: Option<&Node>, node: &Node) {
        self.vacate(id, before);
        self.places.entry(Place::of(node)).or_insert(id);
    }

    /// A node gives its place up.
    pub fn vacate(&mut self, id: NodeId, node: Option<&Node>) {
        if let Some(place) = node.map(Place::of).filter(|place| self.places.get(place) == Some(&id)) {
            self.places.remove(&place);
        }
    }

    /// The other node that holds the place of this one.
    pub fn holder(&self, id: NodeId, newer: &Node) -> Option<NodeId> {
        self.places.get(&Place::of(newer)).copied().filter(|older| *older != id)
    }

    /// An agent's place is another's now.
    pub fn replace(&mut self, id: NodeId) {
        self.replaced.insert(id);
        if self.replaced.len() > MOST_REPLACED {
            self.replaced.pop_first();
        }
    }

    /// Whether an agent's place is another's.
    pub fn is_replaced(&self, id: NodeId) -> bool {
        self.replaced.contains(&id)
    }

    /// The node whose settings the run has.
    pub fn bound_to(&self) -> Option<NodeId> {
        self.bound_to
    }

    /// The run's settings are this node's.
    pub fn bind_to(&mut self, id: NodeId) {
        self.bound_to = Some(id);
    }

    /// When nodes have interrupted a world by going.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// The same, to add to it.
    pub fn departures_mut(&mut self) -> &mut Departures {
        &mut self.departures
    }
}

/// What makes two agents the same one, started anew: the same address, and there the same rank that the user gave, or else the
/// same name (`host:pid`).
///
/// The address is that of the connection: what a node says of its own (`--local-addr`) is for others to connect to, and proves nothing.
/// An address alone is no identity: several agents may run on one host. Nor is a name: pids repeat in containers that share
/// their host's network and name, which is why `node_rank` goes first, and why agents of one process are never taken for another.
/// Agents on loopback are told apart by their process as well. All of a service mesh's may come from there; and where an agent ends on the
/// coordinator's own host, the kernel has ended its connection too, so none is in the way of the next. The same holds over a shared
/// cell, where no address is a connection's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    addr: Option<IpAddr>,
    process: Option<u64>,
    who: Who,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Rank(u32),
    Name(String),
}

impl Place {
    fn of(node: &Node) -> Self {
        let who = node.node_rank.map_or_else(|| Who::Name(node.name.clone()), Who::Rank);
        let addr = node.ends.map(|ends| ends.peer);
        Self { addr, process: addr.is_none_or(|addr| addr.is_loopback()).then_some(node.process), who }
    }
}

/// When nodes of each host have interrupted a world by going, as far as that still matters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Departures(BTreeMap<Origin, VecDeque<Instant>>);

impl Departures {
    /// Departures that are known from elsewhere.
    pub fn of(known: BTreeMap<Origin, VecDeque<Instant>>) -> Self {
        Self(known)
    }

    /// All of them, by host, the earliest first.
    pub fn iter(&self) -> impl Iterator<Item = (&Origin, &VecDeque<Instant>)> {
        self.0.iter()
    }

    /// A running node of this host is gone.
    pub fn add(&mut self, origin: Origin, settings: &Settings, now: Instant) {
        if settings.rejoin_limit == 0 {
            return;
        }
        self.0.retain(|_, times| times.back().is_some_and(|at| now.duration_since(*at) < settings.rejoin_window));
        if self.0.len() >= MOST_ORIGINS
            && !self.0.contains_key(&origin)
            && let Some(oldest) = self.0.iter().min_by_key(|(_, times)| times.back().copied()).map(|(at, _)| at.clone())
        {
            self.0.remove(&oldest);
        }
        let times = self.0.entry(origin).or_default();
        times.push_back(now);
        while times.len() > settings.rejoin_limit as usize {
            times.pop_front();
        }
    }

    /// How many there were of this host in the last `rejoin_window`.
    pub fn recent(&self, origin: &Origin, settings: &Settings, now: Instant) -> usize {
        let recent = |at: &&Instant| now.duration_since(**at) < settings.rejoin_window;
        self.0.get(origin).map_or(0, |times| times.iter().filter(recent).count())
    }
}
