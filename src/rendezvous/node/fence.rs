//! Fencing: a node that is cut off stops its workers, so that two worlds never run at once. Part of [`super].
//!
//! The coordinator may form a world without a node that was silent for its lease. So the node stops its workers when its lease is
//! over. It counts the lease on its own clock, from the moment when it *sent* the last answered message. The coordinator got that
//! message no earlier, so neither clock settings nor transit times matter. A node that was stopped itself (SIGSTOP) finds its lease
//! over as soon as it continues.
//!
//! A node in the coordinator's own process is stopped together with it (Ctrl-Z, a frozen container, a debugger). No other process can
//! form a world without that node meanwhile. When both continue, the coordinator renews every lease, or waits for [`LAST_LOOK`]
//! before it drops a node. So that node also asks once more, and stops its workers only if no answer comes. It needs a fence all the
//! same: a firewall or a moved virtual address may cut its connection while the coordinator forms a world of the other nodes.
//!
//! The workers' guards hold the same deadline ([`NodeMachine::workers_until`]), so that a node whose agent is stopped ends its workers,
//! too. A node in the coordinator's own process gives its guards none.
//!
//! Workers that wait for the next world end with the lease as well. They hold the state of a world that may have gone on without them.
//!
//! A refused connection proves that no coordinator decides, because its process is gone. Workers run on until it is back or
//! `coordinator_timeout` ends. A connection that merely ended proves nothing. The next attempt may.
//!
//! `docs/decisions/0028-a-node-fences-itself.md` has the limits of this.

use std::time::Instant;

use super::NodeMachine;
use super::join::{Link, Report};
use crate::rendezvous::messages::settings::OnPartition;
use crate::rendezvous::messages::settings::{LAST_LOOK, STALL};

impl NodeMachine {
    /// When this node must stop its workers, unless its lease is renewed before. `None`: it runs none, or they may continue.
    pub(in crate::rendezvous) fn fence_at(&self) -> Option<Instant> {
        let live = self.view.failed.is_none() && self.has_workers_of_a_world();
        (live && self.is_fenceable()).then(|| self.lease_ends_at())
    }

    /// When the guards of this node's workers kill them, whatever this process does. `None`: they have no deadline.
    ///
    /// It stays in the past from a fence until the next join, and is not renewed any more when the node has failed: the other nodes may
    /// go on without it while its workers are being stopped.
    pub fn workers_until(&self) -> Option<Instant> {
        let any = self.has_workers_of_a_world() || self.view.fenced.is_some();
        (any && self.is_fenceable() && !self.hosted).then(|| self.lease_ends_at())
    }

    /// Whether the end of this node's lease concerns its workers.
    fn is_fenceable(&self) -> bool {
        let over = self.left || self.view.closed.is_some();
        // Workers that have finished need not be stopped.
        let done = matches!(self.report, Some(Report::Done { .. }));
        self.hello.settings.on_partition == OnPartition::Stop && !over && !done
    }

    /// Whether workers of this node are in a world, or have been in one and wait for the next.
    fn has_workers_of_a_world(&self) -> bool {
        match &self.joining {
            None => self.hello.placed.is_some_and(|placed| placed.active),
            Some(joining) => self.hello.placed.is_some() && joining.brings_survivors(),
        }
    }

    /// Stop the workers if the lease is over. Readers of the view call this too, because the driver's thread may have been stalled.
    pub fn fence_if_due(&mut self, now: Instant) {
        let Some(due) = self.fence_at().filter(|due| *due <= now) else { return };
        if self.hosted && (!self.suspect || now > due + STALL) {
            return self.ask_again(now);
        }
        self.end_alone_if_due(now);
        if self.view.failed.is_none() {
            self.fence(now);
        }
    }

    /// Stop the workers, because their guards have killed them: the deadline has passed by another clock than this machine's, or
    /// before it was renewed.
    #[cfg(feature = "io")]
    pub(super) fn fence_by_guards(&mut self, now: Instant) {
        if self.fence_at().is_some() {
            self.fence(now);
        }
    }

    fn fence(&mut self, now: Instant) {
        let reason = self.why_fenced(now - self.vouched_at, matches!(self.link, Link::Up { .. }));
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
        self.report = None;
        self.end_part();
        self.record_fenced(&reason, now);
        self.tallies.on_fenced();
        self.view.waiting = self.view.waiting.max(1);
        self.view.reason.clone_from(&reason);
        self.view.fenced = Some(reason.clone());
        let Some(joining) = &mut self.joining else { return };
        joining.lose_survivors();
        // A round may have formed that counts on them. The next Hello gives that place up, which breaks it, before the join is repeated.
        self.hello.joining = false;
        self.lost_survivors = Some(reason);
        if matches!(self.link, Link::Up { .. }) {
            // A place that counts on the survivors may be on its way. The next connection repeats the join, without them.
            self.end_silent_link(now);
        }
    }

    /// Why the survivors that the last join brought have ended, if this node fenced itself while it waited. Taken once.
    pub fn take_lost_survivors(&mut self) -> Option<String> {
        self.lost_survivors.take()
    }

    /// Ask the coordinator in this process once more before the workers are stopped.
    fn ask_again(&mut self, now: Instant) {
        self.suspect = true;
        let since = (now + LAST_LOOK).checked_sub(self.hello.settings.lease()).unwrap_or(now);
        self.vouched_at = self.vouched_at.max(since);
        if let Link::Up { answered_at, beat_at, .. } = &mut self.link {
            *answered_at = since.max(*answered_at);
            *beat_at = now;
        }
    }

    /// A message sent at `sent_at` was answered.
    pub(super) fn vouch_by_answer(&mut self, sent_at: Instant, now: Instant) {
        if self.counterpart.vouches() {
            self.vouch(sent_at, now);
        }
    }

    /// Renew the lease from `sent_at`: a message sent then has arrived, or no coordinator was running then. A lease that is over is not
    /// renewed for the workers that ran until then: their guards have killed them.
    pub(in crate::rendezvous) fn vouch(&mut self, sent_at: Instant, now: Instant) {
        self.fence_if_due(now);
        self.vouched_at = self.vouched_at.max(sent_at);
        self.suspect = false;
    }
}
