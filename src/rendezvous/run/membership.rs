//! The nodes of a run. Counters are updated with every change, so that an event costs the same in a large job as in a small one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::event::SessionId;
use super::node::{Node, Program, Status, natural_order};
use crate::rendezvous::messages::message::{Health, Join, NodeId, Round};

/// The nodes of a run, and the number of the round whose members they may be.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Roster {
    nodes: BTreeMap<NodeId, Node>,
    round: Round,
    active: BTreeSet<NodeId>,
    unfinished: BTreeSet<NodeId>,
    waiting: BTreeSet<NodeId>,
    counts: Counts,
    arrivals: u64,
    checks: BTreeMap<NodeId, Instant>,
    /// When to look for lost nodes: none is lost before.
    lost_by: Option<Instant>,
}

/// The number of nodes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Counts {
    /// Waiting nodes that were members of the last world.
    pub returning: usize,
    /// Waiting nodes with a broken connection.
    pub unreachable: usize,
    /// Active nodes that reported that all their workers succeeded.
    pub done: usize,
    /// Active nodes whose workers are all connected to their agent.
    pub attending: usize,
    /// Connected nodes.
    pub connected: usize,
    /// Connected nodes that wait or run.
    pub present: usize,
    /// Workers that the waiting nodes offer.
    pub slots: usize,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.for_each(other, |mine, its| mine + its);
    }

    fn subtract(&mut self, other: Self) {
        self.for_each(other, |mine, its| mine - its);
    }

    fn for_each(&mut self, other: Self, of: impl Fn(usize, usize) -> usize) {
        let Self { returning, unreachable, done, attending, connected, present, slots } = *self;
        *self = Self {
            returning: of(returning, other.returning),
            unreachable: of(unreachable, other.unreachable),
            done: of(done, other.done),
            attending: of(attending, other.attending),
            connected: of(connected, other.connected),
            present: of(present, other.present),
            slots: of(slots, other.slots),
        };
    }
}

impl Roster {
    /// Make a roster of nodes read from a shared cell.
    pub fn restored(round: Round, arrivals: u64, nodes: BTreeMap<NodeId, Node>) -> Self {
        let mut roster = Self { nodes, round, arrivals, ..Self::default() };
        roster.recount();
        roster.look_when_lost();
        roster
    }

    /// Number of joins so far.
    pub fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// A node, if it is connected or within its `reconnect_grace`.
    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// Whether a node is connected, or within its `reconnect_grace`.
    pub fn knows(&self, id: NodeId) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// All nodes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    /// The ids of all nodes.
    pub fn ids(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    /// The nodes with these ids, as far as they exist.
    pub fn of<'a>(&'a self, which: &'a BTreeSet<NodeId>) -> impl Iterator<Item = (NodeId, &'a Node)> {
        which.iter().filter_map(|id| Some((*id, self.nodes.get(id)?)))
    }

    /// Nodes that run workers of the current round.
    pub fn active(&self) -> &BTreeSet<NodeId> {
        &self.active
    }

    /// Active nodes that have not reported that all their workers succeeded.
    pub fn unfinished(&self) -> &BTreeSet<NodeId> {
        &self.unfinished
    }

    /// Nodes that wait for the next round.
    pub fn waiting(&self) -> &BTreeSet<NodeId> {
        &self.waiting
    }

    /// The number of nodes of each kind.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether the workers of all active nodes are connected to their agents, and none has finished: they can change in place.
    pub fn is_attended(&self) -> bool {
        let active = self.active.len();
        active > 0 && self.counts.attending == active && self.counts.done == 0
    }

    /// Number of the last round that completed.
    pub fn round(&self) -> Round {
        self.round
    }

    /// Rank in the last world, for a node that belonged to it.
    pub fn last_rank(&self, node: &Node) -> Option<u32> {
        last_rank(node, self.round)
    }

    /// Round and rank of a node that runs workers of the current round.
    pub fn assignment(&self, id: NodeId) -> Option<(Round, u32)> {
        let node = self.get(id).filter(|node| node.status == Status::Active)?;
        node.placed.filter(|(round, _)| *round == self.round)
    }

    /// Whether a node has or had a rank in the current round.
    pub fn was_placed(&self, id: NodeId) -> bool {
        self.get(id).and_then(|node| node.placed).is_some_and(|(round, _)| round == self.round)
    }

    /// Whether a node neither waits nor runs.
    pub fn is_idle(&self, id: NodeId) -> bool {
        self.get(id).is_some_and(|node| node.status == Status::Idle)
    }

    /// Whether a connected node has this address: that of its connection, or one that it has named as its own.
    pub fn has_node_at(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.nodes.values().filter(|node| node.session.is_some()).any(|node| {
            node.ends.is_some_and(|ends| {
                ends.peer.to_canonical() == address || node.interfaces.iter().flatten().any(|its| *its == address)
            })
        })
    }

    /// A node's name in messages.
    pub fn label(&self, id: NodeId) -> String {
        self.nodes.get(&id).map(Node::label).unwrap_or_default()
    }

    /// List nodes as ` (a, b, c, and 4 more)`, or as an empty text. At most 8 are named, because every waiting node's heartbeat
    /// makes this text.
    pub fn list(&self, which: &BTreeSet<NodeId>) -> String {
        const SHOWN: usize = 8;
        let mut names: Vec<_> = which.iter().take(SHOWN).filter_map(|id| self.nodes.get(id)).map(Node::label).collect();
        if names.is_empty() {
            return String::new();
        }
        names.sort_by(|a, b| natural_order(a, b));
        if which.len() > SHOWN {
            names.push(format!("and {} more", which.len() - SHOWN));
        }
        format!(" ({})", names.join(", "))
    }

    /// Count a join. Returns the number of joins before it.
    pub fn next_arrival(&mut self) -> u64 {
        let arrival = self.arrivals;
        self.arrivals += 1;
        arrival
    }

    /// Insert a node, or replace the entry with its id.
    pub fn insert(&mut self, id: NodeId, node: Node) {
        self.remove(id);
        self.count(id, Share::default(), Share::of(&node, self.round));
        self.look_no_later(&node);
        self.nodes.insert(id, node);
    }

    /// Forget a node.
    pub fn remove(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.remove(&id) {
            self.count(id, Share::of(&node, self.round), Share::default());
        }
    }

    /// Change a node's status. Has no effect on an unknown node.
    pub fn set_status(&mut self, id: NodeId, status: Status) {
        if !matches!(status, Status::Waiting { .. }) {
            self.set_check(id, None);
        }
        self.update(id, |node| (node.status, node.done, node.attending) = (status, false, false));
    }

    /// Record whether a node's host is out.
    pub fn set_out(&mut self, id: NodeId, out: bool) {
        self.update(id, |node| node.out = out);
    }

    /// The waiting nodes whose health check runs, and until when at the latest.
    pub fn checks(&self) -> &BTreeMap<NodeId, Instant> {
        &self.checks
    }

    /// Record that a node's health check runs until then at the latest, or has ended.
    pub fn set_check(&mut self, id: NodeId, until: Option<Instant>) {
        match until {
            Some(until) => _ = self.checks.entry(id).or_insert(until),
            None => _ = self.checks.remove(&id),
        }
        if until.is_none() {
            self.update(id, |node| node.unchecked = false);
        }
    }

    /// Leave a node out of rounds until its health check has ended.
    pub fn set_unchecked(&mut self, id: NodeId) {
        self.update(id, |node| node.unchecked = true);
    }

    /// A node that waits has to check its machine again.
    pub fn check_again(&mut self, id: NodeId) {
        self.update(id, |node| {
            node.rechecks = true;
            if let Status::Waiting { join, .. } = &mut node.status {
                join.health = Health::Checking;
            }
        });
    }

    /// A node checks its machine.
    pub fn checks_now(&mut self, id: NodeId) {
        self.update(id, |node| node.rechecks = false);
    }

    /// Record that a node's workers of the current round have all succeeded.
    pub fn set_done(&mut self, id: NodeId) {
        self.update(id, |node| node.done = true);
    }

    /// Record that a node's workers of the current round are all connected to their agent.
    pub fn set_attending(&mut self, id: NodeId) {
        self.update(id, |node| node.attending = true);
    }

    /// Count that a node has reported the durations of its phases of the last recovery.
    pub fn count_phase(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.phases_reported = node.phases_reported.saturating_add(1);
        }
    }

    /// Record that a node has reported its first step of the current round.
    pub fn set_first_step_reported(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.first_step_reported = true;
        }
    }

    /// Record what a node's workers run, and when it first asked to join, if that matters.
    pub fn set_program(&mut self, id: NodeId, join: &Join, joined_at: Option<Instant>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if let Some(workers) = &join.workers {
            node.program = Some(Program { role: workers.role.clone(), script: workers.script.clone() });
        }
        node.joined_at = node.joined_at.or(joined_at);
    }

    /// Record that a node's connection has ended.
    pub fn disconnect(&mut self, id: NodeId, now: Instant) {
        self.update(id, |node| (node.session, node.received_at) = (None, now));
        let lost_at = self.nodes.get(&id).map(Node::lost_at);
        self.lost_by = self.lost_by.into_iter().chain(lost_at).min();
    }

    /// Renew a node's lease: a message has arrived.
    pub fn renew_lease(&mut self, id: NodeId, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            (node.received_at, node.suspect) = (now, false);
        }
    }

    /// A node's machine is taken away then. Of several such times the first counts.
    pub fn set_gone_at(&mut self, id: NodeId, gone_at: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.gone_at = node.gone_at.into_iter().chain([gone_at]).min();
        }
        self.look_when_lost();
    }

    /// Renew every node's lease.
    pub fn renew_all_leases(&mut self, now: Instant) {
        for node in self.nodes.values_mut() {
            (node.received_at, node.suspect) = (now, false);
            node.gone_at = node.gone_at.map(|gone_at| gone_at.max(now));
        }
        self.look_when_lost();
    }

    /// Set the lease and the reconnect grace of every node.
    pub fn set_limits(&mut self, lease: Duration, reconnect_grace: Duration) {
        for node in self.nodes.values_mut() {
            (node.lease, node.reconnect_grace) = (lease, reconnect_grace);
        }
        self.look_when_lost();
    }

    /// End the reconnect grace of every node.
    pub fn end_graces(&mut self, now: Instant) {
        self.nodes.values_mut().for_each(|node| node.reconnect_grace = Duration::ZERO);
        self.lost_by = Some(now);
    }

    /// Start a round with these members, in the order of their ranks.
    pub fn begin_round(&mut self, round: Round, members: &[NodeId]) {
        self.round = round;
        self.checks.retain(|id, _| !members.contains(id));
        for (rank, id) in (0..).zip(members) {
            if let Some(node) = self.nodes.get_mut(id) {
                (node.status, node.placed) = (Status::Active, Some((round, rank)));
                (node.done, node.attending, node.phases_reported, node.first_step_reported) = (false, false, 0, false);
            }
        }
        self.recount();
    }

    /// Adopt a round that this coordinator did not form. Nodes that run here do not belong to it and become idle. Returns their
    /// sessions.
    pub fn adopt_round(&mut self, round: Round) -> Vec<SessionId> {
        let mut over = Vec::new();
        for node in self.nodes.values_mut().filter(|node| node.status == Status::Active) {
            (node.status, node.done, node.attending) = (Status::Idle, false, false);
            over.extend(node.session);
        }
        self.round = round;
        self.recount();
        over
    }

    /// Find the nodes that are lost. A node whose lease ends in silence is first a suspect. It is lost after a further
    /// [`LAST_LOOK`], in which the driver reads messages that have already arrived.
    ///
    /// [`LAST_LOOK`]: crate::rendezvous::messages::settings::LAST_LOOK
    pub fn lost(&mut self, now: Instant) -> Vec<NodeId> {
        for node in self.nodes.values_mut() {
            if !node.suspect && node.session.is_some() && node.lost_at() <= now {
                node.suspect = true;
                node.received_at = now.checked_sub(node.lease).unwrap_or(now);
            }
        }
        self.nodes.iter().filter(|(_, node)| node.lost_at() <= now).map(|(id, _)| *id).collect()
    }

    /// When to look for lost nodes: none is lost before.
    pub fn lost_by(&self) -> Option<Instant> {
        self.lost_by
    }

    /// Look again when the first node is lost, unless a message of it arrives.
    pub fn look_when_lost(&mut self) {
        self.lost_by = self.nodes.values().map(Node::lost_at).min();
    }

    /// Look no later than when this node is lost.
    fn look_no_later(&mut self, node: &Node) {
        self.lost_by = self.lost_by.into_iter().chain([node.lost_at()]).min();
    }

    /// Compare the counters with a recount.
    ///
    /// # Errors
    /// Describes the difference.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        let kept = (self.counts, [&self.active, &self.unfinished, &self.waiting]);
        let (counts, sets) = self.counts_and_sets();
        let fresh = (counts, sets.each_ref());
        if kept == fresh { Ok(()) } else { Err(format!("counters are {kept:?}, a recount gives {fresh:?}")) }
    }

    /// Change a node where it is. Has no effect on an unknown node.
    fn update(&mut self, id: NodeId, change: impl FnOnce(&mut Node)) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let before = Share::of(node, self.round);
        change(node);
        let after = Share::of(node, self.round);
        self.count(id, before, after);
    }

    /// A node counts otherwise than before.
    fn count(&mut self, id: NodeId, before: Share, after: Share) {
        self.counts.subtract(before.counts);
        self.counts.add(after.counts);
        for (set, was, is) in [
            (&mut self.active, before.active, after.active),
            (&mut self.unfinished, before.unfinished, after.unfinished),
            (&mut self.waiting, before.waiting, after.waiting),
        ] {
            match (was, is) {
                (false, true) => drop(set.insert(id)),
                (true, false) => drop(set.remove(&id)),
                _ => {}
            }
        }
    }

    /// Recount all nodes after the round has changed.
    fn recount(&mut self) {
        (self.counts, [self.active, self.unfinished, self.waiting]) = self.counts_and_sets();
    }

    /// Derive the counts, and the ids of active, unfinished and waiting nodes, from all nodes.
    fn counts_and_sets(&self) -> (Counts, [BTreeSet<NodeId>; 3]) {
        let shares: Vec<_> = self.nodes.iter().map(|(id, node)| (*id, Share::of(node, self.round))).collect();
        let mut counts = Counts::default();
        shares.iter().for_each(|(_, share)| counts.add(share.counts));
        let of =
            |which: fn(&Share) -> bool| shares.iter().filter(|(_, share)| which(share)).map(|(id, _)| *id).collect();
        (counts, [of(|it| it.active), of(|it| it.unfinished), of(|it| it.waiting)])
    }
}

/// What a node contributes to the counts, and the sets that it belongs to. It depends on the round, so every change of the round
/// recounts all nodes.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    counts: Counts,
    active: bool,
    unfinished: bool,
    waiting: bool,
}

impl Share {
    fn of(node: &Node, round: Round) -> Self {
        let (active, waiting, connected) = (node.status == Status::Active, node.waits(), node.session.is_some());
        let counts = Counts {
            returning: usize::from(waiting && last_rank(node, round).is_some()),
            unreachable: usize::from(waiting && !connected),
            done: usize::from(active && node.done),
            attending: usize::from(active && node.attending),
            connected: usize::from(connected),
            present: usize::from(connected && node.status != Status::Idle),
            slots: node.slots(),
        };
        Self { counts, active, unfinished: active && !node.done, waiting }
    }
}

/// Rank in the world of this round, for a node that belonged to it.
fn last_rank(node: &Node, round: Round) -> Option<u32> {
    node.placed.filter(|(placed, _)| *placed == round && round > Round(0)).map(|(_, rank)| rank)
}
