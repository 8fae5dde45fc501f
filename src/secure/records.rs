//! The records of a session's connection: TLS 1.3 after both ends have proven themselves.
//!
//! A coordinator speaks with thousands of nodes, and each says little and seldom. So a message costs mostly the memory that has to be
//! fetched for it, and rustls' and tokio-rustls' objects are several KiB for each connection. Here a half has a key, a number, and the
//! bytes that are under way, in one allocation. ring encrypts and decrypts, as it does for rustls. This file makes the nonces, builds
//! the records and parses them (RFC 8446, 5.1 to 5.3). The peer may be any end of ours, also one with rustls' own
//! stream.
//!
//! Keys are not changed, and a peer that changes its own is refused. A connection that has carried as many records as one key may
//! protect ends, and its node connects again: a session needs years for them. The store's tunnel may need an hour, so it keeps rustls'
//! own stream (`docs/decisions/0094-sessions-have-records-of-their-own.md`).

use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::error::Unspecified;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::{
    Connection, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, Tls13CipherSuite,
};

/// Bytes of a record's type, version and length.
const HEADER: usize = 5;
/// Bytes of plain text that a record may have.
const PLAIN_LIMIT: usize = 1 << 14;
/// Bytes of plain text, type and padding that a record may have (RFC 8446, 5.4).
const INNER_LIMIT: usize = PLAIN_LIMIT + 1;
/// The version in the header of all records: that of TLS 1.2 (RFC 8446, 5.2).
const VERSION: [u8; 2] = [3, 3];
/// Bytes that may follow a record's header.
const BODY_LIMIT: usize = PLAIN_LIMIT + 256;
/// Room for the next bytes, if no more are known to come.
const ROOM: usize = 1024;
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
        let reader = RecordReader {
            from,
            cipher: Cipher::new(&rx, received)?,
            bytes: Vec::new(),
            plain: 0..0,
            next: 0,
            has_ended: false,
            has_failed: false,
        };
        let limit = suite.common.confidentiality_limit;
        let writer =
            RecordWriter { to, cipher: Cipher::new(&tx, sent)?, limit, bytes: Vec::new(), gone: 0, has_ended: false };
        Ok((reader, writer))
    }
}

/// The key, the base of the nonces and the record number of one direction.
struct Cipher {
    /// Of the next record.
    number: u64,
    iv: [u8; NONCE_LEN],
    key: LessSafeKey,
}

impl Cipher {
    fn new(secrets: &ConnectionTrafficSecrets, number: u64) -> Result<Self, Error> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(Error::General("the connection has a cipher that sessions do not support".to_owned())),
        };
        let unusable = || Error::General("a key or an IV does not have the cipher's length".to_owned());
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unusable())?;
        let iv = iv.as_ref().try_into().map_err(|_| unusable())?;
        Ok(Self { number, iv, key: LessSafeKey::new(key) })
    }

    /// The nonce of the next record (RFC 8446, 5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        let number = self.number.to_be_bytes();
        nonce[NONCE_LEN - number.len()..].iter_mut().zip(number).for_each(|(byte, other)| *byte ^= other);
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Make the next record.
    fn seal(&mut self, typ: ContentType, plain: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let length = plain.len() + 1 + self.key.algorithm().tag_len();
        let [.., high, low] = length.to_be_bytes();
        let header = [ContentType::ApplicationData.into(), VERSION[0], VERSION[1], high, low];
        let mut record = Vec::with_capacity(HEADER + length);
        record.extend_from_slice(&header);
        record.extend_from_slice(plain);
        record.push(typ.into());
        let nonce = self.nonce();
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), &mut record[HEADER..])?;
        record.extend_from_slice(tag.as_ref());
        Ok(record)
    }

    /// Decrypt the record that begins here. `None`: not all of it has come.
    fn open(&mut self, bytes: &mut [u8]) -> io::Result<Option<Opened>> {
        let Some(length) = body_length(bytes)? else { return Ok(None) };
        let end = HEADER + length;
        let Some((header, body)) = bytes.get_mut(..end).and_then(<[u8]>::split_first_chunk_mut::<HEADER>) else {
            return Ok(None);
        };
        let nonce = self.nonce();
        let plain = self
            .key
            .open_in_place(nonce, Aad::from(*header), body)
            .map_err(|_| invalid("a record cannot be decrypted"))?;
        if plain.len() > INNER_LIMIT {
            return Err(invalid(format!(
                "a record has {} bytes of text and type, must have at most {INNER_LIMIT}",
                plain.len()
            )));
        }
        // The type follows the text, and any number of zeros follows the type as padding (RFC 8446, 5.4).
        let typ = plain.iter().rposition(|byte| *byte != 0).ok_or_else(|| invalid("a record without a type"))?;
        let is_last_word = match ContentType::from(plain[typ]) {
            ContentType::ApplicationData => false,
            ContentType::Alert if plain[..typ] == CLOSE_NOTIFY => true,
            kind => return Err(invalid(format!("a record of the type {kind:?} in a session"))),
        };
        let text = HEADER..if is_last_word { HEADER } else { HEADER + typ };
        Ok(Some(Opened { text, end, is_last_word }))
    }
}

/// A record that was decrypted in place. The positions count from its first byte.
struct Opened {
    text: Range<usize>,
    /// Where the next record begins.
    end: usize,
    is_last_word: bool,
}

/// What the peer sends.
///
/// A record that arrives whole is decrypted in the caller's buffer. Incomplete records, and records behind the first one, are kept here.
pub struct RecordReader<R> {
    from: R,
    cipher: Cipher,
    /// Bytes that were read and not passed to the caller yet.
    bytes: Vec<u8>,
    /// The part of them that is decrypted text.
    plain: Range<usize>,
    /// Where the next record begins.
    next: usize,
    /// The peer has said its last word.
    has_ended: bool,
    /// Something came that no peer sends, and no more is read.
    has_failed: bool,
}

impl<R: AsyncRead + Unpin> RecordReader<R> {
    /// Read into the caller's buffer, and decrypt the first record there. The bytes behind it are kept. If it is incomplete, all are.
    fn poll_direct(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.from).poll_read(cx, buf))?;
        let come = &mut buf.filled_mut()[before..];
        if come.is_empty() {
            return Poll::Ready(Err(cut_off()));
        }
        let opened = self.cipher.open(come);
        let (text, end) = match &opened {
            Ok(Some(record)) => (record.text.clone(), record.end),
            Ok(None) => (0..0, 0),
            Err(_) => (0..0, come.len()),
        };
        self.bytes.extend_from_slice(&come[end..]);
        let length = text.len();
        come.copy_within(text, 0);
        buf.set_filled(before + length);
        self.has_ended = opened?.is_some_and(|record| record.is_last_word);
        Poll::Ready(Ok(()))
    }

    /// Decrypt the next kept record. If it is incomplete, read more of it.
    fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(record) = self.cipher.open(&mut self.bytes[self.next..])? {
            self.plain = self.next + record.text.start..self.next + record.text.end;
            self.next += record.end;
            self.has_ended = record.is_last_word;
            return Poll::Ready(Ok(()));
        }
        self.bytes.drain(..self.next);
        (self.plain, self.next) = (0..0, 0);
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
            return Poll::Ready(Ok(()));
        }
        let whole = body_length(&self.bytes)?.map_or(0, |length| HEADER + length);
        self.bytes.reserve(whole.saturating_sub(self.bytes.len()).max(ROOM));
        match ready!(pin!(self.from.read_buf(&mut self.bytes)).poll(cx))? {
            0 => Poll::Ready(Err(cut_off())),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// The connection ended without the peer's last word. An attacker between both ends could have cut it off.
fn cut_off() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
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
        let before = buf.filled().len();
        while buf.filled().len() == before && buf.remaining() > 0 && !this.has_ended {
            if this.has_failed {
                return Poll::Ready(Err(invalid("a record before was refused")));
            }
            let done = match this.bytes.is_empty() {
                true => ready!(this.poll_direct(cx, buf)),
                false if this.plain.is_empty() => ready!(this.poll_kept(cx)),
                false => Ok(()),
            };
            if let Err(error) = done {
                this.has_failed = error.kind() == io::ErrorKind::InvalidData;
                return Poll::Ready(Err(error));
            }
            let count = this.plain.len().min(buf.remaining());
            let end = this.plain.start + count;
            buf.put_slice(&this.bytes[this.plain.start..end]);
            this.plain.start = end;
        }
        Poll::Ready(Ok(()))
    }
}

/// What the peer gets.
pub struct RecordWriter<W> {
    to: W,
    cipher: Cipher,
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
        if self.cipher.number >= self.limit {
            return Err(io::Error::other(format!(
                "the connection has carried {} records, as many as one key may protect",
                self.cipher.number
            )));
        }
        let record = self.cipher.seal(typ, plain);
        self.bytes = record.map_err(|_| io::Error::other("a record cannot be encrypted"))?;
        self.gone = 0;
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
