//! One process's part in the quorum of a run: its voter, and whether it follows, stands or leads.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::{Duration, Instant};

use super::candidate::{Candidate, Verdict};
use super::leader::{Effect, Leader};
use super::record::{Ballot, Record, Stamp, Voters};
use super::voter::{Reply, Voter};
use crate::rendezvous::messages::message::NodeId;

/// Time between two voters that stand, so that the first one has the votes before the second one asks.
const STAGGER: Duration = Duration::from_millis(250);
/// How often a candidate asks again whoever has not answered: a connection that ends takes messages along.
const ASKS_EVERY: Duration = Duration::from_secs(1);

/// What one process of a run's quorum sends another. Any of them may be lost, or arrive twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message<C> {
    /// The leader writes the record.
    Write(Record<C>),
    /// A candidate asks for a vote.
    Ask(Ballot),
    /// Who had this ballot leads no more, or does not stand any more: it writes nothing under it.
    Abdicated(Ballot),
    /// A voter that follows this ballot was asked for its vote: does the process that made it still stand or lead by it? If not, it answers
    /// [`Message::Abdicated`], which may have been lost.
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
        /// When the last question of each process was read whose lease may not be over yet.
        read: BTreeMap<NodeId, Instant>,
    },
}

/// A process's part in the quorum of one run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Seat<C> {
    id: NodeId,
    lease: Duration,
    voter: Voter<C>,
    part: Part<C>,
    /// Who is proven dead, among those that matter.
    dead: BTreeSet<NodeId>,
    actions: Vec<Action<C>>,
}

impl<C: Clone> Seat<C> {
    /// A process without a record. `lease`: how long after a question the lease of whoever has asked is over for a leader, which is
    /// longer than for the process that has it, by as much as their clocks may differ.
    pub fn new(id: NodeId, lease: Duration) -> Self {
        let part = Part::Follows { stands_at: None };
        Self { id, lease, voter: Voter::new(id), part, dead: BTreeSet::new(), actions: Vec::new() }
    }

    /// The process that leads a run which has no record.
    pub fn first(id: NodeId, lease: Duration, content: C, now: Instant) -> Self {
        let leader = Leader::first(id, content);
        let mut seat = Self { part: Part::Leads { leader, read: BTreeMap::new() }, ..Self::new(id, lease) };
        seat.perform(now);
        seat
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
        self.dead.contains(&node)
    }

    /// Take what is to be done since the last call, in order.
    pub fn take_actions(&mut self) -> Vec<Action<C>> {
        mem::take(&mut self.actions)
    }

    /// When to call [`Seat::on_tick`] at the latest.
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
                self.elect(now);
                self.follow(now);
            }
            Message::IsOver(ballot) => {
                let is_mine = match &self.part {
                    Part::Follows { .. } => false,
                    Part::Stands { candidate, .. } => candidate.ballot() == ballot,
                    Part::Leads { leader, .. } => leader.ballot() == ballot,
                };
                // Nobody makes a ballot twice.
                if ballot.node == self.id && !is_mine {
                    self.actions.push(Action::Send(from, Message::Abdicated(ballot)));
                }
            }
            Message::Abdicated(ballot) => {
                let reply = self.voter.on_abdicated(ballot, now);
                self.answer(from, reply);
                self.elect(now);
                self.follow(now);
            }
            Message::Reply(Reply::Accepted(stamp)) => self.lead(now, |leader| leader.on_accepted(from, stamp)),
            Message::Reply(Reply::Refused(by)) => {
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
        self.dead.insert(node);
        let reply = self.voter.on_dead(node, now);
        self.answer(node, reply);
        if let Part::Stands { candidate, .. } = &mut self.part {
            candidate.on_dead(node);
        }
        self.on_left(node, now);
        self.elect(now);
        self.follow(now);
        let (voters, promised) = (self.all_voters(), self.promised().map(|ballot| ballot.node));
        self.dead.retain(|node| voters.contains(node) || promised == Some(*node));
    }

    /// A process has left for good, and its workers have ended. Its lease is over.
    pub fn on_left(&mut self, node: NodeId, now: Instant) {
        if let Part::Leads { read, .. } = &mut self.part {
            read.remove(&node);
        }
        self.lead(now, |leader| leader.on_absent(node));
    }

    /// A process has asked whether it is still one of the run. Returns the record under which it has a lease, from when it sent this question.
    /// `None`: it has none.
    pub fn on_question(&mut self, from: NodeId, now: Instant) -> Option<Stamp> {
        let Part::Leads { leader, read } = &mut self.part else { return None };
        read.insert(from, now);
        leader.on_present(from);
        let stamp = leader.chosen().map(|record| record.stamp);
        self.perform(now);
        stamp
    }

    /// The leader has answered a question with this stamp, so this process has a lease. `until`: counted from when it has sent the question.
    pub fn on_lease(&mut self, stamp: Stamp, until: Instant) {
        self.voter.on_lease(stamp, until);
    }

    /// Write the record, with these voters. Replaces what still waits to be written.
    pub fn write(&mut self, voters: Voters, content: C, now: Instant) {
        if let Part::Leads { read, .. } = &mut self.part {
            // A leader before may have given a lease.
            let others = voters.0.iter().filter(|voter| **voter != self.id && !self.dead.contains(voter));
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
            if let Some(mut candidate) = Candidate::stand(&mut self.voter, now) {
                self.dead.iter().for_each(|dead| candidate.on_dead(*dead));
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
        let Part::Leads { leader, read } = &mut self.part else { return };
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

    /// If the leader is over, it is this process's turn to stand at some time.
    fn follow(&mut self, now: Instant) {
        let is_over = self.voter.has_lost_leader();
        let turn = self.all_voters().difference(&self.dead).position(|voter| *voter == self.id);
        if let Part::Follows { stands_at } = &mut self.part {
            let turn = turn.filter(|_| is_over).map(|turn| now + STAGGER * turn as u32);
            *stands_at = turn.map(|turn| stands_at.unwrap_or(turn).min(turn));
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
                let read = others.filter(|voter| !self.dead.contains(voter)).map(|voter| (voter, now)).collect();
                self.actions.push(Action::Lead(newest.content.clone()));
                self.part = Part::Leads { leader: *leader, read };
                self.perform(now);
            }
        }
    }

    /// Stand no more. Those that have voted for this process learn that when they are asked for another ([`Message::IsOver`]).
    fn give_way(&mut self, now: Instant) {
        let Part::Stands { candidate, .. } = &self.part else { return };
        let ballot = candidate.ballot();
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
                    Effect::Over(ballot) => {
                        self.part = Part::Follows { stands_at: None };
                        self.actions.push(Action::Over(ballot));
                        let reply = self.voter.on_abdicated(ballot, now);
                        self.answer(self.id, reply);
                    }
                }
            }
        }
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
