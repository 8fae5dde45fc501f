//! The commands of the agent's machine to its driver.

use std::collections::BTreeSet;
use std::time::Duration;

use super::policy::Outcome;
use crate::channel::message::ToWorker;
use crate::rendezvous::messages::message::{Failure, Placement, Round, Survival, Verdict};
use crate::signals::Signal;
use crate::workers::StopPolicy;

/// A command to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Find out whether a world runs, so that workers can be started before the join; answer with `on_forecast`, at most
    /// [`LOOK_LIMIT`](super::machine::LOOK_LIMIT) later.
    Look,
    /// Check this machine. The next join says that a check runs, and what it has found once that is known.
    CheckHealth,
    /// Join the next round; answer with `on_placed` or `on_no_placement`.
    Join {
        /// What became of this node's last workers.
        survival: Survival,
    },
    /// Start workers; answer with `on_started`, or with `on_worker_failed` if one cannot be started.
    Start {
        /// The round.
        placement: Box<Placement>,
        /// The workers to start. The others have parked.
        missing: BTreeSet<u32>,
    },
    /// As [`Self::Start`], for all workers of a node that has not joined yet. Their place is the one that it will probably get.
    StartAhead(Box<Placement>),
    /// Start missing workers while the others leave their world, in a place that they will probably get; answer as to [`Self::Start`]. The
    /// workers that are left are not placed.
    Replace {
        /// The expected place.
        placement: Box<Placement>,
        /// The workers to start.
        missing: BTreeSet<u32>,
    },
    /// Start a standby of the round's program; answer with `on_standby_started`,
    /// `on_standby_not_started` or `on_no_room_for_standby`.
    StartStandby(Box<Placement>),
    /// A standby takes the place of a worker. It gets its world as those that were started ahead.
    Call {
        /// The slot of the standby.
        standby: u32,
        /// Whose place.
        local_rank: u32,
    },
    /// Drop a start that has not been answered.
    CancelStart,
    /// Tell a worker its place in the world.
    SendPlacement {
        /// Which worker.
        local_rank: u32,
    },
    /// Send a worker a message.
    Send {
        /// Which worker.
        local_rank: u32,
        /// The message.
        message: Box<ToWorker>,
    },
    /// Kill one worker, and everything that it started; answer with `on_worker_gone`.
    KillWorker {
        /// Which worker.
        local_rank: u32,
    },
    /// Tell the coordinator that all workers of this node attend.
    Attending(Round),
    /// Tell the coordinator that the workers let the library make their process groups.
    NoProcessGroup(Round),
    /// Tell the coordinator that the workers save at the check, which takes longer.
    Saves(Round),
    /// Answer the coordinator's change.
    Counted {
        /// The round that is to change.
        round: Round,
        /// The largest number of a check that a worker of this node has made.
        count: u64,
    },
    /// Tell the coordinator that this node's workers have left their world at the check, and this node leaves.
    Parked(Round),
    /// Ask the coordinator for the check at which this node's workers may leave; answer with `on_leave_unanswered` if it does not
    /// answer.
    WillLeave {
        /// The round.
        round: Round,
        /// The signal that ends this agent.
        signal: i32,
    },
    /// Tell the coordinator that this machine is taken away, and have the workers save.
    Notice {
        /// The round.
        round: Round,
        /// After how long.
        left: Duration,
        /// Who says so, in words.
        reason: String,
    },
    /// Signal every worker's group, with SIGKILL after the grace; answer with `on_stopped` when nothing is left of the workers.
    Stop(StopPolicy),
    /// End the stop under way with SIGKILL, now.
    Kill,
    /// Collect the words of a worker that has failed; answer with `on_failure_message`, soon if that hangs.
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
        /// The signal that ended this agent, if one did.
        signal: Option<i32>,
    },
    /// End the job for everybody.
    Close(Verdict),
    /// Log a line for the operator.
    Log(String),
    /// Log a warning for the operator: workers are restarted.
    Warn(String),
    /// The agent has ended.
    End(Box<Outcome>),
}

/// Why a node leaves that a signal ends, for the other nodes.
pub(super) fn farewell_reason(signal: i32) -> String {
    format!("its agent got {}", Signal(signal))
}
