//! One process's part in the quorum of a run: its voter, and whether it follows, stands or leads.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::candidate::{Candidate, Verdict};
use super::leader::{Effect, Leader};
use super::record::{Ballot, Record, Stamp, Voters};
use super::voter::{Reply, Voter};
use crate::rendezvous::messages::message::NodeId;

/// Time between two voters that stand, so that the first one has the votes before the second one asks.
const STAGGER: Duration = Duration::from_millis(250);
/// How often a candidate asks again whoever has not answered: a connection that ends takes messages along.
const ASKS_EVERY: Duration = Duration::from_secs(1);
/// Clocks differ by less than one part of so many.
const DRIFT: u32 = 50;

/// What one process of a run's quorum sends another. Any of them may be lost, or arrive twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Message<C> {
    /// The leader writes the record.
    Write(Record<C>),
    /// A candidate asks for a vote.
    Ask(Ballot),
    /// Whoever made this ballot neither leads nor stands any more: it writes nothing under it.
    Abdicated(Ballot),
    /// A voter that follows this ballot was asked for its vote: does the process that made it still lead or stand? If not, it answers
    /// [`Message::Abdicated`], which may have been lost before.
    IsOver(Ballot),
    /// A voter answers.
    Reply(Reply<C>),
}

/// What a process's driver must do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action<C> {
    /// Send this to a process, over its session or a new connection.
    Send(NodeId, Message<C>),
    /// This process leads from now on, and goes on with this content. It answers questions once a record is chosen.
    Lead(C),
    /// The record is chosen: what depends on it may be said.
    Chosen(Record<C>),
    /// This process leads no more: decide nothing, answer nobody, and tell everybody [`Message::Abdicated`].
    Over(Ballot),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Part<C> {
    Follows {
        /// When it stands, unless another leads by then.
        stands_at: Option<Instant>,
    },
    Stands {
        candidate: Candidate<C>,
        /// When it asks again.
        asks_at: Instant,
    },
    Leads {
        leader: Leader<C>,
        /// The first ballot of the attempt by which it leads.
        since: Ballot,
        /// When the last question of each process was read whose lease may not be over yet.
        read: BTreeMap<NodeId, Instant>,
    },
}

/// A process's part in the quorum of one run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica<C> {
    id: NodeId,
    lease: Duration,
    voter: Voter<C>,
    part: Part<C>,
    actions: Vec<Action<C>>,
}

impl<C: Clone> Replica<C> {
    /// A process without a record. `lease`: how long after a question the lease of whoever has asked is over for a leader, which is
    /// longer than for the process that has it, by as much as their clocks may differ.
    pub fn new(id: NodeId, lease: Duration) -> Self {
        let part = Part::Follows { stands_at: None };
        Self { id, lease, voter: Voter::new(id), part, actions: Vec::new() }
    }

    /// The process that leads a run which has no record.
    pub fn first(id: NodeId, lease: Duration, content: C, now: Instant) -> Self {
        let leader = Leader::first(id, content);
        let part = Part::Leads { leader, since: Ballot::first(id), read: BTreeMap::new() };
        let mut replica = Self { part, ..Self::new(id, lease) };
        replica.perform(now);
        replica
    }

    /// The record that is chosen, if this process leads.
    pub fn chosen(&self) -> Option<&Record<C>> {
        if let Part::Leads { leader, .. } = &self.part { leader.chosen() } else { None }
    }

    /// Whether this process leads.
    pub fn leads(&self) -> bool {
        matches!(self.part, Part::Leads { .. })
    }

    /// The record that this process holds.
    pub fn held(&self) -> Option<&Record<C>> {
        self.voter.held()
    }

    /// The ballot that prevails, as far as this process knows: of the leader or of a candidate.
    pub fn promised(&self) -> Option<Ballot> {
        self.voter.promised()
    }

    /// Whether a process is proven dead. That is forgotten when it does not matter.
    pub fn is_dead(&self, node: NodeId) -> bool {
        self.voter.dead().contains(&node)
    }

    /// Take the actions that have come up since the last call, in order.
    pub fn take_actions(&mut self) -> Vec<Action<C>> {
        mem::take(&mut self.actions)
    }

    /// When to call [`Replica::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.part {
            Part::Follows { stands_at } => *stands_at,
            Part::Stands { asks_at, .. } => Some(*asks_at),
            Part::Leads { read, .. } => read.values().min().map(|read| *read + self.lease),
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        match &mut self.part {
            Part::Follows { stands_at: Some(at) } if *at <= now => drop(self.stand(now)),
            Part::Stands { asks_at, .. } if *asks_at <= now => {
                *asks_at = now + ASKS_EVERY;
                self.ask_all();
            }
            Part::Leads { .. } => self.lapse(now),
            _ => {}
        }
    }

    /// A message of this process has arrived.
    pub fn on_message(&mut self, from: NodeId, message: Message<C>, now: Instant) {
        match message {
            Message::Write(record) => {
                let ballot = record.stamp.ballot;
                let reply = self.voter.on_record(record);
                self.actions.push(Action::Send(from, Message::Reply(reply)));
                self.lead(now, |leader| leader.on_refused(ballot));
                self.elect(now);
                self.follow(now);
            }
            Message::Ask(ballot) => {
                let reply = self.voter.on_asked(ballot, now);
                let follows = self.promised().filter(|promised| reply.is_none() && promised.node != self.id);
                self.actions.extend(follows.map(|it| Action::Send(it.node, Message::IsOver(it))));
                self.answer(from, reply);
                if self.all_voters().contains(&from) {
                    // A voter that this leader has lost would stand for ever.
                    self.lead(now, |leader| leader.on_refused(ballot));
                }
                self.elect(now);
                self.follow(now);
            }
            Message::IsOver(ballot) => self.answer_if_over(from, ballot),
            Message::Abdicated(ballot) => {
                let reply = self.voter.on_abdicated(ballot, now);
                self.answer(from, reply);
                self.lead(now, |leader| leader.on_refused(ballot));
                self.elect(now);
                self.follow(now);
            }
            Message::Reply(Reply::Accepted(stamp)) => self.lead(now, |leader| leader.on_accepted(from, stamp)),
            Message::Reply(Reply::Refused(by)) => {
                self.voter.on_heard(by);
                if matches!(&self.part, Part::Stands { candidate, .. } if candidate.ballot() < by) {
                    self.give_way(now);
                }
                self.lead(now, |leader| leader.on_refused(by));
            }
            Message::Reply(Reply::Voted(ballot, record)) => self.count(from, ballot, record, now),
        }
    }

    /// A process is proven dead.
    pub fn on_dead(&mut self, node: NodeId, now: Instant) {
        let reply = self.voter.on_dead(node, now);
        self.answer(node, reply);
        if let Part::Stands { candidate, .. } = &mut self.part {
            candidate.on_dead(node);
        }
        self.on_left(node, now);
        self.elect(now);
        self.follow(now);
    }

    /// Messages reach a process again. What was sent before may be lost.
    pub fn on_connected(&mut self, node: NodeId, now: Instant) {
        self.lead(now, |leader| leader.repeat(node));
    }

    /// A process has left for good, and its workers have ended. Its lease is over.
    pub fn on_left(&mut self, node: NodeId, now: Instant) {
        if let Part::Leads { read, .. } = &mut self.part {
            read.remove(&node);
        }
        self.lead(now, |leader| leader.on_absent(node));
    }

    /// A process that follows this ballot has asked whether it is still one of the run. Returns the record under which it has a lease,
    /// counted from when it has sent this question. `None`: it has none.
    pub fn on_question(&mut self, from: NodeId, follows: Ballot, now: Instant) -> Option<Stamp> {
        let Part::Leads { leader, read, .. } = &mut self.part else {
            self.answer_if_over(from, follows);
            return None;
        };
        if self.voter.dead().contains(&from) {
            return None; // it was sent before
        }
        read.insert(from, now);
        leader.on_present(from);
        let stamp = leader.chosen().map(|record| record.stamp);
        self.perform(now);
        stamp
    }

    /// The leader has answered a question with this stamp, so this process has a lease. `until`: counted from when it has sent the question.
    pub fn on_lease(&mut self, stamp: Stamp, until: Instant, now: Instant) {
        self.voter.on_lease(stamp, until);
        self.follow(now);
    }

    /// Write the record, with these voters. Replaces what still waits to be written.
    pub fn write(&mut self, voters: Voters, content: C, now: Instant) {
        if let Part::Leads { read, .. } = &mut self.part {
            // A leader before may have given a lease.
            let others = voters.0.iter().filter(|voter| **voter != self.id && !self.voter.dead().contains(voter));
            others.for_each(|voter| _ = read.entry(*voter).or_insert(now));
        }
        self.lead(now, |leader| leader.write(voters, content));
    }

    /// Hand over, if this process leads.
    pub fn abdicate(&mut self, now: Instant) {
        self.lead(now, Leader::abdicate);
    }

    /// Stand, if this process may. Returns whether it does.
    pub fn stand(&mut self, now: Instant) -> bool {
        if let Part::Follows { stands_at } = &mut self.part {
            *stands_at = None;
            if let Some(candidate) = Candidate::stand(&mut self.voter, now) {
                self.part = Part::Stands { candidate, asks_at: now + ASKS_EVERY };
                self.ask_all();
                self.elect(now);
                return true;
            }
        }
        false
    }

    /// Wait no longer for processes whose leases are over.
    pub fn lapse(&mut self, now: Instant) {
        let Part::Leads { leader, read, .. } = &mut self.part else { return };
        let lease = self.lease;
        read.retain(|node, read| {
            let lasts = now < *read + lease;
            if !lasts {
                leader.on_absent(*node);
            }
            lasts
        });
        self.perform(now);
    }

    /// If whoever this process follows is over, it stands when it is its turn.
    fn follow(&mut self, now: Instant) {
        let is_over = self.voter.has_lost_leader();
        let voters = self.all_voters();
        let turn = voters.difference(self.voter.dead()).position(|voter| *voter == self.id);
        // A process that has led or stood before lets the others stand first.
        let waits = if self.promised().is_some_and(|it| it.node == self.id) { ASKS_EVERY } else { Duration::ZERO };
        if let Part::Follows { stands_at } = &mut self.part {
            let turn = turn.filter(|_| is_over).map(|turn| now + waits + STAGGER * turn as u32);
            *stands_at = turn.map(|turn| stands_at.unwrap_or(turn).min(turn));
        }
    }

    /// Tell a process that follows a ballot of this one if that is over. Nobody makes a ballot twice. Within one attempt to lead none is over,
    /// because a candidate's second votes are safe by its first ones.
    fn answer_if_over(&mut self, to: NodeId, ballot: Ballot) {
        let since = match &self.part {
            Part::Follows { .. } => None,
            Part::Stands { candidate, .. } => Some(candidate.since()),
            Part::Leads { since, .. } => Some(*since),
        };
        if ballot.node == self.id && since.is_none_or(|since| ballot < since) {
            self.actions.push(Action::Send(to, Message::Abdicated(ballot)));
        }
    }

    fn all_voters(&self) -> BTreeSet<NodeId> {
        self.held().map(Record::all_voters).unwrap_or_default()
    }

    /// Send a voter's answer. A vote goes to the candidate of its ballot, which may have asked earlier; a refusal to `asks`.
    fn answer(&mut self, asks: NodeId, reply: Option<Reply<C>>) {
        let Some(reply) = reply else { return };
        let to = if let Reply::Voted(ballot, _) = &reply { ballot.node } else { asks };
        self.actions.push(Action::Send(to, Message::Reply(reply)));
    }

    fn ask_all(&mut self) {
        if let Part::Stands { candidate, .. } = &self.part {
            let ballot = candidate.ballot();
            self.actions.extend(candidate.asks().into_iter().map(|voter| Action::Send(voter, Message::Ask(ballot))));
        }
    }

    /// A vote has come.
    fn count(&mut self, from: NodeId, ballot: Ballot, record: Record<C>, now: Instant) {
        let Part::Stands { candidate, .. } = &mut self.part else { return };
        let before = candidate.asks();
        candidate.on_vote(from, ballot, record);
        let more = &candidate.asks() - &before;
        let ballot = candidate.ballot();
        self.actions.extend(more.into_iter().map(|voter| Action::Send(voter, Message::Ask(ballot))));
        self.elect(now);
    }

    /// See what the votes bring.
    fn elect(&mut self, now: Instant) {
        let Part::Stands { candidate, .. } = &mut self.part else { return };
        match candidate.decide(&mut self.voter, now) {
            Verdict::Wait => {}
            Verdict::Ask => self.ask_all(),
            Verdict::GiveWay => self.give_way(now),
            Verdict::Lead(leader) => {
                let newest = candidate.newest();
                let others = newest.all_voters().into_iter().filter(|voter| *voter != self.id);
                // The leader before has given leases until now.
                let lives = |voter: &NodeId| !self.voter.dead().contains(voter);
                let read = others.filter(lives).map(|voter| (voter, now)).collect();
                self.actions.push(Action::Lead(newest.content.clone()));
                self.part = Part::Leads { leader: *leader, since: candidate.since(), read };
                self.perform(now);
            }
        }
    }

    /// Stand no more, and tell those that may have voted for this process.
    fn give_way(&mut self, now: Instant) {
        let Part::Stands { candidate, .. } = &self.part else { return };
        let ballot = candidate.ballot();
        let others = candidate.newest().all_voters().into_iter().filter(|voter| *voter != self.id);
        self.actions.extend(others.map(|voter| Action::Send(voter, Message::Abdicated(ballot))));
        self.part = Part::Follows { stands_at: None };
        let reply = self.voter.on_abdicated(ballot, now);
        self.answer(self.id, reply);
        self.follow(now);
    }

    /// Tell the leader something, if this process leads.
    fn lead(&mut self, now: Instant, tell: impl FnOnce(&mut Leader<C>)) {
        if let Part::Leads { leader, .. } = &mut self.part {
            tell(leader);
            self.perform(now);
        }
    }

    fn perform(&mut self, now: Instant) {
        while let Part::Leads { leader, .. } = &mut self.part {
            let effects = leader.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Write(to, record) if to == self.id => self.write_here(record),
                    Effect::Write(to, record) => self.actions.push(Action::Send(to, Message::Write(record))),
                    Effect::Chosen(record) => self.actions.push(Action::Chosen(record)),
                    Effect::Over(ballot) => self.hand_over(ballot, now),
                }
            }
        }
    }

    fn hand_over(&mut self, ballot: Ballot, now: Instant) {
        self.part = Part::Follows { stands_at: None };
        self.actions.push(Action::Over(ballot));
        // It holds what it has written. Whoever leads next waits for this lease, as for those that were given.
        let lease = self.lease - self.lease / DRIFT;
        if let Some(stamp) = self.held().map(|held| held.stamp) {
            self.voter.on_lease(stamp, now + lease);
        }
        let reply = self.voter.on_abdicated(ballot, now);
        self.answer(self.id, reply);
        self.follow(now);
    }

    fn write_here(&mut self, record: Record<C>) {
        let reply = self.voter.on_record(record);
        if let Part::Leads { leader, .. } = &mut self.part {
            match reply {
                Reply::Accepted(stamp) => leader.on_accepted(self.id, stamp),
                Reply::Refused(by) => leader.on_refused(by),
                Reply::Voted(..) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);
    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    /// What a process sends.
    fn sent(replica: &mut Replica<u8>) -> Vec<(NodeId, Message<u8>)> {
        let send = |action| if let Action::Send(to, message) = action { Some((to, message)) } else { None };
        replica.take_actions().into_iter().filter_map(send).collect()
    }

    /// The second and the third of three voters, which hold the record and have leases. The first one leads.
    fn followers(now: Instant) -> [Replica<u8>; 2] {
        let mut leader = Replica::first(A, LEASE, 0, now);
        leader.write([A, B, C].into_iter().collect(), 1, now);
        let mut others = [B, C].map(|id| Replica::new(id, LEASE));
        for _ in 0..2 {
            // The record with the voters before, and the one without.
            for (to, message) in sent(&mut leader) {
                let other = &mut others[usize::from(to == C)];
                other.on_message(A, message, now);
                sent(other).into_iter().for_each(|(_, reply)| leader.on_message(to, reply, now));
            }
        }
        for (other, id) in others.iter_mut().zip([B, C]) {
            let stamp = leader.on_question(id, Ballot::first(A), now).unwrap();
            other.on_lease(stamp, now + LEASE, now);
        }
        others
    }

    /// Otherwise whoever has voted for its first ballot could vote for another candidate, while the second votes are on their way.
    #[test]
    fn a_candidate_that_asks_again_does_not_give_up_its_first_ballot() {
        let now = Instant::now();
        let [mut one, mut other] = followers(now);
        one.on_dead(A, now);
        other.on_dead(A, now);
        assert!(one.stand(now));
        let first = one.promised().unwrap();
        let (_, ask) = sent(&mut one).into_iter().find(|(to, _)| *to == C).unwrap();
        other.on_message(B, ask, now);
        sent(&mut other).into_iter().for_each(|(_, vote)| one.on_message(C, vote, now));
        let again = sent(&mut one);
        assert!(again.iter().any(|(to, message)| *to == C && matches!(message, Message::Ask(it) if *it > first)));
        one.on_message(C, Message::IsOver(first), now);
        assert_eq!(sent(&mut one), []);
        one.on_message(C, Message::Reply(Reply::Refused(Ballot { number: 9, node: C })), now);
        sent(&mut one);
        one.on_message(C, Message::IsOver(first), now);
        assert_eq!(sent(&mut one), [(C, Message::Abdicated(first))]);
    }

    #[test]
    fn voters_stand_one_after_another() {
        let now = Instant::now();
        let [mut one, mut other] = followers(now);
        for replica in [&mut one, &mut other] {
            assert_eq!(replica.next_deadline(), None);
            replica.on_dead(A, now);
        }
        assert_eq!((one.next_deadline(), other.next_deadline()), (Some(now), Some(now + STAGGER)));
        one.on_tick(now);
        assert_eq!(one.next_deadline(), Some(now + ASKS_EVERY));
        // One that has voted follows whom it has voted for.
        other.on_message(B, Message::Ask(one.promised().unwrap()), now);
        assert_eq!(other.next_deadline(), None);
    }
}
