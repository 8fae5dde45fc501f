//! One output stream of one worker, from its pipe to its destinations.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::super::lines::{Lines, Part};
use super::super::prefix::Prefix;
use super::super::spawn::{PIPE_BYTES, Reading, Stage, StartError};
use super::super::spec::Copies;
use super::Shown;
use super::read_end::ReadEnd;
use super::sink::{LogFile, Sink};

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

pub(super) struct Stream {
    local_rank: u32,
    which: Which,
    read_end: Arc<ReadEnd>,
    /// The inotify watch on the file that is read; `None` for a pipe.
    watch: Option<i32>,
    /// Bytes of the file that have been read.
    read_bytes: u64,
    /// The file into which the bytes of a pipe are copied.
    file: Option<LogFile>,
    console: bool,
    prefix: Option<Prefix>,
    lines: Lines,
}

/// The result of one read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Copied {
    Some(usize),
    Nothing,
    Ended,
}

impl Stream {
    /// Opens the destination file of a stream that comes from a pipe.
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
            read_end: Arc::new(ReadEnd::new(reading)),
            watch,
            read_bytes: 0,
            file,
            console: copies.console,
            prefix: copies.prefix.map(|prefix| Prefix::new(prefix.into_bytes(), local_rank.into())),
            lines: Lines::default(),
        })
    }

    /// The pipe that is read, if the stream comes from one.
    pub fn pipe(&self) -> Option<&Arc<ReadEnd>> {
        self.watch.is_none().then_some(&self.read_end)
    }

    /// The inotify watch on the file that is read.
    pub fn watch(&self) -> Option<i32> {
        self.watch
    }

    /// Upper bound on the unread bytes that were written before now.
    pub fn enough(&self) -> u64 {
        match self.watch {
            Some(_) => self.read_end.length().saturating_sub(self.read_bytes),
            // A pipe has at most this size. Twice, for bytes that are written while it is read.
            None => 2 * PIPE_BYTES as u64,
        }
    }

    pub fn local_rank(&self) -> u32 {
        self.local_rank
    }

    pub fn which(&self) -> Which {
        self.which
    }

    /// Reads once and copies it.
    pub fn copy(&mut self, buffer: &mut [u8], sink: &mut Sink) -> Copied {
        if self.watch.is_some() && !(self.console && sink.is_wanted()) {
            self.skip();
        }
        // The end of a file can be read from the file.
        let keeps_tail = self.which == Which::Stderr && self.watch.is_none();
        match self.read_end.read(buffer, keeps_tail) {
            None => Copied::Ended,
            // The end of a file is only the writer's present position.
            Some(Ok(0)) => {
                if self.watch.is_some() {
                    Copied::Nothing
                } else {
                    Copied::Ended
                }
            }
            Some(Ok(read)) => {
                self.read_bytes += read as u64;
                self.pass_on(&buffer[..read], sink);
                Copied::Some(read)
            }
            Some(Err(Errno::AGAIN | Errno::INTR)) => Copied::Nothing,
            Some(Err(error)) => {
                let local_rank = self.local_rank;
                tracing::error!(local_rank, %error, "the output of a worker can no longer be read: the rest of it is lost, and its next print may fail");
                Copied::Ended
            }
        }
    }

    /// Skips to the end of a file that nothing is shown of: reading gigabytes would delay the worker's end.
    fn skip(&mut self) {
        let end = self.read_end.length();
        if end > self.read_bytes && self.read_end.seek(SeekFrom::Start(end)) {
            self.read_bytes = end;
        }
    }

    /// Set how output is shown from now on. A line that has begun ends with the prefix that it began with.
    pub fn set_shown(&mut self, shown: &Shown, sink: &mut Sink) {
        let prefix =
            shown.prefix.as_ref().filter(|prefix| self.prefix.is_some() && self.prefix.as_ref() != Some(*prefix));
        if self.console && (!shown.console || prefix.is_some()) {
            self.end_line(sink);
        }
        self.console = shown.console;
        if let Some(prefix) = prefix {
            self.prefix = Some(prefix.clone());
        }
    }

    fn end_line(&mut self, sink: &mut Sink) {
        let (stream_id, prefix) = (self.stream_id(), self.prefix.as_ref());
        self.lines.finish(|part| give(sink, self.console, prefix, stream_id, &part));
        sink.flush();
    }

    /// Writes a last line without an end. Returns the descriptor to be closed; `None` if that has happened before.
    pub fn finish(&mut self, sink: &mut Sink) -> Option<OwnedFd> {
        let ended = self.read_end.take()?;
        self.end_line(sink);
        self.file = None;
        Some(ended)
    }

    fn pass_on(&mut self, bytes: &[u8], sink: &mut Sink) {
        if let Some(file) = &mut self.file {
            file.write(bytes);
        }
        if !self.console {
            return;
        }
        let prints = self.prefix.is_some();
        if !prints {
            sink.print(bytes);
        }
        if prints || sink.filters() {
            let (stream_id, prefix) = (self.stream_id(), self.prefix.as_ref());
            self.lines.feed(bytes, |part| give(sink, true, prefix, stream_id, &part));
            sink.flush();
        }
        if prints {
            self.lines.written(Instant::now());
        }
    }

    /// When text that has no end of its line is to be shown, if there is such text.
    pub fn next_show(&self) -> Option<Instant> {
        self.lines.show_at()
    }

    /// Shows text that has no end of its line.
    pub fn show(&mut self, sink: &mut Sink) {
        let stream_id = self.stream_id();
        if let Some(prefix) = &self.prefix {
            sink.push_open(prefix, stream_id, self.lines.show());
            sink.flush();
        }
    }

    /// Its number among all streams of the group.
    fn stream_id(&self) -> u64 {
        u64::from(self.local_rank) * 2 + self.which as u64
    }
}

/// Passes on a part of a stream. Without a prefix the console has got its bytes already.
fn give(sink: &mut Sink, console: bool, prefix: Option<&Prefix>, stream_id: u64, part: &Part<'_>) {
    if let Some(prefix) = prefix.filter(|_| console) {
        sink.push(prefix, stream_id, part);
    }
    sink.filter(prefix.map(Prefix::plain).unwrap_or_default(), part);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::super::super::consoles::Consoles;
    use super::super::super::spec::Copies;
    use super::super::progress::ProgressLog;
    use super::*;

    #[test]
    fn a_file_behind_a_console_that_is_gone_is_not_read() {
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
        assert_eq!(stream.enough(), 1 << 20);
        assert_eq!(stream.copy(&mut buffer, &mut sink), Copied::Nothing);
        assert_eq!(stream.enough(), 0);
    }

    #[test]
    fn a_console_gets_what_is_printed_while_it_shows_the_stream() {
        for prefix in [None, Some("P".to_owned())] {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
            let mut printed = File::from(write);
            let copies = Copies { console: false, prefix: prefix.clone(), file: None };
            let reading = Reading::Pipe(read);
            let mut stream = Stream::open(Source { local_rank: 0, which: Which::Stdout, reading, copies }).unwrap();
            let (theirs, console) = rustix::pipe::pipe().unwrap();
            let mut sink = Sink::new(console, None);
            let mut buffer = vec![0; 4096];
            let mut print = |stream: &mut Stream, sink: &mut Sink, text: &str| {
                printed.write_all(text.as_bytes()).unwrap();
                assert_eq!(stream.copy(&mut buffer, sink), Copied::Some(text.len()));
            };
            print(&mut stream, &mut sink, "another rank's\nhalf of a line");
            let as_before = |console| Shown { console, prefix: None };
            stream.set_shown(&as_before(true), &mut sink);
            print(&mut stream, &mut sink, "rank 0's\nits last");
            let other = Some(Prefix::new(b"Q".to_vec(), 1));
            stream.set_shown(&Shown { console: true, prefix: other }, &mut sink);
            print(&mut stream, &mut sink, "of another place\n");
            stream.set_shown(&as_before(false), &mut sink);
            print(&mut stream, &mut sink, "another rank's again\n");
            stream.finish(&mut sink);
            drop(sink);
            let shown = std::io::read_to_string(File::from(theirs)).unwrap();
            let expected =
                prefix.map_or("rank 0's\nits lastof another place\n", |_| "Prank 0's\nPits last\nQof another place\n");
            assert_eq!(shown, expected);
        }
    }

    #[test]
    fn lines_that_show_progress_are_seen_with_and_without_a_prefix_even_if_the_console_is_gone() {
        for prefix in [None, Some("P".to_owned())] {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
            let mut printed = File::from(write);
            let copies = Copies { console: true, prefix, file: None };
            let source = Source { local_rank: 0, which: Which::Stdout, reading: Reading::Pipe(read), copies };
            let mut stream = Stream::open(source).unwrap();
            let log = Arc::new(ProgressLog::new("^step".parse().unwrap()));
            let gone = || rustix::pipe::pipe().unwrap().1;
            let consoles = Consoles { stdout: gone(), stderr: gone() };
            let [mut sink, _] = Sink::pair(consoles, [None, None], Some(&log));
            let mut buffer = vec![0; 4096];
            for (text, is_seen) in [("loading\nst", false), ("ep 1", false), ("\n", true)] {
                printed.write_all(text.as_bytes()).unwrap();
                stream.copy(&mut buffer, &mut sink);
                assert_eq!(log.last_ns() > 0, is_seen, "{text:?}");
            }
            let before = log.last_ns();
            printed.write_all(b"step 2\n").unwrap();
            stream.copy(&mut buffer, &mut sink);
            assert!(log.last_ns() > before && sink.is_wanted());
        }
    }
}
