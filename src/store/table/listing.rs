//! The reply to `LIST_KEYS`: the keys that the table held at one moment, sorted.
//!
//! Owns sorting them piece by piece. Sorting 300,000 keys takes tens of milliseconds, and the server has other clients to
//! serve meanwhile. The copy of the keys is made at once, so that the list is of one moment.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bytes::Bytes;

/// Keys to be listed.
#[derive(Debug)]
pub struct Listing {
    /// All keys, concatenated.
    text: Bytes,
    /// Begin and end of each key in `text`, in runs of [`PIECE_KEYS`]. The runs before `sorted` are sorted.
    keys: Vec<(usize, usize)>,
    sorted: usize,
    /// The first remaining key of each run, and its index in `keys`.
    heads: BinaryHeap<Reverse<(Bytes, usize)>>,
    left: usize,
}

impl Listing {
    /// Copies these keys, which have `bytes` bytes in all.
    pub(super) fn new<'a>(keys: impl ExactSizeIterator<Item = &'a [u8]>, bytes: usize) -> Listing {
        let (mut text, mut ranges) = (Vec::with_capacity(bytes), Vec::with_capacity(keys.len()));
        for key in keys {
            let start = text.len();
            text.extend_from_slice(key);
            ranges.push((start, text.len()));
        }
        let left = ranges.len();
        Listing { text: text.into(), keys: ranges, sorted: 0, heads: BinaryHeap::new(), left }
    }

    /// Keys that `each` has not been given yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Does a piece of the work. Once all runs are sorted, calls `each` with the next keys. Returns the number of keys processed.
    pub fn advance(&mut self, mut each: impl FnMut(&[u8])) -> usize {
        if self.sorted < self.keys.len() {
            return self.sort();
        }
        let given = self.left.min(PIECE_KEYS);
        for _ in 0..given {
            let Some(mut head) = self.heads.peek_mut() else { break };
            let Reverse((key, at)) = &mut *head;
            each(key);
            *at += 1;
            match self.keys.get(*at).filter(|_| !at.is_multiple_of(PIECE_KEYS)) {
                Some(&(start, end)) => *key = self.text.slice(start..end),
                None => drop(std::collections::binary_heap::PeekMut::pop(head)),
            }
        }
        self.left -= given;
        given
    }

    /// Sorts the next run.
    fn sort(&mut self) -> usize {
        let (first, end) = (self.sorted, self.keys.len().min(self.sorted + PIECE_KEYS));
        let Listing { text, keys, .. } = self;
        keys[first..end].sort_unstable_by(|one, other| text[one.0..one.1].cmp(&text[other.0..other.1]));
        let (start, stop) = keys[first];
        self.heads.push(Reverse((text.slice(start..stop), first)));
        self.sorted = end;
        end - first
    }
}

/// Keys of one piece of work, which takes about a fifth of a millisecond.
const PIECE_KEYS: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;

    /// In pieces of no more than that, whatever the number of keys is to the length of a run.
    #[test]
    fn keys_of_any_number_come_in_order_and_in_pieces() {
        for count in [0, 1, PIECE_KEYS - 1, PIECE_KEYS, PIECE_KEYS + 1, 5 * PIECE_KEYS + 7] {
            // An order that is none; some are the beginning of others.
            let keys: Vec<String> = (0..count).map(|number| format!("{}", number * 7919 % count)).collect();
            let bytes = keys.iter().map(String::len).sum();
            let mut listing = Listing::new(keys.iter().map(String::as_bytes), bytes);
            let mut listed = Vec::new();
            while listing.left() > 0 {
                assert!(listing.advance(|key| listed.push(String::from_utf8(key.to_vec()).unwrap())) <= PIECE_KEYS);
            }
            let mut expected = keys;
            expected.sort();
            assert_eq!(listed, expected, "{count} keys");
        }
    }
}
