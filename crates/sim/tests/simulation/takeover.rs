//! Simulations of jobs with a list of endpoints. The checks are in `crates/sim/src/takeover/checks.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::Instant;

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::takeover::{Mutation, Report, live, live_with};

#[test]
fn invariants_hold_for_all_seeds() {
    let began = Instant::now();
    let lived = live_through(asked_for(400), live, "simulation takeover::invariants_hold_for_all_seeds");
    let sum = |count: fn(&Report) -> u64| lived.iter().map(count).sum::<u64>();
    println!(
        "{} seeds in {:.1} s: {} rounds, {} take-overs, {} of them promised",
        lived.len(),
        began.elapsed().as_secs_f64(),
        sum(|it| it.rounds),
        sum(|it| it.takeovers),
        sum(|it| it.promises)
    );
}

/// Each mistake, and the number of seeds within which an invariant shows it.
const MISTAKES: [(Mutation, u64); 9] = [
    (Mutation::KeepsItsId, 1000),
    (Mutation::RefusalRenews, 1000),
    (Mutation::SaidEarly, 1000),
    (Mutation::NobodyIsWaitedFor, 1000),
    (Mutation::EndIsProof, 1000),
    (Mutation::ResetIsProof, 1000),
    (Mutation::SilenceIsAbsence, 1000),
    (Mutation::ThreadDiesAlone, 1000),
    (Mutation::NoDeadline, 1000),
];
/// So many of the last events are printed.
const SHOWN: usize = 12;

#[test]
fn each_mistake_shows() {
    let mut missed = Vec::new();
    for (mutation, within) in MISTAKES {
        let found = (0..within).find_map(|seed| live_with(seed, Some(mutation), false).err());
        let Some(found) = found else {
            missed.push(mutation);
            continue;
        };
        let again = live_with(found.seed, Some(mutation), true).expect_err("a seed determines a history");
        let last = again.history.len().saturating_sub(SHOWN);
        println!(
            "{mutation:?}, seed {} at {:.3?}: {}\n{}\n",
            found.seed,
            found.at,
            found.violation,
            again.history[last..].join("\n")
        );
    }
    assert!(missed.is_empty(), "{missed:?} violate nothing");
}

#[test]
fn a_seed_determines_a_history() {
    for seed in 0..20 {
        let (one, other) = (live(seed, false), live(seed, true));
        assert_eq!(one.ok(), other.ok(), "seed {seed}");
    }
}
