//! Joins with workers that have survived, and the bounds of what nodes say about them.

use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::rendezvous::messages::codec::{decode_frame, encode_frame};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, Join, JoinWorkers, LARGEST_COUNT, NodeMessage, Placed, Resume, Round,
    SURVIVORS_LIMIT, Survival, Survivor,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::SessionId;
use elastic_rs::wire::text::{LOCAL_WORLD_SIZE_LIMIT, NAME_LIMIT_BYTES};

use super::{ROUND, SECOND, attended, settings};
use crate::bench::{Bench, back, failure, hello, join, joins, survived};

/// A join in this round, of a node whose workers became this.
fn with(round: u64, survival: Survival) -> NodeMessage {
    joins(round, survival, None)
}

#[test]
fn a_failure_is_mended_in_place_and_a_node_without_survivors_restarts_all() {
    let stopped = "10.0.0.2 (host:2) had to stop its workers: ";
    for (mine, expected) in [
        (back(1, &[(0, Some(7))], None), Ok(3)),
        (back(1, &[], None), Ok(2)),
        (with(1, Survival::NeverAttended), Err(format!("{stopped}they cannot change in place"))),
        (with(1, Survival::NotYetAttended), Err(format!("{stopped}some of them had not come to"))),
        (join(1), Err("10.0.0.2 (host:2) does not report what became of its workers".to_owned())),
    ] {
        let mut bench = attended(2, 2);
        bench.send(2, NodeMessage::Failed { round: ROUND, failure: failure() });
        bench.send(1, back(1, &[(0, Some(7)), (1, Some(7))], None));
        bench.send(2, mine);
        match (bench.resume(1), expected) {
            (_, Ok(survivors)) => bench.assert_go_on(1, true, survivors),
            (Resume::Restart { reason }, Err(expected)) => assert!(reason.starts_with(&expected), "{reason}"),
            (resume, expected) => panic!("{resume:?}, not {expected:?}"),
        }
        assert_eq!(bench.resume(1), bench.resume(2));
        assert_eq!(bench.placement(1).restart, 1);
    }
}

/// The source of the last world, and of which round its state is. `None`: all workers are restarted, since nobody has that state.
fn source(bench: &Bench, node: u64) -> Option<(u32, u64)> {
    match bench.resume(node) {
        Resume::Continue { source, generation, .. } => Some((*source, generation.round.0)),
        Resume::Restart { reason } => {
            assert!(reason.starts_with("no worker lives that has the state of round"), "{reason}");
            None
        }
    }
}

/// A node is out of reach while its workers wait with 76 commits. The other begins again from the checkpoint, and commits 20 times. The
/// node comes back. These numbers have nothing to do with each other.
fn with_a_node_that_missed_a_round() -> Bench {
    let mut bench = attended(2, 2);
    bench.send(1, NodeMessage::Failed { round: ROUND, failure: failure() });
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.send(1, back(1, &[], None));
    for _ in 0..4 {
        bench.pass(SECOND);
    }
    assert_eq!(bench.placement(1).round.0, 2);
    let placed = Placed {
        round: ROUND,
        rank: 1,
        world_size: 2,
        world: bench.worlds[&ROUND],
        active: false,
        restart: 1,
        host: None,
        began_with: Generation { round: ROUND, world: bench.worlds[&ROUND] },
    };
    bench.greet(12, Hello { placed: Some(placed), joining: true, ..hello(2, &settings(1, 2)) }, 2);
    bench.send(12, back(1, &[(0, Some(76)), (1, Some(76))], None));
    bench.send(1, back(2, &[(0, Some(20)), (1, Some(20))], None));
    assert_eq!(bench.placement(12).round.0, 3);
    bench
}

#[test]
fn a_node_that_missed_a_round_is_never_the_source_whatever_its_commit() {
    let bench = with_a_node_that_missed_a_round();
    assert_eq!((source(&bench, 1), source(&bench, 12)), (Some((0, 2)), Some((0, 2))));
    // The next world fails before the node has the state of the others.
    for (of_others, expected) in
        [(vec![(0, Some(20)), (1, Some(20))], Some((0, 2))), (vec![(1, Some(20))], Some((1, 2))), (vec![], None)]
    {
        let mut bench = with_a_node_that_missed_a_round();
        bench.send(1, NodeMessage::Failed { round: Round(3), failure: failure() });
        bench.send(12, with(3, survived(1, &[(0, Some(76)), (1, Some(76))])));
        bench.send(1, with(3, survived(2, &of_others)));
        assert_eq!(bench.placement(1).round.0, 4);
        assert_eq!(source(&bench, 12), expected, "{of_others:?}");
    }
    // It was synchronised, and the others have died.
    let mut bench = with_a_node_that_missed_a_round();
    bench.send(1, NodeMessage::Failed { round: Round(3), failure: failure() });
    bench.send(12, back(3, &[(0, Some(22)), (1, Some(21))], None));
    bench.send(1, back(3, &[], None));
    assert_eq!(source(&bench, 12), Some((bench.placement(12).workers.unwrap().first_rank, 3)));
}

/// The others are lost meanwhile, and a new node comes.
#[test]
fn a_node_that_missed_a_round_and_a_new_one_begin_from_the_checkpoint() {
    let mut bench = with_a_node_that_missed_a_round();
    bench.machine.on_disconnected(SessionId(1), bench.now);
    bench.pass(SECOND);
    bench.newcomer(3, 2);
    bench.send(12, with(3, survived(1, &[(0, Some(76)), (1, Some(76))])));
    assert_eq!(bench.placement(3).round.0, 4);
    assert_eq!((source(&bench, 3), source(&bench, 12)), (None, None));
}

/// Its members say with which state their world began.
#[test]
fn a_restarted_coordinator_knows_which_survivors_have_the_state_of_the_last_world() {
    for (of, expected) in [(3, Some((0, 3))), (2, Some((0, 2))), (1, None)] {
        let mut bench = Bench::new();
        bench.worlds.extend([(Round(3), 33), (Round(2), 32), (ROUND, 31)]);
        for node in 1..=2 {
            let placed = Placed {
                round: Round(3),
                rank: node as u32 - 1,
                world_size: 2,
                world: 33,
                active: false,
                restart: 0,
                host: None,
                began_with: Generation { round: Round(2), world: 32 },
            };
            bench.greet(
                node,
                Hello { placed: Some(placed), joining: true, ..hello(node, &settings(2, 2)) },
                node as u8,
            );
            bench.send(node, with(3, survived(of, &[(0, Some(7)), (1, Some(7))])));
        }
        assert_eq!(bench.placement(1).round.0, 4);
        assert_eq!(source(&bench, 1), expected, "the state of round {of}");
    }
}

/// The place is repeated with the same words about workers.
#[test]
fn a_placement_that_was_lost_is_sent_again_with_how_workers_begin() {
    let mut bench = attended(2, 2);
    bench.will_leave(2);
    (1..=2).for_each(|node| bench.count(node, 1));
    bench.send(2, NodeMessage::Parked { round: ROUND });
    bench.stop(1, 2);
    let reported = bench.last(1).clone();
    bench.machine.on_disconnected(SessionId(1), bench.now);
    bench.greet(11, Hello { joining: true, ..hello(1, &settings(1, 2)) }, 1);
    bench.send(11, back(1, &[(0, Some(7)), (1, Some(7))], Some(2)));
    let again: Vec<_> =
        bench.sent.iter().filter(|(to, message)| *to == SessionId(11) && *message == reported).collect();
    assert_eq!(again.len(), 1, "{:?}", bench.sent);
}

#[test]
fn numbers_out_of_bounds_end_the_session_with_the_reason() {
    let survivors = |list: Vec<Survivor>| with(1, Survival::Attended(list));
    let of = |local_rank| Survivor { local_rank, generation: None, commit: None };
    let too_many = format!("{} surviving workers are named, at most {SURVIVORS_LIMIT} may be", SURVIVORS_LIMIT + 1);
    let too_far = format!("the number of checks is `{}`, must be at most {LARGEST_COUNT}", u64::MAX);
    for (message, reason) in [
        (survivors(vec![of(0); SURVIVORS_LIMIT + 1]), too_many.as_str()),
        (survivors(vec![of(1), of(0)]), "the surviving workers are not named by rising local rank"),
        (survivors(vec![of(0), of(0)]), "the surviving workers are not named by rising local rank"),
        (survivors(vec![of(2)]), "the local rank of a surviving worker is `2`, must be below local_world_size (`2`)"),
        (NodeMessage::Counted { round: ROUND, count: u64::MAX }, too_far.as_str()),
    ] {
        let mut bench = attended(2, 2);
        bench.send(1, message);
        assert_eq!((bench.rejection(1), &bench.ended[..]), (reason, &[SessionId(1)][..]));
    }
}

#[test]
fn reasons_of_members_that_leave_are_bounded_and_cannot_control_a_terminal() {
    let mut bench = attended(2, 2);
    let reason = format!("\u{1b}[2J{}", "語".repeat(20_000));
    bench.send(2, NodeMessage::WillLeave { round: ROUND, reason, signal: None });
    let (_, reason) = bench.change(1);
    assert!(reason.len() <= 4096 && !reason.contains('\u{1b}'), "{} bytes", reason.len());
}

/// The place is lost on a connection that is silent. The node fences itself while it waits, so its survivors end, and it joins again before
/// the coordinator gives it up.
#[test]
fn a_node_whose_survivors_have_ended_breaks_the_round_that_counts_on_them() {
    let mut bench = attended(2, 2);
    bench.send(1, NodeMessage::Failed { round: ROUND, failure: failure() });
    bench.send(1, back(1, &[(0, Some(7)), (1, Some(7))], None));
    bench.send(2, back(1, &[(0, Some(8)), (1, Some(8))], None));
    assert_eq!(bench.placement(2).round, Round(2));
    assert_eq!(source(&bench, 1), Some((2, 1)));
    let generation = Generation { round: ROUND, world: bench.worlds[&ROUND] };
    let placed = Placed {
        round: ROUND,
        rank: 1,
        world_size: 2,
        world: generation.world,
        active: false,
        restart: 1,
        host: None,
        began_with: generation,
    };
    let before = bench.sent.len();
    bench.greet(12, Hello { placed: Some(placed), joining: false, ..hello(2, &settings(1, 2)) }, 2);
    bench.send(12, back(1, &[], None));
    let sent = &bench.sent[before..];
    let stops = |(to, message): &(SessionId, CoordinatorMessage)| {
        *to == SessionId(1) && matches!(message, CoordinatorMessage::Status { waiting: 1.., .. })
    };
    assert!(sent.iter().any(stops), "{sent:#?}");
    assert!(!sent.iter().any(|(to, message)| *to == SessionId(12) && message.placement().is_some()), "{sent:#?}");
}

/// PyTorch's agent, or `in_place=off`.
#[test]
fn a_job_with_a_node_that_cannot_change_in_place_is_restarted() {
    let settings = Settings { settle_timeout: Duration::ZERO, ..Settings::new(2, 3) };
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings), 1);
    bench.greet(2, Hello { in_place: false, ..hello(2, &settings) }, 2);
    bench.greet(3, hello(3, &settings), 3);
    (1..=3).for_each(|node| bench.send(node, join(0)));
    for node in [1, 3] {
        bench.send(node, NodeMessage::Attending { round: ROUND });
    }
    bench.will_leave(3);
    assert!(bench.stopped(&[1, 2, 3]).contains("is about to leave"));
    bench.leave(3);
    bench.send(1, back(1, &[(0, Some(4)), (1, Some(4))], None));
    bench.send(2, join(1));
    bench.pass(Duration::ZERO);
    let Resume::Restart { reason } = bench.resume(1) else { panic!("{:?}", bench.last(1)) };
    assert_eq!(reason, "10.0.0.2 (host:2) has an agent that does not change in place");
    assert_eq!(bench.placement(2).resume, None);
}

/// The largest list of survivors fits into a frame, with the largest numbers and the longest role.
#[test]
fn the_longest_list_of_survivors_fits_into_a_frame() {
    let generation = Some(Generation { round: Round(u64::MAX), world: u64::MAX });
    let last = Survivor { local_rank: LOCAL_WORLD_SIZE_LIMIT, generation, commit: Some(u64::MAX) };
    let workers = JoinWorkers {
        script: Some("s".repeat(NAME_LIMIT_BYTES)),
        survival: Survival::Attended(vec![last; SURVIVORS_LIMIT]),
        check: Some(u64::MAX),
        ..JoinWorkers::new("r".repeat(NAME_LIMIT_BYTES), LOCAL_WORLD_SIZE_LIMIT)
    };
    let (round, node_rank, workers) = (Round(u64::MAX), Some(u32::MAX), Some(workers));
    let message =
        NodeMessage::Join(Join { round, store_port: u16::MAX, node_rank, workers, health: Default::default() });
    let mut frame = BytesMut::new();
    encode_frame(&message, &mut frame);
    assert_eq!(decode_frame::<NodeMessage>(&mut frame), Ok(Some(message)));
}
