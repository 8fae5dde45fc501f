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
use crate::process::{Exited, Signal};

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

/// What a worker said of its end, and a hint about memory if it was killed.
async fn words_of(stderr_tail: Vec<u8>, error_file: Option<PathBuf>, killed: Option<OomKills>) -> String {
    let read = spawn_blocking(move || {
        let recorded = error_file.and_then(|file| fs::read_to_string(file).ok());
        (recorded, killed.map(|before| OomKills::now().hint(before)))
    });
    let (recorded, hint) = match timeout(READ_TIMEOUT, read).await {
        Ok(Ok(read)) => read,
        _ => (None, None),
    };
    let words = account::words(recorded.as_deref(), &stderr_tail);
    [hint.unwrap_or_default(), words.as_str()].join("\n").trim().to_owned()
}
