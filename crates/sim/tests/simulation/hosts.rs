//! Simulations of jobs that keep hosts out for their failures, and whose worlds count workers. The checks are in
//! `src/sim/coordinator/ledger`: no world has fewer or more workers than it may, no node of a host that is out is in one, and ranks are
//! dense.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::coordinator::hosts_plan::{Outcome, live, live_as, many_hosts};

fn sum(all: impl IntoIterator<Item = Outcome>) -> Outcome {
    all.into_iter().fold(Outcome::default(), |sum, one| Outcome {
        exclusions: sum.exclusions + one.exclusions,
        cut: sum.cut + one.cut,
    })
}

#[test]
fn invariants_hold_for_all_seeds() {
    let seeds = asked_for(100);
    let few = seeds.end - seeds.start < 100;
    let lived = live_through(seeds, live, "simulation hosts::invariants_hold_for_all_seeds");
    let all = sum(lived.into_iter().map(|(_, outcome)| outcome));
    println!("{all:?}");
    // Both must happen often, or they are not tested.
    assert!(few || (all.exclusions >= 30 && all.cut >= 30), "{all:?}");
}

#[test]
fn a_seed_determines_a_history() {
    for seed in 0..10 {
        let (Ok(one), Ok(other)) = (live(seed, false), live(seed, true)) else { continue };
        assert_eq!(one, other, "seed {seed}");
    }
}

/// One in a hundred fails in each minute.
#[test]
fn a_thousand_hosts_that_fail_stay_a_job() {
    let plan = many_hosts(1, 1000, 1);
    let live = |seed, keep| live_as(seed, &plan, keep);
    let lived = live_through([1], live, "simulation hosts::a_thousand_hosts_that_fail_stay_a_job");
    let (report, outcome) = &lived[0];
    println!("{report:?} {outcome:?}");
    assert!(report.rounds >= 5 && outcome.exclusions >= 3, "{report:?} {outcome:?}");
}
