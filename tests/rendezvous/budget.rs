//! A sliding budget of restarts (`restart_window`), at the coordinator.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, EndClass, Failure, NodeMessage, Round, Verdict};
use elastic_rs::rendezvous::messages::settings::{Rules, Settings};

const HOUR: Duration = Duration::from_secs(3600);
const FAULT: &str =
    "ValueError: bad\nTraceback (most recent call last):\n  File \"/job/data.py\", line 88, in load\nValueError: bad";

fn settings(min: u32, max: u32, restarts: u32) -> Settings {
    Settings {
        max_restarts: Some(restarts),
        settle_timeout: Duration::ZERO,
        rules: Rules { restart_window: Some(HOUR), ..Rules::default() },
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
    bench
}

/// A worker of this node fails, and the nodes that may join again.
fn crash(bench: &mut Bench, node: u64, nodes: &[u64], with: Failure) {
    let round = bench.run().round();
    bench.send(node, NodeMessage::Failed { round, failure: Box::new(with) });
    nodes.iter().for_each(|node| bench.send(*node, join(round.0)));
    bench.pass(Duration::ZERO);
}

fn verdict(bench: &Bench) -> (EndClass, &str) {
    match bench.run().closed() {
        Some(Verdict::Failed { class, cause, .. }) => (*class, cause),
        other => panic!("{other:?}"),
    }
}

#[test]
fn restarts_come_back_when_their_hour_is_over() {
    let mut bench = job(1, &settings(1, 1, 2));
    crash(&mut bench, 1, &[1], *failure());
    let reason = bench.run().reason().unwrap().to_owned();
    assert!(
        bench
            .notes
            .iter()
            .any(|note| note.contains("restart 1; 1/2 attempts left within 3600 s; will restart worker group")),
        "{reason}"
    );
    crash(&mut bench, 1, &[1], *failure());
    bench.pass(HOUR);
    for _ in 0..2 {
        crash(&mut bench, 1, &[1], *failure());
    }
    assert_eq!((bench.run().round(), bench.run().restart()), (Round(5), 4));
    let state = bench.run().state(bench.now);
    let left = state.budget.unwrap();
    assert_eq!((left.crashes, left.hangs, left.window_s, state.interruptions.crashes), (0, 2, 3600, 4));
    // A node that says so of its last world is believed, although its number is above the limit.
    crash(&mut bench, 1, &[], *failure());
    let (class, cause) = verdict(&bench);
    assert_eq!(class, EndClass::Program);
    assert!(
        cause.ends_with("no restarts left: 2 after crashes within 3600 s (max_restarts, restart_window)"),
        "{cause}"
    );
}

#[test]
fn restarts_without_a_new_step_end_the_job_for_its_scheduler() {
    let mut bench = job(2, &settings(2, 2, 10));
    for _ in 0..3 {
        crash(&mut bench, 1, &[1, 2], Failure { step: Some(7), ..*failure() });
        bench.pass(HOUR);
    }
    crash(&mut bench, 2, &[], Failure { step: Some(7), ..*failure() });
    let (class, cause) = verdict(&bench);
    assert_eq!(class, EndClass::NoProgress);
    assert!(cause.ends_with("3 restarts in a row brought no step after step 7"), "{cause}");
    assert!(matches!(bench.last(2), CoordinatorMessage::Closed { .. }));
}

#[test]
fn a_host_with_the_same_fault_is_out_if_the_job_can_do_without_it() {
    let fault = Failure { message: FAULT.into(), step: Some(7), ..*failure() };
    let mut bench = job(3, &settings(2, 3, 10));
    for _ in 0..2 {
        crash(&mut bench, 2, &[1, 2, 3], fault.clone());
        bench.pass(HOUR);
    }
    crash(&mut bench, 2, &[1, 3], fault.clone());
    let out = bench.run().exclusions(bench.now);
    assert_eq!(out.iter().map(|host| host.addr.as_str()).collect::<Vec<_>>(), ["10.0.0.2"]);
    let text = out[0].out.why.text();
    let expected = "the same fault was there again and again, and nowhere else: ValueError at data.py:88 in load, 3 times at step 7";
    assert!(text.starts_with(expected), "{text}");
    bench.send(2, join(3));
    assert!(bench.rejection(2).contains("look for a fault of the host"), "{}", bench.rejection(2));
    assert!(bench.is_placed(1, 4), "the others go on");
    crash(&mut bench, 3, &[], fault.clone());
    let (class, cause) = verdict(&bench);
    assert_eq!(class, EndClass::Program);
    assert!(cause.contains("the program, not the machines: ValueError at data.py:88 in load, 4 times"), "{cause}");

    // No host can be spared.
    let mut bench = job(2, &settings(2, 2, 10));
    for _ in 0..3 {
        crash(&mut bench, 2, &[1, 2], fault.clone());
    }
    assert!(bench.run().exclusions(bench.now).is_empty() && bench.is_placed(2, 4));
}

#[test]
fn after_bad_starts_the_next_one_waits_and_says_so() {
    let mut bench = job(1, &settings(1, 1, 10));
    let second = Duration::from_secs(1);
    for (exit, restarted) in [("exit code 1", true), ("exit code 2", true), ("exit code 3", false)] {
        let round = bench.run().round();
        crash(&mut bench, 1, &[1], Failure { lived: second, exit: exit.into(), message: String::new(), ..*failure() });
        assert_eq!(bench.is_placed(1, round.0 + 1), restarted, "{exit}");
    }
    let progress = bench.run().progress(bench.now);
    assert!(progress.contains("the workers ended soon after their last starts, so the next one waits"), "{progress}");
    bench.pass(2 * second);
    assert!(bench.is_placed(1, 4));
    crash(
        &mut bench,
        1,
        &[],
        Failure { lived: second, exit: "exit code 3".into(), message: String::new(), ..*failure() },
    );
    let (class, cause) = verdict(&bench);
    assert_eq!(class, EndClass::Program);
    assert!(
        cause.ends_with("the same crash twice in a row within 10 s of the start, before any step: exit code 3"),
        "{cause}"
    );
}

#[test]
fn nodes_whose_budgets_differ_are_refused_with_both() {
    let ours = settings(1, 2, 3);
    let mut bench = job(1, &ours);
    let plain = Settings { rules: Rules::default(), ..ours };
    bench.greet(2, hello(2, &plain), 2);
    let text = bench.rejection(2);
    let expected = "asks for 3 restarts of the job, but run `job` was opened for 3 restarts of the job within 3600 s";
    assert!(text.contains(expected) && text.contains("`restart_window`"), "{text}");
}

#[test]
fn an_exit_code_that_is_never_restarted_ends_the_job_at_once() {
    let rules = Rules { no_restart_on: [3, 4].into(), ..Rules::default() };
    for window in [None, Some(HOUR)] {
        let rules = Rules { restart_window: window, ..rules.clone() };
        let mut bench = job(1, &Settings { rules, ..settings(1, 1, 3) });
        let other = |returncode| Failure { returncode, ..*failure() };
        // A signal's number is no exit code.
        crash(&mut bench, 1, &[1], other(-4));
        assert_eq!(bench.run().closed(), None);
        crash(&mut bench, 1, &[1], other(3));
        let (class, cause) = verdict(&bench);
        assert_eq!(class, EndClass::Program);
        assert!(cause.ends_with("; exit code 3 is never restarted (no_restart_on)"), "{cause}");
    }
}

#[test]
fn nodes_whose_no_restart_on_differs_are_refused_with_both() {
    let with = |codes: &[u8]| {
        let rules = Rules { no_restart_on: codes.iter().copied().collect(), ..Rules::default() };
        Settings { rules, ..settings(1, 2, 3) }
    };
    for (ours, theirs, expected) in [
        (with(&[]), with(&[3, 4]), "has `no_restart_on=3+4`, but run `job` was opened with no `no_restart_on`:"),
        (with(&[4]), with(&[3]), "has `no_restart_on=3`, but run `job` was opened with `no_restart_on=4`:"),
    ] {
        let mut bench = job(1, &ours);
        bench.greet(2, hello(2, &theirs), 2);
        let text = bench.rejection(2);
        assert!(text.contains(expected) && text.contains("give every node the same `--no-restart-on`"), "{text}");
    }
}
