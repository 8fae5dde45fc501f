//! etcd, as far as the rendezvous uses it: revisions, transactions, leases that end, ordered watches, compaction, and times without a
//! leader.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::engine::paths::HostId;
use super::super::engine::queue::Time;
use elastic_rs::rendezvous::etcd::interface::{
    EtcdEvent, EtcdRequest, LeaseId, NodeKey, Revision, RunChange, Snapshot, StateKey,
};
use elastic_rs::rendezvous::messages::message::NodeId;

/// A time without a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outage {
    pub from: Time,
    pub until: Time,
    /// The members answer that they know no leader, or refuse the connection. Otherwise they are silent (SIGSTOP).
    pub reported: bool,
}

/// What the members of etcd hold.
#[derive(Debug, Default)]
pub(super) struct Etcd {
    revision: u64,
    compacted: u64,
    state: Option<StateKey>,
    nodes: BTreeMap<NodeId, NodeKey>,
    leases: BTreeMap<LeaseId, (Duration, Time)>,
    log: Vec<(Revision, Vec<RunChange>)>,
    /// By host: the process that watches, and the next revision to send.
    watches: BTreeMap<HostId, (u32, u64)>,
    outages: Vec<Outage>,
}

impl Etcd {
    /// The state that nodes have agreed on.
    pub fn state(&self) -> Option<&[u8]> {
        self.state.as_ref().map(|state| &*state.bytes)
    }

    /// Number of leases of nodes, and of their keys.
    pub fn left(&self) -> (usize, usize) {
        let of_nodes = self.leases.values().filter(|(ttl, _)| *ttl < Duration::from_secs(3600)).count();
        (of_nodes, self.nodes.len())
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { revision: Revision(self.revision), state: self.state.clone(), nodes: self.nodes.clone() }
    }

    fn commit(&mut self, changes: Vec<RunChange>) -> Revision {
        self.revision += 1;
        self.log.push((Revision(self.revision), changes));
        Revision(self.revision)
    }

    /// Forgets all revisions up to now.
    pub fn compact(&mut self) {
        self.compacted = self.revision;
    }

    /// Has no leader for this time. Whoever leads afterwards first renews all leases.
    pub fn lose_leader(&mut self, outage: Outage) {
        self.outages.push(outage);
        for (ttl, ends) in self.leases.values_mut() {
            *ends = (*ends).max(outage.until + *ttl);
        }
    }

    /// The outage at a time.
    pub fn outage(&self, at: Time) -> Option<Outage> {
        self.outages.iter().find(|outage| outage.from <= at && at < outage.until).copied()
    }

    /// Whether every member, each asked at one of these times, knows no leader. `None`: one of them is silent.
    pub fn knows_no_leader(&self, asked: [Time; 3]) -> Option<bool> {
        let outages = asked.map(|at| self.outage(at));
        if outages.iter().flatten().any(|outage| !outage.reported) {
            return None;
        }
        Some(outages.iter().all(Option::is_some))
    }

    /// Ends the leases whose time is over, and removes the keys under them.
    pub fn expire(&mut self, now: Time) {
        let over: Vec<_> = self.leases.iter().filter(|(_, (_, at))| *at <= now).map(|(lease, _)| *lease).collect();
        over.into_iter().for_each(|lease| self.revoke(lease));
    }

    fn revoke(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
        let gone: Vec<_> = self.nodes.iter().filter(|(_, key)| key.lease == lease).map(|(node, _)| *node).collect();
        self.nodes.retain(|_, key| key.lease != lease);
        let mut changes: Vec<_> = gone.into_iter().map(|node| RunChange::Node(node, None)).collect();
        if self.state.as_ref().is_some_and(|state| state.lease == lease) {
            self.state = None;
            changes.push(RunChange::State(None));
        }
        if !changes.is_empty() {
            self.commit(changes);
        }
    }

    /// Somebody deletes the state by hand.
    pub fn delete_state(&mut self) {
        if self.state.take().is_some() {
            self.commit(vec![RunChange::State(None)]);
        }
    }

    /// Ends a host's watch. Returns the process that had it.
    pub fn end_watch(&mut self, host: HostId) -> Option<u32> {
        self.watches.remove(&host).map(|(incarnation, _)| incarnation)
    }

    /// Ends all watches. Returns the hosts and processes that had them.
    pub fn end_watches(&mut self) -> Vec<(HostId, u32)> {
        std::mem::take(&mut self.watches).into_iter().map(|(host, (incarnation, _))| (host, incarnation)).collect()
    }

    /// Whether a transaction would be applied, which the model judges first.
    pub fn accepts(&self, request: &EtcdRequest) -> bool {
        let EtcdRequest::Txn { expect, run_lease, own, .. } = request else { return false };
        let leases = own.iter().map(|(lease, _)| lease).chain([run_lease]);
        self.revision_of_state() == *expect && leases.into_iter().all(|lease| self.leases.contains_key(lease))
    }

    fn revision_of_state(&self) -> Revision {
        self.state.as_ref().map_or(Revision(0), |state| state.revision)
    }

    fn put_node(&mut self, node: NodeId, lease: LeaseId, wish: Vec<u8>, at: Revision) -> RunChange {
        let created = self.nodes.get(&node).map_or(at, |key| key.created);
        let key = NodeKey { lease, created, modified: at, wish };
        self.nodes.insert(node, key.clone());
        RunChange::Node(node, Some(key))
    }

    /// The answer to a request of a process on a host: of `node`. `None`: there is none. `lease` is the id of a new lease.
    pub fn answer(
        &mut self,
        (host, incarnation): (HostId, u32),
        node: NodeId,
        request: EtcdRequest,
        lease: impl FnOnce() -> LeaseId,
        now: Time,
    ) -> Option<EtcdEvent> {
        let lease_gone =
            || EtcdEvent::Failed { error: "etcdserver: requested lease not found".to_owned(), lease_gone: true };
        let next = Revision(self.revision + 1);
        Some(match request {
            EtcdRequest::Grant { of, ttl, asked } => {
                let lease = lease();
                self.leases.insert(lease, (ttl, now + ttl));
                EtcdEvent::Granted { of, lease, asked }
            }
            EtcdRequest::KeepAlive { lease, asked, .. } => {
                let held = self.leases.get_mut(&lease).map(|(ttl, at)| *at = now + *ttl).is_some();
                EtcdEvent::Renewed { lease, asked, held }
            }
            EtcdRequest::Revoke { lease } => {
                self.revoke(lease);
                return None;
            }
            EtcdRequest::Range => EtcdEvent::Snapshot(self.snapshot()),
            EtcdRequest::PutWish { lease, .. } if !self.leases.contains_key(&lease) => lease_gone(),
            EtcdRequest::PutWish { lease, wish } => {
                let change = self.put_node(node, lease, wish, next);
                EtcdEvent::WishPut(self.commit(vec![change]))
            }
            EtcdRequest::Txn { expect, .. } if self.revision_of_state() != expect => {
                EtcdEvent::Refused(self.snapshot())
            }
            // etcd refuses a put under a lease that has ended.
            EtcdRequest::Txn { .. } if !self.accepts(&request) => lease_gone(),
            EtcdRequest::Txn { state, run_lease, own, .. } => {
                let state = StateKey { bytes: state, revision: next, lease: run_lease };
                let mut changes = vec![RunChange::State(Some(state.clone()))];
                if let Some((lease, wish)) = own {
                    changes.push(self.put_node(node, lease, wish, next));
                }
                self.state = Some(state);
                EtcdEvent::Written(self.commit(changes))
            }
            EtcdRequest::Watch { from } if from.0 <= self.compacted => EtcdEvent::WatchEnded,
            EtcdRequest::Watch { from } => {
                self.watches.insert(host, (incarnation, from.0));
                return None;
            }
            EtcdRequest::Survey { .. } => return None,
        })
    }

    /// The revisions that the watch of a host has not got, in order, with the process to notify.
    pub fn news(&mut self, host: HostId) -> Vec<(u32, EtcdEvent)> {
        let Some((incarnation, from)) = self.watches.get_mut(&host) else { return Vec::new() };
        let missed = self.log.iter().filter(|(revision, _)| revision.0 >= *from);
        let news =
            missed.map(|(revision, changes)| (*incarnation, EtcdEvent::Changed(*revision, changes.clone()))).collect();
        *from = (*from).max(self.revision + 1);
        news
    }
}
