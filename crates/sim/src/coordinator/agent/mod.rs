//! Our agent on a host: an [`AgentMachine`] between its node's session and simulated workers.
//!
//! `runner` plays the part of [`elastic_rs::agent::runner`]: it performs the machine's commands and passes events to it. `workers` take
//! a while to start, fail, succeed, and end late or not at all when stopped. `message_delay` are those of failed workers. Invariants of a
//! node's workers are checked where they could break.

mod failure_message;
mod guards;
mod health;
mod in_place;
mod runner;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::engine::alarm::Alarm;
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use crate::worlds::Held;
use elastic_rs::agent::news::Seen;
use elastic_rs::agent::{AgentMachine, Budget, Outcome, Policy};
use elastic_rs::rendezvous::messages::message::{Failure, Round};
use elastic_rs::signals::FirstSignal;
use elastic_rs::workers::Stopping;

/// The hosts that run our agent, and the behaviour of their workers. Default: none, all agents are PyTorch's.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    /// The hosts that run our agent.
    pub hosts: BTreeSet<HostId>,
    /// Restarts of each agent, if it counts for itself. `None`: the coordinator counts.
    pub restarts_left: Option<u32>,
    /// Grace of workers after the stop signal.
    pub grace: Duration,
    /// How long a node waits for the others at the end.
    pub exit_barrier_timeout: Option<Duration>,
    /// Shortest and longest time from the decision to start workers until they run.
    pub start: (Duration, Duration),
    /// Shortest and longest time that a worker takes to end after the stop signal.
    pub stop: (Duration, Duration),
    /// Percentage of workers that take up to twice the grace, so that some have to be killed.
    pub stubborn: u64,
    /// Percentage of starts that fail.
    pub bad_starts: u64,
    /// Until when starts fail.
    pub bad_starts_until: Time,
    /// Shortest and longest time that collecting a failed worker's words takes.
    pub message_delay: (Duration, Duration),
    /// Percentage of failures whose words are on a file system that hangs.
    pub hanging_files: u64,
    /// How workers change in place.
    pub in_place: InPlace,
    /// Which machines are ill. `None`: none is checked.
    pub health: Option<Ill>,
    /// Guards hold no deadline: a test of the tests.
    pub without_deadlines: bool,
    /// A fence asks workers to end and gives them their grace, as any other stop: a test of the tests.
    pub fences_with_grace: bool,
}

use health::Checked;
pub use health::Ill;
pub use in_place::InPlace;
use in_place::Member;

/// An event of the workers of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerGroupEvent {
    /// The workers that were missing run.
    Started,
    /// One of them cannot be started, and none of them runs.
    NotStarted,
    /// A worker ends.
    Ends {
        /// Its local rank.
        local_rank: u32,
        /// The number of its process.
        process: u64,
        /// Whether with exit code 0.
        well: bool,
    },
    /// A worker does what a message asks for, or what its program is for.
    Does {
        /// Its local rank.
        local_rank: u32,
        /// The number of its process.
        process: u64,
        /// What.
        what: Doing,
    },
    /// The stop's deadline.
    Tick,
}

/// What a worker that changes in place does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It connects to its agent.
    Attend,
    /// It says how far it is.
    Count {
        /// In answer to this change.
        change: u64,
    },
    /// It leaves its world.
    Park,
    /// It says that its world cannot be formed.
    BeStuck {
        /// This world.
        world: (Round, u64),
    },
}

/// The workers on a host.
#[derive(Clone, Debug)]
pub struct WorkerGroup {
    /// The number of the last start.
    generation: u64,
    /// Whether the last start is complete.
    up: bool,
    /// Those that have not ended.
    left: BTreeMap<u32, Member>,
    stopping: Option<Stopping>,
    /// The place for which workers were started last.
    placement: Option<Held>,
}

/// Our agent in a process.
#[derive(Clone, Debug)]
pub struct Ours {
    pub(super) machine: AgentMachine,
    /// Those of the current world.
    workers: u32,
    grace: Duration,
    seen: Option<Seen>,
    /// Until when it looks for a running world.
    looking_until: Option<Time>,
    ending: Option<Outcome>,
    /// The deadline that guards were given last.
    until: Option<Instant>,
    first_rank: u32,
    /// Workers of the last generation that ended well.
    succeeded: u32,
    alarm: Alarm,
    /// The signal that it got.
    signal: Option<i32>,
    /// The first failure of the current round, once there was one.
    listening: Option<Listening>,
    /// When the check that runs has begun, or what the last one has found.
    health: Checked,
    /// How often the coordinator had asked for a check.
    checks_asked: u64,
}

/// How the agents of a job ended.
#[derive(Clone, Debug, Default)]
pub struct Ends {
    /// The outcome of each agent that ended, in order.
    pub outcomes: Vec<(HostId, Outcome)>,
    /// How often the workers of a node were started before it joined.
    pub started_ahead: usize,
    /// How many workers of a node were started while the others left their world, and got their place later.
    pub replaced_ahead: usize,
    /// Number of workers that have said that their world cannot be formed.
    pub stuck: usize,
    /// Number of workers that have left their world on purpose.
    pub raised: usize,
    /// The cause that the first agent of a failed job reported.
    cause: Option<Option<Box<Failure>>>,
}

/// Number of workers that a host offers.
pub(super) fn worker_count(host: HostId) -> u32 {
    1 + host as u32 % 3
}

fn pid_of_workers(host: HostId) -> u32 {
    1000 + host as u32
}

impl Ours {
    pub(super) fn new(host: HostId, name: String, agents: &Agents, max_restarts: Option<u32>) -> Self {
        let workers = worker_count(host);
        let policy = Policy {
            budget: agents.restarts_left.map_or(Budget::Job, Budget::Node),
            workers,
            max_restarts: max_restarts.unwrap_or(u32::MAX),
            grace: agents.grace,
            first_signal: FirstSignal::default(),
            exit_barrier_timeout: agents.exit_barrier_timeout,
            in_place: true,
            standbys: 0,
            replaces_dying: true,
            saves_by_signal: false,
            checks_health: agents.health.is_some(),
        };
        Self {
            machine: AgentMachine::new(policy, name),
            workers,
            grace: agents.grace,
            seen: None,
            looking_until: None,
            ending: None,
            until: None,
            first_rank: 0,
            succeeded: 0,
            alarm: Alarm::default(),
            signal: None,
            listening: None,
            health: Checked::Never,
            checks_asked: 0,
        }
    }

    /// Another event than its own failure ends this node's round.
    fn need_not_report(&mut self) {
        self.listening.iter_mut().for_each(|listening| listening.moot = true);
    }

    fn failure(&self, host: HostId, local_rank: u32, exit: &str, returncode: i32) -> Failure {
        Failure {
            node: String::new(),
            role: "default".to_owned(),
            local_rank,
            global_rank: self.first_rank + local_rank,
            pid: pid_of_workers(host),
            exit: exit.to_owned(),
            returncode,
            message: String::new(),
            counts: true,
            lived: Duration::from_secs(60),
            step: None,
        }
    }
}

/// A driver's result of collecting words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Collecting them hangs.
    Hang,
    /// All words.
    All,
}

/// A round's first failure, as seen by the machine's driver and the other nodes.
#[derive(Clone, Debug)]
struct Listening {
    round: Round,
    local_rank: u32,
    since: Time,
    /// The words that the machine has got.
    found: Option<Found>,
    /// It got them while it waited for them.
    in_time: bool,
    /// The failure has been reported.
    reported: bool,
    /// No report is needed: another event ends the round, or other nodes are not concerned.
    moot: bool,
}
