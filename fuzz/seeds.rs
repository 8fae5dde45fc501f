//! Writes seeds/: the client bytes of the captured exchanges, and a small rendezvous, in the form that the targets read.
//! Run in this folder: `cargo run --example seeds`.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::hang::fr::Recorded;
use elastic_rs::hang::view::View;
use elastic_rs::hosts::Cooldown;
use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::messages::codec::{encode_preamble, try_encode_frame};
use elastic_rs::rendezvous::messages::message::{
    EndClass, Failure, Generation, Health, Hello, Join, JoinWorkers, NodeId, NodeMessage, Placed, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::messages::settings::{Rules, WorkerBounds};
use elastic_rs::secure::claim::{Answer, Claim, MAC_BYTES};
use serde_json::Value;

/// Longer captures test limits. As seeds they would be slow.
const LONGEST_SEED_BYTES: usize = 3000;

fn main() {
    for target in ["codec", "table", "session", "blob", "proof", "hello", "http", "view", "recorder", "frames"] {
        fs::create_dir_all(format!("seeds/{target}")).expect("seeds/ can be made");
    }
    for entry in fs::read_dir("../tests/data/tcpstore").expect("the captures are there") {
        let path = entry.expect("the captures can be listed").path();
        let name = path.file_stem().expect("files have names").to_string_lossy().into_owned();
        if name.starts_with("libuv-") {
            let file: Value = serde_json::from_slice(&fs::read(&path).expect("readable")).expect("JSON");
            exchange(&name, &file);
        }
    }
    rendezvous();
    states();
    proofs();
    greetings();
    hangs();
    interpreters();
}

/// Write the recorded hangs: dumps of the flight recorder, and the views that are made of them.
fn hangs() {
    for entry in fs::read_dir("../tests/data/hangs").expect("the recorded hangs are there") {
        let path = entry.expect("they can be listed").path();
        let name = path.file_stem().expect("files have names").to_string_lossy().into_owned();
        let file: Value = serde_json::from_slice(&fs::read(&path).expect("readable")).expect("JSON");
        let mut views = Vec::new();
        for one in file["views"].as_array().into_iter().flatten() {
            let rank = one["rank"].as_u64().unwrap_or_default() as u32;
            let mut dump = one["dump"].clone();
            let mut view = View::new(rank, 1);
            view.answered = dump.is_object();
            if let Some(entries) = dump["entries"].as_array_mut() {
                entries.drain(..entries.len().saturating_sub(6));
                let bytes = serde_json::to_vec(&dump).expect("JSON");
                Recorded::parse(&bytes).expect("a dump").fill(&mut view, &BTreeMap::new());
                write("recorder", &format!("{name}-{rank}"), &bytes);
            }
            let bytes = view.encode();
            views.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            views.extend_from_slice(&bytes);
        }
        write("view", &name, &views);
    }
}

/// A `_PyRuntime` whose interpreters, threads and frames lie within the bytes, again and again.
fn interpreters() {
    let described: Vec<u64> = [
        vec![u64::from_ne_bytes(*b"xdebugpy"), 0x030d_00f0, 0, 283_320, 600, 632],
        vec![194_968, 100, 624, 736, 1, 2, 3, 4, 640, 696, 16, 712, 704],
        vec![304, 0, 8, 16, 72, 152, 160, 208, 24, 88, 8, 0, 56, 80, 74],
        vec![224, 112, 120, 128, 136, 68, 52, 96, 104, 208],
        vec![16, 8, 416, 24, 88, 168, 32, 24, 16, 40, 24, 16, 48, 32, 40, 24, 16],
        vec![32, 16, 24, 33, 16, 32, 64, 32, 16, 40, 300, 8],
    ]
    .concat();
    let pointers = (0..64_u64).map(|at| 0x1_0000 + 1000 + at * 24);
    for (name, hint, words) in [
        ("3.11", 0_u8, pointers.clone().collect::<Vec<_>>()),
        ("3.12", 1, pointers.clone().rev().collect()),
        ("3.13", 2, described.into_iter().chain(pointers).collect()),
    ] {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        write("frames", name, &[hint].into_iter().chain(bytes).collect::<Vec<_>>());
    }
}

fn greetings() {
    let request = "GET /?run=a%20b&refresh=off HTTP/1.1\r\nHost: [::1]:29400\r\n\r\n";
    for (name, bytes) in [
        ("c10d", &b"\0\xce\xf7\x85\x3c\x0d\x01\0\0\0"[..]),
        ("http", request.as_bytes()),
        ("session", b"ELRZ\x02\x00"),
        ("tls", b"\x16\x03\x01\x02\0\x01"),
        ("ssh", b"SSH-2.0-OpenSSH_9.2\r\n"),
    ] {
        write("hello", name, bytes);
    }
    write("http", "page", request.as_bytes());
    write("http", "metrics", b"GET /metrics HTTP/1.1\r\nHost: node0\r\nAccept: */*\r\n\r\n");
    write("http", "health", b"GET /healthz HTTP/1.0\r\n\r\n");
    write("http", "half", b"GET /readyz?verbose HTTP/1.1\r\nX-Long: aaaaaaaaaaaa");
}

fn proofs() {
    let claim = |key| Claim { key, run_id: "job".to_owned() }.encode().expect("it is short");
    write("proof", "claim", &[claim(Some([1, 2, 3, 4, 5, 6, 7, 8])), vec![9; MAC_BYTES]].concat());
    write("proof", "certificate", &claim(None));
    write("proof", "admitted", &Answer::Admitted.encode());
    write("proof", "proven", &Answer::Proven([7; MAC_BYTES]).encode());
    write("proof", "refused", &Answer::Refused("no such token".to_owned()).encode());
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    if bytes.len() <= LONGEST_SEED_BYTES {
        fs::write(format!("seeds/{target}/{name}"), bytes).expect("seeds/ can be written");
    }
}

fn exchange(name: &str, file: &Value) {
    // The bytes of each connection in both directions, and the table's script.
    let (mut sent, mut received) = (BTreeMap::<String, Vec<u8>>::new(), Vec::new());
    let (mut script, mut numbers) = (vec![0u8], BTreeMap::<String, u8>::new());
    for step in file["steps"].as_array().into_iter().flatten() {
        let conn = step["conn"].as_str().unwrap_or_default().to_owned();
        for message in step["exchange"].as_array().into_iter().flatten() {
            let bytes = data(&message["data"]);
            if message["dir"] == "s2c" {
                received.extend_from_slice(&bytes);
                continue;
            }
            sent.entry(conn.clone()).or_default().extend_from_slice(&bytes);
            if message["query"] == "VALIDATE" {
                continue; // the table's connections have sent it already
            }
            let next = numbers.len() as u8;
            let number = *numbers.entry(conn.clone()).or_insert(next);
            for part in bytes.chunks(255) {
                script.extend_from_slice(&[number % 4, part.len() as u8]);
                script.extend_from_slice(part);
            }
        }
    }
    write("table", name, &script);
    for (conn, bytes) in sent {
        write("codec", &format!("{name}-{conn}"), &[&[0, 7], &bytes[..]].concat());
    }
    write("codec", &format!("{name}-replies"), &[&[30, 5], &received[..]].concat());
}

fn data(parts: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts.as_array().into_iter().flatten() {
        match part.as_str() {
            Some(text) => bytes.extend(hex(text)),
            None => {
                let pattern = hex(part["repeat"].as_str().unwrap_or_default());
                let count = part["count"].as_u64().unwrap_or(0).min(LONGEST_SEED_BYTES as u64 + 1);
                (0..count).for_each(|_| bytes.extend_from_slice(&pattern));
            }
        }
    }
    bytes
}

fn hex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
    (0..text.len() / 2).map(|at| digit(2 * at)).collect()
}

fn rendezvous() {
    let hello = |node: u128, placed: Option<Placed>| {
        let settings = Settings { last_call_timeout: Duration::from_secs(3), ..Settings::new(2, 3) };
        NodeMessage::Hello(Box::new(Hello {
            local_addr: (node == 2).then(|| "b".into()),
            placed,
            joining: placed.is_none(),
            ..Hello::new("run", NodeId(node), format!("host{node}:1"), settings)
        }))
    };
    let first_join = |round, node_rank| NodeMessage::Join(Join { store_port: 29500, node_rank, ..join(round, None) });
    let placed = |active| {
        Some(Placed {
            round: Round(1),
            rank: 1,
            world_size: 2,
            world: 1,
            active,
            restart: 0,
            host: None,
            began_with: Generation::default(),
        })
    };

    long_texts(hello);
    let mut script = Vec::new();
    for node in 0..3 {
        open(&mut script, node, &hello(node.into(), None));
        send(&mut script, node, &first_join(0, (node == 1).then_some(0)));
    }
    send(&mut script, 0, &NodeMessage::Heartbeat { rtt_us: None });
    write("session", "three-join-at-once", &script);
    send(&mut script, 1, &NodeMessage::Leave { reason: "SIGTERM".into(), signal: None });
    script.extend_from_slice(&[1, 200]); // four seconds
    send(&mut script, 0, &first_join(1, None));
    send(&mut script, 2, &first_join(1, None));
    send(&mut script, 0, &NodeMessage::Close(Verdict::Succeeded { by: "host0".into() }));
    write("session", "one-leaves-and-the-job-ends", &script);

    let mut script = Vec::new();
    for node in 0..2 {
        open(&mut script, node, &hello(node.into(), None));
        send(&mut script, node, &first_join(0, None));
    }
    script.extend_from_slice(&[1, 200, 0x20, 0, 1, 100, 0x11, 20]); // last call; 0 hangs up; two seconds; a stall
    open(&mut script, 0, &hello(0, placed(true)));
    send(&mut script, 1, &NodeMessage::Withdraw);
    write("session", "one-is-lost-and-returns", &script);

    let mut script = Vec::new();
    open(&mut script, 1, &hello(1, placed(true)));
    open(&mut script, 2, &hello(2, placed(false)));
    send(&mut script, 2, &first_join(1, None));
    send(
        &mut script,
        1,
        &NodeMessage::Close(Verdict::Failed {
            by: "host1".into(),
            cause: "exit code 1".into(),
            failure: None,
            class: EndClass::Program,
        }),
    );
    write("session", "the-coordinator-was-restarted", &script);

    let mut script = Vec::new();
    let workers = |size| Some(JoinWorkers::new("trainer", size));
    for node in 0..3 {
        open(&mut script, node, &hello(node.into(), None));
        send(&mut script, node, &NodeMessage::Join(join(0, workers(1 + u32::from(node)))));
    }
    send(&mut script, 1, &NodeMessage::Done { round: Round(1) });
    let failure = Failure {
        node: String::new(),
        role: "trainer".into(),
        local_rank: 1,
        global_rank: 2,
        pid: 77,
        exit: "SIGKILL".into(),
        returncode: -9,
        message: "first line\nsecond".into(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    };
    send(&mut script, 2, &NodeMessage::Failed { round: Round(1), failure: Box::new(failure.clone()) });
    write("session", "one-is-done-and-one-fails", &script);

    let mut script = Vec::new();
    for node in 0..3 {
        let NodeMessage::Hello(mut asking) = hello(node.into(), None) else { return };
        asking.host_name = Some(format!("rack{node}"));
        asking.settings.rules = Rules {
            workers: Some(WorkerBounds { min: 2, max: 5 }),
            host_failures: 1,
            cooldown: Some(Cooldown { min: Duration::from_secs(2), max: Duration::from_secs(9) }),
            reset_limit: Some(3),
            store_tunnel: true,
            ..Rules::default()
        };
        open(&mut script, node, &NodeMessage::Hello(asking));
        send(&mut script, node, &NodeMessage::Join(join(0, workers(2))));
    }
    send(&mut script, 2, &NodeMessage::Failed { round: Round(1), failure: Box::new(failure) });
    for node in 0..3 {
        send(&mut script, node, &NodeMessage::Join(join(1, workers(2))));
    }
    script.extend_from_slice(&[1, 200]); // four seconds
    write("session", "a-host-is-kept-out-for-a-while", &script);
}

/// Write states of nodes over a shared cell: one node waits, a world of two runs, one node has gone, closed, and an invalid state.
fn states() {
    let mut now = Instant::now();
    let mut cell: Option<Vec<u8>> = None;
    let mut nodes: Vec<_> = (1..3)
        .map(|node| {
            let hello = Hello::new("run", NodeId(node), format!("host{node}:1"), Settings::new(2, 3));
            let hello = Hello { local_addr: Some(format!("10.0.0.{node}")), ..hello };
            CellNode::new(hello, false, now)
        })
        .collect();
    // A node's request, as the target reads it.
    let keep = |name: &str, cell: &Option<Vec<u8>>| {
        for (what, wish) in [("joins", 0x20), ("looks", 0x00), ("closes", 0x10), ("leaves", 0x2c)] {
            write("blob", &format!("{name}-a-node-{what}"), &[&[wish], cell.as_deref().unwrap_or_default()].concat());
        }
    };
    nodes[0].ask(|node| node.join(1, None, None, Duration::from_secs(600), now), now);
    run(&mut nodes, &mut cell, &mut now, 4);
    keep("one-waits", &cell);
    nodes[1].ask(|node| node.join(2, Some(0), None, Duration::from_secs(600), now), now);
    run(&mut nodes, &mut cell, &mut now, 200);
    keep("a-world-runs", &cell);
    nodes[1].ask(|node| node.leave("SIGTERM".into(), None), now);
    run(&mut nodes, &mut cell, &mut now, 10);
    keep("one-has-gone", &cell);
    nodes[0].ask(
        |node| {
            node.close(Verdict::Failed {
                by: "host1".into(),
                cause: "exit code 1".into(),
                failure: None,
                class: EndClass::Program,
            })
        },
        now,
    );
    run(&mut nodes, &mut cell, &mut now, 10);
    keep("closed", &cell);
    write("blob", "a-pickle", b"\x20\x80\x04\x95\x10torch.distributed.elastic\x8c\x10_RendezvousState\x94.");
    write("blob", "another-version", b"\x20ELRS\x09\x00");
}

fn run(nodes: &mut [CellNode], cell: &mut Option<Vec<u8>>, now: &mut Instant, steps: u32) {
    for _ in 0..steps {
        *now += Duration::from_millis(200);
        for node in &mut *nodes {
            node.on_tick(*now);
            while let Some(command) = node.take_command() {
                match command {
                    CellCommand::Read => node.on_state(cell.as_deref(), *now),
                    CellCommand::Write(state) => {
                        *cell = Some(state);
                        node.on_written(*now);
                    }
                }
            }
        }
    }
}

/// A join after this round.
fn join(round: u64, workers: Option<JoinWorkers>) -> Join {
    Join { round: Round(round), store_port: 1, node_rank: None, workers, health: Health::Unchecked }
}

/// Write texts that fit into their own frame, but together not into a frame that quotes them.
fn long_texts(hello: impl Fn(u128, Option<Placed>) -> NodeMessage) {
    let mut script = Vec::new();
    for node in 0..3 {
        let NodeMessage::Hello(mut long) = hello(node.into(), None) else { return };
        long.name = "x".repeat(30_000);
        open(&mut script, node, &NodeMessage::Hello(long));
        send(&mut script, node, &NodeMessage::Join(join(0, None)));
    }
    write("session", "long-names", &script);

    let mut script = Vec::new();
    for node in 0..2 {
        open(&mut script, node, &hello(node.into(), None));
    }
    let cause = "x".repeat(65_528);
    send(
        &mut script,
        0,
        &NodeMessage::Close(Verdict::Failed { by: "a".into(), cause, failure: None, class: EndClass::Program }),
    );
    write("session", "a-long-cause", &script);

    let mut script = Vec::new();
    for node in 0..3 {
        open(&mut script, node, &hello(node.into(), None));
        send(&mut script, node, &NodeMessage::Join(join(0, None)));
    }
    send(&mut script, 0, &NodeMessage::Leave { reason: "x".repeat(65_500), signal: None });
    write("session", "a-long-reason", &script);
}

fn open(script: &mut Vec<u8>, at: u8, hello: &NodeMessage) {
    let mut bytes = BytesMut::new();
    encode_preamble(&mut bytes);
    try_encode_frame(hello, &mut bytes).expect("a message that is short enough");
    chunk(script, at, &bytes);
}

fn send(script: &mut Vec<u8>, at: u8, message: &NodeMessage) {
    let mut bytes = BytesMut::new();
    try_encode_frame(message, &mut bytes).expect("a message that is short enough");
    chunk(script, at, &bytes);
}

fn chunk(script: &mut Vec<u8>, at: u8, bytes: &[u8]) {
    // The target has an action for multiples of 256 times `x`.
    let is_text = |bytes: &[u8]| bytes.len() >= 256 && bytes[..256].iter().all(|byte| *byte == b'x');
    let mut rest = bytes;
    while !rest.is_empty() {
        let repeated = rest.chunks(256).take_while(|part| is_text(part)).count().min(255);
        if repeated > 0 {
            script.extend_from_slice(&[0x30 | at, repeated as u8]);
            rest = &rest[repeated * 256..];
        } else {
            let plain = (0..rest.len().min(255)).find(|from| is_text(&rest[*from..])).unwrap_or(rest.len().min(255));
            script.extend_from_slice(&[0x40 | at, plain as u8]);
            script.extend_from_slice(&rest[..plain]);
            rest = &rest[plain..];
        }
    }
}
