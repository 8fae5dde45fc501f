//! What the connections of one server share: the table, the counters, the log, and the buffers for the present turn.
//!
//! Owns carrying out a request. Everything here runs on one thread, so a request is atomic.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::BytesMut;

use super::outbox::Outbox;
use super::stats::Counters;
use super::{Cause, ConnectionPermit, ServerOptions};
use crate::bounded_log::{LeftOut, LogBudget};
use crate::store::protocol::hello::printable;
use crate::store::protocol::{Query, Reply, Request, Sink, WaitReply, put_length};
use crate::store::table::{ConnId, KEYS_PER_UNIT, Listing, Table, Violation};

pub(super) struct Hub {
    pub options: ServerOptions,
    pub counters: Arc<Counters>,
    /// Connections whose waits have ended, and which are still to be sent a release.
    pub released: Vec<ConnId>,
    /// The shared read buffer, empty between turns. Only a connection in the middle of a request has its own.
    pub input: BytesMut,
    /// The shared write buffer, likewise. Only a client that does not read has its own.
    pub outbox: Option<Box<Outbox>>,
    /// Shared by the connections that were handed over.
    pub handed_over: ConnectionPermit,
    table: Table,
    /// The number of tables before this one.
    tables: u64,
    /// The request that changes the table now. If it has panicked, the table may be half changed.
    changing: Option<Query>,
    /// c10d clients that are connected.
    open_count: usize,
    log_budget: LogBudget,
}

/// Why the server closes a connection, for counters and log.
#[derive(Debug)]
pub(super) struct Rejection {
    pub cause: Cause,
    /// The reason, in words.
    pub detail: String,
    /// The first bytes of an unknown client.
    pub preview: Option<String>,
    /// The key that a request names, if the request is refused for a size.
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

impl Hub {
    pub(super) fn new(options: ServerOptions, counters: Arc<Counters>) -> Hub {
        Hub {
            table: Table::new(options.table.clone()),
            log_budget: LogBudget::new(options.log_period),
            options,
            counters,
            released: Vec::new(),
            input: BytesMut::new(),
            outbox: None,
            handed_over: ConnectionPermit::default(),
            tables: 0,
            changing: None,
            open_count: 0,
        }
    }

    /// The number of the present table. A connection may use only the one that it was accepted for.
    pub(super) fn table_number(&self) -> u64 {
        self.tables
    }

    /// Begins with an empty table. No client is connected.
    pub(super) fn replace_table(&mut self) {
        self.table = Table::new(self.options.table.clone());
        self.tables += 1;
        self.count(0);
    }

    /// c10d clients that are connected.
    pub(super) fn open_count(&self) -> usize {
        self.open_count
    }

    /// A connection has turned out to be a c10d client's.
    pub(super) fn on_opened(&mut self) {
        self.open_count += 1;
        self.counters.clients.send_modify(|count| *count += 1);
        self.counters.connections_open.store(self.open_count as u64, Relaxed);
    }

    /// A c10d client's connection has ended.
    pub(super) fn on_closed(&mut self, id: ConnId) {
        self.open_count -= 1;
        self.counters.connections_open.store(self.open_count as u64, Relaxed);
        self.forget_wait(id);
    }

    /// The server has ended: no client is connected. Writes the last summaries to the log.
    pub(super) fn on_end(&mut self) {
        self.counters.connections_open.store(0, Relaxed);
        self.counters.waiting.store(0, Relaxed);
        log_left_out(self.log_budget.end());
    }

    /// After a panic: the request in which it came, if the table may be half changed.
    pub(super) fn half_changed_by(&self) -> Option<Query> {
        self.changing
    }

    /// The cost of a request, as of [`Table::cost`].
    pub(super) fn cost(&self, request: &Request) -> usize {
        self.table.cost(request)
    }

    /// Carries out one request of a connection and queues its reply. Connections that it releases are noted in `released`.
    /// Returns a list that is to be written piece by piece.
    pub(super) fn apply(
        &mut self,
        id: ConnId,
        request: Request,
        outbox: &mut Outbox,
    ) -> Result<Option<Listing>, Violation> {
        if let Request::MultiGet { keys } = &request {
            self.table.multi_get(keys, outbox);
            return Ok(None);
        }
        if request == Request::ListKeys {
            let listing = self.table.list_keys();
            put_length(outbox, listing.left());
            return Ok(Some(listing).filter(|listing| listing.left() > 0));
        }
        if let (Request::CompareSet { key, .. }, Some(listener)) = (&request, &self.options.on_pytorchs_rendezvous) {
            listener.on_compare_set(key);
        }
        self.changing = Some(request.query());
        let applied = self.table.apply(id, request);
        self.changing = None;
        let applied = applied?;
        for released in applied.released {
            if released == id {
                Reply::Wait(WaitReply::StopWaiting).encode(outbox);
            } else {
                self.released.push(released);
            }
        }
        if let Some(reply) = applied.reply {
            reply.encode(outbox);
        }
        Ok(None)
    }

    /// Forgets the wait of a client that will read no release.
    pub(super) fn forget_wait(&mut self, id: ConnId) {
        self.changing = Some(Query::CancelWait);
        self.table.disconnect(id);
        self.changing = None;
        self.count(0);
    }

    /// Updates the counters after this many requests.
    pub(super) fn count(&self, requests: u64) {
        let counters = &self.counters;
        // Only this thread writes them, so nothing is lost between reading and writing.
        counters.requests.store(counters.requests.load(Relaxed) + requests, Relaxed);
        counters.keys.store(self.table.num_keys() as u64, Relaxed);
        counters.stored_bytes.store(self.table.stored_bytes() as u64, Relaxed);
        counters.waiting.store(self.table.num_waiting() as u64, Relaxed);
    }

    /// Counts and logs a connection that the server closes.
    pub(super) fn reject(&mut self, peer: SocketAddr, rejection: &Rejection) {
        let Rejection { cause, detail, preview, key } = rejection;
        self.counters.reject(*cause);
        // Whoever crowds a port comes often.
        let may = if *cause == Cause::Crowded {
            self.may_log_once(cause.name(), peer.ip())
        } else {
            self.may_log(cause.name())
        };
        let cause = cause.name();
        if may {
            tracing::warn!(target: LOG_TARGET, %peer, cause, detail, preview, key, "connection rejected");
        }
    }

    /// Whether one more record of this kind fits the log.
    pub(super) fn may_log(&mut self, kind: &'static str) -> bool {
        let now = Instant::now();
        self.summarise(now);
        self.log_budget.admit(kind, now)
    }

    /// The same for a record of this address, of which there is one in each period.
    fn may_log_once(&mut self, kind: &'static str, address: IpAddr) -> bool {
        let now = Instant::now();
        self.summarise(now);
        self.log_budget.admit_once(kind, address, now)
    }

    /// When [`summarise`](Self::summarise) is to be called next.
    pub(super) fn next_summary(&self) -> Option<Instant> {
        self.log_budget.next_deadline()
    }

    /// Logs how many records were left out, if the period is over.
    pub(super) fn summarise(&mut self, now: Instant) {
        log_left_out(self.log_budget.summaries(now));
    }
}

/// Writes the next piece of the reply to `LIST_KEYS`. Returns its cost, as of [`Table::cost`].
pub(super) fn list_more(listing: &mut Listing, outbox: &mut Outbox) -> usize {
    let count = listing.advance(|key| {
        put_length(outbox, key.len());
        outbox.put(key);
    });
    1 + count / KEYS_PER_UNIT
}

fn log_left_out(summaries: Vec<LeftOut>) {
    for (cause, count) in summaries {
        tracing::warn!(target: LOG_TARGET, cause = &*cause, count, "further messages of this kind were not logged");
    }
}

/// The target of all of the server's log records.
pub(super) const LOG_TARGET: &str = "elastic_rs::store::server";

#[cfg(test)]
impl Hub {
    /// Stores a key that cannot be deleted: the table counts fewer bytes than are taken off.
    pub(super) fn miscount(&mut self, key: &'static [u8]) {
        let set = Request::Set { key: key.into(), value: Default::default() };
        self.table.apply(ConnId(u64::MAX), set).expect("room");
        self.table.miscount();
    }
}
