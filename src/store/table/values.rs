//! The map from keys to values, in little memory.
//!
//! Owns the memory layout. A small value lies behind its key in one block of exactly that size. An entry of the map takes 24
//! bytes. A larger value is shared with the replies that name it. A million keys of 8 bytes with values of 64 take 130 bytes
//! each, of which 80 are the block. `docs/decisions/0011-a-key-and-its-small-value-are-one-block.md` has the alternatives.

use std::hash::{BuildHasher, Hasher, RandomState};

use bytes::{Bytes, BytesMut};
use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;

use super::listing::Listing;

/// A map from keys to values.
#[derive(Debug, Default)]
pub(super) struct Values {
    entries: HashTable<Entry>,
    /// Bytes of all keys.
    key_bytes: usize,
    /// Keyed at random: keys come from the network.
    hasher: RandomState,
}

#[derive(Debug)]
enum Entry {
    /// Key and value, concatenated.
    Small {
        block: Box<[u8]>,
        key_len: u32,
    },
    Large(Box<Large>),
}

#[derive(Debug)]
struct Large {
    key: Box<[u8]>,
    value: Bytes,
}

/// A value as it is stored.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    Small(&'a [u8]),
    Large(&'a Bytes),
}

impl Value<'_> {
    /// A copy of a small value, a handle of a large one.
    pub(super) fn to_bytes(self) -> Bytes {
        match self {
            Value::Small(value) => Bytes::copy_from_slice(value),
            Value::Large(value) => value.clone(),
        }
    }
}

impl std::ops::Deref for Value<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Value::Small(value) => value,
            Value::Large(value) => value,
        }
    }
}

impl Entry {
    fn new(key: &[u8], value: Bytes) -> Entry {
        match u32::try_from(key.len()) {
            Ok(key_len) if value.len() < LARGE_BYTES => Entry::Small { block: [key, &value].concat().into(), key_len },
            _ => Entry::Large(Box::new(Large { key: key.into(), value })),
        }
    }

    fn key(&self) -> &[u8] {
        match self {
            Entry::Small { block, key_len } => &block[..*key_len as usize],
            Entry::Large(large) => &large.key,
        }
    }

    fn value(&self) -> Value<'_> {
        match self {
            Entry::Small { block, key_len } => Value::Small(&block[*key_len as usize..]),
            Entry::Large(large) => Value::Large(&large.value),
        }
    }

    fn set(&mut self, value: Bytes) {
        match self {
            Entry::Small { block, key_len } if block.len() - *key_len as usize == value.len() => {
                block[*key_len as usize..].copy_from_slice(&value);
            }
            Entry::Large(large) if value.len() >= LARGE_BYTES => large.value = value,
            _ => *self = Entry::new(self.key(), value),
        }
    }

    fn append(&mut self, more: &[u8]) {
        let Entry::Large(large) = self else {
            *self = Entry::new(self.key(), [&self.value(), more].concat().into());
            return;
        };
        // In place, unless a reply that is being sent holds the old value: many appends must not be quadratic.
        let mut value = match std::mem::take(&mut large.value).try_into_mut() {
            Ok(value) => value,
            Err(shared) => {
                let mut copy = BytesMut::with_capacity(shared.len() + more.len());
                copy.extend_from_slice(&shared);
                copy
            }
        };
        value.extend_from_slice(more);
        large.value = value.freeze();
    }
}

impl Values {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<Value<'_>> {
        self.entries.find(hash(&self.hasher, key), |entry| entry.key() == key).map(Entry::value)
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    /// Stores a value and returns the length of the previous one. A small value is copied, a larger one kept.
    pub(super) fn set(&mut self, key: &[u8], value: Bytes) -> Option<usize> {
        match self.slot(key) {
            Slot::Occupied(mut slot) => {
                let before = slot.get().value().len();
                slot.get_mut().set(value);
                Some(before)
            }
            Slot::Vacant(slot) => {
                slot.insert(Entry::new(key, value));
                self.key_bytes += key.len();
                None
            }
        }
    }

    /// Appends to an existing value.
    pub(super) fn append(&mut self, key: &[u8], more: &[u8]) {
        if let Slot::Occupied(mut slot) = self.slot(key) {
            slot.get_mut().append(more);
        }
    }

    /// Removes a key and returns the length of its value.
    pub(super) fn remove(&mut self, key: &[u8]) -> Option<usize> {
        match self.slot(key) {
            Slot::Occupied(slot) => {
                let removed = slot.remove().0.value().len();
                self.key_bytes -= key.len();
                Some(removed)
            }
            Slot::Vacant(_) => None,
        }
    }

    /// All keys as they are now.
    pub(super) fn list_keys(&self) -> Listing {
        Listing::new(self.entries.iter().map(Entry::key), self.key_bytes)
    }

    /// How many bytes an `append` would copy besides those that it adds: the old value's, if a reply that is being sent holds it.
    pub(super) fn copied_by_append(&self, key: &[u8]) -> usize {
        match self.get(key) {
            Some(Value::Large(value)) if !value.is_unique() => value.len(),
            _ => 0,
        }
    }

    fn slot(&mut self, key: &[u8]) -> Slot<'_, Entry> {
        let Values { entries, hasher, .. } = self;
        let is_key = |entry: &Entry| entry.key() == key;
        entries.entry(hash(hasher, key), is_key, |entry| hash(hasher, entry.key()))
    }
}

/// Hashes the key's bytes alone. `hash_one` would also write their number, which costs time and only separates lists of slices
/// apart.
pub(super) fn hash(hasher: &RandomState, key: &[u8]) -> u64 {
    let mut state = hasher.build_hasher();
    state.write(key);
    state.finish()
}

/// Values of this size or more are shared with the replies that name them. Below, copying costs less than sharing. The
/// number is low, so that a reply that names one value many times takes little memory.
pub(super) const LARGE_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_entry_is_three_words() {
        assert_eq!(size_of::<Entry>(), 24);
    }

    /// Every change from one size to every other, against a plain map.
    #[test]
    fn values_change_between_small_and_large() {
        let sizes = [0, 1, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES];
        let (mut values, mut model) = (Values::default(), BTreeMap::new());
        let mut fill = 0u8;
        for key in [&b""[..], b"a", b"key"] {
            for (before, after) in sizes.iter().flat_map(|before| sizes.map(|after| (*before, after))) {
                for size in [before, after] {
                    fill += 1;
                    let value = vec![fill; size];
                    let old = values.set(key, Bytes::from(value.clone()));
                    assert_eq!(old, model.insert(key, value).map(|old: Vec<u8>| old.len()));
                }
                let handle = values.get(key).map(Value::to_bytes);
                values.append(key, &[fill; 3]);
                assert_eq!(
                    handle.as_deref(),
                    model.get(key).map(|value| &value[..]),
                    "a reply under way stays as it is"
                );
                model.entry(key).and_modify(|value| value.extend([fill; 3]));
                assert_eq!(values.get(key).as_deref(), model.get(key).map(|value| &value[..]));
            }
        }
        assert_eq!(values.len(), model.len());
        assert_eq!(values.list_keys().left(), model.len());
        assert_eq!(values.remove(b"key"), model.remove(&b"key"[..]).map(|value| value.len()));
        assert_eq!(values.remove(b"key"), None);
        assert!(!values.contains(b"key"));
    }
}
