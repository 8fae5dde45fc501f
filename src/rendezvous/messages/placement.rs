//! Places in rounds: what a node asks for, what it gets, and what it says of an earlier one.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::Round;
use crate::wire::text::{NAME_LIMIT_BYTES, cut, plain};

/// A node's account of the last round it was placed in; lets a coordinator that lost its memory take it up again.
/// Anybody can claim one. `src/rendezvous/run/recovery.rs` decides what a coordinator takes from a claim, and when.
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
    pub host: Option<HostInstance>,
    /// The generation of the state with which the workers of that round began. A restarted coordinator has to know which survivors have
    /// the job's state.
    pub began_with: Generation,
}

/// A world, as the generation of a state: the workers of that world have had the same state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation {
    /// The world's round.
    pub round: Round,
    /// The world's id: [`Placement::world`]. A coordinator that knows of no round may use round numbers again.
    pub world: u64,
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
    /// Whether the node's machine is well. A check may end after the join: then the same join follows once more.
    pub health: Health,
}

/// What a node's health check has found (`--health-check`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Health {
    /// The node checks nothing.
    #[default]
    Unchecked,
    /// The check runs. It takes [`CHECK_WITHIN`] at most.
    Checking,
    /// Nothing was found, or the check could not say.
    Well,
    /// What was found, in one line.
    Ill(String),
}

/// How long a health check may take before rounds close without the node.
pub const CHECK_WITHIN: Duration = Duration::from_secs(35);

/// A node's workers, as of its join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinWorkers {
    /// Their role, by which role ranks are counted.
    pub role: String,
    /// Their number: 1 to [`LOCAL_WORLD_SIZE_LIMIT`](crate::wire::text::LOCAL_WORLD_SIZE_LIMIT).
    pub local_world_size: u32,
    /// The file name of their script, or the name of their module, program or function, if the agent reports it. It distinguishes jobs
    /// without a run id from one another: `run/admission.rs`.
    pub script: Option<String>,
    /// What became of the workers of the node's last round.
    pub survival: Survival,
    /// The check of [`CoordinatorMessage::RaiseAt`] at which all of them have stopped. `None`: survivors have gone back to their commits.
    ///
    /// [`CoordinatorMessage::RaiseAt`]: super::message::CoordinatorMessage::RaiseAt
    pub check: Option<u64>,
}

impl JoinWorkers {
    /// Workers that are all new.
    pub fn new(role: impl Into<String>, local_world_size: u32) -> Self {
        Self { role: role.into(), local_world_size, script: None, survival: Survival::New, check: None }
    }

    /// These workers, with the name of what they run: the last part of a path, cut to [`NAME_LIMIT_BYTES`]. An empty name is none.
    #[must_use]
    pub fn running(self, entrypoint: &str) -> Self {
        let name = entrypoint.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
        let script = cut(plain(name.to_owned()), NAME_LIMIT_BYTES);
        Self { script: Some(script).filter(|script| !script.is_empty()), ..self }
    }

    /// Whether all of them live.
    pub fn have_all_survived(&self) -> bool {
        matches!(self.survival, Survival::Attended(_)) && self.survivors().len() == self.local_world_size as usize
    }

    /// The workers that live and wait for the next round.
    pub fn survivors(&self) -> &[Survivor] {
        match &self.survival {
            Survival::Attended(survivors) => survivors,
            Survival::New | Survival::Saved | Survival::NotYetAttended | Survival::NeverAttended => &[],
        }
    }
}

/// What became of the workers of a node's last round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Survival {
    /// The node has had none, or its agent does not say.
    #[default]
    New,
    /// They use `elastic_rs.elastic`. Those in the list live and wait for the next round: by rising local rank, at most
    /// [`SURVIVORS_LIMIT`]. It may be empty.
    Attended(Vec<Survivor>),
    /// They have saved at the check of a change, and wait to be replaced.
    Saved,
    /// They were stopped. Some had used the interface, and others had not come to it yet.
    NotYetAttended,
    /// They were stopped, and no worker of the node has ever used the interface.
    NeverAttended,
}

/// A worker that lives on from one round to the next, and the state that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// Its rank on its node.
    pub local_rank: u32,
    /// The last world in which it has had the job's state: it was synchronised, or all workers were equal when the world began. `None`: it
    /// has never had it.
    pub generation: Option<Generation>,
    /// The number of its last commit. Numbers of one generation can be compared. `None`: it was never synchronised, and has not committed.
    pub commit: Option<u64>,
}

/// Most survivors that one node may name. As many fit into a frame.
pub const SURVIVORS_LIMIT: usize = 1024;

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

/// A node's place in a completed round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The round.
    pub round: Round,
    /// This node's rank.
    pub rank: u32,
    /// Number of nodes.
    pub world_size: u32,
    /// The world's id. It distinguishes this world from others with the same round number: a restarted coordinator that knows of no
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
    pub host: Option<HostInstance>,
    /// How many workers this node starts, if rounds count workers: as many as it has offered, or fewer.
    pub local_world_size: Option<u32>,
    /// How the workers begin. `None`, and survivors of the last round have to be restarted: those of this node cannot survive a change
    /// ([`Hello::in_place`](super::message::Hello::in_place)), or the world is of another backend than a coordinator.
    pub resume: Option<Resume>,
    /// From where the members connect, for the node that serves their workers' store, if it wants to know.
    /// Received in parts: [`CoordinatorMessage::Members`].
    ///
    /// [`CoordinatorMessage::Members`]: super::message::CoordinatorMessage::Members
    #[serde(skip)]
    pub members: Option<Arc<[IpAddr]>>,
}

impl Placement {
    /// The world, as the generation of a state.
    pub fn generation(&self) -> Generation {
        Generation { round: self.round, world: self.world }
    }

    /// The generation of the state with which the workers of this world begin: the world itself, if all are new.
    pub fn began_with(&self) -> Generation {
        match self.resume {
            Some(Resume::Continue { generation, .. }) => generation,
            Some(Resume::Restart { .. }) | None => self.generation(),
        }
    }

    /// How many workers this node starts, which has offered this number.
    pub fn workers_of(&self, offered: u32) -> u32 {
        self.local_world_size.unwrap_or(offered)
    }
}

/// How the workers of a new world begin. The same for all its members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resume {
    /// Survivors live on. Only missing workers are started.
    Continue {
        /// Global rank of the worker whose state the others take: the lowest one with the newest state.
        source: u32,
        /// Whether the workers' states may differ, so that all take the source's.
        sync: bool,
        /// Number of workers in the new world that live on. 0: all are new.
        survivors: u32,
        /// The generation of the source's state: the new world itself, if all are new.
        generation: Generation,
    },
    /// Survivors are stopped, and every worker is started.
    Restart {
        /// Why, in words.
        reason: String,
    },
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Continue { survivors: 0, .. } => f.write_str("all workers are new"),
            Self::Continue { source, sync: true, survivors, generation } => {
                let round = generation.round;
                write!(f, "{survivors} workers live on; all take the state of rank {source}, which is of round {round}")
            }
            Self::Continue { sync: false, .. } => f.write_str("all workers go on with the states they have"),
            Self::Restart { reason } => write!(f, "all workers are restarted: {reason}"),
        }
    }
}

/// The world that runs, for a node that may start its workers before it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// The round.
    pub round: Round,
    /// The world's id: [`Placement::world`].
    pub world: u64,
    /// Number of nodes.
    pub nodes: u32,
    /// Number of workers.
    pub workers: u32,
    /// How many more workers it may have, if rounds count workers and it is not full.
    pub room: Option<u32>,
    /// Address of rank 0.
    pub master_addr: String,
    /// Port of the round's worker store at rank 0.
    pub master_port: u16,
    /// The job's restart number.
    pub restart: u32,
}

impl Running {
    /// The place that a node which offers `workers` would get if it joined now and nothing else changed.
    pub fn next_placement(&self, workers: u32) -> Placement {
        let workers = self.room.map_or(workers, |room| room.min(workers));
        let world_size = self.workers.saturating_add(workers);
        Placement {
            round: self.round.next(),
            rank: self.nodes,
            world_size: self.nodes.saturating_add(1),
            world: self.world,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            reason: "workers are started ahead of the join".to_owned(),
            restart: self.restart,
            workers: Some(WorkerRanks {
                first_rank: self.workers,
                world_size,
                first_role_rank: self.workers,
                role_world_size: world_size,
            }),
            host: None,
            local_world_size: self.room.map(|_| workers),
            resume: None,
            members: None,
        }
    }
}

/// The rank whose process hosted the coordinator that formed a round, and where that coordinator listened.
///
/// A later coordinator with the same `instance_id` and another `incarnation` listens where that process did, so that process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInstance {
    /// The rank.
    pub rank: u32,
    /// [`CoordinatorInstance::instance_id`].
    pub instance_id: u64,
    /// [`CoordinatorInstance::incarnation`].
    pub incarnation: u64,
}
