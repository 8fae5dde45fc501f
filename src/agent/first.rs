//! The first worker of a round that ends badly, from its end until it is known what it said.
//!
//! The others are stopped at once. What it said is read meanwhile, and their ends, which are consequences, are held back until
//! then: the first failure is the one that is told.

use std::fs;
use std::future::pending;
use std::path::PathBuf;
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
    let read = spawn_blocking(move || {
        let recorded = error_file.as_ref().and_then(|file| fs::read_to_string(file).ok());
        let no_logs = error_file.as_ref().and_then(|file| file.parent()).and_then(why_no_more_logs);
        (recorded, killed.map(|before| OomKills::now().hint(before)), no_logs)
    });
    let (recorded, killed, no_logs) = match timeout(READ_TIMEOUT, read).await {
        Ok(Ok(read)) => read,
        _ => (None, None, None),
    };
    let (killed, no_logs) = (killed.unwrap_or_default(), no_logs.unwrap_or_default());
    // What is left of standard error on a full disk is older than the failure.
    let words = match recorded.as_deref().and_then(account::recorded) {
        Some(recorded) => [killed.to_owned(), recorded, no_logs],
        None => [killed.to_owned(), no_logs, account::last_words(&stderr_tail)],
    };
    words.into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join("\n")
}
