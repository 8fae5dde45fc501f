//! The node's state machine: back-off, servers that are no coordinator, silence, and a coordinator that stays away.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, Hello, NodeId, NodeMessage, Placement, Round, Verdict, Waits,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::status_log::StatusLog;
use elastic_rs::rendezvous::node::{JoinError, NodeCommand, NodeMachine};

const COORDINATOR_TIMEOUT: Duration = Duration::from_secs(60);

fn node(now: Instant) -> NodeMachine {
    let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4));
    NodeMachine::new(hello, "head:29400".into(), COORDINATOR_TIMEOUT, now)
}

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

fn welcome() -> CoordinatorMessage {
    CoordinatorMessage::Welcome { addr: "10.0.0.7".into(), hosted: false, running: None, wants_replay: false }
}

pub fn complete(round: u64) -> CoordinatorMessage {
    CoordinatorMessage::Complete(Placement {
        round: Round(round),
        rank: 0,
        world_size: 1,
        world: 9,
        master_addr: "10.0.0.7".into(),
        master_port: 1,
        reason: "all 1 nodes are in".into(),
        restart: 0,
        workers: None,
        host: None,
        local_world_size: None,
        resume: None,
        members: None,
    })
}

/// Tick at each deadline until the machine connects. Returns when it does.
fn connects_at(node: &mut NodeMachine) -> Instant {
    for _ in 0..100 {
        let at = node.next_deadline().expect("a waiting node has a deadline");
        node.on_tick(at);
        if node.take_commands().contains(&NodeCommand::Connect) {
            return at;
        }
    }
    panic!("the node does not connect");
}

/// A node that is connected and welcomed.
fn connected(now: Instant) -> NodeMachine {
    let mut node = node(now);
    assert_eq!(connects_at(&mut node), now);
    node.on_connected(now);
    node.on_message(welcome(), now);
    node.take_commands();
    node
}

#[test]
fn a_node_without_a_descriptor_for_its_first_connection_fails_at_once() {
    let now = Instant::now();
    let mut node = node(now);
    node.join(29500, None, None, seconds(600), now);
    node.on_tick(now);
    node.on_out_of_descriptors("10.0.0.1:29400: Too many open files (os error 24)".into(), now);
    let Some(Err(JoinError::Connection { text, .. })) = node.take_outcome() else { panic!("it waits") };
    assert!(text.contains("Too many open files") && text.contains("ulimit -n"), "{text}");
}

#[test]
fn a_node_retries_at_growing_intervals_up_to_two_seconds() {
    let mut now = Instant::now();
    let mut node = node(now);
    let mut longest = Duration::from_millis(50);
    assert_eq!(connects_at(&mut node), now);
    for _ in 0..12 {
        node.on_connect_failed("connection refused".into(), true, now);
        let at = connects_at(&mut node);
        let waited = at - now;
        // The delays are spread over the upper half.
        assert!(waited >= longest / 2 && waited <= longest, "{waited:?} of {longest:?}");
        longest = (longest * 2).min(seconds(2));
        now = at;
    }
}

#[test]
fn a_join_before_the_connection_is_sent_with_the_welcome() {
    let now = Instant::now();
    let mut node = node(now);
    node.join(29_500, Some(3), None, seconds(600), now);
    assert_eq!(connects_at(&mut node), now);
    node.on_connected(now);
    let commands = node.take_commands();
    assert!(matches!(&commands[..], [NodeCommand::Send(NodeMessage::Hello(hello))] if hello.joining));
    node.on_message(welcome(), now);
    let commands = node.take_commands();
    assert!(
        matches!(&commands[..], [NodeCommand::Send(NodeMessage::Join(join))] if join.store_port == 29_500 && join.node_rank == Some(3))
    );
    node.on_message(complete(1), now);
    assert_eq!(node.take_outcome().expect("answered").expect("placed").round, Round(1));
    assert!(node.take_outcome().is_none(), "answered once");
}

/// The store port of the join that is sent now, if any.
fn joins_with(node: &mut NodeMachine) -> Option<u16> {
    node.take_commands().into_iter().find_map(|command| match command {
        NodeCommand::Send(NodeMessage::Join(join)) => Some(join.store_port),
        _ => None,
    })
}

#[test]
fn a_worker_store_is_opened_for_the_address_that_others_get() {
    let now = Instant::now();
    let mut node = node(now);
    node.join_with_new_store(None, None, seconds(600), now);
    assert_eq!(node.wanted_store(), None, "the node's address is not known yet");
    assert_eq!(connects_at(&mut node), now);
    node.on_connected(now);
    // The Hello announces no join, because the join may not come.
    let commands = node.take_commands();
    assert!(matches!(&commands[..], [NodeCommand::Send(NodeMessage::Hello(hello))] if !hello.joining));
    node.on_message(welcome(), now);
    assert_eq!(joins_with(&mut node), None);
    assert_eq!(node.wanted_store().as_deref(), Some("10.0.0.7"));
    node.on_store_opened("10.0.0.7".into(), 29_500);
    assert_eq!((joins_with(&mut node), node.wanted_store()), (Some(29_500), None));

    // After a reconnect the node has another address, and the store must listen there.
    node.on_disconnected("reset".into(), false, now);
    let at = connects_at(&mut node);
    node.on_connected(at);
    node.on_message(
        CoordinatorMessage::Welcome { addr: "10.0.0.8".into(), hosted: false, running: None, wants_replay: false },
        at,
    );
    assert_eq!(joins_with(&mut node), None);
    assert_eq!(node.wanted_store().as_deref(), Some("10.0.0.8"));
    node.on_store_opened("10.0.0.8".into(), 29_500);
    assert_eq!(joins_with(&mut node), Some(29_500));
    node.on_message(complete(1), at);
    assert_eq!(node.take_outcome().expect("answered").expect("placed").round, Round(1));

    // The next join knows the address, so it wants a store at once.
    node.join_with_new_store(None, None, seconds(600), at);
    assert_eq!(node.wanted_store().as_deref(), Some("10.0.0.8"));
    node.abandon();
    assert_eq!(node.wanted_store(), None);
}

#[test]
fn a_reconnect_reports_round_and_rank_and_does_not_join() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(600), now);
    node.on_message(complete(1), now);
    node.take_commands();
    node.on_disconnected("reset".into(), false, now);
    let at = connects_at(&mut node);
    node.on_connected(at);
    let commands = node.take_commands();
    let [NodeCommand::Send(NodeMessage::Hello(hello))] = &commands[..] else {
        panic!("{commands:?}");
    };
    let placed = hello.placed.expect("it was placed");
    assert!(placed.active && !hello.joining);
    assert_eq!((placed.round, placed.rank, placed.world_size), (Round(1), 0, 1));
    node.on_message(welcome(), at);
    assert_eq!(node.take_commands(), []);
}

#[test]
fn a_server_of_another_protocol_fails_the_join() {
    let now = Instant::now();
    let mut node = node(now);
    node.join(1, None, None, seconds(600), now);
    assert_eq!(connects_at(&mut node), now);
    node.on_connected(now);
    node.on_disconnected("first bytes `HTTP`".into(), true, now);
    let error = node.take_outcome().expect("answered").expect_err("refused");
    assert_eq!(error.to_string(), "the server at head:29400 is not an elastic_rs coordinator: first bytes `HTTP`");
    assert_eq!(node.next_deadline(), None);
}

/// End connections before the welcome, until the node probes the server.
fn until_probe(node: &mut NodeMachine) {
    for unanswered in 1.. {
        let now = connects_at(node);
        node.on_connected(now);
        node.on_disconnected("closed".into(), false, now);
        if node.take_commands().contains(&NodeCommand::Probe) {
            assert_eq!(unanswered, 3);
            return;
        }
    }
}

#[test]
fn a_store_of_pytorch_is_recognised_by_its_answer_to_c10d() {
    let now = Instant::now();
    let mut node = node(now);
    node.join(1, None, None, seconds(600), now);
    until_probe(&mut node);
    node.on_probed(true);
    let error = node.take_outcome().expect("answered").expect_err("refused");
    assert!(error.to_string().starts_with("the server at head:29400 is a store of PyTorch's c10d backend"), "{error}");
}

#[test]
fn a_node_waits_for_a_server_that_closes_connections_without_an_answer() {
    // A proxy does that until the coordinator behind it is up.
    let now = Instant::now();
    let mut node = node(now);
    node.join(1, None, None, seconds(600), now);
    for _ in 0..3 {
        until_probe(&mut node);
        node.on_probed(false);
    }
    let now = connects_at(&mut node);
    node.on_connected(now);
    node.on_message(welcome(), now);
    assert_eq!(node.view().failed, None);
}

#[test]
fn a_hello_without_an_answer_is_followed_by_a_heartbeat() {
    // PyTorch's libuv server does not react to an unknown first query until more bytes arrive (protocol page, section 2.2).
    let mut node = node(Instant::now());
    let now = connects_at(&mut node);
    node.on_connected(now);
    node.take_commands();
    assert_eq!(node.next_deadline(), Some(now + seconds(1)));
    node.on_tick(now + seconds(1));
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Heartbeat { rtt_us: None })]);
}

#[test]
fn a_join_timeout_names_a_server_that_accepts_connections_and_stays_silent() {
    // A web server does that: it waits for the end of a line.
    let start = Instant::now();
    let mut node = node(start);
    node.join(1, None, None, seconds(5), start);
    connects_at(&mut node);
    node.on_connected(start);
    node.on_tick(start + seconds(5));
    let outcome = node.take_outcome().expect("the join is given up");
    let text =
        "could not reach the coordinator at head:29400 in 5.0s: it accepts connections, but has not answered yet";
    let (endpoint, elapsed) = (Some("head:29400".into()), Some(seconds(5)));
    assert_eq!(outcome, Err(JoinError::Connection { text: text.into(), endpoint, elapsed }));
}

#[test]
fn a_coordinator_that_has_welcomed_the_node_is_not_probed() {
    // While it restarts, the connections that it accepts end without an answer.
    let start = Instant::now();
    let mut node = connected(start);
    let mut now = start;
    node.on_disconnected("reset".into(), false, now);
    for _ in 0..20 {
        now = connects_at(&mut node);
        node.on_connected(now);
        node.on_disconnected("reset".into(), false, now);
    }
    assert_eq!(node.view().failed, None);
    now = connects_at(&mut node);
    node.on_connected(now);
    node.on_message(welcome(), now);
    assert_eq!(node.view().out_of_reach_since, None);
}

#[test]
fn a_member_waits_for_the_coordinator_until_coordinator_timeout() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(600), now);
    node.on_disconnected("reset".into(), false, now);
    let error = loop {
        let at = node.next_deadline().expect("a waiting node has a deadline");
        node.on_tick(at);
        if node.take_commands().contains(&NodeCommand::Connect) {
            node.on_connect_failed("connection refused".into(), true, at);
        }
        if let Some(outcome) = node.take_outcome() {
            assert_eq!(at, now + COORDINATOR_TIMEOUT);
            break outcome.expect_err("failed");
        }
    };
    assert_eq!(
        error.to_string(),
        "the coordinator at head:29400 has been out of reach for 60.0s (coordinator_timeout): connection refused"
    );
    assert_eq!(node.view().failed, Some(error));
}

#[test]
fn silence_for_a_lease_ends_the_connection() {
    let now = Instant::now();
    let mut node = connected(now);
    let mut beats = 0;
    let at = loop {
        let at = node.next_deadline().expect("a connected node sends heartbeats");
        node.on_tick(at);
        match &node.take_commands()[..] {
            [NodeCommand::Send(NodeMessage::Heartbeat { rtt_us: None })] => beats += 1,
            [NodeCommand::Disconnect] => break at,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((at - now, beats), (seconds(15), 2));
    assert_eq!(node.view().out_of_reach_since, Some(at));
}

#[test]
fn an_unanswered_withdrawal_is_kept_from_the_next_join_by_a_new_connection() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(3), now);
    node.take_commands();
    node.on_tick(now + seconds(3));
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Withdraw)]);
    // The node ignores a place that was given just before the withdrawal was read.
    node.on_message(complete(1), now + seconds(3));
    assert_eq!(node.take_outcome(), None);
    node.on_tick(now + seconds(4));
    assert_eq!(node.take_commands(), [NodeCommand::Disconnect]);
    let outcome = node.take_outcome().expect("answered");
    let Err(error @ JoinError::Timeout { .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((error.endpoint(), error.elapsed()), (Some("head:29400"), Some(seconds(3))));
}

#[test]
fn a_node_that_has_left_does_not_introduce_itself_again() {
    let now = Instant::now();
    let mut node = node(now);
    assert_eq!(connects_at(&mut node), now);
    node.leave("SIGTERM".into(), Some(15));
    node.on_connected(now);
    assert_eq!(node.take_commands(), [NodeCommand::Disconnect]);
    node.join(1, None, None, seconds(1), now);
    assert!(matches!(node.take_outcome(), Some(Err(JoinError::Connection { .. }))));
    assert_eq!(node.next_deadline(), None);
}

#[test]
fn an_abandoned_join_is_withdrawn_and_kept_from_the_next_one() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(60), now);
    node.take_commands();
    node.abandon();
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Withdraw)]);
    // A place that was given just before the withdrawal was read must not arrive: it would look like the answer to the next join.
    node.join(2, None, None, seconds(60), now);
    assert_eq!(node.take_commands(), [NodeCommand::Disconnect]);

    let mut node = connected(now);
    node.join(1, None, None, seconds(60), now);
    node.abandon();
    node.on_message(complete(1), now);
    node.on_message(CoordinatorMessage::Withdrawn { progress: String::new() }, now);
    assert_eq!((node.take_outcome(), node.view().round), (None, Round(0)));
    node.take_commands();
    node.join(2, None, None, seconds(60), now);
    assert!(matches!(node.take_commands().as_slice(), [NodeCommand::Send(NodeMessage::Join(_))]));
}

/// The Hello has said that the node asks for a place. A round would count on it.
#[test]
fn a_join_that_ends_before_the_welcome_is_withdrawn() {
    let join = || {
        let now = Instant::now();
        let mut node = node(now);
        node.join(1, None, None, seconds(2), now);
        let at = connects_at(&mut node);
        node.on_connected(at);
        let commands = node.take_commands();
        let reports_it = |command: &_| matches!(command, NodeCommand::Send(NodeMessage::Hello(hello)) if hello.joining);
        assert!(commands.iter().any(reports_it), "{commands:?}");
        (node, now)
    };
    let (mut node, _) = join();
    node.abandon();
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Withdraw)]);

    let (mut node, now) = join();
    node.on_tick(now + seconds(2));
    assert!(matches!(node.take_outcome(), Some(Err(JoinError::Connection { .. }))));
    assert!(node.take_commands().contains(&NodeCommand::Send(NodeMessage::Withdraw)));
}

#[test]
fn an_abandoned_placement_is_given_up() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(60), now);
    node.on_message(complete(1), now);
    node.take_commands();
    node.abandon();
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Withdraw)]);
    assert_eq!(node.take_outcome(), None);

    let mut node = connected(now);
    node.join(1, None, None, seconds(60), now);
    node.on_message(complete(1), now);
    assert!(matches!(node.take_outcome(), Some(Ok(_))));
    node.take_commands();
    node.abandon();
    assert_eq!(node.take_commands(), [], "a place that was taken is kept");
}

#[test]
fn a_node_without_a_placement_does_not_fail_the_job() {
    // Its workers were started before it joined, and one has failed.
    let now = Instant::now();
    let mut node = connected(now);
    node.take_commands();
    let failed = || Verdict::Failed {
        by: "10.0.0.8".into(),
        cause: "exit code 1".into(),
        failure: None,
        class: EndClass::Program,
    };
    node.close(failed());
    assert_eq!(node.take_commands(), []);
    assert_eq!(node.view().closed, None);
    node.join(1, None, None, seconds(60), now);
    node.on_message(complete(1), now);
    node.take_commands();
    node.close(failed());
    assert_eq!(node.take_commands(), [NodeCommand::Send(NodeMessage::Close(failed()))]);
}

#[test]
fn a_closed_rendezvous_needs_no_coordinator() {
    // The job has succeeded elsewhere, and the host has left. Workers of this node may still be running.
    let now = Instant::now();
    let mut node = connected(now);
    node.join(1, None, None, seconds(60), now);
    node.on_message(complete(1), now);
    let verdict = Verdict::Succeeded { by: "10.0.0.6".into() };
    node.on_message(CoordinatorMessage::Closed { verdict, spare: false }, now);
    node.on_disconnected("reset".into(), false, now);
    for _ in 0..100 {
        let at = node.next_deadline().expect("it keeps trying");
        node.on_tick(at);
        node.on_connect_failed("connection refused".into(), true, at);
    }
    node.on_tick(now + COORDINATOR_TIMEOUT * 2);
    assert_eq!(node.view().failed, None);
}

/// The lines that are logged until `now + until`, each with its second.
fn reported(node: &mut NodeMachine, status_log: &mut StatusLog, now: Instant, until: Duration) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    for second in 0..=until.as_secs() {
        let at = now + seconds(second);
        all.extend(status_log.look(node, at).into_iter().map(|text| (second, text)));
        let next = status_log.next_deadline(node);
        assert!(next.is_none_or(|next| next > at), "a deadline that has passed would keep the driver busy");
    }
    all
}

#[test]
fn a_waiting_node_logs_what_it_waits_for_now_and_then() {
    // #91943: silence for ten minutes, then an error.
    let now = Instant::now();
    let mut node = connected(now);
    let mut status_log = StatusLog::default();
    node.join(1, None, None, seconds(6000), now);
    let progress =
        |text: &str| CoordinatorMessage::Heartbeat { waits: Some(Waits { progress: text.into(), spare: false }) };
    node.on_message(progress("1 of 3 are in"), now);
    let first = reported(&mut node, &mut status_log, now, seconds(100));
    assert_eq!(first, [(3, "waiting for 3s of up to 6000s (join_timeout): 1 of 3 are in".to_owned())]);
    node.on_message(progress("2 of 3 are in"), now);
    let more = reported(&mut node, &mut status_log, now + seconds(101), seconds(900));
    let texts: Vec<_> = more.iter().map(|(_, text)| text.split_once(": ").map_or("", |parts| parts.1)).collect();
    assert_eq!(texts, ["2 of 3 are in", "2 of 3 are in"], "every ten minutes if nothing changes");
    node.on_message(complete(1), now);
    assert_eq!(reported(&mut node, &mut status_log, now + seconds(1100), seconds(100)), []);
}

#[test]
fn the_absence_and_the_return_of_a_coordinator_are_logged() {
    let now = Instant::now();
    let mut node = connected(now);
    let mut status_log = StatusLog::default();
    node.on_disconnected("the coordinator closed the connection".into(), false, now);
    assert_eq!(status_log.look(&node, now), [""; 0], "it may be back in a moment");
    let gone = reported(&mut node, &mut status_log, now, seconds(20));
    let text = "the coordinator at head:29400 is out of reach: the coordinator closed the connection; this node waits for it \
                for up to 60s (coordinator_timeout)";
    assert_eq!(gone, [(1, text.to_owned())]);
    let at = connects_at(&mut node);
    node.on_connected(at);
    node.on_message(welcome(), at);
    assert_eq!(status_log.look(&node, now + seconds(21)), ["the coordinator at head:29400 is back after 21s"]);
    assert_eq!(reported(&mut node, &mut status_log, now + seconds(22), seconds(20)), []);
}

/// The workers of this node run on without the coordinator, unless they have ended, or were being stopped when it went.
#[test]
fn workers_run_on_without_a_coordinator_only_if_nothing_has_happened_to_them() {
    type Happens = fn(&mut NodeMachine);
    let cases: [(&str, Happens, &str); 5] = [
        ("nothing", |_| {}, "this node's workers run on, and it retries"),
        (
            "a worker has failed",
            |node| node.report_failure(Round(1), *crate::bench::failure()),
            "this node waits for it",
        ),
        ("a worker has just ended", |node| node.stopping(Round(1)), "this node waits for it"),
        ("they have succeeded", |node| node.report_done(Round(1)), "this node waits for it"),
        ("those of an earlier round were stopped", |node| node.stopping(Round(0)), "this node's workers run on"),
    ];
    for (what, happens, text) in cases {
        let now = Instant::now();
        let mut node = connected(now);
        node.join(1, None, None, seconds(60), now);
        node.on_message(complete(1), now);
        happens(&mut node);
        node.on_disconnected("reset".into(), false, now);
        let lines = reported(&mut node, &mut StatusLog::default(), now, seconds(5));
        let [(1, line)] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.contains(&format!("reset; {text}")), "{what}: {line}");
    }
}

/// The store opens only after the join has timed out.
#[test]
fn a_store_that_opens_after_the_join_was_given_up_asks_for_no_placement() {
    let now = Instant::now();
    let mut node = connected(now);
    node.join_with_new_store(None, None, seconds(5), now);
    let addr = node.wanted_store().expect("it is welcome");
    let late = now + seconds(5);
    node.on_tick(late);
    let sent = node.take_commands();
    assert!(sent.contains(&NodeCommand::Send(NodeMessage::Withdraw)), "{sent:?}");
    node.on_store_opened(addr, 4711);
    assert_eq!(node.take_commands(), []);
    // Nor does it join on a new connection.
    node.on_disconnected("cut".into(), false, late);
    connects_at(&mut node);
    node.on_connected(late);
    let sent = node.take_commands();
    let [NodeCommand::Send(NodeMessage::Hello(hello))] = &sent[..] else { panic!("{sent:?}") };
    assert!(!hello.joining);
}
