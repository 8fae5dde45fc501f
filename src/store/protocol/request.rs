//! Requests as values, and their encoding.
//!
//! Owns the query codes, each query's shape, and the encoder. The decoder is in [`super::decode`].
//! Facts: `QueryType` in PyTorch's `TCPStoreBackend.hpp`, and who reads it in `TCPStoreBackend.cpp`.

use bytes::{BufMut, Bytes, BytesMut};

use super::{ReplyShape, VALIDATION_MAGIC};

/// The query codes, as upstream names and numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[allow(missing_docs, reason = "named as in PyTorch's `TCPStoreBackend.hpp`")]
pub enum Query {
    Validate = 0,
    Set = 1,
    CompareSet = 2,
    Get = 3,
    Add = 4,
    Check = 5,
    Wait = 6,
    GetNumKeys = 7,
    DeleteKey = 8,
    Append = 9,
    MultiGet = 10,
    MultiSet = 11,
    CancelWait = 12,
    Ping = 13,
    QueuePush = 14,
    QueuePop = 15,
    QueueLen = 16,
    ListKeys = 17,
    Barrier = 18,
}

impl Query {
    /// Every query, in order of its code.
    pub const ALL: [Query; 19] = [
        Query::Validate,
        Query::Set,
        Query::CompareSet,
        Query::Get,
        Query::Add,
        Query::Check,
        Query::Wait,
        Query::GetNumKeys,
        Query::DeleteKey,
        Query::Append,
        Query::MultiGet,
        Query::MultiSet,
        Query::CancelWait,
        Query::Ping,
        Query::QueuePush,
        Query::QueuePop,
        Query::QueueLen,
        Query::ListKeys,
        Query::Barrier,
    ];

    /// The query with this code, if torch 2.15 has one.
    pub fn from_code(code: u8) -> Option<Query> {
        Query::ALL.get(usize::from(code)).copied()
    }

    /// The byte that begins the query.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// What follows the code.
    pub(super) fn shape(self) -> Shape {
        use Field::{I64, Key, U32, Value};
        match self {
            Query::Validate | Query::Ping => Shape::Once(&[U32]),
            Query::Set | Query::Append | Query::QueuePush => Shape::Once(&[Key, Value]),
            Query::CompareSet => Shape::Once(&[Key, Value, Value]),
            Query::Get | Query::DeleteKey | Query::QueuePop | Query::QueueLen => Shape::Once(&[Key]),
            Query::Add | Query::Barrier => Shape::Once(&[Key, I64]),
            Query::Check | Query::Wait | Query::MultiGet => Shape::List(&[Key]),
            Query::MultiSet => Shape::List(&[Key, Value]),
            Query::GetNumKeys | Query::CancelWait | Query::ListKeys => Shape::Once(&[]),
        }
    }
}

/// What follows a query code: these fields once, or a count and then the fields that many times.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    Once(&'static [Field]),
    List(&'static [Field]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    U32,
    I64,
    Key,
    Value,
}

/// One request. Keys are as sent: a client has already put its `/` before them.
///
/// A decoded request holds slices of the receive buffer (`B = Bytes`), so parts that are kept for long are better copied:
/// [`crate::store::Table`] does. A request to be encoded may have any `B` that is bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named as in PyTorch's `TCPStoreBackend.cpp`")]
pub enum Request<B = Bytes> {
    /// Opens every connection. Carries the magic number; no reply.
    Validate,
    /// Stores a value. No reply.
    Set { key: B, value: B },
    /// Stores `desired` if the value is `expected`. Replies with the value that is then valid.
    CompareSet { key: B, expected: B, desired: B },
    /// Replies with the value, empty if there is none.
    Get { key: B },
    /// Adds to a decimal number and replies with the sum.
    Add { key: B, amount: i64 },
    /// Asks whether all keys exist.
    Check { keys: Vec<B> },
    /// Asks for a reply once all keys exist.
    Wait { keys: Vec<B> },
    /// Asks for the number of stored keys.
    GetNumKeys,
    /// Removes a key. Replies 1 if it existed.
    DeleteKey { key: B },
    /// Appends to a value. No reply.
    Append { key: B, value: B },
    /// Replies with the values one after the other.
    MultiGet { keys: Vec<B> },
    /// Stores several values. No reply.
    MultiSet { pairs: Vec<(B, B)> },
    /// Ends this connection's wait. Always has a reply.
    CancelWait,
    /// The server returns the nonce.
    Ping { nonce: u32 },
    /// Adds an item to a queue. No reply.
    QueuePush { key: B, value: B },
    /// Takes the oldest item of a queue.
    QueuePop { key: B },
    /// Asks for the length of a queue.
    QueueLen { key: B },
    /// Asks for all stored keys.
    ListKeys,
    /// Counts the caller, and asks for a reply once `world_size` callers were counted.
    Barrier { key: B, world_size: i64 },
}

impl<B: AsRef<[u8]>> Request<B> {
    /// The query this request is.
    pub fn query(&self) -> Query {
        match self {
            Request::Validate => Query::Validate,
            Request::Set { .. } => Query::Set,
            Request::CompareSet { .. } => Query::CompareSet,
            Request::Get { .. } => Query::Get,
            Request::Add { .. } => Query::Add,
            Request::Check { .. } => Query::Check,
            Request::Wait { .. } => Query::Wait,
            Request::GetNumKeys => Query::GetNumKeys,
            Request::DeleteKey { .. } => Query::DeleteKey,
            Request::Append { .. } => Query::Append,
            Request::MultiGet { .. } => Query::MultiGet,
            Request::MultiSet { .. } => Query::MultiSet,
            Request::CancelWait => Query::CancelWait,
            Request::Ping { .. } => Query::Ping,
            Request::QueuePush { .. } => Query::QueuePush,
            Request::QueuePop { .. } => Query::QueuePop,
            Request::QueueLen { .. } => Query::QueueLen,
            Request::ListKeys => Query::ListKeys,
            Request::Barrier { .. } => Query::Barrier,
        }
    }

    /// The shape of its reply; `None` for the queries that must not be answered.
    pub fn reply_shape(&self) -> Option<ReplyShape> {
        match self {
            Request::Validate
            | Request::Set { .. }
            | Request::Append { .. }
            | Request::MultiSet { .. }
            | Request::QueuePush { .. } => None,
            Request::CompareSet { .. } | Request::Get { .. } => Some(ReplyShape::Value),
            Request::Add { .. } | Request::GetNumKeys | Request::DeleteKey { .. } | Request::QueueLen { .. } => {
                Some(ReplyShape::Integer)
            }
            Request::Check { .. } => Some(ReplyShape::Check),
            Request::Wait { .. } | Request::Barrier { .. } | Request::CancelWait => Some(ReplyShape::Wait),
            Request::MultiGet { keys } => Some(ReplyShape::Values(keys.len())),
            Request::Ping { .. } => Some(ReplyShape::Nonce),
            Request::QueuePop { .. } => Some(ReplyShape::Popped),
            Request::ListKeys => Some(ReplyShape::Keys),
        }
    }

    /// Appends the request's bytes.
    pub fn encode(&self, out: &mut BytesMut) {
        out.reserve(self.encoded_len());
        out.put_u8(self.query().code());
        match self {
            Request::Validate => out.put_u32_le(VALIDATION_MAGIC),
            Request::Ping { nonce } => out.put_u32_le(*nonce),
            Request::GetNumKeys | Request::CancelWait | Request::ListKeys => {}
            Request::Get { key }
            | Request::DeleteKey { key }
            | Request::QueuePop { key }
            | Request::QueueLen { key } => put_bytes(out, key),
            Request::Set { key, value } | Request::Append { key, value } | Request::QueuePush { key, value } => {
                put_bytes(out, key);
                put_bytes(out, value);
            }
            Request::CompareSet { key, expected, desired } => {
                put_bytes(out, key);
                put_bytes(out, expected);
                put_bytes(out, desired);
            }
            Request::Add { key, amount: number } | Request::Barrier { key, world_size: number } => {
                put_bytes(out, key);
                out.put_i64_le(*number);
            }
            Request::Check { keys } | Request::Wait { keys } | Request::MultiGet { keys } => {
                out.put_u64_le(keys.len() as u64);
                keys.iter().for_each(|key| put_bytes(out, key));
            }
            Request::MultiSet { pairs } => {
                out.put_u64_le(pairs.len() as u64);
                for (key, value) in pairs {
                    put_bytes(out, key);
                    put_bytes(out, value);
                }
            }
        }
    }

    /// How many bytes [`encode`](Self::encode) appends.
    pub fn encoded_len(&self) -> usize {
        let long = |part: &B| 8 + part.as_ref().len();
        1 + match self {
            Request::Validate | Request::Ping { .. } => 4,
            Request::GetNumKeys | Request::CancelWait | Request::ListKeys => 0,
            Request::Get { key }
            | Request::DeleteKey { key }
            | Request::QueuePop { key }
            | Request::QueueLen { key } => long(key),
            Request::Set { key, value } | Request::Append { key, value } | Request::QueuePush { key, value } => {
                long(key) + long(value)
            }
            Request::CompareSet { key, expected, desired } => long(key) + long(expected) + long(desired),
            Request::Add { key, .. } | Request::Barrier { key, .. } => long(key) + 8,
            Request::Check { keys } | Request::Wait { keys } | Request::MultiGet { keys } => {
                8 + keys.iter().map(long).sum::<usize>()
            }
            Request::MultiSet { pairs } => 8 + pairs.iter().map(|(key, value)| long(key) + long(value)).sum::<usize>(),
        }
    }
}

fn put_bytes(out: &mut BytesMut, part: &impl AsRef<[u8]>) {
    let part = part.as_ref();
    out.put_u64_le(part.len() as u64);
    out.put_slice(part);
}
