//! What the agent's machine asks of its driver.

use super::policy::Outcome;
use crate::process::{Signal, StopPolicy};
use crate::rendezvous::protocol::message::{Failure, Placement, Round, Verdict};

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ask for a place in the next round; answer with `on_placed` or `on_no_place`.
    Join,
    /// Start all workers; answer with `on_worker_failed` if one cannot be started.
    Start(Box<Placement>),
    /// Signal every worker's group, SIGKILL after the grace; answer with `on_stopped` when nothing is left of them.
    Stop(StopPolicy),
    /// End the stop under way with SIGKILL, now.
    Kill,
    /// Find out what a worker that has failed said; answer with `on_words`, at once when finding out hangs.
    Listen {
        /// Which worker.
        local_rank: u32,
    },
    /// Tell the coordinator that a worker failed.
    Report(Box<Failure>),
    /// Tell the coordinator that all workers of this node have succeeded.
    Done(Round),
    /// Say goodbye to the coordinator.
    Leave {
        /// Why, for the others.
        reason: String,
        /// The signal that ended this agent.
        signal: i32,
    },
    /// End the job for everybody.
    Close(Verdict),
    /// For the operator.
    Tell(String),
    /// For the operator, of what they did not ask for: workers are restarted.
    Warn(String),
    /// There is nothing more to do.
    End(Box<Outcome>),
}

impl Command {
    /// What the others are told of this node's going.
    pub(super) fn farewell(signal: i32) -> Self {
        Self::Leave { reason: format!("its agent got {}", Signal(signal)), signal }
    }
}
