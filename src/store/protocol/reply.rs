//! Replies as values, their encoding and their decoding.
//!
//! Owns the layout of each reply and its incremental decoder. [`Request::reply_shape`](super::Request::reply_shape) says which
//! reply a request has: the bytes of a reply do not say it.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{ProtoError, part};

/// The reply to `CHECK`. Note that 0 means yes. Mirrors `CheckResponseType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckReply {
    /// All keys exist.
    Ready = 0,
    /// At least one key is missing.
    NotReady = 1,
}

/// The reply to `WAIT` and `BARRIER`, and to `CANCEL_WAIT`. Mirrors `WaitResponseType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReply {
    /// The wait is over: its keys exist, or its barrier is complete.
    StopWaiting = 0,
    /// `CANCEL_WAIT` has been carried out.
    WaitCanceled = 1,
}

/// One reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// To `GET` and `COMPARE_SET`.
    Value(Bytes),
    /// To `ADD`, `GETNUMKEYS`, `DELETE_KEY` and `QUEUE_LEN`.
    Integer(i64),
    /// To `CHECK`.
    Check(CheckReply),
    /// To `WAIT`, `BARRIER` and `CANCEL_WAIT`.
    Wait(WaitReply),
    /// To `MULTI_GET`: values without a count.
    Values(Vec<Bytes>),
    /// To `PING`.
    Nonce(u32),
    /// To `QUEUE_POP`: the length before the pop, and the item if that was above 0.
    Popped {
        /// Length of the queue before the pop.
        length: i64,
        /// The oldest item.
        item: Option<Bytes>,
    },
    /// To `LIST_KEYS`.
    Keys(Vec<Bytes>),
}

/// The destination of a reply's bytes. A sink that can keep a [`Bytes`] saves a copy of big values.
pub trait Sink {
    /// Copies a few bytes.
    fn put(&mut self, bytes: &[u8]);

    /// Takes a value, which the sink may keep instead of copying it.
    fn put_shared(&mut self, bytes: Bytes) {
        self.put(&bytes);
    }
}

impl Sink for BytesMut {
    fn put(&mut self, bytes: &[u8]) {
        self.put_slice(bytes);
    }
}

impl Reply {
    /// Writes the reply's bytes to `out`.
    pub fn encode(self, out: &mut impl Sink) {
        match self {
            Reply::Value(value) => put_value(out, value),
            Reply::Integer(number) => out.put(&number.to_le_bytes()),
            Reply::Check(reply) => out.put(&[reply as u8]),
            Reply::Wait(reply) => out.put(&[reply as u8]),
            Reply::Values(values) => values.into_iter().for_each(|value| put_value(out, value)),
            Reply::Nonce(nonce) => out.put(&nonce.to_le_bytes()),
            Reply::Popped { length, item } => {
                out.put(&length.to_le_bytes());
                if let Some(item) = item {
                    put_value(out, item);
                }
            }
            Reply::Keys(keys) => {
                out.put(&(keys.len() as u64).to_le_bytes());
                keys.into_iter().for_each(|key| put_value(out, key));
            }
        }
    }
}

fn put_value(out: &mut impl Sink, value: Bytes) {
    put_length(out, value.len());
    out.put_shared(value);
}

/// Writes the length that precedes a value's bytes.
pub(crate) fn put_length(out: &mut impl Sink, length: usize) {
    out.put(&(length as u64).to_le_bytes());
}

/// Which layout a reply has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyShape {
    /// [`Reply::Value`]
    Value,
    /// [`Reply::Integer`]
    Integer,
    /// [`Reply::Check`]
    Check,
    /// [`Reply::Wait`]
    Wait,
    /// [`Reply::Values`], this many
    Values(usize),
    /// [`Reply::Nonce`]
    Nonce,
    /// [`Reply::Popped`]
    Popped,
    /// [`Reply::Keys`]
    Keys,
}

/// Takes one reply of known shape off the front of a receive buffer.
///
/// Replies have no limit (a value may have grown by `APPEND`), so nothing is reserved for a length either: memory is
/// used only as bytes arrive.
#[derive(Debug)]
pub struct ReplyDecoder {
    shape: ReplyShape,
    /// Remaining values; `None` until the count before them has been read.
    left: Option<u64>,
    at: usize,
    needed: usize,
}

impl ReplyDecoder {
    /// For one reply of this shape.
    pub fn new(shape: ReplyShape) -> Self {
        let left = match shape {
            ReplyShape::Value => Some(1),
            ReplyShape::Values(count) => Some(count as u64),
            _ => None,
        };
        ReplyDecoder { shape, left, at: 0, needed: 1 }
    }

    /// How many bytes, at least, the buffer must hold before the next call can get further.
    pub fn needed(&self) -> usize {
        self.needed
    }

    /// Takes the reply; `Ok(None)` until it has arrived whole.
    pub fn decode(&mut self, buf: &mut BytesMut) -> Result<Option<Reply>, ProtoError> {
        let fixed = match self.shape {
            ReplyShape::Check | ReplyShape::Wait => 1,
            ReplyShape::Nonce => 4,
            ReplyShape::Integer => 8,
            _ => return self.values(buf),
        };
        if buf.len() < fixed {
            self.needed = fixed;
            return Ok(None);
        }
        Ok(Some(match self.shape {
            ReplyShape::Check => Reply::Check(match buf.get_u8() {
                0 => CheckReply::Ready,
                1 => CheckReply::NotReady,
                other => return Err(ProtoError::BadCheckReply(other)),
            }),
            ReplyShape::Wait => Reply::Wait(match buf.get_u8() {
                0 => WaitReply::StopWaiting,
                1 => WaitReply::WaitCanceled,
                other => return Err(ProtoError::BadStopWaiting(other)),
            }),
            ReplyShape::Nonce => Reply::Nonce(buf.get_u32_le()),
            _ => Reply::Integer(buf.get_i64_le()),
        }))
    }

    fn values(&mut self, buf: &mut BytesMut) -> Result<Option<Reply>, ProtoError> {
        loop {
            if self.left == Some(0) {
                break;
            }
            let Some(number) = buf.get(self.at..).and_then(|rest| rest.first_chunk::<8>()) else {
                self.needed = self.at + 8;
                return Ok(None);
            };
            let number = u64::from_le_bytes(*number);
            match self.left {
                None => {
                    if number > i64::MAX as u64 {
                        return Err(ProtoError::ImpossibleLength(number));
                    }
                    self.at += 8;
                    self.left = Some(if self.shape == ReplyShape::Popped { number.min(1) } else { number });
                }
                Some(left) => {
                    let end = usize::try_from(number).ok().and_then(|length| length.checked_add(self.at + 8));
                    let Some(end) = end.filter(|&end| end <= isize::MAX as usize) else {
                        return Err(ProtoError::ImpossibleLength(number));
                    };
                    if buf.len() < end {
                        self.needed = end;
                        return Ok(None);
                    }
                    self.at = end;
                    self.left = Some(left - 1);
                }
            }
        }
        let mut message = buf.split_to(self.at).freeze();
        Ok(Some(match self.shape {
            ReplyShape::Popped => {
                let length = message.get_i64_le();
                Reply::Popped { length, item: (length > 0).then(|| part(&mut message)) }
            }
            ReplyShape::Keys => {
                let count = message.get_u64_le();
                Reply::Keys((0..count).map(|_| part(&mut message)).collect())
            }
            ReplyShape::Values(count) => Reply::Values((0..count).map(|_| part(&mut message)).collect()),
            _ => Reply::Value(part(&mut message)),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_popped_item_follows_only_a_positive_length() {
        let mut buf = BytesMut::from(&b"\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0x"[..]);
        let empty = ReplyDecoder::new(ReplyShape::Popped).decode(&mut buf).unwrap();
        assert_eq!(empty, Some(Reply::Popped { length: 0, item: None }));
        let one = ReplyDecoder::new(ReplyShape::Popped).decode(&mut buf).unwrap();
        assert_eq!(one, Some(Reply::Popped { length: 2, item: Some(Bytes::from("x")) }));
        assert!(buf.is_empty());
    }

    #[test]
    fn impossible_lengths_are_errors_and_reserve_nothing() {
        for shape in [ReplyShape::Value, ReplyShape::Values(3), ReplyShape::Keys, ReplyShape::Popped] {
            let mut buf = BytesMut::from(&[0xff; 8][..]);
            let error = ReplyDecoder::new(shape).decode(&mut buf).unwrap_err();
            assert_eq!(error, ProtoError::ImpossibleLength(u64::MAX), "{shape:?}");
        }
        // A count that is merely huge is accepted, but costs nothing until keys arrive.
        let mut buf = BytesMut::from(&(1u64 << 62).to_le_bytes()[..]);
        assert_eq!(ReplyDecoder::new(ReplyShape::Keys).decode(&mut buf), Ok(None));
    }

    #[test]
    fn bytes_outside_the_enums_are_errors() {
        let decode = |shape, byte: u8| ReplyDecoder::new(shape).decode(&mut BytesMut::from(&[byte][..]));
        assert_eq!(decode(ReplyShape::Check, 2), Err(ProtoError::BadCheckReply(2)));
        assert_eq!(decode(ReplyShape::Wait, 9), Err(ProtoError::BadStopWaiting(9)));
    }
}
