//! Bytes → [`Request`], as they arrive.
//!
//! Owns the walk along a query's shape: where a message ends, and whether its lengths are within [`Limits`]. Leaves
//! reading to the caller. A length is checked as soon as its eight bytes have arrived, before the body, and no memory is
//! reserved for it. The position is kept between calls, so a big request is not walked again for each segment.

use bytes::{Buf, Bytes, BytesMut};

use super::request::{Field, Shape};
use super::{Limits, ProtoError, Query, Request, VALIDATION_MAGIC, part};

/// Takes requests off the front of a receive buffer.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    validated: bool,
    walk: Option<Walk>,
    failed: Option<ProtoError>,
    needed: usize,
}

impl Decoder {
    /// For a fresh connection: its first request must be `VALIDATE`, and no later one may be.
    pub fn new(limits: Limits) -> Self {
        Decoder { limits, validated: false, walk: None, failed: None, needed: 1 }
    }

    /// For a connection whose `VALIDATE` has been seen.
    pub fn validated(limits: Limits) -> Self {
        Decoder { validated: true, ..Decoder::new(limits) }
    }

    /// Takes one request off the front of `buf`; `Ok(None)` until a whole one has arrived.
    ///
    /// Between calls the caller appends to `buf` and takes nothing from it. After an error the rest of the stream has
    /// no meaning; further calls return the same error.
    pub fn decode(&mut self, buf: &mut BytesMut) -> Result<Option<Request>, ProtoError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        match self.walk(buf) {
            Ok(Some((query, end))) => {
                let message = buf.split_to(end).freeze();
                self.validated = true;
                self.walk = None;
                self.needed = 1;
                Ok(Some(cut(query, message)))
            }
            Ok(None) => Ok(None),
            Err(error) => {
                self.failed = Some(error);
                Err(error)
            }
        }
    }

    /// How many bytes, at least, the buffer must hold before the next call can return a request or get further.
    pub fn needed(&self) -> usize {
        self.needed
    }

    /// Whether part of a request has been seen.
    pub fn is_mid_request(&self) -> bool {
        self.walk.is_some()
    }

    /// After an error about a length: the key that the refused request names, as far as it has arrived. For the log.
    ///
    /// `buf` is the buffer of the failed call. `None` if no key precedes the length, as with a count.
    pub fn refused_key<'buf>(&self, buf: &'buf [u8]) -> Option<&'buf [u8]> {
        self.failed?;
        self.walk.as_ref()?.last_key(buf)
    }

    fn walk(&mut self, buf: &[u8]) -> Result<Option<(Query, usize)>, ProtoError> {
        let walk = match &mut self.walk {
            Some(walk) => walk,
            empty => {
                let Some(&code) = buf.first() else { return Ok(None) };
                let query = Query::from_code(code).ok_or(ProtoError::UnknownQuery(code))?;
                match (self.validated, query) {
                    (false, Query::Validate) => {}
                    (true, Query::Validate) => return Err(ProtoError::ValidatedTwice),
                    (false, other) => return Err(ProtoError::NotValidated(other)),
                    (true, _) => {}
                }
                empty.insert(Walk::new(query))
            }
        };
        let whole = walk.advance(buf, &self.limits)?;
        self.needed = walk.needed;
        Ok(whole.then_some((walk.query, walk.at)))
    }
}

/// A position inside a query of known shape.
#[derive(Debug)]
struct Walk {
    query: Query,
    fields: &'static [Field],
    /// Field of the current round that comes next.
    next: usize,
    /// Remaining rounds of `fields`, including the current one; `None` until the count has been read.
    rounds: Option<u64>,
    /// Bytes of the message that have been walked.
    at: usize,
    needed: usize,
}

impl Walk {
    fn new(query: Query) -> Self {
        let (fields, rounds) = match query.shape() {
            Shape::Once(fields) => (fields, Some(if fields.is_empty() { 0 } else { 1 })),
            Shape::List(fields) => (fields, None),
        };
        Walk { query, fields, next: 0, rounds, at: 1, needed: 1 }
    }

    /// Walks as far as the bytes allow. True once the end has been reached.
    fn advance(&mut self, buf: &[u8], limits: &Limits) -> Result<bool, ProtoError> {
        loop {
            let rounds = match self.rounds {
                Some(0) => return Ok(true),
                Some(rounds) => rounds,
                None => {
                    let Some(count) = self.u64_at(buf) else {
                        return Ok(false);
                    };
                    self.check(count, limits.list_len, "list_len")?;
                    self.at += 8;
                    self.rounds = Some(count);
                    continue;
                }
            };
            let width = match self.fields[self.next] {
                Field::U32 => 4,
                Field::I64 => 8,
                Field::Key => match self.length(buf, limits.key_bytes, "key_bytes")? {
                    Some(length) => 8 + length,
                    None => return Ok(false),
                },
                Field::Value => match self.length(buf, limits.value_bytes, "value_bytes")? {
                    Some(length) => 8 + length,
                    None => return Ok(false),
                },
            };
            let end = self.at.saturating_add(width);
            self.check(end as u64, limits.message_bytes, "message_bytes")?;
            if self.query == Query::Validate {
                check_magic(&buf[self.at..buf.len().min(end)])?;
            }
            if buf.len() < end {
                self.needed = end;
                return Ok(false);
            }
            self.at = end;
            self.next += 1;
            if self.next == self.fields.len() {
                self.next = 0;
                self.rounds = Some(rounds - 1);
            }
        }
    }

    /// The key at this position, or the last one before it. Walks the message again: only errors ask.
    fn last_key<'buf>(&self, buf: &'buf [u8]) -> Option<&'buf [u8]> {
        self.rounds?;
        let is_list = matches!(self.query.shape(), Shape::List(_));
        let (mut at, mut key) = (if is_list { 9 } else { 1 }, None);
        for field in self.fields.iter().cycle() {
            let length = match field {
                Field::U32 | Field::I64 => 0,
                Field::Key | Field::Value => {
                    buf.get(at..)?.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes))?
                }
            };
            if *field == Field::Key {
                let rest = &buf[at + 8..];
                key = Some(&rest[..rest.len().min(usize::try_from(length).unwrap_or(usize::MAX))]);
            }
            if at >= self.at {
                break;
            }
            at += match field {
                Field::U32 => 4,
                Field::I64 => 8,
                Field::Key | Field::Value => 8 + length as usize,
            };
        }
        key
    }

    fn length(&mut self, buf: &[u8], limit: usize, what: &'static str) -> Result<Option<usize>, ProtoError> {
        let Some(length) = self.u64_at(buf) else {
            return Ok(None);
        };
        self.check(length, limit, what)?;
        Ok(Some(length as usize))
    }

    fn u64_at(&mut self, buf: &[u8]) -> Option<u64> {
        let bytes = buf.get(self.at..).and_then(|rest| rest.first_chunk::<8>());
        if bytes.is_none() {
            self.needed = self.at + 8;
        }
        bytes.map(|bytes| u64::from_le_bytes(*bytes))
    }

    fn check(&self, announced: u64, limit: usize, what: &'static str) -> Result<(), ProtoError> {
        if announced > limit as u64 {
            return Err(ProtoError::TooLong { query: self.query, what, announced, limit });
        }
        Ok(())
    }
}

/// Refuses a wrong magic number at its first wrong byte, without waiting for the rest.
fn check_magic(seen: &[u8]) -> Result<(), ProtoError> {
    if VALIDATION_MAGIC.to_le_bytes().starts_with(seen) { Ok(()) } else { Err(ProtoError::BadMagic) }
}

/// Decodes a message that has been walked to its end. The walk has seen every byte, so the getters cannot run short.
fn cut(query: Query, mut message: Bytes) -> Request {
    message.advance(1);
    let m = &mut message;
    match query {
        Query::Validate => Request::Validate,
        Query::Set => Request::Set { key: part(m), value: part(m) },
        Query::CompareSet => Request::CompareSet { key: part(m), expected: part(m), desired: part(m) },
        Query::Get => Request::Get { key: part(m) },
        Query::Add => Request::Add { key: part(m), amount: m.get_i64_le() },
        Query::Check => Request::Check { keys: parts(m) },
        Query::Wait => Request::Wait { keys: parts(m) },
        Query::GetNumKeys => Request::GetNumKeys,
        Query::DeleteKey => Request::DeleteKey { key: part(m) },
        Query::Append => Request::Append { key: part(m), value: part(m) },
        Query::MultiGet => Request::MultiGet { keys: parts(m) },
        Query::MultiSet => {
            let count = m.get_u64_le();
            Request::MultiSet { pairs: (0..count).map(|_| (part(m), part(m))).collect() }
        }
        Query::CancelWait => Request::CancelWait,
        Query::Ping => Request::Ping { nonce: m.get_u32_le() },
        Query::QueuePush => Request::QueuePush { key: part(m), value: part(m) },
        Query::QueuePop => Request::QueuePop { key: part(m) },
        Query::QueueLen => Request::QueueLen { key: part(m) },
        Query::ListKeys => Request::ListKeys,
        Query::Barrier => Request::Barrier { key: part(m), world_size: m.get_i64_le() },
    }
}

fn parts(message: &mut Bytes) -> Vec<Bytes> {
    let count = message.get_u64_le();
    (0..count).map(|_| part(message)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<Request>, ProtoError> {
        Decoder::validated(Limits::default()).decode(&mut BytesMut::from(bytes))
    }

    /// `set("alpha", "one")` as PyTorch's client sends it (`TCPStore.cpp`), byte by byte.
    #[test]
    fn set_is_cut_into_key_and_value() {
        let bytes = b"\x01\x06\0\0\0\0\0\0\0/alpha\x03\0\0\0\0\0\0\0one";
        let request = decode(bytes).unwrap().unwrap();
        assert_eq!(request, Request::Set { key: Bytes::from("/alpha"), value: Bytes::from("one") });
        let mut again = BytesMut::new();
        request.encode(&mut again);
        assert_eq!(&again[..], bytes);
    }

    #[test]
    fn a_length_is_refused_before_its_body_arrives() {
        let key = decode(b"\x01\x01\x20\0\0\0\0\0\0").unwrap_err();
        assert!(matches!(key, ProtoError::TooLong { what: "key_bytes", announced: 8193, .. }), "{key}");
        let value = decode(b"\x01\x00\0\0\0\0\0\0\0\x01\0\x80\0\0\0\0\0").unwrap_err();
        assert!(matches!(value, ProtoError::TooLong { what: "value_bytes", announced: 8_388_609, .. }), "{value}");
        let count = decode(b"\x0b\xff\xff\xff\xff\xff\xff\xff\xff").unwrap_err();
        assert!(matches!(count, ProtoError::TooLong { what: "list_len", announced: u64::MAX, .. }), "{count}");
    }

    #[test]
    fn a_refusal_knows_the_key_and_nothing_else() {
        let limits = Limits { key_bytes: 8, value_bytes: 4, list_len: 3, message_bytes: 80 };
        let key = |bytes: &[u8]| {
            let (mut decoder, mut buf) = (Decoder::validated(limits.clone()), BytesMut::from(bytes));
            assert_eq!(decoder.refused_key(&buf), None, "nothing is refused yet");
            decoder.decode(&mut buf).unwrap_err();
            decoder.refused_key(&buf).map(|key| String::from_utf8(key.to_vec()).unwrap())
        };
        let long = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let five = 5u64.to_le_bytes();
        let max = u64::MAX.to_le_bytes();
        assert_eq!(key(&[b"\x01", &long("key")[..], &five].concat()).as_deref(), Some("key"));
        assert_eq!(key(&[b"\x01", &long("key")[..], &five, b"value"].concat()).as_deref(), Some("key"));
        assert_eq!(key(&[b"\x02", &long("key")[..], &long("ex"), &max].concat()).as_deref(), Some("key"));
        assert_eq!(key(&[b"\x03", &max[..]].concat()).as_deref(), Some(""), "the key itself is too long, and not here");
        assert_eq!(key(&[b"\x03", &max[..], b"begins so"].concat()).as_deref(), Some("begins so"));
        assert_eq!(key(&[b"\x0b", &max[..]].concat()), None, "a count");
        let two = [b"\x0b", &2u64.to_le_bytes()[..], &long("first"), &long("v")].concat();
        assert_eq!(key(&[&two, &long("second")[..], &five].concat()).as_deref(), Some("second"));
        assert_eq!(key(&[b"\x0a", &3u64.to_le_bytes()[..], &long("a"), &max].concat()).as_deref(), Some(""));
        assert_eq!(key(b"\xff"), None, "not about a length");
    }

    #[test]
    fn a_message_is_refused_where_it_passes_the_limit_of_the_whole() {
        let limits = Limits { message_bytes: 30, ..Limits::default() };
        let mut buf = BytesMut::from(&b"\x05\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0a\x05\0\0\0\0\0\0\0"[..]);
        let error = Decoder::validated(limits).decode(&mut buf).unwrap_err();
        assert!(matches!(error, ProtoError::TooLong { what: "message_bytes", announced: 31, .. }), "{error}");
    }

    #[test]
    fn validate_comes_first_and_once() {
        let mut decoder = Decoder::new(Limits::default());
        let mut buf = BytesMut::from(&b"\0\xce\xf7\x85\x3c\0"[..]);
        assert_eq!(decoder.decode(&mut buf), Ok(Some(Request::Validate)));
        assert_eq!(decoder.decode(&mut buf), Err(ProtoError::ValidatedTwice));
        assert_eq!(decoder.decode(&mut buf), Err(ProtoError::ValidatedTwice), "the error stays");

        let first = |bytes: &[u8]| Decoder::new(Limits::default()).decode(&mut BytesMut::from(bytes));
        assert_eq!(first(b"\x07"), Err(ProtoError::NotValidated(Query::GetNumKeys)));
        assert_eq!(first(b"\0\xce\xf8"), Err(ProtoError::BadMagic), "refused at the first wrong byte");
        assert_eq!(first(b"\0\xce"), Ok(None));
        assert_eq!(first(b"\x13"), Err(ProtoError::UnknownQuery(19)));
    }

    /// The walk resumes: after each byte `needed` is beyond the buffer, and it skips bodies.
    #[test]
    fn a_body_is_skipped_and_not_walked_again() {
        let mut decoder = Decoder::validated(Limits::default());
        let mut buf = BytesMut::from(&b"\x01\x01\0\0\0\0\0\0\0k\x00\x00\x10\0\0\0\0\0"[..]);
        assert_eq!(decoder.decode(&mut buf), Ok(None));
        assert_eq!(decoder.needed(), 18 + 0x10_0000);
        let capacity = buf.capacity();
        assert_eq!(decoder.decode(&mut buf), Ok(None));
        assert_eq!(buf.capacity(), capacity, "nothing is reserved for an announced length");
    }
}
