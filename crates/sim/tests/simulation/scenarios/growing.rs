//! Nodes that join a running job, and verdicts that close it.

use elastic_rs::rendezvous::messages::message::Verdict;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs_sim::coordinator::host::Exit;
use elastic_rs_sim::coordinator::{Action, Options};

use super::job::{Job, failed, ms, ranks, seconds};

// Growing.

/// #147064: a node that joins a running job killed it or split it, depending on where its address sorts.
#[test]
fn a_third_node_joins_a_running_world_of_two_wherever_its_address_sorts() {
    for addr in ["10.0.0.0", "10.0.0.1x", "10.9.9.9"] {
        let mut options = Options::exact(3, Settings::new(1, 3));
        options.local_addrs.insert(2, addr.to_owned());
        let mut job = Job::with(options);
        job.start(seconds(0), 0);
        job.start(seconds(0), 1);
        assert_eq!(job.world(seconds(30)), (1, vec![Some(0), Some(1), None]), "{addr}");
        job.start(seconds(40), 2);
        // The maximum is reached, so the round closes at once. Survivors keep their ranks, and the newcomer is last.
        assert_eq!(job.world(seconds(40)), (2, ranks(&[0, 1, 2])), "{addr}");
        let master = |host| job.0.running(host).map(|p| (p.master_addr.clone(), p.master_port));
        assert_eq!(master(2), Some(("10.0.0.1".to_owned(), 30_000)), "{addr}");
        assert!((0..3).all(|host| master(host) == master(2)), "{addr}");
    }
}

/// NVRx PR #357: more joiners than max nodes. The surplus waits, and the job is not disturbed.
#[test]
fn surplus_nodes_wait_and_disturb_nobody() {
    let mut job = Job::new(5, 2, 3);
    for host in 0..5 {
        job.start(seconds(host as u64), host);
    }
    assert_eq!(job.world(seconds(500)), (1, vec![Some(0), Some(1), Some(2), None, None]));
    assert!(job.waits(3) && job.waits(4));
}

/// PR #117066, #114097: a spare takes over. The others restart once and keep their ranks.
#[test]
fn a_surplus_node_is_promoted_when_an_active_one_dies() {
    let mut job = Job::started(3, 2, 2);
    assert_eq!(job.world(seconds(9)), (1, vec![Some(0), Some(1), None]));
    job.at(seconds(10), Action::Kill(1));
    assert_eq!(job.world(ms(10_500)), (2, vec![Some(0), None, Some(1)]));
    assert_eq!(job.0.ledger().rounds, 2);
}

/// #99684, #67615, #182223: rank 0 moved to a new node. Here the lowest-ranked survivor gets it, and the others keep their ranks.
#[test]
fn rank_0_stays_with_a_survivor() {
    let mut job = Job::started(5, 3, 4);
    assert_eq!(job.world(seconds(9)).1, vec![Some(0), Some(1), Some(2), Some(3), None]);
    job.at(seconds(10), Action::Kill(0));
    // host1 gets rank 0, and the newcomer host1's old rank.
    assert_eq!(job.world(seconds(12)), (2, vec![None, Some(0), Some(2), Some(3), Some(1)]));
}

// Closing.

/// #76287: running agents never looked at `closed`. A verdict of failure reaches them at once, with its cause.
#[test]
fn a_failed_verdict_reaches_running_nodes() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::Close(1, failed()));
    assert_eq!(job.world(seconds(10)), (0, vec![None; 3]));
    for host in [0, 2] {
        let [Exit::Closed(view)] = job.exits(host) else {
            panic!("{:?}", job.exits(host));
        };
        assert!(view.contains("rank 3 (host1) exited with code 7"), "{view}");
    }
}

/// NVRx #348: a spare reconnects while the job closes. It learns that the job is closed, and that it was a spare.
#[test]
fn a_spare_that_reconnects_as_the_job_closes_exits_gracefully() {
    let succeeded = Verdict::Succeeded { by: "host0".into() };
    let mut job = Job::new(3, 2, 2);
    for host in 0..3 {
        job.start(seconds(host as u64), host);
    }
    job.at(seconds(10), Action::Sever(2));
    job.at(seconds(10), Action::Close(0, succeeded.clone()));
    job.world(seconds(20));
    assert_eq!(job.join_error(2), &JoinError::Closed { verdict: succeeded, spare: true });
    // A node that joins after the close is no spare, and hears how and when the run ended.
    job.start(seconds(30), 2);
    job.world(seconds(30));
    assert!(matches!(job.exits(2), [_, Exit::Join(JoinError::Over { ago: Some(_), .. })]), "{:?}", job.exits(2));
}

/// #67616: a local fault closed the rendezvous for all nodes, for good.
#[test]
fn a_node_that_fails_and_comes_back_closes_nothing() {
    let mut job = Job::started(2, 2, 2);
    job.at(seconds(10), Action::FailWorkers(1));
    assert_eq!(job.world(seconds(10)), (2, ranks(&[0, 1])));
    job.at(seconds(20), Action::Terminate(1));
    assert_eq!(job.world(seconds(30)), (0, vec![None; 2]));
    assert!(job.waits(0));
    job.start(seconds(40), 1);
    assert_eq!(job.world(seconds(40)), (3, ranks(&[0, 1])));
}
