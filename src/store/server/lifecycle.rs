//! When a server ends.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Instant;

use super::control::{Command, Control, Ended, Expected};
use super::{Members, after};
use crate::store::table::ConnId;

/// What decides when the server ends: owners, draining, a command to stop.
pub(super) struct Lifecycle {
    commands: Receiver<Command>,
    expected: Arc<Expected>,
    /// Whether the server ends with its owners.
    is_owned: bool,
    /// The owners that are connected.
    owners: HashSet<ConnId>,
    drain_until: Option<Instant>,
    /// Who may connect, since somebody has last asked.
    opened_to: Option<Option<Members>>,
    /// Those that wait for an empty table.
    table_requests: Vec<Sender<()>>,
}

impl Lifecycle {
    pub(super) fn new(control: Control) -> Lifecycle {
        let Control { commands, expected, .. } = control;
        Lifecycle {
            commands,
            expected,
            is_owned: false,
            owners: HashSet::new(),
            drain_until: None,
            opened_to: None,
            table_requests: Vec::new(),
        }
    }

    /// Who may connect from now on, if that was set since the last call.
    pub(super) fn take_opened_to(&mut self) -> Option<Option<Members>> {
        self.opened_to.take()
    }

    /// The requests for an empty table since the last call. Dropping one answers it.
    pub(super) fn take_table_requests(&mut self) -> Vec<Sender<()>> {
        std::mem::take(&mut self.table_requests)
    }

    /// When the time for draining is over.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.drain_until
    }

    /// Reads pending commands. `find` looks a client up by its address. Returns why the server ends, if it does.
    pub(super) fn listen(&mut self, find: impl Fn(SocketAddr) -> Option<ConnId>) -> Option<Ended> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Stop) => return Some(Ended::Stopped),
                Ok(Command::StopWhenClosed(peer)) => {
                    self.is_owned = true;
                    self.owners.extend(find(peer));
                    self.expected.on_done();
                }
                Ok(Command::GiveUpOwner) => {
                    self.is_owned = true;
                    self.expected.on_done();
                }
                Ok(Command::OpenTo(members)) => self.opened_to = Some(members),
                Ok(Command::ReplaceTable(done)) => self.table_requests.push(done),
                Ok(Command::Drain(timeout)) => self.drain_until = Some(after(timeout)),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) if !self.is_owned && self.drain_until.is_none() => {
                    return Some(Ended::Stopped);
                }
                Err(TryRecvError::Disconnected) => {
                    // No controller is left that could keep a promise.
                    self.expected.end();
                    return None;
                }
            }
        }
    }

    /// A client's connection has closed.
    pub(super) fn on_closed(&mut self, id: ConnId) {
        self.owners.remove(&id);
    }

    /// Why the server ends now, with this many clients connected, if it does.
    pub(super) fn is_over(&self, open_count: usize) -> Option<Ended> {
        match self.drain_until {
            // Draining was asked for explicitly, so the end of the owners does not cut it short.
            Some(_) if open_count == 0 => Some(Ended::Drained),
            Some(until) if Instant::now() >= until => Some(Ended::DrainTimedOut),
            None if self.is_owned && self.owners.is_empty() && self.expected.end_if_none() => Some(Ended::OwnerGone),
            _ => None,
        }
    }
}

impl Drop for Lifecycle {
    fn drop(&mut self) {
        self.expected.end();
    }
}
