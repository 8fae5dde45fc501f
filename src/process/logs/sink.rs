//! Where lines go: a console, and a file of those that match.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use memchr::memmem::Finder;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::lines::Part;
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

/// A filter's file.
pub(super) struct Filtered {
    file: Option<File>,
    texts: Vec<Finder<'static>>,
    out: Vec<u8>,
}

impl Filtered {
    pub fn create(filter: &Filter) -> io::Result<Filtered> {
        let texts = filter.texts.iter().map(|text| Finder::new(text.as_bytes()).into_owned()).collect();
        Ok(Filtered { file: Some(create(&filter.file)?), texts, out: Vec::new() })
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
        write_file(&mut self.file, &self.out);
        self.out.clear();
        self.out.shrink_to(FLUSH_BYTES);
    }
}

/// Writes all of it. A file that cannot be written (a full disk) is given up, once and loudly: the worker should go on.
pub(super) fn write_file(file: &mut Option<File>, bytes: &[u8]) {
    let Some(open) = file else { return };
    if let Err(error) = open.write_all(bytes) {
        tracing::error!(%error, "a log file can no longer be written; what follows is missing from it");
        *file = None;
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
