//! What a run records, and the events that later ones name as their causes. No decision depends on anything here.
//!
//! **Progress of the training.** While somebody watches, rank 0's node is asked for it, at most twice a second: all workers make the same
//! steps. An observer that asks again soon after also gets the nodes that are behind, so all members are asked then, at most once a second.
//! A node is behind if it has not reached the step that the farthest one had reported before it was asked. That it made a step later than
//! others while answers were under way does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::event::SessionId;
use super::membership::Roster;
use super::node::{Node, Status};
use super::round::Current;
use crate::events::journal::{Reference, id};
use crate::events::record::{CAUSES_LIMIT, Kind, LONGEST_US, Number, Record, Replayed, Why};
use crate::rendezvous::messages::message::{LARGEST_STEP, NodeId, Replay, Round, StepReport};

/// Most events of members that a restarted coordinator keeps of a run.
const REPORTED_LIMIT: usize = 1024;

/// How often a running world was interrupted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Interruptions {
    /// A worker failed.
    pub crashes: u32,
    /// The training hung.
    pub hangs: u32,
    /// A node was lost.
    pub losses: u32,
    /// A node left: most often its host was taken back.
    pub departures: u32,
}

impl Interruptions {
    fn count(&mut self, why: Why) {
        let count = match why {
            Why::WorkerFailed => &mut self.crashes,
            Why::HangFound => &mut self.hangs,
            Why::NodeLost => &mut self.losses,
            Why::NodeLeft => &mut self.departures,
            _ => return,
        };
        *count = count.saturating_add(1);
    }
}

/// The events that may cause others.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Trace {
    /// Number of the last event.
    recorded: u64,
    /// Why the current world must re-form, or changes in place.
    broken: Option<Number>,
    /// When the current world was formed.
    completed: Option<Number>,
    /// When the training of the current world was last found to hang.
    hang: Option<Number>,
    /// The last request to join.
    joined: Option<Number>,
    /// That of each node that is known.
    joins: BTreeMap<NodeId, Number>,
    /// The first request to leave of this round.
    leaves: Option<Number>,
    /// How long the import of the current round has taken, in microseconds, if that is known.
    import_us: Option<u64>,
    interruptions: Interruptions,
    watch: Watch,
    /// Over a shared cell: events of other nodes that may be causes. Their numbers are 1, 2, … Those that are recorded follow.
    references: Vec<Reference>,
    /// It goes on from a state in a shared cell.
    goes_on: bool,
    /// Members that were asked for what they recorded under the coordinator before this one.
    asked: BTreeSet<NodeId>,
    /// By origin, the node that reported its first event, and the number of the last one that was kept. Ids are chosen by the nodes, and many have one
    /// origin: without this a member could go on in the name of another.
    last_reported: BTreeMap<String, (NodeId, u64)>,
    /// What several members know is kept once: kinds and rounds.
    known: BTreeSet<(&'static str, u64)>,
    reported: usize,
}

impl Trace {
    /// The event for which the current world must re-form.
    pub fn broken(&self) -> Option<Number> {
        self.broken
    }

    /// The event by which the training of the current world was found to hang.
    pub fn hang(&self) -> Option<Number> {
        self.hang
    }

    /// The event by which the current world was formed.
    pub fn completed(&self) -> Option<Number> {
        self.completed
    }

    /// The workers of the current round are all connected to their store.
    pub fn imported(&mut self, import_us: Option<u64>) {
        self.import_us = import_us.or(self.import_us);
    }

    /// How long that has taken, in microseconds. 0: it is not known.
    pub fn import_us(&self) -> u64 {
        self.import_us.unwrap_or(0)
    }

    /// Whether nothing was recorded yet.
    pub fn is_blank(&self) -> bool {
        self.recorded == 0 && !self.goes_on
    }

    /// Forget what concerns a node.
    pub(super) fn forget(&mut self, id: NodeId) {
        self.joins.remove(&id);
        self.asked.remove(&id);
    }

    fn refer(&mut self, to: Reference) -> Number {
        self.references.push(to);
        self.recorded += 1;
        Number(self.recorded)
    }

    /// The last request to join.
    pub fn joined(&self) -> Option<Number> {
        self.joined
    }

    /// The events of other nodes that those of this run may name as causes, by their numbers from 1. Over a shared cell alone.
    pub fn references(&self) -> &[Reference] {
        &self.references
    }

    /// When a member last asked to leave.
    pub fn leaves(&self) -> Option<Number> {
        self.leaves
    }

    /// How often a world was interrupted.
    pub fn interruptions(&self) -> Interruptions {
        self.interruptions
    }

    /// How far the training is.
    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The same, to change it.
    pub(super) fn watch_mut(&mut self) -> &mut Watch {
        &mut self.watch
    }

    /// An event of the current round, with the next number. `node` is the name of the node that it is about. `text` is its line in the log.
    pub(super) fn event(
        &mut self,
        (round, restart): (Round, u32),
        kind: Kind,
        node: Option<&str>,
        causes: impl IntoIterator<Item = Number>,
        text: Option<String>,
    ) -> Record {
        self.recorded += 1;
        let number = Number(self.recorded);
        match &kind {
            Kind::NodeJoined { .. } => self.joined = Some(number),
            Kind::NodeLeaves {} => _ = self.leaves.get_or_insert(number),
            Kind::RoundCompleted { .. } => {
                (self.completed, self.broken, self.import_us, self.hang) = (Some(number), None, None, None);
                self.leaves = None;
                self.watch = Watch::default();
            }
            Kind::RoundGoesOn {} => (self.broken, self.leaves) = (None, None),
            Kind::HangFound(_) => self.hang = Some(number),
            Kind::RoundChanges {} => self.broken = Some(number),
            Kind::RoundBroken { why } => {
                self.broken = Some(number);
                self.interruptions.count(*why);
            }
            _ => {}
        }
        let causes = causes.into_iter().take(CAUSES_LIMIT).collect();
        Record { number, causes, round: round.0, restart, node: node.map(str::to_owned), kind, text }
    }

    /// A node has asked to join, by this event.
    pub(super) fn on_joined(&mut self, id: NodeId, event: Number) {
        self.joins.insert(id, event);
    }

    /// The first request to join among those of waiting newcomers.
    pub(super) fn first_newcomer(&self, roster: &Roster) -> Option<Number> {
        let new = roster.of(roster.waiting()).filter(|(_, node)| node.waits() && roster.last_rank(node).is_none());
        new.filter_map(|(id, _)| self.joins.get(&id).copied()).min().or(self.joined)
    }

    /// Go on from a state in a shared cell, before anything is recorded. What led to it was recorded by the nodes that wrote it.
    pub(super) fn go_on(&mut self, current: &Current, roster: &Roster) {
        self.goes_on = true;
        let round = roster.round().0;
        if current.world().is_some() {
            self.completed = Some(self.refer(Reference::Completed(round)));
            if current.interrupted().is_some() || current.notified() {
                self.broken = Some(self.refer(Reference::Broken(round)));
            }
        }
        let arrival = |node: &Node| match node.status {
            Status::Waiting { arrival, .. } => Some(arrival),
            _ => None,
        };
        let waiting = roster.of(roster.waiting());
        let mut waiting: Vec<_> =
            waiting.filter_map(|(id, node)| Some((arrival(node)?, id, node.name.clone()))).collect();
        waiting.sort();
        for (_, id, name) in waiting {
            let joined = self.refer(Reference::Joined(name));
            self.joins.insert(id, joined);
            self.joined = Some(joined);
        }
    }

    /// A node reconnects that was placed by an earlier coordinator. Returns whether it is asked for what it has recorded: once a Hello.
    pub(super) fn asks(&mut self, id: NodeId) -> bool {
        let asks = self.reported < REPORTED_LIMIT;
        if asks {
            self.asked.insert(id);
        }
        asks
    }

    /// A member reports what it recorded under the coordinator before this one. Returns the events that are kept.
    pub(super) fn on_replay(&mut self, node: NodeId, name: &str, replay: Replay) -> Vec<Replayed> {
        let mut kept = Vec::new();
        if !self.asked.remove(&node) {
            return kept;
        }
        let Some(Replay { origin, events }) = replay.validated(node) else { return kept };
        let (reporter, last) = self.last_reported.get(&origin).copied().unwrap_or((node, 0));
        if reporter != node {
            return kept;
        }
        for event in events {
            let kind = event.kind();
            let shared = match kind {
                Kind::ReceivedCompleted { .. } => Some(("completed", event.round)),
                Kind::ReceivedExited(_) => Some(("exited", event.round)),
                Kind::ReceivedBroken { .. } => Some(("broken", event.round)),
                _ => None,
            };
            if event.number <= last || self.reported == REPORTED_LIMIT {
                continue;
            }
            if shared.is_some_and(|shared| !self.known.insert(shared)) {
                continue;
            }
            self.reported += 1;
            self.last_reported.insert(origin.clone(), (node, event.number));
            // Only a failure may be another node's.
            let about =
                event.node.filter(|_| matches!(kind, Kind::ReceivedExited(_))).unwrap_or_else(|| name.to_owned());
            kept.push(Replayed {
                id: id(&origin, Number(event.number)),
                order: event.number,
                cause: event.cause.map(|cause| id(&origin, Number(cause))).into_iter().collect(),
                ago_us: event.ago_us,
                round: event.round,
                restart: event.restart,
                node: Some(about),
                kind,
                text: event.text,
            });
        }
        kept
    }
}

/// How often a node is asked at most.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// How often all members are asked at most.
const ASK_ALL_EVERY: Duration = Duration::from_secs(1);

/// An observer that asks again within this time watches, and does not look once.
const WATCHES: Duration = Duration::from_secs(3);

/// What is known of the steps of the current round.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    asked_at: Option<Instant>,
    reported_at: Option<Instant>,
    asked_all_at: Option<Instant>,
    /// The step that the farthest member had reached when all were asked last.
    goal: u64,
    /// The farthest step that any member has reported.
    farthest: u64,
    /// By how many steps members were behind the goal. Others are not named.
    behind: BTreeMap<NodeId, u64>,
    /// Number of the last step.
    pub step: Option<u64>,
    /// Mean time of a step, in microseconds.
    pub step_time_us: Option<u64>,
    /// The workers of rank 0's node are restarted when the world changes, because their process groups use NCCL.
    pub restarts_for_nccl: bool,
}

impl Watch {
    /// Somebody wants to know how far the training is. Returns the sessions of the nodes to ask.
    pub(super) fn on_watched(&mut self, roster: &Roster, now: Instant) -> Vec<SessionId> {
        let ago = |at: Option<Instant>| at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
        let since = ago(self.asked_at);
        if since < ASK_EVERY {
            return Vec::new();
        }
        let all = since < WATCHES && ago(self.asked_all_at) >= ASK_ALL_EVERY;
        let rank = |node: &Node| node.placed.filter(|(round, _)| *round == roster.round()).map(|(_, rank)| rank);
        let members = roster.of(roster.active()).filter(|(_, node)| node.reports_steps);
        let asked = members.filter_map(|(_, node)| Some((rank(node).filter(|rank| all || *rank == 0)?, node.session?)));
        let asked: Vec<_> = asked.collect();
        if asked.iter().any(|(rank, _)| *rank == 0) {
            self.asked_at = Some(now);
        }
        if all {
            (self.asked_all_at, self.goal) = (Some(now), self.farthest);
        }
        asked.into_iter().map(|(_, session)| session).collect()
    }

    /// A member reports how far its workers are. `is_first`: it has rank 0.
    pub(super) fn on_step(&mut self, id: NodeId, is_first: bool, report: StepReport, now: Instant) {
        let step = report.step.map(|step| step.min(LARGEST_STEP));
        if is_first {
            (self.reported_at, self.step) = (Some(now), step);
            self.step_time_us = report.step_time_us.map(|us| us.min(LONGEST_US));
            self.restarts_for_nccl = report.restarts_for_nccl;
        }
        // A node whose workers report no numbers is not known to be behind.
        match self.goal.saturating_sub(step.unwrap_or(LARGEST_STEP)) {
            0 => drop(self.behind.remove(&id)),
            steps => drop(self.behind.insert(id, steps)),
        }
        self.farthest = self.farthest.max(step.unwrap_or(0));
    }

    /// The members that are behind, and by how many steps: most first, at most so many.
    pub(super) fn behind<'a>(&self, roster: &'a Roster, limit: usize) -> Vec<(&'a str, u64)> {
        let behind = self.behind.iter();
        let mut behind: Vec<_> =
            behind.filter_map(|(id, steps)| Some((roster.get(*id)?.name.as_str(), *steps))).collect();
        behind.sort_by_key(|(_, steps)| std::cmp::Reverse(*steps));
        behind.truncate(limit);
        behind
    }

    /// Whether a node was asked how far the training is, and has not answered yet.
    pub fn awaits_step(&self) -> bool {
        self.asked_at > self.reported_at
    }
}
