//! Members reconnect during a change, to the same coordinator or to a restarted one.

use elastic_rs::rendezvous::messages::message::{
    ADDED, CoordinatorMessage, Generation, Hello, NodeMessage, Placed, REMOVED, Round, WorldChange,
};
use elastic_rs::rendezvous::run::SessionId;

use super::{attended, settings};
use crate::bench::{Bench, back, hello};

impl Bench {
    /// What a node says of its place in the world of two when it connects again.
    pub(super) fn placed(&self, node: u64) -> Option<Placed> {
        let mut sent = self.sent.iter();
        let placement = sent.find_map(|(to, message)| (*to == SessionId(node)).then_some(message.placement()?));
        let placement = placement.unwrap();
        let (round, rank, world) = (placement.round, placement.rank, placement.world);
        Some(Placed {
            round,
            rank,
            world_size: 2,
            world,
            active: true,
            restart: 0,
            host: None,
            began_with: Generation::default(),
        })
    }
}

#[test]
fn a_member_that_reconnects_gets_the_change_again() {
    let mut bench = attended(2, 2);
    bench.will_leave(2);
    let mine = bench.placed(1);
    bench.machine.on_disconnected(SessionId(1), bench.now);
    bench.greet(11, Hello { placed: mine, ..hello(1, &settings(1, 2)) }, 1);
    assert_eq!(bench.change(11), (REMOVED, "10.0.0.2 (host:2) is about to leave: SIGTERM"));
    assert!(!bench.is_stopped(11));
    bench.count(11, 7);
    bench.count(2, 7);
    bench.assert_raise_at(&[11, 2], 8);
    bench.machine.on_disconnected(SessionId(11), bench.now);
    bench.greet(12, Hello { placed: mine, ..hello(1, &settings(1, 2)) }, 1);
    bench.assert_raise_at(&[12], 8);
    let reported: Vec<_> =
        bench.sent.iter().filter(|(to, _)| *to == SessionId(12)).map(|(_, message)| message).collect();
    assert!(
        matches!(
            reported[..],
            [
                CoordinatorMessage::Welcome { .. },
                CoordinatorMessage::Status { waiting: 0, .. },
                CoordinatorMessage::Change(_),
                _
            ]
        ),
        "{reported:?}"
    );
}

/// A member of round 5 at a coordinator that was restarted.
fn member(node: u64, attending: bool) -> Hello {
    let placed = Placed {
        round: Round(5),
        rank: node as u32 - 1,
        world_size: 2,
        world: 77,
        active: true,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    };
    Hello { placed: Some(placed), attending, ..hello(node, &settings(1, 3)) }
}

#[test]
fn a_restarted_coordinator_goes_on_with_a_change_that_members_report() {
    let mut bench = Bench::new();
    bench.newcomer(3, 3);
    for node in [1, 2] {
        bench.greet(node, member(node, true), node as u8);
        assert!(!bench.is_stopped(node), "{:?}", bench.sent);
    }
    // The first got check 31. The other one had counted.
    bench.send(1, NodeMessage::Counted { round: Round(5), count: 30 });
    bench.send(2, NodeMessage::Counted { round: Round(5), count: 29 });
    for node in [1, 2] {
        assert_eq!(*bench.last(node), CoordinatorMessage::RaiseAt { round: Round(5), check: 31 });
    }
}

/// Workers may have got a check, so that they stop there whether or not a node still waits.
#[test]
fn a_change_that_began_elsewhere_is_not_called_off() {
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, member(node, true), node as u8);
    }
    bench.send(1, NodeMessage::Counted { round: Round(5), count: 30 });
    let change = bench
        .sent
        .iter()
        .rfind(|(to, message)| *to == SessionId(2) && matches!(message, CoordinatorMessage::Change(_)));
    let Some((_, CoordinatorMessage::Change(WorldChange { reason, flags, .. }))) = change else {
        panic!("{:?}", bench.sent)
    };
    assert_eq!((reason.as_str(), *flags), ("its change began before this coordinator was restarted", REMOVED | ADDED));
    bench.send(2, NodeMessage::Counted { round: Round(5), count: 28 });
    assert_eq!(*bench.last(1), CoordinatorMessage::RaiseAt { round: Round(5), check: 31 });
}

/// A member that has stopped at the check waits at the restarted coordinator for the one that has not.
#[test]
fn a_restarted_coordinator_lets_the_others_stop_where_one_has_stopped() {
    let mut bench = Bench::new();
    let Hello { placed, .. } = member(1, false);
    let waiting =
        Hello { placed: placed.map(|placed| Placed { active: false, ..placed }), joining: true, ..member(1, false) };
    bench.worlds.extend(placed.map(|placed| (placed.round, placed.world)));
    bench.greet(1, waiting, 1);
    bench.send(1, back(5, &[(0, Some(3)), (1, Some(3))], Some(31)));
    bench.greet(2, member(2, true), 2);
    bench.send(2, NodeMessage::Counted { round: Round(5), count: 30 });
    assert_eq!(*bench.last(2), CoordinatorMessage::RaiseAt { round: Round(5), check: 31 });
    bench.send(2, back(5, &[(0, Some(3)), (1, Some(3))], Some(31)));
    bench.assert_go_on(1, false, 4);
}

#[test]
fn a_restarted_coordinator_stops_members_that_cannot_go_on_with_a_change() {
    let mut bench = Bench::new();
    bench.greet(1, member(1, true), 1);
    bench.greet(2, member(2, false), 2);
    bench.send(1, NodeMessage::Counted { round: Round(5), count: 30 });
    assert_eq!(bench.stopped(&[1, 2]), "its change began before this coordinator was restarted");
}
