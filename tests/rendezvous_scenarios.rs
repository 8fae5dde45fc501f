//! Bugs that other systems had, as named scenarios: the name is what must hold, the comment says who had it (`#n` is
//! pytorch/pytorch). Times are virtual and exact: no delays, no randomness.
//!
//! That clocks of hosts do not matter (`dynamic_rendezvous.py` compares them) is a fact of compilation, not a test: no
//! function of the rendezvous takes a wall-clock time, and no message carries one.

use std::time::Duration;

use elastic_rs::rendezvous::message::{Round, Verdict};
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::settings::{OnPartition, Settings};
use elastic_rs::sim::host::{Agent, Exit};
use elastic_rs::sim::network::{End, Partition};
use elastic_rs::sim::simulation::{Action, Options, Simulation};

/// A duration or time in milliseconds.
fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// A job that has been started at once on all hosts.
struct Job(Simulation);

impl Job {
    fn new(hosts: usize, min: u32, max: u32) -> Self {
        Self::with(Options::exact(hosts, Settings::new(min, max)))
    }

    fn with(options: Options) -> Self {
        let mut simulation = Simulation::new(options);
        simulation.keep_history();
        Self(simulation)
    }

    fn started(hosts: usize, min: u32, max: u32) -> Self {
        let mut job = Self::new(hosts, min, max);
        job.0.start_all(Duration::ZERO);
        job
    }

    fn start(&mut self, at: Duration, host: usize) {
        self.0.at(at, Action::Start(host, seconds(600)));
    }

    fn at(&mut self, at: Duration, action: Action) {
        self.0.at(at, action);
    }

    /// Run to `at`, and give the world as ranks by host (`None`: runs nothing), with its round.
    fn world(&mut self, at: Duration) -> (u64, Vec<Option<u32>>) {
        if let Err(violation) = self.0.run_until(at) {
            let history = self.0.history();
            let last = history.len().saturating_sub(40);
            panic!("{}\n{}", violation, history[last..].join("\n"));
        }
        let hosts = 0..self.0.hosts().len();
        let ranks = hosts.clone().map(|host| self.0.running(host).map(|place| place.rank)).collect();
        let rounds: std::collections::BTreeSet<_> =
            hosts.filter_map(|host| Some(self.0.running(host)?.round.0)).collect();
        assert!(rounds.len() <= 1, "two worlds at {at:?}: rounds {rounds:?}");
        (rounds.first().copied().unwrap_or(0), ranks)
    }

    fn exits(&self, host: usize) -> &[Exit] {
        &self.0.hosts()[host].exits
    }

    fn join_error(&self, host: usize) -> &JoinError {
        match self.exits(host) {
            [Exit::Join(error)] => error,
            other => panic!("host{host} did not fail to join: {other:?}"),
        }
    }

    fn waits(&self, host: usize) -> bool {
        let process = self.0.hosts()[host].process.as_ref();
        process.is_some_and(|process| process.agent == Agent::Joining)
    }
}

fn ranks(of: &[u32]) -> Vec<Option<u32>> {
    of.iter().copied().map(Some).collect()
}

fn failed() -> Verdict {
    Verdict::Failed { by: "host1".into(), cause: "rank 3 (host1) exited with code 7".into(), failure: None }
}

// Losses.

/// #111646, #67742, #150916: an agent is killed while its peers are healthy, and they train on for ever.
#[test]
fn an_agent_is_killed_and_the_survivors_reform_after_grace_and_settling() {
    let mut job = Job::started(3, 2, 3);
    assert_eq!(job.world(seconds(9)), (1, ranks(&[0, 1, 2])));
    job.at(seconds(10), Action::Kill(1));
    // The connection ends at once; the grace is 500 ms, the settle window 1 s.
    assert_eq!(job.world(ms(10_499)), (1, vec![Some(0), None, Some(2)]));
    assert_eq!(job.world(ms(11_499)), (0, vec![None, None, None]));
    assert_eq!(job.world(ms(11_500)), (2, vec![Some(0), None, Some(1)]));
}

/// #67742: survivors are too few; they wait for a replacement, which takes the place of the lost one.
#[test]
fn too_few_survivors_wait_for_a_replacement() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::Kill(1));
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 1);
    assert_eq!(job.world(seconds(61)), (2, ranks(&[0, 1, 2])));
}

/// #67742, #147064, pains row 20: scale-down by SIGTERM waited 15 s and a last call; a goodbye needs neither.
#[test]
fn a_node_leaves_and_no_lease_is_waited_for() {
    let mut job = Job::started(3, 2, 3);
    job.at(seconds(10), Action::Terminate(0));
    assert_eq!(job.world(ms(10_999)), (0, vec![None; 3]));
    // The lowest survivor becomes rank 0.
    assert_eq!(job.world(seconds(11)), (2, vec![None, Some(0), Some(1)]));
}

/// `dynamic_rendezvous.py`, sanitize step: a silent node was dropped by whoever looked, and nobody acted.
#[test]
fn a_silent_node_is_lost_after_its_lease() {
    let mut job = Job::started(3, 2, 3);
    job.at(seconds(11), Action::PowerOff(2));
    // Last heard at 10 s; lease 15 s; a last look of 250 ms; settling 1 s.
    assert_eq!(job.world(ms(25_249)), (1, vec![Some(0), Some(1), None]));
    assert_eq!(job.world(ms(26_249)), (0, vec![None; 3]));
    assert_eq!(job.world(ms(26_250)), (2, vec![Some(0), Some(1), None]));
}

/// Torn connections: within the grace a node keeps its place and nobody is disturbed.
#[test]
fn a_node_that_reconnects_within_its_grace_disturbs_nobody() {
    let mut job = Job::started(3, 2, 3);
    for i in 0..20 {
        job.at(seconds(10 + i), Action::Sever(1));
    }
    assert_eq!(job.world(seconds(100)), (1, ranks(&[0, 1, 2])));
}

/// A waiting node's broken connection holds the round up for the grace only, and the node keeps its place in it.
#[test]
fn a_joiner_that_reconnects_within_its_grace_is_in_the_round() {
    let mut job = Job::new(3, 3, 3);
    job.start(seconds(1), 0);
    job.start(seconds(1), 1);
    job.at(seconds(5), Action::Sever(1));
    job.start(seconds(5), 2);
    let (round, world) = job.world(ms(5_100));
    assert_eq!((round, world), (1, ranks(&[0, 1, 2])));
}

/// NVRx PR #391: a joiner that dies between announcing itself and completion was counted in the world.
#[test]
fn a_joiner_that_dies_before_completion_is_no_ghost() {
    let mut job = Job::new(3, 3, 3);
    job.start(seconds(1), 0);
    job.start(seconds(1), 1);
    job.at(seconds(5), Action::Kill(1));
    job.start(seconds(5), 2);
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 1);
    assert_eq!(job.world(seconds(61)), (1, ranks(&[0, 1, 2])));
}

/// NVRx 6330cd4: a node that withdrew was counted.
#[test]
fn a_node_that_withdrew_is_not_counted() {
    let mut job = Job::new(3, 2, 2);
    job.at(seconds(0), Action::Start(0, seconds(10)));
    job.start(seconds(11), 1);
    assert_eq!(job.world(seconds(60)), (0, vec![None; 3]));
    job.start(seconds(61), 2);
    assert_eq!(job.world(seconds(61)), (1, vec![None, Some(0), Some(1)]));
}

// Starting.

/// kubeflow/trainer #2000, #1638: 200 nodes start staggered over minutes; one round, and no timeout.
#[test]
fn a_staggered_start_ends_in_one_round() {
    let mut job = Job::new(200, 200, 200);
    for host in 0..200 {
        job.start(seconds(host as u64), host);
    }
    assert_eq!(job.world(ms(198_999)), (0, vec![None; 200]));
    assert_eq!(job.world(seconds(199)).0, 1);
    assert_eq!(job.0.ledger().rounds, 1);
}

/// The same with `--nnodes=1:200`: every newcomer after the first round has a last call of its own, which batches them.
#[test]
fn a_staggered_elastic_start_forms_a_round_per_last_call_at_most() {
    let mut job = Job::new(200, 1, 200);
    for host in 0..200 {
        job.start(seconds(host as u64), host);
    }
    let (_, world) = job.world(seconds(300));
    assert!(world.iter().all(Option::is_some));
    // 200 s of arrivals, 30 s of last call each, and the round at which all 200 are in.
    assert!(job.0.ledger().rounds <= 200 / 30 + 2, "{} rounds", job.0.ledger().rounds);
}

/// PR #185930, PR #117066: cost grew with the square of N. Here it is linear, and only heartbeats at rest.
#[test]
fn a_thousand_nodes_at_one_instant_cost_a_constant_each() {
    const N: u64 = 1_000;
    let mut job = Job::started(N as usize, N as u32, N as u32);
    let (round, world) = job.world(Duration::ZERO);
    assert_eq!((round, world), (1, (0..N as u32).map(Some).collect()));
    // Hello and Join; Welcome and Complete.
    assert_eq!(job.0.ledger().messages, (2 * N, 2 * N));
    // At rest a heartbeat and its answer per 5 s.
    job.world(seconds(100));
    assert_eq!(job.0.ledger().messages, (2 * N + 20 * N, 2 * N + 20 * N));
    // A loss: one Status to each survivor; then Join and Complete.
    let before = job.0.ledger().messages;
    job.at(seconds(101), Action::Terminate(7));
    job.start(seconds(102), 7);
    assert_eq!(job.world(seconds(103)).0, 2);
    let (from, to) = job.0.ledger().messages;
    assert!(from - before.0 <= 2 * N, "{} messages from nodes", from - before.0);
    assert!(to - before.1 <= 3 * N, "{} messages to nodes", to - before.1);
}

/// When a round closes, by what is missing: exact times.
#[test]
fn a_round_closes_at_these_times() {
    // min, max, starts (s), and when the round is complete (ms).
    for (min, max, starts, complete_at) in [
        (3, 3, vec![0, 0, 0], 0),
        // At max at once, whatever the last call.
        (1, 3, vec![0, 5, 7], 7_000),
        // The last call begins when min is reached, and later nodes do not prolong it.
        (2, 4, vec![0, 10], 40_000),
        (2, 4, vec![0, 10, 39], 40_000),
        (1, 4, vec![3], 33_000),
    ] {
        let mut job = Job::new(starts.len(), min, max);
        for (host, at) in starts.iter().enumerate() {
            job.start(seconds(*at), host);
        }
        if complete_at > 0 {
            assert_eq!(job.world(ms(complete_at - 1)).0, 0, "{min}:{max} {starts:?}");
        }
        assert_eq!(job.world(ms(complete_at)).0, 1, "{min}:{max} {starts:?}");
    }
}

/// Pains row 9: the timeout's message was empty. It says who is in, and how many are missing.
#[test]
fn a_join_timeout_says_who_is_in_and_how_many_are_missing() {
    let mut job = Job::new(4, 4, 8);
    job.at(seconds(0), Action::Start(0, seconds(25)));
    job.start(seconds(0), 1);
    job.world(seconds(25));
    let text = job.join_error(0).to_string();
    assert_eq!(
        text,
        "no round completed within 25.0s: round 1: 2 of 4 to 8 nodes have joined (10.0.0.1 (host0:1), 10.0.0.2 (host1:2)); \
         2 more needed",
    );
}

/// Nodes started with different `--nnodes` formed nothing, and nobody said why.
#[test]
fn different_node_counts_are_refused_naming_both() {
    let mut machine = elastic_rs::rendezvous::machine::Machine::new();
    let now = std::time::Instant::now();
    raw::hello(&mut machine, 1, Settings::new(2, 4), now);
    raw::hello(&mut machine, 2, Settings::new(3, 3), now);
    let told = raw::told(&mut machine, 2);
    assert!(told.contains("node2 asks for 3 to 3 nodes, but run `job` was opened for 2 to 4"), "{told}");
    raw::hello(&mut machine, 3, Settings { max_restarts: Some(3), ..Settings::new(2, 4) }, now);
    let told = raw::told(&mut machine, 3);
    let both = "node3 asks for 3 restarts of the job, but run `job` was opened for restarts counted by each node";
    assert!(told.contains(both), "{told}");
}

// Growing.

/// Pains row 1, #147064: a node that joins a running job killed it or split it, depending on where its address sorts.
#[test]
fn a_third_node_joins_a_running_world_of_two_wherever_its_address_sorts() {
    for addr in ["10.0.0.0", "10.0.0.1x", "10.9.9.9"] {
        let mut options = Options::exact(3, Settings::new(1, 3));
        options.local_addrs.insert(2, addr.to_owned());
        let mut job = Job::with(options);
        job.start(seconds(0), 0);
        job.start(seconds(0), 1);
        assert_eq!(job.world(seconds(30)), (1, vec![Some(0), Some(1), None]), "{addr}");
        job.start(seconds(40), 2);
        // All three are in: at max, so at once. Ranks of survivors stay; the newcomer is last.
        assert_eq!(job.world(seconds(40)), (2, ranks(&[0, 1, 2])), "{addr}");
        let master = |host| job.0.running(host).map(|p| (p.master_addr.clone(), p.master_port));
        assert_eq!(master(2), Some(("10.0.0.1".to_owned(), 30_000)), "{addr}");
        assert!((0..3).all(|host| master(host) == master(2)), "{addr}");
    }
}

/// NVRx PR #357: more joiners than max nodes. The surplus waits, and the job is not disturbed.
#[test]
fn surplus_nodes_wait_and_disturb_nobody() {
    let mut job = Job::new(5, 2, 3);
    for host in 0..5 {
        job.start(seconds(host as u64), host);
    }
    assert_eq!(job.world(seconds(500)), (1, vec![Some(0), Some(1), Some(2), None, None]));
    assert!(job.waits(3) && job.waits(4));
}

/// PR #117066, #114097, pains row 19: a spare takes over; the others restart once and keep their ranks.
#[test]
fn a_surplus_node_is_promoted_when_an_active_one_dies() {
    let mut job = Job::started(3, 2, 2);
    assert_eq!(job.world(seconds(9)), (1, vec![Some(0), Some(1), None]));
    job.at(seconds(10), Action::Kill(1));
    assert_eq!(job.world(ms(10_500)), (2, vec![Some(0), None, Some(1)]));
    assert_eq!(job.0.ledger().rounds, 2);
}

/// #99684, #67615, #182223: rank 0 moved to a cold node. The lowest-ranked survivor has it, and others keep their ranks.
#[test]
fn rank_0_stays_with_a_survivor() {
    let mut job = Job::started(5, 3, 4);
    assert_eq!(job.world(seconds(9)).1, vec![Some(0), Some(1), Some(2), Some(3), None]);
    job.at(seconds(10), Action::Kill(0));
    // host1 moves to 0, the newcomer to its hole.
    assert_eq!(job.world(seconds(12)), (2, vec![None, Some(0), Some(2), Some(3), Some(1)]));
}

// Closing.

/// Pains row 7, #76287: running agents never looked at `closed`. A verdict of failure reaches them at once, with its cause.
#[test]
fn a_failed_verdict_reaches_running_nodes() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::Close(1, failed()));
    assert_eq!(job.world(seconds(10)), (0, vec![None; 3]));
    for host in [0, 2] {
        let [Exit::Closed(view)] = job.exits(host) else {
            panic!("{:?}", job.exits(host));
        };
        assert!(view.contains("rank 3 (host1) exited with code 7"), "{view}");
    }
}

/// NVRx #348: a spare re-joining races with close. Closed wins, and the spare knows that it was one.
#[test]
fn a_spare_that_reconnects_as_the_job_closes_exits_gracefully() {
    let succeeded = Verdict::Succeeded { by: "host0".into() };
    let mut job = Job::new(3, 2, 2);
    for host in 0..3 {
        job.start(seconds(host as u64), host);
    }
    job.at(seconds(10), Action::Sever(2));
    job.at(seconds(10), Action::Close(0, succeeded.clone()));
    job.world(seconds(20));
    assert_eq!(job.join_error(2), &JoinError::Closed { verdict: succeeded, spare: true });
    // Who comes after that is turned away, and is no spare.
    job.start(seconds(30), 2);
    job.world(seconds(30));
    assert!(matches!(job.exits(2), [_, Exit::Join(JoinError::Closed { spare: false, .. })]));
}

/// Pains row 8: a local fault closed the rendezvous for everybody, for good.
#[test]
fn a_node_that_fails_and_comes_back_closes_nothing() {
    let mut job = Job::started(2, 2, 2);
    job.at(seconds(10), Action::FailWorkers(1));
    assert_eq!(job.world(seconds(10)), (2, ranks(&[0, 1])));
    job.at(seconds(20), Action::Terminate(1));
    assert_eq!(job.world(seconds(30)), (0, vec![None; 2]));
    assert!(job.waits(0));
    job.start(seconds(40), 1);
    assert_eq!(job.world(seconds(40)), (3, ranks(&[0, 1])));
}

// Failures and success, as our agent reports them.

fn job_with_budget(hosts: usize, min: u32, max_restarts: Option<u32>) -> Job {
    let mut settings = Settings::new(min, hosts as u32);
    settings.max_restarts = max_restarts;
    let mut job = Job::with(Options::exact(hosts, settings));
    job.0.start_all(Duration::ZERO);
    job
}

fn restarts(job: &Job) -> Vec<u32> {
    (0..job.0.hosts().len()).filter_map(|host| job.0.running(host).map(|place| place.restart)).collect()
}

/// #108158, #135712, pains row 14: counters of two agents diverged. The number is the job's, the same on every node.
#[test]
fn a_failure_raises_the_restart_number_of_all_and_a_loss_does_not() {
    let mut job = job_with_budget(3, 2, Some(5));
    job.at(seconds(10), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(10)), (2, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [1, 1, 1]);
    job.at(seconds(20), Action::Kill(0));
    assert_eq!(job.world(seconds(22)).0, 3);
    assert_eq!(restarts(&job), [1, 1]);
    job.start(seconds(30), 0);
    job.world(seconds(30));
    assert_eq!(restarts(&job), [1, 1, 1], "a newcomer is told the number too");
    job.at(seconds(40), Action::ReportFailure(0));
    job.world(seconds(40));
    assert_eq!(restarts(&job), [2, 2, 2]);
}

/// Horovod #3014, #3264: all workers fail at once on all nodes. One restart, one cause.
#[test]
fn all_nodes_fail_at_once_and_one_restart_is_counted() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.settings.max_restarts = Some(1);
    // Answers take a while, so that all have failed before any is told.
    options.delay = (ms(50), ms(50));
    let mut job = Job::with(options);
    job.0.start_all(Duration::ZERO);
    for host in [2, 0, 1] {
        job.at(seconds(10), Action::ReportFailure(host));
    }
    assert_eq!(job.world(seconds(12)), (2, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [1, 1, 1]);
}

/// Pains rows 7 and 14: with no restarts left every node is told at once, with host, rank and exit of the first cause.
#[test]
fn a_failure_beyond_the_budget_ends_the_job_everywhere_with_its_cause() {
    let mut job = job_with_budget(3, 3, Some(1));
    job.at(seconds(10), Action::ReportFailure(0));
    job.at(seconds(20), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(20)), (0, vec![None; 3]));
    for host in 0..3 {
        let [Exit::Closed(view)] = job.exits(host) else {
            panic!("{:?}", job.exits(host));
        };
        for said in ["10.0.0.2 (host1:2)", "pid: 1001", "exit code 7", "all 1 restarts are used up (max_restarts)"] {
            assert!(view.contains(said), "{said} is not in {view}");
        }
    }
}

/// A worker that notices its peer's end before the coordinator does is not the cause.
#[test]
fn a_failure_while_a_member_is_out_of_reach_costs_no_restart() {
    let mut job = job_with_budget(3, 2, Some(0));
    job.at(seconds(10), Action::Kill(1));
    job.at(ms(10_100), Action::ReportFailure(0));
    assert_eq!(job.world(seconds(13)), (2, vec![Some(0), None, Some(1)]));
    assert_eq!(restarts(&job), [0, 0]);
}

/// A failure reported to a coordinator that has just died is reported to its successor, and the number is not forgotten.
#[test]
fn a_restarted_coordinator_goes_on_with_the_restart_number() {
    let mut job = job_with_budget(3, 3, Some(3));
    job.at(seconds(10), Action::ReportFailure(1));
    job.at(seconds(20), Action::CrashCoordinator);
    job.at(seconds(21), Action::ReportFailure(2));
    job.at(seconds(30), Action::StartCoordinator);
    assert_eq!(job.world(seconds(40)), (3, ranks(&[0, 1, 2])));
    assert_eq!(restarts(&job), [2, 2, 2]);
}

/// Pains row 25, #69520: the exit barrier counted nodes that were gone. The last live member ends it, at once and for all.
#[test]
fn the_job_ends_when_the_last_live_member_is_done() {
    let mut job = job_with_budget(4, 2, Some(0));
    job.at(seconds(10), Action::ReportDone(0));
    job.at(seconds(20), Action::ReportDone(1));
    // Who has finished may go: nobody is disturbed.
    job.at(seconds(30), Action::Kill(1));
    job.at(seconds(3000), Action::ReportDone(2));
    assert_eq!(job.world(seconds(3600)), (1, vec![Some(0), None, Some(2), Some(3)]));
    // Lost before it was done: it is excused, since all others have finished.
    job.at(seconds(3600), Action::Kill(3));
    assert_eq!(job.world(ms(3_600_499)).0, 1);
    assert_eq!(job.world(ms(3_600_500)), (0, vec![None; 4]));
    for host in [0, 2] {
        let [Exit::Closed(view)] = job.exits(host) else { panic!("{:?}", job.exits(host)) };
        assert!(view.contains("all_done: true"), "{view}");
    }
}

/// A node that waits for the others to finish begins anew with them when one fails.
#[test]
fn a_node_that_is_done_begins_anew_when_another_fails() {
    let mut job = job_with_budget(3, 3, Some(1));
    job.at(seconds(10), Action::ReportDone(0));
    job.at(seconds(20), Action::ReportFailure(1));
    assert_eq!(job.world(seconds(20)), (2, ranks(&[0, 1, 2])));
    for host in 0..3 {
        job.at(seconds(30), Action::ReportDone(host));
    }
    assert_eq!(job.world(seconds(30)), (0, vec![None; 3]));
}

/// A newcomer does not make nodes begin anew that have begun to finish.
#[test]
fn a_newcomer_does_not_disturb_a_job_that_is_ending() {
    let mut job = job_with_budget(3, 1, Some(0));
    job.at(seconds(5), Action::Terminate(2));
    job.world(seconds(10));
    job.at(seconds(11), Action::ReportDone(0));
    job.start(seconds(12), 2);
    assert_eq!(job.world(seconds(100)), (2, vec![Some(0), Some(1), None]));
    job.at(seconds(100), Action::ReportDone(1));
    job.world(seconds(100));
    assert!(matches!(job.exits(2), [Exit::Terminated, Exit::Join(JoinError::Closed { spare: true, .. })]));
}

/// The ranks of workers come with the completion.
#[test]
fn ranks_of_workers_come_with_the_place() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.node_ranks = [(0, 2), (1, 1), (2, 0)].into();
    let mut job = Job::with(options);
    job.0.start_all(Duration::ZERO);
    assert_eq!(job.world(seconds(1)).1, ranks(&[2, 1, 0]));
    // Host n has 1 + n workers.
    let workers = |host| job.0.running(host).and_then(|place| place.workers).map(|w| (w.first_rank, w.world_size));
    assert_eq!([workers(2), workers(1), workers(0)], [Some((0, 6)), Some((3, 6)), Some((5, 6))]);
}

// The coordinator.

/// Pains row 6, #67616: a store that stood still expired everybody. A late tick renews all leases.
#[test]
fn a_coordinator_that_stood_still_loses_nobody() {
    let mut job = Job::started(4, 2, 4);
    job.at(ms(10_001), Action::StallCoordinator(seconds(14)));
    job.at(ms(10_002), Action::Kill(3));
    assert_eq!(job.world(ms(24_400)), (1, vec![Some(0), Some(1), Some(2), None]));
    // Only the dead one is lost, and only now can that be known: grace and settling.
    assert_eq!(job.world(seconds(27)), (2, vec![Some(0), Some(1), Some(2), None]));
}

/// Pains row 6: the store's host was frozen, then a node came, and a world of 3 and one of 1 ran at once. Who hears nothing
/// for its lease stops its workers; when the coordinator goes on, one world forms, with the ranks of before.
#[test]
fn a_coordinator_frozen_for_longer_than_the_lease_never_makes_two_worlds() {
    let mut job = Job::new(4, 2, 4);
    for host in 0..3 {
        job.start(seconds(0), host);
    }
    assert_eq!(job.world(seconds(39)), (1, vec![Some(0), Some(1), Some(2), None]));
    // Last answered heartbeats: the first at 5 s after the connection, so at 40 s.
    job.at(ms(40_001), Action::StallCoordinator(seconds(30)));
    job.start(seconds(60), 3);
    assert_eq!(job.world(ms(54_999)), (1, vec![Some(0), Some(1), Some(2), None]));
    assert_eq!(job.world(seconds(55)), (0, vec![None; 4]));
    // The first to be back do not wait for the others for longer than the settle window.
    let (round, world) = job.world(seconds(80));
    assert_eq!((round <= 3, world), (true, ranks(&[0, 1, 2, 3])));
}

/// PR #168242, #118891, pains row 4: the store's host dies and comes back. Workers never notice.
#[test]
fn a_coordinator_that_comes_back_disturbs_nobody() {
    let mut job = Job::started(4, 2, 4);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(38), Action::StartCoordinator);
    assert_eq!(job.world(seconds(200)), (1, ranks(&[0, 1, 2, 3])));
    let run = job.0.run().expect("the nodes have re-attached");
    assert_eq!(run.round(), Round(1));
    // It has taken up enough to go on: a loss is noticed, the ranks are known, the number goes up.
    job.at(seconds(200), Action::Kill(0));
    assert_eq!(job.world(seconds(202)), (2, vec![None, Some(0), Some(1), Some(2)]));
}

/// As above, with a spare: until all members have had time to report, a free place is not taken for one.
#[test]
fn a_spare_waits_while_a_restarted_coordinator_collects_its_members() {
    let mut job = Job::started(4, 2, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(20), Action::StartCoordinator);
    assert_eq!(job.world(seconds(100)), (1, vec![Some(0), Some(1), Some(2), None]));
    assert!(job.waits(3));
}

/// As above, but one member died with the coordinator: one lease later the others re-form, with the spare if there is one.
#[test]
fn a_member_that_does_not_report_to_a_restarted_coordinator_is_replaced() {
    let mut job = Job::started(4, 2, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(10), Action::Kill(1));
    job.at(seconds(20), Action::StartCoordinator);
    // Nodes try again within 2 s; the lease is 15 s.
    assert_eq!(job.world(ms(34_900)), (1, vec![Some(0), None, Some(2), None]));
    assert_eq!(job.world(ms(37_100)), (2, vec![Some(0), None, Some(2), Some(1)]));
}

/// torchft manager: a decider restarted with its counters at zero, and old prefixes were used again.
#[test]
fn round_numbers_never_go_back_when_the_coordinator_restarts() {
    let mut job = Job::started(3, 3, 3);
    for i in 1..=4 {
        job.at(seconds(10 * i), Action::FailWorkers(0));
    }
    assert_eq!(job.world(seconds(50)).0, 5);
    job.at(seconds(50), Action::CrashCoordinator);
    // All fail while it is away, and join a coordinator that knows nothing.
    for host in 0..3 {
        job.at(seconds(51), Action::FailWorkers(host));
    }
    job.at(seconds(60), Action::StartCoordinator);
    assert_eq!(job.world(seconds(70)), (6, ranks(&[0, 1, 2])));
}

/// torchft manager: an error at the decider was not passed on, and waiters hung. (`check_answers` counts at each exit.)
#[test]
fn every_waiter_is_answered_when_the_coordinator_goes_away_for_good() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.coordinator_timeout = seconds(60);
    let mut job = Job::with(options);
    job.start(seconds(0), 0);
    job.start(seconds(0), 1);
    job.at(seconds(10), Action::CrashCoordinator);
    // This one never reaches a coordinator, and says so when its join timeout ends.
    job.at(seconds(11), Action::Start(2, seconds(30)));
    job.world(seconds(70));
    for host in [0, 1] {
        let text = job.join_error(host).to_string();
        assert_eq!(
            text,
            "the coordinator at coordinator:29400 has been out of reach for 60.0s (coordinator_timeout): connection refused"
        );
    }
    let text = job.join_error(2).to_string();
    assert_eq!(text, "could not reach the coordinator at coordinator:29400 in 30.0s: connection refused");
}

/// Pains row 15: the host starts 120 s late; the others keep trying.
#[test]
fn nodes_keep_trying_until_the_coordinator_is_there() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(0), Action::CrashCoordinator);
    job.at(seconds(120), Action::StartCoordinator);
    assert_eq!(job.world(seconds(122)), (1, ranks(&[0, 1, 2])));
}

/// torchft PR #70: a split leaves two halves with at least min nodes each. The half without the coordinator forms nothing.
#[test]
fn the_half_without_the_coordinator_forms_no_world() {
    let mut job = Job::started(4, 2, 4);
    for host in [2, 3] {
        for end in [End::Node, End::Coordinator] {
            job.at(seconds(10), Action::Cut(host, end, seconds(60), Partition::Lost));
        }
    }
    // Last heard of at 5 s, or at 10 s: then 15 s, and two worlds never run at once.
    job.world(ms(19_999));
    assert_eq!(job.world(ms(26_300)), (2, vec![Some(0), Some(1), None, None]));
    assert!(job.waits(2) && job.waits(3), "they form nothing by themselves");
    // Healed, they are let in again.
    assert_eq!(job.world(seconds(110)), (3, ranks(&[0, 1, 2, 3])));
}

/// The same one way: what the nodes say is lost, or what they are told.
#[test]
fn a_node_cut_off_one_way_stops_before_the_others_go_on() {
    for end in [End::Node, End::Coordinator] {
        let mut job = Job::started(3, 2, 3);
        job.at(ms(10_001), Action::Cut(2, end, seconds(60), Partition::Lost));
        assert_eq!(job.world(ms(24_999)), (1, ranks(&[0, 1, 2])), "{end:?}");
        let process = |job: &Job| job.0.hosts()[2].process.as_ref().map(|process| process.machine.view().clone());
        assert_eq!(process(&job).expect("it lives").fenced, None);
        // 15 s after the last message that was answered.
        let (_, world) = job.world(seconds(25));
        assert_eq!(world[2], None, "{end:?}");
        assert_eq!(job.world(seconds(33)), (2, vec![Some(0), Some(1), None]), "{end:?}");
    }
}

/// `on_partition=continue`: workers that are cut off run on, and stop when they hear that the others went on.
#[test]
fn a_node_that_may_go_on_when_cut_off_does() {
    let mut settings = Settings::new(2, 3);
    settings.on_partition = OnPartition::Continue;
    let mut job = Job::with(Options::exact(3, settings));
    job.0.start_all(Duration::ZERO);
    for end in [End::Node, End::Coordinator] {
        job.at(seconds(10), Action::Cut(2, end, seconds(60), Partition::Lost));
    }
    job.0.run_until(seconds(60)).expect("invariants hold");
    assert_eq!(job.0.running(2).map(|place| place.round.0), Some(1));
    assert_eq!(job.0.running(0).map(|place| place.round.0), Some(2));
    assert_eq!(job.world(seconds(110)), (3, ranks(&[0, 1, 2])));
}

/// A node that was stopped (SIGSTOP) for longer than its lease stops its workers as soon as it goes on, before it has heard
/// that the others went on without it.
#[test]
fn a_node_that_stood_still_finds_at_once_that_its_lease_is_over() {
    let mut job = Job::started(3, 2, 3);
    job.at(ms(10_001), Action::Stall(2, seconds(40)));
    // It cannot be told, either.
    job.at(seconds(30), Action::Cut(2, End::Node, seconds(60), Partition::Held));
    job.0.run_until(ms(50_001)).expect("invariants hold");
    assert_eq!(job.0.running(2), None);
    assert_eq!(job.world(seconds(150)).1, ranks(&[0, 1, 2]));
}

/// Who is refused knows that nobody decides: the coordinator's process is gone, and workers train on for minutes.
#[test]
fn a_coordinator_that_is_gone_for_longer_than_a_lease_stops_no_workers() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(200), Action::StartCoordinator);
    assert_eq!(job.world(seconds(300)), (1, ranks(&[0, 1, 2])));
}

// What was said too late.

/// NVRx 6d7b54d: a message of round N arrived in N+1 and was applied.
#[test]
fn a_join_of_an_earlier_round_is_answered_and_not_applied() {
    let mut machine = elastic_rs::rendezvous::machine::Machine::new();
    let now = std::time::Instant::now();
    for node in [1, 2] {
        raw::hello(&mut machine, node, Settings::new(2, 2), now);
        raw::join(&mut machine, node, 0, now);
    }
    assert!(raw::told(&mut machine, 1).contains("round: Round(1), rank: 0"));
    // Node 1 had not heard of it when its connection broke, and asks again.
    raw::join(&mut machine, 1, 0, now);
    let told = raw::told(&mut machine, 1);
    assert!(told.contains("round: Round(1), rank: 0"), "{told}");
    let run = machine.run("job").expect("the run is known");
    assert_eq!(run.round(), Round(1));
    assert!(run.nodes().all(|(_, status, _)| *status == elastic_rs::rendezvous::state::Status::Active));
}

/// A place that was given before the withdrawal was read, and arrived after the node had joined again, was taken for the
/// answer to the second join: the node then ran round 1 while the others ran round 2.
#[test]
fn a_place_given_before_a_withdrawal_is_no_answer_to_the_next_join() {
    let mut options = Options::exact(2, Settings::new(2, 2));
    options.rejoin = true;
    let mut job = Job::with(options);
    job.at(seconds(0), Action::Start(0, seconds(10)));
    // What the coordinator says reaches host0 five seconds late.
    job.at(seconds(9), Action::Cut(0, End::Node, seconds(5), Partition::Held));
    job.start(ms(9_500), 1);
    assert_eq!(job.world(seconds(30)), (2, vec![Some(1), Some(0)]));
}

mod raw {
    //! A machine without a network: node `n` has session `n`.

    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Instant;

    use elastic_rs::rendezvous::machine::{Command, Machine};
    use elastic_rs::rendezvous::message::{Hello, Join, NodeId, NodeMessage, Round};
    use elastic_rs::rendezvous::settings::Settings;
    use elastic_rs::rendezvous::state::{Ends, SessionId};

    pub fn hello(machine: &mut Machine, node: u64, settings: Settings, now: Instant) {
        let hello = Hello {
            run_id: "job".to_owned(),
            node: NodeId(node.into()),
            name: format!("node{node}"),
            local_addr: None,
            process: 0,
            node_rank: None,
            settings,
            placed: None,
            joining: true,
        };
        let addr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8));
        machine.on_hello(SessionId(node), hello, Ends { peer: addr, local: addr }, now);
    }

    pub fn join(machine: &mut Machine, node: u64, round: u64, now: Instant) {
        let join = Join { round: Round(round), store_port: 1, node_rank: None, workers: None };
        machine.on_message(SessionId(node), NodeMessage::Join(join), now);
    }

    /// All that a node is told now, as text; the rest is dropped.
    pub fn told(machine: &mut Machine, node: u64) -> String {
        let commands = machine.take_commands().into_iter();
        let told = commands.filter(|c| matches!(c, Command::Send { session, .. } if *session == SessionId(node)));
        told.map(|command| format!("{command:?}")).collect()
    }
}
