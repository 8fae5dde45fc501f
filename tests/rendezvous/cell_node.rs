//! Log lines of a node over a shared cell, and its answers when two write at once. Its decisions are tested in `simulation/cell`.

use std::time::{Duration, Instant};

use elastic_rs::events::record::{Kind, Phase};
use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::node::status_log::StatusLog;

fn node(number: u128, nodes: u32, now: Instant) -> CellNode {
    let hello = Hello::new("job", NodeId(number), format!("host:{number}"), Settings::new(nodes, nodes));
    let mut node = CellNode::new(Hello { local_addr: Some(format!("node{number}")), ..hello }, false, now);
    node.ask(|node| node.join(1, None, None, Duration::from_secs(600), now), now);
    node
}

/// Perform reads and writes until there are none.
fn perform(node: &mut CellNode, cell: &mut Option<Vec<u8>>, now: Instant) {
    node.on_tick(now);
    while let Some(command) = node.take_command() {
        match command {
            CellCommand::Read => node.on_state(cell.as_deref(), now),
            CellCommand::Write(bytes) => {
                *cell = Some(bytes);
                node.on_written(now);
            }
        }
    }
}

#[test]
fn a_waiting_node_logs_what_it_waits_for() {
    // #91943: silence for ten minutes, then an error.
    let mut now = Instant::now();
    let mut node = node(1, 2, now);
    let mut status_log = StatusLog::default();
    let (mut cell, mut reported) = (None, Vec::new());
    for _ in 0..310 {
        perform(&mut node, &mut cell, now);
        reported.extend(status_log.look(node.machine(), now));
        now += Duration::from_millis(100);
    }
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(reported[0].starts_with("waiting for 3s of up to "), "{reported:?}");
    assert!(reported[0].contains("node1"), "{reported:?}");
}

/// The write was done, but neither its answer nor that of the next read has arrived.
#[test]
fn a_decision_is_recorded_once_when_its_write_is_seen_to_be_done_after_an_outage() {
    let mut now = Instant::now();
    let (mut node, mut cell, mut reads) = (node(1, 2, now), None, 0);
    let mut joined = 0;
    for _ in 0..600 {
        node.on_tick(now);
        while let Some(command) = node.take_command() {
            match (command, &cell) {
                (CellCommand::Write(bytes), None) => {
                    cell = Some(bytes);
                    node.on_failed("no answer".into(), false, now);
                }
                (CellCommand::Write(bytes), Some(_)) => {
                    cell = Some(bytes);
                    node.on_written(now);
                }
                (CellCommand::Read, None) => node.on_state(None, now),
                (CellCommand::Read, Some(bytes)) => {
                    reads += 1;
                    match reads {
                        1..=3 => node.on_failed("no answer".into(), false, now),
                        _ => node.on_state(Some(bytes), now),
                    }
                }
            }
        }
        let (events, _) = node.take_events();
        joined += events.iter().filter(|event| matches!(event.record.kind, Kind::NodeJoined { .. })).count();
        now += Duration::from_millis(100);
    }
    assert!(reads > 3, "{reads}");
    assert_eq!(joined, 1);
}

/// Nobody counts over a cell, and each node records for itself.
#[test]
fn a_node_that_comes_back_to_its_rank_writes_nothing_to_the_cell_that_is_a_coordinators() {
    let mut now = Instant::now();
    let (mut node, mut cell) = (node(1, 1, now), None);
    perform(&mut node, &mut cell, now);
    let Some(Ok(placement)) = node.take_outcome() else { panic!("no place") };
    let (before, _) = node.take_events();
    // The backend fails once, and the node greets it anew.
    let mut failed = false;
    for _ in 0..300 {
        now += Duration::from_millis(100);
        node.on_tick(now);
        if !failed && node.take_command().is_some() {
            node.on_failed("no answer".into(), false, now);
            failed = true;
        }
        perform(&mut node, &mut cell, now);
    }
    assert!(failed && node.machine().was_welcomed());
    assert!(!node.machine().has_coordinator());
    let phase = Phase { stop_us: Some(5), ..Phase::default() };
    node.ask(|node| node.report_phases(placement.round, phase, now), now);
    perform(&mut node, &mut cell, now);
    let (events, _) = node.take_events();
    let count = |is_it: fn(&Kind) -> bool| events.iter().filter(|event| is_it(&event.record.kind)).count();
    assert_eq!((count(|kind| matches!(kind, Kind::Phase(_))), count(|kind| matches!(kind, Kind::Replayed(_)))), (1, 0));
    assert_eq!(count(|kind| matches!(kind, Kind::LineFound { .. })), 1, "{before:?} {events:?}");
}

#[test]
fn a_spare_whose_join_meets_the_close_ends_as_a_spare() {
    let now = Instant::now();
    let (mut first, mut spare, mut cell) = (node(1, 1, now), node(2, 1, now), None);
    perform(&mut first, &mut cell, now);
    assert!(matches!(first.take_outcome(), Some(Ok(_))));
    spare.on_tick(now);
    assert_eq!(spare.take_command(), Some(CellCommand::Read));
    spare.on_state(cell.as_deref(), now);
    assert!(matches!(spare.take_command(), Some(CellCommand::Write(_))), "it writes its join");
    // The job ends before that arrives.
    let verdict = Verdict::Succeeded { by: "node1".into() };
    first.ask(|node| node.close(verdict.clone()), now);
    perform(&mut first, &mut cell, now);
    spare.on_conflict(cell.as_deref(), now);
    assert_eq!(spare.take_outcome(), Some(Err(JoinError::Closed { verdict, spare: true })));
}

/// PyTorch's launcher shuts a handler down whose agent has failed before it joined.
#[test]
fn a_node_that_has_never_joined_closes_the_rendezvous_and_knows_it() {
    let now = Instant::now();
    let hello = Hello::new("job", NodeId(1), "host:1".to_owned(), Settings::new(1, 1));
    let mut node = CellNode::new(Hello { local_addr: Some("node1".to_owned()), ..hello }, false, now);
    let (mut cell, verdict) = (None, Verdict::Succeeded { by: "node1".into() });
    node.ask(|node| node.close(verdict.clone()), now);
    perform(&mut node, &mut cell, now);
    assert!(cell.is_some(), "the verdict is written");
    assert_eq!(node.view().closed, Some(verdict));
}

/// The lease of 3 s ends before the 10 s do. A fence would have the failure forgotten.
#[test]
fn a_failure_whose_cell_is_gone_is_this_nodes_end_also_with_a_short_lease() {
    let mut now = Instant::now();
    let settings = Settings {
        keep_alive_interval: Duration::from_secs(1),
        keep_alive_max_attempt: 3,
        last_call_timeout: Duration::ZERO,
        settle_timeout: Duration::ZERO,
        ..Settings::new(1, 2)
    };
    let hello = Hello::new("job", NodeId(1), "host:1".to_owned(), settings);
    let mut node = CellNode::new(Hello { local_addr: Some("node1".to_owned()), ..hello }, false, now);
    node.ask(|node| node.join(1, None, None, Duration::from_secs(600), now), now);
    let mut cell = None;
    let placement = loop {
        perform(&mut node, &mut cell, now);
        if let Some(outcome) = node.take_outcome() {
            break outcome.unwrap();
        }
        now += Duration::from_millis(100);
    };
    let failure = *crate::bench::failure();
    node.ask(|node| node.report_failure(placement.round, failure), now);
    let since = now;
    while node.view().failed.is_none() {
        assert!(now < since + Duration::from_secs(4), "{:?}", node.view());
        node.on_tick(now);
        while node.take_command().is_some() {
            node.on_failed("Broken pipe".into(), true, now);
        }
        now += Duration::from_millis(100);
    }
    let error = node.view().failed.clone().unwrap().to_string();
    assert!(error.contains("has been gone for") && node.view().fenced.is_none(), "{error}");
}
