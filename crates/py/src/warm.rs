//! `Template`: the agent's end of a fork server. `ForkServer` and `SpawnRequest`: the server's own end, and what it receives.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use elastic_rs::agent::environment;
use elastic_rs::channel::watch::WATCH;
use elastic_rs::warm;
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::runtime::{block_on, detach, handle};

/// A process that has imported the workers' modules, and from which workers are forked.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Template(pub warm::Template);

#[pymethods]
impl Template {
    /// Start it in the background. ``command`` is the workers' program and arguments, of which ``fixed`` are the same for every worker.
    /// ``begin`` precedes the arguments. ``env`` is the environment that workers inherit. ``what`` names the modules, for the log.
    ///
    /// Raises ``ValueError`` for a command without a program.
    #[new]
    #[pyo3(signature = (command, *, begin, fixed, env, what))]
    fn new(
        command: Vec<OsString>,
        begin: Vec<OsString>,
        fixed: usize,
        mut env: BTreeMap<OsString, OsString>,
        what: String,
    ) -> PyResult<Self> {
        env.remove(OsStr::new(WATCH)); // a thread that answers another agent would make its forks useless
        let (program, args) =
            command.split_first().ok_or_else(|| PyValueError::new_err("command is empty, must name a program"))?;
        let spec = warm::TemplateSpec {
            program: program.clone(),
            begin,
            args: args.to_vec(),
            fixed,
            env,
            varies: environment::VARIES.iter().map(Into::into).collect(),
            cwd: None,
            what,
        };
        let runtime = handle()?;
        let _inside = runtime.enter();
        Ok(Self(warm::Template::start(spec)))
    }

    /// End it, kill the workers that were forked from it, and wait until no process of them is left.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.0.end())
    }
}

/// In the fork server: its state.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct ForkServer(Mutex<Option<warm::ForkServer>>);

#[pymethods]
impl ForkServer {
    /// Take the server's end of the socket that it shares with the agent: the descriptor ``fd``.
    #[new]
    fn new(fd: i32) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
        }
        // SAFETY: the caller hands it over.
        #[expect(unsafe_code, reason = "a descriptor from Python is a number; there is no safe way to take it")]
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(Mutex::new(Some(warm::ForkServer::new(socket)))))
    }

    /// Report to the agent that everything is imported.
    fn ready(&self) -> PyResult<()> {
        self.with(|server| server.ready())
    }

    /// Report to the agent why no worker can be forked here. The caller ends the process then.
    fn refuse(&self, reason: &str) -> PyResult<()> {
        self.with(|server| server.refuse(reason))
    }

    /// Wait for the next spawn request. None once the agent has closed the socket.
    fn next_request(&self, py: Python<'_>) -> PyResult<Option<SpawnRequest>> {
        let request = detach(py, || self.with(warm::ForkServer::next_request))?;
        Ok(request.map(|request| SpawnRequest(Mutex::new(request))))
    }

    /// In the fork server, after it has forked ``guard``, the guard of the requested worker.
    fn forked(&self, request: &SpawnRequest, guard: i32) -> PyResult<()> {
        self.with(|server| server.forked(&mut request.0.lock(), guard))
    }

    /// In a child of the fork server: become the guard of the requested worker. The caller forks the worker next.
    fn become_guard(&self, request: &SpawnRequest) -> PyResult<()> {
        let server = self.0.lock().take().ok_or_else(no_server)?;
        Ok(server.become_guard(&mut request.0.lock())?)
    }
}

impl ForkServer {
    fn with<T>(&self, act: impl FnOnce(&mut warm::ForkServer) -> io::Result<T>) -> PyResult<T> {
        let mut server = self.0.lock();
        Ok(act(server.as_mut().ok_or_else(no_server)?)?)
    }
}

fn no_server() -> PyErr {
    PyRuntimeError::new_err("this process is no fork server any more")
}

/// In the fork server: a request to fork a worker.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct SpawnRequest(Mutex<warm::SpawnRequest>);

#[pymethods]
impl SpawnRequest {
    /// The worker's program and arguments.
    #[getter]
    fn argv(&self) -> Vec<OsString> {
        self.0.lock().argv()
    }

    /// The worker's whole environment.
    #[getter]
    fn env(&self) -> BTreeMap<OsString, OsString> {
        self.0.lock().env()
    }

    /// In the guard: supervise its child ``worker`` (-1: there is none) until no process of it is left. Does not return.
    fn watch(&self, worker: i32) -> PyResult<()> {
        Err(self.0.lock().watch(worker).into())
    }

    /// In the guard's child: become the worker, with its session, streams and folder.
    fn become_worker(&self) -> PyResult<()> {
        Ok(self.0.lock().become_worker()?)
    }

    /// In the worker, once its variables are set: make ``ps`` and ``/proc`` show them and its command.
    fn show(&self) {
        // SAFETY: Python has copied its arguments, and setting a variable copies it. What a library keeps of what `getenv` has
        // returned is text in place of other text.
        #[expect(unsafe_code, reason = "what `/proc` shows is memory of this process")]
        unsafe {
            self.0.lock().show();
        }
    }
}
