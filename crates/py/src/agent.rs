//! `Agent`: one node's agent, with Python as its front end. Its steps, and its outcome.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use elastic_rs::agent;
use elastic_rs::agent::environment::{self, Workers};
use elastic_rs::agent::runner::{self, Ear, ErrorFiles, Programs, Runner, START_PATIENCE};
use elastic_rs::agent::worker_group::{Adopted, WorkerGroup, captured};
use elastic_rs::rendezvous::messages::message;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::signals::Signal;
use elastic_rs::signals::last_sender;
use elastic_rs::workers::{self, Consoles, Copies, ExitStatus, Filter, FilterOptions, Output, WorkerSpec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::conf::seconds;
use crate::errors;
use crate::options::AgentOptions;
use crate::rendezvous::{Placement, Session};
use crate::runtime::{block_on, block_on_task, detach, handle};
use crate::warm::Template;

/// A worker's failure. Every node names it as the cause when the job restarts or ends.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
#[derive(Clone)]
pub struct Failure {
    /// The name of the worker's node.
    node: String,
    /// The worker's role.
    role: String,
    /// The worker's rank on its node.
    local_rank: u32,
    /// The worker's rank in the job.
    global_rank: u32,
    /// Its process id there.
    pid: u32,
    /// How it ended, such as ``exit code 3`` or ``SIGKILL``.
    exit: String,
    /// The same as a number, as ``subprocess.Popen.returncode``; 1 for a failure without one.
    returncode: i32,
    /// The first lines of the worker's words, if there are any.
    message: String,
}

impl From<message::Failure> for Failure {
    fn from(failure: message::Failure) -> Self {
        let message::Failure { node, role, local_rank, global_rank, pid, exit, returncode, message, .. } = failure;
        Self { node, role, local_rank, global_rank, pid, exit, returncode, message }
    }
}

/// How a worker of this node ended.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
pub struct WorkerExit {
    /// Its rank on its node.
    local_rank: u32,
    /// Its process id.
    pid: u32,
    /// How it ended, as ``subprocess.Popen.returncode``.
    returncode: i32,
    /// When it ended, in seconds since 1970.
    at: f64,
    /// A signal of this agent has ended it: it was stopped.
    stopped: bool,
}

impl From<&workers::WorkerExit> for WorkerExit {
    fn from(exited: &workers::WorkerExit) -> Self {
        let workers::WorkerExit { local_rank, pid, exit, stopped, .. } = *exited;
        let at = exited.wall().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        Self { local_rank, pid, returncode: exit.returncode(), at, stopped }
    }
}

/// A time of this process, in seconds since 1970.
pub fn seconds_since_1970(at: Instant) -> f64 {
    let then = SystemTime::now().checked_sub(at.elapsed()).unwrap_or(UNIX_EPOCH);
    then.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The next step of the front end.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Step(runner::Step);

#[pymethods]
impl Step {
    /// ``join``, ``start``, ``reap``, ``barrier`` or ``end``.
    #[getter]
    fn kind(&self) -> &'static str {
        match &self.0 {
            runner::Step::Join => "join",
            runner::Step::Start(_) => "start",
            runner::Step::Reap { .. } => "reap",
            runner::Step::Barrier => "barrier",
            runner::Step::End(_) => "end",
        }
    }

    /// Of ``reap``: local rank of the worker that has ended.
    #[getter]
    fn local_rank(&self) -> Option<u32> {
        match &self.0 {
            runner::Step::Reap { local_rank } => Some(*local_rank),
            _ => None,
        }
    }

    /// Of ``start``: the node's place, or the one that it will probably get if it has not joined yet.
    #[getter]
    fn placement(&self) -> Option<Placement> {
        match &self.0 {
            runner::Step::Start(placement) => Some(Placement((**placement).clone())),
            _ => None,
        }
    }

    /// Of ``end``: ``succeeded``, ``not_needed`` (a spare), ``failed``, ``no_placement`` or ``signal``.
    #[getter]
    fn outcome(&self) -> Option<&'static str> {
        match &self.0 {
            runner::Step::End(outcome) => Some(match **outcome {
                agent::Outcome::Succeeded => "succeeded",
                agent::Outcome::NotNeeded => "not_needed",
                agent::Outcome::Failed { .. } | agent::Outcome::Unfit { .. } => "failed",
                agent::Outcome::NoPlacement(_) => "no_placement",
                agent::Outcome::Signal(_) => "signal",
            }),
            _ => None,
        }
    }

    /// Of the outcome ``failed``: the reason, in words.
    #[getter]
    fn reason(&self) -> Option<String> {
        match &self.0 {
            runner::Step::End(outcome) => match &**outcome {
                agent::Outcome::Failed { reason, .. } | agent::Outcome::Unfit { reason, .. } => Some(reason.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    /// Of the outcome ``failed``: the first failure, on whatever node. None if the job was closed without a failure report.
    #[getter]
    fn failure(&self) -> Option<Failure> {
        match &self.0 {
            runner::Step::End(outcome) => match &**outcome {
                agent::Outcome::Failed { cause, .. } => cause.as_deref().cloned().map(Failure::from),
                agent::Outcome::Unfit { cause, .. } => Some(Failure::from((**cause).clone())),
                _ => None,
            },
            _ => None,
        }
    }

    /// Of the outcome ``no_placement``: the exception with the reason.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match &self.0 {
            runner::Step::End(outcome) => match &**outcome {
                agent::Outcome::NoPlacement(error) => Some(errors::from_join(py, error).into_value(py).into_any()),
                _ => None,
            },
            _ => None,
        }
    }
}

/// A program to start as a worker.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct WorkerCommand(WorkerSpec);

#[pymethods]
impl WorkerCommand {
    /// ``command`` is the program and its arguments, ``env`` the whole environment.
    ///
    /// ``stdout`` and ``stderr`` are paths of files, or empty for this process's own stream. With ``tee_stdout`` or
    /// ``tee_stderr`` the stream is shown here too, each line with ``prefix``. ``cpus`` are those that the worker may use, all of this
    /// process's if none is given.
    #[new]
    #[pyo3(signature = (local_rank, command, env, *, stdout = PathBuf::new(), stderr = PathBuf::new(), tee_stdout = false,
        tee_stderr = false, prefix = None, cpus = Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per property")]
    fn new(
        local_rank: u32,
        command: Vec<String>,
        env: BTreeMap<String, String>,
        stdout: PathBuf,
        stderr: PathBuf,
        tee_stdout: bool,
        tee_stderr: bool,
        prefix: Option<String>,
        cpus: Vec<u32>,
    ) -> PyResult<Self> {
        let (program, args) =
            command.split_first().ok_or_else(|| PyValueError::new_err("command is empty, must name a program"))?;
        Ok(Self(WorkerSpec {
            args: args.iter().map(Into::into).collect(),
            cpus,
            env: env.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            stdout: output(stdout, tee_stdout, prefix.clone()),
            stderr: captured(output(stderr, tee_stderr, prefix)),
            ..WorkerSpec::new(local_rank, program)
        }))
    }
}

/// A duplicate of the caller's descriptor `fd`.
pub(crate) fn copy_of(fd: i32) -> PyResult<OwnedFd> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
    }
    // SAFETY: the descriptor is only borrowed to duplicate it, which fails if it is not open.
    #[expect(unsafe_code, reason = "a descriptor from Python is a number; there is no safe way to borrow it")]
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(borrowed.try_clone_to_owned()?)
}

fn output(path: PathBuf, tee: bool, prefix: Option<String>) -> Output {
    match path.to_str() {
        Some("") => Output::Inherit,
        Some("/dev/null") => Output::Null,
        _ if tee => Output::Copied(Copies { file: Some(path), console: true, prefix }),
        _ => Output::File(path),
    }
}

/// One node's agent: runs the workers of each round. It decides. The caller carries out its steps and answers.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Agent {
    runner: Arc<Mutex<Runner>>,
    ear: Ear,
    workers: Workers,
}

impl Agent {
    /// Handle signals and notices while this node joins. Returns once one of them has made the agent leave.
    pub async fn leaves_in_join(&self) {
        let mut runner = self.runner.lock().await;
        loop {
            runner.hear().await;
            if !runner.is_joining() {
                return;
            }
        }
    }
}

#[pymethods]
impl Agent {
    /// ``session`` reports other nodes. Without a session the caller does.
    #[new]
    fn new(session: Option<&Session>, options: &AgentOptions) -> PyResult<Self> {
        let options = options.core()?;
        let workers = options.workers.clone();
        let runtime = handle()?;
        let _inside = runtime.enter(); // it may listen for workers
        let runner = Runner::new(options, session.map(|session| Arc::clone(session.node().session())));
        Ok(Self { ear: runner.ear(), runner: Arc::new(Mutex::new(runner)), workers })
    }

    /// Wait for the next step, at most ``timeout_s`` seconds if given. None if there was none by then.
    ///
    /// Python's signal handlers run meanwhile. An exception that they raise ends the call, which may then be repeated.
    #[pyo3(signature = (*, timeout_s = None))]
    fn next(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Option<Step>> {
        let limit = timeout_s.map(|limit| seconds("timeout_s", limit)).transpose()?;
        let runner = Arc::clone(&self.runner);
        // Workers are stopped before this thread wakes up, which may have to wait for the interpreter.
        let step = block_on_task(py, async move {
            let mut runner = runner.lock_owned().await;
            match limit {
                Some(limit) => timeout(limit, runner.next()).await.ok(),
                None => Some(runner.next().await),
            }
        })?;
        Ok(step.map(Step))
    }

    /// Wait until the consoles have taken what all workers have printed, as long as somebody has them open.
    ///
    /// Python's signal handlers run meanwhile. An exception that they raise ends the wait, and the rest of the output is lost.
    #[staticmethod]
    fn written(py: Python<'_>) -> PyResult<()> {
        block_on_task(py, workers::written())
    }

    /// Answers ``join``.
    fn placed(&self, placement: &Placement) {
        self.runner.blocking_lock().placed(placement.0.clone());
    }

    /// Answers ``join``: the join failed. The workers of an agent without a rank do not run.
    fn no_placement(&self, reason: String) {
        self.runner.blocking_lock().no_placement(JoinError::connection(reason));
    }

    /// The variables of the workers that are to be started by local rank, which override those that they inherit.
    ///
    /// Raises ``ValueError`` if there are fewer GPUs than workers with ``virtual_local_rank``.
    fn environments(&self) -> PyResult<BTreeMap<u32, BTreeMap<&'static str, String>>> {
        let runner = self.runner.blocking_lock();
        let placement =
            runner.placement_to_start().ok_or_else(|| PyValueError::new_err("this node has no placement"))?;
        let ranks = placement.workers.ok_or_else(|| PyValueError::new_err("the placement has no ranks of workers"))?;
        let inherited = |name: &str| std::env::var(name).ok();
        let variables = |local_rank| {
            environment::variables(
                &self.workers,
                placement,
                &ranks,
                runner.restarts_for_workers(),
                local_rank,
                inherited,
            )
            .map(|variables| {
                let watched = runner.watch_variables(|name| std::env::var_os(name).is_some());
                (local_rank, variables.into_iter().chain(runner.steps_variable(local_rank)).chain(watched).collect())
            })
            .map_err(PyValueError::new_err)
        };
        (0..placement.workers_of(self.workers.local_world_size)).map(variables).collect()
    }

    /// The name of the start that was asked for in the names of log folders: the round's number from 0, or that and which standby it is.
    #[getter]
    fn attempt(&self) -> String {
        self.runner.blocking_lock().attempt()
    }

    /// Whether the start that was asked for is a standby's.
    #[getter]
    fn starts_standby(&self) -> bool {
        self.runner.blocking_lock().starts_standby()
    }

    /// Answers ``start``: start these programs. Returns their process ids by local rank. The result is empty if one could not be
    /// started, which is a failure of that worker like any other, if the round ended before the start was complete, and for a standby.
    ///
    /// Workers may record their exceptions in ``error_files``. A filter is the path of a file for the lines of teed streams that
    /// contain one of the texts. Teed lines are shown on ``stdout_fd`` and ``stderr_fd``, which stay the caller's. Workers are forked
    /// from the ``template`` if possible.
    #[pyo3(signature = (commands, *, error_files: "dict[int, str]", stdout_filter = None, stderr_filter = None, stdout_fd = 1, stderr_fd = 2,
        template = None))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per property")]
    fn start(
        &self,
        py: Python<'_>,
        commands: Vec<PyRef<'_, WorkerCommand>>,
        error_files: ErrorFiles,
        stdout_filter: Option<(PathBuf, Vec<String>)>,
        stderr_filter: Option<(PathBuf, Vec<String>)>,
        stdout_fd: i32,
        stderr_fd: i32,
        template: Option<&Template>,
    ) -> PyResult<BTreeMap<u32, u32>> {
        let filter = |filter: Option<(PathBuf, Vec<String>)>| filter.map(|(file, texts)| Filter { file, texts });
        let specs: Vec<WorkerSpec> = commands.iter().map(|command| command.0.clone()).collect();
        let template = template.map(|it| &it.0);
        if !block_on(py, async { self.runner.lock().await.loaded(template, &specs).await })? {
            return Ok(BTreeMap::new());
        }
        let programs = Programs {
            specs,
            filters: FilterOptions {
                stdout: filter(stdout_filter),
                stderr: filter(stderr_filter),
                ..FilterOptions::default()
            },
            consoles: Consoles { stdout: copy_of(stdout_fd)?, stderr: copy_of(stderr_fd)? },
            error_files,
            template,
        };
        let mut starting = pin!(async { self.runner.lock().await.start(programs).await });
        // A signal does not interrupt it: workers that run already are stopped as any others. A file system that hangs must not
        // delay it for ever.
        let runtime = handle()?;
        let in_time = detach(py, || runtime.block_on(async { timeout(START_PATIENCE, &mut starting).await.ok() }));
        match in_time {
            Some(pids) => Ok(pids),
            None => block_on(py, starting),
        }
    }

    /// Answers ``start`` of a standby: it cannot be started, for this reason. There are no more.
    fn no_standby(&self, reason: &str) {
        self.runner.blocking_lock().not_started(0, reason);
    }

    /// Answers ``start``: supervise these children of the calling process, which has started them.
    #[pyo3(signature = (pids: "dict[int, int]", *, error_files: "dict[int, str]"))]
    fn adopt(&self, pids: BTreeMap<u32, u32>, error_files: ErrorFiles) -> PyResult<()> {
        let runtime = handle()?;
        let _inside = runtime.enter();
        let adopted = Adopted::new(&pids)?;
        self.runner.blocking_lock().started(WorkerGroup::Adopted(adopted), error_files);
        Ok(())
    }

    /// Answers ``reap``: how the worker ended, as ``subprocess.Popen.returncode``, and the cause of its failure, if known.
    #[pyo3(signature = (local_rank, returncode, *, reported))]
    fn reaped(&self, local_rank: u32, returncode: i32, reported: String) {
        let exit = match returncode {
            0.. => ExitStatus::Code(returncode),
            signal => ExitStatus::Signal { signal: Signal(-signal), core_dumped: false },
        };
        self.runner.blocking_lock().reaped(local_rank, exit, reported);
    }

    /// Answers ``barrier``: the other nodes have finished, or this node stops waiting for them.
    fn all_done(&self) {
        self.runner.blocking_lock().all_done();
    }

    /// This process got a signal that ends it. A second one kills the remaining workers. The log names its
    /// sender if :func:`watch_signals` watches it.
    fn signal(&self, signal: i32) {
        self.runner.blocking_lock().signal(signal, &last_sender(signal).text());
    }

    /// This process got a signal that does not end it: :meth:`next` acts on it. For handlers, which may interrupt a call of this agent.
    fn heard(&self, signal: i32) {
        self.ear.signal(signal, &last_sender(signal).text());
    }

    /// Kill the remaining workers: the caller gives up. Not needed after ``end``.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, async { self.runner.lock().await.close().await })
    }

    /// Without a session: the world must re-form.
    fn interrupted(&self, reason: &str) {
        self.runner.blocking_lock().interrupted(reason);
    }

    /// Whose fault the outcome of an ``end`` was: ``program``, ``machine``, ``preempted`` or ``no progress``. None: nobody's, or it is
    /// not known.
    fn end_class(&self, step: &Step) -> Option<&'static str> {
        let runner::Step::End(outcome) = &step.0 else { return None };
        outcome.class(self.runner.blocking_lock().was_in_world()).map(message::EndClass::name)
    }

    /// The last round's workers that have ended, in that order.
    fn exits(&self) -> Vec<WorkerExit> {
        self.runner.blocking_lock().exits().iter().map(WorkerExit::from).collect()
    }

    /// When the last round's first failure happened, on whatever node, or when this node learned of it: in seconds since 1970. None: there
    /// was none.
    #[getter]
    fn failed_at(&self) -> Option<f64> {
        self.runner.blocking_lock().failed_at().map(seconds_since_1970)
    }

    /// Where the last round's workers may have recorded exceptions, by local rank.
    fn error_files(&self) -> BTreeMap<u32, OsString> {
        let runner = self.runner.blocking_lock();
        runner.error_files().iter().map(|(rank, file)| (*rank, file.into())).collect()
    }

    /// The number of restarts after failures: the job's, or this node's if it counts for itself.
    #[getter]
    fn restarts(&self) -> u32 {
        self.runner.blocking_lock().restarts()
    }
}

/// Have the calling process killed when the thread that started it ends: for workers that are Python functions.
#[pyfunction]
pub fn follow_parent() -> PyResult<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| std::io::Error::from(error).into())
}

/// Return the beginning of a log folder's name: the run id, without slashes and short enough for a file system, and this machine's
/// name.
#[pyfunction]
pub fn log_folder_name(run_id: &str) -> String {
    workers::folder_name(run_id)
}
