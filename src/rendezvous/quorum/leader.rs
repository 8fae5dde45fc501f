//! A leader: what it writes, and when that is chosen.

use std::collections::BTreeSet;
use std::mem;

use super::record::{Ballot, Record, Stamp, Voters};
use crate::rendezvous::messages::message::NodeId;

/// What a leader has its driver do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Effect<C> {
    /// Send the record to a voter, which may be its own.
    Write(NodeId, Record<C>),
    /// The record is chosen: messages that depend on it may be sent.
    Chosen(Record<C>),
    /// It leads no more: decide nothing, answer nobody, and tell everybody that this ballot is handed over, the own voter first.
    Over(Ballot),
}

/// The process that writes the record of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leader<C> {
    ballot: Ballot,
    /// The record that is chosen, and who holds it.
    chosen: Option<(Record<C>, BTreeSet<NodeId>)>,
    /// The record that is being written, and who holds it.
    writing: Option<(Record<C>, BTreeSet<NodeId>)>,
    /// The voters and the content of the next record.
    next: Option<(Voters, C)>,
    /// Processes for which this leader does not wait: they have left, are proven dead, or have no lease any more.
    absent: BTreeSet<NodeId>,
    /// It has handed over, or another leads.
    is_over: bool,
    effects: Vec<Effect<C>>,
}

impl<C: Clone> Leader<C> {
    /// Lead a run that has no record.
    pub fn first(node: NodeId, content: C) -> Self {
        let (ballot, voters) = (Ballot::first(node), Voters::from_iter([node]));
        let record = Record { stamp: Stamp { ballot, seq: 0 }, voters, before: None, content };
        Self::begin(ballot, record, BTreeSet::new())
    }

    /// Lead a run whose newest record is this one.
    pub(super) fn elected(ballot: Ballot, newest: Record<C>, dead: BTreeSet<NodeId>) -> Self {
        let stamp = Stamp { ballot, seq: newest.stamp.seq.saturating_add(1) };
        Self::begin(ballot, Record { stamp, ..newest }, dead)
    }

    fn begin(ballot: Ballot, record: Record<C>, absent: BTreeSet<NodeId>) -> Self {
        let mut leader =
            Self { ballot, chosen: None, writing: None, next: None, absent, is_over: false, effects: Vec::new() };
        leader.begin_write(record);
        leader
    }

    /// The record that is chosen, under which leases are given. Whoever gets one is present ([`Leader::on_present`]): without it nothing is
    /// chosen as long as the lease lasts.
    pub fn chosen(&self) -> Option<&Record<C>> {
        self.chosen.as_ref().map(|(record, _)| record).filter(|_| !self.is_over)
    }

    /// Write a record with these voters and this content, once the present one is chosen. Replaces a record that still waits for that.
    pub fn write(&mut self, voters: Voters, content: C) {
        if !self.is_over {
            self.next = Some((voters, content));
            self.go_on();
        }
    }

    /// A voter holds this writing.
    pub fn on_accepted(&mut self, from: NodeId, stamp: Stamp) {
        let mut both = self.writing.as_mut().into_iter().chain(self.chosen.as_mut());
        if let Some((_, holders)) = both.find(|(record, _)| record.stamp == stamp) {
            holders.insert(from);
            self.go_on();
        }
    }

    /// A voter has voted for this ballot. It may lead already, so this one hands over: otherwise those that follow it would vote for nobody.
    pub fn on_refused(&mut self, by: Ballot) {
        if by > self.ballot {
            self.abdicate();
        }
    }

    /// A process has left, is proven dead, or its lease is over, which began when its last question was *read*. If this leader has read none,
    /// it began when this leader was elected, or when the process became a voter: the leader before has given leases too.
    pub fn on_absent(&mut self, node: NodeId) {
        self.absent.insert(node);
        self.go_on();
    }

    /// A process is there, for the first time or again.
    pub fn on_present(&mut self, node: NodeId) {
        let was_absent = self.absent.remove(&node);
        let Some((record, holders)) = self.writing.as_ref().or(self.chosen.as_ref()) else { return };
        let lacks_it = record.all_voters().contains(&node) && !holders.contains(&node);
        if !self.is_over && (lacks_it || was_absent) {
            self.effects.push(Effect::Write(node, record.clone()));
        }
    }

    /// What was sent to this process before may be lost: send it what is being written, if it lacks that.
    pub fn repeat(&mut self, node: NodeId) {
        let Some((record, holders)) = self.writing.as_ref().filter(|_| !self.is_over) else { return };
        if record.all_voters().contains(&node) && !holders.contains(&node) {
            self.effects.push(Effect::Write(node, record.clone()));
        }
    }

    /// Hand over.
    pub fn abdicate(&mut self) {
        if !mem::replace(&mut self.is_over, true) {
            self.effects.push(Effect::Over(self.ballot));
        }
    }

    /// Take the effects since the last call, in order.
    pub fn take_effects(&mut self) -> Vec<Effect<C>> {
        mem::take(&mut self.effects)
    }

    /// See whether the record is chosen, and write the next one.
    fn go_on(&mut self) {
        if self.is_over {
            return;
        }
        let is_chosen = self.writing.as_ref().is_some_and(|(record, holders)| {
            record.sets().all(|voters| voters.most(|node| holders.contains(&node) || self.absent.contains(&node)))
        });
        if is_chosen && let Some((record, holders)) = self.writing.take() {
            self.effects.push(Effect::Chosen(record.clone()));
            self.chosen = Some((record, holders));
        }
        let Some((chosen, _)) = self.chosen.as_ref().filter(|_| self.writing.is_none()) else { return };
        let Some((voters, content)) = self.next.take().or_else(|| {
            // The voters before have no say any more once this is known.
            chosen.before.as_ref().map(|_| (chosen.voters.clone(), chosen.content.clone()))
        }) else {
            return;
        };
        let stamp = Stamp { ballot: self.ballot, seq: chosen.stamp.seq.saturating_add(1) };
        let before = (voters != chosen.voters).then(|| chosen.voters.clone());
        self.begin_write(Record { stamp, voters, before, content });
    }

    fn begin_write(&mut self, record: Record<C>) {
        let writes = record.all_voters().into_iter().map(|node| Effect::Write(node, record.clone()));
        self.effects.extend(writes);
        self.writing = Some((record, BTreeSet::new()));
        self.go_on();
    }
}
