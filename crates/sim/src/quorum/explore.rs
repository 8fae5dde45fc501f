//! Histories: all of them up to a bound, the shortest that violates an invariant, and random ones.

use std::collections::HashMap;
use std::time::Instant;

use super::deep;
use super::model::{Bounds, Quorum};
use crate::engine::dice::Dice;

/// Go through all histories.
///
/// # Errors
/// The first that violates an invariant, a line each step.
pub fn explore(bounds: &Bounds) -> Result<usize, String> {
    deep(|| {
        let mut search = Search { seen: HashMap::new(), trace: Vec::new() };
        match search.violates(&Quorum::new(bounds, Instant::now()), usize::MAX) {
            Some(history) => Err(history),
            None => Ok(search.seen.len()),
        }
    })
}

/// The shortest history that violates an invariant, of at most this many steps.
pub fn shortest(bounds: &Bounds, limit: usize) -> Option<String> {
    let start = Quorum::new(bounds, Instant::now());
    (1..=limit).find_map(|limit| Search { seen: HashMap::new(), trace: Vec::new() }.violates(&start, limit))
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
        trace.push(quorum.told(step));
        quorum.step(step);
        if let Some(violation) = quorum.violation() {
            return Err(format!("seed {seed}:\n{}\n{violation}", trace.join("\n")));
        }
    }
    Ok(())
}

struct Search {
    /// Each state, and with how many steps left it was seen.
    seen: HashMap<u64, usize>,
    trace: Vec<String>,
}

impl Search {
    /// A history from here on, of at most so many steps, that violates an invariant.
    fn violates(&mut self, quorum: &Quorum<'_>, left: usize) -> Option<String> {
        if let Some(violation) = quorum.violation() {
            return Some(format!("{}\n{violation}", self.trace.join("\n")));
        }
        let seen = self.seen.insert(quorum.digest(), left).filter(|seen| *seen >= left);
        if left == 0 || seen.is_some() {
            return None;
        }
        for step in quorum.steps() {
            let mut next = quorum.clone();
            if !next.step(&step) {
                continue;
            }
            self.trace.push(quorum.told(&step));
            if let Some(history) = self.violates(&next, left.saturating_sub(1)) {
                return Some(history);
            }
            self.trace.pop();
        }
        None
    }
}
