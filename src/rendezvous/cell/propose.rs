//! What a node would make of the state that the cell holds. The decisions are the coordinator's, called in its order.

use std::collections::BTreeMap;
use std::time::Instant;

use super::blob::{Blob, introduced};
use super::node::{CasNode, Liveness};
use crate::rendezvous::coordinator::machine::Command;
use crate::rendezvous::decider::admission::disagreement;
use crate::rendezvous::decider::decide::decide;
use crate::rendezvous::decider::members::{close, expire, note, on_join, stand_down};
use crate::rendezvous::decider::state::{Node, Run, SessionId, Status};
use crate::rendezvous::node::view::JoinError;
use crate::rendezvous::protocol::message::{Hello, NodeId};

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
            Some(blob) => blob.run(self.hello.node, &self.seen, now),
            None if self.joining.is_some() || self.closing.is_some() => self.new_run(),
            None => return Ok(None),
        };
        if run.nodes.is_empty() && run.closed.is_none() {
            run.settings = self.hello.settings.clone();
        }
        if self.joining.is_some()
            && let Some(reason) = disagreement(&run, &self.hello.name, &self.hello.settings)
        {
            return Err(JoinError::Rejected(reason));
        }
        run.standing = self.standing;
        let mut out = Vec::new();
        self.wish(&mut run, now, &mut out);
        self.judge(&mut run, now, &mut out);
        decide(&mut run, now, &mut out);
        // Whoever writes it logs it; the others know then.
        self.standing = run.standing;
        self.note_progress(&run, now);

        let before = self.confirmed.as_ref();
        let mut blob = Blob::of(&run, before, &self.seen, now);
        let beats = matches!(self.liveness, Liveness::Counters) && now >= self.beat_at && run.closed.is_none();
        let changed = before.is_none_or(|before| !blob.says_the_same(before));
        if let Some(me) = blob.nodes.get_mut(&self.hello.node).filter(|_| beats || changed) {
            me.beat += 1;
        } else if !changed {
            return Ok(None);
        }
        let notes = out.into_iter().filter_map(|command| match command {
            Command::Note { text, .. } => Some(text),
            _ => None,
        });
        Ok(Some(Proposal { blob, notes: notes.collect() }))
    }

    /// When the next round closes, if nothing changes.
    pub(super) fn close_at(&self, now: Instant) -> Option<Instant> {
        let mut run = self.confirmed.as_ref()?.run(self.hello.node, &self.seen, now);
        decide(&mut run, now, &mut Vec::new());
        run.close_at
    }

    /// The cell is empty. Numbers of rounds that this node has seen are not given again.
    fn new_run(&self) -> Run {
        let mut run = Run::new(self.hello.run_id.clone(), self.hello.settings.clone());
        run.round = self.round();
        run
    }

    fn wish(&self, run: &mut Run, now: Instant, out: &mut Vec<Command>) {
        let me = self.hello.node;
        if let Some(verdict) = &self.closing {
            close(run, verdict.clone(), out);
        }
        if let Some(reason) = &self.leaving {
            go(run, me, &format!("left: {reason}"), out);
        } else if let Some(joining) = &self.joining {
            if joining.withdrawn_at.is_some() {
                go(run, me, "gave up waiting", out);
            } else if run.closed.is_none() && !waits_already(run, me, &joining.join) {
                if !run.knows(me) {
                    run.update(me, |_| Some(introduced(&Hello { placed: None, ..self.hello.clone() }, now)));
                }
                on_join(run, me, SessionId(0), joining.join.clone(), now, out);
            }
        } else if !self.runs() {
            // A join that nobody waits for any more.
            go(run, me, "gave up waiting", out);
        }
    }

    /// Give up those who are not heard of.
    fn judge(&mut self, run: &mut Run, now: Instant, out: &mut Vec<Command>) {
        if run.closed.is_some() {
            return;
        }
        match &self.liveness {
            Liveness::Counters => {
                expire(run, now, &mut BTreeMap::new(), out);
                self.seen.keep_suspicions(run);
            }
            Liveness::Leases(alive) => {
                let me = self.hello.node;
                let lost: Vec<_> = run.nodes.keys().filter(|id| **id != me && !alive.contains(id)).copied().collect();
                for id in lost {
                    go(run, id, "is lost: its lease ended", out);
                }
            }
        }
    }

    fn note_progress(&mut self, run: &Run, now: Instant) {
        let spare = run.nodes.get(&self.hello.node).is_some_and(|node| run.is_spare(node));
        if let Some(joining) = self.joining.as_mut().filter(|joining| joining.withdrawn_at.is_none()) {
            joining.progress = Some(match self.unkept {
                0 | 1 => run.progress(now),
                times => format!("the backend keeps nothing: {times} times in a row it was empty right after a write"),
            });
            joining.be_spare(spare, now);
        }
    }
}

/// A node is no longer of the run.
fn go(run: &mut Run, id: NodeId, what: &str, out: &mut Vec<Command>) {
    let Some(node) = run.nodes.get(&id) else { return };
    let text = format!("{} {what}", node.label());
    note(run, text, out);
    stand_down(run, id, what, out);
    run.update(id, |_| None);
}

fn waits_already(run: &Run, id: NodeId, wanted: &crate::rendezvous::protocol::message::Join) -> bool {
    let node: Option<&Node> = run.nodes.get(&id);
    node.is_some_and(|node| match (&node.status, node.placed) {
        (Status::Waiting { join, .. }, _) => join == wanted,
        // Placed meanwhile: what the cell holds says so, and was taken in before.
        (Status::Active, Some((round, _))) => round > wanted.round,
        _ => false,
    })
}
