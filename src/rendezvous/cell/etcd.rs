//! A node over etcd v3: the interface that a network driver performs. Pure; no such driver exists yet.
//!
//! Under the run's prefix there are the key of the state, and one key per member, attached to the member's lease. The transaction that
//! adds a member to the state also writes the member's key. So a member of the state without a key is lost.
//!
//! A transaction writes the state if its `mod_revision` is the known one. Otherwise it returns the whole prefix, because new members
//! of the state must not be judged by an older list of keys. A watch delivers changes in order. A watch that ends (compaction, a
//! broken stream) is replaced by a snapshot and a new watch.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::node::{CellCommand, CellNode, Liveness};
use crate::rendezvous::protocol::message::{Hello, NodeId};

/// A revision of etcd's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// A lease at etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A request to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdRequest {
    /// Grant a lease. Answered by [`EtcdEvent::Granted`].
    Grant {
        /// Time for which it holds without renewal.
        ttl: Duration,
    },
    /// Renew the lease. Answered by [`EtcdEvent::Renewed`].
    KeepAlive {
        /// The lease.
        lease: LeaseId,
    },
    /// Read the whole prefix at one revision. Answered by [`EtcdEvent::Snapshot`].
    Range,
    /// If the state's `mod_revision` is `expect` (0: there is no state), put the state, and this node's key under the lease.
    /// Otherwise read the whole prefix. Answered by [`EtcdEvent::Written`] or [`EtcdEvent::Refused`].
    Txn {
        /// The expected `mod_revision`.
        expect: Revision,
        /// The new state.
        state: Vec<u8>,
        /// This node's lease.
        lease: LeaseId,
    },
    /// Watch the prefix from this revision on, and end the earlier watch. Each change is reported by [`EtcdEvent::Changed`].
    Watch {
        /// The first revision of interest.
        from: Revision,
    },
}

/// The run's prefix at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The revision.
    pub revision: Revision,
    /// The state and its `mod_revision`.
    pub state: Option<(Vec<u8>, Revision)>,
    /// The members with a key, and the leases that the keys are attached to.
    pub members: BTreeMap<NodeId, LeaseId>,
}

/// One change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The state was put.
    State(Vec<u8>),
    /// A member's key was put under a lease, or deleted with its lease.
    Member(NodeId, Option<LeaseId>),
}

/// A report of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdEvent {
    /// The lease was granted.
    Granted(LeaseId),
    /// The answer to [`EtcdRequest::KeepAlive`].
    Renewed {
        /// Whether the lease holds. False: it had ended before.
        held: bool,
    },
    /// The answer to [`EtcdRequest::Range`].
    Snapshot(Snapshot),
    /// The transaction put the state at this revision.
    Written(Revision),
    /// The transaction found another state.
    Refused(Snapshot),
    /// All changes of one revision.
    Changed(Revision, Vec<Change>),
    /// The watch has ended: its next revision was compacted, or its stream broke.
    WatchEnded,
    /// A request other than a watch failed.
    Failed(String),
}

/// A node over etcd.
#[derive(Clone, Debug)]
pub struct EtcdNode {
    node: CellNode,
    ttl: Duration,
    renew_every: Duration,
    lease: Option<LeaseId>,
    renew_at: Option<Instant>,
    /// When the last grant or renewal was requested.
    asked_at: Instant,
    /// When the last successful grant or renewal was requested.
    renewed_at: Instant,
    /// Whether this node's key is attached to the lease. Before that, a new lease proves nothing to the other nodes: the key may be
    /// gone, and a world may be forming without this node.
    attached: bool,
    /// A grant, range or transaction is under way.
    busy: bool,
    /// A watch has reported changes that the node has not seen.
    stale: bool,
    /// The watch or the lease has ended, and no snapshot has come since. Changes are not reported meanwhile.
    adrift: bool,
    /// The state in the current transaction.
    unanswered: Option<Vec<u8>>,
    /// The last known content of the prefix.
    known: Snapshot,
    requests: Vec<EtcdRequest>,
}

impl EtcdNode {
    /// Create a node. `hello` must have its address. etcd is not called before the first request.
    pub fn new(hello: Hello, now: Instant) -> Self {
        Self {
            ttl: hello.settings.lease(),
            renew_every: hello.settings.keep_alive_interval,
            node: CellNode::new(hello, Liveness::Leases(BTreeSet::new()), now),
            lease: None,
            renew_at: None,
            asked_at: now,
            renewed_at: now,
            attached: false,
            busy: false,
            stale: false,
            adrift: false,
            unanswered: None,
            known: Snapshot::default(),
            requests: Vec::new(),
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
        self.node.on_tick(now);
        if let (Some(lease), Some(_)) = (self.lease, self.renew_at.filter(|at| *at <= now)) {
            self.asked_at = now;
            self.renew_at = Some(now + self.renew_every);
            self.requests.push(EtcdRequest::KeepAlive { lease });
        }
        self.send_requests(now);
    }

    /// etcd has answered, or its watch reports changes.
    pub fn on_event(&mut self, event: EtcdEvent, now: Instant) {
        match event {
            EtcdEvent::Granted(lease) => {
                self.lease = Some(lease);
                self.renew_at = Some(self.asked_at + self.renew_every);
                (self.renewed_at, self.attached) = (self.asked_at, false);
                self.requests.push(EtcdRequest::Range);
            }
            EtcdEvent::Renewed { held: true } => {
                self.renewed_at = self.asked_at;
                if self.attached {
                    self.node.on_renewed(self.renewed_at);
                }
            }
            EtcdEvent::Renewed { held: false } => {
                (self.lease, self.renew_at) = (None, None);
                self.adrift = true;
            }
            EtcdEvent::Snapshot(snapshot) => {
                self.take(snapshot);
                self.node.on_state(self.known.state.as_ref().map(|(state, _)| state.as_slice()), now);
            }
            EtcdEvent::Refused(snapshot) => {
                self.take(snapshot);
                self.node.on_conflict(self.known.state.as_ref().map(|(state, _)| state.as_slice()), now);
            }
            EtcdEvent::Written(revision) => {
                self.busy = false;
                // The watch may have reported a later state already.
                if let Some(state) = self.unanswered.take()
                    && self.known.state.as_ref().is_none_or(|(_, known)| *known < revision)
                {
                    self.known.state = Some((state, revision));
                }
                if let Some(lease) = self.lease {
                    self.known.members.insert(self.node.id(), lease);
                }
                self.apply_members();
                self.node.on_written(now);
            }
            EtcdEvent::Changed(revision, changes) => self.change(revision, changes),
            EtcdEvent::WatchEnded => self.adrift = true,
            EtcdEvent::Failed(error) => {
                self.busy = false;
                self.node.on_failed(error, now);
            }
        }
        self.send_requests(now);
    }

    /// When to call [`EtcdNode::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.node.next_deadline(), self.renew_at].into_iter().flatten().min()
    }

    /// The requests to make now, in order.
    pub fn take_requests(&mut self) -> Vec<EtcdRequest> {
        std::mem::take(&mut self.requests)
    }

    /// Apply a snapshot, and watch for changes after it.
    fn take(&mut self, snapshot: Snapshot) {
        (self.busy, self.stale, self.adrift) = (false, false, false);
        self.requests.push(EtcdRequest::Watch { from: Revision(snapshot.revision.0 + 1) });
        self.known = snapshot;
        self.apply_members();
    }

    /// Tell the node which members are alive: those with a key. If its own key is attached to its lease, renew its fence.
    fn apply_members(&mut self) {
        let alive: BTreeSet<_> = self.known.members.keys().copied().collect();
        self.node.on_leases(alive);
        self.attached = self.lease.is_some() && self.known.members.get(&self.node.id()) == self.lease.as_ref();
        if self.attached {
            self.node.on_renewed(self.renewed_at);
        }
    }

    fn change(&mut self, revision: Revision, changes: Vec<Change>) {
        if revision <= self.known.revision {
            return;
        }
        self.known.revision = revision;
        for change in changes {
            match change {
                Change::Member(node, Some(lease)) => _ = self.known.members.insert(node, lease),
                Change::Member(node, None) => _ = self.known.members.remove(&node),
                // The answer to a transaction may arrive before the watch reports the same state.
                Change::State(state) if self.known.state.as_ref().is_none_or(|(_, known)| *known < revision) => {
                    self.known.state = Some((state, revision));
                }
                Change::State(_) => {}
            }
        }
        self.stale = true;
    }

    fn send_requests(&mut self, now: Instant) {
        if self.busy {
            return;
        }
        if self.stale {
            self.stale = false;
            self.apply_members();
            self.node.on_state(self.known.state.as_ref().map(|(state, _)| state.as_slice()), now);
        }
        let (Some(command), lease) = (self.node.take_command(), self.lease) else {
            if self.adrift {
                self.node.look_if_idle(now);
            }
            return;
        };
        self.busy = true;
        match (command, lease) {
            (CellCommand::Write(state), Some(lease)) => {
                let expect = self.known.state.as_ref().map_or(Revision(0), |(_, revision)| *revision);
                self.unanswered = Some(state.clone());
                self.requests.push(EtcdRequest::Txn { expect, state, lease });
            }
            (CellCommand::Read, Some(_)) => self.requests.push(EtcdRequest::Range),
            (CellCommand::Read, None) => {
                self.asked_at = now;
                self.requests.push(EtcdRequest::Grant { ttl: self.ttl });
            }
            (CellCommand::Write(_), None) => {
                self.busy = false;
                self.node.on_failed("this node's lease has ended".to_owned(), now);
            }
        }
    }
}
