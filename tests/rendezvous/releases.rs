//! Nodes of two releases of this package at one coordinator. Each end names the capabilities that it has beyond the protocol's version.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::rendezvous::node::machine::NodeMachine;
use elastic_rs::rendezvous::protocol::capability::Capabilities;
use elastic_rs::rendezvous::protocol::codec;
use elastic_rs::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, NodeMessage};
use elastic_rs::rendezvous::protocol::settings::Settings;

use crate::bench::{Bench, hello, join};

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
    let mut bench = Bench::new();
    bench.greet(1, sent(newer), 1);
    bench.greet(2, sent(hello(2, &settings)), 2);
    bench.say(1, join(0));
    bench.say(2, join(0));
    assert!(bench.is_placed(1, 1) && bench.is_placed(2, 1), "{:?}", bench.said);
    // A message of a later release may be sent only to nodes with its capability.
    assert!(bench.run().node_has(NodeId(1), "in_place") && !bench.run().node_has(NodeId(2), "in_place"));
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
    assert!(text.starts_with("rendezvous protocol version 1 is not spoken here, only version 2"), "{text}");
}
