//! `launch`: the agent of `elastic-run`, at work until it has ended; and what its doctor asks: `visible_gpus`, `rehearse`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::panic;
use std::path::PathBuf;
use std::sync::Arc;

use elastic_rs::agent::environment::Workers;
use elastic_rs::agent::{Budget, Outcome};
use elastic_rs::devices::{Wanted, nvidia};
use elastic_rs::host::Reach;
use elastic_rs::launch::{Ended, Fixed, Job, LogFolder, LogOptions, Signals, Warm, run as run_job};
use elastic_rs::process::{self, Signal, StreamsOf};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::agent::Failure;
use crate::errors::class_of_join;
use crate::host::Host;
use crate::rendezvous::{Session, limit, seconds};
use crate::runtime::{block_on_task, detach, handle};

/// How :func:`launch` ended.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
pub struct Launched {
    /// ``succeeded``, ``not_needed`` (a spare), ``failed``, ``no_place`` or ``signal``.
    outcome: &'static str,
    /// Of ``failed`` and ``no_place``: why, in words.
    reason: Option<String>,
    /// Of ``failed``: the first failure, on whatever node; None if the job was closed without naming one.
    failure: Option<Failure>,
    /// Of ``no_place``: which exception of ``elastic_rs.errors`` says so elsewhere.
    error: Option<&'static str>,
    /// Of ``signal``: its number.
    signal: Option<i32>,
    /// The last round's workers that have ended, in that order: local rank, process id, and return code.
    exits: Vec<(u32, u32, i32)>,
    /// Global rank of the last round's first worker.
    first_rank: u32,
    /// Where the last round's workers may have recorded exceptions, by local rank.
    error_files: BTreeMap<u32, OsString>,
}

impl From<Ended> for Launched {
    fn from(ended: Ended) -> Self {
        let mut launched = Self {
            outcome: "succeeded",
            reason: None,
            failure: None,
            error: None,
            signal: None,
            exits: ended.exits.iter().map(|it| (it.local_rank, it.pid, it.exit.returncode())).collect(),
            first_rank: ended.first_rank,
            error_files: ended.error_files.into_iter().map(|(rank, file)| (rank, file.into())).collect(),
        };
        match ended.outcome {
            Outcome::Succeeded => {}
            Outcome::NotNeeded => launched.outcome = "not_needed",
            Outcome::Failed { cause, reason } => {
                launched.outcome = "failed";
                (launched.failure, launched.reason) = (cause.map(|cause| Failure::from(*cause)), Some(reason));
            }
            Outcome::NoPlace(error) => {
                launched.outcome = "no_place";
                launched.error = Some(class_of_join(&error));
                launched.reason = Some(error.to_string());
            }
            Outcome::Signal(number) => (launched.outcome, launched.signal) = ("signal", Some(number)),
        }
        launched
    }
}

/// Run the workers of one node until the job, or this node's part in it, has ended. Nothing is left of them then.
///
/// ``session`` has not been used before; ``host`` is the coordinator, if this process serves it. ``command`` is the program and
/// its arguments, in which ``${local_rank}`` is replaced; workers inherit this process's environment. With ``restarts_left``
/// this node counts its own restarts. ``fixed_master`` is the address and port that workers are told instead of the
/// round's. ``log_dir`` is None for a temporary folder; without ``log_files`` there are none. ``redirects`` and ``tee`` are as
/// torchrun's. ``signals`` end the job on this node; a second one kills. ``warm`` is what :class:`Template` has as ``begin``,
/// ``fixed`` and ``what``. All times in seconds, zero for ``uninterruptible_sleep_s``
/// means that nobody looks for it.
///
/// Call it in the main thread. Python runs no signal handlers and holds no lock meanwhile.
///
/// Raises ``ValueError`` for what is not allowed, and ``RuntimeError`` if this node alone cannot go on.
#[pyfunction]
#[pyo3(signature = (session, host, *, name, entrypoint, command, run_id, role, local_world_size, max_restarts, restarts_left,
    grace_s, exit_barrier_timeout_s, uninterruptible_sleep_s, node_rank, join_timeout_s, close_timeout_s, drain_timeout_s, local_addr, fixed_master,
    use_agent_store, virtual_local_rank, log_dir, log_files, redirects, tee, shown_ranks, stdout_filters, stderr_filters,
    prefix, signals, warm = None))]
#[expect(clippy::too_many_arguments, reason = "one named argument per setting, checked here once")]
pub fn launch(
    py: Python<'_>,
    session: &Session,
    host: Option<&Host>,
    name: String,
    entrypoint: String,
    command: Vec<OsString>,
    run_id: String,
    role: String,
    local_world_size: u32,
    max_restarts: u32,
    restarts_left: Option<u32>,
    grace_s: f64,
    exit_barrier_timeout_s: Option<f64>,
    uninterruptible_sleep_s: f64,
    node_rank: Option<u32>,
    join_timeout_s: f64,
    close_timeout_s: f64,
    drain_timeout_s: f64,
    local_addr: Option<String>,
    fixed_master: Option<(String, u16)>,
    use_agent_store: bool,
    virtual_local_rank: bool,
    log_dir: Option<PathBuf>,
    log_files: bool,
    redirects: &str,
    tee: &str,
    shown_ranks: Option<Vec<u32>>,
    stdout_filters: Vec<String>,
    stderr_filters: Vec<String>,
    prefix: Option<String>,
    signals: Vec<i32>,
    warm: Option<(Vec<OsString>, usize, String)>,
) -> PyResult<Launched> {
    let mut reach = Reach::new(local_addr, session.is_alone());
    reach.on_one_machine = host.is_some_and(Host::is_on_loopback);
    reach.unused = fixed_master.is_some();
    if command.is_empty() {
        return Err(PyValueError::new_err("command is empty, must name a program"));
    }
    let streams = |text: &str| text.parse::<StreamsOf>().map_err(|error| PyValueError::new_err(error.to_string()));
    let logs = LogOptions {
        redirects: streams(redirects)?,
        tee: streams(tee)?,
        shown: shown_ranks.map(|ranks| ranks.into_iter().collect()),
        stdout_filters,
        stderr_filters,
        prefix,
    };
    let job = Job {
        name,
        entrypoint,
        command,
        workers: Workers { run_id, role, local_world_size, max_restarts, use_agent_store, virtual_local_rank },
        budget: restarts_left.map_or(Budget::Job, Budget::Node),
        grace: seconds("shutdown_timeout", grace_s)?,
        exit_barrier_timeout: limit("exit_barrier_timeout", exit_barrier_timeout_s)?,
        uninterruptible_sleep: seconds("uninterruptible_state_timeout", uninterruptible_sleep_s)?,
        node_rank,
        join_timeout: seconds("join_timeout", join_timeout_s)?,
        close_timeout: seconds("close_timeout", close_timeout_s)?,
        drain_timeout: seconds("drain_timeout", drain_timeout_s)?,
        reach,
        fixed: fixed_master.map(|(addr, port)| Fixed { addr, port }),
        log_folder: match log_dir {
            _ if !log_files => LogFolder::Nowhere,
            Some(folder) => LogFolder::In(folder),
            None => LogFolder::Temporary,
        },
        logs,
        warm: warm.map(|(begin, fixed, what)| Warm { begin, fixed, what }),
    };
    run(py, job, session, host, signals)
}

fn run(py: Python<'_>, job: Job, session: &Session, host: Option<&Host>, signals: Vec<i32>) -> PyResult<Launched> {
    let (session, sessions) = (Arc::clone(&session.0), host.map(Host::sessions));
    let runtime = handle()?;
    let taken = Signals::take(&signals.into_iter().map(Signal).collect::<Vec<_>>())?;
    let receiver = {
        let _inside = runtime.enter();
        taken.receiver()?
    };
    // On the runtime's own thread, so that nothing waits for this one.
    let task = runtime.spawn(run_job(job, session, sessions, receiver));
    match detach(py, || runtime.block_on(task)) {
        Ok(Ok(ended)) => Ok(ended.into()),
        Ok(Err(error)) => Err(PyRuntimeError::new_err(error.to_string())),
        Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
        Err(_) => Err(PyRuntimeError::new_err("elastic_rs is shut down: the interpreter is exiting")),
    }
}

/// How many NVIDIA GPUs a process sees if ``CUDA_VISIBLE_DEVICES`` is so, as ``torch.cuda.device_count()`` says it.
///
/// Raises ``RuntimeError`` if there is no driver, with what was tried.
#[pyfunction]
#[pyo3(signature = (cuda_visible_devices))]
pub fn visible_gpus(py: Python<'_>, cuda_visible_devices: Option<&str>) -> PyResult<usize> {
    let gpus = detach(py, nvidia::gpus).map_err(PyRuntimeError::new_err)?;
    Ok(Wanted::parse(cuda_visible_devices).count(&gpus))
}

/// Start a command as workers are started, and wait until nothing of it is left.
///
/// Raises ``RuntimeError`` if that fails, with the system call that this machine refuses.
#[pyfunction]
pub fn rehearse(py: Python<'_>, command: Vec<OsString>) -> PyResult<()> {
    block_on_task(py, process::rehearse(command))?.map_err(PyRuntimeError::new_err)
}
