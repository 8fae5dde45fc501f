//! What a coordinator counts without recording it: rejected nodes, nodes that were cut off, and round trips of heartbeats.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::events::tally::{Refused, Tally};
use elastic_rs::rendezvous::messages::codec;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, Join, JoinWorkers, NodeId, NodeMessage, Placed, Progress, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::{NodeCommand, NodeMachine};

use crate::bench::{Bench, hello, join};
use crate::node::complete;

fn settings() -> Settings {
    Settings { max_restarts: Some(1), rejoin_limit: 1, ..Settings::new(1, 2) }
}

#[test]
fn rejected_nodes_are_counted_by_why() {
    let mut bench = Bench::formed(2, &settings());
    assert_eq!(bench.tallies, []);
    let refused = |bench: &mut Bench, hello: Hello, address| {
        bench.greet(9, hello, address);
        std::mem::take(&mut bench.tallies)
    };
    let count = |why| vec![Tally::Refused(why)];
    let other = Settings { max_restarts: Some(9), ..settings() };
    assert_eq!(refused(&mut bench, hello(9, &other), 9), count(Refused::Settings));
    let endless = Hello { name: "x".repeat(300), ..hello(9, &settings()) };
    assert_eq!(refused(&mut bench, endless, 9), count(Refused::Invalid));
    let round = Round(u64::MAX);
    let placed = Placed {
        round,
        rank: 0,
        world_size: 2,
        world: 77,
        active: true,
        restart: 1,
        host: None,
        began_with: Generation::default(),
    };
    let far = Hello { placed: Some(placed), ..hello(9, &settings()) };
    assert_eq!(refused(&mut bench, far, 9), count(Refused::Invalid));
    // A newer agent comes from the place of the second one, which comes back.
    bench.greet(3, Hello { node_rank: None, name: "host:2".into(), ..hello(3, &settings()) }, 1);
    assert_eq!(std::mem::take(&mut bench.tallies), count(Refused::Replaced), "the second one was connected");
    assert_eq!(refused(&mut bench, hello(2, &settings()), 1), count(Refused::Replaced));
    // Nodes of their host may leave the running job once.
    bench.send(1, NodeMessage::Leave { reason: "test".into(), signal: None });
    assert_eq!(refused(&mut bench, hello(11, &settings()), 1), count(Refused::Flapping));
}

#[test]
fn a_node_that_finds_other_settings_when_it_joins_is_counted() {
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings()), 1);
    bench.greet(2, hello(2, &Settings::new(1, 5)), 2);
    bench.send(1, join(0));
    bench.send(2, join(0));
    assert_eq!(bench.tallies, [Tally::Refused(Refused::Settings)]);
}

#[test]
fn a_node_that_says_what_cannot_be_later_on_is_counted() {
    let NodeMessage::Join(join) = join(1) else { unreachable!() };
    let endless = Join { workers: Some(JoinWorkers::new("r".repeat(300), 2)), ..join };
    for message in [NodeMessage::Join(endless), NodeMessage::Counted { round: Round(1), count: u64::MAX }] {
        let mut bench = Bench::formed(2, &settings());
        bench.send(1, message.clone());
        assert_eq!(bench.tallies, [Tally::Refused(Refused::Invalid)], "{message:?}");
    }
}

#[test]
fn round_trips_that_heartbeats_report_are_counted_and_bounded() {
    let mut bench = Bench::formed(2, &settings());
    let records = bench.records.len();
    for rtt_us in [700, u64::MAX] {
        bench.send(2, NodeMessage::Heartbeat { rtt_us: Some(rtt_us) });
        assert_eq!(bench.last(2), &CoordinatorMessage::Heartbeat { waits: None });
    }
    bench.send(2, NodeMessage::Fenced);
    let times = [Duration::from_micros(700), settings().lease()].map(Tally::RoundTrip);
    assert_eq!(bench.tallies, [times[0], times[1], Tally::Fenced]);
    assert_eq!(bench.records.len(), records);
}

/// A node at this coordinator, that has a place.
fn placed(now: Instant) -> NodeMachine {
    let mut node = NodeMachine::new(
        Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4)),
        "head:29400".into(),
        Duration::from_secs(60),
        now,
    );
    node.join(1, None, None, Duration::from_secs(60), now);
    welcomed(&mut node, now);
    node.on_message(complete(1), now);
    node.take_commands();
    node
}

fn welcomed(node: &mut NodeMachine, now: Instant) {
    node.on_tick(now);
    node.on_connected(now);
    node.on_message(
        CoordinatorMessage::Welcome { addr: "10.0.0.7".into(), hosted: false, running: None, wants_replay: false },
        now,
    );
}

fn sent(node: &mut NodeMachine) -> Vec<NodeMessage> {
    let sent = |command| match command {
        NodeCommand::Send(message) => Some(message),
        _ => None,
    };
    node.take_commands().into_iter().filter_map(sent).collect()
}

/// What a node says in ten minutes whose heartbeats are answered after a while, and the bytes of both directions.
fn ten_minutes(after: Duration) -> (Vec<NodeMessage>, usize) {
    let begin = Instant::now();
    let (mut node, mut all, mut bytes) = (placed(begin), Vec::new(), BytesMut::new());
    loop {
        let now = node.next_deadline().unwrap();
        if now > begin + Duration::from_secs(600) {
            return (all, bytes.len());
        }
        node.on_tick(now);
        for message in sent(&mut node) {
            codec::encode_frame(&message, &mut bytes);
            let answer = CoordinatorMessage::Heartbeat { waits: None };
            codec::encode_frame(&answer, &mut bytes);
            node.on_message(answer, now + after);
            all.push(message);
        }
    }
}

#[test]
fn one_of_twelve_heartbeats_reports_a_round_trip_and_costs_next_to_nothing() {
    let (sent, bytes) = ten_minutes(Duration::from_millis(40));
    assert_eq!(sent.len(), 120, "one each 5 s");
    for (at, message) in sent.iter().enumerate() {
        let rtt_us = (at % 12 == 11).then_some(40_000);
        assert_eq!(*message, NodeMessage::Heartbeat { rtt_us }, "{at}");
    }
    assert!((bytes as f64) / 600.0 <= 2.5, "{bytes} bytes in ten minutes");
}

/// It may be a store of PyTorch's, or not a coordinator at all.
#[test]
fn a_coordinator_that_has_not_welcomed_a_node_gets_heartbeats_alone() {
    let begin = Instant::now();
    let mut node = placed(begin);
    let tick = |node: &mut NodeMachine| {
        let now = node.next_deadline().unwrap();
        node.on_tick(now);
        now
    };
    let mut now = begin;
    for _ in 0..11 {
        now = tick(&mut node);
        node.on_message(CoordinatorMessage::Heartbeat { waits: None }, now);
    }
    node.on_disconnected("reset".into(), false, now);
    now = tick(&mut node);
    node.on_connected(now);
    sent(&mut node);
    node.report_first_step(
        Round(1),
        Progress { after_us: 1, formed_us: [None; 2], step: None, before: None, step_time_us: None },
    );
    tick(&mut node);
    assert_eq!(sent(&mut node), [NodeMessage::Heartbeat { rtt_us: None }]);
}

#[test]
fn a_node_that_was_cut_off_says_so_once() {
    let begin = Instant::now();
    let mut node = placed(begin);
    let now = begin + Duration::from_secs(600);
    node.on_tick(now);
    assert!(node.view().fenced.is_some());
    assert!(!sent(&mut node).contains(&NodeMessage::Fenced), "nobody answers yet");
    welcomed(&mut node, now + Duration::from_secs(10));
    let fences = |sent: Vec<NodeMessage>| sent.iter().filter(|message| **message == NodeMessage::Fenced).count();
    assert_eq!(fences(sent(&mut node)), 1);
    node.on_message(CoordinatorMessage::Heartbeat { waits: None }, now + Duration::from_secs(11));
    node.on_message(
        CoordinatorMessage::Closed { verdict: Verdict::Succeeded { by: "host:2".into() }, spare: false },
        now + Duration::from_secs(12),
    );
    assert_eq!(fences(sent(&mut node)), 0);
}
