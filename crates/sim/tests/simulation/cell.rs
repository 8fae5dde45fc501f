//! Simulations of jobs over one shared cell. The checks are in `src/sim/cell`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::cell::{CellReport, live, live_with_a_host_that_leaves};

#[test]
fn invariants_hold_for_all_seeds() {
    let lived = live_through(asked_for(100), live, "simulation cell::invariants_hold_for_all_seeds");
    assert!(lived.iter().any(|report| report.rounds > 0), "histories without a round prove nothing");
    // Of a history without losses every cause is recorded.
    let reported = |report: &CellReport| report.breaks > 0 && report.lossless;
    assert!(lived.len() < 50 || lived.iter().any(reported), "no recorded cause was looked for");
}

/// The others would not learn how the job ended.
#[test]
fn seeds_find_a_host_of_the_cell_that_leaves_with_the_final_write() {
    let found = (0..20).filter_map(|seed| live_with_a_host_that_leaves(seed, false).err());
    let found: Vec<_> = found.map(|failure| failure.violation.to_string()).collect();
    assert!(found.iter().any(|it| it.contains("ends without knowing how the job ended")), "{found:?}");
}

/// A place that becomes free in a decision must not go to a waiting node that the same decision finds lost.
#[test]
fn no_rank_goes_to_a_waiting_node_that_is_lost() {
    live_through([3647, 4089, 6767], live, "simulation cell::invariants_hold_for_all_seeds");
}

/// A join may be abandoned after the Hello that announces it and before the answer. It must be withdrawn all the same.
#[test]
fn a_join_that_is_abandoned_before_the_welcome_is_withdrawn() {
    live_through([9371], live, "simulation cell::invariants_hold_for_all_seeds");
}

#[test]
fn a_seed_determines_a_history() {
    // A seed that breaks an invariant must break the same one at the same time.
    let lived = |seed, keep| live(seed, keep).map_err(|failure| (failure.at, failure.violation.to_string()));
    for seed in 0..20 {
        assert_eq!(lived(seed, false), lived(seed, true), "seed {seed}");
    }
}
