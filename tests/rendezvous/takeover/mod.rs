//! The process that leads a job ends, and another one of the list leads it from then on.

mod ensemble;
mod random;
mod sockets;

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{Round, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;

use self::ensemble::Job;
use crate::bench::failure;

const SECOND: Duration = Duration::from_secs(1);

fn settings(min: u32, max: u32) -> Settings {
    Settings { max_restarts: Some(3), last_call_timeout: SECOND, settle_timeout: SECOND, ..Settings::new(min, max) }
}

/// A job whose nodes are in round 1, at endpoints of a list.
fn formed(endpoints: usize) -> Job {
    let count = endpoints as u32;
    let mut job = Job::new(endpoints, settings(count - 1, count));
    (0..endpoints).for_each(|place| _ = job.start(place));
    job.until(|job| (0..endpoints).all(|node| is_placed(job, node, 1)));
    job
}

/// Whether a node has joined this round.
fn is_placed(job: &Job, node: usize, round: u64) -> bool {
    job.agents[node].outcome.as_ref().and_then(|it| it.as_ref().ok()).is_some_and(|it| it.round == Round(round))
}

fn rank(job: &Job, node: usize) -> u32 {
    job.agents[node].outcome.as_ref().and_then(|it| it.as_ref().ok()).map(|it| it.rank).unwrap()
}

/// The agent of this node does what PyTorch's does: when the world must re-form, it joins again.
fn rejoin(job: &mut Job) {
    let now = job.now;
    for agent in &mut job.agents {
        let placed = matches!(agent.outcome, Some(Ok(_)));
        if placed && agent.machine.view().waiting > 0 {
            agent.outcome = None;
            agent.machine.join(7, None, None, Duration::from_secs(60), now);
        }
    }
}

#[test]
fn the_first_of_the_list_leads_and_a_list_costs_half_a_second() {
    let mut job = Job::new(3, settings(3, 3));
    [2, 1, 0].into_iter().for_each(|place| _ = job.start(place));
    let took = job.until(|job| (0..3).all(|node| is_placed(job, node, 1)));
    assert_eq!(job.leader(), Some(0));
    assert!(took < Duration::from_millis(900), "{took:?}");
}

#[test]
fn a_node_says_which_endpoint_is_silent() {
    let mut job = Job::new(3, settings(2, 3));
    job.cut = vec![(0, 2), (1, 2)];
    job.start(0);
    job.start(1);
    job.pass(5 * SECOND);
    assert_eq!(job.leader(), None);
    for agent in &job.agents {
        let (_, why) = agent.machine.waits().unwrap();
        assert!(why.contains("in the list n2:29400 did not answer"), "{why}");
    }
}

#[test]
fn a_member_takes_over_and_remembers_the_restarts() {
    let mut job = formed(3);
    let now = job.now;
    job.agents[1].machine.report_failure(Round(1), *failure());
    job.until(|job| job.agents[2].machine.view().waiting > 0);
    assert_eq!(job.agents[2].machine.view().restart, 1);
    rejoin(&mut job);
    job.until(|job| (0..3).all(|node| is_placed(job, node, 2)));
    assert!(job.now > now);
    job.pass(6 * SECOND);
    let ranks = [rank(&job, 1), rank(&job, 2)];

    job.kill(0);
    let led = job.until(|job| job.leader().is_some());
    assert!(led < Duration::from_millis(400), "{led:?}");
    assert_eq!(job.leader(), Some(1));
    let known = job.until(|job| job.agents[1].machine.view().waiting > 0 && job.agents[2].machine.view().waiting > 0);
    rejoin(&mut job);
    let formed = job.until(|job| (1..3).all(|node| is_placed(job, node, 3)));
    assert!(led + known + formed < Duration::from_millis(2500), "{led:?}, {known:?}, {formed:?}: {:#?}", job.notes);
    assert_eq!([rank(&job, 1), rank(&job, 2)].map(|rank| rank + 1), ranks, "rank 0 has ended, and the others move up");
    for node in 1..3 {
        // The loss of a node does not count.
        assert_eq!(job.agents[node].outcome.as_ref().unwrap().as_ref().unwrap().restart, 1);
        assert_eq!(job.agents[node].machine.view().fenced, None);
    }
}

#[test]
fn a_process_that_is_started_again_follows() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    job.kill(0);
    job.start(0);
    job.until(|job| job.leader() == Some(1));
    for _ in 0..20 {
        job.pass(SECOND);
        rejoin(&mut job);
        assert_eq!(job.leader(), Some(1));
    }
    assert!((1..4).all(|node| job.agents[node].machine.view().round >= Round(2)), "it joins the job: {:#?}", job.notes);
}

#[test]
fn each_may_end_in_turn() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    for turn in 0..9 {
        let leader = job.leader().unwrap();
        job.kill(leader);
        job.until(|job| job.leader().is_some());
        job.start(leader);
        for _ in 0..10 {
            job.pass(SECOND);
            rejoin(&mut job);
        }
        assert!(job.leader().is_some_and(|it| it != leader), "turn {turn}");
    }
    let round = |job: &Job, node: usize| job.agents[node].machine.view().round;
    let last = job.agents.len() - 1;
    assert!(round(&job, last) > Round(9), "{:?}", round(&job, last));
}

#[test]
fn of_two_the_one_that_is_left_leads() {
    let mut job = formed(2);
    job.pass(6 * SECOND);
    job.kill(0);
    let led = job.until(|job| job.leader() == Some(1));
    let known = job.until(|job| job.agents[1].machine.view().waiting > 0);
    rejoin(&mut job);
    let formed = job.until(|job| is_placed(job, 1, 2));
    assert!(led + known + formed < Duration::from_millis(2500), "{led:?}, {known:?}, {formed:?}: {:#?}", job.notes);
}

/// Its guards would keep workers for ever otherwise, if it is stopped after another one has begun to lead.
#[test]
fn the_node_of_the_leader_stops_its_workers_as_any_other() {
    let job = formed(3);
    assert!(job.agents[0].machine.view().hosted);
    assert!(job.agents[0].machine.workers_until().is_some(), "its workers have a deadline");
}

#[test]
fn nobody_leads_beside_one_that_is_cut_off() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    job.cut = vec![(0, 1), (0, 2)];
    for _ in 0..60 {
        job.pass(SECOND);
        assert_eq!(job.leader(), Some(0), "it is not proven dead");
    }
}

#[test]
fn what_voters_do_not_hold_is_not_said() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    job.cut = vec![(0, 1), (0, 2)];
    job.agents[0].machine.report_failure(Round(1), *failure());
    job.pass(9 * SECOND);
    assert!(job.agents.iter().all(|agent| agent.machine.view().waiting == 0), "{:#?}", job.notes);
    // Once their leases are over, nobody could lead in its place.
    let said = job.until(|job| job.agents.iter().all(|agent| agent.machine.view().waiting > 0));
    assert!(said < 7 * SECOND, "{said:?}");
    assert!(job.agents.iter().all(|agent| agent.machine.view().fenced.is_none()));
}

#[test]
fn a_verdict_is_remembered() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    job.agents[1].machine.close(Verdict::Succeeded { by: "n1".into() });
    job.until(|job| job.agents[2].machine.view().closed.is_some());
    job.kill(0);
    job.until(|job| job.leader().is_some());
    let late = job.start(0);
    job.until(|job| job.agents[late].outcome.is_some());
    assert!(
        matches!(&job.agents[late].outcome, Some(Err(error)) if error.is_after_success()),
        "{:?}",
        job.agents[late].outcome
    );
}

#[test]
fn a_process_that_leaves_hands_over() {
    let mut job = formed(3);
    job.pass(6 * SECOND);
    job.agents[0].machine.leave("SIGTERM".into(), Some(15));
    let led = job.until(|job| job.leader().is_some_and(|leader| leader != 0));
    assert!(led < 2 * SECOND, "{led:?}");
    let known = job.until(|job| job.agents[1].machine.view().waiting > 0 && job.agents[2].machine.view().waiting > 0);
    rejoin(&mut job);
    let formed = job.until(|job| (1..3).all(|node| is_placed(job, node, 2)));
    assert!(led + known + formed < Duration::from_secs(4), "{led:?}, {known:?}, {formed:?}: {:#?}", job.notes);
}
