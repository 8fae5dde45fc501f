//! A stream of a worker that is to be copied.

use super::super::spawn::Reading;
use super::super::spec::Copies;

/// One of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Which {
    Stdout = 0,
    Stderr = 1,
}

/// A stream to copy.
pub(in super::super) struct Source {
    pub local_rank: u32,
    pub which: Which,
    pub reading: Reading,
    pub copies: Copies,
}
