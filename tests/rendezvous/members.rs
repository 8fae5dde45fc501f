//! The node with rank 0 gets the addresses from which the members of its round connect.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::rendezvous::messages::codec::encode_frame;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, INTERFACES_LIMIT, JoinWorkers, MEMBERS_IN_A_MESSAGE, NodeId, Placement, Round,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::{Ends, SessionId};

use crate::bench::{Bench, hello, join};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| ip(text)).collect()
}

/// A node that wants to know the members.
fn asking(node: u64, settings: &Settings) -> Hello {
    Hello { interfaces: Some(Vec::new()), ..hello(node, settings) }
}

/// Connect to the coordinator at `local` from `peer`, with these interfaces if it wants to know the members, and join.
fn arrive(bench: &mut Bench, node: u64, hello: Hello, (peer, local): (&str, &str), interfaces: &[&str]) {
    let hello = Hello { interfaces: hello.interfaces.as_ref().map(|_| ips(interfaces)), ..hello };
    bench.machine.on_hello(SessionId(node), hello, Ends { peer: ip(peer), local: ip(local) }, bench.now);
    bench.take();
    bench.send(node, join(0));
}

/// The addresses that each session got for a round, in order, and whether all parts but the last said `more`.
fn reported(bench: &Bench, session: u64, of: u64) -> Option<Vec<IpAddr>> {
    let parts =
        bench.sent.iter().filter(|(to, _)| *to == SessionId(session)).filter_map(|(_, message)| match message {
            CoordinatorMessage::Members { round, addresses, more } if *round == Round(of) => Some((addresses, *more)),
            _ => None,
        });
    let parts: Vec<_> = parts.collect();
    let (_, last) = parts.last()?;
    assert!(!last && parts.iter().rev().skip(1).all(|(_, more)| *more), "{parts:?}");
    Some(parts.into_iter().flat_map(|(addresses, _)| addresses.clone()).collect())
}

#[test]
fn rank_0_gets_all_addresses_of_the_members_and_nobody_else_does() {
    let settings = Settings::new(4, 4);
    let mut bench = Bench::new();
    let host = "10.0.0.200";
    arrive(&mut bench, 1, asking(1, &settings), ("10.0.0.1", host), &["10.0.0.1", "10.1.0.1", "2001:db8::1"]);
    arrive(&mut bench, 2, asking(2, &settings), ("::ffff:10.0.0.2", host), &[]);
    let given = Hello { local_addr: Some("10.9.0.3".into()), ..asking(3, &settings) };
    arrive(&mut bench, 3, given, ("10.0.0.3", host), &["127.0.0.1", "0.0.0.0", "224.0.0.1", "::ffff:10.3.0.3"]);
    // On the coordinator's host: the others know it by the address at which they have reached the coordinator.
    arrive(&mut bench, 4, asking(4, &settings), ("127.0.0.1", "127.0.0.1"), &["10.4.0.4"]);
    assert!(bench.is_placed(4, 1));
    let expected = [
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.3",
        "10.0.0.200",
        "10.1.0.1",
        "10.3.0.3",
        "10.4.0.4",
        "10.9.0.3",
        "2001:db8::1",
    ];
    assert_eq!(reported(&bench, 1, 1), Some(ips(&expected)));
    for other in 2..=4 {
        assert_eq!(reported(&bench, other, 1), None, "node {other}");
    }
    let to_rank_0: Vec<_> = bench.sent.iter().filter(|(to, _)| *to == SessionId(1)).map(|(_, sent)| sent).collect();
    let [.., CoordinatorMessage::Members { .. }, placement] = &to_rank_0[..] else { panic!("{to_rank_0:?}") };
    assert!(placement.placement().is_some(), "the place comes last: {placement:?}");
}

#[test]
fn a_node_that_has_not_asked_for_members_gets_none() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::new();
    arrive(&mut bench, 1, hello(1, &settings), ("10.0.0.1", "10.0.0.200"), &[]);
    arrive(&mut bench, 2, asking(2, &settings), ("10.0.0.2", "10.0.0.200"), &["10.1.0.2"]);
    assert!(bench.is_placed(1, 1));
    assert!(!bench.sent.iter().any(|(_, message)| matches!(message, CoordinatorMessage::Members { .. })));
}

/// A waiting node that reconnects may complete its round with its Hello.
#[test]
fn interfaces_come_with_each_hello() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::new();
    arrive(&mut bench, 1, asking(1, &settings), ("10.0.0.1", "10.0.0.200"), &[]);
    arrive(&mut bench, 2, asking(2, &settings), ("10.0.0.2", "10.0.0.200"), &["10.1.0.2"]);
    assert_eq!(reported(&bench, 1, 1), Some(ips(&["10.0.0.1", "10.0.0.2", "10.1.0.2"])));
    // The world re-forms: node 2 waits first, loses its connection, and comes back after the other.
    bench.send(2, join(1));
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.send(1, join(1));
    bench.take();
    assert_eq!(bench.run().round(), Round(1), "one is unreachable");
    let placed = bench.sent.iter().rev().find_map(|(to, sent)| sent.placement().filter(|_| *to == SessionId(2)));
    let Placement { rank, world_size, world, restart, host, .. } = placed.unwrap().clone();
    let placed = elastic_rs::rendezvous::messages::message::Placed {
        round: Round(1),
        rank,
        world_size,
        world,
        active: false,
        restart,
        host,
        began_with: Default::default(),
    };
    let interfaces = Some(ips(&["10.1.0.2"]));
    let again = Hello { placed: Some(placed), joining: true, interfaces, ..hello(2, &settings) };
    let ends = Ends { peer: ip("10.0.0.2"), local: ip("10.0.0.200") };
    bench.machine.on_hello(SessionId(3), again, ends, bench.now);
    bench.take();
    assert_eq!(bench.run().round(), Round(2));
    assert_eq!(reported(&bench, 1, 2), Some(ips(&["10.0.0.1", "10.0.0.2", "10.1.0.2"])));
}

#[test]
fn what_a_node_names_is_bounded_and_a_long_list_comes_in_parts_that_fit() {
    const NODES: u64 = 500;
    let settings = Settings::new(NODES as u32, NODES as u32);
    let mut bench = Bench::new();
    let address = |node: u64, interface: u64| {
        IpAddr::from(std::net::Ipv6Addr::from(u128::from(node << 16 | interface) | 1 << 120))
    };
    for node in 1..=NODES {
        let addresses = (0..INTERFACES_LIMIT as u64 + 9).map(|interface| address(node, interface)).collect();
        bench.greet(node, Hello { interfaces: Some(addresses), ..hello(node, &settings) }, 7);
        bench.send(node, join(0));
    }
    let reported = reported(&bench, 1, 1).unwrap();
    assert_eq!(reported.len(), NODES as usize * INTERFACES_LIMIT + 1);
    let largest = CoordinatorMessage::Members {
        round: Round(u64::MAX),
        addresses: vec![IpAddr::from([0xff; 16]); MEMBERS_IN_A_MESSAGE],
        more: true,
    };
    encode_frame(&largest, &mut BytesMut::new());
}

/// more addresses than are sent with all interfaces: the proven ones are sent.
#[test]
fn a_job_with_too_many_interfaces_gets_the_proven_addresses() {
    const NODES: u64 = 3000;
    let settings = Settings::new(NODES as u32, NODES as u32);
    let mut bench = Bench::new();
    for node in 1..=NODES {
        let peer = IpAddr::from([10, 1, (node >> 8) as u8, node as u8]);
        let interface = |number: usize| IpAddr::from([11 + number as u8, 1, (node >> 8) as u8, node as u8]);
        let interfaces = Some((0..INTERFACES_LIMIT).map(interface).collect());
        let hello = Hello { interfaces, ..hello(node, &settings) };
        bench.machine.on_hello(SessionId(node), hello, Ends { peer, local: peer }, bench.now);
        bench.send(node, join(0));
    }
    assert_eq!(reported(&bench, 1, 1).unwrap().len(), NODES as usize);
}

/// A node's side, with a coordinator that a test plays.
struct Node(NodeMachine, Instant);

impl Node {
    fn new() -> Self {
        let now = Instant::now();
        let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4));
        let hello = Hello { interfaces: Some(Vec::new()), ..hello };
        let limit = Duration::from_secs(600);
        let mut machine = NodeMachine::new(hello, "head:29400".into(), limit, now);
        machine.join(1, None, Some(JoinWorkers::new("trainer", 2)), limit, now);
        Self(machine, now)
    }

    fn connect(&mut self) {
        self.0.on_connected(self.1);
        let addr = "10.0.0.7".to_owned();
        self.receive(CoordinatorMessage::Welcome { addr, hosted: false, running: None, wants_replay: false });
    }

    fn receive(&mut self, message: CoordinatorMessage) {
        self.0.on_message(message, self.1);
    }

    fn members(&mut self, round: u64, addresses: &[&str], more: bool) {
        self.receive(CoordinatorMessage::Members { round: Round(round), addresses: ips(addresses), more });
    }

    /// Gets this place. Returns the members that come with it.
    fn placed(&mut self, round: u64, rank: u32) -> Option<Vec<IpAddr>> {
        self.receive(CoordinatorMessage::Complete(Placement {
            round: Round(round),
            rank,
            world_size: 2,
            world: 9,
            master_addr: "10.0.0.7".into(),
            master_port: 1,
            reason: "all are in".into(),
            restart: 0,
            workers: None,
            host: None,
            local_world_size: None,
            resume: None,
            members: None,
        }));
        let placement = self.0.take_outcome().unwrap().unwrap();
        placement.members.map(|members| members.to_vec())
    }
}

#[test]
fn a_placement_with_rank_0_has_the_members_that_were_sent_for_its_round() {
    let mut node = Node::new();
    node.connect();
    node.members(1, &["10.0.0.1", "::ffff:10.0.0.2"], true);
    node.members(1, &["2001:db8::1"], false);
    assert_eq!(node.placed(1, 0), Some(ips(&["10.0.0.1", "10.0.0.2", "2001:db8::1"])));

    for (what, round, more, rank) in
        [("another round", 3, false, 0), ("half a list", 1, true, 0), ("rank 1", 1, false, 1)]
    {
        let mut node = Node::new();
        node.connect();
        node.members(round, &["10.0.0.1"], more);
        assert_eq!(node.placed(1, rank), None, "{what}");
    }
    // What one connection has reported does not count on the next.
    let mut node = Node::new();
    node.connect();
    node.members(1, &["10.0.0.1"], true);
    node.0.on_disconnected("a test".into(), false, node.1);
    node.connect();
    node.members(1, &["10.0.0.2"], false);
    assert_eq!(node.placed(1, 0), Some(ips(&["10.0.0.2"])));
}
