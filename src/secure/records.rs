//! The records of a session's connection: TLS 1.3 after both ends have proven themselves.
//!
//! A coordinator speaks with thousands of nodes, and each says little and seldom. So a message costs mostly the memory that has to be
//! fetched for it, and rustls' and tokio-rustls' objects are several KiB for each connection. Here a half has a key, a number, and the
//! bytes that are under way. rustls still encrypts and decrypts; this file puts its results into records, and takes them out again
//! (RFC 8446, 5.1 and 5.2). The peer may be any end of ours, also one with rustls' own stream.
//!
//! Keys are not changed, and a peer that changes its own is refused. A connection that has carried as many records as one key may
//! protect ends, and its node connects again: a session needs years for them. The store's tunnel may need an hour, so it keeps rustls'
//! own stream (`docs/decisions/0094-sessions-have-records-of-their-own.md`).

use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use tokio_rustls::rustls::{
    Connection, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion, Tls13CipherSuite,
};

/// Bytes of a record's type, version and length.
const HEADER: usize = 5;
/// Bytes of plain text that a record may have.
const PLAIN_LIMIT: usize = 1 << 14;
/// Bytes that may follow a record's header.
const BODY_LIMIT: usize = PLAIN_LIMIT + 256;
/// Room for the next bytes, if no more are known to come.
const ROOM: usize = 1024;
/// Room that is kept when all has been read.
const KEPT: usize = 4 * ROOM;
/// The version in all records (RFC 8446, 5.2).
const VERSION: ProtocolVersion = ProtocolVersion::TLSv1_2;
/// A peer's last word.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// The keys of both directions of a connection.
pub struct Keys {
    suite: &'static Tls13CipherSuite,
    secrets: ExtractedSecrets,
}

impl Keys {
    /// The keys that a connection has agreed on.
    ///
    /// # Errors
    /// The peer has sent more, which would be lost with rustls' buffers; or rustls does not give the keys away.
    pub fn of(mut tls: Connection) -> Result<Self, Error> {
        let state = tls.process_new_packets()?;
        if state.plaintext_bytes_to_read() > 0 || state.peer_has_closed() {
            return Err(Error::General("more follows the proof, before its answer".to_owned()));
        }
        let suite = tls.negotiated_cipher_suite().and_then(|suite| suite.tls13()).ok_or(Error::HandshakeNotComplete)?;
        Ok(Self { suite, secrets: tls.dangerous_extract_secrets()? })
    }

    /// The halves of this connection, whose bytes come from `from` and go to `to`.
    ///
    /// # Errors
    /// The cipher is one that this file does not know.
    pub fn halves<R, W>(self, from: R, to: W) -> Result<(RecordReader<R>, RecordWriter<W>), Error> {
        let Self { suite, secrets: ExtractedSecrets { tx: (sent, tx), rx: (received, rx) } } = self;
        let (key, iv) = split(rx)?;
        let decrypter = suite.aead_alg.decrypter(key, iv);
        let (key, iv) = split(tx)?;
        let encrypter = suite.aead_alg.encrypter(key, iv);
        let reader = RecordReader {
            from,
            decrypter,
            number: received,
            bytes: Vec::new(),
            plain: 0..0,
            next: 0,
            has_ended: false,
            has_failed: false,
        };
        let limit = suite.common.confidentiality_limit;
        let writer = RecordWriter { to, encrypter, number: sent, limit, bytes: Vec::new(), gone: 0, has_ended: false };
        Ok((reader, writer))
    }
}

fn split(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Error::General("a cipher without secrets for records".to_owned())),
    }
}

/// What the peer sends.
pub struct RecordReader<R> {
    from: R,
    decrypter: Box<dyn MessageDecrypter>,
    /// Of the next record.
    number: u64,
    /// Bytes that have come.
    bytes: Vec<u8>,
    /// Those of them that are plain text and not read yet.
    plain: Range<usize>,
    /// Where the next record begins.
    next: usize,
    /// The peer has said its last word.
    has_ended: bool,
    /// Something came that no peer sends, and no more is read.
    has_failed: bool,
}

impl<R> RecordReader<R> {
    /// Takes the next record, if all of it has come.
    fn take_record(&mut self) -> io::Result<bool> {
        let Some(length) = body_length(&self.bytes[self.next..])? else { return Ok(false) };
        let begin = self.next + HEADER;
        let Some(body) = self.bytes.get_mut(begin..begin + length) else { return Ok(false) };
        let sealed = InboundOpaqueMessage::new(ContentType::ApplicationData, VERSION, body);
        let opened = self.decrypter.decrypt(sealed, self.number).map_err(invalid)?;
        self.number += 1;
        self.next = begin + length;
        match opened.typ {
            ContentType::ApplicationData => self.plain = begin..begin + opened.payload.len(),
            ContentType::Alert if opened.payload == CLOSE_NOTIFY => self.has_ended = true,
            kind => return Err(invalid(format!("a record of the type {kind:?} in a session"))),
        }
        Ok(true)
    }

    /// Make room for at least the rest of the next record, where no byte is still to be read but those of it that have come.
    fn make_room(&mut self) {
        self.bytes.drain(..self.next);
        self.next = 0;
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT {
            self.bytes = Vec::new();
        }
        let whole = body_length(&self.bytes).ok().flatten().map_or(0, |length| HEADER + length);
        self.bytes.reserve(whole.saturating_sub(self.bytes.len()).max(ROOM));
    }
}

/// How many bytes follow the header, once it has come.
fn body_length(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(&[kind, _, _, high, low]) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
    if kind != u8::from(ContentType::ApplicationData) {
        return Err(invalid(format!("a record of the type {kind}, must be encrypted")));
    }
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > BODY_LIMIT {
        return Err(invalid(format!("a record of {length} bytes, must have at most {BODY_LIMIT}")));
    }
    Ok(Some(length))
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<R: AsyncRead + Unpin> AsyncRead for RecordReader<R> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.plain.is_empty() {
                let count = this.plain.len().min(buf.remaining());
                let end = this.plain.start + count;
                buf.put_slice(&this.bytes[this.plain.start..end]);
                this.plain.start = end;
                return Poll::Ready(Ok(()));
            }
            if this.has_ended {
                return Poll::Ready(Ok(()));
            }
            if this.has_failed {
                return Poll::Ready(Err(invalid("a record before was refused")));
            }
            match this.take_record() {
                Ok(true) => continue,
                Ok(false) => this.make_room(),
                Err(error) => {
                    this.has_failed = true;
                    return Poll::Ready(Err(error));
                }
            }
            if ready!(pin!(this.from.read_buf(&mut this.bytes)).poll(cx))? == 0 {
                // Whoever stands between could have cut it off.
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

/// What the peer gets.
pub struct RecordWriter<W> {
    to: W,
    encrypter: Box<dyn MessageEncrypter>,
    /// Of the next record.
    number: u64,
    /// Records that the key may protect.
    limit: u64,
    /// The records that are being sent.
    bytes: Vec<u8>,
    /// How many of these bytes have gone.
    gone: usize,
    /// The last word is said.
    has_ended: bool,
}

impl<W: AsyncWrite + Unpin> RecordWriter<W> {
    /// Make the next record. All before it have gone.
    fn put(&mut self, typ: ContentType, plain: &[u8]) -> io::Result<()> {
        if self.number >= self.limit {
            return Err(io::Error::other(format!(
                "the connection has carried {} records, as many as one key may protect",
                self.number
            )));
        }
        let message = OutboundPlainMessage { typ, version: VERSION, payload: OutboundChunks::Single(plain) };
        self.bytes = self.encrypter.encrypt(message, self.number).map_err(io::Error::other)?.encode();
        self.gone = 0;
        self.number += 1;
        Ok(())
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.gone < self.bytes.len() {
            match ready!(Pin::new(&mut self.to).poll_write(cx, &self.bytes[self.gone..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.gone += count,
            }
        }
        (self.bytes, self.gone) = (Vec::new(), 0);
        Poll::Ready(Ok(()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for RecordWriter<W> {
    /// What does not go at once goes when more is written, or with a flush.
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(this.poll_send(cx))?;
        let count = buf.len().min(PLAIN_LIMIT);
        if count > 0 {
            this.put(ContentType::ApplicationData, &buf[..count])?;
            if let Poll::Ready(Err(error)) = this.poll_send(cx) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        Pin::new(&mut this.to).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        if !this.has_ended {
            this.put(ContentType::Alert, &CLOSE_NOTIFY)?;
            this.has_ended = true;
            ready!(this.poll_send(cx))?;
        }
        Pin::new(&mut this.to).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
