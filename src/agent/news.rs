//! What of a session's view concerns an agent, and when it has changed.

use super::machine::AgentMachine;
use crate::rendezvous::node::machine::View;
use crate::rendezvous::protocol::message::{Placement, Round};

/// What an agent has acted on last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    round: Round,
    must_re_form: bool,
    closed: bool,
    cut_off: bool,
    unfinished: Option<String>,
}

impl Seen {
    /// Of a view.
    pub fn of(view: &View) -> Self {
        Self {
            round: view.round,
            must_re_form: view.waiting > 0,
            closed: view.closed.is_some(),
            cut_off: view.failed.is_some(),
            unfinished: view.unfinished.clone(),
        }
    }

    /// A place has just been taken: whatever the view says besides is news.
    pub fn placed(placement: &Placement) -> Self {
        Self { round: placement.round, must_re_form: false, closed: false, cut_off: false, unfinished: None }
    }
}

impl AgentMachine {
    /// How things stand at the rendezvous, when it is not as it was [`Seen`] last.
    pub fn on_view(&mut self, view: &View) {
        if let Some(verdict) = &view.closed {
            self.on_closed(verdict.clone());
        } else if let Some(error) = &view.failed {
            self.on_cut_off(error.clone());
        } else if view.waiting > 0 && view.stopped.is_some() {
            self.on_host_gone(view.round, &view.reason);
        } else if view.waiting > 0 {
            self.on_interrupted(view.round, &view.reason);
        } else if let Some(unfinished) = &view.unfinished {
            self.on_unfinished(unfinished);
        }
    }
}
