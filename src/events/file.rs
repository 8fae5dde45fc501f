//! A file of events, written by a dedicated thread that may hang. Whoever has events never waits for it.
//!
//! Lines wait in a bounded queue. Those that find no room, and those that cannot be written (a full disk), are dropped and counted. The
//! next line that can be written is preceded by an event of type `dropped` with their number.

use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use super::line::line;
use super::record::{Kind, Number, Record};
use crate::threads;

/// Longest a file becomes. It is then renamed to `NAME.1`, in the place of the one before, and begun again.
pub const FILE_BYTES: u64 = 64 << 20;
/// Longest that the end of a process waits for its last lines to be written. Only a folder that hangs takes as long.
pub const LAST_LINES: Duration = Duration::from_secs(2);
/// Most bytes that wait to be written.
const QUEUE_BYTES: usize = 4 << 20;

/// A file of events. Clones write to the same file. What is queued when the last one is dropped is still written.
#[derive(Clone, Debug)]
pub struct EventFile(Arc<Open>);

/// Its thread ends once this is dropped.
#[derive(Debug)]
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to write, or something was written.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Queued>,
    bytes: usize,
    /// Lines that found no room.
    dropped: u64,
    /// The thread is writing what it took from the queue.
    writing: bool,
    closed: bool,
}

impl Shared {
    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

/// An event's line and its run.
#[derive(Debug)]
struct Queued {
    line: Arc<str>,
    run_id: Arc<str>,
}

/// The writing thread's state.
struct Writer {
    path: PathBuf,
    limit: u64,
    file: Option<File>,
    /// Only a part of the last line could be written.
    torn: bool,
    /// Lines that were dropped, and that no `dropped` counts yet.
    lost: u64,
    /// Number of `dropped` written.
    reported: u64,
    /// Names the origin of these.
    origin: String,
    began: Instant,
}

impl EventFile {
    /// Append to the file at `path`, whose events are of `origin`. The file is created when there is something to write.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn open(path: &Path, origin: &str) -> io::Result<Self> {
        Self::limited(path, origin, FILE_BYTES)
    }

    fn limited(path: &Path, origin: &str, limit: u64) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (path, origin) = (path.to_owned(), format!("{origin}-file"));
        let writer =
            Writer { path, limit, file: None, torn: false, lost: 0, reported: 0, origin, began: Instant::now() };
        let own = Arc::clone(&shared);
        threads::spawn("events-file".to_owned(), move || write_all(&own, writer))?;
        Ok(Self(Arc::new(Open(shared))))
    }

    /// Have a line written, without its end. Never waits. `missed` events before it were dropped already.
    pub fn push(&self, run_id: &Arc<str>, line: Arc<str>, missed: u64) {
        let mut state = self.shared().state.lock();
        state.dropped += missed;
        if state.closed || state.bytes + line.len() > QUEUE_BYTES {
            state.dropped += 1;
            return;
        }
        state.bytes += line.len();
        state.queue.push_back(Queued { line, run_id: Arc::clone(run_id) });
        drop(state);
        self.shared().changed.notify_all();
    }

    fn shared(&self) -> &Shared {
        &self.0.0
    }

    /// Wait until everything is written, at most `limit`. Returns whether it is. Nothing more is written afterwards.
    pub fn finish(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        self.shared().close();
        let mut state = self.shared().state.lock();
        while state.writing || !state.queue.is_empty() {
            if self.shared().changed.wait_until(&mut state, until).timed_out() {
                return !state.writing && state.queue.is_empty();
            }
        }
        true
    }
}

/// Write what is queued until the file is finished.
fn write_all(shared: &Shared, mut writer: Writer) {
    let mut state = shared.state.lock();
    loop {
        while state.queue.is_empty() && !state.closed {
            shared.changed.wait(&mut state);
        }
        let queue = std::mem::take(&mut state.queue);
        if queue.is_empty() {
            return;
        }
        writer.lost += std::mem::take(&mut state.dropped);
        (state.bytes, state.writing) = (0, true);
        drop(state);
        for queued in &queue {
            writer.write(queued);
        }
        state = shared.state.lock();
        state.writing = false;
        shared.changed.notify_all();
    }
}

impl Writer {
    fn write(&mut self, queued: &Queued) {
        if self.lost > 0 {
            let line = self.dropped(&queued.run_id);
            if self.append(&line).is_ok() {
                (self.lost, self.reported) = (0, self.reported + 1);
            }
        }
        if self.append(&queued.line).is_err() {
            self.lost += 1;
        }
    }

    /// Append one line. Another process may append to the same file: nothing that is in it is touched.
    fn append(&mut self, line: &str) -> io::Result<()> {
        self.make_room(line.len() as u64 + 1)?;
        let mut bytes = Vec::with_capacity(line.len() + 2);
        // What was left of a line that could not be written whole is no line.
        bytes.extend(self.torn.then_some(b'\n'));
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.open()?.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.torn |= rest.len() < bytes.len();
                    self.file = None;
                    return Err(error);
                }
            }
        }
        self.torn = false;
        Ok(())
    }

    /// Have the file open with room for so many bytes more. A full one is put aside, unless another process has done that already.
    fn make_room(&mut self, more: u64) -> io::Result<()> {
        loop {
            let open = self.open()?.metadata()?;
            if open.len() == 0 || open.len() + more <= self.limit {
                return Ok(());
            }
            self.file = None;
            let same = |there: Metadata| (there.dev(), there.ino()) == (open.dev(), open.ino());
            if std::fs::metadata(&self.path).is_ok_and(same) {
                std::fs::rename(&self.path, rotated(&self.path))?;
            }
        }
    }

    /// The file. Opened if it is not.
    fn open(&mut self) -> io::Result<&mut File> {
        match &mut self.file {
            Some(open) => Ok(open),
            closed => Ok(closed.insert(OpenOptions::new().create(true).append(true).open(&self.path)?)),
        }
    }

    /// The event with the number of dropped lines.
    fn dropped(&self, run_id: &str) -> Arc<str> {
        let record = Record {
            number: Number(self.reported + 1),
            causes: Vec::new(),
            round: 0,
            restart: 0,
            node: None,
            kind: Kind::Dropped { count: self.lost },
            text: None,
        };
        line(&record, run_id, &self.origin, self.began.elapsed(), SystemTime::now())
    }
}

/// The file that is full.
fn rotated(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    /// For a thread that writes to a folder of this machine.
    const PATIENCE: Duration = Duration::from_secs(30);

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("elastic_rs-events-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn push(file: &EventFile, line: &str) {
        file.push(&"job".into(), line.into(), 0);
    }

    #[test]
    fn lines_are_appended_and_a_full_file_is_put_aside() {
        let folder = folder("rotated");
        let path = folder.join("events.jsonl");
        fs::write(&path, "before\n").unwrap();
        let file = EventFile::limited(&path, "n1", 20).unwrap();
        for line in ["one", "twotwotwo", "three", "4"] {
            push(&file, line);
        }
        assert!(file.finish(PATIENCE));
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!((read(&rotated(&path)).as_str(), read(&path).as_str()), ("before\none\n", "twotwotwo\nthree\n4\n"));
        push(&file, "nobody reads this");
        assert!(file.finish(PATIENCE));
        assert_eq!(read(&path), "twotwotwo\nthree\n4\n");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn two_processes_that_append_to_one_file_lose_nothing() {
        let folder = folder("two");
        let path = folder.join("events.jsonl");
        let [one, two] = ["n1", "n2"].map(|origin| EventFile::limited(&path, origin, 30).unwrap());
        let push_and_wait = |file: &EventFile, line: &str| {
            push(file, line);
            let until = Instant::now() + PATIENCE;
            loop {
                let state = file.shared().state.lock();
                if !state.writing && state.queue.is_empty() || Instant::now() > until {
                    return;
                }
                drop(state);
                std::thread::yield_now();
            }
        };
        push_and_wait(&one, "aaaaaaaaaaaaaaaaaaaa");
        push_and_wait(&two, "b");
        push_and_wait(&one, "cccccccccc");
        push_and_wait(&two, "dddddddddd");
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let all = (read(&rotated(&path)), read(&path));
        fs::remove_dir_all(folder).unwrap();
        assert_eq!(all, ("aaaaaaaaaaaaaaaaaaaa\nb\n".to_owned(), "cccccccccc\ndddddddddd\n".to_owned()));
    }

    #[test]
    fn what_cannot_be_written_is_dropped_and_counted_once_it_can() {
        let folder = folder("dropped");
        let path = folder.join("later").join("events.jsonl");
        let file = EventFile::open(&path, "n1").unwrap();
        push(&file, "one");
        push(&file, "two");
        let settled = || {
            let state = file.shared().state.lock();
            !state.writing && state.queue.is_empty()
        };
        let until = Instant::now() + PATIENCE;
        while !settled() && Instant::now() < until {
            std::thread::yield_now();
        }
        fs::create_dir(folder.join("later")).unwrap();
        file.push(&"job".into(), "three".into(), 5);
        assert!(file.finish(PATIENCE));
        let text = fs::read_to_string(&path).unwrap();
        let (dropped, rest) = text.split_once('\n').unwrap();
        assert_eq!(rest, "three\n");
        let dropped: Value = serde_json::from_str(dropped).unwrap();
        let facts = [&dropped["type"], &dropped["data"]["count"], &dropped["id"], &dropped["run"]];
        assert_eq!(facts, [&json!("dropped"), &json!(7), &json!("n1-file.1"), &json!("job")]);
        fs::remove_dir_all(folder).unwrap();
    }

    /// The limit on the size of files stands for a full disk. `cargo nextest` gives each test a process of its own.
    #[test]
    fn a_full_disk_costs_nothing_that_another_process_has_appended() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let folder = folder("shared");
        let path = folder.join("events.jsonl");
        let file = EventFile::open(&path, "n1").unwrap();
        let settled = || {
            let state = file.shared().state.lock();
            !state.writing && state.queue.is_empty()
        };
        let push_and_wait = |line: &str| {
            push(&file, line);
            let until = Instant::now() + PATIENCE;
            while !settled() && Instant::now() < until {
                std::thread::yield_now();
            }
        };
        push_and_wait("one");
        let mut other = OpenOptions::new().append(true).open(&path).unwrap();
        other.write_all(b"other\n").unwrap();
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let before = getrlimit(Resource::Fsize);
        setrlimit(Resource::Fsize, Rlimit { current: Some(13), ..before }).unwrap();
        push_and_wait("two is torn");
        setrlimit(Resource::Fsize, before).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\nother\ntwo");
        push(&file, "three");
        assert!(file.finish(PATIENCE));
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.split('\n').collect();
        let [one, it, torn, dropped, three, ""] = lines[..] else { panic!("{text}") };
        assert_eq!([one, it, torn, three], ["one", "other", "two", "three"]);
        assert!(dropped.contains("\"type\":\"dropped\""), "{dropped}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_full_file_that_cannot_be_put_aside_does_not_grow() {
        let folder = folder("stuck");
        let path = folder.join("events.jsonl");
        fs::create_dir_all(rotated(&path).join("in the way")).unwrap();
        let file = EventFile::limited(&path, "n1", 20).unwrap();
        for _ in 0..100 {
            push(&file, "ten bytes");
        }
        assert!(file.finish(PATIENCE));
        assert_eq!(fs::read_to_string(&path).unwrap(), "ten bytes\n".repeat(2));
        fs::remove_dir_all(folder).unwrap();
    }

    /// A pipe that nobody reads stands for a folder that hangs.
    #[test]
    fn a_file_that_hangs_holds_up_nobody_and_takes_a_bounded_amount() {
        let folder = folder("hangs");
        let path = folder.join("events.jsonl");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if !made.is_ok_and(|status| status.success()) {
            return eprintln!("skipped: no mkfifo here");
        }
        let file = EventFile::open(&path, "n1").unwrap();
        let line = "x".repeat(1 << 20);
        push(&file, &line);
        let until = Instant::now() + PATIENCE;
        while !file.shared().state.lock().writing && Instant::now() < until {
            std::thread::yield_now();
        }
        // The thread waits for a reader of the pipe now.
        for _ in 0..20 {
            push(&file, &line);
        }
        let state = file.shared().state.lock();
        assert_eq!((state.bytes, state.dropped), (QUEUE_BYTES, 16));
        drop(state);
        assert!(!file.finish(Duration::from_millis(50)), "nobody reads");
        // The thread goes on with a reader, and ends.
        let reader = File::open(&path).unwrap();
        let reading = std::thread::spawn(move || io::copy(&mut { reader }, &mut io::sink()).unwrap());
        assert!(file.finish(PATIENCE));
        drop(file); // its end of the pipe is closed with the thread
        assert!(reading.join().unwrap() >= 1 << 20);
        fs::remove_dir_all(folder).unwrap();
    }
}
