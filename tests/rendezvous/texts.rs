//! Texts that nodes send reach other nodes. They must fit into a frame, and must not control a terminal.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::events::record::Kind;
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::codec::encode_frame;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, Failure, Hello, Join, NodeId, NodeMessage, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::{Ends, SessionId};
use elastic_rs::wire::text::{NAME_LIMIT_BYTES, RUN_ID_LIMIT_BYTES};

fn hello(number: u64, nodes: u32) -> Hello {
    let (run_id, name) = ("r".repeat(RUN_ID_LIMIT_BYTES), "n".repeat(NAME_LIMIT_BYTES));
    let hello = Hello::new(run_id, NodeId(u128::from(number)), name, Settings::new(nodes, nodes));
    Hello { local_addr: Some("a".repeat(NAME_LIMIT_BYTES)), ..hello }
}

fn greet(machine: &mut Machine, number: u64, hello: Hello, now: Instant) {
    let ends = Ends { peer: [10, 0, 0, 1].into(), local: [10, 0, 0, 2].into() };
    machine.on_hello(SessionId(number), hello, ends, now);
}

/// The machine's messages. Each must fit into a frame, and each note into one line.
fn sent(machine: &mut Machine) -> Vec<CoordinatorMessage> {
    let mut messages = Vec::new();
    for command in machine.take_commands() {
        match command {
            Command::Send { message, .. } => {
                encode_frame(&message, &mut BytesMut::new());
                messages.push(message);
            }
            Command::Record { run_id, record } => {
                let exit = match &record.kind {
                    Kind::WorkerExited(exit) => format!("{}{}{}", exit.role, exit.exit, exit.message),
                    _ => String::new(),
                };
                let texts = [Some(run_id), record.node.clone(), record.text.clone(), Some(exit)];
                assert!(!texts.into_iter().flatten().any(|text| text.contains(char::is_control)), "{record:?}")
            }
            Command::Tally { .. }
            | Command::Forget { .. }
            | Command::Exclusions { .. }
            | Command::Warn { .. }
            | Command::EmptyStore
            | Command::HandOver
            | Command::End { .. } => {}
        }
    }
    messages
}

fn refusal(machine: &mut Machine, hello: Hello) -> String {
    greet(machine, 1000, hello, Instant::now());
    match sent(machine).as_slice() {
        [CoordinatorMessage::Rejected { reason }] => reason.clone(),
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn the_longest_texts_fit_into_a_frame() {
    const NODES: u64 = 30;
    let mut now = Instant::now();
    let mut machine = Machine::new();
    let join = |round| {
        NodeMessage::Join(Join {
            round: Round(round),
            store_port: 1,
            node_rank: None,
            workers: None,
            health: Default::default(),
        })
    };
    for number in 0..NODES {
        greet(&mut machine, number, hello(number, NODES as u32), now);
        machine.on_message(SessionId(number), join(0), now);
        machine.on_message(SessionId(number), NodeMessage::Heartbeat { rtt_us: None }, now);
        sent(&mut machine);
    }
    greet(&mut machine, 500, hello(500, 7), now);
    assert!(matches!(sent(&mut machine).as_slice(), [CoordinatorMessage::Rejected { .. }]));

    let reason = "\u{1b}語".repeat(20_000);
    machine.on_message(SessionId(0), NodeMessage::Leave { reason: reason.clone(), signal: None }, now);
    let reported = sent(&mut machine);
    assert!(
        reported
            .iter()
            .any(|message| matches!(message, CoordinatorMessage::Status { reason, .. } if reason.len() > 4096))
    );
    greet(&mut machine, 501, hello(501, NODES as u32), now);
    machine.on_message(SessionId(501), join(0), now);
    for number in 1..NODES {
        machine.on_message(SessionId(number), join(1), now);
        machine.on_message(SessionId(number), NodeMessage::Heartbeat { rtt_us: None }, now);
        sent(&mut machine);
    }
    now += Duration::from_secs(60);
    machine.on_tick(now);
    sent(&mut machine);
    let verdict = Verdict::Failed { by: reason.clone(), cause: reason, failure: None, class: EndClass::Program };
    machine.on_message(SessionId(1), NodeMessage::Close(verdict), now);
    assert!(sent(&mut machine).iter().any(|message| matches!(message, CoordinatorMessage::Closed { .. })));
}

#[test]
fn a_hello_with_texts_out_of_bounds_is_rejected() {
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

/// In log viewers, U+2028 would begin a new line, and U+202E would reverse the text after it.
#[test]
fn separators_and_bidi_controls_forge_no_lines() {
    const STEERING: [char; 9] =
        ['\u{2028}', '\u{2029}', '\u{202e}', '\u{2066}', '\u{200f}', '\u{61c}', '\u{200b}', '\u{feff}', '\u{85}'];
    for steering in STEERING {
        let mut machine = Machine::new();
        let bad = format!("node{steering}[job] closed");
        let escaped = format!("node{}[job] closed", steering.escape_default());
        let good = Hello { run_id: "job".into(), ..hello(1, 1) };
        for (what, hello) in [
            ("run id", Hello { run_id: bad.clone(), ..good.clone() }),
            ("name", Hello { name: bad.clone(), ..good.clone() }),
            ("address", Hello { local_addr: Some(bad.clone()), ..good.clone() }),
        ] {
            assert_eq!(refusal(&mut machine, hello), format!("the {what} `{escaped}` has control characters"));
        }
        greet(&mut machine, 1, good, Instant::now());
        sent(&mut machine);
        machine.on_message(SessionId(1), NodeMessage::Leave { reason: bad.clone(), signal: None }, Instant::now());
        let notes: Vec<_> = machine.take_commands().iter().map(|command| format!("{command:?}")).collect();
        assert!(notes.iter().any(|note| note.contains("node [job] closed")), "{notes:?}");
    }
    // Joiners and emoji of real names stay.
    let mut machine = Machine::new();
    greet(&mut machine, 1, Hello { name: "می‌خواهم 語 👩‍🚀".into(), ..hello(1, 1) }, Instant::now());
    assert!(matches!(sent(&mut machine).as_slice(), [CoordinatorMessage::Welcome { .. }]));
}

/// A node logs texts of the server at the endpoint, which may be any program.
#[test]
fn texts_of_a_coordinator_cannot_control_a_nodes_terminal() {
    let mut node = NodeMachine::new(hello(1, 1), "coordinator:1".into(), Duration::from_secs(300), Instant::now());
    node.on_tick(Instant::now());
    node.on_connected(Instant::now());
    let reason = "no\u{1b}[2J\u{2028}[job] closed".to_owned();
    node.on_message(CoordinatorMessage::Rejected { reason }, Instant::now());
    let failed = node.view().failed.clone().unwrap().to_string();
    assert!(failed.contains("no [2J [job] closed"), "{failed:?}");
}

/// An agent logs its worker's message before the coordinator has cleaned it.
#[test]
fn a_workers_message_is_one_line_in_the_log_of_its_agent() {
    let failure = Failure {
        node: String::new(),
        role: "default".into(),
        local_rank: 0,
        global_rank: 0,
        pid: 7,
        exit: "exit code 1".into(),
        returncode: 1,
        message: "bad\u{1b}[2K\r\u{202e}news\nat line 3".into(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    };
    let text = failure.to_string();
    assert!(text.ends_with("ended with exit code 1: bad [2K  news"), "{text:?}");
}
