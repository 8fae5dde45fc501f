//! A value that is read from files, and read again when one of them has changed.
//!
//! One thread looks at the files of all values, one after the other: they may be on another machine, which does not answer, and those
//! who ask also serve sessions. It looks when a value is asked for, and what it found is good for a while ([`GOOD_FOR`]), so that a
//! thousand connections look at the files a few times, and a process without new connections never does. Files that cannot be used
//! change nothing: the last good value stays, and the reason is logged once for each change.
//!
//! While a look hangs, its value stays as it was, and another thread looks at the other files in its place.

use std::collections::VecDeque;
use std::fmt;
use std::fs::Metadata;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::geteuid;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::error::ProtectionError;
use crate::at_once;
use crate::net::local_peers::is_unmapped;
use crate::threads;

/// How long what was found is good for, before the files are looked at again.
pub const GOOD_FOR: Duration = Duration::from_millis(100);
/// How long a look at the files is waited for.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// What others, and everybody but the owner who writes, may not do with a file that holds a secret.
const FORBIDDEN: u32 = 0o137;
const ROOT: u32 = 0;

/// What files hold.
pub(super) trait Content: Sized + Send + Sync + 'static {
    /// Which files.
    type Files: fmt::Debug + Send + Sync + 'static;
    /// What stays as it was when they cannot be used any more, as the end of a sentence.
    const KEPT: &'static str;

    /// Where they are.
    fn paths(files: &Self::Files) -> Vec<&Path>;

    /// Read them.
    fn read(files: &Self::Files) -> Result<Self, ProtectionError>;

    /// A sentence for the log, if this is not what they held `before`.
    fn news(&self, before: &Self, files: &Self::Files) -> Option<String>;

    /// What an operator has to know of it once it is in use is logged here.
    fn on_loaded(&self) {}
}

/// Files that are read again when they have changed.
pub(super) struct Watched<T: Content>(Arc<Inner<T>>);

struct Inner<T: Content> {
    files: T::Files,
    good_for: Duration,
    known: Mutex<Known<T>>,
}

struct Known<T> {
    /// The last that could be used.
    value: Arc<T>,
    /// The files shortly before `value` was read.
    stamps: Vec<Option<Stamp>>,
    /// The files, and why they could not be used, as it was logged last. `None`: `value` is what they hold.
    reported: Option<(Vec<Option<Stamp>>, String)>,
    /// The process whose thread looks at the files, or is about to. A forked one has no such thread.
    looking: Option<u32>,
    /// Notified once they have been looked at.
    waiting: Option<oneshot::Sender<()>>,
    looked_at: Instant,
}

impl<T: Content> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl<T: Content> Watched<T> {
    /// Read the files.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn open(files: T::Files, good_for: Duration) -> Result<Self, ProtectionError> {
        // Files that change while they are read are read again at the next look.
        let stamps = stamps::<T>(&files);
        let value = Arc::new(T::read(&files)?);
        value.on_loaded();
        let known = Known { value, stamps, reported: None, looking: None, waiting: None, looked_at: Instant::now() };
        Ok(Self(Arc::new(Inner { files, good_for, known: Mutex::new(known) })))
    }

    /// What the files held at the last look.
    pub fn last(&self) -> Arc<T> {
        Arc::clone(&self.0.known.lock().value)
    }

    /// What the files hold. If they cannot be used any more, or if they cannot be looked at within [`LOOK_LIMIT`], what they held
    /// before.
    pub async fn current(&self) -> Arc<T> {
        if let Some(looked) = self.0.begin_to_look() {
            match LOOKER.add(Arc::clone(&self.0) as Arc<dyn Look>) {
                Ok(()) if timeout(LOOK_LIMIT, looked).await.is_err() => LOOKER.replace_if_hung(),
                Ok(()) => {}
                Err(_) => self.0.end_look(),
            }
        }
        self.last()
    }
}

/// Files that are looked at on the common thread.
trait Look: Send + Sync {
    /// Look at them, and read them if they have changed.
    fn look(&self);
    /// The look is over, however it has ended.
    fn end_look(&self);
}

impl<T: Content> Inner<T> {
    /// Whether it is time to look, and nobody does. What is returned is notified once that is done.
    fn begin_to_look(&self) -> Option<oneshot::Receiver<()>> {
        let mut known = self.known.lock();
        let own = process::id();
        if known.looking == Some(own) || known.looked_at.elapsed() < self.good_for {
            return None;
        }
        let (done, looked) = oneshot::channel();
        (known.looking, known.waiting) = (Some(own), Some(done));
        Some(looked)
    }
}

impl<T: Content> Look for Inner<T> {
    fn look(&self) {
        let stamps = stamps::<T>(&self.files);
        let same = stamps.iter().all(Option::is_some) && stamps == self.known.lock().stamps;
        let read = || catch_unwind(AssertUnwindSafe(|| T::read(&self.files)));
        let failed = |_| Err(ProtectionError::Bug(format!("{:?}", self.files)));
        let found = (!same).then(|| read().unwrap_or_else(failed));
        let mut known = self.known.lock();
        match found {
            None => known.reported = None,
            Some(Ok(value)) => {
                if let Some(news) = value.news(&known.value, &self.files) {
                    tracing::info!("{news}");
                    value.on_loaded();
                    known.value = Arc::new(value);
                }
                (known.stamps, known.reported) = (stamps, None);
            }
            Some(Err(error)) => {
                let reported = Some((stamps, error.to_string()));
                if known.reported != reported {
                    tracing::warn!("{error}; {}", T::KEPT);
                    known.reported = reported;
                }
            }
        }
    }

    fn end_look(&self) {
        let mut known = self.known.lock();
        (known.looking, known.looked_at) = (None, Instant::now());
        if let Some(waiting) = known.waiting.take() {
            let _ = waiting.send(()); // nobody may wait any more
        }
    }
}

/// The thread that looks at all files.
static LOOKER: Looker = Looker { state: Mutex::new(Looking::new()), added: Condvar::new() };

struct Looker {
    state: Mutex<Looking>,
    added: Condvar,
}

/// Files that are to be looked at, and who does.
struct Looking {
    due: VecDeque<Arc<dyn Look>>,
    /// Since when the thread has been looking at one.
    busy_since: Option<Instant>,
    /// The process that has started the thread. 0: none.
    started_by: u32,
    /// The number of the thread. One whose look has hung ends once it finds another in its place.
    thread: u64,
}

impl Looking {
    const fn new() -> Self {
        Self { due: VecDeque::new(), busy_since: None, started_by: 0, thread: 0 }
    }
}

impl Looker {
    /// Have files looked at.
    ///
    /// # Errors
    /// The system has no further thread.
    fn add(&'static self, files: Arc<dyn Look>) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.started_by != process::id() {
            // The thread of the process from which this one was forked is not here.
            state.due.clear();
            self.start(&mut state)?;
        }
        state.due.push_back(files);
        drop(state);
        self.added.notify_all();
        Ok(())
    }

    /// Let another thread go on with the other files, if the look under way has taken long.
    fn replace_if_hung(&'static self) {
        let mut state = self.state.lock();
        if state.busy_since.is_some_and(|since| since.elapsed() >= LOOK_LIMIT / 2) {
            // Without a further thread the others wait until the look is over.
            let _ = self.start(&mut state);
        }
    }

    fn start(&'static self, state: &mut Looking) -> io::Result<()> {
        let number = state.thread + 1;
        threads::spawn("secret-files".to_owned(), move || self.run(number))?;
        (state.started_by, state.thread, state.busy_since) = (process::id(), number, None);
        Ok(())
    }

    /// Look at files that are due, until another thread has taken the place of this one.
    fn run(&self, number: u64) {
        let mut state = self.state.lock();
        while state.thread == number {
            let Some(files) = state.due.pop_front() else {
                self.added.wait(&mut state);
                continue;
            };
            state.busy_since = Some(Instant::now());
            drop(state);
            if catch_unwind(AssertUnwindSafe(|| files.look())).is_err() {
                tracing::error!(
                    "looking at files with secrets has failed, which is a bug; what they held before stays in use"
                );
            }
            files.end_look();
            state = self.state.lock();
            if state.thread == number {
                state.busy_since = None;
            }
        }
    }
}

fn stamps<T: Content>(files: &T::Files) -> Vec<Option<Stamp>> {
    let stamp = |path: &Path| std::fs::metadata(path).ok().map(|metadata| Stamp::of(&metadata));
    T::paths(files).into_iter().map(stamp).collect()
}

/// Tells whether a file has changed, or who may read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// What it is, for errors: `token`.
    pub what: &'static str,
    /// Where it is.
    pub path: &'a Path,
    /// No such file is larger.
    pub limit_bytes: u64,
    /// Others may not read it.
    pub is_secret: bool,
}

impl Wanted<'_> {
    /// Read it.
    pub fn text(self) -> Result<String, ProtectionError> {
        let Self { what, path, limit_bytes, is_secret } = self;
        let failed = |source| ProtectionError::Read { what, path: path.to_owned(), source };
        let (file, metadata) = at_once::open(path).map_err(failed)?;
        if !metadata.is_file() {
            return Err(self.unusable("is not a file".to_owned()));
        }
        let (mode, owner, own) = (metadata.mode() & 0o777, metadata.uid(), geteuid().as_raw());
        // Its owner may change the mode, and then the file.
        if is_secret && owner != own && owner != ROOT && !is_unmapped(owner) {
            return Err(self.unusable(format!(
                "belongs to uid {owner}, who may change it; only this process's user (uid {own}) and root may own it"
            )));
        }
        if is_secret && mode & FORBIDDEN != 0 {
            return Err(self.unusable(format!(
                "has the mode {mode:04o}: others may read or change it; 0600, 0400, 0640 and 0440 are allowed"
            )));
        }
        let mut text = String::new();
        file.take(limit_bytes + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > limit_bytes {
            return Err(self.unusable(format!("has more than {limit_bytes} bytes")));
        }
        Ok(text)
    }

    /// The error of a file that can be read, and must not be used.
    pub fn unusable(self, why: String) -> ProtectionError {
        ProtectionError::Unusable { what: self.what, path: PathBuf::from(self.path), why }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Two files, and how often they were read.
    #[derive(Debug)]
    struct Pair {
        paths: [PathBuf; 2],
        reads: AtomicUsize,
    }

    /// The sum of the numbers that they hold.
    #[derive(Debug, PartialEq)]
    struct Sum(u64);

    impl Content for Sum {
        type Files = Arc<Pair>;
        const KEPT: &'static str = "the sum stays";

        fn paths(files: &Arc<Pair>) -> Vec<&Path> {
            files.paths.iter().map(PathBuf::as_path).collect()
        }

        fn read(files: &Arc<Pair>) -> Result<Self, ProtectionError> {
            files.reads.fetch_add(1, Ordering::Relaxed);
            let first = std::fs::read_to_string(&files.paths[0]).unwrap_or_default();
            assert_ne!(first, "bug", "as asked");
            let numbers = files.paths.iter().map(|path| {
                let wanted = Wanted { what: "number", path, limit_bytes: 8, is_secret: false };
                wanted.text()?.parse::<u64>().map_err(|error| wanted.unusable(error.to_string()))
            });
            numbers.sum::<Result<u64, _>>().map(Self)
        }

        fn news(&self, before: &Self, _: &Arc<Pair>) -> Option<String> {
            (self != before).then(|| format!("the sum is {} now", self.0))
        }
    }

    /// Files with 1 and 2.
    fn pair(name: &str) -> Arc<Pair> {
        let path = |number: &str| {
            let path = std::env::temp_dir().join(format!("elastic_rs-watched-{}-{name}-{number}", process::id()));
            write(&path, number).unwrap();
            path
        };
        Arc::new(Pair { paths: [path("1"), path("2")], reads: AtomicUsize::new(0) })
    }

    impl Drop for Pair {
        fn drop(&mut self) {
            self.paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
    }

    #[tokio::test]
    async fn a_change_of_any_file_is_seen_and_one_that_cannot_be_used_changes_nothing() {
        let files = pair("changing");
        let sum = Watched::<Sum>::open(Arc::clone(&files), Duration::ZERO).unwrap();
        assert_eq!(sum.current().await.0, 3);
        // Each is of another length: the file system's clock may stand still meanwhile.
        for (text, expected) in [("40", 41), ("4xx", 41), ("123456789", 41), ("0050", 51)] {
            write(&files.paths[1], text).unwrap();
            assert_eq!(sum.current().await.0, expected, "{text}");
        }
        std::fs::remove_file(&files.paths[0]).unwrap();
        assert_eq!(sum.current().await.0, 51);
        write(&files.paths[0], "02").unwrap();
        assert_eq!(sum.current().await.0, 52);
        let reads = || files.reads.load(Ordering::Relaxed);
        let before = reads();
        sum.current().await;
        assert_eq!(reads(), before, "nothing has changed");
        // Files that could not be used are read at every look: the reason may have been the time, or the file system.
        write(&files.paths[0], "x").unwrap();
        sum.current().await;
        sum.current().await;
        assert_eq!(reads(), before + 2);
    }

    #[tokio::test]
    async fn a_bug_in_one_reload_does_not_end_the_others() {
        let (files, others) = (pair("bug"), pair("beside-bug"));
        let [sum, other] = [&files, &others].map(|it| Watched::<Sum>::open(Arc::clone(it), Duration::ZERO).unwrap());
        write(&files.paths[0], "bug").unwrap();
        assert_eq!(sum.current().await.0, 3, "the last good one stays");
        write(&others.paths[0], "40").unwrap();
        assert_eq!(other.current().await.0, 42);
        write(&files.paths[0], "5").unwrap();
        assert_eq!(sum.current().await.0, 7);
    }

    /// A pipe that nobody writes stands for a file on a file system that hangs.
    #[tokio::test]
    async fn a_file_that_hangs_holds_up_no_other() {
        let (files, others) = (pair("hanging"), pair("beside-hanging"));
        let [sum, other] = [&files, &others].map(|it| Watched::<Sum>::open(Arc::clone(it), Duration::ZERO).unwrap());
        std::fs::remove_file(&files.paths[0]).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &files.paths[0], fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let began = Instant::now();
        assert_eq!(sum.current().await.0, 3);
        assert!(began.elapsed() >= LOOK_LIMIT, "it was waited for once");
        for number in 4..8 {
            write(&others.paths[0], format!("{number:0number$}")).unwrap();
            assert_eq!((other.current().await.0, sum.current().await.0), (number as u64 + 2, 3));
        }
        let reads = files.reads.load(Ordering::Relaxed);
        assert_eq!(reads, 2, "it is read once, not by a thread for each who asks");
        // The thread that hangs gets an empty pipe, and reads what is in its place then.
        let pipe = std::fs::OpenOptions::new().read(true).write(true).open(&files.paths[0]).unwrap();
        std::fs::remove_file(&files.paths[0]).unwrap();
        write(&files.paths[0], "5").unwrap();
        drop(pipe);
        let until = Instant::now() + Duration::from_secs(60);
        while sum.current().await.0 != 7 {
            assert!(Instant::now() < until, "it is looked at again");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_was_found_is_good_for_a_while() {
        let files = pair("resting");
        let sum = Watched::<Sum>::open(Arc::clone(&files), Duration::from_secs(3600)).unwrap();
        write(&files.paths[0], "7").unwrap();
        assert_eq!(sum.current().await.0, 3);
        assert_eq!(files.reads.load(Ordering::Relaxed), 1);
        let brief = Watched::<Sum>::open(Arc::clone(&files), Duration::ZERO).unwrap();
        assert_eq!(brief.current().await.0, 9);
    }
}
