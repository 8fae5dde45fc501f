//! Recovery after a restart of the coordinator: the worlds it knows, and how far a node's claim to a rank is believed.
//!
//! A *claim* is a [`Placed`] in a node's Hello. It outlives the coordinator that assigned the rank. Anybody who reaches the port can make
//! one, so a claim counts only as far as it can be true.
//!
//! - **A rank in a known world** (one that this coordinator formed or adopted) is checked against the world's id. The id is a digest
//!   over random ids, which only members know.
//! - **A rank in an unknown world** can be true only while this coordinator is *recovering*: for one lease and [`SLACK`] after the
//!   run's first Hello. By then every member of an earlier world has reported or stopped its workers. A recovering coordinator may
//!   adopt the claimed world, unless it knows a world that runs. The claim may also hold up the next round. All claims together
//!   hold it up for two leases at most. Later claims do neither.
//! - **A round's number** raises the numbers of later rounds. Members of an earlier world must not take a new round for theirs. A
//!   number that no job can have is not believed, and its node is rejected: no rank that it is offered could be new to it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::{HostInstance, Placed, Round};

/// Largest round number that is accepted in an unknown world. No job gets there, and counting on from it does not overflow.
const LARGEST_ROUND: Round = Round(1 << 48);
/// How far above the next round's number a claim to an unknown world may be, once this coordinator has formed a world or is no
/// longer recovering. It is more rounds than a job has. It is also so small that claims do not reach [`LARGEST_ROUND`], above which a
/// restarted coordinator would reject true members.
const LARGEST_STEP: u64 = 1 << 20;
/// Time for messages that are on the way when the last lease ends.
const SLACK: Duration = Duration::from_secs(5);
/// Number of unknown worlds that are remembered. A run has a few at most.
const MOST_UNKNOWN_WORLDS: usize = 100;

/// The worlds that a coordinator knows or that nodes have claimed, and the waits that follow from them.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Recovery {
    /// Worlds that this coordinator formed or adopted.
    worlds: BTreeSet<u64>,
    /// Unknown worlds that nodes have claimed.
    unknown_worlds: BTreeSet<u64>,
    /// Highest round that a node has claimed. New rounds get higher numbers.
    named: Round,
    /// Until this instant, members of a world formed before this coordinator restarted may still be running, unknown to it.
    /// `None`: that is over, or this is not a restarted coordinator.
    recovering_until: Option<Instant>,
    /// Until this instant, members of an unknown world may still be running beside the known one; no round closes earlier.
    unknown_worlds_until: Option<Instant>,
    /// Until this instant, members of an adopted world have time to report. Those that have run on undisturbed. `None`: none is awaited.
    members_until: Option<Instant>,
    /// The rank of the current world whose process hosted the former coordinator, if that process is known to have ended.
    gone_rank: Option<u32>,
    /// Ranks of the current world whose nodes have left or are lost.
    left: BTreeSet<u32>,
}

impl Recovery {
    /// Start with known worlds, as read from a shared cell. A cell outlives every node, so nothing is unknown.
    pub fn with_worlds(worlds: BTreeSet<u64>, named: Round) -> Self {
        Self { worlds, named, ..Self::default() }
    }

    /// Whether no world and no claim is remembered.
    pub fn is_blank(&self) -> bool {
        self.worlds.is_empty() && self.unknown_worlds.is_empty() && self.named == Round(0)
    }

    /// Recover from now on, for one lease and [`SLACK`]. Called at the run's first Hello, and when the lease changes.
    pub fn begin(&mut self, lease: Duration, now: Instant) {
        self.recovering_until = Some(now + lease + SLACK);
    }

    /// Apply a changed lease. A coordinator that has recovered does not begin again.
    pub fn set_lease(&mut self, lease: Duration, now: Instant) {
        self.members_until = self.members_until.map(|until| until.min(now + lease));
        self.unknown_worlds_until = self.unknown_worlds_until.map(|until| until.min(now + lease));
        if self.recovering_until.is_some() {
            self.begin(lease, now);
        }
    }

    /// Whether members of an unknown world may still run.
    pub fn is_recovering(&self, now: Instant) -> bool {
        self.recovering_until.is_some_and(|until| now < until)
    }

    /// End the recovery if its time is over, and the hold for members of unknown worlds if its is.
    pub fn end_if_due(&mut self, now: Instant) {
        self.recovering_until = self.recovering_until.filter(|until| now < *until);
        self.unknown_worlds_until = self.unknown_worlds_until.filter(|until| now < *until);
    }

    /// Whether the world that a node claims is known.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.worlds.contains(&placed.world)
    }

    /// Add a world that was formed or adopted.
    pub fn add_world(&mut self, world: u64) {
        self.worlds.insert(world);
    }

    /// Wait until this instant for members of an adopted world to report. `None`: wait no longer.
    pub fn await_members(&mut self, until: Option<Instant>) {
        self.members_until = until;
    }

    /// Until when members of an adopted world have time to report, if they have.
    pub fn members_until(&self) -> Option<Instant> {
        self.members_until
    }

    /// Whether members of an adopted world still have time to report.
    pub fn awaits_members(&self) -> bool {
        self.members_until.is_some()
    }

    /// Highest round that a node has claimed.
    pub fn named(&self) -> Round {
        self.named
    }

    /// Until when no round may close, because members of an unknown world may still run.
    pub fn unknown_worlds_until(&self) -> Option<Instant> {
        self.unknown_worlds_until
    }

    /// Let no round close before `until`.
    pub fn hold_for_unknown_worlds(&mut self, until: Instant) {
        self.unknown_worlds_until = self.unknown_worlds_until.max(Some(until));
    }

    /// The largest round number that is believed of a claim to an unknown world. `restarted`: this coordinator has formed no world
    /// itself. `next`: the next round's number.
    pub fn largest_claim(&self, restarted: bool, next: Round, now: Instant) -> Round {
        if restarted && self.is_recovering(now) {
            LARGEST_ROUND
        } else {
            Round(next.0 + LARGEST_STEP).min(LARGEST_ROUND)
        }
    }

    /// Record a claim to an unknown world, which is at most the [largest](Recovery::largest_claim).
    pub fn record_claim(&mut self, placed: &Placed, lease: Duration, now: Instant) {
        let recovering = self.is_recovering(now);
        self.named = self.named.max(placed.round);
        let new = self.unknown_worlds.len() < MOST_UNKNOWN_WORLDS && self.unknown_worlds.insert(placed.world);
        if recovering && (new || placed.active) {
            // Other members of that world may still run, even if this one has stopped. They get one lease to report.
            self.hold_for_unknown_worlds(now + lease);
        }
    }

    /// Record which rank hosted the former coordinator, as a member of the current world reports. `gone`: whether its process has
    /// ended.
    pub fn record_host(&mut self, host: Option<HostInstance>, gone: impl Fn(&HostInstance) -> bool) {
        self.gone_rank = host.filter(gone).map(|host| host.rank).or(self.gone_rank);
    }

    /// The process that hosted the former coordinator has ended. The member with this rank was in it, if one was.
    pub fn lose_host(&mut self, rank: Option<u32>) {
        self.gone_rank = rank;
    }

    /// The node with this rank of the current world has left, or is lost.
    pub fn on_left(&mut self, rank: u32) {
        self.left.insert(rank);
    }

    /// It has come back.
    pub fn on_back(&mut self, rank: u32) {
        self.left.remove(&rank);
    }

    /// The ranks of the current world whose nodes have left or are lost. No recovery waits for them.
    pub fn left(&self) -> &BTreeSet<u32> {
        &self.left
    }

    /// The rank that hosted the former coordinator and has ended. No recovery waits for it.
    pub fn gone_rank(&self) -> Option<u32> {
        self.gone_rank
    }

    /// Forget these ranks. Called when another world becomes the current one.
    pub fn forget_host(&mut self) {
        self.gone_rank = None;
        self.left.clear();
    }

    /// Clear all waits. Called when a round has formed: no unknown world can run beside it.
    pub fn settle(&mut self) {
        (self.unknown_worlds_until, self.members_until) = (None, None);
        self.forget_host();
    }
}

/// What the members of an adopted world have reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reports {
    /// Others have time until this instant. `None`: nobody is awaited.
    Awaited(Option<Instant>),
    /// All have reported: that, in words.
    Complete(String),
    /// Some have not, and their time is over: why the world re-forms, unless all that have reported have finished.
    Missing(String),
}

#[cfg(test)]
mod tests;
