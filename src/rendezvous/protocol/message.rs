//! The messages between a node and the coordinator, version 2. Serialised with postcard ([`super::codec`]).
//!
//! A connection opens with [`MAGIC`] and [`PROTOCOL_VERSION`], then carries frames. The node's first frame is
//! [`NodeMessage::Hello`]; the coordinator answers with [`CoordinatorMessage::Welcome`] or [`CoordinatorMessage::Rejected`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::capability::Capabilities;
use super::settings::Settings;
use super::text::tidy;

/// First bytes of a session's connection. `E` is no query code of c10d, so one look tells the two protocols apart.
pub const MAGIC: &[u8] = b"ELRZ";

/// Follows [`MAGIC`], as `u16` little-endian. Both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 2;

/// An agent's identity, drawn at random when its handler is made. It survives reconnects, but not restarts of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u128);

/// Number of a completed round: 1 for the first. Never decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Round(pub u64);

impl Round {
    /// The round after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// From node to coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeMessage {
    /// Introduces the node. First message of every connection.
    Hello(Box<Hello>),
    /// Joins the next round. Answered by [`CoordinatorMessage::Complete`] when the round is complete.
    Join(Join),
    /// Withdraws the join (join timeout). Answered by [`CoordinatorMessage::Withdrawn`].
    Withdraw,
    /// The node leaves and will not come back. The rendezvous stays open.
    Leave {
        /// The reason, for the other nodes' logs.
        reason: String,
        /// The signal that ended the agent, if one did.
        signal: Option<i32>,
    },
    /// The job is over: no node is admitted any more.
    Close(Verdict),
    /// A heartbeat. Each is answered by one [`CoordinatorMessage::Heartbeat`], in order.
    Heartbeat,
    /// A worker of this node has failed. Answered by [`CoordinatorMessage::Status`], [`CoordinatorMessage::Closed`] or
    /// [`CoordinatorMessage::Stale`].
    Failed {
        /// The round it belonged to.
        round: Round,
        /// The failure.
        failure: Box<Failure>,
    },
    /// All workers of this node have succeeded. Once those of all live members have, the rendezvous closes ([`Verdict::AllDone`]).
    Done {
        /// The round they belonged to.
        round: Round,
    },
}

/// Introduces a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The job's run id.
    pub run_id: String,
    /// The agent's id.
    pub node: NodeId,
    /// The node's name in messages: `host:pid`.
    pub name: String,
    /// The address for other nodes, if the user gave one (`--local-addr`). Otherwise the one that the coordinator sees.
    pub local_addr: Option<String>,
    /// Drawn at random once per process: agents of one process share it.
    pub process: u64,
    /// The rank the user gave this node, if any.
    pub node_rank: Option<u32>,
    /// The node's settings.
    pub settings: Settings,
    /// The last round this node was placed in, if any.
    pub placed: Option<Placed>,
    /// The node waits for its next place, and its [`Join`] follows.
    pub joining: bool,
    /// The node's own process hosts a coordinator. A coordinator believes this only of its own process.
    pub hosts: bool,
    /// What the node understands beyond this version's messages.
    pub capabilities: Capabilities,
}

impl Hello {
    /// A node that was just started and was in no round. Its address is the one that the coordinator sees, its process has no number
    /// (0), and it asks for no rank.
    pub fn new(run_id: impl Into<String>, node: NodeId, name: impl Into<String>, settings: Settings) -> Self {
        Self {
            run_id: run_id.into(),
            node,
            name: name.into(),
            local_addr: None,
            process: 0,
            node_rank: None,
            settings,
            placed: None,
            joining: false,
            hosts: false,
            capabilities: Capabilities::default(),
        }
    }
}

/// A node's account of the last round it was placed in; lets a coordinator that lost its memory take it up again.
/// Anybody can claim one. `src/rendezvous/decider/recovery.rs` decides what a coordinator takes from a claim, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The round.
    pub round: Round,
    /// The node's rank in it.
    pub rank: u32,
    /// How many nodes it had.
    pub world_size: u32,
    /// The world's id: [`Placement::world`].
    pub world: u64,
    /// Whether the node still belongs to it, that is, has not asked to join another round.
    pub active: bool,
    /// The job's restart number, as the node last heard it.
    pub restart: u32,
    /// The rank of the coordinator's host.
    pub host: Option<HostSeat>,
}

/// Asks for a place in the next round, with everything that the other nodes need to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The last round in which this node knows its place (0: none). If it is older than the coordinator's record, the completion was
    /// lost, and is sent again.
    pub round: Round,
    /// Port of this node's empty worker store, which is used if it becomes rank 0.
    pub store_port: u16,
    /// Rank the user asked for in the first round.
    pub node_rank: Option<u32>,
    /// The node's workers, so that their ranks come with the completion. `None` from PyTorch's agent, which assigns ranks
    /// through the store.
    pub workers: Option<JoinWorkers>,
}

/// A node's workers, as of its join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinWorkers {
    /// Their role, by which role ranks are counted.
    pub role: String,
    /// Their number: 1 to [`LOCAL_WORLD_SIZE_LIMIT`](super::text::LOCAL_WORLD_SIZE_LIMIT).
    pub local_world_size: u32,
}

/// Ranks of a node's workers: worker `i` has global rank `first_rank + i` and role rank `first_role_rank + i`.
///
/// As assigned by `_assign_worker_ranks` in `torch/distributed/elastic/agent/server/api.py` (2.15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRanks {
    /// Global rank of the node's first worker.
    pub first_rank: u32,
    /// Number of workers on all nodes.
    pub world_size: u32,
    /// Rank of the node's first worker among those of its role.
    pub first_role_rank: u32,
    /// Number of workers of the role on all nodes.
    pub role_world_size: u32,
}

/// A worker's failure. Every node names it as the cause when the job restarts or ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The node of the worker. The coordinator fills it in.
    pub node: String,
    /// The worker's role.
    pub role: String,
    /// The worker's rank on its node.
    pub local_rank: u32,
    /// The worker's rank in the job.
    pub global_rank: u32,
    /// Its process id there.
    pub pid: u32,
    /// How it ended: `exit code 3`, `SIGKILL`.
    pub exit: String,
    /// PyTorch's number for it: the exit code, or the signal's number negated. 1 for a failure without either, such as a program
    /// that could not be started.
    pub returncode: i32,
    /// The first lines of the worker's words, if there are any.
    pub message: String,
    /// Whether a restart after it counts against the job's budget.
    pub counts: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, role, local_rank, global_rank, pid, exit, message, .. } = self;
        // Until the coordinator has filled it in.
        let node = if node.is_empty() { "this node" } else { node };
        write!(f, "rank {global_rank} (local rank {local_rank}, role {role}, pid {pid}) on {node} ended with {exit}")?;
        match message.lines().find(|line| !line.trim().is_empty()) {
            // A worker's words may contain anything until the coordinator has cleaned them, and this becomes a line of a log.
            Some(line) => write!(f, ": {}", tidy(line)),
            None => Ok(()),
        }
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The workers finished.
    Succeeded {
        /// The node that reported it.
        by: String,
    },
    /// A failure for which no restart is left: all nodes stop.
    Failed {
        /// The node that reported it.
        by: String,
        /// The cause, in words.
        cause: String,
        /// The failure, if a node reported it.
        failure: Option<Box<Failure>>,
    },
    /// The workers of all live members succeeded.
    AllDone {
        /// The round.
        round: Round,
        /// Number of its members.
        nodes: u32,
    },
    /// A person ended the job on the node that hosts the coordinator (Ctrl-C). No node can go on without it.
    Stopped {
        /// The node.
        by: String,
        /// The cause, in words.
        cause: String,
    },
}

impl Verdict {
    /// Whether the job has failed, or was ended before it could succeed.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Stopped { .. })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Succeeded { by } => write!(f, "closed by {by}"),
            Self::Failed { by, cause, .. } => write!(f, "closed by {by} after a failure: {cause}"),
            Self::AllDone { round, nodes: 1 } => write!(f, "closed: the node of round {round} has finished"),
            Self::AllDone { round, nodes } => {
                write!(f, "closed: all {nodes} live nodes of round {round} have finished")
            }
            Self::Stopped { by, cause } => write!(f, "ended by {by}: {cause}"),
        }
    }
}

/// From coordinator to node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoordinatorMessage {
    /// The node is rejected. The first variant, so that its encoding never changes with the version.
    Rejected {
        /// The reason, and what would be accepted.
        reason: String,
    },
    /// The answer to an accepted [`Hello`].
    Welcome {
        /// The address at which other nodes will look for this one.
        addr: String,
        /// The node is in the coordinator's own process.
        hosted: bool,
        /// What the coordinator understands beyond this version's messages.
        capabilities: Capabilities,
    },
    /// The state of the world, pushed to running members when it changes.
    Status {
        /// Above zero when the world must re-form: nodes wait for a place, or a member was lost.
        waiting: u32,
        /// Why, in words.
        reason: String,
        /// The job's restart number. If the world must re-form, the next round's.
        restart: u32,
        /// The failure that is the cause, if any.
        failure: Option<Box<Failure>>,
    },
    /// The round is complete. With the node's place in it.
    Complete(Placement),
    /// The answer to [`NodeMessage::Withdraw`].
    Withdrawn {
        /// Which nodes had joined, and how many were missing.
        progress: String,
    },
    /// The rendezvous is closed.
    Closed {
        /// How the job ended.
        verdict: Verdict,
        /// Whether this node was a spare, which the job did not need.
        spare: bool,
    },
    /// The session is over, and reconnecting would not help.
    Ended {
        /// Why.
        reason: String,
    },
    /// Answer to a heartbeat.
    Heartbeat {
        /// For a waiting node: the progress of the round.
        waits: Option<Waits>,
    },
    /// Answer to the [`Join`] of a spare.
    Waits(Waits),
    /// The node's message was about a round that is over for it, and had no effect.
    Stale {
        /// The round of the message.
        round: Round,
        /// The current one.
        current: Round,
    },
    /// The run's lease. Sent after [`Welcome`](Self::Welcome) to a node that brought another one, and when it has changed. From then
    /// on it is the node's own.
    Terms {
        /// See [`Settings::keep_alive_interval`].
        keep_alive_interval: Duration,
        /// See [`Settings::keep_alive_max_attempt`].
        keep_alive_max_attempt: u32,
    },
    /// The coordinator's process ends. The coordinator decides nothing more, and closes the connection.
    Leaving {
        /// What ends it, in words.
        why: String,
        /// Whether the node's world must re-form, because a member with running workers was in that process.
        interrupts: bool,
    },
}

/// The progress of a round, for a waiting node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Which nodes have joined, how many are missing, and until when.
    pub progress: String,
    /// Whether the node is a spare. Its join does not time out then.
    pub spare: bool,
}

/// A node's place in a completed round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The round.
    pub round: Round,
    /// This node's rank.
    pub rank: u32,
    /// Number of nodes.
    pub world_size: u32,
    /// The world's id. It tells this world from others with the same round number: a restarted coordinator that has heard of no
    /// round counts from 1 (`docs/decisions/0030-worlds-have-an-id.md`).
    pub world: u64,
    /// Address of rank 0.
    pub master_addr: String,
    /// Port of the round's empty worker store at rank 0.
    pub master_port: u16,
    /// Why the round closed when it did, and its members.
    pub reason: String,
    /// The job's restart number: the number of failures after which it restarted. The same for all members. Membership changes do
    /// not raise it.
    pub restart: u32,
    /// Ranks of this node's workers, if every member has sent its number of workers.
    pub workers: Option<WorkerRanks>,
    /// The rank of the coordinator's host, if a member is.
    pub host: Option<HostSeat>,
}

/// The rank whose process hosted the coordinator that formed a round, and where that coordinator listened.
///
/// A later coordinator with the same `place` and another `life` listens where that process did, so that process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSeat {
    /// The rank.
    pub rank: u32,
    /// [`Home::place`].
    pub place: u64,
    /// [`Home::life`].
    pub life: u64,
}
