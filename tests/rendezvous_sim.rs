//! Whole histories of jobs under seeded faults; what is checked is in `src/sim/invariants.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use elastic_rs::sim::plan::live;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number"))
    })
}

/// Live through one seed, and again with its history if an invariant breaks.
fn check(seed: u64) {
    if live(seed, false).is_err() {
        let failure = live(seed, true).expect_err("a seed is a whole history");
        let last = failure
            .history
            .len()
            .saturating_sub(number("ELASTIC_RS_SIM_LINES", 60) as usize);
        panic!(
            "seed {seed}\nreplay: ELASTIC_RS_SIM_SEED={seed} ELASTIC_RS_SIM_SEEDS=1 cargo test --features sim --test \
             rendezvous_sim seeds\nat {:?}: {}\n{}",
            failure.at,
            failure.violation.0,
            failure.history[last..].join("\n"),
        );
    }
}

#[test]
fn invariants_hold_for_all_seeds() {
    let first = number("ELASTIC_RS_SIM_SEED", 0);
    for seed in first..first + number("ELASTIC_RS_SIM_SEEDS", 300) {
        check(seed);
    }
}

#[test]
fn a_seed_is_a_whole_history() {
    for seed in 0..10 {
        let (Ok(one), Ok(other)) = (live(seed, false), live(seed, true)) else {
            continue;
        };
        assert_eq!(one, other, "seed {seed}");
    }
}
