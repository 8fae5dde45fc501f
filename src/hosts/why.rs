//! The reasons for which a host is not used: for each its text, how long it lasts, and what to do about it.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::wire::text::{cut, plain, tidy};

/// Most hosts that a text or a state names.
pub const NAMED: usize = 16;
/// Longest name of a host in a state, in bytes.
const NAME_BYTES: usize = 96;
/// Longest reason in a state, in bytes. JSON writes quotes and backslashes with two.
const WHY_BYTES: usize = 400;

/// Why a host runs no workers of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WhyUnused {
    /// Rounds had their first failure there.
    FailedFirst {
        /// How many.
        count: usize,
        /// Within this time.
        window: Duration,
    },
    /// A program failed there several times in the same way at the same step, and nowhere else.
    SameFault {
        /// How, in words.
        what: String,
    },
    /// Workers that were new there failed before their world's first step, and workers elsewhere had the job's state.
    NewWorkersFailed {
        /// How many.
        count: usize,
        /// The last one, in words.
        last: String,
        /// Within this time.
        window: Duration,
    },
    /// Nodes of it left the running job.
    LeftOften {
        /// How many.
        count: u32,
        /// Within this time.
        window: Duration,
    },
    /// Its agents could not be started, or ended by themselves, too often.
    AgentsFailed {
        /// How often.
        count: usize,
        /// The last time, in words.
        last: String,
    },
    /// Its health check has found something.
    Ill {
        /// What, in words.
        what: String,
    },
    /// A program has put it out, by `HostManager.blacklist`.
    Blacklisted,
    /// Discovery does not list it any longer.
    NotListed,
    /// Its agent could not be started, or has ended by itself, and the next try waits.
    Retried {
        /// Why, in words.
        last: String,
    },
    /// Its agent was asked to leave, and has not ended.
    Leaving,
    /// Its agent is being started.
    Starting {
        /// Why the agent before could not be started, or has ended, in words.
        last: Option<String>,
    },
}

impl WhyUnused {
    /// Its name for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::FailedFirst { .. } => "failed_first",
            Self::SameFault { .. } => "same_fault",
            Self::NewWorkersFailed { .. } => "new_workers_failed",
            Self::LeftOften { .. } => "left_often",
            Self::AgentsFailed { .. } => "agents_failed",
            Self::Ill { .. } => "ill",
            Self::Blacklisted => "blacklisted",
            Self::NotListed => "not_listed",
            Self::Retried { .. } => "retried",
            Self::Leaving => "leaving",
            Self::Starting { .. } => "starting",
        }
    }

    /// The reason, in words.
    pub fn text(&self) -> String {
        match self {
            Self::FailedFirst { count: 1, .. } => "the first failure of a round was there (host_failures)".to_owned(),
            Self::FailedFirst { count, window } => format!(
                "{count} rounds had their first failure there within {window:.0?} (host_failures, host_failures_window)"
            ),
            Self::SameFault { what } => {
                format!("the same fault was there again and again, and nowhere else: {what} (restart_window)")
            }
            Self::NewWorkersFailed { count, last, window } => format!(
                "{count} workers that were new there failed before their first step within {window:.0?}, while others went on; the last \
                 one with {last} (restart_window)"
            ),
            Self::LeftOften { count, window } => format!(
                "nodes there left the running job {count} times within {window:.0?} (rejoin_limit, rejoin_window)"
            ),
            Self::AgentsFailed { count: 1, last } | Self::Retried { last } => last.clone(),
            Self::AgentsFailed { count, last } => {
                format!("{last}; its agents failed {count} times (--host-failures)")
            }
            Self::Ill { what } => format!("its health check has found this: {what} (--health-check)"),
            Self::Blacklisted => "a program has put it out (HostManager.blacklist)".to_owned(),
            Self::NotListed => "discovery does not list it any longer".to_owned(),
            Self::Leaving => "its last agent was asked to leave, and has not ended".to_owned(),
            Self::Starting { last: None } => "its agent is being started (--start-timeout)".to_owned(),
            Self::Starting { last: Some(last) } => {
                format!("its agent is being started again (--start-timeout), after this: {last}")
            }
        }
    }

    /// The same, with its words as one safe line. Another process has written them.
    pub(super) fn tidied(self) -> Self {
        match self {
            Self::SameFault { what } => Self::SameFault { what: tidy(&what) },
            Self::NewWorkersFailed { count, last, window } => {
                Self::NewWorkersFailed { count, last: tidy(&last), window }
            }
            Self::AgentsFailed { count, last } => Self::AgentsFailed { count, last: tidy(&last) },
            Self::Ill { what } => Self::Ill { what: tidy(&what) },
            Self::Retried { last } => Self::Retried { last: tidy(&last) },
            Self::Starting { last } => Self::Starting { last: last.map(|last| tidy(&last)) },
            Self::FailedFirst { .. } | Self::LeftOften { .. } | Self::Blacklisted | Self::NotListed | Self::Leaving => {
                self
            }
        }
    }

    /// Whether an observer needs to know it before another one: lower numbers first.
    fn urgency(&self) -> u8 {
        match self {
            Self::FailedFirst { .. }
            | Self::SameFault { .. }
            | Self::NewWorkersFailed { .. }
            | Self::LeftOften { .. }
            | Self::AgentsFailed { .. }
            | Self::Ill { .. }
            | Self::Blacklisted => 0,
            Self::Retried { .. } | Self::Starting { last: Some(_) } => 1,
            Self::NotListed => 2,
            Self::Leaving | Self::Starting { last: None } => 3,
        }
    }
}

/// Why a host is not used, and until when. `T`: as in [`Standing`](super::Standing).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unused<T = Instant> {
    /// Why.
    pub why: WhyUnused,
    /// Until when, at the latest. `None`: for the job or, if discovery does not list it, until that lists it.
    pub until: Option<T>,
}

impl<T> Unused<T> {
    /// The same, with its time as another kind of number.
    pub(super) fn map<U>(self, of: &mut impl FnMut(T) -> U) -> Unused<U> {
        Unused { why: self.why, until: self.until.map(of) }
    }
}

impl Unused {
    /// Whether its time is not over.
    pub fn holds(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }

    /// How long it lasts, in words.
    pub fn how_long(&self, now: Instant) -> String {
        match (self.until, &self.why) {
            (Some(until), _) => format!("for {} s", seconds(until.saturating_duration_since(now))),
            (None, WhyUnused::NotListed) => "until discovery lists it".to_owned(),
            (None, WhyUnused::Leaving) => "until its agent has ended".to_owned(),
            (None, _) => "for the job".to_owned(),
        }
    }

    /// What to do about it.
    pub fn advice(&self) -> &'static str {
        match (&self.why, self.until) {
            (WhyUnused::FailedFirst { .. }, _) => "look for a fault of the host, or raise host_failures",
            (WhyUnused::SameFault { .. }, _) => {
                "look for a fault of the host; a program's own fault shows on another host next"
            }
            (WhyUnused::NewWorkersFailed { .. }, _) => {
                "look at the output of these workers: the state of the others may not fit there"
            }
            (WhyUnused::LeftOften { .. }, _) => "check why they exit, or raise rejoin_limit",
            (WhyUnused::AgentsFailed { .. }, None) => {
                "mend it for the next job; --blacklist-cooldown-range lets hosts in again"
            }
            (WhyUnused::AgentsFailed { .. }, Some(_)) => "mend it until then",
            (WhyUnused::Ill { .. }, _) => {
                "mend it: it is checked again then (elastic-run doctor --join checks the same)"
            }
            (WhyUnused::Blacklisted, _) => "look at the program's output",
            (WhyUnused::NotListed, _) => "nothing if you took it away, else look at what discovery prints",
            (WhyUnused::Retried { .. }, _) => "mend it; it is tried again then (--host-failures)",
            (WhyUnused::Leaving, _) => "wait: it is killed after its grace",
            (WhyUnused::Starting { .. }, _) => "wait, or look at how ssh reaches it",
        }
    }

    /// How long it lasts, and why, in words.
    pub fn text(&self, now: Instant) -> String {
        format!("{}: {}", self.how_long(now), self.why.text())
    }
}

/// Seconds, with a digit after the point if they are few.
fn seconds(time: Duration) -> String {
    let tenths = (time.as_secs_f64() * 10.0).round() / 10.0;
    if tenths < 10.0 { format!("{tenths}") } else { format!("{tenths:.0}") }
}

/// Hosts that are not used: the most urgent of them by name, and how many more there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnusedHosts {
    named: Vec<(String, Unused)>,
    more: usize,
}

impl<N: Into<String>> FromIterator<(N, Unused)> for UnusedHosts {
    fn from_iter<I: IntoIterator<Item = (N, Unused)>>(hosts: I) -> Self {
        let mut all: Vec<_> = hosts.into_iter().collect();
        all.sort_by_key(|(_, unused)| unused.why.urgency());
        let more = all.len().saturating_sub(NAMED);
        Self { named: all.into_iter().take(NAMED).map(|(name, unused)| (name.into(), unused)).collect(), more }
    }
}

impl UnusedHosts {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// These hosts and those, which are others.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        let more = self.more + others.more;
        let both: Self = self.named.into_iter().chain(others.named).collect();
        Self { more: both.more + more, ..both }
    }

    /// How many there are beyond those that are named.
    pub fn more(&self) -> usize {
        self.more
    }

    /// The named ones, as observers get them.
    pub fn shown(&self, now: Instant) -> Vec<UnusedHost> {
        let named = self.named.iter().filter(|(_, unused)| unused.holds(now));
        named.map(|(host, unused)| UnusedHost::of(host, unused, now)).collect()
    }

    /// All of them in words.
    pub fn text(&self, now: Instant) -> String {
        let shown = self.shown(now);
        let named = shown.iter().map(|it| format!("`{}` {}: {}", it.host, it.how_long, it.why));
        let more = (self.more > 0).then(|| format!("and {} more", self.more));
        named.chain(more).collect::<Vec<_>>().join("; ")
    }
}

/// A host that is not used, as observers get it. Fields are only added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnusedHost {
    /// Its name, or its address.
    pub host: String,
    /// The name of the reason: [`WhyUnused::name`].
    pub reason: &'static str,
    /// The reason, in words.
    pub why: String,
    /// How long it lasts, in words.
    pub how_long: String,
    /// How long that is at most, in milliseconds. `None`: no end is known.
    pub left_ms: Option<u64>,
    /// What to do.
    pub advice: &'static str,
}

impl UnusedHost {
    fn of(host: &str, unused: &Unused, now: Instant) -> Self {
        let left = unused.until.map(|until| until.saturating_duration_since(now).as_millis());
        Self {
            host: cut(plain(host.to_owned()), NAME_BYTES),
            reason: unused.why.name(),
            why: cut(plain(unused.why.text()), WHY_BYTES),
            how_long: unused.how_long(now),
            left_ms: left.map(|left| u64::try_from(left).unwrap_or(u64::MAX)),
            advice: unused.advice(),
        }
    }
}
