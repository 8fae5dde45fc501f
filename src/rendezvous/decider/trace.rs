//! What a run records, and the events that later ones name as their causes.

use std::collections::BTreeMap;
use std::fmt;

use super::event::Effect;
use super::run::Run;
use super::watched::Watch;
use crate::events::record::{CAUSES_LIMIT, Kind, Number, Record};
use crate::rendezvous::protocol::message::NodeId;

/// The events that may cause others.
#[derive(Clone, Default)]
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
}

/// No decision depends on it, so the explorer of small jobs must not tell states apart by it.
impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Trace")
    }
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
        self.recorded == 0
    }

    /// The last request for a place.
    pub fn joined(&self) -> Option<Number> {
        self.joined
    }
}

impl Run {
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

    /// Forget a node's request for a place.
    pub(super) fn forget_join(&mut self, id: NodeId) {
        self.trace.joins.remove(&id);
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
