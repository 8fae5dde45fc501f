//! The parts of a run as its policies read them: functions from parts to a value, which change nothing.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Instant;

use super::hosts::Hosts;
use super::in_place::InPlace;
use super::membership::Roster;
use super::node::{Node, may_connect_from};
use super::recovery::{Recovery, Reports};
use super::round::{Current, Pace};
use super::standing::Standing;
use crate::rendezvous::messages::message::{CHECK_WITHIN, CoordinatorMessage, NodeId, Round};
use crate::rendezvous::messages::settings::{LAST_LOOK, Settings};

/// The parts of a run, none of which a policy changes.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub id: &'a str,
    pub settings: &'a Settings,
    pub roster: &'a Roster,
    pub current: &'a Current,
    pub pace: Pace,
    pub recovery: &'a Recovery,
    pub in_place: &'a InPlace,
    pub hosts: &'a Hosts,
    /// When the next round closes, if nothing changes.
    pub closes_at: Option<Instant>,
    /// The last decision that was logged.
    pub standing: Standing,
}

impl Parts<'_> {
    /// Number of the last round that completed.
    pub fn round(self) -> Round {
        self.roster.round()
    }

    /// The number of the next round.
    pub fn next_round(self) -> Round {
        self.round().max(self.recovery.named()).next()
    }

    /// Number of members that run, or may still report that they do.
    fn running_count(self) -> usize {
        match self.current.size().filter(|_| self.recovery.awaits_members()) {
            Some(size) => size.saturating_sub(self.roster.counts().returning),
            None => self.roster.active().len(),
        }
    }

    /// The members' value of `num_nodes_waiting()`: above zero when the world must re-form.
    pub fn waiting_for_members(self) -> u32 {
        match self.must_change() {
            true => self.waiting_count().max(1),
            false if self.held_growth().is_some() => 0,
            false => self.joinable(),
        }
    }

    /// Whether the world was interrupted, or changes in place.
    fn must_change(self) -> bool {
        self.current.interrupted().is_some() || self.in_place.is_changing()
    }

    /// Until when no round closes: members of a world that this coordinator did not form may still run, and have not reported.
    pub fn held_until(self) -> Option<Instant> {
        self.recovery.members_until().max(self.recovery.unknown_worlds_until())
    }

    /// Until when no round closes, since the health check of a node runs that it counts.
    pub fn checks_until(self) -> Option<Instant> {
        let counted = |id: &NodeId| self.roster.get(*id).is_some_and(Node::waits);
        let checks = self.roster.checks().iter().filter(|(id, _)| counted(id));
        checks.map(|(_, until)| self.check_ends(*until)).max()
    }

    /// When a check is no longer waited for. Whoever begins one late holds nobody up for as long as others did.
    pub fn check_ends(self, until: Instant) -> Instant {
        self.pace.ready_since.map_or(until, |since| until.min(since + CHECK_WITHIN))
    }

    /// Until when the world does not re-form for the nodes that wait to join it: no round could close before, and its members would stand
    /// still. `None`: it may, or none waits, or its members were notified that they stop.
    pub fn held_growth(self) -> Option<Instant> {
        let undisturbed = !self.roster.active().is_empty() && !self.must_change() && !self.current.notified();
        self.held_until().filter(|_| undisturbed && self.joinable() > 0)
    }

    /// Number of members of the current world that are known to run, or to wait for another round.
    pub fn reported(self) -> usize {
        self.roster.active().len() + self.roster.counts().returning
    }

    /// What the members of an adopted world have reported so far.
    pub fn reports(self, now: Instant) -> Reports {
        let until = self.recovery.members_until();
        let (Some(until), Some(world)) = (until, self.current.world()) else { return Reports::Awaited(until) };
        let (round, size, reported) = (self.round(), world.size as usize, self.reported());
        // The former coordinator's host is not awaited, if it has ended and has not reported. Nor are those that have left.
        let gone: BTreeSet<_> = self.recovery.left().iter().copied().chain(self.recovery.gone_rank()).collect();
        let gone = gone.iter().filter(|rank| **rank < world.size && !world.members.contains_key(rank)).count();
        let all_known = reported + gone >= size;
        if reported >= size {
            return Reports::Complete(format!("all {size} members of round {round} have reported"));
        }
        if until > now {
            // If no other member is expected: one that has finished sends `Done` right after its Hello.
            let soon = until.min(now + LAST_LOOK);
            return Reports::Awaited(Some(if all_known { soon } else { until }));
        }
        Reports::Missing(match self.recovery.gone_rank().filter(|_| all_known) {
            Some(rank) => {
                format!("node rank {rank} of round {round} has ended with the coordinator that its process hosted")
            }
            None => {
                let missing = format!("{} of {size} members of round {round}", size - reported);
                format!("{missing} did not report to the restarted coordinator")
            }
        })
    }

    fn waiting_count(self) -> u32 {
        u32::try_from(self.roster.waiting().len()).unwrap_or(u32::MAX)
    }

    /// The number of waiting nodes, if the world would re-form for them.
    pub fn joinable(self) -> u32 {
        if self.roster.counts().done > 0 || !self.has_resets_left() {
            // The job is about to end, and growing it would restart workers that have finished. Or growing would end it.
            0
        } else if self.has_room(self.running_count()) {
            self.waiting_count()
        } else {
            0
        }
    }

    /// Whether the world may change once more.
    pub fn has_resets_left(self) -> bool {
        self.settings.rules.reset_limit.is_none_or(|limit| self.current.resets() < limit)
    }

    /// Whether a waiting node is a spare: the job is full and undisturbed, or was so when it was closed, or the node's host is out, and
    /// others run.
    pub fn is_spare(self, node: &Node) -> bool {
        let full = match self.current.closed() {
            Some(_) => self.current.full_at_close(),
            None => self.is_full(),
        };
        (full && node.waits()) || (node.is_kept_out() && !self.roster.active().is_empty())
    }

    /// Whether the world runs and has no reason to re-form, now or later.
    pub fn is_full(self) -> bool {
        !self.roster.active().is_empty() && !self.must_change() && self.joinable() == 0
    }

    /// Whether every live member of an undisturbed world has finished.
    pub fn is_all_done(self) -> bool {
        let done = self.roster.counts().done;
        done > 0
            && done == self.roster.active().len()
            && self.current.interrupted().is_none()
            && !self.recovery.awaits_members()
            && self.current.closed().is_none()
            && !self.in_place.is_anyone_back()
    }

    /// Whether the run's settings are fixed, so that other nodes must ask for the same: a connected node waits or runs, or a world
    /// that this coordinator formed is running.
    pub fn is_bound(self) -> bool {
        let runs = self.current.has_formed() && !self.roster.active().is_empty();
        self.roster.counts().present > 0 || runs || self.knows_settings()
    }

    /// Whether this coordinator knows the settings of members that have time to come back to it. It got them from the one before.
    pub fn knows_settings(self) -> bool {
        self.current.has_formed() && self.recovery.awaits_members()
    }

    /// Whether the members stop their workers together, when they have to: none is notified to stop before.
    pub fn changes_in_place(self) -> bool {
        let undisturbed = self.current.interrupted().is_none() && !self.current.notified();
        undisturbed && (self.in_place.is_changing() || self.roster.is_attended())
    }

    /// The reason for which the world must re-form.
    pub fn why(self) -> String {
        match self.current.interrupted() {
            Some(reason) => reason.to_owned(),
            None => format!(
                "{}; Detected {} new nodes; will restart worker group", // PyTorch's words
                self.who_waits(),
                self.roster.waiting().len()
            ),
        }
    }

    /// The nodes that wait to join, in words.
    pub fn who_waits(self) -> String {
        let waiting = self.roster.waiting();
        let count =
            if waiting.len() == 1 { "1 node waits".to_owned() } else { format!("{} nodes wait", waiting.len()) };
        format!("{count} to join{}", self.roster.list(waiting))
    }

    /// The message by which members learn whether the world must re-form, and why.
    pub fn status(self) -> CoordinatorMessage {
        let waiting = if self.changes_in_place() { 0 } else { self.waiting_for_members() };
        let reason = if waiting > 0 { self.why() } else { String::new() };
        let failure = self.current.failure().cloned().map(Box::new);
        CoordinatorMessage::Status { waiting, reason, restart: self.current.restart(), failure }
    }

    /// The message by which a node learns that its world is over, for a reason outside the node.
    pub fn over(self, reason: String) -> CoordinatorMessage {
        CoordinatorMessage::Status { waiting: 1, reason, restart: self.current.restart(), failure: None }
    }

    /// Whether the node with rank 0 wants to know the members' addresses.
    pub fn wants_members(self) -> bool {
        let serving = self.current.world().and_then(|world| self.roster.get(*world.members.get(&0)?));
        serving.is_some_and(|node| node.interfaces.is_some())
    }

    /// The addresses of the world's members: of their connections, of their interfaces if these are wanted, and those that their users
    /// have given.
    ///
    /// A member whose connection comes over loopback is on the coordinator's host. Others know that host by the address at which they have
    /// reached the coordinator.
    pub fn member_addresses(self, interfaces: bool) -> Vec<IpAddr> {
        let (mut addresses, mut hosts) = (BTreeSet::new(), BTreeSet::new());
        let mut is_anyone_here = false;
        let ids = self.current.world().into_iter().flat_map(|world| world.members.values());
        for node in ids.filter_map(|id| self.roster.get(*id)) {
            let given = node.local_addr.as_deref().and_then(|addr| addr.parse::<IpAddr>().ok());
            addresses.extend(given.map(|ip| ip.to_canonical()));
            addresses.extend(node.interfaces.iter().flatten().filter(|_| interfaces));
            if let Some(ends) = node.ends {
                is_anyone_here |= ends.peer.is_loopback();
                addresses.insert(ends.peer);
                hosts.insert(ends.local);
            }
        }
        if is_anyone_here {
            addresses.append(&mut hosts);
        }
        addresses.into_iter().filter(|ip| may_connect_from(*ip)).collect()
    }
}
