//! How large a round is: whether enough nodes wait, whether they fill a world, and who is in the next one with how many workers.
//!
//! Rounds count nodes. With [`Rules::workers`](crate::rendezvous::messages::settings::Rules::workers) they count workers besides: a round
//! closes with `min_workers` at least, and at once with `max_workers`. Nodes are taken whole, in the order of admission. The one that
//! would pass the maximum starts fewer workers than it offers, and those after it are spares. In later rounds it is the same one, so that
//! workers of other nodes live on.

use super::closing::join;
use super::node::{Node, Status};
use super::ranks::{self, Candidate};
use super::run::Run;
use crate::rendezvous::messages::message::{JoinWorkers, NodeId, Survival};
use crate::rendezvous::messages::settings::WorkerBounds;

/// A place in the next world.
pub(super) struct Seat {
    pub id: NodeId,
    /// The node's workers in it, if it has told their number.
    pub workers: Option<JoinWorkers>,
}

impl Run {
    pub(super) fn bounds(&self) -> Option<WorkerBounds> {
        self.settings.rules.workers
    }

    /// Number of workers that the waiting nodes offer.
    fn slots(&self) -> usize {
        self.roster.counts().slots
    }

    /// Number of workers of the current world, if it is known.
    fn world_workers(&self) -> Option<usize> {
        self.current.world()?.worker_count().map(|count| count as usize)
    }

    /// Whether enough nodes and workers wait for a round.
    pub(super) fn is_enough(&self) -> bool {
        let nodes = self.roster.waiting().len() >= self.settings.min_nodes as usize;
        nodes && self.bounds().is_none_or(|bounds| self.slots() >= bounds.min as usize)
    }

    /// The waiting nodes fill a world: why, in words.
    pub(super) fn is_full_round(&self) -> Option<String> {
        let max = self.settings.max_nodes as usize;
        if self.roster.waiting().len() >= max {
            return Some(format!("the maximum of {} is reached", nodes(max)));
        }
        let bounds = self.bounds().filter(|bounds| self.slots() >= bounds.max as usize)?;
        Some(format!("the maximum of {} is reached", workers(bounds.max as usize)))
    }

    /// Whether the waiting nodes and the running ones fill a world together.
    pub(super) fn would_be_full(&self) -> bool {
        let nodes = self.roster.active().len() + self.roster.waiting().len() >= self.settings.max_nodes as usize;
        let running = self.world_workers().unwrap_or_default();
        nodes || self.bounds().is_some_and(|bounds| running + self.slots() >= bounds.max as usize)
    }

    /// Whether the world may grow, of which this number of nodes runs.
    pub(super) fn has_room(&self, running: usize) -> bool {
        let is_whole = self.current.size().is_none_or(|size| running >= size);
        let full =
            |bounds: WorkerBounds| is_whole && self.world_workers().is_some_and(|count| count >= bounds.max as usize);
        running < self.settings.max_nodes as usize && !self.bounds().is_some_and(full)
    }

    /// Whether a world of the waiting nodes would have a member of the last world, and be no larger than it.
    pub(super) fn shrinks(&self) -> bool {
        let (waiting, size) = match (self.bounds(), self.world_workers()) {
            (Some(bounds), Some(count)) => (self.slots().min(bounds.max as usize), Some(count)),
            _ => (self.roster.waiting().len(), self.current.size()),
        };
        self.roster.counts().returning > 0 && size.is_some_and(|size| waiting <= size)
    }

    /// The members of the next world, by rank: first members of the last world, then newcomers by arrival, as far as there is room.
    pub(super) fn next_members(&self) -> Vec<Seat> {
        let mut waiting: Vec<_> = self.roster.of(self.roster.waiting()).collect();
        waiting.sort_by_key(|(_, node)| self.turn(node));
        waiting.truncate(self.settings.max_nodes as usize);
        let mut left = self.bounds().map_or(u32::MAX, |bounds| bounds.max);
        let mut candidates = Vec::with_capacity(waiting.len());
        for (id, node) in waiting {
            let Some(join) = join(node) else { continue };
            let mut workers = join.workers.clone();
            if let (Some(_), Some(workers)) = (self.bounds(), &mut workers) {
                let size = workers.local_world_size.min(left);
                left -= size;
                workers.local_world_size = size;
                // The node kills those that have no place.
                if let Survival::Attended(survivors) = &mut workers.survival {
                    survivors.retain(|survivor| survivor.local_rank < size);
                }
                if workers.local_world_size == 0 {
                    continue;
                }
            }
            let last_rank = self.roster.last_rank(node).filter(|_| !self.settings.ranks_as_asked);
            let key = Seat { id, workers };
            candidates.push(Candidate { key, last_rank, node_rank: join.node_rank, addr: node.addr() });
        }
        ranks::assign(candidates)
    }

    /// When it is a waiting node's turn to be admitted, before those with a higher key.
    fn turn(&self, node: &Node) -> (bool, bool, u64) {
        let Status::Waiting { join, arrival } = &node.status else { return (true, true, u64::MAX) };
        let Some(rank) = self.roster.last_rank(node) else { return (true, false, *arrival) };
        let had = self.current.world().and_then(|world| world.local_world_size(rank));
        let was_cut = had < join.workers.as_ref().map(|workers| workers.local_world_size);
        (false, was_cut, rank.into())
    }

    /// How many nodes wait or run, and of how many, in words.
    pub(super) fn known_text(&self) -> String {
        let known = self.roster.waiting().len() + self.roster.active().len();
        match self.bounds() {
            None => format!("{known} of {} nodes", self.settings.node_counts()),
            Some(bounds) => format!("{}; {} of {bounds} workers wait", nodes(known), self.slots()),
        }
    }

    /// How many nodes have joined, in words.
    pub(super) fn joined_text(&self) -> String {
        let waiting = self.roster.waiting().len();
        match self.bounds() {
            None => format!("{waiting} of {} nodes have joined", self.settings.node_counts()),
            Some(bounds) => format!("{} of {bounds} workers have joined, on {}", self.slots(), nodes(waiting)),
        }
    }

    /// What the round has, and what it needs at least, in words.
    pub(super) fn gathering_text(&self) -> String {
        let waiting = self.roster.waiting().len();
        match self.bounds().filter(|bounds| self.slots() < bounds.min as usize) {
            None => format!("{waiting} of at least {} nodes", self.settings.min_nodes),
            Some(bounds) => format!("{} of at least {}", self.slots(), workers(bounds.min as usize)),
        }
    }

    /// How much is missing even if all running members come back, in words.
    pub(super) fn needed_text(&self) -> Option<String> {
        let (waiting, active) = (self.roster.waiting().len(), self.roster.active().len());
        let nodes = (self.settings.min_nodes as usize).saturating_sub(waiting + active);
        if nodes > 0 {
            return Some(format!("{nodes} more needed"));
        }
        let bounds = self.bounds().filter(|_| active == 0)?;
        let missing = (bounds.min as usize).saturating_sub(self.slots());
        (missing > 0).then(|| format!("{} more needed", workers(missing)))
    }
}

/// A number of nodes in words.
pub(super) fn nodes(count: usize) -> String {
    if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") }
}

fn workers(count: usize) -> String {
    if count == 1 { "1 worker".to_owned() } else { format!("{count} workers") }
}
