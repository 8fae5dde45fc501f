//! The invariants of any rendezvous, checked on the places that agents hold.
//!
//! [`super::coordinator`] checks our rendezvous with this code, and [`super::pytorch`] checks PyTorch's.

use std::collections::BTreeSet;
use std::fmt;

use super::engine::paths::HostId;
use super::engine::queue::Time;
use elastic_rs::rendezvous::messages::codec::CodecError;
use elastic_rs::rendezvous::messages::settings::Settings;

/// The invariants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// No two worlds run at once.
    OneWorld,
    /// All members of a completed round hold the same world.
    SameWorld,
    /// Ranks are unique and dense.
    Ranks,
    /// No world is smaller than `min_nodes` or larger than `max_nodes`.
    WorldSize,
    /// Survivors notice a lost member in time.
    LossNoticed,
    /// Once faults stop, as many nodes as may run do so, in one world.
    Settles,
    /// Further promises of our rendezvous: fencing by round, ranks that stay, answers, reasons.
    Contract,
}

/// An invariant does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant.
    pub invariant: Invariant,
    /// What was found.
    pub text: String,
}

impl Violation {
    /// A violation of a promise of ours.
    pub fn contract(text: String) -> Self {
        Self { invariant: Invariant::Contract, text }
    }
}

/// Checks a promise of ours.
///
/// # Errors
/// It does not hold.
pub(super) fn ensure_contract(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Violation> {
    ensure(Invariant::Contract, holds, otherwise)
}

impl From<CodecError> for Violation {
    fn from(error: CodecError) -> Self {
        Self::contract(format!("bytes that we have sent are not a session's: {error}"))
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.invariant, self.text)
    }
}

/// A place, as its holder knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The agent's host.
    pub host: HostId,
    /// The round.
    pub round: u64,
    /// Tells worlds of one round apart.
    pub world: u64,
    /// Its rank there.
    pub rank: u32,
    /// The number of nodes that it got.
    pub size: u32,
}

/// Checks that the places of one round, or those taken so far, fit together, and that their number is allowed.
///
/// # Errors
/// The first contradiction.
pub fn check_world(round: u64, placements: &[Held], settings: &Settings) -> Result<(), Violation> {
    let Settings { min_nodes, max_nodes, .. } = settings;
    let Some(first) = placements.first() else { return Ok(()) };
    let mut ranks = BTreeSet::new();
    for placement in placements {
        ensure(Invariant::WorldSize, (*min_nodes..=*max_nodes).contains(&placement.size), || {
            format!("round {round} has {} nodes, not {min_nodes} to {max_nodes}: {placement:?}", placement.size)
        })?;
        ensure(Invariant::SameWorld, (placement.size, placement.world) == (first.size, first.world), || {
            format!("round {round}: {first:?} and {placement:?} hold different worlds")
        })?;
        ensure(Invariant::Ranks, placement.rank < placement.size && ranks.insert(placement.rank), || {
            format!("round {round}: rank {} is given twice, or too high: {placement:?}", placement.rank)
        })?;
    }
    Ok(())
}

/// Checks that no node still runs an earlier round when this one exists. Nodes that are exempt are not in `running`.
///
/// # Errors
/// The node that does.
pub fn check_one_world(round: u64, running: impl IntoIterator<Item = Held>) -> Result<(), Violation> {
    let other = running.into_iter().find(|held| held.round < round);
    match other {
        None => Ok(()),
        Some(Held { host, round: earlier, .. }) => Err(Violation {
            invariant: Invariant::OneWorld,
            text: format!("round {round} completes while host{host} still runs round {earlier}"),
        }),
    }
}

/// Checks that the loss of a member of `round` at `at` was noticed. Nodes that run it `undisturbed` well after have not been notified.
///
/// # Errors
/// The first such node.
pub fn check_noticed(
    round: u64,
    at: Time,
    now: Time,
    undisturbed: impl IntoIterator<Item = HostId>,
) -> Result<(), Violation> {
    match undisturbed.into_iter().next() {
        None => Ok(()),
        Some(host) => Err(Violation {
            invariant: Invariant::LossNoticed,
            text: format!(
                "host{host} still runs round {round} undisturbed at {now:?}, a member of which died at {at:?}"
            ),
        }),
    }
}

/// Checks a settled job: as many nodes as may run do so, in one world, and the others wait. With too few nodes, none runs.
///
/// # Errors
/// A node that does not.
pub fn check_settled(live: usize, stopping: usize, running: &[Held], settings: &Settings) -> Result<(), Violation> {
    let Settings { min_nodes, max_nodes, .. } = settings;
    let expected = if live < *min_nodes as usize { 0 } else { live.min(*max_nodes as usize) };
    let rounds: BTreeSet<_> = running.iter().map(|held| held.round).collect();
    let ranks: BTreeSet<_> = running.iter().map(|held| held.rank).collect();
    let whole = running.len() == expected && stopping == 0 && rounds.len() <= 1 && ranks.len() == expected;
    ensure(Invariant::Settles, whole && running.iter().all(|held| held.size as usize == expected), || {
        format!(
            "{live} nodes live (of {min_nodes} to {max_nodes}), {stopping} stop, {} run, which should be {expected} in one \
             world: {running:?}",
            running.len(),
        )
    })
}

fn ensure(invariant: Invariant, holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { invariant, text: otherwise() }) }
}
