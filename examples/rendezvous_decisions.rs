//! Measures the cost of the coordinator's decisions in a round, without sockets: `rendezvous_decisions NODES [elastic]`. The nodes
//! introduce themselves, join, and send one heartbeat while they wait. Then one is lost, and the others join again.
//!
//! `perf stat -e instructions:u` with several sizes shows whether the cost per node depends on the number of nodes.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::messages::message::{Hello, Join, JoinWorkers, NodeId, NodeMessage, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{Ends, SessionId};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let nodes: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(4000);
    let min = if arguments.next().as_deref() == Some("elastic") { 1 } else { nodes as u32 };
    let (start, mut now) = (Instant::now(), Instant::now());
    let mut machine = Machine::new();
    let mut said = 0;
    for node in 0..nodes {
        let [.., high, low] = node.to_be_bytes();
        let ends = Ends { peer: [10, 0, high, low].into(), local: [10, 1, 0, 0].into() };
        let id = NodeId(u128::from(node).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
        let hello = Hello::new("job", id, format!("host{node}:1"), Settings::new(min, nodes as u32));
        let hello = Hello { process: node, joining: true, ..hello };
        machine.on_hello(SessionId(node), hello, ends, now);
        machine.on_message(SessionId(node), join(0), now);
        machine.on_message(SessionId(node), NodeMessage::Heartbeat { rtt_us: None }, now);
        said += machine.take_commands().len();
    }
    let first = start.elapsed();
    now += Duration::from_secs(1);
    machine.on_disconnected(SessionId(0), now);
    now += Duration::from_secs(1);
    machine.on_tick(now);
    for node in 1..nodes {
        machine.on_message(SessionId(node), join(1), now);
        machine.on_message(SessionId(node), NodeMessage::Heartbeat { rtt_us: None }, now);
    }
    machine.on_tick(now + Duration::from_secs(2));
    said += machine.take_commands().len();
    let round = machine.run("job").map_or(Round(0), |run| run.round());
    println!(
        "{nodes} nodes: round {round}, {said} commands, {first:?} to the first round, {:?} in all",
        start.elapsed()
    );
}

fn join(round: u64) -> NodeMessage {
    let workers = Some(JoinWorkers::new("default", 8));
    NodeMessage::Join(Join {
        round: Round(round),
        store_port: 29_500,
        node_rank: None,
        workers,
        health: Default::default(),
    })
}
