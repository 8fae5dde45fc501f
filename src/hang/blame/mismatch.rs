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

/// Most numbers for which there is a table.
const DENSE: u64 = 1 << 13;

/// What is known of the collectives of one number.
#[derive(Clone, Copy)]
struct Seen {
    seq: u64,
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
    let (low, high) = here
        .iter()
        .flat_map(|(_, group)| entries(group))
        .fold((u64::MAX, 0), |(low, high), entry| (entry.seq.min(low), entry.seq.max(high)));
    // Numbers of one group are near one another, unless a rank lies.
    let near = high.saturating_sub(low);
    let mut dense = vec![None; if near < DENSE { near as usize + 1 } else { 0 }];
    let mut sparse: HashMap<u64, Seen> = HashMap::new();
    for (at, group) in &here {
        for entry in entries(group) {
            let Some(signature) = world.number(*at, entry.signature) else { continue };
            let first = Seen { seq: entry.seq, signature, differs: false, ranks: 0 };
            let of = match usize::try_from(entry.seq - low).ok().and_then(|at| dense.get_mut(at)) {
                Some(slot) => slot.get_or_insert(first),
                None => sparse.entry(entry.seq).or_insert(first),
            };
            of.differs |= of.signature != signature;
            of.ranks += 1;
        }
    }
    // What is pending is known for longer. It is compared if all that have come so far still know it.
    let all_know = |of: &Seen| here.iter().filter(|(_, group)| group.last >= of.seq).count() <= of.ranks;
    let seen = dense.iter().flatten().chain(sparse.values());
    let seq = seen.filter(|of| of.differs && (of.seq >= from || all_know(of))).map(|of| of.seq).min()?;

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
