//! Fencing: a node that is cut off stops its workers, so that two worlds never run at once. Part of [`super::machine`].
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
//! A refused connection proves that no coordinator decides, because its process is gone. Workers run on until it is back or
//! `coordinator_timeout` ends. A connection that merely ended proves nothing. The next attempt may.
//!
//! `docs/decisions/0028-a-node-fences-itself.md` has the limits of this.

use std::time::Instant;

use super::machine::NodeMachine;
use super::pending::{Link, Report};
use crate::rendezvous::protocol::settings::OnPartition;
use crate::rendezvous::protocol::settings::{LAST_LOOK, STALL};

impl NodeMachine {
    /// When this node must stop its workers, unless its lease is renewed before. `None`: it runs none, or they may continue.
    pub(in crate::rendezvous) fn fence_at(&self) -> Option<Instant> {
        let settings = &self.hello.settings;
        let runs = self.joining.is_none() && self.hello.placed.is_some_and(|placed| placed.active);
        let over = self.left || self.view.closed.is_some() || self.view.failed.is_some();
        // Workers that have finished need not be stopped.
        let done = matches!(self.report, Some(Report::Done { .. }));
        let fenced = settings.on_partition == OnPartition::Stop && runs && !over && !done;
        fenced.then(|| self.vouched_at + settings.lease())
    }

    /// Stop the workers if the lease is over. Readers of the view call this too, because the driver's thread may have been stalled.
    pub fn fence_if_due(&mut self, now: Instant) {
        let Some(due) = self.fence_at().filter(|due| *due <= now) else { return };
        if self.hosted && (!self.suspect || now > due + STALL) {
            return self.ask_again(now);
        }
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
        self.view.fenced = Some(reason);
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
    pub(super) fn vouch_by_answer(&mut self, sent_at: Instant) {
        if self.counterpart.vouches() {
            self.vouch(sent_at);
        }
    }

    /// Renew the lease from `sent_at`: a message sent then has arrived, or no coordinator was running then.
    pub(in crate::rendezvous) fn vouch(&mut self, sent_at: Instant) {
        self.vouched_at = self.vouched_at.max(sent_at);
        self.suspect = false;
    }
}
