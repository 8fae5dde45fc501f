//! Histories: all of them up to a bound, the shortest that violates an invariant, and random ones.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use super::model::{Bounds, Quorum};
use crate::engine::dice::Dice;

/// A history has room for so many steps on the stack. Unused memory is not touched.
const STACK_BYTES: usize = 1 << 30;
/// No limit on the length of a history.
const UNLIMITED: usize = usize::MAX;

/// A state of a model.
pub(super) trait State: Sized + Send + Sync {
    /// A digest of everything that decides what may happen from here on.
    fn digest(&self) -> u64;

    /// The invariant that does not hold.
    fn violation(&self) -> Option<String>;

    /// Each step that may happen now, in words, and the state after it.
    fn next(&self) -> impl Iterator<Item = (String, Self)>;
}

/// Go through all histories from here. Returns the number of states.
///
/// # Errors
/// The first history that violates an invariant, a line each step.
pub(super) fn explore_from(start: &impl State) -> Result<usize, String> {
    std::thread::scope(|scope| {
        let search = || {
            let mut search = Search::default();
            search.violates(start, UNLIMITED).map_or(Ok(search.seen.len()), Err)
        };
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, search);
        thread.expect("a thread starts").join().expect("the search ends")
    })
}

/// Go through all histories of a quorum. Returns the number of states.
///
/// # Errors
/// The first history that violates an invariant, a line each step.
pub fn explore(bounds: &Bounds) -> Result<usize, String> {
    explore_from(&Quorum::new(bounds, Instant::now()))
}

/// The shortest history that violates an invariant, of at most this many steps.
pub fn shortest(bounds: &Bounds, limit: usize) -> Option<String> {
    let start = Quorum::new(bounds, Instant::now());
    (1..=limit).find_map(|limit| Search::default().violates(&start, limit))
}

/// A random history of so many steps.
///
/// # Errors
/// It violates an invariant.
pub fn walk(bounds: &Bounds, seed: u64, steps: usize) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    let mut quorum = Quorum::new(bounds, Instant::now());
    let mut trace = Vec::new();
    for _ in 0..steps {
        let all = quorum.steps();
        let Some(last) = all.len().checked_sub(1) else { return Ok(()) };
        let step = &all[dice.between(0, last as u64) as usize];
        trace.push(quorum.describe(step));
        quorum.step(step);
        if let Some(violation) = quorum.violation() {
            return Err(format!("seed {seed}:\n{}\n{violation}", trace.join("\n")));
        }
    }
    Ok(())
}

/// A digest of a part of a state.
pub(super) fn digest_of(part: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    part.hash(&mut hasher);
    hasher.finish()
}

#[derive(Default)]
struct Search {
    /// Each state that was seen, and how many more steps were allowed then.
    seen: HashMap<u64, usize>,
    trace: Vec<String>,
}

impl Search {
    /// A history from here on, of at most so many steps, that violates an invariant.
    fn violates(&mut self, state: &impl State, left: usize) -> Option<String> {
        if let Some(violation) = state.violation() {
            return Some(format!("{}\n{violation}", self.trace.join("\n")));
        }
        let seen = self.seen.entry(state.digest()).or_default();
        if *seen >= left {
            return None; // nor is any step left when that is 0
        }
        *seen = left;
        let after = if left == UNLIMITED { left } else { left - 1 };
        for (step, next) in state.next() {
            self.trace.push(step);
            if let Some(history) = self.violates(&next, after) {
                return Some(history);
            }
            self.trace.pop();
        }
        None
    }
}
