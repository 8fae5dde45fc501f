//! What is counted but not recorded. Pure.
//!
//! An unauthenticated peer may be rejected as often as it likes, and heartbeats never end. As events they would drive out those that
//! explain.

use std::time::Duration;

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// A node was rejected.
    Refused(Refused),
    /// A node has stopped its workers, because it was cut off for its whole lease.
    Fenced,
    /// A heartbeat was answered within this time, as its node has measured it.
    RoundTrip(Duration),
}

/// Why a node was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It asks for other settings than the run has.
    Settings,
    /// A newer agent has come from its place.
    Replaced,
    /// Nodes of its host have left too often (`rejoin_limit`).
    Flapping,
    /// Its host is out for its failures (`host_failures`).
    Failures,
    /// What it says of itself cannot be.
    Invalid,
}

impl Refused {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::Settings, Self::Replaced, Self::Flapping, Self::Failures, Self::Invalid];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Settings => "settings",
            Self::Replaced => "replaced",
            Self::Flapping => "flapping",
            Self::Failures => "failures",
            Self::Invalid => "invalid",
        }
    }
}
