//! Accepting connections.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use socket2::{SockRef, TcpKeepalive};

use super::ServerOptions;

/// A listening socket, and when to try it next.
pub(super) struct Listener {
    socket: TcpListener,
    /// A connection may be waiting to be accepted.
    is_ready: bool,
    /// Not to be tried before this instant, because accepting has failed.
    pub paused_until: Option<Instant>,
    delay: Duration,
    last_kind: Option<io::ErrorKind>,
}

/// The result of an attempt to accept.
pub(super) enum Accepted {
    Connection(TcpStream, SocketAddr),
    Nobody,
    /// Most likely no file descriptor is free, and the next attempt would fail as fast. The listener pauses for a while.
    Failed {
        error: io::Error,
        /// The error differs from the last one, so it is worth logging.
        is_new: bool,
    },
}

impl Listener {
    /// Prepares a listening socket.
    pub(super) fn new(socket: std::net::TcpListener, options: &ServerOptions) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        // On Linux accepted sockets inherit these options, which saves four system calls for each connection.
        let keepalive = TcpKeepalive::new().with_time(options.keepalive_idle).with_interval(options.keepalive_interval);
        let options = SockRef::from(&socket);
        options.set_tcp_nodelay(true)?;
        options.set_tcp_keepalive(&keepalive)?;
        Ok(Listener {
            socket: TcpListener::from_std(socket),
            // Connections may have arrived before the socket was registered with the poll.
            is_ready: true,
            paused_until: None,
            delay: FIRST_DELAY,
            last_kind: None,
        })
    }

    pub(super) fn socket(&mut self) -> &mut TcpListener {
        &mut self.socket
    }

    /// The poll reports a connection.
    pub(super) fn on_event(&mut self) {
        self.is_ready = true;
    }

    /// Whether [`accept`](Self::accept) is worth calling now.
    pub(super) fn is_due(&self, now: impl FnOnce() -> Instant) -> bool {
        self.is_ready && self.paused_until.is_none_or(|until| now() >= until)
    }

    pub(super) fn accept(&mut self) -> Accepted {
        loop {
            match self.socket.accept() {
                Ok((stream, peer)) => {
                    (self.delay, self.last_kind, self.paused_until) = (FIRST_DELAY, None, None);
                    // An IPv4 client of a dual-stack listener is shown with its IPv4 address.
                    return Accepted::Connection(stream, SocketAddr::new(peer.ip().to_canonical(), peer.port()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (self.is_ready, self.paused_until) = (false, None);
                    return Accepted::Nobody;
                }
                // The client has given up already.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                Err(error) => {
                    self.paused_until = Some(Instant::now() + self.delay);
                    self.delay = (self.delay * 2).min(LONGEST_DELAY);
                    let is_new = self.last_kind.replace(error.kind()) != Some(error.kind());
                    return Accepted::Failed { error, is_new };
                }
            }
        }
    }
}

const FIRST_DELAY: Duration = Duration::from_millis(5);
const LONGEST_DELAY: Duration = Duration::from_secs(1);
