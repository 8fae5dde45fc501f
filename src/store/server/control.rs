//! Telling a running server when to end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use mio::Waker;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::stats::Counters;
use super::{Members, Stats};

/// Makes the two ends: one that steers a server from any thread, and one for the server's thread, which `waker` wakes.
pub(super) fn control(waker: Waker) -> (Controller, Control) {
    let (commands, receiver) = channel();
    let (counters, expected) = (Arc::<Counters>::default(), Arc::<Expected>::default());
    let line = Arc::new(Line { commands, waker: WakeOnDrop(waker) });
    let controller = Controller { line, counters: counters.clone(), expected: expected.clone() };
    (controller, Control { commands: receiver, counters, expected })
}

/// Steers a server. When the last clone is dropped the server stops, unless it was ended some other way.
#[derive(Debug, Clone)]
pub struct Controller {
    line: Arc<Line>,
    counters: Arc<Counters>,
    expected: Arc<Expected>,
}

impl Controller {
    /// Closes everything now.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    /// Makes this client an owner. The server ends when the connections of all its owners have closed; at once if there
    /// is no such connection.
    ///
    /// Keeps a promise made by [`expect_owner`](Self::expect_owner). `peer` is the client's address as the server sees it, which
    /// is the client's own local address. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn stop_when_closed(&self, peer: SocketAddr) {
        self.expected.on_sent();
        self.send(Command::StopWhenClosed(peer));
    }

    /// Promises another owner. Until it is named, or given up, the server does not end for lack of owners.
    ///
    /// False if the server has ended, so that a new one is needed. A client that shares a server cannot lose it to a
    /// former owner while it is still connecting.
    #[must_use]
    pub fn expect_owner(&self) -> bool {
        self.expected.promise()
    }

    /// Takes back the promise of [`expect_owner`](Self::expect_owner). Without owners, the server ends.
    pub fn give_up_owner(&self) {
        self.expected.on_sent();
        self.send(Command::GiveUpOwner);
    }

    /// Ends the server when no c10d client is connected, after `timeout` at the latest. New ones are served meanwhile.
    pub fn drain(&self, timeout: Duration) {
        self.send(Command::Drain(timeout));
    }

    /// Accepts connections from these members, or from everywhere.
    pub fn open_to(&self, members: Option<Members>) {
        self.send(Command::OpenTo(members));
    }

    /// Replaces the table by an empty one, and closes the connections of all c10d clients that have connected by now, also of those that
    /// wait to be accepted. Blocks until that is done: no request of an earlier connection reaches the new table, and no later connection
    /// is closed.
    pub fn replace_table(&self) {
        let (done, replaced) = channel();
        self.send(Command::ReplaceTable(done));
        // An error means that the server has ended, and with it all connections.
        let _ = replaced.recv();
    }

    /// The number of c10d clients since the start, to wait for some number of them. It ends with the server.
    pub fn clients(&self) -> watch::Receiver<u64> {
        self.counters.clients.subscribe()
    }

    /// The server's counters.
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    fn send(&self, command: Command) {
        // A server that has ended needs no telling.
        if self.line.commands.send(command).is_ok() {
            self.line.waker.wake();
        }
    }
}

/// Fields are dropped in this order: the server is woken last, when the channel has closed.
#[derive(Debug)]
struct Line {
    commands: Sender<Command>,
    waker: WakeOnDrop,
}

#[derive(Debug)]
struct WakeOnDrop(Waker);

impl WakeOnDrop {
    fn wake(&self) {
        // Fails only for a server that has ended.
        let _ = self.0.wake();
    }
}

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.wake();
    }
}

/// The server's end of a [`Controller`].
#[derive(Debug)]
pub(super) struct Control {
    pub commands: Receiver<Command>,
    pub counters: Arc<Counters>,
    pub expected: Arc<Expected>,
}

#[derive(Debug)]
pub(super) enum Command {
    Stop,
    StopWhenClosed(SocketAddr),
    GiveUpOwner,
    Drain(Duration),
    OpenTo(Option<Members>),
    /// Dropped when it is carried out.
    ReplaceTable(Sender<()>),
}

/// Why a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to stop, or its last controller was dropped.
    Stopped,
    /// The connection of its last owner closed.
    OwnerGone,
    /// It was draining, and the last client has gone.
    Drained,
    /// It was draining, and clients were left when the time was over.
    DrainTimedOut,
    /// A request has failed in the middle of a change of the table. This is a bug.
    HalfChanged,
}

/// Owners that are still to come; `None` once the server has ended.
///
/// Behind a lock, so that a promise and the end for lack of owners cannot cross.
#[derive(Debug)]
pub(super) struct Expected(Mutex<Option<Coming>>);

#[derive(Debug, Default)]
struct Coming {
    promised: usize,
    /// Commands about owners that the server has not read yet.
    commands: usize,
}

impl Default for Expected {
    fn default() -> Self {
        Expected(Mutex::new(Some(Coming::default())))
    }
}

impl Expected {
    fn promise(&self) -> bool {
        let mut coming = self.0.lock();
        if let Some(coming) = &mut *coming {
            coming.promised += 1;
        }
        coming.is_some()
    }

    /// A command about an owner is about to be sent.
    fn on_sent(&self) {
        if let Some(coming) = &mut *self.0.lock() {
            coming.promised = coming.promised.saturating_sub(1);
            coming.commands += 1;
        }
    }

    /// Such a command has been carried out.
    pub(super) fn on_done(&self) {
        if let Some(coming) = &mut *self.0.lock() {
            coming.commands = coming.commands.saturating_sub(1);
        }
    }

    /// Refuses further owners, unless one is still to come. Returns whether it does.
    pub(super) fn end_if_none(&self) -> bool {
        let mut coming = self.0.lock();
        if coming.as_ref().is_none_or(|coming| coming.promised == 0 && coming.commands == 0) {
            *coming = None;
        }
        coming.is_none()
    }

    /// Refuses further owners, and forgets the promised ones.
    pub(super) fn end(&self) {
        *self.0.lock() = None;
    }
}
