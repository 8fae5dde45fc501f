//! A node's side of its session: joins, keeps alive, reconnects, and knows how things stand. Pure, as [`super::machine`].
//!
//! The driver connects when told to, reports what happened, and performs [`NodeCommand`]s. What a handler asks between
//! rounds (`num_nodes_waiting`, closed or not) is answered from [`View`], which pushes keep current.

use std::time::{Duration, Instant};

use super::message::{CoordinatorMessage, Hello, Join, NodeMessage, Placed, Placement, Verdict, clipped};

pub use super::view::{JoinError, NodeCommand, View};

#[derive(Clone, Debug)]
struct Joining {
    join: Join,
    since: Instant,
    deadline: Instant,
    withdrawn_at: Option<Instant>,
    progress: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Down { retry_at: Instant },
    Connecting,
    Up { welcomed: bool, heard_at: Instant, beat_at: Instant },
}

/// The state of one node. Made from the [`Hello`] it introduces itself with.
#[derive(Clone, Debug)]
pub struct NodeMachine {
    hello: Hello,
    /// Where the coordinator is, for messages.
    endpoint: String,
    coordinator_timeout: Duration,
    link: Link,
    ever_welcomed: bool,
    tries: u32,
    /// Connections that were closed before a welcome, in a row.
    unanswered: u32,
    last_error: String,
    joining: Option<Joining>,
    outcome: Option<Result<Placement, JoinError>>,
    view: View,
    left: bool,
    commands: Vec<NodeCommand>,
}

/// How long the answer to a `Withdraw` is waited for.
const WITHDRAW_GRACE: Duration = Duration::from_secs(1);
/// After how many connections that ended without an answer to ask what listens there, and how often again.
const PROBE_EVERY: u32 = 3;
/// A store of PyTorch's takes no notice of a Hello until more bytes follow, then it closes.
const NUDGE_AFTER: Duration = Duration::from_secs(1);
const LEFT: &str = "this node has left the rendezvous";

impl NodeMachine {
    /// A node that will connect to the coordinator at `endpoint` and, once it has been there, does without it for at most
    /// `coordinator_timeout`.
    pub fn new(hello: Hello, endpoint: String, coordinator_timeout: Duration, now: Instant) -> Self {
        Self {
            hello,
            endpoint,
            coordinator_timeout,
            link: Link::Down { retry_at: now },
            ever_welcomed: false,
            tries: 0,
            unanswered: 0,
            last_error: "not tried yet".to_owned(),
            joining: None,
            outcome: None,
            view: View { out_of_reach_since: Some(now), ..View::default() },
            left: false,
            commands: Vec::new(),
        }
    }

    /// Ask for a place in the next round, giving up at `now + timeout`. The answer comes through [`NodeMachine::take_outcome`].
    pub fn join(&mut self, store_port: u16, node_rank: Option<u32>, timeout: Duration, now: Instant) {
        self.outcome = None;
        let refusal = match (&self.view.failed, &self.view.closed) {
            _ if self.left => Some(JoinError::Connection(LEFT.to_owned())),
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
        self.hello.joining = true;
        self.view.waiting = 0;
        let join = Join { round: self.view.round, store_port, node_rank };
        if matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(NodeMessage::Join(join.clone())));
        }
        let deadline = now + timeout;
        self.joining = Some(Joining { join, since: now, deadline, withdrawn_at: None, progress: None });
    }

    /// End the job for everybody.
    pub fn close(&mut self, verdict: Verdict) {
        let verdict = verdict.clipped();
        self.view.closed.get_or_insert_with(|| verdict.clone());
        if matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(NodeMessage::Close(verdict)));
        }
    }

    /// Say goodbye. Nothing is sent or received afterwards.
    pub fn leave(&mut self, reason: String) {
        if !self.left && matches!(self.link, Link::Up { welcomed: true, .. }) {
            self.commands.push(NodeCommand::Send(NodeMessage::Leave { reason: clipped(reason) }));
        }
        self.left = true;
        self.resolve(Err(JoinError::Connection(LEFT.to_owned())));
    }

    /// The connection asked for is open.
    pub fn on_connected(&mut self, now: Instant) {
        if self.left || self.view.failed.is_some() {
            // Asked for before: a node that has gone must not be introduced again.
            self.commands.push(NodeCommand::Disconnect);
            return;
        }
        let beat_at = now + self.hello.settings.keep_alive_interval.min(NUDGE_AFTER);
        self.link = Link::Up { welcomed: false, heard_at: now, beat_at };
        self.commands.push(NodeCommand::Send(NodeMessage::Hello(Box::new(self.hello.clone()))));
    }

    /// The connection asked for could not be opened.
    pub fn on_connect_failed(&mut self, error: String, now: Instant) {
        self.last_error = error;
        self.retry(now);
    }

    /// The connection ended. `foreign` says that what came over it was not this protocol.
    pub fn on_disconnected(&mut self, cause: String, foreign: bool, now: Instant) {
        if foreign {
            let text = format!("what listens at {} is not an elastic_rs coordinator: {cause}", self.endpoint);
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

    /// What listens at the endpoint does, or does not, speak c10d. Asked only while it has never welcomed this node: a
    /// coordinator answers both protocols, so a store that answers one alone is PyTorch's. Anything else may still become a
    /// coordinator, such as a proxy whose other end is not up yet.
    pub fn on_probed(&mut self, speaks_c10d: bool) {
        if speaks_c10d && !self.ever_welcomed {
            let text = format!(
                "what listens at {} is a store of PyTorch's c10d backend, not an elastic_rs coordinator: \
                 use `--rdzv-backend=rust-c10d` on every node of the job, or another port",
                self.endpoint
            );
            self.fail(JoinError::Connection(text));
        }
    }

    /// The coordinator said something.
    pub fn on_message(&mut self, message: CoordinatorMessage, now: Instant) {
        if let Link::Up { heard_at, .. } = &mut self.link {
            *heard_at = now;
        }
        match message {
            CoordinatorMessage::Rejected { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Ended { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Welcome { addr } => self.on_welcome(addr),
            CoordinatorMessage::Status { waiting, reason } => {
                if self.joining.is_none() && self.hello.placed.is_some_and(|placed| placed.active) {
                    self.view.waiting = waiting;
                    self.view.reason = reason;
                }
            }
            CoordinatorMessage::Complete(placement) => self.on_complete(placement),
            CoordinatorMessage::Withdrawn { progress } => {
                if let Some(joining) = self.joining.as_ref().filter(|joining| joining.withdrawn_at.is_some()) {
                    let after = joining.deadline - joining.since;
                    self.resolve(Err(JoinError::Timeout { after, progress }));
                }
            }
            CoordinatorMessage::Closed { verdict, spare } => {
                self.view.closed = Some(verdict.clone());
                self.resolve(Err(JoinError::Closed { verdict, spare }));
            }
            CoordinatorMessage::Heartbeat { progress } => {
                if let (Some(joining), Some(progress)) = (&mut self.joining, progress) {
                    joining.progress = Some(progress);
                }
            }
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        if self.left || self.view.failed.is_some() {
            return;
        }
        self.give_up_join_if_due(now);
        match self.link {
            Link::Down { retry_at } if retry_at <= now => {
                self.link = Link::Connecting;
                self.commands.push(NodeCommand::Connect);
            }
            Link::Up { welcomed, heard_at, beat_at } => {
                let lease = self.hello.settings.lease();
                if now >= heard_at + lease {
                    self.commands.push(NodeCommand::Disconnect);
                    self.lose(format!("{} was silent for {lease:.1?}", self.endpoint), now);
                } else if now >= beat_at {
                    self.commands.push(NodeCommand::Send(NodeMessage::Heartbeat));
                    self.link = Link::Up { welcomed, heard_at, beat_at: now + self.hello.settings.keep_alive_interval };
                }
            }
            Link::Down { .. } | Link::Connecting => {}
        }
        let away =
            self.view.out_of_reach_since.filter(|since| self.ever_welcomed && now >= *since + self.coordinator_timeout);
        if away.is_some() {
            let text = format!(
                "the coordinator at {} has been out of reach for {:.1?} (coordinator_timeout): {}",
                self.endpoint, self.coordinator_timeout, self.last_error
            );
            self.fail(JoinError::Connection(text));
        }
    }

    /// When to call [`NodeMachine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.left || self.view.failed.is_some() {
            return None;
        }
        let link = match self.link {
            Link::Down { retry_at } => Some(retry_at),
            Link::Connecting => None,
            Link::Up { heard_at, beat_at, .. } => Some(beat_at.min(heard_at + self.hello.settings.lease())),
        };
        let join = self
            .joining
            .as_ref()
            .map(|joining| joining.withdrawn_at.map_or(joining.deadline, |at| at + WITHDRAW_GRACE));
        let reach =
            self.view.out_of_reach_since.filter(|_| self.ever_welcomed).map(|since| since + self.coordinator_timeout);
        [link, join, reach].into_iter().flatten().min()
    }

    /// What to do now, in order.
    pub fn take_commands(&mut self) -> Vec<NodeCommand> {
        std::mem::take(&mut self.commands)
    }

    /// How the last join ended, once it has; handed out once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.outcome.take()
    }

    /// Whether the node has said goodbye: once its commands are performed, nothing is left to do.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// How things stand.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// For a node that waits: what the coordinator last said about the round.
    pub fn progress(&self) -> Option<&str> {
        self.joining.as_ref().and_then(|joining| joining.progress.as_deref())
    }

    fn on_welcome(&mut self, addr: String) {
        if let Link::Up { welcomed, heard_at, beat_at } = &mut self.link {
            *welcomed = true;
            *beat_at = *heard_at + self.hello.settings.keep_alive_interval;
        }
        self.ever_welcomed = true;
        self.tries = 0;
        self.unanswered = 0;
        self.view.addr = Some(addr);
        self.view.out_of_reach_since = None;
        if let Some(joining) = &self.joining {
            let message = match joining.withdrawn_at {
                Some(_) => NodeMessage::Withdraw,
                None => NodeMessage::Join(joining.join.clone()),
            };
            self.commands.push(NodeCommand::Send(message));
        }
        if let Some(verdict) = &self.view.closed {
            // Told again, in case the first telling was lost with its connection.
            self.commands.push(NodeCommand::Send(NodeMessage::Close(verdict.clone())));
        }
    }

    fn on_complete(&mut self, placement: Placement) {
        // A place that comes after this node has given up is not taken: the coordinator learns so from the withdrawal.
        let wanted = self.joining.as_ref().is_some_and(|j| j.withdrawn_at.is_none() && placement.round > j.join.round);
        if !wanted {
            return;
        }
        let Placement { round, rank, world_size, .. } = placement;
        self.hello.placed = Some(Placed { round, rank, world_size, active: true });
        self.view.round = round;
        self.view.waiting = 0;
        self.view.reason.clear();
        self.resolve(Ok(placement));
    }

    fn give_up_join_if_due(&mut self, now: Instant) {
        let Some(joining) = &mut self.joining else { return };
        let after = joining.deadline - joining.since;
        match joining.withdrawn_at {
            None if now >= joining.deadline => {
                joining.withdrawn_at = Some(now);
                self.hello.joining = false;
                if matches!(self.link, Link::Up { welcomed: true, .. }) {
                    self.commands.push(NodeCommand::Send(NodeMessage::Withdraw));
                } else {
                    let text = format!(
                        "could not reach the coordinator at {} in {after:.1?}: {}",
                        self.endpoint, self.last_error
                    );
                    self.resolve(Err(JoinError::Connection(text)));
                }
            }
            Some(at) if now >= at + WITHDRAW_GRACE => {
                let progress = joining.progress.clone().unwrap_or_else(|| format!("{} does not answer", self.endpoint));
                self.resolve(Err(JoinError::Timeout { after, progress }));
                if matches!(self.link, Link::Up { .. }) {
                    // A place given before the withdrawal was read may still arrive. A new connection keeps it from the next
                    // join, which it would look like an answer to.
                    self.commands.push(NodeCommand::Disconnect);
                    self.lose(format!("{} does not answer", self.endpoint), now);
                }
            }
            _ => {}
        }
    }

    /// There is no connection any more.
    fn lose(&mut self, cause: String, now: Instant) {
        self.last_error = cause;
        self.retry(now);
    }

    /// End the pending join, if there is one.
    fn resolve(&mut self, outcome: Result<Placement, JoinError>) {
        if self.joining.take().is_some() {
            self.hello.joining = false;
            self.outcome = Some(outcome);
        }
    }

    fn fail(&mut self, error: JoinError) {
        if self.view.failed.is_none() {
            self.view.failed = Some(error.clone());
            self.commands.push(NodeCommand::Disconnect);
        }
        self.resolve(Err(error));
    }

    /// Try again after a delay that doubles up to two seconds, spread by half so that many nodes do not come at once.
    fn retry(&mut self, now: Instant) {
        const FIRST: Duration = Duration::from_millis(50);
        const LONGEST: Duration = Duration::from_secs(2);
        let delay = (FIRST * 2_u32.pow(self.tries.min(10))).min(LONGEST);
        self.tries += 1;
        let spread = (self.hello.node.0 as u64 ^ u64::from(self.tries)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let delay = delay.mul_f64(0.5 + 0.5 * spread as f64 / u32::MAX as f64);
        self.view.out_of_reach_since.get_or_insert(now);
        self.link = Link::Down { retry_at: now + delay };
    }
}
