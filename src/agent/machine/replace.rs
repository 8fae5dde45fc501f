//! Workers that are missing are started while the others leave their world. Part of [`super`].
//!
//! The next world needs them, and waits for them: their imports, data and model take longer than everything else. If the program lets
//! `elastic_rs.elastic.run` make the process group, its workers need no world until they get there, as a newcomer's ([`super::ahead`]). So
//! they are started as soon as the failure is reported, in the place that the node has had. They get the next place when the node does.
//!
//! - The node's join does not list them: they are new, and have no state.
//! - One that fails before the node has its place is the first failure of the next world. One that cannot be started is started in that
//!   world, as any other. Neither is started ahead again before that.

use std::time::{Duration, Instant};

use super::worker_states::WorkerState;
use super::{AgentMachine, Next, Phase, Way};
use crate::agent::command::Command;
use crate::agent::policy::Budget;
use crate::rendezvous::messages::message::{Failure, Placement};

/// How long after the end of a world a node's join may wait until missing workers are started. A fork server that is loading takes longer,
/// and other nodes should know by then that this one takes part.
pub const REPLACE_LIMIT: Duration = Duration::from_secs(1);

impl AgentMachine {
    /// Have the missing workers started, unless they have to wait for their place.
    pub(super) fn start_missing_ahead(&mut self) {
        self.call_standbys();
        let Some(placement) = self.placement.as_deref().filter(|_| self.is_followed_by_another_world()) else { return };
        if !self.worker_states.no_process_group || self.closed_well {
            return;
        }
        let worker_states = &self.worker_states;
        let missing = worker_states
            .which(|worker_state| worker_state == WorkerState::Missing)
            .filter(|rank| !worker_states.tried.contains(rank));
        let missing: Vec<_> = missing.collect();
        if missing.is_empty() {
            return;
        }
        // A failure that this agent counts itself has been counted already.
        let restart = self.restarts + u32::from(self.policy.budget == Budget::Job);
        let reason = "workers are started ahead of the next round".to_owned();
        let placement = Placement { round: placement.round.next(), restart, reason, resume: None, ..placement.clone() };
        if !self.worker_states.asked.is_empty() {
            self.commands.push(Command::CancelStart); // all in one
        }
        self.worker_states.tried.extend(&missing);
        self.worker_states.asked.extend(missing);
        self.commands
            .push(Command::Replace { placement: Box::new(placement), missing: self.worker_states.asked.clone() });
    }

    /// Whether workers leave their world, and this node takes part in the next, as far as it knows.
    pub(super) fn is_followed_by_another_world(&self) -> bool {
        let Phase::Stopping { next, over, way: Way::Park { .. } } = &self.phase else { return false };
        match next {
            // A join that is not held up already follows at once.
            Next::Join => !over || !self.worker_states.asked.is_empty(),
            // The coordinator decides, after the report.
            Next::Decide => self.first_is_decided() && self.restarts < self.policy.max_restarts,
            Next::Start(_) | Next::End(_) => false,
        }
    }

    /// The workers that were asked for run.
    pub(super) fn on_started_ahead(&mut self) {
        for local_rank in std::mem::take(&mut self.worker_states.asked) {
            self.waits_ahead(local_rank, false);
        }
        self.look_at_parked();
    }

    /// One of the workers that were asked for cannot be started, and none of them runs.
    pub(super) fn on_not_started_ahead(&mut self, failure: &Failure) {
        self.warn(format!("{failure}; it is started again in the next round"));
        self.worker_states.asked.clear();
        self.look_at_parked();
    }

    /// Whether a worker that was started ahead is connected.
    pub(super) fn waits_ahead(&mut self, local_rank: u32, waits: bool) {
        self.worker_states.of.insert(local_rank, WorkerState::Ahead { waits });
    }

    /// Until when the join waits for workers that are being started, if it does.
    pub(super) fn held_up_until(&self) -> Option<Instant> {
        let Phase::Stopping { next: Next::Join, over: true, way: Way::Park { ended, .. } } = self.phase else {
            return None;
        };
        (!self.worker_states.asked.is_empty()).then(|| ended + REPLACE_LIMIT)
    }

    /// Joins without workers whose start takes too long. They are started in the next round.
    pub(super) fn stop_holding_join_up(&mut self, now: Instant) {
        if self.held_up_until().is_some_and(|until| until <= now) {
            self.commands.push(Command::CancelStart);
            self.worker_states.asked.clear();
            self.look_at_parked();
        }
    }
}
