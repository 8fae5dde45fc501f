//! The drivers' part: passes bytes and deadlines to the machines, performs their commands, and calls the checks.

use std::time::Duration;

use bytes::Bytes;

use super::event::{Event, REFUSED};
use super::host::{self, Agent, Exit, Host};
use super::ledger::Known;
use super::options::run_id;
use super::simulation::Simulation;
use crate::engine::paths::{End, HostId};
use crate::worlds::Violation;
use elastic_rs::rendezvous::coordinator::machine::Command;
use elastic_rs::rendezvous::messages::codec::CodecError;
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, NodeMessage};
use elastic_rs::rendezvous::node::{JoinError, NodeCommand};
use elastic_rs::rendezvous::run::SessionId;

/// How long a node waits for a connection attempt without an answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Simulation {
    // Connections.

    pub(super) fn on_syn(&mut self, host: HostId, pid: u64) {
        let back = self.engine.transit();
        let now = self.now();
        if !self.coordinator.up {
            return self.engine.push(now + back, Event::ConnectFailed(host, pid, REFUSED));
        }
        let conn = self.network.open(host, pid);
        self.coordinator.accept(conn, host, self.options.odd_hosts.seen_as(host));
        if self.engine.paths.cut_now(host, End::Node, now).is_some() {
            self.network.silence(conn);
            let failed = Event::ConnectFailed(host, pid, "timed out");
            return self.engine.push(now + CONNECT_TIMEOUT, failed);
        }
        self.engine.push(now + back, Event::Connected(host, pid, conn));
    }

    pub(super) fn on_connected(&mut self, host: HostId, pid: u64, conn: SessionId) -> Result<(), Violation> {
        let now = self.instant();
        if self.process(host, pid).is_none() {
            self.network.close(conn, End::Node, &mut self.engine);
            return Ok(());
        }
        if let Some(process) = self.process(host, pid) {
            process.connected(conn);
            process.machine.on_connected(now);
        }
        self.after_node(host)
    }

    pub(super) fn on_eof(&mut self, conn: SessionId, to: End) -> Result<(), Violation> {
        let Some((host, pid)) = self.network.holder(conn, to) else {
            return Ok(());
        };
        self.network.release(conn, to);
        let now = self.instant();
        match to {
            End::Coordinator => {
                self.coordinator.forget(conn);
                self.ledger_of(host).on_eof(conn);
                let who = self.coordinator.machine.node_of(conn);
                self.coordinator.machine.on_disconnected(conn, now);
                // Every other connection is of a node whose port the coordinator has reached.
                if let Some((run_id, node)) = who.filter(|_| {
                    self.options.life_ports && conn.0.is_multiple_of(2) && self.process(host, pid).is_none()
                }) {
                    self.coordinator.machine.on_dead(&run_id, node, now);
                }
                self.after_coordinator()
            }
            End::Node => {
                let Some(process) = self.process(host, pid).filter(|p| p.conn == Some(conn)) else {
                    return Ok(());
                };
                process.conn = None;
                process.machine.on_disconnected("the connection ended".to_owned(), false, now);
                self.after_node(host)
            }
        }
    }

    pub(super) fn coordinator_reads(&mut self, conn: SessionId, bytes: &[u8]) -> Result<(), Violation> {
        let Some(host) = self.coordinator.host_of(conn) else { return Ok(()) };
        let message = match self.coordinator.read(conn, bytes) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            Err(error @ CodecError::Version { .. }) if self.options.odd_hosts.versions.contains(&host) => {
                self.turn_away(conn, &error);
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        self.engine.remark(|| format!("coordinator reads {message:?}"));
        let (incarnation, now) = (self.coordinator.incarnation, self.instant());
        let run = self.options.odd_hosts.run_of(host);
        let known = match &message {
            NodeMessage::Hello(hello) => self.ledgers[run].known(&self.coordinator.machine, hello, now),
            _ => Known::default(),
        };
        self.coordinator.handle(conn, message.clone(), now);
        let commands = self.coordinator.machine.take_commands();
        let refused = commands.iter().find_map(|command| match command {
            Command::Send { session, message: CoordinatorMessage::Rejected { reason } } if *session == conn => {
                Some(reason)
            }
            _ => None,
        });
        match refused {
            Some(reason) => self.ledgers[run].check_refusal(&message, reason)?,
            None => self.ledgers[run].on_message(conn, &message, known, &self.coordinator.machine, incarnation),
        }
        self.obey_coordinator(commands)
    }

    /// The driver's handling of a connection with another version: it sends the refusal, and closes.
    fn turn_away(&mut self, conn: SessionId, error: &CodecError) {
        let rejected = CoordinatorMessage::Rejected { reason: error.to_string() };
        self.send(conn, End::Coordinator, host::coordinator_bytes(&rejected));
        self.network.close(conn, End::Coordinator, &mut self.engine);
        self.coordinator.forget(conn);
    }

    pub(super) fn node_reads(&mut self, conn: SessionId, bytes: &[u8]) -> Result<(), Violation> {
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
        self.engine.remark(|| text);
        self.after_node(host)
    }

    // Deadlines.

    pub(super) fn tick_coordinator(&mut self) -> Result<(), Violation> {
        if !self.coordinator.alarm.rings(self.engine.now()) {
            return Ok(());
        }
        let now = self.instant();
        if self.coordinator.machine.next_deadline().is_some_and(|at| at <= now) {
            self.coordinator.machine.on_tick(now);
            self.count_tick()?;
            if self.coordinator.machine.next_deadline().is_some_and(|at| at <= now) {
                return Err(Violation::contract("the coordinator's tick changed nothing: it would spin".to_owned()));
            }
        }
        self.after_coordinator()
    }

    /// Checks that ticks do not loop. A deadline belongs to a node's lease or grace, to the close of a round, or to the wait of a
    /// restarted coordinator. Each of the first kind may be looked at twice, so more ticks than that in a virtual second are a loop.
    fn count_tick(&mut self) -> Result<(), Violation> {
        let second = self.now().as_secs();
        self.ticks = if self.ticks.0 == second { (second, self.ticks.1 + 1) } else { (second, 1) };
        if self.ticks.1 > 2 * self.hosts.len() as u64 + 20 {
            return Err(Violation::contract(format!("{} ticks of the coordinator in one second", self.ticks.1)));
        }
        Ok(())
    }

    pub(super) fn tick_node(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        let (now, virtual_now) = (self.instant(), self.now());
        let Some(process) = self.process(host, pid) else {
            return Ok(());
        };
        if !process.alarm.rings(virtual_now) {
            return Ok(());
        }
        if process.machine.next_deadline().is_some_and(|at| at <= now) {
            process.machine.on_tick(now);
            if process.machine.next_deadline().is_some_and(|at| at <= now) {
                return Err(Violation::contract(format!("host{host}'s tick changed nothing: it would spin")));
            }
        }
        self.after_node(host)
    }

    pub(super) fn arm_node(&mut self, host: HostId) {
        let Some(process) = &mut self.hosts[host].process else { return };
        let Some(deadline) = process.machine.next_deadline() else { return };
        if let Some(at) = process.alarm.set(self.engine.due(deadline)) {
            self.engine.push(at, Event::NodeTick(host, process.pid));
        }
    }

    pub(super) fn arm_coordinator(&mut self) {
        let Some(deadline) = self.coordinator.machine.next_deadline() else { return };
        if let Some(at) = self.coordinator.alarm.set(self.engine.due(deadline)) {
            self.engine.push(at, Event::CoordinatorTick);
        }
    }

    // After a machine was called: perform its commands, and check.

    pub(super) fn after_coordinator(&mut self) -> Result<(), Violation> {
        let commands = self.coordinator.machine.take_commands();
        self.obey_coordinator(commands)
    }

    /// Check the decisions of each run separately: runs do not affect one another.
    fn judge(&mut self, commands: &[Command]) -> Result<(), Violation> {
        let (incarnation, now) = (self.coordinator.incarnation, self.instant());
        for run in 0..self.ledgers.len() {
            let (coordinator, odd_hosts) = (&self.coordinator, &self.options.odd_hosts);
            let concerns = |command: &&Command| match command {
                Command::Send { session, .. } | Command::End { session } => {
                    coordinator.host_of(*session).is_some_and(|host| odd_hosts.run_of(host) == run)
                }
                Command::Record { run_id: of, .. }
                | Command::Tally { run_id: of, .. }
                | Command::Forget { run_id: of, .. }
                | Command::Exclusions { run_id: of, .. } => *of == run_id(run),
                Command::EmptyStore | Command::HandOver | Command::Warn { .. } => false,
            };
            let ledger = &mut self.ledgers[run];
            for command in commands.iter().filter(concerns) {
                match command {
                    Command::Send { session, message } => {
                        let (placement, addr) = (message.placement(), coordinator.address_of(*session));
                        placement
                            .zip(addr)
                            .map_or(Ok(()), |(placement, addr)| ledger.check_host(placement, addr, now))?;
                    }
                    Command::Exclusions { hosts, .. } => ledger.on_exclusions(hosts),
                    Command::Record { record, .. } => ledger.chronicle.check(record, incarnation)?,
                    Command::Forget { .. } => ledger.chronicle.forget(),
                    Command::Tally { .. }
                    | Command::End { .. }
                    | Command::EmptyStore
                    | Command::HandOver
                    | Command::Warn { .. } => {}
                }
            }
            let rounds = ledger.rounds;
            coordinator.machine.check().map_err(Violation::contract)?;
            ledger.check_decision(&coordinator.machine, commands.iter().filter(concerns), incarnation)?;
            if self.ledgers[run].rounds > rounds {
                self.ledgers[run].check_one_world(incarnation, self.bound_hosts(run))?;
            }
        }
        self.note_worlds(commands)
    }

    /// The hosts of a run whose workers of earlier rounds must be dead when a round forms: those with guards, and others that are awake.
    /// Guards of the agent in the coordinator's process have no deadline.
    fn bound_hosts(&self, run: usize) -> impl Iterator<Item = (HostId, &Host)> {
        let guarded = |number: HostId, host: &Host| host.ours.is_some() && self.options.coordinator_on != Some(number);
        self.hosts_of(run)
            .filter(move |(number, host)| guarded(*number, host) || self.stalled_until(*number) < self.now())
    }

    fn obey_coordinator(&mut self, commands: Vec<Command>) -> Result<(), Violation> {
        self.judge(&commands)?;
        for command in commands {
            match command {
                Command::Send { session, message } => {
                    self.engine.remark(|| format!("coordinator sends {} {message:?}", session.0));
                    let bytes = host::coordinator_bytes(&message);
                    self.send(session, End::Coordinator, bytes);
                }
                Command::End { session } => {
                    self.network.close(session, End::Coordinator, &mut self.engine);
                    if let Some(host) = self.coordinator.host_of(session) {
                        self.ledger_of(host).on_disconnected(session);
                    }
                    self.coordinator.forget(session);
                    let now = self.instant();
                    self.coordinator.machine.on_disconnected(session, now);
                }
                Command::Record { record, .. } => self.engine.remark(|| format!("coordinator: {record:?}")),
                Command::Tally { tally, .. } => self.engine.remark(|| format!("counted: {tally:?}")),
                Command::Forget { run_id, .. } => self.engine.remark(|| format!("forgotten: {run_id}")),
                Command::Exclusions { hosts, .. } => self.engine.remark(|| format!("kept out: {hosts:?}")),
                Command::Warn { text, .. } => self.engine.remark(|| text),
                Command::EmptyStore => self.engine.remark(|| "the store is emptied".to_owned()),
                Command::HandOver => {} // nobody has a list here
            }
        }
        self.arm_coordinator();
        Ok(())
    }

    pub(super) fn after_node(&mut self, host: HostId) -> Result<(), Violation> {
        self.flush_node(host)?;
        self.after_agent(host)?;
        self.arm_node(host);
        Ok(())
    }

    /// Perform the commands of a node's machine.
    pub(super) fn flush_node(&mut self, host: HostId) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        if let Some(addr) = process.machine.wanted_store() {
            process.machine.on_store_opened(addr, 30_000 + host as u16);
        }
        for command in process.machine.take_commands() {
            let Some(process) = &mut self.hosts[host].process else {
                break;
            };
            let (pid, conn) = (process.pid, process.conn);
            match (command, conn) {
                (NodeCommand::Connect, _) => {
                    let delay = self.engine.transit();
                    let now = self.now();
                    if self.engine.paths.cut_now(host, End::Coordinator, now).is_some() {
                        let failed = Event::ConnectFailed(host, pid, "timed out");
                        self.engine.push(now + CONNECT_TIMEOUT, failed);
                    } else {
                        self.engine.push(now + delay, Event::Syn(host, pid));
                    }
                }
                (NodeCommand::Send(message), Some(conn)) => {
                    self.ledger_of(host).count_from_node();
                    let bytes = match self.options.odd_hosts.versions.contains(&host) {
                        true => host::foreign_bytes(&message),
                        false => host::node_bytes(&message),
                    };
                    self.send(conn, End::Node, bytes);
                }
                (NodeCommand::Disconnect, Some(conn)) => {
                    process.conn = None;
                    self.network.close(conn, End::Node, &mut self.engine);
                }
                (NodeCommand::Send(NodeMessage::Hello(_)), None) => {
                    return Err(Violation::contract(format!("host{host} says Hello without a connection")));
                }
                (NodeCommand::Send(_) | NodeCommand::Disconnect, None) => {}
                // Only coordinators listen in this world, and they are not always up.
                (NodeCommand::Probe, _) => process.machine.on_probed(false),
            }
        }
        Ok(())
    }

    /// Send one frame, sometimes in two parts.
    pub(super) fn send(&mut self, conn: SessionId, from: End, bytes: Bytes) {
        let cut = if self.engine.dice.chance(10) { bytes.len() / 2 } else { 0 };
        for part in [bytes.slice(..cut), bytes.slice(cut..)] {
            if !part.is_empty() {
                self.network.send(conn, from, Some(part), &mut self.engine);
            }
        }
    }

    /// The agent reacts to its handler's state.
    pub(super) fn after_agent(&mut self, host: HostId) -> Result<(), Violation> {
        if self.hosts[host].ours.is_some() {
            return self.after_ours(host);
        }
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        if process.machine.take_lost_survivors().is_some() {
            process.workers.end_with_the_lease();
        }
        if let Some(outcome) = process.machine.take_outcome() {
            process.answers += 1;
            self.ledgers[self.options.odd_hosts.run_of(host)].check_outcome(process, &outcome)?;
            match outcome {
                Ok(placement) => {
                    process.agent = Agent::Running(placement.clone());
                    self.hosts[host].placements.push(placement.clone());
                    self.on_elastic_placement(host, &placement)?;
                }
                // An agent that is about to end does so itself.
                Err(_) if matches!(process.agent, Agent::Stopping { .. }) => return Ok(()),
                Err(JoinError::Timeout { .. }) if self.options.rejoin => return self.join(host),
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
                    return Err(Violation::contract(format!("host{host} must re-form without a reason")));
                }
                return self.fall_back(host);
            } else {
                return self.follow_change(host);
            }
        }
        Ok(())
    }
}
