//! The two halves of a session's connection, with or without TLS.

use std::fmt;

use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::net::TcpStream;

/// The half that reads.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// The half that writes. What was written has gone only once it was flushed.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// A connection that carries a session.
pub struct Halves {
    /// What the peer sends.
    pub reader: Reader,
    /// What the peer gets.
    pub writer: Writer,
}

impl fmt::Debug for Halves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Halves").finish_non_exhaustive()
    }
}

impl Halves {
    /// A connection without protection.
    pub fn plain(stream: TcpStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: Box::new(reader), writer: Box::new(writer) }
    }

    /// A connection with TLS, whose ends have proven themselves.
    pub(super) fn of(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (reader, writer) = split(stream);
        Self { reader: Box::new(reader), writer: Box::new(writer) }
    }
}
