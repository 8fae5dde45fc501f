//! The invariants after every event, checked on the messages that were sent and received, not on the machines' own records.
//! [`super::worlds`] has the invariants of any rendezvous. The others here are further promises of ours.
//!
//! Within one life of the coordinator a round number belongs to one world. A restarted coordinator knows of earlier rounds only
//! what nodes tell it. So across its lives this holds: a new number is above every number that a node has named to this life, and
//! each node gets rising numbers.

mod completion;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::host::{Agent, Host, Process};
use super::network::HostId;
use super::queue::Time;
use super::simulation::run_id;
use completion::check_told_again;

use super::worlds::{self, Violation};
use crate::rendezvous::coordinator::machine::{Command, Machine};
use crate::rendezvous::decider::event::SessionId;
use crate::rendezvous::node::machine::JoinError;
use crate::rendezvous::protocol::message::{
    CoordinatorMessage, Hello, Join, NodeId, NodeMessage, Placed, Placement, Round,
};
use crate::rendezvous::protocol::settings::{OnPartition, Settings};

/// The last message of a node on its session, as the coordinator has read it.
#[derive(Clone, Debug)]
struct Said {
    node: NodeId,
    settings: Settings,
    node_rank: Option<u32>,
    connected: bool,
    join: Option<Join>,
}

/// A world, as sent to its members.
#[derive(Clone, Debug)]
struct Told {
    world: u64,
    size: u32,
    master: (String, u16),
    /// By rank.
    members: Vec<NodeId>,
}

/// A member of `round` died at `at`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Its run.
    pub run: usize,
    /// The round whose workers it ran.
    pub round: Round,
    /// Time of the loss.
    pub at: Time,
    /// Time of the last fault on its host before.
    pub fault: Time,
}

/// A coordinator's knowledge of a node that introduces itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    /// It knows the node, which is connected or expected.
    node: bool,
    /// It knows the world that the node names, or that others of that world may still run.
    heard: bool,
    /// It knows that world as the last one.
    believed: bool,
}

/// The record of earlier events, for checking later ones.
#[derive(Clone, Debug)]
pub struct Ledger {
    run_id: String,
    settings: Settings,
    said: BTreeMap<SessionId, Said>,
    /// The newest session of each node.
    newest: BTreeMap<NodeId, SessionId>,
    /// Worlds, by the coordinator's life and the round.
    worlds: BTreeMap<(u32, Round), Told>,
    /// Last place of each node that this life of the coordinator has heard or sent: round, rank and world.
    places: BTreeMap<NodeId, (Round, u32, u64)>,
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
    closed: bool,
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
            said: BTreeMap::new(),
            newest: BTreeMap::new(),
            worlds: BTreeMap::new(),
            places: BTreeMap::new(),
            named: BTreeSet::new(),
            highest: Round(0),
            named_highest: Round(0),
            learned: BTreeSet::new(),
            learned_restart: 0,
            restart: 0,
            failed: BTreeSet::new(),
            gone: BTreeSet::new(),
            reached: BTreeMap::new(),
            closed: false,
            messages: (0, 0),
            rounds: 0,
        }
    }

    /// Require one world at a time also where settings allow more, to test this check.
    pub(super) fn hold_to_one_world(&mut self) {
        self.settings.on_partition = OnPartition::Stop;
    }

    /// Time within which survivors hear of a loss if no other fault happens: the lease, the last look after it (250 ms), and the push,
    /// each with some transit times.
    pub fn notice_bound(&self, delay: Duration) -> Duration {
        self.settings.lease() + Duration::from_millis(260) + delay * 10
    }

    pub(super) fn count_from_node(&mut self) {
        self.messages.0 += 1;
    }

    /// The coordinator was restarted, and knows nothing.
    pub(super) fn on_restart(&mut self) {
        self.said.clear();
        self.newest.clear();
        self.places.clear();
        self.named.clear();
        (self.highest, self.named_highest) = (Round(0), Round(0));
        self.learned.clear();
        self.learned_restart = 0;
        self.restart = 0;
        self.failed.clear();
        self.gone.clear();
        self.closed = false;
    }

    /// The network tells the coordinator that a connection has ended.
    pub(super) fn on_eof(&mut self, session: SessionId) {
        let node = self.said.get(&session).map(|said| said.node);
        self.gone.extend(node.filter(|node| self.newest.get(node) == Some(&session)));
        self.on_disconnected(session);
    }

    pub(super) fn on_disconnected(&mut self, session: SessionId) {
        if let Some(said) = self.said.get_mut(&session) {
            said.connected = false;
        }
    }

    /// The coordinator's knowledge of a node that is about to introduce itself.
    pub(super) fn known(&self, machine: &Machine, hello: &Hello, now: Instant) -> Known {
        let run = machine.run(&self.run_id);
        let knows = run.is_some_and(|run| run.knows(hello.node));
        let recovering = run.is_none_or(|run| run.is_recovering(now));
        let Some(placed) = hello.placed else { return Known { node: knows, heard: recovering, believed: recovering } };
        let world = run.is_some_and(|run| run.knows_world(&placed));
        let taken_up = run.is_none_or(|run| run.adopts(&placed, now));
        Known { node: knows, heard: world || recovering, believed: world || taken_up }
    }

    /// The coordinator got this message and has not refused it. `known` is its knowledge before.
    pub(super) fn on_message(
        &mut self,
        session: SessionId,
        message: &NodeMessage,
        known: Known,
        machine: &Machine,
        life: u32,
    ) {
        if let NodeMessage::Hello(hello) = message {
            let earlier = self.newest.insert(hello.node, session);
            let earlier = earlier.and_then(|session| self.said.remove(&session));
            let join = earlier.and_then(|said| said.join).filter(|_| hello.joining);
            let Hello { node, settings, node_rank, .. } = (**hello).clone();
            let said = Said { node, settings, node_rank, connected: true, join };
            self.said.insert(session, said);
            if !known.node {
                // The coordinator knows a node that it has given up only by the node's own claims.
                self.places.remove(&hello.node);
            }
            // A round number that was reused after a restart does not make a member of the first world one of the second.
            if let Some(placed) = hello.placed {
                self.named.insert((placed.round, placed.world));
                if known.heard {
                    self.learned.extend(self.world_of(hello.node, placed.round, placed.rank));
                }
                match known.believed {
                    true => self.learned_restart = self.learned_restart.max(placed.restart),
                    // Its restart number is no longer the job's.
                    false => _ = self.reached.remove(&hello.node),
                }
            }
            let foreign = |placed: &Placed| {
                let told = self.worlds.get(&(life, placed.round));
                told.is_some_and(|told| told.members.get(placed.rank as usize) != Some(&hello.node))
            };
            if let Some(placed) = hello.placed.filter(|placed| !foreign(placed)) {
                // A round number that is not taken up is only not reused.
                let taken_up = machine.run(&self.run_id).is_some_and(|run| placed.round <= run.round());
                let number = if taken_up { &mut self.highest } else { &mut self.named_highest };
                *number = placed.round.max(*number);
                let known = self.places.get(&hello.node).map_or(Round(0), |place| place.0);
                if placed.round > known {
                    self.places.insert(hello.node, (placed.round, placed.rank, placed.world));
                }
            }
            return;
        }
        let Some(said) = self.said.get_mut(&session) else {
            return;
        };
        match message {
            NodeMessage::Join(join) => said.join = Some(join.clone()),
            NodeMessage::Withdraw | NodeMessage::Leave { .. } => said.join = None,
            NodeMessage::Hello(_) | NodeMessage::Close(_) | NodeMessage::Heartbeat | NodeMessage::Done { .. } => {}
            NodeMessage::Failed { round, .. } => {
                self.failed.insert(*round);
            }
        }
    }

    /// A stranger may have claimed a place in a world that never existed.
    pub(super) fn on_intruder(&mut self, machine: &Machine) {
        let Some(run) = machine.run(&self.run_id).filter(|run| run.round() > self.highest) else { return };
        self.highest = run.round();
        self.learned_restart = self.learned_restart.max(run.restart());
        // The world's members are not known, so no ranks have to be kept.
        self.named.insert((run.round(), 0));
    }

    /// Checks that a member of a running world is not refused for its settings because of newcomers.
    pub(super) fn check_refusal(&self, message: &NodeMessage, reason: &str) -> Result<(), Violation> {
        let NodeMessage::Hello(hello) = message else { return Ok(()) };
        let member = hello.placed.is_some_and(|placed| placed.active);
        // If a member reports later than a lease, newcomers may have determined the run's settings.
        let late = self.settings.on_partition == OnPartition::Continue;
        ensure(!member || !reason.contains(OTHER_SETTINGS) || self.highest > Round(0) || self.closed || late, || {
            format!("{} runs in a world and is refused by newcomers: {reason}", hello.name)
        })
    }

    /// Check the coordinator's commands after an event.
    pub(super) fn check_decision<'a>(
        &mut self,
        machine: &Machine,
        commands: impl IntoIterator<Item = &'a Command>,
        life: u32,
    ) -> Result<(), Violation> {
        if let Some(run) = machine.run(&self.run_id) {
            run.check().map_err(Violation::contract)?;
        }
        let mut completed: BTreeMap<Round, Vec<(NodeId, &Placement)>> = BTreeMap::new();
        for command in commands {
            let Command::Send { session, message } = command else {
                continue;
            };
            self.messages.1 += 1;
            match message {
                CoordinatorMessage::Complete(placement) => {
                    let said = self.said.get(session);
                    let said = said
                        .ok_or_else(|| Violation::contract(format!("a place is given to {session:?}, a stranger")))?;
                    completed.entry(placement.round).or_default().push((said.node, placement));
                }
                CoordinatorMessage::Status { waiting, reason, .. } => {
                    ensure(*waiting == 0 || !reason.is_empty(), || {
                        "members are interrupted without a reason".to_owned()
                    })?;
                }
                CoordinatorMessage::Closed { .. } => self.closed = true,
                // Another node has its place, because its process is assumed to have ended. That is not proven either.
                CoordinatorMessage::Ended { .. } => {
                    self.gone.extend(self.said.get(session).map(|said| said.node));
                }
                _ => {}
            }
        }
        for (round, places) in completed {
            match self.worlds.get(&(life, round)) {
                Some(told) => check_told_again(told, round, &places)?,
                None => self.check_completion(life, round, &places)?,
            }
        }
        Ok(())
    }

    /// Checks that no two worlds run at once. A node of an earlier world was cut off, and must have stopped its workers before. Nodes
    /// whose connection has ended are exempt: TCP reported their end, within `reconnect_grace`.
    pub(super) fn check_one_world<'a>(
        &self,
        life: u32,
        hosts: impl Iterator<Item = (HostId, &'a Host)>,
        now: Time,
    ) -> Result<(), Violation> {
        if self.settings.on_partition == OnPartition::Continue {
            return Ok(());
        }
        let bound = |(number, host): (HostId, &Host)| {
            let process = host.process.as_ref().filter(|process| !process.done && host.stalled_until < now)?;
            let placement = process.running()?;
            let world = self.world_of(process.id, placement.round, placement.rank);
            let known = world.is_some_and(|world| world.0 == life || self.learned.contains(&world));
            (known && !self.gone.contains(&process.id)).then(|| process.held(number)).flatten()
        };
        worlds::check_one_world(self.highest.0, hosts.filter_map(bound))
    }

    /// The world in which a node has this place, by the life of the coordinator that formed it.
    fn world_of(&self, node: NodeId, round: Round, rank: u32) -> Option<(u32, Round)> {
        let is = |told: &Told| told.members.get(rank as usize) == Some(&node);
        self.worlds.iter().rev().find(|((_, of), told)| *of == round && is(told)).map(|(world, _)| *world)
    }

    /// Check the outcome of a node's join.
    pub(super) fn check_outcome(
        &mut self,
        process: &Process,
        outcome: &Result<Placement, JoinError>,
    ) -> Result<(), Violation> {
        ensure(process.answers <= process.joins, || {
            format!("process {} is answered more often than it asked", process.pid)
        })?;
        let placement = match outcome {
            Ok(placement) => placement,
            Err(error) => {
                return ensure(!error.to_string().is_empty(), || "an error without words".to_owned());
            }
        };
        let (reached, restart) =
            self.reached.insert(process.id, (placement.round, placement.restart)).unwrap_or_default();
        ensure(placement.restart >= restart, || {
            format!("process {} goes from restart {restart} to {}", process.pid, placement.restart)
        })?;
        ensure(placement.round > reached, || {
            format!("process {} goes from round {reached} to {}", process.pid, placement.round)
        })?;
        let told = self.worlds.iter().any(|((_, round), told)| {
            *round == placement.round
                && told.size == placement.world_size
                && told.master == (placement.master_addr.clone(), placement.master_port)
                && told.members.get(placement.rank as usize) == Some(&process.id)
        });
        ensure(told, || format!("process {} holds a place nobody gave it: {placement:?}", process.pid))
    }

    /// Checks that all joins of an agent that ends were answered.
    pub(super) fn check_answers(&self, process: &Process) -> Result<(), Violation> {
        ensure(process.answers == process.joins, || {
            format!("process {} asked {} times and was answered {} times", process.pid, process.joins, process.answers)
        })
    }

    /// Checks that survivors of a loss know by now that their world must re-form, if no other fault happened.
    pub(super) fn check_noticed<'a>(
        &self,
        loss: &Loss,
        hosts: impl Iterator<Item = (HostId, &'a Host)>,
        coordinator_fault: Time,
        now: Time,
    ) -> Result<(), Violation> {
        let clear = |fault: Time| fault == Time::ZERO || fault + 3 * self.settings.lease() < loss.at;
        if !clear(coordinator_fault) || !clear(loss.fault) {
            return Ok(());
        }
        let undisturbed = |process: &Process| {
            process.running().is_some_and(|place| place.round == loss.round && process.machine.view().waiting == 0)
        };
        let survivors = hosts.filter(|(_, host)| clear(host.last_fault));
        let undisturbed = survivors.filter(|(_, host)| host.process.as_ref().is_some_and(undisturbed));
        worlds::check_noticed(loss.round.0, loss.at, now, undisturbed.map(|(number, _)| number))
    }
}

/// Part of the refusal of a node whose settings differ from the run's.
pub(super) const OTHER_SETTINGS: &str = "give every node the same";

/// Checks a settled job: [`worlds::check_settled`].
///
/// # Errors
/// A node that contradicts it.
pub fn check_settled<'a>(
    hosts: impl Iterator<Item = (HostId, &'a Host)>,
    settings: &Settings,
) -> Result<(), Violation> {
    let live: Vec<_> = hosts.filter_map(|(number, host)| Some((number, host.process.as_ref()?))).collect();
    let running: Vec<_> = live.iter().filter_map(|(number, process)| process.held(*number)).collect();
    let stopping = live.iter().filter(|(_, process)| matches!(process.agent, Agent::Stopping { .. })).count();
    worlds::check_settled(live.len(), stopping, &running, settings)
}

/// Whether nodes with these settings may belong to one run.
pub(super) fn agree(one: &Settings, other: &Settings) -> bool {
    let of = |settings: &Settings| (settings.min_nodes, settings.max_nodes, settings.max_restarts);
    of(one) == of(other)
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation::contract(otherwise())) }
}
