//! The store's server: a [`Table`](super::Table) behind sockets.
//!
//! Owns accepting, each connection's buffers and their bounds, turning away what does not speak c10d, and the server's
//! lifetime. Leaves decisions to the table, bytes to [`crate::store::protocol`], and listening sockets to [`crate::net::listen`].
//! Facts: `torch/csrc/distributed/c10d/TCPStoreBackend.cpp` and `TCPStoreLibUvBackend.cpp` (2.15).
//!
//! One dedicated thread serves all connections ([`StoreServer`]), so the table needs no lock and every request is atomic. The
//! thread waits for sockets itself, without an async runtime, and never for Python. It logs through `tracing`. A subscriber
//! that takes the GIL must do so on another thread: a Python thread may hold the GIL while it waits for this server, and
//! both would wait for ever (`docs/decisions/0003-servers-never-wait-for-python.md`).
//!
//! In the order in which to read: `event_loop` waits for sockets and gives connections turns, `accept` accepts them,
//! `crate::net::local_peers` and `members` decide who may connect, `connection` reads and writes ([`crate::store::protocol::hello`] identifies the peer), `hub` carries out
//! requests, `outbox` holds bytes that a client has not read yet, `lifecycle` decides when the server ends.

mod accept;
mod connection;
mod connections;
mod control;
mod event_loop;
mod hub;
mod lifecycle;
pub mod limits;
mod members;
mod outbox;
mod stats;
mod thread;
mod unknown;

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::sync::mpsc::UnboundedSender;

use super::table::TableLimits;
use crate::store::protocol::Limits;

pub use crate::net::local_peers::LocalPeers;
pub use control::{Controller, Ended};
pub use members::Members;
pub use stats::{Cause, Stats};
pub use thread::StoreServer;
pub use unknown::Unknown;

/// Options of a server. A connection that exceeds a limit is closed, counted and logged.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Limits on lengths in requests.
    pub limits: Limits,
    /// Limits on what the table holds.
    pub table: TableLimits,
    /// Connections that may be open at once, including those handed over. A further one is closed at once. Default 1 048 576.
    pub max_connections: usize,
    /// c10d clients that may be connected at once. A further one is closed. Default: as many as `max_connections` allows.
    pub max_clients: usize,
    /// How long a connection may take to say `VALIDATE` (or the magic of an upgrade). Default 30 s.
    ///
    /// [`EndpointServer`](crate::endpoint::EndpointServer) gives a session as long again to send its `Hello`. PyTorch's servers wait for ever.
    pub hello_timeout: Duration,
    /// Bytes of replies that may wait for a client that does not read them. Default 64 MiB.
    ///
    /// A connection that sends a further request while more than this waits is closed. A single reply may be larger: it is
    /// delivered as fast as the client reads.
    pub reply_buffer_bytes: usize,
    /// How long a client that has closed its sending side may take to read the remaining replies. Default 30 s.
    pub flush_timeout: Duration,
    /// How long a connection is silent before the kernel probes its host (TCP keep-alive). Default 60 s.
    ///
    /// PyTorch's servers have no keep-alive and keep the connection of a host that vanished. A client that is merely silent is
    /// kept.
    pub keepalive_idle: Duration,
    /// Time between probes. After `net.ipv4.tcp_keepalive_probes` (9) unanswered ones the connection is lost. Default 30 s.
    pub keepalive_interval: Duration,
    /// In this time 20 rejections of each cause are logged, and then how many more there were. Default 60 s.
    pub log_period: Duration,
    /// Other protocols on the same port.
    pub upgrades: Vec<Upgrade>,
    /// Only the other protocols are served: c10d clients are closed. So everybody here is unknown until it is handed over, which is
    /// bounded. Default: c10d is served.
    pub upgrades_only: Option<Unknown>,
    /// Which users of this machine may connect. Default: any.
    pub local_peers: LocalPeers,
    /// Called with the run id of each write of PyTorch's own `c10d` rendezvous, on the server's thread. Default: nobody is.
    pub on_pytorchs_rendezvous: Option<Listener>,
    /// Accept no connection before [`Controller::open_to`] says from where. They wait in the listener's backlog. Default: accept at once,
    /// from everywhere.
    pub opens_on_request: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            limits: Limits::default(),
            table: TableLimits::default(),
            max_connections: 1 << 20,
            max_clients: usize::MAX,
            hello_timeout: Duration::from_secs(30),
            reply_buffer_bytes: 64 << 20,
            flush_timeout: Duration::from_secs(30),
            keepalive_idle: Duration::from_secs(60),
            keepalive_interval: Duration::from_secs(30),
            log_period: Duration::from_secs(60),
            upgrades: Vec::new(),
            upgrades_only: None,
            local_peers: LocalPeers::Any,
            on_pytorchs_rendezvous: None,
            opens_on_request: false,
        }
    }
}

impl ServerOptions {
    /// The options of an endpoint whose store nothing of the job uses. A program of the user still may, within bounds that keep
    /// unauthenticated peers from filling this process's memory. Sessions are not bounded by them.
    pub fn for_unused_store() -> ServerOptions {
        const KIB: usize = 1 << 10;
        ServerOptions {
            // Each client may leave a request unfinished, and a reply unread.
            limits: Limits { value_bytes: 64 * KIB, message_bytes: 64 * KIB, list_len: 1024, ..Limits::default() },
            table: TableLimits { keys: 16 * 1024, stored_bytes: 16 * KIB * KIB },
            // A quarter of the usual limit of open files.
            max_clients: 256,
            reply_buffer_bytes: 64 * KIB,
            ..ServerOptions::default()
        }
    }
}

/// Another protocol on the same port: a connection whose first bytes are `magic` is handed over whole.
#[derive(Debug, Clone)]
pub struct Upgrade {
    /// Its first bytes. The first byte is never 0, which begins every c10d connection.
    pub magic: &'static [u8],
    /// Receives the connections.
    pub to: Receiver,
}

/// Takes connections over, on the server's thread. False if nobody is there any more.
#[derive(Clone)]
pub struct Receiver(Arc<dyn Fn(Upgraded) -> bool + Send + Sync>);

impl Receiver {
    /// This function, which must not wait.
    pub fn new(take: impl Fn(Upgraded) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }
}

impl From<UnboundedSender<Upgraded>> for Receiver {
    fn from(sender: UnboundedSender<Upgraded>) -> Self {
        Self::new(move |upgraded| sender.send(upgraded).is_ok())
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

/// Is called with a run id, on the server's thread.
#[derive(Clone)]
pub struct Listener(Arc<dyn Fn(&str) + Send + Sync>);

impl Listener {
    /// This function, which must not wait.
    pub fn new(listen: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(listen))
    }

    /// Call it, if the key is that of the state which PyTorch's `C10dRendezvousBackend` keeps in a store.
    fn on_compare_set(&self, key: &[u8]) {
        let state = key.strip_prefix(b"/").unwrap_or(key).strip_prefix(b"torch.rendezvous.");
        if let Some(run_id) = state.and_then(|run_id| std::str::from_utf8(run_id).ok()) {
            (self.0)(run_id);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

/// A connection that turned out to speak another protocol.
#[derive(Debug)]
pub struct Upgraded {
    /// The connection, non-blocking and with `TCP_NODELAY` set.
    pub stream: TcpStream,
    /// The bytes read from it so far, including the magic.
    pub first_bytes: BytesMut,
    /// The other end.
    pub peer: SocketAddr,
    /// This end: the address by which the other end reached the server.
    pub local: SocketAddr,
    /// Counts the connection towards `max_connections`. To be held as long as it is open.
    pub permit: ConnectionPermit,
}

/// A slot that counts towards a server's `max_connections`. Clones share it. It is freed when the last clone is dropped.
#[derive(Debug, Clone, Default)]
pub struct ConnectionPermit(Arc<()>);

impl ConnectionPermit {
    /// Number of other clones.
    fn shared(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

/// The instant after this time.
fn after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);
