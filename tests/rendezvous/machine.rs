//! Decisions of the coordinator's machine: admission, ranks, `rejoin_limit`, reports, and several runs.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Failure, Hello, Join, JoinWorkers, NodeId, NodeMessage, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Rules;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{SessionId, Status};

// One agent to a place.

/// NVRx duplicate-address guard: a pod is restarted before the connection of its older agent has ended. The older session ends with
/// a reason, and the newer agent gets the place at once, without a wait for a lease.
#[test]
fn a_restarted_pod_replaces_its_older_agent() {
    let mut bench = Bench::formed(2, &Settings::new(2, 2));
    let again = Hello { node: NodeId(20), process: 20, ..hello(2, &Settings::new(2, 2)) };
    bench.greet(20, again, 1);
    assert!(bench.ended.contains(&SessionId(2)));
    let reason = bench.rejection(2);
    let text = "agent `host:2` registered from the same address, so this one (10.0.0.1 (host:2)) is assumed dead: give two \
                agents on one address distinct `node_rank`s";
    assert_eq!(reason, text);
    let CoordinatorMessage::Status { waiting: 1, reason, .. } = bench.last(1) else { panic!("{:?}", bench.last(1)) };
    assert_eq!(reason, "10.0.0.1 (host:2) was replaced by host:2, which registered from the same address");
    bench.send(20, join(0));
    bench.send(1, join(1));
    assert!(bench.is_placed(20, 2) && bench.is_placed(1, 2));
}

/// The older agent may not have heard that it was replaced. It must not take its place back.
#[test]
fn a_replaced_agent_that_comes_back_is_refused() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::formed(2, &settings);
    bench.greet(20, Hello { node: NodeId(20), process: 20, ..hello(2, &settings) }, 1);
    bench.greet(21, hello(2, &settings), 1);
    assert_eq!(bench.rejection(21), "host:2 was replaced by a newer agent from the same address (10.0.0.1)");
    assert!(bench.run().knows(NodeId(20)) && !bench.run().knows(NodeId(2)));
}

/// The place of an agent that reconnects from another address moves there, so a restarted agent at that address replaces it.
#[test]
fn an_agent_that_reconnected_from_another_address_is_replaced_there_by_a_restarted_one() {
    let settings = Settings::new(2, 3);
    let mut bench = Bench::formed(3, &settings);
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.greet(12, hello(2, &settings), 7);
    bench.greet(20, Hello { node: NodeId(20), process: 20, ..hello(2, &settings) }, 7);
    assert_eq!((bench.run().knows(NodeId(2)), &bench.ended[..]), (false, &[SessionId(12)][..]));
    // An agent with that name at the old address is a different one.
    bench.greet(21, Hello { node: NodeId(21), process: 21, ..hello(2, &settings) }, 1);
    assert!(bench.run().knows(NodeId(20)) && bench.run().knows(NodeId(21)));
}

/// Several agents on one host, many nodes behind one address (NAT), and several handlers in one process are not duplicates.
#[test]
fn agents_that_share_an_address_are_not_taken_for_one() {
    let settings = Settings::new(4, 8);
    let mut bench = Bench::new();
    let ranked = |node, rank| Hello { node_rank: Some(rank), name: "pod:1".into(), ..hello(node, &settings) };
    bench.greet(1, hello(1, &settings), 1);
    bench.greet(2, hello(2, &settings), 1);
    // The same process.
    bench.greet(3, Hello { name: "host:2".into(), process: 2, ..hello(3, &settings) }, 1);
    // The same name at another address.
    bench.greet(4, Hello { name: "host:2".into(), ..hello(4, &settings) }, 2);
    // The same name, as pods on the host's network may have, with different ranks.
    bench.greet(5, ranked(5, 0), 1);
    bench.greet(6, ranked(6, 1), 1);
    assert_eq!((bench.ended.len(), bench.run().nodes().count()), (0, 6));
    // The same rank at the same address: a restarted agent.
    bench.greet(7, Hello { name: "pod:9".into(), ..ranked(7, 1) }, 1);
    assert_eq!(bench.ended, [SessionId(6)]);
}

// Ranks.

fn join_as(round: u64, rank: u32) -> NodeMessage {
    let workers = Some(JoinWorkers::new("trainer", 2));
    NodeMessage::Join(Join {
        round: Round(round),
        store_port: 1,
        node_rank: Some(rank),
        workers,
        health: Default::default(),
    })
}

/// `torchrun --rdzv-backend=static`: a node keeps the rank it was given in every round. With other backends, a survivor becomes
/// rank 0 when the old rank 0 is gone.
#[test]
fn static_ranks_hold_in_every_round() {
    for as_asked in [true, false] {
        let settings = Settings { ranks_as_asked: as_asked, settle_timeout: Duration::ZERO, ..Settings::new(2, 2) };
        let ranked = |node: u64, rank| Hello { node_rank: Some(rank), ..hello(node, &settings) };
        let mut bench = Bench::new();
        for (node, rank) in [(1, 1), (2, 0)] {
            bench.greet(node, ranked(node, rank), 1);
            bench.send(node, join_as(0, rank));
        }
        let rank = |bench: &Bench, node| bench.placement(node).rank;
        assert_eq!((rank(&bench, 1), rank(&bench, 2)), (1, 0));
        bench.send(2, NodeMessage::Leave { reason: "gone".into(), signal: None });
        bench.send(1, join_as(1, 1));
        bench.greet(3, ranked(3, 0), 1);
        bench.send(3, join_as(0, 0));
        let expected = if as_asked { (1, 0) } else { (0, 1) };
        assert_eq!((rank(&bench, 1), rank(&bench, 3)), expected);
    }
}

/// Workers of ranks that are asked for use the endpoint's store.
#[test]
fn the_store_is_emptied_before_any_member_of_a_static_round_is_placed() {
    for (as_asked, emptied) in [(true, 3), (false, 0)] {
        let mut bench = Bench::new();
        let settings = Settings { ranks_as_asked: as_asked, settle_timeout: Duration::ZERO, ..Settings::new(2, 2) };
        for node in [1, 2] {
            bench.greet(node, hello(node, &settings), 1);
        }
        for round in 0..3 {
            for (node, rank) in [(1, 0), (2, 1)] {
                assert_eq!(bench.emptied.len(), if as_asked { round } else { 0 }, "not before all have joined");
                bench.send(node, join_as(round as u64, rank));
            }
            assert!(bench.is_placed(1, round as u64 + 1) && bench.is_placed(2, round as u64 + 1));
        }
        assert_eq!(bench.emptied.len(), emptied);
        for (round, at) in (1..).zip(bench.emptied.clone()) {
            let placement_of_round = |sent: &(SessionId, CoordinatorMessage)| {
                sent.1.placement().is_some_and(|placement| placement.round == Round(round))
            };
            assert!(!bench.sent[..at].iter().any(placement_of_round), "round {round}");
            assert!(bench.sent[at..].iter().any(placement_of_round), "round {round}");
        }
    }
}

#[test]
fn a_node_with_another_rule_for_ranks_is_rejected() {
    let mut bench = Bench::formed(2, &Settings::new(2, 2));
    bench.greet(9, hello(9, &Settings { ranks_as_asked: true, ..Settings::new(2, 2) }), 1);
    let text = "host:9 asks for ranks set by `--node-rank`, but run `job` was opened for ranks assigned by the rendezvous: \
                give every node the same `--rdzv-backend`";
    assert_eq!(bench.rejection(9), text);
}

#[test]
fn a_node_with_another_store_tunnel_is_rejected_with_both_values() {
    for (ours, theirs) in [(true, false), (false, true)] {
        let with = |store_tunnel| {
            let rules = Rules { store_tunnel, ..Rules::default() };
            Settings { rules, ..Settings::new(2, 2) }
        };
        let mut bench = Bench::formed(2, &with(ours));
        bench.greet(9, hello(9, &with(theirs)), 1);
        let (ours, theirs) = (u32::from(ours), u32::from(theirs));
        let text = format!(
            "host:9 has `store_tunnel={theirs}`, but run `job` was opened with `store_tunnel={ours}`: give every node the same \
             `--rdzv-conf store_tunnel`. Where it is not given, a named token or certificates turn it on, unless \
             TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set"
        );
        assert_eq!(bench.rejection(9), text);
    }
}

// Departures.

/// #147064: a node that leaves and rejoins without end restarts the whole job each time, and bypasses max_restarts.
#[test]
fn a_host_that_comes_and_goes_is_not_let_in_for_ever() {
    let settings = Settings {
        rejoin_limit: 3,
        rejoin_window: Duration::from_secs(600),
        last_call_timeout: Duration::ZERO,
        settle_timeout: Duration::ZERO,
        ..Settings::new(1, 2)
    };
    let mut bench = Bench::formed(1, &settings);
    let mut round = 1;
    for turn in 0..3 {
        let session = 100 + turn;
        bench.greet(session, hello(session, &settings), 9);
        bench.send(session, join(0));
        bench.send(1, join(round));
        assert!(bench.is_placed(session, round + 1), "turn {turn}");
        bench.send(session, NodeMessage::Leave { reason: "crash".into(), signal: None });
        bench.send(1, join(round + 1));
        bench.pass(Duration::from_secs(2));
        round += 2;
        assert!(bench.is_placed(1, round));
    }
    bench.greet(200, hello(200, &settings), 9);
    let text = "host 10.0.0.9 is out for 594 s: nodes there left the running job 3 times within 600s (rejoin_limit, \
                rejoin_window); check why they exit, or raise rejoin_limit";
    assert_eq!(bench.rejection(200), text);
    bench.greet(201, hello(201, &settings), 8);
    assert!(matches!(bench.last(201), CoordinatorMessage::Welcome { .. }), "other hosts are not concerned");
    bench.send(201, NodeMessage::Leave { reason: "test".into(), signal: None });
    for _ in 0..60 {
        bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
        bench.pass(Duration::from_secs(10));
    }
    bench.greet(202, hello(202, &settings), 9);
    assert!(matches!(bench.last(202), CoordinatorMessage::Welcome { .. }), "the window is over");
}

// Reports.

/// NVRx 6d7b54d: a report about round N that arrives in N+1 is answered as stale, and not applied.
#[test]
fn reports_of_an_earlier_round_are_answered_as_stale() {
    let settings = Settings { max_restarts: Some(0), ..Settings::new(2, 2) };
    let mut bench = Bench::formed(2, &settings);
    bench.send(1, join(1));
    bench.send(2, join(1));
    assert!(bench.is_placed(1, 2));
    let stale = CoordinatorMessage::Stale { round: Round(1), current: Round(2) };
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    assert_eq!(bench.last(1), &stale);
    bench.send(2, NodeMessage::Done { round: Round(1) });
    assert_eq!(bench.last(2), &stale);
    assert!(bench.run().closed().is_none() && bench.run().restart() == 0);
    assert!(bench.run().nodes().all(|(_, status, _)| *status == Status::Active));
}

#[test]
fn the_first_failure_of_a_round_is_its_cause_and_is_sent_to_all() {
    let settings = Settings { max_restarts: Some(2), ..Settings::new(3, 3) };
    let mut bench = Bench::formed(3, &settings);
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: failure() });
    bench.send(3, NodeMessage::Failed { round: Round(1), failure: Box::new(Failure { pid: 78, ..*failure() }) });
    assert_eq!(bench.run().restart(), 1);
    for node in 1..=3 {
        let CoordinatorMessage::Status { waiting: 1, reason, restart: 1, failure: Some(reported) } = bench.last(node)
        else {
            panic!("{:?}", bench.last(node))
        };
        assert_eq!(
            (reported.pid, reported.node.as_str(), reported.message.as_str()),
            (77, "10.0.0.1 (host:2)", "out of memory\nat line 3")
        );
        let text = "rank 3 (local rank 1, role trainer, pid 77) on 10.0.0.1 (host:2) ended with SIGKILL: out of memory; restart \
                    1 of 2; 2/2 attempts left; will restart worker group";
        assert_eq!(reason, text);
    }
    assert_eq!(bench.notes.iter().filter(|note| note.contains("is interrupted")).count(), 1, "{:?}", bench.notes);
    assert_eq!(
        bench.run().reason(),
        Some(
            "rank 3 (local rank 1, role trainer, pid 77) on 10.0.0.1 (host:2) ended with SIGKILL: out of memory; restart \
             1 of 2; 2/2 attempts left; will restart worker group"
        )
    );
}

#[test]
fn a_failure_that_does_not_count_costs_no_restart() {
    let settings = Settings { max_restarts: Some(0), ..Settings::new(2, 2) };
    let mut bench = Bench::formed(2, &settings);
    let failure = Box::new(Failure { counts: false, ..*failure() });
    bench.send(1, NodeMessage::Failed { round: Round(1), failure });
    assert_eq!((bench.run().restart(), bench.run().closed()), (0, None));
    assert!(matches!(bench.last(2), CoordinatorMessage::Status { waiting: 1, restart: 0, failure: Some(_), .. }));
}

#[test]
fn a_spent_budget_closes_with_the_failure_itself() {
    let settings = Settings { max_restarts: Some(0), ..Settings::new(2, 2) };
    let mut bench = Bench::formed(2, &settings);
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    for node in [1, 2] {
        let CoordinatorMessage::Closed { verdict: Verdict::Failed { failure: Some(reported), cause, .. }, .. } =
            bench.last(node)
        else {
            panic!("{:?}", bench.last(node))
        };
        assert_eq!((reported.global_rank, reported.exit.as_str()), (3, "SIGKILL"));
        assert!(cause.ends_with("; no restarts are allowed (max_restarts)"), "{cause}");
    }
}

#[test]
fn a_local_world_size_of_zero_is_rejected() {
    let mut bench = Bench::new();
    bench.greet(1, hello(1, &Settings::new(1, 1)), 1);
    let workers = Some(JoinWorkers::new("trainer", 0));
    bench.send(
        1,
        NodeMessage::Join(Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers,
            health: Default::default(),
        }),
    );
    assert_eq!(bench.rejection(1), "local_world_size is `0`, must be from 1 to 65535");
}

#[test]
fn workers_get_no_ranks_unless_every_member_sends_its_number_of_workers() {
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, hello(node, &Settings::new(2, 2)), 1);
    }
    bench.send(1, join(0));
    bench.send(
        2,
        NodeMessage::Join(Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers: None,
            health: Default::default(),
        }),
    );
    assert!(bench.placement(1).workers.is_none());
}

// Several runs.

/// #126510: two jobs on one endpoint were one job.
#[test]
fn runs_of_one_coordinator_are_independent() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::formed(2, &settings);
    let other = |node| Hello { run_id: "other".into(), ..hello(node, &Settings::new(1, 1)) };
    // The same node may be in both.
    bench.greet(11, other(1), 1);
    bench.send(11, join(0));
    assert!(bench.is_placed(11, 1));
    let before = bench.sent.len();
    bench.send(11, NodeMessage::Failed { round: Round(1), failure: failure() });
    bench.send(11, NodeMessage::Close(Verdict::Succeeded { by: "host:1".into() }));
    assert!(bench.sent[before..].iter().all(|(to, _)| *to == SessionId(11)));
    assert!(bench.machine.run("other").unwrap().closed().is_some() && bench.run().closed().is_none());
    bench.greet(12, other(3), 1);
    assert!(matches!(bench.last(12), CoordinatorMessage::Over { .. }));
    bench.send(1, join(1));
    bench.send(2, join(1));
    assert!(bench.is_placed(2, 2));
}
