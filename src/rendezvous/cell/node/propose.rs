//! A node's decision on the cell's state: its messages applied to it, as a coordinator applies them. The result is a new state, or only
//! replies to the node's machine.

use std::time::Instant;

use super::{CellNode, Liveness};
use crate::events::journal::Reference;
use crate::events::record::Record;
use crate::rendezvous::cell::blob::Blob;
use crate::rendezvous::cell::wish::Numbered;
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, NodeMessage};
use crate::rendezvous::run::{Effect, Event, MY_SESSION, Reach, Run, SessionId, Standing, Status};

/// A state to be written.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub blob: Blob,
    /// Decisions, to be logged and recorded once the state is written.
    pub recorded: Recorded,
    /// Replies to this node's machine, once the state is written.
    pub replies: Vec<CoordinatorMessage>,
    /// This node's messages that the state contains.
    pub messages: Vec<Numbered>,
    /// The decision, by which the next one is logged if it is another.
    pub standing: Standing,
}

/// What a decision has recorded.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded {
    pub records: Vec<Record>,
    /// For people.
    pub warnings: Vec<String>,
    /// Events of other nodes that are causes. Theirs are the numbers before those of the records.
    pub references: Vec<Reference>,
}

/// A node's decision on its messages and the cell's state.
#[derive(Debug)]
pub(super) enum Decision {
    /// Write a new state.
    Write(Box<Proposal>),
    /// Write nothing. The node's machine gets these replies at once.
    Reply(Vec<CoordinatorMessage>),
}

impl Proposal {
    /// Drop the replies and messages of a connection that the machine has given up. It repeats those that still matter.
    pub fn drop_connection(&mut self) {
        self.replies.clear();
        self.messages.retain(|(_, message)| outlives_its_connection(message));
    }
}

/// Whether a message must be delivered even if the machine gives up its connection: it will not repeat a `Withdraw` or `Leave`.
pub(super) fn outlives_its_connection(message: &NodeMessage) -> bool {
    matches!(message, NodeMessage::Withdraw | NodeMessage::Leave { .. })
}

/// The results of applying events to a run.
#[derive(Default)]
pub(super) struct Outcome {
    records: Vec<Record>,
    warnings: Vec<String>,
    replies: Vec<CoordinatorMessage>,
    /// The node is rejected, so nothing is written.
    refused: bool,
    /// The node must raise its counter.
    beats: bool,
}

/// The node that a message is from.
#[derive(Clone, Copy)]
pub(super) struct Author<'a> {
    pub hello: &'a Hello,
    pub session: SessionId,
}

fn is_welcome(effect: &Effect) -> bool {
    matches!(effect, Effect::Send { message: CoordinatorMessage::Welcome { .. }, .. })
}

/// Whether the effects of a node's message reject the node.
fn is_refusal(effects: &[Effect], of: SessionId) -> bool {
    effects.iter().any(|effect| {
        let Effect::Send { session, message } = effect else { return false };
        *session == of && matches!(message, CoordinatorMessage::Rejected { .. } | CoordinatorMessage::Ended { .. })
    })
}

impl Outcome {
    fn add(&mut self, effects: Vec<Effect>) {
        self.refused |= is_refusal(&effects, MY_SESSION);
        for effect in effects {
            match effect {
                Effect::Record(record) => self.records.push(record),
                Effect::Warn(text) => self.warnings.push(text),
                Effect::Send { session, message } if session == MY_SESSION => self.replies.push(message),
                // Other nodes derive their messages from the state.
                Effect::Send { .. }
                | Effect::End { .. }
                | Effect::Tally(_)
                | Effect::HostLeft { .. }
                | Effect::Exclusions
                | Effect::EmptyStore => {}
            }
        }
    }
}

impl CellNode {
    /// Take this node's messages from the outbox, apply them to the cell's state, and decide. With etcd, also apply the messages in the
    /// other nodes' wishes.
    pub(super) fn decide(&mut self, now: Instant) -> Decision {
        let mut run = self.run_before(now);
        run.resume(self.standing);
        let mut outcome = Outcome::default();
        let messages = self.outbox.take();
        // A round that closes by now must not count on a join that this node has given up.
        let gives_up =
            |(_, message): &Numbered| outlives_its_connection(message) || matches!(message, NodeMessage::Hello(_));
        let given_up = messages.iter().rposition(gives_up).map_or(0, |last| last + 1);
        // Nor on a waiting node that is lost.
        self.lose_nodes(|status| *status != Status::Active, &mut run, &mut outcome, now);
        if run.closed().is_none() {
            outcome.add(run.apply(Event::TickWaiting, now));
        }
        let me = Author { hello: &self.hello, session: MY_SESSION };
        for (_, message) in &messages[..given_up] {
            self.apply_message(me, message.clone(), &mut run, &mut outcome, now);
        }
        let applied = self.apply_wishes(&mut run, &mut outcome, now);
        self.apply_time(&mut run, &mut outcome, now);
        let me = Author { hello: &self.hello, session: MY_SESSION };
        for (_, message) in &messages[given_up..] {
            self.apply_message(me, message.clone(), &mut run, &mut outcome, now);
        }
        let Outcome { records, warnings, replies, refused, beats } = outcome;
        if refused {
            return Decision::Reply(replies);
        }
        self.note_progress(&run, now);

        let before = self.confirmed.as_ref();
        let nothing_there = before.is_none() || self.begins_anew();
        if nothing_there && run.is_empty() && run.closed().is_none() {
            self.standing = run.standing();
            return Decision::Reply(replies);
        }
        let mut blob = Blob::of(&run, before, &self.seen.pace(now), now);
        blob.record_applied(applied, |_| false);
        let changed = before.is_none_or(|before| !blob.is_same_content(before));
        let beats = beats && self.liveness == Liveness::Counters && run.closed().is_none();
        let shown = (beats || changed) && blob.beat(self.hello.node);
        if !(changed || shown) {
            self.standing = run.standing();
            return Decision::Reply(replies);
        }
        if let Liveness::Leases(peers) = &self.liveness {
            let mine = messages.last().map(|(number, _)| (self.hello.node, *number));
            blob.record_applied(mine.into_iter().collect(), |node| !run.knows(node) && !peers.has(node));
        }
        let recorded = Recorded { records, warnings, references: run.references().to_vec() };
        Decision::Write(Box::new(Proposal { blob, recorded, replies, messages, standing: run.standing() }))
    }

    /// The run as the cell has it.
    fn run_before(&self, now: Instant) -> Run {
        let new = |round| Run::counting_on(&self.hello.run_id, self.hello.settings.clone(), round);
        // The numbers of rounds that this node has seen must not be used again.
        match &self.confirmed {
            Some(blob) if self.begins_anew() => new(blob.round().max(self.view().round)),
            Some(blob) => self.seen.run(blob, &self.hello, now),
            None => new(self.view().round),
        }
    }

    /// When the next round closes, if no state changes.
    pub(super) fn close_at(&self, now: Instant) -> Option<Instant> {
        let mut run = self.seen.run(self.confirmed.as_ref()?, &self.hello, now);
        run.apply(Event::Tick, now);
        run.closes_at()
    }

    /// Apply one message of a node.
    pub(super) fn apply_message(
        &self,
        author: Author<'_>,
        message: NodeMessage,
        run: &mut Run,
        outcome: &mut Outcome,
        now: Instant,
    ) {
        let (node, session) = (author.hello.node, author.session);
        let (known, mine) = (run.knows(node), session == MY_SESSION);
        let hello = |hello: Box<Hello>| Event::Hello { hello, session, reach: Reach::Cell, instance: None };
        match message {
            NodeMessage::Hello(own) if known => {
                outcome.beats |= mine;
                let mut effects = run.apply(hello(own), now);
                if self.is_greeted_early() {
                    effects.retain(|effect| !is_welcome(effect));
                }
                outcome.add(effects);
            }
            // A node that is not in the state is added when it joins. Its Hello is only answered.
            NodeMessage::Hello(_) if mine && !self.is_greeted_early() => {
                outcome.replies.push(self.welcome());
                outcome.replies.extend(self.catch_up(run, now));
            }
            NodeMessage::Hello(_) => {}
            NodeMessage::Join(join) => {
                if !known && run.closed().is_none() {
                    let own = Box::new(Hello { joining: true, ..author.hello.clone() });
                    let mut effects = run.apply(hello(own), now);
                    effects.retain(|effect| !is_welcome(effect));
                    let refused = is_refusal(&effects, session);
                    outcome.add(effects);
                    if refused {
                        return;
                    }
                }
                outcome.add(run.apply(Event::Message { node, session, message: NodeMessage::Join(join) }, now));
            }
            NodeMessage::Withdraw if !known => {
                if mine {
                    outcome.replies.push(CoordinatorMessage::Withdrawn { progress: run.progress(now) });
                }
            }
            NodeMessage::Withdraw => {
                outcome.add(run.apply(Event::Message { node, session, message: NodeMessage::Withdraw }, now));
                if !run.roster().was_placed(node) {
                    // A node that was not in the last world is removed from the state.
                    let message = NodeMessage::Leave { reason: "gave up waiting".to_owned(), signal: None };
                    outcome.add(run.apply(Event::Message { node, session, message }, now));
                }
            }
            NodeMessage::Leave { .. } if !known => {}
            NodeMessage::Heartbeat { .. } => {
                outcome.beats |= mine;
                outcome.add(run.apply(Event::Message { node, session, message }, now));
            }
            message => outcome.add(run.apply(Event::Message { node, session, message }, now)),
        }
    }

    /// The answer to a Hello. A node over a cell knows its own address.
    pub(super) fn welcome(&self) -> CoordinatorMessage {
        let addr = self.hello.local_addr.clone().unwrap_or_default();
        CoordinatorMessage::Welcome { addr, hosted: false, running: None, wants_replay: false }
    }

    /// Apply the end of leases and the passage of time, which may remove lost nodes and close the round.
    fn apply_time(&mut self, run: &mut Run, outcome: &mut Outcome, now: Instant) {
        if run.closed().is_some() {
            return;
        }
        self.lose_nodes(|_| true, run, outcome, now);
        outcome.add(run.apply(Event::Tick, now));
        if self.liveness == Liveness::Counters {
            self.seen.keep_suspicions(run);
        }
    }

    /// With etcd, apply the end of other nodes' leases: of those with such a status.
    fn lose_nodes(&self, such: impl Fn(&Status) -> bool, run: &mut Run, outcome: &mut Outcome, now: Instant) {
        let (Liveness::Leases(peers), None) = (&self.liveness, run.closed()) else { return };
        let lost = |id| id != self.hello.node && !peers.has(id);
        let nodes = run.nodes().filter(|(id, status, _)| lost(*id) && such(status)).map(|(id, ..)| id);
        let nodes: Vec<_> = nodes.collect();
        if !nodes.is_empty() {
            outcome.add(run.apply(Event::LeasesEnded { nodes }, now));
        }
    }

    /// Record the round's progress for this node, if it waits.
    fn note_progress(&mut self, run: &Run, now: Instant) {
        let (spare, unkept) = (run.waits_as_spare(self.hello.node), self.pace.unkept());
        let progress = || match unkept {
            0 | 1 => run.progress(now),
            times => format!("the backend keeps nothing: it was empty right after a write {times} times in a row"),
        };
        self.machine.on_progress(progress, spare, now);
    }
}
