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
    /// Somebody may be waiting.
    is_ready: bool,
    /// Not before this, since accepting has failed.
    pub paused_until: Option<Instant>,
    delay: Duration,
    last_kind: Option<io::ErrorKind>,
}

/// What came of an attempt to accept.
pub(super) enum Accepted {
    Connection(TcpStream, SocketAddr),
    Nobody,
    /// Most likely no descriptor is free, and the next attempt would fail as fast: there is none for a while.
    Failed {
        error: io::Error,
        /// Not the same error as last time.
        is_new: bool,
    },
}

impl Listener {
    /// Prepares a listening socket.
    pub(super) fn new(socket: std::net::TcpListener, options: &ServerOptions) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        // On Linux what is accepted inherits these, which saves four system calls for each connection.
        let keepalive = TcpKeepalive::new().with_time(options.keepalive_idle).with_interval(options.keepalive_interval);
        let options = SockRef::from(&socket);
        options.set_tcp_nodelay(true)?;
        options.set_tcp_keepalive(&keepalive)?;
        Ok(Listener {
            socket: TcpListener::from_std(socket),
            // Connections may have come before the poll.
            is_ready: true,
            paused_until: None,
            delay: FIRST_DELAY,
            last_kind: None,
        })
    }

    pub(super) fn socket(&mut self) -> &mut TcpListener {
        &mut self.socket
    }

    /// The poll says that somebody has come.
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
                    // An IPv4 client of a listener for both is shown as one.
                    return Accepted::Connection(stream, SocketAddr::new(peer.ip().to_canonical(), peer.port()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (self.is_ready, self.paused_until) = (false, None);
                    return Accepted::Nobody;
                }
                // The client was faster in giving up.
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
