//! What a run records, and the events that later ones name as their causes.

use std::collections::{BTreeMap, BTreeSet};

use super::Run;
use super::event::Effect;
use super::node::{Node, Status};
use super::watched::Watch;
use crate::events::journal::{Reference, id};
use crate::events::record::{CAUSES_LIMIT, Kind, Number, Record, Told};
use crate::rendezvous::messages::message::{NodeId, Recalled};

/// Most events of members that a restarted coordinator keeps of a run.
const TOLD_LIMIT: usize = 1024;

/// The events that may cause others.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Trace {
    /// Number of the last event.
    recorded: u64,
    /// Why the current world must re-form, or changes in place.
    broken: Option<Number>,
    /// When the current world was formed.
    completed: Option<Number>,
    /// The last request for a place.
    joined: Option<Number>,
    /// That of each node that is known.
    joins: BTreeMap<NodeId, Number>,
    /// When a member last asked to leave.
    leaves: Option<Number>,
    /// How long the import of the current round has taken, in microseconds, if that is known.
    import_us: Option<u64>,
    /// How far the training is, and when somebody last wanted to know that.
    pub(super) watch: Watch,
    /// Over a shared cell: events of other nodes that may be causes. Their numbers are 1, 2, … Those that are recorded follow.
    references: Vec<Reference>,
    /// It goes on from a state in a shared cell.
    goes_on: bool,
    /// Members that were asked for what they recorded under the coordinator before this one.
    asked: BTreeSet<NodeId>,
    /// By origin, who told its first event, and the number of the last one that was kept. Ids are chosen by the nodes, and many have one
    /// origin: without this a member could go on in the name of another.
    last_told: BTreeMap<String, (NodeId, u64)>,
    /// What several members know is kept once: kinds and rounds.
    known: BTreeSet<(&'static str, u64)>,
    told: usize,
}

impl Trace {
    /// The event for which the current world must re-form.
    pub fn broken(&self) -> Option<Number> {
        self.broken
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

    /// The last request for a place.
    pub fn joined(&self) -> Option<Number> {
        self.joined
    }
}

impl Run {
    /// The events of other nodes that those of this run may name as causes, by their numbers from 1. Over a shared cell alone.
    pub(in crate::rendezvous) fn references(&self) -> &[Reference] {
        &self.trace.references
    }

    /// Record an event. `node` is the name of the node that it is about. `text` is its line in the log.
    pub(super) fn record(
        &mut self,
        kind: Kind,
        node: Option<&str>,
        causes: impl IntoIterator<Item = Number>,
        text: impl Into<Option<String>>,
    ) -> Number {
        self.trace.recorded += 1;
        let number = Number(self.trace.recorded);
        match &kind {
            Kind::NodeJoined { .. } => self.trace.joined = Some(number),
            Kind::NodeLeaves {} => self.trace.leaves = Some(number),
            Kind::RoundCompleted { .. } => {
                (self.trace.completed, self.trace.broken, self.trace.import_us) = (Some(number), None, None);
                self.trace.watch = Watch::default();
            }
            Kind::RoundGoesOn {} => self.trace.broken = None,
            Kind::RoundChanges {} | Kind::RoundBroken { .. } => self.trace.broken = Some(number),
            _ => {}
        }
        self.emit(Effect::Record(Record {
            number,
            causes: causes.into_iter().take(CAUSES_LIMIT).collect(),
            round: self.round().0,
            restart: self.restart(),
            node: node.map(str::to_owned),
            kind,
            text: text.into(),
        }));
        number
    }

    /// The event by which a member asked to leave, if one does.
    pub(super) fn leaver(&self) -> Option<Number> {
        self.trace.leaves.filter(|_| !self.in_place.leaving().is_empty())
    }

    /// Record that a node asks for a place.
    pub(super) fn record_join(&mut self, id: NodeId, kind: Kind, name: &str, cause: Option<Number>, text: String) {
        let number = self.record(kind, Some(name), cause, text);
        self.trace.joins.insert(id, number);
    }

    /// Go on from a state in a shared cell, before anything is recorded. What led to it was recorded by the nodes that wrote it.
    pub(super) fn resume_trace(&mut self) {
        self.trace.goes_on = true;
        let round = self.round().0;
        if self.current.world().is_some() {
            self.trace.completed = Some(self.trace.refer(Reference::Completed(round)));
            if self.current.interrupted().is_some() || self.current.told() {
                self.trace.broken = Some(self.trace.refer(Reference::Broken(round)));
            }
        }
        let arrival = |node: &Node| match node.status {
            Status::Waiting { arrival, .. } => Some(arrival),
            _ => None,
        };
        let waiting = self.roster.of(self.roster.waiting());
        let mut waiting: Vec<_> =
            waiting.filter_map(|(id, node)| Some((arrival(node)?, id, node.name.clone()))).collect();
        waiting.sort();
        for (_, id, name) in waiting {
            let joined = self.trace.refer(Reference::Joined(name));
            self.trace.joins.insert(id, joined);
            self.trace.joined = Some(joined);
        }
    }

    /// Whether a node is to tell what it recorded: it had a place that this coordinator did not give. It may tell it once a Hello.
    pub(super) fn asks_to_recall(&mut self, id: NodeId, had_place: bool) -> bool {
        let asks = had_place && !self.current.has_formed() && self.trace.told < TOLD_LIMIT;
        if asks {
            self.trace.asked.insert(id);
        }
        asks
    }

    /// A member tells what it recorded under the coordinator before this one.
    pub(super) fn on_recalled(&mut self, node: NodeId, recalled: Recalled) {
        if !self.trace.asked.remove(&node) {
            return;
        }
        let Some(name) = self.roster.get(node).map(|node| node.name.clone()) else { return };
        let Some(Recalled { origin, events }) = recalled.validated(node) else { return };
        let (teller, last) = self.trace.last_told.get(&origin).copied().unwrap_or((node, 0));
        if teller != node {
            return;
        }
        for event in events {
            let kind = event.kind();
            let shared = match kind {
                Kind::HeardCompleted { .. } => Some(("completed", event.round)),
                Kind::HeardExited(_) => Some(("exited", event.round)),
                Kind::HeardBroken { .. } => Some(("broken", event.round)),
                _ => None,
            };
            if event.number <= last || self.trace.told == TOLD_LIMIT {
                continue;
            }
            if shared.is_some_and(|shared| !self.trace.known.insert(shared)) {
                continue;
            }
            self.trace.told += 1;
            self.trace.last_told.insert(origin.clone(), (node, event.number));
            // Only a failure may be another node's.
            let about = event.node.filter(|_| matches!(kind, Kind::HeardExited(_))).unwrap_or_else(|| name.clone());
            let told = Told {
                id: id(&origin, Number(event.number)),
                order: event.number,
                cause: event.cause.map(|cause| id(&origin, Number(cause))).into_iter().collect(),
                ago_us: event.ago_us,
                round: event.round,
                restart: event.restart,
                node: Some(about),
                kind,
                text: event.text,
            };
            self.record(Kind::Told(Box::new(told)), Some(&name), None, None);
        }
    }

    /// The first request for a place among those of waiting newcomers.
    pub(super) fn first_newcomer(&self) -> Option<Number> {
        let waiting = self.roster.of(self.roster.waiting());
        let new = waiting.filter(|(_, node)| node.waits() && self.roster.last_rank(node).is_none());
        new.filter_map(|(id, _)| self.trace.joins.get(&id).copied()).min().or(self.trace.joined)
    }

    /// Record what has no type of its own.
    pub(super) fn note(&mut self, text: String) {
        self.record(Kind::Note {}, None, None, text);
    }

    /// Record an event of a node. `what` follows its label in the log.
    pub(super) fn record_of(
        &mut self,
        id: NodeId,
        kind: Kind,
        causes: impl IntoIterator<Item = Number>,
        what: String,
    ) -> Number {
        let Some(node) = self.roster.get(id) else { return self.record(Kind::Note {}, None, causes, what) };
        let (name, text) = (node.name.clone(), format!("{} {what}", node.label()));
        self.record(kind, Some(&name), causes, text)
    }
}
