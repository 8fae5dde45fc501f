//! The first failure of a round: which one it is, when it is reported, and with which words of the worker.

use std::time::{Duration, Instant};

use crate::commands::{self, SIGTERM, does, killed, new_agent, placement, policy, stop};
use elastic_rs::agent::machine::MESSAGE_LIMIT;
use elastic_rs::agent::{AgentMachine, Budget, Command, Outcome, Policy};
use elastic_rs::rendezvous::messages::message::{EndClass, Failure, Round, Survival, Verdict};

fn failure_with(message: &str, local_rank: u32) -> Failure {
    Failure { message: message.into(), ..killed(local_rank) }
}

/// An agent that runs its three workers of round 1.
fn running(budget: Budget) -> AgentMachine {
    let mut agent = new_agent(Policy { budget, workers: 3, ..policy() });
    start_round(&mut agent, 1);
    agent
}

fn start_round(agent: &mut AgentMachine, round: u64) {
    agent.on_placed(placement(round), Instant::now());
    agent.take_commands();
}

fn warned(agent: &mut AgentMachine) -> String {
    let warning = |command| if let Command::Warn(text) = command { Some(text) } else { None };
    agent.take_commands().into_iter().find_map(warning).unwrap_or_default()
}

fn report(failure: Failure) -> Command {
    Command::Report(Box::new(failure))
}

/// An agent after worker 1 has ended, before the worker's words are known.
fn listening(budget: Budget, now: Instant) -> AgentMachine {
    let mut agent = running(budget);
    agent.on_worker_exited_badly(killed(1), now);
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Listen { local_rank: 1 }], "the others are stopped at once");
    agent
}

#[test]
fn a_failure_is_reported_with_what_the_worker_said_once_that_is_known() {
    let mut agent = listening(Budget::Job, Instant::now());
    agent.on_failure_message(1, "ValueError: x".into(), true);
    assert_eq!(does(&mut agent), [report(failure_with("ValueError: x", 1))]);
    assert_eq!(agent.next_deadline(), None, "the agent waits for nothing more");
}

#[test]
fn a_report_does_not_wait_for_words_that_hang() {
    let mut agent = listening(Budget::Job, Instant::now());
    agent.on_failure_message(1, "killed because memory ran out".into(), false);
    assert_eq!(does(&mut agent), [report(failure_with("killed because memory ran out", 1))], "with what is known");
    agent.on_failure_message(1, "ValueError: late".into(), true);
    assert!(warned(&mut agent).contains("ValueError: late"), "late words are logged");
    assert_eq!(does(&mut agent), [], "the report is not repeated");
}

#[test]
fn a_report_waits_for_nothing_longer_than_the_limit() {
    let now = Instant::now();
    let mut agent = listening(Budget::Job, now);
    assert_eq!(agent.next_deadline(), Some(now + MESSAGE_LIMIT));
    agent.on_tick(now + MESSAGE_LIMIT - Duration::from_millis(1));
    assert_eq!(does(&mut agent), []);
    agent.on_tick(now + MESSAGE_LIMIT);
    assert_eq!(does(&mut agent), [report(killed(1))]);
    agent.on_failure_message(1, "too late".into(), true);
    assert_eq!(agent.take_commands(), []);
}

#[test]
fn later_failures_of_the_round_are_consequences_whatever_becomes_known_first() {
    let now = Instant::now();
    let mut agent = listening(Budget::Job, now);
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_failed(failure_with("no such file", 2), false, Instant::now());
    agent.on_failure_message(0, "SignalException".into(), true);
    assert_eq!(does(&mut agent), [], "words of other workers do not matter");
    agent.on_stopped();
    assert_eq!(does(&mut agent), []);
    agent.on_failure_message(1, "the cause".into(), true);
    assert_eq!(does(&mut agent), [report(failure_with("the cause", 1))]);
    // The coordinator answers.
    agent.on_interrupted(Round(1), "rank 5 failed", Instant::now());
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
}

#[test]
fn each_round_has_its_own_first_failure() {
    let now = Instant::now();
    let mut agent = listening(Budget::Job, now);
    agent.on_failure_message(1, String::new(), false);
    agent.on_interrupted(Round(1), "rank 5 failed", Instant::now());
    agent.on_stopped();
    does(&mut agent);
    start_round(&mut agent, 2);
    agent.on_failure_message(1, "of round 1".into(), true);
    assert_eq!(agent.take_commands(), []);
    agent.on_worker_exited_badly(killed(0), now);
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Listen { local_rank: 0 }]);
}

#[test]
fn no_failure_is_reported_if_the_round_ends_before_the_words_are_known() {
    let now = Instant::now();
    let stopped = Verdict::Stopped { by: "node1".into(), cause: "Ctrl-C".into() };
    let of_another = Verdict::Failed {
        by: "node1".into(),
        cause: "theirs".into(),
        failure: Some(Box::new(failure_with("theirs", 2))),
        class: EndClass::Program,
    };
    let ends: [&dyn Fn(&mut AgentMachine); 4] = [
        &|agent| agent.on_interrupted(Round(1), "a node left", Instant::now()),
        &|agent| agent.on_signal(SIGTERM, Instant::now()),
        &|agent| agent.on_closed(stopped.clone()),
        &|agent| agent.on_closed(of_another.clone()),
    ];
    for end in ends {
        let mut agent = listening(Budget::Job, now);
        end(&mut agent);
        agent.on_failure_message(1, "ValueError: x".into(), true);
        agent.on_stopped();
        let did = does(&mut agent);
        assert!(!did.iter().any(|command| matches!(command, Command::Report(_))), "{did:?}");
        assert!(
            matches!(did.last(), Some(Command::Join { survival: Survival::NeverAttended } | Command::End(_))),
            "{did:?}"
        );
    }
}

#[test]
fn an_end_for_this_nodes_failure_waits_for_the_words_and_has_them() {
    let now = Instant::now();
    let mut agent = listening(Budget::Node(0), now);
    agent.on_failure_message(1, String::new(), false);
    let closed = Failure { node: "node0".into(), ..killed(1) };
    let reason = closed.to_string();
    let verdict = Verdict::Failed {
        by: "node0".into(),
        cause: reason.clone(),
        failure: Some(Box::new(closed.clone())),
        class: EndClass::Program,
    };
    assert_eq!(does(&mut agent), [Command::Close(verdict.clone())]);
    agent.on_closed(verdict);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [], "the worker's words may still come");
    assert_eq!(agent.next_deadline(), Some(now + MESSAGE_LIMIT));
    let mut patient = agent.clone();
    agent.on_failure_message(1, "ValueError: late\n  a line".into(), true);
    let cause = Some(Box::new(Failure { message: "ValueError: late\n  a line".into(), ..closed.clone() }));
    assert_eq!(
        does(&mut agent),
        [Command::End(Box::new(Outcome::Failed { cause, reason: reason.clone(), class: EndClass::Program }))]
    );

    patient.on_tick(now + MESSAGE_LIMIT);
    let cause = Some(Box::new(closed));
    assert_eq!(
        does(&mut patient),
        [Command::End(Box::new(Outcome::Failed { cause, reason, class: EndClass::Program }))]
    );
}

#[test]
fn an_end_for_another_nodes_failure_waits_for_no_words() {
    let mut agent = listening(Budget::Job, Instant::now());
    agent.on_failure_message(1, String::new(), false);
    agent.on_stopped();
    does(&mut agent);
    let theirs = Failure { pid: 5, global_rank: 0, ..failure_with("theirs", 0) };
    let reason = "no restart is left".to_owned();
    let cause = Some(Box::new(theirs));
    agent.on_closed(Verdict::Failed {
        by: "node1".into(),
        cause: reason.clone(),
        failure: cause.clone(),
        class: EndClass::Program,
    });
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Failed { cause, reason, class: EndClass::Program }))]);
}

#[test]
fn a_signal_ends_the_wait_for_words() {
    let now = Instant::now();
    let mut agent = listening(Budget::Node(0), now);
    agent.on_failure_message(1, String::new(), false);
    agent.on_stopped();
    does(&mut agent);
    agent.on_signal(SIGTERM, Instant::now());
    assert_eq!(does(&mut agent).last(), Some(&Command::End(Box::new(Outcome::Signal(SIGTERM)))));
}

#[test]
fn a_restart_that_this_node_counts_waits_for_the_words_and_logs_them() {
    let mut agent = listening(Budget::Node(2), Instant::now());
    agent.on_stopped();
    assert_eq!((does(&mut agent), agent.restarts()), (vec![], 0));
    agent.on_failure_message(1, "ValueError: x".into(), true);
    let did = agent.take_commands();
    assert!(
        matches!(&did[..], [Command::Warn(text), Command::Join { survival: Survival::NeverAttended }] if text.contains("ValueError: x")),
        "{did:?}"
    );
    assert_eq!(agent.restarts(), 1);
}

#[test]
fn a_job_declared_a_success_before_the_words_are_known_ends_with_them() {
    let mut agent = listening(Budget::Job, Instant::now());
    agent.on_closed(Verdict::AllDone { round: Round(1), nodes: 2 });
    agent.on_stopped();
    assert_eq!(does(&mut agent), []);
    agent.on_failure_message(1, "ValueError: x".into(), true);
    let did = does(&mut agent);
    let Some(Command::End(outcome)) = did.last() else { panic!("{did:?}") };
    let Outcome::Failed { cause: Some(cause), .. } = &**outcome else { panic!("{outcome:?}") };
    assert_eq!((cause.node.as_str(), cause.message.as_str()), ("node0", "ValueError: x"));
}
