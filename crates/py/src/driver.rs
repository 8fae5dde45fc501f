//! `Driver`: starts agents on hosts until a job has ended. `parse_hosts`, `HostTable`: hosts and their order, for Python.

#![expect(clippy::too_many_arguments, reason = "constructors that are generated: one named argument for each field")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::panic;
use std::process::Stdio;
use std::time::Instant;

use bytes::Bytes;
use elastic_rs::discovery::driver::{Input, Launching, drive};
use elastic_rs::discovery::hosts::{self, Host as HostSlots, HostsError};
use elastic_rs::discovery::machine::{Rules, Verdict};
use elastic_rs::discovery::manager::{HostManager, difference};
use elastic_rs::discovery::programs::start;
use elastic_rs::hosts::{Cooldown, UnusedHosts, WhyUnused};
use elastic_rs::rendezvous::run::Exclusions;
use elastic_rs::signals::Signal;
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::sync::{mpsc, watch};

use crate::agent::copy_of;
use crate::conf::seconds;
use crate::endpoint::EndpointServer;
use crate::runtime::{detach, handle};
use crate::signals::Signals;

/// The options of a driver. Times are in seconds.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct DriverOptions {
    /// Fewest workers of the job.
    pub min_slots: u32,
    /// The list of hosts cannot change.
    pub fixed: bool,
    /// Agents run on without the driver, which ends when all are started.
    pub detach: bool,
    /// The hosts with endpoints of a list, at which such agents meet. None: at the first host.
    pub listed: Option<Vec<String>>,
    /// How long an agent may take to report that it runs.
    pub start_timeout_s: f64,
    /// How long the agents that run may have fewer than ``min_slots``.
    pub elastic_timeout_s: f64,
    /// How long discovery may be silent.
    pub discovery_timeout_s: f64,
    /// How long an agent that has to leave may take.
    pub grace_s: f64,
    /// Numbers of signals that do not end the job, which agents get.
    pub passed_on: Vec<i32>,
    /// After how many troubles a host is kept out; 0: never.
    pub host_failures: u32,
    /// Troubles longer ago than this do not count.
    pub window_s: f64,
    /// The shortest and the longest time that a host is kept out; None: for the job.
    pub cooldown_s: Option<(f64, f64)>,
    /// ``ssh`` and its options.
    pub ssh: Vec<OsString>,
    /// The Python on other hosts.
    pub remote_python: String,
    /// The Python on this machine.
    pub python: OsString,
    /// What both are given: the agent's program.
    pub program: Vec<String>,
    /// The job, which each agent gets: one line.
    pub job: String,
    /// The coordinator's port.
    pub port: u16,
    /// The job's run id, for observers of the coordinator.
    pub run_id: String,
}

impl DriverOptions {
    fn rules(&self) -> PyResult<Rules> {
        if self.min_slots == 0 {
            return Err(PyValueError::new_err("min_slots must be above zero"));
        }
        Ok(Rules {
            min_slots: self.min_slots,
            fixed: self.fixed,
            detach: self.detach,
            listed: self.listed.clone(),
            start_timeout: seconds("start_timeout", self.start_timeout_s)?,
            elastic_timeout: seconds("elastic_timeout", self.elastic_timeout_s)?,
            discovery_timeout: seconds("discovery_timeout", self.discovery_timeout_s)?,
            grace: seconds("grace", self.grace_s)?,
            host_failures: self.host_failures,
            window: seconds("host_failures_window", self.window_s)?,
            cooldown: cooldown(self.cooldown_s)?,
            passed_on: self.passed_on.iter().copied().map(Signal).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            python: self.remote_python.clone(),
        })
    }

    fn launching(&self) -> PyResult<Launching> {
        if self.ssh.is_empty() || self.job.contains('\n') {
            return Err(PyValueError::new_err("ssh must name a program, and the job must be one line"));
        }
        Ok(Launching {
            ssh: self.ssh.clone(),
            remote_python: self.remote_python.clone(),
            python: self.python.clone(),
            program: self.program.clone(),
            job: Bytes::from(self.job.clone().into_bytes()),
            port: self.port,
        })
    }
}

fn cooldown(cooldown_s: Option<(f64, f64)>) -> PyResult<Option<Cooldown>> {
    let Some((low, high)) = cooldown_s else { return Ok(None) };
    let range = Cooldown { min: seconds("cooldown", low)?, max: seconds("cooldown", high)? };
    if range.min.is_zero() || range.min > range.max {
        return Err(PyValueError::new_err(format!(
            "the cool-down is `{low}` to `{high}` seconds, must begin above zero and not end before it begins"
        )));
    }
    Ok(Some(range))
}

/// Starts an agent on each host that discovery finds, until the job has ended.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Driver {
    inputs: mpsc::UnboundedSender<Input>,
    /// For :meth:`run`, which is called once.
    waiting: Mutex<Option<mpsc::UnboundedReceiver<Input>>>,
    rules: Rules,
    launching: Launching,
    run_id: String,
}

/// How a driver's work ended: the verdict (``succeeded``, ``failed``, ``given_up``, ``refused`` or ``signal``), the number of
/// the signal or the exit code after a failure, and why.
type Driven = (&'static str, Option<i32>, String);

#[pymethods]
impl Driver {
    /// Raises ``ValueError`` for invalid options.
    #[new]
    fn new(options: &DriverOptions) -> PyResult<Self> {
        let (inputs, waiting) = mpsc::unbounded_channel();
        let (rules, launching) = (options.rules()?, options.launching()?);
        Ok(Self { inputs, waiting: Mutex::new(Some(waiting)), rules, launching, run_id: options.run_id.clone() })
    }

    /// Discovery has found these hosts, each with its slots.
    ///
    /// Raises ``ValueError`` if a host's name or slots are not allowed, or a host is there twice; nothing changes then.
    fn found(&self, hosts: Vec<(String, i64)>) -> PyResult<()> {
        self.send(Input::Found(checked(hosts)?));
        Ok(())
    }

    /// Discovery has failed, for this reason.
    fn failed(&self, why: String) {
        self.send(Input::DiscoveryFailed(why));
    }

    /// The command line that starts an agent on a host.
    ///
    /// Raises ``ValueError`` if the host's name is not allowed.
    fn command(&self, host: &str) -> PyResult<Vec<OsString>> {
        Ok(self.launching.command(&HostSlots::new(host, 1).map_err(invalid)?))
    }

    /// Start agents until the job has ended, and return the verdict (``succeeded``, ``failed``, ``given_up``, ``refused`` or
    /// ``signal``), the number of the signal or the exit code after a failure, and why.
    ///
    /// ``host`` has the coordinator, if it is here: hosts that it keeps out get no agent, and its observers are shown which hosts the
    /// driver does not use.
    ///
    /// Call it once. The signals end the job.
    ///
    /// Raises ``OSError`` if there is no descriptor or thread left.
    #[pyo3(signature = (signals, *, host = None))]
    fn run(&self, py: Python<'_>, signals: &Signals, host: Option<&EndpointServer>) -> PyResult<Driven> {
        let Some(inputs) = self.waiting.lock().take() else {
            return Err(PyRuntimeError::new_err("this driver has been run already"));
        };
        let runtime = handle()?;
        let mut receiver = signals.receiver(&runtime)?;
        let to = self.inputs.clone();
        let passing_on = runtime.spawn(async move { while to.send(Input::Signal(receiver.next().await)).is_ok() {} });
        if let Some(host) = host {
            runtime.spawn(pass_on_exclusions(host.exclusions(), self.inputs.clone()));
        }
        let (shown, run_id) = (host.map(EndpointServer::drivers), self.run_id.clone());
        let show = move |hosts: UnusedHosts| {
            if let Some(shown) = &shown {
                shown.send_modify(|all| _ = all.insert(run_id.clone(), hosts));
            }
        };
        // On the runtime's thread, so that no event waits for this one.
        let task = runtime.spawn(drive(self.rules.clone(), self.launching.clone(), inputs, show));
        let ended = detach(py, || runtime.block_on(task));
        passing_on.abort();
        let end = match ended {
            Ok(end) => end?,
            Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(PyRuntimeError::new_err("elastic_rs is shut down: the interpreter is exiting")),
        };
        let (verdict, number) = match end.verdict {
            Verdict::Succeeded => ("succeeded", None),
            Verdict::Failed { code } => ("failed", Some(code)),
            Verdict::GivenUp => ("given_up", None),
            Verdict::Refused => ("refused", None),
            Verdict::Signal(number) => ("signal", Some(number)),
        };
        Ok((verdict, number, end.reason))
    }
}

impl Driver {
    fn send(&self, input: Input) {
        // A driver that has ended needs to hear nothing.
        let _ = self.inputs.send(input);
    }
}

/// Tells the driver which hosts are kept out, until one of both has ended.
async fn pass_on_exclusions(mut reported: watch::Receiver<Exclusions>, to: mpsc::UnboundedSender<Input>) {
    loop {
        let excluded = {
            let all = reported.borrow_and_update();
            let named = all.values().flatten().filter_map(|it| Some((it.name.clone()?, it.out.clone())));
            named.collect()
        };
        if to.send(Input::Excluded(excluded)).is_err() || reported.changed().await.is_err() {
            return;
        }
    }
}

/// Parse hosts: ``list`` (``a:8,b:8``), ``lines`` (what a script prints) or ``hostfile``. A host without slots has ``default_slots``.
///
/// Raises ``ValueError`` for a bad line or entry. The error names its number, repeats its text, and says what is allowed.
#[pyfunction]
#[pyo3(signature = (text, *, form, default_slots))]
pub fn parse_hosts(text: &str, form: &str, default_slots: u32) -> PyResult<Vec<(String, u32)>> {
    let parse = match form {
        "list" => hosts::parse_list,
        "lines" => hosts::parse_lines,
        "hostfile" => hosts::parse_hostfile,
        _ => return Err(PyValueError::new_err(format!("`{form}` is not a form, must be list, lines or hostfile"))),
    };
    let parsed = parse(text, default_slots).map_err(invalid)?;
    Ok(parsed.into_iter().map(|host| (host.name, host.slots)).collect())
}

/// Start a program in a session of its own, without blocked signals and with no input, and return its process id.
///
/// ``stdout`` and ``stderr`` are descriptors. The caller waits for the end of the process.
///
/// Raises ``OSError`` with ``errno`` and ``strerror`` if it cannot be run.
#[pyfunction]
#[pyo3(signature = (command, *, stdout, stderr))]
pub fn start_program(py: Python<'_>, command: Vec<OsString>, stdout: i32, stderr: i32) -> PyResult<u32> {
    let (stdout, stderr) = (copy_of(stdout)?, copy_of(stderr)?);
    let started = detach(py, || start(&command, Stdio::null(), stdout.into(), stderr.into()));
    started.map(|child| child.id()).map_err(|error| match error.raw_os_error() {
        Some(number) => {
            let text = error.to_string();
            let strerror = text.split(" (os error").next().unwrap_or_default().to_owned();
            PyOSError::new_err((number, strerror))
        }
        None => error.into(),
    })
}

/// The hosts of a job by age, and those that are kept out of it.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct HostTable(Mutex<Table>);

struct Table {
    manager: HostManager,
    /// The hosts that could be used at the last update.
    shown: Vec<HostSlots>,
}

impl Table {
    fn available(&self) -> Vec<HostSlots> {
        self.manager.available(Instant::now()).map(|known| known.host.clone()).collect()
    }
}

#[pymethods]
impl HostTable {
    /// ``cooldown_s``: the shortest and the longest time that a host is kept out; None: for ever.
    ///
    /// Raises ``ValueError`` if that is no range.
    #[new]
    #[pyo3(signature = (*, cooldown_s = None))]
    fn new(cooldown_s: Option<(f64, f64)>) -> PyResult<Self> {
        let manager = HostManager::new(cooldown(cooldown_s)?);
        Ok(Self(Mutex::new(Table { manager, shown: Vec::new() })))
    }

    /// Replace the list of hosts. Returns Horovod's flags: 1 if hosts or slots were removed, 2 if they were added, 3 for both, else 0.
    ///
    /// Raises ``ValueError`` as :meth:`Driver.found`.
    fn update(&self, hosts: Vec<(String, i64)>) -> PyResult<u8> {
        let hosts = checked(hosts)?;
        let mut table = self.0.lock();
        table.manager.update(&hosts, Instant::now());
        let after = table.available();
        let flags = difference(&table.shown, &after);
        table.shown = after;
        Ok(flags)
    }

    /// The hosts that may be used, with their slots, the oldest first.
    fn available(&self) -> Vec<(String, u32)> {
        self.0.lock().available().into_iter().map(|host| (host.name, host.slots)).collect()
    }

    /// Keep a host out, since it has failed.
    fn blacklist(&self, host: &str) {
        let mut table = self.0.lock();
        table.manager.blacklist(host, WhyUnused::Blacklisted, Instant::now());
        table.shown.retain(|known| known.name != host);
    }

    /// Whether a host is kept out.
    fn is_blacklisted(&self, host: &str) -> bool {
        self.0.lock().manager.out(host, Instant::now()).is_some()
    }
}

fn checked(hosts: Vec<(String, i64)>) -> PyResult<Vec<HostSlots>> {
    let mut seen = BTreeMap::new();
    let check = |(name, slots): (String, i64)| {
        let host = HostSlots::new(&name, u32::try_from(slots).unwrap_or(0)).map_err(invalid)?;
        match seen.insert(name, ()) {
            None => Ok(host),
            Some(()) => Err(PyValueError::new_err(format!("host `{}` is there twice", host.name))),
        }
    };
    hosts.into_iter().map(check).collect()
}

fn invalid(error: HostsError) -> PyErr {
    PyValueError::new_err(error.to_string())
}
