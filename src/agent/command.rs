//! The commands of the agent's machine to its driver.

use super::policy::Outcome;
use crate::process::{Signal, StopPolicy};
use crate::rendezvous::protocol::message::{Failure, Placement, Round, Verdict};

/// A command to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Join the next round; answer with `on_placed` or `on_no_place`.
    Join,
    /// Start all workers; answer with `on_worker_failed` if one cannot be started.
    Start(Box<Placement>),
    /// Signal every worker's group, with SIGKILL after the grace; answer with `on_stopped` when nothing is left of the workers.
    Stop(StopPolicy),
    /// End the stop under way with SIGKILL, now.
    Kill,
    /// Collect the words of a worker that has failed; answer with `on_words`, at once if that hangs.
    Listen {
        /// Which worker.
        local_rank: u32,
    },
    /// Tell the coordinator that a worker failed.
    Report(Box<Failure>),
    /// Tell the coordinator that all workers of this node have succeeded.
    Done(Round),
    /// Send the coordinator a goodbye.
    Leave {
        /// The reason, for the other nodes.
        reason: String,
        /// The signal that ended this agent.
        signal: i32,
    },
    /// End the job for everybody.
    Close(Verdict),
    /// Log a line for the operator.
    Tell(String),
    /// Log a warning for the operator: workers are restarted.
    Warn(String),
    /// The agent has ended.
    End(Box<Outcome>),
}

impl Command {
    /// The goodbye of an agent that a signal ends.
    pub(super) fn farewell(signal: i32) -> Self {
        Self::Leave { reason: format!("its agent got {}", Signal(signal)), signal }
    }
}
