//! How a coordinator counts workers and judges hosts and a job: [`Rules`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::settings::LONGEST_WAIT;
use crate::cooldown::Cooldown;

/// The default of `host_failures_window`.
pub const HOST_FAILURES_WINDOW: Duration = Duration::from_secs(3600);
/// First failures are remembered one by one.
pub const LARGEST_HOST_FAILURES: u32 = 1_000;

/// The rules of one rendezvous. `workers` and `store_tunnel` must agree between all nodes, as `min_nodes` does. The others are those of
/// the first node that joins, for all nodes.
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
    /// How often the world may change after its first round, by restarts and changes of membership together. `None`: as often as it has
    /// to.
    pub reset_limit: Option<u32>,
    /// Whether workers reach the store of rank 0's node through their agents.
    pub store_tunnel: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            workers: None,
            host_failures: 0,
            host_failures_window: HOST_FAILURES_WINDOW,
            cooldown: None,
            reset_limit: None,
            store_tunnel: false,
        }
    }
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
        match self.cooldown {
            Some(Cooldown { min, max }) if min.is_zero() || min > max || max > LONGEST_WAIT => Err(format!(
                "blacklist_cooldown_min and blacklist_cooldown_max are `{min:?}` and `{max:?}`, must be above zero, rising, and \
                 at most {LONGEST_WAIT:?}"
            )),
            _ => Ok(()),
        }
    }
}
