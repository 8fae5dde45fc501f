use super::*;
use crate::rendezvous::messages::message::{Generation, NodeId};
use crate::rendezvous::messages::settings::{LAST_LOOK, Settings};
use crate::rendezvous::run::bench::{Bench, SECOND};
use crate::rendezvous::run::node::Status;

const LEASE: Duration = Duration::from_secs(10);

fn claim(round: u64, world: u64, active: bool) -> Placed {
    Placed {
        round: Round(round),
        rank: 0,
        world_size: 3,
        world,
        active,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    }
}

fn restarted(now: Instant) -> Recovery {
    let mut recovery = Recovery::default();
    recovery.begin(LEASE, now);
    recovery
}

#[test]
fn a_restarted_coordinator_recovers_for_a_lease_and_slack() {
    let start = Instant::now();
    let recovery = restarted(start);
    for (after, expected) in [(0, true), (14, true), (15, false), (100, false)] {
        assert_eq!(recovery.is_recovering(start + after * SECOND), expected, "after {after} s");
    }
    assert!(!Recovery::default().is_recovering(start), "this one was not restarted");
}

#[test]
fn only_a_coordinator_that_was_restarted_and_has_formed_no_world_believes_any_possible_round() {
    let now = Instant::now();
    let (fresh, recovering, late) = (Recovery::default(), restarted(now), now + 15 * SECOND);
    for (recovery, has_formed_none, at, largest) in [
        (&recovering, true, now, LARGEST_ROUND),
        (&recovering, false, now, Round(4 + LARGEST_STEP)),
        (&recovering, true, late, Round(4 + LARGEST_STEP)),
        (&fresh, true, now, Round(4 + LARGEST_STEP)),
    ] {
        assert_eq!(recovery.largest_claim(has_formed_none, Round(4), at), largest);
    }
    assert_eq!(fresh.largest_claim(false, LARGEST_ROUND, now), LARGEST_ROUND);
}

#[test]
fn claims_to_unknown_worlds_hold_up_rounds_only_while_it_recovers() {
    let now = Instant::now();
    for (recovery, active, holds) in [
        (restarted(now), true, true),
        (restarted(now), false, true), // others of that world may still run
        (Recovery::default(), true, false),
    ] {
        let mut recovery = recovery;
        recovery.record_claim(&claim(7, 1, active), LEASE, now);
        assert_eq!(recovery.unknown_worlds_until(), holds.then_some(now + LEASE), "{active}");
        assert_eq!(recovery.named(), Round(7));
    }
}

#[test]
fn one_world_holds_up_rounds_once_unless_a_running_member_claims_it_again() {
    let now = Instant::now();
    let mut recovery = restarted(now);
    recovery.record_claim(&claim(7, 1, false), LEASE, now);
    for (active, until) in [(false, now + LEASE), (true, now + SECOND + LEASE)] {
        recovery.record_claim(&claim(6, 1, active), LEASE, now + SECOND);
        assert_eq!((recovery.unknown_worlds_until(), recovery.named()), (Some(until), Round(7)));
    }
    recovery.end_if_due(now + 11 * SECOND);
    assert_eq!(recovery.unknown_worlds_until(), None);
}

#[test]
fn a_shorter_lease_shortens_every_wait() {
    let now = Instant::now();
    let mut recovery = restarted(now);
    recovery.hold_for_unknown_worlds(now + LEASE);
    recovery.await_members(Some(now + LEASE));
    recovery.set_lease(3 * SECOND, now);
    let until = Some(now + 3 * SECOND);
    assert_eq!((recovery.unknown_worlds_until(), recovery.members_until()), (until, until));
    assert!(recovery.is_recovering(now + 7 * SECOND) && !recovery.is_recovering(now + 8 * SECOND));
    recovery.settle();
    assert_eq!((recovery.unknown_worlds_until(), recovery.members_until()), (None, None));
}

/// Node 1 is back of a world of three that this coordinator has adopted. Others have a lease to report.
fn adopted() -> Bench {
    let mut bench = Bench::new(Settings::new(1, 3));
    let placed = claim(7, 1, true);
    bench.roster.adopt_round(placed.round);
    bench.current.adopt(&placed, None);
    bench.recovery.add_world(placed.world);
    bench.recovery.await_members(Some(bench.now + LEASE));
    report(&mut bench, 0);
    bench
}

/// The member with this rank reports that it runs. Its number is one more.
fn report(bench: &mut Bench, rank: u32) {
    let id = NodeId((rank + 1).into());
    let mut node = bench.node(rank as u8 + 1);
    (node.status, node.placed) = (Status::Active, Some((Round(7), rank)));
    bench.roster.insert(id, node);
    assert!(bench.current.has_rank(id, Placed { rank, ..claim(7, 1, true) }, Round(7)));
}

#[test]
fn members_of_an_adopted_world_have_a_lease_to_report() {
    let mut bench = adopted();
    let until = bench.now + LEASE;
    assert_eq!(bench.parts().reports(bench.now), Reports::Awaited(Some(until)));
    report(&mut bench, 2);
    let missing = "1 of 3 members of round 7 did not report to the restarted coordinator";
    assert_eq!(bench.parts().reports(until), Reports::Missing(missing.to_owned()));
    report(&mut bench, 1);
    let complete = Reports::Complete("all 3 members of round 7 have reported".to_owned());
    assert_eq!(bench.parts().reports(bench.now), complete);
}

#[test]
fn the_host_that_has_ended_with_its_coordinator_is_not_awaited() {
    let gone = HostInstance { rank: 2, instance_id: 1, incarnation: 1 };
    let mut bench = adopted();
    bench.recovery.record_host(Some(gone), |_| true);
    let until = bench.now + LEASE;
    assert_eq!(bench.parts().reports(bench.now), Reports::Awaited(Some(until)), "rank 1 is awaited");
    report(&mut bench, 1);
    assert_eq!(bench.parts().reports(bench.now), Reports::Awaited(Some(bench.now + LAST_LOOK)));
    let ended = "node rank 2 of round 7 has ended with the coordinator that its process hosted";
    assert_eq!(bench.parts().reports(until), Reports::Missing(ended.to_owned()));
    report(&mut bench, 2);
    assert!(matches!(bench.parts().reports(until), Reports::Complete(_)), "it lives");
}

#[test]
fn a_host_whose_process_may_live_is_awaited() {
    let host = HostInstance { rank: 2, instance_id: 1, incarnation: 1 };
    let mut recovery = Recovery::default();
    recovery.record_host(Some(host), |_| false);
    assert_eq!(recovery.gone_rank(), None);
    recovery.record_host(Some(host), |_| true);
    recovery.record_host(None, |_| true);
    assert_eq!(recovery.gone_rank(), Some(2));
    recovery.forget_host();
    assert_eq!(recovery.gone_rank(), None);
}
