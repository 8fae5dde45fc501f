//! A node's part in changes in place: its workers stop at a check that all members are told, and live on. Part of [`super`].
//!
//! What the agent has said is repeated on each new connection, until the round is over for this node. A restarted coordinator knows nothing
//! of a change. It learns from the counts that workers wait for a check, and goes on with the change. A node that knows the check names the
//! count before it, so that the same check is chosen again.

use std::time::{Duration, Instant};

use super::backend::Counterpart;
use super::{Change, NodeCommand, NodeMachine};
use crate::rendezvous::messages::message::{LARGEST_COUNT, NEVER, NodeMessage, Round, Running, Survival};
use crate::wire::text::tidy;

/// Time within which the coordinator must name the check, as workers wait for it. The coordinator gives the members half of it to count.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A node's part in changes in place, in its current round.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    /// Number of changes so far, in this node's life.
    changes: u64,
    /// How far the workers are, as the agent has said in the current change.
    counted: Option<u64>,
    /// Until when the coordinator must have named the check, and be in reach.
    answer_by: Option<Instant>,
    /// The node is about to leave: why, and by which signal.
    leaving: Option<(String, Option<i32>)>,
    /// Its workers have stopped for that.
    parked: bool,
}

impl NodeMachine {
    /// All living workers of `round` are connected to their agent, so that this node can change in place.
    pub fn attending(&mut self, round: Round) {
        if self.is_member(round) && self.hello.in_place {
            // Later connections begin with it.
            self.hello.attending = true;
            self.say_in_place(NodeMessage::Attending { round });
        }
    }

    /// The workers of `round` let `elastic_rs.elastic.run` make their process groups.
    pub fn groupless(&mut self, round: Round) {
        if self.is_member(round) {
            self.say_in_place(NodeMessage::Groupless { round });
        }
    }

    /// The world that runs, if this node may start its workers before it joins. `None` until that is known: the coordinator has not
    /// answered yet.
    pub fn outlook(&self) -> Option<Option<&Running>> {
        if !matches!(self.counterpart, Counterpart::Coordinator { .. }) {
            return Some(None);
        }
        self.ever_welcomed.then_some(self.running.as_ref())
    }

    /// The workers of `round` have passed this many checks, and wait at the next one: the answer to the view's `change`.
    pub fn counted(&mut self, round: Round, count: u64) {
        if self.is_member(round) && self.view.change.is_some() && self.view.raise_at.is_none() {
            let count = count.min(LARGEST_COUNT);
            self.part.counted = Some(count);
            self.say_in_place(NodeMessage::Counted { round, count });
        }
    }

    /// What became of the last workers, for the next join. Without this call: [`Survival::New`].
    pub fn bring(&mut self, survival: Survival) {
        self.brings = survival;
    }

    /// This node is about to leave, and its workers need not be stopped at once. Returns whether the coordinator will answer: by the
    /// view's `change` and `raise_at`, or by `waiting`. If not, leave at once.
    pub fn will_leave(&mut self, round: Round, reason: &str, signal: Option<i32>) -> bool {
        if !self.hello.attending || !self.is_member(round) || !self.changes_in_place() {
            return false;
        }
        self.part.leaving = Some((tidy(reason), signal));
        self.say_departure(round);
        true
    }

    /// The workers have stopped at the check, and this node leaves. The other nodes need not wait for its goodbye.
    pub fn parked(&mut self, round: Round) {
        if self.is_member(round) && self.part.leaving.is_some() && self.view.raise_at.is_some() {
            self.part.parked = true;
            self.say_in_place(NodeMessage::Parked { round });
        }
    }

    /// The world changes: the agent asks its workers how far they are.
    pub(super) fn on_change(&mut self, round: Round, flags: u8, reason: String, now: Instant) {
        let known = self.view.change.as_ref().is_some_and(|change| change.round == round);
        let repeated = known && self.check() != Some(NEVER);
        if repeated || !self.is_member(round) || self.view.waiting > 0 {
            return;
        }
        self.part.changes += 1;
        self.part.counted = None;
        self.part.answer_by = Some(now + ANSWER_WITHIN);
        self.record_change(&reason);
        self.view.raise_at = None;
        self.view.change = Some(Change { number: self.part.changes, round, flags, reason });
    }

    /// The check at which the workers stop.
    pub(super) fn on_raise_at(&mut self, round: Round, check: u64) {
        let known = self.view.change.as_ref().is_some_and(|change| change.round == round);
        if !known || !self.is_member(round) || self.check() == Some(check) {
            return;
        }
        if self.view.raise_at.is_some() || self.part.counted.is_some_and(|count| check <= count) {
            return self.break_off(format!("the workers cannot stop at check {check}, which they may have passed"));
        }
        self.view.raise_at = Some((round, check));
        if check == NEVER {
            self.part.answer_by = None;
        }
    }

    /// Say again what a coordinator may not have heard. Called after its welcome.
    pub(in crate::rendezvous) fn repeat_part(&mut self) {
        let Some(round) = self.hello.placed.map(|placed| placed.round).filter(|round| self.is_member(*round)) else {
            return;
        };
        let count = match self.check() {
            None => self.part.counted,
            Some(NEVER) => None,
            Some(check) => Some(check.saturating_sub(1).min(LARGEST_COUNT)),
        };
        if let Some(count) = count {
            self.say_in_place(NodeMessage::Counted { round, count });
        }
        self.say_departure(round);
        if self.part.parked {
            self.say_in_place(NodeMessage::Parked { round });
        }
    }

    /// The check at which the workers stop, once it is known.
    pub(super) fn check(&self) -> Option<u64> {
        self.view.raise_at.map(|(_, check)| check)
    }

    /// When the change is broken off here, unless the coordinator answers.
    pub(super) fn answer_by(&self) -> Option<Instant> {
        self.part.answer_by
    }

    /// Whether workers wait for the coordinator to name the check.
    pub(in crate::rendezvous) fn awaits_check(&self) -> bool {
        self.view.change.is_some() && self.view.raise_at.is_none()
    }

    /// Break the change off if the coordinator has not named the check in time. If it has, but is out of reach since, it may not have
    /// told all members.
    pub(super) fn break_off_if_due(&mut self, now: Instant) {
        if self.part.answer_by.is_none_or(|at| now < at) {
            return;
        }
        self.part.answer_by = None;
        if self.awaits_check() || self.view.out_of_reach_since.is_some() {
            let name = self.counterpart.name();
            self.break_off(format!("{name} did not bring a change of the world to its end within {ANSWER_WITHIN:.1?}"));
        }
    }

    /// The workers cannot stop together. They have to go back to their last commit.
    fn break_off(&mut self, reason: String) {
        self.end_part();
        self.view.waiting = self.view.waiting.max(1);
        self.view.reason = reason;
    }

    /// The current round is over for this node, or its workers cannot stop together any more.
    pub(in crate::rendezvous) fn end_part(&mut self) {
        self.part = Part { changes: self.part.changes, ..Part::default() };
        self.hello.attending = false;
        (self.view.change, self.view.raise_at) = (None, None);
    }

    /// The job is over. Workers that wait for a check go on.
    pub(in crate::rendezvous) fn let_workers_go_on(&mut self) {
        self.part.answer_by = None;
        if let Some(change) = self.view.change.as_ref().filter(|_| self.awaits_check()) {
            self.view.raise_at = Some((change.round, NEVER));
        }
    }

    /// Whether this node's workers are those of this round.
    pub(super) fn is_member(&self, round: Round) -> bool {
        let over = self.left || self.view.closed.is_some() || self.view.failed.is_some();
        let runs = self.hello.placed.is_some_and(|placed| placed.active && placed.round == round);
        runs && !over && self.joining.is_none()
    }

    /// Whether a coordinator is connected, and this node's workers may survive a change.
    pub(in crate::rendezvous) fn changes_in_place(&self) -> bool {
        self.hello.in_place && self.has_coordinator()
    }

    fn say_departure(&mut self, round: Round) {
        if let Some((reason, signal)) = self.part.leaving.clone() {
            self.say_in_place(NodeMessage::WillLeave { round, reason, signal });
        }
    }

    /// Send this if a coordinator is connected.
    fn say_in_place(&mut self, message: NodeMessage) {
        if self.changes_in_place() {
            self.commands.push(NodeCommand::Send(message));
        }
    }
}
