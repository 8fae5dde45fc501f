//! How the sessions of a job, or of a coordinator, are protected.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, timeout};

use super::stream::Halves;
use super::token::Token;
use super::token_file::TokenFile;
use super::watched::GOOD_FOR;
use super::{TOKEN_FILE, proof, tls};
use crate::net::connect::{in_words, race, resolve};

/// Time for TLS and both proofs, as long as nothing else is slow.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Why tokens cannot be used.
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
    /// TLS cannot be set up. This is a bug, or the system has no randomness.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// The system has no further thread.
    #[error("the threads for handshakes cannot be started: {0}")]
    Threads(io::Error),
}

/// From where an end has its tokens.
#[derive(Debug)]
enum Source {
    /// A file that may change.
    File(TokenFile),
    /// This process made it, or was given it.
    Memory(Token),
    /// A file with the token from which those of all runs are derived.
    Master(TokenFile),
}

/// How the sessions of a job, or of a coordinator, are protected.
pub struct Protection {
    source: Source,
    client: Arc<tls::ClientConfig>,
}

impl fmt::Debug for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Protection").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Protection {
    /// By the token in this file.
    ///
    /// # Errors
    /// The file cannot be read, others may read it, or it holds no token.
    pub fn by_file(path: &Path) -> Result<Self, ProtectionError> {
        Self::by_file_for(path, GOOD_FOR)
    }

    /// The same, with the time for which what the file held is good, before it is looked at again.
    ///
    /// # Errors
    /// As [`Self::by_file`].
    pub fn by_file_for(path: &Path, good_for: Duration) -> Result<Self, ProtectionError> {
        Self::of(Source::File(TokenFile::open(path, good_for)?))
    }

    /// By this token.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn by_token(token: Token) -> Result<Self, ProtectionError> {
        Self::of(Source::Memory(token))
    }

    /// By the tokens that are derived from the one in this file, a different one for each run. Only for a coordinator: a node has its
    /// run's token.
    ///
    /// # Errors
    /// As [`Self::by_file`].
    pub fn by_master_file(path: &Path) -> Result<Self, ProtectionError> {
        Self::of(Source::Master(TokenFile::open(path, GOOD_FOR)?))
    }

    fn of(source: Source) -> Result<Self, ProtectionError> {
        Ok(Self { source, client: tls::client_config().map_err(|error| ProtectionError::Tls(error.to_string()))? })
    }

    /// The token that this end shows.
    pub async fn own(&self) -> Token {
        match &self.source {
            Source::File(file) | Source::Master(file) => file.tokens().await.0,
            Source::Memory(token) => token.clone(),
        }
    }

    /// The same token, for another process of the same job.
    pub fn reveal(&self) -> String {
        self.known()[0].reveal().to_owned()
    }

    /// The tokens that this end accepts, of a peer that speaks for this run.
    pub(super) async fn accepted(&self, run_id: &str) -> Vec<Token> {
        match &self.source {
            Source::File(file) => file.tokens().await.into_vec(),
            Source::Memory(token) => vec![token.clone()],
            Source::Master(file) => {
                file.tokens().await.into_vec().iter().map(|master| master.for_run(run_id)).collect()
            }
        }
    }

    /// The ids of the tokens that this end shows or accepts, for logs. The id of a master's token if there is one.
    pub fn key_ids(&self) -> String {
        self.known().iter().map(|token| token.id().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// The tokens that were found at the last look: at least one.
    fn known(&self) -> Vec<Token> {
        match &self.source {
            Source::File(file) | Source::Master(file) => file.known().into_vec(),
            Source::Memory(token) => vec![token.clone()],
        }
    }

    /// Begin TLS on a connection to a coordinator, and prove both ends.
    ///
    /// # Errors
    /// A sentence for the log. It says nothing about the job: a stranger may have caused it, and the node tries again.
    pub async fn begin(&self, stream: TcpStream, run_id: &str) -> Result<Halves, String> {
        let done = async {
            let token = self.own().await;
            let mut stream = tls::connect(Arc::clone(&self.client), stream).await.map_err(|error| no_tls(&error))?;
            let secret = tls::secret_of_client(&stream)?;
            proof::prove(&mut stream, &token, run_id, &secret).await?;
            Ok(Halves::of(stream))
        };
        let late = || format!("it has not proven within {HANDSHAKE_LIMIT:?} that it holds the token ({TOKEN_FILE})");
        timeout(HANDSHAKE_LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }
}

impl Protection {
    /// Connect to the peer at `host:port`, and prove both ends for a run. `prepare` sets options of the socket.
    ///
    /// # Errors
    /// A sentence: nobody is reached there, or one of the ends is not proven.
    pub async fn connect(
        &self,
        (host, port): (&str, u16),
        run_id: &str,
        limit: Duration,
        prepare: impl Fn(&TcpStream) -> io::Result<()>,
    ) -> Result<Halves, String> {
        let deadline = Instant::now() + limit;
        let addresses = resolve(host, port, deadline).await.map_err(|error| error.to_string())?;
        let open = async |stream: TcpStream| {
            prepare(&stream).map_err(|error| error.to_string())?;
            self.begin(stream, run_id).await
        };
        race(&addresses, deadline, TcpStream::connect, open).await.map_err(|met| in_words(host, &met))
    }

    /// Try whether the coordinator at `host:port` holds the token for a run. No session begins.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn try_at(&self, host: &str, port: u16, run_id: &str, limit: Duration) -> Result<(), String> {
        self.connect((host, port), run_id, limit, |_| Ok(())).await.map(drop)
    }
}

fn no_tls(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!(
            "it closed the connection when asked for TLS: this node has a token ({TOKEN_FILE}), and it seems to have none, or too many others connect"
        ),
        _ => format!("no TLS with it: {error}"),
    }
}
