//! Random histories of a job with a list: processes die and come back, are cut from one another and leave, and workers fail.

use std::collections::BTreeSet;
use std::time::Duration;

use elastic_rs::rendezvous::messages::message::Round;
use proptest::collection::vec;
use proptest::prelude::*;

use super::ensemble::Job;
use super::{SECOND, rejoin, settings};
use crate::bench::failure;

const ENDPOINTS: usize = 3;
/// How often the workers of the nodes look at what they are told.
const LOOKS_EVERY: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
enum Action {
    Kill(usize),
    Start(usize),
    Leave(usize),
    Fail(usize),
    Cut(usize, usize),
    Heal,
    /// For so many tenths of a second.
    Pass(u64),
}

fn action() -> impl Strategy<Value = Action> {
    let place = 0..ENDPOINTS;
    prop_oneof![
        3 => place.clone().prop_map(Action::Kill),
        4 => place.clone().prop_map(Action::Start),
        1 => place.clone().prop_map(Action::Leave),
        2 => place.clone().prop_map(Action::Fail),
        1 => (place.clone(), place).prop_map(|(a, b)| Action::Cut(a, b)),
        1 => Just(Action::Heal),
        4 => (0..3_u64).prop_map(Action::Pass),
        4 => (10..200_u64).prop_map(Action::Pass),
    ]
}

/// The node at an endpoint that was started last, if its process lives and it has not left.
fn node_at(job: &Job, place: usize) -> Option<usize> {
    (0..job.agents.len()).rev().find(|node| job.agents[*node].place == place && job.is_alive(*node))
}

fn act(job: &mut Job, action: &Action) {
    let now = job.now;
    match *action {
        Action::Kill(place) if job.processes[place].is_some() => job.kill(place),
        Action::Start(place) if job.processes[place].is_none() => _ = job.start(place),
        Action::Kill(_) | Action::Start(_) => {}
        Action::Leave(place) => {
            if let Some(node) = node_at(job, place) {
                job.agents[node].machine.leave("SIGTERM".into(), Some(15));
                pass(job, SECOND / 10);
                job.kill(place); // its process ends then
            }
        }
        Action::Fail(place) => {
            let node = node_at(job, place);
            let placed = node.and_then(|node| Some((node, job.agents[node].outcome.as_ref()?.as_ref().ok()?.round)));
            if let Some((node, round)) = placed {
                job.agents[node].machine.report_failure(round, *failure());
            }
        }
        Action::Cut(a, b) if a != b => job.cut.push((a, b)),
        Action::Cut(..) => {}
        Action::Heal => job.cut.clear(),
        Action::Pass(tenths) => pass(job, SECOND / 10 * tenths as u32),
    }
    assert!(job.now >= now);
    check(job);
}

fn pass(job: &mut Job, time: Duration) {
    let end = job.now + time;
    while job.now < end {
        job.pass(LOOKS_EVERY.min(end - job.now));
        rejoin(job);
        check(job);
    }
}

/// One leader at most, and workers of one world at most.
fn check(job: &Job) {
    job.leader();
    let runs = |node: &usize| {
        let view = job.agents[*node].machine.view();
        job.is_alive(*node)
            && view.waiting == 0
            && view.fenced.is_none()
            && view.closed.is_none()
            && view.failed.is_none()
    };
    let placed = |node: usize| job.agents[node].outcome.as_ref()?.as_ref().ok().map(|placement| placement.world);
    let worlds: BTreeSet<_> = (0..job.agents.len()).filter(runs).filter_map(placed).collect();
    assert!(worlds.len() < 2, "worlds {worlds:?} run beside each other: {:#?}", job.notes);
}

/// The highest restart number that a living node has been told.
fn restart(job: &Job) -> u32 {
    let told = |node: usize| job.agents[node].machine.view().restart;
    (0..job.agents.len()).filter(|node| job.is_alive(*node)).map(told).max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn there_is_one_leader_and_one_world_at_most(actions in vec(action(), 1..25)) {
        let mut job = Job::new(ENDPOINTS, settings(1, ENDPOINTS as u32));
        (0..ENDPOINTS).for_each(|place| _ = job.start(place));
        pass(&mut job, 3 * SECOND);
        actions.iter().for_each(|action| act(&mut job, action));
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// As long as each has time to come back, and the others have leases.
    #[test]
    fn somebody_leads_and_counts_on_however_often_single_ones_die(turns in vec((0..ENDPOINTS, any::<bool>(), 200..400_u64), 1..6)) {
        let mut job = Job::new(ENDPOINTS, settings(2, ENDPOINTS as u32));
        (0..ENDPOINTS).for_each(|place| _ = job.start(place));
        pass(&mut job, 3 * SECOND);
        let mut counted = 0;
        for (place, fails, tenths) in turns {
            if fails && counted < 3 {
                act(&mut job, &Action::Fail((place + 1) % ENDPOINTS));
                pass(&mut job, 5 * SECOND);
                prop_assert!(restart(&job) == counted + 1, "{:#?}", job.notes);
                counted += 1;
            }
            act(&mut job, &Action::Kill(place));
            pass(&mut job, 3 * SECOND);
            prop_assert!(job.leader().is_some(), "{:#?}", job.notes);
            act(&mut job, &Action::Start(place));
            pass(&mut job, SECOND / 10 * tenths as u32);
            prop_assert!(restart(&job) == counted, "{} is not {counted}: {:#?}", restart(&job), job.notes);
            let rounds: BTreeSet<Round> = (0..ENDPOINTS)
                .filter_map(|place| node_at(&job, place))
                .map(|node| job.agents[node].machine.view().round)
                .collect();
            prop_assert!(rounds.len() == 1, "all are in one world: {rounds:?}, {:#?}", job.notes);
        }
    }
}
