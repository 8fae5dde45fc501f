//! A node's side of the rendezvous: its state machine, and a session around it.
//!
//! The machine joins, sends heartbeats, reconnects, and keeps a [`View`] of the rendezvous. It is pure, like
//! [`crate::rendezvous::coordinator::machine`]. The driver performs [`NodeCommand`]s and reports the results. Between rounds, a handler's
//! questions (`num_nodes_waiting`, closed or not) are answered from the view, which pushes keep current.
//!
//! | file | what |
//! |---|---|
//! | `messages`, `requests`, `report`, `in_place` | the machine's handling of messages, joins, reports, and changes in place (pure) |
//! | `backend`, `reasons` | the node's backend, a coordinator or a shared cell; why it is out of reach, in words |
//! | `join` | a pending join, an unanswered report, and the state of the connection |
//! | `members`, `records`, `tallies` | the members' addresses, the node's events, what the coordinator counts |
//! | `view` | the output for callers: the view, and the outcome of a join |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`status_log`] | log lines about a node for its operator |
//! | `session`, `shared` | a session's interface for callers that wait; what it shares with its driver (feature `io`) |
//! | `connection`, `dial` | the driver of one connection and its timers, and how a connection is opened (feature `io`) |

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::events::journal::Journal;
#[cfg(feature = "sim")]
use crate::rendezvous::decision_state::DecisionState;
use crate::rendezvous::messages::bounds::tidy_message;
use crate::rendezvous::messages::message::{
    CoordinatorMessage, Hello, NodeMessage, Placement, Round, Running, Survival, Verdict,
};

mod backend;
#[cfg(feature = "io")]
mod connection;
#[cfg(feature = "io")]
mod dial;
pub mod fence;
mod in_place;
pub(in crate::rendezvous) mod join;
mod members;
mod messages;
mod reasons;
mod records;
mod report;
mod requests;
#[cfg(feature = "io")]
pub mod session;
#[cfg(feature = "io")]
pub(in crate::rendezvous) mod shared;
pub mod status_log;
mod tallies;
mod view;

use backend::Counterpart;
use in_place::Part;
use join::{Joining, Link, Report, back_off};
use members::Members;
use tallies::Tallies;

pub use view::{Change, JoinError, NodeCommand, View};

/// The state of one node.
#[derive(Clone, Debug)]
pub struct NodeMachine {
    pub(in crate::rendezvous) hello: Hello,
    counterpart: Counterpart,
    pub(in crate::rendezvous) link: Link,
    /// When each unanswered heartbeat was sent.
    pub(in crate::rendezvous) beats: VecDeque<Instant>,
    /// What the coordinator counts.
    pub(in crate::rendezvous) tallies: Tallies,
    /// When the last attempt to connect began.
    pub(in crate::rendezvous) attempt_at: Instant,
    /// When the last message that is known to have arrived was sent. The node's lease counts from it: see [`fence`].
    pub(in crate::rendezvous) vouched_at: Instant,
    pub(in crate::rendezvous) ever_welcomed: bool,
    pub(in crate::rendezvous) tries: u32,
    /// Connections that were closed before a welcome, in a row.
    pub(in crate::rendezvous) unanswered: u32,
    pub(in crate::rendezvous) last_error: String,
    /// Since when the backend's answer has been that nobody serves it, if it is.
    pub(super) gone_since: Option<Instant>,
    pub(in crate::rendezvous) joining: Option<Joining>,
    outcome: Option<Result<Placement, JoinError>>,
    pub(in crate::rendezvous) report: Option<Report>,
    /// The verdict with which this node ends the job, until the rendezvous is closed.
    pub(super) closing: Option<Verdict>,
    pub(in crate::rendezvous) view: View,
    pub(in crate::rendezvous) left: bool,
    /// The world that ran when this node was welcomed, if its workers may be started before it joins.
    running: Option<Running>,
    /// From where the members of the next round connect, as far as it has been told.
    members: Members,
    /// The round whose workers were started last, and when.
    started: Option<(Round, Instant)>,
    /// The round whose workers have to end.
    pub(super) stopping: Option<Round>,
    /// What this node records.
    pub(in crate::rendezvous) journal: Journal,
    /// This node's part in changes in place.
    part: Part,
    /// The surviving workers of the next join.
    brings: Survival,
    /// The coordinator is in this process: see [`fence`].
    pub(in crate::rendezvous) hosted: bool,
    /// The survivors of the pending join, or of the last one, have ended, for this reason.
    pub(super) lost_survivors: Option<String>,
    /// The lease has ended, and the node asks once more before it stops its workers.
    pub(in crate::rendezvous) suspect: bool,
    /// A join was abandoned, and the coordinator has not confirmed the withdrawal.
    withdrawing: bool,
    pub(in crate::rendezvous) commands: Vec<NodeCommand>,
}

/// Number of connections that end without an answer, in a row, after which the node probes which protocol the server speaks.
const PROBE_EVERY: u32 = 3;
/// Longest time from the Hello to the first heartbeat. PyTorch's store does not react to a Hello alone; it closes the connection when
/// more bytes follow.
const NUDGE_AFTER: Duration = Duration::from_secs(1);
const LEFT: &str = "this node has left the rendezvous";

impl NodeMachine {
    /// Create a node that connects to the coordinator at `endpoint`. Once welcomed, it fails if the coordinator is out of reach for
    /// `coordinator_timeout`.
    pub fn new(hello: Hello, endpoint: String, coordinator_timeout: Duration, now: Instant) -> Self {
        Self::with(Counterpart::Coordinator { endpoint, timeout: coordinator_timeout }, hello, now)
    }

    /// Create a node whose messages are applied to a shared cell.
    pub(in crate::rendezvous) fn over_cell(hello: Hello, now: Instant) -> Self {
        Self::with(Counterpart::Cell, hello, now)
    }

    /// Create a node whose messages are applied to the state in etcd, which messages call `name`.
    pub(in crate::rendezvous) fn over_etcd(hello: Hello, name: String, timeout: Duration, now: Instant) -> Self {
        Self::with(Counterpart::Etcd { name, timeout }, hello, now)
    }

    fn with(counterpart: Counterpart, hello: Hello, now: Instant) -> Self {
        Self {
            journal: Journal::new(hello.node.0, now),
            hello,
            counterpart,
            link: Link::Down { retry_at: now },
            beats: VecDeque::new(),
            tallies: Tallies::default(),
            attempt_at: now,
            vouched_at: now,
            ever_welcomed: false,
            tries: 0,
            unanswered: 0,
            last_error: "no answer yet".to_owned(),
            gone_since: None,
            joining: None,
            outcome: None,
            report: None,
            closing: None,
            view: View { out_of_reach_since: Some(now), ..View::default() },
            left: false,
            running: None,
            started: None,
            stopping: None,
            members: Members::default(),
            part: Part::default(),
            brings: Survival::New,
            hosted: false,
            lost_survivors: None,
            suspect: false,
            withdrawing: false,
            commands: Vec::new(),
        }
    }

    /// The connection is open.
    pub fn on_connected(&mut self, now: Instant) {
        self.journal.tick(now);
        if self.left || self.view.failed.is_some() {
            // The connection was opened for a node that has left since. It must not introduce itself again.
            self.commands.push(NodeCommand::Disconnect);
            return;
        }
        self.gone_since = None;
        let beat_at = now + self.hello.settings.keep_alive_interval.min(NUDGE_AFTER);
        self.link = Link::Up { welcomed: false, answered_at: now, beat_at };
        self.last_error = "it accepts connections, but has not answered yet".to_owned();
        self.beats.clear();
        self.members = Members::default();
        self.commands.push(NodeCommand::Send(NodeMessage::Hello(Box::new(self.hello.clone()))));
    }

    /// The connection could not be opened. `refused`: the host answered that no process listens.
    pub fn on_connect_failed(&mut self, error: String, refused: bool, now: Instant) {
        if refused {
            self.vouch(self.attempt_at, now);
        }
        self.last_error = error;
        self.retry(now);
    }

    /// The connection could not be opened, because this process has no file descriptor left. A node that was never welcomed fails:
    /// it has no workers whose end could free descriptors. A member tries again.
    pub fn on_out_of_descriptors(&mut self, error: String, now: Instant) {
        if !self.ever_welcomed {
            let text = format!(
                "cannot connect to {}: {error}: allow this process more open files (`ulimit -n`)",
                self.counterpart.name()
            );
            self.fail(JoinError::Connection(text));
        }
        self.on_connect_failed(error, false, now);
    }

    /// The connection ended. `foreign`: the peer sent bytes of another protocol.
    pub fn on_disconnected(&mut self, cause: String, foreign: bool, now: Instant) {
        if foreign {
            let text = format!("the server at {} is not an elastic_rs coordinator: {cause}", self.counterpart.place());
            self.fail(JoinError::Connection(text));
        }
        if !self.ever_welcomed && matches!(self.link, Link::Up { welcomed: false, .. }) {
            self.unanswered += 1;
            if self.unanswered.is_multiple_of(PROBE_EVERY) {
                self.commands.push(NodeCommand::Probe);
            }
        }
        self.lose(cause, now);
    }

    /// The result of a probe: whether the server at the endpoint speaks c10d.
    ///
    /// It counts only if the server has never welcomed this node. A coordinator answers both protocols, so a server that speaks c10d
    /// alone is PyTorch's store. Anything else may still become a coordinator, such as a proxy that waits for its backend.
    pub fn on_probed(&mut self, speaks_c10d: bool) {
        if speaks_c10d && !self.ever_welcomed {
            let text = format!(
                "the server at {} is a store of PyTorch's c10d backend, not an elastic_rs coordinator: \
                 use `--rdzv-backend=rust-c10d` on every node of the job, or another port",
                self.counterpart.place()
            );
            self.fail(JoinError::Connection(text));
        }
    }

    /// A message of the coordinator has arrived.
    pub fn on_message(&mut self, message: CoordinatorMessage, now: Instant) {
        self.journal.tick(now);
        // A message that has waited for this process may count on workers whose lease is over by now.
        self.fence_if_due(now);
        if self.lost_survivors.is_some() && matches!(self.link, Link::Down { .. }) {
            return; // the fence has ended the connection
        }
        match tidy_message(message) {
            CoordinatorMessage::Rejected { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Ended { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Welcome { addr, hosted, running, recalls } => {
                self.running = running;
                self.on_welcome(addr, hosted, recalls, now);
            }
            CoordinatorMessage::Leaving { why, interrupts } => self.on_leaving(why, interrupts, now),
            CoordinatorMessage::Status { waiting, reason, restart, failure } => {
                self.on_status(waiting, reason, restart, failure);
            }
            CoordinatorMessage::Complete(placement) => self.on_complete(placement),
            CoordinatorMessage::Change { round, flags, reason } => self.on_change(round, flags, reason, now),
            CoordinatorMessage::RaiseAt { round, check } => self.on_raise_at(round, check),
            CoordinatorMessage::Members { round, addresses, more } => self.on_members(round, addresses, more),
            CoordinatorMessage::Observed(_) => {} // no node asks for it
            CoordinatorMessage::TellStep { round } => {
                if self.is_member(round) {
                    self.view.steps_asked += 1;
                }
            }
            CoordinatorMessage::Withdrawn { progress } => {
                self.withdrawing = false;
                if let Some(joining) = self.joining.as_ref().filter(|joining| joining.withdrawn_at.is_some()) {
                    let after = joining.deadline - joining.since;
                    self.resolve(Err(JoinError::Timeout { after, progress }));
                }
            }
            CoordinatorMessage::Closed { verdict, spare } => {
                self.on_closed(&verdict);
                self.resolve(Err(JoinError::Closed { verdict, spare }));
            }
            CoordinatorMessage::Over { verdict, ago } => {
                self.on_closed(&verdict);
                let (run_id, memory) = (self.hello.run_id.clone(), self.counterpart.memory());
                let over = JoinError::Over { run_id, verdict, ago, memory };
                self.view.over = Some(over.clone());
                self.resolve(Err(over));
            }
            CoordinatorMessage::Heartbeat { waits } => {
                self.on_answer(now);
                self.on_waits(waits, now);
            }
            CoordinatorMessage::Waits(waits) => self.on_waits(Some(waits), now),
            CoordinatorMessage::Terms { keep_alive_interval, keep_alive_max_attempt } => {
                self.on_terms(keep_alive_interval, keep_alive_max_attempt);
            }
            CoordinatorMessage::Stale { round, current } => {
                if self.report.as_ref().is_some_and(|report| report.round() == round) {
                    let reason = format!("round {round} is over; the current one is {current}");
                    self.on_status(1, reason, self.view.restart, None);
                }
            }
        }
        self.tell_fence();
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.journal.tick(now);
        if self.left || self.view.failed.is_some() {
            return;
        }
        self.give_up_join_if_due(now);
        self.fence_if_due(now);
        self.break_off_if_due(now);
        match self.link {
            Link::Down { retry_at } if retry_at <= now => {
                self.link = Link::Connecting;
                self.attempt_at = now;
                self.commands.push(NodeCommand::Connect);
            }
            Link::Up { welcomed, answered_at, beat_at } => {
                let lease = self.hello.settings.lease();
                let asks = welcomed && self.joining.as_mut().is_some_and(|joining| joining.asks(now));
                if now >= answered_at + lease {
                    self.end_silent_link(now);
                } else if asks || now >= beat_at {
                    let beat = self.next_beat();
                    self.commands.push(NodeCommand::Send(beat));
                    self.beats.push_back(now);
                    // A heartbeat that asks for progress does not postpone the regular one.
                    let beat_at = if now >= beat_at { now + self.hello.settings.keep_alive_interval } else { beat_at };
                    self.link = Link::Up { welcomed, answered_at, beat_at };
                }
            }
            Link::Down { .. } | Link::Connecting => {}
        }
        if self.needed_until().is_some_and(|until| now >= until) {
            let text = format!(
                "{} has been out of reach for {:.1?} (coordinator_timeout): {}",
                self.counterpart.name(),
                self.counterpart.timeout().unwrap_or_default(),
                self.why_away()
            );
            self.fail(JoinError::Connection(text));
        }
        self.end_alone_if_due(now);
    }

    /// When to call [`NodeMachine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.left || self.view.failed.is_some() {
            return None;
        }
        let link = match self.link {
            Link::Down { retry_at } => Some(retry_at),
            Link::Connecting => None,
            Link::Up { answered_at, beat_at, .. } => Some(beat_at.min(answered_at + self.hello.settings.lease())),
        };
        let join = self.joining.as_ref().and_then(Joining::next_deadline);
        let welcomed = matches!(self.link, Link::Up { welcomed: true, .. });
        let ask = self.joining.as_ref().filter(|_| welcomed).and_then(Joining::ask_at);
        let patience = self.patience().map(|(_, until)| until);
        let ends = [self.needed_until(), self.ends_alone_at(), self.fence_at()];
        [link, join, ask, patience, self.answer_by()].into_iter().chain(ends).flatten().min()
    }

    /// Take the commands to perform now, in order.
    pub fn take_commands(&mut self) -> Vec<NodeCommand> {
        std::mem::take(&mut self.commands)
    }

    /// The outcome of the last join, once it has ended. Returned once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.outcome.take()
    }

    /// Whether the node has left. Once its commands are performed, nothing remains to be done.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Whether a coordinator has welcomed this node on the connection that is open. The decider over a cell records no events and no
    /// steps, and forms no world whose workers survive.
    pub fn has_coordinator(&self) -> bool {
        matches!(self.link, Link::Up { welcomed: true, .. })
            && matches!(self.counterpart, Counterpart::Coordinator { .. })
    }

    /// The name of the coordinator, or of the backend in its place, in messages.
    pub(in crate::rendezvous) fn counterpart_name(&self) -> String {
        self.counterpart.name()
    }

    /// The same without the word `coordinator`.
    #[cfg(feature = "io")]
    pub(in crate::rendezvous) fn counterpart_place(&self) -> &str {
        self.counterpart.place()
    }

    /// Whether the coordinator, or the backend in its place, has ever answered this node.
    pub fn was_welcomed(&self) -> bool {
        self.ever_welcomed
    }

    /// When this node's lease ends, unless it is renewed before.
    pub(in crate::rendezvous) fn lease_ends_at(&self) -> Instant {
        self.vouched_at + self.hello.settings.lease()
    }

    /// The run id of the job.
    pub fn run_id(&self) -> &str {
        &self.hello.run_id
    }

    /// The node's current view of the rendezvous.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// When this node fails unless the coordinator comes back, if the coordinator is out of reach.
    ///
    /// `None` for a closed rendezvous: its host may have ended with the job while workers of this node still finish.
    pub(in crate::rendezvous) fn needed_until(&self) -> Option<Instant> {
        let since = self.view.out_of_reach_since.filter(|_| self.ever_welcomed && self.view.closed.is_none());
        Some(since? + self.counterpart.timeout()?)
    }

    /// End a connection on which nothing was answered for a lease.
    pub(super) fn end_silent_link(&mut self, now: Instant) {
        self.commands.push(NodeCommand::Disconnect);
        self.lose(format!("{} was silent for {:.1?}", self.counterpart.place(), self.hello.settings.lease()), now);
    }

    /// Record that the connection is lost, and schedule the next attempt.
    pub(in crate::rendezvous) fn lose(&mut self, cause: String, now: Instant) {
        self.record_lost(&cause, now);
        self.withdrawing = false;
        self.last_error = cause;
        self.retry(now);
    }

    /// Whether this node can no longer take part.
    pub(in crate::rendezvous) fn has_failed(&self) -> bool {
        self.view.failed.is_some()
    }

    pub(in crate::rendezvous) fn fail(&mut self, error: JoinError) {
        if self.view.failed.is_none() {
            self.view.failed = Some(error.clone());
            self.commands.push(NodeCommand::Disconnect);
        }
        self.resolve(Err(error));
    }

    /// Schedule the next attempt to connect, after a back-off.
    fn retry(&mut self, now: Instant) {
        let delay = back_off(self.tries, self.hello.node.0 as u64);
        self.tries += 1;
        self.view.out_of_reach_since.get_or_insert(now);
        self.link = Link::Down { retry_at: now + delay };
    }
}

#[cfg(feature = "sim")]
impl DecisionState for NodeMachine {
    fn decision_state(&self, now: Instant) -> Self {
        let journal = Journal::new(self.hello.node.0, now);
        Self { journal, tallies: Tallies::default(), ..self.clone() }
    }
}
