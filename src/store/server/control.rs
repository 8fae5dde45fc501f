//! Telling a running server when to end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Stats;
use super::stats::Counters;

/// Makes the two ends: one to steer a server with, from any thread, and one for [`serve`](super::serve).
pub fn control() -> (Controller, Control) {
    let (commands, receiver) = unbounded_channel();
    let counters = Arc::<Counters>::default();
    (Controller { commands, counters: counters.clone() }, Control { commands: receiver, counters })
}

/// Steers a server. When the last clone is dropped the server stops, unless it was told to end some other way.
#[derive(Debug, Clone)]
pub struct Controller {
    commands: UnboundedSender<Command>,
    counters: Arc<Counters>,
}

impl Controller {
    /// Closes everything now.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    /// Ends the server when the connection of this client closes; at once if there is no such connection.
    ///
    /// `peer` is the client's address as the server sees it, i.e. the client's own local address. IPv4-mapped IPv6
    /// addresses count as IPv4.
    pub fn stop_when_closed(&self, peer: SocketAddr) {
        self.send(Command::StopWhenClosed(peer));
    }

    /// Ends the server when no c10d client is connected, after `timeout` at the latest. New ones are served meanwhile.
    pub fn drain(&self, timeout: Duration) {
        self.send(Command::Drain(timeout));
    }

    /// The server's counters.
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    fn send(&self, command: Command) {
        // A server that has ended needs no telling.
        let _ = self.commands.send(command);
    }
}

/// The server's end of a [`Controller`].
#[derive(Debug)]
pub struct Control {
    pub(super) commands: UnboundedReceiver<Command>,
    pub(super) counters: Arc<Counters>,
}

#[derive(Debug)]
pub(super) enum Command {
    Stop,
    StopWhenClosed(SocketAddr),
    Drain(Duration),
}

/// Why a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to stop, or nobody was left to tell it.
    Stopped,
    /// The connection of its owner closed.
    OwnerGone,
    /// It was draining, and the last client has gone.
    Drained,
    /// It was draining, and clients were left when the time was over.
    DrainTimedOut,
}
