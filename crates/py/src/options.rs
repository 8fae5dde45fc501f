//! What the calls of the binding are told: one object each, checked where it is made.

use std::ffi::OsString;
use std::path::PathBuf;

use elastic_rs::agent::environment::Workers;
use elastic_rs::process::StreamsOf;
use elastic_rs::rendezvous::protocol::message::{Hello, NodeId};
use elastic_rs::rendezvous::protocol::settings::Settings;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::conf::RendezvousConfig;

/// What a node brings to a rendezvous.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct NodeOptions {
    /// The job.
    pub run_id: String,
    /// How others call this node.
    pub name: String,
    /// The address others use, if it is not the one that the coordinator sees.
    pub local_addr: Option<String>,
    /// Fewest and most nodes of the job.
    pub nodes: (u32, u32),
    /// What ``--rdzv-conf`` says.
    pub config: RendezvousConfig,
    /// The job's budget; None if nodes count for themselves.
    pub max_restarts: Option<u32>,
    /// Ranks are those that ``config`` asks for, in every round.
    pub ranks_as_asked: bool,
    /// This process hosts the coordinator, which goes when this node does.
    pub hosts: bool,
}

impl NodeOptions {
    /// What the node introduces itself with.
    pub fn hello(&self) -> PyResult<Hello> {
        let settings = Settings {
            max_restarts: self.max_restarts,
            ranks_as_asked: self.ranks_as_asked,
            ..self.config.settings(self.nodes)
        };
        let hello = Hello {
            local_addr: self.local_addr.clone(),
            node_rank: self.config.0.node_rank,
            hosts: self.hosts,
            process: elastic_rs::host::process_number(),
            ..Hello::new(self.run_id.clone(), NodeId(rand::random()), self.name.clone(), settings)
        };
        hello.validate().map_err(PyValueError::new_err)?;
        Ok(hello)
    }
}

/// What an agent runs, whoever its front end is. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct AgentOptions {
    /// How others call this node.
    pub name: String,
    /// The job.
    pub run_id: String,
    /// The workers' role.
    pub role: String,
    /// How many workers this node has.
    pub local_world_size: u32,
    /// How many failures are survived, as workers are told it.
    pub max_restarts: u32,
    /// With a number this node counts its own restarts, as PyTorch's agent does; None: the coordinator counts the job's.
    pub restarts_left: Option<u32>,
    /// How long workers may take to end once they were asked to.
    pub grace_s: f64,
    /// How long to wait for the other nodes' workers; None: for as long as they run.
    pub exit_barrier_timeout_s: Option<f64>,
    /// Workers share the store at ``MASTER_ADDR:MASTER_PORT``, which then already listens.
    pub use_agent_store: bool,
    /// Each worker sees its own GPU alone.
    pub virtual_local_rank: bool,
    /// How long a worker may sleep uninterruptibly; zero: nobody looks for it.
    pub uninterruptible_sleep_s: f64,
}

impl AgentOptions {
    /// What is the same for all workers' variables.
    pub fn workers(&self) -> Workers {
        Workers {
            run_id: self.run_id.clone(),
            role: self.role.clone(),
            local_world_size: self.local_world_size,
            max_restarts: self.max_restarts,
            use_agent_store: self.use_agent_store,
            virtual_local_rank: self.virtual_local_rank,
        }
    }
}

/// Which streams of which workers: ``--redirects`` and ``--tee``.
#[pyclass(frozen, eq, from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone, PartialEq)]
pub struct Streams(pub StreamsOf);

#[pymethods]
impl Streams {
    /// Read what torchrun takes.
    ///
    /// Raises ``ValueError``, whose text goes behind the flag's name.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        text.parse()
            .map(Self)
            .map_err(|error: elastic_rs::process::StreamsError| PyValueError::new_err(error.to_string()))
    }
}

/// Where the output of ``elastic-run``'s workers goes.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct LogOptions {
    /// To files.
    pub redirects: Streams,
    /// To files and to the console.
    pub tee: Streams,
    /// Local ranks that the console shows; None: all.
    pub shown_ranks: Option<Vec<u32>>,
    /// None for a temporary folder.
    pub log_dir: Option<PathBuf>,
    /// Whether there are files at all.
    pub log_files: bool,
    /// Texts of lines that are kept apart.
    pub stdout_filters: Vec<String>,
    /// The same of standard error.
    pub stderr_filters: Vec<String>,
    /// Of the prefix of teed lines; None for torchrun's.
    pub prefix: Option<String>,
}

/// What a node of ``elastic-run`` runs. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct LaunchOptions {
    /// What the final report calls the workers.
    pub entrypoint: String,
    /// The program and its arguments, in which ``${local_rank}`` is replaced.
    pub command: Vec<OsString>,
    /// The workers' role.
    pub role: String,
    /// How many failures are survived.
    pub max_restarts: u32,
    /// How long workers may take to end once they were asked to.
    pub grace_s: f64,
    /// How long a worker may sleep uninterruptibly; zero: nobody looks for it.
    pub uninterruptible_sleep_s: f64,
    /// Each worker sees its own GPU alone.
    pub virtual_local_rank: bool,
    /// Signals that end the job on this node; a second one kills.
    pub signals: Vec<i32>,
    /// Of workers' output.
    pub logs: LogOptions,
    /// What :class:`Template` has as ``begin``, ``fixed`` and ``what``, if workers are to be forked from one.
    pub warm: Option<(Vec<OsString>, usize, String)>,
    /// How many workers this node has.
    pub local_world_size: u32,
}
