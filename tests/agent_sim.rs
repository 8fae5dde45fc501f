//! Whole histories of jobs with our agents and their workers under seeded faults; what is checked is in `src/sim/agent.rs` and
//! `src/sim/invariants.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use elastic_rs::sim::agent_plan::{Counts, live};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number")))
}

/// Live through some seeds. The first in which an invariant breaks is told with its last events.
fn check(seeds: impl IntoIterator<Item = u64>) -> Counts {
    let mut ends = Counts::new();
    let mut failing = Vec::new();
    for seed in seeds {
        match live(seed, false) {
            Ok((_, counts)) => counts.into_iter().for_each(|(kind, count)| *ends.entry(kind).or_default() += count),
            Err(failure) => failing.push(failure),
        }
    }
    let Some(first) = failing.first() else { return ends };
    let seed = first.seed;
    let again = live(seed, true).expect_err("a seed is a whole history");
    let lines = number("ELASTIC_RS_SIM_LINES", 60) as usize;
    let last = again.history.len().saturating_sub(lines);
    let all: Vec<_> = failing
        .iter()
        .map(|failure| format!("  seed {} at {:.3?}: {}", failure.seed, failure.at, failure.violation))
        .collect();
    panic!(
        "seed {seed}\nreplay: ELASTIC_RS_SIM_SEED={seed} ELASTIC_RS_SIM_SEEDS=1 cargo test --features sim --test \
         agent_sim invariants\n{}\nall that failed:\n{}",
        again.history[last..].join("\n"),
        all.join("\n"),
    );
}

#[test]
fn invariants_hold_for_all_seeds() {
    let first = number("ELASTIC_RS_SIM_SEED", 0);
    let seeds = number("ELASTIC_RS_SIM_SEEDS", 200);
    let ends = check(first..first + seeds);
    if seeds < 200 {
        return;
    }
    // What never comes up is not tested.
    for kind in ["succeeded", "not needed", "failed", "no place", "signal"] {
        assert!(ends.contains_key(kind), "no agent ended as `{kind}`: {ends:?}");
    }
}

#[test]
fn a_seed_is_a_whole_history() {
    for seed in 0..10 {
        let (Ok(one), Ok(other)) = (live(seed, false), live(seed, true)) else { continue };
        assert_eq!(one, other, "seed {seed}");
    }
}
