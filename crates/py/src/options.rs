//! The options of the binding's calls: one typed object per call, checked when it is made.

#![expect(clippy::too_many_arguments, reason = "constructors that are generated: one named argument for each field")]

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::agent;
use elastic_rs::agent::Budget;
use elastic_rs::agent::environment::Workers;
use elastic_rs::agent::health;
use elastic_rs::agent::notices::Source;
use elastic_rs::hang::judge::{self, Mode};
use elastic_rs::launcher::node::{self, Reach, WorkersStore};
use elastic_rs::net::local::interface_addresses;
use elastic_rs::rendezvous::conf::{Agent, Conf, InPlace, StoreMembers};
use elastic_rs::rendezvous::messages::message::{Hello, INTERFACES_LIMIT, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::secure::Protection;
use elastic_rs::signals::{FirstSignal, Meanings, Signal};
use elastic_rs::workers;
use elastic_rs::workers::StreamsOf;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::conf::{RendezvousConfig, limit, seconds};

/// The value of ``--health-check`` that asks for the built-in checks alone.
const BUILT_IN: &str = "builtin";

/// The options of a node.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct NodeOptions {
    /// The job.
    pub run_id: String,
    /// This node's name in other nodes' messages.
    pub name: String,
    /// The address for other nodes, if it is not the one that the coordinator sees.
    pub local_addr: Option<String>,
    /// Fewest and most nodes of the job.
    pub nodes: (u32, u32),
    /// The values of ``--rdzv-conf``.
    pub config: RendezvousConfig,
    /// The job's budget; None if nodes count for themselves.
    pub max_restarts: Option<u32>,
    /// Ranks are those that ``config`` asks for, in every round, and workers share the endpoint's store, which the coordinator empties
    /// for each round.
    pub ranks_as_asked: bool,
    /// The workers share a store that exists already when they start: this node's at rank 0, or the one elsewhere.
    pub use_agent_store: bool,
}

impl NodeOptions {
    /// Which workers of this node may survive a change of the world. None can with PyTorch's agent.
    fn in_place(&self) -> InPlace {
        let Conf { in_place, agent, .. } = self.config.0;
        if agent == Agent::Rust { in_place } else { InPlace::Off }
    }

    /// The node's introduction. `hosts`: this process hosts the coordinator, which ends with this node.
    pub fn hello(&self, hosts: bool) -> PyResult<Hello> {
        let settings = Settings {
            max_restarts: self.max_restarts,
            ranks_as_asked: self.ranks_as_asked,
            ..self.config.settings(self.nodes)
        };
        let (store_members, store_tunnel) = (self.config.0.store_members, self.config.0.has_tunnel());
        // Through a tunnel, only agents that hold the token reach the store.
        let wants_members = store_members != StoreMembers::Off && self.nodes.1 > 1 && !store_tunnel;
        let hello = Hello {
            in_place: self.in_place() != InPlace::Off,
            reports_steps: self.config.0.agent == Agent::Rust,
            life_at: (self.config.0.proof != Some(false)).then_some((Ipv4Addr::UNSPECIFIED, 0).into()),
            interfaces: wants_members.then(|| interface_addresses().into_iter().take(INTERFACES_LIMIT).collect()),
            local_addr: self.local_addr.clone(),
            node_rank: self.config.0.node_rank,
            host_name: self.config.0.host_name.clone(),
            hosts,
            process: elastic_rs::endpoint::process_number(),
            ..Hello::new(self.run_id.clone(), NodeId(rand::random()), self.name.clone(), settings)
        };
        hello.validate().map_err(PyValueError::new_err)?;
        Ok(hello)
    }

    /// The node's part in a job. `on_one_machine`: the coordinator listens on loopback alone. `protection`: the job's token.
    pub fn node(&self, on_one_machine: bool, protection: Option<Arc<Protection>>) -> PyResult<node::NodeOptions> {
        let own_store = self.use_agent_store && !self.ranks_as_asked;
        self.config.0.check_workers_store(protection.is_some(), own_store).map_err(PyValueError::new_err)?;
        let Conf { node_rank, join_timeout, drain_timeout, store_peers, store_members, .. } = self.config.0;
        Ok(node::NodeOptions {
            run_id: self.run_id.clone(),
            name: self.name.clone(),
            tunnel: protection.filter(|_| self.config.0.has_tunnel()),
            reach: Reach {
                local_addr: self.local_addr.clone(),
                alone: self.nodes.1 == 1,
                on_one_machine,
                workers_store: match (self.ranks_as_asked, self.use_agent_store) {
                    (true, _) => WorkersStore::Elsewhere,
                    (false, true) => WorkersStore::Node,
                    (false, false) => WorkersStore::Worker,
                },
                peers: store_peers,
                members: store_members,
            },
            node_rank,
            join_timeout,
            drain_timeout,
        })
    }
}

/// How an agent learns that its machine is about to be taken away, and what its workers get then. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct PreemptOptions {
    /// Number of the signal that is a notice, and how many seconds are left then.
    pub notice_signal: Option<(i32, f64)>,
    /// A file whose appearance is a notice. Its first word is how many seconds are left.
    pub notice_file: Option<PathBuf>,
    /// A command of the shell that is run until it writes how many seconds are left, and its name in messages.
    pub notice_command: Option<(OsString, String)>,
    /// How much time a notice leaves that does not say it.
    pub deadline_s: f64,
    /// A signal by which workers save; None: they get none.
    pub signal: Option<i32>,
}

impl PreemptOptions {
    fn core(&self) -> PyResult<agent::notices::Options> {
        let file = self.notice_file.clone().map(Source::File);
        let command = self.notice_command.clone().map(|(command, name)| Source::Command { command, name });
        Ok(agent::notices::Options {
            sources: file.into_iter().chain(command).collect(),
            deadline: seconds("preempt_deadline", self.deadline_s)?,
            signal: self.signal.map(Signal),
        })
    }
}

/// What every front end says of a node's workers. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct WorkerOptions {
    /// The name of the workers in logs and in the final report.
    pub entrypoint: String,
    /// The workers' role.
    pub role: String,
    /// Number of workers of this node.
    pub local_world_size: u32,
    /// Number of restarts after failures, as workers see it.
    pub max_restarts: u32,
    /// How long workers may take to end after the stop signal.
    pub grace_s: f64,
    /// The stop signal goes to the process that was started as the worker, and to its process group only after that has ended.
    pub leader_first: bool,
    /// Numbers of signals that do not end the agent, but are passed on to whom ``leader_first`` says.
    pub forwarded_signals: Vec<i32>,
    /// Notices that this machine is about to be taken away.
    pub preempt: PreemptOptions,
    /// How long a worker may sleep uninterruptibly; zero: no limit.
    pub uninterruptible_sleep_s: f64,
    /// Each worker sees only its own GPU.
    pub virtual_local_rank: bool,
    /// What a shell runs on rank 0's node when a hang is found; None: nothing.
    pub on_hang: Option<OsString>,
    /// What is checked before a join: ``builtin``, or a command that a shell runs as well; None: nothing.
    pub health_check: Option<OsString>,
    /// Lines of teed streams that match show progress, as steps do; None: none does.
    pub progress_log: Option<ProgressPattern>,
}

impl WorkerOptions {
    fn signals(&self) -> PyResult<Meanings> {
        let notice = |(signal, left)| Ok::<_, PyErr>((Signal(signal), seconds("preempt_notice", left)?));
        Ok(Meanings {
            notices: self.preempt.notice_signal.map(notice).transpose()?.into_iter().collect(),
            forwarded: self.forwarded_signals.iter().copied().map(Signal).collect(),
        })
    }

    /// The options of the agent that runs them. `use_agent_store`: they share a store that already listens.
    fn agent(
        &self,
        name: &str,
        run_id: &str,
        use_agent_store: bool,
        budget: Budget,
        exit_barrier_timeout: Option<Duration>,
        (in_place, standbys, hang): (InPlace, u32, judge::Options),
    ) -> PyResult<agent::AgentOptions> {
        // A worker that goes on needs a store that is new in every round.
        let in_place = if use_agent_store { in_place } else { InPlace::Off };
        Ok(agent::AgentOptions {
            name: name.to_owned(),
            entrypoint: self.entrypoint.clone(),
            workers: Workers {
                run_id: run_id.to_owned(),
                role: self.role.clone(),
                local_world_size: self.local_world_size,
                max_restarts: self.max_restarts,
                use_agent_store,
                virtual_local_rank: self.virtual_local_rank,
                resizes_nccl: in_place == InPlace::Nccl,
            },
            budget,
            grace: seconds("shutdown_timeout", self.grace_s)?,
            first_signal: if self.leader_first { FirstSignal::Leader } else { FirstSignal::Group },
            signals: self.signals()?,
            notices: self.preempt.core()?,
            exit_barrier_timeout,
            uninterruptible_sleep: seconds("uninterruptible_state_timeout", self.uninterruptible_sleep_s)?,
            in_place,
            standbys,
            hang,
            on_hang: self.on_hang.clone(),
            health: self
                .health_check
                .clone()
                .map(|check| health::Options { command: Some(check).filter(|check| check != BUILT_IN) }),
            progress_log: self.progress_log.clone().map(|pattern| pattern.0),
        })
    }
}

/// The options of an agent that Python drives. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct AgentOptions {
    /// This node's name in other nodes' messages.
    pub name: String,
    /// The job.
    pub run_id: String,
    /// The workers.
    pub workers: WorkerOptions,
    /// With a number this node counts its own restarts, as PyTorch's agent does; None: the coordinator counts the job's.
    pub restarts_left: Option<u32>,
    /// How long to wait for the other nodes' workers; None: for as long as they run.
    pub exit_barrier_timeout_s: Option<f64>,
    /// Workers share the store at ``MASTER_ADDR:MASTER_PORT``, which then already listens.
    pub use_agent_store: bool,
    /// The values of ``--rdzv-conf``; None with a rendezvous of PyTorch's.
    pub config: Option<RendezvousConfig>,
    /// Whether workers may survive a change of the world, if the configuration allows it.
    pub survives: bool,
}

impl AgentOptions {
    /// The same for the core.
    pub fn core(&self) -> PyResult<agent::AgentOptions> {
        let budget = self.restarts_left.map_or(Budget::Job, Budget::Node);
        let exit_barrier_timeout = limit("exit_barrier_timeout", self.exit_barrier_timeout_s)?;
        let config = self.config.as_ref().map(|config| &config.0);
        let in_place = config.filter(|_| self.survives).map_or(InPlace::Off, |config| config.in_place);
        let unjudged = judge::Options { mode: Mode::Off, ..judge::Options::default() };
        let standbys = config.map_or(0, |config| config.standby);
        let how = (in_place, standbys, config.map_or(unjudged, Conf::hang_options));
        self.workers.agent(&self.name, &self.run_id, self.use_agent_store, budget, exit_barrier_timeout, how)
    }
}

/// Which streams of which workers: ``--redirects`` and ``--tee``.
#[pyclass(frozen, eq, from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone, PartialEq)]
pub struct Streams(pub StreamsOf);

#[pymethods]
impl Streams {
    /// Parse torchrun's form.
    ///
    /// Raises ``ValueError``. Its text continues the flag's name.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        text.parse().map(Self).map_err(|error: workers::StreamsError| PyValueError::new_err(error.to_string()))
    }

    /// Whether a stream of some worker is one of them.
    #[getter]
    fn any(&self) -> bool {
        self.0.any()
    }
}

/// Which lines of workers show progress: ``--progress-log``.
#[pyclass(frozen, eq, from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone, PartialEq)]
pub struct ProgressPattern(pub workers::ProgressPattern);

#[pymethods]
impl ProgressPattern {
    /// Compile a regular expression.
    ///
    /// Raises ``ValueError``. Its text continues the flag's name.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        text.parse().map(Self).map_err(|error: workers::ProgressPatternError| PyValueError::new_err(error.to_string()))
    }
}

/// The destinations of the output of ``elastic-run``'s workers.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct LogOptions {
    /// Streams that go to files.
    pub redirects: Streams,
    /// Streams that go to files and to the console.
    pub tee: Streams,
    /// Local ranks that the console shows; None: all.
    pub shown_local_ranks: Option<Vec<u32>>,
    /// Global ranks that the console shows; None: all.
    pub shown_ranks: Option<Vec<u32>>,
    /// Folder of log files; None for a temporary folder.
    pub log_dir: Option<PathBuf>,
    /// Whether there are log files at all.
    pub log_files: bool,
    /// Texts that select lines of stdout for a separate file.
    pub stdout_filters: Vec<String>,
    /// The same for stderr.
    pub stderr_filters: Vec<String>,
    /// Template of the prefix of teed lines; None for torchrun's.
    pub prefix: Option<String>,
}

/// The options of a node of ``elastic-run``.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct LaunchOptions {
    /// The program and its arguments, in which ``${local_rank}`` is replaced.
    pub command: Vec<OsString>,
    /// The destinations of workers' output.
    pub logs: LogOptions,
    /// The CPUs of the worker of each local rank. Empty, or missing: this process's.
    pub cpus: Vec<Vec<u32>>,
    /// ``begin``, ``fixed`` and ``what`` of :class:`Template`, if workers are to be forked from one.
    pub warm: Option<(Vec<OsString>, usize, String)>,
    /// The workers.
    pub workers: WorkerOptions,
}

impl LaunchOptions {
    /// The options of this node's agent.
    pub fn agent(&self, node: &NodeOptions) -> PyResult<agent::AgentOptions> {
        // The coordinator does not count failures that are not reported to it.
        let budget = node.max_restarts.map_or(Budget::Node(self.workers.max_restarts), |_| Budget::Job);
        let exit_barrier_timeout = node.config.0.exit_barrier_timeout;
        self.workers.agent(
            &node.name,
            &node.run_id,
            node.use_agent_store,
            budget,
            exit_barrier_timeout,
            (node.in_place(), node.config.0.standby, node.config.0.hang_options()),
        )
    }
}
