//! The coordinator's thread: what becomes of connections that begin as sessions.

use std::net::{IpAddr, SocketAddr};
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{mpsc, watch};

use super::http;
use super::page::PageCache;
use crate::bounded_log::BoundedLog;
use crate::net::admission::tasks::Task;
use crate::rendezvous::coordinator::driver::{self, Incoming, Shown};
use crate::rendezvous::coordinator::machine::Machine;
use crate::rendezvous::messages::codec;
use crate::secure::Halves;
use crate::secure::acceptor::{self, Acceptor, FIRST_BYTES, Proven};
use crate::secure::handshakes::Handshakes;
use crate::secure::proof::Identity;
use crate::secure::refusals::{Kind, Refusal};
use crate::store::server::{ConnectionPermit, Controller, Listener, Upgraded};
use crate::wire::text::tidy;

/// Stops the store when the coordinator's thread ends for whatever reason. Nodes must find a closed port then, not one that
/// accepts connections and never answers.
///
/// Where the closed port is taken for the end of this process, because the job has a list of endpoints, a panic ends the process before.
pub(super) struct EndsStore {
    pub controller: Controller,
    pub has_list: bool,
}

impl Drop for EndsStore {
    fn drop(&mut self) {
        if self.has_list && thread::panicking() {
            process::abort();
        }
        self.controller.stop();
    }
}

/// Requests of HTTP, and what their answers need.
pub(super) struct Web {
    pub requests: mpsc::UnboundedReceiver<Upgraded>,
    pub sources: http::Sources,
    pub cache: PageCache,
    /// Not on the coordinator's thread, if the endpoint is protected: unauthenticated peers may ask.
    pub runs_on: Option<Handle>,
}

/// Connections that begin as sessions.
pub(super) enum NewSessions {
    /// Of an open endpoint.
    Open(mpsc::UnboundedReceiver<Upgraded>),
    /// Of a protected one, from those who have proven themselves.
    Proven(mpsc::UnboundedReceiver<Authenticated>, Arc<BoundedLog>),
}

/// A connection whose peer has proven itself.
pub(super) struct Authenticated {
    proven: Proven,
    identity: Identity,
    peer: SocketAddr,
    local: SocketAddr,
    permit: ConnectionPermit,
}

/// Runs the coordinator until the store's server has ended, and then drops its sessions.
pub(super) fn run(
    runtime: &Runtime,
    machine: Machine,
    new_sessions: NewSessions,
    web: Web,
    shown: Shown,
    store: EndsStore,
    (hello_timeout, log_period): (Duration, Duration),
) {
    let empty_store = || store.controller.replace_table();
    let (sender, incoming) = mpsc::unbounded_channel();
    runtime.block_on(async {
        match new_sessions {
            NewSessions::Open(upgraded) => tokio::spawn(hand_over(upgraded, sender)),
            NewSessions::Proven(proven, log) => tokio::spawn(begin(proven, sender, log)),
        };
        web.runs_on.unwrap_or_else(Handle::current).spawn(http::serve(web.requests, web.sources));
        tokio::spawn(web.cache.serve());
        driver::run(machine, incoming, shown, empty_store, hello_timeout, log_period).await;
    });
}

/// Hands every connection to the coordinator.
async fn hand_over(mut upgraded: mpsc::UnboundedReceiver<Upgraded>, sender: mpsc::UnboundedSender<Incoming>) {
    while let Some(Upgraded { stream, first_bytes, peer, local, permit }) = upgraded.recv().await {
        let stream = match TcpStream::from_std(stream) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%peer, %error, "the connection of a node could not be set up and was closed; the node tries again");
                continue;
            }
        };
        let halves = Halves::plain(stream);
        if sender.send(Incoming { halves, first_bytes, identity: None, peer, local, kept: Box::new(permit) }).is_err() {
            return;
        }
    }
}

/// Hands the connections of those who have proven themselves to the coordinator, in whose runtime their sessions are served.
async fn begin(
    mut proven: mpsc::UnboundedReceiver<Authenticated>,
    sender: mpsc::UnboundedSender<Incoming>,
    log: Arc<BoundedLog>,
) {
    let beginning = async {
        while let Some(Authenticated { proven, identity, peer, local, permit }) = proven.recv().await {
            let halves = match proven.halves() {
                Ok(halves) => halves,
                Err(error) => {
                    tracing::warn!(%peer, %error, "the connection of a node could not be set up and was closed; the node tries again");
                    continue;
                }
            };
            let (first_bytes, identity) = (BytesMut::new(), Some(identity));
            if sender.send(Incoming { halves, first_bytes, identity, peer, local, kept: Box::new(permit) }).is_err() {
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
pub(super) fn warns_of_pytorchs_nodes(sessions: watch::Receiver<usize>, every: Duration) -> Listener {
    let logged_at: Mutex<Option<Instant>> = Mutex::new(None);
    Listener::new(move |run_id| {
        let mut logged_at = logged_at.lock();
        if *sessions.borrow() == 0 || logged_at.is_some_and(|at| at.elapsed() < every) {
            return;
        }
        *logged_at = Some(Instant::now());
        let run_id = tidy(run_id);
        tracing::warn!(
            "[{run_id}] a node of PyTorch's own c10d rendezvous waits at this endpoint, and cannot meet nodes of elastic_rs: start it by \
             `elastic-run`, or by `torchrun --rdzv-backend=rust-c10d`, as all others of the job"
        );
    })
}

/// Where the peers of a protected endpoint prove themselves.
pub(super) fn handshakes(
    acceptor: Arc<Acceptor>,
    to: mpsc::UnboundedSender<Authenticated>,
    log: Arc<BoundedLog>,
) -> Handshakes<Upgraded> {
    let mut wanted = BytesMut::new();
    codec::encode_protected(&acceptor.protection().wanted(), &mut wanted);
    let wanted = wanted.freeze();
    let (helpers, protection) = (acceptor.helpers().clone(), Arc::clone(acceptor.protection()));
    let lost = {
        let (protection, log) = (Arc::clone(&protection), Arc::clone(&log));
        move |peer: IpAddr, refusal: &Refusal| {
            let why = protection.refuse(refusal);
            if log.admits_once(refusal.kind.name(), peer) {
                tracing::warn!(%peer, "a connection is refused: {why}");
            }
        }
    };
    let begin = move |Upgraded { stream, first_bytes, peer, local, permit }: Upgraded| -> Task {
        let (acceptor, wanted, to, log) = (Arc::clone(&acceptor), wanted.clone(), to.clone(), Arc::clone(&log));
        Box::pin(async move {
            let refused = |refusal: &Refusal| {
                let why = acceptor.protection().refuse(refusal);
                if log.admits_once(refusal.kind.name(), peer.ip()) {
                    tracing::warn!(%peer, "a connection is refused: {why}");
                }
            };
            let stream = match TcpStream::from_std(stream) {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%peer, %error, "a connection is closed, it cannot be set up; a node tries again");
                    return false;
                }
            };
            if !first_bytes.starts_with(FIRST_BYTES) {
                refused(&Refusal::new(Kind::NoTls, acceptor.protection().lacking()));
                acceptor::turn_away(stream, &wanted).await;
                return false;
            }
            match acceptor.admit(stream, first_bytes).await {
                // The coordinator may have ended.
                Ok((proven, identity)) => to.send(Authenticated { proven, identity, peer, local, permit }).is_ok(),
                Err(refusal) => {
                    refused(&refusal);
                    false
                }
            }
        })
    };
    Handshakes::new(helpers, protection, begin, lost)
}
