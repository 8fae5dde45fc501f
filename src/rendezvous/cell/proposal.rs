//! What a node has decided on the cell's state, to be written or only told.

use super::blob::Blob;
use crate::rendezvous::protocol::message::{CoordinatorMessage, NodeMessage};

/// A state to be written.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub blob: Blob,
    /// Decisions, to be logged once the state is written.
    pub notes: Vec<String>,
    /// Replies to this node's machine, once the state is written.
    pub replies: Vec<CoordinatorMessage>,
    /// This node's messages that the state contains.
    pub taken_in: Vec<NodeMessage>,
}

/// What a node does about its messages and the cell's state.
#[derive(Debug)]
pub(super) enum Decision {
    /// Write a new state.
    Write(Box<Proposal>),
    /// Write nothing. The node's machine hears these replies at once.
    Tell(Vec<CoordinatorMessage>),
}

impl Proposal {
    /// Drop replies and messages that belong to a connection that the machine has given up. It repeats those that still matter.
    pub fn forget(&mut self) {
        self.replies.clear();
        self.taken_in.retain(outlives_its_connection);
    }
}

/// Whether a message must be delivered even if the machine gives up its connection: it will not repeat a `Withdraw` or `Leave`.
pub(super) fn outlives_its_connection(said: &NodeMessage) -> bool {
    matches!(said, NodeMessage::Withdraw | NodeMessage::Leave { .. })
}
