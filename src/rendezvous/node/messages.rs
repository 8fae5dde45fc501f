//! A node's handling of the coordinator's messages. Part of [`super].

use std::time::{Duration, Instant};

use super::join::{Joining, Link, Report, SLOW_TRIES};
use super::{NodeCommand, NodeMachine};
use crate::rendezvous::messages::message::{Failure, NodeMessage, Placed, Placement, Verdict, Waits};
use crate::rendezvous::messages::settings::Settings;

impl NodeMachine {
    pub(in crate::rendezvous) fn on_welcome(&mut self, addr: String, hosted: bool, recalls: bool, now: Instant) {
        if let Link::Up { welcomed, answered_at, beat_at } = &mut self.link {
            *welcomed = true;
            *beat_at = (*answered_at + self.hello.settings.keep_alive_interval).max(*beat_at);
            let hello_at = *answered_at;
            self.vouch_by_answer(hello_at, now);
        }
        self.ever_welcomed = true;
        self.hosted = hosted;
        (self.view.hosted, self.view.in_place) = (hosted, self.changes_in_place());
        self.view.stopped = None;
        self.tries = 0;
        self.unanswered = 0;
        self.view.addr = Some(addr);
        self.record_found();
        self.view.out_of_reach_since = None;
        if recalls {
            self.recall();
        }
        match &self.joining {
            Some(joining) if joining.withdrawn_at.is_some() => {
                self.commands.push(NodeCommand::Send(NodeMessage::Withdraw));
            }
            Some(_) => self.send_join(),
            None => {}
        }
        if let Some(report) = &self.report {
            self.commands.push(NodeCommand::Send(report.message()));
        }
        self.repeat_part();
        if let Some(verdict) = self.view.closed.as_ref().or(self.closing.as_ref()) {
            // Repeated, because the first Close may have been lost with its connection.
            self.commands.push(NodeCommand::Send(NodeMessage::Close(verdict.clone())));
        }
    }

    pub(in crate::rendezvous) fn on_complete(&mut self, placement: Placement) {
        let mut placement = self.with_members(placement);
        // A place that arrives after this node has given up is ignored. The withdrawal tells the coordinator.
        let wanted = |j: &&Joining| j.withdrawn_at.is_none() && placement.round > j.join.round;
        let Some(joining) = self.joining.as_ref().filter(wanted) else { return };
        // No coordinator has a node start more workers than it has offered.
        let offered = joining.join.workers.as_ref().map_or(0, |workers| workers.local_world_size);
        placement.local_world_size = placement.local_world_size.filter(|size| (1..=offered).contains(size));
        let counts = self.hello.settings.rules.workers.is_some();
        self.hello.world_workers = placement.workers.filter(|_| counts).map(|ranks| ranks.world_size);
        let began_with = placement.began_with();
        let Placement { round, rank, world_size, world, restart, host, .. } = placement;
        self.hello.placed = Some(Placed { round, rank, world_size, world, active: true, restart, host, began_with });
        (self.view.restart, self.view.failure) = (restart, None);
        self.view.round = round;
        (self.view.waiting, self.view.fenced) = (0, None);
        self.view.reason.clear();
        self.record_place(&placement);
        self.end_part();
        self.resolve(Ok(placement));
    }

    pub(in crate::rendezvous) fn on_status(
        &mut self,
        waiting: u32,
        reason: String,
        restart: u32,
        failure: Option<Box<Failure>>,
    ) {
        if let Some(placed) = &mut self.hello.placed {
            placed.restart = placed.restart.max(restart);
            self.view.restart = placed.restart;
        }
        if self.joining.is_some() || !self.hello.placed.is_some_and(|placed| placed.active) {
            return;
        }
        if waiting > 0 && matches!(self.report, Some(Report::Failed { .. })) {
            self.report = None;
        }
        if waiting > 0 {
            self.record_broken(&reason, failure.as_deref());
            self.end_part();
        }
        (self.view.waiting, self.view.reason) = (waiting, reason);
        self.view.failure = failure.map(|failure| *failure);
    }

    pub(in crate::rendezvous) fn on_closed(&mut self, verdict: &Verdict) {
        (self.report, self.closing) = (None, None);
        self.let_workers_go_on();
        self.record_closed(verdict);
        self.view.closed = Some(verdict.clone());
        self.view.all_done |= matches!(verdict, Verdict::AllDone { .. });
        if let Verdict::Failed { failure: Some(failure), .. } = verdict {
            self.view.failure = Some((**failure).clone());
        }
    }

    /// Adopt the run's lease, which differs from the one this node asked for. The coordinator judges by it, so this node must fence
    /// itself by it.
    pub(in crate::rendezvous) fn on_terms(&mut self, keep_alive_interval: Duration, keep_alive_max_attempt: u32) {
        let terms = Settings { keep_alive_interval, keep_alive_max_attempt, ..self.hello.settings.clone() };
        if terms.validate().is_err() {
            return;
        }
        self.hello.settings = terms;
        if let Link::Up { answered_at, beat_at, .. } = &mut self.link {
            *beat_at = (*beat_at).min(*answered_at + keep_alive_interval);
        }
    }

    /// The coordinator's process ends. As with a refused connection, no coordinator decides there any more.
    pub(in crate::rendezvous) fn on_leaving(&mut self, why: String, interrupts: bool, now: Instant) {
        self.vouch(self.attempt_at, now);
        self.view.stopped = Some(why);
        let interrupts = interrupts || self.awaits_check();
        if interrupts && self.joining.is_none() && self.hello.placed.is_some_and(|placed| placed.active) {
            self.end_part();
            self.view.waiting = self.view.waiting.max(1);
            self.view.reason = self.why_out_of_reach();
        }
        self.commands.push(NodeCommand::Disconnect);
        // The process may take a while to end, so reconnecting starts slowly.
        self.tries = self.tries.max(SLOW_TRIES);
        self.lose("its process ends".to_owned(), now);
    }

    /// A heartbeat was answered. Answers come in the order of the heartbeats.
    pub(in crate::rendezvous) fn on_answer(&mut self, now: Instant) {
        let Some(sent_at) = self.beats.pop_front() else { return };
        self.tallies.on_answer(now.saturating_duration_since(sent_at));
        if let Link::Up { answered_at, .. } = &mut self.link {
            *answered_at = sent_at;
        }
        self.vouch_by_answer(sent_at, now);
    }

    pub(in crate::rendezvous) fn on_waits(&mut self, waits: Option<Waits>, now: Instant) {
        match (&mut self.joining, waits) {
            (Some(joining), Some(Waits { progress, spare })) => {
                joining.progress = Some(progress);
                joining.be_spare(spare, now);
            }
            (None, Some(Waits { progress, .. })) if matches!(self.report, Some(Report::Done { .. })) => {
                self.view.unfinished = Some(progress);
            }
            _ => {}
        }
    }
}
