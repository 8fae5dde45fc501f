//! Bounds on the claims of unauthenticated peers: times, counts, places and addresses. The run's settings apply, not those of a Hello, and
//! a claim of a node that was never a member restores nothing.

use std::net::IpAddr;
use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::coordinator::machine::{DESERTED_RUNS, VACANT_RUNS};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, NodeId, NodeMessage, Placed, Round,
};
use elastic_rs::rendezvous::messages::settings::{LONGEST_GRACE, LONGEST_LEASE, LONGEST_WAIT, Settings};
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::{Ends, SessionId};

const SECOND: Duration = Duration::from_secs(1);
/// A visitor's session, and the last byte of its address.
const VISITOR: u64 = 66;

/// Settings with the longest times that are allowed.
fn endless(settings: &Settings) -> Settings {
    Settings {
        keep_alive_interval: LONGEST_LEASE,
        keep_alive_max_attempt: 1,
        reconnect_grace: LONGEST_GRACE,
        last_call_timeout: LONGEST_WAIT,
        settle_timeout: LONGEST_WAIT,
        ..settings.clone()
    }
}

fn claim(world: u64, round: u64) -> Placed {
    Placed {
        round: Round(round),
        rank: 0,
        world_size: 2,
        world,
        active: true,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    }
}

impl Bench {
    fn visit(&mut self, session: u64, hello: Hello, sent: Vec<NodeMessage>) {
        self.greet(session, hello, 66);
        sent.into_iter().for_each(|message| self.send(session, message));
        self.machine.on_disconnected(SessionId(session), self.now);
        self.take();
    }
}

#[test]
fn times_above_the_limits_are_rejected() {
    let year = Duration::from_secs(365 * 24 * 3600);
    let usual = Settings::new(2, 2);
    for (settings, reason) in [
        (
            Settings { keep_alive_interval: year, ..usual.clone() },
            "keep_alive_interval is `31536000s`, must be from 10ms to 3600s",
        ),
        (
            Settings { keep_alive_max_attempt: 1000, ..usual.clone() },
            "keep_alive_interval * keep_alive_max_attempt is `5000s`, must be at most 3600s",
        ),
        (Settings { reconnect_grace: year, ..usual.clone() }, "reconnect_grace is `31536000s`, must be at most 60s"),
        (
            Settings { last_call_timeout: year, ..usual.clone() },
            "last_call_timeout is `31536000s`, must be at most 86400s",
        ),
        (Settings { rejoin_window: year, ..usual.clone() }, "rejoin_window is `31536000s`, must be at most 86400s"),
        (Settings { rejoin_limit: 5000, ..usual.clone() }, "rejoin_limit is `5000`, must be from 0 to 1000"),
    ] {
        let mut bench = Bench::new();
        bench.greet(1, hello(1, &settings), 1);
        assert_eq!(bench.rejection(1), reason);
    }
}

#[test]
fn ranks_that_no_member_can_have_are_rejected() {
    let settings = Settings { max_restarts: Some(3), ..Settings::new(2, 2) };
    for (placed, reason) in [
        (
            Placed { world_size: 3, ..claim(5, 1) },
            "the world size of the last round is `3`, must be from 1 to max_nodes (`2`)",
        ),
        (Placed { rank: 2, ..claim(5, 1) }, "the rank of the last round is `2`, must be below its world size (`2`)"),
        (Placed { restart: 4, ..claim(5, 1) }, "the restart number is `4`, must be at most max_restarts (`3`)"),
        (
            claim(5, u64::MAX),
            "host:1 reports a place in round 18446744073709551615, which must be at most 281474976710656: start this agent \
             again",
        ),
    ] {
        let mut bench = Bench::new();
        bench.greet(1, Hello { placed: Some(placed), ..hello(1, &settings) }, 1);
        assert_eq!(bench.rejection(1), reason);
    }
}

/// A visitor that joins and disconnects must not delay the job for the long grace that it asked for.
#[test]
fn a_visitor_that_has_joined_and_gone_delays_no_round() {
    for placed in [None, Some(claim(5, 7))] {
        let settings = Settings::new(2, 2);
        let mut bench = Bench::new();
        bench.visit(VISITOR, Hello { placed, ..hello(VISITOR, &endless(&settings)) }, vec![join(0)]);
        for node in [1, 2] {
            bench.greet(node, hello(node, &settings), node as u8);
            bench.send(node, join(0));
        }
        // The job's own grace for the visitor, or one lease if it has claimed a place in an unknown world.
        let wait = placed.map_or(settings.reconnect_grace, |_| settings.lease() + SECOND);
        let by = bench.now + wait;
        while bench.machine.next_deadline().is_some_and(|at| at <= by) {
            let at = bench.machine.next_deadline().unwrap();
            bench.pass(at.saturating_duration_since(bench.now));
        }
        let round = placed.map_or(1, |placed| placed.round.0 + 1);
        assert!(bench.is_placed(1, round) && bench.is_placed(2, round), "{:?}", bench.last(1));
    }
}

/// A visitor may give the run its settings while others join. When it goes, the settings of the next node apply.
#[test]
fn a_visitors_settings_end_with_its_connection() {
    let settings = Settings::new(2, 3);
    let mut bench = Bench::new();
    bench.greet(VISITOR, hello(VISITOR, &endless(&settings)), 66);
    bench.send(VISITOR, join(0));
    bench.greet(1, hello(1, &settings), 1);
    bench.send(1, join(0));
    bench.machine.on_disconnected(SessionId(VISITOR), bench.now);
    bench.take();
    let terms = CoordinatorMessage::Terms { keep_alive_interval: 5 * SECOND, keep_alive_max_attempt: 3 };
    assert_eq!(bench.last(1), &terms);
    bench.greet(2, hello(2, &settings), 2);
    bench.send(2, join(0));
    for _ in 0..31 {
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.send(2, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(SECOND);
    }
    let placed = bench.sent.iter().filter(|(_, message)| message.placement().is_some()).count();
    assert_eq!(placed, 2, "{:?}", bench.last(1));
}

/// The next nodes do not wait for a world that a visitor formed alone with `--nnodes=1:2`.
#[test]
fn a_world_of_a_visitor_that_has_gone_is_not_waited_for() {
    let settings = Settings { last_call_timeout: Duration::ZERO, ..Settings::new(1, 2) };
    let mut bench = Bench::new();
    let visitors = Settings { last_call_timeout: Duration::ZERO, ..endless(&settings) };
    bench.visit(VISITOR, hello(VISITOR, &visitors), vec![join(0)]);
    bench.greet(1, hello(1, &settings), 1);
    bench.send(1, join(0));
    bench.pass(settings.reconnect_grace);
    bench.pass(SECOND);
    assert!(bench.is_placed(1, 2), "{:?}", bench.last(1));
}

/// A node that sends Hello with another `--nnodes`, and no Join, does not fix the run's settings.
#[test]
fn a_node_that_only_says_hello_decides_nothing() {
    let mut bench = Bench::new();
    bench.greet(VISITOR, hello(VISITOR, &endless(&Settings::new(7, 7))), 66);
    let settings = Settings::new(2, 2);
    for node in [1, 2] {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    assert!(bench.is_placed(1, 1) && bench.is_placed(2, 1));
    bench.send(VISITOR, join(0));
    assert!(bench.rejection(VISITOR).contains("`job` was opened for 2: give every node the same `--nnodes`"));
    assert!(bench.ended.contains(&SessionId(VISITOR)));
}

/// A claim to round 2^64-1 must not use up the round numbers: no later round could form.
#[test]
fn claimed_ranks_do_not_touch_a_running_world() {
    let settings = Settings { max_restarts: Some(3), ..Settings::new(2, 2) };
    let mut bench = Bench::formed(2, &settings);
    let sent = |bench: &Bench| bench.sent.iter().filter(|(to, _)| [SessionId(1), SessionId(2)].contains(to)).count();
    let before = sent(&bench);
    let mut next = 2;
    for turn in 0..20 {
        // Each number that a job could have raises the next round's. One that no job has is not believed.
        let most = next + (1 << 20);
        let (visitor, [believed, more]) = (VISITOR + 2 * turn, [most, [most + 1, 1 << 48][turn as usize % 2]]);
        for (visitor, round) in [(visitor, more), (visitor + 1, believed)] {
            let placed = Placed { restart: 3, active: turn % 2 == 0, ..claim(visitor, round) };
            let node = NodeId(u128::from(1000 + visitor));
            bench.visit(visitor, Hello { node, placed: Some(placed), ..hello(visitor, &settings) }, vec![]);
        }
        let reason = format!("reports a place in round {more}, which must be at most {most}: start this agent again");
        assert!(bench.rejection(visitor).ends_with(&reason), "{}", bench.rejection(visitor));
        next = most + 1;
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.send(2, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(3 * SECOND);
    }
    assert_eq!(sent(&bench) - before, 40, "answers to heartbeats, and nothing else: {:?}", bench.last(1));
    assert_eq!((bench.run().round(), bench.run().restart()), (Round(1), 0));
    // No restart is used up.
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    assert_eq!((bench.run().restart(), bench.run().closed()), (1, None));
    bench.send(1, join(1));
    bench.send(2, join(1));
    assert!(bench.is_placed(1, next) && bench.is_placed(2, next), "{:?}", bench.last(1));
    // A member's claim is believed, whatever its round's number.
    let placement = bench.placement(1).clone();
    bench.machine.on_disconnected(SessionId(1), bench.now);
    let placed =
        Placed { round: placement.round, rank: placement.rank, world: placement.world, restart: 1, ..claim(0, 0) };
    bench.greet(3, Hello { placed: Some(placed), ..hello(1, &settings) }, 1);
    assert!(matches!(bench.last(3), CoordinatorMessage::Status { waiting: 0, .. }), "{:?}", bench.last(3));
}

#[test]
fn an_adopted_restart_number_is_logged() {
    let settings = Settings { max_restarts: Some(3), ..Settings::new(2, 2) };
    let mut bench = Bench::new();
    bench.greet(1, Hello { placed: Some(Placed { restart: 2, ..claim(9, 4) }), ..hello(1, &settings) }, 1);
    assert_eq!((bench.run().round(), bench.run().restart()), (Round(4), 2));
    let reported = "reports that the job is at restart 2, which this coordinator adopts";
    assert_eq!(bench.notes.iter().filter(|note| note.contains(reported)).count(), 1, "{:?}", bench.notes);
}

/// A visitor that claims a used-up budget before the job begins must not cost the job its restarts.
#[test]
fn a_visitor_before_the_job_uses_up_no_restarts() {
    let settings = Settings { max_restarts: Some(3), ..Settings::new(2, 2) };
    let boundless = Settings { max_restarts: Some(u32::MAX), ..settings.clone() };
    let mut bench = Bench::new();
    let placed = Some(Placed { restart: u32::MAX, ..claim(5, 7) });
    bench.visit(VISITOR, Hello { placed, ..hello(VISITOR, &boundless) }, vec![]);
    for node in [1, 2] {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    for _ in 0..25 {
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.send(2, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(SECOND);
    }
    assert_eq!(bench.run().round(), Round(8));
    bench.send(1, NodeMessage::Failed { round: Round(8), failure: failure() });
    assert_eq!((bench.run().restart(), bench.run().closed()), (1, None));
}

/// A coordinator that has just started cannot tell a member of an earlier world from an unauthenticated peer. All claims together delay the
/// round for as long as members may need to report. A further claim does not extend that time.
#[test]
fn claims_without_end_hold_up_a_restarted_coordinator_for_two_leases_at_most() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::new();
    let begun = bench.now;
    for node in [1, 2] {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
        // A visitor claims a place before the second node joins.
        bench.visit(VISITOR, Hello { placed: Some(claim(1, 1)), ..hello(VISITOR, &settings) }, vec![]);
    }
    let placed = |bench: &Bench| bench.last(1).placement().is_some();
    for turn in 2..200 {
        if placed(&bench) {
            break;
        }
        let visitor = hello(VISITOR + turn, &settings);
        bench.visit(VISITOR + turn, Hello { placed: Some(claim(turn, turn)), ..visitor }, vec![]);
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.send(2, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(SECOND);
    }
    assert!(bench.sent.iter().any(|(to, message)| *to == SessionId(1) && message.placement().is_some()));
    let took = bench.now - begun;
    assert!(took <= 2 * settings.lease() + 7 * SECOND, "{took:?}");
}

// Addresses.

fn elastic(limit: u32) -> Settings {
    let quick = Settings { last_call_timeout: Duration::ZERO, settle_timeout: Duration::ZERO, ..Settings::new(1, 2) };
    Settings { rejoin_limit: limit, ..quick }
}

/// Join from the visitor's address, which `hello` may misstate, and leave the running job.
fn come_and_go(bench: &mut Bench, session: u64, hello: Hello, round: &mut u64) {
    bench.greet(session, hello, 66);
    bench.send(session, join(0));
    bench.send(1, join(*round));
    assert!(bench.is_placed(session, *round + 1), "{:?}", bench.last(session));
    bench.send(session, NodeMessage::Leave { reason: "crash".into(), signal: None });
    bench.send(1, join(*round + 1));
    bench.pass(2 * SECOND);
    *round += 2;
}

/// If `--local-addr` counted, a client that claims a real node's address would lock that node out, and a client that changes its
/// address would never reach `rejoin_limit`.
#[test]
fn departures_count_for_the_address_of_the_connection() {
    let settings = elastic(3);
    for claims_anew in [false, true] {
        let mut bench = Bench::formed(1, &settings);
        let mut round = 1;
        let claims = |turn: u64| Some(if claims_anew { format!("10.0.7.{turn}") } else { "10.0.0.5".to_owned() });
        for turn in 0..3 {
            let session = 100 + turn;
            let visitor = Hello { local_addr: claims(turn), ..hello(session, &settings) };
            come_and_go(&mut bench, session, visitor, &mut round);
        }
        bench.greet(200, Hello { local_addr: claims(200), ..hello(200, &settings) }, 66);
        assert!(bench.rejection(200).contains("nodes there left the running job 3 times"));
        // A claimed place does not help.
        let placed = Some(claim(8, round + 7));
        bench.greet(201, Hello { placed, local_addr: claims(201), ..hello(201, &settings) }, 66);
        assert!(bench.rejection(201).contains("nodes there left the running job 3 times"));
        // The real node at that address is admitted.
        bench.greet(5, hello(5, &settings), 5);
        assert!(matches!(bench.last(5), CoordinatorMessage::Welcome { .. }), "{:?}", bench.last(5));
    }
}

#[test]
fn a_claimed_address_replaces_no_agent() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::formed(2, &settings);
    let twin = Hello { local_addr: Some("10.0.0.1".into()), process: 99, node: NodeId(99), ..hello(2, &settings) };
    bench.greet(VISITOR, twin, 66);
    assert_eq!(bench.ended, [], "the member with that name at that address stays");
}

/// All nodes of a service mesh may connect from loopback, with the same name in each container.
#[test]
fn agents_on_loopback_are_distinguished_by_their_process() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::new();
    let loopback: IpAddr = [127, 0, 0, 6].into();
    for node in [1, 2] {
        let hello = Hello { name: "pod:1".into(), node_rank: Some(0), ..hello(node, &settings) };
        bench.machine.on_hello(SessionId(node), hello, Ends { peer: loopback, local: loopback }, bench.now);
        bench.take();
        bench.send(node, join(0));
    }
    assert!(bench.is_placed(1, 1) && bench.is_placed(2, 1), "{:?}", bench.ended);
}

// Leases.

/// A node that asked for another lease fences itself by the run's lease, because the coordinator judges by that.
#[test]
fn every_node_has_the_lease_of_the_run() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &settings), 1);
    bench.send(1, join(0));
    let slow = Settings { keep_alive_interval: 100 * SECOND, ..settings.clone() };
    bench.greet(2, hello(2, &slow), 2);
    let terms = CoordinatorMessage::Terms { keep_alive_interval: 5 * SECOND, keep_alive_max_attempt: 3 };
    assert_eq!(bench.last(2), &terms);
    assert!(matches!(bench.last(1), CoordinatorMessage::Welcome { .. }), "{:?}", bench.last(1));
    // After the run's lease in silence it is lost.
    bench.send(2, join(0));
    assert!(bench.is_placed(2, 1));
    for _ in 0..65 {
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(SECOND / 4);
    }
    assert!(bench.ended.contains(&SessionId(2)), "{:?}", bench.notes);

    let mut node = NodeMachine::new(hello(2, &slow), "coordinator:1".into(), 300 * SECOND, bench.now);
    node.on_tick(bench.now);
    node.on_connected(bench.now);
    node.on_message(
        CoordinatorMessage::Welcome { addr: "10.0.0.2".into(), hosted: false, running: None, wants_replay: false },
        bench.now,
    );
    node.on_message(terms, bench.now);
    assert_eq!(node.next_deadline(), Some(bench.now + 5 * SECOND), "its interval of heartbeats");
}

// Numbers.

/// A visitor may open any number of runs, and ask for the longest grace in each.
#[test]
fn the_number_of_runs_without_a_connection_is_bounded() {
    let mut bench = Bench::formed(2, &Settings::new(2, 2));
    let settings = endless(&Settings::new(2, 2));
    for visitor in 10..10_000_u64 {
        let hello = Hello { run_id: format!("run {visitor}"), ..hello(visitor, &settings) };
        bench.machine.on_hello(
            SessionId(visitor),
            hello,
            Ends { peer: [10, 0, 0, 9].into(), local: [10, 0, 0, 200].into() },
            bench.now,
        );
        bench.machine.on_message(SessionId(visitor), join(0), bench.now);
        bench.machine.on_disconnected(SessionId(visitor), bench.now);
        bench.now += Duration::from_micros(1);
        bench.machine.take_commands();
    }
    let known = bench.machine.run_count();
    assert!(known <= 1 + DESERTED_RUNS + VACANT_RUNS, "{known} runs");
    assert!(bench.machine.run("run 9999").is_some() && bench.machine.run("run 11").is_none(), "the oldest go first");
    assert_eq!(bench.run().nodes().len(), 2, "a run with nodes is kept");
    bench.pass(LONGEST_GRACE);
    assert_eq!(bench.machine.run_count(), 1, "strangers leave nothing behind");
}
