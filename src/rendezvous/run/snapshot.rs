//! What a successor of a run's coordinator must know when that one's process has ended, and how a run goes on from it.
//!
//! A successor goes on as a restarted coordinator that has adopted the current world (`recovery`): members come back with their ranks, and
//! have one lease for that. It knows what a restarted one has forgotten: settings, the world's id, why it must re-form, restarts and what
//! they have brought, hosts that are out, and the verdict.
//!
//! These stay out:
//!
//! - **The members.** They report their own ranks. Whether they must stop for nodes that wait follows from the nodes.
//! - **Nodes that wait, and changes in place.** Nodes repeat what they have asked.
//! - **How far the training is, and what was recorded.** No decision depends on it, but for the steps of the budget.
//!
//! [`Run::has_snapshot`] compares it with the one before after each event. So it changes only if a successor has to decide otherwise, and its
//! cost does not depend on the number of nodes. It takes at most [`SNAPSHOT_LIMIT_BYTES`] on the wire. Of restarts, faults, hosts and their
//! failures it has the latest, and long texts are cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Run;
use super::budget::Budget;
use super::durable::LARGEST_NUMBER;
use super::event::Effect;
use super::hosts::{Hosts, KeptHosts, LONGEST_AGE_MS};
use super::membership::Roster;
use super::recovery::Recovery;
use super::round::World;
use crate::events::record::Kind;
use crate::rendezvous::messages::bounds::{tidy_failure, tidy_verdict};
use crate::rendezvous::messages::message::{Failure, Generation, Round, Verdict};
use crate::rendezvous::messages::settings::Settings;
use crate::wire::text::{REASON_LIMIT_BYTES, cut, tidy};

/// Most bytes of a [`Snapshot`] on the wire.
pub const SNAPSHOT_LIMIT_BYTES: usize = 48 * 1024;
/// Most ranks that have left of which a successor knows. It waits for the others in vain, for one lease.
const MOST_LEFT: usize = 1024;
/// Longest reason for which a round closed, in bytes, that a successor knows.
const ROUND_REASON_BYTES: usize = 1024;

/// What a successor of a run's coordinator must know. `T`: an instant, or on the wire milliseconds after the moment when it was sent
/// (negative: before).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot<T = Instant> {
    settings: Settings,
    round: Round,
    /// The highest round that is known: this one, or one that a node has claimed a rank in.
    named: Round,
    world: Option<KnownWorld>,
    /// The reason for which the world must re-form, if it must, and the failure that is the cause, if one is.
    interrupted: Option<String>,
    failure: Option<Box<Failure>>,
    restart: u32,
    /// Number of worlds after the first one.
    resets: u32,
    closed: Option<Verdict>,
    full_at_close: bool,
    closed_at: Option<T>,
    /// No round closes before.
    paused_until: Option<T>,
    /// The rank in the current world of the node in the coordinator's own process, if it has one.
    host_rank: Option<u32>,
    /// Ranks of the current world whose nodes have left or are lost: the first of them. A closed run waits for nobody, and names none.
    left: BTreeSet<u32>,
    /// A closed run restarts nothing, and has none.
    budget: Budget<T>,
    #[serde(serialize_with = "serialize_shared", deserialize_with = "deserialize_shared")]
    hosts: Arc<KeptHosts<T>>,
}

/// The current world without its members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KnownWorld {
    id: u64,
    /// Number of nodes.
    size: u32,
    reason: String,
    /// The job's restart number when it was formed.
    restart: u32,
    /// Number of workers, if it is known.
    workers: Option<u32>,
    began_with: Generation,
}

impl KnownWorld {
    fn of(world: &World) -> Self {
        Self {
            id: world.id,
            size: world.size,
            reason: cut(world.reason.clone(), ROUND_REASON_BYTES),
            restart: world.restart,
            workers: world.worker_count(),
            began_with: world.began_with,
        }
    }

    /// Whether it would be made of this world.
    fn is_of(&self, world: &World) -> bool {
        let Self { id, size, reason, restart, workers, began_with } = self;
        (*id, *size, *restart) == (world.id, world.size, world.restart)
            && (*workers, *began_with) == (world.worker_count(), world.began_with)
            && is_cut(reason, &world.reason, ROUND_REASON_BYTES)
    }

    /// The world, whose members will report.
    fn world(self) -> World {
        let Self { id, size, reason, restart, workers, began_with } = self;
        World {
            id,
            size,
            master: None,
            reason,
            members: BTreeMap::new(),
            restart,
            workers: None,
            claimed_workers: workers,
            began_with,
        }
    }
}

/// Whether this is what is left of a text that may be too long.
fn is_cut(kept: &str, whole: &str, limit: usize) -> bool {
    if whole.len() <= limit { kept == whole } else { kept == cut(whole.to_owned(), limit) }
}

impl Run {
    /// Whether [`Self::snapshot`] would be the same as this one. It copies little, since most events change nothing.
    pub fn has_snapshot(&self, last: &Snapshot) -> bool {
        let Self { roster, current, recovery, .. } = self;
        let Snapshot { settings, round, named, world, interrupted, failure, restart, resets, .. } = last;
        let Snapshot { closed, full_at_close, closed_at, paused_until, host_rank, left, budget, hosts, .. } = last;
        let is_open = current.closed().is_none();
        let host = self.host.and_then(|(id, _)| roster.get(id)).and_then(|node| roster.last_rank(node));
        let is_same_world = match (world, current.world()) {
            (Some(known), Some(world)) => known.is_of(world),
            (known, world) => known.is_none() && world.is_none(),
        };
        let is_same_reason = match (interrupted, current.interrupted()) {
            (Some(known), Some(reason)) => is_cut(known, reason, REASON_LIMIT_BYTES),
            (known, reason) => known.is_none() && reason.is_none(),
        };
        let is_same_verdict = match (closed, current.closed()) {
            (Some(known), Some(verdict)) => *known == tidy_verdict(verdict),
            (known, verdict) => known.is_none() && verdict.is_none(),
        };
        let is_same = (*round, *restart, *resets) == (self.round(), current.restart(), current.resets())
            && (*named, *host_rank) == (recovery.named().max(self.round()), host)
            && (*full_at_close, *closed_at) == (current.full_at_close(), self.closed_at)
            && *paused_until == self.pace.paused_until
            && is_same_world
            && is_same_reason
            && is_same_verdict
            && failure.as_deref() == current.failure()
            && left.iter().eq(recovery.left().iter().take(if is_open { MOST_LEFT } else { 0 }))
            && Arc::ptr_eq(hosts, self.hosts.kept())
            && *settings == self.settings
            && if is_open {
                *budget == self.budget || *budget == self.budget.kept()
            } else {
                *budget == Budget::default()
            };
        debug_assert!(!is_same || *last == self.snapshot(), "{last:?} is not {:?}", self.snapshot());
        is_same
    }

    /// What a successor of this run's coordinator must know.
    pub fn snapshot(&self) -> Snapshot {
        let Self { settings, roster, current, recovery, .. } = self;
        let host = self.host.and_then(|(id, _)| roster.get(id));
        let is_open = current.closed().is_none();
        Snapshot {
            settings: settings.clone(),
            round: self.round(),
            named: recovery.named().max(self.round()),
            world: current.world().map(KnownWorld::of),
            interrupted: current.interrupted().map(|reason| cut(reason.to_owned(), REASON_LIMIT_BYTES)),
            failure: current.failure().cloned().map(Box::new),
            restart: current.restart(),
            resets: current.resets(),
            closed: current.closed().map(tidy_verdict),
            full_at_close: current.full_at_close(),
            closed_at: self.closed_at,
            paused_until: self.pace.paused_until,
            host_rank: host.and_then(|node| roster.last_rank(node)),
            left: recovery.left().iter().copied().take(if is_open { MOST_LEFT } else { 0 }).collect(),
            budget: if is_open { self.budget.kept() } else { Budget::default() },
            hosts: Arc::clone(self.hosts.kept()),
        }
    }

    /// Go on with a run from where its former coordinator has left it. `host_is_dead`: the process of that one is proven dead, so nobody
    /// waits for the node in it.
    pub fn succeeding(id: impl Into<String>, snapshot: Snapshot, host_is_dead: bool, now: Instant) -> Self {
        let Snapshot { settings, round, named, world, resets, host_rank, .. } = snapshot;
        let mut run = Self::counting_on(&id.into(), settings, round);
        let worlds: BTreeSet<_> = world.iter().map(|world| world.id).collect();
        run.recovery = Recovery::with_worlds(worlds, named);
        let size = world.as_ref().map(|world| world.size);
        world.into_iter().for_each(|world| run.current.inherit(world.world(), resets));
        run.current.set_restart(snapshot.restart);
        snapshot.interrupted.iter().for_each(|reason| _ = run.current.interrupt(reason));
        snapshot.failure.into_iter().for_each(|failure| run.current.blame(*failure));
        let awaited = size.filter(|_| snapshot.closed.is_none());
        snapshot.closed.into_iter().for_each(|verdict| run.current.close(verdict, snapshot.full_at_close));
        run.closed_at = snapshot.closed_at;
        run.pace.paused_until = snapshot.paused_until;
        run.budget = snapshot.budget;
        run.hosts = Hosts::inherited(Arc::unwrap_or_clone(snapshot.hosts));
        if awaited.is_some() {
            run.recovery.await_members(Some(now + run.settings.lease()));
            let dead = host_rank.filter(|_| host_is_dead);
            run.recovery.lose_host(dead);
            // Another successor must know it too.
            dead.into_iter().for_each(|rank| run.recovery.on_left(rank));
            snapshot.left.into_iter().for_each(|rank| run.recovery.on_left(rank));
        }
        run.record_succession(awaited);
        run
    }

    /// Record that this coordinator has taken over. The first event yields the effects.
    fn record_succession(&mut self, awaited: Option<u32>) {
        if self.is_blank() {
            return;
        }
        let mut text = "this coordinator has taken over from another one".to_owned();
        if let Some(size) = awaited {
            let (round, lease) = (self.round(), self.settings.lease().as_secs_f64());
            text += &format!(", and waits {lease:.1} s for the members of round {round} (nodes: {size})");
            let gone = self.recovery.gone_rank().map(|rank| format!("; node rank {rank} has ended with that one"));
            text += &gone.unwrap_or_default();
        }
        self.record(Kind::CoordinatorRestarted { reported: self.round().0 }, None, None, text);
        if !self.hosts.is_blank() {
            self.emit(Effect::Exclusions);
        }
    }

    /// Create a run that continues the round numbers after this one.
    pub(in crate::rendezvous) fn counting_on(id: &str, settings: Settings, round: Round) -> Self {
        let mut run = Self::new(id, settings);
        run.roster = Roster::restored(round, 0, BTreeMap::new());
        run
    }
}

impl<T: Clone> Snapshot<T> {
    /// The same, with its times as another kind of number.
    fn map<U>(self, of: &mut impl FnMut(T) -> U) -> Snapshot<U> {
        let Self { settings, round, named, world, interrupted, failure, restart, resets, .. } = self;
        Snapshot {
            settings,
            round,
            named,
            world,
            interrupted,
            failure,
            restart,
            resets,
            closed: self.closed,
            full_at_close: self.full_at_close,
            closed_at: self.closed_at.map(&mut *of),
            paused_until: self.paused_until.map(&mut *of),
            host_rank: self.host_rank,
            left: self.left,
            budget: self.budget.map(of),
            hosts: Arc::new(Arc::unwrap_or_clone(self.hosts).map(of)),
        }
    }
}

impl Snapshot {
    /// The same, as it is sent now.
    pub fn to_wire(&self, now: Instant) -> Snapshot<i64> {
        let millis = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(LONGEST_AGE_MS);
        self.clone().map(&mut |at| match now.checked_duration_since(at) {
            Some(ago) => -millis(ago),
            None => millis(at.saturating_duration_since(now)),
        })
    }
}

impl Snapshot<i64> {
    /// The same, as it has arrived now.
    ///
    /// # Errors
    /// A time is none that this machine's clock can show.
    pub fn received(self, now: Instant) -> Result<Snapshot, String> {
        let mut wrong = None;
        let received = self.map(&mut |at_ms| {
            let away = Duration::from_millis(at_ms.unsigned_abs());
            let at = if at_ms < 0 { now.checked_sub(away) } else { now.checked_add(away) };
            at.unwrap_or_else(|| {
                wrong = Some(at_ms);
                now
            })
        });
        match wrong {
            Some(at_ms) => Err(format!("a time is {at_ms} ms away, which this machine's clock cannot show")),
            None => Ok(received),
        }
    }

    /// Check what another process has written, and reduce its texts to one safe line each.
    ///
    /// # Errors
    /// Names the value that is not allowed.
    pub fn validated(self) -> Result<Self, String> {
        self.settings.validate()?;
        let Self { round, named, host_rank, .. } = self;
        if let Some(number) = [round.0, named.0].into_iter().find(|number| *number > LARGEST_NUMBER) {
            return Err(format!("a round's number is {number}, must be at most {LARGEST_NUMBER}"));
        }
        match (&self.world, host_rank) {
            (Some(world), _) if world.size < 1 || round < Round(1) => {
                return Err(format!(
                    "a world of round {round} has {} nodes, must have 1 in round 1 or later",
                    world.size
                ));
            }
            (Some(KnownWorld { size, .. }), Some(rank)) if rank >= *size => {
                return Err(format!("the host's rank is {rank}, must be below the size of the world ({size})"));
            }
            (None, Some(rank)) => return Err(format!("the host has rank {rank} in no world")),
            (Some(_), _) | (None, None) => {}
        }
        let size = self.world.as_ref().map_or(0, |world| world.size);
        if self.left.len() > MOST_LEFT || self.left.last().is_some_and(|rank| *rank >= size) {
            let (count, last) = (self.left.len(), self.left.last().copied().unwrap_or_default());
            return Err(format!("{count} ranks have left up to {last}, must be at most {MOST_LEFT} below {size}"));
        }
        let interrupted = self.interrupted.map(|reason| tidy(&reason));
        if interrupted.as_deref().is_some_and(str::is_empty) {
            return Err("the world is interrupted without a reason".to_owned());
        }
        let mut furthest = 0;
        let valid = Self {
            world: self.world.map(|world| KnownWorld { reason: tidy(&world.reason), ..world }),
            interrupted,
            failure: self.failure.map(|failure| Box::new(tidy_failure(&failure, tidy(&failure.node)))),
            closed: self.closed.as_ref().map(tidy_verdict),
            budget: self.budget.validated()?,
            hosts: Arc::new(Arc::unwrap_or_clone(self.hosts).validated()?),
            ..self
        };
        let valid = valid.map(&mut |at_ms: i64| {
            furthest = furthest.max(at_ms.unsigned_abs());
            at_ms
        });
        if furthest > LONGEST_AGE_MS.unsigned_abs() {
            return Err(format!("a time is {furthest} ms away, must be at most {LONGEST_AGE_MS}"));
        }
        Ok(valid)
    }
}

fn serialize_shared<T: Serialize, S: Serializer>(value: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().serialize(serializer)
}

fn deserialize_shared<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<T>, D::Error> {
    T::deserialize(deserializer).map(Arc::new)
}

#[cfg(test)]
mod tests;
