//! Accepting connections at an end of a tunnel.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::bounded_log::BoundedLog;
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
