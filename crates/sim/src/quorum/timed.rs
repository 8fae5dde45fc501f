//! Quorums in virtual time: leaders die, messages are late or lost, and another process leads.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::message::NodeId;
use elastic_rs::rendezvous::quorum::record::Ballot;
use elastic_rs::rendezvous::quorum::replica::{Action, Message, Replica};

use crate::engine::dice::Dice;

/// A lease, as by default.
const LEASE: Duration = Duration::from_secs(15);
/// Messages take at most this long, and so does the proof of a death.
const LATEST_MS: u64 = 300;
/// How often a process asks whoever leads.
const QUESTION_EVERY: Duration = Duration::from_millis(500);
/// One of so many messages is lost, for so long.
const LOSS: u64 = 5;
const LOSES_FOR: Duration = Duration::from_secs(5);

type Content = u8;

#[derive(Clone, Debug)]
enum Event {
    Arrives { from: NodeId, to: NodeId, message: Message<Content> },
    Proven { to: NodeId, dead: NodeId },
    Asks(NodeId),
}

struct Quorum {
    zero: Instant,
    now: Instant,
    dice: Dice,
    replicas: BTreeMap<NodeId, Replica<Content>>,
    events: BTreeMap<(Instant, u64), Event>,
    count: u64,
    chosen: BTreeSet<NodeId>,
    trace: Vec<String>,
}

/// The first leader of so many voters dies, and others with it, so many in all: at once, or soon after. More than half of the voters live
/// on; of two the one. No deaths: the leader hands over. Returns after how long another leads.
///
/// # Errors
/// Nobody leads while all leases last, or two do.
pub fn take_over(seed: u64, voters: u8, deaths: u8) -> Result<Duration, String> {
    let mut quorum = Quorum::new(seed, voters);
    let began = quorum.now;
    quorum.begin(deaths);
    quorum.goes_on(began + Duration::from_secs(10)).map(|at| at - began).map_err(|why| {
        let trace = quorum.trace.join("\n");
        format!("seed {seed}, {voters} voters, {deaths} deaths:\n{trace}\n{why}")
    })
}

impl Quorum {
    /// All hold the record, and have a new lease.
    fn new(seed: u64, voters: u8) -> Self {
        let zero = Instant::now();
        let ids: Vec<_> = (1..=voters).map(|id| NodeId(u128::from(id))).collect();
        let replicas = ids.iter().map(|id| (*id, Replica::new(*id, LEASE))).collect();
        let (events, chosen) = (BTreeMap::new(), BTreeSet::new());
        let mut quorum =
            Self { zero, now: zero, dice: Dice::new(seed), replicas, events, count: 0, chosen, trace: Vec::new() };
        let first = Replica::first(ids[0], LEASE, 0, zero);
        quorum.replicas.insert(ids[0], first);
        if let Some(replica) = quorum.replicas.get_mut(&ids[0]) {
            replica.write(ids.iter().copied().collect(), 1, zero);
        }
        // Without delays and losses.
        loop {
            let acts = |(from, replica): (&NodeId, &mut Replica<Content>)| (*from, replica.take_actions());
            let actions: Vec<_> = quorum.replicas.iter_mut().map(acts).collect();
            let sends = actions.into_iter().flat_map(|(from, actions)| actions.into_iter().map(move |it| (from, it)));
            let sends: Vec<_> = sends.collect();
            if sends.is_empty() {
                break;
            }
            for (from, action) in sends {
                if let Action::Send(to, message) = action
                    && let Some(replica) = quorum.replicas.get_mut(&to)
                {
                    replica.on_message(from, message, zero);
                }
            }
        }
        for id in &ids[1..] {
            let lasts = Duration::from_millis(quorum.dice.between(10_000, 14_500));
            let leader = quorum.replicas.get_mut(&ids[0]);
            let stamp = leader.and_then(|leader| leader.on_question(*id, Ballot::first(ids[0]), zero));
            if let (Some(stamp), Some(replica)) = (stamp, quorum.replicas.get_mut(id)) {
                replica.on_lease(stamp, zero + lasts, zero);
            }
        }
        quorum
    }

    fn begin(&mut self, deaths: u8) {
        match deaths {
            0 => self.with(NodeId(1), Replica::abdicate),
            deaths => self.die(deaths),
        }
        let living: Vec<_> = self.replicas.keys().copied().collect();
        living.into_iter().for_each(|id| self.schedule(QUESTION_EVERY, Event::Asks(id)));
    }

    fn die(&mut self, deaths: u8) {
        let others: Vec<_> = self.replicas.keys().copied().skip(1).collect();
        let rotated = self.dice.between(0, others.len() as u64 - 1) as usize;
        let dead: Vec<_> = self.replicas.keys().copied().take(1).collect();
        let more = others.iter().cycle().skip(rotated).take(usize::from(deaths) - 1).copied();
        for (index, dead) in dead.into_iter().chain(more).enumerate() {
            self.trace.push(format!("{} dies", dead.0));
            self.replicas.remove(&dead);
            let living: Vec<_> = self.replicas.keys().copied().collect();
            for to in living {
                let ms = self.dice.between(1, LATEST_MS) + index as u64 * self.dice.between(0, 500);
                self.schedule(Duration::from_millis(ms), Event::Proven { to, dead });
            }
        }
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.count += 1;
        self.events.insert((self.now + after, self.count), event);
    }

    /// Let time pass until somebody leads and has its record chosen.
    fn goes_on(&mut self, until: Instant) -> Result<Instant, String> {
        loop {
            let timers = self.replicas.iter().filter_map(|(id, replica)| Some((replica.next_deadline()?, *id))).min();
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            let at = timers.map(|(at, _)| at).into_iter().chain(event).min().ok_or("nothing happens any more")?;
            if at >= until {
                return Err("nobody leads".to_owned());
            }
            self.now = self.now.max(at);
            match timers.filter(|(due, _)| event.is_none_or(|event| *due <= event)) {
                Some((_, id)) => self.with(id, Replica::on_tick),
                None => self.happen(),
            }
            let leaders: Vec<_> =
                self.replicas.iter().filter(|(_, replica)| replica.leads()).map(|(id, _)| id.0).collect();
            if leaders.len() > 1 {
                return Err(format!("{leaders:?} lead at once"));
            }
            if leaders.iter().any(|id| self.chosen.contains(&NodeId(*id))) {
                return Ok(self.now);
            }
        }
    }

    fn happen(&mut self) {
        let Some((_, event)) = self.events.pop_first() else { return };
        match event {
            Event::Arrives { from, to, message } => {
                self.with(to, |replica, now| replica.on_message(from, message, now));
            }
            Event::Proven { to, dead } => self.with(to, |replica, now| replica.on_dead(dead, now)),
            Event::Asks(id) => {
                self.schedule(QUESTION_EVERY, Event::Asks(id));
                let follows = self.replicas.get(&id).and_then(Replica::promised);
                if let Some(follows) = follows.filter(|ballot| ballot.node != id) {
                    self.with(follows.node, |replica, now| _ = replica.on_question(id, follows, now));
                }
            }
        }
    }

    fn with(&mut self, id: NodeId, act: impl FnOnce(&mut Replica<Content>, Instant)) {
        let Some(replica) = self.replicas.get_mut(&id) else { return };
        act(replica, self.now);
        for action in replica.take_actions() {
            self.trace.push(format!("{}: {action:?}", id.0));
            match action {
                Action::Send(to, message) => self.send(id, to, message),
                Action::Over(ballot) => {
                    self.chosen.remove(&id);
                    let all: Vec<_> = self.replicas.keys().copied().filter(|to| *to != id).collect();
                    all.into_iter().for_each(|to| self.send(id, to, Message::Abdicated(ballot)));
                }
                Action::Chosen(_) => drop(self.chosen.insert(id)),
                Action::Lead(_) => {}
            }
        }
    }

    fn send(&mut self, from: NodeId, to: NodeId, message: Message<Content>) {
        let after = Duration::from_millis(self.dice.between(1, LATEST_MS));
        if self.now < self.zero + LOSES_FOR && self.dice.between(1, LOSS) == 1 {
            return self.trace.push("  … which is lost".to_owned());
        }
        self.schedule(after, Event::Arrives { from, to, message });
    }
}
