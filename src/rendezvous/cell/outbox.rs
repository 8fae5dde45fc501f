//! A node's messages that no written state contains yet.

use crate::rendezvous::messages::message::NodeMessage;

/// A message with its number. A node numbers its messages from 1, so that a state can tell which of them it contains.
pub(in crate::rendezvous) type Numbered = (u64, NodeMessage);

/// The messages, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox {
    last: u64,
    messages: Vec<Numbered>,
}

impl Outbox {
    pub fn push(&mut self, message: NodeMessage) {
        self.last += 1;
        self.messages.push((self.last, message));
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The highest number of a message in it. 0: it is empty.
    pub fn highest(&self) -> u64 {
        self.messages.last().map_or(0, |(number, _)| *number)
    }

    pub fn messages(&self) -> &[Numbered] {
        &self.messages
    }

    /// Whether one of its messages is such a one.
    pub fn has(&self, such: impl Fn(&NodeMessage) -> bool) -> bool {
        self.messages.iter().any(|(_, message)| such(message))
    }

    pub fn retain(&mut self, keep: impl Fn(&NodeMessage) -> bool) {
        self.messages.retain(|(_, message)| keep(message));
    }

    /// Take all messages, to make a state that contains them.
    pub fn take(&mut self) -> Vec<Numbered> {
        std::mem::take(&mut self.messages)
    }

    /// Put messages back that were taken, because no state contains them after all.
    pub fn put_back(&mut self, messages: Vec<Numbered>) {
        self.messages.splice(..0, messages);
    }

    /// Remove the messages up to this number, and return them.
    pub fn settle(&mut self, number: u64) -> Vec<Numbered> {
        let kept = self.messages.iter().position(|(known, _)| *known > number).unwrap_or(self.messages.len());
        self.messages.drain(..kept).collect()
    }
}
