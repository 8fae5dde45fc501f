//! Rust futures as awaitables of asyncio, on the process's runtime.
//!
//! `pyo3-async-runtimes` does the conversion. It gets our runtime, because its default one does not handle forks and interpreter
//! exits. Cancelling the awaitable drops the future.

use std::any::Any;
use std::collections::VecDeque;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3_async_runtimes::TaskLocals;
use pyo3_async_runtimes::generic::{self, ContextExt, Runtime};

use crate::runtime::handle;

/// An `asyncio.Future` for the running event loop.
///
/// The future is polled once before this returns, so that futures which wait for a lock queue in the order of the calls.
/// Its output is converted with the interpreter attached, on a thread that is not the runtime's worker.
///
/// # Errors
/// No event loop runs here, or the runtime cannot be used: see [`handle`].
pub fn awaitable<'py, F, T>(py: Python<'py>, future: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Future<Output = T> + Send + 'static,
    T: for<'any> IntoPyObject<'any> + Send + 'static,
{
    let runtime = handle()?;
    let _inside = runtime.enter();
    let locals = TaskLocals::with_running_loop(py)?;
    let mut future = Box::pin(future);
    let mut done = match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    };
    generic::future_into_py_with_locals::<Ours, _, _>(py, locals, async move {
        match done.take() {
            Some(output) => Ok(output),
            None => Ok(future.await),
        }
    })
}

/// The process's runtime, for `pyo3-async-runtimes`.
struct Ours;

impl Runtime for Ours {
    type JoinError = JoinError;
    type JoinHandle = Pin<Box<dyn Future<Output = Result<(), JoinError>> + Send>>;

    fn spawn<F: Future<Output = ()> + Send + 'static>(future: F) -> Self::JoinHandle {
        // `awaitable` has entered the runtime, and this is called from there or from a task.
        let task = tokio::spawn(future);
        Box::pin(async { task.await.map_err(JoinError) })
    }

    fn spawn_blocking<F: FnOnce() + Send + 'static>(job: F) -> Self::JoinHandle {
        deliver(Box::new(job));
        let delivered: Ready<_> = ready(Ok(()));
        Box::pin(delivered)
    }
}

impl ContextExt for Ours {
    fn scope<F, R>(_: TaskLocals, future: F) -> Pin<Box<dyn Future<Output = R> + Send>>
    where
        F: Future<Output = R> + Send + 'static,
    {
        Box::pin(future)
    }

    /// Futures here never await a Python awaitable, so they need no event loop.
    fn get_task_locals() -> Option<TaskLocals> {
        None
    }
}

struct JoinError(tokio::task::JoinError);

impl generic::JoinError for JoinError {
    fn is_panic(&self) -> bool {
        self.0.is_panic()
    }

    fn into_panic(self) -> Box<dyn Any + Send + 'static> {
        self.0.into_panic()
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Jobs that pass results to Python.
struct Deliveries {
    waiting: VecDeque<Job>,
    /// Whether a thread works on the queue.
    active: bool,
}

static DELIVERIES: Mutex<Deliveries> = Mutex::new(Deliveries { waiting: VecDeque::new(), active: false });

/// Run `job`, which waits for the interpreter, on a blocking thread. One thread runs all jobs: several would only wait for each
/// other to release the interpreter, and tokio would start hundreds.
fn deliver(job: Job) {
    let mut deliveries = DELIVERIES.lock();
    deliveries.waiting.push_back(job);
    if !deliveries.active {
        deliveries.active = true;
        tokio::task::spawn_blocking(deliver_all);
    }
}

fn deliver_all() {
    /// Lets another thread continue if jobs are left, as after a job's panic.
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            let mut deliveries = DELIVERIES.lock();
            deliveries.active = !deliveries.waiting.is_empty();
            if deliveries.active {
                tokio::task::spawn_blocking(deliver_all);
            }
        }
    }
    let _leave = Leave;
    // Attach once for all queued jobs.
    Python::attach(|_| {
        while let Some(job) = {
            let mut deliveries = DELIVERIES.lock();
            deliveries.waiting.pop_front()
        } {
            job();
        }
    });
}
