//! Joins with workers that have survived, and the bounds of what nodes say about them.

use elastic_rs::rendezvous::decider::event::SessionId;
use elastic_rs::rendezvous::protocol::message::{
    Hello, Join, LARGEST_COUNT, NodeMessage, Resume, SURVIVORS_LIMIT, Survivor,
};

use super::{ROUND, attended, settings};
use crate::bench::{back, failure, hello, join};

#[test]
fn a_failure_is_mended_in_place_and_a_node_without_survivors_restarts_all() {
    for (mine, expected) in [(back(1, &[(0, Some(7))], None), Some(3)), (back(1, &[], None), Some(2)), (join(1), None)]
    {
        let mut bench = attended(2, 2);
        bench.say(2, NodeMessage::Failed { round: ROUND, failure: failure() });
        bench.say(1, back(1, &[(0, Some(7)), (1, Some(7))], None));
        bench.say(2, mine);
        match (bench.resume(1), expected) {
            (_, Some(survivors)) => bench.assert_go_on(1, true, survivors),
            (Resume::Restart { reason }, None) => {
                assert!(reason.starts_with("10.0.0.2 (host:2) had to stop its workers"), "{reason}");
            }
            (resume, None) => panic!("{resume:?}"),
        }
        assert_eq!(bench.resume(1), bench.resume(2));
        assert_eq!(bench.place(1).restart, 1);
    }
}

/// The place is repeated with the same words about workers.
#[test]
fn a_place_that_was_lost_is_sent_again_with_how_workers_begin() {
    let mut bench = attended(2, 2);
    bench.will_leave(2);
    (1..=2).for_each(|node| bench.count(node, 1));
    bench.say(2, NodeMessage::Parked { round: ROUND });
    bench.stop(1, 2);
    let told = bench.last(1).clone();
    bench.machine.on_disconnected(SessionId(1), bench.now);
    bench.greet(11, Hello { joining: true, ..hello(1, &settings(1, 2)) }, 1);
    bench.say(11, back(1, &[(0, Some(7)), (1, Some(7))], Some(2)));
    let again: Vec<_> = bench.said.iter().filter(|(to, message)| *to == SessionId(11) && *message == told).collect();
    assert_eq!(again.len(), 1, "{:?}", bench.said);
}

#[test]
fn numbers_out_of_bounds_end_the_session_with_the_reason() {
    let survivors = |list: Vec<Survivor>| {
        let NodeMessage::Join(join) = join(1) else { unreachable!() };
        NodeMessage::JoinInPlace { join, survivors: list, check: None }
    };
    let of = |local_rank| Survivor { local_rank, commit: None };
    let nobody = NodeMessage::JoinInPlace {
        join: Join { round: ROUND, store_port: 1, node_rank: None, workers: None },
        survivors: Vec::new(),
        check: None,
    };
    let too_many = format!("{} surviving workers are named, at most {SURVIVORS_LIMIT} may be", SURVIVORS_LIMIT + 1);
    let too_far = format!("the number of checks is `{}`, must be at most {LARGEST_COUNT}", u64::MAX);
    for (message, reason) in [
        (survivors(vec![of(0); SURVIVORS_LIMIT + 1]), too_many.as_str()),
        (survivors(vec![of(1), of(0)]), "the surviving workers are not named by rising local rank"),
        (survivors(vec![of(0), of(0)]), "the surviving workers are not named by rising local rank"),
        (survivors(vec![of(2)]), "the local rank of a surviving worker is `2`, must be below local_world_size (`2`)"),
        (nobody, "a join names surviving workers without the number of workers"),
        (NodeMessage::Counted { round: ROUND, count: u64::MAX }, too_far.as_str()),
    ] {
        let mut bench = attended(2, 2);
        bench.say(1, message);
        assert_eq!((bench.rejection(1), &bench.ended[..]), (reason, &[SessionId(1)][..]));
    }
}

#[test]
fn reasons_of_members_that_leave_are_bounded_and_cannot_control_a_terminal() {
    let mut bench = attended(2, 2);
    let reason = format!("\u{1b}[2J{}", "語".repeat(20_000));
    bench.say(2, NodeMessage::WillLeave { round: ROUND, reason, signal: None });
    let (_, reason) = bench.change(1);
    assert!(reason.len() <= 4096 && !reason.contains('\u{1b}'), "{} bytes", reason.len());
}
