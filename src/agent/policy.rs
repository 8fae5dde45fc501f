//! An agent's settings, and its possible outcomes.

use std::ffi::OsString;
use std::time::Duration;

use super::environment::Workers;
use super::{health, notices};
use crate::hang::judge;
use crate::rendezvous::conf::InPlace;
use crate::rendezvous::messages::message::{EndClass, Failure};
use crate::rendezvous::node::JoinError;
use crate::signals::{FirstSignal, Meanings};
use crate::workers::ProgressPattern;

/// The signal with which schedulers end processes.
pub(super) const SIGTERM: i32 = 15;

/// Who counts restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// The coordinator, for the whole job: one failure costs one restart, wherever it was. Default.
    Job,
    /// This agent, for its own workers, as PyTorch does: this number of restarts is left. Also without a coordinator.
    Node(u32),
}

/// The settings of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Who counts restarts.
    pub budget: Budget,
    /// Workers that this node offers. Above zero. A placement may ask for fewer.
    pub workers: u32,
    /// Restarts that the job may have, as far as this node knows. The coordinator decides.
    pub max_restarts: u32,
    /// How long workers may take to end after the stop signal, on every path. Default 30 s, as PyTorch's.
    pub grace: Duration,
    /// Who gets the stop signal. Default: each worker's process group.
    pub first_signal: FirstSignal,
    /// How long to wait for the other nodes' workers once all of ours have succeeded. Default `None`: for as long as they run.
    /// PyTorch's agent gives up after 300 s, although rank 0 may take longer to write its last checkpoint.
    pub exit_barrier_timeout: Option<Duration>,
    /// Workers that attend survive the end of their world: see [`super::machine`]. Default true.
    pub in_place: bool,
    /// Standbys that this node keeps: see [`super::machine`]. Default 0.
    pub standbys: u32,
    /// A standby takes the place of a worker that is known to die, before its memory is freed. Default true; false if that is a device's.
    pub replaces_dying: bool,
    /// Workers get a signal of the user's choice when a machine of the job is about to be taken away, and save by it. Default false.
    pub saves_by_signal: bool,
    /// This machine is checked before it joins for the first time, and after a failure of a worker of its own. Default false.
    pub checks_health: bool,
}

/// What a front end gives its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentOptions {
    /// This node's name in messages: `host:pid`.
    pub name: String,
    /// The name of the workers in logs and in the final report: the script.
    pub entrypoint: String,
    /// What is the same for all workers in every round.
    pub workers: Workers,
    /// Who counts restarts.
    pub budget: Budget,
    /// As of [`Policy`].
    pub grace: Duration,
    /// As of [`Policy`].
    pub first_signal: FirstSignal,
    /// Which signals do not end this agent.
    pub signals: Meanings,
    /// How it learns that its machine is about to be taken away.
    pub notices: notices::Options,
    /// What is checked before it joins. `None`: nothing is.
    pub health: Option<health::Options>,
    /// As of [`Policy`].
    pub exit_barrier_timeout: Option<Duration>,
    /// Fail the job when a worker sleeps uninterruptibly for this long: it holds a device that a new worker could not use either.
    /// Zero: no limit.
    pub uninterruptible_sleep: Duration,
    /// Which workers may survive the end of their world.
    pub in_place: InPlace,
    /// How many standbys this node keeps, at most as many as workers. Default 0.
    pub standbys: u32,
    /// How hangs are judged: by the coordinator, which is told when the workers make no step, or by this agent if there is none. Unless
    /// nobody does, a thread of each worker answers what its collectives are, which torch records.
    pub hang: judge::Options,
    /// What a shell runs when a hang is found: on rank 0's node, or on each that judges its own workers. Default none.
    pub on_hang: Option<OsString>,
    /// Lines of workers that match show progress, as steps do. Default none.
    pub progress_log: Option<ProgressPattern>,
}

impl AgentOptions {
    /// What the agent's machine decides by.
    pub fn policy(&self) -> Policy {
        Policy {
            budget: self.budget,
            workers: self.workers.local_world_size,
            max_restarts: self.workers.max_restarts,
            grace: self.grace,
            first_signal: self.first_signal,
            exit_barrier_timeout: self.exit_barrier_timeout,
            in_place: self.in_place != InPlace::Off,
            standbys: if self.in_place == InPlace::Off || self.workers.virtual_local_rank {
                0
            } else {
                self.standbys.min(self.workers.local_world_size)
            },
            replaces_dying: self.in_place != InPlace::Nccl,
            saves_by_signal: self.notices.signal.is_some(),
            checks_health: self.health.is_some(),
        }
    }
}

/// How an agent's work ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All workers of this node succeeded.
    Succeeded,
    /// The job ended well without this node: it was a spare.
    NotNeeded,
    /// The job failed and no restart is left.
    Failed {
        /// The root cause, on whatever node. `None` if the job was closed without a report of a worker's failure.
        cause: Option<Box<Failure>>,
        /// The reason, in words.
        reason: String,
        /// Whose fault it was.
        class: EndClass,
    },
    /// Only this node has failed: its workers cannot take part, and the job goes on without it.
    Unfit {
        /// What one of its workers has met.
        cause: Box<Failure>,
        /// The reason, in words.
        reason: String,
    },
    /// The rendezvous could not be joined.
    NoPlacement(JoinError),
    /// A signal ended the agent.
    Signal(i32),
}

impl Outcome {
    /// Whose fault it was, if that is known. `was_in_world`: the node had been a member of a round.
    pub fn class(&self, was_in_world: bool) -> Option<EndClass> {
        match self {
            Self::Succeeded | Self::NotNeeded => None,
            Self::Failed { class, .. } => Some(*class),
            Self::Unfit { .. } => Some(EndClass::Program),
            Self::NoPlacement(error) => error.class(was_in_world),
            // Schedulers take machines back with this one. Others are a person's.
            Self::Signal(signal) => (*signal == SIGTERM).then_some(EndClass::Preempted),
        }
    }
}
