//! What a change in place does next: a policy over the parts of a run. [`super::in_place`] keeps its state.

use std::collections::BTreeSet;
use std::time::Instant;

use super::in_place::{COUNT_WITHIN, Leaver, Phase, PlannedChange};
use super::parts::Parts;
use crate::rendezvous::messages::message::{ADDED, NodeId, REMOVED};
use crate::wire::text::tidy;

/// What a change needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Wait for an event, and look again at this instant if none comes.
    Wait(Option<Instant>),
    /// Begin a change.
    Begin(PlannedChange),
    /// All members have counted: they stop at this check.
    Raise(u64),
    /// The reason for the change is gone, and the members go on.
    CallOff,
    /// A change is due, and the members cannot change in place: the world is interrupted for the reason of the change.
    Interrupt(String),
    /// The members cannot stop together any more: the world is interrupted.
    Fail(String),
}

/// What the change of an undisturbed world needs next.
pub(super) fn next_step(parts: Parts, now: Instant) -> NextStep {
    match parts.in_place.change().map(|change| change.phase) {
        None => begin_if_due(parts, now),
        Some(Phase::Counting { until }) => raise_if_counted(parts, until, now),
        Some(Phase::Raising { back_by, .. }) => await_members(parts, back_by, now),
    }
}

/// Begin a change if one is due.
fn begin_if_due(parts: Parts, now: Instant) -> NextStep {
    let Parts { roster, in_place, settings, .. } = parts;
    let firm = in_place.has_begun_elsewhere();
    // Those whose machines are taken away later run on for a while.
    let leaves_from = in_place.leaves_from(now);
    let asked = firm || leaves_from.is_some_and(|from| from <= now);
    if roster.active().is_empty() || !(asked || leaves_from.is_some() || parts.joinable() > 0) {
        return NextStep::Wait(None);
    }
    if !roster.is_attended() {
        // Newcomers are announced by a `Status`. Who has a notice leaves by itself, in time.
        let leaves = firm || in_place.leaving().values().any(|leaver| leaver.not_before.is_none());
        return if leaves { NextStep::Interrupt(reason_for(parts)) } else { NextStep::Wait(None) };
    }
    if !asked && parts.joinable() == 0 {
        return NextStep::Wait(leaves_from);
    }
    if let Some(until) = parts.held_growth().filter(|_| !asked) {
        return NextStep::Wait([Some(until), leaves_from].into_iter().flatten().min());
    }
    let full = parts.would_be_full();
    let last_call_ends = parts.pace.newcomer_since.map(|since| since + settings.last_call_timeout);
    let due = last_call_ends.filter(|_| !asked && !full).unwrap_or(now);
    if due > now {
        return NextStep::Wait([Some(due), leaves_from].into_iter().flatten().min());
    }
    if parts.recovery.awaits_members() || roster.counts().unreachable > 0 {
        return NextStep::Wait(None); // the next event follows soon
    }
    let removed = if in_place.leaving().is_empty() { 0 } else { REMOVED };
    let added = if roster.waiting().is_empty() { 0 } else { ADDED };
    let flags = if removed | added == 0 { REMOVED | ADDED } else { removed | added };
    let phase = Phase::Counting { until: now + COUNT_WITHIN };
    NextStep::Begin(PlannedChange { flags, reason: reason_for(parts), firm, phase })
}

/// Choose the check at which members stop, if all have counted.
fn raise_if_counted(parts: Parts, until: Instant, now: Instant) -> NextStep {
    let Parts { roster, in_place, .. } = parts;
    if !in_place.has_counts_of(roster.unfinished()) {
        if until > now {
            return NextStep::Wait(Some(until));
        }
        let missing = in_place.uncounted(roster.unfinished());
        return give_up(parts, &missing, &format!("not counted checks within {} s", COUNT_WITHIN.as_secs()));
    }
    let firm = in_place.change().is_some_and(|change| change.firm);
    if !firm && in_place.leaving().is_empty() && parts.joinable() == 0 {
        return NextStep::CallOff;
    }
    NextStep::Raise(in_place.next_check())
}

/// Break the change off if members are missing after it.
fn await_members(parts: Parts, back_by: Option<Instant>, now: Instant) -> NextStep {
    let Parts { roster, in_place, .. } = parts;
    let active = roster.active();
    if active.is_empty() {
        return NextStep::Wait(None);
    }
    if in_place.is_anyone_back() && roster.counts().done > 0 {
        let missing = active.difference(roster.unfinished()).copied().collect();
        return give_up(parts, &missing, "finished, and others have stopped for a change");
    }
    match back_by.or_else(|| in_place.is_anyone_back().then(|| now + in_place.return_within())) {
        Some(back_by) if back_by <= now => {
            give_up(parts, active, &format!("not stopped {} s after others", in_place.return_within().as_secs()))
        }
        back_by => NextStep::Wait(back_by),
    }
}

/// The members cannot stop together, because these have done `what`.
fn give_up(parts: Parts, missing: &BTreeSet<NodeId>, what: &str) -> NextStep {
    let label = missing.first().map(|id| parts.roster.label(*id)).unwrap_or_default();
    let who = match missing.len() {
        0 | 1 => format!("{label} has"),
        count => format!("{label} and {} more have", count - 1),
    };
    let why = parts.in_place.change().map(|change| change.reason.clone()).unwrap_or_default();
    NextStep::Fail(format!("{who} {what}; the world was to change because {why}"))
}

/// The reason for the change.
fn reason_for(parts: Parts) -> String {
    let leaving = parts.in_place.leaving();
    let mut reasons = Vec::new();
    if let Some((id, Leaver { reason, .. })) = leaving.first_key_value() {
        let more = match leaving.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        reasons.push(format!("{} is about to leave: {reason}{more}", parts.roster.label(*id)));
    }
    if parts.joinable() > 0 && parts.roster.waiting().len() > parts.roster.counts().returning {
        reasons.push(parts.who_waits());
    }
    if reasons.is_empty() {
        reasons.push("its change began before this coordinator was restarted".to_owned());
    }
    tidy(&reasons.join("; "))
}

#[cfg(test)]
mod tests;
