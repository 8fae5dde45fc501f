//! One output stream of one worker, from its pipe to its destinations.

use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::super::lines::{Lines, Part, TAIL_BYTES, Tail};
use super::super::spawn::{PIPE_BYTES, Reading, Stage, StartError};
use super::sink::{LogFile, Sink};
use super::{Source, Which};

pub(super) struct Stream {
    local_rank: u32,
    which: Which,
    /// `None` once ended.
    reading: Option<OwnedFd>,
    /// The number of the watch on the file that is read; `None` for a pipe.
    watch: Option<i32>,
    /// How far a file has been read.
    read_bytes: u64,
    /// What comes out of a pipe is written here.
    file: Option<LogFile>,
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
    /// Opens the file that the stream goes to, if it comes from a pipe.
    pub fn open(source: Source) -> Result<Stream, StartError> {
        let Source { local_rank, which, reading, copies } = source;
        let (reading, watch, path) = match reading {
            Reading::Pipe(pipe) => (pipe, None, copies.file),
            Reading::File(file, number) => (file, Some(number), None),
        };
        let error = |error| StartError::new(local_rank, Stage::Stream(path.clone().unwrap_or_default()), error);
        let file = path.as_deref().map(LogFile::create).transpose().map_err(error)?;
        Ok(Stream {
            local_rank,
            which,
            reading: Some(reading),
            watch,
            read_bytes: 0,
            file,
            console: copies.console,
            prefix: copies.prefix.map(String::into_bytes),
            lines: Lines::default(),
            tail: Tail::default(),
        })
    }

    /// The pipe that is read, if it is one that has not ended.
    pub fn pipe(&self) -> Option<&OwnedFd> {
        self.reading.as_ref().filter(|_| self.watch.is_none())
    }

    /// The number of the watch on the file that is read.
    pub fn watch(&self) -> Option<i32> {
        self.watch
    }

    /// How much there can be that was written before now.
    pub fn enough(&self) -> u64 {
        match (&self.reading, self.watch) {
            (Some(file), Some(_)) => length_of(file).saturating_sub(self.read_bytes),
            // Nobody can make it larger than this unnoticed; twice, for what is written while it is read.
            _ => 2 * PIPE_BYTES as u64,
        }
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
        if self.watch.is_some() && !sink.is_wanted() {
            self.skip();
        }
        let Some(reading) = &self.reading else { return Copied::Ended };
        match rustix::io::read(reading, &mut *buffer) {
            // The end of a file is only where its writer is.
            Ok(0) => {
                if self.watch.is_some() {
                    Copied::Nothing
                } else {
                    Copied::Ended
                }
            }
            Ok(read) => {
                self.read_bytes += read as u64;
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

    /// Goes to the end of a file but for what its tail needs: reading gigabytes for nobody would hold up the worker's end.
    fn skip(&mut self) {
        let Some(file) = &self.reading else { return };
        let near_end = length_of(file).saturating_sub(TAIL_BYTES as u64);
        if near_end > self.read_bytes && rustix::fs::seek(file, SeekFrom::Start(near_end)).is_ok() {
            self.read_bytes = near_end;
        }
    }

    /// Passes on an unended last line. Gives what was read, to be closed; `None` if that has happened before.
    pub fn finish(&mut self, sink: &mut Sink) -> Option<OwnedFd> {
        let ended = self.reading.take()?;
        let prefix = self.prefix.as_deref().unwrap_or_default();
        let prints = self.console && self.prefix.is_some();
        self.lines.finish(|part| give(sink, prints, prefix, &part));
        sink.flush();
        self.file = None;
        Some(ended)
    }

    fn pass_on(&mut self, bytes: &[u8], sink: &mut Sink) {
        if let Some(file) = &mut self.file {
            file.write(bytes);
        }
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

fn length_of(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0))
}

fn give(sink: &mut Sink, prints: bool, prefix: &[u8], part: &Part<'_>) {
    if prints {
        sink.push(prefix, part);
    }
    sink.filter(prefix, part);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::super::super::spec::Copies;
    use super::*;

    #[test]
    fn a_file_behind_a_console_that_is_gone_is_not_read_but_for_its_tail() {
        let mut written: File = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        let read = File::open(format!("/proc/self/fd/{}", written.as_raw_fd())).unwrap();
        let copies = Copies { console: true, prefix: Some("P".to_owned()), file: None };
        let reading = Reading::File(read.into(), 1);
        let mut stream = Stream::open(Source { local_rank: 0, which: Which::Stderr, reading, copies }).unwrap();
        let (theirs, console) = rustix::pipe::pipe().unwrap();
        let mut sink = Sink::new(console, None);
        let mut buffer = vec![0; 4096];

        written.write_all(b"first\n").unwrap();
        assert_eq!(stream.copy(&mut buffer, &mut sink), Copied::Some(6));
        drop(theirs);
        written.write_all(b"this one finds the console gone\n").unwrap();
        assert_eq!(stream.copy(&mut buffer, &mut sink), Copied::Some(32));
        written.write_all(&vec![b'\n'; 1 << 20]).unwrap();
        written.write_all(b"the cause\n").unwrap();
        let mut reads = 0;
        while stream.copy(&mut buffer, &mut sink) != Copied::Nothing {
            reads += 1;
        }
        assert_eq!(reads, TAIL_BYTES / buffer.len());
        assert_eq!(stream.tail().len(), TAIL_BYTES);
        assert!(stream.tail().ends_with(b"\n\nthe cause\n"));
        assert_eq!(stream.enough(), 0);
    }
}
