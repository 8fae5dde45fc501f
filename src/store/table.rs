//! The store itself: keys, queues and waiters.
//!
//! Owns what a request does to the table, and which connections are answered because of it. Leaves bytes to
//! [`crate::store::protocol`] and sockets to [`super::server`]. The table has no clock: only clients give up waiting.
//! Facts: PyTorch's `TCPStoreLibUvBackend.cpp`. Where this
//! table differs from the libuv server on purpose:
//!
//! - `COMPARE_SET` releases waiters when it creates the key, and only then (libuv: always; legacy: never);
//! - a second `WAIT` or `BARRIER` on a connection that still waits is a [`Violation`], because replies to the two could not
//!   be told apart. No known client does it. (libuv overwrites the count of the first and keeps its registrations.);
//! - a release leaves nothing behind, so a later push to a queue cannot release a wait for another key;
//! - in a `WAIT` on several keys a non-empty queue counts as present, as it does in a `WAIT` on that key alone;
//! - `MULTI_SET` is atomic, and `LIST_KEYS` is sorted.

mod listing;
mod number;
mod values;
mod waiters;

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;

use crate::store::protocol::{CheckReply, Query, Reply, Request, Sink, WaitReply, put_length};
pub use listing::Listing;
use number::{decimal, parse_decimal};
use values::{Value, Values};
use waiters::Waiters;

/// Identifies a connection. Ids are in the order in which connections were accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// How much a table may hold. A request that would exceed it is refused and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableLimits {
    /// Stored keys and queues. Default: no limit, as in PyTorch.
    pub keys: usize,
    /// Upper bound on [`Table::stored_bytes`]. Default: no limit, as in PyTorch.
    pub stored_bytes: usize,
}

impl Default for TableLimits {
    fn default() -> Self {
        TableLimits { keys: usize::MAX, stored_bytes: usize::MAX }
    }
}

/// The result of an accepted request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Connections whose wait is over. Each is to be sent [`WaitReply::StopWaiting`], in this order, and before `reply`.
    /// The caller's own connection can be among them.
    pub released: Vec<ConnId>,
    /// The reply to the request itself. `None` if it has no reply, or has to wait for it.
    pub reply: Option<Reply>,
}

/// A request that is refused. Nothing was changed. The protocol has no error reply, so the connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// `ADD` or `BARRIER` on a value that is not a number in 64 bits.
    #[error("{0:?} on a value that is not a number")]
    NotANumber(Query),
    /// `WAIT` or `BARRIER` on a connection that is already waiting.
    #[error("{0:?} while the connection is already waiting")]
    AlreadyWaiting(Query),
    /// A second `VALIDATE`.
    #[error("second VALIDATE on one connection")]
    ValidatedTwice,
    /// A limit of [`TableLimits`] would be exceeded.
    #[error("{query:?} would bring the table to {needed}, above its limit {what} = {limit}")]
    Full {
        /// The refused query.
        query: Query,
        /// The key that the request names, the first if there are several.
        key: Bytes,
        /// What the table would hold after the request.
        needed: usize,
        /// The field of [`TableLimits`].
        what: &'static str,
        /// The value of that field.
        limit: usize,
    },
}

/// Keys, queues and waiters of one store.
#[derive(Debug, Default)]
pub struct Table {
    values: Values,
    /// Never holds an empty queue.
    queues: HashMap<Bytes, VecDeque<Bytes>>,
    waiters: Waiters,
    stored_bytes: usize,
    limits: TableLimits,
}

impl Table {
    /// An empty table.
    pub fn new(limits: TableLimits) -> Self {
        Table { limits, ..Table::default() }
    }

    /// Carries out one request of `conn`.
    ///
    /// The request holds slices of the receive buffer. A slice is kept only if it is most of its buffer.
    pub fn apply(&mut self, conn: ConnId, request: Request) -> Result<Applied, Violation> {
        let query = request.query();
        let mut released = Vec::new();
        let reply = match request {
            Request::Validate => return Err(Violation::ValidatedTwice),
            Request::Ping { nonce } => Some(Reply::Nonce(nonce)),
            Request::Set { key, value } => {
                let growth = self.growth(&key, value.len());
                self.check_room(query, &key, growth)?;
                let message = key.len() + value.len();
                self.store(&key, value, message);
                self.waiters.event(&key, &mut released);
                None
            }
            Request::MultiSet { pairs } => {
                self.check_room_for_all(query, &pairs)?;
                let message = pairs.iter().map(|(key, value)| key.len() + value.len()).sum();
                for (key, value) in pairs {
                    self.store(&key, value, message);
                    self.waiters.event(&key, &mut released);
                }
                None
            }
            Request::Append { key, value } => {
                let is_new = !self.values.contains(&key);
                let growth = if is_new { self.growth(&key, value.len()) } else { (0, value.len()) };
                self.check_room(query, &key, growth)?;
                self.append(&key, value);
                self.waiters.event(&key, &mut released);
                None
            }
            Request::CompareSet { key, expected, desired } => Some(Reply::Value(match self.values.get(&key) {
                None if expected.is_empty() => {
                    self.check_room(query, &key, self.growth(&key, desired.len()))?;
                    let message = key.len() + desired.len();
                    self.store(&key, desired.clone(), message);
                    self.waiters.event(&key, &mut released);
                    desired
                }
                // Not an error upstream either: the reply contains a value that is not stored.
                None => expected,
                Some(current) if current[..] == expected[..] => {
                    self.check_room(query, &key, self.growth(&key, desired.len()))?;
                    let message = key.len() + expected.len() + desired.len();
                    self.store(&key, desired.clone(), message);
                    desired
                }
                Some(current) => current.to_bytes(),
            })),
            Request::Get { key } => Some(Reply::Value(self.value(&key))),
            Request::MultiGet { keys } => Some(Reply::Values(keys.iter().map(|key| self.value(key)).collect())),
            Request::Add { key, amount } => {
                let sum = self.number(&key, query)?.wrapping_add(amount);
                self.store_number(&key, sum, query, 0)?;
                self.waiters.event(&key, &mut released);
                Some(Reply::Integer(sum))
            }
            Request::Check { keys } => {
                let ready = keys.iter().all(|key| self.is_ready(key));
                Some(Reply::Check(if ready { CheckReply::Ready } else { CheckReply::NotReady }))
            }
            Request::Wait { keys } => {
                self.check_not_waiting(conn, query)?;
                let missing: Vec<Bytes> = keys.into_iter().filter(|key| !self.is_ready(key)).collect();
                if missing.is_empty() {
                    Some(Reply::Wait(WaitReply::StopWaiting))
                } else {
                    self.check_room(query, &missing[0], (0, waiters::bytes_of(&missing)))?;
                    if missing.len() > waiters::MAX_KEYS {
                        let (key, needed, limit) = (missing[0].clone(), missing.len(), waiters::MAX_KEYS);
                        return Err(Violation::Full { query, key, needed, what: "keys", limit });
                    }
                    self.waiters.register(conn, &missing);
                    None
                }
            }
            Request::CancelWait => {
                self.disconnect(conn);
                Some(Reply::Wait(WaitReply::WaitCanceled))
            }
            Request::Barrier { key, world_size } => {
                self.check_not_waiting(conn, query)?;
                let count = self.number(&key, query)?.wrapping_add(1);
                let is_last = count >= world_size;
                let keys = [key];
                let wait_bytes = if is_last { 0 } else { waiters::bytes_of(&keys) };
                self.store_number(&keys[0], count, query, wait_bytes)?;
                if is_last {
                    self.waiters.event(&keys[0], &mut released);
                    Some(Reply::Wait(WaitReply::StopWaiting))
                } else {
                    self.waiters.register(conn, &keys);
                    None
                }
            }
            Request::GetNumKeys => Some(Reply::Integer(self.values.len() as i64)),
            Request::DeleteKey { key } => {
                let removed = self.values.remove(&key);
                if let Some(value_len) = removed {
                    self.stored_bytes -= ENTRY_BYTES + key.len() + value_len;
                }
                Some(Reply::Integer(i64::from(removed.is_some())))
            }
            Request::ListKeys => {
                let (mut listing, mut keys) = (self.list_keys(), Vec::with_capacity(self.num_keys()));
                while listing.left() > 0 {
                    listing.advance(|key| keys.push(Bytes::copy_from_slice(key)));
                }
                Some(Reply::Keys(keys))
            }
            Request::QueuePush { key, value } => {
                let is_new = !self.queues.contains_key(&key);
                let item = ENTRY_BYTES + value.len();
                let growth = if is_new { (1, ENTRY_BYTES + key.len() + item) } else { (0, item) };
                self.check_room(query, &key, growth)?;
                self.push(&key, value);
                self.waiters.pushed(&key, &mut released);
                None
            }
            Request::QueuePop { key } => Some(self.pop(&key)),
            Request::QueueLen { key } => {
                Some(Reply::Integer(self.queues.get(&key).map_or(0, |queue| queue.len() as i64)))
            }
        };
        Ok(Applied { released, reply })
    }

    /// Writes the reply to `MULTI_GET` that [`apply`](Self::apply) would return, without a handle for each value.
    ///
    /// The handles of a hundred small values cost more than their bytes.
    pub fn multi_get(&self, keys: &[Bytes], out: &mut impl Sink) {
        for key in keys {
            let value = self.values.get(key);
            put_length(out, value.map_or(0, |value| value.len()));
            match value {
                Some(Value::Small(value)) => out.put(value),
                Some(Value::Large(value)) => out.put_shared(value.clone()),
                None => {}
            }
        }
    }

    /// The keys of the reply to `LIST_KEYS` that [`apply`](Self::apply) would return, to be sorted piece by piece.
    pub fn list_keys(&self) -> Listing {
        self.values.list_keys()
    }

    /// The cost of this request, in units of about a small `GET`. It counts the keys that the request walks through, and the
    /// bytes that it copies besides those that were sent.
    pub fn cost(&self, request: &Request) -> usize {
        let walked = match request {
            Request::MultiGet { keys } | Request::Check { keys } | Request::Wait { keys } => keys.len(),
            Request::MultiSet { pairs } => pairs.len(),
            Request::ListKeys => self.num_keys(),
            Request::Append { key, .. } => return 1 + self.values.copied_by_append(key) / BYTES_PER_UNIT,
            _ => return 1,
        };
        1 + walked / KEYS_PER_UNIT
    }

    /// Forgets the wait of a connection, if it has one. Called when a client gives up, or has gone.
    pub fn disconnect(&mut self, conn: ConnId) {
        self.waiters.forget(conn);
    }

    /// Stored keys, as `GETNUMKEYS` counts them.
    pub fn num_keys(&self) -> usize {
        self.values.len()
    }

    /// Connections with an open wait.
    pub fn num_waiting(&self) -> usize {
        self.waiters.count()
    }

    /// Bytes of keys, values, queue items and keys waited for, plus [`ENTRY_BYTES`] for each key, queue, item and key
    /// waited for. Many empty entries take memory too.
    pub fn stored_bytes(&self) -> usize {
        self.stored_bytes + self.waiters.bytes()
    }

    /// Whether a `WAIT` on this key would be answered at once.
    fn is_ready(&self, key: &Bytes) -> bool {
        self.values.contains(key) || self.queues.contains_key(key)
    }

    fn value(&self, key: &Bytes) -> Bytes {
        self.values.get(key).map(Value::to_bytes).unwrap_or_default()
    }

    fn number(&self, key: &Bytes, query: Query) -> Result<i64, Violation> {
        match self.values.get(key) {
            None => Ok(0),
            Some(value) => parse_decimal(&value).ok_or(Violation::NotANumber(query)),
        }
    }

    /// `more_bytes`: bytes that the same request stores besides the number.
    fn store_number(&mut self, key: &Bytes, number: i64, query: Query, more_bytes: usize) -> Result<(), Violation> {
        let text = decimal(number);
        let (keys, bytes) = self.growth(key, text.len());
        self.check_room(query, key, (keys, bytes + more_bytes))?;
        let message = text.len();
        self.store(key, text, message);
        Ok(())
    }

    /// `message`: the length of the message that `value` is a slice of.
    fn store(&mut self, key: &Bytes, value: Bytes, message: usize) {
        self.stored_bytes += value.len();
        // A small value is always copied.
        let value = if value.len() < values::LARGE_BYTES { value } else { kept(value, message) };
        match self.values.set(key, value) {
            Some(before) => self.stored_bytes -= before,
            None => self.stored_bytes += ENTRY_BYTES + key.len(),
        }
    }

    fn append(&mut self, key: &Bytes, more: Bytes) {
        if !self.values.contains(key) {
            let message = key.len() + more.len();
            return self.store(key, more, message);
        }
        self.stored_bytes += more.len();
        self.values.append(key, &more);
    }

    fn push(&mut self, key: &Bytes, item: Bytes) {
        let message = key.len() + item.len();
        let item = kept(item, message);
        self.stored_bytes += ENTRY_BYTES + item.len();
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(item),
            None => {
                self.stored_bytes += ENTRY_BYTES + key.len();
                self.queues.insert(Bytes::copy_from_slice(key), VecDeque::from([item]));
            }
        }
    }

    fn pop(&mut self, key: &Bytes) -> Reply {
        let Some(queue) = self.queues.get_mut(key) else {
            return Reply::Popped { length: 0, item: None };
        };
        let length = queue.len() as i64;
        let item = queue.pop_front();
        self.stored_bytes -= item.as_ref().map_or(0, |item| ENTRY_BYTES + item.len());
        if queue.is_empty() {
            self.stored_bytes -= ENTRY_BYTES + key.len();
            self.queues.remove(key);
        }
        Reply::Popped { length, item }
    }

    fn check_not_waiting(&self, conn: ConnId, query: Query) -> Result<(), Violation> {
        if self.waiters.is_waiting(conn) { Err(Violation::AlreadyWaiting(query)) } else { Ok(()) }
    }

    /// New keys and additional bytes if `key` gets a value of this length.
    fn growth(&self, key: &Bytes, value_len: usize) -> (usize, usize) {
        match self.values.get(key) {
            Some(old) => (0, value_len.saturating_sub(old.len())),
            None => (1, ENTRY_BYTES + key.len() + value_len),
        }
    }

    fn check_room(&self, query: Query, key: &Bytes, (keys, bytes): (usize, usize)) -> Result<(), Violation> {
        let full = |what, needed, limit| Err(Violation::Full { query, key: key.clone(), needed, what, limit });
        let needed = self.values.len() + self.queues.len() + keys;
        if keys > 0 && needed > self.limits.keys {
            return full("keys", needed, self.limits.keys);
        }
        let needed = self.stored_bytes().saturating_add(bytes);
        if bytes > 0 && needed > self.limits.stored_bytes {
            return full("stored_bytes", needed, self.limits.stored_bytes);
        }
        Ok(())
    }

    /// An upper bound: a repeated key counts each time. That a request is refused as a whole matters more than the last byte.
    fn check_room_for_all(&self, query: Query, pairs: &[(Bytes, Bytes)]) -> Result<(), Violation> {
        let Some((first, _)) = pairs.first().filter(|_| self.limits != TableLimits::default()) else {
            return Ok(());
        };
        let growth = pairs.iter().map(|(key, value)| self.growth(key, value.len()));
        let (keys, bytes) = growth.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        self.check_room(query, first, (keys, bytes))
    }
}

/// What an entry of the table counts for besides its bytes: about the memory of its place in the maps.
pub const ENTRY_BYTES: usize = 128;

/// Keys of one request that cost as much as one small request. A further key costs less than a further request, because it
/// needs no decoding, turn or message of its own.
pub(super) const KEYS_PER_UNIT: usize = 16;

/// Bytes that are copied in the time that a small request takes.
const BYTES_PER_UNIT: usize = 4 * 1024;

/// Values of this size or more are kept as slices of the receive buffer, if they are most of it.
const WORTH_SHARING_BYTES: usize = 64 * 1024;

/// The value to store: the slice itself if the `message` that it is a slice of is little larger, else a copy.
///
/// A slice pins its whole receive buffer. The server reads a big request into a separate buffer, so a big value pins little
/// else. A small value might keep megabytes alive.
fn kept(value: Bytes, message: usize) -> Bytes {
    let shares = value.len() >= WORTH_SHARING_BYTES && value.len() >= message / 2;
    if shares { value } else { Bytes::copy_from_slice(&value) }
}

#[cfg(test)]
mod tests;
