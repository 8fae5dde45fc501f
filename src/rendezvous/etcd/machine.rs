//! A node over etcd v3. Pure: a driver performs its [`EtcdRequest`]s, and reports [`EtcdEvent`]s.
//!
//! Under the run's prefix there are the key of the state, and one key per node, attached to the node's lease. The value of a node's key
//! is its wish. A member of the state without a key is lost.
//!
//! A transaction writes the state if its `mod_revision` is the known one. Otherwise it returns the whole prefix, because new members
//! of the state must not be judged by an older list of keys. A watch delivers changes in order. A watch that ends (compaction, a
//! broken stream) is replaced by a snapshot and a new watch.
//!
//! **Fence.** Without a renewal for a lease, a member stops its workers ([`crate::rendezvous::node::fence`]). A renewal counts from
//! the moment it was requested, and only while the member's key is attached to that lease: a key that was gone may have been missed by
//! a node that forms a world without this one. Such a member puts its key in a transaction with the state. So either that node's write
//! fails, or this one's.
//!
//! A renewal needs a leader. If etcd has none for longer than a lease, no lease ends either: whoever leads next first renews all. So
//! the node asks every voting member. If all of them, asked after the last renewal and before the fence, refuse the connection or
//! know no leader, the lease counts as renewed from the first ask (`docs/decisions/0068-a-cluster-without-a-leader-ends-no-lease.md`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::interface::{EtcdEvent, EtcdRequest, LeaseId, LeaseOf, NodeKey, Revision, RunChange, Snapshot, StateKey};
use super::leases::{NodeLease, RUN_TTL, RunLease};
use crate::rendezvous::cell::node::{CellCommand, CellNode};
use crate::rendezvous::cell::peers::{Peer, Peers};
use crate::rendezvous::cell::wish::Wish;
use crate::rendezvous::messages::message::{Hello, NodeId};
use crate::rendezvous::node::JoinError;
use crate::rendezvous::node::link::back_off;

const NO_LEASE: &str = "this node's lease at etcd has ended";

/// A request that is under way. There is one at a time.
#[derive(Clone, Debug)]
enum Doing {
    GrantNode,
    GrantRun,
    Range,
    PutWish { wish: Vec<u8> },
    Txn { state: Vec<u8>, run_lease: LeaseId, own: Option<Vec<u8>> },
}

/// The watch of the prefix.
#[derive(Clone, Copy, Debug)]
enum Watch {
    /// Changes are reported.
    On,
    /// A snapshot is needed first, at this time.
    Off { retry_at: Instant },
}

/// A node over etcd.
#[derive(Clone, Debug)]
pub struct EtcdNode {
    node: CellNode,
    lease: Option<NodeLease>,
    run_lease: Option<RunLease>,
    /// Whether this node's key is attached to its lease.
    attached: bool,
    doing: Option<Doing>,
    /// A write that waits for the run's lease.
    held: Option<Vec<u8>>,
    /// Keys have changed, and the node has not seen it.
    stale: bool,
    /// The revision of the state that the node has seen last.
    reported: Revision,
    watch: Watch,
    /// Watches that ended without a change, in a row.
    watches: u32,
    /// The last known content of the prefix.
    known: Snapshot,
    /// The wishes in it, decoded.
    peers: BTreeMap<NodeId, Peer>,
    surveying: bool,
    requests: Vec<EtcdRequest>,
    notes: Vec<String>,
}

impl EtcdNode {
    /// Create a node. `hello` must have its address. etcd is not called before the first request.
    ///
    /// `name`: of etcd, in messages. `timeout`: how long a node that etcd has answered once goes on without it.
    pub fn new(hello: Hello, name: String, timeout: Duration, now: Instant) -> Self {
        Self {
            node: CellNode::over_etcd(hello, name, timeout, now),
            lease: None,
            run_lease: None,
            attached: false,
            doing: None,
            held: None,
            stale: false,
            reported: Revision::default(),
            watch: Watch::Off { retry_at: now },
            watches: 0,
            known: Snapshot::default(),
            peers: BTreeMap::new(),
            surveying: false,
            requests: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The node over the cell.
    pub fn node(&self) -> &CellNode {
        &self.node
    }

    /// The node over the cell, for requests. Call [`EtcdNode::on_tick`] afterwards.
    pub fn node_mut(&mut self) -> &mut CellNode {
        &mut self.node
    }

    /// Time has passed, or a request was made.
    pub fn on_tick(&mut self, now: Instant) {
        self.requests.extend(self.lease.as_mut().and_then(|lease| lease.renewal(now)));
        self.requests.extend(self.run_lease.as_mut().and_then(|lease| lease.renewal(now)));
        if let Some(lease) = self.lease.as_mut().filter(|_| !self.surveying)
            && let Some(survey) = lease.survey(now)
        {
            self.surveying = true;
            self.requests.push(survey);
            // If etcd does not answer this either, the node counts it as out of reach.
            self.node.look_if_idle(now);
        }
        if self.watch_retry_at().is_some_and(|at| at <= now) {
            self.node.look_if_idle(now);
        }
        self.node.on_tick(now);
        if self.is_over() {
            return self.send_farewell();
        }
        self.send_requests(now);
    }

    /// etcd has answered, or its watch reports changes.
    pub fn on_event(&mut self, event: EtcdEvent, now: Instant) {
        match event {
            EtcdEvent::Granted { of: LeaseOf::Node, lease, asked } => {
                let settings = self.node.settings();
                let (ttl, every) = (settings.lease(), settings.keep_alive_interval);
                self.lease = Some(NodeLease::granted(lease, ttl, every, asked));
                self.attached = false;
                self.ask(Doing::Range, EtcdRequest::Range);
            }
            EtcdEvent::Granted { of: LeaseOf::Run, lease, .. } => {
                self.run_lease = Some(RunLease::known(lease, now));
                self.doing = None;
                if let Some(state) = self.held.take() {
                    self.write(state, now);
                }
            }
            EtcdEvent::Renewed { lease, asked, held } => self.on_renewed(lease, asked, held, now),
            EtcdEvent::Snapshot(snapshot) => {
                self.take(snapshot, now);
                self.report_state(CellNode::on_state, now);
            }
            EtcdEvent::Refused(snapshot) => {
                self.take(snapshot, now);
                self.report_state(CellNode::on_conflict, now);
            }
            EtcdEvent::Written(revision) => self.on_written(revision, now),
            EtcdEvent::WishPut(revision) => {
                if let Some(Doing::PutWish { wish }) = self.doing.take() {
                    self.record_own_key(revision, wish);
                }
                self.node.on_wish_put();
                // The state may have changed meanwhile. The node must see that before it decides.
                self.stale = true;
            }
            EtcdEvent::Changed(revision, changes) => {
                self.watches = 0;
                self.change(revision, changes, now);
            }
            EtcdEvent::WatchEnded => {
                let delay = back_off(self.watches, self.node.id().0 as u64);
                self.watches = self.watches.saturating_add(1);
                self.watch = Watch::Off { retry_at: now + delay };
            }
            EtcdEvent::Failed { error, lease_gone } => {
                (self.doing, self.held) = (None, None);
                if lease_gone {
                    // Whichever it was, the next snapshot shows which of them still has keys.
                    self.run_lease = None;
                    self.lose_lease(now);
                }
                self.node.on_failed(error, false, now);
            }
            EtcdEvent::Surveyed { asked, leaderless } => self.on_surveyed(asked, leaderless, now),
            EtcdEvent::Broken(error) => {
                (self.doing, self.held) = (None, None);
                match self.node.machine().was_welcomed() {
                    // A running job goes on for as long as its lease does: somebody may mend it.
                    true => self.node.on_failed(error, false, now),
                    false => self.node.on_broken(JoinError::connection(error)),
                }
            }
        }
        if self.is_over() {
            return self.send_farewell();
        }
        self.send_requests(now);
    }

    /// When to call [`EtcdNode::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.is_over() {
            return self.lease.as_ref().map(|lease| lease.renewed_at);
        }
        let lease = self.lease.as_ref().map(|lease| lease.next_deadline(self.surveying));
        let run = self.run_lease.as_ref().map(RunLease::next_deadline);
        [self.node.next_deadline(), lease, run, self.watch_retry_at()].into_iter().flatten().min()
    }

    /// When to read the prefix again for a new watch. A node that etcd does not answer reads it when it tries again.
    fn watch_retry_at(&self) -> Option<Instant> {
        match self.watch {
            Watch::Off { retry_at } if self.lease.is_some() && self.doing.is_none() && self.node.is_up() => {
                Some(retry_at)
            }
            _ => None,
        }
    }

    /// The requests to make now, in order.
    pub fn take_requests(&mut self) -> Vec<EtcdRequest> {
        std::mem::take(&mut self.requests)
    }

    /// Decisions that this node has written, and what it has found in etcd, for the log.
    pub fn take_notes(&mut self) -> Vec<String> {
        let mut notes = std::mem::take(&mut self.notes);
        notes.extend(self.node.take_notes());
        notes
    }

    /// Whether the node has left, and nothing remains to be requested.
    pub fn has_left(&self) -> bool {
        self.node.has_left() && self.lease.is_none() && self.requests.is_empty()
    }

    /// Whether this node takes no part any more.
    fn is_over(&self) -> bool {
        self.node.has_left() || self.node.view().failed.is_some()
    }

    /// End the lease, so that the others need not wait for its end.
    fn send_farewell(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.requests.push(EtcdRequest::Revoke { lease: lease.id });
        }
        self.run_lease = None;
    }

    fn ask(&mut self, doing: Doing, request: EtcdRequest) {
        self.doing = Some(doing);
        self.requests.push(request);
    }

    fn on_renewed(&mut self, lease: LeaseId, asked: Instant, held: bool, now: Instant) {
        if let (Some(run), false) = (&self.run_lease, held)
            && run.id == lease
        {
            self.run_lease = None;
        }
        let Some(own) = self.lease.as_mut().filter(|own| own.id == lease) else { return };
        if held {
            own.renewed(asked);
            self.vouch(now);
        } else {
            self.lose_lease(now);
            self.node.look_if_idle(now);
        }
    }

    /// The members were asked whether they know a leader.
    fn on_surveyed(&mut self, asked: Instant, leaderless: bool, now: Instant) {
        self.surveying = false;
        let Some(lease) = self.lease.as_ref().filter(|lease| leaderless && self.attached && asked > lease.renewed_at)
        else {
            return;
        };
        if self.node.machine().lease_ends_at() > now {
            self.node.on_renewed(lease.fence_from(asked, self.node.settings().lease()), now);
        }
    }

    /// Renew the fence of a node whose key is attached to its lease.
    fn vouch(&mut self, now: Instant) {
        if let Some(lease) = self.lease.as_ref().filter(|_| self.attached) {
            self.node.on_renewed(lease.fence_from(lease.renewed_at, self.node.settings().lease()), now);
        }
    }

    fn lose_lease(&mut self, now: Instant) {
        (self.lease, self.attached) = (None, false);
        self.watch = Watch::Off { retry_at: now };
        self.node.forget_wish();
    }

    fn on_written(&mut self, revision: Revision, now: Instant) {
        if let Some(Doing::Txn { state, run_lease, own }) = self.doing.take() {
            // The watch may have reported a later state already.
            if self.known_revision() < revision && self.known.revision < revision {
                self.known.state = Some(StateKey { bytes: state, revision, lease: run_lease });
            }
            if let Some(wish) = own {
                self.record_own_key(revision, wish);
            }
        }
        self.reported = revision;
        self.apply_peers(now);
        self.node.on_written(now);
        // A later state is reported after this one.
        self.stale |= self.known_revision() != revision;
    }

    /// This node's key was put at this revision, according to etcd's answer.
    fn record_own_key(&mut self, revision: Revision, wish: Vec<u8>) {
        let (Some(lease), true) = (&self.lease, self.known.revision < revision) else { return };
        let known = self.known.nodes.get(&self.node.id()).filter(|key| key.lease == lease.id);
        let created = known.map_or(revision, |key| key.created);
        let key = NodeKey { lease: lease.id, created, modified: revision, wish };
        self.put_key(self.node.id(), Some(key));
    }

    /// Apply a snapshot, and watch for changes after it.
    fn take(&mut self, snapshot: Snapshot, now: Instant) {
        (self.doing, self.stale) = (None, false);
        // A watch may have overtaken the answer.
        if snapshot.revision >= self.known.revision {
            self.known.revision = snapshot.revision;
            self.known.state = snapshot.state;
            let gone: Vec<_> =
                self.known.nodes.keys().filter(|node| !snapshot.nodes.contains_key(node)).copied().collect();
            gone.into_iter().for_each(|node| self.put_key(node, None));
            snapshot.nodes.into_iter().for_each(|(node, key)| self.put_key(node, Some(key)));
        }
        if let Watch::Off { .. } = self.watch {
            self.watch = Watch::On;
            self.requests.push(EtcdRequest::Watch { from: Revision(self.known.revision.0 + 1) });
        }
        self.adopt_run_lease(now);
        self.apply_peers(now);
    }

    /// Renew the lease of the state from now on. One of this node's that no state uses is ended.
    fn adopt_run_lease(&mut self, now: Instant) {
        let Some(lease) = self.lease_of_state() else { return };
        if self.run_lease.is_none_or(|run| run.id != lease) {
            let unused = self.run_lease.replace(RunLease::known(lease, now));
            self.requests.extend(unused.map(|unused| EtcdRequest::Revoke { lease: unused.id }));
        }
    }

    fn change(&mut self, revision: Revision, changes: Vec<RunChange>, now: Instant) {
        if revision <= self.known.revision {
            return;
        }
        self.known.revision = revision;
        for change in changes {
            match change {
                // The answer to a transaction may arrive before the watch reports the same state, or an earlier deletion.
                RunChange::State(state) if self.known_revision() < revision => {
                    self.known.state = state;
                    self.adopt_run_lease(now);
                }
                RunChange::State(_) => {}
                RunChange::Node(node, key) => {
                    if self.known.nodes.get(&node).is_none_or(|known| known.modified < revision) {
                        self.put_key(node, key);
                    }
                }
            }
        }
        self.stale = true;
    }

    /// Record a node's key, and decode its wish.
    fn put_key(&mut self, node: NodeId, key: Option<NodeKey>) {
        let Some(key) = key else {
            self.known.nodes.remove(&node);
            self.peers.remove(&node);
            return;
        };
        let before = self.known.nodes.get(&node).map(|known| known.wish.as_slice());
        let wish = match (before == Some(key.wish.as_slice()), self.peers.get(&node)) {
            (true, Some(peer)) => peer.wish.clone(),
            _ => match Wish::decode(node, self.node.machine().run_id(), &key.wish) {
                Ok(wish) => Some(Arc::new(wish)),
                Err(error) => {
                    self.notes.push(format!("the value of node {:032x} at etcd is ignored: {error}", node.0));
                    None
                }
            },
        };
        self.peers.insert(node, Peer { created: key.created.0, modified: key.modified.0, wish });
        self.known.nodes.insert(node, key);
    }

    /// Report to the node which nodes have a key. If its own key is attached to its lease, renew its fence.
    fn apply_peers(&mut self, now: Instant) {
        let own = self.known.nodes.get(&self.node.id()).map(|key| key.lease);
        if self.attached && own.is_none() {
            // Somebody has deleted the key.
            self.node.forget_wish();
        }
        self.attached = own.is_some() && own == self.lease_id();
        self.node.on_peers(Peers::new(self.peers.clone()));
        self.vouch(now);
    }

    /// The `mod_revision` of the state.
    fn known_revision(&self) -> Revision {
        self.known.state.as_ref().map_or(Revision(0), |state| state.revision)
    }

    /// The lease of the state.
    fn lease_of_state(&self) -> Option<LeaseId> {
        self.known.state.as_ref().map(|state| state.lease).filter(|lease| lease.0 != 0)
    }

    /// The lease of this node.
    fn lease_id(&self) -> Option<LeaseId> {
        self.lease.as_ref().map(|lease| lease.id)
    }

    /// Show the node the known state.
    fn report_state(&mut self, how: fn(&mut CellNode, Option<&[u8]>, Instant), now: Instant) {
        self.reported = self.known_revision();
        how(&mut self.node, self.known.state.as_ref().map(|state| state.bytes.as_slice()), now);
    }

    fn send_requests(&mut self, now: Instant) {
        if self.doing.is_some() {
            return;
        }
        if self.stale {
            self.stale = false;
            self.apply_peers(now);
            if self.known_revision() == self.reported {
                self.node.on_wishes(now);
            } else {
                self.report_state(CellNode::on_state, now);
            }
        }
        if self.lease.is_some() && !self.attached {
            self.node.touch();
        }
        match (self.node.take_command(), self.lease_id()) {
            (Some(CellCommand::Read), Some(_)) => self.ask(Doing::Range, EtcdRequest::Range),
            (Some(CellCommand::Read), None) => {
                let ttl = self.node.settings().lease();
                self.ask(Doing::GrantNode, EtcdRequest::Grant { of: LeaseOf::Node, ttl, asked: now });
            }
            (Some(CellCommand::Write(state)), _) => self.write(state, now),
            (None, _) if !self.node.take_wish() => {}
            (None, Some(lease)) => {
                let wish = self.node.wish();
                self.ask(Doing::PutWish { wish: wish.clone() }, EtcdRequest::PutWish { lease, wish });
            }
            (None, None) => self.node.on_failed(NO_LEASE.to_owned(), false, now),
        }
    }

    /// Write the state, under the run's lease.
    fn write(&mut self, state: Vec<u8>, now: Instant) {
        let Some(lease) = self.lease_id() else {
            return self.node.on_failed(NO_LEASE.to_owned(), false, now);
        };
        let Some(run_lease) = self.lease_of_state().or(self.run_lease.map(|run| run.id)) else {
            self.held = Some(state);
            return self.ask(Doing::GrantRun, EtcdRequest::Grant { of: LeaseOf::Run, ttl: RUN_TTL, asked: now });
        };
        let own = (!self.attached).then(|| self.node.wish());
        let doing = Doing::Txn { state: state.clone(), run_lease, own: own.clone() };
        let own = own.map(|wish| (lease, wish));
        self.ask(doing, EtcdRequest::Txn { expect: self.reported, state, run_lease, own });
    }
}
