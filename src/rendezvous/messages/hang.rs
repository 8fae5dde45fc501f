//! A training that stands still: what agents say of their workers' steps, and what the coordinator says of a hang.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ids::Round;
use crate::hang::finding::Finding;
use crate::hang::judge::Still;
use crate::hang::judge::limits::Section;
use crate::hang::text::{Facts, Next};
use crate::wire::text::{cut, plain};

/// Longest name of a node in a [`Found`], in bytes.
const NODE_LIMIT_BYTES: usize = 255;

/// Whether a node's workers make steps, in [`NodeMessage::Pace`](super::message::NodeMessage::Pace).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PaceReport {
    /// They make none. Said again from time to time until they do.
    Still(StillReport),
    /// They have moved since.
    Moved(MovedReport),
}

/// Workers that make no step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StillReport {
    /// Microseconds since their last step, or since they were started.
    pub still_us: u64,
    /// Number of that step, if the training script says where it is.
    pub step: Option<u64>,
    /// They have made a step in this round.
    pub has_stepped: bool,
    /// The median time of a step in microseconds, if it is known.
    pub step_time_us: Option<u64>,
    /// These are steps of optimizers: the training script reports none.
    pub is_counted: bool,
    /// The section of the training in which they are, if it has a name.
    pub section: Option<Section>,
}

/// Workers that have moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedReport {
    /// Microseconds since they did.
    pub ago_us: u64,
    /// They have made a step in this round.
    pub has_stepped: bool,
}

/// What the coordinator says of a training that stands still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangNews {
    /// The round.
    pub round: Round,
    /// The time without progress, in microseconds.
    pub still_us: u64,
    /// What it is.
    pub change: HangChange,
}

/// See [`HangNews`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HangChange {
    /// The training hangs, or all of its ranks are stopped.
    Found(Box<Found>),
    /// What was found goes on.
    Over,
}

/// A hang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Who is waited for.
    pub finding: Finding,
    /// The last step, if the training script says where it is.
    pub step: Option<u64>,
    /// The median time of a step in microseconds, if it is known.
    pub step_time_us: Option<u64>,
    /// Number of ranks in the world.
    pub ranks: u32,
    /// The name of the node of the first rank that is named.
    pub node: Option<String>,
    /// What happens now.
    pub next: Next,
}

impl StillReport {
    /// The same for the judge. `now`: when it has come.
    pub fn still(&self, round: Round, now: Instant) -> Still {
        let Self { still_us, has_stepped, step_time_us, is_counted, section, .. } = *self;
        let step_time = step_time_us.map(Duration::from_micros);
        Still { round: round.0, since: before(now, still_us), has_stepped, step_time, is_counted, section }
    }
}

impl MovedReport {
    /// When they have moved. `now`: when the report has come.
    pub fn at(&self, now: Instant) -> Instant {
        before(now, self.ago_us)
    }
}

fn before(now: Instant, us: u64) -> Instant {
    now.checked_sub(Duration::from_micros(us)).unwrap_or(now)
}

impl Found {
    /// What a text about it needs beside the finding.
    pub fn facts(&self, still: Duration) -> Facts {
        Facts {
            still,
            step: self.step,
            step_time: self.step_time_us.map(Duration::from_micros),
            ranks: self.ranks as usize,
            node: self.node.clone(),
            next: self.next,
            ..Facts::default()
        }
    }
}

impl HangNews {
    /// The news with their texts tidied. `None`: what they say is not allowed.
    pub(in crate::rendezvous) fn tidied(self) -> Option<Self> {
        let change = match self.change {
            HangChange::Found(found) if found.finding.validate().is_err() => return None,
            HangChange::Found(found) => {
                let node = found.node.map(|node| cut(plain(node), NODE_LIMIT_BYTES));
                HangChange::Found(Box::new(Found { node, ..*found }))
            }
            HangChange::Over => HangChange::Over,
        };
        Some(Self { change, ..self })
    }
}
