//! Stopping workers: when each signal is due, and when to give up waiting. Pure.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::exit::ExitStatus;
use crate::signals::{FirstSignal, Signal};

/// How workers are stopped; the same on every path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopPolicy {
    /// The first signal. Default SIGTERM.
    pub signal: Signal,
    /// Who gets it. Default: each worker's process group.
    pub to: FirstSignal,
    /// How long a worker may take to end after that signal before it is killed. Default 30 s, PyTorch's
    /// `--shutdown-timeout`. Zero kills at once.
    pub grace: Duration,
    /// How long to wait for a worker that was killed. Default 5 s. A process that is left after that is in uninterruptible sleep
    /// (a hung GPU or file system), which no signal ends. It is reported and not waited for.
    pub kill_timeout: Duration,
}

impl Default for StopPolicy {
    fn default() -> StopPolicy {
        let (signal, to) = (Signal::TERM, FirstSignal::default());
        StopPolicy { signal, to, grace: Duration::from_secs(30), kill_timeout: Duration::from_secs(5) }
    }
}

/// How long before its SIGKILL it is written down where a worker stands.
pub const DUMP_BEFORE_KILL: Duration = Duration::from_millis(600);
/// In a shorter grace nothing is written down.
const SHORTEST_GRACE_WITH_DUMP: Duration = Duration::from_secs(2);

/// What the driver does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Send this signal to the worker's process group.
    Signal {
        /// Which worker.
        local_rank: u32,
        /// Which signal.
        signal: Signal,
    },
    /// Send this signal to the worker alone, and SIGTERM to what it has started once it has ended.
    SignalLeader {
        /// Which worker.
        local_rank: u32,
        /// Which signal.
        signal: Signal,
    },
    /// Write down where the worker stands: [`DUMP_BEFORE_KILL`] later it is killed.
    Dump {
        /// Which worker.
        local_rank: u32,
    },
    /// Kill the worker and everything it started.
    Kill {
        /// Which worker.
        local_rank: u32,
    },
    /// GuardReport the worker as stuck, and wait for it no longer.
    Abandon {
        /// Which worker.
        local_rank: u32,
    },
}

/// A stop under way.
#[derive(Clone, Debug)]
pub struct Stopping {
    policy: StopPolicy,
    /// Workers that are left, or whose descendants are.
    left: BTreeSet<u32>,
    step: Step,
    /// When to write down where they stand, until that was ordered. Killing does not wait for it.
    dump_at: Option<Instant>,
    began_at: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// End of the grace period.
    Grace(Instant),
    /// End of the wait after SIGKILL.
    Killed(Instant),
    /// The stop is complete, or the rest was given up as stuck.
    Over,
}

impl Stopping {
    /// Begins to stop these workers.
    pub fn begin(policy: StopPolicy, workers: impl IntoIterator<Item = u32>, now: Instant) -> (Stopping, Vec<Command>) {
        let left: BTreeSet<u32> = workers.into_iter().collect();
        let until = now + policy.grace;
        let dump_at = (policy.grace >= SHORTEST_GRACE_WITH_DUMP).then(|| until - DUMP_BEFORE_KILL);
        let mut stopping = Stopping { policy, left, step: Step::Grace(until), dump_at, began_at: now };
        if policy.grace.is_zero() || policy.signal == Signal::KILL {
            let commands = stopping.on_kill(now);
            return (stopping, commands);
        }
        // A stopped process handles no signal but SIGKILL and SIGCONT. Once continued, it can end by itself.
        let commands = stopping.left.iter().flat_map(|&local_rank| {
            let signal = policy.signal;
            let first = match policy.to {
                FirstSignal::Group => Command::Signal { local_rank, signal },
                FirstSignal::Leader => Command::SignalLeader { local_rank, signal },
            };
            [first, Command::Signal { local_rank, signal: Signal::CONT }]
        });
        let commands = commands.collect();
        (stopping, commands)
    }

    /// Of a worker that has ended nobody asks where it stands.
    #[cfg(feature = "io")]
    pub(super) fn without_dump(self) -> Stopping {
        Stopping { dump_at: None, ..self }
    }

    /// A worker and all its descendants are gone.
    pub fn on_gone(&mut self, local_rank: u32) {
        self.left.remove(&local_rank);
    }

    /// Ends the grace period now: a second interrupt.
    pub fn on_kill(&mut self, now: Instant) -> Vec<Command> {
        match self.step {
            Step::Grace(_) => {
                self.step = Step::Killed(now + self.policy.kill_timeout);
                self.left.iter().map(|&local_rank| Command::Kill { local_rank }).collect()
            }
            Step::Killed(_) | Step::Over => Vec::new(),
        }
    }

    /// Returns the commands that are due at `now`. Calling early is harmless.
    pub fn poll(&mut self, now: Instant) -> Vec<Command> {
        match self.step {
            Step::Grace(until) if now >= until => self.on_kill(now),
            Step::Grace(_) if self.dump_at.is_some_and(|dump_at| now >= dump_at) => {
                self.dump_at = None;
                self.left.iter().map(|&local_rank| Command::Dump { local_rank }).collect()
            }
            Step::Killed(until) if now >= until => {
                self.step = Step::Over;
                self.left.iter().map(|&local_rank| Command::Abandon { local_rank }).collect()
            }
            _ => Vec::new(),
        }
    }

    /// When to call [`poll`](Self::poll) next; `None` once the stop is over.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.step {
            Step::Grace(until) if !self.left.is_empty() => Some(self.dump_at.unwrap_or(until)),
            Step::Killed(until) if !self.left.is_empty() => Some(until),
            _ => None,
        }
    }

    /// Whether the stop is over: all workers are gone, or the rest is stuck.
    pub fn is_over(&self) -> bool {
        self.left.is_empty() || self.step == Step::Over
    }

    /// Whether what a worker has started still has time to end, when the worker has ended.
    pub fn waits_for_the_rest(&self) -> bool {
        self.policy.to == FirstSignal::Leader && matches!(self.step, Step::Grace(_))
    }

    /// Whether a signal of this stop ends a worker like that. A handler that saves and ends the process gives 128 + its number.
    pub fn explains(&self, exit: ExitStatus) -> bool {
        let killed = !matches!(self.step, Step::Grace(_));
        match exit {
            ExitStatus::Signal { signal, .. } => signal == self.policy.signal || (killed && signal == Signal::KILL),
            ExitStatus::Code(code) => code == 128 + self.policy.signal.0,
            ExitStatus::Unseen => false,
        }
    }

    /// Time since the stop began.
    pub fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn policy(grace: Duration) -> StopPolicy {
        StopPolicy { grace, ..StopPolicy::default() }
    }

    fn kill(local_rank: u32) -> Command {
        Command::Kill { local_rank }
    }

    #[test]
    fn term_then_kill_after_the_grace_period_for_those_still_there() {
        let now = Instant::now();
        let (mut stopping, commands) = Stopping::begin(policy(3 * SECOND), [0, 1], now);
        let to = |local_rank, signal| Command::Signal { local_rank, signal };
        let expected = [(0, Signal::TERM), (0, Signal::CONT), (1, Signal::TERM), (1, Signal::CONT)];
        assert_eq!(commands, expected.map(|(rank, signal)| to(rank, signal)));
        let dump_at = now + 3 * SECOND - DUMP_BEFORE_KILL;
        assert_eq!(stopping.next_deadline(), Some(dump_at));
        assert_eq!(stopping.poll(now + 2 * SECOND), []);
        stopping.on_gone(0);
        assert_eq!(stopping.poll(dump_at), [Command::Dump { local_rank: 1 }]);
        assert_eq!((stopping.poll(dump_at), stopping.next_deadline()), (Vec::new(), Some(now + 3 * SECOND)));
        assert_eq!(stopping.poll(now + 3 * SECOND), [kill(1)]);
        stopping.on_gone(1);
        assert!(stopping.is_over());
        assert_eq!(stopping.next_deadline(), None);
    }

    #[test]
    fn workers_that_end_by_the_signals_of_a_stop_have_been_stopped() {
        let now = Instant::now();
        let (mut stopping, _) = Stopping::begin(policy(3 * SECOND), [0, 1], now);
        let by = |signal| ExitStatus::Signal { signal, core_dumped: false };
        assert!(stopping.explains(by(Signal::TERM)));
        assert!(stopping.explains(ExitStatus::Code(143)));
        for exit in [by(Signal::KILL), by(Signal(6)), ExitStatus::Code(1), ExitStatus::Code(137)] {
            assert!(!stopping.explains(exit), "{exit}");
        }
        stopping.on_kill(now);
        assert!(stopping.explains(by(Signal::KILL)));
    }

    #[test]
    fn a_second_interrupt_kills_at_once_and_only_once() {
        let now = Instant::now();
        let (mut stopping, _) = Stopping::begin(policy(120 * SECOND), [4], now);
        assert_eq!(stopping.on_kill(now + SECOND), [kill(4)]);
        assert_eq!(stopping.on_kill(now + SECOND), []);
        assert_eq!(stopping.next_deadline(), Some(now + SECOND + StopPolicy::default().kill_timeout));
    }

    #[test]
    fn what_a_kill_does_not_end_is_reported_and_not_waited_for() {
        let now = Instant::now();
        let (mut stopping, _) = Stopping::begin(policy(SECOND), [0, 1], now);
        assert_eq!(stopping.poll(now + SECOND), [kill(0), kill(1)]);
        stopping.on_gone(0);
        assert!(!stopping.is_over());
        assert_eq!(stopping.poll(now + 6 * SECOND), [Command::Abandon { local_rank: 1 }]);
        assert!(stopping.is_over());
        assert_eq!(stopping.poll(now + 60 * SECOND), []);
        assert_eq!(stopping.elapsed(now + 6 * SECOND), 6 * SECOND);
    }

    #[test]
    fn no_kill_waits_for_a_dump() {
        let now = Instant::now();
        let (mut late, _) = Stopping::begin(policy(30 * SECOND), [0], now);
        assert_eq!(late.poll(now + 31 * SECOND), [kill(0)], "the agent was stalled");
        let (mut short, _) = Stopping::begin(policy(SECOND), [0], now);
        assert_eq!((short.next_deadline(), short.poll(now + SECOND)), (Some(now + SECOND), vec![kill(0)]));
        let (mut interrupted, _) = Stopping::begin(policy(30 * SECOND), [0], now);
        assert_eq!(interrupted.on_kill(now + SECOND), [kill(0)]);
        assert_eq!(interrupted.poll(now + 5 * SECOND), []);
    }

    #[test]
    fn without_grace_they_are_killed_at_once() {
        let now = Instant::now();
        assert_eq!(Stopping::begin(policy(Duration::ZERO), [0], now).1, [kill(0)]);
        let by_signal = StopPolicy { signal: Signal::KILL, ..StopPolicy::default() };
        assert_eq!(Stopping::begin(by_signal, [0], now).1, [kill(0)]);
        assert!(Stopping::begin(policy(SECOND), [], now).0.is_over());
    }
}
