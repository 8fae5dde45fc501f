//! Simulations of a driver and its hosts. The checks are in `crates/sim/src/discovery/mod.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::discovery::{Cluster, live};

#[test]
fn invariants_hold_for_all_seeds() {
    let lived = live_through(asked_for(300), live, "simulation discovery::invariants_hold_for_all_seeds");
    let sum = |count: fn(&Cluster) -> u64| lived.iter().map(|report| count(&report.cluster)).sum::<u64>();
    assert!(
        sum(|it| it.losses) > 0 && sum(|it| it.hangs) > 0 && sum(|it| it.script_faults) > 0,
        "no faults prove nothing"
    );
    assert!(lived.iter().any(|report| report.kills > 0) && lived.iter().any(|report| report.leaves > 0));
}

#[test]
fn a_thousand_hosts_of_which_one_in_a_hundred_fails_per_minute() {
    let cluster = Cluster { hosts: 1000, minutes: 10, losses: 100, ..Cluster::default() };
    let report = elastic_rs_sim::discovery::live_in(1, cluster, false).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(report.starts >= 1100, "1000 hosts, and one start more after each of 100 losses: {report:?}");
}

#[test]
fn a_seed_determines_a_history() {
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..20 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
    }
}
