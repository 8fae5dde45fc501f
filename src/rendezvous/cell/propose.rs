//! The state that a node would write: its messages applied to the cell's state, as a coordinator applies them.

use std::time::Instant;

use super::blob::Blob;
use super::node::{CellNode, Liveness};
use super::proposal::{Decision, Proposal, outlives_its_connection};
use crate::rendezvous::decider::durable::MY_SESSION;
use crate::rendezvous::decider::event::{Effect, Event, Reach};
use crate::rendezvous::decider::run::Run;
use crate::rendezvous::protocol::capability::Capabilities;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeMessage};

/// The results of applying events to a run.
#[derive(Default)]
struct Outcome {
    notes: Vec<String>,
    replies: Vec<CoordinatorMessage>,
    /// The node is rejected, so nothing is written.
    refused: bool,
    /// The node must raise its counter.
    beats: bool,
}

impl Outcome {
    fn add(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Note(text) => self.notes.push(text),
                Effect::Send { session, message } if session == MY_SESSION => {
                    self.refused |=
                        matches!(message, CoordinatorMessage::Rejected { .. } | CoordinatorMessage::Ended { .. });
                    self.replies.push(message);
                }
                // Other nodes derive their messages from the state.
                Effect::Send { .. } | Effect::End { .. } | Effect::HostLeft { .. } => {}
            }
        }
    }
}

impl CellNode {
    /// Take this node's messages from the outbox, apply them to the cell's state, and decide.
    pub(super) fn decide(&mut self, now: Instant) -> Decision {
        let mut run = match &self.confirmed {
            Some(blob) => self.seen.run(blob, &self.hello, now),
            // The numbers of rounds that this node has seen must not be used again.
            None => Run::counting_on(&self.hello.run_id, self.hello.settings.clone(), self.view().round),
        };
        run.resume(self.standing);
        let mut outcome = Outcome::default();
        let messages = std::mem::take(&mut self.outbox);
        // A round that closes by now must not count on a join that this node has given up.
        let gives_up = |message: &_| outlives_its_connection(message) || matches!(message, NodeMessage::Hello(_));
        let given_up = messages.iter().rposition(gives_up).map_or(0, |last| last + 1);
        for message in &messages[..given_up] {
            self.apply_message(message.clone(), &mut run, &mut outcome, now);
        }
        self.apply_time(&mut run, &mut outcome, now);
        for message in &messages[given_up..] {
            self.apply_message(message.clone(), &mut run, &mut outcome, now);
        }
        let Outcome { notes, replies, refused, beats } = outcome;
        if refused {
            return Decision::Reply(replies);
        }
        // The node that writes a decision logs it. The others only remember it.
        self.standing = run.standing();
        self.note_progress(&run, now);

        let before = self.confirmed.as_ref();
        if before.is_none() && run.is_empty() && run.closed().is_none() {
            return Decision::Reply(replies);
        }
        let mut blob = Blob::of(&run, before, &self.seen.pace(now), now);
        let changed = before.is_none_or(|before| !blob.says_the_same(before));
        let beats = beats && self.liveness == Liveness::Counters && run.closed().is_none();
        let shown = (beats || changed) && blob.beat(self.hello.node);
        match changed || shown {
            true => Decision::Write(Box::new(Proposal { blob, notes, replies, messages })),
            false => Decision::Reply(replies),
        }
    }

    /// When the next round closes, if no state changes.
    pub(super) fn close_at(&self, now: Instant) -> Option<Instant> {
        let mut run = self.seen.run(self.confirmed.as_ref()?, &self.hello, now);
        run.apply(Event::Tick, now);
        run.closes_at()
    }

    /// Apply one message of this node.
    fn apply_message(&self, message: NodeMessage, run: &mut Run, outcome: &mut Outcome, now: Instant) {
        let (node, session) = (self.hello.node, MY_SESSION);
        let known = run.knows(node);
        let hello = |hello: Box<Hello>| Event::Hello { hello, session, reach: Reach::Cell, home: None };
        match message {
            NodeMessage::Hello(own) if known => {
                outcome.beats = true;
                outcome.add(run.apply(hello(own), now));
            }
            // A node that is not in the state is added when it joins. Its Hello is only answered.
            NodeMessage::Hello(own) => {
                let addr = own.local_addr.clone().unwrap_or_default();
                outcome.replies.push(CoordinatorMessage::Welcome {
                    addr,
                    hosted: false,
                    capabilities: Capabilities::default(),
                });
                outcome.replies.extend(self.catch_up(run));
            }
            NodeMessage::Join(join) => {
                if !known && run.closed().is_none() {
                    let own = Box::new(Hello { joining: true, ..self.hello.clone() });
                    let mut effects = run.apply(hello(own), now);
                    let is_welcome = |effect: &Effect| {
                        matches!(effect, Effect::Send { message: CoordinatorMessage::Welcome { .. }, .. })
                    };
                    effects.retain(|effect| !is_welcome(effect));
                    outcome.add(effects);
                    if outcome.refused {
                        return;
                    }
                }
                outcome.add(run.apply(Event::Message { node, session, message: NodeMessage::Join(join) }, now));
            }
            NodeMessage::Withdraw if !known => {
                outcome.replies.push(CoordinatorMessage::Withdrawn { progress: run.progress(now) });
            }
            NodeMessage::Withdraw => {
                outcome.add(run.apply(Event::Message { node, session, message: NodeMessage::Withdraw }, now));
                if !run.was_placed(node) {
                    // A node that was not in the last world is removed from the state.
                    let message = NodeMessage::Leave { reason: "gave up waiting".to_owned(), signal: None };
                    outcome.add(run.apply(Event::Message { node, session, message }, now));
                }
            }
            NodeMessage::Leave { .. } if !known => {}
            NodeMessage::Heartbeat => {
                outcome.beats = true;
                outcome.add(run.apply(Event::Message { node, session, message: NodeMessage::Heartbeat }, now));
            }
            message => outcome.add(run.apply(Event::Message { node, session, message }, now)),
        }
    }

    /// Apply the end of leases and the passage of time, which may remove lost nodes and close the round.
    fn apply_time(&mut self, run: &mut Run, outcome: &mut Outcome, now: Instant) {
        if run.closed().is_some() {
            return;
        }
        if let Liveness::Leases(alive) = &self.liveness {
            let me = self.hello.node;
            let lost: Vec<_> = run.nodes().map(|(id, ..)| id).filter(|id| *id != me && !alive.contains(id)).collect();
            lost.into_iter().for_each(|node| outcome.add(run.apply(Event::LeaseEnded { node }, now)));
        }
        outcome.add(run.apply(Event::Tick, now));
        if self.liveness == Liveness::Counters {
            self.seen.keep_suspicions(run);
        }
    }

    /// Record the round's progress for this node, if it waits.
    fn note_progress(&mut self, run: &Run, now: Instant) {
        let spare = run.waits_as_spare(self.hello.node);
        if let Some(joining) = self.machine.joining.as_mut().filter(|joining| joining.withdrawn_at.is_none()) {
            joining.progress = Some(match self.pace.unkept() {
                0 | 1 => run.progress(now),
                times => format!("the backend keeps nothing: it was empty right after a write {times} times in a row"),
            });
            joining.be_spare(spare, now);
        }
    }
}
