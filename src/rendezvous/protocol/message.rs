//! What a node and the coordinator say to each other, version 1. Serialised with postcard ([`super::codec`]).
//!
//! A connection opens with [`MAGIC`] and [`PROTOCOL_VERSION`], then carries frames. The node's first frame is
//! [`NodeMessage::Hello`]; the coordinator answers with [`CoordinatorMessage::Welcome`] or [`CoordinatorMessage::Rejected`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::settings::Settings;
use super::text::tidy;

/// First bytes of a session's connection. `E` is no query code of c10d, so one look tells the two protocols apart.
pub const MAGIC: &[u8] = b"ELRZ";

/// Follows [`MAGIC`], as `u16` little-endian. Both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 1;

/// One agent's identity, drawn at random when its handler is made; it survives reconnects, not restarts of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u128);

/// Number of a completed round: 1 for the first. Never goes back.
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
    /// Who I am. First message of every connection.
    Hello(Box<Hello>),
    /// Put me into the next round. Answered by [`CoordinatorMessage::Complete`] when it has completed.
    Join(Join),
    /// I no longer wait (join timeout). Answered by [`CoordinatorMessage::Withdrawn`].
    Withdraw,
    /// I go, and will not come back. The rendezvous stays open.
    Leave {
        /// Why, for the others' logs.
        reason: String,
        /// The signal that ended the agent, if one did.
        signal: Option<i32>,
    },
    /// The job is over: nobody is admitted any more.
    Close(Verdict),
    /// I am here. Each is answered by one [`CoordinatorMessage::Heartbeat`], in order.
    Heartbeat,
    /// A worker of mine has failed. Answered by [`CoordinatorMessage::Status`], [`CoordinatorMessage::Closed`] or
    /// [`CoordinatorMessage::Stale`].
    Failed {
        /// The round it belonged to.
        round: Round,
        /// What failed.
        failure: Box<Failure>,
    },
    /// All my workers have succeeded. Once those of all live members have, the rendezvous closes ([`Verdict::AllDone`]).
    Done {
        /// The round they belonged to.
        round: Round,
    },
}

/// Introduces a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Which job.
    pub run_id: String,
    /// Who.
    pub node: NodeId,
    /// How people know the node, for messages: `host:pid`.
    pub name: String,
    /// The address others should use, if the user gave one (`--local-addr`). Else the one the coordinator sees.
    pub local_addr: Option<String>,
    /// Drawn at random once in each process: agents of one process share it.
    pub process: u64,
    /// The rank the user gave this node, if any.
    pub node_rank: Option<u32>,
    /// What the node asks for.
    pub settings: Settings,
    /// The last round this node was placed in, if any.
    pub placed: Option<Placed>,
    /// The node waits for its next place; its [`Join`] follows.
    pub joining: bool,
    /// The node's own process hosts a coordinator. The coordinator believes it of its own process alone.
    pub hosts: bool,
}

impl Hello {
    /// A node that has just started and was nowhere yet. Its address is the one the coordinator sees, its process has no number
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
        }
    }
}

/// A node's account of the last round it was placed in; lets a coordinator that lost its memory take it up again.
/// Anybody can claim one: what a coordinator takes from it, and when, is for [`crate::rendezvous::decider::claims`] to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The round.
    pub round: Round,
    /// The node's rank in it.
    pub rank: u32,
    /// How many nodes it had.
    pub world_size: u32,
    /// Which world it was: see [`Placement::world`].
    pub world: u64,
    /// Whether the node still belongs to it: it has not asked to join another.
    pub active: bool,
    /// The job's restart number, as far as the node has been told.
    pub restart: u32,
    /// Which rank was the coordinator's host.
    pub host: Option<HostSeat>,
}

/// Asks for a place in the next round, and brings everything the others need to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The last round this node knows to have been placed in (0: none). An older one than the coordinator's record means that
    /// the completion was lost on the way, and it is sent again.
    pub round: Round,
    /// Port of the empty worker store this node holds ready, used if it becomes rank 0.
    pub store_port: u16,
    /// Rank the user asked for in the first round.
    pub node_rank: Option<u32>,
    /// The node's workers, so that their ranks come with the completion. `None` from PyTorch's agent, which assigns ranks
    /// through the store.
    pub workers: Option<JoinWorkers>,
}

/// What a node says of its workers when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinWorkers {
    /// Their role; ranks within a role are counted by it.
    pub role: String,
    /// How many there are: 1 to [`LOCAL_WORLD_SIZE_LIMIT`](super::text::LOCAL_WORLD_SIZE_LIMIT).
    pub local_world_size: u32,
}

/// Ranks of a node's workers: worker `i` has global rank `first_rank + i` and role rank `first_role_rank + i`.
///
/// As `_assign_worker_ranks` in `torch/distributed/elastic/agent/server/api.py` (2.15) gives them.
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

/// A worker's failure: what every node names as the cause when the job restarts or ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The node it happened on. The coordinator fills it in.
    pub node: String,
    /// The worker's role.
    pub role: String,
    /// The worker's rank on its node.
    pub local_rank: u32,
    /// The worker's rank in the job.
    pub global_rank: u32,
    /// Its process id there.
    pub pid: u32,
    /// What ended it: `exit code 3`, `SIGKILL`.
    pub exit: String,
    /// The same as a number, PyTorch's: the exit code, or the signal's number negated; 1 for what has neither, such as a
    /// program that could not be started.
    pub returncode: i32,
    /// The first lines of what it said, if it said anything.
    pub message: String,
    /// Whether a restart because of it is taken from the job's budget.
    pub counts: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, role, local_rank, global_rank, pid, exit, message, .. } = self;
        // Until the coordinator has filled it in.
        let node = if node.is_empty() { "this node" } else { node };
        write!(f, "rank {global_rank} (local rank {local_rank}, role {role}, pid {pid}) on {node} ended with {exit}")?;
        match message.lines().find(|line| !line.trim().is_empty()) {
            // What a worker says may hold anything until the coordinator has tidied it, and this becomes a line of a log.
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
        /// Node that said so.
        by: String,
    },
    /// A failure that no restart is left for: all others stop.
    Failed {
        /// Node that said so.
        by: String,
        /// What failed there, in words.
        cause: String,
        /// The failure, if a node reported it.
        failure: Option<Box<Failure>>,
    },
    /// The workers of all live members succeeded.
    AllDone {
        /// Of which round.
        round: Round,
        /// How many members there were.
        nodes: u32,
    },
    /// A person ended the job on the node that hosts the coordinator (Ctrl-C): nobody can go on without it.
    Stopped {
        /// The node.
        by: String,
        /// What ended it, in words.
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
    /// The node cannot take part. First variant, so that its encoding never changes with the version.
    Rejected {
        /// Why, and what would be accepted.
        reason: String,
    },
    /// The answer to an accepted [`Hello`].
    Welcome {
        /// The address under which others will look for this node.
        addr: String,
        /// The node is in the coordinator's own process.
        hosted: bool,
    },
    /// How things stand, pushed to running members when it changes.
    Status {
        /// Above zero when the world must re-form: nodes wait for a place, or a member was lost.
        waiting: u32,
        /// Why, in words.
        reason: String,
        /// The job's restart number; that of the next round, when the world must re-form.
        restart: u32,
        /// The failure that is the cause, if one is.
        failure: Option<Box<Failure>>,
    },
    /// The round completed and this is the node's place in it.
    Complete(Placement),
    /// The answer to [`NodeMessage::Withdraw`].
    Withdrawn {
        /// Who was in, who was missing.
        progress: String,
    },
    /// The rendezvous is closed.
    Closed {
        /// How the job ended.
        verdict: Verdict,
        /// Whether this node was a spare: it waited beside a full job, which did not need it.
        spare: bool,
    },
    /// The session is over, for a reason the node cannot mend by reconnecting.
    Ended {
        /// Why.
        reason: String,
    },
    /// Answer to a heartbeat.
    Heartbeat {
        /// For a node that waits: how that goes.
        waits: Option<Waits>,
    },
    /// Answer to the [`Join`] of a spare.
    Waits(Waits),
    /// What the node has said belongs to a round that is over for it, and has had no effect.
    Stale {
        /// The round it spoke of.
        round: Round,
        /// The current one.
        current: Round,
    },
    /// The run's settings by which a node's life is judged. Sent after [`Welcome`](Self::Welcome) to a node that brought others, and
    /// when the run's settings have changed. From then on they are the node's own.
    Terms {
        /// See [`Settings::keep_alive_interval`].
        keep_alive_interval: Duration,
        /// See [`Settings::keep_alive_max_attempt`].
        keep_alive_max_attempt: u32,
    },
    /// The coordinator's process ends. It decides nothing more, and closes the connection.
    Leaving {
        /// What ends it, in words.
        why: String,
        /// The node's world must re-form: a member of it was in that process, and its workers ran.
        interrupts: bool,
    },
}

/// How things stand for a node that waits for its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Who is in, who is missing, until when.
    pub progress: String,
    /// The node waits beside a full job: its join does not time out meanwhile.
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
    /// Tells this world from others of the same round: a coordinator that was restarted, and has been told of no round,
    /// counts from 1.
    pub world: u64,
    /// Address of rank 0.
    pub master_addr: String,
    /// Port of the round's empty worker store at rank 0.
    pub master_port: u16,
    /// Why the round closed when it did, and who is in it.
    pub reason: String,
    /// The job's restart number: how many failures have made it begin anew. The same for all members; membership changes do
    /// not raise it.
    pub restart: u32,
    /// Ranks of this node's workers, if every member said how many it has.
    pub workers: Option<WorkerRanks>,
    /// Which rank is the coordinator's host, if one is.
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
