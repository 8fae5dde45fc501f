//! What the coordinator makes of a run at the moment, and why: a decision for each state of affairs, in words.
//!
//! [`super::decide`] takes it after every event. It is logged when it changes, and callers find it in what a waiting node is told
//! ([`Run::progress`]) and in [`Run::standing`].

use super::state::Run;

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
        let enough = self.waiting.len() >= self.settings.min_nodes as usize;
        match () {
            () if self.closed.is_some() => Standing::Closed,
            () if self.nodes.is_empty() => Standing::Vacant,
            () if self.hold_until.is_some() => Standing::Recalling,
            () if !self.active.is_empty() && self.waiting_for_members() == 0 => Standing::Undisturbed,
            () if !self.active.is_empty() => Standing::Reforming,
            () if !enough => Standing::Gathering,
            () if self.unreachable_count > 0 => Standing::Reconnecting,
            () if self.close_at.is_some() && self.close_at == self.strangers_until => Standing::Fencing,
            () if self.shrinks() => Standing::Settling,
            () => Standing::LastCall,
        }
    }

    /// The decision and its reason, for the log.
    pub(in crate::rendezvous) fn standing_text(&self) -> Option<String> {
        let waiting = self.waiting.len();
        match self.standing {
            // What led there was logged: who left, how it was closed, why members are to stop, that the round is complete.
            Standing::Vacant | Standing::Closed | Standing::Recalling | Standing::Undisturbed => None,
            Standing::Reforming if self.interrupted.is_some() => None,
            Standing::Reforming => {
                Some(format!("members of round {} are to stop: {}", self.round, super::decide::why(self)))
            }
            Standing::Gathering => {
                let missing = (self.settings.min_nodes as usize).saturating_sub(waiting);
                Some(format!("round {} waits for {missing} more nodes{}", self.next_round(), self.list(&self.waiting)))
            }
            _ => {
                let why = self.standing.holds_up()?;
                Some(format!("round {} could form with {waiting} nodes, but {why}", self.next_round()))
            }
        }
    }
}
