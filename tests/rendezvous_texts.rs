//! Texts of nodes that are too long for the frames in which others would be told of them. Found by fuzzing: the coordinator
//! panicked when it built such a frame.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use bytes::BytesMut;
use elastic_rs::rendezvous::codec::encode_frame;
use elastic_rs::rendezvous::machine::{Command, Machine};
use elastic_rs::rendezvous::message::{CoordinatorMessage, Hello, Join, NodeId, NodeMessage, Round, Verdict};
use elastic_rs::rendezvous::settings::Settings;
use elastic_rs::rendezvous::state::{Ends, SessionId};

fn hello(number: u128) -> Hello {
    Hello {
        run_id: "job".into(),
        node: NodeId(number),
        name: "node".into(),
        local_addr: None,
        settings: Settings::new(3, 3),
        placed: None,
        joining: true,
    }
}

/// What is sent, each of which fits into a frame.
fn sent(machine: &mut Machine) -> Vec<CoordinatorMessage> {
    let mut messages = Vec::new();
    for command in machine.take_commands() {
        if let Command::Send { message, .. } = command {
            encode_frame(&message, &mut BytesMut::new()); // panics if it does not
            messages.push(message);
        }
    }
    messages
}

fn introduce(machine: &mut Machine, hello: Hello) -> Vec<CoordinatorMessage> {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    machine.on_hello(SessionId(hello.node.0 as u64), hello, Ends { peer: ip, local: ip }, Instant::now());
    sent(machine)
}

/// A running world of three, whose names are as long as they may be.
fn world() -> Machine {
    let mut machine = Machine::new();
    for number in 0..3 {
        let name = "ü".repeat(256);
        introduce(&mut machine, Hello { name: name.clone(), local_addr: Some(name), ..hello(number) });
    }
    for number in 0..3 {
        let join = NodeMessage::Join(Join { round: Round(0), store_port: 1, node_rank: None });
        machine.on_message(SessionId(number), join, Instant::now());
    }
    let complete = |message: &&CoordinatorMessage| matches!(message, CoordinatorMessage::Complete(_));
    assert_eq!(sent(&mut machine).iter().filter(complete).count(), 3);
    machine
}

#[test]
fn a_node_with_too_long_a_name_is_rejected_and_told_why() {
    for (what, hello) in [
        ("run id", Hello { run_id: "x".repeat(513), ..hello(1) }),
        ("name", Hello { name: "x".repeat(30_000), ..hello(1) }),
        ("address", Hello { local_addr: Some("x".repeat(513)), ..hello(1) }),
    ] {
        let mut machine = Machine::new();
        let messages = introduce(&mut machine, hello);
        let [CoordinatorMessage::Rejected { reason }] = &messages[..] else { panic!("{messages:?}") };
        assert!(reason.starts_with(&format!("the {what} has ")), "{reason}");
        assert_eq!(machine.session_count(), 0);
    }
}

#[test]
fn the_others_are_told_the_beginning_of_a_long_reason() {
    let mut machine = world();
    machine.on_message(SessionId(0), NodeMessage::Leave { reason: "ü".repeat(32_000) }, Instant::now());
    let told = |message: &CoordinatorMessage| matches!(message, CoordinatorMessage::Status { reason, .. } if reason.contains("left: üü"));
    assert_eq!(sent(&mut machine).iter().filter(|message| told(message)).count(), 2);
}

#[test]
fn the_others_are_told_the_beginning_of_a_long_cause() {
    let mut machine = world();
    let verdict = Verdict::Failed { by: "node".into(), cause: "x".repeat(65_529) };
    machine.on_message(SessionId(0), NodeMessage::Close(verdict), Instant::now());
    for message in sent(&mut machine) {
        let CoordinatorMessage::Closed { verdict: Verdict::Failed { cause, .. }, .. } = message else { panic!() };
        assert!(cause.len() < 10_000 && cause.ends_with("x…"));
    }
}
