//! What happens in a job.

use bytes::Bytes;

use super::agent::{Found, WorkerGroupEvent};
use super::elastic::Happening;
use super::options::Action;
use crate::engine::paths::{End, HostId};
use crate::engine::processes::Owner;
use crate::engine::queue::Time;
use elastic_rs::rendezvous::messages::message::Round;
use elastic_rs::rendezvous::run::SessionId;

/// The error of connecting to a host that does not listen.
pub(super) const REFUSED: &str = "connection refused";

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// An action on the job.
    Act(Action),
    /// A host that stood still continues, or the coordinator does.
    Resume(Owner),
    /// A host's request for a connection reaches the coordinator's.
    Syn(HostId, u64),
    /// The requested connection is open.
    Connected(HostId, u64, SessionId),
    /// The requested connection cannot be opened.
    ConnectFailed(HostId, u64, &'static str),
    /// Bytes arrive.
    Deliver {
        /// On which connection.
        conn: SessionId,
        /// Where.
        to: End,
        /// What.
        bytes: Bytes,
    },
    /// The end of the stream, or its reset.
    Eof {
        /// Of which connection.
        conn: SessionId,
        /// Where.
        to: End,
    },
    /// The coordinator's deadline.
    CoordinatorTick,
    /// A node's deadline.
    NodeTick(HostId, u64),
    /// An agent's workers have stopped.
    Stopped(HostId, u64),
    /// Something happens to workers of a round that live through changes.
    Elastic(HostId, u64, Round, Happening),
    /// Something happens to the workers of a generation.
    WorkerGroup(HostId, u64, WorkerGroupEvent),
    /// The deadline of the guards of our agent's workers.
    Guards(HostId, u64),
    /// The deadline of our agent.
    AgentTick(HostId, u64),
    /// The check of our agent's machine is over.
    Checked(HostId, u64),
    /// Our agent gets the words of a failed worker of a round.
    FailureMessage(HostId, u64, Round, Found),
    /// Our agent got a signal at that time, and must be gone now.
    MustBeGone(HostId, u64, Time),
    /// The process that hosts the coordinator ends after its agent has left, in this life of the coordinator.
    HostEnds(u32),
    /// A loss must have been noticed by now.
    Noticed(Loss),
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
