//! Fuzzes the reader of frames. Whatever a process's memory has, a look ends within its bounds.

#![no_main]

use std::cell::Cell;

use elastic_rs::hang::frames::{
    FRAME_LIMIT, Memory, NAME_LIMIT_BYTES, READ_LIMIT, Runtime, THREAD_LIMIT, Unreadable, Version, read,
};
use libfuzzer_sys::fuzz_target;

/// The address of the first byte. The bytes stand there again and again, so that most addresses can be read.
const BASE: u64 = 0x1_0000;

struct Endless<'a> {
    bytes: &'a [u8],
    reads: Cell<u32>,
}

impl Memory for Endless<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.reads.set(self.reads.get() + 1);
        assert!(into.len() <= NAME_LIMIT_BYTES, "a number that was read has chosen the size of a read");
        if self.bytes.is_empty() || address < BASE || address >> 47 != 0 {
            return Err(Unreadable);
        }
        let mut from = ((address - BASE) % self.bytes.len() as u64) as usize;
        let mut rest = into;
        while !rest.is_empty() {
            let piece = &self.bytes[from..];
            let piece = &piece[..piece.len().min(rest.len())];
            let (filled, behind) = rest.split_at_mut(piece.len());
            filled.copy_from_slice(piece);
            (rest, from) = (behind, 0);
        }
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&hint, bytes)) = input.split_first() else { return };
    let version = (hint < 5).then(|| Version { major: 3, minor: 11 + hint });
    let memory = Endless { bytes, reads: Cell::new(0) };
    let stacks = read(&memory, 100, Runtime { address: BASE, version });
    assert!(memory.reads.get() <= READ_LIMIT);
    let Ok(stacks) = stacks else { return };
    assert!(!stacks.threads.is_empty() && stacks.threads.len() <= THREAD_LIMIT);
    assert!(stacks.threads.iter().filter(|thread| thread.main).count() == 1);
    for thread in &stacks.threads {
        assert!(thread.frames.len() <= FRAME_LIMIT);
        for frame in &thread.frames {
            assert!(frame.function.len() <= NAME_LIMIT_BYTES && frame.file.len() <= NAME_LIMIT_BYTES);
        }
    }
});
