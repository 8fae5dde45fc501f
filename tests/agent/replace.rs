//! Workers that are missing are started while the others leave their world. `in_place` has what happens to the others.

use std::time::Instant;

use elastic_rs::agent::machine::{PARK_LIMIT, REPLACE_LIMIT};
use elastic_rs::agent::{AgentMachine, Command, Policy};
use elastic_rs::channel::message::ToWorker;
use elastic_rs::rendezvous::messages::message::{EndClass, Failure, Generation, Placement, Resume, Round, Verdict};

use crate::commands::{self, SIGTERM, does, killed, stop};

fn placement(round: u64, survivors: u32) -> Placement {
    Placement {
        resume: Some(Resume::Continue { source: 0, sync: true, survivors, generation: Generation::default() }),
        ..commands::placement(round)
    }
}

fn start(placement: Placement, missing: &[u32]) -> Command {
    Command::Start { placement: Box::new(placement), missing: missing.iter().copied().collect() }
}

/// Workers are started ahead of round 2, in which the job has been restarted once.
fn replace(missing: &[u32]) -> Command {
    let reason = "workers are started ahead of the next round".into();
    let placement = Placement { restart: 1, world: 1, reason, ..commands::placement(2) };
    Command::Replace { placement: Box::new(placement), missing: missing.iter().copied().collect() }
}

fn join(survivors: &[(u32, u64)]) -> Command {
    let survivors: Vec<_> = survivors.iter().map(|&(local_rank, commit)| (local_rank, Some(commit))).collect();
    commands::join_with(&survivors)
}

fn send_placement(local_rank: u32) -> Command {
    Command::SendPlacement { local_rank }
}

/// An agent with two workers in round 1, which let the library make their process groups.
fn running(max_restarts: u32) -> AgentMachine {
    let mut agent = commands::new_agent(Policy { max_restarts, ..commands::policy() });
    agent.on_placed(placement(1, 0), Instant::now());
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    agent.on_worker_without_process_group();
    does(&mut agent);
    agent
}

/// Nothing is left of worker 1, and its words are known.
fn fails(agent: &mut AgentMachine, now: Instant) -> Vec<Command> {
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_worker_gone(1);
    let did = does(agent);
    assert!(!did.iter().any(|command| matches!(command, Command::Replace { .. })), "before the report: {did:?}");
    agent.on_failure_message(1, String::new(), true);
    does(agent)
}

/// An agent that is to start worker 1 again.
fn replacing(now: Instant) -> AgentMachine {
    let mut agent = running(3);
    let report = Command::Report(Box::new(killed(1)));
    assert_eq!(fails(&mut agent, now), [report, replace(&[1])]);
    agent.on_interrupted(Round(1), "rank 1 failed; restart 1 of 3", now);
    assert_eq!(does(&mut agent), []);
    agent
}

/// An agent that has started worker 1 again, and has joined the next round.
fn joining(now: Instant) -> AgentMachine {
    let mut agent = replacing(now);
    agent.on_started();
    assert_eq!(does(&mut agent), []);
    agent.on_worker_parked(0, commands::held(Some(4)));
    assert_eq!(does(&mut agent), [join(&[(0, 4)])], "worker 1 has no state");
    agent
}

#[test]
fn a_worker_that_was_started_ahead_gets_its_placement_whenever_it_waits_for_it() {
    let now = Instant::now();
    let in_round = [Command::Attending(Round(2)), Command::NoProcessGroup(Round(2))];
    for attends in 0..4 {
        let mut agent = replacing(now);
        agent.on_started();
        let attends_after = |step, agent: &mut AgentMachine| {
            if attends == step {
                agent.on_worker_attends(1);
                agent.on_worker_without_process_group();
                assert!(does(agent).iter().all(|did| matches!(did, Command::NoProcessGroup(_))));
            }
        };
        attends_after(0, &mut agent);
        agent.on_worker_parked(0, commands::held(Some(4)));
        assert_eq!(does(&mut agent), [join(&[(0, 4)])]);
        attends_after(1, &mut agent);
        agent.on_placed(placement(2, 3), now);
        assert_eq!(does(&mut agent), [start(placement(2, 3), &[])], "nobody is missing");
        attends_after(2, &mut agent);
        agent.on_started();
        if attends == 3 {
            assert_eq!(does(&mut agent), [send_placement(0)]);
            agent.on_worker_attends(1);
            assert_eq!(does(&mut agent), [&[send_placement(1)][..], &in_round[..]].concat());
        } else {
            assert_eq!(
                does(&mut agent),
                [&[send_placement(0), send_placement(1)][..], &in_round[..]].concat(),
                "{attends}"
            );
        }
    }
}

#[test]
fn a_worker_that_connects_again_is_not_taken_for_one_that_waits() {
    let now = Instant::now();
    let mut agent = joining(now);
    agent.on_worker_attends(1);
    agent.on_worker_deaf(1);
    agent.on_placed(placement(2, 3), now);
    agent.on_started();
    assert_eq!(does(&mut agent)[1..], [send_placement(0)]);
    agent.on_worker_attends(1);
    assert_eq!(does(&mut agent)[0], send_placement(1));
}

#[test]
fn workers_are_started_ahead_only_if_another_world_follows_for_which_they_can_wait() {
    let now = Instant::now();
    let replaced = |did: Vec<Command>| did.iter().any(|command| matches!(command, Command::Replace { .. }));
    assert!(replaced(fails(&mut running(1), now)));
    assert!(!replaced(fails(&mut running(0), now)), "no restart is left");

    let mut agent = commands::new_agent(commands::policy());
    agent.on_placed(placement(1, 0), now);
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    assert!(!replaced(fails(&mut agent, now)), "the programs make their process groups");

    let mut agent = running(3);
    agent.on_closed(Verdict::Succeeded { by: "node1".into() });
    assert!(!replaced(fails(&mut agent, now)), "the job is over");

    let mut agent = running(3);
    agent.on_worker_failed(killed(1), true, now);
    agent.on_worker_gone(1);
    assert!(!replaced(does(&mut agent)), "a restart cannot help");

    let mut agent = running(3);
    agent.on_signal(SIGTERM, now);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_worker_gone(1);
    assert!(!replaced(does(&mut agent)), "this node leaves");

    let mut agent = running(3);
    agent.on_fenced(Round(1), "cut off", now);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_worker_gone(1);
    assert!(!replaced(does(&mut agent)), "this node was cut off");
}

/// The report is the first thing that the other nodes wait for. A worker that ends because of another node's failure has none.
#[test]
fn a_worker_that_ends_while_its_world_does_is_started_again_at_once() {
    let mut agent = running(3);
    agent.on_interrupted(Round(1), "node1 is lost", Instant::now());
    does(&mut agent);
    agent.on_worker_exited_badly(killed(0), Instant::now());
    assert_eq!(does(&mut agent), []);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [replace(&[0])]);
    agent.on_worker_parked(1, commands::held(Some(2)));
    assert_eq!(does(&mut agent), []);
    agent.on_started();
    assert_eq!(does(&mut agent), [join(&[(1, 2)])]);
}

#[test]
fn another_worker_that_ends_meanwhile_is_started_too() {
    let now = Instant::now();
    let mut agent = replacing(now);
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [Command::CancelStart, replace(&[0, 1])]);
    agent.on_started();
    assert_eq!(does(&mut agent), [join(&[])]);

    let mut agent = replacing(now);
    agent.on_started();
    agent.on_worker_exited_badly(killed(0), now);
    assert_eq!(does(&mut agent), []);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [join(&[])], "it is started in the next round: nobody else holds the join up");
}

#[test]
fn the_join_waits_for_a_start_but_not_long() {
    let now = Instant::now();
    let mut agent = replacing(now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    assert_eq!((does(&mut agent), agent.next_deadline()), (vec![], Some(now + REPLACE_LIMIT)));
    agent.on_started();
    assert_eq!(does(&mut agent), [join(&[(0, 4)])]);

    let mut agent = replacing(now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    agent.on_tick(now + REPLACE_LIMIT);
    assert_eq!(does(&mut agent), [Command::CancelStart, join(&[(0, 4)])]);
    agent.on_placed(placement(2, 3), now);
    assert_eq!(does(&mut agent), [start(placement(2, 3), &[1])]);

    // The others take longer than the start may.
    let mut agent = replacing(now);
    agent.on_tick(now + REPLACE_LIMIT);
    assert_eq!((does(&mut agent), agent.next_deadline()), (vec![], Some(now + PARK_LIMIT)));
}

#[test]
fn a_worker_that_cannot_be_started_ahead_is_started_in_the_next_round() {
    let now = Instant::now();
    let mut agent = replacing(now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    agent.on_worker_failed(killed(1), false, now);
    assert_eq!(does(&mut agent), [join(&[(0, 4)])]);
    agent.on_placed(placement(2, 3), now);
    assert_eq!(does(&mut agent), [start(placement(2, 3), &[1])]);
    agent.on_worker_failed(killed(1), false, now);
    assert!(does(&mut agent).contains(&Command::Report(Box::new(killed(1)))));
}

/// Before the join or after it, gone or not: the failure counts once, in the round that the worker was started for.
#[test]
fn a_worker_that_fails_before_its_round_is_the_rounds_first_failure() {
    let now = Instant::now();
    for (after_join, gone_first) in [(false, true), (true, true), (true, false)] {
        let mut agent = replacing(now);
        agent.on_started();
        agent.on_worker_attends(1);
        let fails = |agent: &mut AgentMachine| {
            agent.on_worker_exited_badly(Failure { pid: 8, ..killed(1) }, now);
            assert_eq!(does(agent), []);
            if gone_first {
                agent.on_worker_gone(1);
                assert_eq!(does(agent), [], "it is not started ahead again");
            }
        };
        if !after_join {
            fails(&mut agent);
        }
        agent.on_worker_parked(0, commands::held(Some(4)));
        assert_eq!(does(&mut agent), [join(&[(0, 4)])]);
        if after_join {
            fails(&mut agent);
        }
        agent.on_placed(placement(2, 3), now);
        let did = [start(placement(2, 3), &[1]), Command::CancelStart, Command::Listen { local_rank: 1 }];
        assert_eq!(does(&mut agent), did);
        agent.on_failure_message(1, "no such file".into(), true);
        let failure = Failure { pid: 8, message: "no such file".into(), ..killed(1) };
        assert_eq!(does(&mut agent), [Command::Report(Box::new(failure))]);
        agent.on_interrupted(Round(2), "rank 1 failed; restart 2 of 3", now);
        if !gone_first {
            assert_eq!(does(&mut agent), [], "something of it may be left");
            agent.on_worker_gone(1);
        }
        assert_eq!(does(&mut agent), [join(&[(0, 4)])]);
        agent.on_placed(placement(3, 3), now);
        assert_eq!(does(&mut agent), [start(placement(3, 3), &[1])]);
    }
}

#[test]
fn a_worker_whose_local_rank_has_no_rank_is_stopped_alone() {
    let now = Instant::now();
    let mut agent = joining(now);
    let placement = Placement { local_world_size: Some(1), ..placement(2, 3) };
    agent.on_placed(placement.clone(), now);
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 1 }, start(placement, &[])]);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), []);
}

#[test]
fn it_is_stopped_if_the_others_are_restarted_or_the_job_ends() {
    let now = Instant::now();
    let restart = Placement { resume: Some(Resume::Restart { reason: "node1".into() }), ..commands::placement(2) };
    let mut agent = joining(now);
    agent.on_placed(restart.clone(), now);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [start(restart.clone(), &[0, 1])]);
    // It is the only one that is left.
    let mut agent = replacing(now);
    agent.on_started();
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [join(&[])]);
    agent.on_placed(restart, now);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);

    let failed = || Verdict::Failed {
        by: "node1".into(),
        cause: "no restarts left".into(),
        failure: None,
        class: EndClass::Program,
    };
    let mut agent = replacing(now);
    agent.on_closed(failed());
    assert_eq!(does(&mut agent), [stop(SIGTERM)], "before it runs");
    let mut agent = replacing(now);
    agent.on_started();
    agent.on_worker_parked(0, commands::held(Some(4)));
    does(&mut agent);
    agent.on_signal(SIGTERM, now);
    let did = does(&mut agent);
    assert_eq!(did.last(), Some(&stop(SIGTERM)), "{did:?}");
}

/// The next failure comes before the world has begun here.
#[test]
fn it_waits_for_the_round_after_if_its_own_is_over_before() {
    let now = Instant::now();
    let mut agent = joining(now);
    agent.on_placed(placement(2, 3), now);
    does(&mut agent);
    agent.on_interrupted(Round(2), "node1 is lost", now);
    assert_eq!(does(&mut agent), [Command::CancelStart, join(&[(0, 4)])]);
    agent.on_placed(placement(3, 3), now);
    assert_eq!(does(&mut agent), [start(placement(3, 3), &[])]);
    agent.on_worker_attends(1);
    agent.on_started();
    assert_eq!(does(&mut agent)[..2], [send_placement(0), send_placement(1)]);
    agent.on_interrupted(Round(3), "node1 is lost", now);
    let reported = |local_rank| {
        let message = Box::new(ToWorker::PeerFailed { reason: "node1 is lost".into(), rank: None });
        Command::Send { local_rank, message }
    };
    assert_eq!(does(&mut agent), [Command::CancelStart, reported(0), reported(1)], "it is a worker as the others");
}

/// It was out of reach meanwhile. The others have begun again, and have written another checkpoint than this one has loaded.
#[test]
fn a_worker_that_was_started_before_a_missed_round_does_not_bring_an_old_checkpoint() {
    for (round, survivors, restarts) in [(2, 0, false), (3, 0, true), (3, 2, false)] {
        let now = Instant::now();
        let mut agent = joining(now);
        agent.on_placed(placement(round, survivors), now);
        assert_eq!(does(&mut agent).contains(&stop(SIGTERM)), restarts, "round {round}, {survivors} survivors");
    }
}
