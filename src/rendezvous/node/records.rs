//! What a node records of the rendezvous, in its own words: rounds, causes and its connection, as it has heard of them. Part of
//! [`super`].

use std::time::Instant;

use super::{NodeCommand, NodeMachine};
use crate::events::journal::{Entry, Journal};
use crate::events::record::{Ending, Kind, Number, Phase};
use crate::rendezvous::messages::message::{Failure, NodeMessage, Placement, Recalled, Verdict};

impl NodeMachine {
    /// The events that this node has recorded.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Record an event of this node.
    pub fn record(&mut self, kind: Kind, text: Option<String>, now: Instant) {
        self.journal.tick(now);
        let cause = match kind {
            Kind::WorkerStarted(_) => self.journal.completed(),
            Kind::WorkerEnded(_) => self.journal.broken().or(self.journal.signalled()),
            _ => None,
        };
        self.journal.record(kind, Some(&self.hello.name), cause, text);
    }

    /// This node's agent got a signal that ends it, for this reason in the words of its goodbye. Only the first one is recorded.
    pub fn record_signal(&mut self, signal: i32, reason: &str, now: Instant) {
        if self.journal.signalled().is_none() {
            let text = format!("{} leaves: {reason}", self.hello.name);
            self.record(Kind::HeardSignal { signal }, Some(text), now);
        }
    }

    /// Take the events that no file has taken yet, and the number of those that were dropped before one could.
    pub fn take_events(&mut self) -> (Vec<Entry>, u64) {
        self.journal.take()
    }

    pub(in crate::rendezvous) fn record_place(&mut self, placement: &Placement) {
        let Placement { round, rank, world_size, workers, restart, reason, .. } = placement;
        let cause = self.journal.broken();
        self.journal.begin_round(round.0, *restart);
        let workers = workers.map(|ranks| ranks.world_size);
        let kind = Kind::HeardCompleted { rank: *rank, nodes: *world_size, workers };
        // All members are told the same reason. By it, readers of several nodes' files know a round again.
        let text = format!("round {round} is complete: {reason}");
        self.journal.record(kind, Some(&self.hello.name), cause, Some(text));
    }

    /// The world must re-form. Only the first reason of a round is recorded.
    pub(in crate::rendezvous) fn record_broken(&mut self, reason: &str, failure: Option<&Failure>) {
        if self.journal.broken().is_some() {
            return;
        }
        let cause = failure.map(|failure| self.record_failure(failure));
        let text = format!("round {} is interrupted: {reason}", self.view.round);
        self.journal.record(Kind::HeardBroken { in_place: false }, Some(&self.hello.name), cause, Some(text));
    }

    /// The world changes in place.
    pub(super) fn record_change(&mut self, reason: &str) {
        if self.journal.broken().is_none() {
            let text = format!("round {} changes in place: {reason}", self.view.round);
            self.journal.record(Kind::HeardBroken { in_place: true }, Some(&self.hello.name), None, Some(text));
        }
    }

    fn record_failure(&mut self, failure: &Failure) -> Number {
        let kind = Kind::HeardExited(failure.exit(true, failure.counts));
        self.journal.record(kind, Some(name_in(&failure.node)), None, Some(failure.to_string()))
    }

    pub(in crate::rendezvous) fn record_closed(&mut self, verdict: &Verdict) {
        if self.journal.is_closed() {
            return;
        }
        let (how, cause) = match verdict {
            Verdict::Succeeded { .. } | Verdict::AllDone { .. } => (Ending::Succeeded, None),
            Verdict::Failed { failure, .. } => {
                let cause = failure.as_ref().map(|failure| self.record_failure(failure));
                (Ending::Failed, cause)
            }
            Verdict::Stopped { .. } => (Ending::Stopped, None),
        };
        self.journal.record(
            Kind::HeardClosed { verdict: how },
            Some(&self.hello.name),
            cause,
            Some(verdict.to_string()),
        );
    }

    pub(super) fn record_phase(&mut self, phase: Phase) {
        let cause = self.journal.completed();
        self.journal.record(Kind::Phase(phase), Some(&self.hello.name), cause, None);
    }

    pub(in crate::rendezvous) fn record_fenced(&mut self, reason: &str, now: Instant) {
        self.journal.tick(now);
        let text = Some(reason.to_owned());
        let cause = self.journal.record(Kind::NodeFenced {}, Some(&self.hello.name), None, text.clone());
        if self.journal.broken().is_none() {
            let kind = Kind::HeardBroken { in_place: false };
            self.journal.record(kind, Some(&self.hello.name), Some(cause), text);
        }
    }

    /// The connection is lost, or cannot be opened. Only the first time is recorded.
    pub(super) fn record_lost(&mut self, cause: &str, now: Instant) {
        self.journal.tick(now);
        if self.view.out_of_reach_since.is_none() {
            let text = format!("{} is out of reach: {cause}", self.counterpart.name());
            self.journal.record(Kind::LineLost {}, Some(&self.hello.name), None, Some(text));
        }
    }

    /// This node was welcomed.
    pub(in crate::rendezvous) fn record_found(&mut self) {
        let Some(since) = self.view.out_of_reach_since else { return };
        let away = self.journal.now().saturating_duration_since(since);
        let away_ms = u64::try_from(away.as_millis()).unwrap_or(u64::MAX);
        let text = format!("{} answers, after {:.1} s", self.counterpart.name(), away.as_secs_f64());
        self.journal.record(Kind::LineFound { away_ms }, Some(&self.hello.name), None, Some(text));
    }

    /// Tell a coordinator that was restarted what this node knows of the time before.
    pub(in crate::rendezvous) fn recall(&mut self) {
        let recalled = Recalled::of(self.journal.origin(), self.journal.recent(), self.journal.now());
        if !recalled.events.is_empty() {
            self.commands.push(NodeCommand::Send(NodeMessage::Recalled(Box::new(recalled))));
        }
    }
}

/// The node's name in a coordinator's label, which is `ADDRESS (NAME)`.
fn name_in(label: &str) -> &str {
    label.rsplit_once(" (").and_then(|(_, name)| name.strip_suffix(')')).unwrap_or(label)
}
