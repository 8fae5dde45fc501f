//! HTTP on the host's port: health for everybody, metrics and the page for whoever may know them.
//!
//! One request for each connection. Unauthenticated peers reach the port, so a request is bounded in bytes and time, and requests in
//! number.

use std::ffi::OsStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::events::families;
use crate::net::admission::Bounds;
use crate::net::admission::tasks::{BoundedTasks, Task};
use crate::net::local::is_own_name;
use crate::net::same_user::SameUser;
use crate::rendezvous::coordinator::driver::{Question, asker_of};
use crate::rendezvous::coordinator::readers::{Asker, Readers};
use crate::rendezvous::messages::message::CoordinatorMessage;
use crate::secure::Protection;
use crate::secure::refusals::{Kind, Refusals};
use crate::store::protocol::http::{REQUEST_BYTES, Request, host_name, is_address_or_localhost};
use crate::store::server::{Cause, Controller, Stats, Upgraded};
use crate::wire::text::{plain, validate_run_id};

use super::page::{NoPage, Pages, Which};

/// The first bytes of the requests that are served.
pub(super) const FIRST_BYTES: &[u8] = b"GET ";

/// Requests at once, and those that wait. So health is served however many requests never end.
const BOUNDS: Bounds = Bounds { permits: 64, waiting: 64, kept: 0, patience: ANSWERED_WITHIN };
/// Time for a request to arrive and for its answer to leave.
const LIMIT: Duration = Duration::from_secs(5);
/// How long a request keeps its permit while others of its address wait for one.
const ANSWERED_WITHIN: Duration = Duration::from_millis(100);
/// How long an answer about health is good for.
const FRESH: Duration = Duration::from_millis(20);
/// The coordinator's thread is well if it answers within this time.
const TURN: Duration = Duration::from_secs(2);

/// Who may read more than health, by HTTP, and who may observe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visible {
    pub metrics: Readers,
    pub page: Readers,
}

/// Says who may read more than health, or that there is no HTTP.
const VARIABLE: &str = "ELASTIC_RS_HTTP";

impl Visible {
    /// Health is all there is.
    pub const NOTHING: Self = Self { metrics: Readers::Nobody, page: Readers::Nobody };

    /// As `ELASTIC_RS_HTTP` says: `members` (default), `loopback`, `metrics`, `all`, or `off`, which is `None`. And who may observe a
    /// coordinator that is not protected.
    ///
    /// HTTP has no authentication. So a `protected` host shows metrics only if that is asked for by name, and never the page.
    ///
    /// # Errors
    /// It says something else.
    pub fn of_environment(protected: bool) -> io::Result<(Option<Self>, Readers)> {
        Self::of(std::env::var_os(VARIABLE).as_deref(), protected)
    }

    fn of(value: Option<&OsStr>, protected: bool) -> io::Result<(Option<Self>, Readers)> {
        use Readers::{All, Loopback, Members, Nobody};
        let (metrics, page, observers) = match value.map(|value| value.to_string_lossy()).as_deref() {
            None | Some("members") => (Members, Members, Members),
            Some("loopback") => (Loopback, Loopback, Loopback),
            Some("metrics") if protected => return Ok((Some(Self { metrics: All, page: Nobody }), Members)),
            Some("metrics") => (All, Members, Members),
            Some("all") => (All, All, All),
            Some("off") => return Ok((None, Members)),
            Some(other) => {
                let what = other.escape_default();
                let why = format!("{VARIABLE} is `{what}`, must be `members`, `loopback`, `metrics`, `all` or `off`");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
        };
        Ok((Some(if protected { Self::NOTHING } else { Self { metrics, page } }), observers))
    }
}

/// When the coordinator was asked whether it is ready, and its answer. `None`: it has ended.
type Ready = (Instant, Option<bool>);

/// What answers need.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub questions: mpsc::Sender<Question>,
    pub store: Controller,
    pub visible: Visible,
    pub pages: Pages,
    /// Counts those that are refused, if the host is protected.
    pub protection: Option<Arc<Protection>>,
    /// The name or address by which nodes know the endpoint.
    pub name: Option<String>,
    /// Tells which user of this machine asks. `None`: the host is protected.
    pub same_user: Option<Arc<SameUser>>,
    /// The last answer about health, and when it came.
    ready: Arc<Mutex<Option<Ready>>>,
    /// Held while metrics are made. They cost the coordinator's thread time, and many readers must not keep it from its nodes.
    metrics: Arc<Mutex<()>>,
}

impl Sources {
    pub fn new(
        questions: mpsc::Sender<Question>,
        store: Controller,
        visible: Visible,
        pages: Pages,
        (protection, same_user): (Option<Arc<Protection>>, Option<Arc<SameUser>>),
        name: Option<String>,
    ) -> Self {
        Self {
            questions,
            store,
            visible,
            pages,
            protection,
            name,
            same_user,
            ready: Arc::default(),
            metrics: Arc::default(),
        }
    }
}

/// An answer: its status, the type of its content, and that.
struct Answer(&'static str, &'static str, String);

impl Answer {
    /// Headers for this type of content and this status.
    fn headers(&self) -> String {
        let Self(status, kind, content) = self;
        let policy = if *kind == HTML { PAGE_POLICY } else { NO_POLICY };
        let more = match *status {
            UNAVAILABLE => "Retry-After: 2\r\n".to_owned(),
            ELSEWHERE => format!("Location: {}\r\n", content.trim_end()),
            _ => String::new(),
        };
        format!("Content-Security-Policy: {policy}\r\n{more}")
    }
}

const UNAVAILABLE: &str = "503 Service Unavailable";
/// The content is the address where the same is found.
const ELSEWHERE: &str = "307 Temporary Redirect";
const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
/// What a page may load: nothing. The page itself narrows the styles to its own, by their hash.
const PAGE_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const NO_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answer requests until there are no more connections.
pub(super) async fn serve(mut connections: mpsc::UnboundedReceiver<Upgraded>, sources: Sources) {
    let begin = move |Upgraded { stream, first_bytes, peer, local, permit }: Upgraded| -> Task {
        let sources = sources.clone();
        Box::pin(async move {
            let Ok(stream) = TcpStream::from_std(stream) else { return false };
            let _ = timeout(LIMIT, exchange(stream, first_bytes, (local, peer), &sources)).await;
            drop(permit);
            false
        })
    };
    let requests = BoundedTasks::new(Handle::current(), BOUNDS, begin, |_, _| {});
    while let Some(connection) = connections.recv().await {
        let address = connection.peer.ip();
        requests.arrived(connection, address, false);
    }
}

async fn exchange(mut stream: TcpStream, mut bytes: BytesMut, ends: Ends, sources: &Sources) {
    let answer = loop {
        match Request::parse(&bytes) {
            Ok(Some(request)) => break respond(&request, ends, sources).await,
            Ok(None) => {}
            Err(why) => break Answer("400 Bad Request", TEXT, format!("{why}\n")),
        }
        if bytes.len() > REQUEST_BYTES {
            let why = format!("the request has more than {REQUEST_BYTES} bytes\n");
            break Answer("431 Request Header Fields Too Large", TEXT, why);
        }
        match stream.read_buf(&mut bytes).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
    };
    let more = answer.headers();
    let Answer(status, kind, content) = answer;
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n{more}\r\n",
        content.len()
    );
    let sent = async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(content.as_bytes()).await?;
        stream.shutdown().await?;
        // What is left is read: else the kernel resets the connection, and the answer is lost.
        while !matches!(stream.read_buf(&mut bytes).await?, 0) && bytes.len() <= 2 * REQUEST_BYTES {}
        io::Result::Ok(())
    };
    let _ = sent.await; // it has gone
}

/// This end of a connection, and the other one.
type Ends = (SocketAddr, SocketAddr);

async fn respond(request: &Request, ends: Ends, sources: &Sources) -> Answer {
    match request.path.as_str() {
        "/healthz" => health(sources, false).await,
        "/readyz" => health(sources, true).await,
        "/metrics" => match refusal(request, ends, sources, (sources.visible.metrics, None, METRICS_ELSEWHERE)).await {
            Err(answer) => answer,
            Ok(()) => metrics(sources).await,
        },
        "/" => match which(request) {
            Err(why) => Answer("400 Bad Request", TEXT, why),
            Ok(which) => {
                let what = (sources.visible.page, which.run.clone(), PAGE_ELSEWHERE);
                match refusal(request, ends, sources, what).await {
                    Err(answer) => answer,
                    Ok(()) => page(which, sources).await,
                }
            }
        },
        _ => Answer("404 Not Found", TEXT, "there are /, /healthz, /readyz and /metrics\n".to_owned()),
    }
}

/// What else to do at a protected host: HTTP has no authentication.
const METRICS_ELSEWHERE: &str = "this coordinator is protected, and HTTP has no authentication; ELASTIC_RS_HTTP=metrics on its node serves \
                                 metrics, without the page, to everybody";
const PAGE_ELSEWHERE: &str = "this coordinator is protected, and HTTP has no authentication; `elastic-rs page ENDPOINT -o job.html` \
                              makes the page for those who have the token or a certificate";

/// What a peer gets if its request is not answered with data, of this run or of all: why not, or where it is answered.
async fn refusal(
    request: &Request,
    (local, peer): Ends,
    sources: &Sources,
    (readers, run, protected): (Readers, Option<String>, &str),
) -> Result<(), Answer> {
    let forbidden = |why: String| Err(Answer("403 Forbidden", TEXT, format!("{why}\n")));
    let ended = || Answer(UNAVAILABLE, TEXT, "the coordinator has ended\n".to_owned());
    if readers == Readers::Nobody {
        return forbidden(protected.to_owned());
    }
    if let Some(why) = misnamed(request, peer.ip().to_canonical(), readers, sources.name.as_deref()) {
        return forbidden(why);
    }
    let asker = match &sources.same_user {
        Some(same_user) => asker_of(same_user, local, peer),
        None => Asker::Elsewhere(peer.ip().to_canonical()),
    };
    let why = ask(sources, |reply| Question::MayRead { asker, readers, run, reply }).await.ok_or_else(ended)?;
    // The process that leads knows the nodes of the job, and who may read.
    let elsewhere = ask(sources, Question::Elsewhere).await.ok_or_else(ended)?;
    match (elsewhere, why) {
        (Some(elsewhere), why) if why.is_none() || readers == Readers::Members => Err(redirection(elsewhere, request)),
        (_, why) => why.map_or(Ok(()), forbidden),
    }
}

/// Sends the reader to the process that leads.
fn redirection(elsewhere: CoordinatorMessage, request: &Request) -> Answer {
    match elsewhere {
        CoordinatorMessage::Redirect { endpoint: Some(endpoint), .. } => {
            Answer(ELSEWHERE, TEXT, format!("http://{endpoint}{}\n", request.target()))
        }
        CoordinatorMessage::Redirect { endpoint: None, why } => Answer(UNAVAILABLE, TEXT, format!("{}\n", plain(why))),
        _ => Answer("404 Not Found", TEXT, "this process does not lead the job\n".to_owned()),
    }
}

/// Why the `Host` header cannot be this machine's.
///
/// A site may give this machine another name, so that a browser takes the answer for the site's own (DNS rebinding). So a `Host`
/// header has to be an address, the endpoint's own name, or a name that is this machine's. On its loopback nobody needs another name
/// than `localhost` or the endpoint's, unless everybody may read.
fn misnamed(request: &Request, peer: IpAddr, readers: Readers, name: Option<&str>) -> Option<String> {
    let host = request.host.as_deref().filter(|host| !is_address_or_localhost(host))?;
    if name.is_some_and(|name| name.eq_ignore_ascii_case(host_name(host))) {
        return None; // another process of a list sends readers there
    }
    let shown = host.chars().take(64).collect::<String>().escape_default().to_string();
    if peer.is_loopback() && readers != Readers::All {
        return Some(format!("`{shown}` is no name of this machine's loopback; use localhost"));
    }
    if is_own_name(host_name(host)) {
        return None;
    }
    let known = name.map(|name| format!(", or {name}")).unwrap_or_default();
    Some(format!("`{shown}` is no name of this machine; use an address, its host name{known}"))
}

/// The coordinator's answer. None: it has ended.
async fn ask<T>(sources: &Sources, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    sources.questions.send(question(reply)).await.ok()?;
    answer.await.ok()
}

/// Whether new nodes are welcome. `None`: the coordinator has ended. It is asked once in [`FRESH`], however many ask.
async fn is_ready(sources: &Sources) -> Option<bool> {
    let mut last = sources.ready.lock().await;
    if let Some((at, answer)) = &*last
        && at.elapsed() < FRESH
    {
        return *answer;
    }
    let answer = ask(sources, Question::Ready).await;
    *last = Some((Instant::now(), answer));
    answer
}

async fn health(sources: &Sources, ready: bool) -> Answer {
    match timeout(TURN, is_ready(sources)).await {
        Ok(Some(true)) => Answer("200 OK", TEXT, "ok\n".to_owned()),
        Ok(Some(false)) if !ready => Answer("200 OK", TEXT, "ok\n".to_owned()),
        Ok(Some(false)) => Answer(UNAVAILABLE, TEXT, "this coordinator's process ends\n".to_owned()),
        Ok(None) => Answer(UNAVAILABLE, TEXT, "the coordinator has ended\n".to_owned()),
        Err(_) => {
            let why = format!("the coordinator did not respond within {TURN:?}\n");
            Answer(UNAVAILABLE, TEXT, why)
        }
    }
}

/// The page that a request asks for by the parameters `run=NAME` and `refresh=off`. Others are ignored.
fn which(request: &Request) -> Result<Which, String> {
    let mut which = Which::default();
    for (name, value) in request.parameters() {
        match name {
            "run" => {
                let name = value.filter(|name| validate_run_id(name).is_ok());
                which.run = Some(name.ok_or("`run` in the address is no name of a run\n")?);
            }
            "refresh" => which.still = value.as_deref() == Some("off"),
            _ => {}
        }
    }
    Ok(which)
}

async fn page(which: Which, sources: &Sources) -> Answer {
    match sources.pages.of(which).await {
        Ok(html) => Answer("200 OK", HTML, html.to_string()),
        Err(NoPage::Nothing(why)) => Answer("404 Not Found", TEXT, format!("{why}\n")),
        Err(NoPage::Nobody) => {
            let why = "the process of this coordinator has no Python, which makes the page; `elastic-rs page ENDPOINT -o job.html` \
                       makes it on another machine\n";
            Answer("404 Not Found", TEXT, why.to_owned())
        }
        Err(NoPage::Busy) => {
            Answer(UNAVAILABLE, TEXT, "others wait for the page, or Python is busy; try again\n".to_owned())
        }
        Err(NoPage::Failed) => {
            let why = "the page could not be made; the log of the coordinator's process says why\n";
            Answer("500 Internal Server Error", TEXT, why.to_owned())
        }
    }
}

async fn metrics(sources: &Sources) -> Answer {
    let _turn = sources.metrics.lock().await;
    let Some(mut out) = ask(sources, Question::Metrics).await else {
        return Answer(UNAVAILABLE, TEXT, "the coordinator has ended\n".to_owned());
    };
    let stats = sources.store.stats();
    for (family, value) in [
        (&families::STORE_CONNECTIONS, stats.connections_open),
        (&families::STORE_KEYS, stats.keys),
        (&families::STORE_BYTES, stats.stored_bytes),
    ] {
        out.family(family);
        out.value(family, &[], value);
    }
    out.family(&families::STORE_REQUESTS);
    out.value(&families::STORE_REQUESTS, &[], stats.requests);
    out.family(&families::STORE_REJECTS);
    for cause in Cause::ALL {
        out.value(&families::STORE_REJECTS, &[cause.name()], stats.rejected(cause));
    }
    let refused = sources.protection.as_ref().map(|protection| refusals(protection, &stats)).unwrap_or_default();
    out.family(&families::AUTH_FAILURES);
    for kind in Kind::ALL {
        out.value(&families::AUTH_FAILURES, &[kind.name()], refused.of(kind));
    }
    Answer("200 OK", OPEN_METRICS, out.finish())
}

/// The peers that a protected host has refused. Those that do not even begin TLS end at the store's server.
fn refusals(protection: &Protection, store: &Stats) -> Refusals {
    let mut refused = protection.refusals();
    for (cause, kind) in [
        (Cause::Unproven, Kind::NoTls),
        (Cause::Foreign, Kind::NoTls),
        (Cause::HelloTimeout, Kind::Late),
        (Cause::Crowded, Kind::Crowded),
        (Cause::TooManyConnections, Kind::Crowded),
    ] {
        refused.add(kind, store.rejected(cause));
    }
    refused
}

#[cfg(test)]
mod tests;
