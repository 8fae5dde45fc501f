//! The model: processes, letters between them, and what may happen next.

use std::fmt;
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::message::NodeId;
use elastic_rs::rendezvous::quorum::record::{Ballot, Record, Stamp, Voters};
use elastic_rs::rendezvous::quorum::replica::{Action, Message, Replica};
use elastic_rs::rendezvous::quorum::voter::Reply;

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
    Message(Message<Content>),
    Question { sent: u8, follows: Ballot },
    Lease { stamp: Stamp, until: u8 },
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
    replica: Replica<Content>,
    /// What it has decided, as leader.
    decided: Content,
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Deliver(usize),
    Question(Place),
    Tick,
    Death(Place),
    Proof(Place, Place),
    Lapse(Place),
    Left(Place, Place),
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

fn lease() -> Duration {
    Duration::from_secs(u64::from(LEASE))
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
        let replica = |at| Replica::new(node(at), lease());
        let process = |at| Process { is_alive: true, replica: replica(at), decided: Content::new() };
        let mut quorum = Self {
            bounds,
            zero,
            processes: (0..bounds.processes).map(process).collect(),
            letters: Vec::new(),
            spent: Spent::default(),
            told: Content::new(),
            violation: None,
        };
        quorum.processes[0].replica = Replica::first(node(0), lease(), Content::new(), zero);
        let set = voters(&bounds.voters);
        quorum.with(0, |replica, now| replica.write(set, Content::new(), now));
        quorum.deliver_all();
        for &at in bounds.voters.iter().filter(|at| **at != 0) {
            quorum.post(at, 0, Body::Question { sent: 0, follows: Ballot::first(node(0)) });
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
            let replica = &process.replica;
            let follows = replica.promised().filter(|ballot| ballot.node != node(at));
            if spent.questions < bounds.questions && follows.is_some() {
                steps.push(Step::Question(at));
            }
            if spent.deaths < bounds.deaths {
                steps.push(Step::Death(at));
            }
            let is_proven = |it: &Process| !it.is_alive || self.is(Mutation::ResetIsProof);
            let others = (0..bounds.processes).filter(|other| *other != at && !replica.is_dead(node(*other)));
            let proven = others.filter(|other| is_proven(&self.processes[usize::from(*other)]));
            steps.extend(proven.map(|other| Step::Proof(at, other)));
            if replica.leads() {
                if replica.next_deadline().is_some_and(|lapses_at| lapses_at <= self.now()) {
                    steps.push(Step::Lapse(at));
                }
                if self.is(Mutation::EndedIsConsent) {
                    let others = (0..bounds.processes).filter(|other| *other != at);
                    steps.extend(others.map(|other| Step::Left(at, other)));
                }
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
                let Some(follows) = self.processes[usize::from(at)].replica.promised() else { return false };
                self.spent.questions += 1;
                self.post(at, place(follows.node), Body::Question { sent: self.spent.ticks, follows });
            }
            Step::Death(at) => {
                self.spent.deaths += 1;
                self.processes[usize::from(at)].is_alive = false;
                self.letters.retain(|letter| letter.to != at);
            }
            Step::Proof(at, other) => self.with(at, |replica, now| replica.on_dead(node(other), now)),
            Step::Lapse(at) => self.with(at, Replica::lapse),
            Step::Left(at, other) => self.with(at, |replica, now| replica.on_left(node(other), now)),
            Step::Write(at, change) => self.write(at, change),
            Step::Stand(at) => {
                let mut stands = false;
                self.with(at, |replica, now| stands = replica.stand(now));
                self.spent.stands += u8::from(stands);
                return stands;
            }
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
        let held = |model: &Self| model.processes[usize::from(to)].replica.held().cloned();
        match body {
            Body::Message(Message::Reply(Reply::Voted(ballot, record))) => {
                let own = if self.is(Mutation::OwnRecord) { held(self) } else { None };
                let vote = Message::Reply(Reply::Voted(ballot, own.unwrap_or(record)));
                self.with(to, |replica, now| replica.on_message(node(from), vote, now));
            }
            Body::Message(message) => self.with(to, |replica, now| replica.on_message(node(from), message, now)),
            Body::Question { sent, follows } => {
                let mut stamp = None;
                self.with(to, |replica, now| stamp = replica.on_question(node(from), follows, now));
                if let Some(stamp) = stamp {
                    self.post(to, from, Body::Lease { stamp, until: sent + LEASE });
                }
            }
            Body::Lease { stamp, until } => {
                let late = if self.is(Mutation::VoteAfterLease) { 100 } else { 0 };
                let until = self.at(until + late);
                let newer = if self.is(Mutation::LeaseOfNewer) { held(self) } else { None };
                let stamp = newer.map_or(stamp, |record| record.stamp);
                self.with(to, |replica, now| replica.on_lease(stamp, until, now));
            }
        }
    }

    fn write(&mut self, at: Place, change: Option<usize>) {
        self.spent.writes += 1;
        let number = self.spent.writes;
        let set = change.map(|change| voters(&self.bounds.changes[change]));
        let process = &mut self.processes[usize::from(at)];
        let Some(held) = process.replica.held().cloned() else { return };
        process.decided.push(number);
        let content = process.decided.clone();
        if self.is(Mutation::SaidEarly) {
            self.told = content.clone();
        }
        self.with(at, |replica, now| replica.write(set.unwrap_or(held.voters), content, now));
    }

    fn abdicate(&mut self, at: Place) {
        self.spent.abdications += 1;
        let ballot = self.processes[usize::from(at)].replica.promised();
        if let Some(ballot) = ballot.filter(|_| self.is(Mutation::WritesAfterAbdication)) {
            let said = Message::Abdicated(ballot);
            self.tell_others(at, &said);
            return self.with(at, |replica, now| replica.on_message(node(at), said, now));
        }
        self.with(at, Replica::abdicate);
    }

    fn tell_others(&mut self, at: Place, message: &Message<Content>) {
        for other in (0..self.bounds.processes).filter(|other| *other != at) {
            self.post(at, other, Body::Message(message.clone()));
        }
    }

    /// Have a process do something, and do what follows.
    fn with(&mut self, at: Place, act: impl FnOnce(&mut Replica<Content>, Instant)) {
        let now = self.now();
        act(&mut self.processes[usize::from(at)].replica, now);
        loop {
            let actions = self.processes[usize::from(at)].replica.take_actions();
            if actions.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| self.perform(at, action));
        }
    }

    fn perform(&mut self, at: Place, action: Action<Content>) {
        match action {
            Action::Send(to, message) => {
                let feigned = if let Message::Write(record) = &message { self.feigned(record) } else { Vec::new() };
                self.post(at, place(to), Body::Message(message));
                for (voter, stamp) in feigned {
                    let accepted = Message::Reply(Reply::Accepted(stamp));
                    let now = self.now();
                    self.processes[usize::from(at)].replica.on_message(voter, accepted, now);
                }
            }
            Action::Lead(content) => {
                self.processes[usize::from(at)].decided = content;
                let leaders: Vec<_> = self.alive().filter(|(_, it)| it.replica.leads()).map(|(at, _)| at).collect();
                if leaders.len() > 1 {
                    self.violation = Some(format!("{leaders:?} lead at once"));
                }
            }
            Action::Chosen(record) => {
                if !record.content.starts_with(&self.told) {
                    let said = &self.told;
                    self.violation = Some(format!("{said:?} was said, and {:?} is chosen", record.content));
                }
                self.told = record.content;
            }
            Action::Over(ballot) => self.tell_others(at, &Message::Abdicated(ballot)),
        }
    }

    /// Which voters are taken to hold this writing by mistake.
    fn feigned(&self, record: &Record<Content>) -> Vec<(NodeId, Stamp)> {
        let set = &record.voters;
        let feigned = match self.bounds.mutation {
            Some(Mutation::WithoutVotersBefore) => record.before.clone().unwrap_or_default(),
            Some(Mutation::WithoutNewVoters) if *set != voters(&self.bounds.voters) => set.clone(),
            Some(Mutation::LeadsAlone) if set.0.len() == 2 => set.clone(),
            _ => Voters::default(),
        };
        feigned.0.into_iter().map(|voter| (voter, record.stamp)).collect()
    }

    /// A step in words.
    pub(super) fn describe(&self, step: &Step) -> String {
        match step {
            Step::Deliver(index) => self.letters[*index].to_string(),
            Step::Question(at) => format!("{at} asks for a lease"),
            Step::Tick => format!("it is {}", self.spent.ticks + 1),
            Step::Death(at) => format!("{at} dies"),
            Step::Proof(at, other) => format!("{other} is dead to {at}"),
            Step::Lapse(at) => format!("{at} waits no longer for processes without a lease"),
            Step::Left(at, other) => format!("{at} does not wait for {other}"),
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
        let message = match body {
            Body::Message(message) => message,
            Body::Question { sent, .. } => return write!(f, "{from}→{to}: a lease? sent at {sent}"),
            Body::Lease { stamp: it, until } => {
                return write!(f, "{from}→{to}: lease under {} until {until}", stamp(it));
            }
        };
        match message {
            Message::Write(record) => write!(f, "{from}→{to}: write {} {:?}", stamp(&record.stamp), record.content),
            Message::Ask(ballot) => write!(f, "{from}→{to}: vote for {}.{}", ballot.number, ballot.node.0),
            Message::Abdicated(ballot) => write!(f, "{from}→{to}: {}.{} hands over", ballot.number, ballot.node.0),
            Message::IsOver(ballot) => write!(f, "{from}→{to}: is {}.{} over?", ballot.number, ballot.node.0),
            Message::Reply(Reply::Accepted(it)) => write!(f, "{from}→{to}: accepted {}", stamp(it)),
            Message::Reply(Reply::Voted(ballot, record)) => {
                write!(f, "{from}→{to}: votes for {}.{}, holds {}", ballot.number, ballot.node.0, stamp(&record.stamp))
            }
            Message::Reply(Reply::Refused(by)) => write!(f, "{from}→{to}: refused, by {}.{}", by.number, by.node.0),
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
