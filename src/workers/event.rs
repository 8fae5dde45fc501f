//! What happens to the workers of a group.

use std::time::{Duration, Instant, SystemTime};

use super::exit::ExitStatus;

/// An event of a group of workers.
#[derive(Debug)]
pub enum Event {
    /// A worker has ended, or dies. If it has failed, its process group and its other descendants are being killed. Its last words can be
    /// read at its [`Group::stderr_end`](super::group::Group::stderr_end).
    Exited(WorkerExit),
    /// Nothing of a worker is left: no descendant, and no unread output.
    Gone {
        /// Which worker.
        local_rank: u32,
    },
    /// A worker that was asked to end has not, and is killed [`DUMP_BEFORE_KILL`](super::stop::DUMP_BEFORE_KILL) later.
    Overdue {
        /// Which worker.
        local_rank: u32,
        /// Its process id.
        pid: u32,
    },
    /// A worker could not be ended. The group stops waiting for it.
    Stuck(Left),
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerExit {
    /// Which worker.
    pub local_rank: u32,
    /// Its process id. It may have been reused by now.
    pub pid: u32,
    /// How it ended.
    pub exit: ExitStatus,
    /// When the agent learned of it.
    pub at: Instant,
    /// How much earlier its guard saw it end. `None`: it has no guard, or the guard was killed.
    pub late: Option<Duration>,
    /// A signal of a stop has ended it.
    pub stopped: bool,
}

impl WorkerExit {
    /// When it ended, on the clock that shows the time of day.
    pub fn wall(&self) -> SystemTime {
        let ago = self.at.elapsed() + self.late.unwrap_or_default();
        SystemTime::now().checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// A worker that SIGKILL has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// Which worker.
    pub local_rank: u32,
    /// Its process id.
    pub pid: u32,
    /// The kernel's letter for its state: `D` is uninterruptible sleep. `None` if the worker has ended, but a descendant has not.
    pub state: Option<char>,
    /// How long the stop had taken when the group gave up.
    pub waited: Duration,
}

/// The result of a stop.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Workers whose ends had not been reported before.
    pub exited: Vec<WorkerExit>,
    /// Workers that are stuck.
    pub left: Vec<Left>,
}
