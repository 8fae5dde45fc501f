//! The end of a coordinator that is protected: TLS, then the proof. A peer that has not proven itself yet is called an unauthenticated
//! peer.
//!
//! Each has [`LIMIT`] and may send [`BYTES`]. The number of handshakes at once, and their order, are up to [`super::handshakes`].

use std::fmt;
use std::io::{self, IoSlice};
use std::net::TcpStream as StdTcpStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::helpers::Helpers;
use super::objection::{is_of_certificate, to_text};
use super::proof::{Identity, check};
use super::refusals::{Kind, Refusal};
use super::stream::Halves;
use super::tls::{self, ServerConfig, ServerStream};
use super::{Protection, ProtectionError};
use crate::open_files::pending_handshake_permits;

/// The first bytes of a connection that is meant for an acceptor.
pub use super::tls::FIRST_BYTES;

/// Time for TLS and the proof.
pub const LIMIT: Duration = Duration::from_secs(5);
/// Bytes that an unauthenticated peer may send.
const BYTES: usize = 16 * 1024;

/// Where unauthenticated peers prove that they belong to the job.
#[derive(Debug)]
pub struct Acceptor {
    protection: Arc<Protection>,
    config: Arc<ServerConfig>,
    helpers: Arc<Helpers>,
    permits: usize,
}

/// A connection of a peer that has proven itself, for a session.
pub struct Proven {
    tls: ServerStream<UnauthenticatedPeer>,
    /// Its socket, between the runtime of the handshake and that of the session.
    stream: StdTcpStream,
}

impl fmt::Debug for Proven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proven").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Proven {
    /// What carries the session, in the runtime that this is called in.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn halves(mut self) -> io::Result<Halves> {
        self.tls.get_mut().0.stream = Some(TcpStream::from_std(self.stream)?);
        Ok(Halves::of(self.tls))
    }
}

impl Acceptor {
    /// An acceptor with a new key.
    ///
    /// # Errors
    /// TLS cannot be set up, or the threads for handshakes cannot be started.
    pub fn new(protection: Arc<Protection>) -> Result<Self, ProtectionError> {
        let config = tls::server_config().map_err(|error| ProtectionError::Tls(error.to_string()))?;
        let helpers = Helpers::shared().map_err(ProtectionError::Threads)?;
        Ok(Self { protection, config, helpers, permits: pending_handshake_permits() })
    }

    /// How many unauthenticated peers may prove themselves at once. This process has descriptors for them, and for those who wait.
    pub fn permits(&self) -> usize {
        self.permits
    }

    /// Where handshakes run.
    pub fn helpers(&self) -> &Handle {
        self.helpers.handle()
    }

    /// What is asked of unauthenticated peers. It counts those that are refused.
    pub fn protection(&self) -> &Arc<Protection> {
        &self.protection
    }

    /// Begin TLS with an unauthenticated peer whose first bytes have been read, and let both ends prove themselves, for a session.
    ///
    /// # Errors
    /// Why it is refused. [`Protection::refuse`] has still to count it.
    pub async fn admit(&self, stream: TcpStream, first_bytes: BytesMut) -> Result<(Proven, Identity), Refusal> {
        let (mut tls, identity) = self.meet(stream, first_bytes).await?;
        let stream = tls.get_mut().0.stream.take().ok_or_else(no_socket).and_then(TcpStream::into_std);
        let stream = stream.map_err(|error| Refusal::new(Kind::NoTls, error.to_string()))?;
        Ok((Proven { tls, stream }, identity))
    }

    /// As [`Self::admit`], for a connection that stays in this runtime.
    ///
    /// # Errors
    /// As [`Self::admit`].
    pub async fn admit_to_tunnel(&self, stream: TcpStream) -> Result<(Halves, Identity), Refusal> {
        let (stream, identity) = self.meet(stream, BytesMut::new()).await?;
        Ok((Halves::of(stream), identity))
    }

    async fn meet(
        &self,
        stream: TcpStream,
        first_bytes: BytesMut,
    ) -> Result<(ServerStream<UnauthenticatedPeer>, Identity), Refusal> {
        let done = async {
            // TLS tries once to say what was wrong, and has to find the socket ready.
            stream.writable().await.map_err(|error| Refusal::new(Kind::NoTls, error.to_string()))?;
            let peer = UnauthenticatedPeer { stream: Some(stream), first_bytes, left: BYTES };
            let config = match self.protection.certificates() {
                Some(own) => Arc::clone(&own.identity().await.server),
                None => Arc::clone(&self.config),
            };
            let mut stream = match tls::accept(config, peer).await {
                Ok(stream) => stream,
                Err((error, peer)) => return Err(no_tls(&error, peer).await),
            };
            let unproven = |why| Refusal { kind: Kind::Unproven, why };
            let secret = tls::secret_of_server(&stream).map_err(unproven)?;
            let accepted = async |run_id: &str| self.protection.accepted(run_id).await;
            let identity = check(&mut stream, accepted, &secret).await.map_err(unproven)?;
            stream.get_mut().0.left = usize::MAX;
            Ok((stream, identity))
        };
        timeout(LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }
}

/// The refusal of an unauthenticated peer that has not proven itself within [`LIMIT`].
pub fn late() -> Refusal {
    Refusal::new(Kind::Late, format!("no authentication within {LIMIT:?}"))
}

/// Tell an unauthenticated peer that does not speak TLS why it is refused, and close the connection.
pub async fn turn_away(mut stream: TcpStream, text: &[u8]) {
    let sent = async {
        stream.write_all(text).await?;
        stream.shutdown().await?;
        read_out(&mut stream).await;
        io::Result::Ok(())
    };
    let _ = timeout(LIMIT, sent).await;
}

/// Read the rest of what a refused peer has sent: else the kernel resets the connection, and the refusal is lost.
async fn read_out(stream: &mut (impl AsyncRead + Unpin)) {
    let mut rest = [0; 1024];
    let mut left = BYTES;
    while left > 0
        && let Ok(count @ 1..) = stream.read(&mut rest).await
    {
        left = left.saturating_sub(count);
    }
}

/// The refusal of an unauthenticated peer with which TLS could not be begun.
async fn no_tls(error: &io::Error, mut peer: UnauthenticatedPeer) -> Refusal {
    if is_of_certificate(error) {
        // It takes TLS as begun, and has sent more.
        let _ = peer.shutdown().await;
        read_out(&mut peer).await;
        return Refusal::new(Kind::Certificate, to_text(error).unwrap_or_default());
    }
    Refusal::new(Kind::NoTls, to_text(error).unwrap_or_else(|| format!("no TLS: {error}")))
}

/// A connection whose peer has not proven itself: what it may send is counted.
struct UnauthenticatedPeer {
    /// `None`: on its way from one runtime to the other.
    stream: Option<TcpStream>,
    first_bytes: BytesMut,
    left: usize,
}

impl UnauthenticatedPeer {
    fn socket(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(no_socket)
    }
}

fn no_socket() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

impl AsyncRead for UnauthenticatedPeer {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.left == 0 {
            return Poll::Ready(Err(io::Error::other(format!("more than {BYTES} bytes before it authenticated"))));
        }
        let before = buf.filled().len();
        if self.first_bytes.is_empty() {
            let read = self.socket()?.poll_read(cx, buf);
            if !matches!(read, Poll::Ready(Ok(()))) {
                return read;
            }
        } else {
            let count = self.first_bytes.len().min(buf.remaining());
            buf.put_slice(&self.first_bytes[..count]);
            self.first_bytes.advance(count);
        }
        let count = buf.filled().len() - before;
        if self.left != usize::MAX {
            self.left = self.left.saturating_sub(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UnauthenticatedPeer {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.socket()?.poll_write(cx, buf)
    }

    // TLS tries once to say what was wrong, behind what it has not sent yet.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket()?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket()?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::secure::token::Token;

    fn protection(digit: &str) -> Arc<Protection> {
        Arc::new(Protection::by_token(Token::parse(&digit.repeat(64)).unwrap()).unwrap())
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (one, other) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await });
        (one.unwrap(), other.unwrap().0)
    }

    /// Both ends hold the token. Somebody between speaks TLS with each, with a key of his own, and passes everything on.
    #[tokio::test]
    async fn both_ends_refuse_whom_they_meet_if_somebody_stands_between() {
        let acceptor = Acceptor::new(protection("a")).unwrap();
        let ((node, before), (behind, coordinator)) = (pair().await, pair().await);
        let between = async {
            let mut before = tls::accept(tls::server_config().unwrap(), before).await.ok().unwrap();
            let mut behind = tls::connect(tls::client_config().unwrap(), tls::no_name(), behind).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut before, &mut behind).await;
        };
        let node = async { Halves::begin(node, "host", Some((&protection("a"), "run"))).await };
        let (node, coordinator, ()) = tokio::join!(node, acceptor.admit(coordinator, BytesMut::new()), between);
        assert!(node.unwrap_err().contains("somebody may intercept the connection"));
        assert!(coordinator.unwrap_err().why.contains("somebody may intercept the connection"));
    }

    #[tokio::test]
    async fn an_unauthenticated_peer_with_tls_is_closed() {
        let acceptor = Acceptor::new(protection("a")).unwrap();
        let long = [&[1][..], &[0; 8], &[0xff; 2], &[0; 5000]].concat();
        for (message, why) in
            [(vec![9; 43], "version 9"), (vec![1; 10], "ended before authentication"), (long, "must have at most 1024")]
        {
            let (peer, coordinator) = pair().await;
            let speaking = async {
                let mut peer = tls::connect(tls::client_config().unwrap(), tls::no_name(), peer).await.unwrap();
                let _ = peer.write_all(&message).await;
                let _ = peer.shutdown().await;
                let _ = peer.read_to_end(&mut Vec::new()).await;
            };
            let (admitted, ()) = tokio::join!(acceptor.admit(coordinator, BytesMut::new()), speaking);
            let refusal = admitted.unwrap_err();
            assert!(refusal.kind == Kind::Unproven && refusal.why.contains(why), "{refusal:?}");
        }
    }

    #[tokio::test]
    async fn an_unauthenticated_peer_that_sends_much_is_closed_at_the_limit() {
        let acceptor = Acceptor::new(protection("a")).unwrap();
        let (mut peer, coordinator) = pair().await;
        // Handshake messages of a type that does not exist would be judged at once: this one is a hello that never ends.
        let mut record = vec![0x16, 0x03, 0x01, 0x3f, 0xff, 0x01, 0x00, 0xff, 0xf0];
        record.resize(5 + 0x3fff, 0);
        let flooding = async {
            while peer.write_all(&record).await.is_ok() {
                record.splice(5..9, [0; 4]);
            }
        };
        let (admitted, ()) = tokio::join!(acceptor.admit(coordinator, BytesMut::new()), flooding);
        let refusal = admitted.unwrap_err();
        assert!(refusal.kind == Kind::NoTls && refusal.why.contains("more than 16384 bytes"), "{refusal:?}");
        assert_eq!(acceptor.protection().refuse(&refusal), format!("{}; 1 refused so far", refusal.why));
        assert_eq!(acceptor.protection().refuse(&late()), "no authentication within 5s; 2 refused so far");
        let refused = acceptor.protection().refusals();
        assert_eq!((refused.of(Kind::NoTls), refused.of(Kind::Late), refused.total()), (1, 1, 2));
    }
}
