//! The loop: takes the next event, passes it to its machine, performs the machine's commands, and checks the invariants.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::agent::{Agents, CrewEvent, Ends, Found};
use super::coordinator::Coordinator;
use super::host::{Host, Process};
use super::invariants::{Ledger, Loss};
use super::network::{End, HostId, Network, Partition};
use super::queue::{Dice, Digest, Queue, Time};
use super::strangers::Strangers;
use super::wiring::REFUSED;
use super::worlds::Violation;
use crate::rendezvous::coordinator::machine::Machine;
use crate::rendezvous::decider::event::SessionId;
use crate::rendezvous::decider::run::Run;
use crate::rendezvous::protocol::codec::CodecError;
use crate::rendezvous::protocol::message::{Hello, NodeMessage, Placement, Round, Verdict};
use crate::rendezvous::protocol::settings::Settings;

/// The options of a job, without its faults.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of everything random.
    pub seed: u64,
    /// Number of hosts.
    pub hosts: usize,
    /// The settings of every node.
    pub settings: Settings,
    /// `coordinator_timeout` of the nodes.
    pub coordinator_timeout: Duration,
    /// `join_timeout` of the nodes.
    pub join_timeout: Duration,
    /// Shortest and longest transit time of a message.
    pub delay: (Duration, Duration),
    /// Shortest and longest time for an agent to stop its workers.
    pub stop: (Duration, Duration),
    /// Whether an agent whose join timed out joins again with a long time-out, instead of ending.
    pub rejoin: bool,
    /// Hosts that give an address for the others (`--local-addr`).
    pub local_addrs: BTreeMap<HostId, String>,
    /// Ranks that hosts ask for in the first round.
    pub node_ranks: BTreeMap<HostId, u32>,
    /// Hosts whose wall clock is wrong, with the number of microseconds by which it is ahead.
    pub clocks: BTreeMap<HostId, i64>,
    /// The hosts that run our agent.
    pub agents: Agents,
    /// Hosts that do not belong to this job, or differ from its others.
    pub strangers: Strangers,
    /// The host whose agent is in the coordinator's process. The two stand still, end and start together.
    pub coordinator_on: Option<HostId>,
}

impl Options {
    /// A job without delays or randomness: events happen at exact times.
    pub fn exact(hosts: usize, settings: Settings) -> Self {
        Self {
            seed: 0,
            hosts,
            settings,
            coordinator_timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(600),
            delay: (Duration::ZERO, Duration::ZERO),
            stop: (Duration::ZERO, Duration::ZERO),
            rejoin: false,
            local_addrs: BTreeMap::new(),
            node_ranks: BTreeMap::new(),
            clocks: BTreeMap::new(),
            agents: Agents::default(),
            strangers: Strangers::default(),
            coordinator_on: None,
        }
    }
}

/// An action on a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An agent starts, with a join timeout, and joins.
    Start(HostId, Duration),
    /// The agent dies: the kernel closes its connection.
    Kill(HostId),
    /// The host is switched off: no connection is closed.
    PowerOff(HostId),
    /// SIGTERM: the agent sends a goodbye and ends.
    Terminate(HostId),
    /// Ctrl-C: the same by SIGINT.
    Interrupt(HostId),
    /// SIGSTOP, and SIGCONT later.
    Stall(HostId, Duration),
    /// The connection breaks.
    Sever(HostId),
    /// The path to the given end is cut.
    Cut(HostId, End, Duration, Partition),
    /// A worker fails: the agent stops the others and joins again.
    FailWorkers(HostId),
    /// A worker fails: the agent reports it, and waits for the answer.
    ReportFailure(HostId),
    /// All workers succeed: the agent reports it, and waits for the others.
    ReportDone(HostId),
    /// The agent ends the job, and then itself.
    Close(HostId, Verdict),
    /// SIGSTOP of the coordinator, and SIGCONT later.
    StallCoordinator(Duration),
    /// The coordinator dies. Its memory is lost.
    CrashCoordinator,
    /// The coordinator is started again.
    StartCoordinator,
    /// A stranger introduces itself with any claim, sends this, and ends without a goodbye.
    Intrude(Box<Hello>, Vec<NodeMessage>),
    /// The coordinator is started at another place: its address has moved to another machine.
    MoveCoordinator,
}

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// An action on the job.
    Act(Action),
    /// A host that stood still continues, or the coordinator does.
    Resume(Option<HostId>),
    /// A host's request for a connection reaches the coordinator's.
    Syn(HostId, u64),
    /// The requested connection is open.
    Connected(HostId, u64, SessionId),
    /// The requested connection cannot be opened.
    ConnectFailed(HostId, u64, &'static str),
    /// Bytes arrive.
    Deliver {
        /// On which connection.
        conn: SessionId,
        /// Where.
        to: End,
        /// What.
        bytes: Bytes,
    },
    /// The end of the stream, or its reset.
    Eof {
        /// Of which connection.
        conn: SessionId,
        /// Where.
        to: End,
    },
    /// The coordinator's deadline.
    CoordinatorTick,
    /// A node's deadline.
    NodeTick(HostId, u64),
    /// An agent's workers have stopped.
    Stopped(HostId, u64),
    /// Something happens to the workers of a generation.
    Crew(HostId, u64, CrewEvent),
    /// The deadline of our agent.
    AgentTick(HostId, u64),
    /// Our agent gets the words of a failed worker of a round.
    Words(HostId, u64, Round, Found),
    /// Our agent got a signal at that time, and must be gone now.
    MustBeGone(HostId, u64, Time),
    /// The process that hosts the coordinator ends after its agent has left, in this life of the coordinator.
    HostEnds(u32),
    /// A loss must have been noticed by now.
    Noticed(Loss),
}

impl From<CodecError> for Violation {
    fn from(error: CodecError) -> Self {
        Self::contract(format!("bytes that we have sent are not a session's: {error}"))
    }
}

/// A job under virtual time.
#[derive(Clone, Debug)]
pub struct Simulation {
    pub(super) options: Options,
    /// Virtual time zero as an instant of the machines. Only differences to it are used.
    pub(super) origin: Instant,
    pub(super) queue: Queue<Event>,
    pub(super) dice: Dice,
    pub(super) network: Network,
    pub(super) coordinator: Coordinator,
    pub(super) hosts: Vec<Host>,
    /// The record of each run.
    pub(super) ledgers: Vec<Ledger>,
    pub(super) digest: Digest,
    pub(super) history: Option<Vec<String>>,
    pub(super) pids: u64,
    pub(super) generations: u64,
    pub(super) ends: Ends,
    pub(super) coordinator_fault: Time,
    /// A virtual second, and the number of the coordinator's ticks in it.
    pub(super) ticks: (u64, u64),
    /// Connections that belonged to no host.
    pub(super) intruders: u64,
    /// Events that arrived for processes that stand still.
    pub(super) deferred: BTreeMap<Option<HostId>, Vec<Event>>,
}

/// The run id of every simulated job. Other runs on its coordinator have the ids of [`run_id`].
pub const RUN_ID: &str = "job";

/// The run id of the job with this number.
pub(super) fn run_id(run: usize) -> String {
    if run == 0 { RUN_ID.to_owned() } else { format!("{RUN_ID}-{run}") }
}

impl Simulation {
    /// A job on hosts that have not been started.
    pub fn new(options: Options) -> Self {
        Self {
            origin: Instant::now(),
            queue: Queue::new(),
            dice: Dice::new(options.seed ^ 0x5EED),
            network: Network::new(options.delay),
            coordinator: Coordinator::new(options.coordinator_on.is_none()),
            hosts: (0..options.hosts).map(|_| Host::default()).collect(),
            ledgers: (0..options.strangers.runs()).map(|run| Ledger::new(run, options.settings.clone())).collect(),
            digest: Digest::default(),
            history: None,
            pids: 0,
            generations: 0,
            ends: Ends::default(),
            coordinator_fault: Time::ZERO,
            ticks: (0, 0),
            intruders: 0,
            deferred: BTreeMap::new(),
            options,
        }
    }

    /// Keep a line for each event from now on, for [`Simulation::history`].
    pub fn keep_history(&mut self) {
        self.history = Some(Vec::new());
    }

    /// The lines of the events, if they are kept.
    pub fn history(&self) -> &[String] {
        self.history.as_deref().unwrap_or_default()
    }

    /// Require one world at a time although `on_partition=continue` allows more: a test of the tests.
    pub fn hold_to_one_world(&mut self) {
        self.ledgers.iter_mut().for_each(Ledger::hold_to_one_world);
    }

    /// Add an action at `at`.
    pub fn at(&mut self, at: Time, action: Action) {
        self.queue.push(at, Event::Act(action));
    }

    /// Start agents on all hosts at `at`.
    pub fn start_all(&mut self, at: Time) {
        for host in 0..self.options.hosts {
            self.at(at, Action::Start(host, self.options.join_timeout));
        }
    }

    /// Let all events up to and including `until` happen.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn run_until(&mut self, until: Time) -> Result<(), Violation> {
        while let Some(event) = self.queue.pop(until) {
            self.handle(event)?;
        }
        Ok(())
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.queue.now()
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The coordinator's run.
    pub fn run(&self) -> Option<&Run> {
        self.coordinator.machine.run(RUN_ID)
    }

    /// The coordinator's machine.
    pub fn machine(&self) -> &Machine {
        &self.coordinator.machine
    }

    /// The record of the job to which all hosts belong unless [`Options::strangers`] says otherwise.
    pub fn ledger(&self) -> &Ledger {
        &self.ledgers[0]
    }

    /// The record of a host's run.
    pub(super) fn ledger_of(&mut self, host: HostId) -> &mut Ledger {
        &mut self.ledgers[self.options.strangers.run_of(host)]
    }

    /// The hosts of a run.
    pub fn hosts_of(&self, run: usize) -> impl Iterator<Item = (HostId, &Host)> {
        self.hosts.iter().enumerate().filter(move |(host, _)| self.options.strangers.run_of(*host) == run)
    }

    /// Digest of all events so far.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The placement under which a host's workers run.
    pub fn running(&self, host: HostId) -> Option<&Placement> {
        self.hosts[host].process.as_ref().and_then(Process::running)
    }

    pub(super) fn instant(&self) -> Instant {
        self.origin + self.queue.now()
    }

    pub(super) fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let Some(event) = self.defer(event) else { return Ok(()) };
        self.record(&event);
        match event {
            Event::Act(action) => self.act(action)?,
            Event::Resume(whose) => self.resume(whose)?,
            Event::HostEnds(life) if life == self.coordinator.incarnation => self.crash_coordinator(),
            Event::HostEnds(_) => {}
            Event::Syn(host, pid) => self.on_syn(host, pid),
            Event::Connected(host, pid, conn) => self.on_connected(host, pid, conn)?,
            Event::ConnectFailed(host, pid, error) => {
                let now = self.instant();
                if let Some(process) = self.process(host, pid) {
                    process.machine.on_connect_failed(error.to_owned(), error == REFUSED, now);
                    self.after_node(host)?;
                }
            }
            Event::Deliver { conn, to, bytes } if self.network.delivers(conn, to) => match to {
                End::Coordinator => self.coordinator_reads(conn, &bytes)?,
                End::Node => self.node_reads(conn, &bytes)?,
            },
            Event::Deliver { .. } => {}
            Event::Eof { conn, to } => self.on_eof(conn, to)?,
            Event::CoordinatorTick => self.tick_coordinator()?,
            Event::NodeTick(host, pid) => self.tick_node(host, pid)?,
            Event::Stopped(host, pid) => self.on_stopped(host, pid)?,
            Event::Crew(host, generation, event) => self.on_crew(host, generation, event)?,
            Event::AgentTick(host, pid) => self.tick_agent(host, pid)?,
            Event::Words(host, pid, round, found) => self.on_words(host, pid, round, found)?,
            Event::MustBeGone(host, pid, since) => self.check_gone(host, pid, since)?,
            Event::Noticed(loss) => {
                let fault = if self.coordinator.up { self.coordinator_fault } else { self.now() };
                let hosts = self.hosts_of(loss.run);
                self.ledgers[loss.run].check_noticed(&loss, hosts, fault, self.now())?;
            }
        }
        Ok(())
    }

    /// Defer an event for a process that stands still. Connections are accepted meanwhile, by the kernel.
    pub(super) fn defer(&mut self, event: Event) -> Option<Event> {
        let whose = match &event {
            Event::Deliver { conn, to: End::Node, .. } | Event::Eof { conn, to: End::Node } => {
                Some(self.network.holder(*conn, End::Node)?.0)
            }
            Event::Connected(host, ..)
            | Event::ConnectFailed(host, ..)
            | Event::NodeTick(host, _)
            | Event::Crew(host, ..)
            | Event::AgentTick(host, _)
            | Event::Words(host, ..)
            | Event::Stopped(host, _) => Some(*host),
            Event::Deliver { .. } | Event::Eof { .. } | Event::CoordinatorTick => None,
            Event::Act(_)
            | Event::Resume(_)
            | Event::HostEnds(_)
            | Event::Syn(..)
            | Event::Noticed(_)
            | Event::MustBeGone(..) => {
                return Some(event);
            }
        };
        if self.stalled_until(whose) <= self.now() {
            return Some(event);
        }
        self.deferred.entry(whose).or_default().push(event);
        None
    }

    /// Until when a host stands still, or the coordinator (`None`).
    pub(super) fn stalled_until(&self, whose: Option<HostId>) -> Time {
        whose.map_or(self.coordinator.stalled_until, |host| self.hosts[host].stalled_until)
    }

    /// A process continues, unless it was stopped again. Deferred events come in the order in which they arrived, except that a
    /// driver may look at its timers before it reads.
    pub(super) fn resume(&mut self, whose: Option<HostId>) -> Result<(), Violation> {
        if self.stalled_until(whose) > self.now() {
            return Ok(());
        }
        let mut missed = self.deferred.remove(&whose).unwrap_or_default();
        if self.dice.chance(50) {
            missed.sort_by_key(|event| !matches!(event, Event::NodeTick(..) | Event::CoordinatorTick));
        }
        missed.into_iter().try_for_each(|event| self.handle(event))
    }

    pub(super) fn record(&mut self, event: &Event) {
        let now = self.now();
        // Writing into a digest or a string cannot fail.
        let _ = write!(self.digest, "{} {event:?}", now.as_micros());
        if let Some(history) = &mut self.history {
            history.push(format!("{:>12.6} {event:?}", now.as_secs_f64()));
        }
    }

    pub(super) fn remark(&mut self, text: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(format!("{:>12.6}   {}", self.queue.now().as_secs_f64(), text()));
        }
    }

    pub(super) fn process(&mut self, host: HostId, pid: u64) -> Option<&mut Process> {
        self.hosts[host].process.as_mut().filter(|process| process.pid == pid)
    }
}
