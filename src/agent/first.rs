//! The first worker of a round that ends badly, from its end until it is known what it said.
//!
//! The others are stopped at once. What it said is read meanwhile, and their ends, which are consequences, are held back until
//! then: the first failure is the one that is told.

use std::fs;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use super::account::{self, OomKills};
use crate::process::{Exited, Signal, why_no_more_logs};

/// How long the error file may take to be read: it may be on a file system that hangs.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct First {
    local_rank: Option<u32>,
    exited: Option<Exited>,
    words: Option<JoinHandle<String>>,
    held: Vec<Exited>,
}

impl First {
    /// A worker has ended badly. False if it is not the first.
    pub fn begin(&mut self, local_rank: u32) -> bool {
        let first = self.local_rank.is_none();
        self.local_rank.get_or_insert(local_rank);
        first
    }

    /// How a worker has ended. Gives it back if nobody need wait for what it said. Needs a tokio runtime.
    pub fn on_exited(&mut self, exited: Exited, error_file: Option<PathBuf>, kills_before: OomKills) -> Option<Exited> {
        match self.local_rank {
            None => Some(exited),
            Some(first) if first == exited.local_rank && self.exited.is_none() => {
                let killed = exited.exit.returncode() == -Signal::KILL.0;
                let stderr_tail = exited.stderr_tail.clone();
                self.words = Some(tokio::spawn(words_of(stderr_tail, error_file, killed.then_some(kills_before))));
                self.exited = Some(exited);
                None
            }
            Some(_) => {
                self.held.push(exited);
                None
            }
        }
    }

    /// The first failure with its words, and the ends after it. Waits for ever if there is none. May be cancelled.
    pub async fn told(&mut self) -> (Exited, String, Vec<Exited>) {
        let words = match &mut self.words {
            // An error means that the runtime ends.
            Some(words) => words.await.unwrap_or_default(),
            None => pending().await,
        };
        self.words = None;
        match self.exited.take() {
            Some(exited) => {
                self.local_rank = None;
                (exited, words, std::mem::take(&mut self.held))
            }
            None => pending().await,
        }
    }

    /// Whether [`told`](Self::told) has something to tell soon.
    pub fn is_awaited(&self) -> bool {
        self.words.is_some()
    }

    /// Nothing is left of the workers. The ends that were held back for one that has not come.
    pub fn give_up(&mut self) -> Vec<Exited> {
        if self.words.is_some() {
            return Vec::new();
        }
        self.local_rank = None;
        std::mem::take(&mut self.held)
    }
}

/// What a worker said of its end, after what it could not say: that memory was short, or its logs' file system full.
async fn words_of(stderr_tail: Vec<u8>, error_file: Option<PathBuf>, killed: Option<OomKills>) -> String {
    let folder = error_file.as_deref().and_then(Path::parent).map(Path::to_owned);
    let read = move || {
        let recorded = error_file.and_then(|file| fs::read_to_string(file).ok());
        (recorded, killed.map(|before| OomKills::now().hint(before)))
    };
    let look = move || folder.as_deref().and_then(why_no_more_logs);
    told_by(stderr_tail, read, look).await
}

/// `read`: what the worker has recorded, and a hint if it was killed. `look`: what has become of its logs. They are asked
/// apart: to look means to write, which takes long while a checkpoint is written to the same disk, and what was recorded is
/// not to be lost for that.
async fn told_by(
    stderr_tail: Vec<u8>,
    read: impl FnOnce() -> (Option<String>, Option<&'static str>) + Send + 'static,
    look: impl FnOnce() -> Option<String> + Send + 'static,
) -> String {
    let (read, look) = (timeout(READ_TIMEOUT, spawn_blocking(read)), timeout(READ_TIMEOUT, spawn_blocking(look)));
    let (read, look) = tokio::join!(read, look);
    let (recorded, killed) = read.ok().and_then(Result::ok).unwrap_or_default();
    let no_logs = look.ok().and_then(Result::ok).flatten();
    let (killed, no_logs) = (killed.unwrap_or_default(), no_logs.unwrap_or_default());
    // What is left of standard error on a full disk is older than the failure.
    let words = match recorded.as_deref().and_then(account::recorded) {
        Some(recorded) => [killed.to_owned(), recorded, no_logs],
        None => [killed.to_owned(), no_logs, account::last_words(&stderr_tail)],
    };
    words.into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_disk_that_is_slow_to_write_costs_no_recorded_words() {
        let recorded = r#"{"message": "ValueError: the cause"}"#.to_owned();
        let slow = || {
            // The disk: a look that never ended would keep the test's runtime from ending.
            std::thread::sleep(READ_TIMEOUT + Duration::from_millis(300));
            None
        };
        let words = told_by(b"goodbye".to_vec(), move || (Some(recorded), None), slow).await;
        assert_eq!(words, "ValueError: the cause");
    }
}
