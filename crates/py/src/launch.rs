//! `launch`: runs the agent of `elastic-run` until it has ended. `rehearse`, `why_users_are_unknown` and `check_health`: for its doctor.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::panic;
use std::sync::Arc;

use elastic_rs::agent::Outcome;
use elastic_rs::agent::health::{self, Found};
use elastic_rs::launcher::launch::{Ended, Fixed, Job, LogFolder, LogOptions, Warm, run as run_job};
use elastic_rs::launcher::node::Node;
use elastic_rs::net::local_peers;
use elastic_rs::rendezvous::messages::message::EndClass;
use elastic_rs::rendezvous::node;
use elastic_rs::signals::{Receiver, Signal};
use elastic_rs::workers::{self};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::agent::{Failure, WorkerExit, seconds_since_1970};
use crate::errors::class_of_join;
use crate::options::LaunchOptions;
use crate::rendezvous::Session;
use crate::runtime::{block_on_task, detach, handle};
use crate::signals::Signals;

/// How :func:`launch` ended.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
pub struct Launched {
    /// ``succeeded``, ``not_needed`` (a spare), ``too_late`` (the job had succeeded before this node could join), ``failed``,
    /// ``unfit`` (only this node has failed), ``no_placement``, ``signal``, or ``taken_away`` (by a notice).
    outcome: &'static str,
    /// Of ``failed``, ``unfit``, ``no_placement`` and ``too_late``: the reason, in words.
    reason: Option<String>,
    /// Whose fault it was: ``program``, ``machine``, ``preempted`` or ``no progress``. None: nobody's, or it is not known.
    end_class: Option<&'static str>,
    /// Of ``failed``: the first failure, on whatever node; of ``unfit``: that of this node. None if the job was closed without a failure report.
    failure: Option<Failure>,
    /// Of ``no_placement`` and ``too_late``: name of the corresponding exception of ``elastic_rs.errors``.
    error: Option<&'static str>,
    /// Of ``signal`` and ``taken_away``: the signal's number.
    signal: Option<i32>,
    /// The last round's workers that have ended, in that order.
    exits: Vec<Py<WorkerExit>>,
    /// Of ``failed`` and ``unfit``: when the failure happened, or when this node learned of it, in seconds since 1970.
    failed_at: Option<f64>,
    /// Global rank of the last round's first worker.
    first_rank: u32,
    /// Error files of the last round's workers, by local rank.
    error_files: BTreeMap<u32, OsString>,
}

impl Launched {
    fn of(py: Python<'_>, ended: Ended) -> PyResult<Self> {
        let exits = ended.exits.iter().map(|exited| Py::new(py, WorkerExit::from(exited))).collect::<PyResult<_>>()?;
        let mut launched = Self {
            outcome: "succeeded",
            reason: None,
            end_class: ended.class.map(EndClass::name),
            failure: None,
            error: None,
            signal: None,
            exits,
            failed_at: ended.failed_at.map(seconds_since_1970),
            first_rank: ended.first_rank,
            error_files: ended.error_files.into_iter().map(|(rank, file)| (rank, file.into())).collect(),
        };
        match ended.outcome {
            Outcome::Succeeded => {}
            Outcome::NotNeeded => launched.outcome = "not_needed",
            Outcome::Failed { cause, reason, .. } => {
                launched.outcome = "failed";
                (launched.failure, launched.reason) = (cause.map(|cause| Failure::from(*cause)), Some(reason));
            }
            Outcome::Unfit { cause, reason } => {
                launched.outcome = "unfit";
                (launched.failure, launched.reason) = (Some(Failure::from(*cause)), Some(reason));
            }
            Outcome::NoPlacement(error) => {
                launched.outcome = match (&error, error.is_after_success()) {
                    (node::JoinError::Over { .. }, true) => "succeeded_before",
                    (node::JoinError::Over { .. }, false) => "failed_before",
                    (_, true) => "too_late",
                    (_, false) => "no_placement",
                };
                launched.error = Some(class_of_join(&error));
                launched.reason = Some(error.to_string());
            }
            Outcome::Signal(number) => {
                launched.outcome = if ended.taken_away { "taken_away" } else { "signal" };
                launched.signal = Some(number);
            }
        }
        Ok(launched)
    }
}

/// Run the workers of one node until the job, or this node's part in it, has ended. No process of them is left then.
///
/// ``session`` must be new. Workers inherit this process's environment, and get the ``variables`` besides. ``fixed_master`` is the
/// address and port for workers, instead of the round's. With ``whole_lines`` the console gets only whole lines of workers, also of
/// streams that are not teed.
///
/// The first of the ``signals`` ends this node's part, and a second one kills its workers. None: this process handles its signals
/// itself. Python holds no lock meanwhile.
///
/// Raises ``ValueError`` for invalid values, and ``RuntimeError`` if only this node cannot go on.
#[pyfunction]
#[pyo3(signature = (session, options, *, signals, fixed_master, whole_lines, variables))]
pub fn launch(
    py: Python<'_>,
    session: &Session,
    options: LaunchOptions,
    signals: Option<&Signals>,
    fixed_master: Option<(String, u16)>,
    whole_lines: bool,
    variables: BTreeMap<OsString, OsString>,
) -> PyResult<Launched> {
    if options.command.is_empty() {
        return Err(PyValueError::new_err("command is empty, must name a program"));
    }
    let node = session.options();
    let agent = options.agent(node)?;
    let logs = options.logs;
    let job = Job {
        agent,
        command: options.command,
        close_timeout: node.config.0.close_timeout,
        fixed: fixed_master.map(|(addr, port)| Fixed { addr, port }),
        cpus: options.cpus,
        log_folder: match logs.log_dir {
            _ if !logs.log_files => LogFolder::Nowhere,
            Some(folder) => LogFolder::In(folder),
            None => LogFolder::Temporary,
        },
        logs: LogOptions {
            redirects: logs.redirects.0,
            tee: logs.tee.0,
            shown_local_ranks: logs.shown_local_ranks.map(|ranks| ranks.into_iter().collect()),
            shown_ranks: logs.shown_ranks.map(|ranks| ranks.into_iter().collect()),
            stdout_filters: logs.stdout_filters,
            stderr_filters: logs.stderr_filters,
            prefix: logs.prefix,
            whole_lines,
        },
        warm: options.warm.map(|(begin, fixed, what)| Warm { begin, fixed, what }),
        variables,
    };
    run(py, job, Arc::clone(session.node()), signals)
}

fn run(py: Python<'_>, job: Job, node: Arc<Node>, signals: Option<&Signals>) -> PyResult<Launched> {
    let runtime = handle()?;
    let receiver = signals.map_or_else(|| Ok(Receiver::of_nothing()), |signals| signals.receiver(&runtime))?;
    // On the runtime's thread, so that no event waits for this one.
    let task = runtime.spawn(run_job(job, node, receiver));
    match detach(py, || runtime.block_on(task)) {
        Ok(Ok(ended)) => Launched::of(py, ended),
        Ok(Err(error)) => Err(PyRuntimeError::new_err(error.to_string())),
        Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
        Err(_) => Err(PyRuntimeError::new_err("elastic_rs is shut down: the interpreter is exiting")),
    }
}

/// Return the number of the signal with this name, such as ``SIGTERM``. None if there is none.
///
/// Python's ``signal`` knows the same names. Its import takes a part of an agent's start that can be noticed.
#[pyfunction]
pub fn signal_number(name: &str) -> Option<i32> {
    Signal::from_name(name).map(|signal| signal.0)
}

/// Start a command as workers are started, and wait until no process of it is left.
///
/// Raises ``RuntimeError`` if that fails, with the system call that this machine refuses.
#[pyfunction]
pub fn rehearse(py: Python<'_>, command: Vec<OsString>) -> PyResult<()> {
    block_on_task(py, workers::rehearse(command))?.map_err(PyRuntimeError::new_err)
}

/// Check this machine once, as ``--health-check`` does before a join. The built-in checks come first, then this command, if one is given.
///
/// Returns a verdict (``well``, ``ill`` or ``unknown``) and its reason, which is empty for ``well``.
#[pyfunction]
#[pyo3(signature = (command=None))]
pub fn check_health(py: Python<'_>, command: Option<OsString>) -> (&'static str, String) {
    match detach(py, || health::check(health::Options { command })) {
        Found::Well => ("well", String::new()),
        Found::Ill(what) => ("ill", what),
        Found::Unknown(why) => ("unknown", why),
    }
}

/// Return why a worker store of this process could not know which users connect to it from this machine, and what to do. None: it
/// could.
///
/// Raises ``OSError`` if no descriptor is free.
#[pyfunction]
pub fn why_users_are_unknown(py: Python<'_>) -> PyResult<Option<(&'static str, &'static str)>> {
    Ok(detach(py, local_peers::why_users_are_unknown)?.map(|why| (why, local_peers::REMEDY)))
}
