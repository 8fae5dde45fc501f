//! An agent's process: PyTorch's handler with its two threads (the agent's, and the one for keep-alives) and the lock between them,
//! so that one operation runs at a time.

use std::collections::VecDeque;

use super::super::engine::queue::Time;
use super::super::worlds::Held;
use super::ops::OpKind;
use super::state::{NodeDesc, State};

/// The agent's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// In `next_rendezvous()`.
    Joining,
    /// Workers run; `num_nodes_waiting()` is asked every 0.1 s.
    Running(Held),
    /// Workers are being stopped.
    Stopping,
    /// The rendezvous is being closed, because of a failure or at the job's end.
    Closing,
}

/// An operation that holds the lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub kind: OpKind,
    /// Deadline on the monotonic clock.
    pub deadline: Time,
}

/// One process.
#[derive(Debug)]
pub struct Agent {
    /// Process id, never reused.
    pub pid: u64,
    /// The agent's state.
    pub phase: Phase,
    pub(super) desc: NodeDesc,
    pub(super) op: Option<Op>,
    /// Operations that wait for the lock, in order.
    pub(super) todo: VecDeque<OpKind>,
    /// The number of the running keep-alive thread. A cancelled one does not come back.
    pub(super) beats: Option<u32>,
    pub(super) beat_incarnations: u32,
    pub(super) join_timeout: Time,
    // `_BackendRendezvousStateHolder`.
    pub(super) state: State,
    pub(super) token: Option<u64>,
    pub(super) dirty: bool,
    pub(super) last_sync: Option<Time>,
}

impl Agent {
    pub(super) fn new(pid: u64, addr: String, join_timeout: Time) -> Self {
        let desc = NodeDesc { addr, pid };
        Self {
            pid,
            phase: Phase::Joining,
            desc,
            op: None,
            todo: VecDeque::new(),
            beats: None,
            beat_incarnations: 0,
            join_timeout,
            state: State::default(),
            token: None,
            dirty: false,
            last_sync: None,
        }
    }

    /// The place in force, while workers run.
    pub fn running(&self) -> Option<Held> {
        match self.phase {
            Phase::Running(held) => Some(held),
            _ => None,
        }
    }
}

/// A host.
#[derive(Debug, Default)]
pub struct Host {
    /// Its agent, while one runs.
    pub agent: Option<Agent>,
    /// Microseconds by which its wall clock is ahead.
    pub(super) clock_ahead: i64,
}
