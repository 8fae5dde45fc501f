//! Log lines of a node over a shared cell. Its decisions are tested in `simulation/cell`.
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::node::report::Reporter;
use elastic_rs::rendezvous::protocol::message::{Hello, NodeId};
use elastic_rs::rendezvous::protocol::settings::Settings;

#[test]
fn a_waiting_node_logs_what_it_waits_for() {
    // Pains row 9: silence for ten minutes, then an error.
    let mut now = Instant::now();
    let hello = Hello::new("job", NodeId(1), "host:1", Settings::new(2, 2));
    let hello = Hello { local_addr: Some("node1".into()), ..hello };
    let mut node = CellNode::new(hello, now);
    let mut reporter = Reporter::default();
    node.ask(|node| node.join(1, None, None, Duration::from_secs(600), now), now);
    let (mut cell, mut told) = (None, Vec::new());
    for _ in 0..310 {
        node.on_tick(now);
        while let Some(command) = node.take_command() {
            match command {
                CellCommand::Read => node.on_state(cell.as_deref(), now),
                CellCommand::Write(bytes) => {
                    cell = Some(bytes);
                    node.on_written(now);
                }
            }
        }
        told.extend(reporter.look(node.machine(), now));
        now += Duration::from_millis(100);
    }
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("waiting for 3s: "), "{told:?}");
    assert!(told[0].contains("node1"), "{told:?}");
}
