//! Whole histories of jobs over one shared cell; what is checked is in `src/sim/cell.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

mod seeds;

use elastic_rs::sim::cell::live;
use seeds::asked_for;

#[test]
fn invariants_hold_for_all_seeds() {
    let mut rounds = 0;
    let mut failed = Vec::new();
    for seed in asked_for(300) {
        match live(seed) {
            Ok(report) => rounds += report.rounds,
            Err((at, violation)) => failed.push(format!("  seed {seed} at {at:.3?}: {}", violation.text)),
        }
    }
    assert!(
        failed.is_empty(),
        "replay: ELASTIC_RS_SIM_SEED=… ELASTIC_RS_SIM_SEEDS=1 cargo test --features sim --test rendezvous_cas_sim\n{}",
        failed.join("\n")
    );
    assert!(rounds > 0, "histories without a round prove nothing");
}

#[test]
fn a_seed_is_a_whole_history() {
    for seed in 0..20 {
        assert_eq!(live(seed).ok(), live(seed).ok(), "seed {seed}");
    }
}

/// The same nodes over a model of etcd: leases that end, watches in order, compaction.
#[test]
fn over_etcd_one_world_forms_at_a_time() {
    let seeds = asked_for(300);
    let first = seeds.start;
    let failed: Vec<_> = seeds
        .filter_map(|seed| Some((seed, elastic_rs::sim::etcd::live(seed).err()?)))
        .map(|(seed, (at, violation))| format!("  seed {seed} at {at:.3?}: {}", violation.text))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!((first..first + 20).any(|seed| elastic_rs::sim::etcd::live(seed).is_ok_and(|rounds| rounds > 1)));
}

/// A new lease was taken for a sign of life although the node's key had ended with the old one, and a world formed without it.
#[test]
fn over_etcd_a_new_lease_shows_nothing_before_the_nodes_key_hangs_on_it() {
    assert_eq!(elastic_rs::sim::etcd::live(2314).err().map(|(_, violation)| violation.text), None);
}

/// The answer to the write that put the node's key was lost, and with it the time by which the node had to stop its workers.
#[test]
fn over_etcd_a_node_is_fenced_by_its_key_however_it_learns_of_it() {
    for seed in [196, 481, 939, 1389] {
        assert_eq!(elastic_rs::sim::etcd::live(seed).err().map(|(_, violation)| violation.text), None, "seed {seed}");
    }
}
