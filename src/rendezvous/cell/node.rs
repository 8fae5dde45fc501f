//! A node over a shared cell: a [`NodeMachine`] and the transport that applies its messages to the cell's state. Pure.
//!
//! The caller performs one [`CellCommand`] at a time and reports the result: [`CellNode::on_state`] after a read,
//! [`CellNode::on_written`] or [`CellNode::on_conflict`] after a write, [`CellNode::on_failed`] after either. A write succeeds only if
//! the cell still holds the state that was last reported. A write that failed may still have been done. The next read shows it.
//!
//! The machine's messages wait in an outbox until a written state contains them. A failing backend is a connection that has ended. When
//! it works again, the machine repeats the messages that still matter.

use std::time::{Duration, Instant};

use super::blob::Blob;
use super::pace::Pace;
use super::peers::Peers;
use super::seen::Seen;
use super::wish::Outbox;
use crate::events::journal::Entry;
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, NodeId, NodeMessage, Placement};
use crate::rendezvous::messages::settings::{Rules, Settings};
use crate::rendezvous::node::{JoinError, NodeCommand, NodeMachine, View};
use crate::rendezvous::run::Standing;

mod by_wishes;
mod farewell;
mod propose;
mod received;

use farewell::Stay;
use propose::{Decision, Proposal, Recorded, outlives_its_connection};

/// A command to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CellCommand {
    /// Read the cell.
    Read,
    /// Write this, if the cell still holds the state that was last reported, or is still empty.
    Write(Vec<u8>),
}

/// How a node learns which other nodes are alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// By changes of their counters in the cell, which is polled.
    Counters,
    /// By their leases at etcd: the nodes with a key. Changes are pushed ([`CellNode::on_state`], [`CellNode::on_wishes`]).
    Leases(Peers),
}

/// The state of the backend, in place of a connection to a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// The backend has failed, or was not called yet.
    Down,
    /// The machine connects: the next read shows whether the backend works.
    Opening,
    /// The backend works.
    Up,
}

/// A node over a shared cell.
#[derive(Clone, Debug)]
pub struct CellNode {
    pub(super) machine: NodeMachine,
    hello: Hello,
    liveness: Liveness,
    seen: Seen,
    /// The last reported state of the cell.
    confirmed: Option<Blob>,
    line: Line,
    /// The machine's messages that no written state contains yet.
    outbox: Outbox,
    /// The last decision, by any node.
    standing: Standing,
    pace: Pace,
    /// The state that is being written.
    pending: Option<Proposal>,
    /// A write that has failed and may have been done: the next read shows it.
    unsure: Option<(Blob, Recorded)>,
    /// A read or write is under way.
    busy: bool,
    /// The number of the last message in the value of this node's key. 0: not known.
    wished: u64,
    /// The key is to be put.
    wishes: bool,
    /// When this node proposes a state in place of those before it, if no state comes.
    propose_at: Option<Instant>,
    /// This node has had a request. Before the first one the backend is not called.
    awake: bool,
    /// When to read next.
    read_at: Option<Instant>,
    /// When the cell's state was last reported.
    looked_at: Option<Instant>,
    /// The backend's error, if it has failed since.
    failing: Option<String>,
    /// When the current write was handed out.
    written_at: Instant,
    command: Option<CellCommand>,
    /// This node's stay for the others, once it has left the state.
    stay: Stay,
    notes: Vec<String>,
    warnings: Vec<String>,
}

/// The part of a Hello that counts over a cell: no coordinator counts workers, judges hosts, or sends the members' addresses.
fn stored(hello: Hello) -> Hello {
    Hello { settings: Settings { rules: Rules::default(), ..hello.settings }, interfaces: None, ..hello }
}

impl CellNode {
    /// Create a node. `hello` must have its address. `serves`: the end of this process may end the cell, so the node stays for the others
    /// at the job's end. The backend is not called before the first request.
    pub fn new(hello: Hello, serves: bool, now: Instant) -> Self {
        let hello = stored(hello);
        let stay = if serves { Stay::Before } else { Stay::Over };
        Self { stay, ..Self::with(NodeMachine::over_cell(hello.clone(), now), hello, Liveness::Counters, now) }
    }

    /// Create a node over etcd, which messages call `name`. A node that etcd has answered once goes on without it for `timeout`.
    pub fn over_etcd(hello: Hello, name: String, timeout: Duration, now: Instant) -> Self {
        let hello = stored(hello);
        let machine = NodeMachine::over_etcd(hello.clone(), name, timeout, now);
        Self::with(machine, hello, Liveness::Leases(Peers::default()), now)
    }

    fn with(machine: NodeMachine, hello: Hello, liveness: Liveness, now: Instant) -> Self {
        let pace = Pace::new(hello.node.0 as u64);
        Self {
            machine,
            hello,
            liveness,
            seen: Seen::default(),
            confirmed: None,
            line: Line::Down,
            outbox: Outbox::default(),
            standing: Standing::default(),
            pace,
            pending: None,
            unsure: None,
            busy: false,
            wished: 0,
            wishes: false,
            propose_at: None,
            awake: false,
            read_at: None,
            looked_at: None,
            failing: None,
            written_at: now,
            command: None,
            stay: Stay::Over,
            notes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// The node's state machine.
    pub fn machine(&self) -> &NodeMachine {
        &self.machine
    }

    /// Make a request to the machine. Call [`CellNode::on_tick`] afterwards.
    pub fn ask<T>(&mut self, question: impl FnOnce(&mut NodeMachine) -> T, now: Instant) -> T {
        let answer = question(&mut self.machine);
        self.on_request(now);
        answer
    }

    /// A request was made to the machine: the cell is read soon, and often.
    pub fn on_request(&mut self, now: Instant) {
        self.pace.asked();
        self.awake = true;
        // Over etcd, a state that is known is up to date.
        if self.liveness == Liveness::Counters || self.line != Line::Up {
            self.read_at = Some(now);
        }
    }

    /// Read the cell as soon as no read or write is under way.
    pub fn look(&mut self, now: Instant) {
        self.awake = true;
        self.read_at = Some(now);
    }

    /// Read the cell now, unless a read is scheduled or the backend is not in use yet.
    pub fn look_if_idle(&mut self, now: Instant) {
        if self.awake {
            self.read_at.get_or_insert(now);
        }
    }

    /// The cell's content, as a read or a watch reports it. `None`: it is empty.
    pub fn on_state(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.pace.read();
        self.receive(bytes, now);
        self.pump(now);
        self.decide_and_write(now);
        self.pump(now);
    }

    /// The write has succeeded.
    pub fn on_written(&mut self, now: Instant) {
        self.pace.written();
        self.busy = false;
        let Some(Proposal { blob, recorded, mut replies, .. }) = self.pending.take() else { return };
        if let Some(verdict) = blob.closed().filter(|_| !blob.knows(self.hello.node)) {
            // The run answers its members alone, and this node has closed it without joining.
            replies.push(CoordinatorMessage::Closed { verdict: verdict.clone(), spare: false });
        }
        self.keep(recorded, now);
        if self.liveness == Liveness::Counters && blob.knows(self.hello.node) {
            self.machine.renew(self.written_at, now);
        }
        self.accept(Some(blob), now);
        self.deliver(replies, now);
        self.pump(now);
        self.schedule(now);
    }

    /// The write was not done, because the cell holds another state: this one.
    pub fn on_conflict(&mut self, bytes: Option<&[u8]>, now: Instant) {
        self.requeue();
        self.receive(bytes, now);
        self.pump(now);
        match self.pace.conflict(bytes.is_none()) {
            Some(wait) => self.read_at = Some(now + wait),
            None => {
                self.decide_and_write(now);
                self.pump(now);
            }
        }
    }

    /// A read or write has failed. A failed write may still have been done. `gone`: somebody has answered that nobody serves the cell, or
    /// has ended the connection to it. Silence is no answer.
    pub fn on_failed(&mut self, error: String, gone: bool, now: Instant) {
        self.machine.on_backend_failed(gone, now);
        // Reads may fail after it, too.
        self.unsure = self.requeue().or_else(|| self.unsure.take());
        (self.busy, self.read_at) = (false, None);
        self.forget_wish();
        self.failing = Some(error.clone());
        // A node that has left does not read again, so its goodbye is lost. Over etcd the next answer shows what became of it.
        let left = self.machine.has_left() && self.liveness == Liveness::Counters;
        self.outbox.retain(|message| !left && matches!(message, NodeMessage::Leave { .. }));
        match std::mem::replace(&mut self.line, Line::Down) {
            Line::Up => self.machine.on_disconnected(error, false, now),
            Line::Opening | Line::Down => self.machine.on_connect_failed(error, false, now),
        }
        self.pump(now);
    }

    /// The backend will never work. It is not called again.
    pub fn on_broken(&mut self, error: JoinError) {
        (self.busy, self.pending) = (false, None);
        self.machine.fail(error);
    }

    /// Time has passed, or a request was made.
    pub fn on_tick(&mut self, now: Instant) {
        self.pump(now);
        self.stay_for_others(now);
        if self.busy || self.is_over() {
            return;
        }
        let due = match self.liveness {
            Liveness::Counters => !self.outbox.is_empty() && !self.pace.is_contended(),
            Liveness::Leases(_) => self.outbox.highest() > self.wished || self.propose_at.is_some_and(|at| at <= now),
        };
        if due && self.line == Line::Up {
            self.decide_and_write(now);
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
        let propose = self.propose_at.filter(|_| self.can_write());
        [read, propose, self.stay.until(), self.machine.next_deadline()].into_iter().flatten().min()
    }

    /// Take the command to perform now.
    pub fn take_command(&mut self) -> Option<CellCommand> {
        self.command.take()
    }

    /// Take the decisions that this node has written, for the log.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Take the warnings of decisions that this node has written, for the log.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Take the events that this node has recorded, and the number of those that were dropped before they could be taken.
    pub fn take_events(&mut self) -> (Vec<Entry>, u64) {
        self.machine.take_events()
    }

    /// Log and record decisions that this node has written.
    fn keep(&mut self, Recorded { records, warnings, references }: Recorded, now: Instant) {
        self.warnings.extend(warnings);
        self.notes.extend(records.iter().filter_map(|record| record.text.clone()));
        self.machine.record_decisions(records, &references, now);
    }

    /// Take the outcome of the last join, once it has ended.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.machine.take_outcome()
    }

    /// This node's id.
    pub fn id(&self) -> NodeId {
        self.hello.node
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.machine.hello().settings
    }

    /// The node's current view of the rendezvous.
    pub fn view(&self) -> &View {
        self.machine.view()
    }

    /// Whether the backend works, as far as this node knows.
    pub fn is_up(&self) -> bool {
        self.line == Line::Up
    }

    /// When the cell's state was last reported.
    pub fn looked_at(&self) -> Option<Instant> {
        self.looked_at
    }

    /// The backend's error, if it fails at the moment.
    pub fn failing(&self) -> Option<&str> {
        self.failing.as_deref()
    }

    /// Whether a write may begin now.
    fn can_write(&self) -> bool {
        !self.busy && !self.is_over() && self.is_up()
    }

    /// Perform the machine's commands until there are none.
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
                    pending.drop_connection();
                }
            }
            NodeCommand::Send(message) => {
                match &message {
                    NodeMessage::Hello(hello) => self.hello = (**hello).clone(),
                    NodeMessage::Withdraw => self.outbox.retain(|sent| !matches!(sent, NodeMessage::Join(_))),
                    _ => {}
                }
                match self.liveness {
                    Liveness::Leases(_) => self.answer_early(&message, now),
                    Liveness::Counters => _ = self.read_at.get_or_insert(now),
                }
                // Over etcd no state contains a heartbeat.
                if !(self.is_greeted_early() && matches!(message, NodeMessage::Heartbeat { .. })) {
                    self.outbox.push(message);
                }
            }
            // There is no endpoint to probe.
            NodeCommand::Probe => {}
        }
    }

    /// Put the messages of a write that was not done, or may not have been done, back into the outbox. Returns what it would have
    /// written and recorded.
    fn requeue(&mut self) -> Option<(Blob, Recorded)> {
        let Proposal { blob, recorded, mut messages, .. } = self.pending.take()?;
        let withdrawn = self.outbox.has(|message| *message == NodeMessage::Withdraw);
        messages.retain(|(_, message)| !(withdrawn && matches!(message, NodeMessage::Join(_))));
        self.outbox.put_back(messages);
        Some((blob, recorded))
    }

    /// Deliver the replies to the machine, if the backend works.
    fn deliver(&mut self, replies: Vec<CoordinatorMessage>, now: Instant) {
        for reply in replies.into_iter().filter(|_| self.line == Line::Up) {
            self.machine.on_message(reply, now);
        }
    }

    /// Record the state that the cell is known to hold.
    fn accept(&mut self, blob: Option<Blob>, now: Instant) {
        let news = match (&self.confirmed, &blob) {
            (Some(before), Some(after)) => before.revision() != after.revision(),
            (before, after) => before.is_some() != after.is_some(),
        };
        self.pace.looked(news);
        if news {
            self.propose_at = None;
        }
        self.busy = false;
        (self.looked_at, self.failing) = (Some(now), None);
        if let Some((_, recorded)) = self.unsure.take().filter(|(written, _)| blob.as_ref() == Some(written)) {
            self.keep(recorded, now);
        }
        if let Some(blob) = &blob {
            self.seen.look(blob, now);
        }
        self.confirmed = blob;
        if std::mem::replace(&mut self.line, Line::Up) != Line::Up {
            self.machine.on_connected(now);
        }
    }

    /// Decide on the cell's state, and write the result if it differs.
    fn decide_and_write(&mut self, now: Instant) {
        // A node that has left only looks.
        if !self.can_write() || self.has_sent_farewell() {
            return;
        }
        match self.decide(now) {
            Decision::Write(proposal) if self.proposes(now) => {
                self.written_at = now;
                self.write(*proposal);
            }
            Decision::Write(proposal) => self.leave_to_proposer(*proposal, now),
            Decision::Reply(replies) => {
                self.deliver(replies, now);
                self.pump(now);
                // The replies may have caused new messages, which must be written.
                match self.outbox.is_empty() {
                    true => self.schedule(now),
                    false => self.decide_and_write(now),
                }
            }
        }
    }

    fn write(&mut self, proposal: Proposal) {
        self.busy = true;
        self.propose_at = None;
        self.standing = proposal.standing;
        self.command = Some(CellCommand::Write(proposal.blob.encode()));
        self.pending = Some(proposal);
    }

    /// Schedule the next read.
    fn schedule(&mut self, now: Instant) {
        let inside = self.confirmed.as_ref().is_some_and(|blob| blob.knows(self.hello.node));
        let joining = self.machine.pending_join();
        let due = joining.is_some() || (inside && self.view().closed.is_none());
        if !due && self.outbox.is_empty() {
            (self.read_at, self.propose_at) = (None, None);
            return;
        }
        let forming = joining.is_some_and(|joining| !joining.is_spare());
        let closes_at = self.close_at(now).map(|at| at.max(now));
        if let Liveness::Leases(_) = self.liveness {
            // Changes are pushed, so only the closing of a round needs a deadline.
            return self.propose_when_closing(closes_at);
        }
        let next = self.pace.next_look(forming, closes_at, now);
        self.read_at = Some(self.read_at.filter(|at| *at <= next).unwrap_or(next));
    }
}
