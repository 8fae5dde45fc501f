//! Whole histories of jobs under seeded faults; what is checked is in `src/sim/invariants.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::seeds::{asked_for, live_through};
use elastic_rs::sim::plan::{live, live_with_host};
use elastic_rs::sim::strange_plan;

fn check(seeds: impl IntoIterator<Item = u64>) {
    let began = Instant::now();
    let lived = live_through(seeds, live, "simulation rendezvous::invariants_hold_for_all_seeds");
    let (took, count) = (began.elapsed().as_secs_f64(), lived.len());
    let virtual_time: Duration = lived.iter().map(|report| report.lived).sum();
    println!(
        "{count} seeds in {took:.1} s: {:.0} per minute, {:.0} simulated seconds per second",
        60.0 * count as f64 / took,
        virtual_time.as_secs_f64() / took
    );
}

fn check_among_strangers(seeds: impl IntoIterator<Item = u64>) -> BTreeMap<&'static str, usize> {
    let mut all = BTreeMap::new();
    let lived = live_through(seeds, strange_plan::live, "simulation rendezvous::invariants_hold_among_strangers");
    for (kind, count) in lived.into_iter().flat_map(|(_, refusals)| refusals) {
        *all.entry(kind).or_default() += count;
    }
    all
}

#[test]
fn invariants_hold_for_all_seeds() {
    check(asked_for(300));
}

/// The coordinator is in the process of the first host's agent: it stands still, ends and comes back with that.
#[test]
fn invariants_hold_with_the_coordinator_in_an_agents_process() {
    live_through(asked_for(300), live_with_host, "simulation rendezvous::invariants_hold_with_the_coordinator");
}

/// Several runs on one coordinator, agents at another's place, other settings and versions, ranks asked for, limits on coming back.
#[test]
fn invariants_hold_among_strangers() {
    let seeds = asked_for(300);
    let all = seeds.end - seeds.start >= 300;
    let refusals = check_among_strangers(seeds);
    println!("{refusals:?}");
    // What never comes up is not tested.
    for kind in ["settings", "replaced", "flapping", "version", "several runs"].into_iter().filter(|_| all) {
        assert!(refusals.contains_key(kind), "never: {kind}; {refusals:?}");
    }
}

/// A node ran on in a world that had gone on without it: the news was lost with its connection, and not told again.
#[test]
fn a_node_that_comes_back_is_told_that_its_world_is_over() {
    check([4, 15, 51]);
}

/// A place was told again after a reconnect, but not the interruption that had come meanwhile.
#[test]
fn a_place_told_again_is_followed_by_what_came_after_it() {
    check([76, 109, 563]);
}

/// A restarted coordinator gave a round's number anew; members of the first round of that number passed for the second's.
#[test]
fn a_number_given_anew_does_not_mix_two_worlds() {
    check([187, 500, 591]);
}

/// A restarted coordinator heard of an earlier life's world from a member that had stopped, and closed a round while another member
/// still ran.
#[test]
fn a_world_named_by_a_member_that_has_stopped_may_still_run() {
    check([1_005_704]);
}

/// The checker took a member of another world with the same number for a survivor, and missed its rank.
#[test]
fn survivors_are_those_of_the_world_that_goes_on() {
    check([16_713]);
}

/// The calm began while the coordinator served on for the moment after its host's agent had left: it passed for one that runs, and was
/// not started when that moment was over.
#[test]
fn a_coordinator_that_ends_with_its_host_is_started_again() {
    live_through([505, 736, 3990], live_with_host, "simulation rendezvous::invariants_hold_with_the_coordinator");
}

#[test]
fn a_seed_is_a_whole_history() {
    // One that breaks an invariant breaks the same one at the same moment.
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..10 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
    }
}
