//! The nodes of a run, with what is counted of them kept true: so that no event costs more in a large job than in a small one.

use std::collections::BTreeSet;
use std::time::Instant;

use super::admission::place_of;
use super::state::{Node, Run, Status};
use crate::rendezvous::protocol::message::NodeId;

impl Run {
    /// Change a node with the counters kept true. `None` removes it.
    pub(in crate::rendezvous) fn update(&mut self, id: NodeId, change: impl FnOnce(Option<Node>) -> Option<Node>) {
        let before = self.nodes.remove(&id);
        if let Some(node) = &before {
            self.count(node, false);
        }
        let after = change(before);
        self.sort(id, after.as_ref());
        if let Some(node) = after {
            self.count(&node, true);
            self.nodes.insert(id, node);
        }
    }

    /// Take in a node.
    pub(in crate::rendezvous) fn settle_in(&mut self, id: NodeId, node: Node) {
        self.places.insert(place_of(&node), id);
        self.update(id, |_| Some(node));
    }

    /// A known node has introduced itself anew, perhaps at another place, which it takes unless another node has it.
    pub(in crate::rendezvous) fn resettle(&mut self, id: NodeId, node: Node) {
        self.vacate(id);
        self.places.entry(place_of(&node)).or_insert(id);
        self.update(id, |_| Some(node));
    }

    /// Forget a node.
    pub(in crate::rendezvous) fn remove(&mut self, id: NodeId) {
        self.vacate(id);
        self.update(id, |_| None);
    }

    fn vacate(&mut self, id: NodeId) {
        if let Some(place) = self.nodes.get(&id).map(place_of).filter(|place| self.places.get(place) == Some(&id)) {
            self.places.remove(&place);
        }
    }

    /// Something was heard of a node: no counter changes.
    pub(in crate::rendezvous) fn hear(&mut self, id: NodeId, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&id) {
            (node.heard_at, node.suspect) = (now, false);
        }
    }

    /// Put a node into the set it belongs to.
    fn sort(&mut self, id: NodeId, node: Option<&Node>) {
        let status = node.map(|node| &node.status);
        for (set, belongs) in [
            (&mut self.active, status == Some(&Status::Active)),
            (&mut self.unfinished, status == Some(&Status::Active) && !node.is_some_and(|node| node.done)),
            (&mut self.waiting, matches!(status, Some(Status::Waiting { .. }))),
        ] {
            if belongs {
                set.insert(id);
            } else {
                set.remove(&id);
            }
        }
    }

    /// Which of the counters a node adds to: returning, unreachable, done, connected, present.
    fn counted(&self, node: &Node) -> [bool; 5] {
        let waiting = matches!(node.status, Status::Waiting { .. });
        // The round does not change while nodes wait, other than in `complete` and `recall`, which recount.
        [
            waiting && self.last_rank(node).is_some(),
            waiting && node.session.is_none(),
            node.status == Status::Active && node.done,
            node.session.is_some(),
            node.session.is_some() && node.status != Status::Idle,
        ]
    }

    fn counters(&mut self) -> [&mut usize; 5] {
        [
            &mut self.returning_count,
            &mut self.unreachable_count,
            &mut self.done_count,
            &mut self.connected_count,
            &mut self.present_count,
        ]
    }

    fn count(&mut self, node: &Node, add: bool) {
        let counted = self.counted(node);
        for (counter, _) in self.counters().into_iter().zip(counted).filter(|(_, counted)| *counted) {
            *counter = if add { *counter + 1 } else { *counter - 1 };
        }
    }

    fn fresh_count(&self) -> [usize; 5] {
        let mut fresh = [0; 5];
        for node in self.nodes.values() {
            for (count, counted) in fresh.iter_mut().zip(self.counted(node)) {
                *count += usize::from(counted);
            }
        }
        fresh
    }

    /// Count all nodes anew, after the round number has changed.
    pub(in crate::rendezvous) fn recount(&mut self) {
        let fresh = self.fresh_count();
        for (counter, fresh) in self.counters().into_iter().zip(fresh) {
            *counter = fresh;
        }
        (self.active, self.unfinished, self.waiting) = self.fresh_sets();
    }

    /// Who is active, who of these has not finished, and who waits.
    fn fresh_sets(&self) -> (BTreeSet<NodeId>, BTreeSet<NodeId>, BTreeSet<NodeId>) {
        let of =
            |which: fn(&Node) -> bool| self.nodes.iter().filter(|(_, node)| which(node)).map(|(id, _)| *id).collect();
        (
            of(|node| node.status == Status::Active),
            of(|node| node.status == Status::Active && !node.done),
            of(|node| matches!(node.status, Status::Waiting { .. })),
        )
    }

    /// Compare the counters with a recount.
    ///
    /// # Errors
    /// Which differ.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        let counters = [self.returning_count, self.unreachable_count, self.done_count, self.connected_count];
        let kept = ((counters, self.present_count), (&self.active, &self.unfinished, &self.waiting));
        let ([returning, unreachable, done, connected, present], (active, unfinished, waiting)) =
            (self.fresh_count(), self.fresh_sets());
        let fresh = (([returning, unreachable, done, connected], present), (&active, &unfinished, &waiting));
        if kept == fresh { Ok(()) } else { Err(format!("counters are {kept:?}, a recount gives {fresh:?}")) }
    }
}
