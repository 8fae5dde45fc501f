//! etcd, as far as the rendezvous uses it: revisions, transactions, leases that end, ordered watches, and compaction.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::engine::paths::HostId;
use super::super::engine::queue::Time;
use crate::rendezvous::cell::etcd::{Change, EtcdEvent, EtcdRequest, LeaseId, Revision, Snapshot};
use crate::rendezvous::protocol::message::NodeId;

/// What a server of etcd holds.
#[derive(Debug, Default)]
pub(super) struct Etcd {
    revision: u64,
    compacted: u64,
    state: Option<(Vec<u8>, Revision)>,
    members: BTreeMap<NodeId, LeaseId>,
    leases: BTreeMap<LeaseId, (Duration, Time)>,
    log: Vec<(Revision, Vec<Change>)>,
    /// By host: the process that watches, and the next revision to send.
    watches: BTreeMap<HostId, (u32, u64)>,
}

impl Etcd {
    /// The state that nodes have agreed on.
    pub fn state(&self) -> Option<&[u8]> {
        self.state.as_ref().map(|(state, _)| &**state)
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { revision: Revision(self.revision), state: self.state.clone(), members: self.members.clone() }
    }

    fn commit(&mut self, changes: Vec<Change>) -> Revision {
        self.revision += 1;
        self.log.push((Revision(self.revision), changes));
        Revision(self.revision)
    }

    /// Forgets all revisions up to now.
    pub fn compact(&mut self) {
        self.compacted = self.revision;
    }

    /// Ends the leases whose time is over, and removes the keys under them.
    pub fn expire(&mut self, now: Time) {
        let over: Vec<_> = self.leases.iter().filter(|(_, (_, at))| *at <= now).map(|(lease, _)| *lease).collect();
        for lease in over {
            self.leases.remove(&lease);
            let gone: Vec<_> = self.members.iter().filter(|(_, of)| **of == lease).map(|(node, _)| *node).collect();
            self.members.retain(|_, of| *of != lease);
            if !gone.is_empty() {
                self.commit(gone.into_iter().map(|node| Change::Member(node, None)).collect());
            }
        }
    }

    /// Ends a host's watch. Returns the process that had it.
    pub fn end_watch(&mut self, host: HostId) -> Option<u32> {
        self.watches.remove(&host).map(|(life, _)| life)
    }

    /// Whether a transaction would be applied, which the model judges first.
    pub fn accepts(&self, expect: Revision, lease: LeaseId) -> bool {
        self.revision_of_state() == expect && self.leases.contains_key(&lease)
    }

    fn revision_of_state(&self) -> Revision {
        self.state.as_ref().map_or(Revision(0), |(_, revision)| *revision)
    }

    /// The answer to a request of a process on a host: of `node`, if it still runs. `None`: a watch has begun. `lease` is the id of a
    /// new lease.
    pub fn answer(
        &mut self,
        (host, life): (HostId, u32),
        node: Option<NodeId>,
        request: EtcdRequest,
        lease: impl FnOnce() -> LeaseId,
        now: Time,
    ) -> Option<EtcdEvent> {
        Some(match request {
            EtcdRequest::Grant { ttl } => {
                let lease = lease();
                self.leases.insert(lease, (ttl, now + ttl));
                EtcdEvent::Granted(lease)
            }
            EtcdRequest::KeepAlive { lease } => {
                let held = self.leases.get_mut(&lease).map(|(ttl, at)| *at = now + *ttl).is_some();
                EtcdEvent::Renewed { held }
            }
            EtcdRequest::Range => EtcdEvent::Snapshot(self.snapshot()),
            EtcdRequest::Txn { expect, .. } if self.revision_of_state() != expect => {
                EtcdEvent::Refused(self.snapshot())
            }
            // etcd refuses a put under a lease that has ended.
            EtcdRequest::Txn { lease, .. } if !self.leases.contains_key(&lease) => {
                EtcdEvent::Failed("requested lease not found".into())
            }
            EtcdRequest::Txn { state, lease, .. } => {
                let mut changes = vec![Change::State(state.clone())];
                if let Some(node) = node {
                    self.members.insert(node, lease);
                    changes.push(Change::Member(node, Some(lease)));
                }
                let revision = self.commit(changes);
                self.state = Some((state, revision));
                EtcdEvent::Written(revision)
            }
            EtcdRequest::Watch { from } if from.0 <= self.compacted => EtcdEvent::WatchEnded,
            EtcdRequest::Watch { from } => {
                self.watches.insert(host, (life, from.0));
                return None;
            }
        })
    }

    /// The revisions that the watches have not got, in order, with the process to tell.
    pub fn news(&mut self) -> Vec<(HostId, u32, EtcdEvent)> {
        let mut news = Vec::new();
        for (host, (life, from)) in &mut self.watches {
            for (revision, changes) in self.log.iter().filter(|(revision, _)| revision.0 >= *from) {
                news.push((*host, *life, EtcdEvent::Changed(*revision, changes.clone())));
            }
            if let Some((revision, _)) = self.log.last() {
                *from = (*from).max(revision.0 + 1);
            }
        }
        news
    }
}
