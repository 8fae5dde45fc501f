//! What the connections of one server share: the table, each other's outboxes, the counters.
//!
//! Owns carrying out a request and delivering what it leads to. Everything here runs on one thread and never awaits, so
//! a request is atomic.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::connection::Connection;
use super::hello::printable;
use super::stats::Counters;
use super::{Cause, Place, ServerOptions};
use crate::bounded_log::BoundedLog;
use crate::proto::{Reply, Request, WaitReply};
use crate::store::table::{ConnId, Table, Violation};

pub(super) struct Hub {
    pub options: ServerOptions,
    pub counters: Arc<Counters>,
    /// The connections' tasks, hello included.
    pub tasks: RefCell<JoinSet<()>>,
    /// A connection has closed.
    pub closed: Notify,
    table: RefCell<Table>,
    connections: RefCell<Connections>,
    /// What this server logs about strangers and offenders.
    pub log: BoundedLog,
    /// What connections that were handed over share.
    pub handed_over: Place,
}

/// Why the server closes a connection, for counters and log.
pub(super) struct Rejection {
    pub cause: Cause,
    /// In words.
    pub detail: String,
    /// How a stranger began.
    pub preview: Option<String>,
    /// The key that a request names, where its size is what is wrong.
    pub key: Option<String>,
}

impl Rejection {
    pub(super) fn new(cause: Cause, detail: impl Into<String>) -> Self {
        Rejection { cause, detail: detail.into(), preview: None, key: None }
    }

    pub(super) fn with_preview(self, preview: Option<String>) -> Self {
        Rejection { preview, ..self }
    }

    pub(super) fn with_key(self, key: Option<&[u8]>) -> Self {
        Rejection { key: key.map(printable), ..self }
    }
}

#[derive(Default)]
struct Connections {
    open: HashMap<ConnId, Rc<Connection>>,
    last: u64,
}

impl Hub {
    pub(super) fn new(options: ServerOptions, counters: Arc<Counters>) -> Rc<Hub> {
        Rc::new(Hub {
            table: RefCell::new(Table::new(options.table.clone())),
            log: BoundedLog::new(options.log_period, say_left_out),
            handed_over: Place::default(),
            options,
            counters,
            tasks: RefCell::default(),
            closed: Notify::new(),
            connections: RefCell::default(),
        })
    }

    /// Registers a validated connection; it is open until the guard is dropped.
    pub(super) fn open(self: &Rc<Hub>, stream: TcpStream, peer: SocketAddr) -> Open {
        let mut connections = self.connections.borrow_mut();
        connections.last += 1;
        let connection = Rc::new(Connection::new(ConnId(connections.last), stream, peer));
        connections.open.insert(connection.id, connection.clone());
        self.counters.connections_open.store(connections.open.len() as u64, Relaxed);
        Open { hub: self.clone(), connection }
    }

    /// Connections that count towards the limit: those in the server's care, and those handed over.
    pub(super) fn taken_places(&self) -> usize {
        self.tasks.borrow().len() + self.handed_over.shared()
    }

    pub(super) fn open_count(&self) -> usize {
        self.connections.borrow().open.len()
    }

    pub(super) fn is_open(&self, id: ConnId) -> bool {
        self.connections.borrow().open.contains_key(&id)
    }

    /// The connection whose other end is `peer`.
    pub(super) fn find(&self, peer: SocketAddr) -> Option<ConnId> {
        let same =
            |other: SocketAddr| other.port() == peer.port() && other.ip().to_canonical() == peer.ip().to_canonical();
        self.connections.borrow().open.values().find(|connection| same(connection.peer)).map(|connection| connection.id)
    }

    /// Carries out one request of `connection` and queues its reply. Others that it releases are written to at once.
    pub(super) fn apply(&self, connection: &Connection, request: Request) -> Result<(), Violation> {
        let applied = self.table.borrow_mut().apply(connection.id, request)?;
        self.counters.requests.fetch_add(1, Relaxed);
        self.update_gauges();
        let connections = self.connections.borrow();
        for id in applied.released {
            let Some(released) = connections.open.get(&id) else {
                continue;
            };
            released.queue(Reply::Wait(WaitReply::StopWaiting));
            if id != connection.id {
                released.nudge();
            }
        }
        if let Some(reply) = applied.reply {
            connection.queue(reply);
        }
        Ok(())
    }

    /// The client will read no release any more.
    pub(super) fn forget_wait(&self, id: ConnId) {
        self.table.borrow_mut().disconnect(id);
        self.update_gauges();
    }

    /// Counts and logs a connection that the server closes.
    pub(super) fn reject(&self, peer: SocketAddr, rejection: &Rejection) {
        let Rejection { cause, detail, preview, key } = rejection;
        self.counters.reject(*cause);
        let cause = cause.name();
        if self.log.admits(cause) {
            tracing::warn!(target: LOG_TARGET, %peer, cause, detail, preview, key, "connection rejected");
        }
    }

    fn update_gauges(&self) {
        let table = self.table.borrow();
        self.counters.keys.store(table.num_keys() as u64, Relaxed);
        self.counters.stored_bytes.store(table.stored_bytes() as u64, Relaxed);
        self.counters.waiting.store(table.num_waiting() as u64, Relaxed);
    }
}

fn say_left_out(cause: &'static str, count: u64) {
    tracing::warn!(target: LOG_TARGET, cause, count, "more of the same was not logged");
}

/// An open connection's entry in the hub. Dropping it, for whatever reason, removes the entry and the wait.
pub(super) struct Open {
    hub: Rc<Hub>,
    pub connection: Rc<Connection>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let id = self.connection.id;
        self.hub.forget_wait(id);
        let mut connections = self.hub.connections.borrow_mut();
        connections.open.remove(&id);
        self.hub.counters.connections_open.store(connections.open.len() as u64, Relaxed);
        self.hub.closed.notify_one();
    }
}

/// One target for all of the server's records, whichever file they come from.
pub(super) const LOG_TARGET: &str = "elastic_rs::store::server";
