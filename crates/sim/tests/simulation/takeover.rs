//! Simulations of jobs with a list of endpoints. The checks are in `crates/sim/src/takeover/checks.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::{Duration, Instant};

use crate::seeds::{asked_for, live_through};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs_sim::engine::Model;
use elastic_rs_sim::engine::history::Failure;
use elastic_rs_sim::engine::paths::Partition;
use elastic_rs_sim::takeover::{Action, Job, Mutation, Options, Report, live, live_with};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn invariants_hold_for_all_seeds() {
    let began = Instant::now();
    let lived = live_through(asked_for(400), live, "simulation takeover::invariants_hold_for_all_seeds");
    let sum = |count: fn(&Report) -> u64| lived.iter().map(count).sum::<u64>();
    println!(
        "{} seeds in {:.1} s: {} rounds, {} take-overs, {} of them promised",
        lived.len(),
        began.elapsed().as_secs_f64(),
        sum(|it| it.rounds),
        sum(|it| it.takeovers),
        sum(|it| it.promises)
    );
}

/// What a process was told of a leader went on from one to another after that one's end. And a leader that ended recorded as lost whom it had
/// sent away. A leader named successors that had no lease yet, or could not know that a silent voter counts no more.
#[test]
fn seeds_that_have_found_defects_pass() {
    for seed in [16732, 25999, 27506, 25928, 17278, 38469] {
        live(seed, false).unwrap_or_else(|failure| panic!("seed {seed}: {}", failure.violation));
    }
}

/// Each mistake, and a seed from which on an invariant shows it soon.
const MISTAKES: [(Mutation, u64); 9] = [
    (Mutation::KeepsItsId, 0),
    (Mutation::RefusalRenews, 80),
    (Mutation::SaidEarly, 450),
    (Mutation::NobodyIsWaitedFor, 340),
    (Mutation::EndIsProof, 40),
    (Mutation::ResetIsProof, 40),
    (Mutation::SilenceIsAbsence, 60),
    (Mutation::ThreadDiesAlone, 80),
    (Mutation::NoDeadline, 40),
];
/// Within so many seeds.
const SOON: u64 = 2000;
/// So many of the last events are printed, each up to so many characters.
const SHOWN: (usize, usize) = (15, 160);

#[test]
fn each_mistake_shows() {
    for (mutation, from) in MISTAKES {
        let found = (from..from + SOON).find_map(|seed| live_with(seed, Some(mutation), true).err());
        let Failure { seed, at, violation, history } =
            *found.unwrap_or_else(|| panic!("{mutation:?} violates nothing"));
        let last = history.len().saturating_sub(SHOWN.0);
        let lines: Vec<String> = history[last..].iter().map(|line| line.chars().take(SHOWN.1).collect()).collect();
        println!("{mutation:?}, seed {seed} at {at:.3?}: {violation}\n{}\n", lines.join("\n"));
    }
}

#[test]
fn a_seed_determines_a_history() {
    for seed in 0..20 {
        let (one, other) = (live(seed, false), live(seed, true));
        assert_eq!(one.ok(), other.ok(), "seed {seed}");
    }
}

/// A job of so many hosts, all of which are listed, and may go on without one of them.
fn job(hosts: usize) -> Job {
    job_of(hosts, hosts)
}

fn job_of(hosts: usize, listed: usize) -> Job {
    let settings = Settings {
        max_restarts: Some(3),
        last_call_timeout: SECOND,
        settle_timeout: SECOND,
        ..Settings::new(hosts as u32 - 1, hosts as u32)
    };
    let mut job = Job::new(1, Options::new(hosts, listed, settings));
    job.keep_history();
    job
}

/// Let this time pass.
fn pass(job: &mut Job, time: Duration) {
    job.pass(job.now() + time).unwrap_or_else(|violation| panic!("{violation}"));
}

/// Let time pass until this is true. Returns how long that took.
fn until(job: &mut Job, done: impl Fn(&Job) -> bool) -> Duration {
    let began = job.now();
    while !done(job) {
        assert!(job.now() < began + 60 * SECOND, "it does not happen");
        pass(job, Duration::from_millis(1));
    }
    job.now() - began
}

/// Whether the workers of these hosts are in one world, and this is its round.
fn run(job: &Job, hosts: &[usize], round: u64) -> bool {
    hosts.iter().all(|host| job.place(*host).is_some_and(|place| place.round.0 == round))
}

/// The job when it runs round 1, and all voters have leases.
fn formed(hosts: usize) -> Job {
    formed_of(hosts, hosts)
}

fn formed_of(hosts: usize, listed: usize) -> Job {
    let mut job = job_of(hosts, listed);
    let all: Vec<_> = (0..hosts).collect();
    all.iter().for_each(|host| job.happens_now(Action::Start(*host)));
    until(&mut job, |job| run(job, &all, 1));
    pass(&mut job, 6 * SECOND);
    job
}

/// Cut a host off from all others.
fn cut_off(job: &mut Job, host: usize, hosts: usize) {
    for other in (0..hosts).filter(|other| *other != host) {
        job.happens_now(Action::Cut(host, other, 100 * SECOND, Partition::Lost));
        job.happens_now(Action::Cut(other, host, 100 * SECOND, Partition::Lost));
    }
}

#[test]
fn the_first_of_the_list_leads_and_a_list_costs_half_a_second() {
    let mut job = job(3);
    [2, 1, 0].into_iter().for_each(|host| job.happens_now(Action::Start(host)));
    let took = until(&mut job, |job| run(job, &[0, 1, 2], 1));
    assert_eq!(job.leaders(), [0]);
    assert!(took < Duration::from_millis(900), "{took:?}");
}

#[test]
fn a_node_says_which_endpoint_is_silent() {
    let mut job = job(3);
    cut_off(&mut job, 2, 3);
    [0, 1].into_iter().for_each(|host| job.happens_now(Action::Start(host)));
    pass(&mut job, 15 * SECOND);
    assert!(job.leaders().is_empty());
    for host in [0, 1] {
        let (_, why) = job.node(host).and_then(|node| node.waits()).expect("it waits");
        assert!(why.contains("in the list n2:29400 did not answer"), "{why}");
    }
}

#[test]
fn a_member_takes_over_and_remembers_the_restarts() {
    let mut job = formed(3);
    job.happens_now(Action::Fail(1));
    until(&mut job, |job| run(job, &[0, 1, 2], 2));
    assert_eq!(job.place(2).map(|place| place.restart), Some(1));
    pass(&mut job, 6 * SECOND);
    let rank = |job: &Job, host| job.place(host).map_or(9, |place| place.rank);
    let ranks = [rank(&job, 1), rank(&job, 2)];

    job.happens_now(Action::Kill(0));
    let led = until(&mut job, |job| job.leaders().iter().any(|it| *it != 0));
    assert!(led < Duration::from_millis(400), "{led:?}");
    let formed = until(&mut job, |job| run(job, &[1, 2], 3));
    assert!(led + formed < Duration::from_millis(2500), "{led:?}, {formed:?}");
    assert_eq!([rank(&job, 1), rank(&job, 2)].map(|rank| rank + 1), ranks, "rank 0 has ended, and the others move up");
    // The loss of a node does not count.
    assert_eq!(job.place(1).map(|place| place.restart), Some(1));
}

#[test]
fn each_may_end_in_turn() {
    let mut job = formed(3);
    for turn in 0..9 {
        let leader = job.leaders()[0];
        job.happens_now(Action::Kill(leader));
        until(&mut job, |job| job.leaders().iter().any(|it| *it != leader));
        job.happens_now(Action::Start(leader));
        pass(&mut job, 10 * SECOND);
        assert!(job.leaders() != [leader], "turn {turn}");
    }
    assert!((0..3).all(|host| job.place(host).is_some_and(|place| place.round.0 > 9)));
}

#[test]
fn of_two_the_one_that_is_left_leads() {
    let mut job = formed(2);
    job.happens_now(Action::Kill(0));
    let took = until(&mut job, |job| job.leaders() == [1] && run(job, &[1], 2));
    assert!(took < Duration::from_millis(2500), "{took:?}");
}

/// Its guards would keep workers for ever otherwise, if it is stopped after another one has begun to lead.
#[test]
fn the_node_of_the_leader_stops_its_workers_as_any_other() {
    let job = formed(3);
    let node = job.node(0).expect("it lives");
    assert!(node.view().hosted && node.workers_until().is_some(), "its workers have a deadline");
}

#[test]
fn nobody_leads_beside_one_that_is_cut_off() {
    let mut job = formed(3);
    cut_off(&mut job, 0, 3);
    for _ in 0..35 {
        pass(&mut job, SECOND);
        assert_eq!(job.leaders(), [0], "it is not proven dead");
    }
}

/// Once the leases of those that do not hold it are over, nobody could lead in its place.
#[test]
fn what_voters_do_not_hold_is_not_said_while_they_have_leases() {
    let mut job = formed_of(4, 3);
    for voter in [1, 2] {
        job.happens_now(Action::Cut(0, voter, 100 * SECOND, Partition::Lost));
        job.happens_now(Action::Cut(voter, 0, 100 * SECOND, Partition::Lost));
    }
    job.happens_now(Action::Fail(3));
    pass(&mut job, 9 * SECOND);
    let waits = |job: &Job| job.node(3).is_some_and(|node| node.view().waiting > 0);
    assert!(!waits(&job));
    let took = until(&mut job, waits);
    assert!(took < 7 * SECOND, "{took:?}");
}

#[test]
fn a_verdict_is_remembered() {
    let mut job = formed(3);
    job.happens_now(Action::Close(1));
    until(&mut job, |job| job.node(2).is_some_and(|node| node.view().closed.is_some()));
    job.happens_now(Action::Kill(0));
    until(&mut job, |job| !job.leaders().is_empty());
    job.happens_now(Action::Start(0));
    until(&mut job, |job| job.node(0).is_some_and(|node| node.view().over.is_some()));
}

/// It would be replaced otherwise, while its workers run: it has half a second to come back.
#[test]
fn a_node_whose_connection_breaks_comes_back_though_another_endpoint_is_silent() {
    let mut job = formed_of(4, 3);
    let leader = job.leaders()[0];
    let silent = (leader + 1) % 3;
    job.happens_now(Action::PowerOff(silent));
    let others: Vec<_> = (0..4).filter(|host| *host != silent).collect();
    until(&mut job, |job| run(job, &others, 2));
    pass(&mut job, 6 * SECOND);
    job.happens_now(Action::Sever(3));
    pass(&mut job, 20 * SECOND);
    assert!(run(&job, &others, 2), "nobody is lost: {:?}", job.place(3));
}

#[test]
fn a_process_that_leaves_hands_over() {
    let mut job = formed(3);
    job.happens_now(Action::Terminate(0));
    let took = until(&mut job, |job| job.leaders().iter().any(|it| *it != 0) && run(job, &[1, 2], 2));
    assert!(took < 4 * SECOND, "{took:?}");
}
