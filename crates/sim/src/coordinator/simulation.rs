//! A job: takes the next event, passes it to its machine, performs the machine's commands, and checks the invariants.

use std::collections::BTreeMap;
use std::time::Instant;

use super::agent::Ends;
use super::elastic::ElasticHistory;
use super::event::{Event, REFUSED};
use super::host::{Host, Process};
use super::ledger::Ledger;
use super::network::Network;
use super::options::{Action, Options, RUN_ID};
use super::server::Coordinator;
use crate::engine::dice::Dice;
use crate::engine::paths::{End, HostId};
use crate::engine::processes::Owner;
use crate::engine::queue::Time;
use crate::engine::record::Digest;
use crate::engine::{Engine, Happens, Model};
use crate::worlds::Violation;
use elastic_rs::channel::message::HeldState;
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::messages::message::Placement;
use elastic_rs::rendezvous::run::Run;

/// A job under virtual time.
#[derive(Clone, Debug)]
pub struct Simulation {
    pub(super) options: Options,
    pub(super) engine: Engine<Event>,
    pub(super) network: Network,
    pub(super) coordinator: Coordinator,
    pub(super) hosts: Vec<Host>,
    /// The record of each run.
    pub(super) ledgers: Vec<Ledger>,
    pub(super) pids: u64,
    pub(super) generations: u64,
    /// Number of workers' processes that were started.
    pub(super) processes: u64,
    /// The state with which workers go on in a world that is not synchronised, by its id.
    pub(super) states: BTreeMap<u64, HeldState>,
    pub(super) ends: Ends,
    /// A virtual second, and the number of the coordinator's ticks in it.
    pub(super) ticks: (u64, u64),
    /// Connections that belonged to no host.
    pub(super) intruders: u64,
    /// What has happened to workers that live through changes.
    pub(super) elastic_history: ElasticHistory,
}

impl Simulation {
    /// A job on hosts that have not been started.
    pub fn new(options: Options) -> Self {
        Self {
            engine: Engine::new(Dice::new(options.seed ^ 0x5EED), options.delay),
            network: Network::new(),
            coordinator: Coordinator::new(options.coordinator_on.is_none()),
            hosts: (0..options.hosts).map(|_| Host::default()).collect(),
            ledgers: (0..options.odd_hosts.runs()).map(|run| Ledger::new(run, options.settings.clone())).collect(),
            pids: 0,
            generations: 0,
            processes: 0,
            states: BTreeMap::new(),
            ends: Ends::default(),
            ticks: (0, 0),
            intruders: 0,
            elastic_history: ElasticHistory::default(),
            options,
        }
    }

    /// Keep a line for each event from now on, for [`Simulation::history`].
    pub fn keep_history(&mut self) {
        self.engine.record.keep_lines();
    }

    /// The lines of the events, if they are kept.
    pub fn history(&self) -> &[String] {
        self.engine.record.lines()
    }

    /// Require one world at a time although `on_partition=continue` allows more: a test of the tests.
    pub fn hold_to_one_world(&mut self) {
        self.ledgers.iter_mut().for_each(Ledger::hold_to_one_world);
    }

    /// Add an action at `at`.
    pub fn at(&mut self, at: Time, action: Action) {
        self.engine.push(at, Event::Act(action));
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
        self.pass(until)
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.engine.now()
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

    /// The record of the job to which all hosts belong unless [`Options::odd_hosts`] says otherwise.
    pub fn ledger(&self) -> &Ledger {
        &self.ledgers[0]
    }

    /// The record of a host's run.
    pub(super) fn ledger_of(&mut self, host: HostId) -> &mut Ledger {
        &mut self.ledgers[self.options.odd_hosts.run_of(host)]
    }

    /// The hosts of a run.
    pub fn hosts_of(&self, run: usize) -> impl Iterator<Item = (HostId, &Host)> {
        self.hosts.iter().enumerate().filter(move |(host, _)| self.options.odd_hosts.run_of(*host) == run)
    }

    /// Digest of all events so far.
    pub fn digest(&self) -> Digest {
        self.engine.record.digest()
    }

    /// The placement under which a host's workers run.
    pub fn running(&self, host: HostId) -> Option<&Placement> {
        self.hosts[host].process.as_ref().and_then(Process::running)
    }

    pub(super) fn instant(&self) -> Instant {
        self.engine.instant()
    }

    pub(super) fn process(&mut self, host: HostId, pid: u64) -> Option<&mut Process> {
        self.hosts[host].process.as_mut().filter(|process| process.pid == pid)
    }

    /// Until when a host stands still, or stood still last.
    pub(super) fn stalled_until(&self, host: HostId) -> Time {
        self.engine.processes.stalled_until(Some(host))
    }

    /// A process continues, unless it was stopped again. Deferred events come in the order in which they arrived, except that a
    /// driver may look at its timers before it reads.
    fn resume(&mut self, owner: Owner) -> Result<(), Violation> {
        let Some(mut missed) = self.engine.processes.missed(owner, self.engine.now()) else { return Ok(()) };
        if self.engine.dice.chance(50) {
            missed.sort_by_key(|event| !matches!(event, Event::NodeTick(..) | Event::CoordinatorTick));
        }
        missed.into_iter().try_for_each(|event| self.happen(event))
    }
}

impl Model for Simulation {
    type Event = Event;
    type Broken = Violation;

    fn engine(&mut self) -> &mut Engine<Event> {
        &mut self.engine
    }

    /// Connections to a process that stands still are accepted, by the kernel.
    fn happens(&self, event: &Event) -> Happens {
        match event {
            Event::Deliver { conn, to: End::Node, .. } | Event::Eof { conn, to: End::Node } => {
                let holder = self.network.holder(*conn, End::Node);
                holder.map_or(Happens::Nowhere, |(host, _)| Happens::In(Some(host)))
            }
            Event::Connected(host, ..)
            | Event::ConnectFailed(host, ..)
            | Event::NodeTick(host, _)
            | Event::WorkerGroup(host, ..)
            | Event::AgentTick(host, _)
            | Event::Checked(host, _)
            | Event::Elastic(host, ..)
            | Event::FailureMessage(host, ..)
            | Event::Stopped(host, _) => Happens::In(Some(*host)),
            Event::Deliver { .. } | Event::Eof { .. } | Event::CoordinatorTick => Happens::In(None),
            Event::Act(_)
            | Event::Guards(..)
            | Event::Resume(_)
            | Event::HostEnds(_)
            | Event::Syn(..)
            | Event::Noticed(_)
            | Event::MustBeGone(..) => Happens::Outside,
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Act(action) => self.act(action),
            Event::Resume(owner) => self.resume(owner),
            Event::HostEnds(incarnation) => {
                if incarnation == self.coordinator.incarnation {
                    self.crash_coordinator();
                }
                Ok(())
            }
            Event::Syn(host, pid) => {
                self.on_syn(host, pid);
                Ok(())
            }
            Event::Connected(host, pid, conn) => self.on_connected(host, pid, conn),
            Event::ConnectFailed(host, pid, error) => {
                let now = self.instant();
                let Some(process) = self.process(host, pid) else { return Ok(()) };
                process.machine.on_connect_failed(error.to_owned(), error == REFUSED, now);
                self.after_node(host)
            }
            Event::Deliver { conn, to, bytes } => match to {
                _ if !self.network.delivers(conn, to) => Ok(()),
                End::Coordinator => self.coordinator_reads(conn, &bytes),
                End::Node => self.node_reads(conn, &bytes),
            },
            Event::Eof { conn, to } => self.on_eof(conn, to),
            Event::CoordinatorTick => self.tick_coordinator(),
            Event::NodeTick(host, pid) => self.tick_node(host, pid),
            Event::Stopped(host, pid) => self.on_stopped(host, pid),
            Event::WorkerGroup(host, generation, event) => self.on_worker_group(host, generation, event),
            Event::Elastic(host, pid, round, happening) => self.on_elastic(host, pid, round, happening),
            Event::AgentTick(host, pid) => self.tick_agent(host, pid),
            Event::Checked(host, pid) => self.on_checked(host, pid),
            Event::Guards(host, pid) => {
                self.look_at_guards(host, pid);
                Ok(())
            }
            Event::FailureMessage(host, pid, round, found) => self.on_failure_message(host, pid, round, found),
            Event::MustBeGone(host, pid, since) => self.check_gone(host, pid, since),
            Event::Noticed(loss) => {
                let fault = if self.coordinator.up { self.engine.processes.last_fault(None) } else { self.now() };
                let survivors = self
                    .hosts_of(loss.run)
                    .map(|(number, host)| (number, host, self.engine.processes.last_fault(Some(number))));
                self.ledgers[loss.run].check_noticed(&loss, survivors, fault, self.now())
            }
        }
    }
}
