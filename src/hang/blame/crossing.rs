//! Ranks that wait for one another, each in another group.

use super::waits::{On, Waits};
use super::world::World;
use crate::hang::view::{Class, View, waits_in};

/// Most earlier turns in which the order of two groups is compared.
const TURNS: u64 = 3;

/// A rank that has entered two groups in another order than in its last turns.
pub(super) struct Turned {
    pub rank: u32,
    /// The group that it has entered, and its number.
    pub first: (usize, u64),
    /// The group that it used to enter before, and in which the others wait.
    pub second: (usize, u64),
}

/// Who of a circle waits in one group, though it used to enter the group first in which another one of them waits.
pub(super) fn turned(world: &World<'_>, waits: &Waits<'_>, circle: &[(u32, On)]) -> Vec<Turned> {
    let mut found: Vec<_> =
        circle.iter().filter_map(|(rank, on)| turned_at(world, waits, circle, *rank, *on)).collect();
    found.sort_by_key(|it| it.rank);
    found
}

fn turned_at(world: &World<'_>, waits: &Waits<'_>, circle: &[(u32, On)], rank: u32, on: On) -> Option<Turned> {
    let On::Collective(first, seq) = on else { return None };
    circle.iter().find_map(|(_, other)| {
        let On::Collective(second, awaited) = *other else { return None };
        let is_late =
            second != first && waits.teams[second].has(rank) && waits.teams[second].last(world, rank) < awaited;
        let place = |team: usize, seq: u64| {
            let group = waits.teams[team].of(world, rank)?;
            group.tail.iter().find(|entry| entry.seq == seq).map(|entry| entry.at)
        };
        let turn =
            |back: u64| Some((place(second, awaited.checked_sub(back)?)?, place(first, seq.checked_sub(back)?)?));
        let mut turns = (1..=TURNS).filter_map(turn).peekable();
        let had_order = turns.peek().is_some() && turns.all(|(before, after)| before < after);
        (is_late && had_order).then_some(Turned { rank, first: (first, seq), second: (second, awaited) })
    })
}

/// Whether a rank may still go on: it runs, and is in no call of torch.distributed that we know. It may have entered its collective
/// without waiting for it.
pub(super) fn may_go_on(view: &View) -> bool {
    matches!(view.class, Some(Class::Busy | Class::Moving)) && waits_in(&view.frames).is_none()
}
