//! A node over a shared cell. Pure: what the cell said and what time it is go in; reads, writes and answers come out.
//!
//! The caller performs one [`CasCommand`] at a time and reports how it ended: [`CasNode::on_state`] after a read,
//! [`CasNode::on_written`] or [`CasNode::on_conflict`] after a write, [`CasNode::on_failed`] after either. A write holds only if
//! the cell is still what it was when the node was last told of it. A failed write may yet have been done: the next read tells.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::blob::Blob;
use super::propose::Proposal;
use super::seen::Seen;
use crate::rendezvous::decider::standing::Standing;
use crate::rendezvous::node::pending::{Joining, Store, back_off};
use crate::rendezvous::node::view::{JoinError, View};
use crate::rendezvous::protocol::message::{Hello, Join, NodeId, Placement, Round, Verdict};
use crate::rendezvous::protocol::text::{tidy, tidy_verdict};

/// What the caller is to do with the cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CasCommand {
    /// Read the cell.
    Read,
    /// Write this, if the cell is still what the node was last told (or empty, if it was that).
    Write(Vec<u8>),
}

/// How a node knows that the others live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Their counters in the cell are seen to change; the cell is polled.
    Counters,
    /// Each holds a lease at the cell's keeper: these do. Changes are told to the node ([`CasNode::on_state`]) as they come.
    Leases(BTreeSet<NodeId>),
}

/// How often a node looks while a round forms: first, and at the longest.
const LOOK_FIRST: Duration = Duration::from_millis(150);
/// How often a node looks while it runs, or is a spare. PyTorch's nodes look as often.
const LOOK_LAST: Duration = Duration::from_secs(1);

/// One node's part in a run.
#[derive(Clone, Debug)]
pub struct CasNode {
    pub(super) hello: Hello,
    pub(super) liveness: Liveness,
    pub(super) seen: Seen,
    /// What the cell holds, as last told.
    pub(super) confirmed: Option<Blob>,
    pub(super) joining: Option<Joining>,
    pub(super) leaving: Option<String>,
    pub(super) closing: Option<Verdict>,
    pub(super) view: View,
    /// What was decided last, by whomever.
    pub(super) standing: Standing,
    /// The node is due to show that it lives.
    pub(super) beat_at: Instant,
    pending: Option<Proposal>,
    pub(super) busy: bool,
    pub(super) read_at: Option<Instant>,
    /// When the cell was last told, and when this node last showed that it lives.
    pub(super) looked_at: Option<Instant>,
    pub(super) shown_at: Option<Instant>,
    /// When the write that is under way was handed out.
    written_at: Instant,
    pub(super) quiet_looks: u32,
    conflicts: u32,
    /// How often in a row the cell was empty right after a write to it.
    pub(super) unkept: u32,
    pub(super) tries: u32,
    pub(super) failing_since: Option<Instant>,
    pub(super) last_error: String,
    pub(super) left: bool,
    dice: u64,
    outcome: Option<Result<Placement, JoinError>>,
    command: Option<CasCommand>,
    notes: Vec<String>,
}

impl CasNode {
    /// A node that introduces itself with `hello`, which has its address. Does nothing until it is asked for something.
    pub fn new(hello: Hello, liveness: Liveness, now: Instant) -> Self {
        let dice = hello.node.0 as u64 | 1;
        Self {
            hello,
            liveness,
            seen: Seen::default(),
            confirmed: None,
            joining: None,
            leaving: None,
            closing: None,
            view: View::default(),
            standing: Standing::default(),
            beat_at: now,
            pending: None,
            busy: false,
            read_at: None,
            looked_at: None,
            shown_at: None,
            written_at: now,
            quiet_looks: 0,
            conflicts: 0,
            unkept: 0,
            tries: 0,
            failing_since: None,
            last_error: String::new(),
            left: false,
            dice,
            outcome: None,
            command: None,
            notes: Vec::new(),
        }
    }

    /// Ask for a place in the next round, giving up at `now + timeout`. The answer comes through [`CasNode::take_outcome`].
    pub fn join(&mut self, store_port: u16, node_rank: Option<u32>, timeout: Duration, now: Instant) {
        self.outcome = None;
        let refusal = match (&self.view.failed, &self.view.closed) {
            _ if self.leaving.is_some() => Some(JoinError::Connection("this node has left the rendezvous".to_owned())),
            (Some(error), _) => Some(error.clone()),
            (None, Some(verdict)) => Some(JoinError::Closed { verdict: verdict.clone(), spare: false }),
            (None, None) => None,
        };
        if let Some(error) = refusal {
            self.outcome = Some(Err(error));
            return;
        }
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
        self.view.waiting = 0;
        let join = Join { round: self.view.round, store_port, node_rank, workers: None };
        let deadline = now + timeout;
        self.joining = Some(Joining::new(join, Store::Open, now, deadline));
        self.quiet_looks = 0;
        // Each join gives the backend the same time to work again.
        self.failing_since = None;
        self.look(now);
    }

    /// Nobody waits for the pending join any more (Ctrl-C).
    pub fn abandon(&mut self, now: Instant) {
        let outcome = self.outcome.take();
        if let Some(joining) = &mut self.joining {
            joining.withdrawn_at.get_or_insert(now);
        } else if !matches!(outcome, Some(Ok(_))) {
            return;
        }
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
        self.look(now);
    }

    /// End the job for everybody. [`View::closed`] is set once that is written.
    pub fn close(&mut self, verdict: &Verdict, now: Instant) {
        if self.view.closed.is_none() {
            self.closing.get_or_insert_with(|| tidy_verdict(verdict));
            self.look(now);
        }
    }

    /// Go, for good. Done once [`CasNode::has_left`].
    pub fn leave(&mut self, reason: &str, now: Instant) {
        self.leaving.get_or_insert_with(|| tidy(reason));
        self.resolve(Err(JoinError::Connection("this node has left the rendezvous".to_owned())));
        let never_came = self.looked_at.is_none() && !self.busy && self.closing.is_none();
        self.left = self.left || never_came || self.view.failed.is_some();
        self.look(now);
    }

    /// Look at the cell as soon as no read or write is under way.
    pub fn look(&mut self, now: Instant) {
        self.read_at = Some(now);
    }

    /// Look at the cell now, unless it is looked at anyway, now or later.
    pub fn look_if_idle(&mut self, now: Instant) {
        self.read_at.get_or_insert(now);
    }

    /// The cell holds this, or nothing: the answer to a read, or told by a watch.
    pub fn on_state(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.conflicts = 0;
        self.be_told(bytes, now);
        self.go_on(now);
    }

    /// The write was done.
    pub fn on_written(&mut self, now: Instant) {
        (self.conflicts, self.unkept) = (0, 0);
        let Some(Proposal { blob, notes }) = self.pending.take() else {
            return;
        };
        self.notes.extend(notes);
        if self.liveness == Liveness::Counters && blob.knows(self.hello.node) {
            self.shown_at = Some(self.written_at);
            self.beat_at = self.written_at + self.hello.settings.keep_alive_interval;
        }
        self.accept(Some(blob), now);
        self.schedule(now);
    }

    /// The write was not done, since the cell holds something else: this.
    pub fn on_conflict(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.pending = None;
        self.unkept = if bytes.is_none() { self.unkept.saturating_add(1) } else { 0 };
        self.be_told(bytes, now);
        self.conflicts += 1;
        if self.conflicts == 1 && self.unkept == 0 {
            self.go_on(now);
        } else {
            let most = Duration::from_millis(10) * 2_u32.pow(self.conflicts.max(self.unkept).min(6));
            self.read_at = Some(now + most.mul_f64(self.draw()));
        }
    }

    /// The cell could not be read or written. A write may have been done all the same.
    pub fn on_failed(&mut self, error: String, now: Instant) {
        (self.busy, self.pending) = (false, None);
        self.last_error = error;
        self.failing_since.get_or_insert(now);
        self.view.out_of_reach_since = self.failing_since;
        self.read_at = Some(now + back_off(self.tries, self.hello.node.0 as u64));
        self.tries += 1;
    }

    /// The backend will never work: further calls are pointless.
    pub fn on_broken(&mut self, error: JoinError) {
        (self.busy, self.pending) = (false, None);
        self.fail(error);
    }

    /// With [`Liveness::Leases`]: whose leases hold. A change is acted on with the next state.
    pub fn on_leases(&mut self, alive: BTreeSet<NodeId>) {
        self.liveness = Liveness::Leases(alive);
    }

    /// With [`Liveness::Leases`]: the keeper has renewed this node's lease, asked to at `asked_at`.
    pub fn on_renewed(&mut self, asked_at: Instant) {
        self.shown_at = Some(asked_at);
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.give_up_join_if_due(now);
        self.fence(now);
        if self.busy || self.left || self.view.failed.is_some() {
            return;
        }
        if self.read_at.is_some_and(|at| at <= now) {
            self.read_at = None;
            self.busy = true;
            self.command = Some(CasCommand::Read);
        }
    }

    /// When to call [`CasNode::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.left {
            return None;
        }
        let read = self.read_at.filter(|_| !self.busy && self.view.failed.is_none());
        let join = self.joining.as_ref().and_then(Joining::next_deadline);
        let failing = self.failing_since.filter(|_| self.joining.is_some()).map(|at| at + self.hello.settings.lease());
        let fence = self.fenced_at().filter(|_| self.view.waiting == 0);
        [read, join, failing, fence].into_iter().flatten().min()
    }

    /// What to do with the cell now.
    pub fn take_command(&mut self) -> Option<CasCommand> {
        self.command.take()
    }

    /// What this node has decided for all, in words.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// How the last join ended, once it has; handed out once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.outcome.take()
    }

    /// Who this node is.
    pub fn id(&self) -> NodeId {
        self.hello.node
    }

    /// How things stand.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// When the cell was last told.
    pub fn looked_at(&self) -> Option<Instant> {
        self.looked_at
    }

    /// Why the backend does not work at the moment.
    pub fn failing(&self) -> Option<&str> {
        self.failing_since.map(|_| self.last_error.as_str())
    }

    /// Whether the goodbye is written, or none was needed.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// For a node that waits: since when.
    pub fn waits_since(&self) -> Option<Instant> {
        self.joining.as_ref().filter(|joining| joining.withdrawn_at.is_none()).map(|joining| joining.since)
    }

    /// For a node that waits: what for.
    pub fn progress(&self) -> Option<String> {
        self.joining.as_ref()?.progress.clone()
    }

    /// Decide on what the cell holds, and write if that changes anything.
    fn go_on(&mut self, now: Instant) {
        if self.busy || self.left || self.view.failed.is_some() {
            return;
        }
        match self.propose(now) {
            Err(error) => self.fail(error),
            Ok(Some(proposal)) => {
                (self.busy, self.written_at) = (true, now);
                self.command = Some(CasCommand::Write(proposal.blob.encode()));
                self.pending = Some(proposal);
            }
            Ok(None) => self.schedule(now),
        }
    }

    /// When to look next.
    fn schedule(&mut self, now: Instant) {
        let inside = self.confirmed.as_ref().is_some_and(|blob| blob.knows(self.hello.node));
        if !inside && self.leaving.is_some() {
            self.left = self.closing.is_none();
            return;
        }
        let due = self.joining.is_some() || self.closing.is_some() || (inside && self.view.closed.is_none());
        if !due && self.leaving.is_none() {
            self.read_at = None;
            return;
        }
        let forming = self.joining.as_ref().is_some_and(|joining| !joining.spare);
        let most = match forming {
            true => (LOOK_FIRST * 2_u32.pow(self.quiet_looks.min(10))).min(LOOK_LAST),
            false => LOOK_LAST,
        };
        let next = now + most.mul_f64(0.7 + 0.3 * self.draw());
        let mut next = next.min(self.beat_at.max(now));
        if let Some(at) = self.close_at(now) {
            // All nodes see the round's end come; a little spread lets the first one's write be read by the rest.
            next = next.min(at.max(now) + Duration::from_millis(30).mul_f64(self.draw()));
        }
        if matches!(self.liveness, Liveness::Leases(_)) {
            // Changes are told: only the time at which a round closes has to be waited for.
            self.read_at = self.close_at(now).map(|at| at.max(now)).or(self.closing.as_ref().map(|_| next));
        } else {
            self.read_at = Some(self.read_at.filter(|at| *at <= next).unwrap_or(next));
        }
    }

    /// Whether workers of the last round run here.
    pub(super) fn runs(&self) -> bool {
        self.joining.is_none() && self.hello.placed.is_some_and(|placed| placed.active)
    }

    /// End the pending join, if there is one.
    pub(super) fn resolve(&mut self, outcome: Result<Placement, JoinError>) {
        if self.joining.take().is_some() {
            self.outcome = Some(outcome);
        }
    }

    pub(super) fn fail(&mut self, error: JoinError) {
        self.view.failed.get_or_insert_with(|| error.clone());
        self.left = self.left || self.leaving.is_some();
        self.resolve(Err(error));
    }

    /// From 0 to 1. Spreads what nodes do at the same time; nothing depends on how random it is.
    fn draw(&mut self) -> f64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The last round this node knows of.
    pub(super) fn round(&self) -> Round {
        self.view.round
    }
}
