//! The bytes that a client has not read yet.
//!
//! Owns the bytes between a reply and the socket. Big values are queued as they are, shared with the table. The rest is
//! gathered into one buffer. No I/O: the connection asks for slices, and says how many bytes were sent.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes, BytesMut};

use crate::store::protocol::Sink;

/// A queue of bytes to send.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Sent first.
    segments: VecDeque<Bytes>,
    /// Sent last. Further small pieces are appended here.
    tail: BytesMut,
    len: usize,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The front of the queue, for one vectored write.
    pub(super) fn slices(&self) -> ([IoSlice<'_>; SLICES], usize) {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let pieces = self.segments.iter().map(|segment| &segment[..]).chain([&self.tail[..]]);
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(pieces) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        (slices, count)
    }

    /// Removes `count` bytes, which were sent, from the front.
    pub(super) fn advance(&mut self, mut count: usize) {
        self.len -= count;
        while let Some(segment) = self.segments.front_mut() {
            if count < segment.len() {
                segment.advance(count);
                return;
            }
            count -= segment.len();
            self.segments.pop_front();
        }
        self.tail.advance(count);
        if self.is_empty() {
            if self.tail.capacity() > IDLE_BYTES {
                self.tail = BytesMut::new();
            }
            if self.segments.capacity() > SLICES {
                self.segments = VecDeque::new();
            }
        }
    }
}

impl Sink for Outbox {
    fn put(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        self.tail.extend_from_slice(bytes);
    }

    fn put_shared(&mut self, bytes: Bytes) {
        if bytes.len() < WORTH_SHARING_BYTES {
            return self.put(&bytes);
        }
        self.len += bytes.len();
        if !self.tail.is_empty() {
            self.segments.push_back(self.tail.split().freeze());
        }
        self.segments.push_back(bytes);
    }
}

/// Most slices of one vectored write.
const SLICES: usize = 64;

/// Values of this size or more are shared and not copied. The number is low, so that a reply that names one value many
/// times takes little memory.
const WORTH_SHARING_BYTES: usize = 512;

/// Capacity that an empty outbox may keep. All connections without unread replies share one.
const IDLE_BYTES: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_in_order_whatever_the_socket_takes() {
        for step in [1, 7, 300, 10_000] {
            let mut outbox = Outbox::default();
            let mut expected = Vec::new();
            for round in 0..100u8 {
                let big = Bytes::from(vec![round; 600]);
                for piece in [Bytes::from(vec![round; 3]), big, Bytes::from(vec![round; 20]), Bytes::new()] {
                    expected.extend_from_slice(&piece);
                    outbox.put_shared(piece);
                }
            }
            assert_eq!(outbox.len(), expected.len());
            let mut sent = Vec::new();
            while !outbox.is_empty() {
                let (slices, count) = outbox.slices();
                let before = sent.len();
                for slice in &slices[..count] {
                    let room = step - (sent.len() - before);
                    sent.extend_from_slice(&slice[..slice.len().min(room)]);
                }
                let taken = sent.len() - before;
                outbox.advance(taken);
            }
            assert!(sent == expected, "step {step}");
        }
    }
}
