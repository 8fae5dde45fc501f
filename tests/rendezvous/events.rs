//! What the coordinator records: each event with its causes.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::events::journal::{id, origin};
use elastic_rs::events::record::{Ending, FirstStep, Kind, LONGEST_US, Loss, Number, Phase, Record, Replayed, Why};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, LARGEST_STEP, NodeId, NodeMessage, Placed, Progress, Replay, ReplayedEvent,
    Round, StepReport,
};
use elastic_rs::rendezvous::messages::replay::What;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::SessionId;

/// The only event of this kind.
fn only(bench: &Bench, is_it: impl Fn(&Kind) -> bool) -> &Record {
    let found: Vec<_> = bench.records.iter().filter(|record| is_it(&record.kind)).collect();
    assert_eq!(found.len(), 1, "{:#?}", bench.records);
    found[0]
}

/// The event of which this one is a consequence.
fn cause<'a>(bench: &'a Bench, of: &Record) -> &'a Record {
    let cause = of.causes.first().unwrap_or_else(|| panic!("no cause: {of:?}"));
    bench.records.iter().find(|record| record.number == *cause).unwrap()
}

fn is_broken(kind: &Kind) -> bool {
    matches!(kind, Kind::RoundBroken { .. })
}

fn settings() -> Settings {
    Settings { max_restarts: Some(1), ..Settings::new(2, 2) }
}

#[test]
fn events_are_numbered_without_gaps_from_the_opening_to_the_end() {
    let mut bench = Bench::formed(2, &settings());
    for node in [1, 2] {
        bench.send(node, NodeMessage::Done { round: Round(1) });
    }
    let kinds: Vec<_> = bench.records.iter().map(|record| record.kind.clone()).collect();
    let joined = |node: u8| Kind::NodeJoined { address: format!("10.0.0.{node}"), workers: Some(2), new: true };
    let finished = |done| Kind::WorkersFinished { done, of: 2 };
    assert_eq!(
        kinds.iter().filter(|kind| !matches!(kind, Kind::RoundWaits { .. })).collect::<Vec<_>>(),
        [
            &Kind::RunOpened { min_nodes: 2, max_nodes: 2, max_restarts: Some(1) },
            &joined(1),
            &joined(1),
            &Kind::RoundCompleted { nodes: 2, workers: Some(4), rank0: Some("host:1".into()), in_place: false },
            &finished(1),
            &finished(2),
            &Kind::RunClosed { verdict: Ending::Succeeded },
        ]
    );
    assert!(bench.records.iter().map(|record| record.number).eq((1..).map(Number).take(bench.records.len())));
    let completed = only(&bench, |kind| matches!(kind, Kind::RoundCompleted { .. }));
    assert_eq!(completed.round, 1, "an event names the round that it begins");
    assert!(matches!(cause(&bench, completed).kind, Kind::NodeJoined { .. }));
    assert_eq!(cause(&bench, bench.records.last().unwrap()).number, completed.number);
}

#[test]
fn a_workers_failure_is_the_root_of_what_follows() {
    let mut bench = Bench::formed(2, &settings());
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    bench.send(2, NodeMessage::Failed { round: Round(1), failure: failure() });
    bench.send(1, join(1));
    bench.send(2, join(1));

    let broken = only(&bench, is_broken);
    assert_eq!((&broken.kind, broken.restart), (&Kind::RoundBroken { why: Why::WorkerFailed }, 1));
    let Kind::WorkerExited(exit) = &cause(&bench, broken).kind else { panic!("{broken:?}") };
    assert_eq!((exit.rank, exit.local_rank, exit.pid, exit.returncode), (3, 1, 77, -9));
    assert_eq!((exit.exit.as_str(), exit.message.as_str()), ("SIGKILL", "out of memory"));
    assert!(exit.first && exit.counts && cause(&bench, broken).causes.is_empty());
    assert_eq!(cause(&bench, broken).node.as_deref(), Some("host:1"));
    let second = only(&bench, |kind| matches!(kind, Kind::WorkerExited(exit) if !exit.first));
    assert_eq!((cause(&bench, second).number, second.node.as_deref()), (broken.number, Some("host:2")));
    let again = only(&bench, |kind| matches!(kind, Kind::RoundCompleted { .. }) && is_second(&bench, kind));
    assert_eq!(cause(&bench, again).number, broken.number);

    // The budget is used up by the next one, which ends the job.
    bench.send(1, NodeMessage::Failed { round: Round(2), failure: failure() });
    let closed = only(&bench, |kind| matches!(kind, Kind::RunClosed { .. }));
    assert_eq!(closed.kind, Kind::RunClosed { verdict: Ending::Failed });
    assert!(matches!(&cause(&bench, closed).kind, Kind::WorkerExited(exit) if exit.first));
}

/// Whether this is the last completed round of two.
fn is_second(bench: &Bench, kind: &Kind) -> bool {
    let last = bench.records.iter().rfind(|record| matches!(record.kind, Kind::RoundCompleted { .. }));
    last.is_some_and(|last| std::ptr::eq(&last.kind, kind))
}

#[test]
fn lost_and_leaving_nodes_are_roots() {
    let mut bench = Bench::formed(2, &settings());
    bench.machine.on_disconnected(SessionId(2), bench.now);
    bench.pass(settings().reconnect_grace);
    let broken = only(&bench, is_broken);
    assert_eq!(broken.kind, Kind::RoundBroken { why: Why::NodeLost });
    let lost = cause(&bench, broken);
    assert_eq!(lost.kind, Kind::NodeLost { how: Loss::Connection, silent_ms: Some(500) });
    assert_eq!(lost.node.as_deref(), Some("host:2"));

    let mut bench = Bench::formed(2, &settings());
    bench.send(2, NodeMessage::Leave { reason: "got SIGTERM".into(), signal: Some(15) });
    let broken = only(&bench, is_broken);
    assert_eq!(broken.kind, Kind::RoundBroken { why: Why::NodeLeft });
    assert_eq!(cause(&bench, broken).kind, Kind::NodeLeft { signal: Some(15) });

    let mut bench = Bench::formed(2, &settings());
    while !bench.records.iter().any(|record| matches!(record.kind, Kind::NodeLost { .. })) {
        let next = bench.machine.next_deadline().unwrap();
        bench.pass(next.saturating_duration_since(bench.now));
    }
    let silent = bench.records.iter().find(|record| matches!(record.kind, Kind::NodeLost { .. })).unwrap();
    assert!(matches!(silent.kind, Kind::NodeLost { how: Loss::Silence, .. }), "{silent:?}");
}

#[test]
fn nodes_that_wait_break_a_round() {
    let settings = Settings { last_call_timeout: Duration::ZERO, ..Settings::new(2, 3) };
    let mut bench = Bench::formed(2, &settings);
    bench.greet(3, hello(3, &settings), 3);
    bench.send(3, join(0));
    let broken = only(&bench, is_broken);
    assert_eq!(broken.kind, Kind::RoundBroken { why: Why::NodesWait });
    assert_eq!(cause(&bench, broken).node.as_deref(), Some("host:3"));
    assert!(broken.text.as_deref().unwrap().starts_with("members of round 1 must stop: 1 node waits to join"));
}

/// Each node tells the time since its start, in which it imports. Only rank 0's node knows how long that took.
#[test]
fn a_nodes_first_step_of_a_round_is_recorded_once_and_without_the_import() {
    let mut bench = Bench::formed(2, &settings());
    let import = Phase { import_us: Some(3_000), ..Phase::default() };
    bench.send(1, NodeMessage::PhaseDurations { round: Round(1), phase: import });
    let first_step = |round, step| {
        let first = Progress {
            after_us: 5_000,
            formed_us: [Some(3_500), Some(4_000)],
            step: Some(step),
            before: Some(u64::MAX),
            step_time_us: Some(7),
        };
        NodeMessage::Progress { round: Round(round), first }
    };
    for (round, step) in [(0, 1), (2, 2), (1, 901), (1, 902)] {
        bench.send(2, first_step(round, step));
    }
    let replayed = only(&bench, |kind| matches!(kind, Kind::FirstStep(_)));
    let step_before = Some(LARGEST_STEP);
    let first = FirstStep {
        group_us: Some(500),
        state_us: Some(500),
        first_step_us: 1_000,
        step: Some(901),
        step_before,
        step_time_us: Some(7),
    };
    assert_eq!((&replayed.kind, replayed.node.as_deref()), (&Kind::FirstStep(first), Some("host:2")));
    assert!(matches!(cause(&bench, replayed).kind, Kind::RoundCompleted { .. }));

    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    for node in [1, 2] {
        bench.send(node, join(1));
    }
    bench.send(2, first_step(2, 900));
    let again = bench.records.last().unwrap();
    assert!(
        matches!(again.kind, Kind::FirstStep(FirstStep { first_step_us: 1_000, step: Some(900), .. })),
        "{again:?}"
    );
}

fn step_of(round: u64, step: Option<u64>, us: u64) -> NodeMessage {
    let report = StepReport { step, step_time_us: Some(us), restarts_for_nccl: false };
    NodeMessage::Step { round: Round(round), report }
}

/// Rank 0's node knows it, since all workers make the same process group.
#[test]
fn the_state_says_that_workers_are_restarted_because_their_groups_use_nccl() {
    let settings = settings();
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, Hello { reports_steps: true, ..hello(node, &settings) }, node as u8);
        bench.send(node, join(0));
    }
    let restarts = |bench: &Bench| bench.run().state(bench.now).restarts_for_nccl;
    let reports = |bench: &mut Bench, node, restarts_for_nccl| {
        let report = StepReport { restarts_for_nccl, ..StepReport::default() };
        bench.send(node, NodeMessage::Step { round: Round(1), report });
    };
    assert!(!restarts(&bench));
    reports(&mut bench, 2, true);
    assert!(!restarts(&bench), "not rank 0's node");
    reports(&mut bench, 1, true);
    assert!(restarts(&bench));
    reports(&mut bench, 1, false);
    assert!(!restarts(&bench));
}

/// Whoever looks once is answered by one node: all workers make the same steps.
#[test]
fn whoever_watches_learns_how_far_the_training_is() {
    let settings = settings();
    let mut bench = Bench::new();
    for node in [1, 2] {
        bench.greet(node, Hello { reports_steps: true, ..hello(node, &settings) }, node as u8);
        bench.send(node, join(0));
    }
    let asked = |bench: &mut Bench| {
        bench.machine.on_watched(None, bench.now);
        bench.take();
        bench.sent.iter().filter(|(_, message)| matches!(message, CoordinatorMessage::ReportStep { .. })).count()
    };
    assert_eq!((asked(&mut bench), bench.last(1)), (1, &CoordinatorMessage::ReportStep { round: Round(1) }));
    assert!(bench.run().awaits_step());
    assert_eq!(asked(&mut bench), 1, "not again so soon");
    let step_message = |round, step| step_of(round, step, 7);
    bench.send(1, step_message(2, Some(9)));
    assert!(bench.run().awaits_step(), "of another round");
    bench.pass(Duration::from_millis(1));
    bench.send(1, step_message(1, Some(u64::MAX)));
    let state = bench.run().state(bench.now);
    assert_eq!((state.step, state.step_time_us), (Some(LARGEST_STEP), Some(7)));
    assert!(!bench.run().awaits_step());
    bench.pass(Duration::from_secs(3));
    assert_eq!(asked(&mut bench), 2);
    // The next round has made no step yet.
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    for node in [1, 2] {
        bench.send(node, join(1));
    }
    assert_eq!(bench.run().state(bench.now).step, None);
    assert_eq!(asked(&mut bench), 3);
}

/// Whoever asks again soon watches: all are asked then. What others did while answers were under way puts no node behind.
#[test]
fn whoever_goes_on_watching_learns_which_nodes_are_behind() {
    let settings = Settings::new(3, 3);
    let mut bench = Bench::new();
    for node in [1, 2, 3] {
        bench.greet(node, Hello { reports_steps: node != 3, ..hello(node, &settings) }, node as u8);
        bench.send(node, join(0));
    }
    let watch = |bench: &mut Bench, after_ms| {
        bench.pass(Duration::from_millis(after_ms));
        let before = bench.sent.len();
        bench.machine.on_watched(None, bench.now);
        bench.take();
        bench.sent[before..].iter().map(|(node, _)| *node).collect::<Vec<_>>()
    };
    let step_message = |step, us| step_of(1, step, us);
    let behind = |bench: &Bench| bench.run().state(bench.now).behind;
    let looks = watch(&mut bench, 0);
    assert_eq!((looks.len(), watch(&mut bench, 3000)), (1, looks.clone()), "two looks are no watching");
    bench.send(1, step_message(Some(100), 7));
    let all = watch(&mut bench, 1000);
    assert_eq!((all.len(), all.contains(&looks[0])), (2, true), "node 3 tells no steps");
    bench.send(1, step_message(Some(103), 7));
    bench.send(2, step_message(Some(101), 9));
    assert_eq!(behind(&bench), [], "100 was the goal");
    let state = bench.run().state(bench.now);
    assert_eq!((state.step, state.step_time_us), (Some(103), Some(7)), "of rank 0's node");
    assert_eq!(watch(&mut bench, 600), looks, "all are asked once a second");
    bench.send(1, step_message(Some(104), 7));
    assert_eq!(watch(&mut bench, 600).len(), 2);
    bench.send(1, step_message(Some(106), 7));
    bench.send(2, step_message(Some(101), 9));
    assert_eq!(behind(&bench), [("host:2".to_owned(), 3)]);
    assert_eq!(watch(&mut bench, 1000).len(), 2);
    bench.send(2, step_message(None, 9));
    assert_eq!(behind(&bench), [], "a node without numbers is not known to be behind");
    assert_eq!(watch(&mut bench, 1000).len(), 2);
    bench.send(2, step_message(Some(5), 9));
    assert_eq!(behind(&bench), [("host:2".to_owned(), 101)]);
    // The next world has made no step yet.
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    for node in [1, 2, 3] {
        bench.send(node, join(1));
    }
    assert_eq!(behind(&bench), []);
}

/// A coordinator that was restarted, with a member of a world that it did not form.
fn restarted() -> Bench {
    let mut bench = Bench::new();
    let placed = Placed {
        round: Round(4),
        rank: 0,
        world_size: 2,
        world: 77,
        active: true,
        restart: 1,
        host: None,
        began_with: Generation::default(),
    };
    bench.greet(1, Hello { placed: Some(placed), ..hello(1, &settings()) }, 1);
    bench
}

/// What this member tells.
fn replay(member: u8, numbers: std::ops::RangeInclusive<u64>) -> NodeMessage {
    let event = |number| ReplayedEvent {
        number,
        cause: None,
        round: number,
        restart: 1,
        ago_us: 7,
        node: Some("host:9".into()),
        text: Some("gone\u{1b}[2J".into()),
        what: What::Broken { in_place: false },
    };
    NodeMessage::Replay(Box::new(Replay { origin: origin(member.into()), events: numbers.map(event).collect() }))
}

fn replayed(bench: &Bench) -> Vec<&Replayed> {
    let mut found = Vec::new();
    for record in &bench.records {
        if let Kind::Replayed(replayed) = &record.kind {
            found.push(&**replayed);
        }
    }
    found
}

#[test]
fn what_a_member_recalls_is_taken_once_and_about_itself() {
    let mut bench = restarted();
    bench.send(1, replay(1, 1..=3));
    bench.send(1, replay(1, 4..=6)); // it was asked once
    let seen = replayed(&bench);
    assert_eq!(seen.iter().map(|replayed| replayed.order).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!((seen[0].id.as_str(), seen[0].node.as_deref()), (id(&origin(1), Number(1)).as_str(), Some("host:1")));
    assert_eq!((seen[0].text.as_deref(), seen[0].ago_us), (Some("gone [2J"), 7));
    // What it told before, and what others know, is not kept again.
    let again = Hello { placed: None, joining: true, ..hello(1, &settings()) };
    let placed = Placed {
        round: Round(4),
        rank: 0,
        world_size: 2,
        world: 77,
        active: true,
        restart: 1,
        host: None,
        began_with: Generation::default(),
    };
    bench.greet(3, Hello { placed: Some(placed), ..again }, 1);
    bench.send(3, replay(1, 2..=5));
    assert_eq!(replayed(&bench).iter().map(|replayed| replayed.order).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}

#[test]
fn only_members_that_a_restarted_coordinator_asks_are_heard() {
    let mut bench = Bench::formed(2, &settings());
    bench.send(1, replay(1, 1..=3));
    assert!(replayed(&bench).is_empty(), "this coordinator has formed the world");
    let mut bench = restarted();
    bench.greet(2, hello(2, &settings()), 2);
    bench.send(2, replay(2, 1..=3));
    assert!(replayed(&bench).is_empty(), "a newcomer has nothing to tell");
    bench.send(1, NodeMessage::Replay(Box::new(Replay { origin: "c0-1".into(), events: Vec::new() })));
    bench.send(1, replay(1, 1..=3));
    assert!(replayed(&bench).is_empty(), "its one answer was none");
}

#[test]
fn no_member_replays_events_in_the_name_of_another() {
    let mut bench = restarted();
    let placed = Placed {
        round: Round(4),
        rank: 1,
        world_size: 2,
        world: 77,
        active: true,
        restart: 1,
        host: None,
        began_with: Generation::default(),
    };
    bench.greet(2, Hello { placed: Some(placed), ..hello(2, &settings()) }, 2);
    bench.send(2, replay(1, 1..=60)); // it would keep those of the first member out
    assert!(replayed(&bench).is_empty());
    bench.send(1, replay(1, 1..=3));
    assert_eq!(replayed(&bench).len(), 3);
    // Another id has the same origin.
    let double = NodeId(1_u128.rotate_left(96));
    assert_eq!(origin(double.0), origin(1));
    bench.greet(3, Hello { node: double, placed: Some(placed), name: "host:3".into(), ..hello(3, &settings()) }, 3);
    bench.send(3, replay(1, 4..=6));
    assert_eq!(replayed(&bench).len(), 3);
}

#[test]
fn times_that_nobody_can_have_measured_are_not_believed() {
    let mut bench = Bench::formed(2, &settings());
    let phase = Phase { detect_us: Some(u64::MAX), start_us: Some(3), ..Phase::default() };
    bench.send(2, NodeMessage::PhaseDurations { round: Round(1), phase });
    let kept = only(&bench, |kind| matches!(kind, Kind::Phase(_)));
    let phase = Phase { detect_us: Some(LONGEST_US), ..phase };
    assert_eq!(kept.kind, Kind::Phase(phase));
}

/// Members of a large job, and any number of visitors that claim to be members.
#[test]
fn what_all_members_recall_is_bounded() {
    let mut bench = restarted();
    for turn in 0..60_u64 {
        let session = if turn == 0 { 1 } else { turn + 9 };
        bench.send(session, replay(1, turn * 64 + 1..=turn * 64 + 64));
        let placed = Placed {
            round: Round(4),
            rank: 0,
            world_size: 2,
            world: 77,
            active: true,
            restart: 1,
            host: None,
            began_with: Generation::default(),
        };
        bench.greet(turn + 10, Hello { placed: Some(placed), ..hello(1, &settings()) }, 1);
    }
    assert_eq!(replayed(&bench).len(), 1024);
}

/// A node may tell it as often as it likes.
#[test]
fn a_nodes_phases_are_kept_twice_for_each_round() {
    let mut bench = Bench::formed(2, &settings());
    let phase = Phase { rendezvous_us: Some(7), start_us: Some(8), ..Phase::default() };
    let durations = |round| NodeMessage::PhaseDurations { round: Round(round), phase };
    for round in [1, 1, 1, 1, 0, 2] {
        bench.send(2, durations(round));
    }
    let kept: Vec<_> = bench.records.iter().filter(|record| matches!(record.kind, Kind::Phase(_))).collect();
    assert_eq!(kept.len(), 2, "when its workers were started, and when all workers are there");
    assert_eq!((&kept[0].kind, kept[0].node.as_deref()), (&Kind::Phase(phase), Some("host:2")));
    assert!(matches!(cause(&bench, kept[0]).kind, Kind::RoundCompleted { .. }));
    bench.send(1, NodeMessage::Failed { round: Round(1), failure: failure() });
    for node in [1, 2] {
        bench.send(node, join(1));
    }
    for node in [1, 2] {
        bench.send(node, durations(2));
    }
    let phases = bench.records.iter().filter(|record| matches!(record.kind, Kind::Phase(_)));
    assert_eq!(phases.count(), 4);
}
