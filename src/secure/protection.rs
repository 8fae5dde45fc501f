//! How the sessions of a job, or of a coordinator, are protected.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, timeout};

use super::certificates::{CertificateFiles, Certificates};
use super::error::ProtectionError;
use super::objection::to_text;
use super::refusals::{Counters, Refusal, Refusals};
use super::stream::Halves;
use super::tls::{self, ClientStream};
use super::token::Token;
use super::token_file::TokenFile;
use super::watched::GOOD_FOR;
use super::x509::Shown;
use super::{TLS_CA, TLS_CERT, TLS_KEY, TOKEN_FILE, proof};
use crate::net::admission::Authenticated;
use crate::net::connect::{race, resolve, to_text as to_text_of};

/// Time for a connection's TLS handshake and both proofs of the token.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

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

/// Where an end's token is.
#[derive(Clone, Debug)]
pub enum TokenSource {
    /// In this file.
    File(PathBuf),
    /// Here.
    Memory(Token),
    /// Derived from the one in this file, a different one for each run. Only for a coordinator: a node has its run's token.
    Master(PathBuf),
}

/// What an end proves itself by.
#[derive(Clone, Debug)]
pub struct ProtectionOptions {
    /// A token.
    pub token: Option<TokenSource>,
    /// A certificate. With a token, both are wanted of the peer.
    pub certificates: Option<CertificateFiles>,
    /// How long what a file held is good for, before it is looked at again.
    pub good_for: Duration,
}

impl Default for ProtectionOptions {
    fn default() -> Self {
        Self { token: None, certificates: None, good_for: GOOD_FOR }
    }
}

/// How the sessions of a job, or of a coordinator, are protected: by a token, by certificates, or by both.
pub struct Protection {
    token: Option<Source>,
    certificates: Option<Certificates>,
    /// Of an end without certificates.
    client: Arc<tls::ClientConfig>,
    /// Of all acceptors that ask for it.
    refused: Counters,
    /// From where peers have proven themselves at any of these acceptors.
    authenticated: Mutex<Authenticated>,
}

impl fmt::Debug for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, certificates, .. } = self;
        f.debug_struct("Protection").field("token", token).field("certificates", certificates).finish_non_exhaustive()
    }
}

impl Protection {
    /// By what these options say.
    ///
    /// # Errors
    /// A file cannot be read, others may read it, or it does not hold what it should; or there is neither token nor certificate.
    pub fn new(options: ProtectionOptions) -> Result<Self, ProtectionError> {
        let ProtectionOptions { token, certificates, good_for } = options;
        if token.is_none() && certificates.is_none() {
            return Err(ProtectionError::Nothing);
        }
        let token = token.map(|source| match source {
            TokenSource::File(path) => TokenFile::open(&path, good_for).map(Source::File),
            TokenSource::Master(path) => TokenFile::open(&path, good_for).map(Source::Master),
            TokenSource::Memory(token) => Ok(Source::Memory(token)),
        });
        let certificates = certificates.map(|files| Certificates::open(files, good_for));
        let client = tls::client_config().map_err(|error| ProtectionError::Tls(error.to_string()))?;
        Ok(Self {
            token: token.transpose()?,
            certificates: certificates.transpose()?,
            client,
            refused: Counters::default(),
            authenticated: Mutex::default(),
        })
    }

    /// By the token in this file.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn by_file(path: &Path) -> Result<Self, ProtectionError> {
        Self::of(TokenSource::File(path.to_owned()))
    }

    /// By this token.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn by_token(token: Token) -> Result<Self, ProtectionError> {
        Self::of(TokenSource::Memory(token))
    }

    /// By the tokens that are derived from the one in this file.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn by_master_file(path: &Path) -> Result<Self, ProtectionError> {
        Self::of(TokenSource::Master(path.to_owned()))
    }

    fn of(token: TokenSource) -> Result<Self, ProtectionError> {
        Self::new(ProtectionOptions { token: Some(token), ..ProtectionOptions::default() })
    }

    /// The token that this end shows.
    async fn own(&self) -> Option<Token> {
        match self.token.as_ref()? {
            Source::File(file) | Source::Master(file) => Some(file.tokens().await.0),
            Source::Memory(token) => Some(token.clone()),
        }
    }

    /// The token that this end shows, for another process of the same job. `None`: it has certificates alone.
    pub fn reveal(&self) -> Option<String> {
        self.known().first().map(|token| token.reveal().to_owned())
    }

    /// The tokens that this end accepts, of a peer that speaks for this run. `None`: certificates are enough.
    pub(super) async fn accepted(&self, run_id: &str) -> Option<Vec<Token>> {
        Some(match self.token.as_ref()? {
            Source::File(file) => file.tokens().await.into_vec(),
            Source::Memory(token) => vec![token.clone()],
            Source::Master(file) => {
                file.tokens().await.into_vec().iter().map(|master| master.for_run(run_id)).collect()
            }
        })
    }

    /// The ids of the tokens that this end shows or accepts, for logs. The id of a master's token if there is one. `None`: it has
    /// certificates alone.
    pub fn key_ids(&self) -> Option<String> {
        let ids: Vec<_> = self.known().iter().map(|token| token.id().to_string()).collect();
        (!ids.is_empty()).then(|| ids.join(", "))
    }

    /// What the certificate that this end shows says. `None`: it has a token alone.
    pub fn certificate(&self) -> Option<Shown> {
        self.certificates.as_ref().map(Certificates::shown)
    }

    /// What an operator has to know now about certificates that end soon, one sentence for each. It has been logged, too.
    pub fn warnings(&self) -> Vec<String> {
        self.certificates.as_ref().map(Certificates::warnings).unwrap_or_default()
    }

    /// Count a refused peer, and return the sentence for the log.
    pub fn refuse(&self, refusal: &Refusal) -> String {
        self.refused.count(refusal.kind);
        format!("{}; {} refused so far", refusal.why, self.refusals().total())
    }

    /// The peers that were refused so far, by the coordinator and at tunnels.
    pub fn refusals(&self) -> Refusals {
        self.refused.now()
    }

    /// A peer at this address has proven itself.
    pub(super) fn note_authenticated(&self, address: IpAddr) {
        self.authenticated.lock().add(address);
    }

    /// Whether a peer at this address has proven itself before, as far as that is remembered.
    pub fn has_authenticated(&self, address: IpAddr) -> bool {
        self.authenticated.lock().has(address)
    }

    /// What this end proves itself by, for logs.
    pub fn text(&self) -> String {
        let token = self.key_ids().map(|ids| format!("the token with the id {ids}"));
        let certificate = self.certificate().map(|shown| shown.to_string());
        token.into_iter().chain(certificate).collect::<Vec<_>>().join(" and ")
    }

    /// What a peer needs that shows nothing: a token, certificates, or both, and where it names them.
    pub fn wanted(&self) -> String {
        let token = format!("name the file with the job's token in {TOKEN_FILE}");
        let certificates = format!("name their files in {TLS_CERT}, {TLS_KEY} and {TLS_CA}");
        match (&self.token, &self.certificates) {
            (_, None) => format!("a token: {token}"),
            (None, _) => format!("certificates: {certificates}"),
            (Some(_), Some(_)) => format!("a token and certificates: {token}, and {certificates}"),
        }
    }

    /// What an unauthenticated peer lacks that does not even speak TLS.
    pub fn lacking(&self) -> &'static str {
        if self.token.is_some() { "it shows no token" } else { "it shows no certificate" }
    }

    /// The certificate that this end shows.
    pub(super) fn certificates(&self) -> Option<&Certificates> {
        self.certificates.as_ref()
    }

    /// The tokens that were found at the last look.
    fn known(&self) -> Vec<Token> {
        match &self.token {
            Some(Source::File(file) | Source::Master(file)) => file.known().into_vec(),
            Some(Source::Memory(token)) => vec![token.clone()],
            None => Vec::new(),
        }
    }

    /// Begin TLS on a connection to a coordinator, and prove both ends. The certificate of the coordinator, if it has one, has to be for
    /// `host`. An error says nothing about the job: an unauthenticated peer may have caused it, and the node tries again.
    async fn meet(&self, stream: TcpStream, host: &str, run_id: &str) -> Result<ClientStream<TcpStream>, String> {
        let done = async {
            let token = self.own().await;
            let (config, name) = match &self.certificates {
                Some(own) => (Arc::clone(&own.identity().await.client), own.server_name(host)?),
                None => (Arc::clone(&self.client), tls::no_name()),
            };
            let mut stream = tls::connect(config, name, stream).await.map_err(|error| self.no_tls(&error))?;
            let secret = tls::secret_of_client(&stream)?;
            proof::prove(&mut stream, token.as_ref(), run_id, &secret).await?;
            Ok(stream)
        };
        let late = || {
            format!("it has not proven itself within {HANDSHAKE_LIMIT:?}, as this node's {} asks for", self.variable())
        };
        timeout(HANDSHAKE_LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }

    fn no_tls(&self, error: &io::Error) -> String {
        if let Some(text) = to_text(error) {
            return text;
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!(
                "it closed the connection when asked for TLS: this node has {} ({}), and it seems to have none, or too many others connect",
                if self.token.is_some() { "a token" } else { "certificates" },
                self.variable()
            ),
            _ => format!("no TLS with it: {error}"),
        }
    }

    /// Where this end's means are named.
    fn variable(&self) -> &'static str {
        if self.token.is_some() { TOKEN_FILE } else { TLS_CERT }
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
        self.connect_to((host, port), host, run_id, limit, prepare).await.map(Halves::of)
    }

    /// Try whether the coordinator at `address:port` is one that this end can meet for a run. Its certificate, if it has one, has to
    /// be for `host`. No session begins.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn try_at(
        &self,
        address: &str,
        port: u16,
        host: &str,
        run_id: &str,
        limit: Duration,
    ) -> Result<(), String> {
        self.connect_to((address, port), host, run_id, limit, |_| Ok(())).await.map(drop)
    }

    async fn connect_to(
        &self,
        (address, port): (&str, u16),
        host: &str,
        run_id: &str,
        limit: Duration,
        prepare: impl Fn(&TcpStream) -> io::Result<()>,
    ) -> Result<ClientStream<TcpStream>, String> {
        let deadline = Instant::now() + limit;
        let addresses = resolve(address, port, deadline).await.map_err(|error| error.to_string())?;
        let open = async |stream: TcpStream| {
            prepare(&stream).map_err(|error| error.to_string())?;
            self.meet(stream, host, run_id).await
        };
        race(&addresses, deadline, TcpStream::connect, open).await.map_err(|met| to_text_of(address, &met))
    }
}

impl Halves {
    /// What carries a session on this connection to a coordinator at `host`. If it is protected, both ends have proven themselves for
    /// the run of this id.
    ///
    /// # Errors
    /// A sentence: an end is not proven, or the connection has ended.
    pub async fn begin(stream: TcpStream, host: &str, secured: Option<(&Protection, &str)>) -> Result<Self, String> {
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        match secured {
            Some((protection, run_id)) => protection.meet(stream, host, run_id).await.map(Self::of),
            None => Ok(Self::plain(stream)),
        }
    }
}
