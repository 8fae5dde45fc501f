//! What a node asks of the rendezvous, and what a coordinator accepts. Defaults, and what users may say, are the table's in
//! [`crate::rendezvous::conf`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::rules::Rules;

/// Settings of one rendezvous, as each node brings them.
///
/// `min_nodes` and `max_nodes`, among others, must agree between all nodes of a run. All other limits are those of the first node that
/// joined, for every node: the coordinator tells them to nodes that have brought others. `on_partition` alone is each node's own.
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
    /// How long a node whose connection ended without a goodbye may take to come back and keep its place.
    pub reconnect_grace: Duration,
    /// The job's budget: how many failures of workers it survives, wherever they happen. Must agree between all nodes, as
    /// `min_nodes`. Default `None`: nodes do not report failures, or count for themselves as PyTorch's agents do.
    pub max_restarts: Option<u32>,
    /// How often nodes of one address may interrupt the job by going, within `rejoin_window`, before they are not let in again.
    /// 0: as often as they like.
    pub rejoin_limit: u32,
    /// See `rejoin_limit`.
    pub rejoin_window: Duration,
    /// What this node does when it has heard nothing for its whole lease.
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
