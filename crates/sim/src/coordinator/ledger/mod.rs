//! The invariants after every event, checked on the messages that were sent and received, not on the machines' own records.
//! [`crate::worlds`] has the invariants of any rendezvous. The others here are further promises of ours. This file keeps the
//! record of what was said, `checks`, `completion` and `in_place` judge by it.
//!
//! Within one life of the coordinator a round number belongs to one world. A restarted coordinator knows of earlier rounds only
//! what nodes report to it. So across its lives this holds: a new number is above every number that a node has named to this life, and
//! each node gets rising numbers.

mod checks;
pub(crate) mod chronicle;
mod completion;
mod in_place;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

pub use checks::check_settled;
pub use chronicle::Chronicle;
pub(super) use in_place::NONE_HAS_THE_STATE;

use super::options::run_id;
use elastic_rs::hosts::WhyUnused;
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::messages::message::{Hello, Join, JoinWorkers, NodeId, NodeMessage, Placed, Round};
use elastic_rs::rendezvous::messages::settings::{OnPartition, Settings};
use elastic_rs::rendezvous::run::{Exclusion, SessionId};

/// The last message of a node on its session, as the coordinator has read it.
#[derive(Clone, Debug)]
struct Reported {
    node: NodeId,
    settings: Settings,
    node_rank: Option<u32>,
    connected: bool,
    join: Option<Join>,
}

impl Reported {
    /// The workers of its join.
    fn workers(&self) -> Option<&JoinWorkers> {
        self.join.as_ref()?.workers.as_ref()
    }

    /// It has asked for a place, and its workers have stopped at a check.
    fn has_stopped(&self) -> bool {
        self.workers().is_some_and(|workers| workers.check.is_some())
    }
}

/// A world, as sent to its members.
#[derive(Clone, Debug)]
struct Sent {
    world: u64,
    size: u32,
    master: (String, u16),
    /// By rank.
    members: Vec<NodeId>,
}

/// A coordinator's knowledge of a node that introduces itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    /// It knows the node, which is connected or expected.
    node: bool,
    /// It knows the world that the node names, or that others of that world may still run.
    received: bool,
    /// It knows that world as the last one.
    believed: bool,
}

/// The record of earlier events, for checking later ones.
#[derive(Clone, Debug)]
pub struct Ledger {
    run_id: String,
    settings: Settings,
    reported: BTreeMap<SessionId, Reported>,
    /// The newest session of each node.
    newest: BTreeMap<NodeId, SessionId>,
    /// Nodes that have named their interfaces.
    interfaces: BTreeSet<NodeId>,
    /// Worlds, by the coordinator's life and the round.
    worlds: BTreeMap<(u32, Round), Sent>,
    /// Last place of each node that this life of the coordinator has heard or sent: round, rank and world.
    placements: BTreeMap<NodeId, (Round, u32, u64)>,
    /// Worlds that nodes have named to this life, whether or not it has taken them as the last one.
    named: BTreeSet<(Round, u64)>,
    /// Highest round that this life of the coordinator knows.
    highest: Round,
    /// Highest round that a node has named to it.
    named_highest: Round,
    /// Worlds that nodes have named to this life as their last, by the life that formed them.
    learned: BTreeSet<(u32, Round)>,
    /// Highest restart number that nodes have named to this life.
    learned_restart: u32,
    /// The restart number of the last world of this life.
    restart: u32,
    /// Rounds for which this life got a failure report.
    failed: BTreeSet<Round>,
    /// Nodes whose connection has ended at the coordinator since their last place. TCP reports their end, which is not proven.
    gone: BTreeSet<NodeId>,
    /// Last round and restart number that each node got.
    reached: BTreeMap<NodeId, (Round, u32)>,
    /// The highest count of checks that members of a round have named to this life.
    counted: BTreeMap<Round, u64>,
    /// The check at which members of a round were asked to stop, by this life.
    raised: BTreeMap<Round, u64>,
    /// The sessions that were last asked to stop their workers at once.
    stopped: BTreeSet<SessionId>,
    closed: bool,
    /// What was recorded.
    pub chronicle: Chronicle,
    /// The hosts that are kept out, as the coordinator has sent to its driver.
    excluded: Vec<Exclusion>,
    /// How often a host was put out.
    pub exclusions: u64,
    /// Messages from nodes and to nodes.
    pub messages: (u64, u64),
    /// Rounds that were completed.
    pub rounds: u64,
}

impl Ledger {
    /// An empty record for the run with this number.
    pub fn new(run: usize, settings: Settings) -> Self {
        Self {
            run_id: run_id(run),
            settings,
            reported: BTreeMap::new(),
            newest: BTreeMap::new(),
            interfaces: BTreeSet::new(),
            worlds: BTreeMap::new(),
            placements: BTreeMap::new(),
            named: BTreeSet::new(),
            highest: Round(0),
            named_highest: Round(0),
            learned: BTreeSet::new(),
            learned_restart: 0,
            restart: 0,
            failed: BTreeSet::new(),
            gone: BTreeSet::new(),
            reached: BTreeMap::new(),
            counted: BTreeMap::new(),
            raised: BTreeMap::new(),
            stopped: BTreeSet::new(),
            closed: false,
            chronicle: Chronicle::default(),
            excluded: Vec::new(),
            exclusions: 0,
            messages: (0, 0),
            rounds: 0,
        }
    }

    /// Require one world at a time also where settings allow more, to test this check.
    pub(super) fn hold_to_one_world(&mut self) {
        self.settings.on_partition = OnPartition::Stop;
    }

    pub(super) fn count_from_node(&mut self) {
        self.messages.0 += 1;
    }

    /// The coordinator was restarted, and knows nothing.
    pub(super) fn on_restart(&mut self) {
        self.reported.clear();
        self.newest.clear();
        self.placements.clear();
        self.named.clear();
        (self.highest, self.named_highest) = (Round(0), Round(0));
        self.learned.clear();
        self.learned_restart = 0;
        self.restart = 0;
        self.failed.clear();
        self.gone.clear();
        self.counted.clear();
        self.raised.clear();
        self.stopped.clear();
        self.closed = false;
        self.excluded.clear();
    }

    /// The coordinator sends its driver which hosts are kept out. Members of a host that flaps (`rejoin_limit`) stay.
    pub(super) fn on_exclusions(&mut self, hosts: &[Exclusion]) {
        let out: Vec<_> =
            hosts.iter().filter(|host| matches!(host.out.why, WhyUnused::FailedFirst { .. })).cloned().collect();
        let known = |host: &Exclusion| self.excluded.iter().any(|known| known.addr == host.addr);
        self.exclusions += out.iter().filter(|host| !known(host)).count() as u64;
        self.excluded = out;
    }

    /// The network notifies the coordinator that a connection has ended.
    pub(super) fn on_eof(&mut self, session: SessionId) {
        let node = self.reported.get(&session).map(|reported| reported.node);
        self.gone.extend(node.filter(|node| self.newest.get(node) == Some(&session)));
        self.on_disconnected(session);
    }

    pub(super) fn on_disconnected(&mut self, session: SessionId) {
        if let Some(reported) = self.reported.get_mut(&session) {
            reported.connected = false;
        }
    }

    /// The coordinator's knowledge of a node that is about to introduce itself.
    pub(super) fn known(&self, machine: &Machine, hello: &Hello, now: Instant) -> Known {
        let run = machine.run(&self.run_id);
        let knows = run.is_some_and(|run| run.knows(hello.node));
        let recovering = run.is_none_or(|run| run.is_recovering(now));
        let Some(placed) = hello.placed else {
            return Known { node: knows, received: recovering, believed: recovering };
        };
        let world = run.is_some_and(|run| run.knows_world(&placed));
        let taken_up = run.is_none_or(|run| run.adopts(&placed, now));
        Known { node: knows, received: world || recovering, believed: world || taken_up }
    }

    /// The coordinator got this message and has not refused it. `known` is its knowledge before.
    pub(super) fn on_message(
        &mut self,
        session: SessionId,
        message: &NodeMessage,
        known: Known,
        machine: &Machine,
        incarnation: u32,
    ) {
        if let NodeMessage::Hello(hello) = message {
            let earlier = self.newest.insert(hello.node, session);
            let earlier = earlier.and_then(|session| self.reported.remove(&session));
            let earlier = earlier.filter(|_| hello.joining);
            let join = earlier.and_then(|reported| reported.join);
            let Hello { node, settings, node_rank, .. } = (**hello).clone();
            let reported = Reported { node, settings, node_rank, connected: true, join };
            self.reported.insert(session, reported);
            if hello.interfaces.is_some() {
                self.interfaces.insert(hello.node);
            }
            if !known.node {
                // The coordinator knows a node that it has given up only by the node's own claims.
                self.placements.remove(&hello.node);
            }
            // A round number that was reused after a restart does not make a member of the first world one of the second.
            if let Some(placed) = hello.placed {
                self.named.insert((placed.round, placed.world));
                if known.received {
                    self.learned.extend(self.world_of(hello.node, placed.round, placed.rank));
                }
                match known.believed {
                    true => self.learned_restart = self.learned_restart.max(placed.restart),
                    // Its restart number is no longer the job's.
                    false => _ = self.reached.remove(&hello.node),
                }
            }
            let foreign = |placed: &Placed| {
                let sent = self.worlds.get(&(incarnation, placed.round));
                sent.is_some_and(|sent| sent.members.get(placed.rank as usize) != Some(&hello.node))
            };
            if let Some(placed) = hello.placed.filter(|placed| !foreign(placed)) {
                // A round number that is not taken up is only not reused.
                let taken_up = machine.run(&self.run_id).is_some_and(|run| placed.round <= run.round());
                let number = if taken_up { &mut self.highest } else { &mut self.named_highest };
                *number = placed.round.max(*number);
                let known = self.placements.get(&hello.node).map_or(Round(0), |placement| placement.0);
                if placed.round > known {
                    self.placements.insert(hello.node, (placed.round, placed.rank, placed.world));
                }
            }
            return;
        }
        let Some(reported) = self.reported.get_mut(&session) else {
            return;
        };
        match message {
            NodeMessage::Join(join) => reported.join = Some(join.clone()),
            NodeMessage::Withdraw | NodeMessage::Leave { .. } => reported.join = None,
            NodeMessage::Counted { round, count } => {
                let highest = self.counted.entry(*round).or_default();
                *highest = (*count).max(*highest);
            }
            NodeMessage::Hello(_)
            | NodeMessage::Close(_)
            | NodeMessage::Heartbeat { .. }
            | NodeMessage::Done { .. }
            | NodeMessage::Attending { .. }
            | NodeMessage::NoProcessGroup { .. }
            | NodeMessage::WillLeave { .. }
            | NodeMessage::Parked { .. }
            | NodeMessage::Notice { .. }
            | NodeMessage::Saves { .. }
            | NodeMessage::PhaseDurations { .. }
            | NodeMessage::Progress { .. }
            | NodeMessage::Step { .. }
            | NodeMessage::Replay(_)
            | NodeMessage::Fenced
            | NodeMessage::View { .. }
            | NodeMessage::PySpy { .. }
            | NodeMessage::Looked { .. }
            | NodeMessage::Pace { .. }
            | NodeMessage::AskLook(_)
            | NodeMessage::Observe(_)
            | NodeMessage::Peer(_) => {}
            NodeMessage::Failed { round, .. } => {
                self.failed.insert(*round);
            }
        }
    }

    /// An odd host may have claimed a place in a world that never existed.
    pub(super) fn on_intruder(&mut self, machine: &Machine) {
        let Some(run) = machine.run(&self.run_id).filter(|run| run.round() > self.highest) else { return };
        self.highest = run.round();
        self.learned_restart = self.learned_restart.max(run.restart());
        // The world's members are not known, so no ranks have to be kept.
        self.named.insert((run.round(), 0));
    }

    /// The world in which a node has this place, by the life of the coordinator that formed it.
    fn world_of(&self, node: NodeId, round: Round, rank: u32) -> Option<(u32, Round)> {
        let is = |sent: &Sent| sent.members.get(rank as usize) == Some(&node);
        self.worlds.iter().rev().find(|((_, of), sent)| *of == round && is(sent)).map(|(world, _)| *world)
    }
}

/// Part of the refusal of a node whose settings differ from the run's.
pub(super) const OTHER_SETTINGS: &str = "give every node the same";

/// Whether nodes with these settings may belong to one run.
pub(super) fn agree(one: &Settings, other: &Settings) -> bool {
    let of =
        |settings: &Settings| (settings.min_nodes, settings.max_nodes, settings.rules.workers, settings.max_restarts);
    of(one) == of(other)
}
