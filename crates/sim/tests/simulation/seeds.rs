//! Run a simulation with many seeds, and report those that fail.

use elastic_rs_sim::engine::history::Failure;

/// A number from the environment, such as `ELASTIC_RS_SIM_SEEDS`.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number")))
}

/// The seeds to run: `ELASTIC_RS_SIM_SEEDS` of them, from `ELASTIC_RS_SIM_SEED` on.
pub fn asked_for(default: u64) -> std::ops::Range<u64> {
    let first = number("ELASTIC_RS_SIM_SEED", 0);
    first..first + number("ELASTIC_RS_SIM_SEEDS", default)
}

/// Run some seeds. Panics if an invariant breaks, with the last events of the first such seed, and the command that replays it.
/// `replay` follows `--test` in that command.
pub fn live_through<T>(
    seeds: impl IntoIterator<Item = u64>,
    live: impl Fn(u64, bool) -> Result<T, Box<Failure>>,
    replay: &str,
) -> Vec<T> {
    let (mut lived, mut failing) = (Vec::new(), Vec::new());
    for seed in seeds {
        match live(seed, false) {
            Ok(report) => lived.push(report),
            Err(failure) => failing.push(failure),
        }
    }
    let Some(first) = failing.first() else { return lived };
    let seed = first.seed;
    let Err(again) = live(seed, true) else {
        panic!("seed {seed} fails, and a second run of it passes: a seed must determine the history")
    };
    let lines = number("ELASTIC_RS_SIM_LINES", 60) as usize;
    let last = again.history.len().saturating_sub(lines);
    let all: Vec<_> = failing
        .iter()
        .map(|failure| format!("  seed {} at {:.3?}: {}", failure.seed, failure.at, failure.violation))
        .collect();
    panic!(
        "seed {seed}\nreplay: ELASTIC_RS_SIM_SEED={seed} ELASTIC_RS_SIM_SEEDS=1 cargo test -p elastic_rs_sim --test \
         {replay}\n{}\nall that failed:\n{}",
        again.history[last..].join("\n"),
        all.join("\n"),
    );
}
