//! The first failure of a round on this node: which one it is, when the others are told, and with what words.
//!
//! A worker's failure is first if no other has failed in its round and nothing else has ended that. Later ones are consequences, and
//! nobody is told of them. All workers are asked to end at once. What the failed worker said takes longer to find out, and may take for
//! ever: its error file can be on a file system that hangs. So the others are told as soon as one of these holds:
//!
//! - all that it said is known ([`AgentMachine::on_words`], complete);
//! - finding out hangs (the same, incomplete): they are told what is known by then;
//! - [`WORDS_LIMIT`] has passed.
//!
//! Words that come after that are told on this node only. A failure is reported once, with its words, because the report ends the
//! round: a node that hears of it may have ended before a second message came.

use std::time::{Duration, Instant};

use super::{AgentMachine, Next, Phase, SIGTERM};
use crate::agent::command::Command;
use crate::agent::policy::{Budget, Outcome};
use crate::rendezvous::protocol::message::{Failure, Verdict};
use crate::rendezvous::protocol::text::tidy_failure;

/// How long a report, and this node's end, wait for what a failed worker said while reading it neither ends nor hangs: the machine may
/// be that busy.
pub const WORDS_LIMIT: Duration = Duration::from_secs(1);

const TOO_LATE: &str = "a worker failed after the job had been declared a success";

/// A failure from the worker's end on.
#[derive(Clone, Debug)]
pub(super) struct First {
    failure: Failure,
    /// More of what it said may come until then.
    words_until: Option<Instant>,
    /// A restart on this node cannot help.
    hopeless: bool,
    /// What follows from it has been decided; that the others are told, for one.
    decided: bool,
    /// It said more than what was known when that was decided.
    has_late_words: bool,
}

impl AgentMachine {
    /// A worker ended otherwise than with exit code 0. What it said is not known yet: the failure's message is empty.
    pub fn on_worker_exited_badly(&mut self, failure: Failure, now: Instant) {
        let local_rank = failure.local_rank;
        if self.take_first(failure, Some(now + WORDS_LIMIT), false) {
            self.commands.push(Command::Listen { local_rank });
        }
    }

    /// A worker failed of which nothing more is to be found out: it could not be started, or does not end.
    ///
    /// `hopeless`: starting it again on this node cannot help (it holds a device in uninterruptible sleep), so the job ends.
    pub fn on_worker_failed(&mut self, failure: Failure, hopeless: bool) {
        if self.take_first(failure, None, hopeless) {
            self.decide();
        }
    }

    /// What the failed worker said, as far as it is known. `complete`: no more will come. Otherwise finding out hangs.
    pub fn on_words(&mut self, local_rank: u32, words: String, complete: bool) {
        let Some(first) = self.first.as_mut().filter(|first| first.failure.local_rank == local_rank) else { return };
        if first.words_until.is_none() {
            return; // no more was waited for
        }
        if complete {
            first.words_until = None;
        }
        let late = first.decided && words != first.failure.message;
        first.failure.message = words;
        first.has_late_words |= late;
        let text = late.then(|| format!("{}; which could not be found out at once", first.failure));
        self.commands.extend(text.map(Command::Warn));
        self.decide();
        self.proceed();
    }

    /// False if it is not the first, or no worker runs that it could concern.
    fn take_first(&mut self, failure: Failure, words_until: Option<Instant>, hopeless: bool) -> bool {
        let runs = self.is_running();
        if runs {
            self.stop(SIGTERM, Next::Decide);
            self.first = Some(First { failure, words_until, hopeless, decided: false, has_late_words: false });
        }
        runs
    }

    /// What follows from the first failure, once, unless something else has been decided meanwhile.
    fn decide(&mut self) {
        let Some(first) = self.first.as_mut().filter(|first| !first.decided) else { return };
        first.decided = true;
        let (failure, hopeless) = (first.failure.clone(), first.hopeless);
        if !matches!(self.phase, Phase::Stopping { next: Next::Decide, .. }) {
            return;
        }
        if hopeless {
            self.warn(format!("{failure}; a restart cannot help"));
            return self.give_up(failure);
        }
        if self.closed_well {
            // No more is to be heard of a closed rendezvous, nor is there a further round.
            return self.fail_too_late();
        }
        match &mut self.policy.budget {
            Budget::Job => self.commands.push(Command::Report(Box::new(failure))),
            Budget::Node(0) => {
                self.warn(format!("{failure}; no restarts left on this node"));
                self.give_up(failure);
            }
            Budget::Node(left) => {
                let before = *left; // as PyTorch counts them
                *left -= 1;
                self.restarts += 1;
                self.warn(format!(
                    "{failure}; restarting all workers; {before} attempts left; will restart worker group"
                ));
                self.go_on_with(Next::Join);
            }
        }
    }

    /// The job was declared a success, and a worker of this node has failed.
    pub(super) fn fail_too_late(&mut self) {
        self.first.iter_mut().for_each(|first| first.decided = true);
        let cause = self.first.as_ref().map(|first| Box::new(self.of_this_node(first.failure.clone())));
        self.end_after_stop(Outcome::Failed { cause, reason: TOO_LATE.to_owned() });
    }

    fn give_up(&mut self, failure: Failure) {
        let failure = self.of_this_node(failure);
        let cause = failure.to_string();
        let failure = Some(Box::new(failure));
        self.commands.push(Command::Close(Verdict::Failed {
            by: self.name.clone(),
            cause: cause.clone(),
            failure: failure.clone(),
        }));
        self.end_after_stop(Outcome::Failed { cause: failure, reason: cause });
    }

    /// To others it would otherwise be "this node".
    fn of_this_node(&self, failure: Failure) -> Failure {
        Failure { node: self.name.clone(), ..failure }
    }

    /// The first failure is waited for no longer than this.
    pub(super) fn words_until(&self) -> Option<Instant> {
        self.first.as_ref()?.words_until
    }

    /// No more of what it said is waited for once its time is over.
    pub(super) fn give_up_words_if_due(&mut self, now: Instant) {
        let Some(first) = self.first.as_mut().filter(|first| first.words_until.is_some_and(|until| until <= now))
        else {
            return;
        };
        first.words_until = None;
        self.decide();
        self.proceed();
    }

    /// Whether an outcome would lack what the worker said that is its cause.
    pub(super) fn lacks_words(&self, outcome: &Outcome) -> bool {
        let Some(first) = self.first.as_ref().filter(|first| first.words_until.is_some()) else { return false };
        first.is_cause_of(outcome)
    }

    /// The outcome with what was found out about its cause after others were told.
    pub(super) fn with_late_words(&self, mut outcome: Outcome) -> Outcome {
        if let Some(first) = self.first.as_ref().filter(|first| first.has_late_words && first.is_cause_of(&outcome))
            && let Outcome::Failed { cause: Some(cause), .. } = &mut outcome
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
        let Outcome::Failed { cause: Some(cause), .. } = outcome else { return false };
        (cause.pid, cause.global_rank) == (self.failure.pid, self.failure.global_rank)
    }
}
