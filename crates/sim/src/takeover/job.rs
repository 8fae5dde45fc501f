//! The job: its events, and what each of them does.

use std::time::Instant;

use super::checks::Sent;
use super::event::{Event, Payload, Pid};
use super::host::Host;
use super::network::{Network, Purpose};
use super::peers::Outcome;
use super::plan::{Action, Options};
use crate::engine::dice::Dice;
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use crate::engine::{Engine, Happens, Model};
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::Placement;
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::SessionId;

/// A job with a list.
#[derive(Debug)]
pub struct Job {
    pub(super) engine: Engine<Event>,
    pub(super) options: Options,
    pub(super) hosts: Vec<Host>,
    pub(super) network: Network,
    pub(super) told: Sent,
    pub(super) pids: Pid,
    /// Number of the workers that were started last.
    pub(super) started: u64,
    /// Number of faults so far.
    pub(super) faults: u64,
    /// Faults are over.
    pub(super) is_calm: bool,
    /// The job is being ended: no agent is started again.
    pub(super) ends: bool,
}

impl Job {
    /// A job of which nothing has been started.
    pub fn new(seed: u64, options: Options) -> Self {
        // Drawn apart from the plan, so that a plan can be changed by hand.
        let engine = Engine::new(Dice::new(!seed), options.delay);
        let zero = Instant::now();
        Self {
            hosts: options.drift.iter().map(|drift| Host::new(zero, *drift)).collect(),
            engine,
            options,
            network: Network::default(),
            told: Sent::default(),
            pids: 0,
            started: 0,
            faults: 0,
            is_calm: false,
            ends: false,
        }
    }

    /// Keep a line for each event.
    pub fn keep_history(&mut self) {
        self.engine.record.keep_lines();
    }

    /// Something happens now.
    pub fn happens_now(&mut self, action: Action) {
        self.engine.push(self.engine.now(), Event::Act(action));
    }

    /// The node of the process on a host.
    pub fn node(&self, host: HostId) -> Option<&NodeMachine> {
        self.hosts[host].process.as_ref().map(|process| &process.node)
    }

    /// The place of the workers that run on a host.
    pub fn place(&self, host: HostId) -> Option<&Placement> {
        self.hosts[host].workers?;
        self.hosts[host].process.as_ref()?.placement.as_ref()
    }

    /// The hosts whose processes lead.
    pub fn leaders(&self) -> Vec<HostId> {
        (0..self.hosts.len()).filter(|host| self.hosts[*host].leads()).collect()
    }

    /// Number of rounds that were formed, over all histories of the run.
    pub fn rounds(&self) -> u64 {
        self.told.rounds
    }

    /// How often a process has taken over.
    pub fn takeovers(&self) -> u64 {
        self.told.takeovers
    }

    /// How often somebody had to lead soon after a process that led has ended, and did.
    pub fn promises(&self) -> u64 {
        self.told.promises
    }

    /// Digest of all events.
    pub fn digest(&self) -> u64 {
        self.engine.record.digest().0
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.engine.now()
    }

    fn lives(&self, host: HostId, pid: Pid) -> bool {
        self.hosts[host].process.as_ref().is_some_and(|process| process.pid == pid)
    }

    fn at_end(&self, conn: SessionId, end: End) -> Happens {
        let holder = self.network.holder(conn, end).filter(|(host, pid)| self.lives(*host, *pid));
        holder.map_or(Happens::Nowhere, |(host, _)| Happens::In(Some(host)))
    }

    /// An attempt to connect has ended without a connection, or a connection has ended.
    fn on_ended(&mut self, conn: SessionId, to: End, how: Outcome) -> Result<(), Violation> {
        let (Some((host, _)), Some(purpose)) = (self.network.holder(conn, to), self.network.purpose(conn)) else {
            return Ok(());
        };
        let was_established = self.network.is_established(conn);
        self.network.release(conn, to);
        match (to, purpose) {
            (End::Node, Purpose::Peer(place)) if self.peer(host, place).is_some_and(|it| it.conn == Some(conn)) => {
                self.on_peer_lost(host, place, how)
            }
            (End::Node, Purpose::Session) => self.on_session_lost(host, conn, how, was_established),
            (End::Coordinator, Purpose::Session) => self.on_node_gone(host, conn),
            (_, Purpose::Peer(_)) => Ok(()),
        }
    }

    fn deliver(&mut self, conn: SessionId, to: End, payload: Payload) -> Result<(), Violation> {
        let (Some((host, _)), Some(purpose)) = (self.network.holder(conn, to), self.network.purpose(conn)) else {
            return Ok(());
        };
        match (payload, purpose) {
            (Payload::FromNode(message), _) => self.coordinator_reads(host, conn, *message),
            (Payload::ToNode(message), _) => self.node_reads(host, conn, *message),
            (Payload::Introduction(hello), _) => self.on_introduction(host, conn, &hello),
            (Payload::Here(process), Purpose::Peer(place)) => self.on_peer_here(host, place, process),
            (Payload::Here(_), Purpose::Session) => Ok(()),
            (Payload::Peer(message), _) => self.on_peer_message(host, conn, *message),
        }
    }

    /// What the kernel of the host answers to an attempt to connect. A process that stands still has its kernel accept.
    fn on_arrival(&mut self, conn: SessionId) {
        let Some(host) = self.network.target(conn).filter(|host| self.hosts[*host].is_on) else { return };
        let now = self.engine.now();
        let at = &self.hosts[host];
        let listens = at.process.as_ref().filter(|process| process.part.is_some());
        let answer = match listens {
            Some(process) => Ok(process.pid),
            // The kernel still ends the sockets of a process that has ended.
            None if now < at.closed_at => Err(Event::Ended(conn, End::Node, true)),
            None => Err(Event::Refused(conn)),
        };
        self.network.answer(conn, answer, &mut self.engine);
    }
}

impl Model for Job {
    type Event = Event;
    type Broken = Violation;

    fn engine(&mut self) -> &mut Engine<Event> {
        &mut self.engine
    }

    fn happens(&self, event: &Event) -> Happens {
        let of =
            |host: HostId, pid: Pid| if self.lives(host, pid) { Happens::In(Some(host)) } else { Happens::Nowhere };
        match event {
            Event::Act(_)
            | Event::Resume(_)
            | Event::Arrives(_)
            | Event::Guards(..)
            | Event::WorkersEnd(..)
            | Event::Knock(_)
            | Event::MustLead(_) => Happens::Outside,
            Event::Opened(conn) | Event::Refused(conn) => self.at_end(*conn, End::Node),
            Event::TimedOut(conn) if self.network.is_established(*conn) => Happens::Nowhere,
            Event::TimedOut(conn) => self.at_end(*conn, End::Node),
            Event::Deliver(conn, to, _) if !self.network.delivers(*conn, *to) => Happens::Nowhere,
            Event::Deliver(conn, to, _) | Event::Ended(conn, to, _) => self.at_end(*conn, *to),
            Event::Dial(host, pid, ..)
            | Event::Tick(host, pid)
            | Event::WorkersEnded(host, pid)
            | Event::Exit(host, pid)
            | Event::ProcessEnded(host, pid, _) => of(*host, *pid),
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Act(action) => self.act(action)?,
            Event::Resume(host) => self.resume(Some(host))?,
            Event::Arrives(conn) => self.on_arrival(conn),
            Event::Opened(conn) => {
                let Some((host, _)) = self.network.holder(conn, End::Node) else { return Ok(()) };
                if self.network.purpose(conn) == Some(Purpose::Session) {
                    self.network.establish(conn);
                    self.on_session_opened(host, conn)?;
                } else {
                    // The introduction has to be answered within the time for a connection, too.
                    self.on_peer_opened(host, conn);
                }
            }
            Event::Refused(conn) => self.on_ended(conn, End::Node, Outcome::Refused)?,
            Event::TimedOut(conn) => self.give_up(conn)?,
            Event::Deliver(conn, to, payload) => {
                if matches!(payload, Payload::Here(_)) {
                    self.network.establish(conn);
                }
                self.deliver(conn, to, payload)?;
            }
            Event::Ended(conn, to, reset) => self.on_ended(conn, to, Outcome::Ended { reset })?,
            Event::Dial(host, pid, place, attempt) => self.dial_peer(host, pid, place, attempt)?,
            Event::Tick(host, pid) => self.tick(host, pid)?,
            Event::Guards(host, number) => self.look_at_deadline(host, number),
            Event::WorkersEnd(host, number) => self.on_workers_end(host, number),
            Event::WorkersEnded(host, _) => self.settle(host)?,
            Event::Exit(host, _) => self.exit(host),
            Event::Knock(knock) => self.knock(knock),
            Event::ProcessEnded(host, _, node) => self.on_process_ended(host, node)?,
            Event::MustLead(faults) => self.check_led(faults)?,
        }
        self.check()
    }
}

impl Job {
    /// An attempt to connect has had no answer. The kernel there may have accepted it.
    fn give_up(&mut self, conn: SessionId) -> Result<(), Violation> {
        let (Some((host, _)), Some(purpose)) = (self.network.holder(conn, End::Node), self.network.purpose(conn))
        else {
            return Ok(());
        };
        self.network.close(conn, End::Node, false, &mut self.engine);
        match purpose {
            Purpose::Peer(place) => self.on_peer_lost(host, place, Outcome::Silent),
            Purpose::Session => self.on_session_lost(host, conn, Outcome::Silent, false),
        }
    }
}
