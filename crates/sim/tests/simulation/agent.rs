//! Simulations of jobs with our agents and their workers under seeded faults. The checks are in `src/sim/coordinator/agent` and
//! `src/sim/coordinator/ledger`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::Duration;

use crate::seeds::{asked_for, live_through};
use elastic_rs::agent::Outcome;
use elastic_rs::rendezvous::messages::message::Failure;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs_sim::coordinator::agent::Agents;
use elastic_rs_sim::coordinator::agent_plan::{Counts, draw, live, live_ill, live_with_notices};
use elastic_rs_sim::coordinator::history::live_plan;
use elastic_rs_sim::coordinator::{Action, Options, Simulation};
use elastic_rs_sim::engine::paths::{End, Partition};
use elastic_rs_sim::worlds::{Invariant, Violation};

fn check(seeds: impl IntoIterator<Item = u64>) -> Counts {
    let mut ends = Counts::new();
    let lived = live_through(seeds, live, "simulation agent::invariants_hold_for_all_seeds");
    for (kind, count) in lived.into_iter().flat_map(|(_, counts)| counts) {
        *ends.entry(kind).or_default() += count;
    }
    ends
}

#[test]
fn invariants_hold_for_all_seeds() {
    let seeds = asked_for(200);
    let few = seeds.end - seeds.start < 200;
    let ends = check(seeds);
    if few {
        return;
    }
    // Every kind of end and of start must occur, or it is not tested.
    let starts = ["started ahead", "replaced ahead", "stuck", "raised"];
    for kind in ["succeeded", "not needed", "failed", "no place", "signal"].into_iter().chain(starts) {
        assert!(ends.contains_key(kind), "no agent was or ended as `{kind}`: {ends:?}");
    }
}

/// Hosts are taken away. Each that has a notice is gone in time, with its workers, and all invariants hold.
#[test]
fn invariants_hold_for_all_seeds_with_notices() {
    live_through(asked_for(100), live_with_notices, "simulation agent::invariants_hold_for_all_seeds_with_notices");
}

/// Machines are ill for a while. None is in a world, and all invariants hold.
#[test]
fn ill_machines_are_in_no_world_for_all_seeds() {
    live_through(asked_for(100), live_ill, "simulation agent::ill_machines_are_in_no_world_for_all_seeds");
}

/// It hangs at the agreed check, and the other nodes have joined again.
#[test]
fn a_worker_that_hangs_in_the_last_change_is_waited_for() {
    check([859]);
}

/// It comes back after the others have finished without it, and fails then.
#[test]
fn a_lost_node_that_fails_after_the_end_of_its_job_has_nobody_to_notify() {
    check([607]);
}

#[test]
fn a_seed_determines_a_history() {
    for seed in 0..10 {
        let (Ok(one), Ok(other)) = (live(seed, false), live(seed, true)) else { continue };
        assert_eq!(one, other, "seed {seed}");
    }
}

// Scenarios: see "Agent and workers" in the list of scenarios. Times are exact, because messages take no time.

const GRACE: Duration = Duration::from_secs(7);

/// A job with our agents on all hosts. Workers run, and end at once when asked to, unless `change` sets something else.
fn job(hosts: usize, max_restarts: u32, change: impl FnOnce(&mut Agents)) -> Simulation {
    let mut settings = Settings::new(hosts as u32, hosts as u32);
    settings.max_restarts = Some(max_restarts);
    let mut agents = Agents { hosts: (0..hosts).collect(), grace: GRACE, ..Agents::default() };
    change(&mut agents);
    if agents.restarts_left.is_some() {
        settings.max_restarts = None;
    }
    let mut job = Simulation::new(Options { agents, ..Options::exact(hosts, settings) });
    job.start_all(Duration::ZERO);
    job
}

fn run(job: &mut Simulation, seconds: f64) {
    job.run_until(Duration::from_secs_f64(seconds)).unwrap_or_else(|violation| panic!("{violation}"));
}

/// The cause that each agent names. All agents must have failed.
fn causes(job: &Simulation) -> Vec<Failure> {
    let cause = |outcome: &Outcome| match outcome {
        Outcome::Failed { cause: Some(cause), .. } => (**cause).clone(),
        outcome => panic!("{outcome:?}"),
    };
    job.ends().outcomes.iter().map(|(_, outcome)| cause(outcome)).collect()
}

/// A job of one or two nodes. `fault` befalls the first, which runs in a world of both. Its workers take the whole grace to end, those of
/// the other end at once.
fn without_the_first(fault: Action, change: impl FnOnce(&mut Agents)) -> Result<Simulation, Violation> {
    let mut agents = Agents { hosts: [0].into(), grace: GRACE, stop: (GRACE, GRACE), ..Agents::default() };
    change(&mut agents);
    let mut job = Simulation::new(Options { agents, ..Options::exact(2, Settings::new(1, 2)) });
    job.start_all(Duration::ZERO);
    job.at(Duration::from_secs(12), fault);
    job.run_until(Duration::from_secs(90))?;
    assert_eq!(job.hosts()[1].placements.last().map(|placement| placement.world_size), Some(1), "it has gone on alone");
    Ok(job)
}

const FOR_LONG: Duration = Duration::from_secs(120);

fn cut() -> Action {
    Action::Cut(0, End::Coordinator, FOR_LONG, Partition::Lost)
}

#[track_caller]
fn is_two_worlds(job: Result<Simulation, Violation>) {
    assert_eq!(job.map(|_| ()).map_err(|violation| violation.invariant), Err(Invariant::OneWorld));
}

#[test]
fn workers_of_a_node_that_is_cut_off_or_whose_agent_is_stopped_are_dead_before_the_others_go_on() {
    for fault in [cut(), Action::Stall(0, FOR_LONG), Action::Cut(0, End::Node, FOR_LONG, Partition::Lost)] {
        without_the_first(fault.clone(), |_| ()).unwrap_or_else(|violation| panic!("{fault:?}: {violation}"));
    }
}

/// Each of the two, the agent's fence and the guards' deadline, ends the workers of an agent that is awake. Without both, a worker that
/// takes its grace runs beside the next world.
#[test]
fn a_fence_that_does_not_kill_is_caught() {
    without_the_first(cut(), |agents| agents.without_deadlines = true).unwrap();
    without_the_first(cut(), |agents| agents.fences_with_grace = true).unwrap();
    is_two_worlds(without_the_first(cut(), |agents| {
        (agents.without_deadlines, agents.fences_with_grace) = (true, true);
    }));
}

#[test]
fn guards_without_a_deadline_are_caught_when_their_agent_is_stopped() {
    is_two_worlds(without_the_first(Action::Stall(0, FOR_LONG), |agents| agents.without_deadlines = true));
}

/// The same in histories that are drawn from seeds.
#[test]
fn seeds_find_guards_without_a_deadline() {
    let broken = |seed: &u64| {
        let mut plan = draw(*seed);
        plan.options.agents.without_deadlines = true;
        let failure = live_plan(*seed, &plan, false).err();
        failure.is_some_and(|failure| failure.violation.invariant == Invariant::OneWorld)
    };
    assert!((0..300).any(|seed| broken(&seed)), "no history shows two worlds");
}

/// #60910: a failure to start was retried without end.
#[test]
fn start_up_failures_count_against_max_restarts() {
    let mut job = job(1, 3, |agents| {
        agents.bad_starts = 100;
        agents.bad_starts_until = Duration::from_secs(3600);
    });
    run(&mut job, 600.0);
    assert_eq!(job.hosts()[0].placements.len(), 4, "one start and three restarts");
    assert_eq!(causes(&job)[0].exit, "a failure to start");
}

/// With `restart_budget=node` each agent counts its own restarts, as in PyTorch.
#[test]
fn every_node_counts_its_own_failures_if_asked() {
    let mut job = job(2, 0, |agents| agents.restarts_left = Some(1));
    for (seconds, host) in [(10, 0), (20, 1), (30, 0)] {
        job.at(Duration::from_secs(seconds), Action::FailWorkers(host));
    }
    run(&mut job, 29.0);
    assert!(job.ends().outcomes.is_empty());
    assert_eq!(job.hosts()[1].placements.len(), 3, "one start, and a restart for each node");
    run(&mut job, 31.0);
    let causes = causes(&job);
    assert_eq!(causes.len(), 2);
    assert!(causes.iter().all(|cause| cause.node.contains("host0")), "{causes:?}");
}

/// #76287: one node's agent failed, and the others ran on for ever.
#[test]
fn no_agent_runs_on_when_the_job_has_failed() {
    let mut job = job(3, 0, |_| {});
    job.at(Duration::from_secs(10), Action::FailWorkers(1));
    run(&mut job, 9.9);
    assert_eq!(job.workers().len(), 3);
    run(&mut job, 10.0);
    assert!(job.workers().is_empty());
    let causes = causes(&job);
    assert_eq!((causes.len(), causes[0].local_rank), (3, 0));
    assert!(causes[0].node.contains("host1"), "{causes:?}");
    assert!(causes.iter().all(|cause| *cause == causes[0]), "{causes:?}");
}

/// An error file on a file system that hangs must not delay the report to the other nodes for long.
#[test]
fn other_nodes_hear_of_a_failure_within_half_a_second_although_the_error_file_hangs() {
    let mut job = job(3, 0, |agents| agents.hanging_files = 100);
    job.at(Duration::from_secs(10), Action::FailWorkers(1));
    run(&mut job, 10.505);
    assert!(job.workers().is_empty(), "the workers of all nodes were stopped");
    let ended: Vec<_> = job.ends().outcomes.iter().map(|(host, _)| *host).collect();
    assert_eq!(ended, [0, 2], "the failing node still waits for the error file");
    run(&mut job, 11.0);
    assert_eq!(causes(&job).len(), 3);
}

/// The report waits for words that are late but do not hang, so that all nodes name the cause in the worker's own words.
#[test]
fn other_nodes_hear_a_workers_words_if_they_are_only_late() {
    let late = Duration::from_millis(400);
    let mut job = job(3, 0, |agents| agents.message_delay = (late, late));
    job.at(Duration::from_secs(10), Action::FailWorkers(1));
    run(&mut job, 11.0);
    let causes = causes(&job);
    assert_eq!(causes.len(), 3);
    assert!(causes.iter().all(|cause| cause.message == "words of host1"), "{causes:?}");
}

/// PR #99051, #118891: one trainer crashed, and the others held their GPUs in the exit barrier for 5 minutes.
#[test]
fn no_agent_waits_for_a_barrier_that_cannot_complete() {
    let mut job = job(2, 0, |_| {});
    job.at(Duration::from_secs(10), Action::ReportDone(0));
    job.at(Duration::from_secs(20), Action::FailWorkers(1));
    run(&mut job, 19.0);
    assert!(job.ends().outcomes.is_empty(), "the first waits for the second");
    run(&mut job, 20.0);
    assert_eq!(causes(&job).len(), 2);
}

/// PR #192815: the restart path had another grace. After the grace, a worker that ignores SIGTERM is killed.
#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_on_every_path() {
    let ignore = |agents: &mut Agents| agents.stop = (Duration::from_secs(3600), Duration::from_secs(3600));
    // The third host has three workers: two are left when one fails.
    let actions = [Action::FailWorkers(2), Action::Terminate(2)];
    for (action, restarts) in actions.into_iter().flat_map(|action| [(action.clone(), 0), (action, 5)]) {
        let mut job = job(3, restarts, ignore);
        job.at(Duration::from_secs(10), action.clone());
        run(&mut job, 9.9);
        let generation = job.workers()[&2].0;
        run(&mut job, 10.0 + 6.9);
        assert_eq!(job.workers()[&2].0, generation, "{action:?}: within the grace");
        run(&mut job, 10.0 + 7.1);
        assert!(job.workers().get(&2).is_none_or(|now| now.0 != generation), "{action:?}: after the grace");
    }
}

/// Horovod #3014, #3264: each of several simultaneous failures cost a restart.
#[test]
fn workers_that_fail_at_once_on_all_nodes_cost_one_restart() {
    let mut job = job(4, 1, |_| {});
    for host in 0..4 {
        job.at(Duration::from_secs(10), Action::FailWorkers(host));
    }
    run(&mut job, 60.0);
    assert!(job.ends().outcomes.is_empty());
    assert_eq!(job.workers().len(), 4);
    let restarts: Vec<_> =
        job.hosts().iter().map(|host| host.placements.last().map(|placement| placement.restart)).collect();
    assert_eq!(restarts, [Some(1); 4]);
}

/// lerobot #3818: a second Ctrl-C began a second grace.
#[test]
fn a_second_signal_does_not_wait_for_the_grace() {
    let mut job = job(1, 0, |agents| agents.stop = (Duration::from_secs(3600), Duration::from_secs(3600)));
    job.at(Duration::from_secs(10), Action::Terminate(0));
    job.at(Duration::from_secs(11), Action::Terminate(0));
    run(&mut job, 10.9);
    assert_eq!(job.workers().len(), 1);
    run(&mut job, 11.1);
    assert_eq!(job.ends().outcomes, [(0, Outcome::Signal(15))]);
}

/// A node that waits for its template must hear that the round is over before the template has loaded.
#[test]
fn a_node_that_prepares_its_start_joins_the_next_round_at_once() {
    let mut job = job(2, 0, |agents| agents.start = (Duration::from_secs(60), Duration::from_secs(60)));
    job.at(Duration::from_secs(10), Action::Terminate(1));
    job.at(Duration::from_secs(20), Action::Start(1, Duration::from_secs(600)));
    run(&mut job, 19.0);
    assert_eq!(job.hosts()[0].placements.len(), 1);
    run(&mut job, 20.1);
    assert_eq!(job.hosts()[0].placements.len(), 2);
    assert!(job.workers().is_empty(), "the workers of neither round run");
    run(&mut job, 81.0);
    assert_eq!(job.workers().len(), 2);
}

/// As above, with a job that ends: no worker is started only to be killed at once.
#[test]
fn a_job_that_fails_while_a_node_prepares_its_start_ends_there_too() {
    let mut job = job(3, 0, |agents| agents.start = (Duration::from_secs(1), Duration::from_secs(60)));
    // Wait for the first worker, which then fails.
    let first = (1..60).find_map(|second| {
        run(&mut job, f64::from(second));
        job.workers().keys().next().copied()
    });
    let failing = first.unwrap();
    assert_eq!(job.workers().len(), 1, "the other nodes still prepare their starts");
    let now = job.now();
    job.at(now, Action::FailWorkers(failing));
    run(&mut job, now.as_secs_f64() + 0.5);
    assert!(job.workers().is_empty());
    assert_eq!(causes(&job).len(), 3);
}

/// Rank 0 may take an hour to write its last checkpoint. PyTorch's agents leave the exit barrier after five minutes.
#[test]
fn a_node_that_has_finished_waits_for_the_others_as_long_as_they_live() {
    let mut job = job(3, 0, |_| {});
    job.at(Duration::from_secs(10), Action::ReportDone(0));
    job.at(Duration::from_secs(20), Action::ReportDone(2));
    run(&mut job, 4000.0);
    assert!(job.ends().outcomes.is_empty());
    job.at(Duration::from_secs(4000), Action::ReportDone(1));
    run(&mut job, 4001.0);
    let succeeded = job.ends().outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Succeeded);
    assert_eq!(succeeded.count(), 3);
}

/// `exit_barrier_timeout` limits the wait for the other nodes.
#[test]
fn the_exit_barrier_ends_in_time_and_leaves_the_others_undisturbed() {
    let mut job = job(2, 0, |agents| agents.exit_barrier_timeout = Some(Duration::from_secs(300)));
    job.at(Duration::from_secs(10), Action::ReportDone(0));
    run(&mut job, 309.0);
    assert!(job.ends().outcomes.is_empty());
    run(&mut job, 311.0);
    assert_eq!(job.ends().outcomes, [(0, Outcome::Succeeded)]);
    run(&mut job, 400.0);
    assert_eq!(job.hosts()[1].placements.len(), 1);
    job.at(Duration::from_secs(400), Action::ReportDone(1));
    run(&mut job, 401.0);
    assert_eq!(job.ends().outcomes.last(), Some(&(1, Outcome::Succeeded)));
}
