//! Ranks that have entered different collectives under one number.

use std::collections::{BTreeMap, HashMap};

use super::world::{Team, World};
use crate::hang::view::{Entry, Group, Signature};

/// The first number under which ranks of a group have entered different collectives.
pub(super) struct Mismatch {
    pub seq: u64,
    /// Who has entered what, the fewest ranks first.
    pub classes: Vec<(Signature, Vec<u32>)>,
    /// The ranks that differ from most: all of them, if no class is the largest.
    pub ranks: Vec<u32>,
    pub tie: bool,
}

/// What is known of the collectives of one number.
struct Seen {
    signature: u32,
    differs: bool,
    ranks: usize,
}

/// The first mismatch of a group in which ranks wait. One that everybody has passed explains nothing if nobody waits.
pub(super) fn find(world: &World<'_>, team: &Team<'_>) -> Option<Mismatch> {
    let here: Vec<_> = team.known.iter().filter(|(_, group)| begins(group).is_some()).collect();
    if team.pending.is_empty() || here.len() < 2 {
        return None;
    }
    // Before the latest beginning some have forgotten what they entered.
    let from = here.iter().filter_map(|(_, group)| begins(group)).max()?;
    let mut seen: HashMap<u64, Seen> = HashMap::new();
    for (at, group) in &here {
        for entry in entries(group) {
            let Some(signature) = world.number(*at, entry.signature) else { continue };
            let of = seen.entry(entry.seq).or_insert(Seen { signature, differs: false, ranks: 0 });
            of.differs |= of.signature != signature;
            of.ranks += 1;
        }
    }
    // What is pending is known for longer. It is compared if all that have come so far still know it.
    let all_know = |seq: u64, ranks: usize| here.iter().filter(|(_, group)| group.last >= seq).count() <= ranks;
    let differing = seen.iter().filter(|(seq, of)| of.differs && (**seq >= from || all_know(**seq, of.ranks)));
    let seq = differing.map(|(seq, _)| *seq).min()?;

    let mut classes: BTreeMap<&Signature, Vec<u32>> = BTreeMap::new();
    for (at, group) in &here {
        let entry = entries(group).find(|entry| entry.seq == seq);
        if let Some(signature) = entry.and_then(|entry| world.views[*at].signature(entry)) {
            classes.entry(signature).or_default().push(world.views[*at].rank);
        }
    }
    let mut classes: Vec<_> = classes.into_iter().map(|(signature, ranks)| (signature.clone(), ranks)).collect();
    classes.sort_by_key(|(_, ranks)| ranks.len());
    let (_, largest) = classes.last()?;
    let tie = classes.iter().filter(|(_, ranks)| ranks.len() == largest.len()).count() > 1;
    let named = if tie { classes.len() } else { classes.len() - 1 };
    let mut ranks: Vec<_> = classes[..named].iter().flat_map(|(_, ranks)| ranks.iter().copied()).collect();
    ranks.sort_unstable();
    Some(Mismatch { seq, ranks, tie, classes })
}

/// The number from which on all collectives of a group are known.
fn begins(group: &Group) -> Option<u64> {
    group.tail.first().or(group.pending.first()).map(|entry| entry.seq)
}

/// What is known of a group's collectives, each number once.
fn entries(group: &Group) -> impl Iterator<Item = &Entry> {
    let begins = group.tail.first().map_or(u64::MAX, |entry| entry.seq);
    group.pending.iter().filter(move |entry| entry.seq < begins).chain(&group.tail)
}
