//! The tunnel between workers and the worker store of rank 0's node (`--rdzv-conf store_tunnel=1`).
//!
//! PyTorch's store client speaks neither TLS nor a token. With a tunnel it never leaves its machine: workers connect to their own agent
//! on loopback ([`entrance`]), the agent speaks TLS with the agent of rank 0's node ([`acceptor`]), and that one connects to its worker
//! store on loopback. Both agents prove that they belong to the job, by its token or by certificates. One connection of a worker is one connection of each of the
//! three ([`relay`]).
//!
//! Each end has a dedicated thread, so a handshake delays no session, and no byte waits for Python. The thread sleeps until a socket
//! is ready. It ends with its [`Tunnel`], and all its connections with it.
//! `docs/decisions/0086-workers-reach-the-store-through-their-agents.md` has the reasons.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::bounded_log::BoundedLog;
use crate::net::local_peers::{LocalPeerCheck, LocalPeers};
use crate::secure::Protection;
use crate::secure::acceptor::Acceptor;
use crate::threads;
use connections::Listener;

mod acceptor;
mod connections;
mod entrance;

/// In this time 20 records of each kind are logged, and then how many more there were.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What both ends of a job's tunnels know.
#[derive(Clone, Debug)]
pub(super) struct Trust {
    /// The token that all agents hold, or their certificates.
    pub protection: Arc<Protection>,
    /// The job, for which both ends prove themselves.
    pub run_id: String,
}

/// One end of a round's tunnels. Dropping it closes all its connections, and waits until its thread has ended.
///
/// In a process forked from the one that started it, dropping it does nothing: the thread does not exist there.
#[derive(Debug)]
pub(super) struct Tunnel {
    addr: SocketAddr,
    way: String,
    /// The thread ends when this is dropped. `None` only while `self` is dropped.
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    started_by: u32,
}

impl Tunnel {
    /// The end at rank 0's node: admit the job's agents at `listener`, and connect each of their connections to `store`.
    ///
    /// # Errors
    /// A socket cannot be used, or the thread not be started.
    pub fn to_own_store(
        listener: TcpListener,
        store: SocketAddr,
        acceptor: Arc<Acceptor>,
        run_id: String,
    ) -> io::Result<Self> {
        let way = format!("other nodes come through a tunnel at {}", listener.local_addr()?);
        Self::start(way, listener, move |listener, log| acceptor::serve(listener, store, acceptor, run_id, log))
    }

    /// The end at the other nodes: connect each connection that this node's workers open at `listener` to the tunnel's other end at
    /// `to`, which is rank 0's. `who` may connect.
    ///
    /// # Errors
    /// As [`Self::to_own_store`].
    pub fn to_rank_0(listener: TcpListener, to: (String, u16), trust: Trust, who: LocalPeers) -> io::Result<Self> {
        let way = format!("a tunnel to {}:{}", to.0, to.1);
        let check = LocalPeerCheck::new(who, listener.local_addr()?)?;
        if let Some(check) = &check {
            check.warn_if_off();
        }
        Self::start(way, listener, move |listener, log| entrance::serve(listener, to, trust, check, log))
    }

    fn start<F: Future<Output = ()>>(
        way: String,
        listener: TcpListener,
        serve: impl FnOnce(Listener, Arc<BoundedLog>) -> F + Send + 'static,
    ) -> io::Result<Self> {
        let addr = listener.local_addr()?;
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = {
            let _inside = runtime.enter();
            Listener::new(listener)?
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            let log = Arc::new(BoundedLog::new(LOG_PERIOD, |what, count| {
                tracing::warn!(target: "elastic_rs::rendezvous", what, count, "further messages of this kind were not logged");
            }));
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = serve(listener, Arc::clone(&log)) => {}
                    () = log.summarise() => {}
                }
            });
            // A resolver that does not answer is not waited for.
            runtime.shutdown_background();
        };
        let thread = threads::spawn(format!("tunnel-{}", addr.port()), run)?;
        Ok(Self { addr, way, running: Some((stop, thread)), started_by: std::process::id() })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it leads, for the log.
    pub fn way(&self) -> &str {
        &self.way
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let Some((stop, thread)) = self.running.take() else { return };
        if self.started_by != std::process::id() {
            // Neither wake nor join a thread that is not there.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        // A panic has been reported by the thread itself.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests;
