//! The parts of a session's view that concern an agent, and their changes.

use std::time::Instant;

use super::machine::AgentMachine;
use crate::rendezvous::messages::message::{Placement, Round};
use crate::rendezvous::node::View;

/// The state that an agent has last acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    round: Round,
    must_re_form: bool,
    closed: bool,
    cut_off: bool,
    fenced: bool,
    unfinished: Option<String>,
    /// The number of the change.
    change: Option<u64>,
    raise_at: Option<u64>,
}

impl Seen {
    /// From a view.
    pub fn of(view: &View) -> Self {
        Self {
            round: view.round,
            must_re_form: view.waiting > 0,
            closed: view.closed.is_some(),
            cut_off: view.failed.is_some(),
            fenced: view.fenced.is_some(),
            unfinished: view.unfinished.clone(),
            change: view.change.as_ref().map(|_| view.changes),
            raise_at: view.raise_at.map(|(_, check)| check),
        }
    }

    /// After a placement: everything else in the view is news.
    pub fn placed(placement: &Placement) -> Self {
        Self {
            round: placement.round,
            must_re_form: false,
            closed: false,
            cut_off: false,
            fenced: false,
            unfinished: None,
            change: None,
            raise_at: None,
        }
    }
}

impl AgentMachine {
    /// The state of the rendezvous differs from the one that was [`Seen`] last.
    pub fn on_view(&mut self, view: &View, now: Instant) {
        self.failure = view.failure.clone().map(Box::new);
        if let Some(verdict) = &view.closed {
            self.on_closed(verdict.clone());
        } else if let Some(error) = &view.failed {
            self.on_cut_off(error.clone());
        } else if view.waiting > 0 && view.fenced.is_some() {
            self.on_fenced(view.round, &view.reason, now);
        } else if view.waiting > 0 && view.stopped.is_some() {
            self.on_host_gone(view.round, &view.reason, now);
        } else if view.waiting > 0 {
            self.on_interrupted(view.round, &view.reason, now);
        } else {
            if let Some(change) = &view.change {
                self.on_change(view.changes, change);
                if let Some((_, check)) = view.raise_at {
                    self.on_raise_at(view.changes, change, check, now);
                }
            }
            if let Some(unfinished) = &view.unfinished {
                self.on_unfinished(unfinished);
            }
        }
    }
}
