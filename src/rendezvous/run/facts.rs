//! Queries about a run's state.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Run;
use super::event::SessionId;
use super::hosts::Exclusion;
use super::node::{Node, Status};
use super::standing::Standing;
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeId, Placed, Round, Verdict};

impl Run {
    /// The place of a node in the current round, if it runs workers of it.
    pub(in crate::rendezvous) fn seat(&self, id: NodeId) -> Option<(Round, u32)> {
        let node = self.roster.get(id).filter(|node| node.status == Status::Active)?;
        node.placed.filter(|(round, _)| *round == self.round())
    }

    /// Whether a node has or had a place in the current round.
    pub(in crate::rendezvous) fn was_placed(&self, id: NodeId) -> bool {
        self.roster.get(id).and_then(|node| node.placed).is_some_and(|(round, _)| round == self.round())
    }

    /// Whether a node neither waits nor runs.
    pub(in crate::rendezvous) fn is_idle(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(|node| node.status == Status::Idle)
    }

    /// Whether a node waits until its host is let in again.
    pub fn is_out(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(Node::is_kept_out)
    }

    /// The hosts that are kept out of the job, because of their failures or departures.
    pub fn exclusions(&self, now: Instant) -> Vec<Exclusion> {
        self.hosts.exclusions(&self.settings, now)
    }

    /// Whether a node is a spare.
    pub(in crate::rendezvous) fn waits_as_spare(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(|node| self.parts().is_spare(node))
    }

    /// Whether a world that a node claims becomes the current one: this coordinator was restarted, and knows no running world.
    pub fn adopts(&self, placed: &Placed, now: Instant) -> bool {
        let none_runs = !self.current.has_formed() && self.roster.active().is_empty();
        none_runs && self.recovery.is_recovering(now) && !self.knows_world(placed) && placed.round > self.round()
    }

    /// Whether this coordinator knows the world that a node claims.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.recovery.knows_world(placed)
    }

    /// Whether members of a world that this coordinator does not know may still run.
    pub fn is_recovering(&self, now: Instant) -> bool {
        self.recovery.is_recovering(now)
    }

    /// Until when no round closes: members of a world that this coordinator did not form may still run, and have not reported.
    pub fn held_until(&self) -> Option<Instant> {
        self.parts().held_until()
    }

    /// The current decision.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Describe the next round: which nodes have joined, how many are missing, why it does not close, and when it will.
    pub fn progress(&self, now: Instant) -> String {
        self.parts().progress(now)
    }

    /// The message by which members learn whether the world must re-form, and why.
    pub(in crate::rendezvous) fn status(&self) -> CoordinatorMessage {
        self.parts().status()
    }

    /// The message by which a node learns that its world is over, for a reason outside the node.
    pub(in crate::rendezvous) fn over(&self, reason: String) -> CoordinatorMessage {
        self.parts().over(reason)
    }

    /// The run's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The current round: number of the last one that completed.
    pub fn round(&self) -> Round {
        self.roster.round()
    }

    /// The job's restart number: the number of failures that were counted against its budget.
    pub fn restart(&self) -> u32 {
        self.current.restart()
    }

    /// The reason for which the world must re-form, or else the reason for which its round closed.
    pub fn reason(&self) -> Option<&str> {
        self.current.interrupted().or(self.current.world().map(|world| world.reason.as_str()))
    }

    /// The verdict with which the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.current.closed()
    }

    /// Whether a node is connected, or within its `reconnect_grace`.
    pub fn knows(&self, node: NodeId) -> bool {
        self.roster.knows(node)
    }

    /// Whether the run has no nodes.
    pub fn is_empty(&self) -> bool {
        self.roster.is_empty()
    }

    /// Whether a connected node has this address: that of its connection, or one that it has named as its own.
    pub fn has_node_at(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.roster.iter().filter(|(_, node)| node.session.is_some()).any(|(_, node)| {
            node.ends.is_some_and(|ends| {
                ends.peer.to_canonical() == address || node.interfaces.iter().flatten().any(|its| *its == address)
            })
        })
    }

    /// Number of connected nodes.
    pub fn connected(&self) -> usize {
        self.roster.counts().connected
    }

    /// The session of a node, while it is connected.
    pub fn session(&self, node: NodeId) -> Option<SessionId> {
        self.roster.get(node)?.session
    }

    /// All nodes with their status and last place.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Status, Option<(Round, u32)>)> {
        self.roster.iter().map(|(id, node)| (id, &node.status, node.placed))
    }

    /// Time since a deadline passed that is about the silence of nodes.
    pub fn lateness(&self, now: Instant) -> Option<Duration> {
        let deadlines = [self.roster.lost_by(), self.in_place.due_at()];
        Some(now.saturating_duration_since(deadlines.into_iter().flatten().min()?))
    }

    /// Compare the counters of the nodes with a recount.
    ///
    /// # Errors
    /// Describes the difference.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        self.roster.check()
    }
}
