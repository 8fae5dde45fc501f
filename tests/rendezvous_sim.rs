//! Whole histories of jobs under seeded faults; what is checked is in `src/sim/invariants.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets how many seeds are lived through, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::{Duration, Instant};

use elastic_rs::sim::plan::live;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number")))
}

/// Live through some seeds. The first in which an invariant breaks is told with its last events.
fn check(seeds: impl IntoIterator<Item = u64>) {
    let (mut failing, mut count, mut lived, began) = (Vec::new(), 0, Duration::ZERO, Instant::now());
    for seed in seeds {
        count += 1;
        match live(seed, false) {
            Ok(report) => lived += report.lived,
            Err(failure) => failing.push(failure),
        }
    }
    let took = began.elapsed().as_secs_f64();
    println!(
        "{count} seeds in {took:.1} s: {:.0} per minute, {:.0} simulated seconds per second",
        60.0 * f64::from(count) / took,
        lived.as_secs_f64() / took
    );
    let Some(first) = failing.first() else { return };
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

/// A node ran on in a world that had gone on without it: the news was lost with its connection, and not told again.
#[test]
fn a_node_that_comes_back_is_told_that_its_world_is_over() {
    check([4, 15, 51]);
}

/// A place was told again after a reconnect, but not the interruption that had come meanwhile.
#[test]
fn a_place_told_again_is_followed_by_what_came_after_it() {
    check([76, 109, 563]);
}

/// A restarted coordinator gave a round's number anew; members of the first round of that number passed for the second's.
#[test]
fn a_number_given_anew_does_not_mix_two_worlds() {
    check([187, 500, 591]);
}

/// A restarted coordinator heard of an earlier life's world from a member that had stopped, and closed a round while another member
/// still ran.
#[test]
fn a_world_named_by_a_member_that_has_stopped_may_still_run() {
    check([1_005_704]);
}

/// The checker took a member of another world with the same number for a survivor, and missed its rank.
#[test]
fn survivors_are_those_of_the_world_that_goes_on() {
    check([16_713]);
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
