//! Why a token or a certificate cannot be used.

use std::io;
use std::path::PathBuf;

/// Why tokens or certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectionError {
    /// The file cannot be read.
    #[error("the {what} file `{path}` cannot be read: {source}")]
    Read {
        /// What it holds.
        what: &'static str,
        /// Where it is.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file can be read, and must not be used.
    #[error("the {what} file `{path}` {why}")]
    Unusable {
        /// What it holds.
        what: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What is wrong, and what is allowed.
        why: String,
    },
    /// What the files hold makes their reader fail.
    #[error("reading {0} has failed, which is a bug")]
    Bug(String),
    /// There is neither.
    #[error(
        "sessions cannot be protected: neither a token (ELASTIC_RS_TOKEN_FILE) nor certificates (ELASTIC_RS_TLS_CERT) are given"
    )]
    Nothing,
    /// TLS cannot be set up. This is a bug, or the system has no randomness.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// The system has no further thread.
    #[error(
        "the threads that authenticate connections cannot be started: {0}; check the limits of threads (ulimit -u, pids.max)"
    )]
    Threads(io::Error),
}
