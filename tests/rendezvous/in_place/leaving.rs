//! Members ask to leave, and leave when their workers have stopped.

use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, NodeId, NodeMessage, REMOVED, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::Standing;

use super::{ROUND, attended, settings};
use crate::bench::{Bench, hello};

#[test]
fn a_member_that_leaves_costs_no_step_and_no_settling() {
    let mut bench = attended(3, 3);
    bench.will_leave(3);
    assert_eq!(bench.change(1), (REMOVED, "10.0.0.3 (host:3) is about to leave: SIGTERM"));
    (1..=3).for_each(|node| bench.count(node, 100 + node));
    bench.assert_raise_at(&[1, 2, 3], 104);
    bench.stop(1, 104);
    bench.send(3, NodeMessage::Parked { round: ROUND });
    bench.stop(2, 104);
    for node in [1, 2] {
        bench.assert_go_on(node, false, 4);
        assert_eq!((bench.placement(node).world_size, bench.placement(node).restart), (2, 0));
    }
    bench.leave(3);
    assert!(!bench.is_stopped(1) && !bench.is_stopped(2), "{:?}", bench.sent);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
}

#[test]
fn a_departure_in_place_counts_against_the_rejoin_limit() {
    let settings = Settings { rejoin_limit: 1, ..settings(1, 2) };
    let mut bench = Bench::formed(2, &settings);
    (1..=2).for_each(|node| bench.send(node, NodeMessage::Attending { round: ROUND }));
    bench.will_leave(2);
    (1..=2).for_each(|node| bench.count(node, 1));
    bench.send(2, NodeMessage::Parked { round: ROUND });
    bench.leave(2);
    bench.greet(20, Hello { node: NodeId(20), process: 20, ..hello(2, &settings) }, 1);
    assert!(bench.rejection(20).contains("left the running job 1 times"), "{}", bench.rejection(20));
}

#[test]
fn a_member_that_goes_before_its_workers_have_stopped_interrupts_the_others() {
    for counted in [false, true] {
        let mut bench = attended(2, 2);
        bench.will_leave(2);
        bench.count(1, 1);
        if counted {
            bench.count(2, 1);
        }
        // It has not said that its workers have stopped.
        bench.leave(2);
        assert_eq!(bench.stopped(&[1]), "10.0.0.2 (host:2) left: SIGTERM");
    }
}

#[test]
fn a_member_that_asks_to_leave_is_answered_even_if_the_others_cannot_change_in_place() {
    let mut bench = Bench::formed(2, &settings(2, 2));
    bench.send(1, NodeMessage::Attending { round: ROUND });
    bench.will_leave(1);
    assert_eq!(bench.stopped(&[1, 2]), "10.0.0.1 (host:1) is about to leave: SIGTERM");
    // Nobody has work left that the leaving node could disturb.
    let mut bench = attended(2, 2);
    bench.send(2, NodeMessage::Done { round: ROUND });
    bench.will_leave(1);
    assert!(bench.stopped(&[1]).starts_with("no other node has work left, so 10.0.0.1 (host:1) may leave"));
    assert!(!bench.is_stopped(2));
    bench.leave(1);
    assert!(matches!(bench.last(2), CoordinatorMessage::Closed { verdict: Verdict::AllDone { .. }, .. }));
}

#[test]
fn two_members_that_leave_at_once_are_one_change() {
    let mut bench = attended(3, 3);
    bench.will_leave(2);
    bench.will_leave(3);
    (1..=3).for_each(|node| bench.count(node, 9));
    bench.assert_raise_at(&[1, 2, 3], 10);
    bench.send(2, NodeMessage::Parked { round: ROUND });
    bench.stop(1, 10);
    assert_eq!(bench.run().round(), ROUND, "the third still runs");
    bench.send(3, NodeMessage::Parked { round: ROUND });
    assert_eq!((bench.placement(1).round, bench.placement(1).world_size), (Round(2), 1));
}
