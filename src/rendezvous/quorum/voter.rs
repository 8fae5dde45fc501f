//! A voter: what it accepts from a leader, and when it votes for another.

use std::collections::BTreeSet;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::record::{Ballot, Record, Stamp};
use crate::rendezvous::messages::message::NodeId;

/// What a voter answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reply<C> {
    /// It holds this writing of the record.
    Accepted(Stamp),
    /// It votes for this ballot, and holds this record.
    Voted(Ballot, Record<C>),
    /// It has voted for this ballot, which prevails over the one that was asked for.
    Refused(Ballot),
}

/// A process that holds the record of a run, or will. Its memory is all there is of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Voter<C> {
    id: NodeId,
    /// It takes nothing under a lower ballot.
    promised: Option<Ballot>,
    held: Option<Record<C>>,
    /// The last lease: under which writing of the record it was given, and until when it lasts.
    lease: Option<(Stamp, Instant)>,
    /// Which of the voters, and of those it has voted for, are proven dead.
    dead: BTreeSet<NodeId>,
    /// Whoever made this ballot leads and stands no more.
    abdicated: Option<Ballot>,
    /// The highest ballot that it has heard of, and not voted for.
    heard: Option<Ballot>,
    /// It was asked to vote for this ballot, and does once it has the proof.
    asked: Option<Ballot>,
}

impl<C: Clone> Voter<C> {
    /// A process without a record.
    pub fn new(id: NodeId) -> Self {
        Self {
            id,
            promised: None,
            held: None,
            lease: None,
            dead: BTreeSet::new(),
            abdicated: None,
            heard: None,
            asked: None,
        }
    }

    /// The record that it holds.
    pub fn held(&self) -> Option<&Record<C>> {
        self.held.as_ref()
    }

    /// The highest ballot that it knows of: of the leader, or of a candidate.
    pub fn promised(&self) -> Option<Ballot> {
        self.promised
    }

    /// Whether this voter may give up whomever it follows: that one is proven dead, or neither leads nor stands any more.
    pub fn has_lost_leader(&self) -> bool {
        self.promised.is_some_and(|promised| self.is_over(promised))
    }

    fn is_over(&self, ballot: Ballot) -> bool {
        self.dead.contains(&ballot.node) || self.abdicated == Some(ballot)
    }

    /// A leader writes the record.
    pub fn on_record(&mut self, record: Record<C>) -> Reply<C> {
        let stamp = record.stamp;
        if let Some(promised) = self.promised.filter(|promised| *promised > stamp.ballot) {
            return Reply::Refused(promised);
        }
        self.promised = Some(stamp.ballot);
        if self.held.as_ref().is_none_or(|held| held.stamp < stamp) {
            self.held = Some(record);
            self.forget();
        }
        Reply::Accepted(stamp)
    }

    /// The leader has answered a question, so this process has a lease. `stamp`: the chosen record at that time. `until`: counted from
    /// when the question was sent.
    pub fn on_lease(&mut self, stamp: Stamp, until: Instant) {
        match &mut self.lease {
            Some((under, _)) if *under > stamp => {}
            Some((under, last)) if *under == stamp => *last = until.max(*last),
            lease => *lease = Some((stamp, until)),
        }
    }

    /// A process is proven dead. The proof is forgotten if the process is neither a voter nor whom this voter follows: it must be given
    /// again if that changes. Returns the answer to a candidate that has asked for this vote before.
    pub fn on_dead(&mut self, node: NodeId, now: Instant) -> Option<Reply<C>> {
        self.dead.insert(node);
        self.asked = self.asked.filter(|ballot| ballot.node != node);
        self.forget();
        self.vote_if_asked(now)
    }

    /// Others have a higher ballot than this process.
    pub fn on_heard(&mut self, ballot: Ballot) {
        self.heard = self.heard.max(Some(ballot));
    }

    /// Which processes are proven dead, among those that matter.
    pub fn dead(&self) -> &BTreeSet<NodeId> {
        &self.dead
    }

    /// A leader has handed over, or a candidate has given way: it writes nothing under this ballot any more. Returns the answer to a candidate that has asked before.
    pub fn on_abdicated(&mut self, ballot: Ballot, now: Instant) -> Option<Reply<C>> {
        if self.promised.is_none_or(|promised| promised <= ballot) {
            self.promised = Some(ballot);
            self.abdicated = Some(ballot);
        }
        self.vote_if_asked(now)
    }

    /// A candidate asks for this vote. `None`: not yet, or not at all.
    pub fn on_asked(&mut self, ballot: Ballot, now: Instant) -> Option<Reply<C>> {
        if let Some(promised) = self.promised.filter(|promised| *promised > ballot) {
            return Some(Reply::Refused(promised));
        }
        self.asked = self.asked.max(Some(ballot));
        self.vote_if_asked(now)
    }

    /// This process stands as candidate itself. `None`: it may not.
    pub fn stand(&mut self, now: Instant) -> Option<(Ballot, Record<C>)> {
        let promised = self.promised?;
        let ballot = promised.max(self.heard.unwrap_or(promised)).beaten_by(self.id);
        if !self.may_vote(ballot, now) {
            return None;
        }
        self.promised = Some(ballot);
        self.held.clone().map(|held| (ballot, held))
    }

    /// Whether it would vote for this ballot. The lease: a leader writes without a voter only if that has none. So whatever was chosen before
    /// the lease this one holds, and whatever was chosen since it holds as well, or others of each majority do.
    fn may_vote(&self, ballot: Ballot, now: Instant) -> bool {
        let (Some(promised), Some(held)) = (self.promised, &self.held) else { return false };
        let is_over = self.is_over(promised);
        // A candidate that has written nothing here may make another attempt, and give way to one that prevails.
        let is_attempt = held.stamp.ballot != promised && [self.id, ballot.node].contains(&promised.node);
        let holds_all = self.lease.is_some_and(|(stamp, until)| stamp <= held.stamp && now < until);
        // A candidate whose answer was lost asks once more, by the same ballot.
        let is_new = ballot > promised || ballot == promised && is_attempt;
        is_new && (is_over || is_attempt) && holds_all
    }

    fn vote_if_asked(&mut self, now: Instant) -> Option<Reply<C>> {
        let ballot = self.asked.filter(|ballot| self.may_vote(*ballot, now))?;
        self.asked = None;
        self.promised = Some(ballot);
        self.held.clone().map(|held| Reply::Voted(ballot, held))
    }

    /// Remember no more deaths than matter.
    fn forget(&mut self) {
        let voters = self.held.as_ref().map(Record::all_voters).unwrap_or_default();
        let promised = self.promised.map(|ballot| ballot.node);
        self.dead.retain(|node| voters.contains(node) || promised == Some(*node));
    }
}
