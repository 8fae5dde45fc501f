//! Forming the first round.

use std::time::Duration;

use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs_sim::coordinator::Action;

use super::job::{Job, ms, seconds};

use super::raw;

/// kubeflow/trainer #2000, #1638: 200 nodes start staggered over minutes, and form one round without a time-out.
#[test]
fn a_staggered_start_ends_in_one_round() {
    let mut job = Job::new(200, 200, 200);
    for host in 0..200 {
        job.start(seconds(host as u64), host);
    }
    assert_eq!(job.world(ms(198_999)), (0, vec![None; 200]));
    assert_eq!(job.world(seconds(199)).0, 1);
    assert_eq!(job.0.ledger().rounds, 1);
}

/// The same with `--nnodes=1:200`: newcomers after the first round are batched by a last call.
#[test]
fn a_staggered_elastic_start_forms_a_round_per_last_call_at_most() {
    let mut job = Job::new(200, 1, 200);
    for host in 0..200 {
        job.start(seconds(host as u64), host);
    }
    let (_, world) = job.world(seconds(300));
    assert!(world.iter().all(Option::is_some));
    // 200 s of arrivals in batches of 30 s, and the round that completes at the maximum of 200.
    assert!(job.0.ledger().rounds <= 200 / 30 + 2, "{} rounds", job.0.ledger().rounds);
}

/// PR #185930, PR #117066: the cost grew with the square of N. Here it is linear, with only heartbeats at rest.
#[test]
fn a_thousand_nodes_at_one_instant_cost_a_constant_each() {
    const N: u64 = 1_000;
    let mut job = Job::started(N as usize, N as u32, N as u32);
    let (round, world) = job.world(Duration::ZERO);
    assert_eq!((round, world), (1, (0..N as u32).map(Some).collect()));
    // Hello and Join; Welcome and Complete.
    assert_eq!(job.0.ledger().messages, (2 * N, 2 * N));
    // At rest a heartbeat and its answer per 5 s.
    job.world(seconds(100));
    assert_eq!(job.0.ledger().messages, (2 * N + 20 * N, 2 * N + 20 * N));
    // A loss: one Status to each survivor; then Join and Complete.
    let before = job.0.ledger().messages;
    job.at(seconds(101), Action::Terminate(7));
    job.start(seconds(102), 7);
    assert_eq!(job.world(seconds(103)).0, 2);
    let (from, to) = job.0.ledger().messages;
    assert!(from - before.0 <= 2 * N, "{} messages from nodes", from - before.0);
    assert!(to - before.1 <= 3 * N, "{} messages to nodes", to - before.1);
}

/// The exact times at which a first round closes.
#[test]
fn a_round_closes_at_these_times() {
    // min, max, starts (s), and when the round is complete (ms).
    for (min, max, starts, complete_at) in [
        (3, 3, vec![0, 0, 0], 0),
        // At the maximum it closes at once, during the last call.
        (1, 3, vec![0, 5, 7], 7_000),
        // The last call begins when the minimum is reached, and later nodes do not prolong it.
        (2, 4, vec![0, 10], 40_000),
        (2, 4, vec![0, 10, 39], 40_000),
        (1, 4, vec![3], 33_000),
    ] {
        let mut job = Job::new(starts.len(), min, max);
        for (host, at) in starts.iter().enumerate() {
            job.start(seconds(*at), host);
        }
        if complete_at > 0 {
            assert_eq!(job.world(ms(complete_at - 1)).0, 0, "{min}:{max} {starts:?}");
        }
        assert_eq!(job.world(ms(complete_at)).0, 1, "{min}:{max} {starts:?}");
    }
}

/// #91943: the time-out's message was empty. Here it names the nodes that joined, and the number missing.
#[test]
fn a_join_timeout_names_the_nodes_that_joined_and_the_number_missing() {
    let mut job = Job::new(4, 4, 8);
    job.at(seconds(0), Action::Start(0, seconds(25)));
    job.start(seconds(0), 1);
    job.world(seconds(25));
    let text = job.join_error(0).to_string();
    assert_eq!(
        text,
        "no round completed within 25.0s: round 1: 2 of 4 to 8 nodes have joined (10.0.0.1 (host0:1), 10.0.0.2 (host1:2)); \
         2 more needed",
    );
}

/// Nodes with different `--nnodes` formed no world, and no message said why.
#[test]
fn different_node_counts_are_refused_naming_both() {
    let mut machine = elastic_rs::rendezvous::coordinator::machine::Machine::new();
    let now = std::time::Instant::now();
    raw::hello(&mut machine, 1, Settings::new(2, 4), now);
    raw::join(&mut machine, 1, 0, now);
    raw::hello(&mut machine, 2, Settings::new(3, 3), now);
    let reported = raw::reported(&mut machine, 2);
    assert!(reported.contains("node2 asks for 3 nodes, but run `job` was opened for 2 to 4"), "{reported}");
    raw::hello(&mut machine, 3, Settings { max_restarts: Some(3), ..Settings::new(2, 4) }, now);
    let reported = raw::reported(&mut machine, 3);
    let both = "node3 asks for 3 restarts of the job, but run `job` was opened for restarts counted by each node";
    assert!(reported.contains(both), "{reported}");
}

/// kubeflow/trainer #2000, #1638, ten times as large: 2,000 nodes come one after the other over four minutes.
#[test]
fn two_thousand_nodes_start_staggered_and_form_one_round() {
    const N: u64 = 2_000;
    let mut job = Job::quiet(N as usize, N as u32, N as u32);
    for host in 0..N {
        job.start(ms(120 * host), host as usize);
    }
    let last = ms(120 * (N - 1));
    assert_eq!(job.world(last - ms(1)).0, 0);
    assert_eq!(job.world(last), (1, (0..N as u32).map(Some).collect()));
    // Hello and Join, Welcome and Complete, and heartbeats of waiting nodes: 120 s on average, one every 5 s, and an early one.
    let (from, to) = job.0.ledger().messages;
    assert!(from <= 2 * N + 25 * N && to <= 2 * N + 25 * N, "{from} and {to} messages");
}

/// As above, but all nodes start at one instant.
#[test]
fn two_thousand_nodes_start_at_one_instant() {
    const N: u64 = 2_000;
    let mut job = Job::quiet(N as usize, N as u32, N as u32);
    job.0.start_all(Duration::ZERO);
    assert_eq!(job.world(Duration::ZERO), (1, (0..N as u32).map(Some).collect()));
    assert_eq!(job.0.ledger().messages, (2 * N, 2 * N));
}
