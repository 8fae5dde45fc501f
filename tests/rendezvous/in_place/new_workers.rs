//! With `restart_window`: workers that are new among others that go on, and fail before their world's first step.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{Failure, NodeMessage, Progress, Round, Survival, Survivor};
use elastic_rs::rendezvous::messages::settings::{Rules, Settings};

use super::SECOND;
use crate::bench::{Bench, back, failure, hello, join, joins};

const HOUR: Duration = Duration::from_secs(3600);
/// The global ranks of node 3's workers.
const NEW: [u32; 2] = [4, 5];

/// Nodes 1 to 3 with two workers each, as members of round 2. Those of nodes 1 and 2 have lived on, those of node 3 are new.
fn with_new_workers(min: u32) -> Bench {
    let settings = Settings {
        max_restarts: Some(2),
        settle_timeout: Duration::ZERO,
        rules: Rules { restart_window: Some(HOUR), ..Rules::default() },
        ..Settings::new(min, 3)
    };
    let mut bench = Bench::new();
    for node in 1..=3 {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    (1..=3).for_each(|node| bench.send(node, NodeMessage::Attending { round: Round(1) }));
    bench.send(3, NodeMessage::Failed { round: Round(1), failure: failure() });
    next_world(&mut bench, &[1, 2, 3]);
    assert_eq!((bench.run().round(), bench.run().restart()), (Round(2), 1));
    bench
}

/// These nodes join again. The workers of nodes 1 and 2 have lived on.
fn next_world(bench: &mut Bench, nodes: &[u64]) {
    let round = bench.run().round().0;
    for node in nodes {
        let lived_on: &[_] = if *node == 3 { &[] } else { &[(0, Some(7)), (1, Some(7))] };
        bench.send(*node, back(round, lived_on, None));
    }
    bench.pass(Duration::ZERO);
}

fn fails(bench: &mut Bench, node: u64, global_rank: u32, lived: Duration) {
    let failure = Failure { global_rank, local_rank: global_rank % 2, lived, ..*failure() };
    bench.send(node, NodeMessage::Failed { round: bench.run().round(), failure: Box::new(failure) });
}

fn steps(bench: &mut Bench, node: u64) {
    let first = Progress { after_us: 1, formed_us: [None; 2], step: None, before: None, step_time_us: None };
    bench.send(node, NodeMessage::Progress { round: bench.run().round(), first });
}

/// How many restarts after crashes are left of two.
fn left(bench: &Bench) -> u32 {
    bench.run().state(bench.now).budget.unwrap().crashes
}

#[test]
fn new_workers_cost_the_job_nothing_and_their_host_is_out_after_three() {
    let mut bench = with_new_workers(2);
    for (count, rank) in [(1, NEW[0]), (2, NEW[1]), (3, NEW[0])] {
        fails(&mut bench, 3, rank, SECOND);
        let said = format!("{count} of 3 failures of new workers on host 10.0.0.3");
        assert!(
            bench.notes.iter().any(|note| note.contains("; not counted, since it was new") && note.contains(&said))
        );
        next_world(&mut bench, &[1, 2, 3]);
        assert_eq!((bench.run().round(), bench.run().restart(), left(&bench)), (Round(2 + count), 1, 1));
    }
    let out = bench.run().exclusions(bench.now);
    assert_eq!(out.iter().map(|host| host.addr.as_str()).collect::<Vec<_>>(), ["10.0.0.3"]);
    let text = out[0].out.why.text();
    assert!(text.starts_with("3 workers that were new there failed before their first step within 3600s"), "{text}");
    assert!(bench.is_placed(1, 5) && bench.is_placed(2, 5), "the others go on");
    assert!(bench.rejection(3).contains("the state of the others may not fit there"), "{}", bench.rejection(3));
}

/// A node that joins a running job starts its workers first, and joins with them.
#[test]
fn a_worker_that_was_started_before_its_node_joined_is_new() {
    let mut bench = with_new_workers(2);
    fails(&mut bench, 3, NEW[0], SECOND);
    let started = |local_rank| Survivor { local_rank, generation: None, commit: None };
    bench.send(3, joins(2, Survival::Attended(vec![started(0), started(1)]), None));
    next_world(&mut bench, &[1, 2]);
    assert_eq!(bench.run().round(), Round(3));
    fails(&mut bench, 3, NEW[1], SECOND);
    assert_eq!((bench.run().restart(), left(&bench)), (1, 1));
}

#[test]
fn failures_of_new_workers_are_forgotten_after_the_window() {
    let mut bench = with_new_workers(2);
    for _ in 0..4 {
        fails(&mut bench, 3, NEW[0], SECOND);
        next_world(&mut bench, &[1, 2, 3]);
        bench.pass(HOUR / 2);
    }
    assert!(bench.run().exclusions(bench.now).is_empty() && bench.run().restart() == 1);
}

#[test]
fn what_counts_as_ever() {
    type Case = (&'static str, u32, fn(&mut Bench));
    let cases: [Case; 5] = [
        ("a worker that had lived on", 2, |bench| fails(bench, 2, 3, SECOND)),
        ("a new worker after a step of its world", 2, |bench| {
            steps(bench, 1);
            fails(bench, 3, NEW[0], SECOND);
        }),
        ("a new worker of a script that reports no steps, after a while", 2, |bench| {
            fails(bench, 3, NEW[0], 60 * SECOND);
        }),
        ("a new worker without whose host there is no world", 3, |bench| fails(bench, 3, NEW[0], SECOND)),
        ("a new worker in a world in which all are new", 2, |bench| {
            fails(bench, 2, 3, SECOND);
            (1..=3).for_each(|node| bench.send(node, back(2, &[], None)));
            bench.pass(HOUR);
            fails(bench, 3, NEW[0], SECOND);
        }),
    ];
    for (which, min, happens) in cases {
        let mut bench = with_new_workers(min);
        happens(&mut bench);
        let reason = bench.run().reason().unwrap_or_default().to_owned();
        assert!(!bench.notes.iter().any(|note| note.contains("not counted")), "{which}: {reason}");
        assert!(bench.run().restart() >= 2, "{which}: {reason}");
    }
}
