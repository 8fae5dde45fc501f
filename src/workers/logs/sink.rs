//! The destinations of lines: a console, and a file of the lines that match a filter.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memchr::memmem::Finder;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::consoles::Consoles;
use super::super::lines::{OpenLine, Part, append_open};
use super::super::prefix::{Prefix, shows_colours};
use super::super::room::is_full;
use super::super::spawn::create;
use super::super::spec::Filter;
use super::progress::ProgressLog;

/// The console's side of one of the two streams, for all workers of a group. Writes only whole lines.
pub(crate) struct Sink {
    /// `None` once it cannot be written any more.
    console: Option<File>,
    colours: bool,
    /// Bytes that the console did not take, because it is a file on a full disk.
    lost_bytes: u64,
    /// The line there that has no end yet. Both streams may have one console.
    open: Arc<Mutex<OpenLine>>,
    filtered: Option<Filtered>,
    progress: Option<Arc<ProgressLog>>,
    /// The lines of one read, which are written at once.
    out: Vec<u8>,
}

impl Sink {
    pub fn new(console: OwnedFd, filtered: Option<Filtered>) -> Sink {
        let colours = shows_colours(&console);
        Sink {
            console: Some(console.into()),
            colours,
            lost_bytes: 0,
            open: Arc::default(),
            filtered,
            progress: None,
            out: Vec::new(),
        }
    }

    /// The sinks of standard output and standard error.
    pub fn pair(
        consoles: Consoles,
        [stdout, stderr]: [Option<Filtered>; 2],
        progress: Option<&Arc<ProgressLog>>,
    ) -> [Sink; 2] {
        let is_one = consoles.are_one();
        let (mut stdout, mut stderr) = (Sink::new(consoles.stdout, stdout), Sink::new(consoles.stderr, stderr));
        if is_one {
            stderr.open = stdout.open.clone();
        }
        (stdout.progress, stderr.progress) = (progress.cloned(), progress.cloned());
        [stdout, stderr]
    }

    /// Whether the console shows colours.
    pub fn colours(&self) -> bool {
        self.colours
    }

    /// Whether lines are looked at besides being printed.
    pub fn filters(&self) -> bool {
        self.filtered.is_some() || self.progress.is_some()
    }

    /// Whether the output is shown or filtered at all.
    pub fn is_wanted(&self) -> bool {
        self.console.is_some() || self.filters()
    }

    /// Prints bytes as they are.
    pub fn print(&mut self, bytes: &[u8]) {
        write_console(&mut self.console, &mut self.lost_bytes, bytes);
    }

    /// Takes a part of a stream for the console; see [`flush`](Self::flush). `stream_id` is the stream.
    pub fn push(&mut self, prefix: &Prefix, stream_id: u64, part: &Part<'_>) {
        part.append_to(&mut self.out, prefix.shown(self.colours), stream_id, &mut self.open.lock());
        if self.out.len() >= FLUSH_BYTES {
            self.flush();
        }
    }

    /// Takes the beginning of a line that has no end yet. `continues`: more of it was shown before.
    pub fn push_open(&mut self, prefix: &Prefix, stream_id: u64, (text, continues): (&[u8], bool)) {
        append_open(text, continues, &mut self.out, prefix.shown(self.colours), stream_id, &mut self.open.lock());
    }

    /// Looks whether the part belongs into the filter's file, and whether it shows progress.
    pub fn filter(&mut self, prefix: &[u8], part: &Part<'_>) {
        let (Part::Line(line, _) | Part::Unended(line, _)) = part else { return };
        if let Some(filtered) = &mut self.filtered {
            filtered.push(prefix, line);
        }
        if let Some(progress) = &self.progress {
            progress.on_line(line);
        }
    }

    /// Writes what was pushed.
    pub fn flush(&mut self) {
        if !self.out.is_empty() {
            write_console(&mut self.console, &mut self.lost_bytes, &self.out);
            self.out.clear();
            self.out.shrink_to(FLUSH_BYTES * 2);
        }
        if let Some(filtered) = &mut self.filtered {
            filtered.flush();
        }
    }
}

/// Bound on buffered output: short lines with long prefixes make more than was read.
const FLUSH_BYTES: usize = 256 << 10;

/// A file that the agent writes. Bytes that cannot be written are lost, which is logged, and workers go on. The file is given up
/// for good, unless the disk is full, which may pass.
pub(super) struct LogFile {
    path: PathBuf,
    /// `None` once it is given up.
    open: Option<File>,
    lost_bytes: u64,
}

impl LogFile {
    /// # Errors
    /// The file cannot be made, for another reason than a full disk.
    pub fn create(path: &Path) -> io::Result<LogFile> {
        let mut file = LogFile { path: path.to_owned(), open: None, lost_bytes: 0 };
        match create(path) {
            Ok(open) => file.open = Some(open),
            Err(error) if is_full(&error) => file.give_up(&error),
            Err(error) => return Err(error),
        }
        Ok(file)
    }

    /// Writes all bytes, if possible.
    pub fn write(&mut self, bytes: &[u8]) {
        let (Some(open), false) = (&mut self.open, bytes.is_empty()) else { return };
        let path = self.path.display();
        match open.write_all(bytes) {
            Ok(()) => match std::mem::take(&mut self.lost_bytes) {
                0 => {}
                lost => {
                    tracing::warn!("log file `{path}` can be written again; up to {lost} bytes of output were lost")
                }
            },
            Err(error) if is_full(&error) => {
                if self.lost_bytes == 0 {
                    tracing::error!(
                        "log file `{path}` cannot be written: {error}; output is lost until there is room, and workers go on"
                    );
                }
                self.lost_bytes += bytes.len() as u64;
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        let path = self.path.display();
        tracing::error!("log file `{path}` cannot be written: {error}; further output is lost, and workers go on");
        self.open = None;
    }
}

/// A filter's file.
pub(crate) struct Filtered {
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

fn write_console(console: &mut Option<File>, lost_bytes: &mut u64, mut bytes: &[u8]) {
    while let (Some(open), false) = (console.as_mut(), bytes.is_empty()) {
        match open.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            // The console is a file, whose disk may have room later.
            Err(error) if is_full(&error) => {
                if *lost_bytes == 0 {
                    tracing::error!(
                        "the console cannot be written: {error}; workers' output is lost until there is room"
                    );
                }
                *lost_bytes += bytes.len() as u64;
                return;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Another process that shares the terminal may have made it non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(&*open, PollFlags::OUT)], None);
            }
            Err(error) => {
                tracing::warn!(%error, "the console can no longer be written; workers' output is no longer shown there");
                *console = None;
            }
        }
    }
    if console.is_some() && *lost_bytes > 0 {
        tracing::warn!("the console's disk has room again; {lost_bytes} bytes of workers' output are missing there");
        *lost_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::ptr;

    use super::*;

    /// A file system of 64 KiB that only this thread sees. `None` where that is not permitted.
    fn small_disk(name: &str) -> Option<PathBuf> {
        let folder = std::env::temp_dir().join(format!("elastic_rs-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = CString::new(folder.as_os_str().as_bytes()).unwrap();
        // SAFETY: system calls on valid strings; the namespace is this thread's alone, and ends with it.
        let mounted = unsafe {
            let private = libc::MS_REC | libc::MS_PRIVATE;
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(c"none".as_ptr(), c"/".as_ptr(), ptr::null(), private, ptr::null()) == 0
                && libc::mount(c"none".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=64k".as_ptr().cast()) == 0
        };
        if !mounted {
            fs::remove_dir(&folder).unwrap();
            eprintln!("not tested: file systems cannot be mounted here");
        }
        mounted.then_some(folder)
    }

    #[test]
    fn files_and_consoles_go_on_once_a_full_disk_has_room_again() {
        let in_a_thread_of_its_own = std::thread::spawn(|| {
            let Some(disk) = small_disk("room-again") else { return };
            let (other, log, console) = (disk.join("other"), disk.join("log"), disk.join("console"));
            let mut file = LogFile::create(&log).unwrap();
            let mut sink = Sink::new(create(&console).unwrap().into(), None);
            let filled = fs::write(&other, vec![0; 1 << 17]).unwrap_err();
            assert!(is_full(&filled), "{filled}");
            file.write(b"lost\n");
            sink.print(b"lost\n");
            assert_eq!((file.lost_bytes, sink.lost_bytes), (5, 5));
            fs::remove_file(&other).unwrap();
            file.write(b"kept\n");
            sink.print(b"kept\n");
            assert_eq!((file.lost_bytes, sink.lost_bytes), (0, 0));
            for path in [log, console] {
                assert_eq!(fs::read_to_string(path).unwrap(), "kept\n");
            }
            let path = CString::new(disk.as_os_str().as_bytes()).unwrap();
            // SAFETY: a system call on a valid string.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
            fs::remove_dir(&disk).unwrap();
        });
        in_a_thread_of_its_own.join().unwrap();
    }
}
