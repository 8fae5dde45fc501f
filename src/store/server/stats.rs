//! The counters of a server, readable from any thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::sync::watch;

/// Why the server closed a connection that its client had not closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The first bytes are not c10d, nor an upgrade's magic: HTTP, TLS, a port scan.
    Foreign,
    /// The connection said nothing, or not enough, within `hello_timeout`.
    HelloTimeout,
    /// An unknown query, or a second `VALIDATE`.
    Protocol,
    /// A length or count above [`Limits`](crate::store::protocol::Limits).
    TooLong,
    /// `ADD` or `BARRIER` on a value that is not a number.
    NotANumber,
    /// `WAIT` or `BARRIER` on a connection that was already waiting.
    AlreadyWaiting,
    /// A limit of [`TableLimits`](crate::store::TableLimits) would have been exceeded.
    Full,
    /// More than `reply_buffer_bytes` waited to be read, and the client asked for more.
    NotReading,
    /// `max_connections` were open, or as many c10d clients as `max_clients`.
    TooManyConnections,
    /// The magic of an upgrade, but its receiver has ended.
    UpgradeGone,
    /// A c10d client where only other protocols are served.
    Unproven,
    /// It took too long to say what it speaks, where only other protocols are served and others wanted its place.
    Crowded,
    /// It came from this machine, and is not known to be of this process's user or root, with
    /// [`LocalPeers::SameUser`](super::LocalPeers::SameUser).
    OtherUser,
    /// Its address is none of those that [`Members`](super::Members) has.
    NotAMember,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Cause; 14] = [
        Cause::Foreign,
        Cause::HelloTimeout,
        Cause::Protocol,
        Cause::TooLong,
        Cause::NotANumber,
        Cause::AlreadyWaiting,
        Cause::Full,
        Cause::NotReading,
        Cause::TooManyConnections,
        Cause::UpgradeGone,
        Cause::Unproven,
        Cause::Crowded,
        Cause::OtherUser,
        Cause::NotAMember,
    ];

    /// The name in log records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Foreign => "foreign_protocol",
            Cause::HelloTimeout => "hello_timeout",
            Cause::Protocol => "protocol_violation",
            Cause::TooLong => "too_long",
            Cause::NotANumber => "not_a_number",
            Cause::AlreadyWaiting => "already_waiting",
            Cause::Full => "store_full",
            Cause::NotReading => "not_reading",
            Cause::TooManyConnections => "too_many_connections",
            Cause::UpgradeGone => "upgrade_gone",
            Cause::Unproven => "unproven",
            Cause::Crowded => "crowded",
            Cause::OtherUser => "other_user",
            Cause::NotAMember => "not_a_member",
        }
    }
}

/// A server's counters at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Validated c10d connections that are open.
    pub connections_open: u64,
    /// Connections accepted since the start, including rejected and upgraded ones.
    pub connections_accepted: u64,
    /// Connections handed over to another protocol.
    pub connections_upgraded: u64,
    /// Failed attempts to accept, for instance because no file descriptor was free.
    pub accept_errors: u64,
    /// Requests carried out, `VALIDATE` not counted.
    pub requests: u64,
    /// Stored keys.
    pub keys: u64,
    /// Bytes of keys, values and queue items.
    pub stored_bytes: u64,
    /// Connections with an open wait.
    pub waiting: u64,
    rejected: [u64; Cause::ALL.len()],
}

impl Stats {
    /// Connections closed for this cause.
    pub fn rejected(&self, cause: Cause) -> u64 {
        self.rejected[cause as usize]
    }

    /// Connections closed for any cause.
    pub fn rejected_total(&self) -> u64 {
        self.rejected.iter().sum()
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub connections_open: AtomicU64,
    pub connections_accepted: AtomicU64,
    pub connections_upgraded: AtomicU64,
    pub accept_errors: AtomicU64,
    pub requests: AtomicU64,
    pub keys: AtomicU64,
    pub stored_bytes: AtomicU64,
    pub waiting: AtomicU64,
    /// c10d clients since the start, for those who wait for some number of them.
    pub clients: watch::Sender<u64>,
    rejected: [AtomicU64; Cause::ALL.len()],
}

impl Counters {
    pub(super) fn reject(&self, cause: Cause) {
        self.rejected[cause as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        Stats {
            connections_open: read(&self.connections_open),
            connections_accepted: read(&self.connections_accepted),
            connections_upgraded: read(&self.connections_upgraded),
            accept_errors: read(&self.accept_errors),
            requests: read(&self.requests),
            keys: read(&self.keys),
            stored_bytes: read(&self.stored_bytes),
            waiting: read(&self.waiting),
            rejected: std::array::from_fn(|at| read(&self.rejected[at])),
        }
    }
}
