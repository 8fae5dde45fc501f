//! Nodes that die, leave, fall silent or come back.

use elastic_rs_sim::coordinator::Action;
use elastic_rs_sim::engine::paths::{End, Partition};

use super::job::{Job, ms, ranks, seconds};

/// #111646, #67742, #150916: an agent is killed while its peers are healthy, and they train on for ever.
#[test]
fn an_agent_is_killed_and_the_survivors_reform_after_grace_and_settling() {
    let mut job = Job::started(3, 2, 3);
    assert_eq!(job.world(seconds(9)), (1, ranks(&[0, 1, 2])));
    job.at(seconds(10), Action::Kill(1));
    // The connection ends at once; the grace is 500 ms, the settle window 1 s.
    assert_eq!(job.world(ms(10_499)), (1, vec![Some(0), None, Some(2)]));
    assert_eq!(job.world(ms(11_499)), (0, vec![None, None, None]));
    assert_eq!(job.world(ms(11_500)), (2, vec![Some(0), None, Some(1)]));
}

/// #67742: too few survivors wait for a replacement, which gets the rank of the lost node.
#[test]
fn too_few_survivors_wait_for_a_replacement() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::Kill(1));
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 1);
    assert_eq!(job.world(seconds(61)), (2, ranks(&[0, 1, 2])));
}

/// #67742, #147064: scale-down by SIGTERM waited 15 s and a last call. Here the node leaves, which needs neither.
#[test]
fn a_node_leaves_and_no_lease_is_waited_for() {
    let mut job = Job::started(3, 2, 3);
    job.at(seconds(10), Action::Terminate(0));
    assert_eq!(job.world(ms(10_999)), (0, vec![None; 3]));
    // The lowest survivor becomes rank 0.
    assert_eq!(job.world(seconds(11)), (2, vec![None, Some(0), Some(1)]));
}

/// `dynamic_rendezvous.py`, sanitize step: a silent node was dropped from the state, but its peers were not restarted.
#[test]
fn a_silent_node_is_lost_after_its_lease() {
    let mut job = Job::started(3, 2, 3);
    job.at(seconds(11), Action::PowerOff(2));
    // Last heard at 10 s, lease 15 s, last look 250 ms, settle window 1 s.
    assert_eq!(job.world(ms(25_249)), (1, vec![Some(0), Some(1), None]));
    assert_eq!(job.world(ms(26_249)), (0, vec![None; 3]));
    assert_eq!(job.world(ms(26_250)), (2, vec![Some(0), Some(1), None]));
}

/// torchft's broadcast channel: a slow reader fell behind the pushes. Here the others wait for it within its lease, and it gets the latest
/// state. After the lease its session ends, and the others go on.
#[test]
fn a_slow_reader_gets_the_latest_state_or_is_ended() {
    let mut job = Job::started(3, 2, 3);
    job.at(ms(10_001), Action::Cut(2, End::Node, seconds(8), Partition::Held));
    job.at(seconds(11), Action::FailWorkers(1));
    assert_eq!(job.world(seconds(18)), (1, vec![None, None, Some(2)]));
    assert_eq!(job.world(ms(18_001)), (2, ranks(&[0, 1, 2])));
    job.at(ms(40_001), Action::Cut(2, End::Node, seconds(60), Partition::Held));
    job.at(seconds(41), Action::FailWorkers(1));
    assert_eq!(job.world(ms(54_999)), (2, vec![None, None, Some(2)]));
    assert_eq!(job.world(seconds(57)), (3, vec![Some(0), Some(1), None]));
}

/// A node that reconnects within its grace keeps its place, and disturbs no other node.
#[test]
fn a_node_that_reconnects_within_its_grace_disturbs_nobody() {
    let mut job = Job::started(3, 2, 3);
    for i in 0..20 {
        job.at(seconds(10 + i), Action::Sever(1));
    }
    assert_eq!(job.world(seconds(100)), (1, ranks(&[0, 1, 2])));
}

/// A waiting node's broken connection delays the round for at most its grace, and the node keeps its place in the round.
#[test]
fn a_joiner_that_reconnects_within_its_grace_is_in_the_round() {
    let mut job = Job::new(3, 3, 3);
    job.start(seconds(1), 0);
    job.start(seconds(1), 1);
    job.at(seconds(5), Action::Sever(1));
    job.start(seconds(5), 2);
    let (round, world) = job.world(ms(5_100));
    assert_eq!((round, world), (1, ranks(&[0, 1, 2])));
}

/// NVRx PR #391: a joiner that dies between announcing itself and completion was counted in the world.
#[test]
fn a_joiner_that_dies_before_completion_is_no_ghost() {
    let mut job = Job::new(3, 3, 3);
    job.start(seconds(1), 0);
    job.start(seconds(1), 1);
    job.at(seconds(5), Action::Kill(1));
    job.start(seconds(5), 2);
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 1);
    assert_eq!(job.world(seconds(61)), (1, ranks(&[0, 1, 2])));
}

/// NVRx 6330cd4: a node that had withdrawn was counted.
#[test]
fn a_node_that_withdrew_is_not_counted() {
    let mut job = Job::new(3, 2, 2);
    job.at(seconds(0), Action::Start(0, seconds(10)));
    job.start(seconds(11), 1);
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 2);
    assert_eq!(job.world(seconds(61)), (1, vec![None, Some(0), Some(1)]));
}
