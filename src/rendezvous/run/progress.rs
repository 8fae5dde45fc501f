//! The current decision about a run's next round, and its reason in words.
//!
//! The run updates it after every event, and logs it when it changes. Waiting nodes receive it in words ([`Parts::progress`]).

use std::time::Instant;

use super::node::{Node, Status};
use super::parts::Parts;
use super::standing::Standing;
use crate::rendezvous::messages::message::Waits;

impl Parts<'_> {
    /// Determine the decision from the current state.
    pub(super) fn judge_standing(self) -> Standing {
        match () {
            () if self.current.closed().is_some() => Standing::Closed,
            () if self.roster.is_empty() => Standing::Vacant,
            () if self.recovery.awaits_members() => Standing::Recalling,
            () if self.held_growth().is_some() => Standing::Holding,
            () if !self.roster.active().is_empty() && self.waiting_for_members() == 0 => Standing::Undisturbed,
            () if !self.roster.active().is_empty() && self.changes_in_place() => Standing::Changing,
            () if !self.roster.active().is_empty() => Standing::Reforming,
            () if !self.is_enough() => Standing::Gathering,
            () if self.roster.counts().unreachable > 0 => Standing::Reconnecting,
            () if self.closes_at.is_some() && self.closes_at == self.recovery.strangers_until() => Standing::Fencing,
            () if self.shrinks() => Standing::Settling,
            () => Standing::LastCall,
        }
    }

    /// The decision and its reason, for the log.
    pub(super) fn standing_text(self, standing: Standing) -> Option<String> {
        let waiting = self.roster.waiting().len();
        match standing {
            // The event that led to each of these was logged already.
            Standing::Vacant | Standing::Closed | Standing::Recalling | Standing::Undisturbed | Standing::Reforming => {
                None
            }
            Standing::Changing if self.in_place.is_changing() => None,
            Standing::Changing => Some(format!(
                "round {} runs on until the last call of those that want to join ends (last_call_timeout): {}",
                self.round(),
                self.who_waits()
            )),
            Standing::Holding => {
                Some(format!("round {} runs on, though {}: {}", self.round(), self.who_waits(), standing.holds_up()?))
            }
            Standing::Gathering => Some(format!(
                "round {} has {}{}",
                self.next_round(),
                self.gathering_text(),
                self.roster.list(self.roster.waiting())
            )),
            _ => {
                let why = standing.holds_up()?;
                Some(format!("round {} could form with {waiting} nodes, but {why}", self.next_round()))
            }
        }
    }

    /// The progress for a node that waits for a place, or has finished and waits for the others to finish.
    pub(super) fn waits(self, node: &Node, now: Instant) -> Option<Waits> {
        match node.status {
            Status::Waiting { .. } => {
                let out = self.hosts.out_text(&node.origin(), now).filter(|_| node.out);
                let progress = self.progress(now);
                let progress = match out {
                    Some(out) => format!("{out}; {progress}"),
                    None => progress,
                };
                Some(Waits { progress, spare: self.is_spare(node) })
            }
            Status::Active if node.done => {
                let (done, all) = (self.roster.counts().done, self.roster.active().len());
                let have = if done == 1 { "has" } else { "have" };
                let still = self.roster.list(self.roster.unfinished());
                let progress = format!("{done} of {all} nodes {have} finished; still at work{still}");
                Some(Waits { progress, spare: false })
            }
            Status::Active | Status::Idle => None,
        }
    }

    /// Describe the next round: which nodes have joined, how many are missing, why it does not close, and when it will.
    pub(super) fn progress(self, now: Instant) -> String {
        let (waiting, active) = (self.roster.waiting(), self.roster.active());
        let mut text = format!("round {}: {}{}", self.next_round(), self.joined_text(), self.roster.list(waiting));
        if !active.is_empty() {
            let (running, round) = (active.len(), self.round());
            if self.waiting_for_members() == 0 {
                text += &format!("; round {round} runs undisturbed (nodes: {running})");
            } else if self.changes_in_place() {
                text += &format!("; round {round} runs on until its workers stop together (nodes: {running})");
            } else {
                text += &format!("; {running} still to come back from round {round}{}", self.roster.list(active));
            }
        }
        if let Some(needed) = self.needed_text() {
            text += &format!("; {needed}");
        }
        if let Some(out) = self.hosts.describe(now) {
            text += &format!("; {out}");
        }
        if let Some(reason) = self.current.interrupted() {
            text += &format!("; re-forming because {reason}");
        }
        if let Some(at) = self.held_growth() {
            text += &format!("; no node can join for {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        } else if let Some(at) = self.in_place.due_at().filter(|_| !self.in_place.is_changing()) {
            let left = at.saturating_duration_since(now).as_secs_f64();
            text += &format!("; more nodes may join for {left:.1} s (last_call_timeout)");
        }
        if let Some(at) = self.closes_at {
            text += &format!("; closes within {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        }
        if let Some(why) = self.standing.holds_up() {
            text += &format!(": {why}");
        }
        text
    }
}
