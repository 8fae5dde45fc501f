//! Simulations of jobs with a list of endpoints. The checks are in `crates/sim/src/takeover/checks.rs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one.

use std::time::Instant;

use crate::seeds::{asked_for, live_through};
use elastic_rs_sim::takeover::{Report, live};

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
