//! A node's decision on the cell's state: a new state, or only replies to the node's machine.

use super::blob::Blob;
use super::outbox::Numbered;
use crate::events::journal::Reference;
use crate::events::record::Record;
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeMessage};
use crate::rendezvous::run::Standing;

/// A state to be written.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub blob: Blob,
    /// Decisions, to be logged and recorded once the state is written.
    pub recorded: Recorded,
    /// Replies to this node's machine, once the state is written.
    pub replies: Vec<CoordinatorMessage>,
    /// This node's messages that the state contains.
    pub messages: Vec<Numbered>,
    /// The decision, by which the next one is logged if it is another.
    pub standing: Standing,
}

/// What a decision has recorded.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded {
    pub records: Vec<Record>,
    /// For people.
    pub warnings: Vec<String>,
    /// Events of other nodes that are causes. Theirs are the numbers before those of the records.
    pub references: Vec<Reference>,
}

/// A node's decision on its messages and the cell's state.
#[derive(Debug)]
pub(super) enum Decision {
    /// Write a new state.
    Write(Box<Proposal>),
    /// Write nothing. The node's machine gets these replies at once.
    Reply(Vec<CoordinatorMessage>),
}

impl Proposal {
    /// Drop the replies and messages of a connection that the machine has given up. It repeats those that still matter.
    pub fn drop_connection(&mut self) {
        self.replies.clear();
        self.messages.retain(|(_, message)| outlives_its_connection(message));
    }
}

/// Whether a message must be delivered even if the machine gives up its connection: it will not repeat a `Withdraw` or `Leave`.
pub(super) fn outlives_its_connection(message: &NodeMessage) -> bool {
    matches!(message, NodeMessage::Withdraw | NodeMessage::Leave { .. })
}
