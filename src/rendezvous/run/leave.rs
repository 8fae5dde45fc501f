//! Nodes leave, and members report how their workers are. A node withdraws, leaves, perhaps after a notice, is lost, or is sent away because
//! its host is out. Its workers make steps, and finish. The coordinator's own process ends.
//!
//! Without a coordinator no world can form. If the host's node leaves before the job has ended, the coordinator notifies every node,
//! closes all sessions, and decides nothing more. SIGINT or SIGQUIT at the host's terminal ends the job. After any other end, such as
//! a moved pod, a coordinator may come back to the same address.

use std::time::{Duration, Instant};

use super::Run;
use super::event::{CoordinatorInstance, Effect, SessionId};
use super::hosts::{Consequence, Entry};
use super::in_place::Leaver;
use super::node::{Node, Origin, Status};
use crate::events::record::{FirstStep, Kind, LONGEST_US, Loss, Number, Phase, Why};
use crate::hang::judge;
use crate::rendezvous::messages::message::{
    CheckpointBy, CoordinatorMessage, GATHER, Hello, HostInstance, LARGEST_STEP, LONGEST_NOTICE_MS, NodeId, Placed,
    Progress, Replay, Round, StepReport, Verdict,
};
use crate::rendezvous::messages::settings::LAST_LOOK;
use crate::wire::text::tidy;

/// How often a node may report how long its parts of a round have taken.
const MOST_REPORTED: u8 = 2;

impl Run {
    /// A node gives up waiting.
    pub(super) fn on_withdraw(&mut self, id: NodeId, session: SessionId, now: Instant) {
        let progress = self.progress(now);
        self.send(session, CoordinatorMessage::Withdrawn { progress });
        let placed = self.roster.get(id).is_some_and(|node| node.status == Status::Active);
        let what = if placed { "gave up waiting just as the round completed" } else { "gave up waiting" };
        self.withdraw(id, what, Why::NodeWithdrew, None);
    }

    /// A member asks to leave.
    pub(super) fn on_will_leave(&mut self, id: NodeId, session: SessionId, round: Round, reason: &str, at_once: bool) {
        let over = self.current.interrupted().is_some() || self.current.notified();
        if over || !self.is_capable_member(id, round) {
            return; // it learns that its round is over
        }
        let label = self.roster.label(id);
        let reason = tidy(reason);
        if !self.roster.unfinished().iter().any(|other| *other != id) {
            return self
                .send(session, self.over(format!("no other node has work left, so {label} may leave: {reason}")));
        }
        let known = self.leaver().filter(|_| self.in_place.leaving().contains_key(&id));
        let text = format!("is about to leave: {reason}");
        let leaves = known.unwrap_or_else(|| self.record_of(id, Kind::NodeLeaves {}, None, text));
        if at_once {
            return self.interrupt(&format!("{label} is about to leave: {reason}"), Why::NodeLeft, leaves);
        }
        let taken_away = self.in_place.is_taken_away(id);
        self.in_place.announce(id, Leaver { reason, not_before: None, taken_away });
    }

    /// The machine of a member is about to be taken away: all members save, and the world changes without it, by one change for all
    /// notices that come together.
    pub(super) fn on_notice(&mut self, id: NodeId, round: Round, left_ms: u64, reason: &str, now: Instant) {
        let (reason, left_ms) = (tidy(reason), left_ms.min(LONGEST_NOTICE_MS));
        let left = Duration::from_millis(left_ms);
        if !self.roster.get(id).is_some_and(|node| self.is_current(node, round)) {
            return; // the round is over for it
        }
        if !self.is_host(id) {
            self.roster.set_gone_at(id, now + left);
        }
        if self.in_place.leaving().contains_key(&id) {
            return; // this is known
        }
        let text = format!("leaves within {:.1} s: {reason}", left.as_secs_f64());
        self.record_of(id, Kind::NodeLeaves {}, None, text);
        let over = self.current.interrupted().is_some() || self.current.notified();
        if !over && self.in_place.pushes_checkpoint(now) {
            let reason = format!("{}: {reason}", self.roster.label(id));
            let sessions: Vec<_> = self.roster.active().iter().filter_map(|id| self.session(*id)).collect();
            for session in sessions {
                let news = CheckpointBy { round, left_ms, reason: reason.clone() };
                self.send(session, CoordinatorMessage::CheckpointBy(news));
            }
        }
        let own = now + GATHER.min(left / 3);
        let not_before = Some(self.in_place.leaves_from(now).map_or(own, |first| first.min(own)));
        self.in_place.announce(id, Leaver { reason, not_before, taken_away: true });
    }

    /// The workers of a member that leaves have stopped at the common check.
    pub(super) fn on_parked(&mut self, id: NodeId, round: Round, now: Instant) {
        let leaves = self.in_place.check().is_some() && self.in_place.leaving().contains_key(&id);
        if !leaves || !self.is_capable_member(id, round) {
            return;
        }
        self.note(format!("{} has stopped its workers, and leaves", self.roster.label(id)));
        if !self.in_place.is_taken_away(id) {
            self.count_departure(id, now);
        }
        self.roster.set_status(id, Status::Idle);
        self.in_place.forget(id);
        self.in_place.has_parked(id);
        self.in_place.someone_has_stopped(now);
    }

    /// Members that leave and have saved may go once all others have, or the change is over.
    pub(super) fn let_savers_go(&mut self) {
        if self.in_place.is_changing() && !self.roster.active().is_empty() {
            return;
        }
        for session in self.in_place.take_saved().into_iter().filter_map(|id| self.session(id)).collect::<Vec<_>>() {
            let message = self.over("all workers have stopped for the change".to_owned());
            self.send(session, message);
        }
    }

    /// A node leaves. Returns whether that may change the decision.
    pub(super) fn on_leave(
        &mut self,
        id: NodeId,
        session: SessionId,
        reason: &str,
        signal: Option<i32>,
        now: Instant,
    ) -> bool {
        let reason = tidy(reason);
        let left = self.record_of(id, Kind::NodeLeft { signal }, None, format!("left: {reason}"));
        if self.is_host(id) {
            self.on_host_left(id, session, &reason, signal, left, now);
            return false;
        }
        self.depart(id, &format!("left: {reason}"), Why::NodeLeft, left, now);
        self.remove(id);
        self.emit(Effect::End { session });
        true
    }

    /// Make a waiting or running node idle. A running node interrupts the world, unless it or the whole job has finished. `cause`: the
    /// event that caused it, if one did.
    pub(super) fn withdraw(&mut self, id: NodeId, what: &str, why: Why, cause: Option<Number>) {
        let Some(node) = self.roster.get(id) else { return };
        let (waits, name) = (node.waits(), node.name.clone());
        let reason = (node.status == Status::Active && !node.done).then(|| format!("{} {what}", node.label()));
        if waits {
            let text = format!("{} no longer waits: it {what}", node.label());
            self.record(Kind::NodeWithdrew {}, Some(&name), cause, text);
        }
        self.roster.set_status(id, Status::Idle);
        self.in_place.forget(id);
        if let Some(reason) = reason.filter(|_| !self.parts().is_all_done()) {
            let cause = cause.unwrap_or_else(|| self.record(Kind::NodeWithdrew {}, Some(&name), None, None));
            self.interrupt(&reason, why, cause);
        }
        let newcomers_left = self.roster.waiting().len() > self.roster.counts().returning;
        if !newcomers_left {
            self.pace.newcomer_since = None;
        }
    }

    /// Handle a node's departure. If it ran workers, the departure counts against its host (`rejoin_limit`).
    pub(super) fn depart(&mut self, id: NodeId, what: &str, why: Why, cause: Number, now: Instant) {
        if !self.in_place.is_taken_away(id) {
            self.count_departure(id, now);
        }
        self.withdraw(id, what, why, Some(cause));
    }

    /// Forget a node and free its identity.
    pub(super) fn remove(&mut self, id: NodeId) {
        let rank = self.roster.get(id).and_then(|node| self.roster.last_rank(node));
        rank.into_iter().for_each(|rank| self.recovery.on_left(rank));
        self.in_place.forget(id);
        self.trace.forget(id);
        self.roster.set_check(id, None);
        self.admission.release(id, self.roster.get(id));
        self.roster.remove(id);
    }

    /// Log that a node is lost, and remove it.
    pub(super) fn lose(&mut self, id: NodeId, how: Loss, what: &str, now: Instant) {
        let Some(node) = self.roster.get(id) else { return };
        let origin = node.origin();
        let silent_ms = match how {
            Loss::Lease | Loss::Notice => None,
            Loss::Connection | Loss::Silence => u64::try_from((now - node.received_at).as_millis()).ok(),
        };
        let lost = self.record_of(id, Kind::NodeLost { how, silent_ms }, None, what.to_owned());
        let expected = self.in_place.is_taken_away(id);
        let first = !expected && self.hosts.is_first_failure(id, &self.roster, &self.current);
        self.depart(id, what, Why::NodeLost, lost, now);
        if first {
            self.on_first_failure(&origin, None, now);
        }
        self.remove(id);
    }

    /// The process of a node has ended. One that is connected is another process's, or was not meant.
    pub(super) fn on_dead(&mut self, id: NodeId, now: Instant) {
        if self.roster.get(id).is_some_and(|node| node.session.is_none()) {
            self.lose(id, Loss::Connection, "is lost: its process has ended", now);
            self.roster.look_when_lost();
        }
    }

    /// Remove such nodes that are lost by now, and set the next deadline.
    pub(super) fn expire(&mut self, such: impl Fn(&Node) -> bool, now: Instant) {
        if self.roster.lost_by().is_none_or(|at| now < at) {
            return;
        }
        for id in self.roster.lost(now) {
            let Some(node) = self.roster.get(id).filter(|node| such(node)) else { continue };
            let session = node.session;
            let ago = (now - node.received_at).as_secs_f64();
            let (how, what) = match session {
                _ if node.is_gone(now) => {
                    (Loss::Notice, "is lost: its machine was taken away, and it had not left by then".to_owned())
                }
                None => (Loss::Connection, format!("is lost: its connection ended {ago:.1} s ago")),
                Some(_) => {
                    let silent = (node.lease + LAST_LOOK).as_secs_f64();
                    (Loss::Silence, format!("is lost: silent for {silent:.1} s"))
                }
            };
            self.lose(id, how, &what, now);
            session.into_iter().for_each(|session| self.emit(Effect::End { session }));
        }
        self.roster.look_when_lost();
    }

    /// Count a departure against the node's host, if the node ran workers.
    pub(super) fn count_departure(&mut self, id: NodeId, now: Instant) {
        let open = self.current.closed().is_none();
        let running = self.roster.get(id).filter(|node| open && node.status == Status::Active && !node.done);
        let Some(origin) = running.map(Node::origin) else { return };
        if self.hosts.on_departure(&origin, &self.settings, now) {
            self.emit(Effect::Exclusions);
        }
    }

    /// Count a round's first failure against a host: that of the worker with this rank, or of a node that was lost.
    pub(super) fn on_first_failure(&mut self, origin: &Origin, rank: Option<u32>, now: Instant) {
        let consequence = self.hosts.on_first_failure(origin, rank, &self.settings, now);
        self.apply_to_hosts(consequence, now);
    }

    /// Record an event of a host. If other hosts are kept out than before, apply that to the nodes that wait.
    pub(super) fn apply_to_hosts(&mut self, Consequence { records, changes }: Consequence, now: Instant) {
        for (kind, text) in records {
            let failed = matches!(kind, Kind::HostFailed { .. } | Kind::HostOut { .. });
            self.record(kind, None, self.trace.broken().filter(|_| failed), text);
        }
        if !changes {
            return;
        }
        for (id, session, entry) in self.hosts.entries(&self.roster, now) {
            match (entry, session) {
                (Entry::Never, Some(session)) => self.evict(id, session, now),
                _ => self.keep_out(id, entry != Entry::Open, now),
            }
        }
        self.emit(Effect::Exclusions);
    }

    /// Record whether a waiting node's host is out.
    pub(super) fn keep_out(&mut self, id: NodeId, out: bool, now: Instant) {
        let Some(node) = self.roster.get(id).filter(|node| node.out != out) else { return };
        let (new, session) = (self.roster.last_rank(node).is_none(), node.session);
        if !out && node.checks_health() {
            self.check_again(id, session, now);
        }
        self.roster.set_out(id, out);
        if !out && new {
            self.pace.newcomer_since.get_or_insert(now);
        }
    }

    /// End the session of a node whose host is out for the job.
    pub(super) fn evict(&mut self, id: NodeId, session: SessionId, now: Instant) {
        let Some(origin) = self.roster.get(id).map(Node::origin) else { return };
        let Some((why, reason)) = self.hosts.refusal(&origin, &self.settings, now) else { return };
        self.withdraw(id, "is sent away: its host is out for the job", Why::NodeWithdrew, None);
        self.remove(id);
        self.refuse(session, why, reason);
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

    /// Record how long a node's phases of the last recovery have taken. Rank 0's node reports twice: when its workers were started, and when
    /// all workers are there.
    pub(super) fn on_phase(&mut self, id: NodeId, round: Round, phase: Phase) {
        let is_new = |node: &Node| self.is_current(node, round) && node.phases_reported < MOST_REPORTED;
        let Some(node) = self.roster.get(id).filter(|node| is_new(node)) else { return };
        let name = node.name.clone();
        self.roster.count_phase(id);
        let phase = phase.bounded();
        self.trace.imported(phase.import_us);
        self.record(Kind::Phase(phase), Some(&name), self.trace.completed(), None);
    }

    /// Record a node's first step of the round. Only rank 0's node knows how long the import took, and each node reports the time since
    /// its start: what remains is the step's.
    pub(super) fn on_first_step(&mut self, id: NodeId, round: Round, first: Progress) {
        let is_new = |node: &Node| self.is_current(node, round) && !node.first_step_reported;
        let Some(node) = self.roster.get(id).filter(|node| is_new(node)) else { return };
        let name = node.name.clone();
        self.roster.set_first_step_reported(id);
        if self.limit().is_some() {
            self.budget.on_first_step(first.step);
        }
        let bounded = |number: u64| number.min(LARGEST_STEP);
        let first_step = FirstStep {
            step: first.step.map(bounded),
            step_before: first.before.map(bounded),
            step_time_us: first.step_time_us.map(|micros| micros.min(LONGEST_US)),
            ..FirstStep::parts(first.after_us, self.trace.import_us(), first.formed_us)
        };
        self.record(Kind::FirstStep(first_step), Some(&name), self.trace.completed(), None);
    }

    /// A member reports what it recorded under the coordinator before this one.
    pub(super) fn on_replay(&mut self, id: NodeId, replay: Replay) {
        let Some(name) = self.roster.get(id).map(|node| node.name.clone()) else { return };
        for reported in self.trace.on_replay(id, &name, replay) {
            self.record(Kind::Replayed(Box::new(reported)), Some(&name), None, None);
        }
    }

    /// A node reports how far its workers are.
    pub(super) fn on_step(&mut self, id: NodeId, round: Round, report: StepReport, now: Instant) {
        let Some(node) = self.roster.get(id).filter(|node| self.is_current(node, round)) else { return };
        let is_first = node.placed == Some((round, 0));
        self.trace.watch_mut().on_step(id, is_first, report, now);
    }

    /// Answer a report about a round that is over for the node.
    pub(super) fn stale(&mut self, label: String, session: SessionId, round: Round) {
        let current = self.round();
        self.note(format!(
            "a report of {label} about round {round} is ignored: that round is over, the current one is {current}"
        ));
        self.send(session, CoordinatorMessage::Stale { round, current });
    }

    /// Whether a node runs workers of this round.
    pub(in crate::rendezvous) fn is_current(&self, node: &Node, round: Round) -> bool {
        let placed = node.placed.is_some_and(|(placed, _)| placed == round);
        node.status == Status::Active && placed && round == self.round()
    }

    /// The coordinator has seen how the training stands. No decision changes.
    pub(super) fn on_seen(&mut self, kind: Kind, node: Option<&str>, text: String) -> bool {
        let cause = self.trace.hang().filter(|_| matches!(kind, Kind::HangOver { .. }));
        self.record(kind, node, cause, text);
        false
    }

    /// How standstills of this run are judged.
    pub(in crate::rendezvous) fn hang_options(&self) -> judge::Options {
        self.settings.rules.hang
    }

    /// Number of workers of the current world, if it is known.
    pub(in crate::rendezvous) fn worker_count(&self) -> Option<u32> {
        self.current.world()?.worker_count()
    }

    /// Record which node is in the coordinator's own process. The claim is checked against the number of that process.
    pub(super) fn record_host(&mut self, hello: &Hello, instance: Option<CoordinatorInstance>) {
        if let Some(instance) = instance.filter(|instance| hello.hosts && hello.process == instance.process) {
            self.host = Some((hello.node, instance));
        }
    }

    /// Whether the node is in the coordinator's own process.
    pub(super) fn is_host(&self, id: NodeId) -> bool {
        self.host.is_some_and(|(host, _)| host == id)
    }

    /// The host's rank in the current world, and where it listens, for the members.
    pub(super) fn host_rank(&self) -> Option<HostInstance> {
        let (id, instance) = self.host?;
        let rank = self.roster.get(id).and_then(|node| self.roster.last_rank(node))?;
        Some(HostInstance { rank, instance_id: instance.instance_id?, incarnation: instance.incarnation })
    }

    /// Evaluate a member's statement about the process that hosted the former coordinator. That process has ended if this coordinator
    /// listens at the same address in another process.
    pub(super) fn record_former_host(&mut self, placed: Placed, instance: Option<CoordinatorInstance>) {
        self.recovery.record_host(placed.host, |host| {
            instance.is_some_and(|instance| {
                instance.instance_id == Some(host.instance_id) && instance.incarnation != host.incarnation
            })
        });
    }

    /// Handle that the node in this coordinator's own process has left.
    pub(super) fn on_host_left(
        &mut self,
        id: NodeId,
        session: SessionId,
        reason: &str,
        signal: Option<i32>,
        left: Number,
        now: Instant,
    ) {
        self.emit(Effect::End { session });
        let label = self.roster.label(id);
        // Members that stop their workers together for this know it already.
        let must_re_form = self.parts().waiting_for_members() > 0 && self.in_place.check().is_none();
        self.depart(id, &format!("left: {reason}"), Why::NodeLeft, left, now);
        let interrupts = must_re_form || self.current.interrupted().is_some();
        self.remove(id);
        self.host = None;
        self.close_if_all_done();
        if self.current.closed().is_none() && signal.is_some_and(is_from_keyboard) {
            let cause = format!("{reason}, and its process hosted the coordinator");
            self.close(Verdict::Stopped { by: label.clone(), cause }, Some(left));
            self.end_all(None);
        }
        let why = format!("its host {label} left: {reason}");
        self.emit(Effect::HostLeft { why, interrupts });
    }

    /// End all sessions and forget all nodes, because this coordinator's process ends. A closed run stays, so that a late node can
    /// still learn how it ended.
    pub(super) fn on_coordinator_ends(&mut self, why: &str, interrupts: bool) {
        if self.current.closed().is_some() {
            return;
        }
        self.end_all(Some(CoordinatorMessage::Leaving { why: why.to_owned(), interrupts }));
        let text = format!("this coordinator ends, and no world can form without it: {why}");
        self.record(Kind::CoordinatorEnds {}, None, None, text);
        // Nodes with a broken connection are left: they will find no coordinator.
        self.roster.ids().into_iter().for_each(|id| self.remove(id));
    }

    /// End all sessions, and forget the nodes that had one.
    fn end_all(&mut self, last_message: Option<CoordinatorMessage>) {
        for id in self.roster.ids() {
            let Some(session) = self.session(id) else { continue };
            if let Some(message) = last_message.clone() {
                self.send(session, message);
            }
            self.emit(Effect::End { session });
            self.remove(id);
        }
    }
}

/// Whether a terminal sends this signal for Ctrl-C or Ctrl-\: SIGINT, SIGQUIT.
pub(super) fn is_from_keyboard(signal: i32) -> bool {
    matches!(signal, 2 | 3)
}
