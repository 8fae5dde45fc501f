//! `Template`: the agent's end of a fork server. `Nest` and `Egg`: the fork server's own end, and its spawn requests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use elastic_rs::agent::environment;
use elastic_rs::process;
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::runtime::{block_on, detach, handle};

/// A process that has imported the workers' modules, and from which workers are forked.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Template(pub process::Template);

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
        env: BTreeMap<OsString, OsString>,
        what: String,
    ) -> PyResult<Self> {
        let (program, args) =
            command.split_first().ok_or_else(|| PyValueError::new_err("command is empty, must name a program"))?;
        let spec = process::TemplateSpec {
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
        Ok(Self(process::Template::start(spec)))
    }

    /// End it, kill the workers that were forked from it, and wait until no process of them is left.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        block_on(py, self.0.end())
    }
}

/// In the template: the fork server's state.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Nest(Mutex<Option<process::Nest>>);

#[pymethods]
impl Nest {
    /// Take the template's end of the socket that it shares with the agent: the descriptor ``fd``.
    #[new]
    fn new(fd: i32) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
        }
        // SAFETY: the caller hands it over.
        #[expect(unsafe_code, reason = "a descriptor from Python is a number; there is no safe way to take it")]
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(Mutex::new(Some(process::Nest::new(socket)))))
    }

    /// Tell the agent that everything is imported.
    fn ready(&self) -> PyResult<()> {
        self.with(|nest| nest.ready())
    }

    /// Tell the agent why no worker can be forked here. The caller ends the process then.
    fn refuse(&self, reason: &str) -> PyResult<()> {
        self.with(|nest| nest.refuse(reason))
    }

    /// Wait for the next spawn request. None once the agent has closed the socket.
    fn next_egg(&self, py: Python<'_>) -> PyResult<Option<Egg>> {
        let egg = detach(py, || self.with(process::Nest::next_egg))?;
        Ok(egg.map(|egg| Egg(Mutex::new(egg))))
    }

    /// In the template, after it has forked the guard of the requested worker.
    fn forked(&self, egg: &Egg, guard: i32) -> PyResult<()> {
        self.with(|nest| nest.forked(&mut egg.0.lock(), guard))
    }
}

impl Nest {
    fn with<T>(&self, act: impl FnOnce(&mut process::Nest) -> io::Result<T>) -> PyResult<T> {
        let mut nest = self.0.lock();
        let nest = nest.as_mut().ok_or_else(|| PyRuntimeError::new_err("this process is no template any more"))?;
        Ok(act(nest)?)
    }
}

/// In the template: a spawn request.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Egg(Mutex<process::Egg>);

#[pymethods]
impl Egg {
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

    /// In a child of the template: become the worker's guard. The caller forks the worker next.
    fn become_guard(&self, nest: &Nest) -> PyResult<()> {
        match nest.0.lock().take() {
            Some(nest) => Ok(self.0.lock().become_guard(nest)?),
            None => Err(PyRuntimeError::new_err("this process is no template any more")),
        }
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
