//! A candidate: whose votes it asks for, and which record goes on.

use std::collections::BTreeSet;
use std::time::Instant;

use super::leader::Leader;
use super::record::{Ballot, Record};
use super::voter::Voter;
use crate::rendezvous::messages::message::NodeId;

/// A process that would lead. It tells nobody anything of the run before it does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate<C> {
    ballot: Ballot,
    /// The newest record among those of the votes.
    newest: Record<C>,
    votes: BTreeSet<NodeId>,
    dead: BTreeSet<NodeId>,
}

impl<C: Clone> Candidate<C> {
    /// Stand, if the voter of this process may vote.
    pub fn stand(voter: &mut Voter<C>, now: Instant) -> Option<Self> {
        let (ballot, newest) = voter.stand(now)?;
        Some(Self { ballot, newest, votes: [ballot.node].into(), dead: BTreeSet::new() })
    }

    /// Its ballot.
    pub fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// Whom to ask for their votes. Grows when a vote brings a record with other voters.
    pub fn asks(&self) -> BTreeSet<NodeId> {
        &self.newest.all_voters() - &self.votes
    }

    /// A voter votes for this ballot, and holds that record.
    pub fn on_vote(&mut self, from: NodeId, ballot: Ballot, record: Record<C>) {
        if ballot != self.ballot {
            return;
        }
        self.votes.insert(from);
        if record.stamp > self.newest.stamp {
            self.newest = record;
        }
    }

    /// A process is proven dead.
    pub fn on_dead(&mut self, node: NodeId) {
        self.dead.insert(node);
    }

    /// Lead, if it has the votes: most of each set, or of two voters the one that lives.
    pub fn elected(&self) -> Option<Leader<C>> {
        let me = self.ballot.node;
        let elects = self.newest.sets().all(|voters| {
            let is_left = voters.other_of_two(me).is_some_and(|other| self.dead.contains(&other));
            voters.most(|node| self.votes.contains(&node)) || is_left
        });
        elects.then(|| Leader::elected(self.ballot, self.newest.clone(), self.dead.clone()))
    }
}
