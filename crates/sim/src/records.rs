//! Checks what the nodes over shared state have recorded: each node numbers its events without gaps, and causes explain, across nodes too.

use std::collections::{BTreeMap, BTreeSet};

use super::coordinator::ledger::chronicle::explains;
use super::worlds::{Violation, ensure_contract as ensure};
use elastic_rs::events::journal::{Entry, id};
use elastic_rs::events::record::{Kind, Number};
use elastic_rs::rendezvous::cell::node::CellNode;

/// The events of all nodes, by id.
#[derive(Debug, Default)]
pub(super) struct Records {
    entries: BTreeMap<String, Entry>,
    /// Number of the last event of each node.
    last: BTreeMap<String, u64>,
}

impl Records {
    /// Take what a node has recorded since the last call.
    ///
    /// # Errors
    /// A number is missing, or a cause is no earlier event.
    pub fn take(&mut self, node: &mut CellNode) -> Result<(), Violation> {
        let origin = node.machine().journal().origin().to_owned();
        let (entries, missed) = node.take_events();
        ensure(missed == 0, || format!("{missed} events of {origin} were dropped"))?;
        let last = self.last.entry(origin.clone()).or_default();
        for entry in entries {
            let Number(number) = entry.record.number;
            ensure(number == *last + 1, || format!("event {number} of {origin} follows event {last}"))?;
            *last = number;
            let own = format!("{origin}.");
            let earlier = |cause: &String| match cause.strip_prefix(&own) {
                Some(number) => number.parse::<u64>().is_ok_and(|number| number < *last),
                None => cause.starts_with('@'),
            };
            ensure(entry.causes.iter().all(earlier), || format!("{entry:?} has a cause that is no earlier event"))?;
            self.entries.insert(id(&origin, entry.record.number), entry);
        }
        Ok(())
    }

    /// Check that what broke rounds is explained, and that no event causes itself. `complete`: no node was lost with what it recorded, so
    /// every cause is there.
    ///
    /// # Errors
    /// An event that is not explained.
    pub fn check(&self, complete: bool) -> Result<(), Violation> {
        for (id, entry) in &self.entries {
            let causes: Vec<_> = entry.causes.iter().map(|cause| (cause, self.named(cause))).collect();
            let missing =
                causes.iter().find(|(cause, found)| found.is_empty() && (complete || !cause.starts_with('@')));
            ensure(missing.is_none(), || format!("{id} {entry:?}: its cause {missing:?} is not recorded"))?;
            let Kind::RoundBroken { why } = entry.record.kind else { continue };
            let (_, first) = causes
                .first()
                .ok_or_else(|| Violation::contract(format!("{id} {entry:?} names no cause, so it has no root")))?;
            let explained = first.iter().any(|(_, cause)| explains(&cause.record.kind, why));
            ensure(explained || first.is_empty(), || format!("{id} {entry:?} is not explained by {first:?}"))?;
        }
        self.check_acyclic()
    }

    /// Number of events that say that a round was broken.
    pub fn breaks(&self) -> usize {
        self.entries.values().filter(|entry| matches!(entry.record.kind, Kind::RoundBroken { .. })).count()
    }

    /// The events that a cause may name.
    fn named(&self, cause: &str) -> Vec<(&String, &Entry)> {
        if !cause.starts_with('@') {
            return self.entries.get_key_value(cause).into_iter().collect();
        }
        let is_it = |entry: &Entry| {
            let (round, record) = (entry.record.round, &entry.record);
            match &record.kind {
                Kind::RoundCompleted { .. } => cause == format!("@completed.{round}"),
                Kind::RoundBroken { .. } => cause == format!("@broken.{round}"),
                Kind::NodeJoined { .. } => record.node.as_ref().is_some_and(|node| cause == format!("@joined.{node}")),
                _ => false,
            }
        };
        self.entries.iter().filter(|(_, entry)| is_it(entry)).collect()
    }

    /// Every event that a cause may name counts, so this is stricter than what a reader concludes.
    fn check_acyclic(&self) -> Result<(), Violation> {
        let mut done: BTreeSet<&str> = BTreeSet::new();
        for start in self.entries.keys() {
            let (mut path, mut open) = (Vec::new(), BTreeSet::new());
            path.push((start.as_str(), false));
            while let Some((at, leaving)) = path.pop() {
                if leaving {
                    open.remove(at);
                    done.insert(at);
                    continue;
                }
                if done.contains(at) {
                    continue;
                }
                ensure(open.insert(at), || format!("event {at} causes itself"))?;
                path.push((at, true));
                // A node may ask for a place several times. Its last request before the event is meant.
                let causes = self.entries[at].causes.iter().filter(|cause| !cause.starts_with("@joined."));
                path.extend(causes.flat_map(|cause| self.named(cause)).map(|(cause, _)| (cause.as_str(), false)));
            }
        }
        Ok(())
    }
}
