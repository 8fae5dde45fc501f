//! Fencing: a node that is cut off stops its workers, so that two worlds never run at once. Part of [`super`].
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
//! The workers' guards hold the same deadline ([`NodeMachine::workers_until`](super::NodeMachine::workers_until)), so that a node whose agent is stopped ends its workers,
//! too. A node in the coordinator's own process gives its guards none.
//!
//! Workers that wait for the next world end with the lease as well. They hold the state of a world that may have gone on without them.
//!
//! A refused connection proves that no coordinator decides, because its process is gone. Workers run on until it is back or
//! `coordinator_timeout` ends. A connection that merely ended proves nothing. The next attempt may.
//!
//! `docs/decisions/0028-a-node-fences-itself.md` has the limits of this.

use std::time::{Duration, Instant};

use crate::rendezvous::messages::settings::{LAST_LOOK, STALL};

/// A node's lease.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    /// When the last message that is known to have arrived was sent.
    renewed_at: Instant,
    /// The coordinator is in this process.
    hosted: bool,
    /// The lease has ended, and the node asks once more before it stops its workers.
    suspect: bool,
    /// This node has stopped its workers, and the coordinator does not know it yet.
    unreported: bool,
    /// Its machine is taken away then, as a notice says.
    gone_at: Option<Instant>,
}

impl Lease {
    /// A lease that begins now.
    pub fn new(now: Instant) -> Self {
        Self { renewed_at: now, hosted: false, suspect: false, unreported: false, gone_at: None }
    }

    /// Whether the coordinator is in this process.
    pub fn is_hosted(&self) -> bool {
        self.hosted
    }

    /// When the lease ends, unless it is renewed before.
    pub fn ends_at(&self, lease: Duration) -> Instant {
        self.renewed_at + lease
    }

    /// This node's machine is taken away then: the others go on without it, whether it is heard or not.
    pub fn ends_no_later(&mut self, gone_at: Instant) {
        self.gone_at = self.gone_at.into_iter().chain([gone_at]).min();
    }

    /// When the guards of its workers kill them, if there are any: at the end of the lease, if that concerns them, or with the machine,
    /// after their agent was given the chance.
    pub fn guards_until(&self, lease_ends_at: Option<Instant>, any: bool) -> Option<Instant> {
        let gone_at = self.gone_at.filter(|_| any).map(|gone_at| gone_at + LAST_LOOK / 2);
        lease_ends_at.into_iter().chain(gone_at).min()
    }

    /// Why its workers are stopped, if that is not since nobody has renewed it.
    pub fn why_gone(&self, now: Instant) -> Option<String> {
        let gone = self.gone_at.is_some_and(|gone_at| gone_at <= now);
        gone.then(|| "its machine was to be taken away by now".to_owned())
    }

    /// Time since it was last renewed.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.renewed_at)
    }

    /// A coordinator has welcomed this node. `hosted`: it is in this process.
    pub fn on_welcome(&mut self, hosted: bool) {
        self.hosted = hosted;
    }

    /// A message sent at `sent_at` has arrived, or no coordinator was running then.
    pub fn renew(&mut self, sent_at: Instant) {
        self.renewed_at = self.renewed_at.max(sent_at);
        self.suspect = false;
    }

    /// The lease was over at `due`. Returns since when it counts as renewed, if the coordinator in this process is asked once more before
    /// the workers are stopped.
    pub fn ask_again(&mut self, due: Instant, lease: Duration, now: Instant) -> Option<Instant> {
        if !self.hosted || (self.suspect && now <= due + STALL) {
            return None;
        }
        self.suspect = true;
        let since = (now + LAST_LOOK).checked_sub(lease).unwrap_or(now);
        self.renewed_at = self.renewed_at.max(since);
        Some(since)
    }

    /// This node stops its workers.
    pub fn on_fenced(&mut self) {
        self.unreported = true;
    }

    /// Whether to report to the coordinator now that this node has stopped its workers. Nothing depends on the report.
    pub fn take_unreported(&mut self) -> bool {
        std::mem::take(&mut self.unreported)
    }

    /// The same, as if nothing were to be reported.
    #[cfg(feature = "sim")]
    pub fn without_report(&self) -> Self {
        Self { unreported: false, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    #[test]
    fn a_lease_counts_from_the_last_message_that_arrived_whatever_the_order_of_the_answers() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut lease = Lease::new(begin);
        for (sent, ends) in [(5, 20), (10, 25), (3, 25)] {
            lease.renew(at(sent));
            assert_eq!(lease.ends_at(LEASE), at(ends));
        }
        assert_eq!((lease.age(at(12)), lease.age(begin)), (Duration::from_secs(2), Duration::ZERO));
    }

    #[test]
    fn only_a_node_beside_its_coordinator_asks_again_and_once_unless_both_were_stopped() {
        let begin = Instant::now();
        let due = begin + LEASE;
        let mut lease = Lease::new(begin);
        assert_eq!(lease.ask_again(due, LEASE, due), None);
        lease.on_welcome(true);
        let since = lease.ask_again(due, LEASE, due).expect("it is in the coordinator's process");
        assert_eq!((since + LEASE, lease.ends_at(LEASE)), (due + LAST_LOOK, due + LAST_LOOK));
        let due = due + LAST_LOOK;
        assert_eq!(lease.ask_again(due, LEASE, due + STALL), None);
        // It was stopped meanwhile, and so was the coordinator.
        let late = due + STALL + Duration::from_millis(1);
        assert_eq!(lease.ask_again(due, LEASE, late), Some(late + LAST_LOOK - LEASE));
        lease.renew(late);
        assert!(lease.ask_again(late + LEASE, LEASE, late + LEASE).is_some(), "an answer came in between");
    }

    #[test]
    fn a_fence_is_reported_once() {
        let mut lease = Lease::new(Instant::now());
        lease.on_fenced();
        assert_eq!([(); 2].map(|()| lease.take_unreported()), [true, false]);
    }
}
