//! Property tests: the codec with any bytes, and the table against a simple model with any sequence of requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Bytes, BytesMut};
use elastic_rs::store::protocol::{
    CheckReply, Decoder, Limits, ProtoError, Query, Reply, ReplyDecoder, ReplyShape, Request, WaitReply,
};
use elastic_rs::store::{Applied, ConnId, ENTRY_BYTES, Table, TableLimits, Violation};
use proptest::collection::vec;
use proptest::prelude::*;

fn bytes(longest: usize) -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..longest).prop_map(Bytes::from)
}

/// Any request but VALIDATE, which only opens a connection.
fn request() -> impl Strategy<Value = Request> {
    let (key, value) = (|| bytes(20), || bytes(300));
    let keys = || vec(bytes(20), 0..6);
    prop_oneof![
        (key(), value()).prop_map(|(key, value)| Request::Set { key, value }),
        (key(), value(), value()).prop_map(|(key, expected, desired)| Request::CompareSet { key, expected, desired }),
        key().prop_map(|key| Request::Get { key }),
        (key(), any::<i64>()).prop_map(|(key, amount)| Request::Add { key, amount }),
        keys().prop_map(|keys| Request::Check { keys }),
        keys().prop_map(|keys| Request::Wait { keys }),
        Just(Request::GetNumKeys),
        key().prop_map(|key| Request::DeleteKey { key }),
        (key(), value()).prop_map(|(key, value)| Request::Append { key, value }),
        keys().prop_map(|keys| Request::MultiGet { keys }),
        vec((key(), value()), 0..5).prop_map(|pairs| Request::MultiSet { pairs }),
        Just(Request::CancelWait),
        any::<u32>().prop_map(|nonce| Request::Ping { nonce }),
        (key(), value()).prop_map(|(key, value)| Request::QueuePush { key, value }),
        key().prop_map(|key| Request::QueuePop { key }),
        key().prop_map(|key| Request::QueueLen { key }),
        Just(Request::ListKeys),
        (key(), any::<i64>()).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
    ]
}

fn encoded(requests: &[Request]) -> BytesMut {
    let mut stream = BytesMut::new();
    for request in requests {
        let before = stream.len();
        request.encode(&mut stream);
        assert_eq!(stream.len() - before, request.encoded_len());
    }
    stream
}

/// Decode a stream that arrives in these pieces.
fn decode_pieces(decoder: &mut Decoder, pieces: &[&[u8]]) -> Result<Vec<Request>, ProtoError> {
    let mut buf = BytesMut::new();
    let mut requests = Vec::new();
    for piece in pieces {
        buf.extend_from_slice(piece);
        while let Some(request) = decoder.decode(&mut buf)? {
            requests.push(request);
        }
        assert!(decoder.needed() > buf.len(), "the decoder stopped although it had enough bytes");
    }
    Ok(requests)
}

fn cut<'a>(mut stream: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for &length in lengths.iter().cycle() {
        if stream.is_empty() || lengths.iter().all(|&length| length == 0) {
            break;
        }
        let (piece, rest) = stream.split_at(length.min(stream.len()));
        pieces.push(piece);
        stream = rest;
    }
    pieces
}

proptest! {
    #[test]
    fn any_split_of_the_stream_gives_the_same_requests(
        requests in vec(request(), 0..8),
        lengths in vec(1usize..40, 1..10),
    ) {
        let mut stream = encoded(&[Request::Validate]);
        stream.unsplit(encoded(&requests));
        let mut expected = vec![Request::Validate];
        expected.extend(requests);
        let got = decode_pieces(&mut Decoder::new(Limits::default()), &cut(&stream, &lengths));
        prop_assert_eq!(got, Ok(expected));
    }

    #[test]
    fn a_truncated_request_is_no_request(request in request()) {
        let stream = encoded(std::slice::from_ref(&request));
        for end in 0..stream.len() {
            let mut decoder = Decoder::validated(Limits::default());
            let mut buf = BytesMut::from(&stream[..end]);
            prop_assert_eq!(decoder.decode(&mut buf), Ok(None), "{} of {} bytes", end, stream.len());
            prop_assert!(decoder.needed() > end && decoder.needed() <= stream.len());
            // The remaining bytes complete the request.
            buf.extend_from_slice(&stream[end..]);
            prop_assert_eq!(decoder.decode(&mut buf), Ok(Some(request.clone())));
        }
    }

    #[test]
    fn any_bytes_are_requests_or_an_error(noise in vec(any::<u8>(), 0..600), lengths in vec(1usize..40, 1..10)) {
        let pieces = cut(&noise, &lengths);
        let _ = decode_pieces(&mut Decoder::new(Limits::default()), &pieces);
        let _ = decode_pieces(&mut Decoder::validated(Limits::default()), &pieces);
        for shape in SHAPES {
            let _ = ReplyDecoder::new(shape).decode(&mut BytesMut::from(&noise[..]));
        }
    }

    /// Random bytes rarely get past the first length. A request with one changed byte does.
    #[test]
    fn almost_requests_are_requests_or_an_error(
        requests in vec(request(), 1..5), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut stream = encoded(&requests);
        let at = at.index(stream.len());
        stream[at] = byte;
        let _ = decode_pieces(&mut Decoder::validated(Limits::default()), &[&stream]);
    }

    #[test]
    fn any_split_of_a_reply_gives_the_same_reply(
        values in vec(bytes(50), 0..5), number in any::<i64>(), length in 1usize..20,
    ) {
        let value = values.first().cloned().unwrap_or_default();
        let replies = [
            (ReplyShape::Value, Reply::Value(value.clone())),
            (ReplyShape::Integer, Reply::Integer(number)),
            (ReplyShape::Check, Reply::Check(CheckReply::NotReady)),
            (ReplyShape::Wait, Reply::Wait(WaitReply::WaitCanceled)),
            (ReplyShape::Values(values.len()), Reply::Values(values.clone())),
            (ReplyShape::Nonce, Reply::Nonce(number as u32)),
            (ReplyShape::Popped, Reply::Popped { length: 3, item: Some(value) }),
            (ReplyShape::Popped, Reply::Popped { length: 0, item: None }),
            (ReplyShape::Keys, Reply::Keys(values)),
        ];
        for (shape, reply) in replies {
            let mut stream = BytesMut::new();
            reply.clone().encode(&mut stream);
            let mut decoder = ReplyDecoder::new(shape);
            let mut buf = BytesMut::new();
            let mut got = decoder.decode(&mut buf).unwrap();
            for piece in cut(&stream, &[length]) {
                prop_assert_eq!(&got, &None, "{:?} before its end", shape);
                buf.extend_from_slice(piece);
                got = decoder.decode(&mut buf).unwrap();
            }
            prop_assert_eq!(got, Some(reply));
            prop_assert!(buf.is_empty());
        }
    }
}

const SHAPES: [ReplyShape; 9] = [
    ReplyShape::Value,
    ReplyShape::Integer,
    ReplyShape::Check,
    ReplyShape::Wait,
    ReplyShape::Values(0),
    ReplyShape::Values(3),
    ReplyShape::Nonce,
    ReplyShape::Popped,
    ReplyShape::Keys,
];

/// A length or count above its limit is refused as soon as its eight bytes have arrived, and no memory is reserved for it.
#[test]
fn lengths_above_their_limits_are_refused_at_once() {
    let limits = Limits { key_bytes: 10, value_bytes: 20, list_len: 30, ..Limits::default() };
    let (key, value, list) = (("key_bytes", 10), ("value_bytes", 20), ("list_len", 30));
    for query in Query::ALL {
        // The lengths and counts of each query, in order. Fields before the one under test are empty.
        let fields: &[(&str, u64)] = match query {
            Query::Validate | Query::Ping | Query::GetNumKeys | Query::CancelWait | Query::ListKeys => continue,
            Query::Set | Query::Append | Query::QueuePush => &[key, value],
            Query::CompareSet => &[key, value, value],
            Query::Check | Query::Wait | Query::MultiGet => &[list, key],
            Query::MultiSet => &[list, key, value],
            _ => &[key],
        };
        for (at, &(what, limit)) in fields.iter().enumerate() {
            for announced in [limit + 1, 1 << 32, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
                let mut buf = BytesMut::from(&[query.code()][..]);
                for before in &fields[..at] {
                    buf.extend_from_slice(&u64::from(before.0 == "list_len").to_le_bytes());
                }
                buf.extend_from_slice(&announced.to_le_bytes());
                let capacity = buf.capacity();
                let got = Decoder::validated(limits.clone()).decode(&mut buf);
                let limit = limit as usize;
                assert_eq!(got, Err(ProtoError::TooLong { query, what, announced, limit }), "{query:?} {what}");
                assert_eq!(buf.capacity(), capacity);
            }
        }
    }
}

/// A simple model of the store. Waiters are in order of arrival.
#[derive(Default)]
struct Model {
    values: BTreeMap<Bytes, Vec<u8>>,
    queues: BTreeMap<Bytes, VecDeque<Bytes>>,
    waiters: Vec<(ConnId, BTreeSet<Bytes>)>,
}

impl Model {
    fn ready(&self, key: &Bytes) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    fn get(&self, key: &Bytes) -> Bytes {
        self.values.get(key).cloned().unwrap_or_default().into()
    }

    fn event(&mut self, key: &Bytes) -> Vec<ConnId> {
        self.release(key, usize::MAX)
    }

    /// Remove `key` from the waiters' missing keys, in order, until `most` waiters are released.
    fn release(&mut self, key: &Bytes, most: usize) -> Vec<ConnId> {
        let mut released = Vec::new();
        for (conn, missing) in &mut self.waiters {
            if released.len() < most && missing.remove(key) && missing.is_empty() {
                released.push(*conn);
            }
        }
        self.waiters.retain(|(_, missing)| !missing.is_empty());
        released
    }

    fn add(&mut self, key: &Bytes, amount: i64, query: Query) -> Result<i64, Violation> {
        let old = match self.values.get(key) {
            None => 0,
            Some(text) => {
                let text = std::str::from_utf8(text).map_err(|_| Violation::NotANumber(query))?;
                text.parse::<i64>().map_err(|_| Violation::NotANumber(query))?
            }
        };
        let sum = old.wrapping_add(amount);
        self.values.insert(key.clone(), sum.to_string().into_bytes());
        Ok(sum)
    }

    fn apply(&mut self, conn: ConnId, request: &Request) -> Result<Applied, Violation> {
        let reply = |reply| Applied { released: vec![], reply: Some(reply) };
        let only = |released| Applied { released, reply: None };
        let stop = Reply::Wait(WaitReply::StopWaiting);
        let waits = self.waiters.iter().any(|(waiter, _)| *waiter == conn);
        Ok(match request {
            Request::Validate => unreachable!(),
            Request::Ping { nonce } => reply(Reply::Nonce(*nonce)),
            Request::Set { key, value } => {
                self.values.insert(key.clone(), value.to_vec());
                only(self.event(key))
            }
            Request::MultiSet { pairs } => {
                let mut released = vec![];
                for (key, value) in pairs {
                    self.values.insert(key.clone(), value.to_vec());
                    released.extend(self.event(key));
                }
                only(released)
            }
            Request::Append { key, value } => {
                self.values.entry(key.clone()).or_default().extend_from_slice(value);
                only(self.event(key))
            }
            Request::CompareSet { key, expected, desired } => {
                let (answer, released) = match self.values.get_mut(key) {
                    None if expected.is_empty() => {
                        self.values.insert(key.clone(), desired.to_vec());
                        (desired.clone(), self.event(key))
                    }
                    None => (expected.clone(), vec![]),
                    Some(value) if value == expected => {
                        *value = desired.to_vec();
                        (desired.clone(), vec![])
                    }
                    Some(value) => (value.clone().into(), vec![]),
                };
                Applied { released, reply: Some(Reply::Value(answer)) }
            }
            Request::Get { key } => reply(Reply::Value(self.get(key))),
            Request::MultiGet { keys } => reply(Reply::Values(keys.iter().map(|key| self.get(key)).collect())),
            Request::Add { key, amount } => {
                let sum = self.add(key, *amount, Query::Add)?;
                Applied { released: self.event(key), reply: Some(Reply::Integer(sum)) }
            }
            Request::Check { keys } if keys.iter().all(|key| self.ready(key)) => reply(Reply::Check(CheckReply::Ready)),
            Request::Check { .. } => reply(Reply::Check(CheckReply::NotReady)),
            Request::Wait { .. } if waits => return Err(Violation::AlreadyWaiting(Query::Wait)),
            Request::Wait { keys } => {
                let missing: BTreeSet<Bytes> = keys.iter().filter(|key| !self.ready(key)).cloned().collect();
                if missing.is_empty() {
                    return Ok(reply(stop));
                }
                self.waiters.push((conn, missing));
                only(vec![])
            }
            Request::CancelWait => {
                self.waiters.retain(|(waiter, _)| *waiter != conn);
                reply(Reply::Wait(WaitReply::WaitCanceled))
            }
            Request::Barrier { .. } if waits => return Err(Violation::AlreadyWaiting(Query::Barrier)),
            Request::Barrier { key, world_size } => {
                if self.add(key, 1, Query::Barrier)? >= *world_size {
                    Applied { released: self.event(key), reply: Some(stop) }
                } else {
                    self.waiters.push((conn, BTreeSet::from([key.clone()])));
                    only(vec![])
                }
            }
            Request::GetNumKeys => reply(Reply::Integer(self.values.len() as i64)),
            Request::DeleteKey { key } => reply(Reply::Integer(self.values.remove(key).is_some().into())),
            Request::ListKeys => reply(Reply::Keys(self.values.keys().cloned().collect())),
            Request::QueuePush { key, value } => {
                self.queues.entry(key.clone()).or_default().push_back(value.clone());
                only(self.release(key, 1))
            }
            Request::QueuePop { key } => {
                let queue = self.queues.entry(key.clone()).or_default();
                let length = queue.len() as i64;
                reply(Reply::Popped { length, item: queue.pop_front() })
            }
            Request::QueueLen { key } => {
                reply(Reply::Integer(self.queues.get(key).map_or(0, |queue| queue.len() as i64)))
            }
        })
    }

    fn stored_bytes(&self) -> usize {
        let values = self.values.iter().flat_map(|(key, value)| [ENTRY_BYTES + key.len(), value.len()]);
        let queues = self.queues.iter().filter(|(_, queue)| !queue.is_empty()).flat_map(|(key, queue)| {
            [ENTRY_BYTES + key.len(), queue.iter().map(|item| ENTRY_BYTES + item.len()).sum()]
        });
        values.chain(queues).sum()
    }
}

/// Requests with few keys and mostly numeric values, so that requests of different connections interact.
fn small_request() -> impl Strategy<Value = Request> {
    let key = || prop::sample::select(vec!["/a", "/b", "/c"]).prop_map(Bytes::from);
    let value = || prop::sample::select(vec!["", "1", "2", "x", "-9223372036854775808"]).prop_map(Bytes::from);
    let keys = || vec(key(), 0..4);
    prop_oneof![
        2 => (key(), value()).prop_map(|(key, value)| Request::Set { key, value }),
        2 => (key(), value(), value())
            .prop_map(|(key, expected, desired)| Request::CompareSet { key, expected, desired }),
        1 => key().prop_map(|key| Request::Get { key }),
        2 => (key(), -2i64..3).prop_map(|(key, amount)| Request::Add { key, amount }),
        1 => keys().prop_map(|keys| Request::Check { keys }),
        6 => keys().prop_map(|keys| Request::Wait { keys }),
        1 => Just(Request::GetNumKeys),
        6 => key().prop_map(|key| Request::DeleteKey { key }),
        1 => (key(), value()).prop_map(|(key, value)| Request::Append { key, value }),
        1 => keys().prop_map(|keys| Request::MultiGet { keys }),
        1 => vec((key(), value()), 0..4).prop_map(|pairs| Request::MultiSet { pairs }),
        1 => Just(Request::CancelWait),
        2 => (key(), value()).prop_map(|(key, value)| Request::QueuePush { key, value }),
        3 => key().prop_map(|key| Request::QueuePop { key }),
        1 => key().prop_map(|key| Request::QueueLen { key }),
        1 => Just(Request::ListKeys),
        2 => (key(), 0i64..4).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
    ]
}

/// More cases than proptest's default; `PROPTEST_CASES` can ask for still more.
fn at_least(cases: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases.max(cases), ..config }
}

proptest! {
    #![proptest_config(at_least(1000))]

    #[test]
    fn the_table_does_what_the_model_does(steps in vec((0u64..5, prop::option::weighted(0.95, small_request())), 1..80)) {
        let (mut table, mut model) = (Table::new(TableLimits::default()), Model::default());
        // Connections that wait. Each must be released exactly once.
        let mut unanswered = BTreeSet::new();
        for (conn, request) in steps {
            let conn = ConnId(conn);
            let Some(request) = request else {
                table.disconnect(conn);
                model.waiters.retain(|(waiter, _)| *waiter != conn);
                unanswered.remove(&conn);
                continue;
            };
            // The model uses std's parser, which rejects a number with text after it.
            if let Request::Add { key, .. } | Request::Barrier { key, .. } = &request
                && model.values.get(key).is_some_and(|text| is_number_and_more(text))
            {
                continue;
            }
            let expected = model.apply(conn, &request);
            let got = table.apply(conn, request.clone());
            prop_assert_eq!(&got, &expected, "{:?} by {:?}", request, conn);
            if let (Request::MultiGet { keys }, Ok(Applied { reply: Some(reply), .. })) = (&request, &got) {
                let (mut written, mut encoded) = (BytesMut::new(), BytesMut::new());
                table.multi_get(keys, &mut written);
                reply.clone().encode(&mut encoded);
                prop_assert_eq!(written, encoded, "{:?} by {:?}", request, conn);
            }
            if let Ok(applied) = got {
                for released in applied.released {
                    prop_assert!(unanswered.remove(&released), "{:?} released without waiting", released);
                }
                match (&request, &applied.reply) {
                    (Request::Wait { .. } | Request::Barrier { .. }, None) => {
                        prop_assert!(unanswered.insert(conn));
                    }
                    (Request::CancelWait, _) => { unanswered.remove(&conn); }
                    _ => {}
                }
            }
            prop_assert_eq!(table.num_waiting(), unanswered.len());
            prop_assert_eq!(table.num_waiting(), model.waiters.len());
            prop_assert_eq!(table.num_keys(), model.values.len());
            let waits = table.stored_bytes() - model.stored_bytes();
            prop_assert_eq!(waits == 0, model.waiters.is_empty(), "only open waits add to the stored bytes");
        }
    }
}

/// Texts such as `1x` or `1-2`, which APPEND makes and `strtoll` reads up to the first other byte.
fn is_number_and_more(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    text.parse::<i64>().is_err() && text.chars().any(|c| c.is_ascii_digit())
}
