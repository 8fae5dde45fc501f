//! Explanations for a node's log and errors: why it cannot reach its counterpart, and why it stops its workers.

use std::time::Duration;

use super::NodeMachine;
use super::backend::Counterpart;

impl NodeMachine {
    /// Explain why the counterpart is out of reach, in a sentence that names it.
    pub(super) fn why_out_of_reach(&self) -> String {
        let name = self.counterpart.name();
        match (&self.counterpart, &self.view.stopped) {
            (Counterpart::Cell, _) => format!("{name} fails: {}", self.last_error),
            (Counterpart::Etcd { .. }, _) if self.tries == 0 => format!("{name} has not answered yet"),
            // The error names the members that were tried.
            (Counterpart::Etcd { .. }, _) => self.last_error.clone(),
            (Counterpart::Coordinator { .. }, None)
                if self.was_welcomed() || self.unanswered > 0 || self.tries == 0 =>
            {
                format!("{name} is out of reach: {}", self.last_error)
            }
            (Counterpart::Coordinator { .. }, None) => format!(
                "{name} is out of reach: {}; nobody has answered there yet, so either the node that hosts it has not started, or the job \
                 is over; behind a Service or NAT, that node needs --rdzv-conf is_host=1",
                self.last_error
            ),
            (Counterpart::Coordinator { .. }, Some(why)) => {
                format!("{name} was stopped: {why}; no world can form until a coordinator runs there again")
            }
        }
    }

    /// Explain why no answer has come yet.
    #[cfg(feature = "io")]
    pub(super) fn why_unanswered(&self) -> String {
        match self.view.out_of_reach_since {
            Some(_) => self.last_error.clone(),
            None => format!("{} does not answer", self.counterpart.place()),
        }
    }

    /// Explain why the counterpart is out of reach, for an error that names it already.
    pub(super) fn why_away(&self) -> String {
        match &self.view.stopped {
            None => self.last_error.clone(),
            Some(why) => format!("it was stopped ({why}), and has not come back: {}", self.last_error),
        }
    }

    /// Explain why this node stops its workers. `away`: the time since its lease was last renewed. `connected`: a connection is open.
    pub(super) fn why_fenced(&self, away: Duration, connected: bool) -> String {
        let lease = self.hello.settings.lease();
        match &self.counterpart {
            Counterpart::Coordinator { .. } => {
                let why = if connected { "its last messages were not answered" } else { self.last_error.as_str() };
                format!(
                    "this node has been cut off from {} for {away:.1?} (its lease is {lease:.1?}): {why}; it stops its workers, \
                     because the other nodes may go on without it (on_partition=stop)",
                    self.counterpart.name(),
                )
            }
            Counterpart::Cell => {
                format!("this node could not renew its lease of {lease:.1?} in the backend: {}", self.last_error)
            }
            Counterpart::Etcd { name, .. } => format!(
                "this node could not renew its lease of {lease:.1?} at {name} for {away:.1?}: {}; it stops its workers, because the \
                 other nodes may go on without it (on_partition=stop)",
                self.last_error
            ),
        }
    }
}
