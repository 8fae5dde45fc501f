//! The store's server: a [`Table`](super::Table) behind sockets.
//!
//! Owns accepting, each connection's buffers and their bounds, turning away what does not speak c10d, and the server's
//! lifetime. Leaves decisions to the table, bytes to [`crate::proto`], and listening sockets to [`super::listen`].
//! Facts: sections 2, 8 and 9 of the protocol description; it names the accidents of PyTorch's servers that are not copied.
//!
//! One thread of its own serves all connections ([`StoreServer`]), so the table needs no lock and every request is
//! atomic. It waits for sockets itself, without an async runtime, and never for Python. It does log through `tracing`: a
//! subscriber that takes the GIL must do so on a thread of its own, or a Python thread that holds the GIL while it waits
//! for this server waits for ever.
//!
//! To read: `event_loop` waits for sockets and gives them turns, `accept` lets them in, `connection` talks to them (`hello`
//! decides who is at the door), `hub` applies what they ask, `outbox` holds what they have not read yet, `life` knows
//! when it all ends.

mod accept;
mod connection;
mod connections;
mod control;
mod event_loop;
mod hello;
mod hub;
mod life;
mod outbox;
mod stats;
mod thread;

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::sync::mpsc::UnboundedSender;

use super::table::TableLimits;
use crate::proto::Limits;

pub use control::{Controller, Ended};
pub use stats::{Cause, Stats};
pub use thread::StoreServer;

/// How a server behaves. Every limit exceeded costs the connection that exceeds it, and is counted and logged.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// What lengths in requests may be at most.
    pub limits: Limits,
    /// What the table may hold at most.
    pub table: TableLimits,
    /// Connections that may be open at once, handed over ones included; a further one is closed at once. Default 1 048 576.
    pub max_connections: usize,
    /// How long a connection may take to say `VALIDATE` (or the magic of an upgrade). Default 30 s.
    ///
    /// [`Host`](crate::host::Host) gives a session as long again to say Hello.
    /// PyTorch's servers wait for ever.
    pub hello_timeout: Duration,
    /// How much may wait for a client that does not read its replies. Default 64 MiB.
    ///
    /// A connection that sends a further request while more than this waits is closed. A single reply may be larger: it is
    /// delivered as fast as the client reads.
    pub reply_buffer_bytes: usize,
    /// How long a client that has closed its sending side may take to read the rest. Default 30 s.
    pub flush_timeout: Duration,
    /// How long a connection is silent before the kernel asks whether its host is still there. Default 60 s.
    ///
    /// PyTorch's servers never ask, and keep the connection of a host that vanished. A client that is merely silent stays.
    pub keepalive_idle: Duration,
    /// How long it waits for the answer before it asks again, `net.ipv4.tcp_keepalive_probes` (9) times. Default 30 s.
    pub keepalive_interval: Duration,
    /// Of each cause so many (20) rejections are logged in this time, then how many more there were. Default 60 s.
    pub log_period: Duration,
    /// Other protocols on the same port.
    pub upgrades: Vec<Upgrade>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            limits: Limits::default(),
            table: TableLimits::default(),
            max_connections: 1 << 20,
            hello_timeout: Duration::from_secs(30),
            reply_buffer_bytes: 64 << 20,
            flush_timeout: Duration::from_secs(30),
            keepalive_idle: Duration::from_secs(60),
            keepalive_interval: Duration::from_secs(30),
            log_period: Duration::from_secs(60),
            upgrades: Vec::new(),
        }
    }
}

/// Another protocol on the same port: a connection whose first bytes are `magic` is handed over whole.
#[derive(Debug, Clone)]
pub struct Upgrade {
    /// Its first bytes. The first byte is never 0, which begins every c10d connection.
    pub magic: &'static [u8],
    /// Who takes over.
    pub to: UnboundedSender<Upgraded>,
}

/// A connection that turned out to speak another protocol.
#[derive(Debug)]
pub struct Upgraded {
    /// The connection, non-blocking and with `TCP_NODELAY` set.
    pub stream: TcpStream,
    /// What has been read from it, the magic included.
    pub first_bytes: BytesMut,
    /// The other end.
    pub peer: SocketAddr,
    /// This end: the address by which the other end reached the server.
    pub local: SocketAddr,
    /// Keeps the connection counted towards `max_connections`: to be held as long as it is open.
    pub place: Place,
}

/// A place among a server's connections. Clones share it; it is free when the last is dropped.
#[derive(Debug, Clone, Default)]
pub struct Place(Arc<()>);

impl Place {
    /// How many others share it.
    fn shared(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

/// When this time is over.
fn after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);
