//! The current round: its world, why the world must re-form, the job's restarts, and how the rendezvous was closed.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::bounds::{tidy_failure, tidy_verdict};
use crate::rendezvous::messages::message::{
    Failure, Generation, JoinWorkers, NodeId, Placed, Round, Verdict, WorkerRanks,
};
use crate::wire::text::plain;

/// A node's part in the next world.
pub(super) struct Assignment {
    pub id: NodeId,
    /// The node's workers in it, if it has reported their number.
    pub workers: Option<JoinWorkers>,
}

/// The world of the last completed round. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct World {
    /// Tells this world from one with the same round number that the coordinator formed before it restarted.
    pub id: u64,
    /// Number of nodes.
    pub size: u32,
    /// Address and port of rank 0's worker store. `None` if this coordinator did not form the world.
    pub master: Option<(String, u16)>,
    /// The reason for which the round closed.
    pub reason: String,
    /// Nodes by rank. In a world that this coordinator did not form: the nodes that have reported.
    pub members: BTreeMap<u32, NodeId>,
    /// The job's restart number when the world was formed.
    pub restart: u32,
    /// Ranks of workers by the node's rank, if every member sent its number of workers.
    pub workers: Option<Vec<WorkerRanks>>,
    /// Number of workers of a world that this coordinator did not form, as a member claims it. Not in a cell.
    #[serde(skip)]
    pub claimed_workers: Option<u32>,
    /// The generation of the state with which its workers began: of the source's, or the world itself if all were new. Not in a cell,
    /// where no worker lives on.
    #[serde(skip)]
    pub began_with: Generation,
}

impl World {
    /// Number of workers, if it is known.
    pub fn worker_count(&self) -> Option<u32> {
        let first = self.workers.as_ref().and_then(|workers| workers.first());
        first.map(|ranks| ranks.world_size).or(self.claimed_workers)
    }

    /// Number of workers of the node with this rank, if it is known.
    pub fn local_world_size(&self, rank: u32) -> Option<u32> {
        let workers = self.workers.as_ref()?;
        let own = workers.get(rank as usize)?;
        let next = workers.get(rank as usize + 1).map_or(own.world_size, |next| next.first_rank);
        Some(next.saturating_sub(own.first_rank))
    }

    /// A world that this coordinator did not form, as a member claims it.
    fn of(placed: &Placed, workers: Option<u32>) -> Self {
        Self {
            id: placed.world,
            size: placed.world_size,
            master: None,
            reason: String::new(),
            members: BTreeMap::new(),
            restart: placed.restart,
            workers: None,
            claimed_workers: workers,
            began_with: placed.began_with,
        }
    }
}

/// The current world, and whether it must re-form. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct Current {
    world: Option<World>,
    /// The reason for which the world must re-form, if it must.
    interrupted: Option<String>,
    /// The failure that is the cause, if any.
    failure: Option<Box<Failure>>,
    /// Number of failures counted against the job's budget.
    restart: u32,
    /// Members were notified that the world must re-form.
    notified: bool,
    closed: Option<Verdict>,
    /// The world was full and undisturbed when the rendezvous was closed. A node that waited then was a spare.
    full_at_close: bool,
    /// Number of worlds after the first one. Not in a cell, where nothing limits it.
    #[serde(skip)]
    resets: u32,
    /// The coordinator before this one has passed the world on. Not in a cell, where that is always so.
    #[serde(skip)]
    inherited: bool,
}

impl Current {
    /// The world of the last completed round.
    pub fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    /// Number of members of the last world.
    pub fn size(&self) -> Option<usize> {
        self.world.as_ref().map(|world| world.size as usize)
    }

    /// Whether this coordinator formed the current world, or got it from the one before, rather than adopted it from its members' claims.
    pub fn has_formed(&self) -> bool {
        self.inherited || self.world.as_ref().is_some_and(|world| world.master.is_some())
    }

    /// The reason for which the world must re-form, if it must.
    pub fn interrupted(&self) -> Option<&str> {
        self.interrupted.as_deref()
    }

    /// The failure that is the cause, if any.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_deref()
    }

    /// Number of failures counted against the job's budget.
    pub fn restart(&self) -> u32 {
        self.restart
    }

    /// Whether members were notified that the world must re-form.
    pub fn notified(&self) -> bool {
        self.notified
    }

    /// The verdict with which the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.closed.as_ref()
    }

    /// Whether the world was full and undisturbed when the rendezvous was closed.
    pub fn full_at_close(&self) -> bool {
        self.full_at_close
    }

    /// Mark that the world must re-form. Returns false, and keeps the first reason, if that is known or the rendezvous is closed.
    pub fn interrupt(&mut self, reason: &str) -> bool {
        let first = self.interrupted.is_none() && self.closed.is_none();
        if first {
            self.interrupted = Some(reason.to_owned());
        }
        first
    }

    /// Record the failure that is the cause.
    pub fn blame(&mut self, failure: Failure) {
        self.failure = Some(Box::new(failure));
    }

    /// Count a failure against the job's budget. Returns the number of the restart that follows.
    pub fn count_restart(&mut self) -> u32 {
        self.restart = self.restart.saturating_add(1);
        self.restart
    }

    /// Set the job's restart number.
    pub fn set_restart(&mut self, restart: u32) {
        self.restart = restart;
    }

    /// Record whether members know that the world must re-form. Returns whether that changed.
    pub fn set_notified(&mut self, notified: bool) -> bool {
        std::mem::replace(&mut self.notified, notified) != notified
    }

    /// Close the rendezvous. `full`: whether the world is full and undisturbed.
    pub fn close(&mut self, verdict: Verdict, full: bool) {
        (self.closed, self.full_at_close) = (Some(verdict), full);
    }

    /// Make a new world the current one.
    pub fn form(&mut self, world: World) {
        if self.world.is_some() {
            self.resets = self.resets.saturating_add(1);
        }
        self.begin(world);
    }

    /// Adopt a world that this coordinator did not form, with this number of workers if that is known. Rounds before it were worlds too.
    pub fn adopt(&mut self, placed: &Placed, workers: Option<u32>) {
        self.resets = u32::try_from(placed.round.0.saturating_sub(1)).unwrap_or(u32::MAX);
        self.begin(World::of(placed, workers));
    }

    /// Go on with a world that the coordinator before this one has passed on. `resets`: as many worlds came after the first one.
    pub fn inherit(&mut self, world: World, resets: u32) {
        self.begin(world);
        (self.inherited, self.resets) = (true, resets);
    }

    fn begin(&mut self, world: World) {
        self.world = Some(world);
        (self.interrupted, self.failure, self.notified, self.inherited) = (None, None, false, false);
    }

    /// Number of worlds after the first one.
    pub fn resets(&self) -> u32 {
        self.resets
    }

    /// Whether a node's claim to a rank in the current world can be true: no other node has that rank. Records the rank if it is
    /// the first claim to it.
    ///
    /// The world's id is compared as well, because a restarted coordinator that knows no round uses round numbers again.
    pub fn has_rank(&mut self, node: NodeId, placed: Placed, round: Round) -> bool {
        let Some(world) = self.world.as_mut().filter(|world| placed.round == round && placed.world == world.id) else {
            return false;
        };
        let known = world.master.is_some();
        if known || placed.world_size != world.size || placed.rank >= world.size {
            return world.members.get(&placed.rank) == Some(&node);
        }
        *world.members.entry(placed.rank).or_insert(node) == node
    }

    /// Reduce each text to one safe line. Other nodes wrote the texts, and every node logs them.
    pub fn tidied(self) -> Self {
        Self {
            closed: self.closed.as_ref().map(tidy_verdict),
            interrupted: self.interrupted.map(plain),
            world: self.world.map(|world| World { reason: plain(world.reason), ..world }),
            failure: self.failure.map(|failure| Box::new(tidy_failure(&failure, plain(failure.node.clone())))),
            ..self
        }
    }
}

/// The instants from which the next round's time-outs count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Pace {
    /// When the first newcomer joined. `last_call_timeout` counts from it while a world grows.
    pub newcomer_since: Option<Instant>,
    /// When enough nodes were waiting and no member was running any more.
    pub ready_since: Option<Instant>,
    /// No round closes before, after several bad starts.
    pub paused_until: Option<Instant>,
}
