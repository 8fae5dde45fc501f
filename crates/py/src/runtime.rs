//! The process's tokio runtime, and how Python threads wait for its futures.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::panic;
use std::pin::{Pin, pin};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use elastic_rs::threads;
use parking_lot::{Condvar, Mutex, MutexGuard};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

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
                .on_thread_start(threads::take_no_signals)
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
/// The thread polls the future itself and sleeps in `poll(2)`, which a signal interrupts. A signal does not wake tokio's own
/// `block_on`.
///
/// # Errors
/// The exception that a signal handler raised (Ctrl-C: `KeyboardInterrupt`; torchrun's handlers: `SignalException`). The future
/// is then dropped.
pub fn block_on<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let handle = handle()?;
    let mut future = pin!(future);
    let waiting = Waiting::begin()?;
    let mut looks = Looks::of_this_thread();
    loop {
        let wait = || {
            let _inside = handle.enter();
            waiting.wait(future.as_mut(), &mut looks, None)
        };
        match detach(py, wait) {
            Some(output) => return Ok(output),
            None => py.check_signals()?,
        }
    }
}

/// Like [`block_on`], but makes no runtime: for a future that a thread of its own wakes. `None` if it is not ready within the limit.
///
/// # Errors
/// As [`block_on`].
pub fn block_without_runtime<F>(py: Python<'_>, future: F, limit: Option<Duration>) -> PyResult<Option<F::Output>>
where
    F: Future + Send,
    F::Output: Send,
{
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut future = pin!(future);
    let waiting = Waiting::begin()?;
    let mut looks = Looks::of_this_thread();
    loop {
        if let Some(output) = detach(py, || waiting.wait(future.as_mut(), &mut looks, deadline)) {
            return Ok(Some(output));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Like [`block_on`], for a future that handles many events before it is ready: the runtime's thread polls it, so that not every
/// event wakes the calling thread.
///
/// # Errors
/// As [`block_on`]. The future is then dropped soon, by the runtime's thread.
pub fn block_on_task<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    /// Aborts the task when dropped: nobody will take its output.
    struct Task<T>(JoinHandle<T>);
    impl<T> Drop for Task<T> {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
    let mut task = Task(handle()?.spawn(future));
    match block_on(py, async { (&mut task.0).await })? {
        Ok(output) => Ok(output),
        Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
        Err(_) => Err(PyRuntimeError::new_err("elastic_rs is shut down: the interpreter is exiting")),
    }
}

/// When a waiting thread checks for signals that did not interrupt it.
enum Looks {
    /// Not at all: only the main thread runs Python's handlers.
    Never,
    /// Soon, because the future has just run: a signal that came before the thread slept did not interrupt it.
    Soon,
    /// Now and then, because the system may deliver a signal to a thread that is neither this one nor ours: ours block signals.
    Late,
}

impl Looks {
    fn of_this_thread() -> Self {
        if rustix::thread::gettid() == rustix::process::getpid() { Self::Soon } else { Self::Never }
    }

    fn limit(&self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Soon => Some(Duration::from_millis(10)),
            Self::Late => Some(Duration::from_secs(2)),
        }
    }

    fn ran(&mut self) {
        if matches!(self, Self::Late) {
            *self = Self::Soon;
        }
    }

    fn looked(&mut self) {
        if matches!(self, Self::Soon) {
            *self = Self::Late;
        }
    }
}

/// The waker of a thread that waits in `poll(2)`.
struct Waiter {
    event: OwnedFd,
    woken: AtomicBool,
}

impl Wake for Waiter {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full, and then the thread wakes anyway.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

thread_local! {
    /// The waker of this thread's last wait, for its next one. A signal handler that waits during a wait finds none and makes one.
    static SPARE: Cell<Option<Arc<Waiter>>> = const { Cell::new(None) };
}

/// A thread in [`block_on`]. It is registered in [`GATE`], so that the interpreter's exit wakes it.
struct Waiting(Arc<Waiter>);

impl Waiting {
    fn begin() -> PyResult<Self> {
        let waiter = match SPARE.take() {
            Some(waiter) => waiter,
            None => {
                let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
                Arc::new(Waiter { event, woken: AtomicBool::new(false) })
            }
        };
        Gate::lock().waiters.push(waiter.clone());
        Ok(Self(waiter))
    }

    /// Poll the future until it is ready. `None` when signals must be checked, at the deadline, and when the interpreter exits.
    fn wait<F: Future>(
        &self,
        mut future: Pin<&mut F>,
        looks: &mut Looks,
        deadline: Option<Instant>,
    ) -> Option<F::Output> {
        let waker = std::task::Waker::from(self.0.clone());
        let mut context = Context::from_waker(&waker);
        loop {
            if is_exiting_elsewhere() {
                return None; // the runtime is being shut down, and polling a future could panic
            }
            self.0.woken.swap(false, Ordering::AcqRel);
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return Some(output);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !self.sleep([looks.limit(), left].into_iter().flatten().min()) {
                looks.looked();
                return None;
            }
            looks.ran();
        }
    }

    /// Sleep until woken. False if a signal or the limit ended the sleep.
    fn sleep(&self, limit: Option<Duration>) -> bool {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut fds = [PollFd::new(&self.0.event, PollFlags::IN)];
        let woken = matches!(poll(&mut fds, limit.as_ref()), Ok(1..));
        if woken {
            // There is something to read, because only this thread reads the counter.
            let _ = rustix::io::read(&self.0.event, &mut [0; 8]);
        }
        woken
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        GATE.lock().waiters.retain(|waiter| !Arc::ptr_eq(waiter, &self.0));
        SPARE.set(Some(self.0.clone()));
    }
}

/// Stop the runtime. Called once, at interpreter exit.
///
/// Daemon threads do not return from calls that are under way: see [`detach`].
pub fn shutdown(py: Python<'_>) {
    {
        let mut gate = Gate::lock();
        gate.exiting = Some(thread::current().id());
        gate.waiters.iter().for_each(Wake::wake_by_ref);
    }
    let runtime = match &mut *RUNTIME.lock() {
        // The parent's runtime, copied by a fork: its threads do not exist here.
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

/// How long the interpreter's exit waits for calls that are under way, and then for the runtime's threads.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(1);

/// Do `work` with the interpreter released.
///
/// Every call that takes time must use this function, because of daemon threads. When such a thread asks for the interpreter
/// while that is being finalized, CPython up to 3.13 unwinds the thread's stack. Unwinding into Rust aborts the process. So once
/// the interpreter is exiting, a thread that has done its work stays in this function, as it would in CPython from 3.14 on.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let (done, _outside) = py.detach(|| {
        let outside = Outside::enter();
        let done = work();
        if is_exiting_elsewhere() {
            drop(outside);
            loop {
                thread::park();
            }
        }
        (done, outside)
    });
    done
}

/// The threads that are in [`detach`], and the interpreter's exit.
struct Gate {
    /// The process whose threads they are.
    pid: u32,
    /// How many threads have released the interpreter and will ask for it again.
    outside: usize,
    /// The wakers of the threads in [`block_on`].
    waiters: Vec<Arc<Waiter>>,
    /// The thread in which the interpreter is exiting.
    exiting: Option<ThreadId>,
}

static GATE: Mutex<Gate> = Mutex::new(Gate::of(0));

impl Gate {
    const fn of(pid: u32) -> Self {
        Self { pid, outside: 0, waiters: Vec::new(), exiting: None }
    }

    /// The gate of this process: after a fork it has none of the parent's threads, for which an exit would wait.
    fn lock() -> MutexGuard<'static, Self> {
        let mut gate = GATE.lock();
        if gate.pid != process::id() {
            *gate = Self::of(process::id());
        }
        gate
    }
}

/// Whether the interpreter is exiting in another thread.
fn is_exiting_elsewhere() -> bool {
    let exiting = GATE.lock().exiting;
    exiting.is_some_and(|exiting| exiting != thread::current().id())
}

/// Notified when [`Gate::outside`] falls.
static LEFT: Condvar = Condvar::new();

/// A thread that [`Gate::outside`] counts.
struct Outside;

impl Outside {
    fn enter() -> Self {
        Gate::lock().outside += 1;
        Outside
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        GATE.lock().outside -= 1;
        LEFT.notify_all();
    }
}
