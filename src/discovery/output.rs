//! Prints the output of all agents on this process's own streams: whole lines with a prefix, and text that waits for its line's end.
//!
//! A thread writes, since a console may block. Agents' connections are read no faster than it writes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::threads;
use crate::workers::{Consoles, OpenLine, Prefix, Sink};

/// One of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// Writes lines in the order in which they come.
#[derive(Clone, Debug)]
pub(super) struct Output {
    pieces: mpsc::Sender<(Stream, Vec<u8>)>,
    /// Whether standard output and standard error show colours.
    colours: [bool; 2],
    /// The lines there that have no end yet.
    open: Arc<Mutex<[OpenLine; 2]>>,
    /// Whether both are one console.
    is_one: bool,
}

/// Ends once everything is written.
#[derive(Debug)]
pub(super) struct Written(oneshot::Receiver<()>);

/// How many pieces, each of one read, may wait for the console.
const WAITING: usize = 64;
/// When it is logged that the end of the job waits for a blocked console.
const BLOCKED_AFTER: Duration = Duration::from_secs(5);

impl Output {
    /// Starts the thread.
    ///
    /// # Errors
    /// There is no further descriptor or thread.
    pub(super) fn start(consoles: Consoles) -> io::Result<(Self, Written)> {
        let (sender, mut pieces) = mpsc::channel::<(Stream, Vec<u8>)>(WAITING);
        let (end, written) = oneshot::channel();
        let is_one = consoles.are_one();
        let (mut stdout, mut stderr) = (Sink::new(consoles.stdout, None), Sink::new(consoles.stderr, None));
        let colours = [stdout.colours(), stderr.colours()];
        threads::spawn("driver-output".to_owned(), move || {
            while let Some((stream, piece)) = pieces.blocking_recv() {
                match stream {
                    Stream::Stdout => stdout.print(&piece),
                    Stream::Stderr => stderr.print(&piece),
                }
            }
            // The driver may have stopped waiting.
            let _ = end.send(());
        })?;
        Ok((Self { pieces: sender, colours, open: Arc::default(), is_one }, Written(written)))
    }

    /// What begins a line there.
    pub(super) fn prefix<'a>(&self, prefix: &'a Prefix, stream: Stream) -> &'a [u8] {
        let [stdout, stderr] = self.colours;
        prefix.shown(match stream {
            Stream::Stdout => stdout,
            Stream::Stderr => stderr,
        })
    }

    /// Write what `compose` appends, which gets the line there that has no end yet. Waits while too much waits already.
    pub(super) async fn write(&self, stream: Stream, compose: impl FnOnce(&mut Vec<u8>, &mut OpenLine)) {
        // The thread ends after all senders.
        let Ok(place) = self.pieces.reserve().await else { return };
        let mut open = self.open.lock();
        let mut piece = Vec::new();
        compose(&mut piece, &mut open[if self.is_one { 0 } else { stream as usize }]);
        if !piece.is_empty() {
            // Before the next one is composed, which has to know how this one ends.
            place.send((stream, piece));
        }
    }
}

impl Written {
    /// Wait until everything is written: as long as a pager that nobody moves on takes nothing. All [`Output`]s must have been dropped.
    /// May be dropped.
    pub(super) async fn wait(mut self) {
        if timeout(BLOCKED_AFTER, &mut self.0).await.is_err() {
            tracing::warn!(
                "the job is over, and the console does not take the rest of the agents' output (a pager that waits, Ctrl-S): waiting \
                 for it; a signal ends the wait, and loses that output"
            );
            let _ = self.0.await;
        }
    }
}
