//! A node's next step for its copy of the state: PyTorch's state handlers (`_RendezvousExitOp` and its siblings).

use std::time::Duration;

use super::super::engine::queue::Time;
use super::state::{NodeDesc, State, WallTime};
use elastic_rs::rendezvous::messages::settings::Settings;

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    /// Leave the participants of the last round.
    Exit,
    /// Get a place in the next one.
    Join,
    /// Close the rendezvous.
    Close,
    /// Renew the node's time stamp, if it is due.
    KeepAlive,
    /// `num_nodes_waiting()`: read the state once.
    Look,
}

/// `_Action`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    KeepAlive,
    AddToParticipants,
    AddToWaitList,
    AddToRedundancyList,
    RemoveFromParticipants,
    RemoveFromWaitList,
    RemoveFromRedundancyList,
    MarkComplete,
    MarkClosed,
    Sync,
    ErrorClosed,
    ErrorTimeout,
    Finish,
}

/// The input of a handler. `now` is the monotonic clock, `wall` the host's own wall clock.
pub(super) struct Context<'a> {
    pub node: &'a NodeDesc,
    pub state: &'a State,
    pub settings: &'a Settings,
    pub now: Time,
    pub wall: WallTime,
    pub deadline: Time,
}

/// How long after its deadline a join still removes itself from the state.
const ROLLBACK: Duration = Duration::from_secs(5);

impl Context<'_> {
    pub fn decide(&self, op: OpKind) -> Step {
        match op {
            OpKind::Exit => self.exit(),
            OpKind::Join => self.join(),
            OpKind::Close if self.state.closed => Step::Finish,
            OpKind::Close if self.late() => Step::ErrorTimeout,
            OpKind::Close => Step::MarkClosed,
            OpKind::KeepAlive if !self.should_keep_alive() => Step::Finish,
            OpKind::KeepAlive if self.late() => Step::ErrorTimeout,
            OpKind::KeepAlive => Step::KeepAlive,
            OpKind::Look => Step::Finish,
        }
    }

    fn late(&self) -> bool {
        self.now > self.deadline
    }

    /// A node that is missing from its own copy finds no time stamp of its own, and never renews it again.
    fn should_keep_alive(&self) -> bool {
        let last = self.state.last_heartbeats.get(self.node);
        last.is_some_and(|last| *last <= self.wall.before(self.settings.keep_alive_interval))
    }

    fn exit(&self) -> Step {
        match self.state.participants.contains_key(self.node) {
            true if self.late() => Step::ErrorTimeout,
            true => Step::RemoveFromParticipants,
            false => Step::Finish,
        }
    }

    fn join(&self) -> Step {
        let Self { node, state, settings, .. } = self;
        let (count, max) = (state.participants.len(), settings.max_nodes as usize);
        let redundant = state.redundancy_list.contains(node);
        if state.closed {
            return Step::ErrorClosed;
        }
        if redundant {
            return if count == max { self.wait() } else { Step::RemoveFromRedundancyList };
        }
        let is_participant = state.participants.contains_key(node);
        if state.complete && is_participant {
            return Step::Finish;
        }
        let waits = state.wait_list.contains(node);
        if self.late() {
            return match self.now <= self.deadline + ROLLBACK {
                true if is_participant => Step::RemoveFromParticipants,
                true if waits => Step::RemoveFromWaitList,
                _ => Step::ErrorTimeout,
            };
        }
        match (state.complete, is_participant) {
            (true, _) if count < max && !waits => Step::AddToWaitList,
            (true, _) if count >= max && !waits => Step::AddToRedundancyList,
            (true, _) => self.wait(),
            (false, true)
                if count >= settings.min_nodes as usize && state.deadline.is_some_and(|at| at < self.wall) =>
            {
                Step::MarkComplete
            }
            (false, true) => self.wait(),
            (false, false) => Step::AddToParticipants,
        }
    }

    fn wait(&self) -> Step {
        if self.should_keep_alive() { Step::KeepAlive } else { Step::Sync }
    }
}

/// Perform a step on the node's copy, which is then written back. Only for steps that change the state.
pub(super) fn apply(step: Step, state: &mut State, node: &NodeDesc, settings: &Settings, wall: WallTime) {
    match step {
        Step::KeepAlive => state.keep_alive(node, wall),
        Step::AddToParticipants => state.add_to_participants(node, settings, wall),
        Step::AddToWaitList => state.add_to_wait_list(node, wall),
        Step::AddToRedundancyList => state.add_to_redundancy_list(node, wall),
        Step::RemoveFromParticipants => state.remove_from_participants(node, settings),
        Step::RemoveFromWaitList | Step::RemoveFromRedundancyList => state.remove_from_lists(node),
        Step::MarkComplete => state.mark_complete(),
        Step::MarkClosed => state.closed = true,
        Step::Sync | Step::ErrorClosed | Step::ErrorTimeout | Step::Finish => {}
    }
}
