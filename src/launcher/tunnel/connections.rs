//! Connections at an end of a tunnel: accepting them, and passing bytes on between a store's client and its server.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::pin;
use tokio::time::sleep;

use crate::bounded_log::BoundedLog;
use crate::secure::{Halves, Reader, Writer};
use crate::store::server::ServerOptions;

const FIRST_DELAY: Duration = Duration::from_millis(5);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// A listening socket.
pub(super) struct Listener(TcpListener);

impl Listener {
    /// Take over a listening socket, in a runtime.
    pub fn new(socket: std::net::TcpListener) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        // On Linux accepted sockets inherit these options.
        prepare(SockRef::from(&socket))?;
        TcpListener::from_std(socket).map(Self)
    }

    /// The next connection. If accepting fails, most likely no file descriptor is free, and it is tried again after a while.
    pub async fn accept(&self, log: &BoundedLog) -> (TcpStream, SocketAddr) {
        let mut delay = FIRST_DELAY;
        loop {
            match self.0.accept().await {
                Ok((stream, peer)) => return (stream, SocketAddr::new(peer.ip().to_canonical(), peer.port())),
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                Err(error) => {
                    if log.admits("accept_error") {
                        tracing::warn!(
                            target: "elastic_rs::rendezvous", %error,
                            "the store's tunnel cannot accept a connection, and tries again"
                        );
                    }
                    sleep(delay).await;
                    delay = (delay * 2).min(LONGEST_DELAY);
                }
            }
        }
    }
}

/// Set the options of a connection of a tunnel. They are those of the store's: a host that vanishes without a word ends its
/// connections, and small messages are not held back.
pub(super) fn prepare(socket: SockRef<'_>) -> io::Result<()> {
    let ServerOptions { keepalive_idle, keepalive_interval, .. } = ServerOptions::default();
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(keepalive_idle).with_interval(keepalive_interval))
}

/// Bytes of a buffer at first. Most requests and replies are smaller, and most connections are idle.
const FIRST_BYTES: usize = 1024;
/// Bytes of a buffer that was full again and again: four records of TLS.
const MOST_BYTES: usize = 64 * 1024;

/// Pass bytes on in both directions until the server has closed the connection, or it fails.
///
/// A client that shuts its sending side down still gets what the server sends. A server that closes takes nothing more. What one end
/// does not read is not read from the other either, so at most a buffer's bytes wait here.
///
/// # Errors
/// One of the two connections has failed. Both are closed when this returns.
pub(super) async fn relay(client: Halves, server: Halves) -> io::Result<()> {
    let requests = pass_on(client.reader, server.writer);
    let replies = pass_on(server.reader, client.writer);
    pin!(requests, replies);
    tokio::select! {
        ended = &mut replies => return ended,
        ended = &mut requests => ended?,
    }
    replies.await
}

/// Pass bytes on until there are no more, and say so to the receiver.
async fn pass_on(mut from: Reader, mut to: Writer) -> io::Result<()> {
    let mut bytes = vec![0; FIRST_BYTES];
    loop {
        let count = from.read(&mut bytes).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..count]).await?;
        to.flush().await?;
        if count == bytes.len() && count < MOST_BYTES {
            bytes.resize(2 * count, 0);
        }
    }
}
