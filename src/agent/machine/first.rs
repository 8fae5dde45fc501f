//! The first failure of a round on this node: which one it is, when it is reported, and with which words.
//!
//! A worker's failure is the first if no other worker has failed in its round and nothing else has ended the round. Later failures
//! are consequences and are not reported. All workers are stopped at once. Collecting the failed worker's words takes longer, and
//! may take for ever: its error file can be on a file system that hangs. So the failure is reported as soon as one of these holds:
//!
//! - all words are known ([`AgentMachine::on_failure_message`], complete);
//! - collecting them hangs (the same, incomplete): the report has the words that are known by then;
//! - [`MESSAGE_LIMIT`] has passed.
//!
//! The failure is logged on this node when it is reported. The coordinator's answer begins with it, and what follows from it is all
//! that is logged then ([`AgentMachine::after_own_failure`]).
//!
//! Later words are logged on this node only. A failure is reported once, with its words, because the report ends the round: a node
//! that hears of it may have ended before a second message arrives
//! (`docs/decisions/0061-a-failure-is-reported-once-and-never-waits-for-a-hang.md`).

use std::time::{Duration, Instant};

use super::{AgentMachine, Next, Phase, SIGTERM, SURVIVING, TOO_LATE};
use crate::agent::command::Command;
use crate::agent::policy::{Budget, Outcome};
use crate::rendezvous::messages::bounds::tidy_failure;
use crate::rendezvous::messages::message::{EndClass, Failure, Verdict};

/// How long a report, and this node's end, wait at most for the words of a failed worker. Files that hang are given up sooner.
pub const MESSAGE_LIMIT: Duration = Duration::from_secs(1);

/// A failure, from the worker's end on.
#[derive(Clone, Debug)]
pub(super) struct First {
    failure: Failure,
    /// Until this instant more words may come.
    message_until: Option<Instant>,
    /// A restart on this node cannot help.
    hopeless: bool,
    /// The failure has been reported, and its consequences decided.
    decided: bool,
    /// More words were found after the report.
    has_late_message: bool,
}

impl AgentMachine {
    /// A worker ended with another exit than code 0. Its words are not known yet: the failure's message is empty.
    pub fn on_worker_exited_badly(&mut self, failure: Failure, now: Instant) {
        let local_rank = failure.local_rank;
        if self.is_surplus(local_rank) {
            return;
        }
        let ahead = self.worker_states.is_ahead(local_rank) && !self.is_running();
        self.ended(local_rank, false);
        if ahead {
            self.lose_until_placement(failure);
        } else {
            self.take_failure(failure, now);
        }
        self.call_standbys();
    }

    /// A worker has ended. Its words are to be collected if that is the first failure.
    pub(super) fn take_failure(&mut self, failure: Failure, now: Instant) {
        let local_rank = failure.local_rank;
        if self.take_first(failure, Some(now + MESSAGE_LIMIT), false, now) {
            self.commands.push(Command::Listen { local_rank });
        }
    }

    /// A worker failed, and no words are to be collected: it could not be started, or does not end.
    ///
    /// `hopeless`: starting it again on this node cannot help (it holds a device in uninterruptible sleep), so the job ends.
    pub fn on_worker_failed(&mut self, failure: Failure, hopeless: bool, now: Instant) {
        if !self.worker_states.asked.is_empty() {
            return self.on_not_started_ahead(&failure);
        }
        if self.take_first(failure, None, hopeless, now) {
            self.decide();
        }
    }

    /// The words of the failed worker, as far as they are known. `complete`: no more will come. Otherwise collecting them hangs.
    pub fn on_failure_message(&mut self, local_rank: u32, message: String, complete: bool) {
        let Some(first) = self.first.as_mut().filter(|first| first.failure.local_rank == local_rank) else { return };
        if first.message_until.is_none() {
            return; // no more was waited for
        }
        if complete {
            first.message_until = None;
        }
        let late = first.decided && message != first.failure.message;
        first.failure.message = message;
        first.has_late_message |= late;
        let text = late.then(|| {
            format!("{}; this message arrived after the failure was reported to the other nodes", first.failure)
        });
        self.commands.extend(text.map(Command::Warn));
        self.decide();
        self.proceed();
    }

    /// False if it is not the first failure, or no workers run.
    fn take_first(&mut self, failure: Failure, message_until: Option<Instant>, hopeless: bool, now: Instant) -> bool {
        if self.is_brought(failure.local_rank) {
            self.checks = self.policy.checks_health;
            self.lose_until_placement(failure);
            return false;
        }
        let runs = self.is_running() || self.raises() || self.is_preparing();
        // Those that are being stopped end by that.
        self.checks |= runs && self.policy.checks_health;
        if runs && self.leaving.is_some() {
            self.log(format!("{failure}; this node leaves"));
            self.leave_now(); // the failure is nobody's concern any more
            return false;
        }
        if runs {
            if hopeless || self.is_preparing() {
                self.stop(SIGTERM, Next::Decide);
            } else {
                self.break_up(&failure.to_string(), Some(failure.global_rank), Next::Decide, now);
            }
            self.first = Some(First { failure, message_until, hopeless, decided: false, has_late_message: false });
        }
        runs
    }

    /// The coordinator hears of this failure when the round that counts on this worker is complete.
    fn lose_until_placement(&mut self, failure: Failure) {
        self.lost.get_or_insert(failure);
    }

    /// Decides what follows from the first failure, once, unless something else has been decided meanwhile.
    fn decide(&mut self) {
        let Some(first) = self.first.as_mut().filter(|first| !first.decided) else { return };
        first.decided = true;
        let (failure, hopeless) = (first.failure.clone(), first.hopeless);
        if !matches!(self.phase, Phase::Stopping { next: Next::Decide, .. }) {
            return;
        }
        if self.is_new() {
            return self.give_up_alone(failure);
        }
        if hopeless {
            self.warn(format!("{failure}; a restart cannot help"));
            return self.give_up(failure, EndClass::Machine);
        }
        if self.closed_well {
            // The rendezvous is closed: there is no further message and no further round.
            return self.fail_alone(TOO_LATE, EndClass::Program);
        }
        match &mut self.policy.budget {
            Budget::Job => {
                let notified = if self.in_company { "; the other nodes are notified" } else { "" };
                // Reported before it is logged, because the log may be slower.
                self.commands.push(Command::Report(Box::new(failure.clone())));
                match self.parks() {
                    true => self.warn(format!("{SURVIVING}: {failure}{notified}")),
                    false => self.warn(format!("stopping all workers: {failure}{notified}")),
                }
                self.start_missing_ahead(); // the others have to hear of the failure first
            }
            Budget::Node(_) if !failure.counts => {
                let does = if self.parks() { SURVIVING } else { "restarting all workers" };
                self.warn(format!("{failure}; {does}"));
                self.go_on_with(Next::Join);
            }
            Budget::Node(0) => {
                self.warn(format!("{failure}; no restarts left on this node"));
                self.give_up(failure, EndClass::Program);
            }
            Budget::Node(left) => {
                let before = *left; // the number that PyTorch logs
                *left -= 1;
                self.restarts += 1;
                let does = if self.parks() { SURVIVING } else { "restarting all workers" };
                self.warn(format!("{failure}; {does}; {before} attempts left; will restart worker group"));
                self.go_on_with(Next::Join);
            }
        }
    }

    /// A worker of this node has failed, and the failure is no longer reported to the job, for this reason.
    pub(super) fn fail_alone(&mut self, reason: &str, class: EndClass) {
        self.first.iter_mut().for_each(|first| first.decided = true);
        let cause = self.first.as_ref().map(|first| Box::new(self.of_this_node(first.failure.clone())));
        self.end_after_stop(Outcome::Failed { cause, reason: reason.to_owned(), class });
    }

    fn give_up(&mut self, failure: Failure, class: EndClass) {
        let failure = self.of_this_node(failure);
        let cause = failure.to_string();
        let failure = Some(Box::new(failure));
        self.commands.push(Command::Close(Verdict::Failed {
            by: self.name.clone(),
            cause: cause.clone(),
            failure: failure.clone(),
            class,
        }));
        self.end_after_stop(Outcome::Failed { cause: failure, reason: cause, class });
    }

    /// Adds this node's name, without which other nodes would say "this node".
    pub(super) fn of_this_node(&self, failure: Failure) -> Failure {
        Failure { node: self.name.clone(), ..failure }
    }

    /// Whether the first failure has been reported.
    pub(super) fn first_is_decided(&self) -> bool {
        self.first.as_ref().is_some_and(|first| first.decided)
    }

    /// What follows from the failure that this node has reported, and logged, if `reason` begins with it. `failure`: the one that the
    /// coordinator gives this reason for.
    pub(super) fn after_own_failure<'a>(&self, reason: &'a str, failure: Option<&Failure>) -> Option<&'a str> {
        let first = self.first.as_ref().filter(|first| first.decided)?;
        failure.filter(|failure| first.is(failure))?.rest_of(reason)
    }

    /// The global rank of the worker whose failure ends the round, if one does.
    pub(super) fn failed_rank(&self) -> Option<u32> {
        self.failure.as_ref().map(|failure| failure.global_rank)
    }

    /// When to stop waiting for the words of the first failure.
    pub(super) fn message_until(&self) -> Option<Instant> {
        self.first.as_ref()?.message_until
    }

    /// Stops waiting for words when their time is over.
    pub(super) fn give_up_message_if_due(&mut self, now: Instant) {
        let Some(first) = self.first.as_mut().filter(|first| first.message_until.is_some_and(|until| until <= now))
        else {
            return;
        };
        first.message_until = None;
        self.decide();
        self.proceed();
    }

    /// Whether an outcome would lack words of the worker that caused it.
    pub(super) fn lacks_message(&self, outcome: &Outcome) -> bool {
        let Some(first) = self.first.as_ref().filter(|first| first.message_until.is_some()) else { return false };
        first.is_cause_of(outcome)
    }

    /// The outcome, with the words of its cause that were found after the report.
    pub(super) fn with_late_message(&self, mut outcome: Outcome) -> Outcome {
        if let Some(first) = self.first.as_ref().filter(|first| first.has_late_message && first.is_cause_of(&outcome))
            && let Outcome::Failed { cause: Some(cause), .. } | Outcome::Unfit { cause, .. } = &mut outcome
        {
            let node = cause.node.clone();
            cause.message.clone_from(&first.failure.message);
            **cause = tidy_failure(cause, node);
        }
        outcome
    }
}

impl First {
    fn is_cause_of(&self, outcome: &Outcome) -> bool {
        let (Outcome::Failed { cause: Some(cause), .. } | Outcome::Unfit { cause, .. }) = outcome else { return false };
        self.is(cause)
    }

    fn is(&self, failure: &Failure) -> bool {
        (failure.pid, failure.global_rank) == (self.failure.pid, self.failure.global_rank)
    }
}
