use serde_json::Value;

use super::*;
use crate::hang::view::Frame;
use crate::rendezvous::coordinator::machine::{Command, Machine};
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, Join, NodeMessage};
use crate::rendezvous::messages::settings::Settings;
use crate::rendezvous::run::Ends;

const SECOND: Duration = Duration::from_secs(1);

/// A coordinator of a job of two nodes in their first round, and since when.
fn machine() -> (Machine, Instant) {
    let (mut machine, now) = (Machine::new(), Instant::now());
    for number in 1..=2_u8 {
        let ends = Ends { peer: [10, 0, 0, number].into(), local: [10, 0, 0, 1].into() };
        let hello = Hello {
            reports_steps: true,
            ..Hello::new("job", NodeId(number.into()), format!("n{number}:7"), Settings::new(2, 2))
        };
        let session = SessionId(number.into());
        machine.on_hello(session, hello, ends, now);
        let join = Join { round: Round(0), store_port: 1, node_rank: None, workers: None, health: Default::default() };
        machine.on_message(session, NodeMessage::Join(join), now);
    }
    machine.on_tick(now + SECOND);
    assert_eq!(machine.run("job").unwrap().round(), Round(1));
    machine.take_commands();
    (machine, now + SECOND)
}

/// The looks that nodes are asked for, by their sessions.
fn asked(machine: &mut Machine) -> Vec<(u64, u64)> {
    let of = |command| match command {
        Command::Send { session, message: CoordinatorMessage::Look(look) } => Some((session.0, look.number)),
        _ => None,
    };
    machine.take_commands().into_iter().filter_map(of).collect()
}

fn view(rank: u32, line: u32) -> Box<View> {
    let frame = Frame { function: "main".into(), file: "/job/train.py".into(), line, peer: None };
    Box::new(View { frames: vec![frame], ..View::new(rank, 1) })
}

fn answer(machine: &Machine, rank: Option<u32>) -> Value {
    serde_json::from_str(&machine.looks("job").unwrap().answer(rank, false).unwrap()).unwrap()
}

#[test]
fn all_members_look_and_one_answer_has_what_they_saw() {
    let (mut machine, now) = machine();
    machine.on_look_asked("job", None, now);
    assert_eq!(asked(&mut machine), [(1, 1), (2, 1)]);
    assert_eq!(machine.looks("job").unwrap().awaited_until(), Some(now + LOOK_LIMIT));
    for (session, rank, line) in [(1, 0, 5), (1, 1, 9), (2, 2, 5)] {
        machine.on_message(SessionId(session), NodeMessage::View { number: 1, view: view(rank, line) }, now);
    }
    machine.on_message(SessionId(1), NodeMessage::Looked { number: 1, problem: None }, now);
    assert!(machine.looks("job").unwrap().awaited_until().is_some(), "the other node has not answered");
    let early = answer(&machine, None);
    assert_eq!(early["silent"], serde_json::json!(["n2:7"]));
    let problem = Some("yama says no\n".to_owned());
    machine.on_message(SessionId(2), NodeMessage::Looked { number: 1, problem }, now);
    assert_eq!(machine.looks("job").unwrap().awaited_until(), None);
    let seen = answer(&machine, None);
    assert_eq!((&seen["ranks"], &seen["silent"]), (&3.into(), &serde_json::json!([])));
    let lines: Vec<&str> = seen["lines"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    assert_eq!(
        lines,
        [
            "1 rank   1    n1     unknown  main train.py:9",
            "2 ranks  0,2  n1,n2  unknown  main train.py:5",
            "n2:7: yama says no"
        ]
    );
    assert_eq!(answer(&machine, Some(1))["lines"][1], "  main (/job/train.py:9)");
    let error = machine.looks("job").unwrap().answer(Some(7), false).unwrap_err();
    assert_eq!(error, "nothing was seen of rank 7: ranks 0 to 2 were");
    assert_eq!(answer(&machine, None), answer(&machine, None), "the second is kept");
}

#[test]
fn who_asks_soon_after_shares_the_look() {
    let (mut machine, now) = machine();
    machine.on_look_asked("job", None, now);
    asked(&mut machine);
    machine.on_look_asked("job", None, now + SECOND);
    assert_eq!(asked(&mut machine), []);
    machine.on_look_asked("job", None, now + SHARED_FOR);
    assert_eq!(asked(&mut machine), [(1, 2), (2, 2)]);
    machine.on_look_asked("other", None, now);
    assert_eq!(asked(&mut machine), []);
}

#[test]
fn what_nobody_asked_for_is_dropped() {
    let (mut machine, now) = machine();
    let send = |machine: &mut Machine, session, number, view| {
        machine.on_message(SessionId(session), NodeMessage::View { number, view }, now);
    };
    send(&mut machine, 1, 1, view(0, 5));
    machine.on_look_asked("job", None, now);
    send(&mut machine, 1, 7, view(0, 6)); // another look
    send(&mut machine, 9, 1, view(0, 6)); // a session that there is not
    send(&mut machine, 1, 1, Box::new(View { round: 4, ..*view(0, 6) }));
    send(&mut machine, 1, 1, Box::new(View { frames: vec![Frame::default(); 1000], ..*view(0, 6) }));
    assert_eq!(answer(&machine, None)["ranks"], 0);
    send(&mut machine, 1, 1, view(0, 8));
    send(&mut machine, 2, 1, view(0, 9)); // a rank that another node has already
    assert_eq!(answer(&machine, None)["groups"][0]["frames"], serde_json::json!(["main train.py:8"]));
    machine.on_message(SessionId(1), NodeMessage::Looked { number: 1, problem: None }, now);
    send(&mut machine, 1, 1, view(1, 8)); // after its last word
    assert_eq!(answer(&machine, None)["ranks"], 1);
}

#[test]
fn an_answer_fits_its_frame_however_long_names_are() {
    let (mut machine, now) = machine();
    machine.on_look_asked("job", None, now);
    for rank in 0..200 {
        let long =
            Frame { function: "f".repeat(120), file: format!("/{}.py", "x".repeat(240)), line: rank, peer: None };
        let view = View { frames: vec![long; 60], ..View::new(rank, 1) };
        machine.on_message(SessionId(1), NodeMessage::View { number: 1, view: Box::new(view) }, now);
    }
    for rank in [None, Some(3)] {
        let answer = machine.looks("job").unwrap().answer(rank, false).unwrap();
        assert!(answer.len() <= ANSWER_BYTES && answer.len() > ANSWER_BYTES / 8, "{}", answer.len());
    }
    assert_eq!(answer(&machine, None)["ranks"], 200);
}

#[test]
fn an_answer_ends_however_much_nodes_say_of_what_they_cannot_read() {
    let mut machine = Machine::new();
    let now = Instant::now();
    for number in 1..=40_u64 {
        let ends = Ends { peer: [10, 0, 0, number as u8].into(), local: [10, 0, 0, 1].into() };
        let name = format!("{}{number}:7", "n".repeat(150));
        let hello = Hello {
            reports_steps: number < 20,
            ..Hello::new("job", NodeId(number.into()), name, Settings::new(40, 40))
        };
        machine.on_hello(SessionId(number), hello, ends, now);
        let join = Join { round: Round(0), store_port: 1, node_rank: None, workers: None, health: Default::default() };
        machine.on_message(SessionId(number), NodeMessage::Join(join), now);
    }
    machine.on_tick(now + SECOND);
    machine.on_look_asked("job", None, now + SECOND);
    for number in 1..=18 {
        let problem = Some("\"".repeat(4096));
        machine.on_message(SessionId(number), NodeMessage::Looked { number: 1, problem }, now);
    }
    let seen = answer(&machine, None);
    assert!(seen.to_string().len() <= ANSWER_BYTES);
    assert_eq!(seen["silent_more"], 22 - NODES_SENT);
    let lines = seen["lines"].to_string();
    assert!(
        lines.contains("1 node has not answered: n") && lines.contains("21 of the nodes cannot be asked: n"),
        "{lines}"
    );
}

/// The lines that an answer has of `py-spy`.
fn of_py_spy(machine: &Machine, rank: u32) -> Vec<String> {
    let answer = machine.looks("job").unwrap().answer(Some(rank), true).unwrap();
    let lines = serde_json::from_str::<Value>(&answer).unwrap()["lines"].take();
    let lines: Vec<String> = serde_json::from_value(lines).unwrap();
    let is_below = |line: &String| line.starts_with("py-spy:") || line.starts_with("  ");
    lines.into_iter().skip_while(|line| !line.starts_with("py-spy:")).take_while(is_below).collect()
}

#[test]
fn a_deep_look_has_what_py_spy_shows_of_its_rank() {
    let (mut machine, now) = machine();
    machine.on_look_asked("job", None, now);
    machine.on_look_asked("job", Some(2), now);
    assert_eq!(asked(&mut machine), [(1, 1), (2, 1), (1, 2), (2, 2)], "the one before was not deep");
    assert_eq!(machine.looks("job").unwrap().awaited_until(), Some(now + DEEP_LOOK_LIMIT));
    machine.on_look_asked("job", None, now + SHARED_FOR);
    assert_eq!(asked(&mut machine), [], "those who ask meanwhile do not end it");
    let py_spy = |machine: &mut Machine, session, number, text: &str| {
        machine.on_message(SessionId(session), NodeMessage::PySpy { number, text: text.to_owned() }, now);
    };
    py_spy(&mut machine, 2, 2, "before its view");
    for (session, rank) in [(1, 0), (1, 1), (2, 2)] {
        machine.on_message(SessionId(session), NodeMessage::View { number: 2, view: view(rank, 5) }, now);
    }
    assert_eq!(of_py_spy(&machine, 2), ["py-spy:", "  the agent has not said what it shows"]);
    py_spy(&mut machine, 2, 2, "Thread 7 (idle)\n    all_reduce\x1b[2J (c10d.py:9)\n");
    py_spy(&mut machine, 1, 2, "of another's worker");
    py_spy(&mut machine, 2, 1, "of the look before");
    assert_eq!(of_py_spy(&machine, 2), ["py-spy:", "  Thread 7 (idle)", "      all_reduce [2J (c10d.py:9)"]);
    assert_eq!(of_py_spy(&machine, 1), ["py-spy: another look has begun meanwhile: ask again"]);
    assert!(!answer(&machine, Some(2)).to_string().contains("py-spy"), "only who asks for it gets it");
    py_spy(&mut machine, 2, 2, &"\"\n".repeat(PY_SPY_BYTES));
    assert!(machine.looks("job").unwrap().answer(Some(2), true).unwrap().len() <= ANSWER_BYTES);
}
