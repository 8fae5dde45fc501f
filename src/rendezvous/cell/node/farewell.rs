//! A node's end over a cell: its goodbye, and its stay for the others. Part of [super].
//!
//! At the end of a job over a cell that may be in this process, the other nodes have to read that it is over before the process ends.
//!
//! Each node leaves the state once it has read the verdict and its workers have ended. The node in whose process the cell is stays until
//! all have, or for [`AT_MOST`]: a node that was killed does not leave any more.

use std::time::{Duration, Instant};

use super::{CellNode, Line};
use crate::rendezvous::cell::blob::Blob;

/// How long a node stays for the others. Each reads at least once a second.
const AT_MOST: Duration = Duration::from_secs(5);
/// How often it looks whether the others have left.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Whether a node stays for the others after its goodbye.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stay {
    /// Its goodbye is not written yet.
    Before,
    /// Until then, if they do not leave before.
    Until(Instant),
    /// No longer, or the end of its process does not end the cell.
    Over,
}

impl Stay {
    /// When it ends.
    pub fn until(self) -> Option<Instant> {
        match self {
            Self::Until(at) => Some(at),
            Self::Before | Self::Over => None,
        }
    }
}

impl CellNode {
    /// Whether this node's `Leave` is written, or none was needed, and it does not stay for others.
    pub fn has_left(&self) -> bool {
        self.has_sent_farewell() && (self.stay == Stay::Over || self.machine.has_failed())
    }

    /// Whether this node's `Leave` is written, or none was needed.
    pub(super) fn has_sent_farewell(&self) -> bool {
        self.machine.has_left() && (self.machine.has_failed() || (!self.busy && self.outbox.is_empty()))
    }

    /// Whether the backend is no longer called.
    pub(super) fn is_over(&self) -> bool {
        self.has_left() || self.machine.has_failed()
    }

    /// Stay after the goodbye while others have not read that the job is over, and look for it.
    pub(super) fn stay_for_others(&mut self, now: Instant) {
        if !self.has_sent_farewell() || self.stay == Stay::Over {
            return;
        }
        let until = self.stay.until().unwrap_or(now + AT_MOST);
        if now >= until || !self.is_awaited() {
            self.stay = Stay::Over;
            return;
        }
        self.stay = Stay::Until(until);
        self.read_at.get_or_insert(now + LOOK_EVERY);
    }

    /// Whether others have not read yet that the job is over.
    fn is_awaited(&self) -> bool {
        let over = |blob: &Blob| blob.closed().is_some() && blob.members().any(|id| id != self.hello.node);
        self.line == Line::Up && self.confirmed.as_ref().is_some_and(over)
    }
}
