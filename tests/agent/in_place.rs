//! Workers that survive the end of their world, event by event. `simulation/agent` tests them together with the rendezvous.

use std::slice;
use std::time::Instant;

use crate::commands::{self, SIGKILL, SIGTERM, does, join_with as join, killed, stop, warnings};
use elastic_rs::agent::machine::{LEAVE_LIMIT, PARK_LIMIT, RAISE_LIMIT};
use elastic_rs::agent::{AgentMachine, Budget, Command, Outcome, Policy};
use elastic_rs::channel::message::{HeldState, ToWorker};
use elastic_rs::rendezvous::messages::message::{
    EndClass, Failure, Generation, NEVER, Placement, Resume, Round, STILL_ALIVE, Survival, Verdict, WorldChange,
};
use elastic_rs::rendezvous::node::{JoinError, View};

const FIRST: Resume = Resume::Continue { source: 0, sync: true, survivors: 0, generation: GENERATION };
const GENERATION: Generation = Generation { round: Round(1), world: 1 };

fn placement(round: u64, resume: Option<Resume>) -> Placement {
    Placement { resume, ..commands::placement(round) }
}

fn start(round: u64, resume: Option<Resume>, missing: &[u32]) -> Command {
    Command::Start { placement: Box::new(placement(round, resume)), missing: missing.iter().copied().collect() }
}

fn send(local_rank: u32, message: ToWorker) -> Command {
    Command::Send { local_rank, message: Box::new(message) }
}

fn peer_failed(local_rank: u32, reason: &str) -> Command {
    send(local_rank, ToWorker::PeerFailed { reason: reason.into(), rank: None })
}

/// The news of a worker's failure.
fn worker_failed(local_rank: u32, failure: &Failure) -> Command {
    send(local_rank, ToWorker::PeerFailed { reason: failure.to_string(), rank: Some(failure.global_rank) })
}

fn new_agent() -> AgentMachine {
    commands::new_agent(commands::policy())
}

/// An agent whose two workers run in round 1. Those of `attend` attend.
fn running(attend: &[u32]) -> AgentMachine {
    running_as(new_agent(), attend)
}

fn running_as(mut agent: AgentMachine, attend: &[u32]) -> AgentMachine {
    does(&mut agent);
    agent.on_placed(placement(1, Some(FIRST)), Instant::now());
    assert_eq!(does(&mut agent), [start(1, Some(FIRST), &[0, 1])]);
    agent.on_started();
    assert_eq!(does(&mut agent), []);
    for &local_rank in attend {
        agent.on_worker_attends(local_rank);
        assert_eq!(does(&mut agent)[0], Command::SendPlacement { local_rank });
    }
    agent
}

/// An agent whose two workers attend, and whose round is broken.
fn interrupted(now: Instant) -> AgentMachine {
    let mut agent = running(&[0, 1]);
    agent.on_interrupted(Round(1), "node1 is lost", now);
    agent
}

/// An agent whose worker 1 has been killed, and whose worker 0 has parked. It has joined the next round.
fn joining() -> AgentMachine {
    let mut agent = interrupted(Instant::now());
    agent.on_worker_exited_badly(killed(1), Instant::now());
    agent.on_worker_gone(1);
    agent.on_worker_parked(0, commands::held(Some(4)));
    assert_eq!(does(&mut agent).last(), Some(&join(&[(0, Some(4))])));
    agent
}

fn going_on(survivors: u32) -> Resume {
    Resume::Continue { source: 0, sync: true, survivors, generation: GENERATION }
}

#[test]
fn a_node_whose_workers_attend_says_so_once() {
    let mut agent = running(&[]);
    agent.on_worker_attends(1);
    assert_eq!(does(&mut agent), [Command::SendPlacement { local_rank: 1 }]);
    agent.on_worker_attends(0);
    assert_eq!(does(&mut agent), [Command::SendPlacement { local_rank: 0 }, Command::Attending(Round(1))]);
}

#[test]
fn workers_survive_the_failure_of_one_of_them() {
    let now = Instant::now();
    let mut agent = running(&[0, 1]);
    agent.on_worker_exited_badly(killed(1), now);
    assert_eq!(
        does(&mut agent),
        [Command::CancelStart, worker_failed(0, &killed(1)), Command::Listen { local_rank: 1 }]
    );
    agent.on_failure_message(1, "killed".into(), true);
    let reported = Failure { message: "killed".into(), ..killed(1) };
    assert_eq!(does(&mut agent), [Command::Report(Box::new(reported))]);
    agent.on_interrupted(Round(1), "rank 1 failed; restart 1 of 3", now);
    agent.on_worker_parked(0, commands::held(Some(7)));
    assert_eq!(does(&mut agent), [], "something of worker 1 may be left");
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [join(&[(0, Some(7))])]);
    agent.on_placed(placement(2, Some(going_on(3))), now);
    assert_eq!(does(&mut agent), [start(2, Some(going_on(3)), &[1])]);
    agent.on_started();
    assert_eq!(does(&mut agent), [Command::SendPlacement { local_rank: 0 }]);
    agent.on_worker_attends(1);
    assert_eq!(does(&mut agent), [Command::SendPlacement { local_rank: 1 }, Command::Attending(Round(2))]);
}

/// That they leave their world is logged with the failure. What follows is all that is new.
#[test]
fn a_failure_that_workers_survive_is_logged_once() {
    let surviving = "the workers leave their world, and wait for the next";
    let view = |follows: &str| {
        let failure = Failure { node: "node0".into(), ..killed(1) };
        let reason = format!("{failure}{follows}");
        View { round: Round(1), waiting: 1, reason, failure: Some(failure), ..View::default() }
    };
    for (follows, logged) in [("; restart 1 of 3", &["restart 1 of 3"][..]), ("", &[])] {
        let mut agent = running(&[0, 1]);
        agent.on_worker_exited_badly(killed(1), Instant::now());
        agent.on_failure_message(1, String::new(), true);
        assert_eq!(warnings(&mut agent), [format!("{surviving}: {}; the other nodes are notified", killed(1))]);
        agent.on_view(&view(follows), Instant::now());
        assert_eq!(warnings(&mut agent), logged);
    }
}

#[test]
fn workers_survive_the_failure_of_another_node() {
    let mut agent = interrupted(Instant::now());
    assert_eq!(
        does(&mut agent),
        [Command::CancelStart, peer_failed(0, "node1 is lost"), peer_failed(1, "node1 is lost")]
    );
    agent.on_worker_parked(1, commands::held(None));
    agent.on_worker_parked(0, commands::held(Some(2)));
    assert_eq!(does(&mut agent), [join(&[(0, Some(2)), (1, None)])]);
}

#[test]
fn workers_learn_the_rank_of_a_worker_that_failed_on_another_node() {
    let mut agent = running(&[0, 1]);
    let failure = Failure { global_rank: 5, ..killed(1) };
    let reason = "rank 5 failed; restart 1 of 3".to_owned();
    let view = View { round: Round(1), waiting: 1, reason: reason.clone(), failure: Some(failure), ..View::default() };
    agent.on_view(&view, Instant::now());
    let news = |local_rank| send(local_rank, ToWorker::PeerFailed { reason: reason.clone(), rank: Some(5) });
    assert_eq!(does(&mut agent), [Command::CancelStart, news(0), news(1)]);
}

/// A program that does not use the API is restarted as before, also if only one of the workers does not use it.
#[test]
fn a_worker_that_does_not_attend_ends_all_with_the_true_reason() {
    let not_yet = Command::Join { survival: Survival::NotYetAttended };
    for (attend, reason) in [(&[][..], &commands::UNATTENDED), (&[0], &not_yet), (&[1], &not_yet)] {
        let mut agent = running(attend);
        agent.on_interrupted(Round(1), "node1 is lost", Instant::now());
        assert_eq!(does(&mut agent), [stop(SIGTERM)], "{attend:?}");
        agent.on_stopped();
        assert_eq!(does(&mut agent), slice::from_ref(reason), "{attend:?}");
    }
    // The one that does not attend is the one that failed.
    let mut agent = running(&[0]);
    agent.on_worker_exited_badly(killed(1), Instant::now());
    assert!(does(&mut agent).contains(&worker_failed(0, &killed(1))));
}

/// It has to stop its workers. Those of other nodes need not end for that.
#[test]
fn a_node_that_was_cut_off_says_that_none_of_its_workers_survived() {
    let fenced = |agent: &mut AgentMachine, round| {
        agent.on_fenced(Round(round), "cut off for 15 s", Instant::now());
        agent.on_stopped();
        does(agent).pop()
    };
    assert_eq!(fenced(&mut running(&[0, 1]), 1), Some(join(&[])));
    assert_eq!(fenced(&mut interrupted(Instant::now()), 1), Some(join(&[])), "its workers were leaving their world");
    assert_eq!(fenced(&mut running(&[1]), 1), Some(Command::Join { survival: Survival::NotYetAttended }));
    assert_eq!(fenced(&mut running(&[]), 1), Some(commands::UNATTENDED));
    // A world that goes on, with a new worker that has not attended yet.
    let mut agent = joining();
    agent.on_placed(placement(2, Some(going_on(1))), Instant::now());
    agent.on_started();
    assert_eq!(fenced(&mut agent, 2), Some(join(&[])));
}

/// The ends of both connections are seen before the processes' ends. Workers that attended and end are not workers that never did.
#[test]
fn two_workers_that_die_in_one_instant_are_mended_in_place() {
    for deaf in [&[0, 1][..], &[1], &[0], &[]] {
        let now = Instant::now();
        let mut agent = running(&[0, 1]);
        deaf.iter().for_each(|local_rank| agent.on_worker_deaf(*local_rank));
        assert_eq!(does(&mut agent), []);
        agent.on_worker_exited_badly(killed(0), now);
        assert!(!does(&mut agent).contains(&stop(SIGTERM)), "{deaf:?}");
        agent.on_worker_exited_badly(killed(1), now);
        agent.on_failure_message(0, String::new(), true);
        (0..2).for_each(|local_rank| agent.on_worker_gone(local_rank));
        agent.on_interrupted(Round(1), "rank 0 failed; restart 1 of 3", now);
        assert_eq!(does(&mut agent).last(), Some(&join(&[])), "{deaf:?}");
    }
}

/// Another failure ends the world of one that has closed its connection.
#[test]
fn a_worker_that_attends_no_more_is_replaced_alone() {
    let mut agent = running(&[0, 1]);
    agent.on_worker_deaf(1);
    agent.on_interrupted(Round(1), "node1 is lost", Instant::now());
    assert_eq!(
        does(&mut agent),
        [Command::CancelStart, peer_failed(0, "node1 is lost"), Command::KillWorker { local_rank: 1 }]
    );
}

/// After a restart of all workers, which had another reason.
#[test]
fn a_program_that_has_used_the_api_is_known_to_use_it() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_placed(placement(2, Some(Resume::Restart { reason: "of node1".into() })), now);
    agent.on_stopped();
    agent.on_started();
    does(&mut agent);
    agent.on_interrupted(Round(2), "node1 is lost", now);
    let kill = |local_rank| Command::KillWorker { local_rank };
    assert_eq!(does(&mut agent), [Command::CancelStart, kill(0), kill(1)]);
    (0..2).for_each(|local_rank| agent.on_worker_gone(local_rank));
    assert_eq!(does(&mut agent), [join(&[])]);
}

/// Over a shared cell nobody could form a world of workers that survive.
#[test]
fn workers_do_not_survive_where_no_world_can_be_formed_of_them() {
    let mut agent = new_agent();
    agent.on_placed(placement(1, None), Instant::now());
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    does(&mut agent);
    agent.on_interrupted(Round(1), "node1 is lost", Instant::now());
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
}

#[test]
fn a_new_worker_of_a_world_that_goes_on_is_replaced_alone() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_placed(placement(2, Some(going_on(1))), now);
    agent.on_started();
    does(&mut agent);
    // Worker 1 has not attended yet.
    agent.on_interrupted(Round(2), "node1 is lost", now);
    assert_eq!(
        does(&mut agent),
        [Command::CancelStart, peer_failed(0, "node1 is lost"), Command::KillWorker { local_rank: 1 }]
    );
    agent.on_worker_parked(0, commands::held(Some(4)));
    agent.on_worker_exited_badly(killed(1), now);
    assert_eq!(does(&mut agent), [], "its end is no failure");
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [join(&[(0, Some(4))])]);
}

/// The first failure of a round is a worker's that was parked when the round began.
#[test]
fn a_parked_worker_that_ends_fails_the_round_that_counts_on_it() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_worker_exited_badly(killed(0), now);
    assert_eq!(does(&mut agent), []);
    agent.on_placed(placement(2, Some(going_on(1))), now);
    let did = does(&mut agent);
    assert!(did.contains(&Command::CancelStart) && did.contains(&Command::Listen { local_rank: 0 }), "{did:?}");
    agent.on_failure_message(0, String::new(), true);
    assert!(matches!(does(&mut agent)[..], [Command::Report(_)]));
    agent.on_interrupted(Round(2), "rank 0 failed", now);
    assert_eq!(does(&mut agent), []);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [join(&[])]);
    // Nothing is left of it when the round begins.
    let mut agent = joining();
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    agent.on_placed(placement(2, Some(going_on(1))), now);
    agent.on_failure_message(0, String::new(), true);
    agent.on_interrupted(Round(2), "rank 0 failed", now);
    assert_eq!(does(&mut agent).last(), Some(&join(&[])));
}

#[test]
fn workers_that_have_parked_are_restarted_if_those_of_another_node_were() {
    let now = Instant::now();
    let restart = Some(Resume::Restart { reason: "node1's workers do not use elastic_rs.elastic".into() });
    let mut agent = joining();
    agent.on_placed(placement(2, restart.clone()), now);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [start(2, restart.clone(), &[0, 1])]);
    // The round may be over before they have ended.
    let mut agent = joining();
    agent.on_placed(placement(2, restart), now);
    does(&mut agent);
    agent.on_interrupted(Round(2), "node1 is lost", now);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join(&[])]);
}

#[test]
fn whoever_does_not_park_in_time_is_replaced_alone() {
    let now = Instant::now();
    let mut agent = interrupted(now);
    agent.on_worker_parked(0, commands::held(Some(3)));
    does(&mut agent);
    assert_eq!(agent.next_deadline(), Some(now + PARK_LIMIT));
    agent.on_tick(now + PARK_LIMIT);
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 1 }]);
    agent.on_worker_exited_badly(killed(1), now + PARK_LIMIT);
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [join(&[(0, Some(3))])]);
}

/// Gloo may forget an operation when a connection ends.
#[test]
fn whoever_waits_in_a_collective_that_does_not_end_is_replaced_alone() {
    let now = Instant::now();
    let mut agent = interrupted(now);
    agent.on_worker_parked(0, commands::held(Some(3)));
    does(&mut agent);
    agent.on_worker_hung(0, "collective 7 of group 0"); // it has left meanwhile
    assert_eq!(does(&mut agent), []);
    agent.on_worker_hung(1, "collective 7 of group 0");
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 1 }]);
    agent.on_worker_exited_badly(killed(1), now);
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [join(&[(0, Some(3))])]);
    agent.on_worker_hung(1, "collective 7 of group 0");
    assert_eq!(does(&mut agent), []);
}

/// A hung device holds the worker that was killed.
#[test]
fn a_killed_worker_that_does_not_end_ends_all() {
    let now = Instant::now();
    let mut agent = interrupted(now);
    agent.on_worker_parked(0, commands::held(Some(3)));
    agent.on_tick(now + PARK_LIMIT);
    does(&mut agent);
    assert_eq!(agent.next_deadline(), Some(now + PARK_LIMIT * 2));
    agent.on_tick(now + PARK_LIMIT * 2);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
}

#[test]
fn a_worker_that_lets_go_of_its_agent_while_it_is_parked_is_replaced() {
    let mut agent = joining();
    agent.on_worker_deaf(0);
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 0 }]);
}

/// A change.
fn announced() -> WorldChange {
    WorldChange { round: Round(1), flags: 2, reason: "node2 waits".into() }
}

fn change(agent: &mut AgentMachine) {
    for number in [1, 2] {
        agent.on_change(number, &announced());
        agent.on_change(number, &announced());
        let message = ToWorker::Change { seq: number, flags: 2, reason: "node2 waits".into() };
        let reported = |local_rank| send(local_rank, message.clone());
        assert_eq!(does(agent), [reported(0), reported(1)]);
        agent.on_worker_counted(0, number, 41);
        assert_eq!(does(agent), []);
        agent.on_worker_counted(1, 7, 40);
        assert_eq!(does(agent), [], "of another change");
        agent.on_worker_counted(1, number, 40);
        assert_eq!(does(agent), [Command::Counted { round: Round(1), count: 41 }]);
        if number == 1 {
            // Its reason is gone.
            agent.on_raise_at(1, &announced(), NEVER, Instant::now());
            let reported = |local_rank| send(local_rank, ToWorker::RaiseAt { seq: 1, check: NEVER });
            assert_eq!(does(agent), [reported(0), reported(1)]);
        }
    }
}

/// The world is to change at check 43, and the workers are notified.
fn raise(agent: &mut AgentMachine, now: Instant) {
    change(agent);
    agent.on_raise_at(2, &announced(), 43, now);
    let reported = |local_rank| send(local_rank, ToWorker::RaiseAt { seq: 2, check: 43 });
    assert_eq!(does(agent), [reported(0), reported(1)]);
}

/// An agent whose workers run until the check at which their world changes.
fn awaiting_the_check(now: Instant) -> AgentMachine {
    let mut agent = running(&[0, 1]);
    raise(&mut agent, now);
    agent
}

#[test]
fn a_change_of_membership_is_raised_at_one_check() {
    let mut agent = awaiting_the_check(Instant::now());
    agent.on_worker_parked(0, commands::held(Some(5)));
    agent.on_worker_parked(1, commands::held(Some(5)));
    assert_eq!(does(&mut agent), [join(&[(0, Some(5)), (1, Some(5))])]);
}

#[test]
fn a_failure_meanwhile_is_sent_to_those_who_wait_for_the_check() {
    let now = Instant::now();
    for own in [true, false] {
        let mut agent = awaiting_the_check(now);
        if own {
            agent.on_worker_exited_badly(killed(1), now);
        } else {
            agent.on_interrupted(Round(1), "node1 is lost", now);
        }
        let did = does(&mut agent);
        let reported =
            |local_rank| matches!(&did[1..], [Command::Send { local_rank: it, .. }, ..] if *it == local_rank);
        assert!(reported(0), "{did:?}");
    }
}

#[test]
fn a_check_that_is_not_reached_ends_the_world() {
    let now = Instant::now();
    let mut agent = awaiting_the_check(now);
    agent.on_tick(now + RAISE_LIMIT);
    assert_eq!(does(&mut agent).len(), 3, "both are notified");
    assert_eq!(agent.next_deadline(), Some(now + RAISE_LIMIT + PARK_LIMIT));
}

#[test]
fn a_world_that_cannot_be_formed_is_left_by_all_and_whoever_stays_is_replaced() {
    let now = Instant::now();
    let mut agent = running(&[0, 1]);
    let stuck = Failure { exit: "no progress towards its world".into(), returncode: 1, ..killed(1) };
    agent.on_worker_stuck(stuck.clone(), now);
    let report = Command::Report(Box::new(stuck.clone()));
    assert_eq!(does(&mut agent), [Command::CancelStart, worker_failed(0, &stuck), worker_failed(1, &stuck), report]);
    agent.on_worker_stuck(Failure { local_rank: 0, ..stuck }, now);
    assert_eq!(does(&mut agent), [], "the others find the same");
    agent.on_interrupted(Round(1), "rank 1 made no progress; restart 1 of 3", now);
    agent.on_worker_parked(1, commands::held(Some(4)));
    agent.on_tick(now + PARK_LIMIT);
    assert_eq!(does(&mut agent), [Command::KillWorker { local_rank: 0 }], "it hangs");
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    assert_eq!(does(&mut agent), [join(&[(1, Some(4))])]);
}

/// To go back to its last commit, for example because of a NaN.
#[test]
fn a_worker_that_leaves_its_world_on_purpose_lives_and_costs_no_restart() {
    let now = Instant::now();
    let mut agent = running(&[0, 1]);
    let raised =
        Failure { exit: "HorovodInternalError".into(), returncode: STILL_ALIVE, message: "nan".into(), ..killed(1) };
    agent.on_worker_raised(raised.clone(), now);
    let reported = raised.to_string();
    assert!(reported.ends_with("left its world with HorovodInternalError: nan"), "{reported}");
    let failure = Box::new(Failure { counts: false, ..raised.clone() });
    let report = Command::Report(failure);
    assert_eq!(does(&mut agent), [Command::CancelStart, worker_failed(0, &raised), worker_failed(1, &raised), report]);
    agent.on_worker_raised(Failure { local_rank: 0, ..raised }, now);
    assert_eq!(does(&mut agent), [], "all ranks may raise it");
    agent.on_interrupted(Round(1), &reported, now);
    agent.on_worker_parked(0, commands::held(Some(4)));
    does(&mut agent);
    agent.on_worker_parked(1, commands::held(Some(4)));
    assert_eq!(does(&mut agent), [join(&[(0, Some(4)), (1, Some(4))])]);
    assert_eq!(agent.restarts(), 0);
}

/// Over etcd, for example. Its failure counts, so it does not begin from the checkpoint for ever.
#[test]
fn a_worker_that_leaves_on_purpose_where_none_can_survive_is_refused_with_the_reason() {
    let mut agent = new_agent();
    does(&mut agent);
    agent.on_placed(placement(1, None), Instant::now());
    agent.on_started();
    for local_rank in [0, 1] {
        agent.on_worker_attends(local_rank);
    }
    does(&mut agent);
    let raised = Failure { exit: "HorovodInternalError".into(), returncode: STILL_ALIVE, ..killed(1) };
    agent.on_worker_raised(raised, Instant::now());
    let reason =
        "its script has raised HorovodInternalError itself, and this rendezvous cannot change the world in place";
    assert_eq!(does(&mut agent), [send(1, ToWorker::Refused { reason: reason.into() })]);
    assert!(agent.is_running());
}

#[test]
fn a_node_that_comes_and_cannot_take_the_state_leaves_alone() {
    let newcomer = |survivors| {
        let mut agent = new_agent();
        does(&mut agent);
        agent.on_placed(placement(2, Some(going_on(survivors))), Instant::now());
        agent.on_started();
        agent.on_worker_attends(1);
        does(&mut agent);
        agent.on_worker_unfit(Failure { message: "no group 2".into(), ..killed(1) });
        let commands = does(&mut agent);
        (agent, commands)
    };
    let (mut agent, commands) = newcomer(2);
    let [Command::Leave { reason, signal: None }, Command::Stop(_)] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(reason, "its workers cannot take the state of the others: no group 2");
    agent.on_stopped();
    let ends = does(&mut agent);
    let [Command::End(outcome)] = &ends[..] else { panic!("{ends:?}") };
    assert!(matches!(**outcome, Outcome::Unfit { .. }), "the job goes on: {outcome:?}");
    assert_eq!(newcomer(0).1, [], "in a job's first world nobody has a better state");
    let mut agent = joining();
    agent.on_placed(placement(2, Some(going_on(1))), Instant::now());
    agent.on_started();
    agent.on_worker_attends(1);
    does(&mut agent);
    agent.on_worker_unfit(killed(1));
    assert_eq!(does(&mut agent), [], "the other worker has the state: the failure of this one follows");
}

#[test]
fn a_node_that_was_in_the_world_does_not_leave_because_its_only_worker_is_new() {
    let now = Instant::now();
    let mut agent = interrupted(now);
    for local_rank in [0, 1] {
        agent.on_worker_exited_badly(killed(local_rank), now);
        agent.on_worker_gone(local_rank);
    }
    assert_eq!(does(&mut agent).last(), Some(&join(&[])));
    agent.on_placed(placement(2, Some(going_on(2))), now);
    agent.on_started();
    agent.on_worker_attends(1);
    does(&mut agent);
    agent.on_worker_unfit(killed(1));
    assert_eq!(does(&mut agent), [], "a fixed job would wait for this node for ever");
    assert!(agent.is_running());
}

#[test]
fn a_node_whose_first_world_was_never_formed_is_still_new() {
    let now = Instant::now();
    let mut agent = interrupted(now);
    for local_rank in [0, 1] {
        agent.on_worker_parked(local_rank, HeldState::default());
    }
    does(&mut agent);
    agent.on_placed(placement(2, Some(going_on(2))), now);
    agent.on_started();
    does(&mut agent);
    agent.on_worker_unfit(killed(1));
    assert!(matches!(does(&mut agent)[..], [Command::Leave { .. }, Command::Stop(_)]));
}

#[test]
fn a_node_that_counts_its_own_restarts_counts_none_for_a_worker_that_leaves_on_purpose() {
    let now = Instant::now();
    let mut agent = running_as(commands::new_agent(Policy { budget: Budget::Node(0), ..commands::policy() }), &[0, 1]);
    let raised = Failure { exit: "HorovodInternalError".into(), returncode: STILL_ALIVE, ..killed(1) };
    agent.on_worker_raised(raised, now);
    for local_rank in [0, 1] {
        agent.on_worker_parked(local_rank, commands::held(Some(4)));
    }
    assert_eq!(does(&mut agent).last(), Some(&join(&[(0, Some(4)), (1, Some(4))])));
    assert_eq!(agent.restarts(), 0);
}

/// A worker says so when it has waited for long. Its world may be over by then.
#[test]
fn a_world_that_is_over_cannot_be_stuck() {
    let mut agent = interrupted(Instant::now());
    agent.on_worker_parked(0, commands::held(Some(4)));
    does(&mut agent);
    for local_rank in [0, 1] {
        agent.on_worker_stuck(Failure { local_rank, ..killed(0) }, Instant::now());
        assert_eq!(does(&mut agent), []);
    }
}

/// After its last check a program saves its results, and ends. The check at which the world was to change never comes.
#[test]
fn a_job_that_finishes_before_the_check_is_done_and_not_started_again() {
    let now = Instant::now();
    let mut agent = awaiting_the_check(now);
    for local_rank in [0, 1] {
        agent.on_worker_deaf(local_rank);
        assert_eq!(does(&mut agent), [], "it ends by itself");
        agent.on_worker_succeeded(local_rank, now);
        agent.on_worker_gone(local_rank);
    }
    assert_eq!(does(&mut agent), [Command::Done(Round(1))]);
    agent.on_closed(Verdict::AllDone { round: Round(1), nodes: 2 });
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Succeeded))]);
}

#[test]
fn a_job_that_is_declared_a_success_before_the_check_ends_with_its_workers() {
    let now = Instant::now();
    let mut agent = awaiting_the_check(now);
    agent.on_closed(Verdict::Succeeded { by: "node1".into() });
    does(&mut agent);
    (0..2).for_each(|local_rank| agent.on_worker_succeeded(local_rank, now));
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Succeeded))]);
}

#[test]
fn a_worker_that_finishes_before_the_check_while_the_other_reaches_it_is_started_again() {
    let now = Instant::now();
    let mut agent = awaiting_the_check(now);
    agent.on_worker_succeeded(1, now);
    agent.on_worker_parked(0, commands::held(Some(5)));
    does(&mut agent);
    agent.on_worker_gone(1);
    assert_eq!(does(&mut agent), [join(&[(0, Some(5))])]);
}

/// The others may have formed a world without this node.
#[test]
fn a_node_that_was_cut_off_stops_its_workers_wherever_they_are() {
    let now = Instant::now();
    let mut agent = running(&[0, 1]);
    agent.on_fenced(Round(1), "cut off", now);
    assert_eq!(does(&mut agent), [stop(SIGKILL)], "no worker of it may go on");
    let mut agent = interrupted(now);
    does(&mut agent);
    agent.on_fenced(Round(1), "cut off", now);
    assert_eq!(does(&mut agent), [stop(SIGKILL)], "they have not parked yet");
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join(&[])]);
    let mut agent = awaiting_the_check(now);
    agent.on_fenced(Round(1), "cut off", now);
    assert_eq!(does(&mut agent), [stop(SIGKILL)], "they run until the check");
}

/// They hold the state of a world that may have gone on without them.
#[test]
fn workers_that_wait_for_a_rank_end_when_their_node_was_cut_off() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_survivors_lost("cut off");
    assert_eq!(does(&mut agent), [Command::Kill]);
    agent.on_placed(placement(2, Some(going_on(3))), now);
    assert_eq!(does(&mut agent), [], "something may be left of them");
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [start(2, Some(going_on(3)), &[0, 1])], "all are new");
}

/// The round that was to be started is over before anything is left of them.
#[test]
fn a_node_whose_waiting_workers_were_lost_says_that_none_survived() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_survivors_lost("cut off");
    agent.on_placed(placement(2, Some(going_on(3))), now);
    does(&mut agent);
    agent.on_interrupted(Round(2), "node1 is lost", now);
    agent.on_worker_gone(0);
    agent.on_stopped();
    assert_eq!(does(&mut agent), [join(&[])]);
}

/// Their guards have killed them, and the agent has seen it, before it has its place.
#[test]
fn workers_that_waited_and_are_gone_are_no_failure_if_their_node_was_cut_off() {
    let now = Instant::now();
    let mut agent = joining();
    agent.on_worker_exited_badly(killed(0), now);
    agent.on_worker_gone(0);
    agent.on_stopped();
    agent.on_survivors_lost("cut off");
    agent.on_placed(placement(2, Some(going_on(3))), now);
    assert_eq!(does(&mut agent), [start(2, Some(going_on(3)), &[0, 1])]);
}

/// An agent that is asked to leave, and asks for a check.
fn leaving(now: Instant) -> AgentMachine {
    let mut agent = running(&[0, 1]);
    agent.on_signal(SIGTERM, now);
    assert_eq!(does(&mut agent), [Command::WillLeave { round: Round(1), signal: SIGTERM }]);
    agent
}

#[test]
fn a_node_that_gets_sigterm_leaves_at_a_check() {
    let now = Instant::now();
    let mut agent = leaving(now);
    raise(&mut agent, now);
    (0..2).for_each(|local_rank| agent.on_worker_parked(local_rank, commands::held(Some(5))));
    let did = does(&mut agent);
    assert!(
        matches!(&did[..], [Command::Parked(Round(1)), Command::Leave { signal: Some(SIGTERM), .. }, Command::Stop(_)]),
        "{did:?}"
    );
    agent.on_stopped();
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Signal(SIGTERM)))]);
}

/// The step that leads to the check may take longer than the coordinator's answer.
#[test]
fn a_node_that_leaves_waits_for_a_known_check_as_long_as_its_grace() {
    let now = Instant::now();
    let grace = commands::policy().grace;
    assert!(grace > LEAVE_LIMIT);
    let mut agent = leaving(now);
    raise(&mut agent, now + LEAVE_LIMIT / 2);
    assert_eq!(agent.next_deadline(), Some(now + grace));
    agent.on_tick(now + grace);
    assert!(matches!(does(&mut agent)[0], Command::Leave { .. }));
}

#[test]
fn a_node_leaves_without_a_check_if_there_is_none_in_time_or_no_reason_to_wait() {
    let now = Instant::now();
    let leaves = |agent: &mut AgentMachine, why: &str| {
        let did = does(agent);
        assert!(matches!(&did[..], [Command::Leave { .. }, Command::Stop(_), ..]), "{why}: {did:?}");
        agent.on_stopped();
        assert_eq!(does(agent).last(), Some(&Command::End(Box::new(Outcome::Signal(SIGTERM)))), "{why}");
    };
    let mut agent = leaving(now);
    assert_eq!(agent.next_deadline(), Some(now + LEAVE_LIMIT));
    agent.on_tick(now + LEAVE_LIMIT);
    leaves(&mut agent, "too late");
    let mut agent = leaving(now);
    agent.on_leave_unanswered();
    leaves(&mut agent, "a coordinator that cannot answer");
    let mut agent = leaving(now);
    agent.on_signal(SIGTERM, now);
    leaves(&mut agent, "a second signal");
    let mut agent = leaving(now);
    agent.on_interrupted(Round(1), "node1 is lost", now);
    leaves(&mut agent, "a failure elsewhere");
    let mut agent = leaving(now);
    agent.on_worker_exited_badly(killed(0), now);
    leaves(&mut agent, "a failure here");
    let mut agent = leaving(now);
    agent.on_closed(Verdict::Failed { by: "node1".into(), cause: "x".into(), failure: None, class: EndClass::Program });
    leaves(&mut agent, "the job has failed");
    let mut agent = running(&[0]);
    agent.on_signal(SIGTERM, now);
    leaves(&mut agent, "a worker does not attend");
    let mut agent = new_agent();
    does(&mut agent);
    agent.on_placed(Placement { world_size: 1, ..placement(1, Some(FIRST)) }, now);
    agent.on_started();
    (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    does(&mut agent);
    agent.on_signal(SIGTERM, now);
    leaves(&mut agent, "there is no other node");
}

#[test]
fn parked_workers_are_stopped_before_the_agent_ends() {
    let closed = JoinError::Closed {
        verdict: Verdict::Failed { by: "node1".into(), cause: "x".into(), failure: None, class: EndClass::Program },
        spare: false,
    };
    let mut agent = joining();
    agent.on_no_placement(closed);
    assert_eq!(does(&mut agent), [stop(SIGTERM)]);
    agent.on_stopped();
    assert!(matches!(&does(&mut agent)[..], [Command::End(_)]));
    let mut agent = joining();
    agent.on_signal(SIGTERM, Instant::now());
    assert!(matches!(&does(&mut agent)[..], [Command::Leave { .. }, Command::Stop(_)]));
}

/// Its workers are new in the next world.
#[test]
fn a_node_that_has_finished_goes_on_in_place() {
    let now = Instant::now();
    let mut agent = running(&[0, 1]);
    (0..2).for_each(|local_rank| agent.on_worker_succeeded(local_rank, now));
    assert_eq!(does(&mut agent), [Command::Done(Round(1))]);
    agent.on_interrupted(Round(1), "node1 is lost", now);
    let kill = |local_rank| Command::KillWorker { local_rank };
    assert_eq!(does(&mut agent), [Command::CancelStart, kill(0), kill(1)], "something of them may be left");
    (0..2).for_each(|local_rank| agent.on_worker_gone(local_rank));
    assert_eq!(does(&mut agent), [join(&[])]);
}
