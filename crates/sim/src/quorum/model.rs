//! The model: processes, letters between them, and what may happen next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::message::NodeId;
use elastic_rs::rendezvous::quorum::candidate::{Candidate, Verdict};
use elastic_rs::rendezvous::quorum::leader::{Effect, Leader};
use elastic_rs::rendezvous::quorum::record::{Ballot, Record, Stamp, Voters};
use elastic_rs::rendezvous::quorum::voter::{Reply, Voter};

use super::explore::{State, digest_of};

/// The numbers of the writes, in order.
type Content = Vec<u8>;
/// A process.
type Place = u8;

/// A lease lasts so many passings of time.
const LEASE: u8 = 2;

/// The bounds of a history.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Number of processes.
    pub processes: u8,
    /// The voters of the first record.
    pub voters: Vec<Place>,
    /// Sets of voters that a leader may change to.
    pub changes: Vec<Vec<Place>>,
    /// Most deaths.
    pub deaths: u8,
    /// Most passings of time.
    pub ticks: u8,
    /// Most writings of something new.
    pub writes: u8,
    /// Most questions for a lease.
    pub questions: u8,
    /// Most attempts to lead.
    pub stands: u8,
    /// Most hand-overs.
    pub abdications: u8,
    /// A mistake.
    pub mutation: Option<Mutation>,
}

/// A mistake that an invariant must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A change of voters is chosen without the voters before.
    WithoutVotersBefore,
    /// What new voters have to hold is chosen without them.
    WithoutNewVoters,
    /// A leader announces a decision before the record is chosen.
    SaidEarly,
    /// A candidate writes its own record, not the newest of those that the votes bring.
    OwnRecord,
    /// A vote counts after the lease.
    VoteAfterLease,
    /// An ended connection is taken for consent.
    EndedIsConsent,
    /// A reset connection is taken for the proof of a death.
    ResetIsProof,
    /// Of two voters, the one that leads is a majority.
    LeadsAlone,
    /// A lease under a newer record counts for the older one.
    LeaseOfNewer,
    /// A leader that hands over goes on with what it writes.
    WritesAfterAbdication,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Body {
    Write(Record<Content>),
    Reply(Reply<Content>),
    Ask(Ballot),
    Question { sent: u8 },
    Lease { stamp: Stamp, until: u8 },
    Abdicated(Ballot),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Letter {
    from: Place,
    to: Place,
    body: Body,
}

#[derive(Clone, Debug, Hash)]
struct Process {
    is_alive: bool,
    voter: Voter<Content>,
    candidate: Option<Candidate<Content>>,
    leader: Option<Leader<Content>>,
    /// When it has read the last question of each, as leader.
    read: BTreeMap<Place, u8>,
    dead: BTreeSet<Place>,
    /// What it has decided, as leader.
    decided: Content,
}

impl Process {
    fn new(place: Place) -> Self {
        Self {
            is_alive: true,
            voter: Voter::new(node(place)),
            candidate: None,
            leader: None,
            read: BTreeMap::new(),
            dead: BTreeSet::new(),
            decided: Content::new(),
        }
    }
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Deliver(usize),
    Question(Place),
    Tick,
    Death(Place),
    Proof(Place, Place),
    Lapse(Place, Place),
    Write(Place, Option<usize>),
    Stand(Place),
    Abdicate(Place),
}

#[derive(Clone, Debug, Default, Hash)]
struct Spent {
    deaths: u8,
    ticks: u8,
    writes: u8,
    questions: u8,
    stands: u8,
    abdications: u8,
}

/// A quorum at some time.
#[derive(Clone, Debug)]
pub struct Quorum<'a> {
    bounds: &'a Bounds,
    zero: Instant,
    processes: Vec<Process>,
    letters: Vec<Letter>,
    spent: Spent,
    /// The content that a leader has announced last: no later record may lack any of it.
    told: Content,
    violation: Option<String>,
}

fn node(place: Place) -> NodeId {
    NodeId(u128::from(place))
}

fn place(node: NodeId) -> Place {
    node.0 as Place
}

fn voters(places: &[Place]) -> Voters {
    places.iter().copied().map(node).collect()
}

impl<'a> Quorum<'a> {
    /// All voters hold the first record, and have a lease under it.
    pub fn new(bounds: &'a Bounds, zero: Instant) -> Self {
        let mut quorum = Self {
            bounds,
            zero,
            processes: (0..bounds.processes).map(Process::new).collect(),
            letters: Vec::new(),
            spent: Spent::default(),
            told: Content::new(),
            violation: None,
        };
        quorum.processes[0].leader = Some(Leader::first(node(0), Content::new()));
        quorum.perform(0);
        let set = voters(&bounds.voters);
        quorum.led(0, |leader| leader.write(set, Content::new()));
        quorum.deliver_all();
        for &at in bounds.voters.iter().filter(|at| **at != 0) {
            quorum.post(at, 0, Body::Question { sent: 0 });
        }
        quorum.deliver_all();
        quorum
    }

    fn deliver_all(&mut self) {
        while !self.letters.is_empty() {
            self.deliver(0);
        }
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.bounds.mutation == Some(mutation)
    }

    fn now(&self) -> Instant {
        self.at(self.spent.ticks)
    }

    fn at(&self, ticks: u8) -> Instant {
        self.zero + Duration::from_secs(u64::from(ticks))
    }

    fn alive(&self) -> impl Iterator<Item = (Place, &Process)> {
        self.processes.iter().enumerate().map(|(at, process)| (at as Place, process)).filter(|(_, it)| it.is_alive)
    }

    /// Everything that may happen now.
    pub(super) fn steps(&self) -> Vec<Step> {
        let (bounds, spent) = (self.bounds, &self.spent);
        let mut steps: Vec<Step> = Vec::new();
        for (index, letter) in self.letters.iter().enumerate() {
            let to = &self.processes[usize::from(letter.to)];
            let is_double = self.letters[..index].contains(letter);
            if to.is_alive && !is_double {
                steps.push(Step::Deliver(index));
            }
        }
        if spent.ticks < bounds.ticks {
            steps.push(Step::Tick);
        }
        for (at, process) in self.alive() {
            let follows = process.voter.promised().filter(|ballot| ballot.node != node(at));
            if spent.questions < bounds.questions && follows.is_some() {
                steps.push(Step::Question(at));
            }
            if spent.deaths < bounds.deaths {
                steps.push(Step::Death(at));
            }
            let is_proven = |it: &Process| !it.is_alive || self.is(Mutation::ResetIsProof);
            let others = (0..bounds.processes).filter(|other| *other != at && !process.dead.contains(other));
            let proven = others.filter(|other| is_proven(&self.processes[usize::from(*other)]));
            steps.extend(proven.map(|other| Step::Proof(at, other)));
            if process.leader.is_some() {
                let lapsed = process
                    .read
                    .iter()
                    .filter(|(_, read)| spent.ticks >= **read + LEASE || self.is(Mutation::EndedIsConsent));
                steps.extend(lapsed.map(|(other, _)| Step::Lapse(at, *other)));
                if spent.writes < bounds.writes {
                    steps.push(Step::Write(at, None));
                    steps.extend((0..bounds.changes.len()).map(|change| Step::Write(at, Some(change))));
                }
                if spent.abdications < bounds.abdications {
                    steps.push(Step::Abdicate(at));
                }
            } else if spent.stands < bounds.stands {
                steps.push(Step::Stand(at));
            }
        }
        steps
    }

    /// Do this. `false`: it has changed nothing.
    pub(super) fn step(&mut self, step: &Step) -> bool {
        match *step {
            Step::Deliver(index) => self.deliver(index),
            Step::Tick => self.spent.ticks += 1,
            Step::Question(at) => {
                let Some(leader) = self.processes[usize::from(at)].voter.promised() else { return false };
                self.spent.questions += 1;
                self.post(at, place(leader.node), Body::Question { sent: self.spent.ticks });
            }
            Step::Death(at) => {
                self.spent.deaths += 1;
                self.processes[usize::from(at)].is_alive = false;
                self.letters.retain(|letter| letter.to != at);
            }
            Step::Proof(at, other) => self.prove(at, other),
            Step::Lapse(at, other) => {
                self.processes[usize::from(at)].read.remove(&other);
                self.led(at, |leader| leader.on_absent(node(other)));
            }
            Step::Write(at, change) => self.write(at, change),
            Step::Stand(at) => return self.stand(at),
            Step::Abdicate(at) => self.abdicate(at),
        }
        true
    }

    fn post(&mut self, from: Place, to: Place, body: Body) {
        if self.processes[usize::from(to)].is_alive {
            self.letters.push(Letter { from, to, body });
        }
    }

    fn deliver(&mut self, index: usize) {
        let Letter { from, to, body } = self.letters.remove(index);
        let now = self.now();
        let process = &mut self.processes[usize::from(to)];
        match body {
            Body::Write(record) => {
                let ballot = record.stamp.ballot;
                let reply = process.voter.on_record(record);
                self.led(to, |leader| leader.on_refused(ballot));
                self.post(to, from, Body::Reply(reply));
            }
            Body::Reply(Reply::Accepted(stamp)) => self.led(to, |leader| leader.on_accepted(node(from), stamp)),
            Body::Reply(Reply::Refused(by)) => {
                if process.candidate.as_ref().is_some_and(|candidate| candidate.ballot() < by) {
                    process.candidate = None;
                }
                self.led(to, |leader| leader.on_refused(by));
            }
            Body::Reply(Reply::Voted(ballot, record)) => self.count(to, from, ballot, record),
            Body::Ask(ballot) => {
                let reply = process.voter.on_asked(ballot, now);
                self.answer(to, from, reply);
            }
            Body::Question { sent } => self.lease(to, from, sent),
            Body::Lease { stamp, until } => {
                let late = if self.is(Mutation::VoteAfterLease) { 100 } else { 0 };
                let (until, is_mutated) = (self.at(until + late), self.is(Mutation::LeaseOfNewer));
                let voter = &mut self.processes[usize::from(to)].voter;
                let held = voter.held().map(|record| record.stamp).filter(|_| is_mutated);
                voter.on_lease(held.unwrap_or(stamp), until);
            }
            Body::Abdicated(ballot) => {
                let reply = process.voter.on_abdicated(ballot, now);
                self.answer(to, from, reply);
            }
        }
    }

    /// Send a voter's answer. A vote goes to the candidate of its ballot, which may have asked earlier; a refusal to `asks`.
    fn answer(&mut self, from: Place, asks: Place, reply: Option<Reply<Content>>) {
        let Some(reply) = reply else { return };
        let to = match &reply {
            Reply::Voted(ballot, _) => place(ballot.node),
            Reply::Refused(_) | Reply::Accepted(_) => asks,
        };
        self.post(from, to, Body::Reply(reply));
    }

    /// A question for a lease.
    fn lease(&mut self, at: Place, from: Place, sent: u8) {
        let now = self.spent.ticks;
        let process = &mut self.processes[usize::from(at)];
        let Some(leader) = &mut process.leader else { return };
        leader.on_present(node(from));
        let stamp = leader.chosen().map(|record| record.stamp);
        process.read.insert(from, now);
        if let Some(stamp) = stamp {
            self.post(at, from, Body::Lease { stamp, until: sent + LEASE });
        }
        self.perform(at);
    }

    fn prove(&mut self, at: Place, dead: Place) {
        let now = self.now();
        let process = &mut self.processes[usize::from(at)];
        process.dead.insert(dead);
        let reply = process.voter.on_dead(node(dead), now);
        if let Some(candidate) = &mut process.candidate {
            candidate.on_dead(node(dead));
        }
        self.answer(at, at, reply);
        self.led(at, |leader| leader.on_absent(node(dead)));
        self.elect(at);
    }

    fn write(&mut self, at: Place, change: Option<usize>) {
        self.spent.writes += 1;
        let number = self.spent.writes;
        let set = change.map(|change| voters(&self.bounds.changes[change]));
        let now = self.spent.ticks;
        let process = &mut self.processes[usize::from(at)];
        let Some(held) = process.voter.held().cloned() else { return };
        for other in set.iter().flat_map(|set| &set.0).map(|node| place(*node)).filter(|other| *other != at) {
            process.read.entry(other).or_insert(now);
        }
        process.decided.push(number);
        let content = process.decided.clone();
        if self.is(Mutation::SaidEarly) {
            self.told = content.clone();
        }
        self.led(at, |leader| leader.write(set.unwrap_or(held.voters), content));
    }

    fn stand(&mut self, at: Place) -> bool {
        let now = self.now();
        let process = &mut self.processes[usize::from(at)];
        let Some(mut candidate) = Candidate::stand(&mut process.voter, now) else { return false };
        self.spent.stands += 1;
        process.dead.iter().for_each(|dead| candidate.on_dead(node(*dead)));
        process.candidate = Some(candidate);
        self.ask_all(at);
        self.elect(at);
        true
    }

    fn ask_all(&mut self, at: Place) {
        let Some(candidate) = &self.processes[usize::from(at)].candidate else { return };
        let (ballot, asks) = (candidate.ballot(), candidate.asks());
        asks.into_iter().for_each(|other| self.post(at, place(other), Body::Ask(ballot)));
    }

    /// A vote has come.
    fn count(&mut self, at: Place, from: Place, ballot: Ballot, mut record: Record<Content>) {
        let process = &mut self.processes[usize::from(at)];
        let Some(candidate) = &mut process.candidate else { return };
        if self.bounds.mutation == Some(Mutation::OwnRecord)
            && let Some(own) = process.voter.held()
        {
            record = own.clone();
        }
        let before = candidate.asks();
        candidate.on_vote(node(from), ballot, record);
        let more: Vec<_> = candidate.asks().difference(&before).copied().collect();
        more.into_iter().for_each(|other| self.post(at, place(other), Body::Ask(ballot)));
        self.elect(at);
    }

    fn elect(&mut self, at: Place) {
        let (now, instant) = (self.spent.ticks, self.now());
        let process = &mut self.processes[usize::from(at)];
        let Some(candidate) = &mut process.candidate else { return };
        match candidate.decide(&mut process.voter, instant) {
            Verdict::Wait => return,
            Verdict::Ask => return self.ask_all(at),
            Verdict::GiveWay => return process.candidate = None,
            Verdict::Lead(leader) => process.leader = Some(*leader),
        }
        process.candidate = None;
        // The one before has given leases until now.
        process.read = (0..self.bounds.processes).filter(|other| *other != at).map(|other| (other, now)).collect();
        let others: Vec<_> = self.alive().filter(|(_, it)| it.leader.is_some()).map(|(other, _)| other).collect();
        if others.len() > 1 {
            self.violation = Some(format!("{others:?} lead at once"));
        }
        self.perform(at);
        let process = &mut self.processes[usize::from(at)];
        process.decided = process.voter.held().map(|record| record.content.clone()).unwrap_or_default();
    }

    fn abdicate(&mut self, at: Place) {
        self.spent.abdications += 1;
        let goes_on = self.is(Mutation::WritesAfterAbdication);
        match &mut self.processes[usize::from(at)].leader {
            Some(leader) if goes_on => {
                let ballot = leader.ballot();
                self.is_over(at, ballot);
            }
            Some(leader) => {
                leader.abdicate();
                self.perform(at);
            }
            None => {}
        }
    }

    /// A leader has handed over.
    fn is_over(&mut self, at: Place, ballot: Ballot) {
        let (now, goes_on) = (self.now(), self.is(Mutation::WritesAfterAbdication));
        let process = &mut self.processes[usize::from(at)];
        if !goes_on {
            process.leader = None;
        }
        let reply = process.voter.on_abdicated(ballot, now);
        self.answer(at, at, reply);
        for other in (0..self.bounds.processes).filter(|other| *other != at) {
            self.post(at, other, Body::Abdicated(ballot));
        }
    }

    /// Tell a leader something, if this process leads.
    fn led(&mut self, at: Place, tell: impl FnOnce(&mut Leader<Content>)) {
        if let Some(leader) = &mut self.processes[usize::from(at)].leader {
            tell(leader);
            self.perform(at);
        }
    }

    fn perform(&mut self, at: Place) {
        loop {
            let process = &mut self.processes[usize::from(at)];
            let effects = process.leader.as_mut().map(Leader::take_effects).unwrap_or_default();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Write(to, record) => self.send(at, place(to), record),
                    Effect::Chosen(record) => {
                        if !record.content.starts_with(&self.told) {
                            let said = &self.told;
                            self.violation = Some(format!("{said:?} was said, and {:?} is chosen", record.content));
                        }
                        self.told = record.content;
                    }
                    Effect::Over(ballot) => self.is_over(at, ballot),
                }
            }
        }
    }

    fn send(&mut self, at: Place, to: Place, record: Record<Content>) {
        let (stamp, before) = (record.stamp, record.before.clone());
        let set = record.voters.clone();
        let is_new = set != voters(&self.bounds.voters);
        let process = &mut self.processes[usize::from(at)];
        if to != at {
            self.post(at, to, Body::Write(record));
        } else {
            let reply = process.voter.on_record(record);
            if let Some(leader) = &mut process.leader {
                match reply {
                    Reply::Accepted(stamp) => leader.on_accepted(node(at), stamp),
                    Reply::Refused(by) => leader.on_refused(by),
                    Reply::Voted(..) => {}
                }
            }
        }
        let feigned = match self.bounds.mutation {
            Some(Mutation::WithoutVotersBefore) => before.unwrap_or_default(),
            Some(Mutation::WithoutNewVoters) if is_new => set,
            Some(Mutation::LeadsAlone) if set.0.len() == 2 => set,
            _ => return,
        };
        if let Some(leader) = &mut self.processes[usize::from(at)].leader {
            feigned.0.into_iter().for_each(|voter| leader.on_accepted(voter, stamp));
        }
    }

    /// A step in words.
    pub(super) fn describe(&self, step: &Step) -> String {
        match step {
            Step::Deliver(index) => self.letters[*index].to_string(),
            Step::Question(at) => format!("{at} asks for a lease"),
            Step::Tick => format!("it is {}", self.spent.ticks + 1),
            Step::Death(at) => format!("{at} dies"),
            Step::Proof(at, other) => format!("{other} is dead to {at}"),
            Step::Lapse(at, other) => format!("{at} does not wait for {other}"),
            Step::Write(at, None) => format!("{at} writes"),
            Step::Write(at, Some(change)) => format!("{at} writes, with the voters {:?}", self.bounds.changes[*change]),
            Step::Stand(at) => format!("{at} stands"),
            Step::Abdicate(at) => format!("{at} hands over"),
        }
    }
}

impl fmt::Display for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, body } = self;
        let stamp = |stamp: &Stamp| format!("{} of {}.{}", stamp.seq, stamp.ballot.number, stamp.ballot.node.0);
        match body {
            Body::Write(record) => {
                write!(f, "{from}→{to}: write {} {:?}", stamp(&record.stamp), record.content)
            }
            Body::Reply(Reply::Accepted(it)) => write!(f, "{from}→{to}: accepted {}", stamp(it)),
            Body::Reply(Reply::Voted(ballot, record)) => {
                write!(f, "{from}→{to}: votes for {}.{}, holds {}", ballot.number, ballot.node.0, stamp(&record.stamp))
            }
            Body::Reply(Reply::Refused(by)) => write!(f, "{from}→{to}: refused, by {}.{}", by.number, by.node.0),
            Body::Ask(ballot) => write!(f, "{from}→{to}: vote for {}.{}", ballot.number, ballot.node.0),
            Body::Question { sent } => write!(f, "{from}→{to}: a lease? sent at {sent}"),
            Body::Lease { stamp: it, until } => write!(f, "{from}→{to}: lease under {} until {until}", stamp(it)),
            Body::Abdicated(ballot) => write!(f, "{from}→{to}: {}.{} hands over", ballot.number, ballot.node.0),
        }
    }
}

impl State for Quorum<'_> {
    fn digest(&self) -> u64 {
        let mut letters: Vec<u64> = self.letters.iter().map(digest_of).collect();
        letters.sort_unstable();
        digest_of(&(&self.processes, letters, &self.spent, &self.told))
    }

    fn violation(&self) -> Option<String> {
        self.violation.clone()
    }

    fn next(&self) -> impl Iterator<Item = (String, Self)> {
        self.steps().into_iter().filter_map(|step| {
            let mut next = self.clone();
            next.step(&step).then(|| (self.describe(&step), next))
        })
    }
}
