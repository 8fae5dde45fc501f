//! One event of a run, with its causes.

use serde::{Deserialize, Serialize};

pub use super::hang::{HANG_RANKS_LIMIT, Hang};
pub use super::phases::{FirstStep, LONGEST_US, Phase};

/// Number of an event: 1 for a run's first one, without gaps. An event's causes have smaller numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Number(pub u64);

/// Most causes that an event names.
pub const CAUSES_LIMIT: usize = 4;

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub number: Number,
    /// The events without which this one would not have happened. Empty: it is a root.
    pub causes: Vec<Number>,
    /// The run's round, when it happened.
    pub round: u64,
    /// The job's restart number, when it happened.
    pub restart: u32,
    /// The name of the node that it is about, if it is about one.
    pub node: Option<String>,
    /// What happened.
    pub kind: Kind,
    /// The sentence for the log. `None`: another event's sentence says it.
    pub text: Option<String>,
}

/// What happened. Serialised as the fields `type` and `data`: variants and fields are only added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "type", content = "data")]
pub enum Kind {
    /// The first node has come.
    #[serde(rename = "run.opened")]
    RunOpened {
        /// Fewest nodes of a world.
        min_nodes: u32,
        /// Most nodes of a world.
        max_nodes: u32,
        /// The job's budget of restarts. `None`: each node counts its own.
        max_restarts: Option<u32>,
    },
    /// The rendezvous is closed.
    #[serde(rename = "run.closed")]
    RunClosed {
        /// How the job ended.
        verdict: Ending,
    },
    /// A node asks for a rank.
    #[serde(rename = "node.joined")]
    NodeJoined {
        /// The address at which other nodes look for it.
        address: String,
        /// Number of its workers, if it reports that.
        workers: Option<u32>,
        /// It was no member of the last world.
        new: bool,
    },
    /// A node has left, and said so.
    #[serde(rename = "node.left")]
    NodeLeft {
        /// The signal that ended its agent, if one did.
        signal: Option<i32>,
    },
    /// A node is about to leave: its workers stop with the others.
    #[serde(rename = "node.leaves")]
    NodeLeaves {},
    /// A node was lost, since it sent nothing for too long, its connection did not come back, or its machine was taken away.
    #[serde(rename = "node.lost")]
    NodeLost {
        /// What ended.
        how: Loss,
        /// Milliseconds since it last sent something, if they are known.
        silent_ms: Option<u64>,
    },
    /// Nodes were sent away.
    #[serde(rename = "node.refused")]
    NodeRefused {},
    /// A newer agent has come from the address of this one.
    #[serde(rename = "node.replaced")]
    NodeReplaced {
        /// Name of the newer one.
        by: String,
    },
    /// A node neither waits nor runs any more, and stays connected.
    #[serde(rename = "node.withdrew")]
    NodeWithdrew {},
    /// A node asks for a new rank while its world runs, or comes back after it was given up.
    #[serde(rename = "node.came_back")]
    NodeCameBack {},
    /// Members did not report to a restarted coordinator in time.
    #[serde(rename = "members.missing")]
    MembersMissing {},
    /// A round waits for nodes, or for a time to pass.
    #[serde(rename = "round.waits")]
    RoundWaits {
        /// Number of the round.
        next: u64,
        /// Number of nodes that wait for it.
        nodes: usize,
    },
    /// A world was formed.
    #[serde(rename = "round.completed")]
    RoundCompleted {
        /// Number of its nodes.
        nodes: usize,
        /// Number of its workers, if every node reports its own.
        workers: Option<u32>,
        /// Name of the node with rank 0.
        rank0: Option<String>,
        /// Whether workers of the last world live on in it.
        in_place: bool,
    },
    /// All workers of a world are to stop together, and may live on.
    #[serde(rename = "round.changes")]
    RoundChanges {},
    /// A world must re-form.
    #[serde(rename = "round.broken")]
    RoundBroken {
        /// Why.
        why: Why,
    },
    /// The workers of nodes have all succeeded.
    #[serde(rename = "workers.finished")]
    WorkersFinished {
        /// Number of nodes that have finished.
        done: usize,
        /// Number of live nodes.
        of: usize,
    },
    /// A world that was to re-form, or to change, goes on: the reason is gone.
    #[serde(rename = "round.goes_on")]
    RoundGoesOn {},
    /// A worker has failed.
    #[serde(rename = "worker.exited")]
    WorkerExited(Box<Exit>),
    /// A first failure counts against a host.
    #[serde(rename = "host.failed")]
    HostFailed {
        /// The host.
        host: String,
        /// How many it has had.
        count: usize,
        /// How many put it out.
        limit: u32,
    },
    /// A host is kept out of the job.
    #[serde(rename = "host.out")]
    HostOut {
        /// The host.
        host: String,
    },
    /// A host is let in again.
    #[serde(rename = "host.let_in")]
    HostLetIn {
        /// The host.
        host: String,
    },
    /// The training makes no step; a look shows for which ranks the others wait.
    #[serde(rename = "hang.waits")]
    HangWaits(Box<Hang>),
    /// The training hangs.
    #[serde(rename = "hang.found")]
    HangFound(Box<Hang>),
    /// A training goes on that was found to hang.
    #[serde(rename = "hang.over")]
    HangOver {
        /// The time without progress, in milliseconds.
        still_ms: u64,
    },
    /// This coordinator was restarted: a node reports a world that it does not know.
    #[serde(rename = "coordinator.restarted")]
    CoordinatorRestarted {
        /// The round of that world.
        reported: u64,
    },
    /// This coordinator's process did not run for a while.
    #[serde(rename = "coordinator.stood_still")]
    CoordinatorStoodStill {
        /// For how long, in milliseconds.
        late_ms: u64,
    },
    /// This coordinator's process ends.
    #[serde(rename = "coordinator.ends")]
    CoordinatorEnds {},
    /// A node's part of a recovery has taken this long.
    #[serde(rename = "phase")]
    Phase(Phase),
    /// The first step of a round on a node.
    #[serde(rename = "phase")]
    FirstStep(FirstStep),
    /// Something that has no type of its own.
    #[serde(rename = "note")]
    Note {},
    // What nodes record themselves.
    /// A worker was started.
    #[serde(rename = "worker.started")]
    WorkerStarted(Box<Started>),
    /// A worker has ended, however.
    #[serde(rename = "worker.ended")]
    WorkerEnded(Box<Ended>),
    /// The node has learned that a round is complete, and has a rank in it.
    #[serde(rename = "received.completed")]
    ReceivedCompleted {
        /// The node's rank.
        rank: u32,
        /// Number of nodes.
        nodes: u32,
        /// Number of workers, if it is known.
        workers: Option<u32>,
    },
    /// The node has learned which failure is the cause of what follows.
    #[serde(rename = "received.exited")]
    ReceivedExited(Box<Exit>),
    /// The node has learned that its world must re-form, or concludes it.
    #[serde(rename = "received.broken")]
    ReceivedBroken {
        /// Its workers may live on.
        in_place: bool,
    },
    /// The node has learned that the rendezvous is closed.
    #[serde(rename = "received.closed")]
    ReceivedClosed {
        /// How the job ended.
        verdict: Ending,
    },
    /// The node's agent got a signal that ends it.
    #[serde(rename = "received.signal")]
    ReceivedSignal {
        /// Which.
        signal: i32,
    },
    /// The node was cut off for its whole lease, and stops its workers.
    #[serde(rename = "node.fenced")]
    NodeFenced {},
    /// The node has lost its connection to the coordinator, or the backend in its place does not answer.
    #[serde(rename = "line.lost")]
    LineLost {},
    /// The node is answered again.
    #[serde(rename = "line.found")]
    LineFound {
        /// For how long it was not, in milliseconds.
        away_ms: u64,
    },
    /// Lines of this node's file of events were not written: the disk was full, or its folder hung. The id is of the file's own count.
    #[serde(rename = "dropped")]
    Dropped {
        /// How many.
        count: u64,
    },
    /// A member has replayed an event that it recorded before this coordinator was restarted.
    #[serde(rename = "replayed")]
    Replayed(Box<Replayed>),
}

impl Kind {
    /// Whether it says why something happened to the whole run. The others are many, and nodes can repeat some of them.
    pub fn explains(&self) -> bool {
        match self {
            Self::WorkerExited(exit) => exit.first,
            Self::Replayed(replayed) => replayed.kind.explains(),
            Self::RunOpened { .. }
            | Self::RunClosed { .. }
            | Self::RoundCompleted { .. }
            | Self::RoundChanges {}
            | Self::RoundBroken { .. }
            | Self::RoundGoesOn {}
            | Self::MembersMissing {}
            | Self::HostFailed { .. }
            | Self::HostOut { .. }
            | Self::HostLetIn { .. }
            | Self::HangFound(_)
            | Self::HangOver { .. }
            | Self::CoordinatorRestarted { .. }
            | Self::CoordinatorStoodStill { .. }
            | Self::CoordinatorEnds {}
            | Self::ReceivedCompleted { .. }
            | Self::ReceivedExited(_)
            | Self::ReceivedBroken { .. }
            | Self::ReceivedClosed { .. } => true,
            Self::NodeJoined { .. }
            | Self::NodeLeft { .. }
            | Self::NodeLeaves {}
            | Self::NodeLost { .. }
            | Self::NodeRefused {}
            | Self::NodeReplaced { .. }
            | Self::NodeWithdrew {}
            | Self::NodeCameBack {}
            | Self::RoundWaits { .. }
            | Self::WorkersFinished { .. }
            | Self::HangWaits(_)
            | Self::Phase(_)
            | Self::FirstStep(_)
            | Self::WorkerStarted(_)
            | Self::WorkerEnded(_)
            | Self::ReceivedSignal { .. }
            | Self::NodeFenced {}
            | Self::LineLost {}
            | Self::LineFound { .. }
            | Self::Dropped { .. }
            | Self::Note {} => false,
        }
    }
}

/// How a worker has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Exit {
    /// Its rank in the job.
    pub rank: u32,
    /// Its rank on its node.
    pub local_rank: u32,
    /// Its role.
    pub role: String,
    /// Its process id.
    pub pid: u32,
    /// How it ended: `exit code 3`, `SIGKILL`.
    pub exit: String,
    /// The exit code, or the signal's number negated.
    pub returncode: i32,
    /// The first line of what it said.
    pub message: String,
    /// It is the round's first failure. Others are consequences.
    pub first: bool,
    /// It counts against the job's budget of restarts.
    pub counts: bool,
}

/// A worker that was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Started {
    /// Its rank in the job.
    pub rank: u32,
    /// Its rank on its node.
    pub local_rank: u32,
    /// Its role.
    pub role: String,
    /// Its process id.
    pub pid: u32,
}

/// A worker that has ended, as its agent saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ended {
    /// Its rank in the job.
    pub rank: u32,
    /// Its rank on its node.
    pub local_rank: u32,
    /// Its role.
    pub role: String,
    /// Its process id.
    pub pid: u32,
    /// How it ended: `exit code 3`, `SIGKILL`.
    pub exit: String,
    /// The exit code, or the signal's number negated.
    pub returncode: i32,
    /// A signal of its agent has ended it.
    pub stopped: bool,
}

/// An event that a member recorded, as it replays it to a coordinator that was restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Replayed {
    /// Its id, of which the member is the origin.
    pub id: String,
    /// The member's number of it.
    pub order: u64,
    /// The ids of its causes.
    pub cause: Vec<String>,
    /// How long before this the member recorded it, in microseconds.
    pub ago_us: u64,
    /// The round, when it happened.
    pub round: u64,
    /// The job's restart number, when it happened.
    pub restart: u32,
    /// The name of the node that it is about.
    pub node: Option<String>,
    /// What happened.
    #[serde(flatten)]
    pub kind: Kind,
    /// Its sentence.
    pub text: Option<String>,
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// The workers have succeeded.
    Succeeded,
    /// No restart was left, or a node said so.
    Failed,
    /// A person ended it.
    Stopped,
}

/// By what a node was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Its connection ended, and it did not come back.
    Connection,
    /// It was silent.
    Silence,
    /// Its lease ended, as etcd says.
    Lease,
    /// Its machine was taken away, as a notice had said, and it had not left by then.
    Notice,
}

/// Why a world must re-form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Why {
    /// A worker has failed.
    #[serde(rename = "worker.failed")]
    WorkerFailed,
    /// A member was lost.
    #[serde(rename = "node.lost")]
    NodeLost,
    /// A member has left, or is about to.
    #[serde(rename = "node.left")]
    NodeLeft,
    /// A member has given up its rank.
    #[serde(rename = "node.withdrew")]
    NodeWithdrew,
    /// A newer agent has come from a member's address.
    #[serde(rename = "node.replaced")]
    NodeReplaced,
    /// A member asks for a new rank, or has come back after it was given up.
    #[serde(rename = "node.came_back")]
    NodeCameBack,
    /// Nodes wait to join.
    #[serde(rename = "nodes.wait")]
    NodesWait,
    /// The members could not stop together.
    #[serde(rename = "change.failed")]
    ChangeFailed,
    /// Members did not report to a restarted coordinator.
    #[serde(rename = "coordinator.restarted")]
    CoordinatorRestarted,
    /// The training hung, and `--hang=restart` was given.
    #[serde(rename = "hang.found")]
    HangFound,
}

impl Why {
    /// All of them.
    #[cfg(test)]
    pub const ALL: [Self; 10] = [
        Self::WorkerFailed,
        Self::NodeLost,
        Self::NodeLeft,
        Self::NodeWithdrew,
        Self::NodeReplaced,
        Self::NodeCameBack,
        Self::NodesWait,
        Self::ChangeFailed,
        Self::CoordinatorRestarted,
        Self::HangFound,
    ];

    /// Its name in events and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::WorkerFailed => "worker.failed",
            Self::NodeLost => "node.lost",
            Self::NodeLeft => "node.left",
            Self::NodeWithdrew => "node.withdrew",
            Self::NodeReplaced => "node.replaced",
            Self::NodeCameBack => "node.came_back",
            Self::NodesWait => "nodes.wait",
            Self::ChangeFailed => "change.failed",
            Self::CoordinatorRestarted => "coordinator.restarted",
            Self::HangFound => "hang.found",
        }
    }
}
