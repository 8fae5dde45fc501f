//! The agent's state machine, event by event. `simulation/agent` tests it together with the rendezvous and workers.

use std::time::{Duration, Instant};

use crate::commands::{self, GRACE, SIGTERM, does, killed, new_agent, policy, stop, warnings};
use elastic_rs::agent::{AgentMachine, Budget, Command, Outcome, Policy};
use elastic_rs::rendezvous::messages::message::{EndClass, Failure, Placement, Round, Verdict};
use elastic_rs::rendezvous::node::{JoinError, View};

const SIGINT: i32 = 2;

/// The policy of a node that waits 20 s for the others when its workers have finished.
fn counted_by(budget: Budget) -> Policy {
    Policy { budget, exit_barrier_timeout: Some(Duration::from_secs(20)), ..policy() }
}

fn placement(round: u64, restart: u32) -> Placement {
    Placement { restart, ..commands::placement(round) }
}

/// A failure that names this node, as in the words of the coordinator.
fn failure(local_rank: u32) -> Failure {
    Failure { node: "node0".into(), ..killed(local_rank) }
}

fn failed(cause: Option<Failure>) -> Verdict {
    Verdict::Failed {
        by: "node1".into(),
        cause: "no restart is left".into(),
        failure: cause.map(Box::new),
        class: EndClass::Program,
    }
}

fn succeeded() -> Verdict {
    Verdict::AllDone { round: Round(1), nodes: 2 }
}

/// An agent that runs its workers of round 1.
fn running(budget: Budget) -> AgentMachine {
    let mut agent = new_agent(counted_by(budget));
    assert_eq!(does(&mut agent), [commands::NEW]);
    agent.on_placed(placement(1, 0), Instant::now());
    assert_eq!(does(&mut agent), [Command::Start { placement: Box::new(placement(1, 0)), missing: [0, 1].into() }]);
    agent
}

/// The place of a node in a world that counts workers.
#[test]
fn a_placement_for_fewer_workers_starts_fewer_and_the_node_has_finished_with_them() {
    let mut agent = AgentMachine::new(counted_by(Budget::Job), "node0".into());
    agent.on_forecast(None, Instant::now());
    does(&mut agent);
    let fewer = Placement { local_world_size: Some(1), ..placement(1, 0) };
    agent.on_placed(fewer.clone(), Instant::now());
    assert_eq!(does(&mut agent), [Command::Start { placement: Box::new(fewer), missing: [0].into() }]);
    agent.on_started();
    agent.on_interrupted(Round(1), "a node waits", Instant::now());
    agent.on_stopped();
    assert_eq!(does(&mut agent), [stop(SIGTERM), commands::UNATTENDED]);
    // The next world has room for both.
    agent.on_placed(Placement { local_world_size: Some(2), ..placement(2, 0) }, Instant::now());
    assert!(matches!(&does(&mut agent)[..], [Command::Start { missing, .. }] if missing.len() == 2));
    agent.on_started();
    agent.on_worker_succeeded(0, Instant::now());
    assert_eq!(does(&mut agent), []);
    agent.on_worker_succeeded(1, Instant::now());
    assert_eq!(does(&mut agent), [Command::Done(Round(2))]);
}

fn end(outcome: Outcome) -> Command {
    Command::End(Box::new(outcome))
}

/// Seed 4412: a member was disconnected for longer than the grace, and the job closed as finished while it still ran. If its workers
/// fail later, it must not wait for an answer.
#[test]
fn a_failure_after_the_job_was_declared_a_success_waits_for_no_answer() {
    for budget in [Budget::Job, Budget::Node(3)] {
        let mut agent = running(budget);
        agent.on_closed(succeeded());
        assert_eq!(does(&mut agent), []);
        agent.on_worker_failed(Failure { node: String::new(), ..failure(1) }, false, Instant::now());
        assert_eq!(does(&mut agent), [stop(SIGTERM)]);
        agent.on_stopped();
        let reason = "a worker failed after the job had been declared a success".to_owned();
        assert_eq!(
            does(&mut agent),
            [end(Outcome::Failed { cause: Some(Box::new(failure(1))), reason, class: EndClass::Program })]
        );
    }
}

/// The agent's next warning.
fn warned(agent: &mut AgentMachine) -> Option<String> {
    agent.take_commands().into_iter().find_map(|command| match command {
        Command::Warn(text) => Some(text),
        _ => None,
    })
}

#[test]
fn a_restart_of_the_workers_is_logged_as_a_warning() {
    let mut agent = running(Budget::Job);
    assert_eq!(warned(&mut agent), None);
    agent.on_interrupted(Round(1), "a node waits", Instant::now());
    assert_eq!(warned(&mut agent).as_deref(), Some("restarting all workers: a node waits"));
    let mut agent = running(Budget::Node(1));
    agent.on_worker_failed(failure(0), false, Instant::now());
    assert!(warned(&mut agent).is_some_and(|text| text.contains("SIGKILL; restarting all workers")));
}

#[test]
fn an_agent_ends_when_the_workers_of_all_nodes_have_succeeded() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(1, now);
    assert_eq!(does(&mut agent), []);
    agent.on_worker_succeeded(0, now);
    assert_eq!(does(&mut agent), [Command::Done(Round(1))]);
    agent.on_closed(succeeded());
    assert_eq!(does(&mut agent), [end(Outcome::Succeeded)]);
}

#[test]
fn the_exit_barrier_ends_at_its_timeout() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    does(&mut agent);
    let until = agent.next_deadline().unwrap();
    assert_eq!(until, now + Duration::from_secs(20));
    agent.on_unfinished("1 of 2 nodes has finished; still at work (node1)");
    agent.on_tick(until - Duration::from_millis(1));
    assert_eq!(does(&mut agent), []);
    agent.on_tick(until);
    let commands = agent.take_commands();
    let text = "the other nodes' workers have not finished within 20s (exit_barrier_timeout): 1 of 2 nodes has finished; \
                still at work (node1); this node's have, and it leaves";
    assert_eq!(commands, [Command::Warn(text.to_owned()), end(Outcome::Succeeded)]);
}

#[test]
fn a_finished_agent_logs_every_thirty_seconds_which_nodes_it_waits_for() {
    let begin = Instant::now();
    let mut agent = new_agent(policy());
    agent.on_placed(placement(1, 0), Instant::now());
    agent.on_worker_succeeded(0, begin);
    agent.on_worker_succeeded(1, begin);
    does(&mut agent);
    for half_minutes in 1..=200 {
        agent.on_unfinished(&format!("still at work (node{half_minutes})"));
        let at = agent.next_deadline().unwrap();
        assert_eq!(at, begin + Duration::from_secs(30) * half_minutes);
        agent.on_tick(at);
        let reported = warned(&mut agent).unwrap();
        assert!(reported.ends_with(&format!("still at work (node{half_minutes})")), "{reported}");
    }
    agent.on_closed(succeeded());
    assert_eq!(does(&mut agent), [end(Outcome::Succeeded)]);
}

/// The coordinator's answer: its reason begins with the failure that it has counted, and names the node.
fn answer(failure: Failure, follows: &str) -> View {
    let reason = format!("{failure}{follows}");
    View { round: Round(1), waiting: 1, reason, failure: Some(failure), ..View::default() }
}

#[test]
fn the_failing_node_logs_the_failure_once_and_then_only_what_follows() {
    let now = Instant::now();
    let own = || failure(1);
    let closed = View {
        closed: Some(Verdict::Failed {
            by: "node0".into(),
            cause: format!("{}; no restarts left", own()),
            failure: Some(Box::new(own())),
            class: EndClass::Program,
        }),
        ..View::default()
    };
    let elsewhere = Failure { node: "node1".into(), global_rank: 3, ..killed(1) };
    let other = format!("restarting all workers: {elsewhere}; restart 1 of 2");
    let cases = [
        (answer(own(), "; restart 1 of 2"), "restarting all workers: restart 1 of 2"),
        (answer(own(), ""), "restarting all workers"),
        (closed, "the job has failed: no restarts left"),
        (answer(elsewhere, "; restart 1 of 2"), &other),
    ];
    for (view, follows) in cases {
        // The answer may come before all workers have stopped, or after that.
        for stopped in [false, true] {
            let mut agent = running(Budget::Job);
            agent.on_worker_failed(killed(1), false, now);
            let text = "stopping all workers: rank 1 (local rank 1, role default, pid 71) on this node ended with SIGKILL; \
                        the other nodes are notified";
            assert_eq!(warnings(&mut agent), [text]);
            if stopped {
                agent.on_stopped();
            }
            agent.on_view(&view, now);
            assert_eq!(warnings(&mut agent), [follows], "{stopped}");
        }
    }
}

/// As on any other node: it has not been logged here.
#[test]
fn a_failure_whose_words_are_not_known_yet_is_logged_with_what_follows() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_view(&answer(failure(1), "; restart 1 of 2"), now);
    assert_eq!(warnings(&mut agent), [format!("restarting all workers: {}; restart 1 of 2", failure(1))]);
}

#[test]
fn a_node_that_counts_its_own_restarts_logs_a_failure_and_what_follows_in_one_line() {
    let mut agent = running(Budget::Node(1));
    agent.on_worker_failed(killed(1), false, Instant::now());
    let follows = "; restarting all workers; 1 attempts left; will restart worker group";
    assert_eq!(warnings(&mut agent), [format!("{}{follows}", killed(1))]);
    let mut agent = running(Budget::Node(0));
    agent.on_worker_failed(killed(1), false, Instant::now());
    assert_eq!(warnings(&mut agent), [format!("{}; no restarts left on this node", killed(1))]);
}

#[test]
fn no_restart_is_logged_when_the_host_of_the_coordinator_has_gone() {
    let reason = "the host of the coordinator got SIGTERM";
    let failing = || {
        let mut agent = running(Budget::Job);
        agent.on_worker_failed(failure(1), false, Instant::now());
        agent
    };
    let mut stopping = failing();
    does(&mut stopping);
    stopping.on_host_gone(Round(1), reason, Instant::now());
    assert_eq!(warned(&mut stopping), Some(format!("stopping all workers: {reason}")));
    let mut stopped = failing();
    stopped.on_stopped();
    does(&mut stopped);
    stopped.on_host_gone(Round(1), reason, Instant::now());
    assert_eq!(warned(&mut stopped), Some(format!("waiting for another round: {reason}")));
}

#[test]
fn a_failure_is_reported_before_the_other_workers_have_stopped_and_counted_by_the_coordinator() {
    let mut agent = running(Budget::Job);
    agent.on_worker_failed(failure(1), false, Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Report(Box::new(failure(1)))]);
    // The other worker's end is a consequence.
    agent.on_worker_failed(failure(0), false, Instant::now());
    assert_eq!(does(&mut agent), []);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [], "the coordinator decides whether the job restarts");
    agent.on_interrupted(Round(1), "rank 1 failed", Instant::now());
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
    agent.on_placed(placement(2, 1), Instant::now());
    assert_eq!(
        (does(&mut agent), agent.restarts()),
        (vec![Command::Start { placement: Box::new(placement(2, 1)), missing: [0, 1].into() }], 1)
    );
}

#[test]
fn the_coordinators_answer_may_come_while_workers_are_being_stopped() {
    let mut agent = running(Budget::Job);
    agent.on_worker_failed(failure(1), false, Instant::now());
    does(&mut agent);
    agent.on_interrupted(Round(1), "rank 1 failed", Instant::now());
    assert_eq!(does(&mut agent), [], "the old workers are still running");
    agent.on_stopped();
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
}

#[test]
fn with_no_restart_left_every_agent_stops_its_workers_and_names_the_first_cause() {
    for own in [true, false] {
        let mut agent = running(Budget::Job);
        if own {
            agent.on_worker_failed(failure(1), false, Instant::now());
            does(&mut agent);
        }
        agent.on_closed(failed(Some(failure(1))));
        assert_eq!(does(&mut agent), if own { vec![] } else { vec![stop(SIGTERM)] });
        agent.on_stopped();
        let outcome = Outcome::Failed {
            cause: Some(Box::new(failure(1))),
            reason: "no restart is left".into(),
            class: EndClass::Program,
        };
        assert_eq!(does(&mut agent), [end(outcome)]);
    }
}

#[test]
fn an_agent_in_the_exit_barrier_fails_if_the_job_fails() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    does(&mut agent);
    agent.on_closed(failed(None));
    assert_eq!(does(&mut agent), [stop(SIGTERM)], "what they have started may be left");
    agent.on_stopped();
    assert_eq!(
        does(&mut agent),
        [end(Outcome::Failed { cause: None, reason: "no restart is left".into(), class: EndClass::Program })]
    );
}

#[test]
fn signals_after_success_stop_and_then_kill_what_workers_have_started() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    agent.on_closed(succeeded());
    assert_eq!(does(&mut agent).last(), Some(&end(Outcome::Succeeded)));
    agent.on_signal(SIGINT, now);
    agent.on_signal(SIGINT, now);
    assert_eq!(does(&mut agent), [stop(SIGINT), Command::Kill]);
}

#[test]
fn an_agent_with_a_budget_of_its_node_restarts_as_often_as_it_may_and_then_closes_the_job() {
    let mut agent = running(Budget::Node(1));
    agent.on_worker_failed(failure(1), false, Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!((does(&mut agent), agent.restarts()), (vec![commands::UNATTENDED], 1));
    agent.on_placed(placement(2, 0), Instant::now());
    does(&mut agent);
    // The verdict names this node.
    agent.on_worker_failed(Failure { node: String::new(), ..failure(0) }, false, Instant::now());
    let cause = Some(Box::new(failure(0)));
    let reason = failure(0).to_string();
    let verdict =
        Verdict::Failed { by: "node0".into(), cause: reason.clone(), failure: cause.clone(), class: EndClass::Program };
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Close(verdict)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [end(Outcome::Failed { cause, reason, class: EndClass::Program })]);
}

#[test]
fn the_first_cause_is_the_one_that_the_coordinator_names() {
    let mut agent = running(Budget::Node(0));
    agent.on_worker_failed(failure(0), false, Instant::now());
    does(&mut agent);
    agent.on_closed(failed(Some(failure(3))));
    agent.on_stopped();
    let outcome = Outcome::Failed {
        cause: Some(Box::new(failure(3))),
        reason: "no restart is left".into(),
        class: EndClass::Program,
    };
    assert_eq!(does(&mut agent), [end(outcome)]);
}

#[test]
fn a_hopeless_failure_is_not_restarted() {
    let mut agent = running(Budget::Job);
    agent.on_worker_failed(failure(1), true, Instant::now());
    assert!(matches!(&does(&mut agent)[..], [Command::Stop(_), Command::Close(Verdict::Failed { .. })]));
}

#[test]
fn a_world_that_must_re_form_stops_the_workers_first() {
    let mut agent = running(Budget::Job);
    agent.on_interrupted(Round(1), "a node waits", Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_interrupted(Round(1), "another one waits", Instant::now());
    assert_eq!(does(&mut agent), []);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
}

#[test]
fn events_of_an_earlier_round_are_ignored() {
    let mut agent = running(Budget::Job);
    agent.on_interrupted(Round(0), "long ago", Instant::now());
    agent.on_placed(placement(1, 0), Instant::now());
    agent.on_no_placement(JoinError::Busy);
    agent.on_stopped();
    assert_eq!(does(&mut agent), []);
}

#[test]
fn workers_that_had_succeeded_run_again_when_the_world_re_forms() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    does(&mut agent);
    agent.on_interrupted(Round(1), "rank 3 failed", Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)], "what they have started may be left");
    agent.on_stopped();
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
}

#[test]
fn a_signal_leaves_at_once_and_ends_when_the_workers_have() {
    let mut agent = running(Budget::Job);
    agent.on_signal(SIGINT, Instant::now());
    assert_eq!(
        does(&mut agent),
        [Command::Leave { reason: "its agent got SIGINT".into(), signal: Some(SIGINT) }, stop(SIGINT)]
    );
    agent.on_closed(failed(None));
    agent.on_interrupted(Round(1), "a node left", Instant::now());
    assert_eq!(does(&mut agent), [], "it is on its way out");
    agent.on_stopped();
    assert_eq!(does(&mut agent), [end(Outcome::Signal(SIGINT))]);
}

#[test]
fn a_second_signal_kills() {
    let mut agent = running(Budget::Job);
    agent.on_signal(SIGINT, Instant::now());
    does(&mut agent);
    agent.on_signal(SIGINT, Instant::now());
    assert_eq!(does(&mut agent), [Command::Kill]);
}

#[test]
fn a_signal_during_another_stop_does_not_begin_a_second_grace() {
    let mut agent = running(Budget::Job);
    agent.on_interrupted(Round(1), "a node waits", Instant::now());
    does(&mut agent);
    agent.on_signal(SIGTERM, Instant::now());
    assert_eq!(does(&mut agent), [Command::Leave { reason: "its agent got SIGTERM".into(), signal: Some(SIGTERM) }]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [end(Outcome::Signal(SIGTERM))]);
}

#[test]
fn a_signal_ends_an_agent_without_workers_at_once() {
    let mut joining = new_agent(counted_by(Budget::Job));
    does(&mut joining);
    let mut deciding = running(Budget::Job);
    deciding.on_worker_failed(failure(0), false, Instant::now());
    deciding.on_stopped();
    does(&mut deciding);
    for mut agent in [joining, deciding] {
        agent.on_signal(SIGTERM, Instant::now());
        assert_eq!(
            does(&mut agent),
            [
                Command::Leave { reason: "its agent got SIGTERM".into(), signal: Some(SIGTERM) },
                end(Outcome::Signal(SIGTERM))
            ]
        );
        agent.on_signal(SIGTERM, Instant::now());
        assert_eq!(does(&mut agent), [stop(SIGTERM)], "nothing is there to be stopped");
    }
}

#[test]
fn a_failed_join_ends_the_agent() {
    let closed = |verdict, spare| JoinError::Closed { verdict, spare };
    let timeout = JoinError::Timeout { after: GRACE, progress: "1 of 2".into(), endpoint: None };
    let cause = Some(Box::new(failure(3)));
    let cases = [
        (closed(succeeded(), true), Outcome::NotNeeded),
        (closed(succeeded(), false), Outcome::NoPlacement(closed(succeeded(), false))),
        (
            closed(failed(Some(failure(3))), true),
            Outcome::Failed { cause, reason: "no restart is left".into(), class: EndClass::Program },
        ),
        (timeout.clone(), Outcome::NoPlacement(timeout)),
    ];
    for (error, outcome) in cases {
        let mut agent = new_agent(counted_by(Budget::Job));
        does(&mut agent);
        agent.on_no_placement(error);
        assert_eq!(does(&mut agent), [end(outcome)]);
    }
}

#[test]
fn a_node_that_is_cut_off_stops_its_workers_before_it_ends() {
    let error = JoinError::connection("the coordinator stayed away");
    let mut agent = running(Budget::Job);
    agent.on_cut_off(error.clone());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [end(Outcome::NoPlacement(error.clone()))]);

    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    does(&mut agent);
    agent.on_cut_off(error);
    assert_eq!(does(&mut agent), [end(Outcome::Succeeded)], "its own workers have succeeded");
}

#[test]
fn workers_that_are_being_stopped_lose_their_grace_when_the_lease_ends() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_interrupted(Round(1), "node1 is lost", now);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_fenced(Round(1), "cut off", now);
    assert_eq!(does(&mut agent), [Command::Kill]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [commands::UNATTENDED]);
    agent.on_fenced(Round(1), "cut off", now);
    assert_eq!(does(&mut agent), [], "nothing is left of them");
}

/// The coordinator forms a world without it at once.
#[test]
fn the_workers_of_a_node_that_is_rejected_have_no_grace() {
    let error = JoinError::Rejected("another agent has its place".into());
    let mut agent = running(Budget::Job);
    agent.on_cut_off(error.clone());
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Kill]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [end(Outcome::NoPlacement(error))]);
}

#[test]
fn a_job_declared_a_success_lets_the_last_workers_finish() {
    let now = Instant::now();
    let mut agent = running(Budget::Job);
    agent.on_closed(Verdict::Succeeded { by: "node1".into() });
    assert_eq!(does(&mut agent), []);
    agent.on_worker_succeeded(0, now);
    agent.on_worker_succeeded(1, now);
    assert_eq!(does(&mut agent), [end(Outcome::Succeeded)]);
}
