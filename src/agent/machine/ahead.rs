//! A newcomer's workers are started before it joins. Part of [`super`].
//!
//! A start takes seconds to minutes: imports, data, the model. Without this the workers of the running world would have left it, and would
//! wait for all of that. It is possible if they can change in place, and if the program lets `elastic_rs.elastic.run` make the process
//! group: such a worker needs no world until it gets there. It gets the placement that is probable, and its own when it has one
//! (`docs/decisions/0076-a-newcomers-workers-are-started-before-it-joins.md`).

use std::time::{Duration, Instant};

use super::{AgentMachine, Phase, REPORT_EVERY, SIGTERM};
use crate::agent::command::Command;
use crate::agent::machine::Next;
use crate::agent::policy::{Budget, Outcome};
use crate::rendezvous::messages::message::{Failure, Running};

/// How long a node waits to hear of a running world before it joins. There may be no coordinator yet, so it does not wait longer.
pub const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// How long workers that were started before their node joins may take until they wait for the world. As long as a join may take by
/// default.
pub const PREPARE_LIMIT: Duration = Duration::from_secs(600);

impl AgentMachine {
    /// Whether a world runs for which the workers may be started now.
    pub fn on_forecast(&mut self, running: Option<&Running>, now: Instant) {
        if !matches!(self.phase, Phase::Looking) {
            return;
        }
        let Some(running) = running else { return self.join() };
        if self.policy.budget == Budget::Job {
            self.restarts = running.restart;
        }
        self.log(format!(
            "the job runs with {} workers on {} nodes, and can change in place: the workers of this node are started before it joins",
            running.workers, running.nodes
        ));
        let placement = running.next_placement(self.policy.workers);
        self.workers = placement.workers_of(self.policy.workers);
        self.worker_states.begin(self.workers, None);
        self.prepared = true;
        self.phase = Phase::Preparing { since: now, report_at: now + REPORT_EVERY };
        self.commands.push(Command::StartAhead(Box::new(placement)));
    }

    pub(super) fn is_preparing(&self) -> bool {
        matches!(self.phase, Phase::Preparing { .. })
    }

    /// Whether this node has never had a rank.
    pub fn is_new(&self) -> bool {
        self.placement.is_none()
    }

    /// A worker waits for its world. The node joins once all do.
    pub(super) fn on_prepared(&mut self, local_rank: u32) {
        self.worker_states.park(local_rank);
        if self.worker_states.all_wait() {
            self.parked_survive();
            self.join();
        }
    }

    /// A worker has succeeded without a world. Whatever that means, the others do not wait for one in vain.
    pub(super) fn stop_if_prepared_in_vain(&mut self, local_rank: u32) {
        if self.is_preparing() {
            self.warn(format!(
                "the worker with local rank {local_rank} has ended before it was in a world; all workers are started again after the join"
            ));
            self.stop(SIGTERM, Next::Join);
        }
    }

    /// A worker has failed before this node has joined. That concerns nobody else.
    pub(super) fn give_up_alone(&mut self, failure: Failure) {
        let failure = self.of_this_node(failure);
        self.warn(format!("{failure}; this node had not joined yet, so it ends alone"));
        let reason = failure.to_string();
        self.end_after_stop(Outcome::Unfit { cause: Box::new(failure), reason });
    }

    pub(super) fn look_after_preparation(&mut self, now: Instant) {
        let Phase::Preparing { since, report_at } = &mut self.phase else { return };
        if now < *report_at {
            return;
        }
        *report_at = now + REPORT_EVERY;
        let waited = now.saturating_duration_since(*since);
        let (missing, workers) = (self.worker_states.started().len(), self.workers);
        let what =
            format!("{missing} of {workers} workers have not reached `elastic_rs.elastic.run` within {waited:.0?}");
        if waited < PREPARE_LIMIT {
            return self.warn(format!("{what}; this node joins when they have"));
        }
        self.warn(format!("{what}: this node joins without them, and starts all workers again"));
        self.stop(SIGTERM, Next::Join);
    }
}
