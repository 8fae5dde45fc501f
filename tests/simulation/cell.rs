//! Whole histories of jobs over one shared cell; what is checked is in `src/sim/cell.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::Duration;

use crate::seeds::{asked_for, live_through};
use elastic_rs::sim::cell::live;
use elastic_rs::sim::etcd;
use elastic_rs::sim::plan::Failure;
use elastic_rs::sim::worlds::Violation;

/// A failure in the form in which all are told. These histories keep no events.
fn told<T>(seed: u64, lived: Result<T, (Duration, Violation)>) -> Result<T, Box<Failure>> {
    lived.map_err(|(at, violation)| Box::new(Failure { seed, at, violation, history: Vec::new() }))
}

#[test]
fn invariants_hold_for_all_seeds() {
    let lived = live_through(
        asked_for(300),
        |seed, _| told(seed, live(seed)),
        "simulation cell::invariants_hold_for_all_seeds",
    );
    assert!(lived.iter().any(|report| report.rounds > 0), "histories without a round prove nothing");
}

#[test]
fn a_seed_is_a_whole_history() {
    // One that breaks an invariant breaks the same one at the same moment.
    let lived = |seed| live(seed).map_err(|(at, violation)| (at, violation.to_string()));
    for seed in 0..20 {
        assert_eq!(lived(seed), lived(seed), "seed {seed}");
    }
}

/// The same nodes over a model of etcd: leases that end, watches in order, compaction.
#[test]
fn over_etcd_one_world_forms_at_a_time() {
    let seeds = asked_for(300);
    let few = seeds.end - seeds.start < 20;
    let rounds = live_through(
        seeds,
        |seed, _| told(seed, etcd::live(seed)),
        "simulation cell::over_etcd_one_world_forms_at_a_time",
    );
    assert!(few || rounds.iter().any(|rounds| *rounds > 1), "histories of one round prove little");
}

/// A new lease was taken for a sign of life although the node's key had ended with the old one, and a world formed without it.
#[test]
fn over_etcd_a_new_lease_shows_nothing_before_the_nodes_key_hangs_on_it() {
    assert_eq!(etcd::live(2314).err().map(|(_, violation)| violation.text), None);
}

/// The answer to the write that put the node's key was lost, and with it the time by which the node had to stop its workers.
#[test]
fn over_etcd_a_node_is_fenced_by_its_key_however_it_learns_of_it() {
    for seed in [196, 481, 939, 1389] {
        assert_eq!(etcd::live(seed).err().map(|(_, violation)| violation.text), None, "seed {seed}");
    }
}

/// A watch that ended while a write was under way was forgotten with its answer, and a node that ran heard of nothing any more.
#[test]
fn over_etcd_a_watch_that_ends_during_a_write_is_begun_anew() {
    assert_eq!(etcd::live(8398).err().map(|(_, violation)| violation.text), None);
}

/// The answer to the write that closed a round was lost. When the node found its place at last others waited already, and nothing told
/// it so again.
#[test]
fn over_etcd_a_place_that_is_found_late_comes_with_who_waits() {
    for seed in [5575, 6702] {
        assert_eq!(etcd::live(seed).err().map(|(_, violation)| violation.text), None, "seed {seed}");
    }
}
