//! Failures and successes that our agents report.

use std::time::Duration;

use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs_sim::coordinator::host::Exit;
use elastic_rs_sim::coordinator::{Action, Options};

use super::job::{Job, job_with_budget, ms, ranks, restarts, seconds};

/// #108158, #135712: counters of two agents diverged. Here the restart number is the job's, the same on every node.
#[test]
fn a_failure_raises_the_restart_number_of_all_and_a_loss_does_not() {
    let mut job = job_with_budget(3, 2, Some(5));
    job.at(seconds(10), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(10)), (2, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [1, 1, 1]);
    job.at(seconds(20), Action::Kill(0));
    assert_eq!(job.world(seconds(22)).0, 3);
    assert_eq!(restarts(&job), [1, 1]);
    job.start(seconds(30), 0);
    job.world(seconds(30));
    assert_eq!(restarts(&job), [1, 1, 1], "a newcomer gets the number too");
    job.at(seconds(40), Action::ReportFailure(0));
    job.world(seconds(40));
    assert_eq!(restarts(&job), [2, 2, 2]);
}

/// Horovod #3014, #3264: all workers fail at once on all nodes. That is one restart with one cause.
#[test]
fn all_nodes_fail_at_once_and_one_restart_is_counted() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.settings.max_restarts = Some(1);
    // Messages take 50 ms, so that all nodes have failed before any of them gets an answer.
    options.delay = (ms(50), ms(50));
    let mut job = Job::with(options);
    job.0.start_all(Duration::ZERO);
    for host in [2, 0, 1] {
        job.at(seconds(10), Action::ReportFailure(host));
    }
    assert_eq!(job.world(seconds(12)), (2, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [1, 1, 1]);
}

/// #76287, #108158: with no restarts left every node is notified at once, with host, rank and exit of the first cause.
#[test]
fn a_failure_beyond_the_budget_ends_the_job_everywhere_with_its_cause() {
    let mut job = job_with_budget(3, 3, Some(1));
    job.at(seconds(10), Action::ReportFailure(0));
    job.at(seconds(20), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(20)), (0, vec![None; 3]));
    for host in 0..3 {
        let [Exit::Closed(view)] = job.exits(host) else {
            panic!("{:?}", job.exits(host));
        };
        for reported in ["10.0.0.2 (host1:2)", "pid: 1001", "exit code 7", "all 1 restarts are used up (max_restarts)"]
        {
            assert!(view.contains(reported), "{reported} is not in {view}");
        }
    }
}

/// A worker that notices its peer's end before the coordinator does is not the cause.
#[test]
fn a_failure_while_a_member_is_out_of_reach_costs_no_restart() {
    let mut job = job_with_budget(3, 2, Some(0));
    job.at(seconds(10), Action::Kill(1));
    job.at(ms(10_100), Action::ReportFailure(0));
    assert_eq!(job.world(seconds(13)), (2, vec![Some(0), None, Some(1)]));
    assert_eq!(restarts(&job), [0, 0]);
}

/// A failure that occurs while the coordinator is away is reported to its successor, and the restart number is kept.
#[test]
fn a_restarted_coordinator_goes_on_with_the_restart_number() {
    let mut job = job_with_budget(3, 3, Some(3));
    job.at(seconds(10), Action::ReportFailure(1));
    job.at(seconds(20), Action::CrashCoordinator);
    job.at(seconds(21), Action::ReportFailure(2));
    job.at(seconds(30), Action::StartCoordinator);
    assert_eq!(job.world(seconds(40)), (3, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [1, 1, 1], "the second failure may have been the consequence of a member's loss");
    job.at(seconds(50), Action::ReportFailure(0));
    assert_eq!(job.world(seconds(60)), (4, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [2, 2, 2]);
}

/// #69520: the exit barrier counted nodes that were gone. Here the last live member ends it for all nodes at once.
#[test]
fn the_job_ends_when_the_last_live_member_is_done() {
    let mut job = job_with_budget(4, 2, Some(0));
    job.at(seconds(10), Action::ReportDone(0));
    job.at(seconds(20), Action::ReportDone(1));
    // A finished node may go without disturbing the others.
    job.at(seconds(30), Action::Kill(1));
    job.at(seconds(3000), Action::ReportDone(2));
    assert_eq!(job.world(seconds(3600)), (1, vec![Some(0), None, Some(2), Some(3)]));
    // This node is lost before it has finished. The job still succeeds, because all others have finished.
    job.at(seconds(3600), Action::Kill(3));
    assert_eq!(job.world(ms(3_600_499)).0, 1);
    assert_eq!(job.world(ms(3_600_500)), (0, vec![None; 4]));
    for host in [0, 2] {
        let [Exit::Closed(view)] = job.exits(host) else { panic!("{:?}", job.exits(host)) };
        assert!(view.contains("all_done: true"), "{view}");
    }
}

/// A finished node restarts its workers with the others when one of them fails.
#[test]
fn a_node_that_is_done_begins_anew_when_another_fails() {
    let mut job = job_with_budget(3, 3, Some(1));
    job.at(seconds(10), Action::ReportDone(0));
    job.at(seconds(20), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(20)), (2, ranks(&[0, 1, 2])));
    for host in 0..3 {
        job.at(seconds(30), Action::ReportDone(host));
    }
    assert_eq!(job.world(seconds(30)), (0, vec![None; 3]));
}

/// A newcomer does not restart a job in which a node has finished.
#[test]
fn a_newcomer_does_not_disturb_a_job_that_is_ending() {
    let mut job = job_with_budget(3, 1, Some(0));
    job.at(seconds(5), Action::Terminate(2));
    job.world(seconds(10));
    job.at(seconds(11), Action::ReportDone(0));
    job.start(seconds(12), 2);
    assert_eq!(job.world(seconds(100)), (2, vec![Some(0), Some(1), None]));
    job.at(seconds(100), Action::ReportDone(1));
    job.world(seconds(100));
    assert!(matches!(job.exits(2), [Exit::Terminated, Exit::Join(JoinError::Closed { spare: true, .. })]));
}

/// The ranks of workers come with the completion.
#[test]
fn ranks_of_workers_come_with_the_placement() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.node_ranks = [(0, 2), (1, 1), (2, 0)].into();
    let mut job = Job::with(options);
    job.0.start_all(Duration::ZERO);
    assert_eq!(job.world(seconds(1)).1, ranks(&[2, 1, 0]));
    // Host n has 1 + n workers.
    let workers =
        |host| job.0.running(host).and_then(|placement| placement.workers).map(|w| (w.first_rank, w.world_size));
    assert_eq!([workers(2), workers(1), workers(0)], [Some((0, 6)), Some((3, 6)), Some((5, 6))]);
}
