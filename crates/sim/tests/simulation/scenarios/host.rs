//! A coordinator in the process of one of the job's agents, as with `elastic-run` and `torchrun`. The two are stopped together, and end
//! together.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::Verdict;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs_sim::coordinator::host::Exit;
use elastic_rs_sim::coordinator::{Action, Options};
use elastic_rs_sim::engine::paths::{End, Partition};

use super::job::{Job, ms, ranks, seconds};

/// A job whose first host has the coordinator. That agent starts at once, the others a second later.
fn hosted(hosts: usize, min: u32) -> Job {
    hosted_with(Options::exact(hosts, Settings::new(min, hosts as u32)))
}

fn hosted_with(options: Options) -> Job {
    let hosts = options.hosts;
    let mut job = Job::with(Options { coordinator_on: Some(0), ..options });
    job.start(seconds(0), 0);
    (1..hosts).for_each(|host| job.start(seconds(1), host));
    job
}

fn fenced(job: &Job, host: usize) -> Option<String> {
    job.0.hosts()[host].process.as_ref().and_then(|process| process.machine.view().fenced.clone())
}

// Stalls (Ctrl-Z, a frozen container, a debugger).

/// No world can form without the coordinator, which was stalled together with the node.
#[test]
fn a_job_of_one_node_that_was_stopped_for_longer_than_its_lease_runs_on() {
    // The lease is 15 s, counted from the last heartbeat. The stalls end just before, at and after its end.
    for paused in [14_700, 14_990, 15_000, 15_010, 15_240, 15_300, 15_490, 15_510, 17_000, 3_600_000] {
        let mut job = hosted(1, 1);
        job.at(ms(10_001), Action::Stall(0, ms(paused)));
        assert_eq!(job.world(ms(paused + 20_000)), (1, ranks(&[0])), "{paused} ms");
        // It stalls again before the coordinator has heard from it.
        job.at(ms(paused + 20_001), Action::Stall(0, seconds(20)));
        job.at(ms(paused + 40_100), Action::Stall(0, seconds(20)));
        assert_eq!(job.world(ms(paused + 70_000)), (1, ranks(&[0])), "{paused} ms");
        assert_eq!(fenced(&job, 0), None);
    }
}

/// The other nodes are cut off meanwhile, and stop. The coordinator notifies the host's node that the world must re-form.
#[test]
fn a_host_that_was_stopped_for_longer_than_the_lease_is_notified_by_its_coordinator() {
    let mut job = hosted(3, 2);
    assert_eq!(job.world(seconds(10)), (1, ranks(&[0, 1, 2])));
    job.at(ms(10_001), Action::Stall(0, seconds(40)));
    job.0.run_until(seconds(49)).expect("invariants hold");
    let runs: Vec<_> = (0..3).map(|host| job.0.running(host).is_some()).collect();
    assert_eq!(runs, [true, false, false], "the others cannot know that no world forms without them");
    let (round, world) = job.world(seconds(60));
    assert_eq!((round <= 3, world), (true, ranks(&[0, 1, 2])));
    assert_eq!(fenced(&job, 0), None);
    assert!(!job.0.history().iter().any(|line| line.contains("host0") && line.contains("cut off")));
}

/// If the host's own connection is cut (a moved virtual address), its workers stop as on any other node. The coordinator goes on with the
/// nodes that it hears.
#[test]
fn a_host_that_is_cut_off_from_its_own_coordinator_stops_before_the_others_go_on() {
    for end in [End::Node, End::Coordinator] {
        let mut job = hosted(3, 2);
        job.at(ms(10_001), Action::Cut(0, end, seconds(60), Partition::Lost));
        job.world(seconds(30));
        assert_eq!(job.world(seconds(33)), (2, vec![None, Some(0), Some(1)]), "{end:?}");
    }
}

/// With `--nnodes=1` and a coordinator elsewhere, a node fences itself: a spare may take its place meanwhile.
#[test]
fn a_single_node_whose_coordinator_is_elsewhere_gives_way_to_a_spare_when_it_was_stopped() {
    let mut job = Job::started(2, 1, 1);
    job.at(ms(10_001), Action::Stall(0, seconds(40)));
    job.0.run_until(seconds(49)).expect("invariants hold");
    assert_eq!(job.0.running(1).map(|placement| placement.round.0), Some(2));
    assert_eq!(job.world(seconds(70)), (2, vec![None, Some(0)]));
}

// Killed, and started again.

/// The restarted agent listens at the same place as the killed one, which must therefore have ended. No node waits for its lease.
#[test]
fn a_host_that_is_killed_and_started_again_is_not_waited_for_as_a_member() {
    let mut job = hosted(3, 3);
    job.at(seconds(10), Action::Kill(0));
    job.start(seconds(12), 0);
    assert_eq!(job.world(ms(11_900)), (1, vec![None, Some(1), Some(2)]), "workers run on until the host is back");
    // Nodes reconnect within 2 s.
    assert_eq!(job.world(ms(14_500)), (2, ranks(&[1, 0, 2])));
    let reported = "node rank 0 of round 1 has ended with the coordinator that its process hosted";
    assert!(job.0.history().iter().any(|line| line.contains(&format!("round 1 is interrupted: {reported}"))));
}

/// The host is killed a second time before the world has formed again.
#[test]
fn a_host_that_is_killed_twice_is_not_waited_for_either() {
    let mut job = hosted(3, 3);
    job.at(seconds(10), Action::Kill(0));
    job.start(seconds(12), 0);
    job.at(ms(12_500), Action::Kill(0));
    job.start(ms(13_000), 0);
    assert_eq!(job.world(seconds(16)).1.iter().flatten().count(), 3);
}

/// A coordinator at another place cannot know that the former host has ended. That host may be cut off, and its workers may run.
#[test]
fn a_coordinator_at_another_address_waits_for_the_host_of_the_one_before() {
    let mut job = hosted(3, 2);
    job.world(seconds(10));
    job.at(seconds(10), Action::Kill(0));
    job.at(seconds(12), Action::MoveCoordinator);
    assert_eq!(job.world(seconds(26)), (1, vec![None, Some(1), Some(2)]));
    assert_eq!(job.world(seconds(31)), (2, vec![None, Some(0), Some(1)]));
}

/// The other nodes have finished, and report that right after their Hello. The job ends, and the host's workers are not restarted.
#[test]
fn members_that_had_finished_when_the_host_was_killed_end_the_job() {
    let mut job = hosted(3, 2);
    job.at(seconds(9), Action::ReportDone(1));
    job.at(seconds(9), Action::ReportDone(2));
    job.at(seconds(10), Action::Kill(0));
    job.at(seconds(12), Action::StartCoordinator);
    job.0.run_until(seconds(20)).expect("invariants hold");
    let run = job.0.run().expect("they have come back");
    assert!(matches!(run.closed(), Some(Verdict::AllDone { nodes: 2, .. })), "{:?}", run.closed());
}

// Ended by a signal.

/// Ctrl-C on the host ends the job on all nodes at once, with an error that names host and signal.
#[test]
fn ctrl_c_on_the_host_ends_the_job_for_all() {
    for min in [1, 3] {
        let mut job = hosted(3, min);
        assert_eq!(job.world(seconds(40)), (1, ranks(&[0, 1, 2])));
        job.at(seconds(40), Action::Interrupt(0));
        job.world(ms(40_100));
        for host in [1, 2] {
            assert!(
                matches!(job.exits(host), [Exit::Closed(view)] if view.contains("SIGINT")),
                "{:?}",
                job.exits(host)
            );
        }
    }
}

/// Waiting nodes are notified too: one that waits for others, and one that joins while the host ends.
#[test]
fn ctrl_c_on_the_host_ends_the_wait_of_all() {
    let mut job = Job::with(Options { coordinator_on: Some(0), ..Options::exact(4, Settings::new(3, 3)) });
    job.start(seconds(0), 0);
    job.start(seconds(1), 1);
    job.at(seconds(5), Action::Interrupt(0));
    job.start(seconds(6), 2);
    job.world(seconds(7));
    for host in [1, 2] {
        // The second one comes when the job is over already.
        let (JoinError::Closed { verdict, .. } | JoinError::Over { verdict, .. }) = job.join_error(host) else {
            panic!("{:?}", job.join_error(host))
        };
        let reported = "ended by 10.0.0.1 (host0:1): its agent got SIGINT, and its process hosted the coordinator";
        assert_eq!(verdict.to_string(), reported);
    }
}

/// A moved pod gets SIGTERM, and may come back at the same address. The others stop their workers, and wait for it.
#[test]
fn sigterm_of_the_host_stops_the_others_until_it_is_back() {
    for min in [1, 3] {
        let mut job = hosted(3, min);
        assert_eq!(job.world(seconds(40)), (1, ranks(&[0, 1, 2])));
        job.at(seconds(40), Action::Terminate(0));
        assert_eq!(job.world(ms(40_100)), (0, vec![None; 3]));
        let reported = "the coordinator at coordinator:29400 was stopped: its host 10.0.0.1 (host0:1) left: its agent got \
                    SIGTERM; no world can form until a coordinator runs there again";
        assert!(job.0.history().iter().any(|line| line.contains("Leaving")));
        // No world forms while the host ends, or without it.
        assert_eq!(job.world(seconds(99)), (0, vec![None; 3]));
        let view = job.0.hosts()[1].process.as_ref().expect("it waits").machine.view().clone();
        assert_eq!(view.reason, reported);
        job.start(seconds(100), 0);
        assert_eq!(job.world(seconds(140)).1.iter().flatten().count(), 3, "min {min}");
    }
}

/// A spare is in no world. Its end does not disturb the others' world, although it hosts the coordinator.
#[test]
fn sigterm_of_a_host_that_is_a_spare_lets_the_others_train_on() {
    let mut job = Job::with(Options { coordinator_on: Some(0), ..Options::exact(3, Settings::new(2, 2)) });
    (0..3).for_each(|host| job.start(seconds(host as u64), host));
    assert_eq!(job.world(seconds(10)), (1, ranks(&[0, 1])[..].iter().copied().chain([None]).collect()));
    // The spare takes its place while it is away.
    job.at(seconds(10), Action::Kill(0));
    job.at(seconds(12), Action::StartCoordinator);
    assert_eq!(job.world(seconds(40)), (2, vec![None, Some(0), Some(1)]));
    job.start(seconds(40), 0);
    assert_eq!(job.world(seconds(60)), (2, vec![None, Some(0), Some(1)]));
    job.at(seconds(60), Action::Terminate(0));
    assert_eq!(job.world(seconds(90)), (2, vec![None, Some(0), Some(1)]), "nothing has happened to their world");
    job.start(seconds(90), 0);
    assert_eq!(job.world(seconds(120)), (2, vec![None, Some(0), Some(1)]));
}

/// A host whose workers have succeeded may end without disturbing the others, like any other node.
#[test]
fn sigterm_of_a_host_that_has_finished_lets_the_others_train_on() {
    let mut job = hosted(3, 3);
    assert_eq!(job.world(seconds(10)), (1, ranks(&[0, 1, 2])));
    job.at(seconds(10), Action::ReportDone(0));
    job.at(seconds(20), Action::Terminate(0));
    assert_eq!(job.world(seconds(40)), (1, vec![None, Some(1), Some(2)]));
}

/// If no host comes back, the nodes end after `coordinator_timeout`, with an error that says what ended the host.
#[test]
fn nodes_that_wait_for_a_host_in_vain_name_the_cause_of_its_end() {
    let options = Options { coordinator_timeout: seconds(60), ..Options::exact(2, Settings::new(2, 2)) };
    let mut job = hosted_with(options);
    job.world(seconds(10));
    job.at(seconds(10), Action::Terminate(0));
    job.world(seconds(80));
    let text = job.join_error(1).to_string();
    let reported = "the coordinator at coordinator:29400 has been out of reach for 60.0s (coordinator_timeout): it was stopped \
                (its host 10.0.0.1 (host0:1) left: its agent got SIGTERM), and has not come back: connection refused";
    assert_eq!(text, reported);
}

/// The host's agent leaves when the job is over, like any other. No node is notified that the coordinator ends.
#[test]
fn the_end_of_the_job_is_not_taken_for_the_end_of_the_host() {
    let mut job = hosted(2, 2);
    for host in 0..2 {
        job.at(seconds(10), Action::ReportDone(host));
    }
    job.world(seconds(10) + Duration::from_millis(500));
    assert!(job.0.history().iter().all(|line| !line.contains("Leaving")));
    assert!(job.0.run().is_some_and(|run| matches!(run.closed(), Some(Verdict::AllDone { .. }))));
}
