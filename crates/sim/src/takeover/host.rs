//! A host: its clock, the process on it, and the workers of its agent, which have guards.
//!
//! The agent joins, runs workers, stops them when the world must re-form, and joins again. When a worker fails it says so. When the job is
//! over, or it can take part no more, it leaves, and its process ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::event::Pid;
use super::peers::Peer;
use crate::engine::alarm::Alarm;
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::coordinator::succession::Succession;
use elastic_rs::rendezvous::messages::message::{Hello, JoinWorkers, NodeId, Placement};
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::SessionId;

/// What an agent does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    /// It waits for a place.
    Joins,
    /// Its workers run.
    Runs,
    /// It stops its workers, and joins again.
    StopsToJoin,
    /// It stops its workers, and leaves. `by`: because of this signal.
    StopsToLeave { by: Option<i32> },
    /// It has left, and its process ends soon.
    HasLeft,
}

/// The process of an agent, and of a coordinator if it is listed.
#[derive(Debug)]
pub(super) struct Process {
    pub pid: Pid,
    pub id: NodeId,
    pub node: NodeMachine,
    /// How the node has introduced itself first, and the last place that it got.
    pub hello: Hello,
    pub placement: Option<Placement>,
    /// The node's connection, or its attempt.
    pub session: Option<SessionId>,
    pub agent: Agent,
    /// Joins, and how many of them are answered.
    pub joins: u32,
    pub answers: u32,
    pub part: Option<Part>,
    /// It has been sent a record, or has written one.
    pub knows: bool,
    /// Its user has ended it, so it is not started again before faults are over.
    pub is_terminated: bool,
    /// The job is over, or has refused it: it is not started again.
    pub is_over: bool,
    pub alarm: Alarm,
    /// When its machines were last called because time had passed, and how often then.
    pub ticks: (Time, u32),
}

/// The coordinator of a listed process, and its part in the list.
#[derive(Debug)]
pub(super) struct Part {
    pub machine: Machine,
    pub succession: Succession,
    /// The other endpoints.
    pub peers: Vec<Peer>,
    /// The connection from each other endpoint that counts.
    pub incoming: BTreeMap<usize, (SessionId, NodeId)>,
    /// Sessions that have introduced themselves, with the process whose port was reached.
    pub sessions: BTreeMap<SessionId, Option<(HostId, Pid)>>,
}

/// The workers of one world on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workers {
    /// Differs between all workers.
    pub number: u64,
    pub round: u64,
    pub world: u64,
    /// When their guards kill them.
    pub until: Option<Time>,
    /// The leader has seen the connection of their node end, and the node has not come back in time: it may be replaced while they run
    /// (decision 28).
    pub is_torn: bool,
}

/// A host.
#[derive(Debug)]
pub(super) struct Host {
    /// The host's clock at time zero, and by how many millionths it is fast.
    zero: Instant,
    drift: i64,
    pub is_on: bool,
    pub process: Option<Process>,
    pub workers: Option<Workers>,
    /// The kernel has ended the sockets of the last process by then.
    pub closed_at: Time,
    /// Until then its workers go on, whatever its lease: a mistake.
    pub renewed_until: Time,
    /// From then on no fault has disturbed it.
    pub steady_since: Time,
    /// The id of the first process: a mistake keeps it.
    pub first_id: Option<NodeId>,
}

const MILLION: u128 = 1_000_000;

impl Host {
    pub fn new(zero: Instant, drift: i64) -> Self {
        Self {
            zero,
            drift,
            is_on: true,
            process: None,
            workers: None,
            closed_at: Time::ZERO,
            renewed_until: Time::ZERO,
            steady_since: Time::ZERO,
            first_id: None,
        }
    }

    fn rate(&self) -> u128 {
        (MILLION as i64 + self.drift) as u128
    }

    /// The host's clock.
    pub fn clock(&self, at: Time) -> Instant {
        self.zero + Duration::from_nanos((at.as_nanos() * self.rate() / MILLION) as u64)
    }

    /// When the host's clock shows this, or a moment later.
    pub fn time_of(&self, instant: Instant) -> Time {
        let shown = instant.saturating_duration_since(self.zero).as_nanos();
        Duration::from_nanos((shown * MILLION / self.rate()) as u64 + 2)
    }

    /// Its process, if that is this one.
    pub fn process(&mut self, pid: Pid) -> Option<&mut Process> {
        self.process.as_mut().filter(|process| process.pid == pid)
    }

    /// The part of its process in the list.
    pub fn part(&self) -> Option<&Part> {
        self.process.as_ref()?.part.as_ref()
    }

    /// The same, to change it.
    pub fn part_mut(&mut self) -> Option<&mut Part> {
        self.process.as_mut()?.part.as_mut()
    }

    /// Whether its process leads.
    pub fn leads(&self) -> bool {
        self.part().is_some_and(|part| part.succession.leads())
    }
}

impl Process {
    /// Join, at the time of the host's clock.
    pub fn join(&mut self, timeout: Duration, now: Instant) {
        (self.agent, self.joins) = (Agent::Joins, self.joins + 1);
        self.node.join(7, None, Some(JoinWorkers::new("trainer", 2)), timeout, now);
    }

    /// When one of its machines wants to be called.
    pub fn next_deadline(&self) -> Option<Instant> {
        let part = self.part.as_ref();
        let succession = part.map(|part| part.succession.next_deadline());
        let machine = part.and_then(|part| part.machine.next_deadline());
        self.node.next_deadline().into_iter().chain(succession).chain(machine).min()
    }
}
