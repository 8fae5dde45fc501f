//! The agent's machine with a newcomer's workers, which are started before the join. `in_place` has those of members.

use std::time::Instant;

use elastic_rs::agent::machine::PREPARE_LIMIT;
use elastic_rs::agent::{AgentMachine, Command, Outcome, Policy};
use elastic_rs::rendezvous::messages::message::{
    EndClass, Failure, Generation, Placement, Resume, Round, Running, Verdict,
};
use elastic_rs::rendezvous::node::JoinError;

use crate::commands::{self, SIGTERM, does, killed, stop};

fn running() -> Running {
    Running {
        round: Round(4),
        world: 99,
        nodes: 2,
        workers: 6,
        room: None,
        master_addr: "node0".into(),
        master_port: 1234,
        restart: 1,
    }
}

fn looking() -> AgentMachine {
    let mut agent = AgentMachine::new(commands::policy(), "node2".into());
    assert_eq!(does(&mut agent), [Command::Look]);
    agent
}

/// An agent whose workers are started ahead.
fn preparing(now: Instant) -> AgentMachine {
    let mut agent = looking();
    agent.on_forecast(Some(&running()), now);
    assert_eq!(does(&mut agent), [Command::StartAhead(Box::new(running().next_placement(2)))]);
    agent.on_started();
    assert_eq!(does(&mut agent), []);
    agent
}

/// An agent that has joined with both workers.
fn joined() -> AgentMachine {
    let mut agent = preparing(Instant::now());
    agent.on_worker_attends(1);
    agent.on_worker_without_process_group();
    assert_eq!(does(&mut agent), [], "one is missing");
    agent.on_worker_attends(0);
    assert_eq!(does(&mut agent), [commands::join_with(&[(0, None), (1, None)])]);
    agent
}

fn placement(resume: Option<Resume>) -> Placement {
    Placement { resume, ..commands::placement(5) }
}

fn leave() -> Command {
    Command::Leave { reason: "its agent got SIGTERM".into(), signal: Some(SIGTERM) }
}

fn join() -> Command {
    commands::NEW
}

#[test]
fn the_expected_placement_follows_those_of_the_running_world() {
    let placement = running().next_placement(2);
    let ranks = placement.workers.unwrap();
    assert_eq!((placement.round, placement.rank, placement.world_size, placement.restart), (Round(5), 2, 3, 1));
    assert_eq!((ranks.first_rank, ranks.world_size), (6, 8));
}

/// A world that counts workers has room for fewer than the node has.
#[test]
fn as_many_workers_are_started_ahead_as_there_is_room_for() {
    let mut agent = looking();
    let running = Running { room: Some(1), ..running() };
    agent.on_forecast(Some(&running), Instant::now());
    let placement = running.next_placement(2);
    assert_eq!((placement.local_world_size, placement.workers.map(|ranks| ranks.world_size)), (Some(1), Some(7)));
    assert_eq!(does(&mut agent), [Command::StartAhead(Box::new(placement))]);
    agent.on_started();
    agent.on_worker_attends(0);
    assert_eq!(does(&mut agent), [commands::join_with(&[(0, None)])], "nobody is missing");
}

/// Another node has taken the room meanwhile.
#[test]
fn a_worker_without_a_rank_is_stopped_alone() {
    let mut agent = joined();
    let resume = Some(Resume::Continue { source: 3, sync: true, survivors: 7, generation: Generation::default() });
    let placement = Placement { local_world_size: Some(1), ..placement(resume) };
    agent.on_placed(placement.clone(), Instant::now());
    let start = Command::Start { placement: Box::new(placement), missing: [].into() };
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 1 }, start]);
    agent.on_started();
    assert_eq!(does(&mut agent)[0], Command::SendPlacement { local_rank: 0 });
    agent.on_worker_exited_badly(killed(1), Instant::now());
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [], "nobody minds its end");
    agent.on_worker_succeeded(0, Instant::now());
    assert_eq!(does(&mut agent), [Command::Done(Round(5))]);
}

#[test]
fn a_node_joins_at_once_if_no_world_runs() {
    let mut agent = looking();
    agent.on_forecast(None, Instant::now());
    assert_eq!(does(&mut agent), [join()]);
    agent.on_forecast(Some(&running()), Instant::now());
    assert_eq!(does(&mut agent), [], "too late");
}

#[test]
fn a_node_that_cannot_change_in_place_does_not_look() {
    let policy = Policy { in_place: false, ..commands::policy() };
    assert_eq!(does(&mut AgentMachine::new(policy, "node2".into())), [join()]);
}

#[test]
fn workers_that_wait_for_a_world_get_it() {
    let mut agent = joined();
    let resume = Resume::Continue { source: 0, sync: true, survivors: 8, generation: Generation::default() };
    agent.on_placed(placement(Some(resume.clone())), Instant::now());
    let start = Command::Start { placement: Box::new(placement(Some(resume))), missing: [].into() };
    assert_eq!(does(&mut agent), [start]);
    agent.on_started();
    let placement = |local_rank| Command::SendPlacement { local_rank };
    let round = Round(5);
    assert_eq!(
        does(&mut agent),
        [placement(0), placement(1), Command::Attending(round), Command::NoProcessGroup(round)]
    );
}

#[test]
fn they_are_started_again_if_the_others_are() {
    let mut agent = joined();
    let placement = placement(Some(Resume::Restart { reason: "node1 had to stop its workers".into() }));
    agent.on_placed(placement.clone(), Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [Command::Start { placement: Box::new(placement), missing: [0, 1].into() }]);
}

#[test]
fn a_worker_that_connects_again_is_waited_for() {
    let mut agent = preparing(Instant::now());
    agent.on_worker_attends(0);
    agent.on_worker_deaf(0);
    agent.on_worker_attends(1);
    assert_eq!(does(&mut agent), []);
    agent.on_worker_attends(0);
    assert_eq!(does(&mut agent), [commands::join_with(&[(0, None), (1, None)])]);
}

#[test]
fn a_failure_before_the_join_ends_this_node_alone() {
    let mut agent = preparing(Instant::now());
    agent.on_worker_attends(0);
    agent.on_worker_exited_badly(killed(1), Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM), Command::Listen { local_rank: 1 }]);
    agent.on_worker_gone(1);
    agent.on_failure_message(1, "no such file".into(), true);
    assert_eq!(does(&mut agent), [], "worker 0 is left");
    agent.on_stopped();
    let cause = Failure { node: "node2".into(), message: "no such file".into(), ..killed(1) };
    let reason = cause.to_string();
    let outcome = Outcome::Unfit { cause: Box::new(cause), reason };
    assert_eq!(does(&mut agent), [Command::End(Box::new(outcome))], "nothing is reported, and nothing is closed");
}

#[test]
fn a_worker_that_cannot_be_started_ends_this_node_alone() {
    let mut agent = looking();
    agent.on_forecast(Some(&running()), Instant::now());
    does(&mut agent);
    agent.on_worker_failed(killed(0), false, Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert!(matches!(&does(&mut agent)[..], [Command::End(outcome)] if matches!(**outcome, Outcome::Unfit { .. })));
}

#[test]
fn workers_that_do_not_wait_for_a_world_are_started_after_the_join() {
    let mut agent = preparing(Instant::now());
    agent.on_worker_attends(0);
    agent.on_worker_succeeded(1, Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_worker_gone(1);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join()]);

    let now = Instant::now();
    let mut agent = preparing(now);
    let mut at = agent.next_deadline().unwrap();
    while at < now + PREPARE_LIMIT {
        agent.on_tick(at);
        assert_eq!(does(&mut agent), []);
        at = agent.next_deadline().unwrap();
    }
    agent.on_tick(at);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join()]);
}

#[test]
fn the_end_of_the_job_ends_the_preparation() {
    let mut agent = preparing(Instant::now());
    agent.on_closed(Verdict::AllDone { round: Round(4), nodes: 2 });
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join()]);
    agent.on_no_placement(closed());
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::NotNeeded))]);

    let mut agent = preparing(Instant::now());
    agent.on_closed(Verdict::Failed {
        by: "node0".into(),
        cause: "a worker failed".into(),
        failure: None,
        class: EndClass::Program,
    });
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert!(matches!(&does(&mut agent)[..], [Command::End(outcome)] if matches!(**outcome, Outcome::Failed { .. })));
}

fn closed() -> JoinError {
    JoinError::Closed { verdict: Verdict::AllDone { round: Round(4), nodes: 2 }, spare: false }
}

/// The job ended well while this node was getting ready for it, whatever it did about its workers just then.
#[test]
fn a_node_that_was_preparing_its_workers_when_the_job_ended_was_not_needed() {
    let mut in_vain = preparing(Instant::now());
    in_vain.on_worker_succeeded(1, Instant::now());
    in_vain.on_stopped();
    for mut agent in [joined(), in_vain] {
        does(&mut agent);
        agent.on_no_placement(closed());
        agent.on_stopped();
        assert_eq!(does(&mut agent).last(), Some(&Command::End(Box::new(Outcome::NotNeeded))));
    }
    // A node that is started after the end of the job was too late.
    let mut late = looking();
    late.on_forecast(None, Instant::now());
    late.on_no_placement(closed());
    assert_eq!(does(&mut late), [join(), Command::End(Box::new(Outcome::NoPlacement(closed())))]);
    // So is a member whose round is over.
    let mut member = joined();
    member.on_placed(
        placement(Some(Resume::Continue { source: 0, sync: true, survivors: 8, generation: Generation::default() })),
        Instant::now(),
    );
    member.on_started();
    member.on_interrupted(Round(5), "a test", Instant::now());
    member.on_stopped();
    does(&mut member);
    member.on_no_placement(closed());
    member.on_stopped();
    assert_eq!(does(&mut member).last(), Some(&Command::End(Box::new(Outcome::NoPlacement(closed())))));
}

#[test]
fn a_signal_ends_the_preparation() {
    let mut agent = preparing(Instant::now());
    agent.on_signal(SIGTERM, Instant::now());
    assert_eq!(does(&mut agent), [leave(), stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Signal(SIGTERM)))]);

    let mut agent = looking();
    agent.on_signal(SIGTERM, Instant::now());
    assert_eq!(does(&mut agent), [leave(), Command::End(Box::new(Outcome::Signal(SIGTERM)))]);
}
