use super::*;
use crate::hang::judge::Mode;
use crate::hang::view::{Entry, Group, Signature, State, View};
use crate::rendezvous::coordinator::machine::{Command, Machine};
use crate::rendezvous::messages::hang::MovedReport;
use crate::rendezvous::messages::message::{Hello, Join, NodeMessage};
use crate::rendezvous::messages::settings::Settings;
use crate::rendezvous::run::Ends;

/// A coordinator of a job of two nodes with a rank each, and what it has done.
struct Stage {
    machine: Machine,
    now: Instant,
    /// Ranks that a signal has stopped.
    stopped: Vec<u32>,
    /// When the agents saw it, the kinds of events and the names of messages.
    log: Vec<(u64, String)>,
    start: Instant,
}

impl Stage {
    fn new(options: Options) -> Self {
        let (mut machine, now) = (Machine::new(), Instant::now());
        for number in 1..=2_u8 {
            let ends = Ends { peer: [10, 0, 0, number].into(), local: [10, 0, 0, 1].into() };
            let mut settings = Settings::new(2, 2);
            settings.rules.hang = options;
            let hello = Hello {
                reports_steps: true,
                ..Hello::new("job", NodeId(number.into()), format!("n{number}:7"), settings)
            };
            let session = SessionId(number.into());
            machine.on_hello(session, hello, ends, now);
            let join =
                Join { round: Round(0), store_port: 1, node_rank: None, workers: None, health: Default::default() };
            machine.on_message(session, NodeMessage::Join(join), now);
        }
        let now = now + Duration::from_secs(1);
        machine.on_tick(now);
        assert_eq!(machine.run("job").unwrap().round(), Round(1));
        machine.take_commands();
        Self { machine, now, stopped: Vec::new(), log: Vec::new(), start: now }
    }

    /// A node says that its workers have made no step for so long.
    fn still(&mut self, node: u64, seconds: u64) {
        let still = StillReport {
            still_us: seconds * 1_000_000,
            step: Some(1841),
            has_stepped: true,
            step_time_us: Some(200_000),
            is_counted: false,
            section: None,
        };
        self.say(node, NodeMessage::Pace { round: Round(1), pace: PaceReport::Still(still) });
    }

    fn say(&mut self, node: u64, message: NodeMessage) {
        self.machine.on_message(SessionId(node), message, self.now);
        self.answer();
    }

    /// A rank that waits in a collective, or has not come to it because it is stopped.
    fn view(&self, rank: u32) -> View {
        let is_stopped = self.stopped.contains(&rank);
        let entry = Entry { seq: 5, at: 0, signature: 0 };
        let pending = if is_stopped { Vec::new() } else { vec![entry] };
        let group = Group {
            name: "0".to_owned(),
            last: if is_stopped { 4 } else { 5 },
            oldest: 1,
            tail: pending.clone(),
            pending,
            ..Group::default()
        };
        let signatures = vec![Signature { op: "all_reduce".to_owned(), shape: String::new() }];
        let state = if is_stopped { State::Stopped } else { State::Sleeping };
        View { state, pid: 40 + rank, answered: !is_stopped, signatures, groups: vec![group], ..View::new(rank, 1) }
    }

    /// Perform what the coordinator asks for: nodes answer looks at once.
    fn answer(&mut self) {
        let at = (self.now - self.start).as_secs();
        for command in self.machine.take_commands() {
            match command {
                Command::Send { session, message: CoordinatorMessage::Look(look) } => {
                    let rank = u32::try_from(session.0).unwrap() - 1;
                    let view = Box::new(self.view(rank));
                    self.log.push((at, format!("look {}", session.0)));
                    self.say(session.0, NodeMessage::View { number: look.number, view });
                    self.say(session.0, NodeMessage::Looked { number: look.number, problem: None });
                }
                Command::Send { session, message: CoordinatorMessage::Hang(news) } => {
                    let what = match news.tidied().unwrap().change {
                        HangChange::Found(found) => format!("{:?} {}", found.next, found.finding.ranks),
                        HangChange::Over => "over".to_owned(),
                    };
                    self.log.push((at, format!("news {} {what}", session.0)));
                }
                Command::Send { session, message: CoordinatorMessage::Status { waiting, reason, .. } } => {
                    self.log.push((at, format!("status {} {waiting} {reason}", session.0)));
                }
                Command::Record { record, .. } => self.log.push((
                    at,
                    match record.kind {
                        Kind::HangWaits(hang) => format!("waits {:?} on {:?}", hang.ranks, record.node),
                        Kind::HangFound(hang) => format!("found {:?} by {:?}", hang.ranks, record.causes),
                        Kind::HangOver { .. } => format!("over by {}", record.causes.len()),
                        Kind::RoundBroken { why } => format!("broken by {} of {why:?}", record.causes.len()),
                        kind => format!("{kind:?}"),
                    },
                )),
                _ => {}
            }
        }
    }

    /// Let time pass. The nodes keep their leases.
    fn pass(&mut self, seconds: u64) {
        let until = self.now + Duration::from_secs(seconds);
        while self.now < until {
            let due = self.machine.next_deadline().unwrap_or(until).max(self.now);
            self.now = due.min(until).min(self.now + Duration::from_secs(1));
            for node in 1..=2 {
                self.say(node, NodeMessage::Heartbeat { rtt_us: None });
            }
            self.machine.on_tick(self.now);
            self.answer();
        }
    }

    fn take(&mut self) -> Vec<(u64, String)> {
        let mut log = std::mem::take(&mut self.log);
        log.retain(|(_, what)| !what.starts_with("look"));
        log
    }
}

fn log(entries: &[(u64, &str)]) -> Vec<(u64, String)> {
    entries.iter().map(|(at, what)| (*at, (*what).to_owned())).collect()
}

#[test]
fn a_stopped_rank_is_named_at_once_and_found_by_two_looks() {
    let mut stage = Stage::new(Options::default());
    stage.stopped = vec![1];
    stage.still(1, 2);
    assert_eq!(stage.log, [], "the other node makes steps");
    stage.still(2, 3);
    assert_eq!(stage.take(), log(&[(0, "waits [1] on Some(\"n2:7\")")]));
    let shown = stage.machine.hang("job", stage.now).unwrap();
    assert_eq!((shown.kind, shown.found, shown.ranks.clone()), ("stopped", false, vec![1]));
    assert_eq!(shown.text, "waits 2.0 s for rank 1 (usually 0.20 s)");
    stage.pass(20);
    let found = log(&[(5, "found [1] by []"), (5, "news 1 Report 1"), (5, "news 2 Report 1")]);
    assert_eq!(stage.take(), found);
    let shown = stage.machine.hang("job", stage.now).unwrap();
    assert!(shown.found && shown.lines[0].ends_with("1 of 2 ranks wait for rank 1 (n2:7, pid 41)"), "{shown:?}");
    stage.stopped.clear();
    let moved = MovedReport { ago_us: 0, has_stepped: true };
    stage.say(2, NodeMessage::Pace { round: Round(1), pace: PaceReport::Moved(moved) });
    assert_eq!(stage.take(), log(&[(20, "over by 1"), (20, "news 1 over"), (20, "news 2 over")]));
    assert_eq!(stage.machine.hang("job", stage.now), None);
}

#[test]
fn the_workers_are_restarted_after_their_dumps_without_a_restart_of_the_job() {
    let mut stage = Stage::new(Options { mode: Mode::Restart, ..Options::default() });
    stage.stopped = vec![0];
    (1..=2).for_each(|node| stage.still(node, 2));
    stage.take();
    stage.pass(8);
    let log = stage.take();
    let at = |what: &str| log.iter().find(|(_, seen)| seen.starts_with(what)).map(|(at, _)| *at);
    assert_eq!((at("found [0]"), at("news 1 Restart"), at("broken by 1 of HangFound")), (Some(5), Some(5), Some(6)));
    assert!(log.iter().any(|(_, what)| what.contains("the training hung: rank 0 was stopped by a signal")), "{log:?}");
    assert!(!log.iter().any(|(_, what)| what.contains("over")), "nothing goes on: {log:?}");
    assert_eq!(stage.machine.run("job").unwrap().restart(), 0);
    assert_eq!(stage.machine.hang("job", stage.now), None);
}

#[test]
fn workers_that_go_on_before_their_restart_are_left_alone() {
    let mut stage = Stage::new(Options { mode: Mode::Restart, ..Options::default() });
    stage.stopped = vec![1];
    (1..=2).for_each(|node| stage.still(node, 2));
    while !stage.log.iter().any(|(_, what)| what.starts_with("found")) {
        stage.pass(1);
    }
    let moved = MovedReport { ago_us: 0, has_stepped: true };
    stage.say(2, NodeMessage::Pace { round: Round(1), pace: PaceReport::Moved(moved) });
    stage.pass(10);
    let log = stage.take();
    assert!(log.iter().any(|(_, what)| what == "news 1 over"), "{log:?}");
    assert!(!log.iter().any(|(_, what)| what.starts_with("broken")), "{log:?}");
}

#[test]
fn nobody_looks_if_that_is_off_or_a_node_does_not_say_whether_it_makes_steps() {
    let mut stage = Stage::new(Options { mode: Mode::Off, ..Options::default() });
    (1..=2).for_each(|node| stage.still(node, 2));
    stage.pass(30);
    assert_eq!(stage.log, []);
    let mut stage = Stage::new(Options::default());
    stage.say(1, NodeMessage::Pace { round: Round(7), pace: PaceReport::Still(StillReport::default()) });
    stage.say(9, NodeMessage::Pace { round: Round(1), pace: PaceReport::Still(StillReport::default()) });
    stage.still(1, 2);
    stage.pass(30);
    assert_eq!(stage.log, [], "of another round, and of a session that there is not");
}

#[test]
fn a_look_that_a_node_never_answers_ends() {
    let mut stage = Stage::new(Options::default());
    stage.still(1, 2);
    let still = StillReport { has_stepped: true, step_time_us: Some(1000), ..StillReport::default() };
    let pace = NodeMessage::Pace { round: Round(1), pace: PaceReport::Still(still) };
    stage.machine.on_message(SessionId(2), pace, stage.now);
    stage.machine.take_commands();
    let view = Box::new(View { state: State::Stopped, ..View::new(0, 1) });
    stage.machine.on_message(SessionId(1), NodeMessage::View { number: 1, view }, stage.now);
    assert_eq!(stage.machine.hang("job", stage.now), None, "the other node is awaited");
    stage.pass(2);
    assert!(stage.machine.hang("job", stage.now).is_some());
}
