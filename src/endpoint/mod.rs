//! The host: the store and the rendezvous coordinator on one port.
//!
//! Owns the decision whether this process is the host ([`claim`]), and the coordinator's thread. Store and rendezvous meet
//! only here: the store's server hands over the connections that begin with the session protocol's magic.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::process;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::bounded_log::BoundedLog;
use crate::clock::telling_if_slow;
use crate::events::file::EventFile;
use crate::net::admission::tasks::Task;
use crate::net::listen::{BindError, bind_all, bind_wildcard};
use crate::net::local::{interface_addresses, is_local, is_own_name, resolve_here};
use crate::net::same_user::SameUser;
use crate::open_files::WAITING_TO_ONE;
use crate::rendezvous::coordinator::driver::{self, Incoming, Question, Shown};
use crate::rendezvous::coordinator::machine::Machine;
use crate::rendezvous::coordinator::readers::Readers;
use crate::rendezvous::decider::hosts::Exclusions;
use crate::rendezvous::messages::codec;
use crate::rendezvous::messages::message::MAGIC;
use crate::secure::door::{self, Door, FIRST_BYTES, Proven};
use crate::secure::handshakes::Handshakes;
use crate::secure::proof::Pass;
use crate::secure::refusals::{Kind, Refusal, Refusals};
use crate::secure::{Halves, Protection};
use crate::store::server::{
    Controller, Listener, Place, Receiver, ServerOptions, StoreServer, Unknown, Upgrade, Upgraded,
};
use crate::threads;
use crate::wire::text::tidy;
use http::Visible;
use identity::home;
use page::{Desk, Shelf, pages};

mod http;
mod identity;
mod page;

pub use crate::rendezvous::coordinator::driver::Subject;
pub use identity::process_number;
pub use page::{Order, Orders, Which};

/// A store with a coordinator behind the same port. Dropping it stops both.
#[derive(Debug)]
pub struct Host {
    store: StoreServer,
    addresses: Vec<SocketAddr>,
    sessions: watch::Receiver<usize>,
    exclusions: watch::Receiver<Exclusions>,
    questions: mpsc::Sender<Question>,
    door: Option<Arc<Door>>,
    shelf: Shelf,
    thread: Option<JoinHandle<()>>,
    started_by: u32,
    /// The endpoint's address is none of this machine's.
    is_elsewhere: bool,
}

/// The result of an attempt to become the host.
#[derive(Debug)]
pub enum Claim {
    /// This process is the host now.
    Host(Host),
    /// Another process is the host, or will be. With the reason, in words.
    Guest(String),
}

/// Why a process that must be the host cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The name of the address to listen on cannot be resolved here.
    #[error("cannot resolve `{host}`: {source}")]
    Resolve {
        /// The name, as given.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The port cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The thread could not be started, or the sockets could not be taken over.
    #[error("cannot start the coordinator: {0}")]
    Start(#[from] io::Error),
}

/// Become the host of `host:port` if that is this process's part.
///
/// `is_host` is the user's choice: `Some(true)` must succeed, `Some(false)` never tries. Without it, whoever can bind the
/// endpoint's address is the host. Binding is the election, so on one machine exactly one process wins
/// (`docs/decisions/0015-the-process-that-can-bind-the-endpoint-is-the-host.md`).
///
/// On a literal address, and on `localhost`, the host listens as given. It listens on all addresses in two cases: a name
/// resolves here to loopback only (Debian's `127.0.1.1`), which cannot be the address that others see; or `is_host` is given
/// for an address that is not local. This process then reaches it by loopback.
///
/// With a `protection`, it serves only those who can prove themselves. `options` are those of its store.
pub fn claim(
    host: &str,
    port: u16,
    is_host: Option<bool>,
    options: ServerOptions,
    protection: Option<Arc<Protection>>,
) -> Result<Claim, HostError> {
    if is_host == Some(false) {
        return Ok(Claim::Guest("is_host=0 was given".to_owned()));
    }
    let resolved: Vec<SocketAddr> = match resolve_here(host, port) {
        Ok(addresses) => addresses,
        Err(error) if is_host.is_none() && !is_own_name(host) => {
            return Ok(Claim::Guest(format!("`{host}` cannot be resolved: {error}")));
        }
        Err(_) => Vec::new(),
    };
    let mut local: Vec<SocketAddr> = resolved.into_iter().filter(|address| is_local(address.ip())).collect();
    local.sort();
    local.dedup();
    if local.is_empty() && is_host.is_none() && !is_own_name(host) {
        return Ok(Claim::Guest(format!("`{host}` is not an address of this machine")));
    }
    let literal = host == "localhost" || host.parse::<IpAddr>().is_ok();
    let invisible = !literal && local.iter().all(|address| address.ip().is_loopback());
    let listeners =
        if local.is_empty() || invisible { bind_wildcard(port).map(|one| vec![one]) } else { bind_all(&local) };
    match listeners {
        Ok(listeners) => {
            let mut host = Host::start_as(Some(host), listeners, options, protection)?;
            host.is_elsewhere = local.is_empty();
            Ok(Claim::Host(host))
        }
        Err(error) if is_host.is_none() && error.source.kind() == io::ErrorKind::AddrInUse => {
            Ok(Claim::Guest(error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

impl Host {
    /// Serve on every address of `host`, or on all of this machine if it is `None`. Port 0 lets the system choose.
    ///
    /// For a dedicated process. Among the processes of a job, [`claim`] decides which is the host.
    ///
    /// # Errors
    /// `host` cannot be resolved or is not an address of this machine, the port is taken, or the thread cannot be started.
    pub fn listen(
        host: Option<&str>,
        port: u16,
        options: ServerOptions,
        protection: Option<Arc<Protection>>,
    ) -> Result<Self, HostError> {
        let listeners = match host {
            None => vec![bind_wildcard(port)?],
            Some(host) => {
                let resolved = (host, port).to_socket_addrs();
                let failed = |source| HostError::Resolve { host: host.to_owned(), source };
                let mut addresses: Vec<SocketAddr> = resolved.map_err(failed)?.collect();
                addresses.sort();
                addresses.dedup();
                bind_all(&addresses)?
            }
        };
        Ok(Self::start_as(host, listeners, options, protection)?)
    }

    /// Serve on these listeners; at least one.
    ///
    /// With a `protection`, there are only sessions of those who can prove themselves, and no store.
    ///
    /// # Errors
    /// The thread cannot be started, or a socket not be made asynchronous.
    pub fn start(
        listeners: Vec<TcpListener>,
        options: ServerOptions,
        protection: Option<Arc<Protection>>,
    ) -> io::Result<Self> {
        Self::start_as(None, listeners, options, protection)
    }

    /// The same for an endpoint with this name.
    fn start_as(
        name: Option<&str>,
        listeners: Vec<TcpListener>,
        mut options: ServerOptions,
        protection: Option<Arc<Protection>>,
    ) -> io::Result<Self> {
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let port = addresses.first().ok_or(io::ErrorKind::InvalidInput)?.port();
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let door = protection.clone().map(Door::new).transpose().map_err(io::Error::other)?.map(Arc::new);
        let log = Arc::new(BoundedLog::new(options.log_period, |what, count| {
            tracing::warn!(what, count, "more of the same was not logged");
        }));
        let comers = match &door {
            None => {
                let (to, upgraded) = mpsc::unbounded_channel();
                options.upgrades.push(Upgrade { magic: MAGIC, to: to.into() });
                Comers::Open(upgraded)
            }
            Some(door) => {
                let (to, proven) = mpsc::unbounded_channel();
                let handshakes = handshakes(Arc::clone(door), to, Arc::clone(&log));
                let to = Receiver::new(move |upgraded: Upgraded| {
                    let address = upgraded.peer.ip();
                    handshakes.arrived(upgraded, address);
                    true
                });
                options.upgrades.extend([FIRST_BYTES, MAGIC].map(|magic| Upgrade { magic, to: to.clone() }));
                let trusted = Arc::clone(door.protection());
                options.upgrades_only = Some(Unknown {
                    most: WAITING_TO_ONE * door.places(),
                    has_authenticated: Arc::new(move |address| trusted.has_authenticated(address)),
                });
                options.hello_timeout = options.hello_timeout.min(door::LIMIT);
                Comers::Proven(proven, log)
            }
        };
        let (visible, readers) = Visible::of_environment(door.is_some())?;
        let same_user = if door.is_none() { Some(Arc::new(SameUser::new()?)) } else { None };
        let (to_http, requests) = mpsc::unbounded_channel();
        if visible.is_some() {
            options.upgrades.push(Upgrade { magic: http::FIRST_BYTES, to: to_http.into() });
        }
        let (hello_timeout, log_period) = (options.hello_timeout, options.log_period);
        let (count, sessions) = watch::channel(0);
        options.on_pytorchs_rendezvous = Some(warns_of_pytorchs_nodes(sessions.clone(), log_period));
        let store = StoreServer::start(listeners, options)?;
        let (asks, questions) = mpsc::channel(QUESTIONS);
        let visible = visible.unwrap_or(Visible::NOTHING);
        let (pages, desk, shelf) = pages(asks.clone(), visible.page != Readers::Nobody);
        let sources = http::Sources::new(
            asks.clone(),
            store.controller(),
            visible,
            pages,
            (protection.clone(), same_user.clone()),
            name.map(str::to_owned),
        );
        let web = Web { requests, sources, desk, runs_on: door.as_ref().map(|door| door.helpers().clone()) };
        let (excluded, exclusions) = watch::channel(Exclusions::new());
        let shown = Shown { sessions: count, exclusions: excluded, questions, protection, readers, same_user };
        let ends_store = EndsStore(store.controller());
        let machine = Machine::at_home(home(&addresses));
        let run = move || {
            run(&runtime, machine, comers, web, shown, ends_store, (hello_timeout, log_period));
        };
        let thread = threads::spawn(format!("host-{port}"), run)?;
        Ok(Self {
            store,
            addresses,
            sessions,
            exclusions,
            questions: asks,
            door,
            shelf,
            thread: Some(thread),
            started_by: process::id(),
            is_elsewhere: false,
        })
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// The addresses it listens on, all with the same port.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Where this process reaches it, if not at the endpoint's address.
    pub fn own_address(&self) -> Option<SocketAddr> {
        self.is_elsewhere.then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, self.port())))
    }

    /// The addresses by which nodes on other machines may reach it, if it listens on all addresses.
    pub fn public_addresses(&self) -> Vec<SocketAddr> {
        let everywhere = self.addresses.iter().any(|address| address.ip().is_unspecified());
        let all = if everywhere { interface_addresses() } else { Vec::new() };
        all.into_iter().map(|ip| SocketAddr::new(ip, self.port())).collect()
    }

    /// Whether it listens on loopback alone, so that every peer is on this machine.
    pub fn is_on_loopback(&self) -> bool {
        self.addresses.iter().all(|address| address.ip().is_loopback())
    }

    /// Whether its threads have ended. Before [`stop`](Self::stop) that is a bug.
    pub fn has_ended(&self) -> bool {
        self.store.has_ended() || self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The sessions of this host, to wait for their end without borrowing the host.
    pub fn sessions(&self) -> Sessions {
        Sessions { count: self.sessions.clone(), questions: self.questions.clone() }
    }

    /// The hosts that are kept out of its jobs, to watch them.
    pub fn exclusions(&self) -> watch::Receiver<Exclusions> {
        self.exclusions.clone()
    }

    /// The pages that are asked for by HTTP, for one who makes them from now on. `None`: somebody does already, or nobody may read
    /// them. They end with the host.
    pub fn take_orders(&mut self) -> Option<Orders> {
        self.shelf.take()
    }

    /// The peers that were refused so far, at workers' tunnels with the same protection too. `None`: it is not protected.
    pub fn refusals(&self) -> Option<Refusals> {
        self.door.as_ref().map(|door| door.protection().refusals())
    }

    /// The users of this host, sessions and store clients, to wait for their end without borrowing the host.
    pub fn users(&self) -> Users {
        Users { sessions: self.sessions.clone(), controller: self.store.controller() }
    }

    /// Close everything and wait until the threads have ended, and the coordinator's events are written. In a process forked from the one that started it, do nothing:
    /// the threads do not exist there.
    pub fn stop(&mut self) {
        if self.started_by != process::id() {
            // The thread does not exist here. Dropping its handle is harmless, but joining it would wait for ever.
            self.thread = None;
            return;
        }
        // The end of the store closes the coordinator's queue of connections, which ends the coordinator.
        self.store.stop();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// The sessions of a host, and what its coordinator records of them.
#[derive(Clone, Debug)]
pub struct Sessions {
    count: watch::Receiver<usize>,
    questions: mpsc::Sender<Question>,
}

impl Sessions {
    /// Wait until every session has ended, at most `limit`. True if all have.
    pub async fn ended(mut self, limit: Duration) -> bool {
        let count = self.count.clone();
        let ended = async { timeout(limit, self.count.wait_for(|count| *count == 0)).await.is_ok() };
        let ended = telling_if_slow(ended, || {
            let count = *count.borrow();
            let nodes = if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") };
            format!(
                "this process hosts the coordinator, and waits up to {limit:.0?} for {nodes} to leave; another signal ends \
                 the wait"
            )
        });
        ended.await
    }

    /// Write the events of all runs of the coordinator into a file from now on, beginning with those that it keeps. They outlive its
    /// process there: when the host has stopped, all of them are written. A coordinator writes into one file, so a later one stays empty.
    ///
    /// # Errors
    /// The thread that writes cannot be started, or the coordinator cannot be told: it has ended, or requests of HTTP keep it busy.
    pub fn write_events(&self, path: &Path) -> io::Result<()> {
        let file = EventFile::open(path, "coordinator")?;
        let untold = |error| match error {
            TrySendError::Full(_) => "too many requests of HTTP wait for the coordinator; the next round tries again",
            TrySendError::Closed(_) => "the coordinator has ended",
        };
        self.questions.try_send(Question::Write(file)).map_err(|error| io::Error::other(untold(error)))
    }
}

/// The users of a host: sessions and store clients.
#[derive(Clone, Debug)]
pub struct Users {
    sessions: watch::Receiver<usize>,
    controller: Controller,
}

impl Users {
    /// Sessions and store clients that are connected now.
    pub fn count(&self) -> (usize, u64) {
        (*self.sessions.borrow(), self.controller.stats().connections_open)
    }

    /// Wait until nobody is connected, at most `limit`. True if all have gone.
    pub async fn gone(self, limit: Duration) -> bool {
        let gone = async {
            // Changes of the store's counters are not announced, so they are polled: only here, at the end of a process.
            while self.count() != (0, 0) {
                sleep(COUNT_INTERVAL).await;
            }
        };
        timeout(limit, gone).await.is_ok()
    }
}

const COUNT_INTERVAL: Duration = Duration::from_millis(20);

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Stops the store when the coordinator's thread ends for whatever reason. Nodes must find a closed port then, not one that
/// accepts connections and never answers.
struct EndsStore(Controller);

impl Drop for EndsStore {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Requests of HTTP, and what their answers need.
struct Web {
    requests: mpsc::UnboundedReceiver<Upgraded>,
    sources: http::Sources,
    desk: Desk,
    /// Not on the coordinator's thread, if the host is protected: strangers may ask.
    runs_on: Option<Handle>,
}

/// Connections that begin as sessions.
enum Comers {
    /// Of an open host.
    Open(mpsc::UnboundedReceiver<Upgraded>),
    /// Of a protected one, from those who have proven themselves.
    Proven(mpsc::UnboundedReceiver<Comer>, Arc<BoundedLog>),
}

/// A connection whose peer has proven itself.
struct Comer {
    proven: Proven,
    pass: Pass,
    peer: SocketAddr,
    local: SocketAddr,
    place: Place,
}

/// Questions to the coordinator that may wait.
const QUESTIONS: usize = 64;

/// Runs the coordinator until the store's server has ended, and then drops its sessions.
fn run(
    runtime: &Runtime,
    machine: Machine,
    comers: Comers,
    web: Web,
    shown: Shown,
    store: EndsStore,
    (hello_timeout, log_period): (Duration, Duration),
) {
    let empty_store = || store.0.replace_table();
    let (sender, incoming) = mpsc::unbounded_channel();
    runtime.block_on(async {
        match comers {
            Comers::Open(upgraded) => tokio::spawn(hand_over(upgraded, sender)),
            Comers::Proven(proven, log) => tokio::spawn(begin(proven, sender, log)),
        };
        web.runs_on.unwrap_or_else(Handle::current).spawn(http::serve(web.requests, web.sources));
        tokio::spawn(web.desk.serve());
        driver::run(machine, incoming, shown, empty_store, hello_timeout, log_period).await;
    });
}

/// Hands every connection to the coordinator.
async fn hand_over(mut upgraded: mpsc::UnboundedReceiver<Upgraded>, sender: mpsc::UnboundedSender<Incoming>) {
    while let Some(Upgraded { stream, first_bytes, peer, local, place }) = upgraded.recv().await {
        let stream = match TcpStream::from_std(stream) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%peer, %error, "a session's connection cannot be used");
                continue;
            }
        };
        let halves = Halves::plain(stream);
        if sender.send(Incoming { halves, first_bytes, pass: None, peer, local, kept: Box::new(place) }).is_err() {
            return;
        }
    }
}

/// Hands the connections of those who have proven themselves to the coordinator, in whose runtime their sessions are served.
async fn begin(
    mut proven: mpsc::UnboundedReceiver<Comer>,
    sender: mpsc::UnboundedSender<Incoming>,
    log: Arc<BoundedLog>,
) {
    let beginning = async {
        while let Some(Comer { proven, pass, peer, local, place }) = proven.recv().await {
            let halves = match proven.halves() {
                Ok(halves) => halves,
                Err(error) => {
                    tracing::warn!(%peer, %error, "a session's connection cannot be used");
                    continue;
                }
            };
            let (first_bytes, pass) = (BytesMut::new(), Some(pass));
            if sender.send(Incoming { halves, first_bytes, pass, peer, local, kept: Box::new(place) }).is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = beginning => {}
        () = log.summarise() => {}
    }
}

/// Warns that nodes of PyTorch's own `c10d` rendezvous wait at this endpoint, while nodes of ours do. They keep their state in the store, and
/// the two kinds of nodes do not find each other.
fn warns_of_pytorchs_nodes(sessions: watch::Receiver<usize>, every: Duration) -> Listener {
    let told: Mutex<Option<Instant>> = Mutex::new(None);
    Listener::new(move |run_id| {
        let mut told = told.lock();
        if *sessions.borrow() == 0 || told.is_some_and(|at| at.elapsed() < every) {
            return;
        }
        *told = Some(Instant::now());
        let run_id = tidy(run_id);
        tracing::warn!(
            "[{run_id}] a node of PyTorch's own c10d rendezvous waits at this endpoint, and cannot meet nodes of elastic_rs: start it by \
             `elastic-run`, or by `torchrun --rdzv-backend=rust-c10d`, as all others of the job"
        );
    })
}

/// Where the peers of a protected host prove themselves.
fn handshakes(door: Arc<Door>, to: mpsc::UnboundedSender<Comer>, log: Arc<BoundedLog>) -> Handshakes<Upgraded> {
    let mut words = BytesMut::new();
    codec::encode_protected(&door.protection().wanted(), &mut words);
    let words = words.freeze();
    let (helpers, protection) = (door.helpers().clone(), Arc::clone(door.protection()));
    let lost = {
        let (protection, log) = (Arc::clone(&protection), Arc::clone(&log));
        move |peer: IpAddr, refusal: &Refusal| {
            let words = protection.refuse(refusal);
            if log.admits_once(refusal.kind.name(), peer) {
                tracing::warn!(%peer, "a connection is refused: {words}");
            }
        }
    };
    let begin = move |Upgraded { stream, first_bytes, peer, local, place }: Upgraded| -> Task {
        let (door, words, to, log) = (Arc::clone(&door), words.clone(), to.clone(), Arc::clone(&log));
        Box::pin(async move {
            let refused = |refusal: &Refusal| {
                let words = door.protection().refuse(refusal);
                if log.admits_once(refusal.kind.name(), peer.ip()) {
                    tracing::warn!(%peer, "a connection is refused: {words}");
                }
            };
            let stream = match TcpStream::from_std(stream) {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%peer, %error, "a connection cannot be used");
                    return false;
                }
            };
            if !first_bytes.starts_with(FIRST_BYTES) {
                refused(&Refusal::new(Kind::NoTls, door.protection().lacking()));
                door::turn_away(stream, &words).await;
                return false;
            }
            match door.admit(stream, first_bytes).await {
                // The coordinator may have ended.
                Ok((proven, pass)) => to.send(Comer { proven, pass, peer, local, place }).is_ok(),
                Err(refusal) => {
                    refused(&refusal);
                    false
                }
            }
        })
    };
    Handshakes::new(helpers, protection, begin, lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim_plainly(host: &str, port: u16, is_host: Option<bool>) -> Result<Claim, HostError> {
        claim(host, port, is_host, ServerOptions::default(), None)
    }

    fn host_of(claim: Claim) -> Host {
        match claim {
            Claim::Host(host) => host,
            Claim::Guest(why) => panic!("not the host: {why}"),
        }
    }

    fn why_guest(claim: Claim) -> String {
        match claim {
            Claim::Host(host) => panic!("host on port {}", host.port()),
            Claim::Guest(why) => why,
        }
    }

    #[test]
    fn of_two_that_could_be_exactly_one_is_the_host() {
        let first = host_of(claim_plainly("127.0.0.1", 0, None).unwrap());
        let why = why_guest(claim_plainly("127.0.0.1", first.port(), None).unwrap());
        let expected = format!("port {} on 127.0.0.1 is already in use by pid {}", first.port(), process::id());
        assert!(why.starts_with(&expected), "{why}");
    }

    #[test]
    fn who_must_be_the_host_and_cannot_is_told_who_has_the_port() {
        let first = host_of(claim_plainly("127.0.0.1", 0, Some(true)).unwrap());
        let error = claim_plainly("127.0.0.1", first.port(), Some(true)).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by pid {}", process::id())), "{error}");
    }

    #[test]
    fn an_address_of_another_machine_makes_a_guest() {
        // TEST-NET-1 of RFC 5737: no machine has it.
        assert_eq!(
            why_guest(claim_plainly("192.0.2.1", 29400, None).unwrap()),
            "`192.0.2.1` is not an address of this machine"
        );
    }

    /// Behind NAT or a Service, this process may not reach itself by the endpoint's address.
    #[test]
    fn a_host_of_an_address_that_is_not_here_listens_everywhere_and_reaches_itself_by_loopback() {
        for endpoint in ["192.0.2.1", "0.0.0.0", "::", "no-such-host.invalid"] {
            let host = host_of(claim_plainly(endpoint, 0, Some(true)).unwrap());
            assert!(host.addresses()[0].ip().is_unspecified(), "{endpoint}");
            assert_eq!(host.own_address(), Some(SocketAddr::from(([127, 0, 0, 1], host.port()))), "{endpoint}");
            assert!(host.public_addresses().iter().all(|address| !address.ip().is_loopback()));
        }
        let here = host_of(claim_plainly("127.0.0.1", 0, Some(true)).unwrap());
        assert_eq!((here.own_address(), here.public_addresses()), (None, vec![]));
    }

    #[test]
    fn is_host_0_never_listens() {
        assert_eq!(why_guest(claim_plainly("127.0.0.1", 0, Some(false)).unwrap()), "is_host=0 was given");
    }

    #[test]
    fn a_host_of_its_own_listens_where_it_is_told() {
        let host = Host::listen(Some("127.0.0.1"), 0, ServerOptions::default(), None).unwrap();
        assert_eq!(host.addresses(), [SocketAddr::from(([127, 0, 0, 1], host.port()))]);
        assert!(!host.has_ended());
        let everywhere = Host::listen(None, 0, ServerOptions::default(), None).unwrap();
        assert!(everywhere.addresses()[0].ip().is_unspecified());
        let error = Host::listen(Some("127.0.0.1"), host.port(), ServerOptions::default(), None).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by pid {}", process::id())), "{error}");
        let error = Host::listen(Some("no such name"), 0, ServerOptions::default(), None).unwrap_err();
        assert!(error.to_string().starts_with("cannot resolve `no such name`: "), "{error}");
    }

    #[test]
    fn a_file_of_events_that_the_coordinator_was_not_told_of_is_an_error() {
        let folder = std::env::temp_dir().join(format!("elastic_rs-untold-{}", process::id()));
        let ((_, count), (questions, asked)) = (watch::channel(0), mpsc::channel(1));
        let sessions = Sessions { count, questions };
        sessions.write_events(&folder).unwrap();
        let full = sessions.write_events(&folder).unwrap_err().to_string();
        assert!(full.starts_with("too many requests of HTTP wait"), "{full}");
        drop(asked);
        assert_eq!(sessions.write_events(&folder).unwrap_err().to_string(), "the coordinator has ended");
    }

    #[test]
    fn a_port_is_free_again_once_its_host_is_dropped() {
        let port = host_of(claim_plainly("127.0.0.1", 0, None).unwrap()).port();
        host_of(claim_plainly("127.0.0.1", port, None).unwrap());
    }
}
