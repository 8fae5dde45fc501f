//! State of [`super]: a pending join, unanswered reports, and the connection.

use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::{Failure, Join, NodeMessage, Round, SURVIVORS_LIMIT, Survival};

/// How long to wait for the answer to a `Withdraw`.
pub(in crate::rendezvous) const WITHDRAW_GRACE: Duration = Duration::from_secs(1);

/// Time after which a waiting node asks for progress with an early heartbeat, so that its operator learns it soon.
const ASK_AFTER: Duration = Duration::from_secs(2);

/// A join that waits for its answer.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct Joining {
    pub join: Join,
    pub store: Store,
    pub since: Instant,
    pub deadline: Instant,
    /// The job is full and runs without this node, as of the last message.
    pub spare: bool,
    pub withdrawn_at: Option<Instant>,
    pub progress: Option<String>,
    /// The coordinator was asked for progress.
    asked: bool,
}

/// The worker store of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) enum Store {
    /// The store is open already.
    Open,
    /// The store is opened after the welcome, which has the address at which other nodes look for this one. Holds the address of the
    /// open store.
    OpenFor(Option<String>),
}

impl Joining {
    /// A join that starts now.
    pub fn new(join: Join, store: Store, now: Instant, deadline: Instant) -> Self {
        Self { join, store, since: now, deadline, spare: false, withdrawn_at: None, progress: None, asked: false }
    }

    /// The message that asks for the place. `in_place`: it says what became of the last workers. More survivors than fit into a message
    /// are not named.
    pub fn message(&self, in_place: bool) -> NodeMessage {
        let mut join = self.join.clone();
        if let Some(workers) = &mut join.workers {
            if !in_place || workers.survivors().len() > SURVIVORS_LIMIT {
                (workers.survival, workers.check) = (Survival::New, None);
            }
            if let Survival::Attended(survivors) = &mut workers.survival {
                survivors.sort_by_key(|survivor| survivor.local_rank);
            }
        }
        NodeMessage::Join(join)
    }

    /// Whether workers survive into the next world.
    pub fn brings_survivors(&self) -> bool {
        self.join.workers.as_ref().is_some_and(|workers| !workers.survivors().is_empty())
    }

    /// The survivors have ended: the node can change in place, and none of its workers lives.
    pub fn lose_survivors(&mut self) {
        let Some(workers) = &mut self.join.workers else { return };
        if let Survival::Attended(survivors) = &mut workers.survival {
            survivors.clear();
        }
        workers.check = None;
    }

    /// When to ask the coordinator for progress, unless it is known by then.
    pub fn ask_at(&self) -> Option<Instant> {
        let unknown = !self.asked && self.progress.is_none() && self.withdrawn_at.is_none();
        unknown.then(|| self.since + ASK_AFTER)
    }

    /// Whether to ask now; once.
    pub fn asks(&mut self, now: Instant) -> bool {
        let due = self.ask_at().is_some_and(|at| at <= now);
        self.asked |= due;
        due
    }

    /// Whether the store for `addr` is open.
    pub fn is_ready(&self, addr: Option<&str>) -> bool {
        match &self.store {
            Store::Open => true,
            Store::OpenFor(opened) => opened.is_some() && opened.as_deref() == addr,
        }
    }

    /// Whether the join has timed out. A spare waits without a limit, as in PyTorch.
    pub fn is_due(&self, now: Instant) -> bool {
        !self.spare && now >= self.deadline
    }

    /// When to check next.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.withdrawn_at {
            Some(at) => Some(at + WITHDRAW_GRACE),
            None => (!self.spare).then_some(self.deadline),
        }
    }

    /// Record whether this node is a spare. When a spare is needed after all, its join time-out starts again.
    pub fn be_spare(&mut self, spare: bool, now: Instant) {
        if self.spare && !spare {
            (self.since, self.deadline) = (now, now + (self.deadline - self.since));
        }
        self.spare = spare;
    }
}

/// A node's report about its workers. It is repeated on each new connection until it is answered.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) enum Report {
    Failed { round: Round, failure: Box<Failure> },
    Done { round: Round },
}

impl Report {
    pub fn round(&self) -> Round {
        match self {
            Self::Failed { round, .. } | Self::Done { round } => *round,
        }
    }

    pub fn message(&self) -> NodeMessage {
        match self.clone() {
            Self::Failed { round, failure } => NodeMessage::Failed { round, failure },
            Self::Done { round } => NodeMessage::Done { round },
        }
    }
}

/// The connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) enum Link {
    Down {
        retry_at: Instant,
    },
    Connecting,
    /// `answered_at`: when the last answered message was sent.
    Up {
        welcomed: bool,
        answered_at: Instant,
        beat_at: Instant,
    },
}

/// Number of tries from which [`back_off`] has its longest delay.
pub(in crate::rendezvous) const SLOW_TRIES: u32 = 6;

/// The delay before an attempt: 50 ms, doubled with each try up to 2 s, of which up to one half is jitter. The jitter keeps many
/// nodes from connecting at once.
pub(in crate::rendezvous) fn back_off(tries: u32, seed: u64) -> Duration {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(2);
    let delay = (FIRST * 2_u32.pow(tries.min(10))).min(LONGEST);
    let spread = (seed ^ u64::from(tries.saturating_add(1))).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    delay.mul_f64(0.5 + 0.5 * spread as f64 / u32::MAX as f64)
}
