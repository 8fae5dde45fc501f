//! What decides for a node, and the words for it: a coordinator, or the nodes themselves over a shared cell.

use std::time::Duration;

use super::machine::NodeMachine;

/// What a node speaks to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Counterpart {
    /// A coordinator. Its answers show that it has heard of this node.
    Coordinator {
        /// Where it listens.
        endpoint: String,
        /// How long a node that has been welcomed does without it.
        timeout: Duration,
    },
    /// A cell that all nodes share. What shows that the others have heard of this node is a write, or a lease: the transport says so
    /// with [`NodeMachine::vouch`]. A backend that fails ends a pending join after one lease; a node that runs is fenced by then.
    Cell,
}

impl Counterpart {
    /// What it is and where, for messages.
    pub fn name(&self) -> String {
        match self {
            Self::Coordinator { endpoint, .. } => format!("the coordinator at {endpoint}"),
            Self::Cell => "the backend".to_owned(),
        }
    }

    /// Where it is, for messages that say what it does.
    pub fn place(&self) -> &str {
        match self {
            Self::Coordinator { endpoint, .. } => endpoint,
            Self::Cell => "the backend",
        }
    }

    /// How long a node that has been welcomed does without it. `None`: as long as nobody waits for it.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Coordinator { timeout, .. } => Some(*timeout),
            Self::Cell => None,
        }
    }

    /// Whether an answer shows that the others have heard of this node.
    pub fn vouches(&self) -> bool {
        matches!(self, Self::Coordinator { .. })
    }
}

impl NodeMachine {
    /// Why the counterpart is out of reach.
    pub(super) fn why_out_of_reach(&self) -> String {
        let name = self.counterpart.name();
        match (&self.counterpart, &self.view.stopped) {
            (Counterpart::Cell, _) => format!("{name} fails: {}", self.last_error),
            (Counterpart::Coordinator { .. }, None) => format!("{name} is out of reach: {}", self.last_error),
            (Counterpart::Coordinator { .. }, Some(why)) => {
                format!("{name} was stopped: {why}; no world can form until one runs there again")
            }
        }
    }

    /// Why nothing has come back yet.
    #[cfg(feature = "io")]
    pub(super) fn why_unanswered(&self) -> String {
        match self.view.out_of_reach_since {
            Some(_) => self.last_error.clone(),
            None => format!("{} does not answer", self.counterpart.place()),
        }
    }

    /// Why it has been out of reach, for an error that says so.
    pub(super) fn why_away(&self) -> String {
        match &self.view.stopped {
            None => self.last_error.clone(),
            Some(why) => format!("it was stopped ({why}), and has not come back: {}", self.last_error),
        }
    }

    /// Why this node's workers must stop, `away` after anybody is known to have heard of it.
    pub(super) fn why_fenced(&self, away: Duration, connected: bool) -> String {
        let lease = self.hello.settings.lease();
        match &self.counterpart {
            Counterpart::Coordinator { .. } => {
                let why = if connected { "its last messages were not answered" } else { self.last_error.as_str() };
                format!(
                    "this node has been cut off from {} for {away:.1?} (its lease is {lease:.1?}): {why}; it stops its workers, \
                     since the others may go on without it (on_partition=stop)",
                    self.counterpart.name(),
                )
            }
            Counterpart::Cell => format!("this node could not show for {lease:.1?} that it lives: {}", self.last_error),
        }
    }
}
