//! A node's messages that no written state contains yet, and its wish: those messages, for the node that proposes the next state. The wish is
//! the value of the node's own key at etcd.

use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::message::{Hello, NodeId, NodeMessage};

/// First bytes of a wish.
const MAGIC: &[u8] = b"ELRW";
/// Follows [`MAGIC`], as `u16` little-endian. All nodes of a run must have the same.
pub const WISH_VERSION: u16 = 2;
/// Most messages of one wish: a node has a join, a report and a farewell to send, and some that it has withdrawn.
const MOST_MESSAGES: usize = 64;
/// Longest wish. Every message fits a frame of the session protocol, and few of them come near it.
pub const LONGEST_WISH: usize = 256 * 1024;

/// A node's messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// The node.
    pub hello: Hello,
    /// Its messages with their numbers, which rise. A state that contains one contains all before it.
    pub messages: Vec<Numbered>,
}

/// The value of a node's key is not a wish that this node understands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WishError {
    /// A value of another program.
    #[error("another program wrote it ({len} bytes); use a run id and a `key_prefix` that no other program uses")]
    Foreign {
        /// Its length in bytes.
        len: usize,
    },
    /// A wish of another version of this package.
    #[error("it has version {theirs}, this node writes version {WISH_VERSION}: install one version everywhere")]
    Version {
        /// The version found.
        theirs: u16,
    },
    /// A damaged wish, or one with values that are not allowed.
    #[error("it is corrupt: {0}")]
    Corrupt(String),
}

impl Wish {
    /// The bytes of the key's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(WISH_VERSION.to_le_bytes());
        postcard::to_extend(self, bytes).unwrap_or_else(|error| panic!("a wish cannot be serialised: {error}"))
    }

    /// Decode the value of this node's key.
    ///
    /// # Errors
    /// [`WishError`].
    pub fn decode(node: NodeId, run_id: &str, bytes: &[u8]) -> Result<Self, WishError> {
        let corrupt = |what: String| WishError::Corrupt(what);
        let rest = bytes.strip_prefix(MAGIC).ok_or(WishError::Foreign { len: bytes.len() })?;
        let (version, body) =
            rest.split_first_chunk::<2>().ok_or_else(|| corrupt("it ends within its header".into()))?;
        let theirs = u16::from_le_bytes(*version);
        if theirs != WISH_VERSION {
            return Err(WishError::Version { theirs });
        }
        if bytes.len() > LONGEST_WISH {
            return Err(corrupt(format!("it has {} bytes, at most {LONGEST_WISH} are allowed", bytes.len())));
        }
        let (wish, rest) = postcard::take_from_bytes::<Self>(body).map_err(|error| corrupt(error.to_string()))?;
        let ordered = wish.messages.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let allowed = rest.is_empty() && wish.messages.len() <= MOST_MESSAGES && ordered;
        if !allowed {
            return Err(corrupt(format!("{} messages, {} bytes after them", wish.messages.len(), rest.len())));
        }
        wish.hello.validate().map_err(corrupt)?;
        for (_, message) in &wish.messages {
            if let NodeMessage::Hello(hello) = message {
                hello.validate().map_err(corrupt)?;
            }
        }
        if wish.hello.node != node || wish.hello.run_id != run_id {
            return Err(corrupt(format!("it is of {} in run `{}`", wish.hello.name, wish.hello.run_id)));
        }
        Ok(wish)
    }
}

/// A message with its number. A node numbers its messages from 1, so that a state can record which of them it contains.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::settings::Settings;

    fn wish() -> Wish {
        let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 2));
        Wish { hello, messages: vec![(3, NodeMessage::Withdraw), (4, NodeMessage::Heartbeat { rtt_us: None })] }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Wish::decode(NodeId(7), "job", &wish().encode()), Ok(wish()));
    }

    #[test]
    fn a_value_that_is_no_wish_of_this_node_is_named_for_what_it_is() {
        let text = |node, run_id, bytes: &[u8]| Wish::decode(node, run_id, bytes).unwrap_err().to_string();
        assert!(text(NodeId(7), "job", b"{}").contains("another program wrote it (2 bytes)"));
        assert!(text(NodeId(7), "job", b"ELRW\x09\x00").contains("has version 9, this node writes version 2"));
        assert!(text(NodeId(7), "job", b"ELRW\x01").contains("ends within its header"));
        assert!(text(NodeId(8), "job", &wish().encode()).contains("it is of host:1 in run `job`"));
        assert!(text(NodeId(7), "other", &wish().encode()).contains("it is of host:1 in run `job`"));
        let bytes = wish().encode();
        for cut in 0..bytes.len() {
            assert!(Wish::decode(NodeId(7), "job", &bytes[..cut]).is_err(), "cut at {cut}");
        }
        let twice = Wish { messages: vec![(3, NodeMessage::Withdraw); 2], ..wish() };
        assert!(text(NodeId(7), "job", &twice.encode()).contains("2 messages"));
        let many = Wish { messages: (0..65).map(|number| (number, NodeMessage::Withdraw)).collect(), ..wish() };
        assert!(text(NodeId(7), "job", &many.encode()).contains("65 messages"));
    }

    #[test]
    fn messages_stay_in_order_until_a_state_contains_them() {
        let beat = |rtt_us| NodeMessage::Heartbeat { rtt_us: Some(rtt_us) };
        let mut outbox = Outbox::default();
        (1..=3).for_each(|number| outbox.push(beat(number)));
        let taken = outbox.take();
        assert!(outbox.is_empty() && outbox.highest() == 0);
        outbox.push(NodeMessage::Withdraw);
        outbox.put_back(taken);
        assert_eq!(outbox.messages().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(outbox.settle(2), [(1, beat(1)), (2, beat(2))]);
        outbox.retain(|message| *message != NodeMessage::Withdraw);
        assert!(outbox.has(|message| *message == beat(3)) && outbox.highest() == 3);
        assert_eq!(outbox.settle(9), [(3, beat(3))]);
    }
}
