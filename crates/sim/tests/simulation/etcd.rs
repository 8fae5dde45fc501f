//! Simulations of jobs over etcd. The model is in `src/sim/etcd`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::etcd::{
    Defect, EtcdReport, live, live_quietly, live_through_deletion, live_with, live_without_leader,
};

fn lived(seeds: impl IntoIterator<Item = u64>) -> Vec<EtcdReport> {
    live_through(seeds, live, "simulation etcd::one_world_forms_at_a_time")
}

#[test]
fn one_world_forms_at_a_time() {
    let seeds = asked_for(300);
    let few = seeds.end - seeds.start < 20;
    let lived = lived(seeds);
    assert!(few || lived.iter().any(|report| report.rounds > 1), "histories of one round prove little");
}

/// Several nodes are lost at once, or as this node gives up its place. No round may close with one of them in passing.
#[test]
fn no_round_closes_with_a_node_that_is_lost_in_the_same_decision() {
    lived([411, 569, 1457, 2727, 5679]);
}

/// The state changes while a node puts its wish. It must see the new state before it decides.
#[test]
fn a_state_that_changes_while_a_wish_is_put_is_seen_first() {
    lived([1268]);
}

#[test]
fn a_seed_determines_a_history() {
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..20 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
    }
}

/// Whoever leads next first renews all leases. So members that know no leader vouch for those who ask them.
#[test]
fn a_cluster_without_a_leader_disturbs_nobody() {
    live_through(0..50, |seed, _| live_without_leader(Defect::None, seed), "");
    let disturbed = (0..50).filter(|seed| live_without_leader(Defect::NoSurvey, *seed).is_err()).count();
    assert!(disturbed > 0, "an outage without a survey must be seen to stop workers");
}

#[test]
fn the_nodes_go_on_after_somebody_has_deleted_the_state() {
    live_through(0..50, |seed, _| live_through_deletion(seed), "");
}

/// What one of many nodes writes for all, the others need not write.
#[test]
fn joins_of_many_nodes_take_few_transactions() {
    for hosts in [1, 8, 64] {
        let report = live_quietly(1, hosts).unwrap_or_else(|failure| panic!("{failure:?}"));
        assert_eq!(report.rounds, 1);
        assert!(report.txns <= 4 * hosts as u64 + 8, "{hosts} nodes: {} transactions", report.txns);
    }
}

/// The histories find what they are there to find. A renewal that counts from a later asking leaves two worlds.
#[test]
fn a_renewal_that_counts_from_a_later_asking_is_found() {
    let lived = |seed| live_with(Defect::RenewalFromLastAsking, seed, false);
    assert!((900..1_000).any(|seed| lived(seed).is_err()));
}
