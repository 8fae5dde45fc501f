//! The one tokio runtime of the process, and the one way to wait for it.

use std::future::Future;
use std::pin::pin;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
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

/// How many threads wait in [`block_on`].
static WAITING: AtomicUsize = AtomicUsize::new(0);

struct Waiting;

impl Waiting {
    fn begin() -> Self {
        WAITING.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::SeqCst);
    }
}

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
    let _waiting = Waiting::begin();
    let mut future = pin!(future);
    loop {
        let slice =
            py.detach(|| handle.block_on(async { tokio::time::timeout(SIGNAL_INTERVAL, future.as_mut()).await }));
        match slice {
            Ok(output) => return Ok(output),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Stop the runtime. Called once, at interpreter exit.
///
/// If a daemon thread still waits for it, the runtime is left to the process's end: such a thread would panic without it.
pub fn shutdown(py: Python<'_>) {
    let runtime =
        RUNTIME.lock().as_mut().filter(|owned| owned.pid == process::id()).and_then(|owned| owned.runtime.take());
    if let Some(runtime) = runtime {
        if WAITING.load(Ordering::SeqCst) > 0 {
            std::mem::forget(runtime);
            return;
        }
        py.detach(|| runtime.shutdown_timeout(Duration::from_secs(1)));
    }
}
