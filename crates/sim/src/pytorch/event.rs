//! What happens in a job of PyTorch's.

use super::store::{Reply, Request};
use crate::coordinator::options::Action;
use crate::engine::paths::HostId;
use crate::engine::processes::Owner;
use crate::engine::queue::Time;

/// An event.
#[derive(Debug)]
pub enum Event {
    Act(Action),
    /// A request reaches the store.
    Ask(HostId, u64, Request),
    /// Its answer reaches the agent.
    Answer(HostId, u64, Reply),
    /// The store can no longer be reached.
    Lost(HostId, u64),
    Wake(HostId, u64, Wake),
    Resume(Owner),
    /// A loss in a round, at a time, must have been noticed by now. Last field: the latest fault on its host before.
    Noticed(u64, Time, Time),
}

/// What a process waits for.
#[derive(Clone, Copy, Debug)]
pub enum Wake {
    /// The operation that holds the lock continues.
    Poll,
    /// The agent's monitor interval is over.
    Monitor,
    /// The keep-alive thread with this number runs.
    Beat(u32),
    /// The agent joins.
    Join,
}
