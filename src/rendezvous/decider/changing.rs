//! The steps of a change in place. [`super::in_place`] keeps its state.
//!
//! The members of a world can change in place if all of them attend: their workers are connected to their agents, and count their checks.
//! Then the members are not told to stop when nodes wait to join. They run on until the newcomers' last call is over, or until one of
//! them asks to leave. What follows:
//!
//! 1. `Change` to all members. Their workers stop at their next check, and each member says how many checks they have passed.
//! 2. `RaiseAt` to all members, with the first check that no worker has passed. Every worker stops there. The members join again, or leave.
//! 3. The round closes as soon as no member runs any more.
//!
//! Whatever interrupts the world meanwhile breaks the change off. The members are told by a `Status`, and their workers go back to their
//! last commits. The same follows if not all members count within [`COUNT_WITHIN`], or come back within [`RETURN_WITHIN`] of the first.

use std::collections::BTreeSet;
use std::time::Instant;

use super::deadlines::Deadline;
use super::event::SessionId;
use super::in_place::{COUNT_WITHIN, Change, Phase, RETURN_WITHIN};
use super::node::Status;
use super::resume::{self, Comer, Last};
use super::run::Run;
use super::size::Seat;
use crate::events::record::{Kind, Why};
use crate::events::tally::Refused;
use crate::rendezvous::messages::message::{
    ADDED, CoordinatorMessage, Generation, LARGEST_COUNT, NEVER, NodeId, REMOVED, Resume, Round, Running, WorkerRanks,
    WorldChange,
};
use crate::wire::text::tidy;

impl Run {
    /// All workers of a node are connected to their agent.
    pub(super) fn on_attending(&mut self, id: NodeId, round: Round) {
        if !self.is_capable_member(id, round) || self.roster.get(id).is_none_or(|node| node.attending) {
            return;
        }
        self.roster.set_attending(id);
        if self.is_attended() {
            let nodes = self.roster.active().len();
            self.note(format!(
                "round {round} can change in place: the workers of all its members attend (nodes: {nodes})"
            ));
        }
    }

    /// The workers of a member let the library make their process groups. All members run the same program.
    pub(super) fn on_groupless(&mut self, id: NodeId, round: Round) {
        if self.is_capable_member(id, round) {
            self.in_place.set_groupless();
        }
    }

    /// The world that runs, if a newcomer may start its workers before it joins.
    pub(super) fn running(&self) -> Option<Running> {
        let settled = self.changes_in_place() && self.in_place.is_groupless();
        let world = self.current.world().filter(|_| settled)?;
        let (master_addr, master_port) = world.master.clone()?;
        let workers = world.workers.as_ref()?.first()?.world_size;
        let room = self.bounds().map(|bounds| bounds.max.saturating_sub(workers));
        Some(Running {
            round: self.round(),
            world: world.id,
            nodes: world.size,
            workers,
            room: room.filter(|room| *room > 0),
            master_addr,
            master_port,
            restart: world.restart,
        })
    }

    /// A member says how far its workers are.
    pub(super) fn on_counted(&mut self, id: NodeId, session: SessionId, round: Round, count: u64) {
        if count > LARGEST_COUNT {
            let reason = format!("the number of checks is `{count}`, must be at most {LARGEST_COUNT}");
            return self.refuse(session, Refused::Invalid, reason);
        }
        if !self.is_capable_member(id, round) {
            return;
        }
        match self.in_place.check() {
            Some(check) if count >= check => {
                let label = self.roster.label(id);
                let reason = format!("the workers of {label} have passed check {check}, at which all were to stop");
                self.fail_change(&reason);
            }
            Some(_) => {}
            None => self.in_place.count(id, count),
        }
    }

    /// A member asks to leave.
    pub(super) fn on_will_leave(&mut self, id: NodeId, session: SessionId, round: Round, reason: &str, at_once: bool) {
        let over = self.current.interrupted().is_some() || self.current.told();
        if over || !self.is_capable_member(id, round) {
            return; // it is told that its round is over
        }
        let label = self.roster.label(id);
        let reason = tidy(reason);
        if !self.roster.unfinished().iter().any(|other| *other != id) {
            return self
                .send(session, self.over(format!("no other node has work left, so {label} may leave: {reason}")));
        }
        let known = self.leaver().filter(|_| self.in_place.leaving().contains_key(&id));
        let told = format!("is about to leave: {reason}");
        let leaves = known.unwrap_or_else(|| self.record_of(id, Kind::NodeLeaves {}, None, told));
        if at_once {
            return self.interrupt(&format!("{label} is about to leave: {reason}"), Why::NodeLeft, leaves);
        }
        self.in_place.announce(id, reason);
    }

    /// The workers of a member that leaves have stopped at the common check.
    pub(super) fn on_parked(&mut self, id: NodeId, round: Round, now: Instant) {
        let leaves = self.in_place.check().is_some() && self.in_place.leaving().contains_key(&id);
        if !leaves || !self.is_capable_member(id, round) {
            return;
        }
        self.note(format!("{} has stopped its workers, and leaves", self.roster.label(id)));
        self.count_departure(id, now);
        self.roster.set_status(id, Status::Idle);
        self.in_place.forget(id);
        self.in_place.someone_has_stopped(now);
    }

    /// Whether the members stop their workers together, when they have to: none is told to stop before.
    pub(super) fn changes_in_place(&self) -> bool {
        let undisturbed = self.current.interrupted().is_none() && !self.current.told();
        undisturbed && (self.in_place.is_changing() || self.is_attended())
    }

    /// Begin a change if it is due, and continue or break off the one that has begun.
    pub(super) fn advance_change(&mut self, now: Instant) {
        self.deadlines.set(Deadline::Change, None);
        if self.current.interrupted().is_some() || self.current.told() {
            return;
        }
        let next = match self.in_place.change().map(|change| change.phase) {
            None => self.begin_if_due(now),
            Some(Phase::Counting { until }) => self.raise_if_counted(until, now),
            Some(Phase::Raising { back_by, .. }) => self.await_members(back_by, now),
        };
        self.deadlines.set(Deadline::Change, next);
    }

    /// Tell a member that has reconnected of the change.
    pub(super) fn repeat_change(&mut self, id: NodeId, session: SessionId) {
        let capable = self.roster.get(id).is_some_and(|node| node.in_place);
        let Some(change) = self.in_place.change().filter(|_| capable) else { return };
        let (flags, reason, round) = (change.flags, change.reason.clone(), self.round());
        self.send(session, CoordinatorMessage::Change(WorldChange { round, flags, reason }));
        if let Some(check) = self.in_place.check() {
            self.send(session, CoordinatorMessage::RaiseAt { round, check });
        }
    }

    /// How the workers of a world of these members begin. `ranks` has those of their workers, if known; `next` is that world.
    pub(super) fn resume_of(&self, members: &[Seat], ranks: Option<&[WorkerRanks]>, next: Generation) -> Resume {
        let world = self.current.world();
        let last_members: BTreeSet<_> = world.iter().flat_map(|world| world.members.values()).collect();
        let comer = |(rank, seat): (usize, &Seat)| {
            let node = self.roster.get(seat.id)?;
            Some(Comer {
                label: node.label(),
                was_member: last_members.contains(&seat.id),
                returning: self.roster.last_rank(node).is_some(),
                capable: node.in_place,
                check: self.in_place.stopped_at(seat.id),
                first_rank: ranks.and_then(|ranks| ranks.get(rank)).map(|ranks| ranks.first_rank),
                workers: seat.workers.clone(),
            })
        };
        let members: Vec<_> = members.iter().enumerate().filter_map(comer).collect();
        let last = world.map(|world| Last {
            generation: Generation { round: self.round(), world: world.id },
            began_with: world.began_with,
        });
        resume::resume(&members, last, next)
    }

    /// Whether the node runs workers of this round, which may survive a change.
    fn is_capable_member(&self, id: NodeId, round: Round) -> bool {
        self.roster.get(id).is_some_and(|node| self.is_current(node, round) && node.in_place)
    }

    /// Whether all members attend, and none has finished.
    fn is_attended(&self) -> bool {
        let (counts, active) = (self.roster.counts(), self.roster.active().len());
        active > 0 && counts.attending == active && counts.done == 0
    }

    /// Begin a change if one is due. Returns when to look again.
    fn begin_if_due(&mut self, now: Instant) -> Option<Instant> {
        let firm = self.in_place.has_begun_elsewhere();
        let asked = firm || !self.in_place.leaving().is_empty();
        let grows = self.joinable() > 0;
        if self.roster.active().is_empty() || !(asked || grows) {
            return None;
        }
        if let Some(until) = self.held_growth().filter(|_| !asked) {
            return Some(until);
        }
        if !self.is_attended() {
            if asked {
                let why = self.why_changing();
                match self.leaver() {
                    Some(leaves) => self.interrupt(&why, Why::NodeLeft, leaves),
                    None => self.fail_change(&why),
                }
            }
            return None; // newcomers are announced by a `Status`
        }
        let full = self.would_be_full();
        let last_call_ends = self.pace.newcomer_since.map(|since| since + self.settings.last_call_timeout);
        let due = last_call_ends.filter(|_| !asked && !full).unwrap_or(now);
        if due > now {
            return Some(due);
        }
        if self.recalls() || self.roster.counts().unreachable > 0 {
            return None; // the next event follows soon
        }
        let removed = if self.in_place.leaving().is_empty() { 0 } else { REMOVED };
        let added = if self.roster.waiting().is_empty() { 0 } else { ADDED };
        let flags = if removed | added == 0 { REMOVED | ADDED } else { removed | added };
        let (round, reason, until) = (self.round(), self.why_changing(), now + COUNT_WITHIN);
        let joined = self.first_newcomer().filter(|_| grows);
        let causes = [self.leaver(), joined].into_iter().flatten();
        self.record(Kind::RoundChanges {}, None, causes, format!("round {round} changes in place: {reason}"));
        self.in_place.begin(Change { flags, reason: reason.clone(), firm, phase: Phase::Counting { until } });
        self.tell_members(&CoordinatorMessage::Change(WorldChange { round, flags, reason }));
        self.raise_if_counted(until, now)
    }

    /// Tell the members the check at which they stop, if all have counted. Returns when to look again.
    fn raise_if_counted(&mut self, until: Instant, now: Instant) -> Option<Instant> {
        let round = self.round();
        if !self.in_place.has_counts_of(self.roster.unfinished()) {
            if until <= now {
                let missing = self.in_place.uncounted(self.roster.unfinished());
                self.give_up_change(&missing, &format!("not counted checks within {} s", COUNT_WITHIN.as_secs()));
                return None;
            }
            return Some(until);
        }
        let firm = self.in_place.change().is_some_and(|change| change.firm);
        if !firm && self.in_place.leaving().is_empty() && self.joinable() == 0 {
            let text = format!("round {round} goes on: no node waits to join or to leave any more");
            self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), text);
            self.tell_members(&CoordinatorMessage::RaiseAt { round, check: NEVER });
            self.in_place.call_off();
        } else if let Some(check) = self.in_place.raise() {
            self.note(format!("the workers of round {round} stop at their check {check}"));
            self.tell_members(&CoordinatorMessage::RaiseAt { round, check });
            return self.await_members(None, now);
        }
        None
    }

    /// Break the change off if members are missing after it. Returns when to look again.
    fn await_members(&mut self, back_by: Option<Instant>, now: Instant) -> Option<Instant> {
        let active = self.roster.active();
        if active.is_empty() {
            return None;
        }
        if self.in_place.is_anyone_back() && self.roster.counts().done > 0 {
            let missing = active.difference(self.roster.unfinished()).copied().collect();
            self.give_up_change(&missing, "finished, and others have stopped for a change");
            return None;
        }
        if self.in_place.is_anyone_back() {
            self.in_place.someone_has_stopped(now);
        }
        let back_by = back_by.or_else(|| self.in_place.is_anyone_back().then(|| now + RETURN_WITHIN))?;
        if back_by <= now {
            let missing = active.clone();
            self.give_up_change(&missing, &format!("not stopped {} s after others", RETURN_WITHIN.as_secs()));
            return None;
        }
        Some(back_by)
    }

    /// The members cannot stop together, because these have done `what`.
    fn give_up_change(&mut self, missing: &BTreeSet<NodeId>, what: &str) {
        let label = missing.first().map(|id| self.roster.label(*id)).unwrap_or_default();
        let who = match missing.len() {
            0 | 1 => format!("{label} has"),
            count => format!("{label} and {} more have", count - 1),
        };
        let why = self.in_place.change().map(|change| change.reason.clone()).unwrap_or_default();
        self.fail_change(&format!("{who} {what}; the world was to change because {why}"));
    }

    /// The world re-forms, since the members cannot stop together.
    fn fail_change(&mut self, reason: &str) {
        let cause = self.trace.broken().unwrap_or_else(|| self.record(Kind::RoundChanges {}, None, None, None));
        self.interrupt(reason, Why::ChangeFailed, cause);
    }

    /// The reason for the change.
    fn why_changing(&self) -> String {
        let mut reasons = Vec::new();
        if let Some((id, reason)) = self.in_place.leaving().first_key_value() {
            let more = match self.in_place.leaving().len() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            reasons.push(format!("{} is about to leave: {reason}{more}", self.roster.label(*id)));
        }
        if self.joinable() > 0 && self.roster.waiting().len() > self.roster.counts().returning {
            reasons.push(self.who_waits());
        }
        if reasons.is_empty() {
            reasons.push("its change began before this coordinator was restarted".to_owned());
        }
        tidy(&reasons.join("; "))
    }

    /// Send this to all members that can change in place.
    fn tell_members(&mut self, message: &CoordinatorMessage) {
        let members = self.roster.of(self.roster.active());
        let capable = members.filter(|(_, node)| node.in_place);
        let sessions: Vec<_> = capable.filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }
}
