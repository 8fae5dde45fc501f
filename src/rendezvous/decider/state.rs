//! What the coordinator knows of one run: its nodes, the last world, and what keeps the next round from closing.
//!
//! Holds data, counters that keep each event's cost constant, and the words in which the state explains itself.
//! Deciding is [`crate::rendezvous::coordinator::machine`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::admission::{Departures, Place};
use super::home::Home;
use super::ranks::natural_order;
use super::standing::Standing;
use crate::rendezvous::protocol::message::{Failure, Hello, Join, NodeId, Placed, Round, Verdict, Waits, WorkerRanks};
use crate::rendezvous::protocol::settings::{LAST_LOOK, Settings};

/// One connection of a node, numbered by the driver. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// The two ends of a session's connection, as the coordinator's host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The node's address.
    pub peer: IpAddr,
    /// The address by which the node reached the coordinator.
    pub local: IpAddr,
}

/// What a node is doing. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Connected, has not asked to join, or has withdrawn.
    Idle,
    /// Waits for a place in the next round.
    Waiting {
        /// What it brought.
        join: Join,
        /// Order of arrival.
        arrival: u64,
    },
    /// Runs workers of the current round.
    Active,
}

/// One node, connected or within its grace.
#[derive(Clone, Debug)]
pub struct Node {
    pub(in crate::rendezvous) name: String,
    pub(in crate::rendezvous) local_addr: Option<String>,
    pub(in crate::rendezvous) ends: Ends,
    /// Drawn by its process.
    pub(in crate::rendezvous) process: u64,
    /// Rank the user gave it.
    pub(in crate::rendezvous) node_rank: Option<u32>,
    /// What it asked for. What holds for it is the run's, once the run has nodes that take part.
    pub(in crate::rendezvous) asked: Settings,
    pub(in crate::rendezvous) lease: Duration,
    pub(in crate::rendezvous) reconnect_grace: Duration,
    /// `None` while the connection is broken.
    pub(in crate::rendezvous) session: Option<SessionId>,
    /// When something was last heard; for a broken connection, when it broke.
    pub(in crate::rendezvous) heard_at: Instant,
    /// The lease has ended; one last look before the node is judged.
    pub(in crate::rendezvous) suspect: bool,
    pub(in crate::rendezvous) status: Status,
    /// Last place: round and rank.
    pub(in crate::rendezvous) placed: Option<(Round, u32)>,
    /// Its workers of the current round have all succeeded.
    pub(in crate::rendezvous) done: bool,
}

impl Node {
    /// Introduce a node. Nothing is known of its last round yet.
    pub(in crate::rendezvous) fn new(hello: &Hello, session: SessionId, ends: Ends, now: Instant) -> Self {
        Self {
            name: hello.name.clone(),
            local_addr: hello.local_addr.clone(),
            ends: Ends { peer: ends.peer.to_canonical(), local: ends.local.to_canonical() },
            process: hello.process,
            node_rank: hello.node_rank,
            asked: hello.settings.clone(),
            lease: hello.settings.lease(),
            reconnect_grace: hello.settings.reconnect_grace,
            session: Some(session),
            heard_at: now,
            suspect: false,
            status: Status::Idle,
            placed: None,
            done: false,
        }
    }

    /// The address others use: the user's, else the one the coordinator sees.
    pub(in crate::rendezvous) fn addr(&self) -> String {
        self.local_addr.clone().unwrap_or_else(|| self.ends.peer.to_string())
    }

    /// How messages call the node: its address, and who that is.
    pub(in crate::rendezvous) fn label(&self) -> String {
        format!("{} ({})", self.addr(), self.name)
    }

    /// When the node is lost unless it is heard of.
    pub(in crate::rendezvous) fn lost_at(&self) -> Instant {
        match (self.session, self.suspect) {
            (None, _) => self.heard_at + self.reconnect_grace,
            (Some(_), false) => self.heard_at + self.lease,
            (Some(_), true) => self.heard_at + self.lease + LAST_LOOK,
        }
    }
}

/// The world of the last completed round. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct World {
    /// Tells it from others of the same round, which another life of the coordinator has formed.
    pub id: u64,
    /// Number of nodes.
    pub size: u32,
    /// Address and port of rank 0's worker store; unknown when this coordinator did not form the world.
    pub master: Option<(String, u16)>,
    /// Why the round closed when it did.
    pub reason: String,
    /// Who has which rank. Of a world that this coordinator did not form: those who have reported.
    pub members: BTreeMap<u32, NodeId>,
    /// The job's restart number when it was formed.
    pub restart: u32,
    /// Ranks of workers by the node's rank, if every member said how many it has.
    pub workers: Option<Vec<WorkerRanks>>,
}

/// Under which times a run is in the machine's indexes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Filed {
    /// When it is looked at.
    pub due: Option<Instant>,
    /// Since when it has had nodes, and no connection.
    pub deserted: Option<Instant>,
}

/// One rendezvous: all nodes with one run id.
#[derive(Clone, Debug)]
pub struct Run {
    pub(in crate::rendezvous) id: String,
    pub(in crate::rendezvous) settings: Settings,
    pub(in crate::rendezvous) nodes: BTreeMap<NodeId, Node>,
    pub(in crate::rendezvous) round: Round,
    pub(in crate::rendezvous) world: Option<World>,
    pub(in crate::rendezvous) closed: Option<Verdict>,
    /// The world was full and undisturbed when the rendezvous was closed: who waited then was a spare.
    pub(in crate::rendezvous) full_at_close: bool,
    /// Why the current world must re-form, if it must.
    pub(in crate::rendezvous) interrupted: Option<String>,
    /// The failure because of which it must, if one is the cause.
    pub(in crate::rendezvous) failure: Option<Box<Failure>>,
    /// How many failures have been taken from the job's budget.
    pub(in crate::rendezvous) restart: u32,
    /// Members have been told that the world must re-form.
    pub(in crate::rendezvous) told: bool,
    /// Nodes that run workers of the current round.
    pub(in crate::rendezvous) active: BTreeSet<NodeId>,
    /// Of these, the ones whose workers have not all succeeded.
    pub(in crate::rendezvous) unfinished: BTreeSet<NodeId>,
    /// Nodes that wait for a place in the next one.
    pub(in crate::rendezvous) waiting: BTreeSet<NodeId>,
    /// Of the active ones, those whose workers have all succeeded.
    pub(in crate::rendezvous) done_count: usize,
    /// Of those waiting, the members of the last world.
    pub(in crate::rendezvous) returning_count: usize,
    /// Of those waiting, the ones whose connection is broken at the moment.
    pub(in crate::rendezvous) unreachable_count: usize,
    /// Nodes that are connected.
    pub(in crate::rendezvous) connected_count: usize,
    /// Of those, the ones that wait or run.
    pub(in crate::rendezvous) present_count: usize,
    pub(in crate::rendezvous) arrivals: u64,
    /// When the first newcomer asked for the next round.
    pub(in crate::rendezvous) newcomer_since: Option<Instant>,
    /// Since when the next round could close, were it not for nodes that may still come.
    pub(in crate::rendezvous) ready_since: Option<Instant>,
    /// After this coordinator was restarted: until when members of a world it did not form are given time to report. Till then
    /// those who do run on undisturbed.
    pub(in crate::rendezvous) hold_until: Option<Instant>,
    /// Who holds which place, to find an agent that was started anew.
    pub(in crate::rendezvous) places: BTreeMap<Place, NodeId>,
    /// Agents whose place is another's: they may not take it back. One for each agent that was started anew.
    pub(in crate::rendezvous) replaced: BTreeSet<NodeId>,
    pub(in crate::rendezvous) departures: Departures,
    /// Worlds that this coordinator has formed, or has been told of first.
    pub(in crate::rendezvous) worlds: BTreeSet<u64>,
    /// Other worlds that nodes have named, while this coordinator was young.
    pub(in crate::rendezvous) strangers: BTreeSet<u64>,
    /// Highest round that a node has named: no round gets a number that a node may know from another life of this coordinator.
    pub(in crate::rendezvous) named: Round,
    /// Until when nodes of a world that an earlier life of this coordinator has formed may still run: see [`super::claims`]. `None`:
    /// that is over, or never was.
    pub(in crate::rendezvous) young_until: Option<Instant>,
    /// Until when nodes may still run a world of an earlier life of this coordinator, beside the one it knows of: no round
    /// closes before.
    pub(in crate::rendezvous) strangers_until: Option<Instant>,
    /// When the next round closes, if nothing changes.
    pub(in crate::rendezvous) close_at: Option<Instant>,
    /// When to look for lost nodes next.
    pub(in crate::rendezvous) check_at: Option<Instant>,
    /// Since when nobody has been in this run.
    pub(in crate::rendezvous) vacant_since: Option<Instant>,
    /// The node whose settings the run has.
    pub(in crate::rendezvous) bound_to: Option<NodeId>,
    /// Under which times the run is in the machine's indexes.
    pub(in crate::rendezvous) filed: Filed,
    /// The node in the coordinator's own process.
    pub(in crate::rendezvous) host: Option<(NodeId, Home)>,
    /// The rank of the current world whose process hosted the coordinator before this one, and is known to have ended.
    pub(in crate::rendezvous) gone_rank: Option<u32>,
    /// What was decided last, as it was logged.
    pub(in crate::rendezvous) standing: Standing,
}

impl Run {
    /// A run nobody has joined yet.
    pub(in crate::rendezvous) fn new(id: String, settings: Settings) -> Self {
        Self {
            id,
            settings,
            nodes: BTreeMap::new(),
            round: Round(0),
            world: None,
            closed: None,
            full_at_close: false,
            interrupted: None,
            failure: None,
            restart: 0,
            told: false,
            active: BTreeSet::new(),
            unfinished: BTreeSet::new(),
            waiting: BTreeSet::new(),
            done_count: 0,
            returning_count: 0,
            unreachable_count: 0,
            connected_count: 0,
            present_count: 0,
            arrivals: 0,
            newcomer_since: None,
            ready_since: None,
            hold_until: None,
            places: BTreeMap::new(),
            replaced: BTreeSet::new(),
            departures: Departures::default(),
            worlds: BTreeSet::new(),
            strangers: BTreeSet::new(),
            named: Round(0),
            young_until: None,
            strangers_until: None,
            close_at: None,
            check_at: None,
            vacant_since: None,
            bound_to: None,
            filed: Filed::default(),
            host: None,
            gone_rank: None,
            standing: Standing::default(),
        }
    }

    /// Whether a new run of this name would be the same.
    pub(in crate::rendezvous) fn is_blank(&self) -> bool {
        let never_ran = self.round == Round(0) && self.restart == 0 && self.closed.is_none() && self.worlds.is_empty();
        never_ran
            && self.nodes.is_empty()
            && self.replaced.is_empty()
            && self.strangers.is_empty()
            && self.named == Round(0)
            && self.departures.is_empty()
    }

    /// The number of the next round.
    pub(in crate::rendezvous) fn next_round(&self) -> Round {
        self.round.max(self.named).next()
    }

    /// When to look at this run at the latest.
    pub(in crate::rendezvous) fn due(&self) -> Option<Instant> {
        [self.check_at, self.close_at, self.hold_until].into_iter().flatten().min()
    }

    /// Whether this coordinator has formed the current world itself, rather than been told of it.
    pub(in crate::rendezvous) fn has_formed(&self) -> bool {
        self.world.as_ref().is_some_and(|world| world.master.is_some())
    }

    /// Rank in the last world, for a node that belonged to it.
    pub(in crate::rendezvous) fn last_rank(&self, node: &Node) -> Option<u32> {
        node.placed.filter(|(round, _)| *round == self.round && self.round > Round(0)).map(|(_, rank)| rank)
    }

    /// Members that run, and those that may still report that they do.
    fn running_count(&self) -> usize {
        match (self.hold_until, &self.world) {
            (Some(_), Some(world)) => (world.size as usize).saturating_sub(self.returning_count),
            _ => self.active.len(),
        }
    }

    /// What `num_nodes_waiting()` is for members: above zero when the world must re-form.
    pub(in crate::rendezvous) fn waiting_for_members(&self) -> u32 {
        let waiting = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        if self.interrupted.is_some() {
            waiting.max(1)
        } else if self.done_count > 0 {
            // The job is about to end: growing it would make nodes begin anew that have finished.
            0
        } else if self.running_count() < self.settings.max_nodes as usize {
            waiting
        } else {
            0
        }
    }

    /// Whether a waiting node is a spare: the job is full and undisturbed, or was so when it was closed.
    pub(in crate::rendezvous) fn is_spare(&self, node: &Node) -> bool {
        let full = match self.closed {
            Some(_) => self.full_at_close,
            None => self.is_full(),
        };
        full && matches!(node.status, Status::Waiting { .. })
    }

    /// Whether the world runs and needs nobody.
    pub(in crate::rendezvous) fn is_full(&self) -> bool {
        !self.active.is_empty() && self.waiting_for_members() == 0
    }

    /// Whether every live member of an undisturbed world has finished.
    pub(in crate::rendezvous) fn is_all_done(&self) -> bool {
        self.done_count > 0
            && self.done_count == self.active.len()
            && self.interrupted.is_none()
            && self.hold_until.is_none()
            && self.closed.is_none()
    }

    /// What a node is told that waits: for its place, or, having finished, for the others to finish.
    pub(in crate::rendezvous) fn waits(&self, node: &Node, now: Instant) -> Option<Waits> {
        match node.status {
            Status::Waiting { .. } => Some(Waits { progress: self.progress(now), spare: self.is_spare(node) }),
            Status::Active if node.done => {
                let (done, all) = (self.done_count, self.active.len());
                let have = if done == 1 { "has" } else { "have" };
                let text =
                    format!("{done} of {all} nodes {have} finished; still at work{}", self.list(&self.unfinished));
                Some(Waits { progress: text, spare: false })
            }
            Status::Active | Status::Idle => None,
        }
    }

    /// How the next round stands, in words: who is in, who is missing, what is waited for and until when.
    pub fn progress(&self, now: Instant) -> String {
        let min_nodes = self.settings.min_nodes;
        let mut text = format!(
            "round {}: {} of {} nodes have joined{}",
            self.next_round(),
            self.waiting.len(),
            self.settings.node_counts(),
            self.list(&self.waiting),
        );
        if !self.active.is_empty() {
            let running = self.active.len();
            if self.waiting_for_members() == 0 {
                text += &format!("; round {} runs undisturbed (nodes: {running})", self.round);
            } else {
                let still = self.list(&self.active);
                text += &format!("; {running} still to come back from round {}{still}", self.round);
            }
        }
        let expected = self.waiting.len() + self.active.len();
        if expected < min_nodes as usize {
            text += &format!("; {} more needed", min_nodes as usize - expected);
        }
        if let Some(reason) = &self.interrupted {
            text += &format!("; re-forming because {reason}");
        }
        if let Some(at) = self.close_at {
            text += &format!("; closes within {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        }
        if let Some(why) = self.standing.holds_up() {
            text += &format!(": {why}");
        }
        text
    }

    /// ` (a, b, c and 4 more)`, or nothing. Costs the same for any number: every waiting node's heartbeat asks for it.
    pub(in crate::rendezvous) fn list(&self, which: &BTreeSet<NodeId>) -> String {
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

    /// Take up a node's own account of a later round than this coordinator knows of. Gives the sessions of nodes that run an
    /// earlier one: it is over.
    pub(in crate::rendezvous) fn recall(&mut self, placed: Placed, hold_until: Instant) -> Vec<SessionId> {
        let mut over = Vec::new();
        for node in self.nodes.values_mut().filter(|node| node.status == Status::Active) {
            (node.status, node.done) = (Status::Idle, false);
            over.extend(node.session);
        }
        self.round = placed.round;
        self.worlds.insert(placed.world);
        if !over.is_empty() {
            // They are told, and stop; those who cannot be told find out for themselves within their lease.
            self.strangers_until = self.strangers_until.max(Some(hold_until));
        }
        self.world = Some(World {
            id: placed.world,
            size: placed.world_size,
            master: None,
            reason: String::new(),
            members: BTreeMap::new(),
            restart: placed.restart,
            workers: None,
        });
        self.interrupted = None;
        self.failure = None;
        self.told = false;
        self.ready_since = None;
        self.hold_until = self.closed.is_none().then_some(hold_until);
        self.gone_rank = None;
        self.recount();
        over
    }

    /// Whether a node's account of the current round is true as far as is known: nobody else has that rank.
    ///
    /// It is not where a coordinator that was restarted has given a number anew, because nobody had told it of the first.
    pub(in crate::rendezvous) fn has_seat(&mut self, node: NodeId, placed: Placed) -> bool {
        let Some(world) = self.world.as_mut().filter(|world| placed.round == self.round && placed.world == world.id)
        else {
            return false;
        };
        let known = world.master.is_some();
        if known || placed.world_size != world.size || placed.rank >= world.size {
            return world.members.get(&placed.rank) == Some(&node);
        }
        *world.members.entry(placed.rank).or_insert(node) == node
    }

    /// The current round: number of the last one that completed.
    pub fn round(&self) -> Round {
        self.round
    }

    /// The job's restart number: how many failures have been taken from its budget.
    pub fn restart(&self) -> u32 {
        self.restart
    }

    /// Why things stand as they do: why the world must re-form, or else why it was formed as it was.
    pub fn reason(&self) -> Option<&str> {
        self.interrupted.as_deref().or(self.world.as_ref().map(|world| world.reason.as_str()))
    }

    /// How the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.closed.as_ref()
    }

    /// Whether a node is connected, or within its grace.
    pub fn knows(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// All nodes with their status and last place.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Status, Option<(Round, u32)>)> {
        self.nodes.iter().map(|(id, node)| (*id, &node.status, node.placed))
    }
}
