//! When a node must stop its workers although nobody tells it to: two worlds never run at once. Part of [`super::machine`].
//!
//! The coordinator may form a world without a node that it has not heard of for the node's lease. So the node stops its workers
//! when that time is over, and counts it from when it *sent* the last message that was answered, on its own clock: the
//! coordinator has heard that message no earlier. Neither a clock's setting nor the time on the way matters. A node that stood
//! still itself (SIGSTOP) finds the time over as soon as it looks.
//!
//! A node in the coordinator's own process is stopped together with it (Ctrl-Z, a frozen container, a debugger), and nobody can
//! form a world without it meanwhile. When both go on, the coordinator finds that it stood still and renews every lease, or
//! takes a last look ([`LAST_LOOK`]) before it judges. So that node takes a last look too: it asks at once, and stops its workers
//! only if the coordinator does not answer. It must not go without a fence: what cuts its connection (a firewall, a
//! virtual address that is moved) need not stop the coordinator from forming a world of the others.
//!
//! Who refuses a connection says that nobody decides there: the coordinator's process is gone, and workers train on until it is
//! back (or `coordinator_timeout` ends). A connection that merely ended says nothing by itself; the next attempt will tell.

use std::time::Instant;

use super::machine::NodeMachine;
use super::pending::{Link, Report};
use crate::rendezvous::protocol::settings::OnPartition;
use crate::rendezvous::protocol::settings::{LAST_LOOK, STALL};

impl NodeMachine {
    /// When this node must have stopped its workers, unless it hears something. `None`: it runs none, or may go on.
    pub(in crate::rendezvous) fn fence_at(&self) -> Option<Instant> {
        let settings = &self.hello.settings;
        let runs = self.joining.is_none() && self.hello.placed.is_some_and(|placed| placed.active);
        let over = self.left || self.view.closed.is_some() || self.view.failed.is_some();
        // Workers that have finished are not there to be stopped.
        let done = matches!(self.report, Some(Report::Done { .. }));
        let fenced = settings.on_partition == OnPartition::Stop && runs && !over && !done;
        fenced.then(|| self.vouched_at + settings.lease())
    }

    /// Stop the workers if the time has come. For whoever looks at the view before the driver does: both may have stood still.
    pub fn fence_if_due(&mut self, now: Instant) {
        let Some(due) = self.fence_at().filter(|due| *due <= now) else { return };
        if self.hosted && (!self.suspect || now > due + STALL) {
            return self.look_again(now);
        }
        let lease = self.hello.settings.lease();
        let why = match self.link {
            Link::Up { .. } => "its last messages were not answered",
            _ => self.last_error.as_str(),
        };
        let reason = format!(
            "this node has been cut off from the coordinator at {} for {:.1?} (its lease is {lease:.1?}): {why}; it stops its \
             workers, since the others may go on without it (on_partition=stop)",
            self.endpoint,
            now - self.vouched_at,
        );
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
        self.report = None;
        self.view.waiting = self.view.waiting.max(1);
        self.view.reason.clone_from(&reason);
        self.view.fenced = Some(reason);
    }

    /// Ask the coordinator in this process once more before the workers are stopped.
    fn look_again(&mut self, now: Instant) {
        self.suspect = true;
        let since = (now + LAST_LOOK).checked_sub(self.hello.settings.lease()).unwrap_or(now);
        self.vouched_at = self.vouched_at.max(since);
        if let Link::Up { answered_at, beat_at, .. } = &mut self.link {
            *answered_at = since.max(*answered_at);
            *beat_at = now;
        }
    }

    /// A message sent at `sent_at` has arrived, or nobody was there to decide anything then.
    pub(in crate::rendezvous) fn vouch(&mut self, sent_at: Instant) {
        self.vouched_at = self.vouched_at.max(sent_at);
        self.suspect = false;
    }
}
