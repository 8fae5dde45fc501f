//! The processes at the endpoints of a list, of which one leads the run: what this one does, and what it says to the others.
//!
//! Pure. Each process keeps a connection to every other one, over which it sends, and finds out who leads: [`bootstrap`](Bootstrap) decides
//! that for a run without a record, and the [`Replica`] from then on. The voters are the processes at the endpoints that are there.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

pub use self::wire::{Content, PeerMessage};
use self::wire::{check_ballot, check_stamp, received, sent};
use crate::rendezvous::messages::ids::NodeId;
use crate::rendezvous::messages::peer::PeerHello;
use crate::rendezvous::quorum::bootstrap::{Answer, Attempt, Bootstrap, Seen, Verdict};
use crate::rendezvous::quorum::record::{Ballot, Voters};
use crate::rendezvous::quorum::replica::{Action, Message, Replica};
use crate::rendezvous::run::snapshot::Snapshot;

mod shown;
mod wire;

/// How long the lease of a voter lasts, from when it has sent its question. It is no node's lease: nobody's workers stop for it. A leader that
/// stood still for longer before it died has no successor; one waits so long for a voter that is silent, as for its node.
const LEASE: Duration = Duration::from_secs(15);
/// How long it lasts for the leader, from when it has read the question: clocks differ by less than one part in fifty.
const LEASE_OF_OTHERS: Duration = Duration::from_millis(15_300);
/// How often a voter asks for its lease.
const ASKS_EVERY: Duration = Duration::from_secs(5);
/// A voter that has not asked for so long is not counted on, although it may still vote: its lease may end before the leader does.
const ASKS_AT_LEAST_EVERY: Duration = Duration::from_secs(6);
/// A process that has followed a leader for so long without being sent its record is not reached by that one.
const BARRED_AFTER: Duration = Duration::from_secs(5);
/// How often a process that knows of no leader asks the others.
const LOOKS_EVERY: Duration = Duration::from_millis(250);

/// What happens to this process's connection to another endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It is about to be opened.
    Begins,
    /// It is open, and this process is at the other end.
    Up(NodeId),
    /// It has ended, or could not be opened.
    Down,
    /// Nobody listens there.
    Refused,
    /// The process that was at the other end has ended: nobody listens any more where it was, or another does.
    Dead(NodeId),
}

/// What the driver must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send this to the process at an endpoint, if there is a connection to it.
    Send {
        /// The place of the endpoint in the list.
        place: usize,
        /// The message.
        message: PeerMessage,
    },
    /// This process leads from now on.
    Lead {
        /// The run as its former leader left it, if it had begun.
        snapshot: Option<Box<Snapshot>>,
        /// The process that led when that was recorded is proven dead.
        is_dead: bool,
    },
    /// What depends on the content of this version may be said.
    Chosen(u64),
    /// This process leads no more.
    Over,
}

/// Another process.
#[derive(Clone, Debug, Default)]
struct Peer {
    /// The one that was there last.
    process: Option<NodeId>,
    is_up: bool,
    /// When it has come, or was heard last. Its connection does not end if its machine is silent.
    heard_at: Option<Instant>,
    /// When this process has given it a lease, as its leader, if that was lately. Without one it does not vote for another.
    leased_at: Option<Instant>,
    attempt: Option<Attempt>,
}

impl Peer {
    /// Whether it is connected, and was heard within a lease.
    fn is_there(&self, now: Instant) -> bool {
        self.is_up && self.heard_at.is_some_and(|at| now < at + LEASE_OF_OTHERS)
    }
}

/// This process's part.
#[derive(Clone, Debug)]
pub struct Ensemble {
    hello: PeerHello,
    peers: Vec<Peer>,
    /// When processes were heard last that are not there any more, unless they are proven dead.
    down: BTreeMap<NodeId, Instant>,
    bootstrap: Bootstrap<usize>,
    /// Where the leader is, as others have said, and since when this process has followed it.
    hint: Option<(usize, Instant)>,
    replica: Replica<Content>,
    /// Whose record this process has been sent last.
    wrote: Option<NodeId>,
    /// Processes that are proven dead, at most one for each endpoint: whether that matters may show later.
    dead: BTreeMap<usize, NodeId>,
    /// It has followed a leader for long without being sent a record. So it begins no history of its own.
    is_barred: bool,
    /// The content that this process writes or has written last, as leader, and who votes on it.
    content: Content,
    voters: Voters,
    /// The last question for a lease, and when it was sent.
    question: (u64, Instant),
    asks_at: Instant,
    looks_at: Instant,
    commands: Vec<Command>,
}

impl Ensemble {
    /// The process that introduces itself so, and listens.
    pub fn new(hello: PeerHello, now: Instant) -> Self {
        let (place, count) = (hello.place as usize, hello.endpoints.len());
        Self {
            peers: vec![Peer::default(); count],
            down: BTreeMap::new(),
            bootstrap: Bootstrap::new(place, count, now),
            hint: None,
            replica: Replica::new(hello.process, LEASE_OF_OTHERS),
            wrote: None,
            dead: BTreeMap::new(),
            is_barred: false,
            content: Content::default(),
            voters: Voters::default(),
            question: (0, now),
            asks_at: now,
            looks_at: now,
            commands: Vec::new(),
            hello,
        }
    }

    /// How this process introduces itself.
    pub fn hello(&self) -> &PeerHello {
        &self.hello
    }

    /// Whether this process leads.
    pub fn leads(&self) -> bool {
        self.replica.leads()
    }

    /// The place of the endpoint whose process leads, as far as this one knows.
    pub fn leader(&self) -> Option<usize> {
        if self.leads() {
            return Some(self.mine());
        }
        let ballot = self.replica.promised();
        let follows = ballot.filter(|ballot| self.wrote == Some(ballot.node) && !self.replica.is_dead(ballot.node));
        follows.map_or(self.hint.map(|(place, _)| place), |ballot| self.place_of(ballot.node))
    }

    /// The version of the content that this process has written last, as leader.
    pub fn version(&self) -> u64 {
        self.content.version
    }

    /// Record this run, as its leader.
    pub fn record(&mut self, snapshot: Snapshot, now: Instant) {
        let version = self.content.version.saturating_add(1);
        self.content = Content { version, snapshot: Some(Box::new(snapshot)), by: Some(self.hello.process) };
        self.write(now);
        self.settle(now);
    }

    /// Hand over, if this process leads.
    pub fn abdicate(&mut self, now: Instant) {
        self.replica.abdicate(now);
        self.settle(now);
    }

    /// Something has happened to the connection to an endpoint.
    pub fn on_link(&mut self, place: usize, link: Link, now: Instant) {
        let Some(peer) = self.peers.get_mut(place) else { return };
        match link {
            Link::Begins => peer.attempt = Some(self.bootstrap.ask(place)),
            Link::Up(process) => {
                let before = peer.process.replace(process).filter(|before| *before != process);
                let heard_at = peer.heard_at.replace(now).unwrap_or(now);
                peer.is_up = true;
                self.down.remove(&process);
                before.into_iter().for_each(|before| _ = self.down.entry(before).or_insert(heard_at));
                if before.is_some() {
                    peer.leased_at = None;
                    self.lose_hint(place, now);
                }
                self.replica.on_connected(process, now);
                let message = match self.leads() {
                    true => PeerMessage::Leader(Answer::Leads),
                    false => PeerMessage::WhoLeads,
                };
                self.send(place, message);
                self.asks_at = now;
            }
            Link::Down | Link::Refused => {
                peer.is_up = false;
                let seen = if link == Link::Refused { Seen::Absent } else { Seen::Silent };
                let attempt = peer.attempt.unwrap_or_else(|| self.bootstrap.ask(place));
                let heard_at = peer.heard_at.unwrap_or(now);
                peer.process.into_iter().for_each(|process| _ = self.down.entry(process).or_insert(heard_at));
                self.bootstrap.on_seen(attempt, seen);
                self.lose_hint(place, now);
            }
            Link::Dead(process) => {
                self.down.remove(&process);
                self.dead.insert(place, process);
                self.replica.on_dead(process, now);
            }
        }
        self.settle(now);
    }

    /// A message of the process at an endpoint has arrived.
    ///
    /// # Errors
    /// It is none that a process of this version sends. Says why.
    pub fn on_message(&mut self, place: usize, from: NodeId, message: PeerMessage, now: Instant) -> Result<(), String> {
        self.peers.get_mut(place).into_iter().for_each(|peer| peer.heard_at = Some(now));
        match message {
            PeerMessage::WhoLeads => self.on_who_leads(place),
            PeerMessage::Leader(answer) => self.on_leader(place, &answer, now),
            PeerMessage::Quorum(message) => {
                let message = received(message, now)?;
                if let Message::Write(record) = &message {
                    if self.wrote != Some(record.stamp.ballot.node) {
                        self.asks_at = now;
                    }
                    (self.wrote, self.hint) = (Some(record.stamp.ballot.node), None);
                }
                let may_matter = matches!(message, Message::Write(_) | Message::Ask(_));
                self.replica.on_message(from, message, now);
                if may_matter {
                    self.dead.values().for_each(|process| self.replica.on_dead(*process, now));
                }
            }
            PeerMessage::Question { number, follows } => {
                check_ballot(follows)?;
                match self.replica.on_question(from, follows, now) {
                    Some(stamp) => {
                        self.peers.get_mut(place).into_iter().for_each(|peer| peer.leased_at = Some(now));
                        self.send(place, PeerMessage::Lease { number, stamp });
                    }
                    // It follows this process because of what it was told of the one that was here before.
                    None if !self.leads() => self.on_who_leads(place),
                    None => {}
                }
            }
            PeerMessage::Lease { number, stamp } => {
                check_stamp(stamp)?;
                let (last, sent_at) = self.question;
                if number == last {
                    self.replica.on_lease(stamp, sent_at + LEASE, now);
                }
            }
        }
        self.settle(now);
        Ok(())
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.replica.on_tick(now);
        if now >= self.asks_at {
            self.asks_at = now + ASKS_EVERY;
            self.ask(now);
        }
        if self.looks() && now >= self.looks_at {
            self.looks_at = now + LOOKS_EVERY;
            (0..self.peers.len()).for_each(|place| self.send(place, PeerMessage::WhoLeads));
        }
        self.settle(now);
    }

    /// When to call [`Ensemble::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Instant {
        let looks = self.looks().then_some(self.looks_at);
        let votes = |peer: &&Peer| peer.process.is_some_and(|process| self.voters.0.contains(&process));
        let heard = self.peers.iter().filter(|peer| peer.is_up).filter(votes).filter_map(|peer| peer.heard_at);
        let drops = self.down.values().copied().chain(heard).map(|since| since + LEASE_OF_OTHERS);
        let leased = self.peers.iter().filter_map(|peer| peer.leased_at).map(|at| at + ASKS_AT_LEAST_EVERY);
        let reviews = drops.chain(leased).min().filter(|_| self.leads());
        let others = [looks, reviews, self.replica.next_deadline()];
        others.into_iter().flatten().fold(self.asks_at, Instant::min)
    }

    /// Take the commands to perform now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        mem::take(&mut self.commands)
    }

    fn mine(&self) -> usize {
        self.hello.place as usize
    }

    /// Whether this process knows of no leader, and looks for one.
    fn looks(&self) -> bool {
        self.replica.held().is_none() && self.hint.is_none()
    }

    fn place_of(&self, process: NodeId) -> Option<usize> {
        if process == self.hello.process {
            return Some(self.mine());
        }
        self.peers.iter().position(|peer| peer.is_up && peer.process == Some(process))
    }

    fn send(&mut self, place: usize, message: PeerMessage) {
        if self.peers.get(place).is_some_and(|peer| peer.is_up) {
            self.commands.push(Command::Send { place, message });
        }
    }

    /// Ask the leader for a lease.
    fn ask(&mut self, now: Instant) {
        let Some(place) = self.leader().filter(|place| *place != self.mine()) else { return };
        let follows = self.replica.promised().unwrap_or_else(|| Ballot::first(self.hello.process));
        self.question = (self.question.0 + 1, now);
        self.send(place, PeerMessage::Question { number: self.question.0, follows });
    }

    fn on_who_leads(&mut self, place: usize) {
        let answer = match self.leader() {
            Some(leader) if leader == self.mine() => Answer::Leads,
            Some(leader) if leader == place => return,
            Some(leader) if self.replica.held().is_some() => Answer::Knows(leader as u32),
            // Its leader has ended, and nobody leads yet: that is no answer. Nor is what it was told itself, and may be true no more: without a
            // record it does not learn of that leader's end from others.
            None if self.replica.held().is_some() => return,
            _ => match self.bootstrap.on_asked(place) {
                Answer::Knows(_) => return,
                Answer::Leads => Answer::Leads,
                Answer::Fresh => Answer::Fresh,
            },
        };
        self.send(place, PeerMessage::Leader(answer));
    }

    fn on_leader(&mut self, place: usize, answer: &Answer<u32>, now: Instant) {
        let has_record = self.replica.held().is_some();
        match self.hint {
            Some((_, since)) if *answer == Answer::Leads => return self.hint = Some((place, since)),
            None if *answer == Answer::Leads && has_record => return self.hint = Some((place, now)),
            Some((followed, _)) if followed == place => self.lose_hint(place, now),
            Some(_) => return,
            None => {}
        }
        if has_record {
            return;
        }
        match answer {
            Answer::Leads => self.bootstrap.on_leader(place),
            Answer::Knows(leader) => {
                let leader = *leader as usize;
                if leader < self.peers.len() && leader != self.mine() {
                    self.bootstrap.on_leader(leader);
                }
            }
            // It holds as long as that process lives, whatever it has asked itself.
            Answer::Fresh => self.bootstrap.on_seen(self.bootstrap.ask(place), Seen::Fresh),
        }
    }

    /// The process at this endpoint has gone. If this one follows it, and was sent no record by it, this one looks for a leader once more. It
    /// does not lead itself if it has followed for long: then there is a record, which others hold.
    fn lose_hint(&mut self, gone: usize, now: Instant) {
        let Some((_, since)) = self.hint.filter(|(place, _)| *place == gone) else { return };
        self.hint = None;
        if self.replica.held().is_none() {
            self.is_barred |= now >= since + BARRED_AFTER;
            self.bootstrap = Bootstrap::new(self.mine(), self.peers.len(), now);
        }
    }

    /// Decide what follows from what has happened.
    fn settle(&mut self, now: Instant) {
        if self.looks() {
            match self.bootstrap.decide(now) {
                Verdict::Wait { .. } => {}
                Verdict::Follow(place) => (self.hint, self.asks_at) = (Some((place, now)), now),
                // It has not told anybody so.
                Verdict::Lead if self.is_barred => self.bootstrap = Bootstrap::new(self.mine(), self.peers.len(), now),
                Verdict::Lead => {
                    self.replica = Replica::first(self.hello.process, LEASE_OF_OTHERS, self.content.clone(), now);
                    self.commands.push(Command::Lead { snapshot: None, is_dead: false });
                    self.lead(now);
                }
            }
        }
        loop {
            let actions = self.replica.take_actions();
            if actions.is_empty() {
                break;
            }
            actions.into_iter().for_each(|action| self.perform(action, now));
        }
        self.review(now);
    }

    fn perform(&mut self, action: Action<Content>, now: Instant) {
        match action {
            Action::Send(to, message) => {
                if let Some(place) = self.place_of(to) {
                    self.send(place, PeerMessage::Quorum(sent(message, now)));
                }
            }
            Action::Lead(content) => {
                let is_dead = content.by.is_some_and(|by| self.replica.is_dead(by));
                self.content = content.clone();
                self.commands.push(Command::Lead { snapshot: content.snapshot, is_dead });
                self.lead(now);
            }
            Action::Chosen(record) => self.commands.push(Command::Chosen(record.content.version)),
            Action::Over(ballot) => {
                self.commands.push(Command::Over);
                self.wrote = None;
                let message = PeerMessage::Quorum(Message::Abdicated(ballot));
                (0..self.peers.len()).for_each(|place| self.send(place, message.clone()));
            }
        }
    }

    /// This process leads from now on.
    fn lead(&mut self, now: Instant) {
        self.peers.iter_mut().for_each(|peer| peer.leased_at = None);
        (self.hint, self.wrote) = (None, Some(self.hello.process));
        self.voters = self.replica.held().map(|record| record.voters.clone()).unwrap_or_default();
        // A process that is not there counts from now on.
        let missing = self.voters.0.iter().filter(|voter| self.place_of(**voter).is_none()).copied();
        self.down = missing.filter(|voter| !self.replica.is_dead(*voter)).map(|voter| (voter, now)).collect();
        (0..self.peers.len()).for_each(|place| self.send(place, PeerMessage::Leader(Answer::Leads)));
    }

    /// Change the voters, if others are there than before.
    fn review(&mut self, now: Instant) {
        for peer in &mut self.peers {
            peer.leased_at = peer.leased_at.filter(|at| peer.is_up && now < *at + ASKS_AT_LEAST_EVERY);
        }
        if self.leads() && self.wanted(now) != self.voters {
            self.write(now);
            // That may do more.
            return self.settle(now);
        }
        let voters = &self.voters.0;
        self.down.retain(|process, since| voters.contains(process) && now < *since + LEASE_OF_OTHERS);
    }

    fn write(&mut self, now: Instant) {
        self.voters = self.wanted(now);
        self.replica.write(self.voters.clone(), self.content.clone(), now);
    }

    /// Who is to vote: this process and the others that are there. One that is not there stays for a lease.
    fn wanted(&self, now: Instant) -> Voters {
        let may_come = |process: &NodeId| self.down.get(process).is_some_and(|since| now < *since + LEASE_OF_OTHERS);
        let there = self.peers.iter().filter(|peer| peer.is_there(now)).filter_map(|peer| peer.process);
        let there = there.filter(|process| !self.replica.is_dead(*process));
        let (old, new): (Vec<_>, Vec<_>) = there.partition(|process| self.voters.0.contains(process));
        let away = self.voters.0.iter().copied().filter(|voter| !self.replica.is_dead(*voter) && may_come(voter));
        let mut voters = vec![self.hello.process];
        voters.extend(old.into_iter().chain(away).chain(new).filter(|process| *process != self.hello.process));
        // Of an even number no more may die than of one less. Two are judged by their own rule.
        if voters.len() > 2 && voters.len().is_multiple_of(2) {
            voters.pop();
        }
        voters.into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
