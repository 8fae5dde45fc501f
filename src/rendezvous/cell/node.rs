//! A node over a shared cell: a [`NodeMachine`] whose messages are not sent, but applied to what the cell holds. Pure.
//!
//! The caller performs one [`CellCommand`] at a time and reports how it ended: [`CellNode::on_state`] after a read,
//! [`CellNode::on_written`] or [`CellNode::on_conflict`] after a write, [`CellNode::on_failed`] after either. A write holds only if
//! the cell is still what it was when the node was last told of it. A failed write may yet have been done: the next read tells.
//!
//! What the machine says waits in an outbox until a write has taken it in. A backend that fails is a connection that has ended: the
//! machine says anew what still matters once the backend works.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::blob::Blob;
use super::propose::{Proposal, outlives_its_connection};
use super::seen::Seen;
use crate::rendezvous::decider::standing::Standing;
use crate::rendezvous::node::machine::{NodeCommand, NodeMachine};
use crate::rendezvous::node::view::{JoinError, View};
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, NodeMessage, Placement};

/// What the caller is to do with the cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CellCommand {
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
    /// Each holds a lease at the cell's keeper: these do. Changes are told to the node ([`CellNode::on_state`]) as they come.
    Leases(BTreeSet<NodeId>),
}

/// How often a node looks while a round forms: first, and at the longest.
const LOOK_FIRST: Duration = Duration::from_millis(150);
/// How often a node looks while it runs, or is a spare. PyTorch's nodes look as often.
const LOOK_LAST: Duration = Duration::from_secs(1);

/// What stands for the connection to a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// The backend has failed, or was not asked yet.
    Down,
    /// The machine wants to be connected: the next read tells whether the backend works.
    Opening,
    /// It does.
    Up,
}

/// One node's part in a run.
#[derive(Clone, Debug)]
pub struct CellNode {
    pub(super) machine: NodeMachine,
    pub(super) hello: Hello,
    pub(super) liveness: Liveness,
    pub(super) seen: Seen,
    /// What the cell holds, as last told.
    pub(super) confirmed: Option<Blob>,
    pub(super) line: Line,
    /// What the machine has said, and the cell has not taken in.
    pub(super) outbox: Vec<NodeMessage>,
    /// What was decided last, by whomever.
    pub(super) standing: Standing,
    /// How often in a row the cell was empty right after a write to it.
    pub(super) unkept: u32,
    pending: Option<Proposal>,
    /// A read or write is under way.
    busy: bool,
    /// Something was asked of this node: until then the backend is left alone.
    awake: bool,
    read_at: Option<Instant>,
    /// When the cell was last told.
    looked_at: Option<Instant>,
    /// Why the backend has failed since.
    failing: Option<String>,
    /// When the write that is under way was handed out.
    written_at: Instant,
    quiet_looks: u32,
    conflicts: u32,
    dice: u64,
    command: Option<CellCommand>,
    notes: Vec<String>,
}

impl CellNode {
    /// A node that introduces itself with `hello`, which has its address. Does nothing until it is asked for something.
    pub fn new(hello: Hello, liveness: Liveness, now: Instant) -> Self {
        let dice = hello.node.0 as u64 | 1;
        Self {
            machine: NodeMachine::over_cell(hello.clone(), now),
            hello,
            liveness,
            seen: Seen::default(),
            confirmed: None,
            line: Line::Down,
            outbox: Vec::new(),
            standing: Standing::default(),
            unkept: 0,
            pending: None,
            busy: false,
            awake: false,
            read_at: None,
            looked_at: None,
            failing: None,
            written_at: now,
            quiet_looks: 0,
            conflicts: 0,
            dice,
            command: None,
            notes: Vec::new(),
        }
    }

    /// The node itself.
    pub fn machine(&self) -> &NodeMachine {
        &self.machine
    }

    /// Ask the node for something. [`CellNode::on_tick`] follows.
    pub fn ask<T>(&mut self, question: impl FnOnce(&mut NodeMachine) -> T, now: Instant) -> T {
        self.quiet_looks = 0;
        let answer = question(&mut self.machine);
        self.look(now);
        answer
    }

    /// Look at the cell as soon as no read or write is under way.
    pub fn look(&mut self, now: Instant) {
        self.awake = true;
        self.read_at = Some(now);
    }

    /// Look at the cell now, unless it is looked at anyway, now or later.
    pub fn look_if_idle(&mut self, now: Instant) {
        if self.awake {
            self.read_at.get_or_insert(now);
        }
    }

    /// The cell holds this, or nothing: the answer to a read, or told by a watch.
    pub fn on_state(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.conflicts = 0;
        self.be_told(bytes, now);
        self.pump(now);
        self.go_on(now);
        self.pump(now);
    }

    /// The write was done.
    pub fn on_written(&mut self, now: Instant) {
        (self.conflicts, self.unkept, self.busy) = (0, 0, false);
        let Some(Proposal { blob, notes, replies, .. }) = self.pending.take() else { return };
        self.notes.extend(notes);
        if self.liveness == Liveness::Counters && blob.knows(self.hello.node) {
            self.machine.vouch(self.written_at);
        }
        self.accept(Some(blob), now);
        self.hand_over(replies, now);
        self.pump(now);
        self.schedule(now);
    }

    /// The write was not done, since the cell holds something else: this.
    pub fn on_conflict(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.say_again();
        self.unkept = if bytes.is_none() { self.unkept.saturating_add(1) } else { 0 };
        self.be_told(bytes, now);
        self.pump(now);
        self.conflicts += 1;
        if self.conflicts == 1 && self.unkept == 0 {
            self.go_on(now);
            self.pump(now);
        } else {
            let most = Duration::from_millis(10) * 2_u32.pow(self.conflicts.max(self.unkept).min(6));
            self.read_at = Some(now + most.mul_f64(self.draw()));
        }
    }

    /// The cell could not be read or written. A write may have been done all the same.
    pub fn on_failed(&mut self, error: String, now: Instant) {
        self.say_again();
        (self.busy, self.read_at) = (false, None);
        self.failing = Some(error.clone());
        self.outbox.retain(|message| matches!(message, NodeMessage::Leave { .. }));
        match std::mem::replace(&mut self.line, Line::Down) {
            Line::Up => self.machine.on_disconnected(error, false, now),
            Line::Opening | Line::Down => self.machine.on_connect_failed(error, false, now),
        }
        self.pump(now);
    }

    /// The backend will never work: further calls are pointless.
    pub fn on_broken(&mut self, error: JoinError) {
        (self.busy, self.pending) = (false, None);
        self.machine.fail(error);
    }

    /// With [`Liveness::Leases`]: whose leases hold. A change is acted on with the next state.
    pub fn on_leases(&mut self, alive: BTreeSet<NodeId>) {
        self.liveness = Liveness::Leases(alive);
    }

    /// With [`Liveness::Leases`]: the keeper has renewed this node's lease, asked to at `asked_at`.
    pub fn on_renewed(&mut self, asked_at: Instant) {
        self.machine.vouch(asked_at);
    }

    /// Time has passed, or something was asked.
    pub fn on_tick(&mut self, now: Instant) {
        self.pump(now);
        if self.busy || self.is_over() {
            return;
        }
        if !self.outbox.is_empty() && self.line == Line::Up && self.conflicts == 0 {
            self.go_on(now);
            self.pump(now);
        }
        if !self.busy && self.read_at.is_some_and(|at| at <= now) && self.line != Line::Down {
            self.read_at = None;
            self.busy = true;
            self.command = Some(CellCommand::Read);
        }
    }

    /// When to call [`CellNode::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.has_left() {
            return None;
        }
        let read = self.read_at.filter(|_| !self.busy && !self.is_over() && self.line != Line::Down);
        [read, self.machine.next_deadline()].into_iter().flatten().min()
    }

    /// What to do with the cell now.
    pub fn take_command(&mut self) -> Option<CellCommand> {
        self.command.take()
    }

    /// What this node has decided for all, in words.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// How the last join ended, once it has; handed out once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.machine.take_outcome()
    }

    /// Who this node is.
    pub fn id(&self) -> NodeId {
        self.hello.node
    }

    /// How things stand.
    pub fn view(&self) -> &View {
        self.machine.view()
    }

    /// When the cell was last told.
    pub fn looked_at(&self) -> Option<Instant> {
        self.looked_at
    }

    /// Why the backend does not work at the moment.
    pub fn failing(&self) -> Option<&str> {
        self.failing.as_deref()
    }

    /// Whether the goodbye is written, or none was needed.
    pub fn has_left(&self) -> bool {
        self.machine.has_left() && (self.machine.has_failed() || (!self.busy && self.outbox.is_empty()))
    }

    /// Nothing is read or written any more, but for a goodbye.
    fn is_over(&self) -> bool {
        self.has_left() || self.machine.has_failed()
    }

    /// Do what the machine wants until it wants nothing more.
    fn pump(&mut self, now: Instant) {
        loop {
            self.machine.on_tick(now);
            let commands = self.machine.take_commands();
            if commands.is_empty() {
                return;
            }
            commands.into_iter().for_each(|command| self.perform(command, now));
        }
    }

    fn perform(&mut self, command: NodeCommand, now: Instant) {
        match command {
            NodeCommand::Connect => {
                self.line = Line::Opening;
                if self.awake {
                    self.read_at = Some(now);
                }
            }
            NodeCommand::Disconnect => {
                self.line = Line::Down;
                self.outbox.retain(outlives_its_connection);
                if let Some(pending) = &mut self.pending {
                    pending.forget();
                }
            }
            NodeCommand::Send(message) => {
                match &message {
                    NodeMessage::Hello(hello) => self.hello = (**hello).clone(),
                    NodeMessage::Withdraw => self.outbox.retain(|said| !matches!(said, NodeMessage::Join(_))),
                    _ => {}
                }
                self.outbox.push(message);
                self.read_at.get_or_insert(now);
            }
            // What listens there is known: a backend.
            NodeCommand::Probe => {}
        }
    }

    /// A write was not done, or perhaps not: what it was to take in is said again.
    fn say_again(&mut self) {
        if let Some(pending) = self.pending.take() {
            let withdrawn = self.outbox.contains(&NodeMessage::Withdraw);
            let said = pending.taken_in.into_iter();
            let said = said.filter(|said| !(withdrawn && matches!(said, NodeMessage::Join(_))));
            self.outbox.splice(..0, said.collect::<Vec<_>>());
        }
    }

    /// The machine hears what was decided.
    pub(super) fn hand_over(&mut self, replies: Vec<CoordinatorMessage>, now: Instant) {
        for reply in replies.into_iter().filter(|_| self.line == Line::Up) {
            self.machine.on_message(reply, now);
        }
    }

    /// The cell holds this for certain.
    pub(super) fn accept(&mut self, blob: Option<Blob>, now: Instant) {
        let news = match (&self.confirmed, &blob) {
            (Some(before), Some(after)) => before.revision() != after.revision(),
            (before, after) => before.is_some() != after.is_some(),
        };
        self.quiet_looks = if news { 0 } else { self.quiet_looks.saturating_add(1) };
        self.busy = false;
        (self.looked_at, self.failing) = (Some(now), None);
        if let Some(blob) = &blob {
            self.seen.look(blob, now);
        }
        self.confirmed = blob;
        if std::mem::replace(&mut self.line, Line::Up) != Line::Up {
            self.machine.on_connected(now);
        }
    }

    /// Decide on what the cell holds, and write if that changes anything.
    fn go_on(&mut self, now: Instant) {
        if self.busy || self.is_over() || self.line != Line::Up {
            return;
        }
        let proposal = match self.propose(now) {
            Ok(Some(proposal)) => proposal,
            Ok(None) => return self.schedule(now),
            Err(replies) => {
                self.outbox.clear();
                self.hand_over(replies, now);
                self.pump(now);
                // What follows may have to be written in turn.
                return if self.outbox.is_empty() { self.schedule(now) } else { self.go_on(now) };
            }
        };
        (self.busy, self.written_at) = (true, now);
        self.command = Some(CellCommand::Write(proposal.blob.encode()));
        self.pending = Some(proposal);
    }

    /// When to look next.
    fn schedule(&mut self, now: Instant) {
        let inside = self.confirmed.as_ref().is_some_and(|blob| blob.knows(self.hello.node));
        let joining = self.machine.joining.as_ref();
        let due = joining.is_some() || (inside && self.view().closed.is_none());
        if !due && self.outbox.is_empty() {
            self.read_at = None;
            return;
        }
        let forming = joining.is_some_and(|joining| !joining.spare);
        let most = match forming {
            true => (LOOK_FIRST * 2_u32.pow(self.quiet_looks.min(10))).min(LOOK_LAST),
            false => LOOK_LAST,
        };
        let mut next = now + most.mul_f64(0.7 + 0.3 * self.draw());
        if let Some(at) = self.close_at(now) {
            // All nodes see the round's end come; a little spread lets the first one's write be read by the rest.
            next = next.min(at.max(now) + Duration::from_millis(30).mul_f64(self.draw()));
        }
        self.read_at = match self.liveness {
            // Changes are told: only the time at which a round closes has to be waited for.
            Liveness::Leases(_) => self.close_at(now).map(|at| at.max(now)),
            Liveness::Counters => Some(self.read_at.filter(|at| *at <= next).unwrap_or(next)),
        };
    }

    /// From 0 to 1. Spreads what nodes do at the same time; nothing depends on how random it is.
    fn draw(&mut self) -> f64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice >> 11) as f64 / (1_u64 << 53) as f64
    }
}
