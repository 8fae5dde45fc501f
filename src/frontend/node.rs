//! A node's life in a job's rounds: it joins each with an empty store for workers, keeps that store while it serves the round, and
//! leaves when its part has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use super::worker_store::Reach;
use crate::host::Sessions;
use crate::rendezvous::node::machine::JoinError;
use crate::rendezvous::node::session::Session;
use crate::rendezvous::protocol::message::{JoinWorkers, Placement};
use crate::store::server::StoreServer;
use crate::wait::telling_if_slow;

/// A node's part in a job.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    /// The job.
    pub run_id: String,
    /// This node's name in other nodes' messages: `host:pid`.
    pub name: String,
    /// The address at which other nodes find this one, if the user has given it (`--local-addr`).
    pub local_addr: Option<String>,
    /// The job never has another node (`max_nodes=1`), so all workers are on this machine.
    pub alone: bool,
    /// The coordinator listens on loopback alone, so that all nodes are on this machine.
    pub on_one_machine: bool,
    /// Which store the workers of a round share.
    pub workers_store: WorkersStore,
    /// The rank to ask for.
    pub node_rank: Option<u32>,
    /// How long a join may take.
    pub join_timeout: Duration,
    /// How long this process serves others at the end.
    pub drain_timeout: Duration,
}

/// The store at `MASTER_ADDR:MASTER_PORT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkersStore {
    /// The node with rank 0 serves an empty one for each round. Default.
    #[default]
    Node,
    /// The worker with rank 0 opens it, at the address and port of its node's (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`).
    Worker,
    /// It exists already, elsewhere (`--rdzv-backend=static`).
    Elsewhere,
}

/// One node of a job, for its front end.
#[derive(Debug)]
pub struct Node {
    session: Arc<Session>,
    options: NodeOptions,
    /// The sessions of the coordinator, if this process hosts it.
    host: Option<Sessions>,
    reach: Mutex<Reach>,
    /// The round's, if this node serves it.
    store: Mutex<Option<StoreServer>>,
}

impl Node {
    /// A node with a new session. `host`: the sessions of the coordinator, if this process hosts it.
    pub fn new(session: Arc<Session>, options: NodeOptions, host: Option<Sessions>) -> Self {
        let NodeOptions { local_addr, alone, on_one_machine, workers_store, .. } = options.clone();
        let unused = workers_store == WorkersStore::Elsewhere;
        let reach = Mutex::new(Reach { local_addr, alone, on_one_machine, unused, ..Reach::default() });
        Self { session, options, host, reach, store: Mutex::default() }
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
    /// (pytorch #135712). With `workers`, the placement has their ranks. Dropping the future withdraws the join.
    ///
    /// # Errors
    /// As [`Session::join`]. `Connection` also if the store cannot listen.
    pub async fn join(&self, workers: Option<JoinWorkers>) -> Result<Placement, JoinError> {
        let began = Instant::now();
        let NodeOptions { node_rank, join_timeout, workers_store, .. } = self.options;
        let mut reach = self.reach.lock().clone();
        let joined = reach.join(&self.session, node_rank, workers, join_timeout).await;
        *self.reach.lock() = reach;
        let (placement, store) = joined?;
        let serves = placement.rank == 0 && workers_store == WorkersStore::Node;
        let store = serves.then_some(store);
        let before = std::mem::replace(&mut *self.store.lock(), store);
        drop(before); // ends it, which waits for its thread
        self.tell_place(&placement, began.elapsed());
        Ok(placement)
    }

    fn tell_place(&self, placement: &Placement, after: Duration) {
        let Placement { round, rank, world_size, master_addr, master_port, reason, .. } = placement;
        let (run_id, addr, after) = (&self.options.run_id, self.addr(), after.as_secs_f64());
        tracing::info!(
            target: "elastic_rs::rendezvous",
            "[{run_id}] {addr}: round {round}: rank {rank} of {world_size}, master {master_addr}:{master_port}, \
             after {after:.1} s: {reason}"
        );
    }

    /// Say goodbye within `limit`, and stay for those whom this process serves. Dropping the future ends the wait. Later calls
    /// send nothing. `signal` is what ended this process, if one did.
    pub async fn leave(&self, reason: String, signal: Option<i32>, limit: Duration) {
        self.session.leave(reason, signal, limit).await;
        let drain_timeout = self.options.drain_timeout;
        let store = self.store.lock().take();
        if let Some(store) = store {
            // Clients that are still reading when their server vanishes print stack traces.
            let drained = spawn_blocking(move || store.drain(drain_timeout));
            let _ = telling_if_slow(drained, || {
                format!(
                    "waiting up to {drain_timeout:.0?} for workers elsewhere to let go of the round's store, which is here; \
                     another signal ends the wait"
                )
            })
            .await;
        }
        if let Some(host) = self.host.clone() {
            host.ended(drain_timeout).await;
        }
    }

    /// Leave, and end the round's store, without waiting for anybody.
    pub async fn abandon(&self, reason: String) {
        let store = self.store.lock().take();
        drop(store);
        self.session.leave(reason, None, Duration::ZERO).await;
    }

    /// Where other nodes look for this one; its name if that is not known.
    pub fn addr(&self) -> String {
        let addr = self.session.view().addr.or_else(|| self.options.local_addr.clone());
        addr.unwrap_or_else(|| self.options.name.clone())
    }

    /// What other nodes' messages call this node: address and name.
    pub fn label(&self) -> String {
        format!("{} ({})", self.addr(), self.options.name)
    }
}
