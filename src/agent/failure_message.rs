//! The words of a failed worker, collected without waiting for a file system that hangs.

use std::fs;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::account::{self, OomKills, SharedMemory};
use crate::threads::spawn;
use crate::workers::{StderrEnd, why_no_more_logs};

/// How long to wait until everything that a failed worker said is read, before returning what is known by then. Only a file system that
/// hangs takes longer.
const HANGS_AFTER: Duration = Duration::from_millis(500);

/// Sources of the words of a failed worker.
#[derive(Debug)]
pub(super) struct Sources {
    /// The error file that `@record` writes.
    pub error_file: Option<PathBuf>,
    pub stderr_end: StderrEnd,
    /// The signal that ended it, if one did whose sender is worth a hint.
    pub hint: Option<Hint>,
    /// Whether the front end adds the cause when it has reaped the worker.
    pub front_end: bool,
}

/// What a signal that ended a worker may mean.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hint {
    /// SIGKILL, with the OOM counters at the worker's start.
    Killed(OomKills),
    /// SIGBUS.
    Bus,
}

impl Hint {
    fn failure_message(self) -> String {
        match self {
            Self::Killed(before) => OomKills::now().hint(before).to_owned(),
            Self::Bus => SharedMemory::now().map(SharedMemory::hint).unwrap_or_default(),
        }
    }
}

/// The words of one worker.
#[derive(Debug)]
pub(super) struct FailureMessage {
    local_rank: u32,
    found: Arc<Mutex<Found>>,
    /// Ends with the thread that reads.
    reading: oneshot::Receiver<()>,
    hangs_at: Instant,
    state: State,
    /// The front end's answer, if it is asked: `None` until it has answered.
    reported: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reading,
    /// The first, incomplete answer has been returned.
    Hangs,
    /// Everything has been read.
    Read,
    /// The complete answer has been returned.
    Delivered,
}

/// The words found so far.
#[derive(Debug, Default)]
struct Found {
    /// From the error file.
    recorded: Option<String>,
    hint: String,
    no_logs: String,
    stderr_tail: Vec<u8>,
}

impl FailureMessage {
    /// Begin to collect. Needs a tokio runtime.
    pub fn new(local_rank: u32, sources: Sources) -> Self {
        let found = Arc::new(Mutex::new(Found::default()));
        let reported = (!sources.front_end).then(String::new);
        let shared = found.clone();
        let (ends, reading) = oneshot::channel();
        let started = spawn(format!("words-{local_rank}"), move || {
            read(&sources, &shared);
            // Nobody may listen any more.
            let _ = ends.send(());
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread that reads the failure message of a worker");
        }
        Self { local_rank, found, reading, hangs_at: Instant::now() + HANGS_AFTER, state: State::Reading, reported }
    }

    /// The cause of this worker's failure, from the front end.
    pub fn on_reported(&mut self, local_rank: u32, reported: String) {
        if local_rank == self.local_rank {
            self.reported.get_or_insert(reported);
        }
    }

    /// Returns the worker, its words as far as they are known, and whether these are all: once when collecting hangs, and once when
    /// all words are known. Waits for ever after that. May be dropped and called again.
    pub async fn next(&mut self) -> (u32, String, bool) {
        loop {
            match self.state {
                // An error means that the thread has panicked, or was not started.
                State::Reading => match timeout_at(self.hangs_at, &mut self.reading).await {
                    Ok(_) => self.state = State::Read,
                    Err(_) => {
                        self.state = State::Hangs;
                        return (self.local_rank, self.text(), false);
                    }
                },
                State::Hangs => {
                    let _ = (&mut self.reading).await;
                    self.state = State::Read;
                }
                // The front end answers through `on_reported`, between two calls.
                State::Read if self.reported.is_none() && self.found.lock().recorded.is_none() => pending().await,
                State::Read => {
                    self.state = State::Delivered;
                    return (self.local_rank, self.text(), true);
                }
                State::Delivered => pending().await,
            }
        }
    }

    fn text(&self) -> String {
        let found = self.found.lock();
        let reported =
            self.reported.as_deref().map(|reported| account::summary_of(reported.as_bytes())).unwrap_or_default();
        let last = if reported.is_empty() { account::summary_of(&found.stderr_tail) } else { reported };
        // On a full disk the end of the stderr file is older than the failure.
        let failure_message = match &found.recorded {
            Some(recorded) => [&found.hint, recorded, &found.no_logs],
            None => [&found.hint, &found.no_logs, &last],
        };
        failure_message
            .into_iter()
            .filter(|failure_message| !failure_message.is_empty())
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Reads sources that never block first, then those that may hang, the most important one first.
fn read(sources: &Sources, found: &Mutex<Found>) {
    let tail = sources.stderr_end.at_once();
    let in_file = tail.is_none();
    found.lock().stderr_tail = tail.unwrap_or_default();
    let hint = sources.hint.map(Hint::failure_message).unwrap_or_default();
    found.lock().hint = hint;
    let recorded = sources.error_file.as_ref().and_then(|file| fs::read_to_string(file).ok());
    let recorded = recorded.as_deref().and_then(account::recorded);
    let is_recorded = recorded.is_some();
    found.lock().recorded = recorded;
    if in_file && !is_recorded {
        let tail = sources.stderr_end.read();
        found.lock().stderr_tail = tail;
    }
    // This writes, which takes long while a checkpoint is being written to the same disk.
    let folder = sources.error_file.as_deref().and_then(Path::parent);
    let no_logs = folder.and_then(why_no_more_logs);
    found.lock().no_logs = no_logs.unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("elastic_rs-words-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        folder
    }

    fn failure_message(error_file: PathBuf, front_end: bool) -> FailureMessage {
        let sources = Sources { error_file: Some(error_file), stderr_end: StderrEnd::default(), hint: None, front_end };
        FailureMessage::new(3, sources)
    }

    #[tokio::test]
    async fn an_error_file_that_hangs_is_logged_and_read_when_it_does_no_longer() {
        let folder = folder("hangs");
        let file = folder.join("error.json");
        mknodat(CWD, &file, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let mut failure_message = failure_message(file.clone(), false);
        assert_eq!(failure_message.next().await, (3, String::new(), false));
        fs::write(&file, r#"{"message": "ValueError: late"}"#).unwrap();
        assert_eq!(failure_message.next().await, (3, "ValueError: late".to_owned(), true));
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn what_the_front_end_says_is_waited_for_if_nothing_is_recorded() {
        let folder = folder("said");
        let mut failure_message = failure_message(folder.join("error.json"), true);
        let early = tokio::time::timeout(Duration::from_millis(50), failure_message.next()).await;
        assert!(early.is_err(), "{early:?}");
        failure_message.on_reported(2, "another's".to_owned());
        failure_message.on_reported(3, "Traceback\nValueError: said\n".to_owned());
        let (_, text, complete) = failure_message.next().await;
        assert!(complete && text.starts_with("ValueError: said\n"), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn what_was_recorded_needs_no_front_end() {
        let folder = folder("recorded");
        let file = folder.join("error.json");
        fs::write(&file, r#"{"message": "ValueError: recorded"}"#).unwrap();
        let mut failure_message = failure_message(file, true);
        assert_eq!(failure_message.next().await, (3, "ValueError: recorded".to_owned(), true));
        fs::remove_dir_all(folder).unwrap();
    }
}
