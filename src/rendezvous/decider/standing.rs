//! What the coordinator makes of a run at the moment, and why: a decision for each state of affairs, in words.
//!
//! [`super::closing`] takes it after every event. It is logged when it changes, and callers find it in what a waiting node is told
//! ([`Run::progress`]) and in [`Run::standing`].

use std::time::Instant;

use super::deadlines::Deadline;
use super::node::{Node, Status};
use super::run::Run;
use crate::rendezvous::protocol::message::Waits;

/// A decision about the next round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nobody is here.
    #[default]
    Vacant,
    /// Fewer nodes wait than are needed.
    Gathering,
    /// The world runs; nobody is needed, or nobody waits.
    Undisturbed,
    /// The world must re-form, and members still run.
    Reforming,
    /// A restarted coordinator gives the members of a world it did not form the time to report.
    Recalling,
    /// Enough nodes wait, but the connection of one has just ended.
    Reconnecting,
    /// Enough nodes wait; others are to be expected.
    LastCall,
    /// Fewer nodes wait than the last world had; a replacement may come.
    Settling,
    /// Nodes that name a world unknown here may still run it: they are given the time to stop.
    Fencing,
    /// The rendezvous is closed.
    Closed,
}

impl Standing {
    /// Why a round that could close does not close yet.
    pub(in crate::rendezvous) fn holds_up(self) -> Option<&'static str> {
        match self {
            Self::Recalling => {
                Some("this coordinator was restarted, and waits for members of the last round to report")
            }
            Self::Reconnecting => Some("the connection of a node has ended, which has its grace to come back"),
            Self::LastCall => Some("others may come within the last call (last_call_timeout)"),
            Self::Settling => Some("a replacement may come for those who are gone (settle_timeout)"),
            Self::Fencing => {
                Some("nodes may still run a world of this coordinator's life before, for as long as their lease")
            }
            _ => None,
        }
    }
}

impl Run {
    /// What is decided at the moment.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// The decision that follows from how things stand.
    pub(in crate::rendezvous) fn judge_standing(&self) -> Standing {
        let enough = self.roster.waiting().len() >= self.settings.min_nodes as usize;
        let close_at = self.deadlines.get(Deadline::CloseRound);
        match () {
            () if self.current.closed().is_some() => Standing::Closed,
            () if self.roster.is_empty() => Standing::Vacant,
            () if self.recalls() => Standing::Recalling,
            () if !self.roster.active().is_empty() && self.waiting_for_members() == 0 => Standing::Undisturbed,
            () if !self.roster.active().is_empty() => Standing::Reforming,
            () if !enough => Standing::Gathering,
            () if self.roster.counts().unreachable > 0 => Standing::Reconnecting,
            () if close_at.is_some() && close_at == self.recovery.strangers_until() => Standing::Fencing,
            () if self.shrinks() => Standing::Settling,
            () => Standing::LastCall,
        }
    }

    /// The decision and its reason, for the log.
    pub(in crate::rendezvous) fn standing_text(&self) -> Option<String> {
        let waiting = self.roster.waiting().len();
        match self.standing {
            // What led there was logged: who left, how it was closed, why members are to stop, that the round is complete.
            Standing::Vacant | Standing::Closed | Standing::Recalling | Standing::Undisturbed => None,
            Standing::Reforming if self.current.interrupted().is_some() => None,
            Standing::Reforming => Some(format!("members of round {} are to stop: {}", self.round(), self.why())),
            Standing::Gathering => {
                let missing = (self.settings.min_nodes as usize).saturating_sub(waiting);
                Some(format!(
                    "round {} waits for {missing} more nodes{}",
                    self.next_round(),
                    self.roster.list(self.roster.waiting())
                ))
            }
            _ => {
                let why = self.standing.holds_up()?;
                Some(format!("round {} could form with {waiting} nodes, but {why}", self.next_round()))
            }
        }
    }

    /// What a node is told that waits: for its place, or, having finished, for the others to finish.
    pub(in crate::rendezvous) fn waits(&self, node: &Node, now: Instant) -> Option<Waits> {
        match node.status {
            Status::Waiting { .. } => Some(Waits { progress: self.progress(now), spare: self.is_spare(node) }),
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

    /// How the next round stands, in words: who is in, who is missing, what is waited for and until when.
    pub fn progress(&self, now: Instant) -> String {
        let min_nodes = self.settings.min_nodes as usize;
        let (waiting, active) = (self.roster.waiting(), self.roster.active());
        let mut text = format!(
            "round {}: {} of {} nodes have joined{}",
            self.next_round(),
            waiting.len(),
            self.settings.node_counts(),
            self.roster.list(waiting),
        );
        if !active.is_empty() {
            let (running, round) = (active.len(), self.round());
            if self.waiting_for_members() == 0 {
                text += &format!("; round {round} runs undisturbed (nodes: {running})");
            } else {
                text += &format!("; {running} still to come back from round {round}{}", self.roster.list(active));
            }
        }
        let expected = waiting.len() + active.len();
        if expected < min_nodes {
            text += &format!("; {} more needed", min_nodes - expected);
        }
        if let Some(reason) = self.current.interrupted() {
            text += &format!("; re-forming because {reason}");
        }
        if let Some(at) = self.deadlines.get(Deadline::CloseRound) {
            text += &format!("; closes within {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        }
        if let Some(why) = self.standing.holds_up() {
            text += &format!(": {why}");
        }
        text
    }
}
