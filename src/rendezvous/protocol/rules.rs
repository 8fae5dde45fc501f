//! What a job asks of its coordinator beyond the settings of earlier releases: [`Rules`].
//!
//! A node that asks for any of it introduces itself with [`NodeMessage::HelloAsking`], which older coordinators refuse. All other nodes
//! say [`NodeMessage::Hello`], so that they can be mixed with older releases.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::message::{Hello, NodeMessage};
use super::settings::{LONGEST_WAIT, Settings};

/// The default of `host_failures_window`.
pub const HOST_FAILURES_WINDOW: Duration = Duration::from_secs(3600);
/// First failures are remembered one by one.
pub const LARGEST_HOST_FAILURES: u32 = 1_000;

/// The rules of one rendezvous. Those of the first node that joins hold for all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
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
}

impl Default for Rules {
    fn default() -> Self {
        Self { host_failures: 0, host_failures_window: HOST_FAILURES_WINDOW, cooldown: None, reset_limit: None }
    }
}

/// How long a host is out: `min` at first, twice as long each time, `max` at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cooldown {
    /// Above zero.
    pub min: Duration,
    /// At least `min`.
    pub max: Duration,
}

impl Rules {
    /// Check the rules by themselves.
    ///
    /// # Errors
    /// A sentence naming the rule, the value and what is allowed.
    pub(super) fn validate(&self) -> Result<(), String> {
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

/// What [`NodeMessage::HelloAsking`] carries beside the introduction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asks {
    /// [`Settings::rules`].
    pub rules: Rules,
    /// [`Hello::host_name`].
    pub host_name: Option<String>,
}

impl Hello {
    /// What this node asks for beyond the settings of earlier releases.
    fn asks(&self) -> Asks {
        Asks { rules: self.settings.rules.clone(), host_name: self.host_name.clone() }
    }

    fn asking(self, asks: Asks) -> Self {
        let Asks { rules, host_name } = asks;
        Self { settings: Settings { rules, ..self.settings }, host_name, ..self }
    }
}

impl NodeMessage {
    /// The message as it is sent. Within a process a `Hello` has all that its node asks for.
    pub fn outgoing(self) -> Self {
        match self {
            Self::Hello(hello) => match hello.asks() {
                asks if asks == Asks::default() => Self::Hello(hello),
                asks => Self::HelloAsking { hello, asks: Box::new(asks) },
            },
            other => other,
        }
    }

    /// A received message as it is used: the reverse of [`Self::outgoing`].
    pub fn incoming(self) -> Self {
        match self {
            Self::HelloAsking { hello, asks } => Self::Hello(Box::new(hello.asking(*asks))),
            other => other,
        }
    }
}
