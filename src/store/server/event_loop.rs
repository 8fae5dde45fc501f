//! The server's loop: wait for sockets, give each that is ready its turn, look at the clock.
//!
//! One system call returns the sockets that are ready. Besides it a single request costs one call to read and one to write.
//! `docs/decisions/0010-the-store-server-has-its-own-event-loop.md` has the reasons.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::accept::{Accepted, Listener};
use super::connection::{After, Connection, End};
use super::connections::{Connections, slot_of};
use super::control::{Control, Ended};
use super::hub::{Hub, LOG_TARGET, Rejection};
use super::lifecycle::Lifecycle;
use super::unknown::{Next, Unknowns};
use super::{Cause, Members, ServerOptions, Upgraded, after};
use crate::net::admission::ConnectionId;
use crate::net::local_peers::{LocalPeerCheck, Verdict};
use crate::store::table::ConnId;

/// A server that has been set up and does not run yet.
pub(super) struct EventLoop {
    poll: Poll,
    listeners: Vec<Listener>,
    connections: Connections,
    /// Connections that get a turn before the next wait.
    line: VecDeque<ConnId>,
    deadlines: BTreeSet<(Instant, ConnId)>,
    hub: Hub,
    lifecycle: Lifecycle,
    /// `None`: c10d is served.
    unknowns: Option<Unknowns>,
    /// `None`: every user of this machine may connect.
    local_peers: Option<LocalPeerCheck>,
    /// Connections are accepted.
    is_open: bool,
    /// `None`: from everywhere.
    members: Option<Members>,
    /// Something has happened that may end the server.
    may_be_over: bool,
}

impl EventLoop {
    /// Serves one table on all of these listeners. `poll` is the one that `control`'s other end wakes with [`WAKE`].
    pub(super) fn new(
        poll: Poll,
        listeners: Vec<std::net::TcpListener>,
        options: ServerOptions,
        control: Control,
    ) -> io::Result<EventLoop> {
        let near = listeners.first().map(std::net::TcpListener::local_addr).transpose()?;
        let local_peers = near.map_or(Ok(None), |near| LocalPeerCheck::new(options.local_peers, near))?;
        let mut prepared = Vec::new();
        for (at, listener) in listeners.into_iter().enumerate() {
            let mut listener = Listener::new(listener, &options)?;
            poll.registry().register(listener.socket(), Token(FIRST_LISTENER + at), Interest::READABLE)?;
            prepared.push(listener);
        }
        Ok(EventLoop {
            poll,
            listeners: prepared,
            connections: Connections::default(),
            line: VecDeque::new(),
            deadlines: BTreeSet::new(),
            unknowns: options.upgrades_only.clone().map(Unknowns::new),
            local_peers,
            is_open: false,
            members: None,
            hub: Hub::new(options, control.counters.clone()),
            lifecycle: Lifecycle::new(control),
            may_be_over: true,
        })
    }

    /// Accept connections from now on, from these machines.
    fn open_to(&mut self, members: Option<Members>) {
        (self.is_open, self.members) = (true, members);
        if let Some(check) = &self.local_peers {
            check.warn_if_off();
        }
    }

    /// Serves until the end. Then everything is closed.
    pub(super) fn run(mut self) -> Ended {
        if !self.hub.options.opens_on_request {
            self.open_to(None);
        }
        let mut events = Events::with_capacity(EVENTS);
        let ended = loop {
            if let Some(ended) = self.is_over() {
                break ended;
            }
            match self.poll.poll(&mut events, self.time_left()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(target: LOG_TARGET, %error, "the server cannot wait for its sockets and ends: this is a bug");
                    break Ended::Stopped;
                }
            }
            if let Err(ended) = self.give_turns(&events) {
                break ended;
            }
            self.accept(ACCEPTED_AT_ONCE);
            self.look_at_the_clock();
        };
        self.hub.on_end();
        tracing::debug!(target: LOG_TARGET, ?ended, "server ended");
        ended
    }

    fn give_turns(&mut self, events: &Events) -> Result<(), Ended> {
        // Once for each connection that is queued now. One that needs another turn is served again after the others.
        for _ in 0..self.line.len() {
            if let Some(id) = self.line.pop_front() {
                self.give_turn(id)?;
            }
        }
        events.iter().try_for_each(|event| self.on_event(event))
    }

    fn on_event(&mut self, event: &mio::event::Event) -> Result<(), Ended> {
        match event.token().0 {
            WAKE => self.may_be_over = true,
            token if token - FIRST_LISTENER < self.listeners.len() => self.listeners[token - FIRST_LISTENER].on_event(),
            token => {
                let at = token - FIRST_LISTENER - self.listeners.len();
                let Some(connection) = self.connections.at_mut(at) else {
                    return Ok(());
                };
                // A connection that is queued already waits for the others first.
                if connection.on_event(event) && !connection.in_line {
                    let id = connection.id;
                    self.give_turn(id)?;
                }
            }
        }
        Ok(())
    }

    /// An error ends the server: a table that is half changed must not answer anybody.
    fn give_turn(&mut self, id: ConnId) -> Result<(), Ended> {
        let Some(connection) = self.connections.get_mut(id) else {
            return Ok(());
        };
        connection.in_line = false;
        let deadline = connection.deadline;
        let hub = &mut self.hub;
        // A fault in one connection must not end the others.
        let result = catch_unwind(AssertUnwindSafe(|| connection.take_turn(hub)));
        if connection.deadline != deadline {
            self.deadlines.extend(connection.deadline.map(|deadline| (deadline, id)));
            if let Some(deadline) = deadline {
                self.deadlines.remove(&(deadline, id));
            }
        }
        match result {
            Ok(Ok(After::Event)) => {}
            Ok(Ok(After::Turn)) => self.queue(id),
            Ok(Err(end)) => self.end(id, end),
            Err(_) => {
                let peer = connection.peer;
                if let Some(request) = self.hub.half_changed_by() {
                    tracing::error!(
                        target: LOG_TARGET, %peer, ?request,
                        "a request has failed while it changed the table, which may be half changed: this is a bug. The server ends, \
                         and all its connections close"
                    );
                    return Err(Ended::HalfChanged);
                }
                tracing::error!(target: LOG_TARGET, %peer, "a connection could not be served: this is a bug");
                self.close(id);
            }
        }
        self.release();
        Ok(())
    }

    /// Writes a release to each connection whose wait a turn has ended.
    fn release(&mut self) {
        if self.hub.released.is_empty() {
            return;
        }
        // In the order of their waits: the first has waited longest.
        let mut released = std::mem::take(&mut self.hub.released);
        for id in released.drain(..) {
            let Some(connection) = self.connections.get_mut(id) else {
                continue;
            };
            if connection.release(&mut self.hub).is_err() {
                // Its own turn finds out that it is lost.
                self.queue(id);
            }
        }
        if released.capacity() <= KEPT_RELEASES {
            self.hub.released = released;
        }
    }

    fn queue(&mut self, id: ConnId) {
        if let Some(connection) = self.connections.get_mut(id)
            && !connection.in_line
        {
            connection.in_line = true;
            self.line.push_back(id);
        }
    }

    fn end(&mut self, id: ConnId, end: End) {
        let Some(connection) = self.close(id) else {
            return;
        };
        let peer = connection.peer;
        match end {
            End::Closed if connection.is_client() => tracing::debug!(target: LOG_TARGET, %peer, "connection closed"),
            End::Closed => tracing::debug!(target: LOG_TARGET, %peer, "connection closed before VALIDATE"),
            End::Rejected(rejection) => {
                // Counted before the close, so that a client that sees its connection end finds it counted.
                self.hub.reject(peer, &rejection);
                drop(connection);
            }
            End::Lost(error) => tracing::debug!(target: LOG_TARGET, %peer, %error, "connection lost"),
            End::TableReplaced => {
                tracing::debug!(target: LOG_TARGET, %peer, "connection closed: its table was replaced")
            }
            End::Upgrade(at, first_bytes) => match Upgraded::new(connection, first_bytes, self.hub.handed_over.clone())
            {
                Ok(upgraded) => self.hand_over(at, upgraded),
                Err(error) => tracing::debug!(target: LOG_TARGET, %peer, %error, "connection lost before its upgrade"),
            },
        }
    }

    fn hand_over(&mut self, at: usize, upgraded: Upgraded) {
        let (upgrade, peer) = (&self.hub.options.upgrades[at], upgraded.peer);
        if (upgrade.to.0)(upgraded) {
            self.hub.counters.connections_upgraded.fetch_add(1, Relaxed);
            tracing::debug!(target: LOG_TARGET, %peer, "connection upgraded");
        } else {
            let detail = format!(
                "this endpoint has no handler for connections that begin with `{}`",
                upgrade.magic.escape_ascii()
            );
            self.hub.reject(peer, &Rejection::new(Cause::UpgradeGone, detail));
        }
    }

    /// Removes a connection. It is closed when the returned value is dropped.
    fn close(&mut self, id: ConnId) -> Option<Connection> {
        let mut connection = self.connections.remove(id)?;
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        // Shut down explicitly: a process forked from this one may hold the socket open.
        let _ = self.poll.registry().deregister(connection.stream());
        if let (Some(unknowns), Some(permit)) = (&mut self.unknowns, connection.permit) {
            unknowns.ended(permit);
        }
        if connection.is_client() {
            self.hub.on_closed(id);
            self.lifecycle.on_closed(id);
            self.may_be_over = true;
        }
        Some(connection)
    }

    /// Begins with an empty table for clients that connect from now on. The others are closed: those that are open now, and those that
    /// are accepted here as soon as they say what they speak.
    fn replace_table(&mut self) {
        let clients: Vec<ConnId> = self.connections.iter().filter(|one| one.is_client()).map(|one| one.id).collect();
        clients.into_iter().for_each(|id| self.end(id, End::TableReplaced));
        for listener in &mut self.listeners {
            // Connections may wait that no event has reported yet, or for descriptors that are free now.
            listener.on_event();
            listener.paused_until = None;
        }
        self.accept(MOST_WAITING);
        self.hub.replace_table();
    }

    /// Accepts waiting connections, so many of each listener at most. The open ones wait meanwhile.
    fn accept(&mut self, at_most: usize) {
        if !self.is_open {
            return;
        }
        for at in 0..self.listeners.len() {
            let mut left = at_most;
            while left > 0 && self.listeners[at].is_due(Instant::now) {
                left -= 1;
                match self.listeners[at].accept() {
                    Accepted::Connection(stream, peer) => self.welcome(stream, peer),
                    Accepted::Nobody => {}
                    Accepted::Failed { error, is_new } => {
                        self.hub.counters.accept_errors.fetch_add(1, Relaxed);
                        if is_new && self.hub.may_log(ACCEPT_ERROR) {
                            tracing::warn!(target: LOG_TARGET, %error, "cannot accept connections, trying again");
                        }
                    }
                }
            }
        }
    }

    fn welcome(&mut self, stream: TcpStream, peer: SocketAddr) {
        let hub = &mut self.hub;
        hub.counters.connections_accepted.fetch_add(1, Relaxed);
        let limit = hub.options.max_connections;
        if self.connections.len() + hub.handed_over.shared() >= limit {
            let detail = format!("limit max_connections = {limit}");
            return hub.reject(peer, &Rejection::new(Cause::TooManyConnections, detail));
        }
        if !self.is_admitted(&stream, peer) {
            return;
        }
        let mut permit = None;
        if self.unknowns.is_some() {
            permit = self.permit_for(peer);
            if permit.is_none() {
                return self.hub.reject(peer, &crowded());
            }
        }
        let hub = &mut self.hub;
        tracing::debug!(target: LOG_TARGET, %peer, "connection accepted");
        let deadline = after(hub.options.hello_timeout);
        let id = self.connections.add(|id| Connection::new(id, stream, peer, (deadline, permit), hub));
        if let (Some(unknowns), Some(permit)) = (&mut self.unknowns, permit) {
            unknowns.serve(permit, id);
        }
        self.deadlines.insert((deadline, id));
        let token = Token(FIRST_LISTENER + self.listeners.len() + slot_of(id));
        let registry = self.poll.registry();
        let registered = self.connections.get_mut(id).map_or(Ok(()), |connection| {
            registry.register(connection.stream(), token, Interest::READABLE | Interest::WRITABLE)
        });
        if let Err(error) = registered {
            self.end(id, End::Lost(error));
        }
    }

    /// Where c10d is not served: the permit of a connection that has not said what it speaks. `None`: there is none for it.
    fn permit_for(&mut self, peer: SocketAddr) -> Option<ConnectionId> {
        self.unknowns.as_mut()?.arrived(peer.ip());
        loop {
            match self.unknowns.as_mut()?.next()? {
                Next::Serve(permit) => return Some(permit),
                Next::Close(other) => self.end(other, crowded().into()),
            }
        }
    }

    /// Whether a connection may come from this user, and from this machine. If not, that is counted and logged.
    fn is_admitted(&mut self, stream: &TcpStream, peer: SocketAddr) -> bool {
        let hub = &mut self.hub;
        if let Some(check) = &mut self.local_peers {
            match check.judge(stream, peer) {
                Verdict::Admit => {}
                Verdict::Refuse(refused) => {
                    hub.reject(peer, &Rejection::new(Cause::OtherUser, check.refusal(refused)));
                    return false;
                }
                Verdict::Gone => {
                    tracing::debug!(target: LOG_TARGET, %peer, "connection closed before its user was known");
                    return false;
                }
            }
        }
        let Some(members) = self.members.as_ref().filter(|members| !members.admit(stream, peer)) else { return true };
        if members.strict {
            hub.reject(peer, &Rejection::new(Cause::NotAMember, members.refusal()));
        } else if hub.may_log(NOT_A_MEMBER) {
            let way_out = members.way_out;
            tracing::warn!(target: LOG_TARGET, %peer, "the workers' store accepted a connection from an address that no node of the job has; {way_out}");
        }
        !members.strict
    }

    fn look_at_the_clock(&mut self) {
        if self.deadlines.is_empty() && self.hub.next_summary().is_none() && self.lifecycle.deadline().is_none() {
            return;
        }
        let now = Instant::now();
        self.hub.summarise(now);
        self.may_be_over |= self.lifecycle.deadline().is_some_and(|deadline| now >= deadline);
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.remove(&(deadline, id));
            if let Some(connection) = self.connections.get_mut(id) {
                let rejection = connection.on_deadline(&self.hub);
                self.end(id, End::Rejected(Box::new(rejection)));
            }
        }
    }

    /// How long to wait for an event; `None` is for ever.
    fn time_left(&self) -> Option<Duration> {
        let someone_waits = |listener: &Listener| listener.paused_until.is_none() && listener.is_due(Instant::now);
        let listeners = if self.is_open { &self.listeners[..] } else { &[] };
        if !self.line.is_empty() || listeners.iter().any(someone_waits) {
            return Some(Duration::ZERO);
        }
        let deadlines =
            [self.deadlines.first().map(|first| first.0), self.hub.next_summary(), self.lifecycle.deadline()];
        let retries = listeners.iter().map(|listener| listener.paused_until);
        let next = deadlines.into_iter().chain(retries).flatten().min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn is_over(&mut self) -> Option<Ended> {
        if !std::mem::take(&mut self.may_be_over) {
            return None;
        }
        let connections = &self.connections;
        let find = |peer| connections.iter().find(|one| one.is_client() && is_same(one.peer, peer)).map(|one| one.id);
        let stopped = self.lifecycle.listen(find);
        if let Some(members) = self.lifecycle.take_opened_to() {
            self.open_to(members);
        }
        for done in self.lifecycle.take_table_requests() {
            self.replace_table();
            drop(done);
        }
        stopped.or_else(|| self.lifecycle.is_over(self.hub.open_count()))
    }
}

fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && one.ip().to_canonical() == other.ip().to_canonical()
}

/// The event of a [`Waker`](mio::Waker).
pub(super) const WAKE: usize = 0;
const FIRST_LISTENER: usize = 1;

/// Events that one system call may report.
const EVENTS: usize = 1024;

/// Capacity for released connections that is kept from one release to the next.
const KEPT_RELEASES: usize = 1024;

/// Connections accepted before the open ones are served again.
const ACCEPTED_AT_ONCE: usize = 64;

/// More connections than the backlog of a listener holds by default (`net.core.somaxconn`, 4,096).
const MOST_WAITING: usize = 1 << 16;

/// A kind of log record, besides those of [`Cause`].
const ACCEPT_ERROR: &str = "accept_error";
/// Another.
const NOT_A_MEMBER: &str = "not_a_member_admitted";

/// Of a connection that has not said what it speaks while too many others have not either.
fn crowded() -> Rejection {
    Rejection::new(Cause::Crowded, "too many connections had not sent their first bytes".to_owned())
}

#[cfg(test)]
mod tests;
