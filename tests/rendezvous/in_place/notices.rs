//! Members whose machines are taken away: all save, and the world changes once.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{
    CheckpointBy, CoordinatorMessage, Hello, NodeId, NodeMessage, REMOVED, Survival,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{SessionId, Standing};

use super::{ROUND, SECOND, attended, formed, settings};
use crate::bench::{Bench, hello, joins};

impl Bench {
    fn notice(&mut self, node: u64, left: Duration) {
        let left_ms = left.as_millis() as u64;
        self.send(node, NodeMessage::Notice { round: ROUND, left_ms, reason: "a test\n".into() });
    }

    /// Time passes, and the nodes are heard every second.
    fn hear(&mut self, nodes: &[u64], time: Duration) {
        for _ in 0..time.as_secs() {
            nodes.iter().for_each(|node| self.send(*node, NodeMessage::Heartbeat { rtt_us: None }));
            self.pass(SECOND);
        }
    }

    /// How often a node got a `CheckpointBy`.
    fn pushed(&self, node: u64) -> usize {
        let tells = |message: &CoordinatorMessage| matches!(message, CoordinatorMessage::CheckpointBy(_));
        self.sent.iter().filter(|(to, message)| *to == SessionId(node) && tells(message)).count()
    }
}

#[test]
fn three_notices_within_ten_seconds_are_one_change() {
    let mut bench = attended(4, 4);
    bench.notice(2, 30 * SECOND);
    let news = CheckpointBy { round: ROUND, left_ms: 30_000, reason: "10.0.0.2 (host:2): a test".into() };
    (1..=4).for_each(|node| assert_eq!(*bench.last(node), CoordinatorMessage::CheckpointBy(news.clone())));
    bench.pass(2 * SECOND);
    bench.notice(3, 30 * SECOND);
    bench.pass(3 * SECOND);
    bench.notice(4, 30 * SECOND);
    bench.notice(4, 30 * SECOND);
    bench.pass(4 * SECOND);
    assert!(matches!(bench.last(1), CoordinatorMessage::CheckpointBy(_)), "further ones may come");
    bench.pass(SECOND);
    assert_eq!(bench.change(1), (REMOVED, "10.0.0.2 (host:2) is about to leave: a test, and 2 more"));
    assert_eq!((1..=4).map(|node| bench.pushed(node)).collect::<Vec<_>>(), [1; 4]);
    (1..=4).for_each(|node| bench.count(node, 9));
    bench.assert_raise_at(&[1, 2, 3, 4], 10);
    (2..=4).for_each(|node| bench.send(node, NodeMessage::Parked { round: ROUND }));
    bench.stop(1, 10);
    bench.assert_go_on(1, false, 2);
    assert_eq!((bench.placement(1).world_size, bench.placement(1).restart), (1, 0));
    (2..=4).for_each(|node| bench.leave(node));
    assert!(!bench.is_stopped(1) && bench.run().standing() == Standing::Undisturbed, "{:?}", bench.sent);
}

#[test]
fn a_short_notice_is_not_kept_waiting() {
    let mut bench = attended(2, 2);
    bench.notice(2, 3 * SECOND);
    bench.pass(SECOND);
    assert_eq!(bench.change(1), (REMOVED, "10.0.0.2 (host:2) is about to leave: a test"));
}

#[test]
fn whoever_has_not_left_when_its_machine_goes_is_lost_heard_or_not() {
    for heard in [true, false] {
        let mut bench = attended(3, 3);
        bench.notice(2, 4 * SECOND);
        bench.notice(3, 60 * SECOND);
        bench.hear(if heard { &[1, 2, 3] } else { &[1, 3] }, 4 * SECOND);
        assert!(bench.run().knows(NodeId(2)), "what it has sent may not have been read yet");
        bench.pass(SECOND / 4);
        assert!(!bench.run().knows(NodeId(2)) && bench.run().knows(NodeId(3)), "heard: {heard}");
        let log = bench.notes.join("\n");
        assert!(log.contains("10.0.0.2 (host:2) is lost: its machine was taken away, and it had not left"), "{log}");
    }
}

#[test]
fn a_second_notice_counts_if_it_is_earlier() {
    let mut bench = attended(2, 2);
    bench.notice(2, 60 * SECOND);
    bench.notice(2, 4 * SECOND);
    bench.notice(2, 60 * SECOND);
    bench.hear(&[1, 2], 4 * SECOND);
    bench.pass(SECOND / 4);
    assert!(!bench.run().knows(NodeId(2)));
}

#[test]
fn a_machine_that_is_taken_away_goes_when_it_has_said_also_after_another_connection() {
    let mut bench = attended(2, 2);
    bench.notice(2, 4 * SECOND);
    let placed = bench.placed(2);
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.greet(12, Hello { placed, attending: true, ..hello(2, &settings(1, 2)) }, 2);
    bench.notice(12, 4 * SECOND);
    bench.hear(&[1], 4 * SECOND);
    assert!(bench.run().knows(NodeId(2)));
    bench.pass(SECOND / 4);
    assert!(!bench.run().knows(NodeId(2)));
}

#[test]
fn a_shorter_notice_does_not_wait_for_the_window_of_a_longer_one() {
    let mut bench = attended(3, 3);
    bench.notice(2, 120 * SECOND);
    bench.pass(SECOND);
    bench.notice(3, 3 * SECOND);
    bench.pass(SECOND);
    assert_eq!(bench.change(1), (REMOVED, "10.0.0.2 (host:2) is about to leave: a test, and 1 more"));
}

#[test]
fn a_member_that_leaves_at_once_does_not_wait_for_notices() {
    let mut bench = attended(3, 3);
    bench.notice(2, 30 * SECOND);
    bench.will_leave(3);
    assert_eq!(bench.change(1).0, REMOVED);
}

#[test]
fn members_that_cannot_change_in_place_run_on_until_the_first_leaves() {
    let mut bench = formed(3, 3);
    bench.notice(2, 30 * SECOND);
    bench.notice(3, 30 * SECOND);
    bench.pass(29 * SECOND / 2);
    assert!((1..=3).all(|node| bench.pushed(node) == 1 && !bench.is_stopped(node)), "{:?}", bench.sent);
    bench.leave(2);
    assert_eq!(bench.stopped(&[1, 3]), "10.0.0.2 (host:2) left: SIGTERM");
}

#[test]
fn a_later_notice_is_sent_again_and_none_once_the_round_is_over() {
    let mut bench = formed(3, 3);
    bench.notice(2, 120 * SECOND);
    bench.pass(11 * SECOND);
    bench.notice(3, 120 * SECOND);
    assert_eq!(bench.pushed(1), 2);
    bench.leave(3);
    bench.leave(2);
    bench.notice(1, 9 * SECOND);
    assert_eq!(bench.pushed(1), 2, "its round is over");
}

#[test]
fn of_machines_that_are_taken_away_together_none_counts() {
    let settings = Settings { rejoin_limit: 1, ..settings(1, 3) };
    let mut bench = Bench::formed(3, &settings);
    bench.notice(2, 30 * SECOND);
    bench.notice(3, 30 * SECOND);
    bench.leave(2);
    bench.leave(3); // because of the first
    for node in [20, 30] {
        bench.greet(
            node,
            Hello { node: NodeId(node.into()), process: node, ..hello(node / 10, &settings) },
            (node / 10) as u8,
        );
        assert!(!matches!(bench.last(node), CoordinatorMessage::Rejected { .. }), "{:?}", bench.last(node));
    }
}

#[test]
fn a_machine_that_is_taken_away_counts_against_nobody() {
    let settings = Settings { rejoin_limit: 1, ..settings(1, 2) };
    for (in_place, announced) in [(false, true), (false, false), (true, true)] {
        let mut bench = Bench::formed(2, &settings);
        if announced {
            bench.notice(2, 3 * SECOND);
        }
        if in_place {
            (1..=2).for_each(|node| bench.send(node, NodeMessage::Attending { round: ROUND }));
            bench.pass(SECOND);
            (1..=2).for_each(|node| bench.count(node, 1));
            bench.send(2, NodeMessage::Parked { round: ROUND });
        }
        bench.leave(2);
        bench.greet(20, Hello { node: NodeId(20), process: 20, ..hello(2, &settings) }, 1);
        let refused = matches!(bench.last(20), CoordinatorMessage::Rejected { .. });
        assert_eq!(refused, !announced, "{in_place} {announced}: {:?}", bench.last(20));
    }
}

/// Each waits for whoever still saves: one that has left, or has been stopped, could not take part in what the others write.
#[test]
fn nobody_is_stopped_while_another_saves_and_who_leaves_stays_until_all_have_saved() {
    let mut bench = attended(3, 3);
    bench.send(1, NodeMessage::Saves { round: ROUND });
    bench.notice(3, 600 * SECOND);
    bench.pass(10 * SECOND);
    (1..=3).for_each(|node| bench.count(node, 9));
    bench.assert_raise_at(&[1, 2, 3], 10);
    bench.send(3, NodeMessage::Parked { round: ROUND });
    bench.send(2, joins(1, Survival::Saved, Some(10)));
    bench.hear(&[1, 2, 3], 400 * SECOND);
    assert!((1..=3).all(|node| !bench.is_stopped(node)), "{:?}", bench.sent);
    bench.send(1, joins(1, Survival::Saved, Some(10)));
    assert_eq!(bench.stopped(&[3]), "all workers have stopped for the change");
    bench.assert_go_on(1, true, 0);
    assert_eq!((bench.placement(1).world_size, bench.placement(1).restart), (2, 0));
}

#[test]
fn members_wait_ten_minutes_for_one_that_saves() {
    for (saves, limit) in [(false, 30), (true, 630)] {
        let mut bench = attended(3, 3);
        if saves {
            bench.send(1, NodeMessage::Saves { round: ROUND });
        }
        bench.notice(3, 1200 * SECOND);
        bench.pass(10 * SECOND);
        (1..=3).for_each(|node| bench.count(node, 9));
        bench.send(3, NodeMessage::Parked { round: ROUND });
        bench.hear(&[1, 2, 3], limit * SECOND - SECOND);
        assert!(!bench.is_stopped(1), "{saves}");
        bench.hear(&[1, 2, 3], SECOND);
        assert!(bench.is_stopped(1), "{saves}");
        assert_eq!(bench.is_stopped(3), saves, "who has saved may go, too");
    }
}
