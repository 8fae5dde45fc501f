//! Standbys take the places of workers that fail. `replace` has what happens without one.

use std::time::Instant;

use elastic_rs::agent::{AgentMachine, Command, Policy};
use elastic_rs::rendezvous::messages::message::{Generation, Placement, Resume, Round};

use crate::commands::{self, does, killed};

fn placement(round: u64, survivors: u32) -> Placement {
    Placement {
        resume: Some(Resume::Continue { source: 0, sync: true, survivors, generation: Generation::default() }),
        ..commands::placement(round)
    }
}

fn start_standby(round: u64) -> Command {
    let placement = Placement { reason: "a standby".into(), resume: None, ..placement(round, 0) };
    Command::StartStandby(Box::new(placement))
}

fn call(standby: u32, local_rank: u32) -> Command {
    Command::Call { standby, local_rank }
}

/// Without lines of the log.
fn acts(agent: &mut AgentMachine) -> Vec<Command> {
    does(agent)
}

fn warnings(agent: &mut AgentMachine) -> Vec<String> {
    let text = |command| if let Command::Warn(text) = command { Some(text) } else { None };
    agent.take_commands().into_iter().filter_map(text).collect()
}

/// An agent with two workers in round 1, before its standbys are there.
fn running(policy: Policy) -> AgentMachine {
    let mut agent = commands::new_agent(policy);
    agent.on_placed(placement(1, 0), Instant::now());
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    assert!(
        !acts(&mut agent).iter().any(|did| matches!(did, Command::StartStandby(_))),
        "the script may make its group"
    );
    agent.on_worker_without_process_group();
    agent
}

fn policy(standbys: u32) -> Policy {
    Policy { standbys, ..commands::policy() }
}

/// The same, with its standbys, which wait: in the slots from 2 on.
fn with(standbys: u32) -> AgentMachine {
    let mut agent = running(policy(standbys));
    for slot in 2..2 + standbys {
        assert_eq!(acts(&mut agent).last(), Some(&start_standby(1)), "one after the other");
        agent.on_standby_started(slot);
        agent.on_standby_waits(slot, true);
    }
    assert!(!acts(&mut agent).contains(&start_standby(1)), "so many and no more");
    agent
}

/// Worker 1 dies, and what is left of it lives for a while.
fn dies(agent: &mut AgentMachine, now: Instant) -> Vec<Command> {
    agent.on_worker_exited_badly(killed(1), now);
    acts(agent);
    agent.on_failure_message(1, String::new(), true);
    acts(agent)
}

#[test]
fn a_standby_is_called_while_the_memory_of_the_dead_is_freed() {
    let now = Instant::now();
    let mut agent = with(1);
    assert_eq!(dies(&mut agent, now), [Command::Report(Box::new(killed(1))), call(2, 1)]);
    agent.on_interrupted(Round(1), "rank 1 failed; restart 1 of 3", now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    let join = commands::join_with(&[(0, Some(4))]);
    assert_eq!(acts(&mut agent), [join], "nothing waits for what is left of the dead");
    agent.on_placed(placement(2, 3), now);
    let start = Command::Start { placement: Box::new(placement(2, 3)), missing: [].into() };
    assert_eq!(acts(&mut agent), [start]);
    agent.on_started();
    let placed = [0, 1].map(|local_rank| Command::SendPlacement { local_rank });
    let rest = [Command::Attending(Round(2)), Command::NoProcessGroup(Round(2)), start_standby(2)];
    assert_eq!(acts(&mut agent), [&placed[..], &rest[..]].concat(), "and it is replaced");
}

#[test]
fn a_device_has_no_memory_for_two() {
    let now = Instant::now();
    let mut agent = running(Policy { replaces_dying: false, ..policy(1) });
    agent.on_standby_started(2);
    agent.on_standby_waits(2, true);
    acts(&mut agent);
    assert_eq!(dies(&mut agent, now), [Command::Report(Box::new(killed(1)))]);
    agent.on_interrupted(Round(1), "rank 1 failed; restart 1 of 3", now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    assert_eq!(acts(&mut agent), [], "the join waits for what is left of the dead");
    agent.on_worker_gone(1);
    assert_eq!(
        acts(&mut agent),
        [call(2, 1), commands::join_with(&[(0, Some(4))])],
        "the last to go is replaced as well"
    );
}

#[test]
fn the_one_that_waits_is_called_before_the_one_that_is_on_its_way() {
    let now = Instant::now();
    let mut agent = running(policy(2));
    [2, 3].into_iter().for_each(|slot| agent.on_standby_started(slot));
    agent.on_standby_waits(3, true);
    acts(&mut agent);
    assert!(dies(&mut agent, now).contains(&call(3, 1)));
}

/// It may not get there, or its script may fail.
#[test]
fn one_that_is_on_its_way_is_not_called() {
    let now = Instant::now();
    let mut agent = running(policy(1));
    agent.on_standby_started(2);
    acts(&mut agent);
    assert!(!dies(&mut agent, now).iter().any(|did| matches!(did, Command::Call { .. })));
    agent.on_worker_gone(1);
    assert!(acts(&mut agent).iter().any(|did| matches!(did, Command::Replace { .. })), "as without a standby");
}

#[test]
fn the_end_of_a_world_withdraws_a_start() {
    let now = Instant::now();
    let mut agent = running(policy(1));
    assert!(acts(&mut agent).contains(&start_standby(1)));
    agent.on_worker_exited_badly(killed(1), now);
    assert!(agent.take_commands().contains(&Command::CancelStart));
    agent.on_failure_message(1, String::new(), true);
    agent.on_worker_gone(1);
    assert!(acts(&mut agent).iter().any(|did| matches!(did, Command::Replace { .. })), "as without a standby");
}

#[test]
fn one_that_ends_while_it_waits_is_replaced_with_the_next_world() {
    let mut agent = with(1);
    agent.on_standby_ended(2, "the standby with pid 7 has ended (SIGKILL)", true);
    assert_eq!(
        warnings(&mut agent),
        ["the standby with pid 7 has ended (SIGKILL); another one is started with the next world"]
    );
    let now = Instant::now();
    assert!(!dies(&mut agent, now).iter().any(|did| matches!(did, Command::Call { .. })));
}

/// Its connection ends before it does.
#[test]
fn one_that_has_waited_and_exits_is_no_script_that_does_not_get_there() {
    let mut agent = with(1);
    agent.on_standby_waits(2, false);
    agent.on_standby_ended(2, "the standby with pid 7 has ended (exit code 1)", false);
    assert!(warnings(&mut agent)[0].ends_with("another one is started with the next world"));
}

#[test]
fn a_second_worker_that_dies_in_the_same_change_gets_a_standby_too() {
    let now = Instant::now();
    let mut agent = with(2);
    assert!(dies(&mut agent, now).contains(&call(2, 1)));
    agent.on_interrupted(Round(1), "rank 1 failed; restart 1 of 3", now);
    acts(&mut agent);
    agent.on_worker_exited_badly(killed(0), now);
    let did = acts(&mut agent);
    assert!(did.contains(&call(3, 0)), "{did:?}");
}

/// Workers that were restarted are not there yet.
#[test]
fn nothing_is_said_of_a_script_that_has_not_come_so_far() {
    let now = Instant::now();
    let mut agent = with(1);
    agent.on_fenced(Round(1), "cut off", now);
    agent.on_stopped();
    agent.on_placed(placement(2, 0), now);
    agent.on_started();
    acts(&mut agent);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_failure_message(1, String::new(), true);
    assert!(!warnings(&mut agent).iter().any(|text| text.contains("process group")));
}

#[test]
fn a_script_that_does_not_get_there_is_not_tried_again() {
    for fails in [
        |agent: &mut AgentMachine| agent.on_standby_not_started("no memory"),
        |agent: &mut AgentMachine| {
            agent.on_standby_started(2);
            agent.on_standby_ended(2, "the standby with pid 7 has ended (exit code 1)", false);
        },
    ] {
        let mut agent = running(policy(2));
        acts(&mut agent);
        fails(&mut agent);
        let said = warnings(&mut agent);
        assert!(said.len() == 1 && said[0].ends_with("a worker that fails is started again"), "{said:?}");
        agent.on_worker_without_process_group();
        assert!(!agent.take_commands().iter().any(|did| matches!(did, Command::StartStandby(_) | Command::Warn(_))));
    }
}

#[test]
fn a_script_that_makes_its_process_group_has_no_standby_and_is_told_why() {
    let now = Instant::now();
    let mut agent = commands::new_agent(policy(1));
    agent.on_placed(placement(1, 0), now);
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    acts(&mut agent);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_failure_message(1, String::new(), true);
    let said = warnings(&mut agent);
    assert!(said.iter().any(|text| text.starts_with("the script makes its process group itself")), "{said:?}");
}

#[test]
fn a_stop_ends_standbys_and_nobody_complains() {
    let now = Instant::now();
    let mut agent = with(1);
    agent.on_fenced(Round(1), "cut off", now);
    acts(&mut agent);
    agent.on_standby_ended(2, "", true);
    assert_eq!(warnings(&mut agent), [""; 0]);
    agent.on_stopped();
    agent.on_placed(placement(2, 0), now);
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    agent.on_worker_without_process_group();
    assert!(acts(&mut agent).contains(&start_standby(2)));
}
