//! What the coordinator sends to a node, and what the node makes of it. Part of [`super`].

use std::time::{Duration, Instant};

use super::{JoinError, NodeCommand, NodeMachine};
use crate::rendezvous::messages::bounds::tidy_message;
use crate::rendezvous::messages::look::ROUND_CHANGES;
use crate::rendezvous::messages::message::{
    CoordinatorMessage, Failure, NodeMessage, Placed, Placement, Verdict, Waits,
};
use crate::rendezvous::messages::settings::Settings;

impl NodeMachine {
    /// A message of the coordinator has arrived.
    pub fn on_message(&mut self, message: CoordinatorMessage, now: Instant) {
        self.records.tick(now);
        // A message that has waited for this process may count on workers whose lease is over by now.
        self.fence_if_due(now);
        if self.joins.has_lost_survivors() && self.link.is_down() {
            return; // the fence has ended the connection
        }
        match tidy_message(message) {
            CoordinatorMessage::Rejected { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Ended { reason } => self.fail(JoinError::Rejected(reason)),
            CoordinatorMessage::Welcome { addr, hosted, running, wants_replay } => {
                self.in_place.on_welcome(running);
                self.on_welcome(addr, hosted, wants_replay, now);
            }
            CoordinatorMessage::Terms { keep_alive_interval, keep_alive_max_attempt } => {
                self.on_terms(keep_alive_interval, keep_alive_max_attempt);
            }
            CoordinatorMessage::Heartbeat { waits } => {
                if let Some(sent_at) = self.link.on_heartbeat_answered(now) {
                    self.renew_by_answer(sent_at, now);
                }
                self.on_waits(waits, now);
            }
            CoordinatorMessage::Waits(waits) => self.on_waits(Some(waits), now),
            CoordinatorMessage::Members { round, addresses, more } => self.joins.on_members(round, addresses, more),
            CoordinatorMessage::Complete(placement) => self.on_complete(placement),
            CoordinatorMessage::Withdrawn { progress } => {
                if let Some(after) = self.joins.on_withdrawn() {
                    self.resolve(Err(JoinError::Timeout { after, progress, endpoint: self.backend.endpoint() }));
                }
            }
            CoordinatorMessage::Status { waiting, reason, restart, failure } => {
                self.on_status(waiting, reason, restart, failure);
            }
            CoordinatorMessage::Stale { round, current } => {
                if self.reports.unanswered().is_some_and(|result| result.round() == round) {
                    let reason = format!("round {round} is over; the current one is {current}");
                    self.on_status(1, reason, self.view.restart, None);
                }
            }
            CoordinatorMessage::Change(change) if self.is_member(change.round) && self.view.waiting == 0 => {
                if self.in_place.on_change(change.round, now) {
                    self.records.on_change(self.view.round, &change.reason);
                    self.view.changes += 1;
                    (self.view.change, self.view.raise_at) = (Some(change), None);
                }
            }
            CoordinatorMessage::RaiseAt { round, check } if self.is_member(round) => {
                match self.in_place.on_raise_at(round, check) {
                    Ok(None) => {}
                    Ok(raise_at) => self.view.raise_at = raise_at,
                    Err(reason) => self.break_off(reason),
                }
            }
            CoordinatorMessage::Change(_) | CoordinatorMessage::RaiseAt { .. } => {}
            CoordinatorMessage::Look(look) if self.is_member(look.round) => {
                (self.view.looks_asked, self.view.look) = (self.view.looks_asked + 1, Some(look));
            }
            CoordinatorMessage::Look(look) => {
                self.report_look(look.number, Vec::new(), Some(ROUND_CHANGES.to_owned()), None);
            }
            CoordinatorMessage::Hang(news) => {
                if let Some(news) = news.tidied().filter(|news| self.is_member(news.round)) {
                    (self.view.hangs, self.view.hang) = (self.view.hangs + 1, Some(news));
                }
            }
            CoordinatorMessage::CheckpointBy(news) => {
                if self.is_member(news.round) {
                    (self.view.notices, self.view.checkpoint_by) = (self.view.notices + 1, Some(news));
                }
            }
            CoordinatorMessage::CheckHealth => self.view.checks_asked += 1,
            CoordinatorMessage::Looked(_) => {} // no node asks for it
            CoordinatorMessage::ReportStep { round } => self.view.steps_asked += u64::from(self.is_member(round)),
            CoordinatorMessage::Closed { verdict, spare } => {
                self.on_closed(&verdict);
                self.resolve(Err(JoinError::Closed { verdict, spare }));
            }
            CoordinatorMessage::Over { verdict, ago } => {
                self.on_closed(&verdict);
                let (run_id, memory) = (self.hello.run_id.clone(), self.backend.memory());
                let over = JoinError::Over { run_id, verdict, ago, memory };
                self.view.over = Some(over.clone());
                self.resolve(Err(over));
            }
            CoordinatorMessage::Leaving { why, interrupts } => self.on_leaving(why, interrupts, now),
            CoordinatorMessage::Redirect { endpoint, why } => self.on_redirect(endpoint, why, now),
            CoordinatorMessage::Observed(_) | CoordinatorMessage::Peer { .. } => {} // no node asks for it
        }
        if self.has_coordinator() && !self.is_out() && self.lease.take_unreported() {
            self.send(NodeMessage::Fenced);
        }
    }

    /// The Hello was accepted. What may have been lost with the last connection is sent again.
    fn on_welcome(&mut self, addr: String, hosted: bool, replays: bool, now: Instant) {
        if let Some(hello_at) = self.link.on_welcome(self.hello.settings.keep_alive_interval) {
            self.renew_by_answer(hello_at, now);
        }
        // With a list another process may decide while this one stands still.
        self.lease.on_welcome(hosted && !self.link.has_list());
        (self.view.hosted, self.view.in_place) = (hosted, self.changes_in_place());
        (self.view.addr, self.view.stopped) = (Some(addr), None);
        if let Some(since) = self.view.out_of_reach_since.take() {
            self.records.on_found(&self.backend.name(), since);
        }
        let replay = if replays { self.records.replay() } else { None };
        self.commands.extend(replay.map(NodeCommand::Send));
        match self.joins.pending() {
            Some(pending) if pending.is_withdrawn() => self.send(NodeMessage::Withdraw),
            Some(_) => self.send_join(),
            None => {}
        }
        let result = self.reports.unanswered().map(|result| result.message());
        self.commands.extend(result.map(NodeCommand::Send));
        let round = self.hello.placed.map(|placed| placed.round).filter(|round| self.is_member(*round));
        for message in round.map(|round| self.in_place.repeated(round, now)).unwrap_or_default() {
            self.send(message);
        }
        let verdict = self.view.closed.as_ref().or(self.reports.closing()).cloned();
        self.commands.extend(verdict.map(|verdict| NodeCommand::Send(NodeMessage::Close(verdict))));
    }

    /// Adopt the run's lease, which differs from the one this node asked for. The coordinator judges by it, so this node must fence
    /// itself by it.
    fn on_terms(&mut self, keep_alive_interval: Duration, keep_alive_max_attempt: u32) {
        let terms = Settings { keep_alive_interval, keep_alive_max_attempt, ..self.hello.settings.clone() };
        if terms.validate().is_ok() {
            self.hello.settings = terms;
            self.link.on_terms(keep_alive_interval);
        }
    }

    /// The progress of the round, or of the job for a node whose workers have succeeded.
    fn on_waits(&mut self, waits: Option<Waits>, now: Instant) {
        let Some(waits) = waits else { return };
        if !self.joins.on_waits(&waits, now) && self.reports.are_done() {
            self.view.unfinished = Some(waits.progress);
        }
    }

    /// The round is complete, with this node in it.
    fn on_complete(&mut self, placement: Placement) {
        let Some(placement) = self.joins.on_complete(placement) else { return };
        let counts = self.hello.settings.rules.workers.is_some();
        self.hello.world_workers = placement.workers.filter(|_| counts).map(|ranks| ranks.world_size);
        let began_with = placement.began_with();
        let Placement { round, rank, world_size, world, restart, host, .. } = placement;
        self.hello.placed = Some(Placed { round, rank, world_size, world, active: true, restart, host, began_with });
        (self.view.round, self.view.restart, self.view.failure) = (round, restart, None);
        (self.view.waiting, self.view.fenced) = (0, None);
        self.view.reason.clear();
        self.records.on_placed(&placement);
        self.end_change();
        self.resolve(Ok(placement));
    }

    /// The state of the world has changed.
    fn on_status(&mut self, waiting: u32, reason: String, restart: u32, failure: Option<Box<Failure>>) {
        if let Some(placed) = &mut self.hello.placed {
            placed.restart = placed.restart.max(restart);
            self.view.restart = placed.restart;
        }
        if self.joins.pending().is_some() || !self.runs_workers() {
            return;
        }
        if waiting > 0 {
            self.reports.on_broken();
            self.records.on_broken(self.view.round, &reason, failure.as_deref());
            self.end_change();
        }
        (self.view.waiting, self.view.reason) = (waiting, reason);
        self.view.failure = failure.map(|failure| *failure);
    }

    /// The job is over.
    fn on_closed(&mut self, verdict: &Verdict) {
        self.reports.on_closed();
        if let Some(never) = self.in_place.let_workers_go_on() {
            self.view.raise_at = Some(never);
        }
        self.records.on_closed(verdict);
        self.view.closed = Some(verdict.clone());
        self.view.all_done |= matches!(verdict, Verdict::AllDone { .. });
        if let Verdict::Failed { failure: Some(failure), .. } = verdict {
            self.view.failure = Some((**failure).clone());
        }
    }

    /// Record that the connection is lost, and schedule the next attempt.
    pub(super) fn lose(&mut self, cause: String, now: Instant) {
        self.note_lost(&cause, now);
        self.link.on_lost(cause, now);
    }

    fn note_lost(&mut self, cause: &str, now: Instant) {
        self.records.tick(now);
        // Only the first time.
        if self.view.out_of_reach_since.is_none() {
            self.records.on_lost(&self.backend.name(), cause);
        }
        self.joins.on_lost();
        self.view.out_of_reach_since.get_or_insert(now);
    }

    /// End a connection on which nothing was answered for a lease.
    pub(super) fn end_silent_link(&mut self, now: Instant) {
        self.commands.push(NodeCommand::Disconnect);
        self.lose(format!("{} was silent for {:.1?}", self.backend.address(), self.hello.settings.lease()), now);
    }

    /// The coordinator is at another endpoint, or nobody leads yet. A node follows to endpoints of its own list alone.
    fn on_redirect(&mut self, endpoint: Option<String>, why: String, now: Instant) {
        self.commands.push(NodeCommand::Disconnect);
        let place = endpoint.as_deref().and_then(|endpoint| self.backend.place_of(endpoint));
        let why = match (&endpoint, place) {
            (None, _) => why,
            (Some(endpoint), Some(_)) => format!("the coordinator is at {endpoint}"),
            (Some(endpoint), None) => format!(
                "the coordinator is at {endpoint}, which this node was not given: give all nodes the same --rdzv-endpoint"
            ),
        };
        self.note_lost(&why, now);
        self.link.on_redirected(place, why, now);
    }

    /// The coordinator's process ends. As with a refused connection, no coordinator decides there any more. One at another endpoint may.
    fn on_leaving(&mut self, why: String, interrupts: bool, now: Instant) {
        if !self.link.has_list() {
            self.renew(self.link.attempt_at(), now);
        }
        self.view.stopped = Some(why);
        let interrupts = interrupts || self.in_place.awaits_check();
        if interrupts && self.joins.pending().is_none() && self.runs_workers() {
            self.end_change();
            self.interrupt(self.why_out_of_reach());
        }
        self.commands.push(NodeCommand::Disconnect);
        self.link.slow_down();
        self.lose("its process ends".to_owned(), now);
    }
}
