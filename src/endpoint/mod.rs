//! The endpoint server: the store and the rendezvous coordinator on one port.
//!
//! Owns the decision whether this process serves the endpoint ([`claim`]), and the coordinator's thread. Store and rendezvous meet
//! only here: the store's server hands over the connections that begin with the session protocol's magic.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::process;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::runtime::Builder;
use tokio::sync::{mpsc, watch};

use crate::bounded_log::BoundedLog;
use crate::net::listen::{BindError, bind_all, bind_wildcard};
use crate::net::local::{interface_addresses, is_local, is_own_name, resolve_here};
use crate::net::same_user::SameUser;
use crate::open_files::WAITING_TO_ONE;
use crate::rendezvous::coordinator::driver::{DriversHosts, Question, Shown};
use crate::rendezvous::coordinator::machine::Machine;
use crate::rendezvous::coordinator::readers::Readers;
use crate::rendezvous::messages::message::{MAGIC, PeerHello};
use crate::rendezvous::run::Exclusions;
use crate::secure::Protection;
use crate::secure::acceptor::{self, Acceptor, FIRST_BYTES};
use crate::secure::refusals::Refusals;
use crate::store::server::{Receiver, ServerOptions, StoreServer, Unknown, Upgrade, Upgraded};
use crate::threads;
use http::Visible;
use identity::instance;
use page::{PageOffer, pages};
use sessions::{EndsStore, NewSessions, Web, handshakes, run, warns_of_pytorchs_nodes};

mod http;
mod identity;
mod page;
mod sessions;
mod users;

pub use crate::rendezvous::coordinator::driver::Subject;
pub use identity::process_number;
pub use page::{PageRequest, PageRequests, Which};
pub use users::{Sessions, Users};

/// A store with a coordinator behind the same port. Dropping it stops both.
#[derive(Debug)]
pub struct EndpointServer {
    store: StoreServer,
    addresses: Vec<SocketAddr>,
    sessions: watch::Receiver<usize>,
    hosts: Box<HostLists>,
    questions: mpsc::Sender<Question>,
    acceptor: Option<Arc<Acceptor>>,
    page_requests: PageOffer,
    thread: Option<JoinHandle<()>>,
    started_by: u32,
    /// The endpoint's address is none of this machine's.
    is_elsewhere: bool,
}

/// The hosts that are not used: those that the coordinator keeps out, and those that drivers in this process do not use.
#[derive(Debug)]
struct HostLists {
    exclusions: watch::Receiver<Exclusions>,
    drivers: watch::Sender<DriversHosts>,
}

/// Questions to the coordinator that may wait.
const QUESTIONS: usize = 64;

/// The result of an attempt to become the host.
#[derive(Debug)]
pub enum Claim {
    /// This process is the host now.
    Serves(EndpointServer),
    /// Another process is the host, or will be. With the reason, in words.
    Elsewhere(String),
}

/// Why a process that must be the host cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
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
    #[error(
        "cannot start the coordinator, its thread or sockets cannot be set up: {0}; check the limits of threads and open files"
    )]
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
/// With a `protection`, it serves only those who can prove themselves. `options` are those of its store. With a `list`, it is one of the
/// processes that may lead the job.
pub fn claim(
    host: &str,
    port: u16,
    is_host: Option<bool>,
    options: ServerOptions,
    protection: Option<Arc<Protection>>,
    list: Option<PeerHello>,
) -> Result<Claim, EndpointError> {
    if is_host == Some(false) {
        return Ok(Claim::Elsewhere("is_host=0 was given".to_owned()));
    }
    let resolved: Vec<SocketAddr> = match resolve_here(host, port) {
        Ok(addresses) => addresses,
        Err(error) if is_host.is_none() && !is_own_name(host) => {
            return Ok(Claim::Elsewhere(format!("`{host}` cannot be resolved: {error}")));
        }
        Err(_) => Vec::new(),
    };
    let mut local: Vec<SocketAddr> = resolved.into_iter().filter(|address| is_local(address.ip())).collect();
    local.sort();
    local.dedup();
    if local.is_empty() && is_host.is_none() && !is_own_name(host) {
        return Ok(Claim::Elsewhere(format!("`{host}` is not an address of this machine")));
    }
    let literal = host == "localhost" || host.parse::<IpAddr>().is_ok();
    let invisible = !literal && local.iter().all(|address| address.ip().is_loopback());
    let listeners =
        if local.is_empty() || invisible { bind_wildcard(port).map(|one| vec![one]) } else { bind_all(&local) };
    match listeners {
        Ok(listeners) => {
            let mut host = EndpointServer::start_as(Some(host), listeners, options, protection, list)?;
            host.is_elsewhere = local.is_empty();
            Ok(Claim::Serves(host))
        }
        Err(error) if is_host.is_none() && error.source.kind() == io::ErrorKind::AddrInUse => {
            Ok(Claim::Elsewhere(error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

impl EndpointServer {
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
    ) -> Result<Self, EndpointError> {
        let listeners = match host {
            None => vec![bind_wildcard(port)?],
            Some(host) => {
                let resolved = (host, port).to_socket_addrs();
                let failed = |source| EndpointError::Resolve { host: host.to_owned(), source };
                let mut addresses: Vec<SocketAddr> = resolved.map_err(failed)?.collect();
                addresses.sort();
                addresses.dedup();
                bind_all(&addresses)?
            }
        };
        Ok(Self::start_as(host, listeners, options, protection, None)?)
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
        Self::start_as(None, listeners, options, protection, None)
    }

    /// The same for an endpoint with this name.
    fn start_as(
        name: Option<&str>,
        listeners: Vec<TcpListener>,
        mut options: ServerOptions,
        protection: Option<Arc<Protection>>,
        list: Option<PeerHello>,
    ) -> io::Result<Self> {
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let port = addresses.first().ok_or(io::ErrorKind::InvalidInput)?.port();
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let acceptor = protection.clone().map(Acceptor::new).transpose().map_err(io::Error::other)?.map(Arc::new);
        let log = Arc::new(BoundedLog::new(options.log_period, |what, count| {
            tracing::warn!(what, count, "further messages of this kind were not logged");
        }));
        let new_sessions = match &acceptor {
            None => {
                let (to, upgraded) = mpsc::unbounded_channel();
                options.upgrades.push(Upgrade { magic: MAGIC, to: to.into() });
                NewSessions::Open(upgraded)
            }
            Some(acceptor) => {
                let (to, proven) = mpsc::unbounded_channel();
                let handshakes = handshakes(Arc::clone(acceptor), to, Arc::clone(&log));
                let to = Receiver::new(move |upgraded: Upgraded| {
                    let address = upgraded.peer.ip();
                    handshakes.arrived(upgraded, address);
                    true
                });
                options.upgrades.extend([FIRST_BYTES, MAGIC].map(|magic| Upgrade { magic, to: to.clone() }));
                let trusted = Arc::clone(acceptor.protection());
                options.upgrades_only = Some(Unknown {
                    most: WAITING_TO_ONE * acceptor.permits(),
                    has_authenticated: Arc::new(move |address| trusted.has_authenticated(address)),
                });
                options.hello_timeout = options.hello_timeout.min(acceptor::LIMIT);
                NewSessions::Proven(proven, log)
            }
        };
        let (visible, readers) = Visible::of_environment(acceptor.is_some())?;
        let same_user = if acceptor.is_none() { Some(Arc::new(SameUser::new()?)) } else { None };
        let (to_http, requests) = mpsc::unbounded_channel();
        if visible.is_some() {
            options.upgrades.push(Upgrade { magic: http::FIRST_BYTES, to: to_http.into() });
        }
        let (hello_timeout, log_period) = (options.hello_timeout, options.log_period);
        let has_list = list.is_some();
        let (count, sessions) = watch::channel(0);
        options.on_pytorchs_rendezvous = Some(warns_of_pytorchs_nodes(sessions.clone(), log_period));
        let store = StoreServer::start(listeners, options)?;
        let (asks, questions) = mpsc::channel(QUESTIONS);
        let visible = visible.unwrap_or(Visible::NOTHING);
        let (pages, cache, page_requests) = pages(asks.clone(), visible.page != Readers::Nobody);
        let sources = http::Sources::new(
            asks.clone(),
            store.controller(),
            visible,
            pages,
            (protection.clone(), same_user.clone()),
            name.map(str::to_owned),
        );
        let web =
            Web { requests, sources, cache, runs_on: acceptor.as_ref().map(|acceptor| acceptor.helpers().clone()) };
        let (excluded, exclusions) = watch::channel(Exclusions::new());
        let (drivers, of_drivers) = watch::channel(DriversHosts::new());
        let shown = Shown {
            sessions: count,
            exclusions: excluded,
            drivers: of_drivers,
            questions,
            protection,
            readers,
            same_user,
            list,
        };
        let ends_store = EndsStore { controller: store.controller(), has_list };
        let machine = Machine::with_instance(instance(&addresses));
        let run = move || {
            run(&runtime, machine, new_sessions, web, shown, ends_store, (hello_timeout, log_period));
        };
        let thread = threads::spawn(format!("host-{port}"), run)?;
        Ok(Self {
            store,
            addresses,
            sessions,
            hosts: Box::new(HostLists { exclusions, drivers }),
            questions: asks,
            acceptor,
            page_requests,
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
        self.hosts.exclusions.clone()
    }

    /// Where a driver of agents in this process shows which hosts it does not use.
    pub fn drivers(&self) -> watch::Sender<DriversHosts> {
        self.hosts.drivers.clone()
    }

    /// The pages that are asked for by HTTP, for one who makes them from now on. `None`: somebody does already, or nobody may read
    /// them. They end with the host.
    pub fn take_page_requests(&mut self) -> Option<PageRequests> {
        self.page_requests.take()
    }

    /// The peers that were refused so far, at workers' tunnels with the same protection too. `None`: it is not protected.
    pub fn refusals(&self) -> Option<Refusals> {
        self.acceptor.as_ref().map(|acceptor| acceptor.protection().refusals())
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

impl Drop for EndpointServer {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim_plainly(host: &str, port: u16, is_host: Option<bool>) -> Result<Claim, EndpointError> {
        claim(host, port, is_host, ServerOptions::default(), None, None)
    }

    fn host_of(claim: Claim) -> EndpointServer {
        match claim {
            Claim::Serves(host) => host,
            Claim::Elsewhere(why) => panic!("not the host: {why}"),
        }
    }

    fn why_not_host(claim: Claim) -> String {
        match claim {
            Claim::Serves(host) => panic!("host on port {}", host.port()),
            Claim::Elsewhere(why) => why,
        }
    }

    #[test]
    fn of_two_that_could_be_exactly_one_is_the_host() {
        let first = host_of(claim_plainly("127.0.0.1", 0, None).unwrap());
        let why = why_not_host(claim_plainly("127.0.0.1", first.port(), None).unwrap());
        let expected = format!("port {} on 127.0.0.1 is already in use by pid {}", first.port(), process::id());
        assert!(why.starts_with(&expected), "{why}");
    }

    #[test]
    fn who_must_be_the_host_and_cannot_gets_the_owner_of_the_port() {
        let first = host_of(claim_plainly("127.0.0.1", 0, Some(true)).unwrap());
        let error = claim_plainly("127.0.0.1", first.port(), Some(true)).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by pid {}", process::id())), "{error}");
    }

    #[test]
    fn an_address_of_another_machine_makes_a_client() {
        // TEST-NET-1 of RFC 5737: no machine has it.
        assert_eq!(
            why_not_host(claim_plainly("192.0.2.1", 29400, None).unwrap()),
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
        assert_eq!(why_not_host(claim_plainly("127.0.0.1", 0, Some(false)).unwrap()), "is_host=0 was given");
    }

    #[test]
    fn a_host_of_its_own_listens_at_the_given_address() {
        let host = EndpointServer::listen(Some("127.0.0.1"), 0, ServerOptions::default(), None).unwrap();
        assert_eq!(host.addresses(), [SocketAddr::from(([127, 0, 0, 1], host.port()))]);
        assert!(!host.has_ended());
        let everywhere = EndpointServer::listen(None, 0, ServerOptions::default(), None).unwrap();
        assert!(everywhere.addresses()[0].ip().is_unspecified());
        let error = EndpointServer::listen(Some("127.0.0.1"), host.port(), ServerOptions::default(), None).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by pid {}", process::id())), "{error}");
        let error = EndpointServer::listen(Some("no such name"), 0, ServerOptions::default(), None).unwrap_err();
        assert!(error.to_string().starts_with("cannot resolve `no such name`: "), "{error}");
    }

    #[test]
    fn a_file_of_events_that_never_reached_the_coordinator_is_an_error() {
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
