//! What is known of other lives of this coordinator: a node's account of its last place outlives the coordinator that gave it.
//!
//! Anybody who reaches the port can claim anything, so a claim counts only where it can be true.
//!
//! - **A place** in a world that this coordinator has formed, or was told of before, is checked against the world's id. That is a
//!   digest over random ids, which only members know.
//! - **A place in an unknown world** can be a member's only while this coordinator is *young*: until every node that an earlier life of
//!   it has placed must have reported or stopped its workers, one lease after the run's first Hello. Until then such a claim may restore
//!   the round, unless a world is known here in which nodes run, and may hold up the next round. All claims together hold it up for
//!   two leases at most. Afterwards they restore nothing and hold up nothing.
//! - **A round's number** only moves the numbers of later rounds: members of another life must not take a new round for their own.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::rendezvous::protocol::message::{HostSeat, Placed, Round};

/// Largest number of a round in an unknown world. Far above what a job counts, far below where numbers end.
pub(super) const LARGEST_ROUND: Round = Round(1 << 48);
/// How far a claim of an unknown world moves the numbers of later rounds once this coordinator has formed a world, or is no longer young.
/// Far more than a job counts, and so little that nobody brings them to [`LARGEST_ROUND`], beyond which members of a known world
/// would be refused by the next life of this coordinator.
const LARGEST_STEP: u64 = 1 << 20;
/// For what is on the way when the last lease ends.
const SLACK: Duration = Duration::from_secs(5);
/// Worlds of other lives that are remembered. A run has a few at most.
const MOST_STRANGERS: usize = 100;

/// Worlds of this life of the coordinator and of others.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Recovery {
    /// Worlds that this coordinator has formed, or has been told of first.
    worlds: BTreeSet<u64>,
    /// Other worlds that nodes have named, while this coordinator was young.
    strangers: BTreeSet<u64>,
    /// Highest round that a node has named: no round gets a number that a node may know from another life of this coordinator.
    named: Round,
    /// Until this instant, members of a world formed before this coordinator was restarted may still be running, unknown to it.
    /// `None`: that is over, or never was.
    young_until: Option<Instant>,
    /// Until this instant, nodes may still run a world of an earlier life of this coordinator, beside the one it knows of: no round
    /// closes before.
    strangers_until: Option<Instant>,
    /// The rank of the current world whose process hosted the coordinator before this one, and is known to have ended.
    gone_rank: Option<u32>,
}

impl Recovery {
    /// Of worlds that are known for certain: those of a shared cell, which outlives every node.
    pub fn knowing(worlds: BTreeSet<u64>, named: Round) -> Self {
        Self { worlds, named, ..Self::default() }
    }

    /// Whether nothing is remembered.
    pub fn is_blank(&self) -> bool {
        self.worlds.is_empty() && self.strangers.is_empty() && self.named == Round(0)
    }

    /// The first node has introduced itself, or the lease has changed: members of other lives' worlds may run for so long.
    pub fn be_young(&mut self, lease: Duration, now: Instant) {
        self.young_until = Some(now + lease + SLACK);
    }

    /// The lease has changed. Whoever is no longer young stays so.
    pub fn shorten(&mut self, lease: Duration, now: Instant) {
        self.strangers_until = self.strangers_until.map(|until| until.min(now + lease));
        if self.young_until.is_some() {
            self.be_young(lease, now);
        }
    }

    /// Whether members of a world that this coordinator does not know may still run.
    pub fn is_young(&self, now: Instant) -> bool {
        self.young_until.is_some_and(|until| now < until)
    }

    /// Time has passed.
    pub fn grow_up(&mut self, now: Instant) {
        self.young_until = self.young_until.filter(|until| now < *until);
    }

    /// Whether this coordinator knows the world that a node names.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.worlds.contains(&placed.world)
    }

    /// A world was formed, or taken up.
    pub fn know(&mut self, world: u64) {
        self.worlds.insert(world);
    }

    /// Highest round that a node has named.
    pub fn named(&self) -> Round {
        self.named
    }

    /// Until when no round may close because of worlds that are not known here.
    pub fn strangers_until(&self) -> Option<Instant> {
        self.strangers_until
    }

    /// Members of another world may run until then.
    pub fn hold_for_strangers(&mut self, until: Instant) {
        self.strangers_until = self.strangers_until.max(Some(until));
    }

    /// A node names a world that is not known here. `restarted`: this coordinator has formed none itself; `next`: the number of the
    /// next round.
    pub fn meet_stranger(&mut self, placed: &Placed, restarted: bool, next: Round, lease: Duration, now: Instant) {
        let young = self.is_young(now);
        let most = if restarted && young { LARGEST_ROUND } else { Round(next.0 + LARGEST_STEP) };
        self.named = self.named.max(placed.round.min(most));
        let named_anew = self.strangers.len() < MOST_STRANGERS && self.strangers.insert(placed.world);
        if young && (named_anew || placed.active) {
            // Others of that world may run too, and are not known: they are given the time to report. That one of them has
            // stopped says nothing of them.
            self.hold_for_strangers(now + lease);
        }
    }

    /// A member of the current world has said which rank hosted the coordinator before this one; `gone` says that this process
    /// has ended.
    pub fn hear_of_host(&mut self, seat: Option<HostSeat>, gone: impl Fn(&HostSeat) -> bool) {
        self.gone_rank = seat.filter(gone).map(|seat| seat.rank).or(self.gone_rank);
    }

    /// The rank of the current world that need not be waited for.
    pub fn gone_rank(&self) -> Option<u32> {
        self.gone_rank
    }

    /// The current world is another now: nothing is known of its host.
    pub fn forget_host(&mut self) {
        self.gone_rank = None;
    }

    /// The next round has formed: nobody runs a world beside it.
    pub fn settle(&mut self) {
        (self.strangers_until, self.gone_rank) = (None, None);
    }
}
