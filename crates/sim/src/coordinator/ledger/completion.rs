//! The invariants of a completed round and its world. Part of [`super`].

use std::collections::BTreeMap;

use super::{Ledger, Sent, agree};
use crate::worlds::{self, Held, Violation, ensure_contract as ensure};
use elastic_rs::rendezvous::messages::message::{NodeId, Placement, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::messages::settings::WorkerBounds;

impl Ledger {
    /// Checks a new world. The module's documentation has the rules.
    pub(super) fn check_completion(
        &mut self,
        incarnation: u32,
        round: Round,
        placements: &[(NodeId, &Placement)],
    ) -> Result<(), Violation> {
        let (_, first) = placements[0];
        let size = first.world_size;
        let held = |placement: &Placement| Held {
            host: 0,
            round: round.0,
            world: placement.world,
            rank: placement.rank,
            size: placement.world_size,
        };
        let all: Vec<_> = placements.iter().map(|(_, placement)| held(placement)).collect();
        let settings = self.common_settings(round, placements.iter().map(|(node, _)| node))?;
        worlds::check_world(round.0, &all, &settings)?;
        ensure(!self.closed, || format!("round {round} completes in a closed rendezvous"))?;
        let known = self.highest.max(self.named_highest);
        ensure(round > known, || format!("round {round} completes although round {known} was known"))?;
        ensure(placements.len() == size as usize, || {
            format!("round {round} has {size} nodes, of which {} got a placement", placements.len())
        })?;
        let mut members = vec![None; size as usize];
        for (node, placement) in placements {
            let same = (&placement.master_addr, placement.master_port) == (&first.master_addr, first.master_port)
                && placement.restart == first.restart;
            ensure(same, || format!("round {round}: {first:?} and {placement:?} differ"))?;
            ensure(!placement.reason.is_empty(), || format!("round {round} completes without a reason"))?;
            if let Some(slot) = members.get_mut(placement.rank as usize) {
                *slot = Some(*node);
            }
            let reported = self.newest.get(node).and_then(|session| self.reported.get(session));
            ensure(reported.is_some_and(|reported| reported.connected && reported.join.is_some()), || {
                format!("round {round} counts a node that does not wait: {reported:?}")
            })?;
        }
        let members: Vec<_> = members.into_iter().flatten().collect();
        let port = self.newest.get(&members[0]).and_then(|session| self.reported.get(session));
        let port = port.and_then(|reported| reported.join.as_ref()).map(|join| join.store_port);
        ensure(port == Some(first.master_port), || format!("round {round}: the master's port is not rank 0's"))?;
        self.check_ranks(incarnation, round, &members)?;
        self.check_restart(round, first.restart)?;
        check_workers(round, placements)?;
        check_bounds(round, placements, &settings)?;
        for (rank, node) in members.iter().enumerate() {
            self.placements.insert(*node, (round, rank as u32, first.world));
            self.gone.remove(node);
        }
        let sent = Sent { world: first.world, size, master: (first.master_addr.clone(), first.master_port), members };
        self.worlds.insert((incarnation, round), sent);
        self.highest = round;
        self.rounds += 1;
        Ok(())
    }

    /// The settings of the members of a world, which are the same for all.
    pub(super) fn common_settings<'a>(
        &self,
        round: Round,
        members: impl Iterator<Item = &'a NodeId>,
    ) -> Result<Settings, Violation> {
        let mut common: Option<&Settings> = None;
        for node in members {
            let reported = self.newest.get(node).and_then(|session| self.reported.get(session));
            let reported =
                reported.ok_or_else(|| Violation::contract(format!("round {round} has a stranger: {node:?}")))?;
            let first = *common.get_or_insert(&reported.settings);
            ensure(agree(first, &reported.settings), || {
                format!("round {round} has members that ask for {first:?} and for {:?}", reported.settings)
            })?;
        }
        Ok(common.unwrap_or(&self.settings).clone())
    }

    /// The rank of each node in the last world. `None` if that is not known: worlds of different lives may have the same number, and it is
    /// not known here which of them this life has taken up.
    pub(super) fn last_ranks(&self, incarnation: u32) -> Option<BTreeMap<NodeId, u32>> {
        let formed = self.worlds.get(&(incarnation, self.highest)).map(|sent| sent.world);
        let named: Vec<u64> =
            self.named.iter().filter(|(at, _)| *at == self.highest).map(|(_, world)| *world).collect();
        let world = match (formed, &named[..]) {
            (Some(world), _) => world,
            (None, [world]) => *world,
            (None, []) => 0,
            (None, _) => return None,
        };
        let last = self.placements.iter().filter(|(_, placement)| placement.0 == self.highest && placement.2 == world);
        Some(last.map(|(node, placement)| (*node, placement.1)).collect())
    }

    /// The rule of `ranks.rs` in one formula. The lowest survivor has rank 0. A survivor with `i` survivors below it keeps its rank,
    /// unless there are too few newcomers to fill the holes below. Then it has rank `i + newcomers`.
    pub(super) fn check_ranks(&self, incarnation: u32, round: Round, members: &[NodeId]) -> Result<(), Violation> {
        let Some(last) = self.last_ranks(incarnation) else { return Ok(()) };
        let last = |node: &NodeId| last.get(node).copied();
        let survivors: BTreeMap<u32, NodeId> = members.iter().filter_map(|node| Some((last(node)?, *node))).collect();
        let count = members.iter().filter_map(last).count();
        if survivors.len() != count {
            // Two nodes name the same place: they come from different lives of the coordinator.
            return Ok(());
        }
        let newcomers = members.len() - count;
        if count == 0 {
            self.check_order(round, members)?;
        }
        for (i, (old, node)) in survivors.iter().enumerate() {
            let expected = if i == 0 { 0 } else { (*old as usize).min(i + newcomers) };
            ensure(members[expected] == *node, || {
                format!("round {round}: the survivor that had rank {old} does not have rank {expected}")
            })?;
        }
        Ok(())
    }

    /// Checks that a world of newcomers alone is in the order of their requested ranks, with nodes that ask for none last.
    pub(super) fn check_order(&self, round: Round, members: &[NodeId]) -> Result<(), Violation> {
        let asked = |node: &NodeId| self.reported.get(self.newest.get(node)?)?.node_rank;
        let order: Vec<_> = members.iter().map(|node| asked(node).unwrap_or(u32::MAX)).collect();
        ensure(order.is_sorted(), || format!("round {round} has its first members in this order: {order:?}"))
    }

    /// Checks that the restart number increases by one after a failure in the round before, and never decreases.
    pub(super) fn check_restart(&mut self, round: Round, restart: u32) -> Result<(), Violation> {
        let known = self.restart.max(self.learned_restart);
        let counted = self.failed.contains(&self.highest);
        ensure(restart == known || (counted && restart == known + 1), || {
            format!("round {round} has restart number {restart}, the one before had {known} (failure: {counted})")
        })?;
        self.restart = restart;
        Ok(())
    }
}

/// Checks that the ranks of workers are unique and dense, and in the order of their nodes.
fn check_workers(round: Round, placements: &[(NodeId, &Placement)]) -> Result<(), Violation> {
    let mut firsts: Vec<_> = placements.iter().filter_map(|(_, p)| Some((p.rank, p.workers?))).collect();
    firsts.sort_by_key(|(rank, _)| *rank);
    let Some((_, last)) = firsts.last() else { return Ok(()) };
    let rising = firsts.windows(2).all(|pair| pair[0].1.first_rank < pair[1].1.first_rank);
    let dense = firsts[0].1.first_rank == 0 && last.first_rank < last.world_size;
    let same = firsts.iter().all(|(_, workers)| workers.world_size == last.world_size);
    ensure(rising && dense && same && firsts.len() == placements.len(), || {
        format!("round {round}: ranks of workers do not fit together: {firsts:?}")
    })
}

/// Checks that the number of workers is allowed, and that each node starts as many as there are ranks for it.
fn check_bounds(round: Round, placements: &[(NodeId, &Placement)], settings: &Settings) -> Result<(), Violation> {
    let Some(WorkerBounds { min, max }) = settings.rules.workers else { return Ok(()) };
    let sizes: Option<Vec<u32>> = placements.iter().map(|(_, placement)| placement.local_world_size).collect();
    let total = sizes.iter().flatten().sum::<u32>();
    let sent = placements.iter().filter_map(|(_, placement)| placement.workers).all(|ranks| ranks.world_size == total);
    let none_is_empty = sizes.iter().flatten().all(|size| *size > 0);
    ensure(sizes.is_some() && sent && none_is_empty && (min..=max).contains(&total), || {
        format!("round {round} has {total} workers, not {min} to {max}: {sizes:?}")
    })
}

/// Checks that a place that is sent again is the same place.
pub(super) fn check_sent_again(
    sent: &Sent,
    round: Round,
    placements: &[(NodeId, &Placement)],
) -> Result<(), Violation> {
    for (node, placement) in placements {
        let same = sent.size == placement.world_size
            && sent.master == (placement.master_addr.clone(), placement.master_port)
            && sent.members.get(placement.rank as usize) == Some(node);
        ensure(same, || format!("round {round} was {sent:?}, and now {node:?} gets {placement:?}"))?;
    }
    Ok(())
}
