//! Hosts that fail are put out of the job, and let in again. The rules are in `docs/rendezvous.md`.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use crate::session::{Coordinator, PATIENCE, until_view};
use elastic_rs::hosts::Cooldown;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Failure, Hello, JoinWorkers, NodeId, NodeMessage, Round, STILL_ALIVE, Waits,
};
use elastic_rs::rendezvous::messages::settings::Rules;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::run::{Exclusion, SessionId};

const SECOND: Duration = Duration::from_secs(1);

fn settings(min: u32, max: u32, host_failures: u32, cooldown: Option<(u64, u64)>) -> Settings {
    let seconds = |(min, max)| Cooldown { min: Duration::from_secs(min), max: Duration::from_secs(max) };
    Settings {
        rules: Rules { host_failures, cooldown: cooldown.map(seconds), ..Rules::default() },
        settle_timeout: Duration::ZERO,
        ..Settings::new(min, max)
    }
}

/// Nodes 1 to `count`, each on a host of its own, as members of round 1.
fn job(count: u64, settings: &Settings) -> Bench {
    let mut bench = Bench::new();
    for node in 1..=count {
        bench.greet(node, hello(node, settings), node as u8);
    }
    (1..=count).for_each(|node| bench.send(node, join(0)));
    assert_eq!(bench.run().round(), Round(1));
    bench
}

/// A worker of this node fails first.
fn fail(bench: &mut Bench, node: u64, rank: u32) {
    let round = bench.run().round();
    let failure = Box::new(Failure { global_rank: rank, ..*failure() });
    bench.send(node, NodeMessage::Failed { round, failure });
}

#[test]
fn a_worker_that_leaves_its_world_on_purpose_counts_against_no_host() {
    let mut bench = job(2, &settings(1, 2, 1, None));
    for round in 1..=3 {
        let failure =
            Failure { counts: false, exit: "HorovodInternalError".into(), returncode: STILL_ALIVE, ..*failure() };
        bench.send(1, NodeMessage::Failed { round: Round(round), failure: Box::new(failure) });
        rejoin(&mut bench, 1..=2);
        assert_eq!((bench.run().round(), bench.run().restart()), (Round(round + 1), 0));
    }
}

/// These nodes join again.
fn rejoin(bench: &mut Bench, nodes: impl IntoIterator<Item = u64>) {
    let round = bench.run().round().0;
    nodes.into_iter().for_each(|node| bench.send(node, join(round)));
    bench.pass(Duration::ZERO);
}

fn wait_text(bench: &Bench, session: u64) -> &str {
    match bench.last(session) {
        CoordinatorMessage::Waits(Waits { progress, spare: true }) => progress,
        other => panic!("it does not wait as a spare: {other:?}"),
    }
}

/// The hosts that are out, and for how long. Observers got the same.
fn excluded(bench: &Bench) -> String {
    let holds = |host: &&Exclusion| host.out.until.is_none_or(|until| bench.now < until);
    let reported: Vec<_> = bench.excluded.iter().filter(holds).cloned().collect();
    assert_eq!(reported, bench.run().exclusions(bench.now));
    let text = |host: &Exclusion| match host.out.until {
        None => host.addr.clone(),
        Some(until) => format!("{} for {:?}", host.addr, until - bench.now),
    };
    reported.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[test]
fn a_host_with_too_many_first_failures_is_out_for_the_job() {
    let settings = settings(1, 3, 2, None);
    let mut bench = job(3, &settings);
    fail(&mut bench, 2, 2);
    rejoin(&mut bench, 1..=3);
    assert!(bench.is_placed(2, 2), "one failure is forgiven");
    assert!(bench.notes.iter().any(|note| note == "host 10.0.0.2 has had 1 of 2 first failures (host_failures)"));
    fail(&mut bench, 2, 3);
    // The others get the cause, and theirs is only a consequence.
    fail(&mut bench, 1, 0);
    assert_eq!(excluded(&bench), "10.0.0.2");
    rejoin(&mut bench, [1, 2, 3]);
    let text = bench.rejection(2);
    assert!(text.starts_with("host 10.0.0.2 is out for the job: 2 rounds had their first failure there"), "{text}");
    assert!(bench.ended.contains(&SessionId(2)) && !bench.run().knows(NodeId(2)));
    assert_eq!((bench.placement(1).world_size, bench.placement(3).rank), (2, 1), "the others go on without it");
    // Neither does another agent of that host get in, and those of other hosts do.
    bench.greet(22, hello(22, &settings), 2);
    assert!(bench.rejection(22).contains("is out for the job"), "{}", bench.rejection(22));
    bench.greet(4, hello(4, &settings), 4);
    assert!(matches!(bench.last(4), CoordinatorMessage::Welcome { .. }), "{:?}", bench.last(4));
    bench.pass(Duration::ZERO);
    assert!(bench.run().progress(bench.now).contains("hosts that are out: 10.0.0.2 for the job"));
}

#[test]
fn a_node_of_a_host_that_cools_down_waits_and_is_let_in() {
    let settings = settings(1, 2, 1, Some((10, 40)));
    let mut bench = job(2, &settings);
    let mut expected = 10;
    for _ in 0..3 {
        fail(&mut bench, 2, 1);
        assert_eq!(excluded(&bench), format!("10.0.0.2 for {expected}s"));
        rejoin(&mut bench, [2, 1]);
        assert_eq!(bench.placement(1).world_size, 1);
        let text = wait_text(&bench, 2);
        assert!(text.starts_with(&format!("host 10.0.0.2 is out for {expected} s: ")), "{text}");
        assert!(bench.run().is_out(NodeId(2)));
        let round = bench.run().round();
        // Nobody is disturbed meanwhile, and the node hears how long it has to wait.
        for _ in 0..expected - 1 {
            (1..=2).for_each(|node| bench.send(node, NodeMessage::Heartbeat { rtt_us: None }));
            bench.pass(SECOND);
        }
        assert_eq!((bench.run().round(), bench.run().is_out(NodeId(2))), (round, true));
        bench.send(2, NodeMessage::Heartbeat { rtt_us: None });
        let CoordinatorMessage::Heartbeat { waits: Some(Waits { progress, spare: true }) } = bench.last(2) else {
            panic!("{:?}", bench.last(2))
        };
        assert!(progress.starts_with("host 10.0.0.2 is out for 1 s: "), "{progress}");
        bench.pass(SECOND);
        assert_eq!(excluded(&bench), "");
        rejoin(&mut bench, [1]);
        assert_eq!((bench.placement(2).world_size, bench.placement(2).rank), (2, 1));
        expected *= 2;
    }
    assert!(bench.notes.iter().any(|note| note == "host 10.0.0.2 is let in again"), "{:?}", bench.notes);
}

/// Horovod #4015: one worker that cannot be stopped takes its host with it, and then the next.
#[test]
fn a_worker_that_follows_its_rank_puts_no_host_out() {
    let settings = settings(1, 3, 1, None);
    let mut bench = job(3, &settings);
    fail(&mut bench, 3, 5);
    assert_eq!(excluded(&bench), "10.0.0.3");
    rejoin(&mut bench, 1..=3);
    fail(&mut bench, 2, 5);
    assert_eq!(excluded(&bench), "", "the worker is the cause, and nobody is out");
    let note = "rank 5 fails first on several hosts, so its failures count against none of them (host_failures)";
    assert!(bench.notes.iter().any(|it| it == note), "{:?}", bench.notes);
    assert!(bench.notes.iter().any(|it| it == "host 10.0.0.3 is let in again"), "{:?}", bench.notes);
}

#[test]
fn a_lost_node_counts_against_its_host_unless_others_are_cut_off_too() {
    let settings = settings(1, 4, 1, Some((60, 60)));
    for together in [false, true] {
        let mut bench = job(4, &settings);
        bench.machine.on_disconnected(SessionId(4), bench.now);
        if together {
            bench.machine.on_disconnected(SessionId(3), bench.now);
        }
        bench.pass(settings.reconnect_grace);
        let expected = if together { "" } else { "10.0.0.4 for 60s" };
        assert_eq!(excluded(&bench), expected, "together: {together}");
    }
}

/// Workers of other nodes notice the end of a node before the coordinator does.
#[test]
fn a_failure_while_a_node_is_cut_off_counts_against_that_node_once_it_is_lost() {
    let settings = settings(1, 3, 1, Some((60, 60)));
    for comes_back in [false, true] {
        let mut bench = job(3, &settings);
        bench.machine.on_disconnected(SessionId(3), bench.now);
        fail(&mut bench, 1, 0);
        assert_eq!(excluded(&bench), "");
        if comes_back {
            bench.greet(30, Hello { joining: true, ..hello(3, &settings) }, 3);
        }
        bench.pass(settings.reconnect_grace);
        let expected = if comes_back { "" } else { "10.0.0.3 for 60s" };
        assert_eq!(excluded(&bench), expected, "comes back: {comes_back}");
    }
}

#[test]
fn a_node_that_leaves_is_no_failure() {
    let settings = settings(1, 2, 1, None);
    let mut bench = job(2, &settings);
    bench.send(2, NodeMessage::Leave { reason: "scaled down".into(), signal: Some(15) });
    assert_eq!(excluded(&bench), "");
    bench.greet(20, hello(20, &settings), 2);
    assert!(matches!(bench.last(20), CoordinatorMessage::Welcome { .. }), "{:?}", bench.last(20));
}

/// A spare of a host that is put out waits, and one of a host that is out for the job is sent away at once.
#[test]
fn other_nodes_of_the_host_are_concerned_at_once() {
    for cooldown in [None, Some((10, 10))] {
        let settings = settings(2, 2, 1, cooldown);
        let mut bench = job(2, &settings);
        bench.greet(3, hello(3, &settings), 2);
        bench.send(3, join(0));
        fail(&mut bench, 2, 1);
        match cooldown {
            None => assert!(bench.rejection(3).contains("is out for the job"), "{}", bench.rejection(3)),
            Some(_) => assert!(bench.run().is_out(NodeId(3))),
        }
        // A round that lacks it is completed with the next node that comes.
        rejoin(&mut bench, [1]);
        assert_eq!(bench.run().round(), Round(1));
        bench.greet(4, hello(4, &settings), 4);
        bench.send(4, join(0));
        rejoin(&mut bench, [2]);
        assert_eq!((bench.placement(1).round, bench.placement(4).rank), (Round(2), 1));
    }
}

#[test]
fn hosts_behind_one_address_are_distinguished_by_their_names() {
    let settings = settings(1, 3, 1, Some((30, 30)));
    let named = |node: u64, name: &str| Hello { host_name: Some(name.to_owned()), ..hello(node, &settings) };
    let mut bench = Bench::new();
    for (node, name) in [(1, "a"), (2, "b"), (3, "b")] {
        bench.greet(node, named(node, name), 1);
    }
    (1..=3).for_each(|node| bench.send(node, join(0)));
    fail(&mut bench, 3, 2);
    let [Exclusion { addr, name: Some(name), .. }] = &bench.excluded[..] else { panic!("{:?}", bench.excluded) };
    assert_eq!((addr.as_str(), name.as_str()), ("10.0.0.1", "b"));
    rejoin(&mut bench, 1..=3);
    assert_eq!(bench.placement(1).world_size, 1);
    assert!(wait_text(&bench, 2).starts_with("host b (10.0.0.1) is out for 30 s: "), "{}", wait_text(&bench, 2));
}

#[test]
fn the_end_of_a_job_ends_the_wait_of_a_node_whose_host_is_out() {
    let settings = settings(1, 2, 1, Some((1000, 1000)));
    let mut bench = job(2, &settings);
    fail(&mut bench, 2, 1);
    rejoin(&mut bench, [2, 1]);
    bench.send(1, NodeMessage::Done { round: Round(2) });
    assert!(matches!(bench.last(2), CoordinatorMessage::Closed { spare: true, .. }), "{:?}", bench.last(2));
}

#[test]
fn rules_outside_their_bounds_are_refused() {
    let day = Duration::from_secs(24 * 3600);
    for (rules, text) in [
        (Rules { host_failures: 1001, ..Rules::default() }, "host_failures is `1001`, must be from 0 to 1000"),
        (
            Rules { host_failures_window: 2 * day, ..Rules::default() },
            "host_failures_window is `172800s`, must be at most",
        ),
        (
            Rules { cooldown: Some(Cooldown { min: 2 * SECOND, max: SECOND }), ..Rules::default() },
            "blacklist_cooldown_min and blacklist_cooldown_max are `2s` and `1s`, must be above zero, rising",
        ),
    ] {
        let mut bench = Bench::new();
        bench.greet(1, hello(1, &Settings { rules, ..Settings::new(1, 1) }), 1);
        assert!(bench.rejection(1).contains(text), "{}", bench.rejection(1));
    }
    let mut bench = Bench::new();
    bench.greet(1, Hello { host_name: Some("x".repeat(256)), ..hello(1, &Settings::new(1, 1)) }, 1);
    assert_eq!(bench.rejection(1), "the host_name has 256 bytes, must have at most 255");
}

/// Over real sockets: what a node asks for arrives, and whoever watches the coordinator hears of the host.
#[tokio::test]
async fn exclusions_are_sent_to_those_who_watch() {
    let settings = settings(1, 1, 1, None);
    let mut coordinator = Coordinator::start().await;
    let named = Hello { host_name: Some("gpu7".to_owned()), ..hello(1, &settings) };
    let session = coordinator.open(named);
    let placement = session.join(1000, None, Some(JoinWorkers::new("trainer", 1)), PATIENCE).await.unwrap();
    session.report_failure(placement.round, *failure());
    until_view(&session, |view| view.waiting > 0).await;
    let watching = coordinator.exclusions.wait_for(|all| !all.is_empty());
    let excluded = tokio::time::timeout(PATIENCE, watching).await.unwrap().unwrap().clone();
    let [Exclusion { addr, name, out }] = &excluded["job"][..] else { panic!("{excluded:?}") };
    assert_eq!((addr.as_str(), name.as_deref(), out.until), ("127.0.0.1", Some("gpu7"), None));
    let error = session.join(1000, None, Some(JoinWorkers::new("trainer", 1)), PATIENCE).await.unwrap_err();
    let JoinError::Rejected(reason) = error else { panic!("{error:?}") };
    assert!(reason.starts_with("host gpu7 (127.0.0.1) is out for the job: the first failure"), "{reason}");
}
