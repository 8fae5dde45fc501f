//! Ballots, stamps and records.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::message::NodeId;

/// A process's attempt to lead. The higher one prevails, and no process makes one twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ballot {
    /// Higher than that of all ballots that the process has heard of.
    pub number: u64,
    /// Who leads by it.
    pub node: NodeId,
}

impl Ballot {
    /// The ballot of the first leader.
    pub fn first(node: NodeId) -> Self {
        Self { number: 0, node }
    }

    /// A ballot of this process that prevails over this one.
    #[must_use]
    pub fn beaten_by(self, node: NodeId) -> Self {
        Self { number: self.number.saturating_add(1), node }
    }
}

/// Which writing of the record this is. Of two that voters hold, the later one goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// Who has written it. First: a record under a later ballot replaces whatever an earlier leader has written.
    pub ballot: Ballot,
    /// Counts the writings, over all leaders.
    pub seq: u64,
}

/// Processes that hold the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Voters(pub BTreeSet<NodeId>);

impl Voters {
    /// Whether more than half of them are such.
    pub fn most(&self, such: impl Fn(NodeId) -> bool) -> bool {
        2 * self.0.iter().filter(|node| such(**node)).count() > self.0.len()
    }

    /// The other one, if they are two.
    pub fn other_of_two(&self, node: NodeId) -> Option<NodeId> {
        let is_pair = self.0.len() == 2 && self.0.contains(&node);
        self.0.iter().copied().find(|other| is_pair && *other != node)
    }
}

impl FromIterator<NodeId> for Voters {
    fn from_iter<T: IntoIterator<Item = NodeId>>(nodes: T) -> Self {
        Self(nodes.into_iter().collect())
    }
}

/// What a run's leader has decided, as far as a successor must know.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Record<C> {
    /// Which writing this is.
    pub stamp: Stamp,
    /// Who votes on what follows.
    pub voters: Voters,
    /// Who votes too until this record is chosen, if its voters are others than those of the record before.
    pub before: Option<Voters>,
    /// What is recorded.
    pub content: C,
}

impl<C> Record<C> {
    /// All sets of voters that count.
    pub fn sets(&self) -> impl Iterator<Item = &Voters> {
        [&self.voters].into_iter().chain(&self.before)
    }

    /// The same record with its content made anew.
    pub fn map<D>(self, content: impl FnOnce(C) -> D) -> Record<D> {
        Record { stamp: self.stamp, voters: self.voters, before: self.before, content: content(self.content) }
    }

    /// All voters, of both sets.
    pub fn all_voters(&self) -> BTreeSet<NodeId> {
        self.sets().flat_map(|voters| voters.0.iter().copied()).collect()
    }
}
