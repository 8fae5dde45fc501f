//! Conversion between a run and its state in a shared cell. That state outlives the deciding process and contains no instants.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Run;
use super::event::{Reach, SessionId};
use super::hosts::{Departures, Hosts};
use super::membership::Roster;
use super::node::{Node, Program, Status};
use super::recovery::Recovery;
use super::round::{Current, Pace};
#[cfg(feature = "sim")]
use super::telemetry::Trace;
#[cfg(feature = "sim")]
use crate::rendezvous::decision_state::DecisionState;
use crate::rendezvous::messages::message::{Hello, NodeId, Round, Verdict};
use crate::rendezvous::messages::settings::{LONGEST_LEASE, Settings};
use crate::wire::text::validate_name;

/// Session of the other nodes. They have no connection, and count as connected through this one.
pub(in crate::rendezvous) const CELL_SESSION: SessionId = SessionId(0);
/// Session of the node that decides.
pub(in crate::rendezvous) const MY_SESSION: SessionId = SessionId(1);
/// Largest number that a cell may hold. Counting on from it cannot overflow.
pub(in crate::rendezvous) const LARGEST_NUMBER: u64 = 1 << 62;

/// A node's part of [`Durable`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct DurableNode {
    name: String,
    addr: String,
    process: u64,
    node_rank: Option<u32>,
    lease: Duration,
    status: Status,
    placed: Option<(Round, u32)>,
    done: bool,
    program: Option<Program>,
}

/// A run as a shared cell holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct Durable {
    id: String,
    settings: Settings,
    round: Round,
    /// Highest round that a node has claimed a rank in.
    named: Round,
    nodes: BTreeMap<NodeId, DurableNode>,
    arrivals: u64,
    current: Current,
}

/// The times of a run. They are not in the cell, because each node has its own clock.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Times {
    /// When each node's last message was received, and whether it is a suspect. A node without an entry counts as if it had sent one now.
    pub last_received: BTreeMap<NodeId, (Instant, bool)>,
    /// The instants from which the next round's time-outs count.
    pub pace: Pace,
    /// When nodes left a running world, by host.
    pub departures: Departures,
}

impl Durable {
    /// The run's id.
    pub fn run_id(&self) -> &str {
        &self.id
    }

    /// Number of the last round that completed.
    pub fn round(&self) -> Round {
        self.round
    }

    /// The verdict with which the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.current.closed()
    }

    /// All nodes with their status.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Status)> {
        self.nodes.iter().map(|(id, node)| (*id, &node.status))
    }

    /// Whether a node is in the run.
    pub fn knows(&self, id: NodeId) -> bool {
        self.nodes.contains_key(&id)
    }

    /// The world of the current round: its members by rank, and address and port of its worker store.
    pub fn world(&self) -> Option<(Vec<NodeId>, (String, u16))> {
        let world = self.current.world()?;
        Some((world.members.values().copied().collect(), world.master.clone()?))
    }

    /// Check a state that another node wrote, and reduce its texts to one line each.
    ///
    /// # Errors
    /// Names the value that is not allowed.
    pub fn validated(self) -> Result<Self, String> {
        self.settings.validate()?;
        if self.nodes.values().any(|node| node.lease > LONGEST_LEASE) {
            return Err(format!("a node's lease is above {LONGEST_LEASE:?}"));
        }
        for node in self.nodes.values() {
            validate_name("name of a node", &node.name)?;
            validate_name("address of a node", &node.addr)?;
            if let Some(Program { role, script }) = &node.program {
                validate_name("role", role)?;
                validate_name("name of a script", script.as_deref().unwrap_or_default())?;
            }
            if let Status::Waiting { join, .. } = &node.status {
                join.validate()?;
            }
        }
        if [self.round.0, self.named.0, self.arrivals].into_iter().any(|number| number > LARGEST_NUMBER) {
            return Err(format!("a round or arrival number is above {LARGEST_NUMBER}"));
        }
        let current = self.current.tidied();
        if current.interrupted().is_some_and(str::is_empty) {
            return Err("the world is interrupted without a reason".to_owned());
        }
        Ok(Self { current, ..self })
    }

    /// The state of a run that goes into its cell.
    pub fn of(run: &Run) -> Self {
        let node = |(id, node): (NodeId, &Node)| {
            let Node { name, process, node_rank, lease, status, placed, done, program, .. } = node.clone();
            (id, DurableNode { name, addr: node.addr(), process, node_rank, lease, status, placed, done, program })
        };
        Self {
            id: run.id.clone(),
            settings: run.settings.clone(),
            round: run.round(),
            named: run.recovery.named(),
            nodes: run.roster.iter().map(node).collect(),
            arrivals: run.roster.arrivals(),
            current: run.current.clone(),
        }
    }

    /// Rebuild a run from this state and the times that the node of this [`Hello`] has seen.
    pub fn restored(&self, me: &Hello, times: &Times, now: Instant) -> Run {
        let settings = &self.settings;
        let node = |(id, known): (&NodeId, &DurableNode)| {
            let asked = if *id == me.node { &me.settings } else { settings };
            let hello = Hello {
                local_addr: Some(known.addr.clone()),
                process: known.process,
                node_rank: known.node_rank,
                ..Hello::new(&self.id, *id, &known.name, asked.clone())
            };
            let (received_at, suspect) = times.last_received.get(id).copied().unwrap_or((now, false));
            let node = Node {
                lease: known.lease,
                placed: known.placed,
                status: known.status.clone(),
                done: known.done,
                program: known.program.clone(),
                received_at,
                suspect,
                ..Node::new(&hello, if *id == me.node { MY_SESSION } else { CELL_SESSION }, Reach::Cell, now)
            };
            (*id, node)
        };
        let mut run = Run::new(&self.id, settings.clone());
        run.roster = Roster::restored(self.round, self.arrivals, self.nodes.iter().map(node).collect());
        run.current = self.current.clone();
        run.pace = times.pace;
        let worlds: BTreeSet<_> = self.current.world().map(|world| world.id).into_iter().collect();
        run.recovery = Recovery::with_worlds(worlds, self.named);
        run.hosts = Hosts::with_departures(times.departures.clone());
        run.trace.go_on(&run.current, &run.roster);
        run
    }
}

impl Times {
    /// The times of a run.
    pub fn of(run: &Run) -> Self {
        Self {
            last_received: run.roster.iter().map(|(id, node)| (id, (node.received_at, node.suspect))).collect(),
            pace: run.pace,
            departures: run.hosts.departures(),
        }
    }
}

#[cfg(feature = "sim")]
impl DecisionState for Run {
    fn decision_state(&self, _: Instant) -> Self {
        Self { trace: Trace::default(), ..self.clone() }
    }
}
