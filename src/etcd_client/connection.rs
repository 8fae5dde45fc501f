//! One connection to one member: opening it, and calls on it.

use std::future::{Ready, ready};
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_rustls::rustls::ClientConfig;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::endpoints::{Address, to_text as address_to_text};
use super::error::{CONNECTION_OVER, EtcdError, Failure, Remedy, To, classify, to_text, transport};
use super::messages::{AuthenticateRequest, StatusRequest, StatusResponse, WatchRequest, WatchResponse};
use super::options::ClientOptions;
use super::rpc::{Request, WATCH_PATH};
use super::{scheme, tls};
use crate::net::connect::{Met, race, resolve, to_text as met_to_text};

/// Largest answer that is read. etcd's requests have at most 1.5 MiB, and so has each value; a prefix may hold thousands of keys.
const ANSWER_LIMIT_BYTES: usize = 64 << 20;
/// Largest head of an answer.
const HEAD_LIMIT_BYTES: u32 = 16 << 10;

/// A token that etcd gives a user for name and password.
pub(super) type Token = MetadataValue<Ascii>;

/// The token of a client, which all its connections share: etcd's members know one another's tokens.
pub(super) type SharedToken = Arc<Mutex<Option<Token>>>;

/// An open connection to a member.
pub(super) struct Connection {
    /// The member's address, in words.
    pub member: String,
    /// The ids of the cluster and of the member.
    pub ids: (u64, u64),
    user: Option<String>,
    token: SharedToken,
    channel: Channel,
    /// Why it was given up, if it was.
    over: watch::Sender<Option<String>>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connect to a member, and ask for its status. `Err` in the pair: it reports none without a (new) token.
    pub async fn open(
        address: &Address,
        options: &ClientOptions,
        token: SharedToken,
    ) -> Result<(Self, Result<StatusResponse, Failure>), Failure> {
        let member = address_to_text(address);
        let user = options.credentials.as_ref().map(|credentials| credentials.username.clone());
        let to = To { member: &member, user: user.as_deref() };
        let deadline = Instant::now() + options.patience;
        let tls = match options.endpoints.tls {
            true => Some(tls::read(&options.tls).map_err(Failure::answer)?),
            false => None,
        };
        let left = || deadline.saturating_duration_since(Instant::now());
        let stream = dial(address, to, deadline).await?;
        let opened = async {
            let channel = channel(stream, address, tls.clone()).await.map_err(|cause| transport(&cause, to))?;
            let over = watch::Sender::new(None);
            let mut connection = Self { member: member.clone(), ids: (0, 0), user: user.clone(), token, channel, over };
            match connection.call(StatusRequest {}, options.patience).await {
                Err(failure) if matches!(failure.error, EtcdError::Denied(_)) && user.is_some() => {
                    Ok((connection, Err(failure)))
                }
                Err(failure) => Err(failure),
                Ok(status) => {
                    connection.note_ids(&status);
                    Ok((connection, Ok(status)))
                }
            }
        };
        let opened = timeout(left(), opened).await.unwrap_or_else(|_| Err(Failure::silent(to, options.patience)));
        match opened {
            Err(failure) if failure.transport => Err(closer_look(address, to, tls).await.unwrap_or(failure)),
            opened => opened,
        }
    }

    /// Note which member this is.
    pub fn note_ids(&mut self, status: &StatusResponse) {
        self.ids = status.header.as_ref().map_or((0, 0), |header| (header.cluster_id, header.member_id));
    }

    /// Call a member. A call that is dropped is cancelled at etcd.
    pub async fn call<Q: Request>(&self, question: Q, limit: Duration) -> Result<Q::Response, Failure> {
        let mut request = tonic::Request::new(question);
        self.put_metadata(&mut request, Q::PATH);
        let asked = async {
            let mut grpc = self.grpc().await?;
            let answered = grpc.unary(request, PathAndQuery::from_static(Q::PATH), ProstCodec::default()).await;
            answered.map(tonic::Response::into_inner).map_err(|status| classify(&status, self.to()))
        };
        tokio::select! {
            answered = timeout(limit, asked) => answered.unwrap_or_else(|_| Err(Failure::silent(self.to(), limit))),
            why = self.until_over() => Err(Failure::member(why, true)),
        }
    }

    /// Open the stream of a watch. `requests` must hold the request that creates it.
    pub async fn watch(
        &self,
        requests: impl tokio_stream::Stream<Item = WatchRequest> + Send + 'static,
        limit: Duration,
    ) -> Result<tonic::Streaming<WatchResponse>, Failure> {
        let mut request = tonic::Request::new(requests);
        self.put_metadata(&mut request, WATCH_PATH);
        let asked = async {
            let mut grpc = self.grpc().await?;
            let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
            let opened = grpc.streaming(request, PathAndQuery::from_static(WATCH_PATH), codec).await;
            opened.map(tonic::Response::into_inner).map_err(|status| classify(&status, self.to()))
        };
        tokio::select! {
            opened = timeout(limit, asked) => opened.unwrap_or_else(|_| Err(Failure::silent(self.to(), limit))),
            why = self.until_over() => Err(Failure::member(why, true)),
        }
    }

    /// Get a token for name and password. `None`: etcd has no users.
    pub async fn authenticate(&self, options: &ClientOptions) -> Result<Option<Token>, Failure> {
        let Some(credentials) = &options.credentials else { return Ok(None) };
        let request = AuthenticateRequest {
            name: credentials.username.clone(),
            password: credentials.password.reveal().to_owned(),
        };
        match self.call(request, options.patience * AUTHENTICATION_PATIENCE).await {
            Ok(answer) => match answer.token.parse::<Token>() {
                Ok(token) => Ok(Some(token)),
                Err(_) => {
                    let text = format!("etcd at {} gave a token that no request can carry", self.member);
                    Err(Failure::answer(EtcdError::Other(text)))
                }
            },
            Err(failure) if failure.remedy == Remedy::WithoutToken => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The token that calls carry at the moment.
    pub fn token(&self) -> Option<Token> {
        self.token.lock().clone()
    }

    /// End all calls on this connection.
    pub fn give_up(&self, why: &str) {
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            over.get_or_insert_with(|| why.to_owned());
            first
        });
    }

    /// Why the connection was given up, if it was.
    pub fn given_up(&self) -> Option<String> {
        self.over.borrow().clone()
    }

    /// Wait until the connection is given up.
    pub async fn until_over(&self) -> String {
        let mut over = self.over.subscribe();
        // The sender lives in `self`: it cannot be gone.
        let why = over.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
        why.unwrap_or_default()
    }

    /// The member, for messages.
    pub fn to(&self) -> To<'_> {
        To { member: &self.member, user: self.user.as_deref() }
    }

    async fn grpc(&self) -> Result<Grpc<Channel>, Failure> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_LIMIT_BYTES);
        match grpc.ready().await {
            Ok(()) => Ok(grpc),
            Err(error) => {
                Err(Failure { remedy: Remedy::OtherMember { sent: false }, ..transport(&to_text(&error), self.to()) })
            }
        }
    }

    fn put_metadata<T>(&self, request: &mut tonic::Request<T>, path: &str) {
        // etcd 3.4 rejects a password that comes with a token that has ended.
        if let Some(token) = self.token().filter(|_| path != AuthenticateRequest::PATH) {
            request.metadata_mut().insert("token", token);
        }
        // Without a leader these cannot succeed. A member that knows none says so at once, and ends streams.
        if ["/etcdserverpb.KV/", "/etcdserverpb.Lease/", "/etcdserverpb.Watch/"]
            .iter()
            .any(|room| path.starts_with(room))
        {
            request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        }
    }
}

/// etcd checks a password with bcrypt, and takes its time when many ask.
const AUTHENTICATION_PATIENCE: u32 = 3;

/// Connect to the first of a member's addresses that answers.
async fn dial((host, port): &Address, to: To<'_>, deadline: Instant) -> Result<TcpStream, Failure> {
    let failed = |why: String, refused: bool| {
        let text = format!("etcd at {}: {why}", to.member);
        Failure { refused, ..Failure::member(text, false) }
    };
    let addresses = resolve(host, *port, deadline).await.map_err(|error| failed(error.to_string(), false))?;
    let open = async |stream: TcpStream| match stream.set_nodelay(true) {
        Ok(()) => Ok(stream),
        Err(error) => Err(error.to_string()),
    };
    race(&addresses, deadline, TcpStream::connect, open).await.map_err(|met| {
        let refused = !met.is_empty() && met.iter().all(Met::is_refusal);
        let mend = if refused { ": start etcd there, or correct the endpoint" } else { "" };
        failed(format!("{}{mend}", met_to_text(host, &met)), refused)
    })
}

/// Speak HTTP/2 on a new connection, with TLS if there is a configuration for it.
async fn channel(stream: TcpStream, address: &Address, tls: Option<Arc<ClientConfig>>) -> Result<Channel, String> {
    let member = address_to_text(address);
    let scheme = if tls.is_some() { "https" } else { "http" };
    let stream: Box<dyn Stream> = match tls {
        Some(config) => Box::new(tls::begin(config, &address.0, stream).await.map_err(|error| to_text(&*error))?),
        None => Box::new(stream),
    };
    let opened = async {
        // tonic gets a connection that is encrypted already: only its requests say `https`.
        let endpoint = Endpoint::from_shared(format!("http://{member}"))?
            .origin(Uri::try_from(format!("{scheme}://{member}")).unwrap_or_default())
            .user_agent(concat!("elastic_rs/", env!("CARGO_PKG_VERSION")))?
            .http2_max_header_list_size(HEAD_LIMIT_BYTES);
        endpoint.connect_with_connector(Dialled(Some(stream))).await
    };
    opened.await.map_err(|error: tonic::transport::Error| to_text(&error))
}

/// A connection, encrypted or not.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Gives tonic a connection that is open. When that has ended, tonic would connect again: it gets an error instead, since the next
/// connection may be to another member.
struct Dialled(Option<Box<dyn Stream>>);

impl Service<Uri> for Dialled {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let over = || io::Error::new(io::ErrorKind::NotConnected, CONNECTION_OVER);
        ready(self.0.take().map(TokioIo::new).ok_or_else(over))
    }
}

/// Time for each question of a closer look. etcd answers them at once.
const LOOK_LIMIT: Duration = Duration::from_millis(500);

/// Find out why a member closed the connection: it speaks TLS and this client does not, or the other way round, or it does not accept
/// this client's certificate. `None`: none of these.
async fn closer_look(address: &Address, to: To<'_>, tls: Option<Arc<ClientConfig>>) -> Option<Failure> {
    let member = to.member;
    let dial = async || dial(address, to, Instant::now() + LOOK_LIMIT).await.ok();
    let text = match tls {
        None if scheme::speaks_tls(dial().await?).await => {
            format!(
                "etcd at {member} speaks TLS: set `protocol=https` and `cacert`, or write `https://` before the endpoint"
            )
        }
        None => return None,
        Some(config) => {
            let objection = timeout(LOOK_LIMIT, tls::objection(config, &address.0, dial().await?));
            if let Some(cause) = objection.await.ok().flatten() {
                return Some(transport(&cause, to)).filter(|failure| failure.error.is_final());
            }
            if !scheme::speaks_plain(dial().await?).await {
                return None;
            }
            format!("etcd at {member} does not speak TLS: set `protocol=http`, or write `http://` before the endpoint")
        }
    };
    Some(Failure { error: EtcdError::WrongScheme(text), ..Failure::member(String::new(), false) })
}
