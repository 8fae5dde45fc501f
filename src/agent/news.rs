//! The parts of a session's view that concern an agent, and their changes.

use super::machine::AgentMachine;
use crate::rendezvous::node::machine::View;
use crate::rendezvous::protocol::message::{Placement, Round};

/// The state that an agent has last acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    round: Round,
    must_re_form: bool,
    closed: bool,
    cut_off: bool,
    unfinished: Option<String>,
}

impl Seen {
    /// From a view.
    pub fn of(view: &View) -> Self {
        Self {
            round: view.round,
            must_re_form: view.waiting > 0,
            closed: view.closed.is_some(),
            cut_off: view.failed.is_some(),
            unfinished: view.unfinished.clone(),
        }
    }

    /// After a placement: everything else in the view is news.
    pub fn placed(placement: &Placement) -> Self {
        Self { round: placement.round, must_re_form: false, closed: false, cut_off: false, unfinished: None }
    }
}

impl AgentMachine {
    /// The state of the rendezvous differs from the one that was [`Seen`] last.
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
