//! The c10d TCPStore protocol: requests and replies as values, and as bytes.
//!
//! Owns the byte layout of every query that torch 2.15 knows and the limits that a length from the network is held
//! against. Leaves the meaning of a request to [`crate::store`], and sockets to its drivers: nothing here does I/O.
//! Facts come from the project's description of the protocol, which restates `TCPStoreBackend.hpp`, `TCPStore.cpp` and
//! `TCPStoreLibUvBackend.cpp` of PyTorch as observed on the wire; captured bytes are in `tests/data/tcpstore`.
//!
//! There is no framing: a reader must know a query's shape to find its end. [`Decoder`] and [`ReplyDecoder`] walk the
//! shape as bytes arrive, remember how far they got, and cut the message out of the buffer once it is whole.
//!
//! Other protocols share the store's port. [`hello`] recognises them by their first bytes, and [`http`] parses requests of HTTP.

mod decode;
pub mod hello;
pub mod http;
mod reply;
mod request;

use bytes::{Buf, Bytes};
pub use decode::Decoder;
pub(crate) use reply::put_length;
pub use reply::{CheckReply, Reply, ReplyDecoder, ReplyShape, Sink, WaitReply};
pub use request::{Query, Request};

/// First four bytes after the query code of `VALIDATE`. Mirrors `validationMagicNumber` in `TCPStoreBackend.hpp`.
pub const VALIDATION_MAGIC: u32 = 0x3C85_F7CE;

/// The key under which the workers of a store count themselves. The only key a client sends without a leading slash.
pub const INIT_KEY: &[u8] = b"init/";

/// Upper limits on lengths and counts from the network. Exactly at the limit is accepted.
///
/// The first three defaults are those of PyTorch's libuv server. It has no limit on a whole message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Length of a key as sent, in bytes. Default 8 192.
    pub key_bytes: usize,
    /// Length of a value in a request, in bytes. Default 8 MiB. `APPEND` may make a stored value longer.
    pub value_bytes: usize,
    /// Keys or pairs in one `CHECK`, `WAIT`, `MULTI_GET` or `MULTI_SET`. Default 131 072.
    pub list_len: usize,
    /// One whole request, in bytes. Default 2 GiB: without it one `MULTI_SET` could grow to a tebibyte.
    pub message_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { key_bytes: 8 * 1024, value_bytes: 8 * 1024 * 1024, list_len: 128 * 1024, message_bytes: 2 << 30 }
    }
}

/// Why bytes do not follow the protocol. The rest of their connection cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtoError {
    /// The first byte of a query is no query code of torch 2.15.
    #[error("unknown query code {0}")]
    UnknownQuery(u8),
    /// The connection does not begin with `VALIDATE`.
    #[error("first query is {0:?}, not VALIDATE")]
    NotValidated(Query),
    /// A second `VALIDATE` arrived.
    #[error("second VALIDATE on one connection")]
    ValidatedTwice,
    /// `VALIDATE` with another magic number.
    #[error("VALIDATE without the magic number")]
    BadMagic,
    /// A length or count above its limit. `what` names the field of [`Limits`].
    #[error("{query:?} announces {announced}, above the limit {what} = {limit}")]
    TooLong {
        /// The query that announced it.
        query: Query,
        /// The field of [`Limits`] that is exceeded.
        what: &'static str,
        /// The number on the wire.
        announced: u64,
        /// The limit.
        limit: usize,
    },
    /// A reply announced a length that no machine can hold.
    #[error("reply announces an impossible length {0}")]
    ImpossibleLength(u64),
    /// The reply to `CHECK` is neither 0 nor 1.
    #[error("ready or not_ready response expected, got {0}")]
    BadCheckReply(u8),
    /// The reply to `WAIT` or `BARRIER` is not 0.
    #[error("stop_waiting response expected, got {0}")]
    BadStopWaiting(u8),
    /// The reply to `CANCEL_WAIT` is not 1.
    #[error("wait_canceled response expected, got {0}")]
    BadWaitCanceled(u8),
    /// `PING` was answered with another nonce.
    #[error("ping answered with {got}, expected {expected}")]
    BadNonce {
        /// The nonce that was sent.
        expected: u32,
        /// The nonce that came back.
        got: u32,
    },
    /// Bytes arrived that answer no query.
    #[error("the server sent bytes that answer no query")]
    Unsolicited,
}

/// Cut a text with its length off a message whose length was checked.
fn part(message: &mut Bytes) -> Bytes {
    let length = message.get_u64_le() as usize;
    message.split_to(length)
}
