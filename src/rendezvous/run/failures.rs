//! Workers fail, or the training hangs: whether the workers are restarted, and what that costs.

use std::time::Instant;

use super::Run;
use super::budget::{Crash, Judgement, Limit, NEW_WORKER_FAILURES};
use super::event::SessionId;
use super::node::{Node, Origin};
use crate::events::record::{Kind, Number, Why};
use crate::hosts::WhyUnused;
use crate::rendezvous::messages::bounds::tidy_failure;
use crate::rendezvous::messages::message::{EndClass, Failure, NodeId, Round, Verdict};

/// Why a failure does not count.
struct Excuse {
    /// In words, after "not counted, ".
    why: String,
    /// The host that is not used any more, if it is at fault.
    host_is_out: Option<(Origin, WhyUnused)>,
}

impl Run {
    /// Handle a worker's failure. Only the first failure of a round is counted. A later one, or one after members were notified to
    /// re-form, is taken for a consequence. Before all members have reported to a restarted coordinator, any failure may be one: it is
    /// not counted. Members are notified at once, since workers whose collective has failed wait only seconds for news.
    pub(super) fn on_failed(&mut self, id: NodeId, session: SessionId, round: Round, failure: &Failure, now: Instant) {
        let Some(node) = self.roster.get(id).filter(|_| self.current.closed().is_none()) else { return };
        if !self.is_current(node, round) {
            return self.stale(node.label(), session, round);
        }
        let failure = tidy_failure(failure, node.label());
        let name = node.name.clone();
        if self.current.interrupted().is_some() || self.current.notified() {
            let text = format!("{failure}; not counted, a consequence of this: {}", self.parts().why());
            self.record(Kind::WorkerExited(failure.exit(false, false)), Some(&name), self.trace.broken(), text);
            return self.send(session, self.status());
        }
        if let Some(excuse) = self.excuse(id, &failure, now) {
            let exit = self.record(Kind::WorkerExited(failure.exit(true, false)), Some(&name), None, None);
            let reason = format!("{failure}; not counted, {}", excuse.why);
            self.interrupt_by(&reason, exit, Failure { counts: false, ..failure });
            return excuse.host_is_out.into_iter().for_each(|(origin, why)| self.put_out(&origin, why, now));
        }
        let exit = self.record(Kind::WorkerExited(failure.exit(true, failure.counts)), Some(&name), None, None);
        if !failure.counts {
            // The worker lives, and has left its world on purpose. Neither the budget nor its host answers for that.
            return self.interrupt_by(&failure.to_string(), exit, failure);
        }
        if let Some(code) = self.settings.rules.never_restarted(&failure) {
            let why = format!("exit code {code} is never restarted (no_restart_on)");
            return self.fail(EndClass::Program, failure, &why, exit);
        }
        let Some(node) = self.roster.get(id) else { return };
        let (origin, rank) = (node.origin(), failure.global_rank);
        if let Some(limit) = self.limit() {
            return self.on_crash(origin, limit, exit, failure, now);
        }
        match self.settings.max_restarts {
            Some(limit) if self.current.restart() >= limit => {
                let restarts = if limit == 0 {
                    "no restarts are allowed".to_owned()
                } else {
                    format!("no restarts left: all {limit} restarts are used up")
                };
                self.fail(EndClass::Program, failure, &format!("{restarts} (max_restarts)"), exit);
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

    /// Why the first failure of a round does not count. `None`: it counts.
    fn excuse(&mut self, id: NodeId, failure: &Failure, now: Instant) -> Option<Excuse> {
        if self.recovery.awaits_members() {
            let round = self.round();
            let why = format!("since not all members of round {round} have reported to the restarted coordinator");
            return Some(Excuse { why, host_is_out: None });
        }
        let unreachable = self.roster.of(self.roster.active()).find(|(_, node)| node.session.is_none());
        if let Some((gone_id, gone)) = unreachable.map(|(id, node)| (id, node.label())) {
            // Workers notice that a peer's connection is gone before the reconnect grace of the peer's agent is over.
            self.hosts.await_loss(Some(gone_id));
            return Some(Excuse { why: format!("since the connection of {gone} has ended"), host_is_out: None });
        }
        let limit = self.limit().filter(|_| self.settings.rules.never_restarted(failure).is_none())?;
        let origin = self.roster.get(id)?.origin();
        if !failure.counts || !self.in_place.is_new_worker(failure.global_rank) || !self.spares(&origin) {
            return None;
        }
        let count = self.budget.on_new_worker(failure, &origin, limit, now)?;
        let others = "since it was new, and the others go on with what they have";
        let why = format!("{others}; {count} of {NEW_WORKER_FAILURES} failures of new workers on host {origin}");
        let out = WhyUnused::NewWorkersFailed { count, last: failure.exit.clone(), window: limit.window };
        Some(Excuse { why, host_is_out: (count >= NEW_WORKER_FAILURES).then_some((origin, out)) })
    }

    /// Whether the job can go on without a host.
    fn spares(&self, origin: &Origin) -> bool {
        let elsewhere = |(_, node): &(NodeId, &Node)| node.origin() != *origin && !node.is_kept_out();
        self.roster.iter().filter(elsewhere).count() >= self.settings.min_nodes as usize
    }

    fn put_out(&mut self, origin: &Origin, why: WhyUnused, now: Instant) {
        let consequence = self.hosts.put_out(origin, why, &self.settings, now);
        self.apply_to_hosts(consequence, now);
    }

    /// Handle a worker's failure that counts against a sliding budget.
    fn on_crash(&mut self, origin: Origin, limit: Limit, exit: Number, failure: Failure, now: Instant) {
        let step = failure.step.or(self.trace.watch().step);
        let crash = Crash { failure: &failure, origin: origin.clone(), step, spares_host: self.spares(&origin) };
        match self.budget.on_crash(&self.id, &crash, limit, now) {
            Judgement::End { class, why } => self.fail(class, failure, &why, exit),
            Judgement::Restart { pause, host_is_out } => {
                let number = self.current.count_restart();
                let left = self.budget.left(limit, now).crashes;
                let Limit { restarts, window } = limit;
                let rest = pause.map_or_else(String::new, |pause| format!(" after {:.1} s", pause.as_secs_f64()));
                let window = window.as_secs();
                // PyTorch's wording, for which logs are searched.
                let reason = format!(
                    "{failure}; restart {number}; {left}/{restarts} attempts left within {window} s; will restart worker group{rest}"
                );
                self.pace.paused_until = pause.map(|pause| now + pause);
                let rank = failure.global_rank;
                self.interrupt_by(&reason, exit, failure);
                match host_is_out {
                    Some(what) => self.put_out(&origin, WhyUnused::SameFault { what }, now),
                    None => self.on_first_failure(&origin, Some(rank), now),
                }
            }
        }
    }

    /// End the job with a worker's failure.
    fn fail(&mut self, class: EndClass, failure: Failure, why: &str, exit: Number) {
        let (by, cause) = (failure.node.clone(), format!("{failure}; {why}"));
        self.close(Verdict::Failed { by, cause, failure: Some(Box::new(failure)), class }, Some(exit));
    }

    /// The sliding budget, if the job has one.
    pub(super) fn limit(&self) -> Option<Limit> {
        let (restarts, window) = self.settings.max_restarts.zip(self.settings.rules.restart_window)?;
        Some(Limit { restarts, window })
    }

    /// The current world must re-form because of a failure.
    fn interrupt_by(&mut self, reason: &str, exit: Number, failure: Failure) {
        self.interrupt(reason, Why::WorkerFailed, exit);
        self.current.blame(failure);
    }

    /// The training hangs, and its workers are to be restarted. Returns whether that may change the decision.
    pub(super) fn on_hung(&mut self, why: &str, step: Option<u64>, now: Instant) -> bool {
        let Some(hang) = self.trace.hang() else { return false };
        if let Some(limit) = self.limit()
            && let Judgement::End { class, why: end } = self.budget.on_hang(step, limit, now)
        {
            let (by, cause) = ("the coordinator".to_owned(), format!("the training hung: {why}; {end}"));
            self.close(Verdict::Failed { by, cause, failure: None, class }, Some(hang));
            return true;
        }
        self.interrupt(&format!("the training hung: {why}"), Why::HangFound, hang);
        true
    }
}
