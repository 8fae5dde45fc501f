//! Nodes of two releases of this package at one coordinator. Each end names the capabilities that it has beyond the protocol's version.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::events::record::Phase;
use elastic_rs::rendezvous::node::machine::{NodeCommand, NodeMachine};
use elastic_rs::rendezvous::protocol::capability::Capabilities;
use elastic_rs::rendezvous::protocol::codec;
use elastic_rs::rendezvous::protocol::message::{
    CoordinatorMessage, Generation, Hello, Join, JoinWorkers, NodeId, NodeMessage, Observe, Placement, Resume, Round,
    SURVIVORS_LIMIT, Stepped, Survival, Survivor,
};
use elastic_rs::rendezvous::protocol::settings::Settings;
use elastic_rs::rendezvous::protocol::text::{LOCAL_WORLD_SIZE_LIMIT, NAME_LIMIT_BYTES};

use crate::bench::{Bench, back, hello, join, survived};

/// Round 1 of one node.
fn placement() -> Placement {
    Placement {
        round: Round(1),
        rank: 0,
        world_size: 1,
        world: 9,
        master_addr: "a".into(),
        master_port: 2,
        reason: "w".into(),
        restart: 0,
        workers: None,
        host: None,
        local_world_size: None,
        resume: None,
        members: None,
    }
}

/// A Hello after encoding and decoding.
fn sent(hello: Hello) -> Hello {
    let mut frame = BytesMut::new();
    codec::encode_frame(&NodeMessage::Hello(Box::new(hello)), &mut frame);
    match codec::decode_frame(&mut frame) {
        Ok(Some(NodeMessage::Hello(hello))) => *hello,
        other => panic!("not a Hello: {other:?}"),
    }
}

#[test]
fn nodes_with_two_sets_of_capabilities_form_one_job() {
    let settings = Settings::new(2, 2);
    let newer = Hello { capabilities: Capabilities::of(["in_place", "of-a-later-release"]), ..hello(1, &settings) };
    let older = Hello { capabilities: Capabilities::none(), ..hello(2, &settings) };
    let mut bench = Bench::new();
    bench.greet(1, sent(newer), 1);
    bench.greet(2, sent(older), 2);
    bench.say(1, join(0));
    bench.say(2, join(0));
    // Each gets its place in words that it understands.
    assert!(matches!(bench.last(1), CoordinatorMessage::CompleteInPlace { .. }), "{:?}", bench.last(1));
    assert!(matches!(bench.last(2), CoordinatorMessage::Complete(_)), "{:?}", bench.last(2));
    assert!(bench.run().node_has(NodeId(1), "in_place") && !bench.run().node_has(NodeId(2), "in_place"));
}

#[test]
fn a_job_with_a_node_of_an_older_release_is_restarted_as_ever() {
    let settings = Settings { settle_timeout: Duration::ZERO, ..Settings::new(2, 3) };
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings), 1);
    bench.greet(2, Hello { capabilities: Capabilities::none(), ..hello(2, &settings) }, 2);
    bench.greet(3, hello(3, &settings), 3);
    (1..=3).for_each(|node| bench.say(node, join(0)));
    for node in [1, 3] {
        bench.say(node, NodeMessage::Attending { round: Round(1) });
    }
    bench.say(3, NodeMessage::WillLeave { round: Round(1), reason: "SIGTERM".into(), signal: Some(15) });
    for node in 1..=3 {
        assert!(matches!(bench.last(node), CoordinatorMessage::Status { waiting: 1, .. }), "{:?}", bench.last(node));
    }
    bench.say(3, NodeMessage::Leave { reason: "SIGTERM".into(), signal: Some(15) });
    bench.say(1, back(1, &[(0, Some(4)), (1, Some(4))], None));
    bench.say(2, join(1));
    bench.pass(Duration::ZERO);
    let CoordinatorMessage::CompleteInPlace { resume: Resume::Restart { reason }, .. } = bench.last(1) else {
        panic!("{:?}", bench.last(1))
    };
    assert_eq!(reason, "10.0.0.2 (host:2) has an agent that does not change in place");
    assert!(matches!(bench.last(2), CoordinatorMessage::Complete(_)), "{:?}", bench.last(2));
}

/// Both ends name their capabilities, but a node learns the coordinator's with its welcome.
#[test]
fn a_coordinator_of_an_older_release_hears_nothing_that_it_does_not_understand() {
    let now = Instant::now();
    let mut node = NodeMachine::new(hello(1, &Settings::new(1, 1)), "head:1".into(), Duration::from_secs(9), now);
    node.bring(survived(1, &[(0, Some(3))]));
    node.on_connected(now);
    let capabilities = Capabilities::none();
    node.on_message(CoordinatorMessage::Welcome { addr: "10.0.0.7".into(), hosted: false, capabilities }, now);
    node.take_commands();
    node.join(1, None, Some(JoinWorkers::new("trainer", 1)), Duration::from_secs(9), now);
    assert!(!node.view().in_place);
    let joined = node.take_commands();
    assert!(matches!(&joined[..], [NodeCommand::Send(NodeMessage::Join(_))]), "{joined:?}");
    node.on_message(CoordinatorMessage::Complete(placement()), now);
    assert_eq!(node.take_outcome().expect("answered").expect("placed").resume, None);
    node.attending(Round(1));
    node.counted(Round(1), 7);
    assert!(!node.will_leave(Round(1), "SIGTERM", Some(15)), "nobody would answer");
    node.parked(Round(1));
    node.took(Round(1), Phase::default(), now);
    node.step(Round(1), Some(9), None);
    node.stepped(Round(1), Stepped { after_us: 9, step: None, before: None, step_time_us: None });
    assert_eq!(node.take_commands(), []);
}

/// Enumerations are encoded by the number of their variant, and structures without their fields' names.
#[test]
fn older_releases_read_the_messages_that_they_know() {
    fn body<M: serde::Serialize>(message: &M) -> Vec<u8> {
        let mut frame = BytesMut::new();
        codec::encode_frame(message, &mut frame);
        frame[4..].to_vec()
    }
    let workers = Some(JoinWorkers { survival: survived(1, &[(0, None)]), ..JoinWorkers::new("r", 2) });
    let join = Join { round: Round(3), store_port: 1, node_rank: None, workers };
    assert_eq!(body(&NodeMessage::Join(join.clone())), [1, 3, 1, 0, 1, 1, b'r', 2, 0]);
    let placement = Placement {
        resume: Some(Resume::Continue { source: 0, sync: true, survivors: 0, generation: Generation::default() }),
        ..placement()
    };
    let known = [1, 0, 1, 9, 1, b'a', 2, 1, b'w', 0, 0, 0];
    assert_eq!(body(&CoordinatorMessage::Complete(placement.clone())), [&[3][..], &known].concat());

    let round = Round(5);
    assert_eq!(body(&NodeMessage::Done { round }), [7, 5], "the last one of older releases");
    assert_eq!(body(&NodeMessage::Attending { round }), [8, 5]);
    assert_eq!(body(&NodeMessage::Counted { round, count: 6 }), [9, 5, 6]);
    let will_leave = NodeMessage::WillLeave { round, reason: "x".into(), signal: Some(15) };
    assert_eq!(body(&will_leave), [10, 5, 1, b'x', 1, 30]);
    let in_place = NodeMessage::JoinInPlace { join, survival: survived(6, &[(1, Some(4))]), check: Some(7) };
    assert_eq!(body(&in_place), [11, 3, 1, 0, 1, 1, b'r', 2, 0, 1, 1, 1, 1, 6, 0, 1, 4, 1, 7]);
    assert_eq!(body(&NodeMessage::Parked { round }), [12, 5]);
    assert_eq!(body(&NodeMessage::Groupless { round }), [13, 5]);
    let addresses: Vec<IpAddr> = vec![[10, 0, 0, 7].into()];
    assert_eq!(body(&NodeMessage::Interfaces { addresses: addresses.clone() }), [15, 1, 0, 10, 0, 0, 7]);
    let phase = Phase { stop_us: Some(9), ..Phase::default() };
    assert_eq!(body(&NodeMessage::Took { round, phase }), [16, 5, 0, 1, 9, 0, 0, 0]);
    let ask = Observe { run_id: Some("r".into()), after: 9, waits: true, state: false };
    assert_eq!(body(&NodeMessage::Observe(ask)), [17, 1, 1, b'r', 9, 1, 0]);
    let first = Stepped { after_us: 9, step: Some(3), before: Some(4), step_time_us: None };
    assert_eq!(body(&NodeMessage::Stepped { round, first }), [18, 5, 9, 1, 3, 1, 4, 0]);
    assert_eq!(body(&NodeMessage::Step { round, step: Some(3), step_time_us: None }), [19, 5, 1, 3, 0]);

    assert_eq!(body(&CoordinatorMessage::Leaving { why: "x".into(), interrupts: true }), [11, 1, b'x', 1]);
    assert_eq!(body(&CoordinatorMessage::Change { round, flags: 3, reason: "x".into() }), [12, 5, 3, 1, b'x']);
    assert_eq!(body(&CoordinatorMessage::RaiseAt { round, check: 9 }), [13, 5, 9]);
    let in_place = CoordinatorMessage::CompleteInPlace {
        placement,
        resume: Resume::Continue { source: 2, sync: true, survivors: 4, generation: Generation { round, world: 8 } },
    };
    assert_eq!(body(&in_place), [&[14][..], &known, &[0, 2, 1, 4, 5, 8]].concat());
    assert_eq!(body(&CoordinatorMessage::TellStep { round }), [19, 5]);
    let members = CoordinatorMessage::Members { round, addresses, more: true };
    assert_eq!(body(&members), [17, 5, 1, 0, 10, 0, 0, 7, 1]);
}

/// The largest list of survivors fits into a frame, with the largest numbers and the longest role.
#[test]
fn the_longest_list_of_survivors_fits_into_a_frame() {
    let generation = Some(Generation { round: Round(u64::MAX), world: u64::MAX });
    let last = Survivor { local_rank: LOCAL_WORLD_SIZE_LIMIT, generation, commit: Some(u64::MAX) };
    let workers = Some(JoinWorkers::new("r".repeat(NAME_LIMIT_BYTES), LOCAL_WORLD_SIZE_LIMIT));
    let join = Join { round: Round(u64::MAX), store_port: u16::MAX, node_rank: Some(u32::MAX), workers };
    let message = NodeMessage::JoinInPlace {
        join,
        survival: Survival::Attended(vec![last; SURVIVORS_LIMIT]),
        check: Some(u64::MAX),
    };
    let mut frame = BytesMut::new();
    codec::encode_frame(&message, &mut frame);
    assert_eq!(codec::decode_frame::<NodeMessage>(&mut frame), Ok(Some(message)));
}

#[test]
fn a_node_knows_what_a_coordinator_of_another_release_understands() {
    let now = Instant::now();
    let mut node = NodeMachine::new(hello(1, &Settings::new(1, 1)), "head:1".into(), Duration::from_secs(9), now);
    node.on_connected(now);
    assert!(!node.coordinator_has("in_place"), "no capability is known yet");
    let capabilities = Capabilities::of(["in_place", "\u{1b}[2J"]);
    node.on_message(CoordinatorMessage::Welcome { addr: "10.0.0.7".into(), hosted: false, capabilities }, now);
    assert!(node.coordinator_has("in_place") && !node.coordinator_has("\u{1b}[2J") && !node.coordinator_has("hosts"));
    assert!(node.view().addr.is_some() && node.view().failed.is_none());
}

#[test]
fn an_invalid_capability_is_rejected_with_the_reason() {
    let capabilities = Capabilities::of(["In Place"]);
    let mut bench = Bench::new();
    bench.greet(1, Hello { capabilities, ..hello(1, &Settings::new(1, 1)) }, 1);
    assert!(bench.rejection(1).contains("the capability `In Place` is not a name"), "{}", bench.rejection(1));
}

#[test]
fn the_refusal_of_version_1_names_both_versions() {
    let mut preamble = BytesMut::from(&b"ELRZ\x01\x00"[..]);
    let text = codec::decode_preamble(&mut preamble).unwrap_err().to_string();
    assert!(text.starts_with("rendezvous protocol version 1 is not spoken here, only version 3"), "{text}");
}
