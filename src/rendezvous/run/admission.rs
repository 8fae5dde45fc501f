//! Admission of nodes: one agent to a place, and the node that gave the run its settings.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use super::node::Node;
use crate::rendezvous::messages::message::NodeId;

/// Number of replaced agents that are remembered. The ones that were replaced first are forgotten first.
const MOST_REPLACED: usize = 10_000;

/// The state of admission.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Admission {
    /// The node at each place, to recognise a restarted agent.
    places: BTreeMap<Place, NodeId>,
    /// Agents that a newer agent has replaced. They may not come back.
    replaced: BTreeSet<NodeId>,
    /// The same in the order in which they were replaced.
    in_order: VecDeque<NodeId>,
    /// The node that gave the run its settings.
    bound_to: Option<NodeId>,
}

impl Admission {
    /// Whether no replaced agent is remembered.
    pub fn is_blank(&self) -> bool {
        self.replaced.is_empty()
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
        if self.replaced.insert(id) {
            self.in_order.push_back(id);
        }
        if self.in_order.len() > MOST_REPLACED
            && let Some(first) = self.in_order.pop_front()
        {
            self.replaced.remove(&first);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_that_was_replaced_first_is_forgotten_first() {
        let mut admission = Admission::default();
        let last = MOST_REPLACED as u128;
        (0..=last).rev().for_each(|id| admission.replace(NodeId(id)));
        assert_eq!([0, 1, last].map(|id| admission.is_replaced(NodeId(id))), [true, true, false]);
    }
}
