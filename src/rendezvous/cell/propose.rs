//! What a node would make of the state that the cell holds. The decisions are the coordinator's, called in its order.

use std::time::Instant;

use super::blob::Blob;
use super::node::{CasNode, Liveness};
use crate::rendezvous::decider::durable::CELL_SESSION;
use crate::rendezvous::decider::event::{Effect, Event, Reach};
use crate::rendezvous::decider::node::Status;
use crate::rendezvous::decider::run::Run;
use crate::rendezvous::node::view::JoinError;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, Join, NodeId, NodeMessage};

/// A state to be written.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub blob: Blob,
    /// What was decided, for the log once it is written.
    pub notes: Vec<String>,
}

impl CasNode {
    /// Apply this node's wishes to what the cell holds, and decide. `None` if nothing changes.
    ///
    /// # Errors
    /// [`JoinError::Rejected`]: this node asks for something else than those that are in.
    pub(super) fn propose(&mut self, now: Instant) -> Result<Option<Proposal>, JoinError> {
        let mut run = match &self.confirmed {
            Some(blob) => blob.run(&self.hello, &self.seen, now),
            None if self.joining.is_some() || self.closing.is_some() => self.new_run(),
            None => return Ok(None),
        };
        run.resume(self.standing);
        let mut effects = self.judge(&mut run, now);
        for event in self.wish(&run) {
            effects.extend(run.apply(event, now));
        }
        if let Some(reason) = effects.iter().find_map(refusal) {
            return Err(JoinError::Rejected(reason));
        }
        // Whoever writes it logs it; the others know then.
        self.standing = run.standing();
        self.note_progress(&run, now);

        let (before, me) = (self.confirmed.as_ref(), self.hello.node);
        let mut blob = Blob::of(&run, before, &self.seen, now);
        let beats = matches!(self.liveness, Liveness::Counters) && now >= self.beat_at && run.closed().is_none();
        let changed = before.is_none_or(|before| !blob.says_the_same(before));
        let told = (beats || changed) && blob.beat(me);
        if !told && !changed {
            return Ok(None);
        }
        let notes = effects.into_iter().filter_map(|effect| match effect {
            Effect::Note(text) => Some(text),
            _ => None,
        });
        Ok(Some(Proposal { blob, notes: notes.collect() }))
    }

    /// When the next round closes, if nothing changes.
    pub(super) fn close_at(&self, now: Instant) -> Option<Instant> {
        let mut run = self.confirmed.as_ref()?.run(&self.hello, &self.seen, now);
        run.apply(Event::Tick, now);
        run.closes_at()
    }

    /// The cell is empty. Numbers of rounds that this node has seen are not given again.
    fn new_run(&self) -> Run {
        Run::counting_on(&self.hello.run_id, self.hello.settings.clone(), self.round())
    }

    /// What this node has to say that the cell does not hold yet.
    fn wish(&self, run: &Run) -> Vec<Event> {
        let (me, session) = (self.hello.node, CELL_SESSION);
        let says = |message| Event::Message { node: me, session, message };
        let leaves = |reason: &str| says(NodeMessage::Leave { reason: reason.to_owned(), signal: None });
        let mut events: Vec<_> =
            self.closing.clone().map(|verdict| says(NodeMessage::Close(verdict))).into_iter().collect();
        let knows = run.knows(me);
        match (&self.leaving, &self.joining) {
            (Some(reason), _) => events.extend(knows.then(|| leaves(reason))),
            (None, Some(joining)) if joining.withdrawn_at.is_none() => {
                if run.closed().is_none() && self.closing.is_none() && !waits_already(run, me, &joining.join) {
                    if !knows {
                        let hello = Box::new(Hello { placed: None, ..self.hello.clone() });
                        events.push(Event::Hello { hello, session, reach: Reach::Cell, home: None });
                    }
                    events.push(says(NodeMessage::Join(joining.join.clone())));
                }
            }
            // A join that nobody waits for any more.
            (None, _) if !self.runs() => events.extend(knows.then(|| leaves("gave up waiting"))),
            (None, _) => {}
        }
        events
    }

    /// Give up the nodes that are not heard of, and decide.
    fn judge(&mut self, run: &mut Run, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        if run.closed().is_some() {
            return effects;
        }
        if let Liveness::Leases(alive) = &self.liveness {
            let me = self.hello.node;
            let lost: Vec<_> = run.nodes().map(|(id, ..)| id).filter(|id| *id != me && !alive.contains(id)).collect();
            lost.into_iter().for_each(|node| effects.extend(run.apply(Event::LeaseEnded { node }, now)));
        }
        effects.extend(run.apply(Event::Tick, now));
        if self.liveness == Liveness::Counters {
            self.seen.keep_suspicions(run);
        }
        effects
    }

    fn note_progress(&mut self, run: &Run, now: Instant) {
        let spare = run.waits_as_spare(self.hello.node);
        if let Some(joining) = self.joining.as_mut().filter(|joining| joining.withdrawn_at.is_none()) {
            joining.progress = Some(match self.unkept {
                0 | 1 => run.progress(now),
                times => format!("the backend keeps nothing: {times} times in a row it was empty right after a write"),
            });
            joining.be_spare(spare, now);
        }
    }
}

/// Why this node may not take part, if an effect says so.
fn refusal(effect: &Effect) -> Option<String> {
    match effect {
        Effect::Send {
            message: CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason },
            ..
        } => Some(reason.clone()),
        _ => None,
    }
}

fn waits_already(run: &Run, me: NodeId, wanted: &Join) -> bool {
    run.nodes().find(|(id, ..)| *id == me).is_some_and(|(_, status, placed)| match (status, placed) {
        (Status::Waiting { join, .. }, _) => join == wanted,
        // Placed meanwhile: what the cell holds says so, and was taken in before.
        (Status::Active, Some((round, _))) => round > wanted.round,
        _ => false,
    })
}
