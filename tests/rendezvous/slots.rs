//! Worlds that count workers: `min_workers` and `max_workers`. The rules are in `docs/rendezvous.md`.

use std::time::{Duration, Instant};

use bytes::BytesMut;

use crate::bench::{Bench, hello, survived};
use elastic_rs::rendezvous::messages::codec::{decode_frame, encode_frame};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, Join, JoinWorkers, NodeMessage, Placed, Placement, Resume, Round, Waits,
    WorkerRanks,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::messages::settings::{Rules, WorkerBounds};
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::Standing;

fn settings(min: u32, max: u32) -> Settings {
    Settings {
        rules: Rules { workers: Some(WorkerBounds { min, max }), ..Rules::default() },
        settle_timeout: Duration::ZERO,
        ..Settings::new(1, 1000)
    }
}

/// A join of a node that offers `workers`, and asks for a rank.
fn asks(round: u64, workers: u32, node_rank: Option<u32>) -> NodeMessage {
    let workers = Some(JoinWorkers::new("trainer", workers));
    NodeMessage::Join(Join { round: Round(round), store_port: 1, node_rank, workers, health: Default::default() })
}

fn offers(round: u64, workers: u32) -> NodeMessage {
    asks(round, workers, None)
}

/// Nodes 1, 2, … on hosts of their own join with so many workers each.
fn joined(settings: &Settings, offered: &[u32]) -> Bench {
    let mut bench = Bench::new();
    for (node, workers) in (1..).zip(offered) {
        bench.greet(node, hello(node, settings), node as u8);
        bench.send(node, offers(0, *workers));
    }
    bench
}

/// How many workers each of these nodes starts in the current round, and the rank of the first one.
fn ranks_of<const N: usize>(bench: &Bench, nodes: [u64; N]) -> [(u32, u32); N] {
    nodes.map(|node| {
        let placed =
            bench.sent.iter().rev().filter(|(to, _)| to.0 == node).find_map(|(_, message)| message.placement());
        let placement = placed.unwrap_or_else(|| panic!("node {node} has no place: {:?}", bench.last(node)));
        assert_eq!(placement.round, bench.run().round(), "node {node}");
        (placement.local_world_size.expect("their number"), placement.workers.expect("ranks").first_rank)
    })
}

fn is_spare(bench: &Bench, node: u64) -> bool {
    matches!(bench.last(node), CoordinatorMessage::Waits(Waits { spare: true, .. }))
}

#[test]
fn the_node_that_would_pass_the_maximum_starts_fewer_and_the_next_one_is_a_spare() {
    let settings = settings(6, 10);
    let mut bench = joined(&settings, &[4]);
    assert_eq!(bench.run().standing(), Standing::Gathering);
    assert!(bench.notes.iter().any(|note| note == "round 1 has 0 of at least 6 workers"), "{:?}", bench.notes);
    let progress = bench.run().progress(bench.now);
    let expected = "round 1: 4 of 6 to 10 workers have joined, on 1 node (10.0.0.1 (host:1)); 2 workers more needed";
    assert!(progress.starts_with(expected), "{progress}");

    bench.greet(2, hello(2, &settings), 2);
    bench.send(2, offers(0, 4));
    assert_eq!(bench.run().standing(), Standing::LastCall, "enough, and more may come");
    bench.greet(3, hello(3, &settings), 3);
    bench.send(3, offers(0, 4));
    assert_eq!(ranks_of(&bench, [1, 2, 3]), [(4, 0), (4, 4), (2, 8)]);
    let placement = bench.placement(3);
    assert_eq!((placement.world_size, placement.rank), (3, 2));
    assert_eq!(placement.workers.map(|ranks| (ranks.world_size, ranks.role_world_size)), Some((10, 10)));
    assert!(placement.reason.starts_with("the maximum of 10 workers is reached"), "{}", placement.reason);
    bench.greet(4, hello(4, &settings), 4);
    bench.send(4, offers(0, 1));
    assert!(is_spare(&bench, 4), "{:?}", bench.last(4));
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
}

#[test]
fn the_minimum_is_enough_once_the_last_call_is_over() {
    let settings = settings(6, 10);
    let mut bench = joined(&settings, &[4, 3]);
    bench.pass(settings.last_call_timeout);
    assert_eq!(ranks_of(&bench, [1, 2]), [(4, 0), (3, 4)]);
}

#[test]
fn one_node_may_have_more_workers_than_the_world() {
    let bench = joined(&settings(1, 3), &[8]);
    assert_eq!(ranks_of(&bench, [1]), [(3, 0)]);
}

#[test]
fn nodes_of_a_first_round_are_admitted_by_arrival_and_ranked_as_they_ask() {
    let settings = settings(1, 5);
    let mut bench = Bench::new();
    for (node, rank) in [(1, 2), (2, 1), (3, 0)] {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, asks(0, 2, Some(rank)));
    }
    assert_eq!(ranks_of(&bench, [1, 2, 3]), [(2, 3), (2, 1), (1, 0)], "the last to come starts fewer, with rank 0");
    // It stays the one that starts fewer, so that workers of the others may live on.
    for node in [3, 1, 2] {
        bench.send(node, asks(1, 2, Some(0)));
    }
    assert_eq!(bench.run().round(), Round(2));
    assert_eq!(ranks_of(&bench, [1, 2, 3]), [(2, 3), (2, 1), (1, 0)]);
}

#[test]
fn the_node_that_started_fewer_takes_the_room_that_another_leaves() {
    let settings = settings(6, 10);
    let mut bench = joined(&settings, &[4, 4, 4]);
    bench.send(1, NodeMessage::Leave { reason: "scaled down".into(), signal: None });
    (2..=3).for_each(|node| bench.send(node, offers(1, 4)));
    bench.pass(Duration::ZERO);
    assert_eq!(ranks_of(&bench, [2, 3]), [(4, 0), (4, 4)]);
    // A newcomer fills what is left, and the next one waits.
    bench.greet(4, hello(4, &settings), 4);
    bench.send(4, offers(0, 4));
    assert!(matches!(bench.last(2), CoordinatorMessage::Status { waiting: 1, .. }), "{:?}", bench.last(2));
    (2..=3).for_each(|node| bench.send(node, offers(2, 4)));
    assert_eq!(ranks_of(&bench, [2, 3, 4]), [(4, 0), (4, 4), (2, 8)]);
    bench.greet(5, hello(5, &settings), 5);
    bench.send(5, offers(0, 4));
    assert!(is_spare(&bench, 5));
    // With too few workers nobody runs.
    (3..=5).for_each(|node| bench.send(node, NodeMessage::Leave { reason: "gone".into(), signal: None }));
    bench.send(2, offers(3, 4));
    bench.pass(settings.last_call_timeout);
    assert_eq!((bench.run().round(), bench.run().standing()), (Round(3), Standing::Gathering));
}

#[test]
fn a_lost_node_that_smaller_ones_replace_settles_without_a_last_call() {
    let settings = settings(4, 12);
    let mut bench = joined(&settings, &[4, 8]);
    assert_eq!(bench.run().round(), Round(1));
    bench.send(2, NodeMessage::Leave { reason: "gone".into(), signal: None });
    for node in [3, 4] {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, offers(0, 3));
    }
    // Three nodes are more than two, but ten workers are no more than twelve.
    bench.send(1, offers(1, 4));
    bench.pass(Duration::ZERO);
    assert_eq!(ranks_of(&bench, [1, 3, 4]), [(4, 0), (3, 4), (3, 7)]);
}

#[test]
fn numbers_of_nodes_hold_besides() {
    let settings = Settings { min_nodes: 2, max_nodes: 2, ..settings(1, 100) };
    let mut bench = joined(&settings, &[50]);
    assert_eq!(bench.run().standing(), Standing::Gathering);
    let progress = bench.run().progress(bench.now);
    assert!(
        progress.contains("50 of 1 to 100 workers have joined, on 1 node (10.0.0.1 (host:1)); 1 more needed"),
        "{progress}"
    );
    bench.greet(2, hello(2, &settings), 2);
    bench.send(2, offers(0, 1));
    assert_eq!(ranks_of(&bench, [1, 2]), [(50, 0), (1, 50)]);
    assert!(
        bench.placement(1).reason.starts_with("the maximum of 2 nodes is reached"),
        "{}",
        bench.placement(1).reason
    );
}

#[test]
fn nodes_must_agree_on_the_numbers_of_workers() {
    let mut bench = joined(&settings(6, 10), &[4]);
    for (other, asks) in [(settings(6, 12), "6 to 12 workers"), (Settings::new(1, 1000), "any number of workers")] {
        bench.greet(9, hello(9, &other), 9);
        let expected = format!(
            "host:9 asks for {asks}, but run `job` was opened for 6 to 10 workers: give every node the same `min_workers` and \
             `max_workers`"
        );
        assert_eq!(bench.rejection(9), expected);
    }
    for bounds in [(0, 1), (3, 2), (1, u32::MAX)] {
        bench.greet(9, hello(9, &settings(bounds.0, bounds.1)), 9);
        assert!(bench.rejection(9).starts_with("min_workers and max_workers are"), "{}", bench.rejection(9));
    }
}

#[test]
fn an_agent_that_does_not_report_its_number_of_workers_is_refused() {
    let settings = settings(1, 10);
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings), 1);
    bench.send(
        1,
        NodeMessage::Join(Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers: None,
            health: Default::default(),
        }),
    );
    assert!(bench.rejection(1).contains("does not report how many it has"), "{}", bench.rejection(1));
}

/// Members tell a restarted coordinator how many workers their world has: a newcomer is no reason to interrupt a full one.
#[test]
fn a_restarted_coordinator_knows_whether_the_world_is_full() {
    let settings = settings(1, 6);
    for (world_workers, full) in [(6, true), (4, false)] {
        let mut bench = Bench::new();
        let placed = |rank| Placed {
            round: Round(4),
            rank,
            world_size: 2,
            world: 7,
            active: true,
            restart: 0,
            host: None,
            began_with: Generation::default(),
        };
        for node in 1..=2_u64 {
            let placed = Some(placed(node as u32 - 1));
            let member = Hello { placed, world_workers: Some(world_workers), ..hello(node, &settings) };
            bench.greet(node, member, node as u8);
        }
        bench.greet(3, hello(3, &settings), 3);
        bench.send(3, offers(0, 2));
        assert_eq!(is_spare(&bench, 3), full, "{:?}", bench.last(3));
    }
}

/// The node ends survivors without a place. Those of other nodes go on.
#[test]
fn survivors_without_a_rank_do_not_count() {
    let settings = settings(1, 6);
    let mut bench = joined(&settings, &[4, 2]);
    let returns = |survivors: &[(u32, u64)]| {
        let NodeMessage::Join(join) = offers(1, 4) else { unreachable!() };
        let survivors: Vec<_> = survivors.iter().map(|&(local_rank, commit)| (local_rank, Some(commit))).collect();
        let workers = JoinWorkers { survival: survived(1, &survivors), ..join.workers.unwrap() };
        NodeMessage::Join(Join { workers: Some(workers), ..join })
    };
    // The second node has more workers than it has offered before. There is room for two of them.
    bench.send(1, returns(&[(0, 3), (1, 3), (2, 3), (3, 3)]));
    bench.send(2, returns(&[(0, 2), (1, 2), (2, 9)]));
    assert_eq!(ranks_of(&bench, [1, 2]), [(4, 0), (2, 4)]);
    let resume = &bench.placement(1).resume;
    assert!(matches!(resume, Some(Resume::Continue { source: 0, sync: true, survivors: 6, .. })), "{resume:?}");
}

/// A newcomer that may start its workers before it joins gets the number of workers for which there is room.
#[test]
fn a_newcomer_gets_the_free_slots_of_a_running_world() {
    let settings = settings(1, 6);
    for (offered, room) in [([2, 2], Some(2)), ([3, 3], None)] {
        let mut bench = joined(&settings, &offered);
        bench.pass(settings.last_call_timeout);
        for node in 1..=2 {
            bench.send(node, NodeMessage::NoProcessGroup { round: Round(1) });
            bench.send(node, NodeMessage::Attending { round: Round(1) });
        }
        bench.greet(3, hello(3, &settings), 3);
        let CoordinatorMessage::Welcome { running: Some(running), .. } = bench.last(3) else {
            panic!("{:?}", bench.last(3))
        };
        assert_eq!(running.room, room);
        let placement = running.next_placement(4);
        let expected = room.unwrap_or(4);
        assert_eq!(placement.workers_of(4), expected);
        assert_eq!(placement.workers.map(|ranks| ranks.world_size), Some(offered.iter().sum::<u32>() + expected));
    }
}

// The node's side.

fn sized(local_world_size: u32) -> CoordinatorMessage {
    let workers = WorkerRanks { first_rank: 4, world_size: 6, first_role_rank: 4, role_world_size: 6 };
    CoordinatorMessage::Complete(Placement {
        round: Round(1),
        rank: 1,
        world_size: 2,
        world: 9,
        master_addr: "a".into(),
        master_port: 2,
        reason: "w".into(),
        restart: 0,
        workers: Some(workers),
        host: None,
        local_world_size: Some(local_world_size),
        resume: None,
        members: None,
    })
}

#[test]
fn a_node_starts_as_many_workers_as_it_has_ranks_but_no_more_than_it_has_offered() {
    for (reported, starts) in [(2, Some(2)), (4, Some(4)), (5, None), (0, None), (u32::MAX, None)] {
        let now = Instant::now();
        let mut node = NodeMachine::new(hello(1, &settings(1, 6)), "head:1".into(), Duration::from_secs(9), now);
        node.on_connected(now);
        node.on_message(
            CoordinatorMessage::Welcome { addr: "10.0.0.7".into(), hosted: false, running: None, wants_replay: false },
            now,
        );
        node.join(1, None, Some(JoinWorkers::new("trainer", 4)), Duration::from_secs(9), now);
        let mut frame = BytesMut::new();
        encode_frame(&sized(reported), &mut frame);
        let message = decode_frame::<CoordinatorMessage>(&mut frame).unwrap().unwrap();
        node.on_message(message, now);
        let placement = node.take_outcome().expect("answered").expect("placed");
        assert_eq!(placement.local_world_size, starts, "told {reported}");
        assert_eq!(placement.workers_of(4), starts.unwrap_or(4));
    }
}
