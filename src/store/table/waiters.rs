//! Who waits for which keys, and who is released by an event on one.

use std::collections::{BTreeMap, HashMap};

use bytes::{Bytes, BytesMut};

use super::{ConnId, ENTRY_BYTES};

/// The open waits of all connections; at most one each.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Key → registrations in order of their tickets. Never holds an empty map.
    registered: HashMap<Bytes, BTreeMap<u64, ConnId>>,
    waiting: HashMap<ConnId, Waiting>,
    next_ticket: u64,
    /// What [`bytes_of`] says of all open waits.
    bytes: usize,
}

/// One connection's open wait.
#[derive(Debug)]
struct Waiting {
    ticket: u64,
    /// Keys without an event so far.
    outstanding: usize,
    keys: Vec<Bytes>,
    bytes: usize,
}

/// What a wait for these keys counts for.
pub(super) fn bytes_of(keys: &[Bytes]) -> usize {
    keys.iter().map(|key| ENTRY_BYTES + key.len()).sum()
}

impl Waiters {
    pub(super) fn is_waiting(&self, conn: ConnId) -> bool {
        self.waiting.contains_key(&conn)
    }

    /// Connections with an open wait.
    pub(super) fn count(&self) -> usize {
        self.waiting.len()
    }

    /// What the open waits count for.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing is left of any wait.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.registered.is_empty() && self.waiting.is_empty() && self.bytes == 0
    }

    /// Opens a wait of `conn`, which has none, for these keys; at least one.
    pub(super) fn register(&mut self, conn: ConnId, keys: Vec<Bytes>) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let bytes = bytes_of(&keys);
        let keys = compact(keys);
        let mut outstanding = 0;
        for key in &keys {
            // A key named twice is one registration: one event brings both.
            if self.registered.entry(key.clone()).or_default().insert(ticket, conn).is_none() {
                outstanding += 1;
            }
        }
        self.bytes += bytes;
        self.waiting.insert(conn, Waiting { ticket, outstanding, keys, bytes });
    }

    /// Forgets the wait of a connection, if it has one.
    pub(super) fn forget(&mut self, conn: ConnId) {
        let Some(waiting) = self.waiting.remove(&conn) else {
            return;
        };
        self.bytes -= waiting.bytes;
        for key in &waiting.keys {
            if let Some(registrations) = self.registered.get_mut(key) {
                registrations.remove(&waiting.ticket);
                if registrations.is_empty() {
                    self.registered.remove(key);
                }
            }
        }
    }

    /// `key` has been stored: everybody registered under it needs one key less.
    ///
    /// Counts events and does not look again: a key that is deleted before the others arrive still counts, as upstream.
    pub(super) fn event(&mut self, key: &Bytes, released: &mut Vec<ConnId>) {
        if self.registered.is_empty() {
            // The common case, and hashing the key once more would be the dearest part of a small `SET`.
            return;
        }
        let Some(registrations) = self.registered.remove(key) else {
            return;
        };
        for conn in registrations.into_values() {
            if self.has_one_less(conn) {
                released.push(conn);
            }
        }
    }

    /// An item was pushed: releases at most one waiter, the first that needs nothing else.
    pub(super) fn pushed(&mut self, key: &Bytes, released: &mut Vec<ConnId>) {
        while let Some(registrations) = self.registered.get_mut(key) {
            let first = registrations.pop_first();
            if registrations.is_empty() {
                self.registered.remove(key);
            }
            if let Some((_, conn)) = first
                && self.has_one_less(conn)
            {
                released.push(conn);
                return;
            }
        }
    }

    /// Counts one event for the wait of `conn`; true if that was the last, in which case the wait is gone.
    fn has_one_less(&mut self, conn: ConnId) -> bool {
        let Some(waiting) = self.waiting.get_mut(&conn) else {
            return false;
        };
        waiting.outstanding -= 1;
        let over = waiting.outstanding == 0;
        if over {
            self.bytes -= waiting.bytes;
            self.waiting.remove(&conn);
        }
        over
    }
}

/// The same keys in one allocation that holds nothing else.
fn compact(keys: Vec<Bytes>) -> Vec<Bytes> {
    let mut all = BytesMut::with_capacity(keys.iter().map(Bytes::len).sum());
    keys.iter().for_each(|key| all.extend_from_slice(key));
    let mut all = all.freeze();
    keys.iter().map(|key| all.split_to(key.len())).collect()
}
