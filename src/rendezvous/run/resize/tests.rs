use super::*;
use crate::rendezvous::messages::message::NodeId;
use crate::rendezvous::messages::settings::Settings;
use crate::rendezvous::run::bench::{Bench, SECOND};
use crate::rendezvous::run::in_place::RETURN_WITHIN;
use crate::rendezvous::run::node::Status;

/// Nodes 1 and 2 run, and up to four nodes can.
fn two_of_four() -> Bench {
    let mut bench = Bench::new(Settings { last_call_timeout: 30 * SECOND, ..Settings::new(1, 4) });
    bench.run([1, 2]);
    bench
}

fn step(bench: &Bench) -> NextStep {
    next_step(bench.parts(), bench.now)
}

/// A change that has begun.
fn begun(bench: &mut Bench) -> PlannedChange {
    let NextStep::Begin(change) = step(bench) else { panic!("{:?}", step(bench)) };
    bench.in_place.begin(change.clone());
    change
}

#[test]
fn an_undisturbed_world_that_nobody_joins_or_leaves_goes_on() {
    assert_eq!(step(&two_of_four()), NextStep::Wait(None));
}

#[test]
fn newcomers_have_a_last_call_unless_the_world_would_be_full() {
    for (newcomers, waits) in [(vec![3], true), (vec![3, 4], false)] {
        let mut bench = two_of_four();
        bench.wait(newcomers);
        let last_call_ends = bench.now + 30 * SECOND;
        if waits {
            assert_eq!(step(&bench), NextStep::Wait(Some(last_call_ends)));
            bench.now = last_call_ends;
        }
        let change = begun(&mut bench);
        assert_eq!((change.flags, change.firm), (ADDED, false));
        assert_eq!(change.phase, Phase::Counting { until: bench.now + COUNT_WITHIN });
    }
}

#[test]
fn a_member_that_asks_to_leave_waits_for_no_last_call() {
    for (newcomers, flags) in [(vec![], REMOVED), (vec![3], REMOVED | ADDED)] {
        let mut bench = two_of_four();
        bench.wait(newcomers);
        bench.in_place.announce(NodeId(2), leaver());
        let change = begun(&mut bench);
        assert_eq!(change.flags, flags);
        assert!(change.reason.starts_with("10.0.0.2 (node2) is about to leave: SIGTERM"), "{}", change.reason);
    }
}

#[test]
fn members_that_do_not_all_attend_are_interrupted_for_one_that_leaves_but_not_for_newcomers() {
    let mut bench = two_of_four();
    let id = NodeId(1);
    bench.roster.set_done(id);
    bench.wait([3]);
    assert_eq!(step(&bench), NextStep::Wait(None));
    bench.in_place.announce(NodeId(2), leaver());
    assert_eq!(step(&bench), NextStep::Interrupt("10.0.0.2 (node2) is about to leave: SIGTERM".to_owned()));
}

#[test]
fn all_must_count_in_time_and_a_count_beyond_the_check_is_returned() {
    let mut bench = two_of_four();
    bench.in_place.announce(NodeId(2), leaver());
    let change = begun(&mut bench);
    assert_eq!(bench.in_place.on_counted(NodeId(1), 5), None);
    assert_eq!(step(&bench), NextStep::Wait(Some(bench.now + COUNT_WITHIN)));
    bench.now += COUNT_WITHIN;
    assert_eq!(
        step(&bench),
        NextStep::Fail(format!(
            "10.0.0.2 (node2) has not counted checks within 5 s; the world was to change because {}",
            change.reason
        ))
    );
    assert_eq!(bench.in_place.on_counted(NodeId(2), 3), None);
    assert_eq!(step(&bench), NextStep::Raise(6), "the last count comes at the last instant");
    bench.in_place.raise(6);
    for (count, passed) in [(5, None), (6, Some(6)), (7, Some(6))] {
        assert_eq!(bench.in_place.on_counted(NodeId(2), count), passed, "{count}");
    }
}

#[test]
fn a_change_is_called_off_when_its_newcomers_are_gone_unless_an_earlier_coordinator_began_it() {
    for (firm, expected) in [(false, NextStep::CallOff), (true, NextStep::Raise(1))] {
        let mut bench = two_of_four();
        bench.wait([3, 4]);
        let change = begun(&mut bench);
        bench.in_place.begin(PlannedChange { firm, ..change });
        [1, 2].into_iter().for_each(|id| _ = bench.in_place.on_counted(NodeId(id), 0));
        assert_eq!(step(&bench), NextStep::Raise(1));
        [3, 4].into_iter().for_each(|id| bench.roster.remove(NodeId(id)));
        assert_eq!(step(&bench), expected);
    }
}

#[test]
fn once_a_member_is_back_the_others_have_thirty_seconds() {
    let mut bench = two_of_four();
    bench.wait([3, 4]);
    begun(&mut bench);
    bench.in_place.raise(1);
    assert_eq!(step(&bench), NextStep::Wait(None), "nobody has stopped yet");
    bench.in_place.stop_at(NodeId(1), Some(1));
    let back_by = bench.now + RETURN_WITHIN;
    assert_eq!(step(&bench), NextStep::Wait(Some(back_by)));
    bench.in_place.wait(Some(back_by));
    bench.now += SECOND;
    assert_eq!(step(&bench), NextStep::Wait(Some(back_by)), "from the first one on");
    bench.in_place.extend(bench.now);
    let back_by = bench.now + RETURN_WITHIN;
    assert_eq!((step(&bench), bench.in_place.due_at()), (NextStep::Wait(Some(back_by)), Some(back_by)));
    bench.now = back_by;
    let NextStep::Fail(reason) = step(&bench) else { panic!("{:?}", step(&bench)) };
    assert!(reason.starts_with("10.0.0.1 (node1) and 1 more have not stopped 30 s after others; "), "{reason}");
}

#[test]
fn nobody_may_finish_while_others_have_stopped_for_the_change() {
    let mut bench = two_of_four();
    bench.wait([3, 4]);
    begun(&mut bench);
    bench.in_place.raise(1);
    bench.roster.set_done(NodeId(2));
    assert_eq!(step(&bench), NextStep::Wait(None));
    bench.in_place.stop_at(NodeId(1), Some(1));
    let NextStep::Fail(reason) = step(&bench) else { panic!("{:?}", step(&bench)) };
    assert!(reason.starts_with("10.0.0.2 (node2) has finished, and others have stopped for a change; "), "{reason}");
}

#[test]
fn a_change_that_is_over_leaves_what_its_end_does_not_touch() {
    let mut bench = two_of_four();
    bench.wait([3, 4]);
    begun(&mut bench);
    bench.in_place.set_without_group();
    bench.in_place.announce(NodeId(2), leaver());
    bench.in_place.on_counted(NodeId(1), 4);
    bench.in_place.stop_at(NodeId(2), Some(5));
    bench.in_place.break_off();
    assert!(!bench.in_place.is_changing() && bench.in_place.leaving().is_empty());
    assert!(bench.in_place.is_without_group(), "the workers are the same");
    assert_eq!(bench.in_place.stopped_at(NodeId(2)), Some(5), "it waits, with its workers where they have stopped");
    bench.in_place.begin_round(None, BTreeSet::new());
    assert!(!bench.in_place.is_without_group());
    assert_eq!(bench.in_place.stopped_at(NodeId(2)), None);
}

#[test]
fn a_change_ends_when_no_member_runs_any_more() {
    let mut bench = two_of_four();
    bench.in_place.announce(NodeId(2), leaver());
    begun(&mut bench);
    bench.in_place.raise(1);
    [1, 2].into_iter().for_each(|id| bench.roster.set_status(NodeId(id), Status::Idle));
    assert_eq!(step(&bench), NextStep::Wait(None));
}

fn leaver() -> Leaver {
    Leaver { reason: "SIGTERM".to_owned(), not_before: None, taken_away: false }
}
