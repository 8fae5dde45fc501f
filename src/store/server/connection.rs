//! One connection, from its first byte to its last.
//!
//! Owns the order of reading, carrying out and writing. A connection that is slow, silent or hostile holds up nobody. It gets
//! a turn only when its socket is ready, and the turn ends after a bounded amount of work. A list of all keys takes many turns.
//! Between turns a connection keeps the bytes of an incomplete request and those that the socket has not taken. An idle one
//! keeps no buffer.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use bytes::BytesMut;
use mio::net::TcpStream;
use rustix::net::RecvFlags;

use super::hub::{Hub, Rejection, list_more};
use super::outbox::Outbox;
use super::{Cause, ConnectionPermit, Upgraded, after};
use crate::net::admission::ConnectionId;
use crate::store::protocol::hello::{Visitor, preview, recognise};
use crate::store::protocol::{Decoder, ProtoError, Reply, Request, WaitReply};
use crate::store::table::{ConnId, Listing, Violation};

pub(super) struct Connection {
    pub id: ConnId,
    pub peer: SocketAddr,
    /// When the connection is closed unless it has made progress by then.
    pub deadline: Option<Instant>,
    /// Where c10d is not served: what it holds until it has said what it speaks.
    pub permit: Option<ConnectionId>,
    /// Whether it is queued for a turn.
    pub in_line: bool,
    stream: TcpStream,
    /// The number of the table for which it was accepted.
    table: u64,
    stage: Stage,
    decoder: Decoder,
    /// Bytes received and not carried out yet.
    input: BytesMut,
    /// Bytes that the socket has not taken yet.
    unsent: Option<Box<Outbox>>,
    /// A list that is being written. Requests that came after its request have to wait.
    listing: Option<Box<Listing>>,
    /// Its wait has ended meanwhile. The release is to be written behind that list.
    is_released: bool,
    /// The socket may hold more bytes.
    is_readable: bool,
    /// The peer has closed its sending side: nothing follows the bytes in the socket.
    is_ending: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has not identified itself yet.
    Hello,
    /// A c10d client.
    Open,
    /// The client has closed its sending side, and gets the rest of its replies.
    Leaving,
}

/// What a connection waits for after its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// An event of its socket.
    Event,
    /// Another turn.
    Turn,
}

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum End {
    /// Its client closed it and has received all its replies.
    Closed,
    /// The server closes it.
    Rejected(Box<Rejection>),
    Lost(io::Error),
    /// The table for which it was accepted has been replaced.
    TableReplaced,
    /// It speaks the protocol of the upgrade at this index. With the bytes received so far.
    Upgrade(usize, BytesMut),
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

impl Connection {
    /// A connection that was just accepted. It is closed at `deadline` unless it has identified itself.
    pub(super) fn new(
        id: ConnId,
        stream: TcpStream,
        peer: SocketAddr,
        (deadline, permit): (Instant, Option<ConnectionId>),
        hub: &Hub,
    ) -> Self {
        Connection {
            id,
            peer,
            deadline: Some(deadline),
            permit,
            in_line: false,
            stream,
            table: hub.table_number(),
            stage: Stage::Hello,
            decoder: Decoder::new(hub.options.limits.clone()),
            input: BytesMut::new(),
            unsent: None,
            listing: None,
            is_released: false,
            is_readable: false,
            is_ending: false,
        }
    }

    pub(super) fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Whether it is a c10d client's.
    pub(super) fn is_client(&self) -> bool {
        self.stage != Stage::Hello
    }

    /// Notes an event of the socket. True if the connection needs a turn.
    pub(super) fn on_event(&mut self, event: &mio::event::Event) -> bool {
        // Edge-triggered: the event is not repeated, so the readiness is remembered.
        self.is_ending |= event.is_read_closed() || event.is_error();
        self.is_readable |= event.is_readable() || self.is_ending;
        self.is_readable || (event.is_writable() && self.unsent.is_some())
    }

    /// The rejection when its deadline is over.
    pub(super) fn on_deadline(&self, hub: &Hub) -> Rejection {
        match self.stage {
            // Its sending side is closed.
            Stage::Open | Stage::Leaving => {
                let detail = format!("closed with unread replies for {:?}", hub.options.flush_timeout);
                Rejection::new(Cause::NotReading, detail)
            }
            Stage::Hello => {
                let detail = format!("no VALIDATE within {:?}", hub.options.hello_timeout);
                Rejection::new(Cause::HelloTimeout, detail).with_preview(preview(&self.input))
            }
        }
    }

    /// Its wait is over.
    pub(super) fn release(&mut self, hub: &mut Hub) -> io::Result<()> {
        if self.listing.is_some() {
            self.is_released = true;
            return Ok(());
        }
        let mut outbox = self.take_outbox(hub);
        Reply::Wait(WaitReply::StopWaiting).encode(&mut *outbox);
        let written = write(&self.stream, &mut outbox);
        self.put_back_outbox(hub, outbox);
        written
    }

    /// Reads, carries out, writes.
    pub(super) fn take_turn(&mut self, hub: &mut Hub) -> Result<After, End> {
        let mut outbox = self.take_outbox(hub);
        let result = if self.stage == Stage::Leaving { Ok(After::Event) } else { self.converse(hub, &mut outbox) };
        // Also after an error: valid requests before it are answered as far as the socket takes the replies.
        let written = write(&self.stream, &mut outbox);
        self.put_back_outbox(hub, outbox);
        let next = result?;
        written?;
        if self.stage == Stage::Leaving {
            if self.unsent.is_none() {
                return Err(End::Closed);
            }
            self.deadline.get_or_insert_with(|| after(hub.options.flush_timeout));
        }
        if self.listing.is_some() && self.unsent.is_some() {
            // The list is continued when the socket takes more.
            if self.is_ending {
                self.deadline.get_or_insert_with(|| after(hub.options.flush_timeout));
            }
            return Ok(After::Event);
        }
        Ok(next)
    }

    /// Carries out requests until none is complete or the turn is over. Buffered requests come first.
    fn converse(&mut self, hub: &mut Hub, outbox: &mut Outbox) -> Result<After, End> {
        let mut talk = Talk { outbox, done: 0, requests: 0 };
        let mut buf = self.take_input(hub);
        let result = self.talk(hub, &mut talk, &mut buf);
        hub.count(talk.requests);
        self.put_back_input(hub, buf);
        result
    }

    fn talk(&mut self, hub: &mut Hub, talk: &mut Talk, buf: &mut BytesMut) -> Result<After, End> {
        loop {
            if self.stage == Stage::Open {
                self.answer(hub, talk, buf)?;
            }
            if talk.done >= REQUESTS_PER_TURN || self.listing.is_some() {
                return Ok(After::Turn);
            }
            if !self.is_readable {
                return Ok(After::Event);
            }
            match self.read(buf)? {
                None => return Ok(After::Event),
                // The client has closed its sending side. It gets its replies, but no release: it counts as gone.
                Some(0) if self.stage == Stage::Open => {
                    hub.forget_wait(self.id);
                    self.stage = Stage::Leaving;
                    return Ok(After::Event);
                }
                // A health check, or a client that gave up.
                Some(0) => return Err(End::Closed),
                Some(count) => talk.done += count / BYTES_PER_REQUEST,
            }
            if self.stage == Stage::Hello {
                self.greet(hub, buf)?;
            }
        }
    }

    /// Identifies the peer by its first bytes.
    fn greet(&mut self, hub: &mut Hub, buf: &mut BytesMut) -> Result<(), End> {
        match recognise(buf, hub.options.upgrades.iter().map(|upgrade| upgrade.magic)) {
            Visitor::Unknown => {}
            Visitor::Client if hub.options.upgrades_only.is_some() => {
                return Err(Rejection::new(Cause::Unproven, UNPROVEN.to_owned()).into());
            }
            Visitor::Client if self.table != hub.table_number() => return Err(End::TableReplaced),
            Visitor::Client if hub.open_count() >= hub.options.max_clients => {
                let detail = format!("limit max_clients = {} of c10d clients", hub.options.max_clients);
                return Err(Rejection::new(Cause::TooManyConnections, detail).into());
            }
            Visitor::Client => {
                self.stage = Stage::Open;
                self.deadline = None;
                hub.on_opened();
            }
            Visitor::Upgrade(at) => return Err(End::Upgrade(at, BytesMut::from(&buf[..]))),
            Visitor::Foreign => {
                let preview = preview(buf);
                let detail = match self.decoder.decode(buf) {
                    Err(error) => error.to_string(),
                    Ok(_) => "not c10d".to_owned(),
                };
                return Err(Rejection::new(Cause::Foreign, detail).with_preview(preview).into());
            }
        }
        Ok(())
    }

    /// Carries out complete requests, as far as the turn lasts.
    fn answer(&mut self, hub: &mut Hub, talk: &mut Talk, buf: &mut BytesMut) -> Result<(), End> {
        while talk.done < REQUESTS_PER_TURN {
            if let Some(listing) = &mut self.listing {
                if talk.outbox.len() > LISTED_AHEAD_BYTES {
                    return Ok(());
                }
                talk.done += list_more(listing, talk.outbox);
                if listing.left() == 0 {
                    self.listing = None;
                    if std::mem::take(&mut self.is_released) {
                        Reply::Wait(WaitReply::StopWaiting).encode(talk.outbox);
                    }
                }
                continue;
            }
            let request = match self.decoder.decode(buf) {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.refused(error, buf)),
            };
            if request == Request::Validate {
                continue;
            }
            self.check_reading(hub, talk.outbox)?;
            talk.done += hub.cost(&request);
            talk.requests += 1;
            self.listing = hub.apply(self.id, request, talk.outbox)?.map(Box::new);
        }
        Ok(())
    }

    fn refused(&self, error: ProtoError, buf: &[u8]) -> End {
        let cause = if let ProtoError::TooLong { .. } = error { Cause::TooLong } else { Cause::Protocol };
        Rejection::new(cause, error.to_string()).with_key(self.decoder.refused_key(buf)).into()
    }

    /// Rejects a client that leaves too many bytes of replies unread.
    fn check_reading(&self, hub: &Hub, outbox: &mut Outbox) -> Result<(), End> {
        let limit = hub.options.reply_buffer_bytes;
        if outbox.len() > limit {
            write(&self.stream, outbox)?;
        }
        let queued = outbox.len();
        if queued > limit {
            let detail = format!("{queued} bytes of replies wait to be read, limit reply_buffer_bytes = {limit}");
            return Err(Rejection::new(Cause::NotReading, detail).into());
        }
        Ok(())
    }

    /// Reads once. 0 is the end of the stream, `None` means that nothing has arrived yet.
    fn read(&mut self, buf: &mut BytesMut) -> io::Result<Option<usize>> {
        let most = self.make_room(buf);
        let room = &mut buf.spare_capacity_mut()[..most];
        let count = match rustix::net::recv(&self.stream, room, RecvFlags::empty()) {
            Ok(((read, _), _)) => read.len(),
            Err(rustix::io::Errno::INTR) => return self.read(buf),
            Err(rustix::io::Errno::AGAIN) => {
                self.is_readable = false;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        // A short read has emptied the socket, and the next bytes raise another event. That saves one system call in three where
        // requests come one by one. The end of the stream raises no second event.
        self.is_readable = count == most || self.is_ending;
        // SAFETY: `count` bytes from the old end on have just been written.
        #[expect(unsafe_code, reason = "there is no safe way to read into memory that has not been zeroed")]
        unsafe {
            buf.set_len(buf.len() + count);
        }
        Ok(Some(count))
    }

    /// Makes room in the buffer and says how much to read at most.
    ///
    /// The buffer grows with the bytes that have arrived, not with the length that was announced. A big request is read exactly
    /// to its end: its values may be kept as slices of the buffer, which should hold little else.
    fn make_room(&self, buf: &mut BytesMut) -> usize {
        let missing = self.decoder.needed().saturating_sub(buf.len());
        let spare = buf.capacity() - buf.len();
        let most = if missing > READ_BYTES {
            missing.min(buf.len().max(GROWTH_BYTES))
        } else if buf.len() > READ_BYTES {
            missing.max(spare.min(READ_BYTES))
        } else {
            READ_BYTES
        };
        if missing > READ_BYTES && spare < most {
            // Leaves the shared buffer to the others.
            let mut own = BytesMut::with_capacity(buf.len() + most);
            own.extend_from_slice(buf);
            *buf = own;
        }
        buf.reserve(most);
        most
    }

    /// The shared outbox, or the connection's own if bytes wait in it.
    fn take_outbox(&mut self, hub: &mut Hub) -> Box<Outbox> {
        self.unsent.take().or_else(|| hub.outbox.take()).unwrap_or_default()
    }

    fn put_back_outbox(&mut self, hub: &mut Hub, outbox: Box<Outbox>) {
        let permit = if outbox.is_empty() { &mut hub.outbox } else { &mut self.unsent };
        *permit = Some(outbox);
    }

    /// The shared buffer with the bytes received so far, or the connection's own if those are too many to be worth copying.
    fn take_input(&mut self, hub: &mut Hub) -> BytesMut {
        if self.input.len() > READ_BYTES {
            return std::mem::take(&mut self.input);
        }
        let mut buf = std::mem::take(&mut hub.input);
        buf.extend_from_slice(&self.input);
        self.input = BytesMut::new();
        buf
    }

    fn put_back_input(&mut self, hub: &mut Hub, mut buf: BytesMut) {
        if buf.len() > READ_BYTES {
            self.input = buf;
            return;
        }
        if !buf.is_empty() {
            self.input = BytesMut::from(&buf[..]);
            buf.clear();
        }
        if hub.input.capacity() == 0 {
            hub.input = buf;
        }
    }
}

/// The state of one turn.
struct Talk<'a> {
    outbox: &'a mut Outbox,
    /// Work done, in requests.
    done: usize,
    /// Requests carried out.
    requests: u64,
}

impl Upgraded {
    /// `None` if the connection has been lost meanwhile.
    pub(super) fn new(connection: Connection, first_bytes: BytesMut, permit: ConnectionPermit) -> io::Result<Upgraded> {
        let Connection { stream, peer, .. } = connection;
        let local = stream.local_addr()?;
        Ok(Upgraded { stream: stream.into(), first_bytes, peer, local, permit })
    }
}

/// Writes as much as the socket takes.
fn write(stream: &TcpStream, outbox: &mut Outbox) -> io::Result<()> {
    use std::io::Write;
    let mut stream: &TcpStream = stream;
    while !outbox.is_empty() {
        let (slices, count) = outbox.slices();
        let written = match &slices[..count] {
            [one] => stream.write(one),
            several => stream.write_vectored(several),
        };
        match written {
            Ok(written) => outbox.advance(written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Why a c10d client is closed where only other protocols are served.
const UNPROVEN: &str =
    "this endpoint is protected, and has no store for c10d clients, which can show neither a token nor a certificate";

/// Work of one turn, after which the other connections have theirs. Without a bound, a connection that always has more
/// requests would keep the thread.
const REQUESTS_PER_TURN: usize = 128;

/// A list is not continued while more than this waits to be sent.
const LISTED_AHEAD_BYTES: usize = 256 * 1024;

/// Bytes received that count as one request.
const BYTES_PER_REQUEST: usize = 4 * 1024;

/// Bytes read at a time, unless a single request is larger. Enough for many small requests, and little to copy of a large one.
const READ_BYTES: usize = 16 * 1024;

/// The next piece of a large request after that. Each further piece is as large as all before it.
const GROWTH_BYTES: usize = 64 * 1024;
