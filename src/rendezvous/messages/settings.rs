//! What a node asks of the rendezvous, and what a coordinator accepts. Defaults, and what users may say, are the table's in
//! [`crate::rendezvous::conf`].

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ending::Failure;
use crate::hang::judge;
use crate::hosts::Cooldown;

/// Settings of one rendezvous, as each node brings them.
///
/// `min_nodes` and `max_nodes`, among others, must agree between all nodes of a run. All other limits are those of the first node that
/// joined, for every node: the coordinator sends them to nodes that have brought others. `on_partition` alone is each node's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Fewest nodes with which a round may complete. At least 1.
    pub min_nodes: u32,
    /// Most nodes in a round; at this number it completes at once. At least `min_nodes`.
    pub max_nodes: u32,
    /// How long a growing round waits for further nodes once `min_nodes` have joined. Counted from the first newcomer
    /// when a running job grows: its workers train on meanwhile until their agents have noticed.
    pub last_call_timeout: Duration,
    /// How long a round that lost members waits for a replacement once all survivors are back. PyTorch has no such
    /// limit: it waits `last_call_timeout`, although nobody else is expected.
    pub settle_timeout: Duration,
    /// How often a silent node is heard of.
    pub keep_alive_interval: Duration,
    /// After how many missed keep-alives a node is lost.
    pub keep_alive_max_attempt: u32,
    /// How long a node whose connection ended without a goodbye may take to come back and keep its rank.
    pub reconnect_grace: Duration,
    /// The job's budget: how many failures of workers it survives, wherever they happen. Must agree between all nodes, as
    /// `min_nodes`. Default `None`: nodes do not report failures, or count for themselves as PyTorch's agents do.
    pub max_restarts: Option<u32>,
    /// How often nodes of one address may interrupt the job by going, within `rejoin_window`, before they are not let in again.
    /// 0: as often as they like.
    pub rejoin_limit: u32,
    /// See `rejoin_limit`.
    pub rejoin_window: Duration,
    /// What this node does when it has received nothing for its whole lease.
    pub on_partition: OnPartition,
    /// In every round ranks follow the ranks that nodes ask for, whoever was in the round before, and the workers use the endpoint's
    /// store, which is emptied for each round. Must agree between all nodes, as `min_nodes`. Default false: survivors keep their ranks,
    /// what is asked for orders newcomers, and rank 0's node brings the workers' store.
    pub ranks_as_asked: bool,
    /// How workers are counted, and hosts judged.
    pub rules: Rules,
}

/// What a node does that is cut off from the coordinator: see [`crate::rendezvous::node::fence`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnPartition {
    /// It stops its workers before the others may go on without it: two worlds never run at once.
    #[default]
    Stop,
    /// Its workers run on. If the others go on without it, two worlds run until it hears of that.
    Continue,
}

impl fmt::Display for OnPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Continue => "continue",
        })
    }
}

impl Settings {
    /// How long a node may be silent before it is lost: `keep_alive_interval * keep_alive_max_attempt`.
    pub fn lease(&self) -> Duration {
        self.keep_alive_interval * self.keep_alive_max_attempt
    }

    /// Fewest and most nodes in words: `2`, or `2 to 4`.
    pub fn node_counts(&self) -> String {
        let Self { min_nodes, max_nodes, .. } = self;
        if min_nodes == max_nodes { min_nodes.to_string() } else { format!("{min_nodes} to {max_nodes}") }
    }

    /// Check the settings by themselves.
    ///
    /// # Errors
    /// A sentence naming the setting, the value and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        if self.min_nodes < 1 {
            return Err(format!("min_nodes is `{}`, must be at least 1", self.min_nodes));
        }
        if self.max_nodes < self.min_nodes {
            return Err(format!(
                "max_nodes is `{}`, must be at least min_nodes (`{}`)",
                self.max_nodes, self.min_nodes
            ));
        }
        if self.keep_alive_interval < SHORTEST_KEEP_ALIVE || self.keep_alive_interval > LONGEST_LEASE {
            let given = self.keep_alive_interval;
            return Err(format!(
                "keep_alive_interval is `{given:?}`, must be from {SHORTEST_KEEP_ALIVE:?} to {LONGEST_LEASE:?}"
            ));
        }
        if self.keep_alive_max_attempt < 1 || self.keep_alive_max_attempt > MOST_KEEP_ALIVES {
            let given = self.keep_alive_max_attempt;
            return Err(format!("keep_alive_max_attempt is `{given}`, must be from 1 to {MOST_KEEP_ALIVES}"));
        }
        for (name, value, longest) in [
            ("keep_alive_interval * keep_alive_max_attempt", self.lease(), LONGEST_LEASE),
            ("last_call_timeout", self.last_call_timeout, LONGEST_WAIT),
            ("settle_timeout", self.settle_timeout, LONGEST_WAIT),
            ("reconnect_grace", self.reconnect_grace, LONGEST_GRACE),
            ("rejoin_window", self.rejoin_window, LONGEST_WAIT),
        ] {
            if value > longest {
                return Err(format!("{name} is `{value:?}`, must be at most {longest:?}"));
            }
        }
        if self.rejoin_limit > LARGEST_REJOIN_LIMIT {
            let given = self.rejoin_limit;
            return Err(format!("rejoin_limit is `{given}`, must be from 0 to {LARGEST_REJOIN_LIMIT}"));
        }
        if self.rules.restart_window.is_some() && !self.max_restarts.is_some_and(|most| RESTARTS_WITHIN.contains(&most))
        {
            let given = self.max_restarts.map_or_else(|| "counted by each node".to_owned(), |most| format!("`{most}`"));
            let most = RESTARTS_WITHIN.end();
            return Err(format!("max_restarts is {given}, must be from 1 to {most} with restart_window"));
        }
        self.rules.validate()
    }
}

/// Shortest time between two keep-alives.
pub const SHORTEST_KEEP_ALIVE: Duration = Duration::from_millis(10);
/// Most keep-alives that a node may miss.
pub const MOST_KEEP_ALIVES: u32 = 1_000;
/// Longest time for which a silent node may hold up its job.
pub const LONGEST_LEASE: Duration = Duration::from_secs(3600);
/// Longest time for which a node may hold up its job after its connection has ended.
pub const LONGEST_GRACE: Duration = Duration::from_secs(60);
/// Longest time for which a round may wait for further nodes, and for which departures are remembered.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// Departures are remembered one by one.
pub const LARGEST_REJOIN_LIMIT: u32 = 1_000;
/// How late a tick may be before the machine takes itself to have been stalled.
pub(in crate::rendezvous) const STALL: Duration = Duration::from_millis(500);
/// After a lease has ended, how long messages that have arrived but were not yet read may still save the node. A host that was
/// stopped and continues finds its timers due before it has read its sockets.
pub(in crate::rendezvous) const LAST_LOOK: Duration = Duration::from_millis(250);

/// Allowed values of `hang_timeout`.
pub const HANG_TIMEOUTS: RangeInclusive<Duration> = Duration::from_secs(1)..=LONGEST_WAIT;

/// Allowed values of `restart_window`.
pub const RESTART_WINDOWS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(30 * 24 * 3600);
/// Restarts within `restart_window` are remembered one by one.
const RESTARTS_WITHIN: RangeInclusive<u32> = 1..=1_000;

/// Most exit codes of `no_restart_on`.
pub const MOST_CODES: usize = 32;

/// The default of `host_failures_window`.
pub const HOST_FAILURES_WINDOW: Duration = Duration::from_secs(3600);
/// First failures are remembered one by one.
pub const LARGEST_HOST_FAILURES: u32 = 1_000;

/// The rules of one rendezvous. `workers`, `store_tunnel` and `no_restart_on` must agree between all nodes, as `min_nodes` does. The
/// others are those of the first node that joins, for all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// How many workers a world has, on however many nodes. `None`: as many as its nodes have.
    pub workers: Option<WorkerBounds>,
    /// How often a round may have its first failure on one host within `host_failures_window` before the host is out. 0: as often as it
    /// has to.
    pub host_failures: u32,
    /// See `host_failures`.
    pub host_failures_window: Duration,
    /// How long a host is out. `None`: for the job.
    pub cooldown: Option<Cooldown>,
    /// The time within which there are `max_restarts` restarts, which are then judged by what they bring
    /// ([`crate::rendezvous::run`], `budget`). `None`: as many in all.
    pub restart_window: Option<Duration>,
    /// The exit codes after which nothing is restarted: the job ends. Without 0.
    pub no_restart_on: BTreeSet<u8>,
    /// How often the world may change after its first round, by restarts and changes of membership together. `None`: as often as it has
    /// to.
    pub reset_limit: Option<u32>,
    /// Whether workers reach the store of rank 0's node through their agents.
    pub store_tunnel: bool,
    /// When a standstill is a hang, and what happens then.
    pub hang: judge::Options,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            workers: None,
            host_failures: 0,
            host_failures_window: HOST_FAILURES_WINDOW,
            cooldown: None,
            restart_window: None,
            no_restart_on: BTreeSet::new(),
            reset_limit: None,
            store_tunnel: false,
            hang: judge::Options::default(),
        }
    }
}

/// Exit codes as users write them: `3+4`.
pub fn codes_text(codes: &BTreeSet<u8>) -> String {
    codes.iter().map(u8::to_string).collect::<Vec<_>>().join("+")
}

/// Fewest and most workers of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerBounds {
    /// At least 1.
    pub min: u32,
    /// At least `min`, at most [`MOST_WORKERS`].
    pub max: u32,
}

/// Most workers of a world: ranks are numbers of 32 bits with a sign.
pub const MOST_WORKERS: u32 = i32::MAX as u32;

/// `2`, `2 to 4`, or `2 or more`.
impl fmt::Display for WorkerBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, max } = self;
        match *max {
            max if max == *min => write!(f, "{min}"),
            MOST_WORKERS => write!(f, "{min} or more"),
            max => write!(f, "{min} to {max}"),
        }
    }
}

impl Rules {
    /// The exit code of this failure, if nothing is restarted after it.
    pub(in crate::rendezvous) fn never_restarted(&self, failure: &Failure) -> Option<u8> {
        u8::try_from(failure.returncode).ok().filter(|code| self.no_restart_on.contains(code))
    }

    /// Check the rules by themselves.
    ///
    /// # Errors
    /// A sentence naming the rule, the value and what is allowed.
    pub(super) fn validate(&self) -> Result<(), String> {
        if let Some(WorkerBounds { min, max }) =
            self.workers.filter(|WorkerBounds { min, max }| *min < 1 || max < min || *max > MOST_WORKERS)
        {
            return Err(format!(
                "min_workers and max_workers are `{min}` and `{max}`, must be from 1 to {MOST_WORKERS}, and rising"
            ));
        }
        if self.host_failures > LARGEST_HOST_FAILURES {
            let given = self.host_failures;
            return Err(format!("host_failures is `{given}`, must be from 0 to {LARGEST_HOST_FAILURES}"));
        }
        if self.host_failures_window > LONGEST_WAIT {
            let given = self.host_failures_window;
            return Err(format!("host_failures_window is `{given:?}`, must be at most {LONGEST_WAIT:?}"));
        }
        if let Some(window) = self.restart_window.filter(|window| !RESTART_WINDOWS.contains(window)) {
            let (least, most) = (RESTART_WINDOWS.start(), RESTART_WINDOWS.end());
            return Err(format!("restart_window is `{window:?}`, must be from {least:?} to {most:?}"));
        }
        if self.no_restart_on.contains(&0) || self.no_restart_on.len() > MOST_CODES {
            let given = codes_text(&self.no_restart_on);
            return Err(format!("no_restart_on is `{given}`, must be at most {MOST_CODES} exit codes from 1 to 255"));
        }
        if let Some(timeout) = self.hang.timeout.filter(|timeout| !HANG_TIMEOUTS.contains(timeout)) {
            let (least, most) = (HANG_TIMEOUTS.start(), HANG_TIMEOUTS.end());
            return Err(format!("hang_timeout is `{timeout:?}`, must be from {least:?} to {most:?}"));
        }
        match self.cooldown {
            Some(Cooldown { min, max }) if min.is_zero() || min > max || max > LONGEST_WAIT => Err(format!(
                "blacklist_cooldown_min and blacklist_cooldown_max are `{min:?}` and `{max:?}`, must be above zero, rising, and \
                 at most {LONGEST_WAIT:?}"
            )),
            _ => Ok(()),
        }
    }
}
