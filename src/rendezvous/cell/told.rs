//! What follows for a node from what the cell holds: its place, whether its world must re-form, how the job ended. Part of
//! [`super::node`].

use std::time::Instant;

use super::blob::Blob;
use super::node::CasNode;
use crate::rendezvous::node::view::JoinError;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Placed, Placement};

impl CasNode {
    /// The cell holds these bytes, or nothing.
    pub(super) fn be_told(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.busy = false;
        (self.failing_since, self.view.out_of_reach_since, self.tries) = (None, None, 0);
        let blob = match bytes.map(Blob::decode).transpose() {
            Ok(blob) => blob,
            Err(error) => return self.fail(JoinError::State(error.to_string())),
        };
        if let Some(other) = blob.as_ref().map(Blob::run_id).filter(|run_id| *run_id != self.hello.run_id) {
            let text = format!("the rendezvous state is that of run `{other}`, not of `{}`", self.hello.run_id);
            return self.fail(JoinError::State(text));
        }
        self.accept(blob, now);
    }

    /// The cell holds this for certain.
    pub(super) fn accept(&mut self, blob: Option<Blob>, now: Instant) {
        let news = match (&self.confirmed, &blob) {
            (Some(before), Some(after)) => before.revision() != after.revision(),
            (before, after) => before.is_some() != after.is_some(),
        };
        self.quiet_looks = if news { 0 } else { self.quiet_looks.saturating_add(1) };
        (self.busy, self.failing_since, self.view.out_of_reach_since, self.tries) = (false, None, None, 0);
        self.looked_at = Some(now);
        if let Some(blob) = &blob {
            self.seen.look(blob, now);
        }
        self.confirmed = blob;
        self.settle(now);
    }

    /// What follows for this node from what the cell holds.
    fn settle(&mut self, now: Instant) {
        let me = self.hello.node;
        let Some(blob) = &self.confirmed else {
            if self.runs() {
                self.interrupt("the rendezvous state is gone from the backend");
            }
            return;
        };
        let run = blob.run(&self.hello, &self.seen, now);
        if let Some(verdict) = run.closed() {
            self.view.closed = Some(verdict.clone());
            self.closing = None;
            let spare = run.waits_as_spare(me);
            self.resolve(Err(JoinError::Closed { verdict: verdict.clone(), spare }));
            return;
        }
        let place = run.seat(me);
        if let Some(joining) = &mut self.joining {
            if let Some((_, rank)) = place.filter(|(round, _)| *round > joining.join.round)
                && let Some(CoordinatorMessage::Complete(placement)) = run.placement(rank)
            {
                if rank == 0 && placement.master_port != joining.join.store_port {
                    // An answer to an earlier join that was abandoned: the store it names is gone.
                    joining.join.round = placement.round;
                    self.view.round = placement.round;
                } else {
                    self.take_place(placement);
                }
            } else if joining.withdrawn_at.is_some() && place.is_none() && !run.knows(me) {
                let after = joining.deadline - joining.since;
                let progress = joining.progress.clone().unwrap_or_default();
                self.resolve(Err(JoinError::Timeout { after, progress }));
            }
        }
        // Also of a place that was taken just now: the answer may be older than what has happened since.
        if self.runs() {
            let mine = self.hello.placed.map(|placed| (placed.round, placed.rank));
            if place.is_some() && place == mine {
                self.view.waiting = run.waiting_for_members();
                self.view.reason = if self.view.waiting > 0 { run.why() } else { String::new() };
            } else {
                let text = if run.round() > self.view.round {
                    format!("round {} formed without this node", run.round())
                } else {
                    "the others have given this node up".to_owned()
                };
                self.interrupt(&text);
            }
        }
    }

    fn take_place(&mut self, placement: Placement) {
        let Placement { round, rank, world_size, world, restart, .. } = placement;
        let wanted = self.joining.as_ref().is_some_and(|joining| joining.withdrawn_at.is_none());
        self.hello.placed = Some(Placed { round, rank, world_size, world, active: wanted, restart, host: None });
        self.view.round = round;
        self.view.waiting = 0;
        self.view.reason.clear();
        if wanted {
            self.resolve(Ok(placement));
        }
    }

    pub(super) fn interrupt(&mut self, reason: &str) {
        self.view.waiting = self.view.waiting.max(1);
        self.view.reason = reason.to_owned();
    }
}
