//! The coordinator logs each decision once with its reason, and sends the reason to the nodes concerned. Runs without nodes are
//! remembered for a while.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::coordinator::machine::{VACANT_FOR, VACANT_RUNS};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Failure, Generation, Hello, NodeId, NodeMessage, Placed, Round, Verdict, Waits,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{SessionId, Standing};

const SECOND: Duration = Duration::from_secs(1);

impl Bench {
    /// Tick at the coordinator's next deadline, `times` times.
    fn look(&mut self, times: usize) {
        for _ in 0..times {
            let at = self.machine.next_deadline().unwrap();
            self.pass(at.saturating_duration_since(self.now));
        }
    }

    /// Assert that exactly one line of the log since `from` contains `text`.
    fn noted_once(&self, from: usize, text: &str) {
        let count = self.notes[from..].iter().filter(|note| note.contains(text)).count();
        assert_eq!(count, 1, "`{text}` in {:#?}", &self.notes[from..]);
    }

    fn progress(&self) -> String {
        self.run().progress(self.now)
    }

    /// The answer to a waiting node's next heartbeat.
    fn received_waits(&mut self, session: u64) -> Waits {
        self.send(session, NodeMessage::Heartbeat { rtt_us: None });
        match self.last(session) {
            CoordinatorMessage::Heartbeat { waits: Some(waits) } => waits.clone(),
            other => panic!("{other:?}"),
        }
    }
}

/// Assert that heartbeats of these sessions, and ticks, log nothing.
fn nothing_new_is_logged(bench: &mut Bench, sessions: &[u64]) {
    let before = bench.notes.len();
    for _ in 0..3 {
        for session in sessions {
            bench.send(*session, NodeMessage::Heartbeat { rtt_us: None });
        }
        bench.machine.on_tick(bench.now);
        bench.take();
    }
    assert_eq!(bench.notes.len(), before, "{:#?}", &bench.notes[before..]);
}

#[test]
fn gathering_last_call_and_completion_are_each_logged_once_with_their_reason() {
    let settings = Settings::new(2, 4);
    let mut bench = Bench::new();
    for node in 1..=3 {
        bench.greet(node, hello(node, &settings), node as u8);
    }
    bench.send(1, join(0));
    assert_eq!(bench.run().standing(), Standing::Gathering);
    bench.noted_once(0, "round 1 has 0 of at least 2 nodes");
    nothing_new_is_logged(&mut bench, &[1]);

    bench.send(2, join(0));
    assert_eq!(bench.run().standing(), Standing::LastCall);
    let why = "more nodes may join until the last call ends (last_call_timeout)";
    bench.noted_once(0, &format!("round 1 could form with 2 nodes, but {why}"));
    assert!(bench.progress().ends_with(&format!("; closes within 30.0 s: {why}")), "{}", bench.progress());
    assert!(bench.received_waits(1).progress.contains(why), "a waiting node is notified");
    nothing_new_is_logged(&mut bench, &[1, 2]);

    // The arrival of a third node is logged, and the decision stays the same.
    let before = bench.notes.len();
    bench.send(3, join(0));
    assert_eq!(bench.notes[before..], ["10.0.0.3 (host:3) joined (3 of 2 to 4 nodes)".to_owned()]);

    bench.look(1);
    bench.pass(settings.last_call_timeout);
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
    bench.noted_once(0, "round 1 is complete with 3 nodes: the last call of 30.0 s ended (10.0.0.1 (host:1), ");
    let placement = bench.placement(3);
    assert!(
        placement.reason.starts_with("the last call of 30.0 s ended"),
        "a member is notified: {}",
        placement.reason
    );
    nothing_new_is_logged(&mut bench, &[1, 2, 3]);
}

#[test]
fn a_newcomer_a_loss_and_settling_are_each_logged_once_with_their_reason() {
    let settings = Settings { settle_timeout: 5 * SECOND, ..Settings::new(1, 3) };
    let mut bench = Bench::new();
    for node in 1..=3 {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    let before = bench.notes.len();
    bench.machine.on_disconnected(SessionId(3), bench.now);
    bench.pass(settings.reconnect_grace);
    let lost = "10.0.0.3 (host:3) is lost: its connection ended 0.5 s ago";
    bench.noted_once(before, &format!("round 1 is interrupted: {lost}"));
    assert_eq!(bench.run().standing(), Standing::Reforming);
    let CoordinatorMessage::Status { waiting: 1, reason, .. } = bench.last(1) else { panic!("{:?}", bench.last(1)) };
    assert_eq!(reason, lost, "a member is notified");

    bench.send(1, join(1));
    bench.send(2, join(1));
    assert_eq!(bench.run().standing(), Standing::Settling);
    let why = "a replacement for a missing member may join (settle_timeout)";
    bench.noted_once(before, why);
    assert!(bench.received_waits(2).progress.contains(why));
    nothing_new_is_logged(&mut bench, &[1, 2]);

    // A waiting node's connection ends when the round could form.
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.take();
    assert_eq!(bench.run().standing(), Standing::Reconnecting);
    bench.noted_once(before, "a waiting node's connection has ended, and it may reconnect (reconnect_grace)");
    bench.pass(settings.reconnect_grace);
    bench.noted_once(before, "10.0.0.2 (host:2) no longer waits: it is lost");
    bench.pass(settings.settle_timeout);
    assert!(bench.is_placed(1, 2));

    // A newcomer joins: the members and the log get the reason why the world must re-form.
    let before = bench.notes.len();
    bench.greet(4, hello(4, &settings), 4);
    bench.send(4, join(0));
    bench.noted_once(before, "members of round 2 must stop: 1 node waits to join (10.0.0.4 (host:4)); Detected 1 new nodes; will restart worker group");
    // It withdraws before any member has stopped.
    bench.send(4, NodeMessage::Withdraw);
    bench.noted_once(before, "10.0.0.4 (host:4) no longer waits: it gave up waiting");
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
}

#[test]
fn failures_late_reports_and_verdicts_are_each_logged_once_with_their_reason() {
    let settings = Settings { max_restarts: Some(1), ..Settings::new(2, 2) };
    let mut bench = Bench::formed(2, &settings);
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    bench.noted_once(
        0,
        "round 1 is interrupted: rank 3 (local rank 1, role trainer, pid 77) on 10.0.0.1 (host:1) ended",
    );
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: Box::new(Failure { pid: 78, ..*failure() }) });
    bench.noted_once(0, "; not counted, a consequence of this: rank 3");
    bench.send(1, join(1));
    bench.send(2, join(1));
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: failure() });
    let ignored = "a report of 10.0.0.1 (host:2) about round 1 is ignored: that round is over, the current one is 2";
    bench.noted_once(0, ignored);
    bench.send(2, NodeMessage::Done { round: Round(2) });
    bench.noted_once(0, "1 of 2 live nodes of round 2 have finished");
    bench.send(1, NodeMessage::Failed { round: Round(2), failure: failure() });
    bench.noted_once(0, "all 1 restarts are used up (max_restarts)");
    assert_eq!(bench.run().standing(), Standing::Closed);
    bench.send(1, NodeMessage::Close(Verdict::Succeeded { by: "host:1".into() }));
    bench.send(2, NodeMessage::Leave { reason: "the job is over".into(), signal: None });
    bench.noted_once(0, "10.0.0.1 (host:2) left: the job is over");
    assert_eq!(bench.notes.iter().filter(|note| note.starts_with("closed")).count(), 1, "{:#?}", bench.notes);
}

#[test]
fn a_restarted_coordinator_logs_that_it_waits_for_members_and_that_all_have_reported() {
    let settings = Settings::new(2, 3);
    let mut bench = Bench::new();
    let member = |node: u64| Hello { placed: Some(placed(node)), ..hello(node, &settings) };
    bench.greet(1, member(1), 1);
    assert_eq!(bench.run().standing(), Standing::Recovering);
    let waits = "which this coordinator does not know: it was restarted, and waits 15.0 s for the other members";
    bench.noted_once(0, waits);
    bench.greet(2, member(2), 2);
    bench.noted_once(0, "all 2 members of round 4 have reported");
    assert_eq!(bench.run().standing(), Standing::Undisturbed);
}

fn placed(node: u64) -> Placed {
    Placed {
        round: Round(4),
        rank: node as u32 - 1,
        world_size: 2,
        world: 77,
        active: true,
        restart: 3,
        host: None,
        began_with: Generation::default(),
    }
}

#[test]
fn a_stalled_coordinator_and_a_restarted_agent_are_each_logged_once() {
    let settings = Settings::new(2, 2);
    let mut bench = Bench::formed(2, &settings);
    bench.pass(settings.lease() + 45 * SECOND);
    bench.noted_once(0, "this coordinator was stalled: its timer is 45.0s late, every lease is renewed");
    assert!(bench.ended.is_empty(), "no node is dropped for it");
    bench.greet(20, Hello { node: NodeId(20), process: 20, ..hello(2, &settings) }, 1);
    bench.noted_once(0, "10.0.0.1 (host:2) is replaced: 10.0.0.1 (host:2) registered from the same address");
    bench.greet(21, hello(2, &settings), 1);
    assert!(bench.rejection(21).contains("was replaced by a newer agent from the same address"));
    nothing_new_is_logged(&mut bench, &[1, 20]);
}

/// A newcomer with another `--nnodes` may reach a restarted coordinator before the running job's members do. These members must not
/// be rejected for it.
#[test]
fn newcomers_with_other_settings_give_way_to_the_members_of_a_running_job() {
    let mut bench = Bench::new();
    bench.greet(9, hello(9, &Settings::new(1, 9)), 9);
    bench.send(9, join(0));
    let member = |node: u64| Hello { placed: Some(placed(node)), ..hello(node, &Settings::new(2, 2)) };
    bench.greet(1, member(1), 1);
    bench.greet(2, member(2), 2);
    assert!(bench.rejection(9).contains("a running world of run `job` with 2 nodes"), "{}", bench.rejection(9));
    bench.noted_once(0, "1 node(s) rejected: host:1 is in a running world");
    assert_eq!((bench.run().round(), bench.run().restart()), (Round(4), 3));
    assert!(!bench.run().knows(NodeId(9)) && bench.run().knows(NodeId(1)));
    assert!(matches!(bench.last(2), CoordinatorMessage::Status { waiting: 0, .. }));
    // A claim with other settings does not displace a known running world.
    let other = Hello { placed: Some(placed(1)), ..hello(7, &Settings::new(1, 7)) };
    bench.greet(7, other, 7);
    assert!(bench.rejection(7).contains("give every node the same `--nnodes`"), "{}", bench.rejection(7));
}

// Many joins at once.

/// Flapping worlds, as in Lightning and NVRx: each arrival made a separate round.
#[test]
fn joins_in_a_burst_make_one_round() {
    const NODES: u64 = 200;
    let settings = Settings { last_call_timeout: 3 * SECOND, ..Settings::new(2, 300) };
    let mut bench = Bench::new();
    for node in 1..=NODES {
        bench.greet(node, hello(node, &settings), 1);
        bench.send(node, join(0));
        bench.now += Duration::from_millis(10);
        bench.machine.on_tick(bench.now);
    }
    bench.pass(3 * SECOND);
    assert_eq!(bench.run().round(), Round(1));
    let placement = bench.placement(NODES);
    assert_eq!(placement.world_size, NODES as u32);

    // Twenty more join while it runs, and ten leave: one more round forms.
    for node in 1..=10 {
        bench.send(node, NodeMessage::Leave { reason: "a test".into(), signal: None });
    }
    for node in NODES + 1..=NODES + 20 {
        bench.greet(node, hello(node, &settings), 1);
        bench.send(node, join(0));
    }
    for node in 11..=NODES {
        bench.send(node, join(1));
    }
    bench.pass(3 * SECOND);
    assert_eq!(bench.run().round(), Round(2));
    assert!(bench.is_placed(NODES + 20, 2) && bench.is_placed(11, 2));
}

// Runs without nodes.

fn of(run: &str, node: u64) -> Hello {
    Hello { run_id: run.into(), ..hello(node, &Settings::new(1, 1)) }
}

#[test]
fn a_run_that_has_ended_is_remembered_for_an_hour_and_then_forgotten() {
    let mut bench = Bench::new();
    bench.greet(1, of("ended", 1), 1);
    bench.send(1, join(0));
    bench.send(1, NodeMessage::Close(Verdict::Succeeded { by: "host:1".into() }));
    bench.send(1, NodeMessage::Leave { reason: "the job is over".into(), signal: None });
    bench.pass(VACANT_FOR - SECOND);
    // A rejected node does not extend the time.
    bench.greet(3, Hello { name: "forged\nline".into(), ..of("ended", 3) }, 3);
    assert!(bench.rejection(3).contains("control characters"));
    assert_eq!(bench.machine.next_deadline().unwrap() - bench.now, SECOND);
    // A late node learns how the job ended. When it leaves, the run is remembered for another hour.
    bench.greet(2, of("ended", 2), 2);
    assert!(matches!(bench.last(2), CoordinatorMessage::Over { .. }), "{:?}", bench.last(2));
    bench.pass(10 * SECOND);
    assert_eq!(bench.machine.run_count(), 1);
    bench.send(2, NodeMessage::Leave { reason: "too late".into(), signal: None });
    bench.pass(VACANT_FOR - SECOND);
    assert_eq!(bench.machine.run_count(), 1);
    let due = bench.machine.next_deadline().unwrap();
    assert_eq!(due - bench.now, SECOND);
    bench.pass(SECOND);
    assert_eq!((bench.machine.run_count(), bench.machine.next_deadline()), (0, None));
    bench.noted_once(0, "this run has had no nodes for 3600s: it is forgotten");
}

#[test]
fn a_run_is_remembered_after_its_last_node_is_lost() {
    let mut bench = Bench::new();
    bench.greet(1, of("lost", 1), 1);
    bench.send(1, join(0));
    bench.machine.on_disconnected(SessionId(1), bench.now);
    bench.pass(SECOND);
    assert!(bench.machine.run("lost").is_some_and(|run| run.round() == Round(1)), "its round number is not used again");
    bench.pass(VACANT_FOR);
    assert_eq!(bench.machine.run_count(), 0);
}

#[test]
fn unknown_nodes_leave_nothing_behind() {
    let mut bench = Bench::new();
    for number in 0..50 {
        bench.greet(number, of(&format!("opened {number}"), number), 1);
        match number % 2 {
            0 => bench.send(number, NodeMessage::Leave { reason: "was only looking".into(), signal: None }),
            _ => bench.machine.on_disconnected(SessionId(number), bench.now),
        }
    }
    bench.pass(SECOND);
    assert_eq!(bench.machine.run_count(), 0);
}

#[test]
fn no_more_than_a_thousand_ended_runs_are_remembered() {
    let mut bench = Bench::formed(2, &Settings::new(2, 2));
    for number in 0..VACANT_RUNS as u64 + 50 {
        let (session, run) = (100 + number, format!("ended {number}"));
        bench.greet(session, of(&run, session), 1);
        bench.send(session, NodeMessage::Close(Verdict::Succeeded { by: "a test".into() }));
        bench.send(session, NodeMessage::Leave { reason: "the job is over".into(), signal: None });
        bench.now += Duration::from_micros(1);
    }
    assert_eq!(bench.machine.run_count(), 1 + VACANT_RUNS);
    assert!(bench.machine.run("ended 49").is_none() && bench.machine.run("ended 50").is_some(), "the oldest go first");
    assert_eq!(bench.run().nodes().count(), 2, "a run with nodes is kept");
}

#[test]
fn a_node_whose_process_has_ended_has_no_grace_to_come_back() {
    let settings = Settings { reconnect_grace: 60 * SECOND, settle_timeout: 5 * SECOND, ..Settings::new(1, 3) };
    let mut bench = Bench::new();
    for node in 1..=3 {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    let before = bench.notes.len();
    let dies = |bench: &mut Bench, node| {
        bench.machine.on_dead("job", NodeId(node), bench.now);
        bench.take();
    };
    dies(&mut bench, 3);
    dies(&mut bench, 77);
    assert_eq!(bench.run().standing(), Standing::Undisturbed, "it is connected, or unknown");
    assert_eq!(bench.machine.node_of(SessionId(3)), Some(("job".to_owned(), NodeId(3))));
    bench.machine.on_disconnected(SessionId(3), bench.now);
    bench.take();
    assert_eq!(bench.run().standing(), Standing::Undisturbed, "it may come back");
    dies(&mut bench, 3);
    let lost = "10.0.0.3 (host:3) is lost: its process has ended";
    bench.noted_once(before, &format!("round 1 is interrupted: {lost}"));
    assert_eq!(bench.run().standing(), Standing::Reforming);
    let known = bench.notes.len();
    dies(&mut bench, 3);
    assert_eq!(bench.notes.len(), known, "it is said once");
}
