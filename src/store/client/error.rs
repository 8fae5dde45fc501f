//! Errors of a store client.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::store::protocol::ProtoError;

/// Why a store operation did not succeed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A wait timed out. The connection stays usable.
    #[error(
        "{operation} of {keys} timed out after {elapsed:?} (timeout {timeout:?}, store at {peer}, which is connected): look for a worker that failed, hangs or has not started"
    )]
    WaitTimeout {
        /// The operation, as PyTorch names it.
        operation: &'static str,
        /// The store.
        peer: SocketAddr,
        /// The keys, as the caller named them.
        keys: Keys,
        /// The timeout that was in force.
        timeout: Duration,
        /// The time that passed.
        elapsed: Duration,
    },
    /// Fewer workers than expected had joined when the timeout ended. The connection stays usable.
    #[error(
        "{joined} of {world_size} workers joined the store at {peer} within {elapsed:?} (timeout {timeout:?}): start the missing ones, or raise the timeout"
    )]
    WorkersTimeout {
        /// The store.
        peer: SocketAddr,
        /// Workers that have joined.
        joined: i64,
        /// Workers that should have.
        world_size: i64,
        /// The timeout that was in force.
        timeout: Duration,
        /// The time that passed.
        elapsed: Duration,
    },
    /// No store answered at this address in time. There is no connection.
    #[error("no store reached at {host}:{port} within {elapsed:?} (timeout {timeout:?}, {attempts} attempts): {last}")]
    ConnectTimeout {
        /// As given.
        host: String,
        /// As given.
        port: u16,
        /// The timeout that was in force.
        timeout: Duration,
        /// The time that passed.
        elapsed: Duration,
        /// Number of attempts.
        attempts: u32,
        /// How the last attempt failed, address by address.
        last: String,
    },
    /// The connection is lost. This and every later operation fails. Whether this one was carried out is not known.
    #[error("{operation} of {keys} failed after {elapsed:?}: connection to the store at {peer} lost: {cause}")]
    ConnectionLost {
        /// The operation, as PyTorch names it.
        operation: &'static str,
        /// The store.
        peer: SocketAddr,
        /// The keys, as the caller named them.
        keys: Keys,
        /// The time that passed.
        elapsed: Duration,
        /// What ended the connection, during this operation or an earlier one.
        cause: LostCause,
    },
    /// The store does not follow the protocol. The connection is closed, and every later operation fails.
    #[error(
        "{operation} of {keys} failed after {elapsed:?}: protocol violation by the store at {peer}: {what}; is another program listening there?"
    )]
    Protocol {
        /// The operation, as PyTorch names it.
        operation: &'static str,
        /// The store.
        peer: SocketAddr,
        /// The keys, as the caller named them.
        keys: Keys,
        /// The time that passed.
        elapsed: Duration,
        /// What is wrong with the bytes that it sent.
        what: ProtoError,
    },
    /// The queue was empty, or another client took the item first. The connection stays usable.
    #[error("queue {keys} is empty (store at {peer})")]
    QueueEmpty {
        /// The store.
        peer: SocketAddr,
        /// The queue.
        keys: Keys,
    },
    /// `multi_set` was given unequal numbers of keys and values. Nothing was sent.
    #[error("multi_set was given {keys} keys and {values} values, must be as many")]
    LengthMismatch {
        /// Number of keys.
        keys: usize,
        /// Number of values.
        values: usize,
    },
}

impl StoreError {
    /// Whether trying again can help: on the same connection, or on a new one if this one is lost.
    pub fn is_transient(&self) -> bool {
        match self {
            StoreError::WaitTimeout { .. }
            | StoreError::WorkersTimeout { .. }
            | StoreError::ConnectTimeout { .. }
            | StoreError::ConnectionLost { .. }
            | StoreError::QueueEmpty { .. } => true,
            StoreError::Protocol { .. } | StoreError::LengthMismatch { .. } => false,
        }
    }

    /// Whether time ran out.
    pub fn is_timeout(&self) -> bool {
        matches!(
            self,
            StoreError::WaitTimeout { .. } | StoreError::WorkersTimeout { .. } | StoreError::ConnectTimeout { .. }
        )
    }

    /// The store, as `host:port`.
    pub fn endpoint(&self) -> Option<String> {
        match self {
            StoreError::WaitTimeout { peer, .. }
            | StoreError::WorkersTimeout { peer, .. }
            | StoreError::ConnectionLost { peer, .. }
            | StoreError::Protocol { peer, .. }
            | StoreError::QueueEmpty { peer, .. } => Some(peer.to_string()),
            StoreError::ConnectTimeout { host, port, .. } if host.contains(':') => Some(format!("[{host}]:{port}")),
            StoreError::ConnectTimeout { host, port, .. } => Some(format!("{host}:{port}")),
            StoreError::LengthMismatch { .. } => None,
        }
    }

    /// The time that the operation took.
    pub fn elapsed(&self) -> Option<Duration> {
        match self {
            StoreError::WaitTimeout { elapsed, .. }
            | StoreError::WorkersTimeout { elapsed, .. }
            | StoreError::ConnectTimeout { elapsed, .. }
            | StoreError::ConnectionLost { elapsed, .. }
            | StoreError::Protocol { elapsed, .. } => Some(*elapsed),
            StoreError::QueueEmpty { .. } | StoreError::LengthMismatch { .. } => None,
        }
    }

    /// Whether the connection can still be used.
    pub fn leaves_connection_usable(&self) -> bool {
        !matches!(
            self,
            StoreError::ConnectTimeout { .. } | StoreError::ConnectionLost { .. } | StoreError::Protocol { .. }
        )
    }
}

/// What ended a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostCause {
    /// The store closed it, because it has ended or refused a request.
    Closed,
    /// The system reported an error, such as a reset.
    Io {
        /// Its kind.
        kind: io::ErrorKind,
        /// Its text.
        message: Box<str>,
    },
    /// The other end does not follow the protocol.
    Protocol(ProtoError),
}

impl fmt::Display for LostCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LostCause::Closed => write!(f, "closed by the store"),
            LostCause::Io { message, .. } => write!(f, "{message}"),
            LostCause::Protocol(error) => write!(f, "{error}"),
        }
    }
}

impl From<io::Error> for LostCause {
    fn from(error: io::Error) -> Self {
        LostCause::Io { kind: error.kind(), message: error.to_string().into() }
    }
}

impl From<ProtoError> for LostCause {
    fn from(error: ProtoError) -> Self {
        LostCause::Protocol(error)
    }
}

/// The keys of an operation. Displays the first few.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keys(pub Box<[Bytes]>);

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 3;
        const SHOWN_BYTES: usize = 200;
        if self.0.is_empty() {
            return write!(f, "no keys");
        }
        for (at, key) in self.0.iter().take(SHOWN).enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            let cut = if key.len() > SHOWN_BYTES { "…" } else { "" };
            let text = String::from_utf8_lossy(&key[..key.len().min(SHOWN_BYTES)]);
            write!(f, "{separator}`{text}{cut}`")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_store_and_the_time() {
        let elapsed = Duration::from_secs(3);
        let no_store = |host: &str| StoreError::ConnectTimeout {
            host: host.into(),
            port: 29500,
            timeout: elapsed,
            elapsed,
            attempts: 1,
            last: "connection refused".into(),
        };
        assert_eq!(no_store("node0").endpoint().as_deref(), Some("node0:29500"));
        assert_eq!(no_store("::1").endpoint().as_deref(), Some("[::1]:29500"));
        assert_eq!(no_store("::1").elapsed(), Some(elapsed));
        let peer = "[::1]:7".parse().unwrap();
        let empty = StoreError::QueueEmpty { peer, keys: Keys::default() };
        assert_eq!((empty.endpoint().as_deref(), empty.elapsed()), (Some("[::1]:7"), None));
        let unequal = StoreError::LengthMismatch { keys: 1, values: 2 };
        assert_eq!((unequal.endpoint(), unequal.elapsed()), (None, None));
    }
}
