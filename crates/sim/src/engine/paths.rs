//! The paths between hosts and the process that all of them talk to, and between two hosts: transit times, and paths that are cut.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::dice::Dice;
use super::queue::Time;

/// Number of a host.
pub type HostId = usize;

/// One end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The host's.
    Node = 0,
    /// The end at the coordinator, or at the store, cell or etcd that the model has instead of one.
    Coordinator = 1,
}

impl End {
    /// The opposite end.
    pub fn other(self) -> Self {
        match self {
            Self::Node => Self::Coordinator,
            Self::Coordinator => Self::Node,
        }
    }
}

/// What happens to messages sent into a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partition {
    /// They arrive once it is over, as with TCP's retransmission.
    Held,
    /// They are lost together with their connection. Neither end is notified.
    Lost,
}

/// The state of all paths.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Shortest and longest transit time.
    delay: (Duration, Duration),
    /// The end of the cut on the path to each end, by host.
    cut: BTreeMap<(HostId, usize), (Time, Partition)>,
    /// The same on the path from one host to another.
    between: BTreeMap<(HostId, HostId), (Time, Partition)>,
}

impl Paths {
    pub(super) fn new(delay: (Duration, Duration)) -> Self {
        Self { delay, cut: BTreeMap::new(), between: BTreeMap::new() }
    }

    /// Draws the transit time of a message.
    pub fn transit(&self, dice: &mut Dice) -> Duration {
        dice.duration(self.delay)
    }

    /// Cuts the path from `host` to the other end, or back, until `until`. Replaces an earlier cut.
    pub fn cut(&mut self, host: HostId, to: End, until: Time, kind: Partition) {
        self.cut.insert((host, to as usize), (until, kind));
    }

    /// The present cut on a path, if any.
    pub fn cut_now(&self, host: HostId, to: End, now: Time) -> Option<(Time, Partition)> {
        self.cut.get(&(host, to as usize)).copied().filter(|(until, _)| *until > now)
    }

    /// Cuts the path from one host to another until `until`. Replaces an earlier cut.
    pub fn cut_between(&mut self, from: HostId, to: HostId, until: Time, kind: Partition) {
        self.between.insert((from, to), (until, kind));
    }

    /// The present cut on the path from one host to another, if any.
    pub fn cut_between_now(&self, from: HostId, to: HostId, now: Time) -> Option<(Time, Partition)> {
        self.between.get(&(from, to)).copied().filter(|(until, _)| *until > now)
    }

    /// The cuts that decide the future, for the coordinator's fingerprint.
    pub(crate) fn describe(&self, now: Time, out: &mut impl fmt::Write) -> fmt::Result {
        let cuts = self.cut.iter().filter(|(_, (until, _))| *until > now);
        cuts.into_iter().try_for_each(|(path, (until, kind))| write!(out, "\n{path:?} {:?} {kind:?}", *until - now))
    }
}
