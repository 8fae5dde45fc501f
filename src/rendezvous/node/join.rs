//! A node's joins: the one that is pending, its outcome, and what became of the last workers. Part of [`super`].

use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::view::JoinError;
use crate::rendezvous::messages::message::{
    Health, Join, JoinWorkers, NodeMessage, Placement, Round, SAVE_WITHIN, SURVIVORS_LIMIT, Survival, Waits,
};

/// How long to wait for the answer to a `Withdraw`.
const WITHDRAW_GRACE: Duration = Duration::from_secs(1);
/// Time after which a waiting node asks for progress with an early heartbeat, so that its operator learns it soon.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// Most addresses of a round's members. Whoever listens at the endpoint could send any number.
const MOST_ADDRESSES: usize = 1 << 20;

/// A node's joins. One is pending at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Joins {
    pending: Option<PendingJoin>,
    outcome: Option<Result<Placement, JoinError>>,
    /// A join was abandoned, and the coordinator has not confirmed the withdrawal.
    withdrawing: bool,
    /// What became of the last workers, for the next join.
    survival: Survival,
    /// Whether this machine is well.
    health: Health,
    /// The survivors of the pending join, or of the last one, have ended, for this reason.
    lost_survivors: Option<String>,
    /// The addresses of the next round's members, which arrive before the rank assignment.
    addresses: Addresses,
}

/// A join that waits for its answer.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct PendingJoin {
    join: Join,
    store: Store,
    since: Instant,
    deadline: Instant,
    /// The job is full and runs without this node, as of the last message.
    spare: bool,
    withdrawn_at: Option<Instant>,
    progress: Option<String>,
    /// The coordinator was asked for progress.
    asked: bool,
}

/// The worker store of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// The store listens on this port already.
    Open(u16),
    /// The store is opened after the welcome, which has the address at which other nodes look for this one. Holds the address of the
    /// open store.
    OpenFor(Option<String>),
}

/// What has arrived of the addresses of a round's members.
#[derive(Clone, Debug, Default)]
struct Addresses {
    round: Round,
    list: Vec<IpAddr>,
    whole: bool,
}

/// What to do about a pending join whose time is over.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GiveUp {
    /// Send the withdrawal. The answer ends the join.
    Withdraw,
    /// No backend has welcomed this node: end the join.
    Unreachable {
        /// Time waited.
        after: Duration,
    },
    /// The withdrawal was not answered: end the join.
    Unanswered {
        /// Time waited.
        after: Duration,
        /// The progress of the round, if it is known.
        progress: Option<String>,
    },
}

impl Joins {
    /// The pending join.
    pub fn pending(&self) -> Option<&PendingJoin> {
        self.pending.as_ref()
    }

    /// Whether an abandoned join may still be answered.
    pub fn is_withdrawing(&self) -> bool {
        self.withdrawing
    }

    /// Whether survivors have ended, and nobody has taken the reason.
    pub fn has_lost_survivors(&self) -> bool {
        self.lost_survivors.is_some()
    }

    /// Record what became of the last workers.
    pub fn set_survivors(&mut self, survival: Survival) {
        self.survival = survival;
    }

    /// What is known of this machine's health.
    pub fn set_health(&mut self, health: Health) {
        if let Some(pending) = &mut self.pending {
            pending.join.health = health.clone();
        }
        self.health = health;
    }

    /// Forget the last join, because another one begins.
    pub fn forget_last(&mut self) {
        (self.outcome, self.lost_survivors) = (None, None);
    }

    /// End a join that has not begun.
    pub fn refuse(&mut self, error: JoinError) {
        self.outcome = Some(Err(error));
    }

    /// Begin a join after `round`. `check`: the one at which workers that have all survived have stopped.
    pub fn begin(
        &mut self,
        store: Store,
        round: Round,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        check: Option<u64>,
        (now, deadline): (Instant, Instant),
    ) {
        let survival = mem::take(&mut self.survival);
        let mut workers = workers.map(|workers| JoinWorkers { survival, ..workers });
        // A node that has lost a worker has not stopped for the change alone.
        let have_stopped =
            |workers: &&mut JoinWorkers| workers.have_all_survived() || workers.survival == Survival::Saved;
        if let Some(workers) = workers.as_mut().filter(have_stopped) {
            workers.check = check;
        }
        // The other nodes may need as long to save.
        let saves = workers.as_ref().is_some_and(|workers| workers.survival == Survival::Saved);
        let deadline = if saves { deadline + SAVE_WITHIN } else { deadline };
        let store_port = if let Store::Open(port) = store { port } else { 0 };
        let join = Join { round, store_port, node_rank, workers, health: self.health.clone() };
        self.pending = Some(PendingJoin::new(join, store, now, deadline));
    }

    /// The address for which a worker store must be opened, if this is it.
    pub fn wants_store(&self, addr: &str) -> bool {
        self.pending.as_ref().is_some_and(|pending| !pending.is_withdrawn() && !pending.is_ready(Some(addr)))
    }

    /// The store for `addr` listens on this port. Returns whether the join waits for it.
    pub fn on_store_opened(&mut self, addr: String, port: u16) -> bool {
        let Some(pending) = self.pending.as_mut().filter(|pending| !pending.is_withdrawn()) else { return false };
        pending.join.store_port = port;
        pending.store = Store::OpenFor(Some(addr));
        true
    }

    /// The pending join, if its worker store for `addr` is open.
    pub fn ready(&self, addr: Option<&str>) -> Option<&PendingJoin> {
        self.pending.as_ref().filter(|pending| pending.is_ready(addr))
    }

    /// A part of the members' addresses has arrived.
    pub fn on_members(&mut self, round: Round, addresses: Vec<IpAddr>, more: bool) {
        self.addresses.add(round, addresses, more);
    }

    /// A rank assignment has arrived. Returns it with the members' addresses, if the node waits for it. One that arrives after the node has
    /// given up is ignored: the withdrawal informs the coordinator.
    pub fn on_complete(&mut self, placement: Placement) -> Option<Placement> {
        let members = mem::take(&mut self.addresses).of(&placement);
        let pending = self.pending.as_ref()?;
        if pending.is_withdrawn() || placement.round <= pending.join.round {
            return None;
        }
        // No coordinator has a node start more workers than it has offered.
        let offered = pending.join.workers.as_ref().map_or(0, |workers| workers.local_world_size);
        let local_world_size = placement.local_world_size.filter(|size| (1..=offered).contains(size));
        Some(Placement { members, local_world_size, ..placement })
    }

    /// The progress of the round has arrived. Returns whether a join is pending.
    pub fn on_waits(&mut self, Waits { progress, spare }: &Waits, now: Instant) -> bool {
        if let Some(pending) = &mut self.pending {
            pending.progress = Some(progress.clone());
            pending.be_spare(*spare, now);
        }
        self.pending.is_some()
    }

    /// End the pending join. Returns whether there was one.
    pub fn resolve(&mut self, outcome: Result<Placement, JoinError>) -> bool {
        let ended = self.pending.take().is_some();
        if ended {
            self.outcome = Some(outcome);
        }
        ended
    }

    /// The outcome of the last join, once it has ended. Returned once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.outcome.take()
    }

    /// Whether to ask the coordinator for progress now; once.
    pub fn asks(&mut self, now: Instant) -> bool {
        self.pending.as_mut().is_some_and(|pending| pending.asks(now))
    }

    /// What to do now that the time of the pending join is over, if it is. `welcomed`: a withdrawal can be sent.
    pub fn give_up_if_due(&mut self, welcomed: bool, now: Instant) -> Option<GiveUp> {
        let pending = self.pending.as_mut()?;
        let after = pending.patience();
        match pending.withdrawn_at {
            None if pending.is_due(now) => {
                pending.withdrawn_at = Some(now);
                Some(if welcomed { GiveUp::Withdraw } else { GiveUp::Unreachable { after } })
            }
            Some(at) if now >= at + WITHDRAW_GRACE => {
                Some(GiveUp::Unanswered { after, progress: pending.progress.clone() })
            }
            _ => None,
        }
    }

    /// Drop the pending join, because its caller no longer waits. `None`: the caller has its outcome. Otherwise, whether that was a
    /// rank assignment.
    pub fn abandon(&mut self) -> Option<bool> {
        let (pending, outcome) = (self.pending.take(), self.outcome.take());
        let placed = matches!(outcome, Some(Ok(_)));
        (pending.is_some() || placed).then_some(placed)
    }

    /// The coordinator was asked to forget a join.
    pub fn on_withdrawal_sent(&mut self) {
        self.withdrawing = true;
    }

    /// The coordinator has forgotten the join. Returns how long a pending one has waited, if it was withdrawn.
    pub fn on_withdrawn(&mut self) -> Option<Duration> {
        self.withdrawing = false;
        self.pending.as_ref().filter(|pending| pending.is_withdrawn()).map(PendingJoin::patience)
    }

    /// A connection was opened: what was sent on the last one does not count.
    pub fn on_connected(&mut self) {
        self.addresses = Addresses::default();
    }

    /// The connection was lost. No answer comes on it.
    pub fn on_lost(&mut self) {
        self.withdrawing = false;
    }

    /// The survivors of the pending join have ended. Returns whether one is pending.
    pub fn lose_survivors(&mut self, reason: String) -> bool {
        let Some(pending) = &mut self.pending else { return false };
        pending.lose_survivors();
        self.lost_survivors = Some(reason);
        true
    }

    /// Why the survivors have ended. Taken once.
    pub fn take_lost_survivors(&mut self) -> Option<String> {
        self.lost_survivors.take()
    }
}

impl PendingJoin {
    fn new(join: Join, store: Store, now: Instant, deadline: Instant) -> Self {
        Self { join, store, since: now, deadline, spare: false, withdrawn_at: None, progress: None, asked: false }
    }

    /// The request.
    pub fn join(&self) -> &Join {
        &self.join
    }

    /// When it began.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// How long it waits.
    pub fn patience(&self) -> Duration {
        self.deadline - self.since
    }

    /// Whether the job is full and runs without this node.
    pub fn is_spare(&self) -> bool {
        self.spare
    }

    /// Whether its time was over.
    pub fn is_withdrawn(&self) -> bool {
        self.withdrawn_at.is_some()
    }

    /// The progress of the round, if it is known.
    pub fn progress(&self) -> Option<&str> {
        self.progress.as_deref()
    }

    /// The message that asks for a rank assignment. `in_place`: it reports what became of the last workers. More survivors than fit into a
    /// message are not named.
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
    pub fn has_survivors(&self) -> bool {
        self.join.workers.as_ref().is_some_and(|workers| !workers.survivors().is_empty())
    }

    /// When to ask the coordinator for progress, unless it is known by then.
    pub fn ask_at(&self) -> Option<Instant> {
        let unknown = !self.asked && self.progress.is_none() && !self.is_withdrawn();
        unknown.then(|| self.since + ASK_AFTER)
    }

    /// When to check next.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.withdrawn_at {
            Some(at) => Some(at + WITHDRAW_GRACE),
            None => (!self.spare).then_some(self.deadline),
        }
    }

    fn asks(&mut self, now: Instant) -> bool {
        let due = self.ask_at().is_some_and(|at| at <= now);
        self.asked |= due;
        due
    }

    /// Whether the store for `addr` is open.
    fn is_ready(&self, addr: Option<&str>) -> bool {
        match &self.store {
            Store::Open(_) => true,
            Store::OpenFor(opened) => opened.is_some() && opened.as_deref() == addr,
        }
    }

    /// Whether the join has timed out. A spare waits without a limit, as in PyTorch.
    fn is_due(&self, now: Instant) -> bool {
        !self.spare && now >= self.deadline
    }

    /// The survivors have ended: the node can change in place, and none of its workers lives.
    fn lose_survivors(&mut self) {
        let Some(workers) = &mut self.join.workers else { return };
        if let Survival::Attended(survivors) = &mut workers.survival {
            survivors.clear();
        }
        workers.check = None;
    }

    /// Record whether this node is a spare. When a spare is needed after all, its join time-out starts again.
    fn be_spare(&mut self, spare: bool, now: Instant) {
        if self.spare && !spare {
            (self.since, self.deadline) = (now, now + self.patience());
        }
        self.spare = spare;
    }
}

impl Addresses {
    fn add(&mut self, round: Round, addresses: Vec<IpAddr>, more: bool) {
        if self.round != round || self.whole {
            *self = Self { round, ..Self::default() };
        }
        if self.list.len() + addresses.len() <= MOST_ADDRESSES {
            self.list.extend(addresses.into_iter().map(|ip| ip.to_canonical()));
            self.whole = !more;
        }
    }

    /// The list, if this rank assignment makes the node serve the workers' store, and the whole list of its round has arrived.
    fn of(self, placement: &Placement) -> Option<Arc<[IpAddr]>> {
        let is_its = self.whole && self.round == placement.round && placement.rank == 0;
        is_its.then(|| Arc::from(self.list))
    }
}

#[cfg(test)]
mod tests;
