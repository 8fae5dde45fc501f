//! A coordinator was restarted. It learns from the members of the running world what is left of it, and from other nodes that they wait.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, NodeMessage, Placed, Round, WorldChange,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::SessionId;

use crate::bench::{Bench, back, failure, hello, join};

const SECOND: Duration = Duration::from_secs(1);
const ROUND: Round = Round(5);
const BOTH: [(u32, Option<u64>); 2] = [(0, Some(7)), (1, Some(7))];

/// Whether workers change in place.
const WAYS: [bool; 2] = [false, true];

fn settings() -> Settings {
    let times = Settings { last_call_timeout: 3 * SECOND, settle_timeout: 2 * SECOND, ..Settings::new(1, 3) };
    Settings { max_restarts: Some(0), ..times }
}

/// A member of round 5, which has two.
fn member(node: u64, in_place: bool) -> Hello {
    let rank = node as u32 - 1;
    let placed = Placed {
        round: ROUND,
        rank,
        world_size: 2,
        world: 77,
        active: true,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    };
    Hello { placed: Some(placed), in_place, attending: in_place, ..hello(node, &settings()) }
}

/// The same, whose workers were killed while it was cut off.
fn fenced(node: u64, in_place: bool) -> Hello {
    let Hello { placed, .. } = member(node, in_place);
    let placed = placed.map(|placed| Placed { active: false, ..placed });
    Hello { placed, joining: true, in_place, ..hello(node, &settings()) }
}

/// A node that was last in round 4, with three nodes.
fn of_an_older_world(node: u64) -> Hello {
    let placed = Placed {
        round: Round(4),
        rank: 2,
        world_size: 3,
        world: 66,
        active: false,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    };
    Hello { placed: Some(placed), joining: true, ..hello(node, &settings()) }
}

impl Bench {
    /// The reason for which a node's workers must stop at once, if they must.
    fn must_stop(&self, node: u64) -> Option<&str> {
        let statuses = self.sent.iter().rev().filter(|(to, _)| *to == SessionId(node));
        let last = statuses
            .map(|(_, message)| message)
            .find(|message| matches!(message, CoordinatorMessage::Status { .. }) || message.placement().is_some());
        match last {
            Some(CoordinatorMessage::Status { waiting: 1.., reason, .. }) => Some(reason),
            _ => None,
        }
    }

    /// The check at which a node's workers must stop, if they must.
    fn must_stop_at(&self, node: u64) -> Option<u64> {
        match self.last(node) {
            CoordinatorMessage::RaiseAt { check, .. } => Some(*check),
            _ => None,
        }
    }

    /// Members 1 and 2 do what messages ask for, until a round forms or the time is over. How long they ran, and how long they stood still.
    fn live(&mut self, limit: Duration) -> (Duration, Duration) {
        const STEP: Duration = Duration::from_millis(100);
        let (began, mut stopped) = (self.now, None);
        while self.now < began + limit {
            for node in [1, 2] {
                match self.last(node) {
                    CoordinatorMessage::Change(WorldChange { round, .. }) => {
                        let round = *round;
                        self.send(node, NodeMessage::Counted { round, count: 30 });
                    }
                    _ if self.must_stop(node).is_some() => self.send(node, join(5)),
                    _ => {
                        let Some(check) = self.must_stop_at(node) else { continue };
                        self.send(node, back(5, &BOTH, Some(check)));
                    }
                }
                stopped.get_or_insert(self.now);
            }
            if self.is_placed(1, 6) {
                let stopped = stopped.unwrap();
                return (stopped - began, self.now - stopped);
            }
            for node in [1, 2, 3] {
                self.send(node, NodeMessage::Heartbeat { rtt_us: None });
            }
            self.sent.retain(|(_, message)| !matches!(message, CoordinatorMessage::Heartbeat { .. }));
            self.pass(STEP);
        }
        (stopped.map_or(limit, |at| at - began), stopped.map_or(Duration::ZERO, |at| self.now - at))
    }
}

// A member whose workers were killed while it was cut off.

/// The workers of the others wait for its workers in a collective. They hear of it at once, and not that a node waits to join.
#[test]
fn a_member_that_was_fenced_while_the_coordinator_was_away_stops_the_others_at_once() {
    for in_place in WAYS {
        for first in [1, 2] {
            let mut bench = Bench::new();
            for node in [first, 3 - first] {
                match node {
                    1 => bench.greet(1, member(1, in_place), 1),
                    _ => {
                        bench.greet(2, fenced(2, in_place), 2);
                        bench.send(2, join(5));
                    }
                }
            }
            let reason = bench.must_stop(1).unwrap_or_else(|| panic!("in place {in_place}: {:?}", bench.last(1)));
            assert_eq!(reason, "10.0.0.2 (host:2) restarts its workers", "in place {in_place}, {first} first");
            bench.send(1, join(5));
            assert!(bench.is_placed(1, 6) && bench.is_placed(2, 6), "in place {in_place}, {first} first");
            assert_eq!((bench.placement(2).rank, bench.placement(2).world_size), (1, 2));
        }
    }
}

/// The workers of the others fail, since those of the fenced member are gone. No restart is left, and none is needed.
#[test]
fn workers_that_fail_because_a_member_was_fenced_cost_no_restart() {
    for joined in [true, false] {
        let mut bench = Bench::new();
        bench.greet(1, member(1, true), 1);
        bench.greet(2, fenced(2, true), 2);
        if joined {
            bench.send(2, join(5));
        }
        bench.send(1, NodeMessage::Failed { round: ROUND, failure: failure() });
        if !joined {
            bench.send(2, join(5));
        }
        assert!(bench.run().closed().is_none(), "{:?}", bench.run().closed());
        assert!(bench.must_stop(1).is_some_and(|reason| !reason.contains("restart 1")), "{:?}", bench.must_stop(1));
        bench.send(1, join(5));
        assert!(bench.is_placed(1, 6) && bench.is_placed(2, 6));
        assert_eq!(bench.placement(1).restart, 0);
    }
}

/// The same, before the fenced member has reached the coordinator.
#[test]
fn workers_that_fail_before_all_members_have_reported_cost_no_restart() {
    let mut bench = Bench::new();
    bench.greet(1, member(1, true), 1);
    bench.send(1, NodeMessage::Failed { round: ROUND, failure: failure() });
    assert!(bench.run().closed().is_none(), "{:?}", bench.run().closed());
    let reason = bench.must_stop(1).expect("its other workers wait for news");
    assert!(reason.contains("not counted, since not all members of round 5 have reported"), "{reason}");
    bench.greet(2, fenced(2, true), 2);
    bench.send(2, join(5));
    bench.send(1, join(5));
    assert!(bench.is_placed(1, 6) && bench.is_placed(2, 6));
}

/// Workers whose collective has failed end if they have no news within 5 s. A third member never reports.
#[test]
fn the_other_members_are_sent_a_failure_before_their_workers_give_up() {
    let of_three = |node| {
        let mut hello = member(node, true);
        hello.placed = hello.placed.map(|placed| Placed { world_size: 3, ..placed });
        hello
    };
    let mut bench = Bench::new();
    bench.greet(1, of_three(1), 1);
    bench.greet(2, of_three(2), 2);
    bench.send(1, NodeMessage::Failed { round: ROUND, failure: failure() });
    let reason = bench.must_stop(2).expect("its workers wait for news");
    assert!(reason.contains("not counted"), "{reason}");
    assert_eq!((bench.run().closed(), bench.run().restart()), (None, 0));
}

/// Half of the workers have succeeded, and the other half never will.
#[test]
fn a_job_has_not_succeeded_while_a_fenced_member_asks_for_another_round() {
    let mut bench = Bench::new();
    bench.greet(1, member(1, false), 1);
    bench.greet(2, fenced(2, false), 2);
    bench.send(2, join(5));
    bench.send(1, NodeMessage::Done { round: ROUND });
    assert_eq!(bench.run().closed(), None);
    assert_eq!(bench.must_stop(1), Some("10.0.0.2 (host:2) restarts its workers"));
}

/// Its workers have stopped at the check of a change that only it remembers: the others have finished.
#[test]
fn a_job_has_not_succeeded_while_a_member_has_stopped_for_a_change() {
    let mut bench = Bench::new();
    bench.greet(1, member(1, true), 1);
    bench.greet(2, fenced(2, true), 2);
    bench.send(2, back(5, &BOTH, Some(31)));
    bench.send(1, NodeMessage::Done { round: ROUND });
    assert_eq!(bench.run().closed(), None);
    assert!(bench.must_stop(1).is_some(), "{:?}", bench.last(1));
}

// A node that only wants to join.

/// No round may close for a lease, as other members of that older world may still run. Until then the healthy world runs on.
#[test]
fn a_node_of_an_older_world_stops_a_healthy_one_only_when_a_round_can_close() {
    for in_place in WAYS {
        let mut bench = Bench::new();
        for node in [1, 2] {
            bench.greet(node, member(node, in_place), node as u8);
        }
        bench.greet(3, of_an_older_world(3), 3);
        bench.send(3, join(4));
        let waits = "round 5 runs undisturbed (nodes: 2); no node can join for 15.0 s: members of a world formed before this \
                     coordinator restarted may still run until their lease ends";
        assert!(bench.run().progress(bench.now).contains(waits), "{}", bench.run().progress(bench.now));
        let noted =
            bench.notes.iter().filter(|note| note.contains("round 5 runs on, though 1 node waits to join")).count();
        assert_eq!(noted, 1, "{:#?}", bench.notes);
        let (ran, stood_still) = bench.live(40 * SECOND);
        println!("in place {in_place}: ran for {ran:?}, and stood still for {stood_still:?}");
        assert!(stood_still <= SECOND, "in place {in_place}: stood still for {stood_still:?}");
        assert!(ran <= settings().lease() + SECOND, "in place {in_place}: ran for {ran:?}");
        assert!(bench.is_placed(2, 6) && bench.is_placed(3, 6), "in place {in_place}");
    }
}

/// It is no spare: its join does not wait for ever, and it may be needed as soon as a round can close.
#[test]
fn a_node_of_an_older_world_is_no_spare_while_it_waits() {
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, member(node, false), node as u8);
    }
    bench.greet(3, of_an_older_world(3), 3);
    bench.send(3, join(4));
    bench.send(3, NodeMessage::Heartbeat { rtt_us: None });
    let CoordinatorMessage::Heartbeat { waits: Some(waits) } = bench.last(3) else { panic!("{:?}", bench.last(3)) };
    assert!(!waits.spare, "{waits:?}");
}

/// What interrupts the world anyway does not wait, and nor does a member that is to leave.
#[test]
fn a_member_that_leaves_is_let_go_at_once_although_no_round_can_close() {
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, member(node, true), node as u8);
    }
    bench.greet(3, of_an_older_world(3), 3);
    bench.send(3, join(4));
    bench.send(2, NodeMessage::WillLeave { round: ROUND, reason: "SIGTERM".into(), signal: Some(15) });
    for node in [1, 2] {
        assert!(matches!(bench.last(node), CoordinatorMessage::Change(_)), "{:?}", bench.last(node));
    }
}

/// Members that have reported are not stopped for a newcomer while one is still missing: no round could close.
#[test]
fn a_newcomer_stops_nobody_before_all_members_have_reported() {
    for in_place in WAYS {
        let mut bench = Bench::new();
        bench.greet(3, hello(3, &settings()), 3);
        bench.send(3, join(0));
        bench.greet(1, member(1, in_place), 1);
        assert_eq!(bench.must_stop(1), None, "in place {in_place}");
        for _ in 0..10 {
            [1, 3].into_iter().for_each(|node| bench.send(node, NodeMessage::Heartbeat { rtt_us: None }));
            bench.pass(SECOND);
            assert_eq!(bench.must_stop(1), None, "in place {in_place}");
        }
        bench.greet(2, member(2, in_place), 2);
        let (ran, stood_still) = bench.live(40 * SECOND);
        assert!(ran <= SECOND && stood_still <= SECOND, "in place {in_place}: {ran:?}, {stood_still:?}");
        assert!(bench.is_placed(3, 6));
    }
}

/// Its workers reach the check of the former coordinator's change before the other member has reconnected.
#[test]
fn a_member_that_stops_for_a_known_check_before_the_others_report_breaks_nothing() {
    let mut bench = Bench::new();
    bench.greet(1, member(1, true), 1);
    bench.send(1, NodeMessage::Counted { round: ROUND, count: 30 });
    bench.send(1, back(5, &BOTH, Some(31)));
    bench.greet(2, member(2, true), 2);
    bench.send(2, NodeMessage::Counted { round: ROUND, count: 30 });
    assert_eq!(bench.must_stop(2), None, "{:?}", bench.last(2));
    assert_eq!(bench.must_stop_at(2), Some(31), "{:?}", bench.last(2));
}

/// The other member has counted less, and was not sent the check.
#[test]
fn the_check_at_which_a_member_has_stopped_is_chosen_again() {
    let mut bench = Bench::new();
    bench.greet(2, member(2, true), 2);
    bench.send(2, NodeMessage::Counted { round: ROUND, count: 29 });
    bench.greet(1, fenced(1, true), 1);
    bench.send(1, back(5, &BOTH, Some(31)));
    assert_eq!(bench.must_stop_at(2), Some(31), "{:?}", bench.last(2));
}
