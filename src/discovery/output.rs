//! Prints the output of all agents on this process's own streams: whole lines with a prefix.
//!
//! A thread writes, since a console may block. Agents' connections are read no faster than it writes.

use std::io;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::process::{Consoles, Prefix, Sink};
use crate::threads;

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
}

/// Ends once everything is written.
#[derive(Debug)]
pub(super) struct Written(oneshot::Receiver<()>);

/// How many pieces, each of one read, may wait for the console.
const WAITING: usize = 64;
/// How long a blocked console is waited for at the end.
const DRAIN: Duration = Duration::from_secs(5);

impl Output {
    /// Starts the thread.
    ///
    /// # Errors
    /// There is no further descriptor or thread.
    pub(super) fn start(consoles: Consoles) -> io::Result<(Self, Written)> {
        let (sender, mut pieces) = mpsc::channel::<(Stream, Vec<u8>)>(WAITING);
        let (end, written) = oneshot::channel();
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
        Ok((Self { pieces: sender, colours }, Written(written)))
    }

    /// What begins a line there.
    pub(super) fn prefix<'a>(&self, prefix: &'a Prefix, stream: Stream) -> &'a [u8] {
        let [stdout, stderr] = self.colours;
        prefix.shown(match stream {
            Stream::Stdout => stdout,
            Stream::Stderr => stderr,
        })
    }

    /// Write a piece of whole lines. Waits while too much waits already.
    pub(super) async fn write(&self, stream: Stream, piece: Vec<u8>) {
        if !piece.is_empty() {
            // The thread ends after all senders.
            let _ = self.pieces.send((stream, piece)).await;
        }
    }
}

impl Written {
    /// Wait until everything is written, if that does not take too long. All [`Output`]s must have been dropped.
    pub(super) async fn wait(self) {
        if timeout(DRAIN, self.0).await.is_err() {
            tracing::warn!("the console is blocked, and the last output of the agents is lost");
        }
    }
}
