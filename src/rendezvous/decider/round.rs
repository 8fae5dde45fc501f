//! The current round: its world, why that must re-form, the job's restarts, and how the rendezvous was closed.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rendezvous::protocol::message::{Failure, NodeId, Placed, Round, Verdict, WorkerRanks};
use crate::rendezvous::protocol::text::{plain, tidy_failure, tidy_verdict};

/// The world of the last completed round. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct World {
    /// Tells it from others of the same round, which another life of the coordinator has formed.
    pub id: u64,
    /// Number of nodes.
    pub size: u32,
    /// Address and port of rank 0's worker store; unknown when this coordinator did not form the world.
    pub master: Option<(String, u16)>,
    /// Why the round closed when it did.
    pub reason: String,
    /// Which node has which rank. Of a world that this coordinator did not form: those that have reported.
    pub members: BTreeMap<u32, NodeId>,
    /// The job's restart number when it was formed.
    pub restart: u32,
    /// Ranks of workers by the node's rank, if every member said how many it has.
    pub workers: Option<Vec<WorkerRanks>>,
}

impl World {
    /// A world that this coordinator did not form, as one of its members tells of it.
    fn of(placed: &Placed) -> Self {
        Self {
            id: placed.world,
            size: placed.world_size,
            master: None,
            reason: String::new(),
            members: BTreeMap::new(),
            restart: placed.restart,
            workers: None,
        }
    }
}

/// The current world and its end. Serialised as part of a [cell's state](crate::rendezvous::cell::blob).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rendezvous) struct Current {
    world: Option<World>,
    /// Why the world must re-form, if it must.
    interrupted: Option<String>,
    /// The failure because of which it must, if one is the cause.
    failure: Option<Box<Failure>>,
    /// How many failures have been taken from the job's budget.
    restart: u32,
    /// Members have been told that the world must re-form.
    told: bool,
    closed: Option<Verdict>,
    /// The world was full and undisturbed when the rendezvous was closed: a node that waited then was a spare.
    full_at_close: bool,
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

    /// Whether this coordinator has formed the current world itself, rather than been told of it.
    pub fn has_formed(&self) -> bool {
        self.world.as_ref().is_some_and(|world| world.master.is_some())
    }

    /// Why the world must re-form, if it must.
    pub fn interrupted(&self) -> Option<&str> {
        self.interrupted.as_deref()
    }

    /// The failure because of which it must.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_deref()
    }

    /// How many failures have been taken from the job's budget.
    pub fn restart(&self) -> u32 {
        self.restart
    }

    /// Whether members have been told that the world must re-form.
    pub fn told(&self) -> bool {
        self.told
    }

    /// How the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.closed.as_ref()
    }

    /// Whether the world was full and undisturbed when the rendezvous was closed.
    pub fn full_at_close(&self) -> bool {
        self.full_at_close
    }

    /// The world must re-form. The first reason is kept: false if there is one, or the rendezvous is closed.
    pub fn interrupt(&mut self, reason: &str) -> bool {
        let first = self.interrupted.is_none() && self.closed.is_none();
        if first {
            self.interrupted = Some(reason.to_owned());
        }
        first
    }

    /// A failure is the cause.
    pub fn blame(&mut self, failure: Failure) {
        self.failure = Some(Box::new(failure));
    }

    /// Take a failure from the job's budget. Gives the number of the restart that follows.
    pub fn count_restart(&mut self) -> u32 {
        self.restart = self.restart.saturating_add(1);
        self.restart
    }

    /// The job's restarts are known to be so many.
    pub fn set_restart(&mut self, restart: u32) {
        self.restart = restart;
    }

    /// Note whether members know that the world must re-form. True if that has changed.
    pub fn set_told(&mut self, told: bool) -> bool {
        std::mem::replace(&mut self.told, told) != told
    }

    /// Nobody is admitted any more.
    pub fn close(&mut self, verdict: Verdict, full: bool) {
        (self.closed, self.full_at_close) = (Some(verdict), full);
    }

    /// A new world has formed.
    pub fn form(&mut self, world: World) {
        self.world = Some(world);
        self.settle();
    }

    /// Take up a world that this coordinator did not form.
    pub fn take_up(&mut self, placed: &Placed) {
        self.form(World::of(placed));
    }

    fn settle(&mut self) {
        (self.interrupted, self.failure, self.told) = (None, None, false);
    }

    /// Whether a node's account of the current round is true as far as is known: nobody else has that rank.
    ///
    /// It is not where a coordinator that was restarted has given a number anew, because nobody had told it of the first.
    pub fn has_seat(&mut self, node: NodeId, placed: Placed, round: Round) -> bool {
        let Some(world) = self.world.as_mut().filter(|world| placed.round == round && placed.world == world.id) else {
            return false;
        };
        let known = world.master.is_some();
        if known || placed.world_size != world.size || placed.rank >= world.size {
            return world.members.get(&placed.rank) == Some(&node);
        }
        *world.members.entry(placed.rank).or_insert(node) == node
    }

    /// Its texts, which others have written and every node logs, as one line each.
    pub fn tidied(self) -> Self {
        Self {
            closed: self.closed.as_ref().map(tidy_verdict),
            interrupted: self.interrupted.as_deref().map(plain),
            world: self.world.map(|world| World { reason: plain(&world.reason), ..world }),
            failure: self.failure.map(|failure| Box::new(tidy_failure(&failure, plain(&failure.node)))),
            ..self
        }
    }
}

/// Since when the next round has been on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Pace {
    /// When the first newcomer asked for it.
    pub newcomer_since: Option<Instant>,
    /// Since when it could close, were it not for nodes that may still come.
    pub ready_since: Option<Instant>,
}
