//! Simulations of jobs over one shared cell. The checks are in `src/sim/cell`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use crate::seeds::{asked_for, live_through};
use elastic_rs::sim::cell::live;
use elastic_rs::sim::etcd::{self, EtcdReport};

#[test]
fn invariants_hold_for_all_seeds() {
    let lived = live_through(asked_for(300), live, "simulation cell::invariants_hold_for_all_seeds");
    assert!(lived.iter().any(|report| report.rounds > 0), "histories without a round prove nothing");
}

#[test]
fn a_seed_determines_a_history() {
    // A seed that breaks an invariant must break the same one at the same time.
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    let etcd = |seed, keep| etcd::live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..20 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
        assert_eq!(etcd(seed, false), etcd(seed, true), "seed {seed}");
    }
}

fn over_etcd(seeds: impl IntoIterator<Item = u64>) -> Vec<EtcdReport> {
    live_through(seeds, etcd::live, "simulation cell::over_etcd_one_world_forms_at_a_time")
}

/// The same nodes over a model of etcd: leases that end, watches in order, compaction.
#[test]
fn over_etcd_one_world_forms_at_a_time() {
    let seeds = asked_for(300);
    let few = seeds.end - seeds.start < 20;
    let lived = over_etcd(seeds);
    assert!(few || lived.iter().any(|report| report.rounds > 1), "histories of one round prove little");
}

/// A new lease alone proves nothing: the node's key may have ended with the old lease, and a world may form without the node.
#[test]
fn over_etcd_a_new_lease_counts_only_once_the_nodes_key_is_attached_to_it() {
    over_etcd([2314]);
}

/// The answer to the write that put the node's key may be lost. The node must be fenced all the same.
#[test]
fn over_etcd_a_node_is_fenced_by_its_key_even_if_it_learns_of_it_by_a_watch() {
    over_etcd([196, 481, 939, 1389]);
}

/// A watch may end while a write is under way. Without a new watch, a running node would hear nothing.
#[test]
fn over_etcd_a_watch_that_ends_during_a_write_is_replaced() {
    over_etcd([8398]);
}

/// The answer to the write that closed a round may be lost. If the node finds its place when other nodes wait already, it must also
/// learn that they wait.
#[test]
fn over_etcd_a_place_that_is_found_late_comes_with_the_waiting_nodes() {
    over_etcd([5575, 6702]);
}
