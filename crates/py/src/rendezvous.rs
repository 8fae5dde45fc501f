//! `Session` and `Placement`: a node's session with the coordinator, and its place in a round.

use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;

use elastic_rs::launcher::node::Node;
use elastic_rs::rendezvous::etcd::driver;
use elastic_rs::rendezvous::messages::message::{self, EndClass, Verdict};
use elastic_rs::rendezvous::node::{self, session};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::agent::{Agent, Failure};
use crate::conf::{limit, seconds};
use crate::endpoint::EndpointServer;
use crate::errors;
use crate::etcd::EtcdOptions;
use crate::options::NodeOptions;
use crate::runtime::{block_on, detach, handle};
use crate::secure::Protection;

/// A node's place in a completed round.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Placement(pub(crate) message::Placement);

#[pymethods]
impl Placement {
    /// A place that a rendezvous other than ours has assigned.
    #[new]
    #[pyo3(signature = (*, round, rank, world_size, master_addr, master_port, first_rank, first_role_rank,
        worker_count, role_worker_count))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per property")]
    fn new(
        round: u64,
        rank: u32,
        world_size: u32,
        master_addr: String,
        master_port: u16,
        first_rank: u32,
        first_role_rank: u32,
        worker_count: u32,
        role_worker_count: u32,
    ) -> Self {
        let workers = message::WorkerRanks {
            first_rank,
            world_size: worker_count,
            first_role_rank,
            role_world_size: role_worker_count,
        };
        Self(message::Placement {
            round: message::Round(round),
            rank,
            world_size,
            world: round,
            master_addr,
            master_port,
            reason: String::new(),
            restart: 0,
            workers: Some(workers),
            host: None,
            local_world_size: None,
            resume: None,
            members: None,
        })
    }

    /// Global and role rank of this node's first worker, the number of workers, and the number of those with its role. None if a
    /// node has not sent its number of workers.
    #[getter]
    fn workers(&self) -> Option<(u32, u32, u32, u32)> {
        let ranks = self.0.workers?;
        Some((ranks.first_rank, ranks.first_role_rank, ranks.world_size, ranks.role_world_size))
    }

    /// How many workers this node starts, which has offered this number: as many, or fewer if rounds count workers.
    fn workers_of(&self, offered: u32) -> u32 {
        self.0.workers_of(offered)
    }

    /// The job's restart number.
    #[getter]
    fn restart(&self) -> u32 {
        self.0.restart
    }

    /// Number of the round, 1 for the first.
    #[getter]
    fn round(&self) -> u64 {
        self.0.round.0
    }

    /// This node's rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank
    }

    /// Number of nodes.
    #[getter]
    fn world_size(&self) -> u32 {
        self.0.world_size
    }

    /// Address of rank 0.
    #[getter]
    fn master_addr(&self) -> &str {
        &self.0.master_addr
    }

    /// Port of the round's empty worker store at rank 0.
    #[getter]
    fn master_port(&self) -> u16 {
        self.0.master_port
    }

    /// The reason for which the round closed, and its members.
    #[getter]
    fn reason(&self) -> &str {
        &self.0.reason
    }

    fn __repr__(&self) -> String {
        let message::Placement { round, rank, world_size, master_addr, master_port, .. } = &self.0;
        format!("Placement(round={round}, rank={rank}, world_size={world_size}, master={master_addr}:{master_port})")
    }
}

/// The state of the rendezvous for a node.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
pub struct View {
    /// Above zero when the world must re-form.
    waiting: u32,
    /// The reason, in words.
    reason: String,
    /// Whether the rendezvous was closed.
    closed: bool,
    /// Whether that was before this node came.
    over: bool,
    /// The cause in words, if the rendezvous was closed after a failure.
    failure: Option<String>,
    /// Whose fault it was, if the rendezvous was closed after a failure: ``program``, ``machine``, ``preempted`` or ``no progress``.
    end_class: Option<&'static str>,
    /// The worker's failure that is the cause, if any.
    cause: Option<Failure>,
    /// The address at which other nodes find this one, once known.
    addr: Option<String>,
    /// The reason, if this node has fenced itself: it was cut off from the coordinator for its whole lease.
    fenced: Option<String>,
}

impl View {
    /// Convert the core's view. Fails if this node can no longer take part.
    pub fn from_core(py: Python<'_>, view: node::View) -> PyResult<Self> {
        if let Some(error) = &view.failed {
            return Err(errors::from_join(py, error));
        }
        let failure = match &view.closed {
            Some(verdict) if verdict.is_failure() => Some(verdict.to_string()),
            _ => None,
        };
        let end_class = view.closed.as_ref().and_then(Verdict::class);
        // Of a job that was over before this node came, that is the error of its joins.
        let end_class = end_class.or_else(|| view.over.as_ref()?.class(false)).map(EndClass::name);
        let node::View { waiting, reason, addr, fenced, closed, over, failure: cause, .. } = view;
        let (cause, over) = (cause.map(Failure::from), over.is_some());
        Ok(Self { waiting, reason, closed: closed.is_some(), over, failure, end_class, cause, addr, fenced })
    }
}

/// A node's session with a coordinator, over etcd, or over a cell that all nodes share (:class:`CellSession`).
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Session {
    node: Arc<Node>,
    options: NodeOptions,
}

impl Session {
    /// A session of this node, made with these options.
    pub fn of(node: Arc<Node>, options: NodeOptions) -> Self {
        Self { node, options }
    }

    /// The node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The options with which it was made.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }
}

#[pymethods]
impl Session {
    /// Start a session for one node with the coordinator at one of these ``endpoints``, which it finds. It connects in the background.
    /// ``coordinator`` is that of this process, if it hosts one. With a ``protection``, it speaks only with one that holds the same token.
    ///
    /// Raises ``ValueError`` for invalid options.
    #[new]
    #[pyo3(signature = (endpoints, options, *, coordinator = None, protection = None))]
    fn new(
        endpoints: Vec<(String, u16)>,
        options: NodeOptions,
        coordinator: Option<&EndpointServer>,
        protection: Option<&Protection>,
    ) -> PyResult<Self> {
        if endpoints.is_empty() {
            return Err(PyValueError::new_err("endpoints is empty, must have one at least"));
        }
        let hello = options.hello(coordinator.is_some())?;
        let (timeout, protection) = (options.config.0.coordinator_timeout, protection.map(Protection::core));
        let part = options.node(coordinator.is_some_and(EndpointServer::is_on_loopback), protection.clone())?;
        // With fixed ranks workers use the endpoint's store too, so this node has to reach that address.
        let own = coordinator.filter(|_| !options.ranks_as_asked);
        let own = own.and_then(|own| Some((own.place(), own.own_address()?)));
        let core = session::Session::open_among(&handle()?, hello, endpoints, own, timeout, protection);
        let node = Node::new(Arc::new(core), part, coordinator.map(EndpointServer::sessions));
        Ok(Self::of(Arc::new(node), options))
    }

    /// Start a session for one node over an etcd cluster. It connects in the background. Other nodes find this one at ``local_addr`` of
    /// the options. ``protection`` is for the tunnels of workers, if the options ask for them.
    ///
    /// Raises ``ValueError`` for invalid options, or if a file for TLS cannot be used.
    #[staticmethod]
    #[pyo3(signature = (etcd, options, *, protection = None))]
    fn over_etcd(etcd: &EtcdOptions, options: NodeOptions, protection: Option<&Protection>) -> PyResult<Self> {
        if options.local_addr.is_none() {
            return Err(PyValueError::new_err("local_addr is None, must be given: over etcd nobody else knows it"));
        }
        let (hello, timeout) = (options.hello(false)?, options.config.0.coordinator_timeout);
        let part = options.node(false, protection.map(Protection::core))?;
        let core = driver::open(&handle()?, hello, etcd.client()?, etcd.prefix(), timeout);
        let node = Node::new(Arc::new(core), part, None);
        Ok(Self::of(Arc::new(node), options))
    }

    /// Take part in the next round, and wait until it is complete. If this node has rank 0, it serves an empty store to the round's
    /// workers until the next round or the end. ``workers`` are the role of the workers, their number, and the script that they run.
    ///
    /// Raises ``RendezvousTimeoutError``, ``RendezvousClosedError``, ``RendezvousGracefulExitError`` (for a spare that was not
    /// needed) or ``RendezvousConnectionError`` of ``elastic_rs.errors``. Over etcd or a cell also ``RendezvousStateError``, if it holds
    /// something else than a state of this rendezvous.
    ///
    /// ``agent`` handles signals and notices meanwhile. Returns None if one of them has made it leave: the join was withdrawn.
    #[pyo3(signature = (*, workers = None, agent = None))]
    fn join(
        &self,
        py: Python<'_>,
        workers: Option<(String, u32, String)>,
        agent: Option<&Agent>,
    ) -> PyResult<Option<Placement>> {
        let workers = workers.map(|(role, count, script)| message::JoinWorkers::new(role, count).running(&script));
        let joined = block_on(py, async {
            let leaves = async {
                match agent {
                    Some(agent) => agent.leaves_in_join().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = leaves => None,
                joined = self.node.join(workers) => Some(joined),
            }
        })?;
        joined.transpose().map(|joined| joined.map(Placement)).map_err(|error| errors::from_join(py, &error))
    }

    /// The state of the rendezvous, from memory. Raises the errors of :meth:`join` when this node can no longer take part.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        View::from_core(py, self.node.session().view())
    }

    /// The address at which other nodes find this one, or its name if the address is not known.
    #[getter]
    fn addr(&self) -> String {
        self.node.addr()
    }

    /// Whether the coordinator has ever welcomed this node.
    #[getter]
    fn was_welcomed(&self) -> bool {
        self.node.session().was_welcomed()
    }

    /// A description of what this node waits for, if it waits for a round.
    #[getter]
    fn progress(&self) -> Option<String> {
        self.node.session().progress()
    }

    /// End the job for all nodes. With a ``cause`` the job has failed, and the other nodes stop. With ``timeout_s``, wait at most that
    /// long until the job is closed, and raise the errors of :meth:`join`.
    #[pyo3(signature = (*, cause = None, timeout_s = None))]
    fn close(&self, py: Python<'_>, cause: Option<String>, timeout_s: Option<f64>) -> PyResult<()> {
        let limit = limit("close_timeout", timeout_s)?;
        let (session, by) = (self.node.session(), self.node.label());
        let verdict = match cause {
            Some(cause) => Verdict::Failed { by, cause, failure: None, class: EndClass::Program },
            None => Verdict::Succeeded { by },
        };
        match limit {
            Some(limit) => {
                block_on(py, session.close_within(verdict, limit))?.map_err(|error| errors::from_join(py, &error))
            }
            None => {
                session.close(verdict);
                Ok(())
            }
        }
    }

    /// Write events into this folder from now on, beginning with those that were recorded already: this node's into ``events.jsonl``, and
    /// the coordinator's into ``events-coordinator.jsonl`` if this process hosts it. Later calls do nothing. Nothing waits for the files:
    /// what cannot be written is dropped and counted.
    fn write_events(&self, folder: PathBuf) {
        self.node.write_events(&folder);
    }

    /// Leave and end the session. Messages that are not sent yet are sent first, for at most ``timeout_s``. Then wait, at most for the
    /// configuration's ``drain_timeout``, for workers that use this node's store, and for nodes that use this process's coordinator.
    /// Later calls do nothing.
    ///
    /// ``signal`` is the signal that ended this process, if one did. SIGINT ends the job if this process hosts the coordinator.
    #[pyo3(signature = (reason, *, timeout_s = 1.0, signal = None))]
    fn leave(&self, py: Python<'_>, reason: String, timeout_s: f64, signal: Option<i32>) -> PyResult<()> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let left = block_on(py, self.node.leave(reason, signal, timeout));
        // Also if a signal has ended the wait for others.
        let runtime = handle()?;
        detach(py, || runtime.block_on(self.node.end_events()));
        left
    }
}

/// Raise ``ValueError`` if this cannot be a job's name: it is empty or too long, or has control characters.
#[pyfunction]
pub fn validate_run_id(run_id: &str) -> PyResult<()> {
    elastic_rs::wire::text::validate_run_id(run_id).map_err(PyValueError::new_err)
}
