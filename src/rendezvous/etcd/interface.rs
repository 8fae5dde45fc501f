//! What the machine asks of etcd's driver, and what the driver reports.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::NodeId;

/// A revision of etcd's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// A lease at etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOf {
    /// The node's own key. It shows the others that the node is alive.
    Node,
    /// The run's state. It removes the state of a job that has ended long ago.
    Run,
}

/// A request to etcd. One of `Grant`, `Range`, `PutWish` and `Txn` is under way at a time, and each is answered once. The others go beside
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdRequest {
    /// Grant a lease. Answered by [`EtcdEvent::Granted`] or [`EtcdEvent::Failed`].
    Grant {
        /// What it is for.
        of: LeaseOf,
        /// Time for which it holds without renewal.
        ttl: Duration,
        /// Now. Comes back with the answer.
        asked: Instant,
    },
    /// Renew a lease. Answered by [`EtcdEvent::Renewed`], or not at all: a later renewal makes up for it.
    KeepAlive {
        /// The lease.
        lease: LeaseId,
        /// Now. Comes back with the answer.
        asked: Instant,
    },
    /// End a lease, and remove its keys. Not answered.
    Revoke {
        /// The lease.
        lease: LeaseId,
    },
    /// Read the whole prefix at one revision. Answered by [`EtcdEvent::Snapshot`] or [`EtcdEvent::Failed`].
    Range,
    /// Put this node's key. Answered by [`EtcdEvent::WishPut`] or [`EtcdEvent::Failed`].
    PutWish {
        /// This node's lease.
        lease: LeaseId,
        /// The key's value.
        wish: Vec<u8>,
    },
    /// If the state's `mod_revision` is `expect` (0: there is no state), put the state. Otherwise read the whole prefix.
    /// Answered by [`EtcdEvent::Written`], [`EtcdEvent::Refused`] or [`EtcdEvent::Failed`].
    Txn {
        /// The expected `mod_revision`.
        expect: Revision,
        /// The new state.
        state: Vec<u8>,
        /// The lease of the state.
        run_lease: LeaseId,
        /// This node's lease and the value of its key, if the transaction is to put that too.
        own: Option<(LeaseId, Vec<u8>)>,
    },
    /// Watch the prefix from this revision on, and end the earlier watch. Each change is reported by [`EtcdEvent::Changed`].
    Watch {
        /// The first revision of interest.
        from: Revision,
    },
    /// Ask every voting member whether it knows a leader. Answered by [`EtcdEvent::Surveyed`].
    Survey {
        /// Now. Comes back with the answer.
        asked: Instant,
    },
}

/// The run's prefix at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The revision.
    pub revision: Revision,
    /// The state.
    pub state: Option<StateKey>,
    /// The nodes with a key.
    pub nodes: BTreeMap<NodeId, NodeKey>,
}

/// The state of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateKey {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its `mod_revision`.
    pub revision: Revision,
    /// The lease it is attached to. 0: none.
    pub lease: LeaseId,
}

/// A node's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeKey {
    /// The lease it is attached to.
    pub lease: LeaseId,
    /// Its `create_revision`.
    pub created: Revision,
    /// Its `mod_revision`.
    pub modified: Revision,
    /// Its value.
    pub wish: Vec<u8>,
}

/// One change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunChange {
    /// The state was put. `None`: it was deleted.
    State(Option<StateKey>),
    /// A node's key was put. `None`: it was deleted, with its lease or by hand.
    Node(NodeId, Option<NodeKey>),
}

/// A report of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdEvent {
    /// The lease was granted.
    Granted {
        /// What it is for.
        of: LeaseOf,
        /// The lease.
        lease: LeaseId,
        /// When it was requested.
        asked: Instant,
    },
    /// The answer to [`EtcdRequest::KeepAlive`].
    Renewed {
        /// The lease.
        lease: LeaseId,
        /// When the renewal was requested.
        asked: Instant,
        /// Whether the lease holds. False: etcd does not know it (any more).
        held: bool,
    },
    /// The answer to [`EtcdRequest::Range`].
    Snapshot(Snapshot),
    /// The transaction put the state at this revision.
    Written(Revision),
    /// The transaction found another state.
    Refused(Snapshot),
    /// This node's key was put at this revision.
    WishPut(Revision),
    /// All changes of one revision. Revisions come in order.
    Changed(Revision, Vec<RunChange>),
    /// The watch has ended: its next revision was compacted, its stream broke, or etcd's member is silent.
    WatchEnded,
    /// A `Grant`, `Range`, `PutWish` or `Txn` has failed. It may have been done.
    Failed {
        /// The error, which names the endpoint.
        error: String,
        /// The cause is that a lease does not exist.
        lease_gone: bool,
    },
    /// The answer to [`EtcdRequest::Survey`].
    Surveyed {
        /// When the first member was asked.
        asked: Instant,
        /// Every voting member has refused the connection or does not know a leader. False also if one did not answer.
        leaderless: bool,
    },
    /// etcd will not serve this node: wrong password, no rights, a wrong certificate.
    Broken(String),
}
