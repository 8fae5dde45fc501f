//! Reads of a process's memory, of which there are at most [`READ_LIMIT`] for one look.

use std::cell::Cell;

use super::{Memory, Unreadable};

/// Most reads of one look at a process.
pub const READ_LIMIT: u32 = 4096;
const FIRST_PAGE: u64 = 4096;

/// A process's memory, of which numbers and short runs of bytes are read.
pub(super) struct Reader<'a> {
    memory: &'a dyn Memory,
    left: Cell<u32>,
}

impl<'a> Reader<'a> {
    /// All reads are left.
    pub(super) fn new(memory: &'a dyn Memory) -> Self {
        Self { memory, left: Cell::new(READ_LIMIT) }
    }

    /// No read is left.
    pub(super) fn is_used_up(&self) -> bool {
        self.left.get() == 0
    }

    /// Fills `into` with what stands `offset` bytes behind `base`.
    ///
    /// # Errors
    /// It cannot be read, or no read is left.
    pub(super) fn bytes(&self, base: u64, offset: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let address = base.checked_add(offset).ok_or(Unreadable)?;
        let end = address.checked_add(into.len() as u64).ok_or(Unreadable)?;
        // No process has its first page, so a null pointer costs no system call. The upper half of all addresses is the kernel's.
        if base < FIRST_PAGE || end > i64::MAX as u64 {
            return Err(Unreadable);
        }
        let left = self.left.get().checked_sub(1).ok_or(Unreadable)?;
        self.left.set(left);
        self.memory.read(address, into)
    }

    /// The number of 64 bits there.
    ///
    /// # Errors
    /// It cannot be read, or no read is left.
    pub(super) fn word(&self, base: u64, offset: u64) -> Result<u64, Unreadable> {
        let mut bytes = [0; 8];
        self.bytes(base, offset, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// The number of 32 bits there.
    ///
    /// # Errors
    /// It cannot be read, or no read is left.
    pub(super) fn half(&self, base: u64, offset: u64) -> Result<u32, Unreadable> {
        let mut bytes = [0; 4];
        self.bytes(base, offset, &mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }
}

/// The number of 64 bits in the middle of bytes that were read. 0 outside of them.
pub(super) fn word_in(bytes: &[u8], at: u64) -> u64 {
    piece(bytes, at).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The number of 32 bits in the middle of bytes that were read. 0 outside of them.
pub(super) fn half_in(bytes: &[u8], at: u64) -> u32 {
    piece(bytes, at).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn piece<const SIZE: usize>(bytes: &[u8], at: u64) -> Option<&[u8; SIZE]> {
    bytes.get(usize::try_from(at).ok()?..)?.first_chunk()
}
