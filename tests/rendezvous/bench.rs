//! [`Bench`]: the coordinator's machine without a driver, which records its messages, notes and ended sessions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elastic_rs::events::record::Record;
use elastic_rs::events::tally::Tally;
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Failure, Generation, Hello, Join, JoinWorkers, NodeId, NodeMessage, Placement, Round, Survival,
    Survivor,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{Ends, Exclusion, SessionId};

/// A machine whose node `n` has session `n`, unless a test says otherwise.
pub struct Bench {
    pub machine: Machine,
    pub now: Instant,
    pub sent: Vec<(SessionId, CoordinatorMessage)>,
    pub ended: Vec<SessionId>,
    pub notes: Vec<String>,
    pub records: Vec<Record>,
    pub tallies: Vec<Tally>,
    pub warnings: Vec<String>,
    /// The id of the world of each round.
    pub worlds: BTreeMap<Round, u64>,
    /// The hosts that are kept out, as last told.
    pub excluded: Vec<Exclusion>,
    /// How many messages were sent before the store was emptied, each time.
    pub emptied: Vec<usize>,
}

pub fn hello(node: u64, settings: &Settings) -> Hello {
    Hello { process: node, ..Hello::new("job", NodeId(node.into()), format!("host:{node}"), settings.clone()) }
}

pub fn failure() -> Box<Failure> {
    Box::new(Failure {
        node: "not yet known".into(),
        role: "trainer".into(),
        local_rank: 1,
        global_rank: 3,
        pid: 77,
        exit: "SIGKILL".into(),
        returncode: -9,
        message: "out of memory\nat line 3".into(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    })
}

impl Bench {
    pub fn new() -> Self {
        Self {
            machine: Machine::new(),
            now: Instant::now(),
            sent: Vec::new(),
            ended: Vec::new(),
            notes: Vec::new(),
            records: Vec::new(),
            tallies: Vec::new(),
            warnings: Vec::new(),
            worlds: BTreeMap::new(),
            excluded: Vec::new(),
            emptied: Vec::new(),
        }
    }

    /// A machine with nodes 1 to `count` as members of round 1.
    pub fn formed(count: u64, settings: &Settings) -> Self {
        let mut bench = Self::new();
        for node in 1..=count {
            bench.greet(node, hello(node, settings), 1);
            bench.send(node, join(0));
        }
        assert_eq!(bench.run().round(), Round(1));
        bench
    }

    pub fn greet(&mut self, session: u64, hello: Hello, address: u8) {
        let ends = Ends { peer: [10, 0, 0, address].into(), local: [10, 0, 0, 200].into() };
        self.machine.on_hello(SessionId(session), hello, ends, self.now);
        self.take();
    }

    pub fn send(&mut self, session: u64, message: NodeMessage) {
        let message = of_worlds(message, &self.worlds);
        self.machine.on_message(SessionId(session), message, self.now);
        self.take();
    }

    pub fn pass(&mut self, time: Duration) {
        self.now += time;
        self.machine.on_tick(self.now);
        self.take();
    }

    pub fn take(&mut self) {
        for command in self.machine.take_commands() {
            match command {
                Command::Send { session, message } => {
                    self.worlds.extend(message.placement().map(|placement| (placement.round, placement.world)));
                    self.sent.push((session, message));
                }
                Command::End { session } => self.ended.push(session),
                Command::Record { record, .. } => {
                    self.notes.extend(record.text.clone());
                    self.records.push(record);
                }
                Command::Tally { tally, .. } => self.tallies.push(tally),
                Command::Forget { why, .. } => self.notes.extend(why),
                Command::Exclusions { hosts, .. } => self.excluded = hosts,
                Command::Warn { text, .. } => self.warnings.push(text),
                Command::EmptyStore => self.emptied.push(self.sent.len()),
                Command::HandOver => panic!("a coordinator without a list hands over"),
            }
        }
    }

    pub fn run(&self) -> &elastic_rs::rendezvous::run::Run {
        self.machine.run("job").unwrap()
    }

    /// The last message to a session.
    pub fn last(&self, session: u64) -> &CoordinatorMessage {
        &self.sent.iter().rev().find(|(to, _)| *to == SessionId(session)).unwrap().1
    }

    pub fn rejection(&self, session: u64) -> &str {
        match self.last(session) {
            CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason } => reason,
            other => panic!("not rejected: {other:?}"),
        }
    }

    pub fn is_placed(&self, session: u64, round: u64) -> bool {
        self.last(session).placement().is_some_and(|placement| placement.round == Round(round))
    }

    /// The place that a session's last message gives.
    pub fn placement(&self, session: u64) -> &Placement {
        self.last(session).placement().unwrap_or_else(|| panic!("no place: {:?}", self.last(session)))
    }
}

pub fn join(round: u64) -> NodeMessage {
    let workers = Some(JoinWorkers::new("trainer", 2));
    NodeMessage::Join(Join { round: Round(round), store_port: 1, node_rank: None, workers, health: Default::default() })
}

/// Workers that live, with their local ranks and commits. They have had the state of that round.
pub fn survived(round: u64, survivors: &[(u32, Option<u64>)]) -> Survival {
    let survivor = |(local_rank, commit): &(u32, Option<u64>)| Survivor {
        local_rank: *local_rank,
        generation: Some(Generation { round: Round(round), world: 0 }),
        commit: *commit,
    };
    Survival::Attended(survivors.iter().map(survivor).collect())
}

/// The same message, in which the worlds of survivors have their ids. Tests name a world by its round alone.
pub fn of_worlds(mut message: NodeMessage, worlds: &BTreeMap<Round, u64>) -> NodeMessage {
    let workers = if let NodeMessage::Join(join) = &mut message { join.workers.as_mut() } else { None };
    if let Some(Survival::Attended(survivors)) = workers.map(|workers| &mut workers.survival) {
        for of in survivors.iter_mut().filter_map(|it| it.generation.as_mut()).filter(|of| of.world == 0) {
            of.world = worlds.get(&of.round).copied().unwrap_or_default();
        }
    }
    message
}

/// A join of a node whose workers with these local ranks and commits live. `check`: at which they have stopped.
pub fn back(round: u64, survivors: &[(u32, Option<u64>)], check: Option<u64>) -> NodeMessage {
    joins(round, survived(round, survivors), check)
}

/// A join of a node whose workers became this.
pub fn joins(round: u64, survival: Survival, check: Option<u64>) -> NodeMessage {
    let NodeMessage::Join(join) = join(round) else { unreachable!() };
    let workers = join.workers.map(|workers| JoinWorkers { survival, check, ..workers });
    NodeMessage::Join(Join { workers, ..join })
}
