//! Changes that do not come to an end: members are asked to stop as after a failure.

use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, NodeMessage};
use elastic_rs::rendezvous::run::SessionId;

use super::{ROUND, SECOND, attended};
use crate::bench::{back, failure};

#[test]
fn a_member_that_does_not_count_in_time_breaks_the_change_off() {
    let mut bench = attended(3, 4);
    bench.will_leave(3);
    bench.count(1, 1);
    bench.pass(4 * SECOND);
    (1..=3).for_each(|node| bench.send(node, NodeMessage::Heartbeat { rtt_us: None }));
    bench.pass(SECOND);
    let reason = bench.stopped(&[1, 2, 3]);
    assert_eq!(
        reason,
        "10.0.0.2 (host:2) and 1 more have not counted checks within 5 s; the world was to change because 10.0.0.3 \
         (host:3) is about to leave: SIGTERM"
    );
    assert!(!bench.sent.iter().any(|(_, message)| matches!(message, CoordinatorMessage::RaiseAt { .. })));
}

#[test]
fn a_loss_or_a_failure_at_any_time_breaks_the_change_off() {
    for raised in [false, true] {
        let prepared = || {
            let mut bench = attended(3, 3);
            bench.will_leave(3);
            (1..=3).filter(|node| raised || *node != 2).for_each(|node| bench.count(node, 4));
            bench
        };
        let mut bench = prepared();
        bench.machine.on_disconnected(SessionId(2), bench.now);
        bench.pass(SECOND);
        assert!(bench.stopped(&[1, 3]).starts_with("10.0.0.2 (host:2) is lost"), "raised: {raised}");

        let mut bench = prepared();
        bench.send(2, NodeMessage::Failed { round: ROUND, failure: failure() });
        for node in 1..=3 {
            let CoordinatorMessage::Status { restart: 1, failure: Some(cause), .. } = bench.last(node) else {
                panic!("{:?}", bench.last(node))
            };
            assert_eq!(cause.node, "10.0.0.2 (host:2)", "a failure is no consequence of a change");
        }
    }
}

/// Its peers would wait in a collective for a worker that has gone back to its commit.
#[test]
fn a_member_that_comes_back_without_having_stopped_at_the_check_interrupts_the_others() {
    for check in [None, Some(4)] {
        let mut bench = attended(3, 3);
        bench.will_leave(3);
        (1..=3).for_each(|node| bench.count(node, 4));
        bench.assert_raise_at(&[1, 2, 3], 5);
        bench.send(1, back(1, &[(0, Some(2)), (1, Some(2))], check));
        assert_eq!(bench.stopped(&[2, 3]), "10.0.0.1 (host:1) restarts its workers");
    }
}

/// One has stopped at the check, and the others are notified of a failure: their states differ, although their commits do not.
#[test]
fn workers_of_which_some_have_gone_back_to_their_commit_are_synchronised() {
    let mut bench = attended(3, 3);
    bench.will_leave(3);
    (1..=3).for_each(|node| bench.count(node, 4));
    bench.stop(1, 5);
    bench.machine.on_disconnected(SessionId(3), bench.now);
    bench.pass(SECOND);
    assert!(bench.stopped(&[2]).starts_with("10.0.0.3 (host:3) is lost"));
    bench.send(2, back(1, &[(0, Some(7)), (1, Some(7))], None));
    bench.pass(3 * SECOND);
    bench.assert_go_on(1, true, 4);
    bench.assert_go_on(2, true, 4);
}

#[test]
fn a_member_that_does_not_stop_is_asked_again_once_the_others_have_waited_long_enough() {
    let mut bench = attended(3, 4);
    bench.will_leave(3);
    (1..=3).for_each(|node| bench.count(node, 4));
    // A step may take as long as it likes.
    for _ in 0..60 {
        bench.pass(SECOND);
        (1..=3).for_each(|node| {
            bench.machine.on_message(SessionId(node), NodeMessage::Heartbeat { rtt_us: None }, bench.now)
        });
    }
    bench.take();
    assert!(!bench.is_stopped(2));
    bench.stop(1, 5);
    for _ in 0..30 {
        bench.pass(SECOND);
        (1..=3).for_each(|node| {
            bench.machine.on_message(SessionId(node), NodeMessage::Heartbeat { rtt_us: None }, bench.now)
        });
        bench.take();
    }
    let of = |node| {
        bench
            .sent
            .iter()
            .rfind(|(to, sent)| *to == SessionId(node) && !matches!(sent, CoordinatorMessage::Heartbeat { .. }))
    };
    let Some((_, CoordinatorMessage::Status { waiting: 1.., reason, .. })) = of(2) else { panic!("{:?}", of(2)) };
    assert!(reason.starts_with("10.0.0.2 (host:2) and 1 more have not stopped 30 s after others"), "{reason}");
}

/// Ranks are to check equally often. Those that do not must not hang the job.
#[test]
fn a_member_that_finishes_while_another_has_stopped_interrupts_the_change() {
    let mut bench = attended(3, 3);
    bench.will_leave(3);
    (1..=3).for_each(|node| bench.count(node, 4));
    bench.stop(1, 5);
    bench.send(2, NodeMessage::Done { round: ROUND });
    assert!(bench.stopped(&[2, 3]).starts_with("10.0.0.2 (host:2) has finished, and others have stopped for a change"));
}

#[test]
fn a_count_beyond_the_check_breaks_the_change_off() {
    let mut bench = attended(2, 2);
    bench.will_leave(2);
    bench.count(1, 4);
    bench.count(2, 4);
    bench.count(1, 5);
    assert_eq!(
        bench.stopped(&[1, 2]),
        "the workers of 10.0.0.1 (host:1) have passed check 5, at which all were to stop"
    );
}

#[test]
fn a_stalled_coordinator_gives_the_members_their_time_again() {
    let mut bench = attended(2, 2);
    bench.will_leave(2);
    bench.count(1, 4);
    // Both have answered in time, but the coordinator stood still, and looks at its timers first.
    bench.pass(60 * SECOND);
    assert!(!bench.is_stopped(1), "{:?}", bench.notes);
    bench.count(2, 4);
    bench.assert_raise_at(&[1, 2], 5);
}
