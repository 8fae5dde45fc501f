//! Who might hold the others up, if nobody waits in a collective that torch records: a guess from states and lines.

use std::collections::BTreeMap;

use super::world::World;
use crate::hang::finding::{Finding, Kind};
use crate::hang::view::{Frame, Gil, View, WaitsIn, users, waits_in};

/// Whether a rank waits in a call that torch's recorder does not have: a message, or the making of a group.
pub(super) fn is_in_unrecorded_call(view: &View) -> bool {
    matches!(waits_in(&view.frames), Some((_, WaitsIn::Peer(_) | WaitsIn::Store)))
}

/// Name the ranks that differ from the others: the first difference that there is.
pub(super) fn guess(world: &World<'_>) -> Finding {
    let ranks = |is: &dyn Fn(&View) -> bool| {
        let of = world.views.iter().filter(|view| is(view));
        of.map(|view| view.rank).collect::<Vec<_>>()
    };
    let is_inside = |view: &View| !view.has_ended() && !view.is_stopped() && waits_in(&view.frames).is_some();
    let inside = ranks(&is_inside);
    let living = ranks(&|view| !view.has_ended());
    let finding = |kind, ranks: Vec<u32>| {
        let waiting = inside.iter().copied().filter(|rank| ranks.binary_search(rank).is_err()).collect();
        Finding { waiting, certain: false, ..Finding::new(kind, ranks) }
    };

    let ended = ranks(&View::has_ended);
    if !ended.is_empty() && !inside.is_empty() {
        return finding(Kind::Ended, ended);
    }
    let stopped = ranks(&View::is_stopped);
    if !stopped.is_empty() {
        let all_others_wait = !inside.is_empty() && inside.len() + stopped.len() == living.len();
        return Finding { certain: all_others_wait, ..finding(Kind::Stopped, stopped) };
    }
    let silent = ranks(&View::is_silent);
    if !silent.is_empty() && silent.len() < living.len() {
        let held = ranks(&|view| view.is_silent() && view.gil == Gil::Held);
        return if held.is_empty() { finding(Kind::Silent, silent) } else { finding(Kind::GilHeld, held) };
    }
    let outside = ranks(&|view| !view.has_ended() && !is_inside(view));
    if !inside.is_empty() && !outside.is_empty() {
        return finding(Kind::Outside, outside);
    }
    by_line(world)
}

/// The ranks that stand at the line at which fewest stand.
fn by_line(world: &World<'_>) -> Finding {
    let mut lines: BTreeMap<Option<&Frame>, Vec<u32>> = BTreeMap::new();
    for view in world.views.iter().filter(|view| !view.has_ended()) {
        lines.entry(users(&view.frames)).or_default().push(view.rank);
    }
    let fewest = lines.values().map(Vec::len).min().unwrap_or_default();
    let (few, rest): (Vec<_>, Vec<_>) = lines.into_values().partition(|ranks| ranks.len() == fewest);
    let mut few = few.concat();
    few.sort_unstable();
    if rest.is_empty() {
        return Finding { waiting: few.into_iter().collect(), ..Finding::new(Kind::Alike, Vec::new()) };
    }
    Finding { waiting: rest.concat().into_iter().collect(), ..Finding::new(Kind::Odd, few) }
}
