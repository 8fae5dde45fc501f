//! A node over etcd leaves its messages to the node that proposes the next state: see [`crate::rendezvous::cell::peers`]. Part of [super].

use std::collections::BTreeMap;
use std::time::Instant;

use super::propose::{Author, Outcome, Proposal, Recorded};
use super::{CellNode, Liveness};
use crate::rendezvous::cell::blob::Blob;
use crate::rendezvous::cell::peers::{Peers, patience};
use crate::rendezvous::cell::wish::Wish;
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeId, NodeMessage};
use crate::rendezvous::run::{CELL_SESSION, Run};
use crate::wire::text::DEFAULT_RUN_ID;

impl CellNode {
    /// The nodes with a key at etcd. The next state, or [`CellNode::on_wishes`], applies a change.
    pub fn on_peers(&mut self, peers: Peers) {
        self.liveness = Liveness::Leases(peers);
    }

    /// Keys of nodes have changed, and the state has not.
    pub fn on_wishes(&mut self, now: Instant) {
        // A node that waits for the proposer already has nothing to decide before its own turn.
        if self.turn() == Some(0) || self.propose_at.is_none() {
            self.decide_and_write(now);
            self.pump(now);
        }
    }

    /// etcd has renewed this node's lease. `asked_at`: when the renewal was requested.
    pub fn on_renewed(&mut self, asked_at: Instant, now: Instant) {
        self.machine.renew(asked_at, now);
    }

    /// Whether this node's key is to be put now, with its [`CellNode::wish`]. Asked for once.
    pub fn take_wish(&mut self) -> bool {
        std::mem::take(&mut self.wishes)
    }

    /// The value of this node's key: its messages.
    pub fn wish(&self) -> Vec<u8> {
        Wish { hello: self.hello.clone(), messages: self.outbox.messages().to_vec() }.encode()
    }

    /// This node's key was put.
    pub fn on_wish_put(&mut self) {
        self.busy = false;
        self.failing = None;
    }

    /// Write the state again as it is. The transaction that does so puts the key of this member, and fails if another node has decided
    /// anything in between. So no world forms without this node after its key was put.
    pub fn touch(&mut self) {
        let there = self.confirmed.as_ref().filter(|blob| blob.knows(self.hello.node));
        let Some(blob) = there.filter(|_| self.can_write()).map(Blob::again) else { return };
        self.write(Proposal {
            blob,
            recorded: Recorded::default(),
            replies: Vec::new(),
            messages: Vec::new(),
            standing: self.standing,
        });
    }

    /// Whether this node's Hello was answered before a state contains it.
    pub(super) fn is_greeted_early(&self) -> bool {
        matches!(self.liveness, Liveness::Leases(_))
    }

    /// Answer the machine's Hello or heartbeat. Over etcd no other node need hear it.
    pub(super) fn answer_early(&mut self, message: &NodeMessage, now: Instant) {
        let replies = match message {
            NodeMessage::Hello(_) => {
                let news = self.confirmed.as_ref().filter(|_| !self.begins_anew());
                let news =
                    news.map(|blob| self.catch_up(&self.seen.run(blob, &self.hello, now), now)).unwrap_or_default();
                std::iter::once(self.welcome()).chain(news).collect()
            }
            NodeMessage::Heartbeat { .. } => vec![CoordinatorMessage::Heartbeat { waits: None }],
            _ => return,
        };
        self.deliver(replies, now);
    }

    /// Number of nodes that may propose before this one. Over a cell without wishes every node proposes.
    fn turn(&self) -> Option<u32> {
        match &self.liveness {
            Liveness::Counters => Some(0),
            Liveness::Leases(peers) => peers.turn(self.hello.node),
        }
    }

    /// Whether this node may write the state now.
    pub(super) fn proposes(&self, now: Instant) -> bool {
        match self.turn() {
            Some(0) => true,
            Some(_) => self.propose_at.is_some_and(|at| at <= now),
            None => false,
        }
    }

    /// Leave a proposal to the node whose turn it is. This node's part in it becomes its wish.
    pub(super) fn leave_to_proposer(&mut self, proposal: Proposal, now: Instant) {
        self.outbox.put_back(proposal.messages);
        let leaves = self.outbox.has(|message| matches!(message, NodeMessage::Leave { .. }));
        if let Some(turn) = self.turn() {
            let at = now + patience(turn, leaves);
            self.propose_at = Some(self.propose_at.map_or(at, |before| before.min(at)));
        }
        let highest = self.outbox.highest();
        if highest > self.wished {
            self.wished = highest;
            self.busy = true;
            self.wishes = true;
        }
    }

    /// Propose a state when the round closes, unless a node before this one does.
    pub(super) fn propose_when_closing(&mut self, closes_at: Option<Instant>) {
        self.read_at = None;
        self.propose_at = closes_at.zip(self.turn()).map(|(at, turn)| at + patience(turn, false));
    }

    /// Apply the messages in the other nodes' wishes that the state does not contain yet. Returns the number of each node's last one.
    pub(super) fn apply_wishes(&self, run: &mut Run, outcome: &mut Outcome, now: Instant) -> BTreeMap<NodeId, u64> {
        let (Liveness::Leases(peers), None) = (&self.liveness, run.closed()) else { return BTreeMap::new() };
        let mut applied = BTreeMap::new();
        for Wish { hello, messages } in peers.wishes_of_others(self.hello.node) {
            let contained = self.confirmed.as_ref().map_or(0, |blob| blob.applied(hello.node));
            let author = Author { hello, session: CELL_SESSION };
            for (number, message) in messages.iter().filter(|(number, _)| *number > contained) {
                self.apply_message(author, message.clone(), run, outcome, now);
                applied.insert(hello.node, *number);
            }
        }
        applied
    }

    /// Whether this node starts the run anew: the run was closed, and none of its nodes is left. Only jobs without a run id do: the next
    /// one is another job under the same id.
    pub(super) fn begins_anew(&self) -> bool {
        let (Liveness::Leases(peers), Some(blob)) = (&self.liveness, &self.confirmed) else { return false };
        let new = self.view().round.0 == 0 && !blob.knows(self.hello.node);
        new && self.hello.run_id == DEFAULT_RUN_ID
            && blob.closed().is_some()
            && !blob.members().any(|node| peers.has(node))
    }

    /// Remove this node's messages that the state contains. Returns whether a withdrawal is among them.
    pub(super) fn settle(&mut self) -> bool {
        let contained = self.confirmed.as_ref().map_or(0, |blob| blob.applied(self.hello.node));
        self.outbox.settle(contained).iter().any(|(_, message)| *message == NodeMessage::Withdraw)
    }

    /// Nothing is known of the value of this node's key any more.
    pub fn forget_wish(&mut self) {
        (self.wished, self.wishes, self.propose_at) = (0, false, None);
    }
}
