//! One output stream of one worker, from its pipe to its destinations.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::super::lines::{Lines, Part, Tail};
use super::super::spawn::{PIPE_BYTES, Stage, StartError, create};
use super::sink::{Sink, write_file};
use super::{Source, Which};

pub(super) struct Stream {
    local_rank: u32,
    which: Which,
    /// `None` once ended.
    pipe: Option<OwnedFd>,
    file: Option<File>,
    console: bool,
    prefix: Option<Vec<u8>>,
    lines: Lines,
    tail: Tail,
}

/// What one read gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Copied {
    Some(usize),
    Nothing,
    Ended,
}

impl Stream {
    /// Opens the file that the stream goes to.
    pub fn open(source: Source) -> Result<Stream, StartError> {
        let Source { local_rank, which, pipe, copies } = source;
        let error = |error| StartError::new(local_rank, Stage::Stream(copies.file.clone().unwrap_or_default()), error);
        let file = copies.file.as_deref().map(create).transpose().map_err(error)?;
        Ok(Stream {
            local_rank,
            which,
            pipe: Some(pipe),
            file,
            console: copies.console,
            prefix: copies.prefix.map(String::into_bytes),
            lines: Lines::default(),
            tail: Tail::default(),
        })
    }

    pub fn pipe(&self) -> Option<&OwnedFd> {
        self.pipe.as_ref()
    }

    pub fn local_rank(&self) -> u32 {
        self.local_rank
    }

    pub fn which(&self) -> Which {
        self.which
    }

    /// The last of what was read; kept for standard error alone.
    pub fn tail(&self) -> &[u8] {
        self.tail.last()
    }

    /// Reads once and copies it.
    pub fn copy(&mut self, buffer: &mut [u8], sink: &mut Sink) -> Copied {
        let Some(pipe) = &self.pipe else { return Copied::Ended };
        match rustix::io::read(pipe, &mut *buffer) {
            Ok(0) => Copied::Ended,
            Ok(read) => {
                self.pass_on(&buffer[..read], sink);
                Copied::Some(read)
            }
            Err(Errno::AGAIN | Errno::INTR) => Copied::Nothing,
            Err(error) => {
                tracing::error!(local_rank = self.local_rank, %error, "a worker's output can no longer be read");
                Copied::Ended
            }
        }
    }

    /// Reads what was written before this call; of what others write meanwhile no more than a pipe holds.
    pub fn copy_what_is_there(&mut self, buffer: &mut [u8], sink: &mut Sink) {
        let mut copied = 0;
        while let Copied::Some(read) = self.copy(buffer, sink) {
            copied += read;
            if copied >= 2 * PIPE_BYTES {
                return;
            }
        }
    }

    /// Passes on an unended last line. Gives the pipe, to be closed; `None` if that has happened before.
    pub fn finish(&mut self, sink: &mut Sink) -> Option<OwnedFd> {
        let pipe = self.pipe.take()?;
        let prefix = self.prefix.as_deref().unwrap_or_default();
        let prints = self.console && self.prefix.is_some();
        self.lines.finish(|part| give(sink, prints, prefix, &part));
        sink.flush();
        self.file = None;
        Some(pipe)
    }

    fn pass_on(&mut self, bytes: &[u8], sink: &mut Sink) {
        write_file(&mut self.file, bytes);
        if self.which == Which::Stderr {
            self.tail.push(bytes);
        }
        if !self.console {
            return;
        }
        let prints = self.prefix.is_some();
        if !prints {
            sink.print(bytes);
        }
        if prints || sink.filters() {
            let prefix = self.prefix.as_deref().unwrap_or_default();
            self.lines.feed(bytes, |part| give(sink, prints, prefix, &part));
            sink.flush();
        }
    }
}

fn give(sink: &mut Sink, prints: bool, prefix: &[u8], part: &Part<'_>) {
    if prints {
        sink.push(prefix, part);
    }
    sink.filter(prefix, part);
}
