//! Where lines go: a console, and a file of those that match.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use memchr::memmem::Finder;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::lines::Part;
use super::super::room::is_full;
use super::super::spawn::create;
use super::super::spec::Filter;

/// The console's side of one of the two streams, for all workers of a group. Writes only whole lines.
pub(super) struct Sink {
    /// `None` once it cannot be written any more.
    console: Option<File>,
    filtered: Option<Filtered>,
    /// Lines of one read, written at once.
    out: Vec<u8>,
}

impl Sink {
    pub fn new(console: OwnedFd, filtered: Option<Filtered>) -> Sink {
        Sink { console: Some(console.into()), filtered, out: Vec::new() }
    }

    /// Whether lines are looked at besides being printed.
    pub fn filters(&self) -> bool {
        self.filtered.is_some()
    }

    /// Whether anybody gets to see what this takes.
    pub fn is_wanted(&self) -> bool {
        self.console.is_some() || self.filters()
    }

    /// Prints bytes as they are.
    pub fn print(&mut self, bytes: &[u8]) {
        write_console(&mut self.console, bytes);
    }

    /// Takes a part of a stream for the console; see [`flush`](Self::flush).
    pub fn push(&mut self, prefix: &[u8], part: &Part<'_>) {
        match part {
            Part::Newline => self.out.push(b'\n'),
            Part::Line(line) => {
                self.out.extend_from_slice(prefix);
                self.out.extend_from_slice(line);
            }
            Part::Unended(line) => {
                self.out.extend_from_slice(prefix);
                self.out.extend_from_slice(line);
                self.out.push(b'\n');
            }
        }
        if self.out.len() >= FLUSH_BYTES {
            self.flush();
        }
    }

    /// Looks whether the part belongs into the filter's file.
    pub fn filter(&mut self, prefix: &[u8], part: &Part<'_>) {
        if let (Some(filtered), Part::Line(line) | Part::Unended(line)) = (&mut self.filtered, part) {
            filtered.push(prefix, line);
        }
    }

    /// Writes what was pushed.
    pub fn flush(&mut self) {
        if !self.out.is_empty() {
            write_console(&mut self.console, &self.out);
            self.out.clear();
            self.out.shrink_to(FLUSH_BYTES * 2);
        }
        if let Some(filtered) = &mut self.filtered {
            filtered.flush();
        }
    }
}

/// Short lines with long prefixes make more than was read; this bounds it.
const FLUSH_BYTES: usize = 256 << 10;

/// A file that the agent writes. Once it cannot be written any more (a full disk) it is given up, loudly: workers go on.
pub(super) struct LogFile {
    path: PathBuf,
    /// `None` once it is given up.
    open: Option<File>,
}

impl LogFile {
    /// Errors if it cannot be made for another reason than a full disk.
    pub fn create(path: &Path) -> io::Result<LogFile> {
        let mut file = LogFile { path: path.to_owned(), open: None };
        match create(path) {
            Ok(open) => file.open = Some(open),
            Err(error) if is_full(&error) => file.give_up(&error),
            Err(error) => return Err(error),
        }
        Ok(file)
    }

    /// Writes all of it, if it can.
    pub fn write(&mut self, bytes: &[u8]) {
        if let Some(open) = &mut self.open
            && let Err(error) = open.write_all(bytes)
        {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        let path = self.path.display();
        tracing::error!("log file `{path}` cannot be written: {error}; it lacks what follows, and workers go on");
        self.open = None;
    }
}

/// A filter's file.
pub(super) struct Filtered {
    file: LogFile,
    texts: Vec<Finder<'static>>,
    out: Vec<u8>,
}

impl Filtered {
    pub fn create(filter: &Filter) -> io::Result<Filtered> {
        let texts = filter.texts.iter().map(|text| Finder::new(text.as_bytes()).into_owned()).collect();
        Ok(Filtered { file: LogFile::create(&filter.file)?, texts, out: Vec::new() })
    }

    fn push(&mut self, prefix: &[u8], line: &[u8]) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if self.texts.iter().any(|text| text.find(line).is_some()) {
            self.out.extend_from_slice(prefix);
            self.out.extend_from_slice(line);
            self.out.push(b'\n');
        }
    }

    fn flush(&mut self) {
        self.file.write(&self.out);
        self.out.clear();
        self.out.shrink_to(FLUSH_BYTES);
    }
}

fn write_console(console: &mut Option<File>, mut bytes: &[u8]) {
    while let (Some(open), false) = (console.as_mut(), bytes.is_empty()) {
        match open.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Whoever shares the terminal with us may have made it non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(&*open, PollFlags::OUT)], None);
            }
            Err(error) => {
                tracing::warn!(%error, "the console can no longer be written; workers' output goes to files alone");
                *console = None;
            }
        }
    }
}
