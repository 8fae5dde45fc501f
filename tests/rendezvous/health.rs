//! Nodes whose machines are ill are in no world: their hosts are out for a while, and are checked again.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::messages::message::{
    CHECK_WITHIN, CoordinatorMessage, Health, Join, NodeMessage, Round, Waits,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{SessionId, Standing};

const SECOND: Duration = Duration::from_secs(1);

fn settings(min: u32, max: u32) -> Settings {
    Settings { settle_timeout: 2 * SECOND, last_call_timeout: 2 * SECOND, ..Settings::new(min, max) }
}

fn ill() -> Health {
    Health::Ill("GPU 3 needs a reset".to_owned())
}

impl Bench {
    fn meet(count: u64, settings: &Settings) -> Self {
        let mut bench = Self::new();
        (1..=count).for_each(|node| bench.greet(node, hello(node, settings), node as u8));
        bench
    }

    fn join_with(&mut self, node: u64, round: u64, health: Health) {
        let NodeMessage::Join(join) = join(round) else { unreachable!() };
        self.send(node, NodeMessage::Join(Join { health, ..join }));
    }

    /// Time passes, and the nodes are heard every second.
    fn stay(&mut self, nodes: &[u64], time: Duration) {
        for _ in 0..time.as_secs() {
            nodes.iter().for_each(|node| self.send(*node, NodeMessage::Heartbeat { rtt_us: None }));
            self.pass(SECOND);
        }
    }

    fn round(&self) -> u64 {
        self.run().round().0
    }

    fn asked_to_check(&self, node: u64) -> usize {
        let asks = |message: &CoordinatorMessage| *message == CoordinatorMessage::CheckHealth;
        self.sent.iter().filter(|(to, message)| *to == SessionId(node) && asks(message)).count()
    }

    fn waits_since(&self, node: u64) -> &str {
        let mut sent = self.sent.iter().rev();
        let waits = sent.find_map(|(to, message)| match message {
            CoordinatorMessage::Waits(Waits { progress, .. })
            | CoordinatorMessage::Heartbeat { waits: Some(Waits { progress, .. }) }
                if *to == SessionId(node) =>
            {
                Some(progress)
            }
            _ => None,
        });
        waits.expect("it waits")
    }
}

#[test]
fn a_check_that_is_shorter_than_the_last_call_costs_no_time() {
    let mut bench = Bench::meet(2, &settings(2, 4));
    (1..=2).for_each(|node| bench.join_with(node, 0, Health::Checking));
    bench.stay(&[1, 2], SECOND);
    (1..=2).for_each(|node| bench.join_with(node, 0, Health::Well));
    assert_eq!((bench.round(), bench.run().standing()), (0, Standing::LastCall));
    bench.stay(&[1, 2], SECOND);
    assert_eq!(bench.round(), 1, "2 s after the second one has joined");
}

#[test]
fn a_round_waits_for_a_longer_check_and_closes_with_its_end() {
    let mut bench = Bench::meet(2, &settings(2, 2));
    bench.join_with(1, 0, Health::Unchecked);
    bench.join_with(2, 0, Health::Checking);
    assert_eq!((bench.round(), bench.run().standing()), (0, Standing::Checking));
    assert!(bench.run().progress(bench.now).contains("the health check of a node runs"));
    bench.stay(&[1, 2], 30 * SECOND);
    assert_eq!(bench.round(), 0);
    bench.join_with(2, 0, Health::Well);
    assert_eq!(bench.round(), 1);
}

#[test]
fn a_node_whose_check_does_not_end_is_left_out() {
    let mut bench = Bench::meet(2, &settings(1, 2));
    bench.join_with(1, 0, Health::Unchecked);
    bench.join_with(2, 0, Health::Checking);
    bench.stay(&[1, 2], CHECK_WITHIN - SECOND);
    bench.join_with(2, 0, Health::Checking);
    assert_eq!(bench.round(), 0);
    bench.stay(&[1, 2], SECOND);
    assert_eq!((bench.round(), bench.placement(1).world_size), (1, 1));
    let told = "10.0.0.2 (host:2) is left out until its health check has ended";
    assert!(bench.notes.iter().any(|note| note == told), "{:?}", bench.notes);
    bench.join_with(2, 0, Health::Well);
    assert_eq!(bench.run().standing(), Standing::Reforming);
}

#[test]
fn a_spare_takes_the_place_of_an_ill_node_at_once() {
    let mut bench = Bench::meet(3, &settings(1, 2));
    (1..=2).for_each(|node| bench.join_with(node, 0, Health::Well));
    bench.join_with(3, 0, Health::Well);
    assert_eq!(bench.round(), 1);
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: Box::new(*failure()) });
    bench.join_with(1, 1, Health::Well);
    bench.join_with(2, 1, Health::Checking);
    bench.stay(&[1, 2, 3], 9 * SECOND);
    assert_eq!(bench.round(), 1);
    bench.join_with(2, 1, ill());
    assert_eq!((bench.round(), bench.placement(1).world_size, bench.placement(3).rank), (2, 2, 1));
    bench.stay(&[1, 2, 3], SECOND);
    let text = " s: its health check has found this: GPU 3 needs a reset (--health-check); round 3: ";
    let waits = |text: &str| text.starts_with("host 10.0.0.2 is out for ");
    assert!(waits(bench.waits_since(2)) && bench.waits_since(2).contains(text), "{}", bench.waits_since(2));
    // A new agent of that host waits too, whatever it says.
    bench.greet(4, hello(4, &settings(1, 2)), 2);
    bench.join_with(4, 0, Health::Well);
    assert!(waits(bench.waits_since(4)) && bench.waits_since(4).contains(text), "{}", bench.waits_since(4));
}

#[test]
fn too_few_well_nodes_wait_and_say_why() {
    let mut bench = Bench::meet(2, &settings(2, 2));
    bench.join_with(1, 0, Health::Well);
    bench.join_with(2, 0, ill());
    bench.stay(&[1, 2], 60 * SECOND);
    assert_eq!((bench.round(), bench.run().standing()), (0, Standing::Gathering));
    let progress = bench.run().progress(bench.now);
    assert!(progress.contains("hosts that are out: 10.0.0.2 for 540 s"), "{progress}");
}

#[test]
fn an_ill_node_is_checked_again_and_its_time_doubles_until_it_is_well() {
    let mut bench = Bench::meet(2, &settings(1, 2));
    bench.join_with(1, 0, Health::Well);
    bench.join_with(2, 0, ill());
    bench.join_with(2, 0, ill()); // sent again on a new connection
    bench.stay(&[1, 2], 599 * SECOND);
    assert_eq!((bench.round(), bench.asked_to_check(2)), (1, 0));
    bench.stay(&[1, 2], SECOND);
    assert_eq!(bench.asked_to_check(2), 1);
    bench.join_with(2, 0, Health::Checking);
    bench.stay(&[1, 2], 5 * SECOND);
    assert_eq!(bench.round(), 1, "the world does not stop for it before it is well");
    bench.join_with(2, 0, ill());
    bench.stay(&[1, 2], 1199 * SECOND);
    assert_eq!(bench.asked_to_check(2), 1);
    bench.stay(&[1, 2], SECOND);
    assert_eq!(bench.asked_to_check(2), 2);
    bench.join_with(2, 0, Health::Checking);
    bench.join_with(2, 0, Health::Well);
    bench.stay(&[1, 2], 3 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Reforming, "{:?}", bench.run().progress(bench.now));
    bench.join_with(1, 1, Health::Well);
    assert_eq!((bench.round(), bench.placement(2).world_size), (2, 2));
}

#[test]
fn a_world_does_not_stop_for_a_newcomer_that_is_checked() {
    let mut bench = Bench::meet(2, &settings(1, 2));
    bench.join_with(1, 0, Health::Well);
    bench.stay(&[1, 2], 3 * SECOND);
    assert_eq!(bench.round(), 1);
    bench.join_with(2, 0, Health::Checking);
    bench.stay(&[1, 2], 20 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.join_with(2, 0, Health::Well);
    assert_eq!(bench.run().standing(), Standing::Reforming);
    bench.join_with(1, 1, Health::Well);
    assert_eq!(bench.placement(2).world_size, 2, "its last call began when it joined");
}

/// It was a member of an earlier round.
#[test]
fn a_world_does_not_stop_for_an_ill_member_of_before_that_is_checked_again() {
    let mut bench = Bench::meet(2, &settings(1, 2));
    (1..=2).for_each(|node| bench.join_with(node, 0, Health::Well));
    bench.stay(&[1, 2], 3 * SECOND);
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: Box::new(*failure()) });
    bench.join_with(1, 1, Health::Well);
    bench.join_with(2, 1, ill());
    bench.stay(&[1, 2], 3 * SECOND);
    assert_eq!(bench.round(), 2, "without it");
    bench.stay(&[1, 2], 600 * SECOND);
    assert_eq!((bench.asked_to_check(2), bench.run().standing()), (1, Standing::Undisturbed));
    bench.join_with(2, 1, Health::Checking);
    bench.stay(&[1, 2], 20 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.join_with(2, 1, Health::Well);
    bench.stay(&[1, 2], 3 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Reforming);
}

#[test]
fn a_long_finding_is_refused() {
    let mut bench = Bench::meet(1, &settings(1, 1));
    bench.join_with(1, 0, Health::Ill("x".repeat(300)));
    let text = bench.rejection(1);
    assert!(text.contains("finding of the health check"), "{text}");
}

/// Nor for one that comes late.
#[test]
fn nobody_is_waited_for_longer_than_one_check() {
    let mut bench = Bench::meet(3, &settings(1, 3));
    bench.join_with(1, 0, Health::Unchecked);
    bench.join_with(2, 0, Health::Checking);
    bench.stay(&[1, 2, 3], 30 * SECOND);
    bench.join_with(3, 0, Health::Checking);
    bench.stay(&[1, 2, 3], 4 * SECOND);
    assert_eq!(bench.round(), 0);
    bench.stay(&[1, 2, 3], SECOND);
    assert_eq!((bench.round(), bench.placement(1).world_size), (1, 1));
    let progress = bench.run().progress(bench.now);
    assert!(
        progress.contains("left out until their health checks have ended (10.0.0.2 (host:2), 10.0.0.3"),
        "{progress}"
    );
}

#[test]
fn what_happens_at_another_host_lets_nobody_in_before_its_check_has_ended() {
    let mut bench = Bench::meet(3, &settings(1, 3));
    bench.join_with(1, 0, Health::Well);
    bench.stay(&[1, 2, 3], 3 * SECOND);
    bench.join_with(2, 0, Health::Checking);
    bench.join_with(3, 0, ill());
    bench.stay(&[1, 2, 3], 5 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
}

/// The request may be lost with the connection that it was sent on.
#[test]
fn what_was_found_before_is_no_answer_to_a_new_check() {
    let mut bench = Bench::meet(2, &settings(1, 2));
    bench.join_with(1, 0, Health::Well);
    bench.join_with(2, 0, ill());
    bench.stay(&[1, 2], 600 * SECOND);
    assert_eq!(bench.asked_to_check(2), 1);
    bench.join_with(2, 0, ill());
    assert_eq!(bench.asked_to_check(2), 2, "asked again");
    bench.join_with(2, 0, Health::Checking);
    bench.join_with(2, 0, Health::Well);
    bench.stay(&[1, 2], 3 * SECOND);
    assert_eq!(bench.run().standing(), Standing::Reforming);
}
