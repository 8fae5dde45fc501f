//! What a node records of the rendezvous: rounds, causes and its connection, as it has learned of them. Part of [`super`].

use std::time::Instant;

use crate::events::journal::{Entry, Journal, Reference};
use crate::events::record::{Ending, Kind, Number, Phase, Record};
use crate::rendezvous::messages::message::{Failure, NodeId, NodeMessage, Placement, Replay, Round, Verdict};
use crate::wire::time::millis;

/// The events of one node.
#[derive(Clone, Debug)]
pub(super) struct Records {
    journal: Journal,
    /// The node's name.
    name: String,
}

impl Records {
    /// None yet.
    pub fn new(node: NodeId, name: String, now: Instant) -> Self {
        Self { journal: Journal::new(node.0, now), name }
    }

    /// The events.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// The time is at least this.
    pub fn tick(&mut self, now: Instant) {
        self.journal.tick(now);
    }

    /// Record an event of this node.
    pub fn add(&mut self, kind: Kind, text: Option<String>) {
        let cause = match kind {
            Kind::WorkerStarted(_) => self.journal.completed(),
            Kind::WorkerEnded(_) => self.journal.broken().or(self.journal.signalled()),
            Kind::Phase(_) => self.journal.completed(),
            _ => None,
        };
        self.record(kind, cause, text);
    }

    /// This node's agent got a signal that ends it, for this reason in the words of its goodbye. Only the first one is recorded.
    pub fn on_signal(&mut self, signal: i32, reason: &str) {
        if self.journal.signalled().is_none() {
            let text = format!("{} leaves: {reason}", self.name);
            self.record(Kind::ReceivedSignal { signal }, None, Some(text));
        }
    }

    /// Take the events that no file has taken yet, and the number of those that were dropped before one could.
    pub fn take(&mut self) -> (Vec<Entry>, u64) {
        self.journal.take()
    }

    /// Decisions that this node has written into a shared cell.
    pub fn on_decided(&mut self, records: Vec<Record>, references: &[Reference]) {
        self.journal.decided(records, references);
    }

    /// This node has its rank assignment.
    pub fn on_placed(&mut self, placement: &Placement) {
        let Placement { round, rank, world_size, workers, restart, reason, .. } = placement;
        let cause = self.journal.broken();
        self.journal.begin_round(round.0, *restart);
        let workers = workers.map(|ranks| ranks.world_size);
        let kind = Kind::ReceivedCompleted { rank: *rank, nodes: *world_size, workers };
        // All members receive the same reason. By it, readers of several nodes' files know a round again.
        self.record(kind, cause, Some(format!("round {round} is complete: {reason}")));
    }

    /// The world must re-form. Only the first reason of a round is recorded.
    pub fn on_broken(&mut self, round: Round, reason: &str, failure: Option<&Failure>) {
        if self.journal.broken().is_none() {
            let cause = failure.map(|failure| self.on_failure(failure));
            let text = format!("round {round} is interrupted: {reason}");
            self.record(Kind::ReceivedBroken { in_place: false }, cause, Some(text));
        }
    }

    /// The world changes in place.
    pub fn on_change(&mut self, round: Round, reason: &str) {
        if self.journal.broken().is_none() {
            let text = format!("round {round} changes in place: {reason}");
            self.record(Kind::ReceivedBroken { in_place: true }, None, Some(text));
        }
    }

    /// The job is over.
    pub fn on_closed(&mut self, verdict: &Verdict) {
        if self.journal.is_closed() {
            return;
        }
        let (how, cause) = match verdict {
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => (Ending::Succeeded, None),
            Verdict::Failed { failure, .. } => {
                let cause = failure.as_ref().map(|failure| self.on_failure(failure));
                (Ending::Failed, cause)
            }
            Verdict::Stopped { .. } => (Ending::Stopped, None),
        };
        self.record(Kind::ReceivedClosed { verdict: how }, cause, Some(verdict.to_string()));
    }

    /// A part of the recovery is over.
    pub fn on_phase(&mut self, phase: Phase) {
        self.add(Kind::Phase(phase), None);
    }

    /// This node stops its workers, because it was cut off.
    pub fn on_fenced(&mut self, reason: &str) {
        let text = Some(reason.to_owned());
        let cause = self.record(Kind::NodeFenced {}, None, text.clone());
        if self.journal.broken().is_none() {
            self.record(Kind::ReceivedBroken { in_place: false }, Some(cause), text);
        }
    }

    /// The connection is lost, or cannot be opened.
    pub fn on_lost(&mut self, backend: &str, cause: &str) {
        self.record(Kind::LineLost {}, None, Some(format!("{backend} is out of reach: {cause}")));
    }

    /// This node was welcomed after it was out of reach.
    pub fn on_found(&mut self, backend: &str, since: Instant) {
        let away = self.journal.now().saturating_duration_since(since);
        let text = format!("{backend} answers, after {:.1} s", away.as_secs_f64());
        self.record(Kind::LineFound { away_ms: millis(away) }, None, Some(text));
    }

    /// The last events, for a coordinator that was restarted. `None`: there are none.
    pub fn replay(&self) -> Option<NodeMessage> {
        let replay = Replay::of(self.journal.origin(), self.journal.recent(), self.journal.now());
        (!replay.events.is_empty()).then(|| NodeMessage::Replay(Box::new(replay)))
    }

    fn on_failure(&mut self, failure: &Failure) -> Number {
        let kind = Kind::ReceivedExited(failure.exit(true, failure.counts));
        self.journal.record(kind, Some(name_in(&failure.node)), None, Some(failure.to_string()))
    }

    fn record(&mut self, kind: Kind, cause: Option<Number>, text: Option<String>) -> Number {
        self.journal.record(kind, Some(&self.name), cause, text)
    }
}

/// The node's name in a coordinator's label, which is `ADDRESS (NAME)`.
fn name_in(label: &str) -> &str {
    label.rsplit_once(" (").and_then(|(_, name)| name.strip_suffix(')')).unwrap_or(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(now: Instant) -> Records {
        Records::new(NodeId(7), "b:2".into(), now)
    }

    /// Kind, subject and cause of each event. A cause is the number of an earlier one.
    fn taken(records: &mut Records) -> Vec<(Kind, String, Option<String>)> {
        let origin = records.journal().origin().to_owned();
        let of = |entry: Entry| {
            let cause =
                entry.causes.first().and_then(|id| id.strip_prefix(&origin)?.strip_prefix('.').map(str::to_owned));
            (entry.record.kind, entry.record.node.unwrap_or_default(), cause)
        };
        records.take().0.into_iter().map(of).collect()
    }

    #[test]
    fn only_the_first_reason_of_a_round_is_recorded_with_its_cause() {
        let mut records = records(Instant::now());
        let failure = Failure::example("10.0.0.1 (a:1)");
        records.on_broken(Round(1), "a worker failed", Some(&failure));
        records.on_broken(Round(1), "a node left", None);
        records.on_change(Round(1), "a node joins");
        records.on_fenced("cut off");
        let own = |kind, cause: Option<&str>| (kind, "b:2".to_owned(), cause.map(str::to_owned));
        let expected = vec![
            (Kind::ReceivedExited(failure.exit(true, true)), "a:1".to_owned(), None),
            own(Kind::ReceivedBroken { in_place: false }, Some("1")),
            own(Kind::NodeFenced {}, None),
        ];
        assert_eq!(taken(&mut records), expected);
    }

    #[test]
    fn the_first_signal_and_the_first_verdict_are_recorded() {
        let mut records = records(Instant::now());
        records.on_signal(15, "SIGTERM");
        records.on_signal(2, "SIGINT");
        let closed = Verdict::Stopped { by: "a:1".into(), cause: "Ctrl-C".into() };
        records.on_closed(&closed);
        records.on_closed(&closed);
        assert_eq!(taken(&mut records).len(), 2);
    }

    #[test]
    fn a_replay_holds_what_explains() {
        let mut records = records(Instant::now());
        assert_eq!(records.replay(), None);
        records.on_broken(Round(1), "a node left", None);
        assert!(matches!(records.replay(), Some(NodeMessage::Replay(replay)) if replay.events.len() == 1));
    }
}
