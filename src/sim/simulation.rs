//! The loop: takes the next event, hands it to whom it concerns, performs what they ask for, and checks the invariants.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::coordinator::Coordinator;
use super::host::{self, Agent, Exit, Host, Process};
use super::invariants::{Ledger, Loss};
use super::network::{End, HostId, Network, Partition};
use super::queue::{Dice, Digest, Queue, Time};
use crate::rendezvous::codec::CodecError;
use crate::rendezvous::machine::{Command, Machine};
use crate::rendezvous::message::{Hello, NodeId, NodeMessage, Placement, Verdict};
use crate::rendezvous::node::{NodeCommand, NodeMachine};
use crate::rendezvous::settings::Settings;
use crate::rendezvous::state::{Run, SessionId};

/// What a job is like, faults aside.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of everything random.
    pub seed: u64,
    /// How many hosts there are.
    pub hosts: usize,
    /// What every node asks for.
    pub settings: Settings,
    /// How long nodes do without the coordinator.
    pub coordinator_timeout: Duration,
    /// How long a join may take.
    pub join_timeout: Duration,
    /// Shortest and longest time of a message on the way.
    pub delay: (Duration, Duration),
    /// Shortest and longest time for an agent to stop its workers.
    pub stop: (Duration, Duration),
    /// Hosts that give the address which others are to use.
    pub local_addrs: BTreeMap<HostId, String>,
}

impl Options {
    /// A job without delays or randomness: what happens, happens at exact times.
    pub fn exact(hosts: usize, settings: Settings) -> Self {
        Self {
            seed: 0,
            hosts,
            settings,
            coordinator_timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(600),
            delay: (Duration::ZERO, Duration::ZERO),
            stop: (Duration::ZERO, Duration::ZERO),
            local_addrs: BTreeMap::new(),
        }
    }
}

/// What may be done to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An agent starts, with a join timeout, and joins.
    Start(HostId, Duration),
    /// The agent dies: the kernel closes its connection.
    Kill(HostId),
    /// The host goes off: nothing is closed.
    PowerOff(HostId),
    /// SIGTERM: the agent says goodbye and goes.
    Terminate(HostId),
    /// SIGSTOP, and SIGCONT later.
    Stall(HostId, Duration),
    /// The connection breaks.
    Sever(HostId),
    /// The path to the given end is cut.
    Cut(HostId, End, Duration, Partition),
    /// A worker fails: the agent stops the others and joins again.
    FailWorkers(HostId),
    /// The agent ends the job, and goes.
    Close(HostId, Verdict),
    /// SIGSTOP of the coordinator, and SIGCONT later.
    StallCoordinator(Duration),
    /// The coordinator dies; nothing remains of its memory.
    CrashCoordinator,
    /// The coordinator is started again.
    StartCoordinator,
}

/// What happens at some time.
#[derive(Debug)]
pub enum Event {
    /// Something is done to the job.
    Act(Action),
    /// A host that stood still goes on, or the coordinator.
    Resume(Option<HostId>),
    /// A host's request for a connection reaches the coordinator's.
    Syn(HostId, u64),
    /// The connection asked for is open.
    Connected(HostId, u64, SessionId),
    /// The connection asked for cannot be opened.
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
    /// A loss must have been noticed by now.
    Noticed(Loss),
}

/// An invariant does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl From<CodecError> for Violation {
    fn from(error: CodecError) -> Self {
        Self(format!("bytes that we have sent are not a session's: {error}"))
    }
}

/// A job under virtual time.
#[derive(Debug)]
pub struct Simulation {
    options: Options,
    /// Virtual time zero as the machines see it. Only differences to it are ever used.
    origin: Instant,
    queue: Queue<Event>,
    dice: Dice,
    network: Network,
    coordinator: Coordinator,
    hosts: Vec<Host>,
    ledger: Ledger,
    digest: Digest,
    history: Option<Vec<String>>,
    pids: u64,
    coordinator_fault: Time,
    /// What arrived for processes that stand still.
    deferred: BTreeMap<Option<HostId>, Vec<Event>>,
}

/// The run id of every simulated job.
pub const RUN_ID: &str = "job";
/// How long a node waits for a connection that nobody refuses.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Simulation {
    /// A job on hosts that have not been started.
    pub fn new(options: Options) -> Self {
        Self {
            origin: Instant::now(),
            queue: Queue::new(),
            dice: Dice::new(options.seed ^ 0x5EED),
            network: Network::new(options.delay),
            coordinator: Coordinator::new(),
            hosts: (0..options.hosts).map(|_| Host::default()).collect(),
            ledger: Ledger::new(options.settings.clone()),
            digest: Digest::default(),
            history: None,
            pids: 0,
            coordinator_fault: Time::ZERO,
            deferred: BTreeMap::new(),
            options,
        }
    }

    /// Keep a line for each event from now on; see [`Simulation::history`].
    pub fn keep_history(&mut self) {
        self.history = Some(Vec::new());
    }

    /// What happened, line by line, if it was to be kept.
    pub fn history(&self) -> &[String] {
        self.history.as_deref().unwrap_or_default()
    }

    /// Put in something to be done at `at`.
    pub fn at(&mut self, at: Time, action: Action) {
        self.queue.push(at, Event::Act(action));
    }

    /// Start agents on all hosts at `at`.
    pub fn start_all(&mut self, at: Time) {
        for host in 0..self.options.hosts {
            self.at(at, Action::Start(host, self.options.join_timeout));
        }
    }

    /// Let everything up to and including `until` happen.
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

    /// What the coordinator knows.
    pub fn run(&self) -> Option<&Run> {
        self.coordinator.machine.run(RUN_ID)
    }

    /// The decision function itself.
    pub fn machine(&self) -> &Machine {
        &self.coordinator.machine
    }

    /// What was seen so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Digest of all events so far.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The placement under which a host's workers run.
    pub fn running(&self, host: HostId) -> Option<&Placement> {
        self.hosts[host].process.as_ref().and_then(Process::running)
    }

    fn instant(&self) -> Instant {
        self.origin + self.queue.now()
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let Some(event) = self.defer(event) else { return Ok(()) };
        self.record(&event);
        match event {
            Event::Act(action) => self.act(action)?,
            Event::Resume(whose) => self.resume(whose)?,
            Event::Syn(host, pid) => self.on_syn(host, pid),
            Event::Connected(host, pid, conn) => self.on_connected(host, pid, conn)?,
            Event::ConnectFailed(host, pid, error) => {
                let now = self.instant();
                if let Some(process) = self.process(host, pid) {
                    process.machine.on_connect_failed(error.to_owned(), now);
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
            Event::Noticed(loss) => {
                self.ledger
                    .check_noticed(&loss, &self.hosts, self.coordinator_fault, self.now())?
            }
        }
        Ok(())
    }

    /// Put off what concerns a process that stands still. Connections are accepted meanwhile: the kernel does that.
    fn defer(&mut self, event: Event) -> Option<Event> {
        let whose = match &event {
            Event::Deliver {
                conn, to: End::Node, ..
            }
            | Event::Eof { conn, to: End::Node } => Some(self.network.holder(*conn, End::Node)?.0),
            Event::Connected(host, ..)
            | Event::ConnectFailed(host, ..)
            | Event::NodeTick(host, _)
            | Event::Stopped(host, _) => Some(*host),
            Event::Deliver { .. } | Event::Eof { .. } | Event::CoordinatorTick => None,
            Event::Act(_) | Event::Resume(_) | Event::Syn(..) | Event::Noticed(_) => return Some(event),
        };
        if self.stalled_until(whose) <= self.now() {
            return Some(event);
        }
        self.deferred.entry(whose).or_default().push(event);
        None
    }

    /// Until when a host, or the coordinator (`None`), stands still.
    fn stalled_until(&self, whose: Option<HostId>) -> Time {
        whose.map_or(self.coordinator.stalled_until, |host| self.hosts[host].stalled_until)
    }

    /// A process goes on, unless it was stopped again: what it has missed comes in the order in which it arrived, except that a
    /// driver may look at its timers before it reads.
    fn resume(&mut self, whose: Option<HostId>) -> Result<(), Violation> {
        if self.stalled_until(whose) > self.now() {
            return Ok(());
        }
        let mut missed = self.deferred.remove(&whose).unwrap_or_default();
        if self.dice.chance(50) {
            missed.sort_by_key(|event| !matches!(event, Event::NodeTick(..) | Event::CoordinatorTick));
        }
        missed.into_iter().try_for_each(|event| self.handle(event))
    }

    fn record(&mut self, event: &Event) {
        let now = self.now();
        // Writing into a digest or a string cannot fail.
        let _ = write!(self.digest, "{} {event:?}", now.as_micros());
        if let Some(history) = &mut self.history {
            history.push(format!("{:>12.6} {event:?}", now.as_secs_f64()));
        }
    }

    fn remark(&mut self, text: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(format!("{:>12.6}   {}", self.queue.now().as_secs_f64(), text()));
        }
    }

    fn process(&mut self, host: HostId, pid: u64) -> Option<&mut Process> {
        self.hosts[host].process.as_mut().filter(|process| process.pid == pid)
    }

    // What is done to the job.

    fn act(&mut self, action: Action) -> Result<(), Violation> {
        let now = self.now();
        match action {
            Action::Start(host, timeout) => return self.start(host, timeout),
            Action::Kill(host) => self.kill(host, false),
            Action::PowerOff(host) => self.kill(host, true),
            Action::Terminate(host) => {
                self.hosts[host].last_fault = now;
                self.leave(host, "SIGTERM", Exit::Terminated)?;
            }
            Action::Stall(host, time) => {
                self.hosts[host].stalled_until = self.hosts[host].stalled_until.max(now + time);
                self.hosts[host].last_fault = now + time;
                self.queue.push(now + time, Event::Resume(Some(host)));
            }
            Action::Sever(host) => {
                self.hosts[host].last_fault = now + Duration::from_secs(2);
                if let Some(conn) = self.hosts[host].process.as_ref().and_then(|p| p.conn) {
                    let told_within = self.options.delay.1 * 20;
                    self.network.sever(conn, told_within, &mut self.dice, &mut self.queue);
                }
            }
            Action::Cut(host, to, time, kind) => {
                self.hosts[host].last_fault = now + time + self.options.settings.lease();
                self.network.partition(host, to, now + time, kind);
            }
            Action::FailWorkers(host) => {
                if self.running(host).is_some() {
                    self.stop_workers(host, true);
                }
            }
            Action::Close(host, verdict) => {
                let Some(process) = &mut self.hosts[host].process else {
                    return Ok(());
                };
                process.machine.close(verdict);
                self.after_node(host)?;
            }
            Action::StallCoordinator(time) => {
                self.coordinator.stalled_until = self.coordinator.stalled_until.max(now + time);
                self.coordinator_fault = now + time;
                self.queue.push(now + time, Event::Resume(None));
            }
            Action::CrashCoordinator => {
                self.coordinator_fault = now;
                self.coordinator.crash();
                self.deferred.remove(&None);
                for conn in self.network.at_coordinator() {
                    let told_within = self.options.delay.1 * 20;
                    self.network.release(conn, End::Coordinator);
                    self.network.sever(conn, told_within, &mut self.dice, &mut self.queue);
                }
            }
            Action::StartCoordinator => {
                self.coordinator_fault = now;
                if !self.coordinator.up {
                    self.coordinator.restart();
                    self.ledger.on_restart();
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, host: HostId, timeout: Duration) -> Result<(), Violation> {
        if self.hosts[host].process.is_some() {
            return Ok(());
        }
        self.pids += 1;
        let pid = self.pids;
        let id = NodeId(u128::from(self.dice.number()) << 64 | u128::from(self.dice.number()));
        let hello = Hello {
            run_id: RUN_ID.to_owned(),
            node: id,
            name: host::name(host, pid),
            local_addr: self.options.local_addrs.get(&host).cloned(),
            settings: self.options.settings.clone(),
            placed: None,
            joining: false,
        };
        let endpoint = "coordinator:29400".to_owned();
        let timeouts = self.options.coordinator_timeout;
        let machine = NodeMachine::new(hello.clone(), endpoint, timeouts, self.instant());
        let mut process = Process::new(pid, hello, machine, self.now());
        process.join_timeout = timeout;
        self.hosts[host].process = Some(process);
        self.join(host)
    }

    fn join(&mut self, host: HostId) -> Result<(), Violation> {
        let now = self.instant();
        let virtual_now = self.now();
        if let Some(process) = &mut self.hosts[host].process {
            process.agent = Agent::Joining;
            process.joins += 1;
            process.changed_at = virtual_now;
            process
                .machine
                .join(30_000 + host as u16, None, process.join_timeout, now);
        }
        self.after_node(host)?;
        // The driver's thread wakes at once: a deadline that is already due is a reason to tick.
        self.arm_node(host);
        Ok(())
    }

    fn kill(&mut self, host: HostId, silently: bool) {
        let now = self.now();
        let Some(process) = self.hosts[host].process.take() else {
            return;
        };
        let fault = self.hosts[host].last_fault;
        self.expect_notice(&process, fault);
        if let Some(conn) = process.conn {
            if silently {
                self.network.silence(conn);
            } else if self.dice.chance(50) {
                self.network.close(conn, End::Node, &mut self.dice, &mut self.queue);
            } else {
                self.network.release(conn, End::Node);
                let told_within = self.options.delay.1 * 4;
                self.network.sever(conn, told_within, &mut self.dice, &mut self.queue);
            }
        }
        self.hosts[host].last_fault = now;
        self.hosts[host].stalled_until = now;
        self.deferred.remove(&Some(host));
        self.hosts[host].exits.push(Exit::Killed);
    }

    /// Survivors must learn of this in time, if nothing else goes wrong meanwhile.
    fn expect_notice(&mut self, process: &Process, fault: Time) {
        let Some(round) = process.running().map(|placement| placement.round) else {
            return;
        };
        let loss = Loss {
            round,
            at: self.now(),
            fault,
        };
        let within = self.ledger.notice_bound(self.options.delay.1);
        self.queue.push(self.now() + within, Event::Noticed(loss));
    }

    /// The agent says goodbye, closes its connection and ends.
    fn leave(&mut self, host: HostId, reason: &str, exit: Exit) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        process.machine.leave(reason.to_owned());
        process.agent = Agent::Stopping { again: false };
        self.after_node(host)?;
        let Some(process) = self.hosts[host].process.take() else {
            return Ok(());
        };
        self.ledger.check_answers(&process)?;
        if let Some(conn) = process.conn {
            self.network.close(conn, End::Node, &mut self.dice, &mut self.queue);
        }
        self.remark(|| format!("host{host} exits: {exit:?}"));
        self.hosts[host].exits.push(exit);
        Ok(())
    }

    fn stop_workers(&mut self, host: HostId, again: bool) {
        let after = self.dice.duration(self.options.stop);
        let at = self.now() + after;
        if let Some(process) = &mut self.hosts[host].process {
            process.agent = Agent::Stopping { again };
            let pid = process.pid;
            self.queue.push(at, Event::Stopped(host, pid));
        }
    }

    fn on_stopped(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        match self.process(host, pid).map(|process| process.agent.clone()) {
            Some(Agent::Stopping { again: true }) => self.join(host),
            Some(Agent::Stopping { again: false }) => {
                let why = self.hosts[host]
                    .process
                    .as_ref()
                    .map(|p| format!("{:?}", p.machine.view()));
                self.leave(host, "the job is over", Exit::Closed(why.unwrap_or_default()))
            }
            _ => Ok(()),
        }
    }

    // Connections.

    fn on_syn(&mut self, host: HostId, pid: u64) {
        let back = self.network.delay(&mut self.dice);
        let now = self.now();
        if !self.coordinator.up {
            let refused = Event::ConnectFailed(host, pid, "connection refused");
            return self.queue.push(now + back, refused);
        }
        let conn = self.network.open(host, pid);
        self.coordinator.accept(conn, host);
        if self.network.cut(host, End::Node, now).is_some() {
            self.network.silence(conn);
            let failed = Event::ConnectFailed(host, pid, "timed out");
            return self.queue.push(now + CONNECT_TIMEOUT, failed);
        }
        self.queue.push(now + back, Event::Connected(host, pid, conn));
    }

    fn on_connected(&mut self, host: HostId, pid: u64, conn: SessionId) -> Result<(), Violation> {
        let now = self.instant();
        if self.process(host, pid).is_none() {
            self.network.close(conn, End::Node, &mut self.dice, &mut self.queue);
            return Ok(());
        }
        if let Some(process) = self.process(host, pid) {
            process.connected(conn);
            process.machine.on_connected(now);
        }
        self.after_node(host)
    }

    fn on_eof(&mut self, conn: SessionId, to: End) -> Result<(), Violation> {
        let Some((host, pid)) = self.network.holder(conn, to) else {
            return Ok(());
        };
        self.network.release(conn, to);
        let now = self.instant();
        match to {
            End::Coordinator => {
                self.coordinator.forget(conn);
                self.ledger.on_disconnected(conn);
                self.coordinator.machine.on_disconnected(conn, now);
                self.after_coordinator()
            }
            End::Node => {
                let Some(process) = self.process(host, pid).filter(|p| p.conn == Some(conn)) else {
                    return Ok(());
                };
                process.conn = None;
                process
                    .machine
                    .on_disconnected("the connection ended".to_owned(), false, now);
                self.after_node(host)
            }
        }
    }

    fn coordinator_reads(&mut self, conn: SessionId, bytes: &[u8]) -> Result<(), Violation> {
        let Some(message) = self.coordinator.read(conn, bytes)? else {
            return Ok(());
        };
        self.remark(|| format!("coordinator reads {message:?}"));
        let life = self.coordinator.incarnation;
        self.ledger.on_message(conn, &message, &self.coordinator.machine, life);
        let now = self.instant();
        self.coordinator.handle(conn, message, now);
        self.after_coordinator()
    }

    fn node_reads(&mut self, conn: SessionId, bytes: &[u8]) -> Result<(), Violation> {
        let Some((host, pid)) = self.network.holder(conn, End::Node) else {
            return Ok(());
        };
        let now = self.instant();
        let Some(process) = self.process(host, pid).filter(|p| p.conn == Some(conn)) else {
            return Ok(());
        };
        let Some(message) = process.read(bytes)? else {
            return Ok(());
        };
        let text = format!("host{host} reads {message:?}");
        process.machine.on_message(message, now);
        self.remark(|| text);
        self.after_node(host)
    }

    // Deadlines.

    fn tick_coordinator(&mut self) -> Result<(), Violation> {
        if self.coordinator.tick_at.is_none_or(|at| at > self.now()) {
            return Ok(());
        }
        self.coordinator.tick_at = None;
        let now = self.instant();
        if self.coordinator.machine.next_deadline().is_some_and(|at| at <= now) {
            self.coordinator.machine.on_tick(now);
            if self.coordinator.machine.next_deadline().is_some_and(|at| at <= now) {
                return Err(Violation(
                    "the coordinator's tick changed nothing: it would spin".to_owned(),
                ));
            }
        }
        self.after_coordinator()
    }

    fn tick_node(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        let (now, virtual_now) = (self.instant(), self.now());
        let Some(process) = self.process(host, pid) else {
            return Ok(());
        };
        if process.tick_at.is_none_or(|at| at > virtual_now) {
            return Ok(());
        }
        process.tick_at = None;
        if process.machine.next_deadline().is_some_and(|at| at <= now) {
            process.machine.on_tick(now);
            if process.machine.next_deadline().is_some_and(|at| at <= now) {
                return Err(Violation(format!("host{host}'s tick changed nothing: it would spin")));
            }
        }
        self.after_node(host)
    }

    fn arm_node(&mut self, host: HostId) {
        let (origin, now) = (self.origin, self.now());
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        let Some(deadline) = process.machine.next_deadline() else {
            return;
        };
        let at = deadline.saturating_duration_since(origin).max(now);
        if process.tick_at.is_none_or(|tick_at| at < tick_at) {
            process.tick_at = Some(at);
            let pid = process.pid;
            self.queue.push(at, Event::NodeTick(host, pid));
        }
    }

    fn arm_coordinator(&mut self) {
        let Some(deadline) = self.coordinator.machine.next_deadline() else {
            return;
        };
        let at = deadline.saturating_duration_since(self.origin).max(self.now());
        if self.coordinator.tick_at.is_none_or(|tick_at| at < tick_at) {
            self.coordinator.tick_at = Some(at);
            self.queue.push(at, Event::CoordinatorTick);
        }
    }

    // After a machine was called: perform what it asks for, and check.

    fn after_coordinator(&mut self) -> Result<(), Violation> {
        let commands = self.coordinator.machine.take_commands();
        self.ledger
            .check_decision(&self.coordinator.machine, &commands, self.coordinator.incarnation)?;
        for command in commands {
            match command {
                Command::Send { session, message } => {
                    self.remark(|| format!("coordinator sends {} {message:?}", session.0));
                    let bytes = host::coordinator_bytes(&message);
                    self.send(session, End::Coordinator, bytes);
                }
                Command::End { session } => {
                    self.network
                        .close(session, End::Coordinator, &mut self.dice, &mut self.queue);
                    self.coordinator.forget(session);
                    self.ledger.on_disconnected(session);
                    let now = self.instant();
                    self.coordinator.machine.on_disconnected(session, now);
                }
                Command::Note { text, .. } => self.remark(|| format!("coordinator: {text}")),
            }
        }
        self.arm_coordinator();
        Ok(())
    }

    fn after_node(&mut self, host: HostId) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        for command in process.machine.take_commands() {
            let Some(process) = &mut self.hosts[host].process else {
                break;
            };
            let (pid, conn) = (process.pid, process.conn);
            match (command, conn) {
                (NodeCommand::Connect, _) => {
                    let delay = self.network.delay(&mut self.dice);
                    let now = self.now();
                    if self.network.cut(host, End::Coordinator, now).is_some() {
                        let failed = Event::ConnectFailed(host, pid, "timed out");
                        self.queue.push(now + CONNECT_TIMEOUT, failed);
                    } else {
                        self.queue.push(now + delay, Event::Syn(host, pid));
                    }
                }
                (NodeCommand::Send(message), Some(conn)) => {
                    self.ledger.count_from_node();
                    let bytes = host::node_bytes(&message);
                    self.send(conn, End::Node, bytes);
                }
                (NodeCommand::Disconnect, Some(conn)) => {
                    process.conn = None;
                    self.network.close(conn, End::Node, &mut self.dice, &mut self.queue);
                }
                (NodeCommand::Send(NodeMessage::Hello(_)), None) => {
                    return Err(Violation(format!("host{host} says Hello without a connection")));
                }
                (NodeCommand::Send(_) | NodeCommand::Disconnect, None) => {}
            }
        }
        self.after_agent(host)?;
        self.arm_node(host);
        Ok(())
    }

    /// One frame, now and then in two parts.
    fn send(&mut self, conn: SessionId, from: End, bytes: Bytes) {
        let cut = if self.dice.chance(10) { bytes.len() / 2 } else { 0 };
        for part in [bytes.slice(..cut), bytes.slice(cut..)] {
            if !part.is_empty() {
                self.network
                    .send(conn, from, Some(part), &mut self.dice, &mut self.queue);
            }
        }
    }

    /// What the agent makes of its handler's state.
    fn after_agent(&mut self, host: HostId) -> Result<(), Violation> {
        let now = self.now();
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        if let Some(outcome) = process.machine.take_outcome() {
            process.answers += 1;
            process.changed_at = now;
            self.ledger.check_outcome(process, &outcome)?;
            match outcome {
                Ok(placement) => {
                    process.agent = Agent::Running(placement.clone());
                    self.hosts[host].placements.push(placement);
                }
                // An agent that is about to go does so itself.
                Err(_) if matches!(process.agent, Agent::Stopping { .. }) => return Ok(()),
                Err(error) => return self.leave(host, "the join failed", Exit::Join(error)),
            }
        }
        let Some(process) = &self.hosts[host].process else {
            return Ok(());
        };
        if let Agent::Running(_) = process.agent {
            let view = process.machine.view();
            if view.closed.is_some() || view.failed.is_some() {
                self.stop_workers(host, false);
            } else if view.waiting > 0 {
                if view.reason.is_empty() {
                    return Err(Violation(format!("host{host} is told to re-form without a reason")));
                }
                self.stop_workers(host, true);
            }
        }
        Ok(())
    }
}
