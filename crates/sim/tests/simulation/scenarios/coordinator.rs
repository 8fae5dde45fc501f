//! A coordinator that stalls, dies, or is cut off, and messages that arrive too late.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::Round;
use elastic_rs::rendezvous::messages::settings::{OnPartition, Settings};
use elastic_rs_sim::coordinator::{Action, Options};
use elastic_rs_sim::engine::paths::{End, Partition};

use super::job::{Job, ms, ranks, seconds};

use super::raw;

// The coordinator.

/// #67616: after a stall, a store expired all nodes. Here a late tick renews all leases.
#[test]
fn a_coordinator_that_stood_still_loses_nobody() {
    let mut job = Job::started(4, 2, 4);
    job.at(ms(10_001), Action::StallCoordinator(seconds(14)));
    job.at(ms(10_002), Action::Kill(3));
    assert_eq!(job.world(ms(24_400)), (1, vec![Some(0), Some(1), Some(2), None]));
    // Only the dead node is lost, after its grace and the settle window.
    assert_eq!(job.world(seconds(27)), (2, vec![Some(0), Some(1), Some(2), None]));
}

/// #67616: the store's host was frozen, then a node joined, and a world of 3 and one of 1 ran at once. Here a node without answers
/// stops its workers when its lease ends. When the coordinator continues, one world forms, with the same ranks.
#[test]
fn a_coordinator_frozen_for_longer_than_the_lease_never_makes_two_worlds() {
    let mut job = Job::new(4, 2, 4);
    for host in 0..3 {
        job.start(seconds(0), host);
    }
    assert_eq!(job.world(seconds(39)), (1, vec![Some(0), Some(1), Some(2), None]));
    // Heartbeats are sent every 5 s from the connection on, so the last answered one at 40 s.
    job.at(ms(40_001), Action::StallCoordinator(seconds(30)));
    job.start(seconds(60), 3);
    assert_eq!(job.world(ms(54_999)), (1, vec![Some(0), Some(1), Some(2), None]));
    assert_eq!(job.world(seconds(55)), (0, vec![None; 4]));
    // The first nodes that are back wait for the others for the settle window only.
    let (round, world) = job.world(seconds(80));
    assert_eq!((round <= 3, world), (true, ranks(&[0, 1, 2, 3])));
}

/// PR #168242, #118891: the store's host dies and comes back. Workers never notice.
#[test]
fn a_coordinator_that_comes_back_disturbs_nobody() {
    let mut job = Job::started(4, 2, 4);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(38), Action::StartCoordinator);
    assert_eq!(job.world(seconds(200)), (1, ranks(&[0, 1, 2, 3])));
    let run = job.0.run().expect("the nodes have re-attached");
    assert_eq!(run.round(), Round(1));
    // The coordinator has recovered its state: a loss is noticed, ranks are kept, and the round number rises.
    job.at(seconds(200), Action::Kill(0));
    assert_eq!(job.world(seconds(202)), (2, vec![None, Some(0), Some(1), Some(2)]));
}

/// As above, with a spare: it gets no place until all members have had time to report.
#[test]
fn a_spare_waits_while_a_restarted_coordinator_collects_its_members() {
    let mut job = Job::started(4, 2, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(20), Action::StartCoordinator);
    assert_eq!(job.world(seconds(100)), (1, vec![Some(0), Some(1), Some(2), None]));
    assert!(job.waits(3));
}

/// As above, but one member died with the coordinator. One lease later the others re-form with the spare.
#[test]
fn a_member_that_does_not_report_to_a_restarted_coordinator_is_replaced() {
    let mut job = Job::started(4, 2, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(10), Action::Kill(1));
    job.at(seconds(20), Action::StartCoordinator);
    // Nodes reconnect within 2 s. The lease is 15 s.
    assert_eq!(job.world(ms(34_900)), (1, vec![Some(0), None, Some(2), None]));
    assert_eq!(job.world(ms(37_100)), (2, vec![Some(0), None, Some(2), Some(1)]));
}

/// torchft manager: a decider restarted with its counters at zero, and used old prefixes again.
#[test]
fn round_numbers_never_go_back_when_the_coordinator_restarts() {
    let mut job = Job::started(3, 3, 3);
    for i in 1..=4 {
        job.at(seconds(10 * i), Action::FailWorkers(0));
    }
    assert_eq!(job.world(seconds(50)).0, 5);
    job.at(seconds(50), Action::CrashCoordinator);
    // All workers fail while it is away, and the nodes join a coordinator without state.
    for host in 0..3 {
        job.at(seconds(51), Action::FailWorkers(host));
    }
    job.at(seconds(60), Action::StartCoordinator);
    assert_eq!(job.world(seconds(70)), (6, ranks(&[0, 1, 2])));
}

/// torchft manager: an error at the decider was not passed on, and waiters hung. `check_answers` checks the answers at each exit.
#[test]
fn every_waiter_is_answered_when_the_coordinator_goes_away_for_good() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.coordinator_timeout = seconds(60);
    let mut job = Job::with(options);
    job.start(seconds(0), 0);
    job.start(seconds(0), 1);
    job.at(seconds(10), Action::CrashCoordinator);
    // This node never reaches a coordinator. Its join times out with an error that says so.
    job.at(seconds(11), Action::Start(2, seconds(30)));
    job.world(seconds(70));
    for host in [0, 1] {
        let text = job.join_error(host).to_string();
        assert_eq!(
            text,
            "the coordinator at coordinator:29400 has been out of reach for 60.0s (coordinator_timeout): connection refused"
        );
    }
    let text = job.join_error(2).to_string();
    assert_eq!(text, "could not reach the coordinator at coordinator:29400 in 30.0s: connection refused");
}

/// #69197: the host starts 120 s late; the others keep trying.
#[test]
fn nodes_keep_trying_until_the_coordinator_is_there() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(0), Action::CrashCoordinator);
    job.at(seconds(120), Action::StartCoordinator);
    assert_eq!(job.world(seconds(122)), (1, ranks(&[0, 1, 2])));
}

/// torchft PR #70: a split leaves two halves with at least min nodes each. The half without the coordinator forms nothing.
#[test]
fn the_half_without_the_coordinator_forms_no_world() {
    let mut job = Job::started(4, 2, 4);
    for host in [2, 3] {
        for end in [End::Node, End::Coordinator] {
            job.at(seconds(10), Action::Cut(host, end, seconds(60), Partition::Lost));
        }
    }
    // They were last heard from at 5 s or 10 s. Their lease is 15 s, and two worlds never run at once.
    job.world(ms(19_999));
    assert_eq!(job.world(ms(26_300)), (2, vec![Some(0), Some(1), None, None]));
    assert!(job.waits(2) && job.waits(3), "they form no world by themselves");
    // When the network is healed, they are admitted again.
    assert_eq!(job.world(seconds(110)), (3, ranks(&[0, 1, 2, 3])));
}

/// The same with a network cut in one direction.
#[test]
fn a_node_cut_off_one_way_stops_before_the_others_go_on() {
    for end in [End::Node, End::Coordinator] {
        let mut job = Job::started(3, 2, 3);
        job.at(ms(10_001), Action::Cut(2, end, seconds(60), Partition::Lost));
        assert_eq!(job.world(ms(24_999)), (1, ranks(&[0, 1, 2])), "{end:?}");
        let process = |job: &Job| job.0.hosts()[2].process.as_ref().map(|process| process.machine.view().clone());
        assert_eq!(process(&job).expect("it lives").fenced, None);
        // 15 s after the last message that was answered.
        let (_, world) = job.world(seconds(25));
        assert_eq!(world[2], None, "{end:?}");
        assert_eq!(job.world(seconds(33)), (2, vec![Some(0), Some(1), None]), "{end:?}");
    }
}

/// `on_partition=continue`: workers that are cut off run on, and stop when their node hears that the others went on.
#[test]
fn a_node_that_may_go_on_when_cut_off_does() {
    let mut settings = Settings::new(2, 3);
    settings.on_partition = OnPartition::Continue;
    let mut job = Job::with(Options::exact(3, settings));
    job.0.start_all(Duration::ZERO);
    for end in [End::Node, End::Coordinator] {
        job.at(seconds(10), Action::Cut(2, end, seconds(60), Partition::Lost));
    }
    job.0.run_until(seconds(60)).expect("invariants hold");
    assert_eq!(job.0.running(2).map(|placement| placement.round.0), Some(1));
    assert_eq!(job.0.running(0).map(|placement| placement.round.0), Some(2));
    assert_eq!(job.world(seconds(110)), (3, ranks(&[0, 1, 2])));
}

/// A node that was stopped (SIGSTOP) for longer than its lease stops its workers as soon as it continues, before it hears that the
/// others went on without it.
#[test]
fn a_stalled_node_finds_at_once_that_its_lease_is_over() {
    let mut job = Job::started(3, 2, 3);
    job.at(ms(10_001), Action::Stall(2, seconds(40)));
    // Messages do not reach it either.
    job.at(seconds(30), Action::Cut(2, End::Node, seconds(60), Partition::Held));
    job.0.run_until(ms(50_001)).expect("invariants hold");
    assert_eq!(job.0.running(2), None);
    assert_eq!(job.world(seconds(150)).1, ranks(&[0, 1, 2]));
}

/// A node whose connection is refused can conclude that no coordinator is running, so its workers run on for minutes.
#[test]
fn a_coordinator_that_is_gone_for_longer_than_a_lease_stops_no_workers() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(200), Action::StartCoordinator);
    assert_eq!(job.world(seconds(300)), (1, ranks(&[0, 1, 2])));
}

// Late messages.

/// NVRx 6d7b54d: a message of round N arrived in N+1 and was applied.
#[test]
fn a_join_of_an_earlier_round_is_answered_and_not_applied() {
    let mut machine = elastic_rs::rendezvous::coordinator::machine::Machine::new();
    let now = std::time::Instant::now();
    for node in [1, 2] {
        raw::hello(&mut machine, node, Settings::new(2, 2), now);
        raw::join(&mut machine, node, 0, now);
    }
    assert!(raw::reported(&mut machine, 1).contains("round: Round(1), rank: 0"));
    // Node 1's connection broke before the answer arrived, and it joins again.
    raw::join(&mut machine, 1, 0, now);
    let reported = raw::reported(&mut machine, 1);
    assert!(reported.contains("round: Round(1), rank: 0"), "{reported}");
    let run = machine.run("job").expect("the run is known");
    assert_eq!(run.round(), Round(1));
    assert!(run.nodes().all(|(_, status, _)| *status == elastic_rs::rendezvous::run::Status::Active));
}

/// A place that was given before a withdrawal was read may arrive after the node's next join. If it were taken for the answer, the node
/// would run round 1 while the others run round 2.
#[test]
fn a_placement_from_before_a_withdrawal_is_no_answer_to_the_next_join() {
    let mut options = Options::exact(2, Settings::new(2, 2));
    options.rejoin = true;
    let mut job = Job::with(options);
    job.at(seconds(0), Action::Start(0, seconds(10)));
    // The coordinator's messages reach host0 five seconds late.
    job.at(seconds(9), Action::Cut(0, End::Node, seconds(5), Partition::Held));
    job.start(ms(9_500), 1);
    assert_eq!(job.world(seconds(30)), (2, vec![Some(1), Some(0)]));
}
