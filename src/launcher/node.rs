//! A node's life in a job's rounds: it joins each with an empty store for workers, keeps that store while it serves the round, and
//! leaves when its part has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use super::tunnel::Trust;
use super::worker_store::{Opener, RoundStore};
pub use super::worker_store::{Reach, WorkersStore};
use crate::clock::log_if_slow;
use crate::endpoint::Sessions;
use crate::rendezvous::messages::message::{JoinWorkers, Placement};
use crate::rendezvous::node::JoinError;
use crate::rendezvous::node::session::Session;
use crate::secure::Protection;

/// A node's part in a job.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    /// The job.
    pub run_id: String,
    /// This node's name in other nodes' messages: `host:pid`.
    pub name: String,
    /// From where its worker stores must be reachable, and which store the workers of a round share.
    pub reach: Reach,
    /// The token by which agents know each other that carry their workers' connections to the store through tunnels. `None`: workers
    /// connect to the store themselves, in clear.
    pub tunnel: Option<Arc<Protection>>,
    /// The rank to ask for.
    pub node_rank: Option<u32>,
    /// How long a join may take.
    pub join_timeout: Duration,
    /// How long this process serves others at the end.
    pub drain_timeout: Duration,
}

/// One node of a job, for its front end.
#[derive(Debug)]
pub struct Node {
    session: Arc<Session>,
    options: NodeOptions,
    /// The sessions of the coordinator, if this process hosts it.
    host: Option<Sessions>,
    stores: Mutex<Opener>,
    /// The worker store of the round, if this node serves it, and this node's end of the tunnel to it.
    store: Mutex<RoundStore>,
    /// The coordinator's events are written, if this process hosts it and has a folder for them.
    coordinators: Mutex<bool>,
}

/// The file of a node's events, in its folder of logs.
const EVENTS: &str = "events.jsonl";
/// The file of the coordinator's events, in the folder of the node that hosts it.
const COORDINATORS_EVENTS: &str = "events-coordinator.jsonl";

impl Node {
    /// A node with a new session. `host`: the sessions of the coordinator, if this process hosts it.
    pub fn new(session: Arc<Session>, options: NodeOptions, host: Option<Sessions>) -> Self {
        let trust = options.tunnel.clone().map(|protection| Trust { protection, run_id: options.run_id.clone() });
        let stores = Mutex::new(Opener::new(options.reach.clone(), trust));
        Self { session, options, host, stores, store: Mutex::default(), coordinators: Mutex::default() }
    }

    /// Write events into this folder from now on, beginning with those that were recorded already: this node's into `events.jsonl`,
    /// and the coordinator's into `events-coordinator.jsonl` if this process hosts it. A later call has no effect. Without a thread to
    /// write them they stay in memory, which is logged: no job fails for its events.
    pub fn write_events(&self, folder: &Path) {
        let mut coordinators = self.coordinators.lock();
        let written = self.session.write_events(&folder.join(EVENTS)).and_then(|()| {
            if let Some(host) = self.host.as_ref().filter(|_| !*coordinators) {
                host.write_events(&folder.join(COORDINATORS_EVENTS))?;
                *coordinators = true;
            }
            Ok(())
        });
        if let Err(error) = written {
            let run_id = &self.options.run_id;
            tracing::warn!(target: "elastic_rs::agent", "[{run_id}] events are not written to {}: {error}", folder.display());
        }
    }

    /// Write this node's events to their end, as [`Session::end_events`]. The coordinator's are when its host has stopped.
    pub async fn end_events(&self) {
        self.session.end_events().await;
    }

    /// Its session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Its options.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Take part in the next round. Every round has a new, empty store for its workers, so no key of an earlier attempt can be read
    /// (pytorch #135712). With `workers`, the placement has their ranks. Its address and port are those by which this node's workers
    /// reach the store. Dropping the future withdraws the join.
    ///
    /// # Errors
    /// As [`Session::join`]. `Connection` also if the store, or a tunnel, cannot listen.
    pub async fn join(&self, workers: Option<JoinWorkers>) -> Result<Placement, JoinError> {
        let began = Instant::now();
        let NodeOptions { node_rank, join_timeout, .. } = self.options;
        let mut stores = self.stores.lock().clone();
        let joined = stores.join(&self.session, node_rank, workers, join_timeout).await;
        *self.stores.lock() = stores;
        let (placement, store) = joined?;
        self.log_placement(&placement, &store, began.elapsed());
        self.await_workers(&placement, &store);
        let before = std::mem::replace(&mut *self.store.lock(), store);
        drop(before); // ends it, which waits for its threads
        Ok(placement)
    }

    /// Tell the coordinator when all workers of the round are connected to their store, if it is here. Ends with the store.
    fn await_workers(&self, placement: &Placement, store: &RoundStore) {
        let (Some(server), Some(ranks)) = (&store.server, placement.workers) else { return };
        let mut clients = server.controller().clients();
        let (session, round) = (Arc::downgrade(&self.session), placement.round);
        tokio::spawn(async move {
            let connected = clients.wait_for(|count| *count >= u64::from(ranks.world_size)).await.is_ok();
            if let Some(session) = session.upgrade().filter(|_| connected) {
                session.imported(round);
            }
        });
    }

    fn log_placement(&self, placement: &Placement, store: &RoundStore, after: Duration) {
        let Placement { round, rank, world_size, master_addr, master_port, reason, .. } = placement;
        let (run_id, addr, after) = (&self.options.run_id, self.addr(), after.as_secs_f64());
        let way = store.tunnel.as_ref().map(|tunnel| format!(" ({})", tunnel.way())).unwrap_or_default();
        let master = match self.options.reach.workers_store {
            WorkersStore::Elsewhere => format!("master {}", self.session.endpoint()),
            WorkersStore::Node | WorkersStore::Worker => format!("master {master_addr}:{master_port}{way}"),
        };
        tracing::info!(
            target: "elastic_rs::rendezvous",
            "[{run_id}] {addr}: round {round}: rank {rank} of {world_size}, {master}, after {after:.1} s: {reason}"
        );
    }

    /// Say goodbye within `limit`, and stay for those whom this process serves. Dropping the future ends the wait. Later calls
    /// send nothing. `signal` is what ended this process, if one did. [`Self::end_events`] follows, whether it was dropped or not.
    pub async fn leave(&self, reason: String, signal: Option<i32>, limit: Duration) {
        self.session.leave(reason, signal, limit).await;
        let drain_timeout = self.options.drain_timeout;
        let RoundStore { tunnel, server } = std::mem::take(&mut *self.store.lock());
        if let Some(server) = server {
            // Clients that are still reading when their server vanishes print stack traces. They may come through the tunnel.
            let drained = spawn_blocking(move || {
                server.drain(drain_timeout);
                drop(tunnel);
            });
            let _ = log_if_slow(drained, || {
                format!(
                    "waiting up to {drain_timeout:.0?} for workers on other nodes to disconnect from the round's store on this node; \
                     another signal ends the wait"
                )
            })
            .await;
        } else {
            drop(tunnel); // rank 0's node may be waiting for its connections to end
        }
        if let Some(host) = self.host.clone() {
            host.ended(drain_timeout).await;
        }
    }

    /// Leave, and end the round's store, without waiting for anybody.
    pub async fn abandon(&self, reason: String) {
        drop(std::mem::take(&mut *self.store.lock()));
        self.session.leave(reason, None, Duration::ZERO).await;
    }

    /// Where other nodes look for this one; its name if that is not known.
    pub fn addr(&self) -> String {
        let addr = self.session.view().addr.or_else(|| self.options.reach.local_addr.clone());
        addr.unwrap_or_else(|| self.options.name.clone())
    }

    /// What other nodes' messages call this node: address and name.
    pub fn label(&self) -> String {
        format!("{} ({})", self.addr(), self.options.name)
    }
}
