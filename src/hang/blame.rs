//! Who holds the others up: a pure function of what all ranks look like at one time.
//!
//! A rank *waits* in a collective that not all members of its group have entered. Whoever is waited for and waits for nobody is a
//! *root*. The first rule that applies names ranks:
//!
//! 1. a root has ended, or nobody has a view of it; 2. a root is stopped;
//! 3. in a group with waiting ranks, some have entered something else under the same number: the fewest ranks;
//! 4. a root does not answer; 5. a root has not come; 6. there are waiting ranks and no root: a circle;
//! 7. all have entered and live: the library or the network, no rank; 8. nobody waits in what torch records: a guess from states and
//!    lines.
//!
//! Numbers of collectives are compared across ranks, times never.

use std::collections::BTreeMap;

use super::finding::{Collective, Entered, Finding, Kind};
use super::view::{Gil, View};

mod crossing;
mod guess;
mod mismatch;
mod places;
mod waits;
mod world;

use waits::{On, Waits};
use world::{Trouble, World};

/// Say who holds the others up. The order of the views does not matter. Those of an earlier round are dropped.
pub fn blame(views: &[View]) -> Finding {
    let world = World::new(views);
    let waits = Waits::new(&world);
    let mut finding = find(&world, &waits);
    places::add(&world, &mut finding);
    finding.fit();
    finding
}

fn find(world: &World<'_>, waits: &Waits<'_>) -> Finding {
    if !world.views.is_empty() && world.views.iter().all(|view| view.is_stopped()) {
        return named(world, waits, Kind::Suspended, world.ranks().collect());
    }
    let roots = waits.roots();
    let with = |trouble| roots.iter().copied().filter(|(rank, _)| world.trouble(*rank) == Some(trouble)).collect();
    let held_up_by = |kind, roots: Vec<(u32, On)>| (!roots.is_empty()).then(|| root(world, waits, kind, &roots));
    held_up_by(Kind::Ended, with(Trouble::Ended))
        .or_else(|| held_up_by(Kind::Absent, with(Trouble::Absent)))
        .or_else(|| held_up_by(Kind::Stopped, with(Trouble::Stopped)))
        .or_else(|| mismatch(world, waits))
        .or_else(|| silent(world, waits, with(Trouble::Silent)))
        .or_else(|| held_up_by(Kind::NotEntered, late(world, waits, &roots)))
        .or_else(|| circle(world, waits))
        .or_else(|| inside(world, waits))
        .unwrap_or_else(|| guess::guess(world))
}

/// Ranks that others wait for.
fn named(world: &World<'_>, waits: &Waits<'_>, kind: Kind, ranks: Vec<u32>) -> Finding {
    let waiting = waits.waiting.iter().copied().filter(|rank| ranks.binary_search(rank).is_err()).collect();
    Finding { waiting, chain: waits.chain(world, &ranks), ..Finding::new(kind, ranks) }
}

/// These roots hold the others up. The wait of the first one is named.
fn root(world: &World<'_>, waits: &Waits<'_>, kind: Kind, roots: &[(u32, On)]) -> Finding {
    let collective = roots.first().and_then(|(_, on)| collective(world, waits, *on));
    Finding { collective, ..named(world, waits, kind, roots.iter().map(|(rank, _)| *rank).collect()) }
}

fn collective(world: &World<'_>, waits: &Waits<'_>, on: On) -> Option<Collective> {
    let On::Collective(team, seq) = on else { return None };
    let team = &waits.teams[team];
    let signature = team.signature(world, seq).cloned().unwrap_or_default();
    Some(Collective { group: team.name.to_owned(), desc: team.desc.to_owned(), seq, signature })
}

fn mismatch(world: &World<'_>, waits: &Waits<'_>) -> Option<Finding> {
    let (at, found) = waits.teams.iter().enumerate().find_map(|(at, team)| Some((at, mismatch::find(world, team)?)))?;
    let mut of = collective(world, waits, On::Collective(at, found.seq))?;
    if let Some((signature, _)) = found.classes.last() {
        of.signature = signature.clone();
    }
    let classes = found.classes.into_iter();
    let classes = classes.map(|(signature, ranks)| Entered { signature, ranks: ranks.into_iter().collect() }).collect();
    // All that have entered something else wait for one another.
    let pending = waits.teams[at].pending.values().flatten().map(|at| world.views[*at].rank);
    let waiting = pending.filter(|rank| found.ranks.binary_search(rank).is_err()).collect();
    let finding = Finding::new(Kind::Mismatch, found.ranks);
    Some(Finding { collective: Some(of), classes, tie: found.tie, waiting, ..finding })
}

/// Roots that do not answer: those whose GIL is held, if there are such.
fn silent(world: &World<'_>, waits: &Waits<'_>, roots: Vec<(u32, On)>) -> Option<Finding> {
    let is_held = |rank: u32| world.view(rank).is_some_and(|view| view.gil == Gil::Held);
    let held: Vec<_> = roots.iter().copied().filter(|(rank, _)| is_held(*rank)).collect();
    match (held.is_empty(), roots.is_empty()) {
        (false, _) => Some(root(world, waits, Kind::GilHeld, &held)),
        (true, false) => Some(root(world, waits, Kind::Silent, &roots)),
        (true, true) => None,
    }
}

/// Of the roots, those that have come least far. Ranks in a call that the recorder does not have, and ranks with pending collectives,
/// are not named if others are left.
fn late(world: &World<'_>, waits: &Waits<'_>, roots: &[(u32, On)]) -> Vec<(u32, On)> {
    let is_in_call = |rank: u32| world.view(rank).is_some_and(guess::is_in_unrecorded_call);
    let is_pending = |rank: u32| waits.of(world, rank).iter().any(|on| matches!(on, On::Collective(..)));
    let roots = unless_empty(roots, |rank| !is_in_call(rank));
    let roots = unless_empty(&roots, |rank| !is_pending(rank));
    let mut lowest: BTreeMap<usize, u64> = BTreeMap::new();
    let last = |rank: u32, on: On| match on {
        On::Collective(team, _) => Some((team, waits.teams[team].last(world, rank))),
        On::Peer(_) | On::Store => None,
    };
    for (team, last) in roots.iter().filter_map(|(rank, on)| last(*rank, *on)) {
        lowest.entry(team).and_modify(|lowest| *lowest = last.min(*lowest)).or_insert(last);
    }
    let is_last = |(rank, on): &(u32, On)| last(*rank, *on).is_none_or(|(team, last)| lowest.get(&team) == Some(&last));
    roots.into_iter().filter(is_last).collect()
}

fn unless_empty(roots: &[(u32, On)], keep: impl Fn(u32) -> bool) -> Vec<(u32, On)> {
    let kept: Vec<_> = roots.iter().copied().filter(|(rank, _)| keep(*rank)).collect();
    if kept.is_empty() { roots.to_vec() } else { kept }
}

fn circle(world: &World<'_>, waits: &Waits<'_>) -> Option<Finding> {
    let circle = waits.circle(world);
    let (_, first) = *circle.first()?;
    // A rank that still runs may come: it has begun a collective that it does not wait for.
    let running = |(rank, _): &&(u32, On)| world.view(*rank).is_some_and(crossing::may_go_on);
    let mut late: Vec<_> = circle.iter().filter(running).map(|(rank, _)| *rank).collect();
    late.sort_unstable();
    if let Some(rank) = late.first().filter(|_| late.len() < circle.len()) {
        let on = waits.awaited.get(rank).copied().unwrap_or(first);
        return Some(Finding {
            collective: collective(world, waits, on),
            ..named(world, waits, Kind::NotEntered, late)
        });
    }
    let next = circle.iter().cycle().skip(1);
    let chain = circle.iter().zip(next).map(|((rank, on), (other, _))| waits.wait(*rank, *on, *other)).collect();
    let turned = crossing::turned(world, waits, &circle);
    let (mut ranks, of) = match turned.first() {
        Some(it) => (turned.iter().map(|it| it.rank).collect(), On::Collective(it.second.0, it.second.1)),
        None => (circle.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), first),
    };
    ranks.sort_unstable();
    let mut finding = named(world, waits, Kind::Crossed, ranks);
    finding.certain = late.is_empty();
    finding.chain = chain;
    finding.collective = collective(world, waits, of);
    finding.turned = turned.first().map(|it| {
        let title = |team: usize| waits.teams[team].title().to_owned();
        (title(it.first.0), title(it.second.0))
    });
    Some(finding)
}

/// All members of a group have entered its oldest pending collective.
fn inside(world: &World<'_>, waits: &Waits<'_>) -> Option<Finding> {
    let first = |(at, team): (usize, &world::Team<'_>)| {
        let (seq, waiters) = team.pending.first_key_value()?;
        Some((waiters.first().copied()?, at, *seq))
    };
    let (_, team, seq) = waits.teams.iter().enumerate().filter_map(first).min()?;
    let waiting = waits.teams[team].pending.values().flatten().map(|at| world.views[*at].rank).collect();
    let of = collective(world, waits, On::Collective(team, seq));
    Some(Finding { collective: of, waiting, ..Finding::new(Kind::Inside, Vec::new()) })
}

#[cfg(test)]
mod tests;
