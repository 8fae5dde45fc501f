//! A node over etcd v3: the interface that a network driver performs. Pure; no such driver exists yet.
//!
//! Under a prefix of the run there are the key of the state and one key per member, which is attached to the member's lease.
//! A member's key is written in the transaction that writes the state with the member in it, so who is in the state and has no
//! key is lost. The state is written if its `mod_revision` is the one known; else the transaction answers with the whole
//! prefix, since members that are new in the state must not be judged by an older list. Changes come by watch, in order; a
//! watch that cannot go on (compaction, a broken stream) begins anew from a snapshot.

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

/// What the driver asks of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdRequest {
    /// Grant a lease. Answered by [`EtcdEvent::Granted`].
    Grant {
        /// How long it holds without being renewed.
        ttl: Duration,
    },
    /// Renew the lease. Answered by [`EtcdEvent::Renewed`].
    KeepAlive {
        /// Which.
        lease: LeaseId,
    },
    /// Read the whole prefix at one revision. Answered by [`EtcdEvent::Snapshot`].
    Range,
    /// If the state's `mod_revision` is `expect` (0: there is no state), put the state, and this node's key under the lease;
    /// else read the whole prefix. Answered by [`EtcdEvent::Written`] or [`EtcdEvent::Refused`].
    Txn {
        /// What is compared.
        expect: Revision,
        /// What is put.
        state: Vec<u8>,
        /// What the member's key is attached to.
        lease: LeaseId,
    },
    /// Watch the prefix from this revision on, instead of any watch before. Answered by [`EtcdEvent::Changed`], over and over.
    Watch {
        /// The first revision of interest.
        from: Revision,
    },
}

/// The run's prefix at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// When.
    pub revision: Revision,
    /// The state and its `mod_revision`.
    pub state: Option<(Vec<u8>, Revision)>,
    /// Whose keys are there, and the leases they hang on.
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

/// What the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdEvent {
    /// The lease is there.
    Granted(LeaseId),
    /// The lease was renewed; or it had ended before.
    Renewed {
        /// It holds.
        held: bool,
    },
    /// The answer to [`EtcdRequest::Range`].
    Snapshot(Snapshot),
    /// The transaction put the state at this revision.
    Written(Revision),
    /// The state was another.
    Refused(Snapshot),
    /// All changes of one revision.
    Changed(Revision, Vec<Change>),
    /// The watch has ended: what it should go on from was compacted, or its stream broke.
    WatchEnded,
    /// A request other than a watch failed.
    Failed(String),
}

/// One node's part in a run over etcd.
#[derive(Clone, Debug)]
pub struct EtcdNode {
    node: CellNode,
    ttl: Duration,
    renew_every: Duration,
    lease: Option<LeaseId>,
    renew_at: Option<Instant>,
    /// When the last grant or renewal was asked for.
    asked_at: Instant,
    /// When the last of them that was answered was asked for.
    renewed_at: Instant,
    /// This node's key hangs on the lease. A new lease proves nothing to the others before it does: the key may be gone, and
    /// a world be forming without this node.
    attached: bool,
    /// A grant, range or transaction is under way.
    busy: bool,
    /// Something changed meanwhile.
    stale: bool,
    /// No watch is on, or the lease has ended, and no snapshot has come since: changes are not told.
    adrift: bool,
    /// What the transaction under way puts.
    unanswered: Option<Vec<u8>>,
    /// The prefix as it is known.
    known: Snapshot,
    requests: Vec<EtcdRequest>,
}

impl EtcdNode {
    /// A node that introduces itself with `hello`, which has its address. Asks for nothing before it is asked itself.
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

    /// The node itself: its view, and how a join ended.
    pub fn node(&self) -> &CellNode {
        &self.node
    }

    /// The node itself, to be asked for something. [`EtcdNode::on_tick`] follows.
    pub fn node_mut(&mut self) -> &mut CellNode {
        &mut self.node
    }

    /// Time has passed, or something was asked of the node.
    pub fn on_tick(&mut self, now: Instant) {
        self.node.on_tick(now);
        if let (Some(lease), Some(_)) = (self.lease, self.renew_at.filter(|at| *at <= now)) {
            self.asked_at = now;
            self.renew_at = Some(now + self.renew_every);
            self.requests.push(EtcdRequest::KeepAlive { lease });
        }
        self.go_on(now);
    }

    /// etcd has answered, or told of changes.
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
                // A watch may have told of a later state already.
                if let Some(state) = self.unanswered.take()
                    && self.known.state.as_ref().is_none_or(|(_, known)| *known < revision)
                {
                    self.known.state = Some((state, revision));
                }
                if let Some(lease) = self.lease {
                    self.known.members.insert(self.node.id(), lease);
                }
                self.heed_members();
                self.node.on_written(now);
            }
            EtcdEvent::Changed(revision, changes) => self.change(revision, changes),
            EtcdEvent::WatchEnded => self.adrift = true,
            EtcdEvent::Failed(error) => {
                self.busy = false;
                self.node.on_failed(error, now);
            }
        }
        self.go_on(now);
    }

    /// When to call [`EtcdNode::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.node.next_deadline(), self.renew_at].into_iter().flatten().min()
    }

    /// What to ask of etcd now, in order.
    pub fn take_requests(&mut self) -> Vec<EtcdRequest> {
        std::mem::take(&mut self.requests)
    }

    /// The prefix anew; changes are watched from there.
    fn take(&mut self, snapshot: Snapshot) {
        (self.busy, self.stale, self.adrift) = (false, false, false);
        self.requests.push(EtcdRequest::Watch { from: Revision(snapshot.revision.0 + 1) });
        self.known = snapshot;
        self.heed_members();
    }

    /// Whose keys are there is who lives; this node shows so by its own.
    fn heed_members(&mut self) {
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
                // An answer to a transaction may be faster than the watch that tells of it.
                Change::State(state) if self.known.state.as_ref().is_none_or(|(_, known)| *known < revision) => {
                    self.known.state = Some((state, revision));
                }
                Change::State(_) => {}
            }
        }
        self.stale = true;
    }

    fn go_on(&mut self, now: Instant) {
        if self.busy {
            return;
        }
        if self.stale {
            self.stale = false;
            self.heed_members();
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
