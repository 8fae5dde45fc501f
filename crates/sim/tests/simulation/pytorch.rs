//! PyTorch's own rendezvous in the simulator (`src/sim/pytorch`). The invariants that ours must keep catch the failures that PyTorch's
//! users report. Each fault plan also runs with our rendezvous, which passes. The failures were
//! measured with real `torchrun` processes on torch 2.15.

use std::collections::BTreeSet;
use std::time::Duration;

use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs_sim::coordinator::history::{SETTLE_WITHIN, live};
use elastic_rs_sim::coordinator::ledger::check_settled;
use elastic_rs_sim::coordinator::plan::Plan;
use elastic_rs_sim::coordinator::{Action, Options, Simulation};
use elastic_rs_sim::pytorch::PyTorch;
use elastic_rs_sim::worlds::Invariant::{self, LossNoticed, OneWorld, Ranks, SameWorld, Settles, WorldSize};

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// A job on one machine: messages take less than a millisecond, agents stop their workers within one second.
fn job(hosts: usize, min: u32, max: u32) -> Plan {
    let mut options = Options::exact(hosts, Settings::new(min, max));
    options.delay = (Duration::from_micros(100), Duration::from_micros(900));
    options.stop = (Duration::from_millis(50), seconds(1));
    options.seed = 7;
    let starts = (0..hosts).map(|host| (Duration::ZERO, Action::Start(host, seconds(600)))).collect();
    Plan { options, actions: starts, calm_at: Duration::ZERO }
}

/// As [`job`], with host 1's wall clock ahead by `ahead` seconds.
fn skewed(min: u32, ahead: i64) -> Plan {
    let mut plan = job(2, min, 2);
    plan.options.clocks.insert(1, ahead * 1_000_000);
    plan
}

fn add(mut plan: Plan, at: u64, action: Action) -> Plan {
    plan.actions.push((seconds(at), action));
    plan.calm_at = plan.calm_at.max(seconds(at));
    plan
}

/// The invariants that PyTorch's algorithm breaks in this plan. Asserts that ours breaks none.
fn broken(plan: &Plan) -> Vec<Invariant> {
    let mut ours = Simulation::new(plan.options.clone());
    for (at, action) in &plan.actions {
        ours.at(*at, action.clone());
    }
    ours.run_until(plan.calm_at + SETTLE_WITHIN).expect("our rendezvous keeps to all invariants");
    check_settled(ours.hosts_of(0), &plan.options.settings).expect("our rendezvous settles");
    kinds(&PyTorch::live(plan, SETTLE_WITHIN))
}

fn kinds(job: &PyTorch) -> Vec<Invariant> {
    let kinds: BTreeSet<_> = job.violations().iter().map(|violation| violation.invariant).collect();
    kinds.into_iter().collect()
}

// The model is faithful where PyTorch works.

/// Measured: 1.1–1.3 s for two nodes that join at once, 1.3–2.2 s for eight. All nodes but the last find out by polling.
#[test]
fn without_faults_one_world_forms_in_the_time_that_was_measured() {
    for (hosts, between) in [(2, 1_000..1_400), (8, 1_000..2_300)] {
        let plan = job(hosts, hosts as u32, hosts as u32);
        let mut job = PyTorch::new(plan.options.clone());
        for (at, action) in plan.actions {
            job.at(at, action);
        }
        let all_run = |job: &PyTorch| (0..hosts).all(|host| job.running(host).is_some());
        let tried = (0..).map(|step| step * 10);
        let took = tried.take(1_000).find(|at| {
            job.run_until(Duration::from_millis(*at));
            all_run(&job)
        });
        let took = took.expect("a world forms");
        assert!(between.contains(&took), "{hosts} nodes took {took} ms");
        let ranks: BTreeSet<_> = (0..hosts).filter_map(|host| Some(job.running(host)?.rank)).collect();
        assert_eq!(ranks, (0..hosts as u32).collect());
        job.run_until(seconds(600));
        job.check_settled();
        assert_eq!(kinds(&job), []);
    }
}

/// A job that is not full waits for the last call. A node that joins later restarts all workers. A surplus node disturbs no other.
#[test]
fn without_faults_jobs_grow_and_spares_wait() {
    let mut plan = job(4, 2, 3);
    plan.actions.retain(|(_, action)| matches!(action, Action::Start(0 | 1, _)));
    let plan = add(add(plan, 60, Action::Start(2, seconds(600))), 120, Action::Start(3, seconds(600)));
    let mut job = PyTorch::new(plan.options.clone());
    for (at, action) in &plan.actions {
        job.at(*at, action.clone());
    }
    let sizes = |job: &PyTorch| (0..4).map(|host| job.running(host).map(|held| held.size)).collect::<Vec<_>>();
    job.run_until(seconds(29));
    assert_eq!(sizes(&job), [None; 4]);
    job.run_until(seconds(59));
    assert_eq!(sizes(&job), [Some(2), Some(2), None, None]);
    job.run_until(seconds(70));
    assert_eq!(sizes(&job), [Some(3), Some(3), Some(3), None]);
    assert_eq!(broken(&plan), []);
}

// #111646: a lost member is not noticed.

/// Measured: 75 s after a SIGKILL of agent B, A does not know. Agents ask only how many nodes wait.
#[test]
fn a_lost_member_stays_unnoticed() {
    let plan = add(job(3, 2, 3), 60, Action::Kill(1));
    assert_eq!(broken(&plan), [LossNoticed, Settles]);
}

/// The same after SIGTERM: PyTorch's agent sends no leave.
#[test]
fn a_node_that_leaves_stays_unnoticed() {
    let plan = add(job(3, 2, 3), 60, Action::Terminate(2));
    assert_eq!(broken(&plan), [LossNoticed, Settles]);
}

// Clocks differ.

/// Measured: with nnodes 2:2 and B's clock 20 s behind, A trains alone with WORLD_SIZE=1.
#[test]
fn a_clock_that_is_behind_makes_a_world_smaller_than_min_nodes() {
    assert_eq!(broken(&skewed(2, -20)), [WorldSize, Settles]);
    let job = PyTorch::live(&skewed(2, -20), SETTLE_WITHIN);
    assert_eq!(job.running(0).map(|held| (held.rank, held.size)), Some((0, 1)));
}

/// Measured: with B's clock 20 s ahead, both train, and wait for each other at the end.
#[test]
fn a_clock_that_is_ahead_makes_a_world_smaller_than_min_nodes() {
    assert_eq!(broken(&skewed(2, 20)), [WorldSize, Settles]);
}

/// With a minimum of one node: two worlds of one round run at once.
#[test]
fn clocks_that_differ_make_two_worlds_of_one_round() {
    assert_eq!(broken(&skewed(1, -20)), [SameWorld, Settles]);
    assert_eq!(broken(&skewed(1, 20)), [SameWorld, Ranks, Settles]);
}

/// Measured: ±10 s are below the 15 s of the keep-alives, and do no harm.
#[test]
fn clocks_that_differ_by_less_than_the_keep_alives_do_no_harm() {
    for ahead in [-10, 10] {
        assert_eq!(broken(&skewed(2, ahead)), [], "{ahead}");
    }
}

/// Clocks do not matter to ours: with an hour's difference it has the same history, down to the last message.
#[test]
fn an_hour_changes_nothing_for_ours() {
    let digest = |ahead| {
        let plan = skewed(2, ahead);
        let mut ours = Simulation::new(plan.options.clone());
        for (at, action) in plan.actions {
            ours.at(at, action);
        }
        ours.run_until(seconds(300)).expect("invariants hold");
        ours.digest()
    };
    assert_eq!(digest(3600), digest(0));
    assert_eq!(digest(-3600), digest(0));
}

// #67616: the store is stalled.

/// Measured: after a SIGSTOP of the host for 20 s, all keep-alives have ended for good. Then node D joins: a world of 3 and one of 1
/// run, both with RANK 0.
#[test]
fn a_store_that_stood_still_makes_two_worlds_at_once() {
    let mut plan = job(4, 1, 4);
    plan.actions.retain(|(_, action)| !matches!(action, Action::Start(3, _)));
    let plan = add(plan, 60, Action::StallCoordinator(seconds(20)));
    let plan = add(plan, 100, Action::Start(3, seconds(600)));
    assert_eq!(broken(&plan), [OneWorld, Settles]);
    let job = PyTorch::live(&plan, SETTLE_WITHIN);
    let worlds: Vec<_> = (0..4).filter_map(|host| Some((job.running(host)?.rank, job.running(host)?.size))).collect();
    assert_eq!(worlds, [(0, 3), (1, 3), (2, 3), (0, 1)]);
}

/// A stall shorter than the keep-alives' limit does no harm.
#[test]
fn a_store_that_stood_still_for_a_moment_does_no_harm() {
    let mut plan = job(4, 1, 4);
    plan.actions.retain(|(_, action)| !matches!(action, Action::Start(3, _)));
    let plan = add(plan, 60, Action::StallCoordinator(seconds(5)));
    let plan = add(plan, 100, Action::Start(3, seconds(600)));
    assert_eq!(broken(&plan), []);
}

// Seeded faults.

/// Our rendezvous keeps all invariants under seeded faults. PyTorch's breaks each of them.
#[test]
fn drawn_faults_break_every_invariant() {
    let mut seen = BTreeSet::new();
    let (mut plans, mut sound) = (0, 0);
    for seed in (0..).filter(|seed| Plan::draw(*seed).options.hosts <= 30).take(60) {
        let kinds = kinds(&PyTorch::live(&Plan::draw(seed), SETTLE_WITHIN));
        live(seed, false).unwrap_or_else(|failure| panic!("ours, seed {seed}: {}", failure.violation));
        plans += 1;
        sound += usize::from(kinds.is_empty());
        seen.extend(kinds);
    }
    println!("{sound} of {plans} plans do PyTorch's rendezvous no harm");
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [OneWorld, SameWorld, Ranks, WorldSize, LossNoticed, Settles]);
}
