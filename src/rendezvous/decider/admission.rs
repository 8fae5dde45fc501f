//! Admission of nodes: one agent to a place, the node that gave the run its settings, and how often each host's nodes have left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use super::node::{Node, Origin};
use crate::rendezvous::protocol::message::NodeId;
use crate::rendezvous::protocol::settings::Settings;

/// Number of replaced agents that are remembered.
const MOST_REPLACED: usize = 10_000;
/// Number of hosts with remembered departures.
const MOST_ORIGINS: usize = 10_000;

/// The state of admission.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Admission {
    /// The node at each place, to recognise a restarted agent.
    places: BTreeMap<Place, NodeId>,
    /// Agents that a newer agent has replaced. They may not come back.
    replaced: BTreeSet<NodeId>,
    departures: Departures,
    /// The node that gave the run its settings.
    bound_to: Option<NodeId>,
}

impl Admission {
    /// Whether no replaced agent and no departure is remembered.
    pub fn is_blank(&self) -> bool {
        self.replaced.is_empty() && self.departures.0.is_empty()
    }

    /// Give a node its place, even if another node holds it.
    pub fn seat(&mut self, id: NodeId, node: &Node) {
        self.places.insert(Place::of(node), id);
    }

    /// Move a reconnected node to its place, which may have changed. It gets no place that another node holds.
    pub fn reseat(&mut self, id: NodeId, before: Option<&Node>, node: &Node) {
        self.vacate(id, before);
        self.places.entry(Place::of(node)).or_insert(id);
    }

    /// Free a node's place.
    pub fn vacate(&mut self, id: NodeId, node: Option<&Node>) {
        if let Some(place) = node.map(Place::of).filter(|place| self.places.get(place) == Some(&id)) {
            self.places.remove(&place);
        }
    }

    /// The other node that holds this node's place.
    pub fn holder(&self, id: NodeId, newer: &Node) -> Option<NodeId> {
        self.places.get(&Place::of(newer)).copied().filter(|older| *older != id)
    }

    /// Record that a newer agent has replaced this one.
    pub fn replace(&mut self, id: NodeId) {
        self.replaced.insert(id);
        if self.replaced.len() > MOST_REPLACED {
            self.replaced.pop_first();
        }
    }

    /// Whether a newer agent has replaced this one.
    pub fn is_replaced(&self, id: NodeId) -> bool {
        self.replaced.contains(&id)
    }

    /// The node that gave the run its settings.
    pub fn bound_to(&self) -> Option<NodeId> {
        self.bound_to
    }

    /// Record that this node gave the run its settings.
    pub fn bind_to(&mut self, id: NodeId) {
        self.bound_to = Some(id);
    }

    /// When nodes left a running world, by host.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// The same, to add to it.
    pub fn departures_mut(&mut self) -> &mut Departures {
        &mut self.departures
    }
}

/// The key by which a restarted agent is recognised: its address, and there its `node_rank`, or without one its name (`host:pid`).
///
/// - The address is the connection's. `--local-addr` is only for others to connect to, and proves nothing.
/// - The address alone is not enough, because several agents may run on one host.
/// - Names repeat in containers that share their host's network and name, because pids repeat there. So `node_rank` comes first.
/// - On loopback, and over a shared cell, the process is part of the key. All connections of a service mesh may come from loopback.
///   If an agent on the coordinator's own host ends, the kernel ends its connection too, so its successor finds the place free.
///
/// `docs/decisions/0033-a-restarted-agent-takes-the-place-of-its-older-self.md` has the alternatives.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    addr: Option<IpAddr>,
    process: Option<u64>,
    agent: Agent,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Agent {
    Rank(u32),
    Name(String),
}

impl Place {
    fn of(node: &Node) -> Self {
        let agent = node.node_rank.map_or_else(|| Agent::Name(node.name.clone()), Agent::Rank);
        let addr = node.ends.map(|ends| ends.peer);
        Self { addr, process: addr.is_none_or(|addr| addr.is_loopback()).then_some(node.process), agent }
    }
}

/// When nodes of each host left a running world, within `rejoin_window`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Departures(BTreeMap<Origin, VecDeque<Instant>>);

impl Departures {
    /// Departures read from a shared cell.
    pub fn of(known: BTreeMap<Origin, VecDeque<Instant>>) -> Self {
        Self(known)
    }

    /// All departures by host, the earliest first.
    pub fn iter(&self) -> impl Iterator<Item = (&Origin, &VecDeque<Instant>)> {
        self.0.iter()
    }

    /// Record that a running node of this host has left.
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

    /// Number of departures from this host in the last `rejoin_window`.
    pub fn recent(&self, origin: &Origin, settings: &Settings, now: Instant) -> usize {
        let recent = |at: &&Instant| now.duration_since(**at) < settings.rejoin_window;
        self.0.get(origin).map_or(0, |times| times.iter().filter(recent).count())
    }
}
