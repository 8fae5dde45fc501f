//! Simulations of jobs whose workers live through changes of the world, under seeded faults and exhaustively. The checks are in
//! `crates/sim/src/coordinator/elastic.rs` and `src/sim/coordinator/ledger`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::seeds::{asked_for, live_through};
use elastic_rs::rendezvous::messages::message::{Generation, Placement, Resume};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs_sim::coordinator::elastic::Elastic;
use elastic_rs_sim::coordinator::elastic_plan::{draw, live};
use elastic_rs_sim::coordinator::history::live_plan;
use elastic_rs_sim::coordinator::{Action, Options, Simulation};
use elastic_rs_sim::engine::paths::{End, Partition};
use elastic_rs_sim::worlds::Violation;

#[test]
fn invariants_hold_for_all_seeds() {
    let seeds = asked_for(300);
    let few = seeds.end - seeds.start < 300;
    let lived = live_through(seeds, live, "simulation elastic::invariants_hold_for_all_seeds");
    let mut elastic_history = BTreeMap::new();
    for (what, count) in lived.into_iter().flat_map(|(_, counts)| counts) {
        *elastic_history.entry(what).or_insert(0) += count;
    }
    println!("{elastic_history:?}");
    // Everything must happen to workers, or it is not tested. A change that is called off is too rare for histories:
    // tests/rendezvous/in_place has it.
    for what in [
        "stop at a check",
        "stop at a check, and leave",
        "go back to their commits",
        "go on with their states",
        "go on with the source's state",
        "are restarted",
    ] {
        assert!(few || elastic_history.contains_key(what), "no workers {what}: {elastic_history:?}");
    }
}

#[test]
fn a_seed_determines_a_history() {
    for seed in 0..10 {
        let (Ok(one), Ok(other)) = (live(seed, false), live(seed, true)) else { continue };
        assert_eq!(one, other, "seed {seed}");
    }
}

/// The number of a commit alone says how new a state is.
#[test]
fn seeds_find_a_source_by_the_number_of_its_commit_alone() {
    let seeds = asked_for(300);
    let few = seeds.end - seeds.start < 300;
    let broken = |seed: u64| {
        let mut plan = draw(seed);
        plan.options.elastic.by_number_alone = true;
        live_plan(seed, &plan, false).err().map(|failure| failure.violation.text)
    };
    let texts: Vec<_> = seeds.filter_map(broken).collect();
    let count = |what: &str| texts.iter().filter(|text| text.contains(what)).count();
    let (lost, older) = (count("and a member has committed"), count("and a member has the state of"));
    println!("{} break: {lost} lose commits, {older} begin with the state of an older world", texts.len());
    assert!(few || lost > 0, "no history loses a commit: {texts:?}");
    assert!(few || older > 0, "no history begins with the state of an older world: {texts:?}");
}

// Scenarios. Times are exact, because messages take no time, and workers count and stop at once.

fn job(hosts: usize, min: u32) -> Simulation {
    let elastic = Elastic { hosts: (0..hosts).collect(), ..Elastic::default() };
    Simulation::new(Options { elastic, ..Options::exact(hosts, Settings::new(min, hosts as u32)) })
}

fn run(job: &mut Simulation, seconds: f64) {
    job.run_until(Duration::from_secs_f64(seconds)).unwrap_or_else(|violation| panic!("{violation}"));
}

/// The round of each host's workers, and how they began.
fn worlds(job: &Simulation) -> Vec<Option<(u64, Option<Resume>)>> {
    let hosts = 0..job.hosts().len();
    let resume = |placement: &Placement| match placement.resume.clone()? {
        Resume::Continue { source, sync, survivors, .. } => {
            Some(Resume::Continue { source, sync, survivors, generation: Generation::default() })
        }
        resume @ Resume::Restart { .. } => Some(resume),
    };
    hosts.map(|host| job.running(host).map(|placement| (placement.round.0, resume(placement)))).collect()
}

fn goes_on(round: u64, survivors: u32, sync: bool) -> Option<(u64, Option<Resume>)> {
    Some((round, Some(Resume::Continue { source: 0, sync, survivors, generation: Generation::default() })))
}

fn start(job: &mut Simulation, seconds: u64, host: usize) {
    job.at(Duration::from_secs(seconds), Action::Start(host, Duration::from_secs(600)));
}

#[test]
fn a_node_that_joins_changes_the_world_in_place_when_its_last_call_is_over() {
    let mut job = job(4, 2);
    (0..2).for_each(|host| start(&mut job, 0, host));
    run(&mut job, 30.0);
    assert_eq!(worlds(&job), [goes_on(1, 0, true), goes_on(1, 0, true), None, None]);
    start(&mut job, 40, 2);
    run(&mut job, 69.9);
    assert_eq!(job.running(0).map(|placement| placement.round.0), Some(1), "the members run on meanwhile");
    run(&mut job, 70.0);
    assert_eq!(worlds(&job), [goes_on(2, 3, true), goes_on(2, 3, true), goes_on(2, 3, true), None]);
    // The maximum is reached.
    start(&mut job, 80, 3);
    run(&mut job, 80.0);
    assert_eq!(worlds(&job)[3], goes_on(3, 6, true));
    assert_eq!(job.elastic_history().get("go back to their commits"), None);
}

#[test]
fn a_node_that_leaves_costs_no_step() {
    let mut job = job(3, 1);
    job.start_all(Duration::ZERO);
    job.at(Duration::from_secs(10), Action::AskToLeave(1));
    run(&mut job, 10.0);
    assert_eq!(worlds(&job), [goes_on(2, 4, false), None, goes_on(2, 4, false)]);
    assert_eq!(job.elastic_history().get("go back to their commits"), None);
}

#[test]
fn a_node_that_dies_leaves_the_others_their_workers() {
    let mut job = job(3, 1);
    job.start_all(Duration::ZERO);
    job.at(Duration::from_secs(10), Action::Kill(0));
    run(&mut job, 12.0);
    assert_eq!(worlds(&job), [None, goes_on(2, 5, true), goes_on(2, 5, true)]);
}

/// Host 0 is out of reach for a moment, and the workers of the others end meanwhile. These begin again from the checkpoint. Host 0 comes
/// back with its workers, into a world that breaks before they have the state of the others.
fn comes_back_with_an_older_state(by_number_alone: bool) -> Result<Simulation, Violation> {
    let sync = Duration::from_secs(3);
    let elastic = Elastic { hosts: (0..3).collect(), sync: (sync, sync), by_number_alone, ..Elastic::default() };
    let mut job = Simulation::new(Options { elastic, ..Options::exact(3, Settings::new(2, 3)) });
    job.start_all(Duration::ZERO);
    // Each of these worlds commits.
    for seconds in [4, 8, 12, 16] {
        job.at(Duration::from_secs(seconds), Action::FailWorkers(1));
    }
    let cut_for = Duration::from_secs(4);
    for to in [End::Coordinator, End::Node] {
        job.at(Duration::from_secs(20), Action::Cut(0, to, cut_for, Partition::Lost));
    }
    job.at(Duration::from_secs(20), Action::Sever(0));
    job.at(Duration::from_secs(20), Action::LoseWorkers(1));
    job.at(Duration::from_secs(20), Action::LoseWorkers(2));
    let round = |job: &Simulation| job.running(0).map(|placement| placement.round.0);
    while round(&job) != Some(7) {
        assert!(job.now() < Duration::from_secs(60), "host 0 is not back: {:?}", worlds(&job));
        job.run_until(job.now() + Duration::from_millis(100))?;
    }
    assert_eq!(job.hosts().iter().map(|host| host.placements.len()).collect::<Vec<_>>(), [6, 7, 7]);
    let now = job.now();
    job.at(now, Action::FailWorkers(2));
    job.run_until(now + Duration::from_secs(10))?;
    Ok(job)
}

#[test]
fn a_node_that_comes_back_with_an_older_state_is_not_the_source() {
    let job = comes_back_with_an_older_state(false).unwrap_or_else(|violation| panic!("{violation}"));
    let placement = job.running(0).unwrap();
    let Some(Resume::Continue { source, sync: true, generation, .. }) = &placement.resume else { panic!() };
    assert_eq!((placement.round.0, generation.round.0), (8, 6));
    assert_ne!(placement.workers.map(|workers| workers.first_rank), Some(*source), "host 0 has one worker");
}

#[test]
fn a_source_by_the_number_of_its_commit_alone_is_caught() {
    let Err(violation) = comes_back_with_an_older_state(true) else { panic!("nothing is found") };
    assert!(violation.text.contains("and a member has"), "{violation}");
}

/// Nodes of which only some can change in place are restarted together, with the reason.
#[test]
fn workers_that_live_are_restarted_beside_those_that_cannot() {
    let mut options = Options::exact(3, Settings::new(3, 3));
    options.elastic.hosts = [0, 2].into();
    let mut job = Simulation::new(options);
    job.start_all(Duration::ZERO);
    job.at(Duration::from_secs(10), Action::FailWorkers(2));
    run(&mut job, 10.0);
    let Some((2, Some(Resume::Restart { reason }))) = &worlds(&job)[0] else { panic!("{:?}", worlds(&job)) };
    assert!(reason.contains("(host1:2) had to stop its workers"), "{reason}");
}

/// The coordinator dies between the change and the check. Its successor brings the change to its end.
#[test]
fn a_change_goes_on_at_a_restarted_coordinator() {
    let mut options = Options::exact(3, Settings::new(1, 3));
    let late = Duration::from_secs(3);
    options.elastic = Elastic { hosts: (0..3).collect(), count: (late, late), ..Elastic::default() };
    let mut job = Simulation::new(options);
    job.start_all(Duration::ZERO);
    job.at(Duration::from_secs(10), Action::AskToLeave(2));
    job.at(Duration::from_secs(12), Action::CrashCoordinator);
    job.at(Duration::from_secs(14), Action::StartCoordinator);
    run(&mut job, 19.0);
    assert_eq!(worlds(&job), [goes_on(2, 3, false), goes_on(2, 3, false), None]);
    assert_eq!(job.elastic_history().get("go back to their commits"), None);
}

/// Exhaustively. `make test-long` finds the longer bounds by the module's name.
mod explore {
    use std::time::Duration;

    use super::{run, start};
    use crate::explore::{bounds, check, options};
    use elastic_rs_sim::coordinator::{Action, Simulation, explore};

    fn elastic(hosts: usize, min: u32) -> Simulation {
        let mut options = options(hosts, min, hosts as u32);
        options.elastic.hosts = (0..hosts).collect();
        explore::job(options)
    }

    fn attended(hosts: usize, min: u32) -> Simulation {
        let mut job = elastic(hosts, min);
        job.start_all(Duration::ZERO);
        run(&mut job, 4.0);
        job
    }

    #[test]
    fn a_member_of_two_leaves_in_any_order_of_events() {
        // `make test-long` allows for another fault meanwhile.
        let others = match std::env::var("ELASTIC_RS_EXPLORE_LONG") {
            Ok(_) => vec![Action::Kill(1), Action::FailWorkers(1), Action::Sever(1), Action::CrashCoordinator],
            Err(_) => vec![],
        };
        let mut leaving = attended(2, 1);
        leaving.at(leaving.now(), Action::AskToLeave(0));
        check("asks to leave", &leaving, &bounds(0, 1, vec![]));
        for other in others {
            check(&format!("asks to leave, {other:?}"), &leaving, &bounds(1, 0, vec![other]));
        }
    }

    #[test]
    fn a_third_node_joins_in_any_order_of_events() {
        let mut job = elastic(3, 1);
        (0..2).for_each(|host| start(&mut job, 0, host));
        run(&mut job, 4.0);
        // `make test-long` allows for a wait at any place.
        let waits = u8::from(std::env::var("ELASTIC_RS_EXPLORE_LONG").is_ok());
        check("a third joins", &job, &bounds(0, waits, vec![]));
    }
}
