//! The descriptor from which a worker's stream is read, and the last bytes that came out of it.
//!
//! Two threads use it: the one that copies, and the one that asks for the worker's last words. Neither holds the lock while it
//! writes to a console or a file, so a blocked console never keeps a worker's last words back.

use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, tee};

use super::super::lines::Tail;
use super::super::spawn::PIPE_BYTES;

/// A pipe's read end, or a file that its writer appends to.
#[derive(Debug)]
pub(in super::super) struct ReadEnd {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// `None` once ended.
    open: Option<OwnedFd>,
    tail: Tail,
}

impl ReadEnd {
    pub fn new(open: OwnedFd) -> Self {
        Self { inner: Mutex::new(Inner { open: Some(open), tail: Tail::default() }) }
    }

    /// Calls `use_it` with the descriptor. `None` once that is closed.
    pub fn with<T>(&self, use_it: impl FnOnce(&OwnedFd) -> T) -> Option<T> {
        self.inner.lock().open.as_ref().map(use_it)
    }

    /// Reads once. `keeps_tail`: the end of what was read is kept for [`last_bytes`](Self::last_bytes). `None` once it is closed.
    pub fn read(&self, buffer: &mut [u8], keeps_tail: bool) -> Option<Result<usize, Errno>> {
        let mut inner = self.inner.lock();
        let read = rustix::io::read(inner.open.as_ref()?, &mut *buffer);
        if let (Ok(read), true) = (read, keeps_tail) {
            inner.tail.push(&buffer[..read]);
        }
        Some(read)
    }

    /// The last bytes that were written into the pipe, read or not. Takes nothing out of it and does not wait.
    pub fn last_bytes(&self) -> Vec<u8> {
        let inner = self.inner.lock();
        let mut all = inner.tail.last().to_vec();
        // Without a second pipe, bytes that are not read yet are missing.
        all.extend(inner.open.as_ref().and_then(|pipe| unread(pipe).ok()).unwrap_or_default());
        let mut tail = Tail::default();
        tail.push(&all);
        tail.last().to_vec()
    }

    /// Length of the file.
    pub fn length(&self) -> u64 {
        let length =
            self.with(|file| rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0)));
        length.unwrap_or(0)
    }

    /// Seeks in the file. False if that is not possible.
    pub fn seek(&self, to: SeekFrom) -> bool {
        self.with(|file| rustix::fs::seek(file, to).is_ok()).unwrap_or(false)
    }

    /// Takes the descriptor, to be closed; `None` if that has happened before.
    pub fn take(&self) -> Option<OwnedFd> {
        self.inner.lock().open.take()
    }
}

/// Copies the content of a pipe without taking it out. Only its beginning, if the user may have no second pipe as large.
fn unread(pipe: &OwnedFd) -> Result<Vec<u8>, Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
    let length = tee(pipe, &write, PIPE_BYTES, SpliceFlags::NONBLOCK)?;
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match rustix::io::read(&read, &mut bytes[filled..])? {
            0 => break,
            more => filled += more,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::super::lines::TAIL_BYTES;
    use super::*;

    #[test]
    fn the_last_bytes_are_what_was_read_and_what_is_still_in_the_pipe() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let end = ReadEnd::new(read);
        rustix::io::write(&write, b"one ").unwrap();
        assert_eq!(end.read(&mut [0; 64], true), Some(Ok(4)));
        rustix::io::write(&write, b"two").unwrap();
        assert_eq!(end.last_bytes(), b"one two");
        assert_eq!(end.last_bytes(), b"one two", "nothing was taken");
        assert_eq!(end.read(&mut [0; 64], true), Some(Ok(3)));
        drop(end.take());
        assert_eq!(end.last_bytes(), b"one two");
        assert_eq!(end.read(&mut [0; 64], true), None);
    }

    #[test]
    fn of_a_full_pipe_the_end_is_known() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        while rustix::io::write(&write, &[b'.'; 4096]).is_ok() {}
        let mut first = [0; 8];
        rustix::io::read(&read, &mut first).unwrap();
        let end = ReadEnd::new(read);
        assert_eq!(end.last_bytes(), [b'.'; TAIL_BYTES]);
    }
}
