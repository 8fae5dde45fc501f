//! A candidate: whose votes it asks for, and which record goes on.
//!
//! It asks twice. When most have voted once, every leader there was is over: whoever voted for that one had the proof before it voted for
//! another. So when they vote again, nothing is written any more, and what they hold counts. Votes of one round could be older than what
//! a leader has written that came in between: with a lower ballot, and without the voters that had no lease from it.

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
    /// That of its first question. Whoever has voted for that one must not give it up before this process does.
    since: Ballot,
    /// The newest record among those of the votes.
    newest: Record<C>,
    votes: BTreeSet<NodeId>,
    dead: BTreeSet<NodeId>,
    /// Most have voted for it before.
    asks_again: bool,
}

/// What follows from the votes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<C> {
    /// More votes are needed.
    Wait,
    /// Ask all of them, by another ballot.
    Ask,
    /// It leads.
    Lead(Box<Leader<C>>),
    /// It stands no more: it has voted for another, or has no lease any more.
    GiveWay,
}

impl<C: Clone> Candidate<C> {
    /// Stand, if the voter of this process may vote.
    pub fn stand(voter: &mut Voter<C>, now: Instant) -> Option<Self> {
        let (ballot, newest) = voter.stand(now)?;
        let dead = voter.dead().clone();
        Some(Self { ballot, since: ballot, newest, votes: [ballot.node].into(), dead, asks_again: false })
    }

    /// Its ballot.
    pub fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// Its first ballot.
    pub fn since(&self) -> Ballot {
        self.since
    }

    /// The newest record among those of the votes: it goes on.
    pub fn newest(&self) -> &Record<C> {
        &self.newest
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

    /// Decide, with the voter of this process.
    pub fn decide(&mut self, voter: &mut Voter<C>, now: Instant) -> Verdict<C> {
        if voter.promised() != Some(self.ballot) {
            return Verdict::GiveWay;
        }
        if !self.has_most() {
            return Verdict::Wait;
        }
        if self.asks_again {
            let leader = Leader::elected(self.ballot, self.newest.clone(), self.dead.clone());
            return Verdict::Lead(Box::new(leader));
        }
        let Some((ballot, held)) = voter.stand(now) else { return Verdict::GiveWay };
        (self.ballot, self.newest, self.votes, self.asks_again) = (ballot, held, [ballot.node].into(), true);
        if self.has_most() { self.decide(voter, now) } else { Verdict::Ask }
    }

    /// Whether it has most of each set, or is the one of two voters that lives.
    fn has_most(&self) -> bool {
        let me = self.ballot.node;
        self.newest.sets().all(|voters| {
            let is_left = voters.other_of_two(me).is_some_and(|other| self.dead.contains(&other));
            voters.most(|node| self.votes.contains(&node)) || is_left
        })
    }
}
