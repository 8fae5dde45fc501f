//! Who uses an endpoint server: sessions, and store clients.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::clock::log_if_slow;
use crate::events::file::EventFile;
use crate::rendezvous::coordinator::driver::Question;
use crate::store::server::Controller;

/// The sessions of an endpoint server, and what its coordinator records of them.
#[derive(Clone, Debug)]
pub struct Sessions {
    pub(super) count: watch::Receiver<usize>,
    pub(super) questions: mpsc::Sender<Question>,
}

impl Sessions {
    /// Wait until every session has ended, at most `limit`. True if all have.
    pub async fn ended(mut self, limit: Duration) -> bool {
        let count = self.count.clone();
        let ended = async { timeout(limit, self.count.wait_for(|count| *count == 0)).await.is_ok() };
        let ended = log_if_slow(ended, || {
            let count = *count.borrow();
            let nodes = if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") };
            format!(
                "this process hosts the coordinator, and waits up to {limit:.0?} for {nodes} to leave; another signal ends \
                 the wait"
            )
        });
        ended.await
    }

    /// Write the events of all runs of the coordinator into a file from now on, beginning with those that it keeps. They outlive its
    /// process there: when the server has stopped, all of them are written. A coordinator writes into one file, so a later one stays empty.
    ///
    /// # Errors
    /// The thread that writes cannot be started, or the coordinator cannot be asked: it has ended, or requests of HTTP keep it busy.
    pub fn write_events(&self, path: &Path) -> io::Result<()> {
        let file = EventFile::open(path, "coordinator")?;
        let unsent = |error| match error {
            TrySendError::Full(_) => "too many requests of HTTP wait for the coordinator; the next round tries again",
            TrySendError::Closed(_) => "the coordinator has ended",
        };
        self.questions.try_send(Question::Write(file)).map_err(|error| io::Error::other(unsent(error)))
    }
}

/// The users of an endpoint server: sessions and store clients.
#[derive(Clone, Debug)]
pub struct Users {
    pub(super) sessions: watch::Receiver<usize>,
    pub(super) controller: Controller,
}

impl Users {
    /// Sessions and store clients that are connected now.
    pub fn count(&self) -> (usize, u64) {
        (*self.sessions.borrow(), self.controller.stats().connections_open)
    }

    /// Wait until nobody is connected, at most `limit`. True if all have gone.
    pub async fn gone(self, limit: Duration) -> bool {
        let gone = async {
            // Changes of the store's counters are not announced, so they are polled: only here, at the end of a process.
            while self.count() != (0, 0) {
                sleep(COUNT_INTERVAL).await;
            }
        };
        timeout(limit, gone).await.is_ok()
    }
}

const COUNT_INTERVAL: Duration = Duration::from_millis(20);
