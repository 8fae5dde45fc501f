//! Simulations of jobs under seeded faults. The checks are in `src/sim/coordinator/ledger`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::coordinator::history::{live, live_with_host};
use elastic_rs_sim::coordinator::strange_plan;

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

fn check_among_odd_hosts(seeds: impl IntoIterator<Item = u64>) -> BTreeMap<&'static str, usize> {
    let mut all = BTreeMap::new();
    let lived = live_through(seeds, strange_plan::live, "simulation rendezvous::invariants_hold_among_odd_hosts");
    for (kind, count) in lived.into_iter().flat_map(|(_, refusals)| refusals) {
        *all.entry(kind).or_default() += count;
    }
    all
}

#[test]
fn invariants_hold_for_all_seeds() {
    check(asked_for(150));
}

/// The coordinator is in the process of the first host's agent, and stalls, ends and comes back with it.
#[test]
fn invariants_hold_with_the_coordinator_in_an_agents_process() {
    live_through(asked_for(150), live_with_host, "simulation rendezvous::invariants_hold_with_the_coordinator");
}

/// Several runs on one coordinator, agents with another's address, other settings and versions, static ranks, and `rejoin_limit`.
#[test]
fn invariants_hold_among_odd_hosts() {
    let seeds = asked_for(150);
    let all = seeds.end - seeds.start >= 150;
    let refusals = check_among_odd_hosts(seeds);
    println!("{refusals:?}");
    // Every kind of refusal must occur, or it is not tested.
    for kind in ["settings", "replaced", "flapping", "version", "several runs"].into_iter().filter(|_| all) {
        assert!(refusals.contains_key(kind), "never: {kind}; {refusals:?}");
    }
}

/// The news that a world is over may be lost with a connection. It must be repeated, or the node runs on.
#[test]
fn a_node_that_comes_back_is_notified_that_its_world_is_over() {
    check([4, 15, 51]);
}

/// A place that is repeated after a reconnect must be followed by an interruption that has come since.
#[test]
fn a_repeated_placement_is_followed_by_later_news() {
    check([76, 109, 563]);
}

/// A restarted coordinator may use a round number again. Members of the first world with that number must not pass for the second's.
#[test]
fn a_round_number_used_twice_does_not_mix_two_worlds() {
    check([187, 500, 591]);
}

/// A restarted coordinator may hear of an earlier world from a member that has stopped. Another member of it may still run.
#[test]
fn a_world_claimed_by_a_member_that_has_stopped_may_still_run() {
    check([1_005_704]);
}

/// The checker must not take a member of another world with the same round number for a survivor.
#[test]
fn survivors_are_those_of_the_world_that_goes_on() {
    check([16_713]);
}

/// The calm may begin just after the host's agent has left, while its coordinator still serves. The plan must start it again.
#[test]
fn a_coordinator_that_ends_with_its_host_is_started_again() {
    live_through([505, 736, 3990], live_with_host, "simulation rendezvous::invariants_hold_with_the_coordinator");
}

/// An odd host may name a round so high that members of it are not believed at a coordinator that was restarted again. They are rejected
/// then: no place that this coordinator offers would be new to them.
#[test]
fn rounds_that_are_not_believed_are_nobodys_last() {
    check_among_odd_hosts([3768, 9065]);
}

#[test]
fn a_seed_determines_a_history() {
    // A seed that breaks an invariant must break the same one at the same time.
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..10 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
    }
}
