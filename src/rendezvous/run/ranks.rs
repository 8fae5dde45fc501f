//! The next world: whether enough nodes wait, which of them are in it, with how many workers, and with which ranks. Policies alone.
//!
//! Rounds count nodes. With [`Rules::workers`](crate::rendezvous::messages::settings::Rules::workers) they count workers besides: a round
//! closes with `min_workers` at least, and at once with `max_workers`. Nodes are taken whole, in the order of admission. The one that
//! would pass the maximum starts fewer workers than it offers, and those after it are spares. In later rounds it is the same one, so that
//! workers of other nodes live on.
//!
//! PyTorch sorts `(address, pid)` as text in every round. There `node10` comes before `node9`, and one new node may change the ranks
//! of all others. Here survivors keep their ranks: see [`assign`].

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::membership::Roster;
use super::node::{Node, Status, natural_order};
use super::parts::Parts;
use super::resume::resume_of;
use super::round::{Assignment, World};
use crate::rendezvous::messages::message::{
    Generation, Join, JoinWorkers, NodeId, Resume, Round, Survival, WorkerRanks,
};
use crate::rendezvous::messages::settings::WorkerBounds;

impl Parts<'_> {
    pub(super) fn bounds(self) -> Option<WorkerBounds> {
        self.settings.rules.workers
    }

    /// Number of workers that the waiting nodes offer.
    fn slots(self) -> usize {
        self.roster.counts().slots
    }

    /// Number of workers of the current world, if it is known.
    fn world_workers(self) -> Option<usize> {
        self.current.world()?.worker_count().map(|count| count as usize)
    }

    /// Whether enough nodes and workers wait for a round.
    pub(super) fn is_enough(self) -> bool {
        let nodes = self.roster.waiting().len() >= self.settings.min_nodes as usize;
        nodes && self.bounds().is_none_or(|bounds| self.slots() >= bounds.min as usize)
    }

    /// Whether the next round may close as soon as it should: no member runs, and enough wait.
    pub(super) fn is_ready(self) -> bool {
        self.roster.active().is_empty() && self.is_enough()
    }

    /// Whether the connection of a waiting node is broken, so that no round closes.
    pub(super) fn awaits_connections(self) -> bool {
        self.roster.counts().unreachable > 0
    }

    /// The waiting nodes fill a world: why, in words.
    pub(super) fn is_full_round(self) -> Option<String> {
        let max = self.settings.max_nodes as usize;
        if self.roster.waiting().len() >= max {
            return Some(format!("the maximum of {} is reached", nodes(max)));
        }
        let bounds = self.bounds().filter(|bounds| self.slots() >= bounds.max as usize)?;
        Some(format!("the maximum of {} is reached", workers(bounds.max as usize)))
    }

    /// Whether the waiting nodes and the running ones fill a world together.
    pub(super) fn would_be_full(self) -> bool {
        let nodes = self.roster.active().len() + self.roster.waiting().len() >= self.settings.max_nodes as usize;
        let running = self.world_workers().unwrap_or_default();
        nodes || self.bounds().is_some_and(|bounds| running + self.slots() >= bounds.max as usize)
    }

    /// Whether the world may grow, of which this number of nodes runs.
    pub(super) fn has_room(self, running: usize) -> bool {
        let is_whole = self.current.size().is_none_or(|size| running >= size);
        let full =
            |bounds: WorkerBounds| is_whole && self.world_workers().is_some_and(|count| count >= bounds.max as usize);
        running < self.settings.max_nodes as usize && !self.bounds().is_some_and(full)
    }

    /// Whether a world of the waiting nodes would have a member of the last world, and be no larger than it.
    pub(super) fn shrinks(self) -> bool {
        let (waiting, size) = match (self.bounds(), self.world_workers()) {
            (Some(bounds), Some(count)) => (self.slots().min(bounds.max as usize), Some(count)),
            _ => (self.roster.waiting().len(), self.current.size()),
        };
        self.roster.counts().returning > 0 && size.is_some_and(|size| waiting <= size)
    }

    /// The members of the next world, by rank: first members of the last world, then newcomers by arrival, as far as there is room.
    pub(super) fn next_members(self) -> Vec<Assignment> {
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
                // The node kills those that have no slot.
                if let Survival::Attended(survivors) = &mut workers.survival {
                    survivors.retain(|survivor| survivor.local_rank < size);
                }
                if workers.local_world_size == 0 {
                    continue;
                }
            }
            let last_rank = self.roster.last_rank(node).filter(|_| !self.settings.ranks_as_asked);
            let key = Assignment { id, workers };
            candidates.push(Candidate { key, last_rank, node_rank: join.node_rank, addr: node.addr() });
        }
        assign(candidates)
    }

    /// When it is a waiting node's turn to be admitted, before those with a higher key.
    fn turn(self, node: &Node) -> (bool, bool, u64) {
        let Status::Waiting { join, arrival } = &node.status else { return (true, true, u64::MAX) };
        let Some(rank) = self.roster.last_rank(node) else { return (true, false, *arrival) };
        let had = self.current.world().and_then(|world| world.local_world_size(rank));
        let was_cut = had < join.workers.as_ref().map(|workers| workers.local_world_size);
        (false, was_cut, rank.into())
    }

    /// How many nodes wait or run, and of how many, in words.
    pub(super) fn known_text(self) -> String {
        let known = self.roster.waiting().len() + self.roster.active().len();
        match self.bounds() {
            None => format!("{known} of {} nodes", self.settings.node_counts()),
            Some(bounds) => format!("{}; {} of {bounds} workers wait", nodes(known), self.slots()),
        }
    }

    /// How many nodes have joined, in words.
    pub(super) fn joined_text(self) -> String {
        let waiting = self.roster.waiting().len();
        match self.bounds() {
            None => format!("{waiting} of {} nodes have joined", self.settings.node_counts()),
            Some(bounds) => format!("{} of {bounds} workers have joined, on {}", self.slots(), nodes(waiting)),
        }
    }

    /// What the round has, and what it needs at least, in words.
    pub(super) fn gathering_text(self) -> String {
        let waiting = self.roster.waiting().len();
        match self.bounds().filter(|bounds| self.slots() < bounds.min as usize) {
            None => format!("{waiting} of at least {} nodes", self.settings.min_nodes),
            Some(bounds) => format!("{} of at least {}", self.slots(), workers(bounds.min as usize)),
        }
    }

    /// How much is missing even if all running members come back, in words.
    pub(super) fn needed_text(self) -> Option<String> {
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

/// The next world, and what is recorded of it.
pub(super) struct NextWorld {
    pub world: World,
    /// Its nodes, in the order of their ranks.
    pub members: Vec<NodeId>,
    /// How its workers begin.
    pub resume: Resume,
    /// The name of the node with rank 0.
    pub rank0: Option<String>,
    /// Whether workers of the last world live on.
    pub survive: bool,
    /// The global ranks of those that have had the job's state, if the numbers of all workers are known.
    pub survivors: BTreeSet<u32>,
    /// What is probably a mistake of the user's.
    pub warning: Option<String>,
}

/// The world of the waiting nodes.
pub(super) fn next_world(parts: Parts, why_now: &str) -> NextWorld {
    let roster = parts.roster;
    let assignments = parts.next_members();
    let members: Vec<NodeId> = assignments.iter().map(|member| member.id).collect();
    let first = members.first().and_then(|id| roster.get(*id));
    let offered: Option<Vec<JoinWorkers>> = assignments.iter().map(|member| member.workers.clone()).collect();
    let workers = offered.map(|offered| assign_workers(&offered));
    let round = parts.next_round();
    let generation = Generation { round, world: world_id(round, &members) };
    let resume = resume_of(parts, &assignments, workers.as_deref(), generation);
    let began_with = match resume {
        Resume::Continue { generation, .. } => generation,
        Resume::Restart { .. } => generation,
    };
    let survivors = survivors(&assignments, workers.as_deref().unwrap_or_default());
    let world = World {
        id: generation.world,
        size: members.len() as u32,
        master: first.and_then(|node| Some((reachable_addr(roster, node, &members), join(node)?.store_port))),
        reason: format!("{why_now}{}", roster.list(&members.iter().copied().collect())),
        members: (0..).zip(members.iter().copied()).collect(),
        restart: parts.current.restart(),
        workers,
        claimed_workers: None,
        began_with,
    };
    NextWorld {
        world,
        resume,
        rank0: first.map(|node| node.name.clone()),
        survive: members.iter().filter_map(|id| roster.get(*id)).any(has_survivors),
        survivors,
        warning: (!parts.current.has_formed()).then(|| warning_of_shared_hosts(roster, &members)).flatten(),
        members,
    }
}

/// A warning if members run on one host: most often one agent too many was started there, and each has started the workers of the
/// whole machine. Agents that a driver has started have their hosts' names, and are meant.
fn warning_of_shared_hosts(roster: &Roster, members: &[NodeId]) -> Option<String> {
    let mut by_host: BTreeMap<(String, &str), Vec<&Node>> = BTreeMap::new();
    for node in members.iter().filter_map(|id| roster.get(*id)).filter(|node| node.host_name.is_none()) {
        let host = node.name.rsplit_once(':').map_or(node.name.as_str(), |(host, _)| host);
        by_host.entry((node.addr(), host)).or_default().push(node);
    }
    let shared = by_host.into_iter().find(|(_, nodes)| nodes.len() > 1);
    let ((addr, host), nodes) = shared?;
    let slots = |node: &&Node| join(node).and_then(|join| Some(join.workers.as_ref()?.local_world_size.to_string()));
    let slots: Vec<String> = nodes.iter().take(8).filter_map(slots).collect();
    let workers = if slots.is_empty() { String::new() } else { format!(", with {} workers", slots.join(" + ")) };
    Some(format!(
        "{} agents of this job run on one machine, {addr} ({host}){workers}. If that is not meant, start one agent on each machine, by \
         `srun --ntasks-per-node=1` for example",
        nodes.len()
    ))
}

/// The address under which the other members reach `node`.
///
/// The coordinator may see a node on its own host under a loopback address, which nodes on other hosts cannot use. Then the
/// address is the one by which another member has reached the coordinator.
fn reachable_addr(roster: &Roster, node: &Node, members: &[NodeId]) -> String {
    if node.local_addr.is_none() && node.ends.is_some_and(|ends| ends.peer.is_loopback()) {
        let elsewhere = |id: &NodeId| roster.get(*id)?.ends.filter(|ends| !ends.peer.is_loopback());
        if let Some(ends) = members.iter().find_map(elsewhere) {
            return ends.local.to_string();
        }
    }
    node.addr()
}

/// Whether workers of a waiting node have survived the last round.
fn has_survivors(node: &Node) -> bool {
    let workers = join(node).and_then(|join| join.workers.as_ref());
    workers.is_some_and(|workers| !workers.survivors().is_empty())
}

/// The global ranks of the workers that have had the job's state, by the ranks of their nodes' workers. One that was started before its node
/// joined lives on too, and has never had it.
fn survivors(members: &[Assignment], ranks: &[WorkerRanks]) -> BTreeSet<u32> {
    let of = |(member, ranks): (&Assignment, &WorkerRanks)| {
        let survivors = member.workers.iter().flat_map(JoinWorkers::survivors).filter(|it| it.generation.is_some());
        survivors.map(|it| ranks.first_rank.saturating_add(it.local_rank)).collect::<Vec<_>>()
    };
    members.iter().zip(ranks).flat_map(of).collect()
}

/// The request of a waiting node.
fn join(node: &Node) -> Option<&Join> {
    match &node.status {
        Status::Waiting { join, .. } => Some(join),
        _ => None,
    }
}

/// Digest (FNV-1a) of a world's round and members. The members' ids are random, so two worlds share a digest only if they have the
/// same members in the same round.
fn world_id(round: Round, members: &[NodeId]) -> u64 {
    let bytes = members.iter().flat_map(|id| id.0.to_le_bytes()).chain(round.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A member of the next round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate<K> {
    /// The caller's key, which [`assign`] returns.
    pub key: K,
    /// Rank in the last round. `None` for a newcomer.
    pub last_rank: Option<u32>,
    /// Rank that the user asked for. Orders newcomers.
    pub node_rank: Option<u32>,
    /// Address. Orders newcomers with equal `node_rank` or none.
    pub addr: String,
}

/// Order the candidates by their new ranks: index 0 is rank 0.
///
/// Survivors keep their ranks, and newcomers fill the holes, the lowest first. Rank 0 is a survivor if there is one: if the old
/// rank 0 is gone, the lowest-ranked survivor gets it. Remaining holes close up in order. Newcomers are ordered by `node_rank`
/// where given, then by natural order of addresses, then by their order in `candidates`.
pub fn assign<K>(candidates: Vec<Candidate<K>>) -> Vec<K> {
    let (mut survivors, mut newcomers): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|c| c.last_rank.is_some());
    survivors.sort_by_key(|c| c.last_rank);
    newcomers.sort_by(|a, b| {
        let asked = |c: &Candidate<K>| c.node_rank.unwrap_or(u32::MAX);
        asked(a).cmp(&asked(b)).then_with(|| natural_order(&a.addr, &b.addr))
    });
    if let Some(first) = survivors.first_mut() {
        first.last_rank = Some(0);
    }

    let mut ordered = Vec::with_capacity(survivors.len() + newcomers.len());
    let mut newcomers = newcomers.into_iter();
    for survivor in survivors {
        let rank = survivor.last_rank.unwrap_or_default() as usize;
        while ordered.len() < rank {
            let Some(newcomer) = newcomers.next() else { break };
            ordered.push(newcomer.key);
        }
        ordered.push(survivor.key);
    }
    ordered.extend(newcomers.map(|c| c.key));
    ordered
}

/// Assign ranks to workers. `nodes` is in the order of the nodes' ranks; a node's workers have consecutive ranks.
///
/// The result is that of `_assign_worker_ranks` in `torch/distributed/elastic/agent/server/api.py` (2.15), which sends every node's
/// role through the store. Sums saturate at 32 bits.
pub fn assign_workers(nodes: &[JoinWorkers]) -> Vec<WorkerRanks> {
    let (mut world_size, mut of_role) = (0_u32, HashMap::<&str, u32>::new());
    let mut first = Vec::with_capacity(nodes.len());
    for JoinWorkers { role, local_world_size, .. } in nodes {
        let role_size = of_role.entry(role).or_default();
        first.push((world_size, *role_size));
        world_size = world_size.saturating_add(*local_world_size);
        *role_size = role_size.saturating_add(*local_world_size);
    }
    let with_sizes = |(node, (first_rank, first_role_rank)): (&JoinWorkers, (u32, u32))| WorkerRanks {
        first_rank,
        world_size,
        first_role_rank,
        role_world_size: of_role.get(node.role.as_str()).copied().unwrap_or_default(),
    };
    nodes.iter().zip(first).map(with_sizes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(key: &'static str, last_rank: Option<u32>) -> Candidate<&'static str> {
        Candidate { key, last_rank, node_rank: None, addr: key.into() }
    }

    #[test]
    fn the_first_round_follows_asked_ranks_then_addresses() {
        let mut b = candidate("node9", None);
        b.node_rank = Some(0);
        assert_eq!(assign(vec![candidate("node10", None), candidate("node2", None), b]), ["node9", "node2", "node10"]);
    }

    #[test]
    fn survivors_keep_their_ranks_whatever_the_newcomers_address() {
        // #191190: PyTorch moved rank 0 to the newcomer because `127.0.0.100` sorts before `127.0.0.2`.
        let round =
            vec![candidate("127.0.0.100", None), candidate("127.0.0.2", Some(0)), candidate("127.0.0.3", Some(1))];
        assert_eq!(assign(round), ["127.0.0.2", "127.0.0.3", "127.0.0.100"]);
    }

    #[test]
    fn workers_are_ranked_by_node_and_within_their_role() {
        let node = |role: &str, local_world_size| JoinWorkers::new(role, local_world_size);
        let ranks = assign_workers(&[node("trainer", 2), node("reader", 1), node("trainer", 3)]);
        let numbers = ranks.iter().map(|r| (r.first_rank, r.world_size, r.first_role_rank, r.role_world_size));
        assert_eq!(numbers.collect::<Vec<_>>(), [(0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5)]);
        assert_eq!(assign_workers(&[]), []);
    }

    #[test]
    fn newcomers_fill_holes() {
        let round = vec![candidate("a", Some(0)), candidate("c", Some(2)), candidate("x", None)];
        assert_eq!(assign(round), ["a", "x", "c"]);
    }

    #[test]
    fn holes_that_remain_close_up_in_order() {
        let round =
            vec![candidate("a", Some(0)), candidate("d", Some(3)), candidate("f", Some(5)), candidate("x", None)];
        assert_eq!(assign(round), ["a", "x", "d", "f"]);
    }

    #[test]
    fn the_lowest_survivor_becomes_rank_0_and_a_newcomer_never_does() {
        let round = vec![candidate("x", None), candidate("b", Some(1)), candidate("c", Some(2))];
        assert_eq!(assign(round), ["b", "x", "c"]);
    }
}
