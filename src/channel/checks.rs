//! A worker's count of its checks, and what a check finds.
//!
//! All workers of a world call `check` equally often, at the same steps. They learn of a change at the same check, without a
//! collective:
//! 1. The agents notify their workers of the change. From then on each check of a worker waits, and the worker answers with the number
//!    of its last check that did not wait. Counting and answering are one atomic step: [`Counter::stop`].
//! 2. The change is to happen at the check after the highest of these numbers. So no worker has passed it, and each one reaches it:
//!    checks before it go on.
//! 3. A failure ends all waits. It is found by the next check, whichever that is.
//!
//! A check that finds nothing costs one atomic addition. All else is behind a lock, which the caller holds ([`super::worker`]).
//! `tests/agent/channel/model.rs` explores all interleavings.

use std::sync::atomic::{AtomicU64, Ordering};

use super::message::{HeldState, ToAgent, ToWorker, World};
use crate::rendezvous::messages::message::{Generation, NEVER};

/// Counts checks, and says of each whether there is news.
///
/// One number, so that both happen in one step. Its order among other memory is given by the lock of [`News`]: the bit is set, and
/// looked up in a second step, only with that lock.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

/// The bit that says that there is news. The others are the count.
const NEWS: u64 = 1 << 63;

impl Counter {
    /// Count one check. `Some` is its number, if there is news: [`News::verdict`] says what it does then.
    #[inline]
    pub fn pass(&self) -> Option<u64> {
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        (before & NEWS != 0).then_some((before & !NEWS) + 1)
    }

    /// How many checks were counted in this world.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed) & !NEWS
    }

    /// From now on each check finds that there is news. Returns how many were counted so far.
    pub fn stop(&self) -> u64 {
        self.0.fetch_or(NEWS, Ordering::Relaxed) & !NEWS
    }

    /// Begin again at 0, without news.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// What a check finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Nothing.
    GoOn,
    /// The world changes here, on all workers.
    WorldChanges,
    /// A member of the world has failed.
    PeerFailed,
}

/// Why no further message will arrive, as text.
pub type Ended = String;

/// The messages that a worker has received from its agent. Each method that returns an option is to be called again after the next message
/// if it returns `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct News {
    /// The last check that went on, once checks find that there is news.
    passed: Option<u64>,
    change: Option<Change>,
    /// The change that no listener knows of: number and flags.
    unread: Option<(u64, u8)>,
    has_failed: bool,
    /// The latest.
    world: Option<Box<World>>,
    /// The last world in which the worker has had the job's state.
    generation: Option<Generation>,
    state: State,
    /// The last failure, change or world.
    reason: String,
    flags: u8,
    /// The worker whose failure is the last one.
    failed_rank: Option<u32>,
    ended: Option<Ended>,
}

/// Where a worker is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum State {
    /// In the latest world, or not in any yet.
    #[default]
    Inside,
    /// It waits for its next world.
    Parked,
    /// The next world is there, and the worker has not taken it yet.
    Called,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Change {
    seq: u64,
    raise_at: Option<u64>,
}

impl News {
    /// A message has arrived, and checks find that there is news since this many were counted ([`Counter::stop`]). Returns the answer.
    pub fn on_message(&mut self, message: ToWorker, counted: u64) -> Option<ToAgent> {
        let passed = *self.passed.get_or_insert(counted);
        match message {
            ToWorker::Change { seq, flags, reason } => {
                match &self.change {
                    Some(change) if change.seq > seq => return None,
                    // Told again, after a reconnect of the agent.
                    Some(change) if change.seq == seq => {}
                    _ => {
                        self.change = Some(Change { seq, raise_at: None });
                        self.unread = Some((seq, flags));
                        (self.reason, self.flags, self.failed_rank) = (reason, flags, None);
                    }
                }
                return Some(ToAgent::Ack { seq, count: passed });
            }
            ToWorker::RaiseAt { seq, check } => match &mut self.change {
                // Others raise at a check that this worker has passed.
                Some(change) if change.seq == seq && check <= passed => {
                    let reason = format!(
                        "the world changes at check {check}, but this worker had already passed that check when it was notified \
                         (last check: {passed}): all workers must call check equally often"
                    );
                    self.fail(reason, None);
                }
                Some(change) if change.seq == seq => change.raise_at = Some(check),
                _ => {} // of a change that is over
            },
            ToWorker::PeerFailed { reason, rank } => self.fail(reason, rank),
            ToWorker::Refused { reason } => self.end(format!("the agent refuses this process: {reason}"), counted),
            ToWorker::World(world) => {
                (self.reason, self.flags, self.failed_rank) = (world.reason.clone(), 0, None);
                (self.passed, self.change, self.has_failed) = (None, None, false);
                if world.equal {
                    self.generation = Some(world.generation);
                }
                self.world = Some(world);
                if self.state == State::Parked {
                    self.state = State::Called;
                }
            }
        }
        None
    }

    /// Whether checks have nothing to find: the caller lets the [`Counter`] begin again.
    pub fn is_quiet(&self) -> bool {
        self.passed.is_none()
    }

    /// The connection has ended, for this reason. Checks find that there is news since this many were counted.
    pub fn end(&mut self, why: Ended, counted: u64) {
        self.passed.get_or_insert(counted);
        // A refusal precedes the end of the connection, and says more.
        self.ended.get_or_insert(why);
    }

    fn fail(&mut self, reason: String, rank: Option<u32>) {
        self.has_failed = true;
        (self.reason, self.flags, self.failed_rank) = (reason, 0, rank);
    }

    /// What the check of this number finds.
    pub fn verdict(&mut self, number: u64) -> Option<Result<Verdict, Ended>> {
        if self.has_failed {
            return Some(Ok(Verdict::PeerFailed));
        }
        // Without a number this check was counted in the world before.
        let is_passed = self.passed.is_none_or(|passed| number <= passed);
        if !is_passed && let Some(change) = &self.change {
            match change.raise_at {
                Some(at) if number >= at => return Some(Ok(Verdict::WorldChanges)),
                Some(_) => {}
                None => return self.ended.clone().map(Err),
            }
        }
        if let Some(why) = &self.ended {
            return Some(Err(why.clone()));
        }
        if let Some(passed) = &mut self.passed {
            *passed = number.max(*passed);
        }
        Some(Ok(Verdict::GoOn))
    }

    /// The check at which the world changes, if that is known, and there is one.
    pub fn raises_at(&self) -> Option<u64> {
        self.change.as_ref()?.raise_at.filter(|check| *check != NEVER)
    }

    /// Whether a failure is known, which ends with the next world.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Ready once a failure is known.
    pub fn failed(&mut self) -> Option<Result<(), Ended>> {
        if self.has_failed { Some(Ok(())) } else { self.ended.clone().map(Err) }
    }

    /// The worker has the state of its world.
    pub fn synchronised(&mut self) {
        self.generation = self.world.as_ref().map(|world| world.generation).or(self.generation);
    }

    /// The worker leaves its world with this commit. Returns the message to the agent: none if an earlier call was interrupted.
    pub fn park(&mut self, commit: Option<u64>) -> Option<HeldState> {
        let is_new = self.state == State::Inside;
        is_new.then(|| {
            self.state = State::Parked;
            HeldState { generation: self.generation, commit }
        })
    }

    /// Ready once a parked worker has its next world. The worker is then in that.
    pub fn next_world(&mut self) -> Option<Result<Box<World>, Ended>> {
        match &self.world {
            Some(world) if self.state == State::Called => {
                self.state = State::Inside;
                Some(Ok(world.clone()))
            }
            _ => self.ended.clone().map(Err),
        }
    }

    /// Ready once there is a world: the latest.
    pub fn latest_world(&mut self) -> Option<Result<Box<World>, Ended>> {
        self.world.clone().map(Ok).or_else(|| self.ended.clone().map(Err))
    }

    /// Ready once there is a change that was not taken yet: its number, and its flags. Takes it.
    pub fn take_change(&mut self) -> Option<Result<(u64, u8), Ended>> {
        self.unread.take().map(Ok).or_else(|| self.ended.clone().map(Err))
    }

    /// The reason of the last failure, change or world, in words.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Global rank of the worker whose failure is the last news, if one is.
    pub fn failed_rank(&self) -> Option<u32> {
        self.failed_rank
    }

    /// What the last change or world changes. 0 after a failure.
    pub fn flags(&self) -> u8 {
        self.flags
    }
}
