//! The next round: when it closes, what its world is, and when members are notified that the world re-forms.
//!
//! A round closes when no member of the last one is still running, at least `min_nodes` and `min_workers` wait, and one of these holds:
//!
//! - `max_nodes` or `max_workers` wait;
//! - all members of the last round are back, and no newcomer waits;
//! - some members are back, no more nodes wait than the last world had, and `settle_timeout` has passed;
//! - more nodes wait than the last world had, or no member is back, and `last_call_timeout` has passed.
//!
//! Members that can change in place are not notified when nodes wait to join: [`super::in_place`] has the rules. Once all of them
//! have stopped for a change, the round closes as soon as enough wait.

use std::net::IpAddr;
use std::time::Instant;

use super::Run;
use super::event::{Effect, SessionId};
use super::node::Node;
use super::parts::Parts;
use super::ranks::{NextWorld, next_world, nodes};
use super::recovery::Reports;
use super::resize::{NextStep, next_step};
use crate::events::record::{Ending, Kind, Number, Why};
use crate::events::tally::Refused;
use crate::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, LARGEST_COUNT, MEMBERS_IN_A_MESSAGE, NEVER, NodeId, Placement, Round, Verdict,
    WorldChange,
};

/// Most addresses that a node is sent: fewer messages than may wait for a session that is not read.
const MOST: usize = 32 * MEMBERS_IN_A_MESSAGE;

impl Run {
    /// Close the round if it can close, and notify members if the world must re-form.
    pub(super) fn decide(&mut self, now: Instant) {
        self.closes_at = None;
        self.recovery.end_if_due(now);
        if self.current.closed().is_none() {
            self.rebind(now);
            self.advance(now);
        }
        // A decision is logged with its reason when it changes.
        let standing = self.parts().judge_standing();
        if standing != std::mem::replace(&mut self.standing, standing)
            && let Some(text) = self.parts().standing_text(standing)
        {
            let (next, nodes) = (self.parts().next_round().0, self.roster.waiting().len());
            self.record(Kind::RoundWaits { next, nodes }, None, self.trace.broken(), text);
        }
    }

    fn advance(&mut self, now: Instant) {
        self.advance_recovery(now);
        let let_in = self.hosts.release(now);
        self.apply_to_hosts(let_in, now);
        if self.close_if_all_done() {
            return;
        }
        self.leave_out_unchecked(now);
        self.advance_change(now);
        self.let_savers_go();
        if self.close_if_out_of_resets() {
            return;
        }
        let parts = self.parts();
        if !parts.is_ready() {
            self.pace.ready_since = None;
        } else if !parts.awaits_connections() {
            self.pace.ready_since.get_or_insert(now);
        }
        let held_until = self.pace.paused_until.max(self.parts().checks_until());
        let closing = when_to_close(self.parts(), now);
        match closing
            .map(|closing| Closing { at: held_until.map_or(closing.at, |until| until.max(closing.at)), ..closing })
        {
            Some(Closing { at, reason }) if at <= now => self.complete(&reason, now),
            Some(Closing { at, .. }) => self.closes_at = Some(at),
            None => {}
        }
        self.notify();
    }

    /// Continue to wait for members of a world that this coordinator did not form, or go on without them.
    fn advance_recovery(&mut self, now: Instant) {
        match self.parts().reports(now) {
            Reports::Awaited(until) => self.recovery.await_members(until),
            Reports::Complete(text) => {
                self.recovery.await_members(None);
                self.note(text);
            }
            Reports::Missing(reason) => {
                self.recovery.await_members(None);
                if !self.parts().is_all_done() {
                    let late = self.record(Kind::MembersMissing {}, None, None, None);
                    self.interrupt(&reason, Why::CoordinatorRestarted, late);
                }
            }
        }
    }

    /// Begin a change in place if it is due, and continue or break off the one that has begun.
    fn advance_change(&mut self, now: Instant) {
        self.in_place.wait(None);
        loop {
            if self.current.interrupted().is_some() || self.current.notified() {
                return;
            }
            let round = self.round();
            match next_step(self.parts(), now) {
                NextStep::Wait(until) => return self.in_place.wait(until),
                NextStep::Begin(change) => {
                    let grows = self.parts().joinable() > 0;
                    let joined = self.trace.first_newcomer(&self.roster).filter(|_| grows);
                    let causes = [self.leaver(), joined].into_iter().flatten();
                    let (flags, reason) = (change.flags, change.reason.clone());
                    let text = format!("round {round} changes in place: {reason}");
                    self.record(Kind::RoundChanges {}, None, causes, text);
                    self.in_place.begin(change);
                    self.notify_capable(&CoordinatorMessage::Change(WorldChange { round, flags, reason }));
                }
                NextStep::Raise(check) => {
                    self.in_place.raise(check);
                    self.note(format!("the workers of round {round} stop at their check {check}"));
                    self.notify_capable(&CoordinatorMessage::RaiseAt { round, check });
                }
                NextStep::CallOff => {
                    let text = format!("round {round} goes on: no node waits to join or to leave any more");
                    self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), text);
                    self.notify_capable(&CoordinatorMessage::RaiseAt { round, check: NEVER });
                    return self.in_place.call_off();
                }
                NextStep::Interrupt(reason) => match self.leaver() {
                    Some(leaves) => return self.interrupt(&reason, Why::NodeLeft, leaves),
                    None => return self.fail_change(&reason),
                },
                NextStep::Fail(reason) => return self.fail_change(&reason),
            }
        }
    }

    /// All workers of a node are connected to their agent.
    pub(super) fn on_attending(&mut self, id: NodeId, round: Round) {
        if !self.is_capable_member(id, round) || self.roster.get(id).is_none_or(|node| node.attending) {
            return;
        }
        self.roster.set_attending(id);
        if self.roster.is_attended() {
            let nodes = self.roster.active().len();
            self.note(format!(
                "round {round} can change in place: the workers of all its members attend (nodes: {nodes})"
            ));
        }
    }

    /// The workers of a member let the library make their process groups. All members run the same program.
    pub(super) fn on_no_process_group(&mut self, id: NodeId, round: Round) {
        if self.is_capable_member(id, round) {
            self.in_place.set_without_group();
        }
    }

    /// The workers of a member save at the check of a change. All members run the same program.
    pub(super) fn on_saves(&mut self, id: NodeId, round: Round) {
        if self.is_capable_member(id, round) {
            self.in_place.set_saves();
        }
    }

    /// A member reports how far its workers are.
    pub(super) fn on_counted(&mut self, id: NodeId, session: SessionId, round: Round, count: u64) {
        if count > LARGEST_COUNT {
            let reason = format!("the number of checks is `{count}`, must be at most {LARGEST_COUNT}");
            return self.refuse(session, Refused::Invalid, reason);
        }
        if !self.is_capable_member(id, round) {
            return;
        }
        if let Some(check) = self.in_place.on_counted(id, count) {
            let label = self.roster.label(id);
            self.fail_change(&format!("the workers of {label} have passed check {check}, at which all were to stop"));
        }
    }

    /// Whether the node runs workers of this round, which may survive a change.
    pub(super) fn is_capable_member(&self, id: NodeId, round: Round) -> bool {
        self.roster.get(id).is_some_and(|node| self.is_current(node, round) && node.in_place)
    }

    /// The world re-forms, since the members cannot stop together.
    pub(super) fn fail_change(&mut self, reason: &str) {
        let cause = self.trace.broken().unwrap_or_else(|| self.record(Kind::RoundChanges {}, None, None, None));
        self.interrupt(reason, Why::ChangeFailed, cause);
    }

    /// Send this to all members that can change in place.
    fn notify_capable(&mut self, message: &CoordinatorMessage) {
        let members = self.roster.of(self.roster.active());
        let capable = members.filter(|(_, node)| node.in_place);
        let sessions: Vec<_> = capable.filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }

    /// Mark that the current world must re-form, because of an event. The first reason is kept.
    pub(super) fn interrupt(&mut self, reason: &str, why: Why, cause: Number) {
        if self.current.interrupt(reason) {
            self.in_place.break_off();
            // A change in place that is broken off is a cause, too.
            let causes = [Some(cause), self.trace.broken().filter(|broken| *broken != cause)].into_iter().flatten();
            let text = format!("round {} is interrupted: {reason}", self.round());
            // Members that were notified to re-form know already that their round is broken.
            let kind = if self.current.notified() { Kind::Note {} } else { Kind::RoundBroken { why } };
            self.record(kind, None, causes, text);
        }
    }

    /// Close the rendezvous, and notify every connected node. No node is admitted afterwards. `cause`: the event for which it is closed.
    pub(super) fn close(&mut self, verdict: Verdict, cause: Option<Number>) {
        if self.current.closed().is_some() {
            return;
        }
        let how = match &verdict {
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => Ending::Succeeded,
            Verdict::Failed { .. } => Ending::Failed,
            Verdict::Stopped { .. } => Ending::Stopped,
        };
        self.record(Kind::RunClosed { verdict: how }, None, cause, verdict.to_string());
        let notified = |(_, node): (_, &Node)| Some((node.session?, self.parts().is_spare(node)));
        let notified: Vec<_> = self.roster.iter().filter_map(notified).collect();
        for (session, spare) in notified {
            self.send(session, CoordinatorMessage::Closed { verdict: verdict.clone(), spare });
        }
        self.current.close(verdict, self.parts().is_full());
        self.in_place.break_off();
        self.in_place.wait(None);
        self.closes_at = None;
        self.recovery.await_members(None);
    }

    /// Close the rendezvous if every live member of an undisturbed world has finished. Returns whether it did.
    pub(super) fn close_if_all_done(&mut self) -> bool {
        let done = self.parts().is_all_done();
        if done {
            let nodes = u32::try_from(self.roster.active().len()).unwrap_or(u32::MAX);
            self.close(Verdict::AllDone { round: self.round(), nodes }, self.trace.completed());
        }
        done
    }

    /// Close the rendezvous if the world must change and has changed as often as it may. Returns whether it did.
    fn close_if_out_of_resets(&mut self) -> bool {
        let change = self.in_place.change().map(|change| change.reason.as_str());
        let why = self.current.interrupted().or(change).filter(|_| self.current.world().is_some());
        let Some((limit, why)) = self.settings.rules.reset_limit.zip(why).filter(|_| !self.parts().has_resets_left())
        else {
            return false;
        };
        let cause = format!("{why}; no resets left: the world may change {limit} times (reset_limit)");
        let failure = self.current.failure().cloned().map(Box::new);
        self.close(
            Verdict::Failed { by: "the coordinator".to_owned(), cause, failure, class: EndClass::NoProgress },
            self.trace.broken(),
        );
        true
    }

    /// Form the next world.
    fn complete(&mut self, why_now: &str, now: Instant) {
        let NextWorld { world, members, resume, rank0, survive, survivors, warning } =
            next_world(self.parts(), why_now);
        let round = self.parts().next_round();
        warning.into_iter().for_each(|text| self.emit(Effect::Warn(text)));
        self.roster.begin_round(round, &members);
        let event = Kind::RoundCompleted {
            nodes: members.len(),
            workers: world.workers.as_ref().and_then(|workers| workers.first()).map(|ranks| ranks.world_size),
            rank0,
            in_place: survive,
        };
        let causes = self.trace.broken().or(self.trace.joined());
        let text = format!("round {round} is complete with {}: {}", nodes(members.len()), world.reason);
        self.record(event, None, causes, text);
        if survive {
            self.note(format!("round {round}: {resume}"));
        }
        self.in_place.begin_round(Some(resume), survivors);
        self.recovery.add_world(world.id);
        self.current.form(world);
        self.budget.begin();
        self.recovery.settle();
        self.hosts.await_loss(None);
        self.closes_at = None;
        (self.pace.ready_since, self.pace.paused_until) = (None, None);
        self.pace.newcomer_since = (!self.roster.waiting().is_empty()).then_some(now);
        if self.settings.ranks_as_asked {
            // Every member has joined since its last workers ended or left their world, so no earlier connection is needed.
            self.emit(Effect::EmptyStore);
        }
        for (rank, id) in (0..).zip(members) {
            if let Some(session) = self.session(id) {
                self.send_assignment(session, rank);
            }
        }
    }

    /// Send a member of the current world its rank assignment. The one that serves the worker store gets the members' addresses first, if
    /// it has requested them: one node of a round gets the list, so that a round costs as much as it has members
    /// (`docs/decisions/0085-the-coordinator-tells-rank-0-who-the-members-are.md`). Returns whether this coordinator has formed the world,
    /// so that there is an assignment.
    pub(super) fn send_assignment(&mut self, session: SessionId, rank: u32) -> bool {
        let Some(assignment) = self.placement(rank) else { return false };
        if rank == 0 && self.parts().wants_members() {
            // Without room for all interfaces, proven addresses have to do. Without room for those, none is sent.
            let addresses = [true, false].map(|interfaces| self.parts().member_addresses(interfaces));
            if let Some(addresses) = addresses.into_iter().find(|addresses| addresses.len() <= MOST) {
                self.send_members(session, &addresses);
            }
        }
        self.send(session, assignment);
        true
    }

    fn send_members(&mut self, session: SessionId, addresses: &[IpAddr]) {
        let round = self.round();
        let mut rest = addresses;
        loop {
            let (part, after) = rest.split_at(rest.len().min(MEMBERS_IN_A_MESSAGE));
            let more = !after.is_empty();
            self.send(session, CoordinatorMessage::Members { round, addresses: part.to_vec(), more });
            if !more {
                return;
            }
            rest = after;
        }
    }

    /// The message by which a member of the current world gets its rank assignment. `None` if this coordinator did not form the world.
    pub(in crate::rendezvous) fn placement(&self, rank: u32) -> Option<CoordinatorMessage> {
        let world = self.current.world()?;
        let (master_addr, master_port) = world.master.clone()?;
        let node = world.members.get(&rank).and_then(|id| self.roster.get(*id));
        Some(CoordinatorMessage::Complete(Placement {
            round: self.round(),
            rank,
            world_size: world.size,
            world: world.id,
            master_addr,
            master_port,
            reason: world.reason.clone(),
            restart: world.restart,
            workers: world.workers.as_ref().and_then(|workers| workers.get(rank as usize)).copied(),
            host: self.host_rank(),
            local_world_size: self.parts().bounds().and_then(|_| world.local_world_size(rank)),
            resume: self.in_place.resume().filter(|_| node.is_some_and(|node| node.in_place)).cloned(),
            members: None,
        }))
    }

    /// Notify members if it has changed whether the world must re-form. Members that change in place learn it by that change.
    fn notify(&mut self) {
        // A member that reports to a restarted coordinator, at which others wait already, was not notified.
        let parts = self.parts();
        let someone_runs = !self.roster.active().is_empty();
        let must_re_form = someone_runs && parts.waiting_for_members() > 0 && !parts.changes_in_place();
        if !self.current.set_notified(must_re_form) {
            return;
        }
        if must_re_form && self.current.interrupted().is_none() {
            let text = format!("members of round {} must stop: {}", self.round(), self.parts().why());
            self.record(Kind::RoundBroken { why: Why::NodesWait }, None, self.trace.first_newcomer(&self.roster), text);
        } else if someone_runs && self.current.interrupted().is_none() {
            self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), None);
        }
        let message = self.status();
        let sessions: Vec<_> = self.roster.of(self.roster.active()).filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }
}

/// When the next round closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Closing {
    pub at: Instant,
    /// Why then, in words.
    pub reason: String,
}

/// When the next round closes. `None`: members run, too few nodes wait, or the connection of one of them is broken.
pub(super) fn when_to_close(parts: Parts, now: Instant) -> Option<Closing> {
    if !parts.is_ready() || parts.awaits_connections() {
        return None;
    }
    let ready_since = parts.pace.ready_since.unwrap_or(now);
    let hold_until = parts.held_until().unwrap_or(ready_since);
    if let Some(reason) = parts.is_full_round() {
        return Some(Closing { at: ready_since.max(hold_until), reason });
    }
    if let Some(change) = parts.in_place.change() {
        let reason = format!("the world changed in place: {}", change.reason);
        return Some(Closing { at: ready_since.max(hold_until), reason });
    }
    let returning = parts.roster.counts().returning;
    if let Some(size) = parts.current.size().filter(|_| parts.shrinks()) {
        if returning == size {
            let reason = format!("all members of round {} are back", parts.round());
            return Some(Closing { at: ready_since, reason });
        }
        let settle = parts.settings.settle_timeout;
        let settled = (ready_since + settle).max(hold_until);
        let cause = parts.current.interrupted().unwrap_or("the world changed");
        let reason = format!("settled for {:.1} s (settle_timeout) after this: {cause}", settle.as_secs_f64());
        return Some(Closing { at: settled, reason });
    }
    let last_call = parts.settings.last_call_timeout;
    // Without any member of the last world, the last call is that of a first round.
    let grows = parts.current.world().is_some() && returning > 0;
    // A first round's last call begins when enough nodes wait. A growing round's begins with the first newcomer.
    let since = if grows { parts.pace.newcomer_since.unwrap_or(ready_since) } else { ready_since };
    let reason = format!("the last call of {:.1} s ended", last_call.as_secs_f64());
    Some(Closing { at: (since + last_call).max(hold_until), reason })
}

#[cfg(test)]
mod tests;
