//! One connection, from its first byte to its last.
//!
//! Owns its receive buffer and the order of reading, applying and writing. A connection that is slow, silent or
//! hostile holds up nobody: it reads and writes only when its socket is ready, and yields when its turn is over.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::hello::{Visitor, preview, recognise};
use super::hub::{Hub, LOG_TARGET, Rejection};
use super::outbox::Outbox;
use super::{Cause, Upgraded};
use crate::proto::{Decoder, ProtoError, Reply, Request};
use crate::store::table::{ConnId, Violation};

/// Serves a connection that has just been accepted.
pub(super) async fn run(hub: Rc<Hub>, mut stream: TcpStream, peer: SocketAddr) {
    let mut buf = BytesMut::new();
    let visitor = match timeout(hub.options.hello_timeout, hello(&hub, &mut stream, &mut buf)).await {
        Ok(Ok(visitor)) => visitor,
        Ok(Err(error)) => {
            tracing::debug!(target: LOG_TARGET, %peer, %error, "connection lost before it said anything");
            return;
        }
        Err(_) => {
            let detail = format!("no VALIDATE within {:?}", hub.options.hello_timeout);
            return hub.reject(peer, &Rejection::new(Cause::HelloTimeout, detail).with_preview(preview(&buf)));
        }
    };
    match visitor {
        Visitor::Client => {
            let open = hub.open(stream, peer);
            match Talk::new(&hub, &open.connection, buf).run().await {
                Ok(()) => tracing::debug!(target: LOG_TARGET, %peer, "connection closed"),
                Err(End::Rejected(rejection)) => hub.reject(peer, &rejection),
                Err(End::Lost(error)) => tracing::debug!(target: LOG_TARGET, %peer, %error, "connection lost"),
            }
        }
        Visitor::Upgrade(at) => upgrade(&hub, at, stream, buf, peer),
        Visitor::Foreign => {
            let detail = match Decoder::new(hub.options.limits.clone()).decode(&mut buf.clone()) {
                Err(error) => error.to_string(),
                Ok(_) => "not c10d".to_owned(),
            };
            hub.reject(peer, &Rejection::new(Cause::Foreign, detail).with_preview(preview(&buf)));
        }
        // Closed before it had said enough: a health check, or a client that gave up.
        Visitor::Unknown => tracing::debug!(target: LOG_TARGET, %peer, "connection closed before VALIDATE"),
    }
}

/// Reads until it is clear who is there, or no more comes.
async fn hello(hub: &Hub, stream: &mut TcpStream, buf: &mut BytesMut) -> io::Result<Visitor> {
    loop {
        match recognise(buf, &hub.options.upgrades) {
            Visitor::Unknown => {}
            visitor => return Ok(visitor),
        }
        buf.reserve(SMALL_READ_BYTES);
        if stream.read_buf(buf).await? == 0 {
            return Ok(Visitor::Unknown);
        }
    }
}

fn upgrade(hub: &Hub, at: usize, stream: TcpStream, first_bytes: BytesMut, peer: SocketAddr) {
    let local = match stream.local_addr() {
        Ok(local) => local,
        Err(error) => return tracing::debug!(target: LOG_TARGET, %peer, %error, "connection lost before its upgrade"),
    };
    let upgrade = &hub.options.upgrades[at];
    let place = hub.handed_over.clone();
    match upgrade.to.send(Upgraded { stream, first_bytes, peer, local, place }) {
        Ok(()) => {
            hub.counters.connections_upgraded.fetch_add(1, Relaxed);
            tracing::debug!(target: LOG_TARGET, %peer, "connection upgraded");
        }
        Err(_) => {
            let detail = format!("nobody takes over `{}`", upgrade.magic.escape_ascii());
            hub.reject(peer, &Rejection::new(Cause::UpgradeGone, detail));
        }
    }
}

/// What other connections see of a connection.
pub(super) struct Connection {
    pub id: ConnId,
    pub peer: SocketAddr,
    stream: TcpStream,
    outbox: RefCell<Outbox>,
    /// Something was queued by another connection and could not be written at once.
    nudged: Notify,
}

impl Connection {
    pub(super) fn new(id: ConnId, stream: TcpStream, peer: SocketAddr) -> Self {
        Connection { id, peer, stream, outbox: RefCell::default(), nudged: Notify::new() }
    }

    pub(super) fn queue(&self, reply: Reply) {
        reply.encode(&mut *self.outbox.borrow_mut());
    }

    /// Writes what was queued from outside, now if the socket takes it.
    pub(super) fn nudge(&self) {
        if !matches!(self.flush(), Ok(true)) {
            self.nudged.notify_one();
        }
    }

    /// Writes as much as the socket takes; true if that was all.
    fn flush(&self) -> io::Result<bool> {
        let mut outbox = self.outbox.borrow_mut();
        while !outbox.is_empty() {
            let (slices, count) = outbox.slices();
            let written = match &slices[..count] {
                [one] => self.stream.try_write(one),
                several => self.stream.try_write_vectored(several),
            };
            match written {
                Ok(written) => outbox.advance(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// A short read has emptied the socket: what comes next raises an event of its own (epoll is edge-triggered), so the
    /// runtime need not be asked to try once more. Saves one system call in three where requests come one by one.
    fn expect_no_more(&self) {
        let nothing = || -> io::Result<()> { Err(io::ErrorKind::WouldBlock.into()) };
        let _ = self.stream.try_io(Interest::READABLE, nothing);
    }

    fn queued_bytes(&self) -> usize {
        self.outbox.borrow().len()
    }
}

/// Why a conversation ended other than by the client closing it.
enum End {
    Rejected(Box<Rejection>),
    Lost(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        End::Lost(error)
    }
}

impl From<Rejection> for End {
    fn from(rejection: Rejection) -> Self {
        End::Rejected(Box::new(rejection))
    }
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        let cause = match violation {
            Violation::NotANumber(_) => Cause::NotANumber,
            Violation::AlreadyWaiting(_) => Cause::AlreadyWaiting,
            Violation::Full { .. } => Cause::Full,
            Violation::ValidatedTwice => Cause::Protocol,
        };
        let key = if let Violation::Full { key, .. } = &violation { Some(&key[..]) } else { None };
        Rejection::new(cause, violation.to_string()).with_key(key).into()
    }
}

/// The conversation with one validated client.
struct Talk<'a> {
    hub: &'a Hub,
    connection: &'a Connection,
    buf: BytesMut,
    decoder: Decoder,
    read_bytes: usize,
    turn: Turn,
}

impl<'a> Talk<'a> {
    fn new(hub: &'a Hub, connection: &'a Connection, buf: BytesMut) -> Self {
        let decoder = Decoder::new(hub.options.limits.clone());
        Talk { hub, connection, buf, decoder, read_bytes: SMALL_READ_BYTES, turn: Turn::default() }
    }

    async fn run(mut self) -> Result<(), End> {
        loop {
            let answered = self.answer().await;
            // Also after an error: what was asked properly before it is answered as far as the socket takes it.
            let flushed = self.connection.flush();
            answered?;
            flushed?;
            if self.read().await? == 0 {
                return self.finish().await;
            }
        }
    }

    /// Carries out all requests that have arrived whole.
    async fn answer(&mut self) -> Result<(), End> {
        while let Some(request) = self.decoder.decode(&mut self.buf).map_err(|error| self.refused(error))? {
            if request == Request::Validate {
                continue;
            }
            self.check_reading()?;
            self.hub.apply(self.connection, request)?;
            if self.turn.is_over_after(1) {
                self.connection.flush()?;
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    fn refused(&self, error: ProtoError) -> End {
        let cause = if let ProtoError::TooLong { .. } = error { Cause::TooLong } else { Cause::Protocol };
        Rejection::new(cause, error.to_string()).with_key(self.decoder.refused_key(&self.buf)).into()
    }

    /// A client that leaves its replies unread gets no more of them.
    fn check_reading(&self) -> Result<(), End> {
        let limit = self.hub.options.reply_buffer_bytes;
        if self.connection.queued_bytes() > limit {
            self.connection.flush()?;
        }
        let queued = self.connection.queued_bytes();
        if queued > limit {
            let detail = format!("{queued} bytes of replies wait to be read, limit reply_buffer_bytes = {limit}");
            return Err(Rejection::new(Cause::NotReading, detail).into());
        }
        Ok(())
    }

    /// Waits for bytes and takes some; writes meanwhile what could not be written before. 0 means that no more come.
    async fn read(&mut self) -> io::Result<usize> {
        let connection = self.connection;
        let most = self.make_room();
        loop {
            let all_sent = connection.queued_bytes() == 0;
            let interest = if all_sent { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
            let ready = tokio::select! {
                ready = connection.stream.ready(interest) => ready?,
                () = connection.nudged.notified() => continue,
            };
            if ready.is_writable() && !all_sent {
                connection.flush()?;
            }
            if !ready.is_readable() {
                continue;
            }
            match connection.stream.try_read_buf(&mut (&mut self.buf).limit(most)) {
                Ok(count) => {
                    if count < most {
                        connection.expect_no_more();
                    }
                    self.read_bytes =
                        if count >= most { (self.read_bytes * 2).min(LARGE_READ_BYTES) } else { SMALL_READ_BYTES };
                    if self.turn.is_over_after(count / BYTES_PER_REQUEST) {
                        tokio::task::yield_now().await;
                    }
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes room in the buffer and says how much to read at most.
    ///
    /// Room grows with what has arrived, not with what was announced. A big request is read exactly to its end: its
    /// values may be kept as slices of the buffer, which should hold little else.
    fn make_room(&mut self) -> usize {
        if self.buf.is_empty() && self.buf.capacity() > LARGE_READ_BYTES {
            self.buf = BytesMut::new();
        }
        let missing = self.decoder.needed().saturating_sub(self.buf.len());
        let most = if missing > LARGE_READ_BYTES {
            missing.min(self.buf.len().max(LARGE_READ_BYTES))
        } else {
            missing.max(self.read_bytes)
        };
        self.buf.reserve(most);
        most
    }

    /// The client sends no more. It gets what it asked for, but no release: it counts as gone.
    async fn finish(self) -> Result<(), End> {
        self.hub.forget_wait(self.connection.id);
        let flush = async {
            while !self.connection.flush()? {
                self.connection.stream.writable().await?;
            }
            Ok(())
        };
        match timeout(self.hub.options.flush_timeout, flush).await {
            Ok(result) => result,
            Err(_) => {
                let detail = format!("closed with unread replies for {:?}", self.hub.options.flush_timeout);
                Err(Rejection::new(Cause::NotReading, detail).into())
            }
        }
    }
}

/// How long a connection may go on before the others have theirs. Without it, one that always has more to say would
/// never let go of the thread.
#[derive(Default)]
struct Turn {
    done: usize,
}

impl Turn {
    fn is_over_after(&mut self, requests: usize) -> bool {
        self.done += requests;
        let over = self.done >= REQUESTS_PER_TURN;
        if over {
            self.done = 0;
        }
        over
    }
}

const REQUESTS_PER_TURN: usize = 128;

/// So many bytes received count as one request.
const BYTES_PER_REQUEST: usize = 4 * 1024;

/// What an idle connection's buffer has room for.
const SMALL_READ_BYTES: usize = 4 * 1024;

/// What a busy one's has, unless a single request is larger.
const LARGE_READ_BYTES: usize = 64 * 1024;
