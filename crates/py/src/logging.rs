//! Log records of Rust threads become records of Python's `logging`, without those threads ever waiting for the interpreter.
//!
//! A store's thread must answer while a Python thread holds the interpreter: PyTorch's client holds it during `list_keys`.
//! So records are queued, and one thread hands them over. The first record starts it: a process that logs nothing has no thread
//! of ours, and can be forked (warm starts fork workers from one that has imported this).

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use elastic_rs::threads;
use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3_log::{Caching, Logger};

/// Records that may wait for the interpreter; beyond that they are dropped. Nothing here logs per request.
const QUEUED: usize = 4096;

enum Item {
    Record { level: Level, target: String, message: String },
    Stop,
}

struct Queue(SyncSender<Item>);

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("elastic_rs")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let (level, target) = (record.level(), record.target().to_owned());
            // A full queue means that Python has not run for a long time; the record is the lesser loss.
            let _: Result<(), TrySendError<Item>> =
                self.0.try_send(Item::Record { level, target, message: record.args().to_string() });
            if !STARTED.load(Ordering::Relaxed) {
                start();
            }
        }
    }

    fn flush(&self) {}
}

/// Who hands records over.
enum Thread {
    /// Nobody yet: there has been no record.
    Waiting {
        queue: SyncSender<Item>,
        records: Receiver<Item>,
        logger: Box<Logger>,
    },
    Running {
        queue: SyncSender<Item>,
        thread: JoinHandle<()>,
        pid: u32,
    },
}

static THREAD: Mutex<Option<Thread>> = Mutex::new(None);
/// Whether somebody has begun to, or need not any more.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Install the queue as this library's logger.
pub fn install(py: Python<'_>) -> PyResult<()> {
    let (queue, records) = sync_channel(QUEUED);
    if log::set_boxed_logger(Box::new(Queue(queue.clone()))).is_err() {
        // The module was imported a second time in this process: the first queue goes on.
        return Ok(());
    }
    reset_levels(py)?;
    let logger = Box::new(Logger::new(py, Caching::Nothing)?.filter(LevelFilter::Trace));
    *THREAD.lock() = Some(Thread::Waiting { queue, records, logger });
    Ok(())
}

/// Start handing over, once.
fn start() {
    let mut slot = THREAD.lock();
    if STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    *slot = match slot.take() {
        Some(Thread::Waiting { queue, records, logger }) => {
            let run = move || hand_over(&records, &logger);
            // Without a thread for it there are no records; what the process is for goes on.
            let started = threads::spawn("elastic_rs-log".to_owned(), run).ok();
            started.map(|thread| Thread::Running { queue, thread, pid: process::id() })
        }
        other => other,
    };
}

/// Take over the level of Python's logger `elastic_rs`: what it would not show is not even queued.
pub fn reset_levels(py: Python<'_>) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("elastic_rs",))?;
    let level: u32 = logger.call_method0("getEffectiveLevel")?.extract()?;
    log::set_max_level(match level {
        0..=5 => LevelFilter::Trace,
        6..=10 => LevelFilter::Debug,
        11..=20 => LevelFilter::Info,
        21..=30 => LevelFilter::Warn,
        31..=50 => LevelFilter::Error,
        _ => LevelFilter::Off,
    });
    Ok(())
}

/// Hand over what is queued and end the thread. Called once, at interpreter exit, after the runtime has stopped.
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

fn hand_over(records: &Receiver<Item>, logger: &Logger) {
    while let Ok(Item::Record { level, target, message }) = records.recv() {
        // The interpreter is attached to for the record's sake, and only here.
        Python::attach(|_| {
            logger.log(&Record::builder().level(level).target(&target).args(format_args!("{message}")).build());
        });
    }
}
