//! A node asks for a place, or reports how its workers ended.

use std::time::Instant;

use super::Run;
use super::event::SessionId;
use super::hosts::Entry;
use super::node::{Node, Status};
use crate::events::record::{FirstStep, Kind, LONGEST_US, Number, Phase, Why};
use crate::events::tally::Refused;
use crate::rendezvous::messages::bounds::tidy_failure;
use crate::rendezvous::messages::message::{
    CoordinatorMessage, Failure, Join, LARGEST_COUNT, LARGEST_STEP, NodeId, Round, Stepped, Verdict,
};

/// How often a node may tell how long its parts of a round have taken.
const TOOK: u8 = 2;

impl Run {
    /// A node asks for a place.
    pub(super) fn on_join(&mut self, id: NodeId, session: SessionId, join: Join, now: Instant) {
        if let Some(verdict) = self.current.closed().cloned() {
            return self.send(session, CoordinatorMessage::Closed { verdict, spare: false });
        }
        if let Err(reason) = join.validate() {
            return self.refuse(session, Refused::Invalid, reason);
        }
        if self.entry(id, now) == Entry::Never {
            return self.evict(id, session, now);
        }
        self.take_join(id, session, join, now);
        if self.roster.get(id).is_some_and(|node| self.parts().is_spare(node)) {
            let waits = self.roster.get(id).and_then(|node| self.parts().waits(node, now));
            waits.into_iter().for_each(|waits| self.send(session, CoordinatorMessage::Waits(waits)));
        }
    }

    /// What the book of hosts says about a node that asks to join.
    fn entry(&self, id: NodeId, now: Instant) -> Entry {
        self.roster.get(id).map_or(Entry::Open, |node| self.hosts.entry(node, now))
    }

    fn take_join(&mut self, id: NodeId, session: SessionId, join: Join, now: Instant) {
        let Some(node) = self.roster.get(id) else { return };
        let asked = node.asked.clone();
        if let Some(reason) = self.disagreement(&node.name, &asked) {
            // The node said Hello before the run's settings were fixed.
            return self.refuse(session, Refused::Settings, reason);
        }
        if let Some(reason) = self.another_job(id, &join, now) {
            let name = node.name.clone();
            self.record(Kind::NodeRefused {}, Some(&name), None, reason.clone());
            return self.refuse(session, Refused::Settings, reason);
        }
        self.bind(id, &asked, now);
        self.roster.set_program(id, &join, self.has_no_name().then_some(now));
        let Some(node) = self.roster.get(id) else { return };
        let (name, label, address) = (node.name.clone(), node.label(), node.addr());
        let workers = join.workers.as_ref().map(|workers| workers.local_world_size);
        if self.parts().bounds().is_some() && join.workers.is_none() {
            let reason = format!(
                "run `{}` counts workers (min_workers, max_workers), and the agent of {label} does not tell how many it has: it is \
                 PyTorch's (`--rdzv-conf agent=torch`)",
                self.id
            );
            return self.refuse(session, Refused::Settings, reason);
        }
        let member = self.roster.last_rank(node).is_some();
        // Only members can have stopped for a change of this world.
        let check = join.workers.as_ref().and_then(|workers| workers.check).filter(|_| member);
        let check = check.map(|check| check.min(LARGEST_COUNT));
        // The workers of an idle member have ended before this coordinator was started, or its session with them.
        let stops_alone = node.status == Status::Active || (member && check.is_none());
        let mut arrival = None;
        match (&node.status, node.placed) {
            // This join belongs to a completed round. The completion was lost with the connection that it was sent on.
            (Status::Active, Some((round, rank))) if join.round < round => {
                if self.send_place(session, rank) {
                    // The node took itself for waiting, and ignored the status pushed since then. Send it again.
                    return self.send(session, self.status());
                }
            }
            // A check that this coordinator has not sent is that of an earlier one, whose change it begins again.
            (Status::Active, _) if check.is_some() && self.in_place.check().is_none_or(|sent| Some(sent) == check) => {
                self.in_place.someone_has_stopped(now);
            }
            (Status::Active | Status::Idle, _) if stops_alone => {
                // A member that was told to re-form is not the cause.
                let told = self.current.told();
                let reason = if told { self.parts().why() } else { format!("{label} restarts its workers") };
                let broken = self.trace.broken().filter(|_| told);
                let asks = broken.unwrap_or_else(|| self.record(Kind::NodeCameBack {}, Some(&name), None, None));
                self.interrupt(&reason, Why::NodeCameBack, asks);
            }
            (Status::Waiting { arrival: first, .. }, _) => arrival = Some(*first),
            (Status::Active | Status::Idle, _) => {}
        }
        let next = self.roster.next_arrival();
        self.roster.set_status(id, Status::Waiting { join, arrival: arrival.unwrap_or(next) });
        self.in_place.stop_at(id, check);
        let out = self.entry(id, now) != Entry::Open;
        self.roster.set_out(id, out);
        let new = self.roster.get(id).is_some_and(|node| self.roster.last_rank(node).is_none());
        if new && !out {
            self.pace.newcomer_since.get_or_insert(now);
        }
        if arrival.is_none() {
            let verb = if new { "joined" } else { "is back" };
            let cause = self.trace.broken().filter(|_| !new);
            let text = format!("{label} {verb} ({})", self.parts().known_text());
            self.record_join(id, Kind::NodeJoined { address, workers, new }, &name, cause, text);
        }
    }

    /// Handle a worker's failure. Only the first failure of a round is counted. A later one, or one after members were told to
    /// re-form, is taken for a consequence. Before all members have reported to a restarted coordinator, any failure may be one: it is
    /// not counted. Members are notified at once, since workers whose collective has failed wait only seconds for news.
    pub(super) fn on_failed(&mut self, id: NodeId, session: SessionId, round: Round, failure: &Failure, now: Instant) {
        let Some(node) = self.roster.get(id).filter(|_| self.current.closed().is_none()) else { return };
        if !self.is_current(node, round) {
            return self.stale(node.label(), session, round);
        }
        let failure = tidy_failure(failure, node.label());
        let name = node.name.clone();
        if self.current.interrupted().is_some() || self.current.told() {
            let text = format!("{failure}; not counted, a consequence of this: {}", self.parts().why());
            self.record(Kind::WorkerExited(failure.exit(false, false)), Some(&name), self.trace.broken(), text);
            return self.send(session, self.status());
        }
        if self.recovery.awaits_members() {
            let reason = format!(
                "{failure}; not counted, since not all members of round {round} have reported to the restarted coordinator"
            );
            let exit = self.record(Kind::WorkerExited(failure.exit(true, false)), Some(&name), None, None);
            return self.interrupt_by(&reason, exit, Failure { counts: false, ..failure });
        }
        let unreachable = self.roster.of(self.roster.active()).find(|(_, node)| node.session.is_none());
        if let Some((gone_id, gone)) = unreachable.map(|(id, node)| (id, node.label())) {
            // Workers notice that a peer's connection is gone before the reconnect grace of the peer's agent is over.
            self.hosts.await_loss(Some(gone_id));
            let reason = format!("{failure}; not counted, since the connection of {gone} has ended");
            let exit = self.record(Kind::WorkerExited(failure.exit(true, false)), Some(&name), None, None);
            return self.interrupt_by(&reason, exit, Failure { counts: false, ..failure });
        }
        let exit = self.record(Kind::WorkerExited(failure.exit(true, failure.counts)), Some(&name), None, None);
        if !failure.counts {
            // The worker lives, and has left its world on purpose. Neither the budget nor its host answers for that.
            return self.interrupt_by(&failure.to_string(), exit, failure);
        }
        let Some(node) = self.roster.get(id) else { return };
        let (origin, rank) = (node.origin(), failure.global_rank);
        match self.settings.max_restarts {
            Some(limit) if self.current.restart() >= limit => {
                let restarts = if limit == 0 {
                    "no restarts are allowed".to_owned()
                } else {
                    format!("no restarts left: all {limit} restarts are used up")
                };
                let cause = format!("{failure}; {restarts} (max_restarts)");
                let by = failure.node.clone();
                self.close(Verdict::Failed { by, cause, failure: Some(Box::new(failure)) }, Some(exit));
            }
            limit => {
                let number = self.current.count_restart();
                // PyTorch's wording, for which logs are searched. PyTorch's number of attempts left includes this restart.
                let of = limit.map_or_else(String::new, |limit| {
                    format!(" of {limit}; {}/{limit} attempts left", limit - number + 1)
                });
                let reason = format!("{failure}; restart {number}{of}; will restart worker group");
                self.interrupt_by(&reason, exit, failure);
                self.on_first_failure(&origin, Some(rank), now);
            }
        }
    }

    /// Record that all workers of a node have succeeded.
    pub(super) fn on_done(&mut self, id: NodeId, session: SessionId, round: Round) {
        let Some(node) = self.roster.get(id).filter(|_| self.current.closed().is_none()) else { return };
        if !self.is_current(node, round) {
            return self.stale(node.label(), session, round);
        }
        if !node.done {
            self.roster.set_done(id);
            let (done, all) = (self.roster.counts().done, self.roster.active().len());
            if done == 1 || done == all {
                let text = format!("{done} of {all} live nodes of round {round} have finished");
                self.record(Kind::WorkersFinished { done, of: all }, None, self.trace.completed(), text);
            }
        }
    }

    /// Record how long a node's parts of the last recovery have taken. Rank 0's node tells twice: when its workers were started, and when
    /// all workers are there.
    pub(super) fn on_took(&mut self, id: NodeId, round: Round, phase: Phase) {
        let told = |node: &Node| self.is_current(node, round) && node.took < TOOK;
        let Some(node) = self.roster.get(id).filter(|node| told(node)) else { return };
        let name = node.name.clone();
        self.roster.count_took(id);
        let phase = phase.bounded();
        self.trace.imported(phase.import_us);
        self.record(Kind::Phase(phase), Some(&name), self.trace.completed(), None);
    }

    /// Record a node's first step of the round. Only rank 0's node knows how long the import took, and each node tells the time since
    /// its start: what remains is the step's.
    pub(super) fn on_stepped(&mut self, id: NodeId, round: Round, first: Stepped) {
        let told = |node: &Node| self.is_current(node, round) && !node.stepped;
        let Some(node) = self.roster.get(id).filter(|node| told(node)) else { return };
        let name = node.name.clone();
        self.roster.set_stepped(id);
        let bounded = |number: u64| number.min(LARGEST_STEP);
        let first_step = FirstStep {
            first_step_us: first.after_us.min(LONGEST_US).saturating_sub(self.trace.import_us()),
            step: first.step.map(bounded),
            step_before: first.before.map(bounded),
            step_time_us: first.step_time_us.map(|micros| micros.min(LONGEST_US)),
        };
        self.record(Kind::FirstStep(first_step), Some(&name), self.trace.completed(), None);
    }

    /// All workers of a node are connected to their agent.
    pub(super) fn on_attending(&mut self, id: NodeId, round: Round) {
        if !self.is_capable_member(id, round) || self.roster.get(id).is_none_or(|node| node.attending) {
            return;
        }
        self.roster.set_attending(id);
        if self.roster.is_attended() {
            let nodes = self.roster.active().len();
            self.note(format!(
                "round {round} can change in place: the workers of all its members attend (nodes: {nodes})"
            ));
        }
    }

    /// The workers of a member let the library make their process groups. All members run the same program.
    pub(super) fn on_groupless(&mut self, id: NodeId, round: Round) {
        if self.is_capable_member(id, round) {
            self.in_place.set_groupless();
        }
    }

    /// A member reports how far its workers are.
    pub(super) fn on_counted(&mut self, id: NodeId, session: SessionId, round: Round, count: u64) {
        if count > LARGEST_COUNT {
            let reason = format!("the number of checks is `{count}`, must be at most {LARGEST_COUNT}");
            return self.refuse(session, Refused::Invalid, reason);
        }
        if !self.is_capable_member(id, round) {
            return;
        }
        if let Some(check) = self.in_place.on_counted(id, count) {
            let label = self.roster.label(id);
            self.fail_change(&format!("the workers of {label} have passed check {check}, at which all were to stop"));
        }
    }

    /// Whether the node runs workers of this round, which may survive a change.
    pub(super) fn is_capable_member(&self, id: NodeId, round: Round) -> bool {
        self.roster.get(id).is_some_and(|node| self.is_current(node, round) && node.in_place)
    }

    /// Answer a report about a round that is over for the node.
    fn stale(&mut self, label: String, session: SessionId, round: Round) {
        let current = self.round();
        self.note(format!(
            "a report of {label} about round {round} is ignored: that round is over, the current one is {current}"
        ));
        self.send(session, CoordinatorMessage::Stale { round, current });
    }

    /// Whether a node runs workers of this round.
    pub(super) fn is_current(&self, node: &Node, round: Round) -> bool {
        let placed = node.placed.is_some_and(|(placed, _)| placed == round);
        node.status == Status::Active && placed && round == self.round()
    }

    /// The current world must re-form because of a failure.
    fn interrupt_by(&mut self, reason: &str, exit: Number, failure: Failure) {
        self.interrupt(reason, Why::WorkerFailed, exit);
        self.current.blame(failure);
    }
}
