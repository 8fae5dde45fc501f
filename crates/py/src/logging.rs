//! Passes log records of Rust threads to Python's `logging`. Those threads never wait for the interpreter.
//!
//! A store's thread must answer while a Python thread holds the interpreter: PyTorch's client holds it during `list_keys`.
//! So records are queued, and one thread passes them on. The first record starts that thread. A process that logs nothing has
//! no thread of ours and can be forked, as warm starts fork workers from a process that has imported this module.
//!
//! `logging` is imported with this module, and not by the thread: it imports `threading`, and up to Python 3.12 the first thread to do
//! that is the main thread.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use elastic_rs::threads;
use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3_log::{Caching, Logger};

/// Limit of queued records. Further records are dropped. Nothing here logs per request.
const QUEUED: usize = 4096;

enum Item {
    Record { level: Level, target: String, message: String },
    Stop,
}

struct Queue(SyncSender<Item>);

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        let admitted = target == JOB || metadata.level() as usize <= LEVEL.load(Ordering::Relaxed);
        admitted && target.starts_with("elastic_rs")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let (level, target) = (record.level(), record.target().to_owned());
            // The queue is full only if Python has not run for a long time. Losing a record is better than waiting for it.
            let _: Result<(), TrySendError<Item>> =
                self.0.try_send(Item::Record { level, target, message: record.args().to_string() });
            if !STARTED.load(Ordering::Relaxed) {
                start();
            }
        }
    }

    fn flush(&self) {}
}

/// The thread that passes records on.
enum Thread {
    /// Not started: there has been no record.
    Waiting {
        queue: SyncSender<Item>,
        records: Receiver<Item>,
        logger: Logger,
    },
    Running {
        queue: SyncSender<Item>,
        thread: JoinHandle<()>,
        pid: u32,
    },
}

/// What a job's person wants to read also where only warnings are shown: who is who, and what a recovery has cost.
const JOB: &str = "elastic_rs::job";
/// The level of all other records, as a number of [`LevelFilter`].
static LEVEL: AtomicUsize = AtomicUsize::new(LevelFilter::Trace as usize);

static THREAD: Mutex<Option<Thread>> = Mutex::new(None);
/// Whether the thread was started, or must no longer be started.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Install the queue as this library's logger.
pub fn install(py: Python<'_>) -> PyResult<()> {
    let (queue, records) = sync_channel(QUEUED);
    if log::set_boxed_logger(Box::new(Queue(queue.clone()))).is_err() {
        // The module was imported a second time in this process. The first queue stays in use.
        return Ok(());
    }
    let logger = Logger::new(py, Caching::Nothing)?.filter(LevelFilter::Trace);
    reset_levels(py)?;
    *THREAD.lock() = Some(Thread::Waiting { queue, records, logger });
    Ok(())
}

/// Start the thread, once.
fn start() {
    let mut slot = THREAD.lock();
    if STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    *slot = match slot.take() {
        Some(Thread::Waiting { queue, records, logger }) => {
            let run = move || pass_on(&records, &logger);
            // If the thread cannot be started, the process continues without log records.
            let started = threads::spawn("elastic_rs-log".to_owned(), run).ok();
            started.map(|thread| Thread::Running { queue, thread, pid: process::id() })
        }
        other => other,
    };
}

/// Adopt the levels of Python's loggers `elastic_rs` and `elastic_rs.job`: records below them are not queued.
pub fn reset_levels(py: Python<'_>) -> PyResult<()> {
    let (all, job) = (level_of(py, "elastic_rs")?, level_of(py, "elastic_rs.job")?);
    LEVEL.store(all as usize, Ordering::Relaxed);
    log::set_max_level(all.max(job));
    Ok(())
}

fn level_of(py: Python<'_>, logger: &str) -> PyResult<LevelFilter> {
    let logger = py.import("logging")?.call_method1("getLogger", (logger,))?;
    Ok(match logger.call_method0("getEffectiveLevel")?.extract::<u32>()? {
        0..=5 => LevelFilter::Trace,
        6..=10 => LevelFilter::Debug,
        11..=20 => LevelFilter::Info,
        21..=30 => LevelFilter::Warn,
        31..=50 => LevelFilter::Error,
        _ => LevelFilter::Off,
    })
}

/// Pass on the queued records and end the thread. Called once, at interpreter exit, after the runtime has stopped.
pub fn shutdown(py: Python<'_>) {
    log::set_max_level(LevelFilter::Off);
    STARTED.store(true, Ordering::Relaxed);
    // After a fork the thread is the parent's.
    if let Some(Thread::Running { queue, thread, pid }) = THREAD.lock().take()
        && pid == process::id()
    {
        py.detach(|| {
            let _ = queue.send(Item::Stop);
            let _ = thread.join();
        });
    }
}

fn pass_on(records: &Receiver<Item>, logger: &Logger) {
    while let Ok(Item::Record { level, target, message }) = records.recv() {
        // Attach per record, so that the interpreter is free while the thread waits for the next one.
        Python::attach(|_| {
            logger.log(&Record::builder().level(level).target(&target).args(format_args!("{message}")).build());
        });
    }
}
