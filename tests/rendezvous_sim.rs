//! Whole histories of jobs under seeded faults; what is checked is in `src/sim/invariants.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use std::ops::Range;

use elastic_rs::sim::plan::live;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number"))
    })
}

/// Live through a range of seeds. The first in which an invariant breaks is told with its last events.
fn check(seeds: Range<u64>) {
    let failing: Vec<_> = seeds.filter_map(|seed| live(seed, false).err()).collect();
    let Some(first) = failing.first() else { return };
    let seed = first.seed;
    let again = live(seed, true).expect_err("a seed is a whole history");
    let lines = number("ELASTIC_RS_SIM_LINES", 60) as usize;
    let last = again.history.len().saturating_sub(lines);
    let all: Vec<_> = failing
        .iter()
        .map(|failure| format!("  seed {} at {:.3?}: {}", failure.seed, failure.at, failure.violation.0))
        .collect();
    panic!(
        "seed {seed}\nreplay: ELASTIC_RS_SIM_SEED={seed} ELASTIC_RS_SIM_SEEDS=1 cargo test --features sim --test \
         rendezvous_sim seeds\n{}\nall that failed:\n{}",
        again.history[last..].join("\n"),
        all.join("\n"),
    );
}

#[test]
fn invariants_hold_for_all_seeds() {
    let first = number("ELASTIC_RS_SIM_SEED", 0);
    check(first..first + number("ELASTIC_RS_SIM_SEEDS", 300));
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
