//! A node's side of the rendezvous: its state machine, and a session around it.
//!
//! The machine joins, sends heartbeats, reconnects, and keeps a [`View`] of the rendezvous. It is pure, like
//! [`crate::rendezvous::coordinator::machine`]. The driver performs [`NodeCommand`]s and reports the results. Between rounds, a handler's
//! questions (`num_nodes_waiting`, closed or not) are answered from the view, which pushes keep current.
//!
//! The machine stands in three files: this one (the connection, time, and the fence), `requests` (what the agent asks for), and `messages`
//! (what the coordinator sends). They alone see several parts. A part keeps its state to itself, and returns what it wants:
//!
//! | file | part |
//! |---|---|
//! | `link` | the connection: attempts, heartbeats, what was answered |
//! | `join` | the pending join and its outcome |
//! | `report` | how the workers of a round ended, and the verdict of this node |
//! | [`fence`] | the lease: when a node that is cut off stops its workers |
//! | `in_place` | this node's part in changes in place |
//! | `records` | the events of this node |
//! | `backend` | a coordinator or a shared cell: what differs, and why it is out of reach, in words |
//! | `view` | the output for callers: the view, and the errors of a join |
//!
//! Around the machine: [`status_log`] (log lines for the operator), and with the feature `io` [`session`] with `shared` (for callers that
//! wait), and `connection` with `dial` (the driver of one connection to a coordinator).

use std::time::{Duration, Instant};

#[cfg(feature = "sim")]
use crate::rendezvous::decision_state::DecisionState;
use crate::rendezvous::messages::message::{Hello, NodeMessage, Placement, Round};
use crate::rendezvous::messages::settings::OnPartition;

mod backend;
#[cfg(feature = "io")]
mod connection;
#[cfg(feature = "io")]
pub(in crate::rendezvous) mod dial;
pub mod fence;
mod in_place;
mod join;
pub(in crate::rendezvous) mod link;
mod messages;
mod records;
mod report;
mod requests;
#[cfg(feature = "io")]
pub mod session;
#[cfg(feature = "io")]
pub(in crate::rendezvous) mod shared;
pub mod status_log;
mod view;

use backend::{Backend, why_away};
use fence::Lease;
use in_place::{ANSWER_WITHIN, InPlace};
use join::{GiveUp, Joins};
use link::Link;
use records::Records;
use report::{Reports, ends_alone_at};

pub use view::{JoinError, NodeCommand, View};

/// The state of one node.
#[derive(Clone, Debug)]
pub struct NodeMachine {
    /// The introduction, with which each connection begins.
    hello: Hello,
    backend: Backend,
    link: Link,
    lease: Lease,
    joins: Joins,
    reports: Reports,
    in_place: InPlace,
    records: Records,
    view: View,
    left: bool,
    commands: Vec<NodeCommand>,
}

const LEFT: &str = "this node has left the rendezvous";

impl NodeMachine {
    /// Create a node that connects to the coordinator at `endpoint`. Once welcomed, it fails if the coordinator is out of reach for
    /// `coordinator_timeout`.
    pub fn new(hello: Hello, endpoint: String, coordinator_timeout: Duration, now: Instant) -> Self {
        Self::among(hello, &[endpoint], coordinator_timeout, now)
    }

    /// Create a node whose coordinator is at one of these endpoints, which it finds. At least one.
    pub fn among(hello: Hello, endpoints: &[String], timeout: Duration, now: Instant) -> Self {
        let backend = Backend::Coordinator { endpoint: endpoints.join(","), timeout };
        let places = u32::try_from(endpoints.len()).unwrap_or(u32::MAX);
        let link = Link::among(places, hello.node.0 as u64, now);
        Self { link, ..Self::with(backend, hello, now) }
    }

    /// Create a node whose messages are applied to a shared cell.
    pub(in crate::rendezvous) fn over_cell(hello: Hello, now: Instant) -> Self {
        Self::with(Backend::Cell, hello, now)
    }

    /// Create a node whose messages are applied to the state in etcd, which messages call `name`.
    pub(in crate::rendezvous) fn over_etcd(hello: Hello, name: String, timeout: Duration, now: Instant) -> Self {
        Self::with(Backend::Etcd { name, timeout }, hello, now)
    }

    fn with(backend: Backend, hello: Hello, now: Instant) -> Self {
        Self {
            backend,
            link: Link::new(hello.node.0 as u64, now),
            lease: Lease::new(now),
            joins: Joins::default(),
            reports: Reports::default(),
            in_place: InPlace::default(),
            records: Records::new(hello.node, hello.name.clone(), now),
            view: View { out_of_reach_since: Some(now), ..View::default() },
            left: false,
            commands: Vec::new(),
            hello,
        }
    }

    // The connection.

    /// The connection is open.
    pub fn on_connected(&mut self, now: Instant) {
        self.records.tick(now);
        if self.is_out() {
            // The connection was opened for a node that has left since. It must not introduce itself again.
            self.commands.push(NodeCommand::Disconnect);
            return;
        }
        self.link.on_connected(self.hello.settings.keep_alive_interval, now);
        self.joins.on_connected();
        self.send(NodeMessage::Hello(Box::new(self.hello.clone())));
    }

    /// The connection could not be opened. `refused`: the host answered that no process listens.
    pub fn on_connect_failed(&mut self, error: String, refused: bool, now: Instant) {
        if refused && !self.link.has_list() {
            // No coordinator was running then.
            self.renew(self.link.attempt_at(), now);
        }
        self.link.on_lost(error, now);
        self.view.out_of_reach_since.get_or_insert(now);
    }

    /// The place in the list of the endpoint to connect to.
    pub fn place(&self) -> usize {
        self.link.place()
    }

    /// The connection could not be opened, because this process has no file descriptor left. A node that was never welcomed fails:
    /// it has no workers whose end could free descriptors. A member tries again.
    pub fn on_out_of_descriptors(&mut self, error: String, now: Instant) {
        if !self.was_welcomed() {
            let name = self.backend.name();
            let text = format!("cannot connect to {name}: {error}: allow this process more open files (`ulimit -n`)");
            self.fail(self.backend.unreachable(text, None));
        }
        self.on_connect_failed(error, false, now);
    }

    /// The connection ended. `foreign`: the peer sent bytes of another protocol.
    pub fn on_disconnected(&mut self, cause: String, foreign: bool, now: Instant) {
        if foreign {
            let at = self.backend.address();
            let text = format!("the server at {at} is not an elastic_rs coordinator: {cause}");
            self.fail(self.backend.unreachable(text, None));
        }
        if self.link.on_ended() {
            self.commands.push(NodeCommand::Probe);
        }
        self.lose(cause, now);
    }

    /// The result of a probe: whether the server at the endpoint speaks c10d.
    ///
    /// It counts only if the server has never welcomed this node. A coordinator answers both protocols, so a server that speaks c10d
    /// alone is PyTorch's store. Anything else may still become a coordinator, such as a proxy that waits for its backend.
    pub fn on_probed(&mut self, speaks_c10d: bool) {
        if speaks_c10d && !self.was_welcomed() {
            let text = format!(
                "the server at {} is a store of PyTorch's c10d backend, not an elastic_rs coordinator: \
                 use `--rdzv-backend=rust-c10d` on every node of the job, or another port",
                self.backend.address()
            );
            self.fail(self.backend.unreachable(text, None));
        }
    }

    /// The backend could not be reached. `gone`: somebody has answered that nobody serves it, or has ended the connection. Silence proves
    /// nothing: the others may go on.
    pub(in crate::rendezvous) fn on_backend_failed(&mut self, gone: bool, now: Instant) {
        self.link.on_backend_failed(gone, now);
    }

    fn send(&mut self, message: NodeMessage) {
        self.commands.push(NodeCommand::Send(message));
    }

    /// Send this if the backend has welcomed this node on the connection that is open.
    fn send_if_welcomed(&mut self, message: NodeMessage) {
        if self.link.is_welcomed() {
            self.send(message);
        }
    }

    // Time.

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.records.tick(now);
        if self.is_out() {
            return;
        }
        self.give_up_join_if_due(now);
        self.fence_if_due(now);
        if self.in_place.is_overdue(self.view.out_of_reach_since.is_some(), now) {
            let name = self.backend.name();
            self.break_off(format!("{name} did not complete a change of the world within {ANSWER_WITHIN:.1?}"));
        }
        if self.link.connect_if_due(now) {
            self.commands.push(NodeCommand::Connect);
        } else if self.link.is_up() {
            self.keep_alive(now);
        }
        if self.needed_until().is_some_and(|until| now >= until) {
            let (name, limit) = (self.backend.name(), self.backend.timeout().unwrap_or_default());
            let why = why_away(&self.link, self.view.stopped.as_deref());
            let text = format!("{name} has been out of reach for {limit:.1?} (coordinator_timeout): {why}");
            self.fail(self.backend.unreachable(text, Some(limit)));
        }
        self.end_alone_if_due(now);
    }

    /// Send a heartbeat if one is due, or end a connection on which none is answered.
    fn keep_alive(&mut self, now: Instant) {
        let (lease, interval) = (self.hello.settings.lease(), self.hello.settings.keep_alive_interval);
        let asks = self.link.is_welcomed() && self.joins.asks(now);
        let counts = self.has_coordinator();
        if self.link.is_silent(lease, now) {
            self.end_silent_link(now);
        } else if let Some(heartbeat) = self.link.heartbeat_if_due(interval, asks, counts, now) {
            self.send(heartbeat);
        }
    }

    /// Withdraw the pending join once its time is over, and end it if the withdrawal is not answered.
    fn give_up_join_if_due(&mut self, now: Instant) {
        if let Some((since, until)) = self.patience_with_cell().filter(|(_, until)| *until <= now) {
            let (name, error) = (self.backend.name(), self.link.last_error());
            let text = format!("{name} has failed for {:.1?}: {error}", until - since);
            return self.resolve(Err(self.backend.unreachable(text, Some(until - since))));
        }
        match self.joins.give_up_if_due(self.link.is_welcomed(), now) {
            None => {}
            Some(GiveUp::Withdraw) => {
                self.hello.joining = false;
                self.send(NodeMessage::Withdraw);
            }
            Some(GiveUp::Unreachable { after }) => {
                let why = why_away(&self.link, self.view.stopped.as_deref());
                let text = format!("could not reach {} in {after:.1?}: {why}", self.backend.name());
                self.resolve(Err(self.backend.unreachable(text, Some(after))));
                self.withdraw();
            }
            Some(GiveUp::Unanswered { after, progress }) => {
                let silence = format!("{} does not answer", self.backend.address());
                let progress = progress.unwrap_or_else(|| silence.clone());
                self.resolve(Err(JoinError::Timeout { after, progress, endpoint: self.backend.endpoint() }));
                if self.link.is_up() {
                    // A rank assignment may still arrive on this connection, and would look like the answer to the next join. So the
                    // connection ends.
                    self.commands.push(NodeCommand::Disconnect);
                    self.lose(silence, now);
                }
            }
        }
    }

    /// The instants between which a pending join over a cell waits for a failing backend.
    fn patience_with_cell(&self) -> Option<(Instant, Instant)> {
        let pending = self.joins.pending().filter(|_| self.backend == Backend::Cell)?;
        let since = self.view.out_of_reach_since?.max(pending.since());
        Some((since, since + self.hello.settings.lease()))
    }

    /// When this node fails unless the coordinator comes back, if the coordinator is out of reach.
    ///
    /// `None` for a closed rendezvous: its host may have ended with the job while workers of this node still finish.
    fn needed_until(&self) -> Option<Instant> {
        let needed = self.was_welcomed() && self.view.closed.is_none();
        Some(self.view.out_of_reach_since.filter(|_| needed)? + self.backend.timeout()?)
    }

    fn ends_alone_at(&self) -> Option<Instant> {
        let since = self.link.gone_since().filter(|_| self.backend == Backend::Cell && !self.is_out())?;
        let waits = self.reports.wait() && self.joins.pending().is_none();
        waits.then(|| ends_alone_at(since, self.fence_at()))
    }

    /// End without an answer to this node's report, if that is due.
    fn end_alone_if_due(&mut self, now: Instant) {
        let Some((since, at)) = self.link.gone_since().zip(self.ends_alone_at()) else { return };
        if at <= now {
            let (name, error, gone) =
                (self.backend.name(), self.link.last_error(), now.saturating_duration_since(since));
            let text = format!(
                "{name} has been gone for {gone:.1?}, perhaps with the node that held it, and how the other nodes ended cannot \
                 be known: {error}"
            );
            self.fail(self.backend.unreachable(text, Some(gone)));
        }
    }

    /// When to call [`NodeMachine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.is_out() {
            return None;
        }
        let pending = self.joins.pending();
        let link = self.link.next_deadline(self.hello.settings.lease());
        let join = pending.and_then(|pending| pending.next_deadline());
        let ask = pending.filter(|_| self.link.is_welcomed()).and_then(|pending| pending.ask_at());
        let patience = self.patience_with_cell().map(|(_, until)| until);
        let ends = [self.needed_until(), self.ends_alone_at(), self.fence_at()];
        [link, join, ask, patience, self.in_place.answer_by()].into_iter().chain(ends).flatten().min()
    }

    // The lease and the fence: see `fence`.

    /// When this node's lease ends, unless it is renewed before.
    pub(in crate::rendezvous) fn lease_ends_at(&self) -> Instant {
        self.lease.ends_at(self.hello.settings.lease())
    }

    /// When this node must stop its workers, unless its lease is renewed before. `None`: it runs none, or they may continue.
    fn fence_at(&self) -> Option<Instant> {
        let live = self.view.failed.is_none() && self.has_workers_of_a_world();
        (live && self.is_fenceable()).then(|| self.lease_ends_at())
    }

    /// When the guards of this node's workers kill them, whatever this process does. `None`: they have no deadline.
    ///
    /// It stays in the past from a fence until the next join, and is not renewed when the node has failed: the others may go on without it.
    pub fn workers_until(&self) -> Option<Instant> {
        let any = self.has_workers_of_a_world() || self.view.fenced.is_some();
        let leased = any && self.is_fenceable() && !self.lease.is_hosted();
        self.lease.guards_until(leased.then(|| self.lease_ends_at()), any)
    }

    /// Whether the end of this node's lease concerns its workers. Workers that have finished need not be stopped.
    fn is_fenceable(&self) -> bool {
        let over = self.left || self.view.closed.is_some() || self.reports.are_done();
        self.hello.settings.on_partition == OnPartition::Stop && !over
    }

    /// Whether workers of this node are in a world, or have been in one and wait for the next.
    fn has_workers_of_a_world(&self) -> bool {
        match self.joins.pending() {
            None => self.runs_workers(),
            Some(pending) => self.hello.placed.is_some() && pending.has_survivors(),
        }
    }

    /// Renew the lease from `sent_at`: a message sent then has arrived, or no coordinator was running then. A lease that is over is not
    /// renewed for the workers that ran until then: their guards have killed them.
    pub(in crate::rendezvous) fn renew(&mut self, sent_at: Instant, now: Instant) {
        self.fence_if_due(now);
        self.lease.renew(sent_at);
    }

    /// A message sent at `sent_at` was answered.
    fn renew_by_answer(&mut self, sent_at: Instant, now: Instant) {
        if self.backend.is_coordinator() {
            self.renew(sent_at, now);
        }
    }

    /// Stop the workers if the lease is over. Readers of the view call this too, because the driver's thread may have been stalled.
    pub fn fence_if_due(&mut self, now: Instant) {
        let Some(due) = self.fence_at().filter(|due| *due <= now) else { return };
        if let Some(since) = self.lease.ask_again(due, self.hello.settings.lease(), now) {
            return self.link.ask_again(since, now);
        }
        self.end_alone_if_due(now);
        if self.view.failed.is_none() {
            self.fence(now);
        }
    }

    /// Stop the workers, because their guards have killed them: the deadline has passed by another clock than this machine's, or
    /// before it was renewed.
    #[cfg(feature = "io")]
    fn fence_by_guards(&mut self, now: Instant) {
        if self.fence_at().is_some() {
            self.fence(now);
        }
    }

    fn fence(&mut self, now: Instant) {
        let silent = || self.backend.why_fenced(&self.link, self.hello.settings.lease(), self.lease.age(now));
        let reason = self.lease.why_gone(now).unwrap_or_else(silent);
        self.stop_running();
        self.reports.forget();
        self.end_change();
        self.records.tick(now);
        self.records.on_fenced(&reason);
        self.lease.on_fenced();
        self.interrupt(reason.clone());
        self.view.fenced = Some(reason.clone());
        if self.joins.lose_survivors(reason) {
            // A round may have formed that counts on them. The next Hello withdraws from it, which breaks it, before the join is repeated.
            self.hello.joining = false;
            if self.link.is_up() {
                // A rank assignment that counts on the survivors may be on its way. The next connection repeats the join, without them.
                self.end_silent_link(now);
            }
        }
    }

    // The state.

    /// Whether this node has left, or can no longer take part.
    fn is_out(&self) -> bool {
        self.left || self.has_failed()
    }

    /// Whether this node's workers run in a world, as far as it knows.
    fn runs_workers(&self) -> bool {
        self.hello.placed.is_some_and(|placed| placed.active)
    }

    /// The workers of the last round run no longer.
    fn stop_running(&mut self) {
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
    }

    /// Whether this node's workers are those of this round.
    fn is_member(&self, round: Round) -> bool {
        let over = self.is_out() || self.view.closed.is_some();
        let runs = self.hello.placed.is_some_and(|placed| placed.active && placed.round == round);
        runs && !over && self.joins.pending().is_none()
    }

    /// Whether a coordinator is connected, and this node's workers may survive a change.
    fn changes_in_place(&self) -> bool {
        self.hello.in_place && self.has_coordinator()
    }

    /// The world must re-form, for this reason.
    fn interrupt(&mut self, reason: String) {
        self.view.waiting = self.view.waiting.max(1);
        self.view.reason = reason;
    }

    /// The workers cannot stop together. They have to go back to their last commit.
    fn break_off(&mut self, reason: String) {
        self.end_change();
        self.interrupt(reason);
    }

    /// The current round is over for this node, or its workers cannot stop together any more.
    fn end_change(&mut self) {
        self.in_place.end();
        self.hello.attending = false;
        (self.view.change, self.view.raise_at) = (None, None);
    }

    /// This node can no longer take part.
    pub(in crate::rendezvous) fn fail(&mut self, error: JoinError) {
        if self.view.failed.is_none() {
            self.view.failed = Some(error.clone());
            self.commands.push(NodeCommand::Disconnect);
        }
        self.resolve(Err(error));
    }

    /// End the pending join, if there is one.
    fn resolve(&mut self, outcome: Result<Placement, JoinError>) {
        if self.joins.resolve(outcome) {
            self.hello.joining = false;
        }
    }
}

#[cfg(feature = "sim")]
impl DecisionState for NodeMachine {
    fn decision_state(&self, now: Instant) -> Self {
        let (link, lease) = (self.link.without_round_trips(), self.lease.without_report());
        let records = Records::new(self.hello.node, self.hello.name.clone(), now);
        Self { link, lease, records, ..self.clone() }
    }
}
