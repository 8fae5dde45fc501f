//! The nodes with a key at etcd, and the order in which they propose the next state.
//!
//! Every node could write the state, since a write counts only if the state is still the one that was read. If all did, N joins would
//! cost N writes in turn, and most writes would be refused. So one proposes for all: the node whose key is the oldest. The others wait
//! for it: [`PATIENCE`] for each node before them in that order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::wish::Wish;
use crate::rendezvous::messages::message::NodeId;

/// How long the next node in order waits for the proposer.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a node that leaves waits: its process is about to end.
const PATIENCE_OF_LEAVER: Duration = Duration::from_millis(200);
/// Number of nodes for which a node waits at most.
const MOST_WAITED_FOR: u32 = 5;

/// A node with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The revision at which the key was created.
    pub created: u64,
    /// The revision at which its value was last put.
    pub modified: u64,
    /// Its value. `None`: this node does not understand it.
    pub wish: Option<Arc<Wish>>,
}

/// The nodes with a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers(BTreeMap<NodeId, Peer>);

impl Peers {
    /// These nodes.
    pub fn new(peers: BTreeMap<NodeId, Peer>) -> Self {
        Self(peers)
    }

    /// Whether a node has a key.
    pub fn has(&self, node: NodeId) -> bool {
        self.0.contains_key(&node)
    }

    /// Number of nodes whose turn it is before this one. `None`: it has no key.
    pub(super) fn turn(&self, node: NodeId) -> Option<u32> {
        let mine = self.0.get(&node)?.created;
        let before = self.0.iter().filter(|(other, peer)| (peer.created, **other) < (mine, node)).count();
        Some(u32::try_from(before).unwrap_or(u32::MAX))
    }

    /// The wishes of the other nodes, in the order in which they were put.
    pub(super) fn wishes_of_others(&self, me: NodeId) -> Vec<&Wish> {
        let mut wishes: Vec<_> = self
            .0
            .iter()
            .filter(|(node, _)| **node != me)
            .filter_map(|(_, peer)| Some((peer.modified, peer.wish.as_deref()?)))
            .collect();
        wishes.sort_by_key(|(modified, _)| *modified);
        wishes.into_iter().map(|(_, wish)| wish).collect()
    }
}

/// How long a node waits for those before it.
pub(super) fn patience(turn: u32, leaves: bool) -> Duration {
    let each = if leaves { PATIENCE_OF_LEAVER } else { PATIENCE };
    each * turn.min(MOST_WAITED_FOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_key_has_the_first_turn() {
        let peer = |created| Peer { created, modified: created, wish: None };
        let peers = Peers::new([(NodeId(1), peer(9)), (NodeId(2), peer(4)), (NodeId(3), peer(9))].into());
        assert_eq!([2, 1, 3, 4].map(|node| peers.turn(NodeId(node))), [Some(0), Some(1), Some(2), None]);
        assert_eq!(patience(0, false), Duration::ZERO);
        assert_eq!(patience(1, true), PATIENCE_OF_LEAVER);
        assert_eq!(patience(4_000, false), PATIENCE * MOST_WAITED_FOR);
    }
}
