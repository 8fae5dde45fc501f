use super::*;
use crate::rendezvous::messages::settings::Settings;
use crate::rendezvous::run::bench::{Bench, SECOND};

/// A last call of 30 s, and 5 s to settle.
fn bench(min: u32, max: u32) -> Bench {
    let settings = Settings { last_call_timeout: 30 * SECOND, settle_timeout: 5 * SECOND, ..Settings::new(min, max) };
    Bench::new(settings)
}

/// In how many seconds the round closes, and why.
fn closes(bench: &Bench) -> Option<(u64, String)> {
    let Closing { at, reason } = when_to_close(bench.parts(), bench.now)?;
    Some((at.saturating_duration_since(bench.now).as_secs(), reason))
}

/// The members of the last world that are still active go.
fn end(bench: &mut Bench) {
    let active: Vec<_> = bench.roster.active().iter().copied().collect();
    active.into_iter().for_each(|id| bench.roster.remove(id));
}

#[test]
fn a_first_round_closes_when_it_is_full_or_when_the_last_call_of_enough_nodes_ends() {
    for (waiting, expected) in [
        (1, None),
        (2, Some((30, "the last call of 30.0 s ended"))),
        (3, Some((30, "the last call of 30.0 s ended"))),
        (4, Some((0, "the maximum of 4 nodes is reached"))),
    ] {
        let mut bench = bench(2, 4);
        bench.wait(1..=waiting);
        assert_eq!(closes(&bench), expected.map(|(at, why)| (at, why.to_owned())), "{waiting} wait");
    }
}

#[test]
fn no_round_closes_while_a_member_runs_or_a_connection_is_broken() {
    let mut bench = bench(1, 4);
    bench.run([1, 2]);
    bench.wait([1]);
    assert_eq!(closes(&bench), None, "node 2 runs");
    bench.wait([2]);
    assert!(closes(&bench).is_some());
    bench.roster.disconnect(NodeId(2), bench.now);
    assert_eq!(closes(&bench), None, "node 2 may reconnect");
}

#[test]
fn the_members_of_the_last_world_wait_for_others_only_if_some_are_missing_or_more_come() {
    let settled = "settled for 5.0 s (settle_timeout) after this: the world changed";
    for (back, newcomers, expected) in [
        (vec![1, 2, 3], vec![], (0, "all members of round 1 are back")),
        (vec![1, 2], vec![], (5, settled)),
        (vec![1, 2], vec![4], (5, settled)), // a replacement
        (vec![1, 2, 3], vec![4], (30, "the last call of 30.0 s ended")),
        (vec![], vec![4, 5], (30, "the last call of 30.0 s ended")),
        (vec![1, 2, 3], vec![4, 5], (0, "the maximum of 5 nodes is reached")),
    ] {
        let mut bench = bench(1, 5);
        bench.run([1, 2, 3]);
        bench.wait(back.clone());
        end(&mut bench);
        bench.wait(newcomers.clone());
        assert_eq!(closes(&bench), Some((expected.0, expected.1.to_owned())), "{back:?} {newcomers:?}");
    }
}

#[test]
fn time_outs_count_from_when_enough_waited_and_end_no_earlier_than_unknown_members_must_have_stopped() {
    let mut bench = bench(2, 4);
    bench.wait([1, 2]);
    bench.pace.ready_since = Some(bench.now);
    bench.now += 20 * SECOND;
    assert_eq!(closes(&bench).map(|(at, _)| at), Some(10));
    bench.recovery.hold_for_unknown_worlds(bench.now + 15 * SECOND);
    assert_eq!(closes(&bench).map(|(at, _)| at), Some(15));
    bench.wait([3, 4]);
    assert_eq!(closes(&bench).map(|(at, _)| at), Some(15), "even if it is full");
}
