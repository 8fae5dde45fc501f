//! The one tokio runtime of the process, and the one way to wait for it.

use std::future::Future;
use std::pin::pin;
use std::process;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// How often a blocked call looks for Ctrl-C and other Python signal handlers.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

struct Owned {
    runtime: Option<Runtime>,
    pid: u32,
}

static RUNTIME: Mutex<Option<Owned>> = Mutex::new(None);

/// The process's runtime, made on first use.
///
/// # Errors
/// `RuntimeError` after a fork (the runtime's threads did not survive it) and once the interpreter is shutting down.
pub fn handle() -> PyResult<Handle> {
    let mut slot = RUNTIME.lock();
    let owned = match &mut *slot {
        Some(owned) => owned,
        none => {
            let runtime = Builder::new_multi_thread()
                .worker_threads(1)
                .thread_name("elastic_rs")
                .enable_all()
                .build()
                .map_err(|error| PyRuntimeError::new_err(format!("cannot start elastic_rs's runtime: {error}")))?;
            none.insert(Owned { runtime: Some(runtime), pid: process::id() })
        }
    };
    if owned.pid != process::id() {
        return Err(PyRuntimeError::new_err(format!(
            "elastic_rs was used in process {} before it forked this one ({}): its threads do not exist here. \
             Use the spawn start method, or import and use elastic_rs only after the fork",
            owned.pid,
            process::id()
        )));
    }
    match &owned.runtime {
        Some(runtime) => Ok(runtime.handle().clone()),
        None => Err(PyRuntimeError::new_err("elastic_rs is shut down: the interpreter is exiting")),
    }
}

/// Wait for `future` with the interpreter released, running Python's signal handlers meanwhile.
///
/// # Errors
/// What a signal handler raised (Ctrl-C: `KeyboardInterrupt`; torchrun's handlers: `SignalException`); the future is dropped then.
pub fn block_on<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let handle = handle()?;
    let mut future = pin!(future);
    loop {
        let slice =
            detach(py, || handle.block_on(async { tokio::time::timeout(SIGNAL_INTERVAL, future.as_mut()).await }));
        match slice {
            Ok(output) => return Ok(output),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Stop the runtime. Called once, at interpreter exit.
///
/// Daemon threads that are in the middle of a call stay there: see [`detach`].
pub fn shutdown(py: Python<'_>) {
    GATE.lock().exiting = Some(thread::current().id());
    let runtime = match &mut *RUNTIME.lock() {
        // A copy, made by fork, of what is not this process's: its threads do not exist here.
        Some(owned) if owned.pid != process::id() => return,
        Some(owned) => owned.runtime.take(),
        None => None,
    };
    py.detach(|| {
        let deadline = Instant::now() + SHUTDOWN_LIMIT;
        let mut gate = GATE.lock();
        while gate.outside > 0 && !LEFT.wait_until(&mut gate, deadline).timed_out() {}
        drop(gate);
        if let Some(runtime) = runtime {
            runtime.shutdown_timeout(SHUTDOWN_LIMIT);
        }
    });
}

/// For a call that is under way, and for a task, when the interpreter exits.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(1);

/// Do `work` with the interpreter released.
///
/// Every call that takes time goes through here, because of daemon threads: one that asks for the interpreter back while
/// that is being finalized is ended by CPython (up to 3.13) by unwinding its stack, which aborts the process when it
/// meets Rust. So once the interpreter is exiting, a thread whose work is done stays here for the process's last moments, as
/// CPython does from 3.14 on.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let (done, _outside) = py.detach(|| {
        let outside = Outside::enter();
        let done = work();
        let exiting = GATE.lock().exiting;
        if exiting.is_some_and(|exiting| exiting != thread::current().id()) {
            drop(outside);
            loop {
                thread::park();
            }
        }
        (done, outside)
    });
    done
}

/// The threads that have let go of the interpreter and will ask for it back, and the one in which it is exiting.
struct Gate {
    outside: usize,
    exiting: Option<ThreadId>,
}

static GATE: Mutex<Gate> = Mutex::new(Gate { outside: 0, exiting: None });

/// A thread has the interpreter back, or will not ask for it.
static LEFT: Condvar = Condvar::new();

struct Outside;

impl Outside {
    fn enter() -> Self {
        GATE.lock().outside += 1;
        Outside
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        GATE.lock().outside -= 1;
        LEFT.notify_all();
    }
}
