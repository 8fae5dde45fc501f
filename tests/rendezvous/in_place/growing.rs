//! Nodes join: members run on until the last call is over, and stop at one check.

use elastic_rs::rendezvous::messages::message::{
    ADDED, CoordinatorMessage, Health, Hello, Join, NEVER, NodeMessage, REMOVED, Round, Running, Verdict,
};
use elastic_rs::rendezvous::run::{SessionId, Standing};

use super::{ROUND, SECOND, attended, formed, settings};
use crate::bench::{Bench, back, hello, join};

#[test]
fn members_run_on_until_the_newcomers_last_call_ends_and_stop_at_the_first_check_that_none_has_passed() {
    let mut bench = attended(2, 4);
    bench.newcomer(3, 4);
    assert_eq!(bench.run().standing(), Standing::Changing);
    assert!(
        bench
            .run()
            .progress(bench.now)
            .contains("round 1 runs on until its workers stop together (nodes: 2); more nodes may join for 3.0 s")
    );
    bench.pass(2 * SECOND);
    bench.send(3, NodeMessage::Heartbeat { rtt_us: None });
    let CoordinatorMessage::Heartbeat { waits: Some(waits) } = bench.last(3) else { panic!("{:?}", bench.last(3)) };
    assert!(!waits.spare && !bench.is_stopped(1));
    bench.pass(SECOND);
    assert_eq!(bench.change(1), (ADDED, "1 node waits to join (10.0.0.3 (host:3))"));
    assert_eq!(bench.change(2).0, ADDED);
    bench.count(1, 41);
    assert_eq!(bench.change(2).0, ADDED, "no check yet");
    bench.count(2, 43);
    bench.assert_raise_at(&[1, 2], 44);

    bench.stop(2, 44);
    bench.stop(1, 44);
    // No second last call, although a fourth node could join.
    for (node, rank) in [(1, 0), (2, 1), (3, 2)] {
        assert_eq!((bench.placement(node).round, bench.placement(node).rank), (Round(2), rank));
        bench.assert_go_on(node, true, 4);
    }
    assert_eq!(bench.placement(1).restart, 0, "a change costs no restart");
    assert_eq!(bench.placement(1).reason.split(" (").next(), Some("the world changed in place: 1 node waits to join"));
    assert!(!bench.is_stopped(1) && !bench.is_stopped(2));
}

#[test]
fn a_change_begins_at_once_when_the_maximum_is_reached() {
    let mut bench = attended(2, 3);
    bench.newcomer(3, 3);
    assert_eq!(bench.change(1).0, ADDED);
    // A further node is not needed, and changes nothing.
    bench.newcomer(4, 3);
    bench.count(1, 0);
    bench.count(2, 0);
    bench.assert_raise_at(&[1, 2], 1);
}

#[test]
fn a_world_that_could_grow_at_once_waits_until_a_machine_is_checked() {
    let mut bench = attended(2, 3);
    let NodeMessage::Join(first) = join(0) else { unreachable!() };
    let with = |health| NodeMessage::Join(Join { health, ..first.clone() });
    bench.greet(3, hello(3, &settings(1, 3)), 3);
    bench.send(3, with(Health::Checking));
    bench.send(3, with(Health::Ill("it is hot".to_owned())));
    for _ in 0..600 {
        (1..=3).for_each(|node| bench.send(node, NodeMessage::Heartbeat { rtt_us: None }));
        bench.pass(SECOND);
    }
    assert!(bench.sent.contains(&(SessionId(3), CoordinatorMessage::CheckHealth)), "it is let in");
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.send(3, with(Health::Checking));
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.send(3, with(Health::Well));
    assert_eq!(bench.change(1).0, ADDED);
}

#[test]
fn a_spare_does_not_change_a_full_world_until_a_member_asks_to_leave() {
    let mut bench = attended(2, 2);
    bench.newcomer(3, 2);
    bench.pass(6 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.will_leave(2);
    assert_eq!(bench.change(1).0, ADDED | REMOVED);
    bench.count(1, 5);
    bench.count(2, 5);
    bench.stop(1, 6);
    bench.send(2, NodeMessage::Parked { round: ROUND });
    bench.assert_go_on(3, true, 2);
    assert_eq!(bench.placement(3).rank, 1);
}

#[test]
fn members_that_do_not_all_attend_are_asked_to_stop_as_ever() {
    let mut bench = formed(2, 3);
    bench.send(1, NodeMessage::Attending { round: ROUND });
    bench.newcomer(3, 3);
    assert!(bench.stopped(&[1, 2]).contains("1 node waits to join"));
    // Too late: the others may have stopped already.
    bench.send(2, NodeMessage::Attending { round: ROUND });
    assert!(bench.stopped(&[1, 2]).contains("1 node waits to join"));
}

#[test]
fn an_attendance_in_another_round_or_of_a_node_that_cannot_change_in_place_does_not_count() {
    let settings = settings(1, 3);
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings), 1);
    bench.greet(2, Hello { in_place: false, ..hello(2, &settings) }, 2);
    (1..=2).for_each(|node| bench.send(node, join(0)));
    bench.pass(settings.last_call_timeout);
    (1..=2).for_each(|node| bench.send(node, NodeMessage::Attending { round: ROUND }));
    bench.newcomer(3, 3);
    assert!(bench.stopped(&[1, 2]).contains("1 node waits to join"));
    let mut bench = formed(2, 3);
    bench.send(1, NodeMessage::Attending { round: ROUND });
    bench.send(2, NodeMessage::Attending { round: Round(2) });
    bench.newcomer(3, 3);
    assert!(bench.stopped(&[1, 2]).contains("1 node waits to join"));
}

/// The world that a node is notified of when it introduces itself.
fn forecast_for(bench: &mut Bench, node: u64, hello: Hello) -> Option<Running> {
    bench.greet(node, hello, node as u8);
    match bench.last(node) {
        CoordinatorMessage::Welcome { running, .. } => running.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_newcomer_hears_of_the_world_for_which_it_may_start_its_workers() {
    let mut bench = attended(2, 4);
    assert_eq!(forecast_for(&mut bench, 3, hello(3, &settings(1, 4))), None, "scripts may make the groups");
    bench.send(1, NodeMessage::NoProcessGroup { round: ROUND });
    let running = forecast_for(&mut bench, 4, hello(4, &settings(1, 4))).unwrap();
    assert_eq!((running.round, running.nodes, running.workers, running.restart), (ROUND, 2, 4, 0));
    let placement = bench.placement(1);
    assert_eq!(
        (running.world, &running.master_addr, running.master_port),
        (placement.world, &placement.master_addr, placement.master_port)
    );
    let next = running.next_placement(2);
    assert_eq!((next.round, next.rank, next.workers.unwrap().first_rank), (Round(2), 2, 4));
}

#[test]
fn a_node_hears_of_no_world_that_is_about_to_end_or_that_it_cannot_wait_for() {
    let ready = || {
        let mut bench = attended(2, 4);
        bench.send(2, NodeMessage::NoProcessGroup { round: ROUND });
        bench
    };
    let new = hello(3, &settings(1, 4));
    assert!(forecast_for(&mut ready(), 3, new.clone()).is_some());
    assert_eq!(forecast_for(&mut ready(), 3, Hello { in_place: false, ..new.clone() }), None);
    assert_eq!(forecast_for(&mut ready(), 3, Hello { joining: true, ..new.clone() }), None);
    let mut bench = ready();
    bench.leave(2);
    assert_eq!(forecast_for(&mut bench, 3, new.clone()), None, "the world has lost a member");
    let mut bench = attended(2, 4);
    bench.send(1, NodeMessage::NoProcessGroup { round: Round(2) });
    assert_eq!(forecast_for(&mut bench, 3, new), None, "another round");
}

#[test]
fn workers_that_were_started_before_the_join_go_on_with_the_state_of_the_others() {
    let mut bench = attended(2, 3);
    bench.greet(3, hello(3, &settings(1, 3)), 3);
    bench.send(3, back(0, &[(0, None), (1, None)], None));
    assert_eq!(bench.change(1).0, ADDED);
    bench.count(1, 8);
    bench.count(2, 8);
    bench.stop(1, 9);
    bench.stop(2, 9);
    for node in 1..=3 {
        bench.assert_go_on(node, true, 6);
    }
    assert_eq!(bench.placement(3).rank, 2);
}

#[test]
fn newcomers_that_are_gone_before_all_have_counted_cost_no_step() {
    let mut bench = attended(2, 3);
    bench.newcomer(3, 3);
    bench.count(1, 10);
    bench.send(3, NodeMessage::Withdraw);
    bench.count(2, 10);
    bench.assert_raise_at(&[1, 2], NEVER);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    // The next one changes the world all the same, at counts of its own.
    bench.send(3, join(0));
    assert_eq!(bench.change(1).0, ADDED);
    bench.count(1, 20);
    bench.count(2, 19);
    bench.assert_raise_at(&[1, 2], 21);
}

#[test]
fn a_job_that_is_about_to_end_does_not_grow() {
    let mut bench = attended(2, 3);
    bench.send(1, NodeMessage::Done { round: ROUND });
    bench.newcomer(3, 3);
    bench.pass(10 * SECOND);
    bench.send(2, NodeMessage::Done { round: ROUND });
    assert!(matches!(bench.last(1), CoordinatorMessage::Closed { verdict: Verdict::AllDone { .. }, .. }));
    // The same while a change waits for the last count: nobody has to count any more.
    let mut bench = attended(2, 3);
    bench.newcomer(3, 3);
    bench.count(1, 3);
    bench.send(2, NodeMessage::Done { round: ROUND });
    bench.assert_raise_at(&[1], NEVER);
    bench.send(1, NodeMessage::Done { round: ROUND });
    assert!(matches!(bench.last(2), CoordinatorMessage::Closed { verdict: Verdict::AllDone { .. }, .. }));
}

/// The script ends before the check: nobody stops there.
#[test]
fn a_job_may_finish_before_the_check() {
    let mut bench = attended(2, 3);
    bench.newcomer(3, 3);
    bench.count(1, 3);
    bench.count(2, 3);
    bench.assert_raise_at(&[1, 2], 4);
    bench.send(1, NodeMessage::Done { round: ROUND });
    bench.send(2, NodeMessage::Done { round: ROUND });
    assert!(matches!(bench.last(2), CoordinatorMessage::Closed { verdict: Verdict::AllDone { .. }, .. }));
}
