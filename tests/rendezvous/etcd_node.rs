//! A node over etcd, event by event. Histories are in `crates/sim/tests/simulation/etcd.rs`.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::cell::blob::Blob;
use elastic_rs::rendezvous::etcd::interface::{
    EtcdEvent, EtcdRequest, LeaseId, LeaseOf, NodeKey, Revision, RunChange, Snapshot, StateKey,
};
use elastic_rs::rendezvous::etcd::machine::EtcdNode;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;

const LEASE: LeaseId = LeaseId(7);
const RUN_LEASE: LeaseId = LeaseId(8);
const SECOND: Duration = Duration::from_secs(1);

/// A node that runs alone, and what etcd holds of it.
struct Running {
    node: EtcdNode,
    now: Instant,
    state: StateKey,
    key: NodeKey,
}

fn new_node(now: Instant) -> EtcdNode {
    let hello = Hello::new("job", NodeId(1), "host:1", Settings::new(1, 1));
    let hello = Hello { local_addr: Some("127.0.0.1".into()), ..hello };
    let mut node = EtcdNode::new(hello, "etcd at h:2379".into(), 60 * SECOND, now);
    node.node_mut().ask(|node| node.join_with_new_store(None, None, 60 * SECOND, now), now);
    node.on_tick(now);
    node
}

/// The one request of the node, apart from those that go beside it.
fn request(node: &mut EtcdNode) -> EtcdRequest {
    let mut requests = node.take_requests();
    requests.retain(|request| !matches!(request, EtcdRequest::Watch { .. }));
    assert_eq!(requests.len(), 1, "{requests:?}");
    requests.remove(0)
}

/// A node joins an empty etcd, and runs.
fn run() -> Running {
    let now = Instant::now();
    let mut node = new_node(now);
    let EtcdRequest::Grant { of: LeaseOf::Node, ttl, asked } = request(&mut node) else { panic!() };
    assert_eq!(ttl, 15 * SECOND);
    node.on_event(EtcdEvent::Granted { of: LeaseOf::Node, lease: LEASE, asked }, now);
    assert_eq!(request(&mut node), EtcdRequest::Range);
    node.on_event(EtcdEvent::Snapshot(Snapshot { revision: Revision(10), ..Snapshot::default() }), now);
    assert_eq!(node.take_requests(), [EtcdRequest::Watch { from: Revision(11) }]);
    let addr = node.node().machine().wanted_store().unwrap();
    node.node_mut().ask(|node| node.on_store_opened(addr, 5), now);
    node.on_tick(now);
    let EtcdRequest::PutWish { lease: LEASE, wish } = request(&mut node) else { panic!() };
    let key = NodeKey { lease: LEASE, created: Revision(11), modified: Revision(11), wish };
    node.on_event(EtcdEvent::WishPut(Revision(11)), now);
    let EtcdRequest::Grant { of: LeaseOf::Run, asked, .. } = request(&mut node) else { panic!() };
    node.on_event(EtcdEvent::Granted { of: LeaseOf::Run, lease: RUN_LEASE, asked }, now);
    let request = request(&mut node);
    let EtcdRequest::Txn { expect: Revision(0), state, run_lease: RUN_LEASE, own: None } = request else {
        panic!("{request:?}")
    };
    node.on_event(EtcdEvent::Written(Revision(12)), now);
    assert!(node.node_mut().take_outcome().unwrap().is_ok());
    let state = StateKey { bytes: state, revision: Revision(12), lease: RUN_LEASE };
    Running { node, now, state, key }
}

impl Running {
    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.node.on_tick(self.now);
    }

    fn on_event(&mut self, event: EtcdEvent) {
        self.node.on_event(event, self.now);
        self.node.on_tick(self.now);
    }

    fn fenced(&self) -> bool {
        self.node.node().view().fenced.is_some()
    }
}

#[test]
fn at_rest_a_node_only_renews_its_lease() {
    let mut running = run();
    let mut requests = Vec::new();
    while let Some(at) =
        running.node.next_deadline().filter(|at| *at < running.now + 60 * SECOND && requests.len() < 99)
    {
        let mut next = Running { now: at, ..running };
        next.node.on_tick(at);
        for request in next.node.take_requests() {
            let EtcdRequest::KeepAlive { lease, asked, .. } = request else { panic!("{request:?}") };
            requests.push(asked);
            next.on_event(EtcdEvent::Renewed { lease, asked, held: true });
        }
        running = Running { now: running.now, ..next };
    }
    assert_eq!(requests.len(), 11, "one in 5 s: {requests:?}");
}

#[test]
fn a_renewal_counts_for_its_own_lease_from_its_own_asking() {
    let mut running = run();
    let began = running.now;
    running.pass(5 * SECOND);
    running.on_event(EtcdEvent::Renewed { lease: LEASE, asked: began + SECOND, held: true });
    // An answer for another lease, and an older one for this lease, change nothing.
    running.on_event(EtcdEvent::Renewed { lease: LeaseId(99), asked: began + 5 * SECOND, held: true });
    running.on_event(EtcdEvent::Renewed { lease: LeaseId(99), asked: began + 5 * SECOND, held: false });
    running.on_event(EtcdEvent::Renewed { lease: LEASE, asked: began, held: true });
    running.pass(11 * SECOND - Duration::from_millis(1));
    assert!(!running.fenced(), "its lease is from 1 s to 16 s");
    running.pass(Duration::from_millis(1));
    assert!(running.fenced());
    let reason = running.node.node().view().fenced.clone().unwrap();
    assert!(reason.contains("lease of 15.0s at etcd at h:2379 for 15.0s"), "{reason}");
}

#[test]
fn members_without_a_leader_vouch_until_one_is_silent() {
    let mut running = run();
    let began = running.now;
    let survey = |requests: Vec<EtcdRequest>| {
        requests.into_iter().find_map(|request| match request {
            EtcdRequest::Survey { asked } => Some(asked),
            _ => None,
        })
    };
    running.pass(7 * SECOND);
    let asked = survey(running.node.take_requests()).expect("a renewal is late by 2 s");
    running.pass(SECOND);
    assert_eq!(survey(running.node.take_requests()), None, "one survey at a time");
    running.on_event(EtcdEvent::Surveyed { asked, leaderless: true });
    running.pass(7 * SECOND);
    assert!(!running.fenced(), "vouched for from 7 s to 22 s");
    let asked = survey(running.node.take_requests()).unwrap();
    running.on_event(EtcdEvent::Surveyed { asked, leaderless: false });
    running.now = began + 22 * SECOND;
    running.node.on_tick(running.now);
    assert!(running.fenced());
    // What is heard after the fence comes too late.
    running.on_event(EtcdEvent::Surveyed { asked: began + 16 * SECOND, leaderless: true });
    assert!(running.fenced());
}

#[test]
fn a_snapshot_that_is_older_than_the_watch_is_not_believed() {
    let mut running = run();
    let interrupted = StateKey { revision: Revision(14), ..running.state.clone() };
    let wish = running.key.clone();
    let other = NodeKey { lease: LeaseId(50), created: Revision(13), modified: Revision(13), wish: b"?".to_vec() };
    running.on_event(EtcdEvent::Changed(Revision(13), vec![RunChange::Node(NodeId(2), Some(other))]));
    running.on_event(EtcdEvent::Changed(Revision(14), vec![RunChange::State(Some(interrupted))]));
    running.on_event(EtcdEvent::WatchEnded);
    assert_eq!(running.node.take_requests(), []);
    running.pass(SECOND);
    assert_eq!(request(&mut running.node), EtcdRequest::Range);
    let nodes = [(NodeId(1), wish)].into();
    let old = Snapshot { revision: Revision(12), state: Some(running.state.clone()), nodes };
    running.on_event(EtcdEvent::Snapshot(old));
    // The watch goes on from what was known.
    assert_eq!(running.node.take_requests(), [EtcdRequest::Watch { from: Revision(15) }]);
    assert!(running.node.take_notes().iter().any(|note| note.contains("is ignored: another program wrote it")));
}

#[test]
fn a_deleted_state_is_heard_and_written_again() {
    let mut running = run();
    running.on_event(EtcdEvent::Changed(Revision(13), vec![RunChange::State(None)]));
    let view = running.node.node().view().clone();
    assert_eq!((view.waiting, view.reason.as_str()), (1, "the rendezvous state is gone from the backend"));
    let now = running.now;
    running.node.node_mut().ask(|node| node.join_with_new_store(None, None, 60 * SECOND, now), now);
    let addr = running.node.node().machine().wanted_store().unwrap();
    running.node.node_mut().ask(|node| node.on_store_opened(addr, 6), now);
    running.pass(Duration::ZERO);
    let EtcdRequest::Txn { expect: Revision(0), state, .. } = request(&mut running.node) else { panic!() };
    assert_eq!(Blob::decode(&state).unwrap().round().0, 2, "numbers of rounds are not used again");
}

#[test]
fn a_watch_that_is_refused_is_asked_for_ever_more_slowly() {
    let mut running = run();
    let (mut delays, began) = (Vec::new(), running.now);
    for _ in 0..12 {
        let ended = running.now;
        running.on_event(EtcdEvent::WatchEnded);
        while !running.node.take_requests().contains(&EtcdRequest::Range) {
            running.now = running.node.next_deadline().unwrap().max(running.now);
            running.node.on_tick(running.now);
        }
        delays.push(running.now - ended);
        let snapshot = Snapshot {
            revision: Revision(12),
            state: Some(running.state.clone()),
            nodes: [(NodeId(1), running.key.clone())].into(),
        };
        running.on_event(EtcdEvent::Snapshot(snapshot));
        running.node.take_requests();
        running.on_event(EtcdEvent::Renewed { lease: LEASE, asked: running.now, held: true });
    }
    assert!(delays[0] < Duration::from_millis(60), "{delays:?}");
    assert!(delays[11] >= SECOND && running.now - began < 30 * SECOND, "{delays:?}");
}

#[test]
fn a_lease_that_has_ended_is_replaced_together_with_the_state() {
    let mut running = run();
    running.on_event(EtcdEvent::Renewed { lease: LEASE, asked: running.now, held: false });
    let EtcdRequest::Grant { of: LeaseOf::Node, asked, .. } = request(&mut running.node) else { panic!() };
    let lease = LeaseId(70);
    running.on_event(EtcdEvent::Granted { of: LeaseOf::Node, lease, asked });
    assert_eq!(request(&mut running.node), EtcdRequest::Range);
    let snapshot = Snapshot { revision: Revision(13), state: Some(running.state.clone()), nodes: [].into() };
    running.on_event(EtcdEvent::Snapshot(snapshot));
    // Had it put the key alone, a node that saw it gone might form a world without this one afterwards.
    let EtcdRequest::Txn { expect: Revision(12), own: Some((own, _)), run_lease: RUN_LEASE, .. } =
        request(&mut running.node)
    else {
        panic!()
    };
    assert_eq!(own, lease);
}

#[test]
fn a_node_that_leaves_ends_its_lease() {
    let mut running = run();
    let now = running.now;
    running.node.node_mut().ask(|node| node.leave("done".into(), None), now);
    running.pass(Duration::ZERO);
    let EtcdRequest::Txn { .. } = request(&mut running.node) else { panic!() };
    running.on_event(EtcdEvent::Written(Revision(13)));
    assert_eq!(running.node.take_requests(), [EtcdRequest::Revoke { lease: LEASE }]);
    assert!(running.node.has_left());
}

#[test]
fn what_etcd_will_never_serve_ends_a_new_node_and_no_member() {
    let now = Instant::now();
    let mut node = new_node(now);
    node.on_event(EtcdEvent::Broken("h:2379: wrong password for `trainer`".into()), now);
    assert!(node.node().view().failed.as_ref().unwrap().to_string().contains("wrong password"));
    let mut running = run();
    running.on_event(EtcdEvent::Broken("h:2379: wrong password for `trainer`".into()));
    assert_eq!(running.node.node().view().failed, None);
}

#[test]
fn a_state_of_another_version_is_named_with_its_endpoint() {
    let now = Instant::now();
    let mut node = new_node(now);
    let EtcdRequest::Grant { of, asked, .. } = request(&mut node) else { panic!() };
    node.on_event(EtcdEvent::Granted { of, lease: LEASE, asked }, now);
    let state = StateKey { bytes: b"ELRS\x09\x00".to_vec(), revision: Revision(9), lease: LeaseId(0) };
    node.on_event(
        EtcdEvent::Snapshot(Snapshot { revision: Revision(10), state: Some(state), ..Snapshot::default() }),
        now,
    );
    let error = node.node_mut().take_outcome().unwrap().unwrap_err().to_string();
    assert!(
        error.starts_with("etcd at h:2379: the rendezvous state has version 9, this node writes version 5"),
        "{error}"
    );
    // Its lease need not end by itself.
    assert!(node.take_requests().contains(&EtcdRequest::Revoke { lease: LEASE }));
}
