//! `start_watch`: the thread in a worker that answers its agent during a look.
//!
//! The thread takes the interpreter for each answer, and never once that is exiting: see [`crate::runtime::detach`].

use std::collections::BTreeMap;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use elastic_rs::channel::watch::{Answer, worker};
use elastic_rs::steps::worker::Steps;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::runtime::SHUTDOWN_LIMIT;

/// The process that has started the thread. 0: none has.
static STARTED: AtomicU32 = AtomicU32::new(0);
/// A step has been made, after which nothing is started any more.
static STEPPED: AtomicBool = AtomicBool::new(false);
/// Locked while the thread has or wants the interpreter.
static ASKS: Mutex<()> = Mutex::new(());
/// The interpreter is exiting.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// What the worker knows: an exception has ended its program, the flight recorders as JSON, and the members of each process group.
type Report = (bool, Vec<Vec<u8>>, BTreeMap<String, Vec<u32>>);

/// Start the thread that answers the agent at ``address`` during a look, with what ``report`` returns: whether an exception has ended the
/// program, the flight recorders as JSON, and the global ranks of each process group by name.
///
/// Does nothing if the process, or one from which it was forked, has started it.
#[pyfunction]
pub fn start_watch(address: String, report: Py<PyAny>) {
    if STARTED.compare_exchange(0, process::id(), Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        worker::start(address, move |has_gil| answer(&report, has_gil));
    }
}

/// The bytes of an answer. Calls `has_gil` once it has the interpreter. `None`: that is exiting.
fn answer(report: &Py<PyAny>, has_gil: &mut dyn FnMut()) -> Option<Vec<u8>> {
    let _asks = ASKS.lock();
    if CLOSED.load(Ordering::Relaxed) {
        return None;
    }
    let reported = Python::try_attach(|py| {
        has_gil();
        let reported = report.call0(py).and_then(|reported| reported.extract::<Report>(py));
        reported.map_err(|error| error.to_string())
    })?;
    let (raised, recorders, members) = match reported {
        Ok(reported) => reported,
        Err(problem) => return Some(Answer { problem: Some(problem), ..Answer::default() }.encode()),
    };
    let members = members.into_iter().map(|(name, ranks)| (name, ranks.into_iter().collect())).collect();
    let recorders = recorders.iter().map(Vec::as_slice).collect();
    Some(Answer { raised, members, recorders, problem: None }.encode())
}

/// The worker has made a step: if an agent asks this process, have it answer. It may have imported torch before it had its variables, or
/// never.
#[inline]
pub fn on_step(py: Python<'_>) {
    if !STEPPED.load(Ordering::Relaxed) {
        start_on_step(py);
    }
}

#[cold]
fn start_on_step(py: Python<'_>) {
    if !STEPPED.swap(true, Ordering::Relaxed) && Steps::of_this_process().is_some() {
        // Without it, training goes on as well.
        let started = py.import("elastic_rs._watch").and_then(|module| module.call_method0("start"));
        drop(started);
    }
}

/// Do not let the thread take the interpreter any more. Called once, at interpreter exit.
pub fn shutdown(py: Python<'_>) {
    // In a forked child the thread does not exist, and what it had locked stays locked.
    if STARTED.load(Ordering::Relaxed) == process::id() {
        CLOSED.store(true, Ordering::Relaxed);
        py.detach(|| drop(ASKS.try_lock_for(SHUTDOWN_LIMIT)));
    }
}
