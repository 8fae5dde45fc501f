//! A host and the agent on it: a [`NodeMachine`] used as PyTorch's agent uses a rendezvous handler.
//!
//! Join; when placed, run workers; when the world must re-form or a worker fails, stop them (which takes a while) and join
//! again; when the rendezvous is closed or a join fails, stop them and go.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::agent::{Ours, WorkerGroup};
use super::elastic::Workers;
use crate::engine::alarm::Alarm;
use crate::engine::paths::HostId;
use crate::worlds::Held;
use elastic_rs::agent::Outcome;
use elastic_rs::rendezvous::decision_state::DecisionState;
use elastic_rs::rendezvous::messages::codec::{CodecError, decode_frame, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, MAGIC, NodeId, NodeMessage, PROTOCOL_VERSION, Placement,
};
use elastic_rs::rendezvous::node::{JoinError, NodeMachine};
use elastic_rs::rendezvous::run::SessionId;

/// The agent's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Waits for a place.
    Joining,
    /// Workers run.
    Running(Placement),
    /// Workers are being stopped. Then the agent joins again, or goes.
    Stopping {
        /// Joins again.
        again: bool,
    },
}

impl Agent {
    /// The placement in force, while workers run.
    pub fn placement(&self) -> Option<&Placement> {
        match self {
            Self::Running(placement) => Some(placement),
            Self::Joining | Self::Stopping { .. } => None,
        }
    }
}

/// One process of an agent.
#[derive(Clone, Debug)]
pub struct Process {
    /// Process id, never reused.
    pub pid: u64,
    /// Random id, drawn at the start of the process.
    pub id: NodeId,
    /// The node's side of the session.
    pub machine: NodeMachine,
    /// The agent's state.
    pub agent: Agent,
    /// All workers have succeeded: none is running.
    pub done: bool,
    /// Its open connection.
    pub conn: Option<SessionId>,
    /// Number of joins.
    pub joins: u32,
    /// Number of answered joins.
    pub answers: u32,
    /// Time-out of its next join.
    pub join_timeout: Duration,
    /// Its workers, if they live through changes of the world.
    pub(super) workers: Workers,
    pub(super) alarm: Alarm,
    inbox: BytesMut,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The join failed.
    Join(JoinError),
    /// The rendezvous was closed while workers ran, or the session failed.
    Closed(String),
    /// SIGTERM.
    Terminated,
    /// Our agent has ended.
    Agent(Outcome),
    /// SIGKILL, or the host is off.
    Killed,
}

/// A host.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Its agent, while one runs.
    pub process: Option<Process>,
    /// The agent's machine, if it is our agent.
    pub ours: Option<Ours>,
    /// Workers of our agent.
    pub worker_group: Option<WorkerGroup>,
    /// How earlier agents ended.
    pub exits: Vec<Exit>,
    /// Places of the agents on this host, in order.
    pub placements: Vec<Placement>,
}

impl Process {
    /// An agent that was just started and has not joined yet.
    pub fn new(pid: u64, id: NodeId, machine: NodeMachine, join_timeout: Duration) -> Self {
        Self {
            pid,
            id,
            machine,
            agent: Agent::Joining,
            done: false,
            conn: None,
            joins: 0,
            answers: 0,
            join_timeout,
            workers: Workers::default(),
            alarm: Alarm::default(),
            inbox: BytesMut::new(),
        }
    }

    /// The connection is open. Bytes of an earlier one are dropped.
    pub(super) fn connected(&mut self, conn: SessionId) {
        self.conn = Some(conn);
        self.inbox.clear();
    }

    /// Add bytes, and return the next whole message.
    ///
    /// # Errors
    /// The bytes are not a session's, though our own coordinator has sent them.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<Option<CoordinatorMessage>, CodecError> {
        self.inbox.extend_from_slice(bytes);
        decode_frame(&mut self.inbox)
    }

    /// The state that decides the future, for [`super::fingerprint`].
    pub(super) fn describe(&self, now: Instant, out: &mut impl fmt::Write) -> fmt::Result {
        let Self { pid, machine, agent, done, conn, workers, inbox, .. } = self;
        let (machine, pending) = (machine.decision_state(now), self.joins - self.answers);
        write!(out, "{pid} {machine:?} {agent:?} {done} {conn:?} {pending} {workers:?} {inbox:?}")
    }

    /// The placement in force, while workers run.
    pub fn running(&self) -> Option<&Placement> {
        self.agent.placement()
    }

    /// The same, in the form of [`crate::worlds`].
    pub fn held(&self, host: HostId) -> Option<Held> {
        let Placement { round, world, rank, world_size, .. } = *self.running()?;
        Some(Held { host, round: round.0, world, rank, size: world_size })
    }
}

/// The bytes of a message from a node. A connection's first message has the session's preamble.
pub(super) fn node_bytes(message: &NodeMessage) -> Bytes {
    let mut bytes = BytesMut::new();
    if matches!(message, NodeMessage::Hello(_)) {
        encode_preamble(&mut bytes);
    }
    encode_frame(message, &mut bytes);
    bytes.freeze()
}

/// The same from a node with another version of the protocol, whose frames could not be read.
pub(super) fn foreign_bytes(message: &NodeMessage) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
    bytes.extend_from_slice(&node_bytes(message));
    bytes.freeze()
}

/// The bytes of a message from the coordinator.
pub(super) fn coordinator_bytes(message: &CoordinatorMessage) -> Bytes {
    if let Err(why) = message.validate() {
        panic!("no node believes this message: {why}: {message:?}");
    }
    let mut bytes = BytesMut::new();
    encode_frame(message, &mut bytes);
    bytes.freeze()
}

/// The name of a process in messages.
pub(super) fn name(host: HostId, pid: u64) -> String {
    format!("host{host}:{pid}")
}

/// Shortest and longest time that an agent takes to notice that the world must re-form, and to stop its workers.
pub const STOP: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// The address of a node's second interface.
pub(super) fn interface(node: NodeId) -> IpAddr {
    Ipv6Addr::from(0xfd << 120 | node.0 >> 8).into()
}
