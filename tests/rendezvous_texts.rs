//! What nodes write about themselves reaches others: it may neither outgrow a frame nor steer a terminal.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::rendezvous::codec::encode_frame;
use elastic_rs::rendezvous::machine::{Command, Machine};
use elastic_rs::rendezvous::message::{CoordinatorMessage, Hello, Join, NodeId, NodeMessage, Round, Verdict};
use elastic_rs::rendezvous::settings::Settings;
use elastic_rs::rendezvous::state::{Ends, SessionId};
use elastic_rs::rendezvous::text::{NAME_LIMIT_BYTES, RUN_ID_LIMIT_BYTES};

fn hello(number: u64, nodes: u32) -> Hello {
    let (run_id, name) = ("r".repeat(RUN_ID_LIMIT_BYTES), "n".repeat(NAME_LIMIT_BYTES));
    let hello = Hello::new(run_id, NodeId(u128::from(number)), name, Settings::new(nodes, nodes));
    Hello { local_addr: Some("a".repeat(NAME_LIMIT_BYTES)), ..hello }
}

fn greet(machine: &mut Machine, number: u64, hello: Hello, now: Instant) {
    let ends = Ends { peer: [10, 0, 0, 1].into(), local: [10, 0, 0, 2].into() };
    machine.on_hello(SessionId(number), hello, ends, now);
}

/// What the machine says now. It must fit into frames, and into lines.
fn said(machine: &mut Machine) -> Vec<CoordinatorMessage> {
    let mut messages = Vec::new();
    for command in machine.take_commands() {
        match command {
            Command::Send { message, .. } => {
                encode_frame(&message, &mut BytesMut::new());
                messages.push(message);
            }
            Command::Note { run_id, text } => {
                assert!(!format!("{run_id}{text}").contains(char::is_control), "{text:?}")
            }
            Command::End { .. } => {}
        }
    }
    messages
}

fn refusal(machine: &mut Machine, hello: Hello) -> String {
    greet(machine, 1000, hello, Instant::now());
    match said(machine).as_slice() {
        [CoordinatorMessage::Rejected { reason }] => reason.clone(),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn the_longest_texts_make_no_message_that_outgrows_its_frame() {
    const NODES: u64 = 30;
    let mut now = Instant::now();
    let mut machine = Machine::new();
    let join = |round| NodeMessage::Join(Join { round: Round(round), store_port: 1, node_rank: None, workers: None });
    for number in 0..NODES {
        greet(&mut machine, number, hello(number, NODES as u32), now);
        machine.on_message(SessionId(number), join(0), now);
        machine.on_message(SessionId(number), NodeMessage::Heartbeat, now);
        said(&mut machine);
    }
    greet(&mut machine, 500, hello(500, 7), now);
    assert!(matches!(said(&mut machine).as_slice(), [CoordinatorMessage::Rejected { .. }]));

    let reason = "\u{1b}語".repeat(20_000);
    machine.on_message(SessionId(0), NodeMessage::Leave { reason: reason.clone() }, now);
    let told = said(&mut machine);
    assert!(
        told.iter().any(|message| matches!(message, CoordinatorMessage::Status { reason, .. } if reason.len() > 4096))
    );
    greet(&mut machine, 501, hello(501, NODES as u32), now);
    machine.on_message(SessionId(501), join(0), now);
    for number in 1..NODES {
        machine.on_message(SessionId(number), join(1), now);
        machine.on_message(SessionId(number), NodeMessage::Heartbeat, now);
        said(&mut machine);
    }
    now += Duration::from_secs(60);
    machine.on_tick(now);
    said(&mut machine);
    let verdict = Verdict::Failed { by: reason.clone(), cause: reason, failure: None };
    machine.on_message(SessionId(1), NodeMessage::Close(verdict), now);
    assert!(said(&mut machine).iter().any(|message| matches!(message, CoordinatorMessage::Closed { .. })));
}

#[test]
fn who_introduces_itself_with_texts_out_of_bounds_is_refused() {
    let mut machine = Machine::new();
    let good = hello(1, 1);
    let reason = refusal(&mut machine, Hello { run_id: "r".repeat(60_000), ..good.clone() });
    assert_eq!(reason, "the run id has 60000 bytes, must have at most 1024");
    let reason = refusal(&mut machine, Hello { name: "n".repeat(256), ..good.clone() });
    assert_eq!(reason, "the name has 256 bytes, must have at most 255");
    let reason = refusal(&mut machine, Hello { local_addr: Some("a\u{1b}[2J\n".into()), ..good.clone() });
    assert_eq!(reason, "the address `a\\u{1b}[2J\\n` has control characters");
    assert_eq!(refusal(&mut machine, Hello { run_id: String::new(), ..good }), "the run id is empty");
}
