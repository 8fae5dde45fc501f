//! Which connection waits for which keys, and which waits an event ends.
//!
//! Owns the order of release and the memory layout of waits. Connections may wait for a hundred thousand keys each, so a key
//! that one connection waits for takes only 33 to 45 bytes besides its own. All keys of a wait are in two blocks, which are
//! freed with the wait. Waits for the same key form a ring, in their order, and a table has the first of each ring.

use std::collections::HashMap;
use std::hash::RandomState;

use bytes::Bytes;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::values::hash;
use super::{ConnId, ENTRY_BYTES};

/// The open waits of all connections; at most one each.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// The first registration of each key that is waited for.
    first: HashTable<KeyRef>,
    /// Keyed at random: keys come from the network.
    hasher: RandomState,
    /// Open waits. Free slots are reused.
    waits: Vec<Option<Wait>>,
    /// Slots of `waits` that may be free.
    free: Vec<u32>,
    by_conn: HashMap<ConnId, u32>,
    /// The sum of [`bytes_of`] over all open waits.
    bytes: usize,
}

/// One connection's open wait.
#[derive(Debug)]
struct Wait {
    conn: ConnId,
    /// Keys without an event so far.
    outstanding: u32,
    bytes: usize,
    /// All keys, concatenated.
    text: Box<[u8]>,
    keys: Box<[Key]>,
}

/// A key of a wait.
#[derive(Debug, Clone, Copy)]
struct Key {
    /// End of the key in the wait's text.
    end: usize,
    /// Neighbours in the ring of waits for the same key. [`NOWHERE`]: the key is in no ring, because its event has come or
    /// because the wait names it twice.
    previous: KeyRef,
    next: KeyRef,
}

/// Position of a key: the slot of its wait, and the key's index in that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KeyRef {
    wait: u32,
    key: u32,
}

const NOWHERE: KeyRef = KeyRef { wait: u32::MAX, key: u32::MAX };

/// Most keys that a wait may have: their indices are 32 bits wide.
pub(super) const MAX_KEYS: usize = u32::MAX as usize;

/// Bytes that a wait for these keys counts for.
pub(super) fn bytes_of(keys: &[Bytes]) -> usize {
    keys.iter().map(|key| ENTRY_BYTES + key.len()).sum()
}

impl Waiters {
    pub(super) fn is_waiting(&self, conn: ConnId) -> bool {
        self.by_conn.contains_key(&conn)
    }

    /// Connections with an open wait.
    pub(super) fn count(&self) -> usize {
        self.by_conn.len()
    }

    /// Bytes that the open waits count for.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing is left of any wait.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.by_conn.is_empty() && self.waits.iter().all(Option::is_none) && self.bytes == 0
    }

    /// Opens a wait of `conn` for these keys: at least one, and at most [`MAX_KEYS`]. `conn` must have no open wait.
    pub(super) fn register(&mut self, conn: ConnId, keys: &[Bytes]) {
        let bytes = bytes_of(keys);
        let mut end = 0;
        let ends = keys.iter().map(|key| {
            end += key.len();
            Key { end, previous: NOWHERE, next: NOWHERE }
        });
        let wait = Wait { conn, outstanding: 0, bytes, keys: ends.collect(), text: keys.concat().into() };
        self.bytes += bytes;
        let at = self.add(wait);
        self.by_conn.insert(conn, at);
        let mut outstanding = 0;
        for key in 0..keys.len() as u32 {
            outstanding += u32::from(self.link(KeyRef { wait: at, key }));
        }
        if let Some(wait) = self.wait_mut(at) {
            wait.outstanding = outstanding;
        }
    }

    /// Forgets the wait of a connection, if it has one.
    pub(super) fn forget(&mut self, conn: ConnId) {
        let Some(wait) = self.by_conn.get(&conn).copied() else {
            return;
        };
        let count = self.wait_mut(wait).map_or(0, |wait| wait.keys.len());
        for key in 0..count as u32 {
            self.unlink(KeyRef { wait, key });
        }
        self.end(wait);
    }

    /// `key` has been stored: each wait that is registered under it needs one key less.
    ///
    /// Counts events and does not look at the keys again. A key that is deleted before the others arrive still counts, as
    /// upstream.
    pub(super) fn event(&mut self, key: &Bytes, released: &mut Vec<ConnId>) {
        if self.first.is_empty() {
            // The common case. Hashing the key once more would be the most expensive part of a small `SET`.
            return;
        }
        let Some(first) = self.take_ring(key) else {
            return;
        };
        let mut key_ref = first;
        loop {
            let next = self.leave_ring(key_ref);
            released.extend(self.has_one_less(key_ref.wait));
            if next == first {
                return;
            }
            key_ref = next;
        }
    }

    /// An item was pushed. Releases at most one waiter: the first that needs no other key.
    pub(super) fn pushed(&mut self, key: &Bytes, released: &mut Vec<ConnId>) {
        while let Some(first) = self.first_of(key) {
            self.unlink(first);
            if let Some(conn) = self.has_one_less(first.wait) {
                released.push(conn);
                return;
            }
        }
    }

    /// Counts one event for a wait. If it was the last, ends the wait and returns its connection.
    fn has_one_less(&mut self, at: u32) -> Option<ConnId> {
        let wait = self.wait_mut(at)?;
        wait.outstanding -= 1;
        if wait.outstanding > 0 {
            return None;
        }
        let conn = wait.conn;
        self.end(at);
        Some(conn)
    }

    fn wait_mut(&mut self, at: u32) -> Option<&mut Wait> {
        self.waits.get_mut(at as usize)?.as_mut()
    }

    fn add(&mut self, wait: Wait) -> u32 {
        while let Some(at) = self.free.pop() {
            // The list may have shrunk since, and grown again.
            if let Some(key_ref @ None) = self.waits.get_mut(at as usize) {
                *key_ref = Some(wait);
                return at;
            }
        }
        self.waits.push(Some(wait));
        (self.waits.len() - 1) as u32
    }

    /// Removes a wait whose keys are in no ring. Frees memory if far more is held than the remaining waits need.
    fn end(&mut self, at: u32) {
        let Some(wait) = self.waits.get_mut(at as usize).and_then(Option::take) else {
            return;
        };
        self.bytes -= wait.bytes;
        self.by_conn.remove(&wait.conn);
        self.free.push(at);
        while let Some(None) = self.waits.last() {
            self.waits.pop();
        }
        if is_too_large(self.waits.len(), self.waits.capacity()) {
            self.waits.shrink_to(2 * self.waits.len());
            self.free.retain(|at| (*at as usize) < self.waits.len());
            self.free.shrink_to_fit();
            self.by_conn.shrink_to(2 * self.by_conn.len());
        }
        if is_too_large(self.first.len(), self.first.capacity()) {
            let Waiters { first, waits, hasher, .. } = self;
            first.shrink_to(2 * first.len(), |key_ref| hash(hasher, text_of(waits, *key_ref)));
        }
    }

    /// Appends a key to its ring. False if its wait is in that ring already.
    fn link(&mut self, key_ref: KeyRef) -> bool {
        let Waiters { first, waits, hasher, .. } = self;
        let text = text_of(waits, key_ref);
        let is_text = |other: &KeyRef| text_of(waits, *other) == text;
        let head = match first.entry(hash(hasher, text), is_text, |other| hash(hasher, text_of(waits, *other))) {
            Entry::Occupied(head) => *head.get(),
            Entry::Vacant(vacant) => {
                vacant.insert(key_ref);
                key_ref
            }
        };
        if head == key_ref {
            join(waits, key_ref, key_ref);
            return true;
        }
        let last = key_of(waits, head).previous;
        // A key that is named twice is one registration: one event satisfies both.
        if last.wait == key_ref.wait {
            return false;
        }
        join(waits, last, key_ref);
        join(waits, key_ref, head);
        true
    }

    /// Removes a key from its ring, if it is in one.
    fn unlink(&mut self, key_ref: KeyRef) {
        let Waiters { first, waits, hasher, .. } = self;
        let Key { previous, next, .. } = key_of(waits, key_ref);
        if next == NOWHERE {
            return;
        }
        if let Ok(mut head) = first.find_entry(hash(hasher, text_of(waits, key_ref)), |head| *head == key_ref) {
            if next == key_ref {
                head.remove();
            } else {
                *head.get_mut() = next;
            }
        }
        join(waits, previous, next);
        self.leave_ring(key_ref);
    }

    /// Marks a key as being in no ring, and returns the key that followed it.
    fn leave_ring(&mut self, key_ref: KeyRef) -> KeyRef {
        let Some(key) = key_mut(&mut self.waits, key_ref) else {
            return NOWHERE;
        };
        key.previous = NOWHERE;
        std::mem::replace(&mut key.next, NOWHERE)
    }

    fn first_of(&self, key: &[u8]) -> Option<KeyRef> {
        self.first.find(hash(&self.hasher, key), |key_ref| text_of(&self.waits, *key_ref) == key).copied()
    }

    /// Removes the ring of a key from the table, and returns its first member.
    fn take_ring(&mut self, key: &[u8]) -> Option<KeyRef> {
        let Waiters { first, waits, hasher, .. } = self;
        let head = first.find_entry(hash(hasher, key), |key_ref| text_of(waits, *key_ref) == key).ok()?;
        Some(head.remove().0)
    }
}

/// The key at a position. Positions in the table and in rings are always those of open waits.
fn key_of(waits: &[Option<Wait>], key_ref: KeyRef) -> Key {
    let wait = waits.get(key_ref.wait as usize).and_then(Option::as_ref);
    let key = wait.and_then(|wait| wait.keys.get(key_ref.key as usize));
    key.copied().unwrap_or(Key { end: 0, previous: NOWHERE, next: NOWHERE })
}

fn text_of(waits: &[Option<Wait>], key_ref: KeyRef) -> &[u8] {
    let Some(wait) = waits.get(key_ref.wait as usize).and_then(Option::as_ref) else {
        return &[];
    };
    let at = key_ref.key as usize;
    let start = at.checked_sub(1).map_or(0, |before| wait.keys[before].end);
    &wait.text[start..wait.keys[at].end]
}

/// Makes two keys neighbours.
fn join(waits: &mut [Option<Wait>], before: KeyRef, behind: KeyRef) {
    if let Some(key) = key_mut(waits, before) {
        key.next = behind;
    }
    if let Some(key) = key_mut(waits, behind) {
        key.previous = before;
    }
}

fn key_mut(waits: &mut [Option<Wait>], key_ref: KeyRef) -> Option<&mut Key> {
    waits.get_mut(key_ref.wait as usize)?.as_mut()?.keys.get_mut(key_ref.key as usize)
}

/// Whether a list of this capacity holds so much less that its memory is worth freeing.
fn is_too_large(len: usize, capacity: usize) -> bool {
    capacity > KEPT_SLOTS && capacity / 8 > len
}

/// Capacity that an empty list may keep.
const KEPT_SLOTS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_takes_three_words_and_one_in_the_table() {
        assert_eq!((size_of::<Key>(), size_of::<KeyRef>()), (24, 8));
    }

    /// After a crowd has left, those who stay keep little, and their order.
    #[test]
    fn what_a_crowd_has_taken_is_given_back_and_those_who_stay_are_released_in_order() {
        let key = |number: u64| Bytes::from(number.to_string());
        let mut waiters = Waiters::default();
        for conn in 0..20_000 {
            waiters.register(ConnId(conn), &[key(conn), Bytes::from_static(b"all")]);
        }
        assert!(waiters.waits.capacity() >= 20_000 && waiters.first.capacity() >= 20_000);
        for conn in (0..20_000).filter(|conn| conn % 10_000 != 3) {
            waiters.forget(ConnId(conn));
        }
        assert!(waiters.first.capacity() <= KEPT_SLOTS);
        let mut released = Vec::new();
        waiters.event(&Bytes::from_static(b"all"), &mut released);
        assert_eq!(released, []);
        waiters.register(ConnId(7), &[key(3)]);
        waiters.event(&key(3), &mut released);
        waiters.event(&key(10_003), &mut released);
        assert_eq!(released, [ConnId(3), ConnId(7), ConnId(10_003)]);
        assert!(waiters.is_empty());
        assert!(waiters.waits.capacity() <= KEPT_SLOTS);
    }
}
