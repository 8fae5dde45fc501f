//! The drivers' part: sessions of nodes, messages between processes, deadlines, and the ports of nodes.

use std::net::IpAddr;
use std::time::Duration;

use super::agent::RUN_ID;
use super::event::{Event, Knock, Payload, Pid};
use super::host::Host;
use super::job::Job;
use super::network::{Purpose, travels};
use super::peers::Outcome;
use super::plan::Mutation;
use crate::engine::paths::{End, HostId};
use crate::worlds::{Violation, ensure_contract};
use elastic_rs::rendezvous::coordinator::ensemble::PeerMessage;
use elastic_rs::rendezvous::coordinator::machine::Command;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, NodeId, NodeMessage, Placed, Placement, Round,
};
use elastic_rs::rendezvous::node::NodeCommand;
use elastic_rs::rendezvous::quorum::replica::Message;
use elastic_rs::rendezvous::run::{Ends, SessionId};

/// How often the port of a process is tried at first, for how long so often, and for how long at all.
const KNOCKS: (Duration, Duration, Duration) =
    (Duration::from_millis(10), Duration::from_millis(200), Duration::from_secs(10));

/// Most ticks of a process at one instant. A node that has lost its connection tries the next endpoint at once.
const MOST_TICKS: u32 = 10;

impl Job {
    /// Let a process do what it has to now, until nothing is left.
    pub(super) fn settle(&mut self, host: HostId) -> Result<(), Violation> {
        while self.run_coordinator(host)? | self.run_node(host) | self.run_agent(host)? {}
        let now = self.engine.now();
        let at = &mut self.hosts[host];
        let deadline = at.process.as_ref().and_then(|process| process.next_deadline());
        let due = deadline.map(|deadline| at.time_of(deadline).max(now));
        if let (Some(due), Some(process)) = (due, &mut at.process)
            && let Some(due) = process.alarm.set(due)
        {
            self.engine.push(due, Event::Tick(host, process.pid));
        }
        Ok(())
    }

    /// Time has passed for a process.
    pub(super) fn tick(&mut self, host: HostId, pid: Pid) -> Result<(), Violation> {
        let now = self.engine.now();
        let clock = self.hosts[host].clock(now);
        let Some(process) = self.hosts[host].process(pid) else { return Ok(()) };
        if !process.alarm.rings(now) {
            return Ok(());
        }
        if let Some(part) = &mut process.part {
            part.succession.on_tick(clock);
            part.machine.on_tick(clock);
        }
        process.node.on_tick(clock);
        process.ticks = if process.ticks.0 == now { (now, process.ticks.1 + 1) } else { (now, 1) };
        if process.ticks.1 > MOST_TICKS {
            return Err(Violation::contract(format!("n{host} ticks {MOST_TICKS} times at one instant: it would spin")));
        }
        self.settle(host)
    }

    // The node.

    fn run_node(&mut self, host: HostId) -> bool {
        let Some(process) = &mut self.hosts[host].process else { return false };
        let commands = process.node.take_commands();
        let did = !commands.is_empty();
        for command in commands {
            let Some(process) = &mut self.hosts[host].process else { break };
            match (command, process.session) {
                (NodeCommand::Connect, _) => {
                    let (pid, place) = (process.pid, process.node.place());
                    let conn = self.network.dial((host, pid), place, Purpose::Session, &mut self.engine);
                    self.hosts[host].process.iter_mut().for_each(|process| process.session = Some(conn));
                }
                (NodeCommand::Send(message), Some(conn)) => {
                    self.network.send(conn, End::Node, Payload::FromNode(Box::new(message)), &mut self.engine);
                }
                (NodeCommand::Disconnect, Some(conn)) => {
                    process.session = None;
                    self.network.close(conn, End::Node, false, &mut self.engine);
                }
                (NodeCommand::Probe, _) => process.node.on_probed(false),
                (NodeCommand::Send(_) | NodeCommand::Disconnect, None) => {}
            }
        }
        did
    }

    pub(super) fn on_session_opened(&mut self, host: HostId, conn: SessionId) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        match self.hosts[host].process.as_mut().filter(|process| process.session == Some(conn)) {
            Some(process) => process.node.on_connected(clock),
            None => self.network.close(conn, End::Node, false, &mut self.engine),
        }
        self.settle(host)
    }

    /// The node's connection has ended, or was not opened.
    pub(super) fn on_session_lost(
        &mut self,
        host: HostId,
        conn: SessionId,
        how: Outcome,
        was_open: bool,
    ) -> Result<(), Violation> {
        let now = self.engine.now();
        let clock = self.hosts[host].clock(now);
        let Host { process: Some(process), renewed_until, .. } = &mut self.hosts[host] else { return Ok(()) };
        if process.session != Some(conn) {
            return Ok(());
        }
        process.session = None;
        match how {
            _ if was_open => process.node.on_disconnected("the connection ended".to_owned(), false, clock),
            Outcome::Refused => {
                if self.options.mutation == Some(Mutation::RefusalRenews) {
                    *renewed_until = now + self.options.settings.lease();
                }
                process.node.on_connect_failed("connection refused".to_owned(), true, clock);
            }
            Outcome::Silent | Outcome::Ended { .. } => {
                process.node.on_connect_failed("no answer".to_owned(), false, clock);
            }
        }
        self.settle(host)
    }

    pub(super) fn node_reads(
        &mut self,
        host: HostId,
        conn: SessionId,
        message: CoordinatorMessage,
    ) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        let Some(process) = self.hosts[host].process.as_mut().filter(|process| process.session == Some(conn)) else {
            return Ok(());
        };
        let before = process.node.view().round;
        process.node.on_message(message, clock);
        let after = process.node.view().round;
        ensure_contract(after >= before, || format!("n{host} goes back from round {before} to {after}"))?;
        self.settle(host)
    }

    // The coordinator.

    fn run_coordinator(&mut self, host: HostId) -> Result<bool, Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        let Some(process) = &mut self.hosts[host].process else { return Ok(false) };
        let Some(part) = &mut process.part else { return Ok(false) };
        // What a leader has decided leaves before it is recorded: a mistake.
        let early = self.options.mutation == Some(Mutation::SaidEarly) && part.succession.leads();
        let early = if early { part.machine.take_commands() } else { Vec::new() };
        let todo = part.succession.take(&mut part.machine, clock);
        part.machine.check().map_err(Violation::contract)?;
        let did = !early.is_empty() || !todo.commands.is_empty() || !todo.peers.is_empty() || todo.changed;
        for (place, message) in todo.peers {
            if let Some(conn) = self.peer(host, place).filter(|peer| peer.is_up).and_then(|peer| peer.conn) {
                self.network.send(conn, End::Node, Payload::Peer(Box::new(message)), &mut self.engine);
            }
        }
        if todo.changed {
            self.on_leads(host)?;
        }
        for command in early.into_iter().chain(todo.commands) {
            self.obey(host, command)?;
        }
        Ok(did)
    }

    /// A process has begun to lead, or has ceased to.
    fn on_leads(&mut self, host: HostId) -> Result<(), Violation> {
        let leads = self.hosts[host].leads();
        self.engine.remark(|| format!("n{host} {} the run", if leads { "leads" } else { "no longer leads" }));
        if !leads {
            return Ok(());
        }
        self.check_history(host)?;
        if self.options.mutation == Some(Mutation::NobodyIsWaitedFor) {
            self.take_all_for_gone(host);
        }
        Ok(())
    }

    /// The members that have not reported to this new leader are taken for gone, as if each had said goodbye: a mistake.
    fn take_all_for_gone(&mut self, host: HostId) {
        let now = self.engine.now();
        let clock = self.hosts[host].clock(now);
        let members: Vec<_> = (0..self.hosts.len()).filter(|other| *other != host).collect();
        for other in members {
            let Some(hello) = self.introduction_of(other) else { continue };
            let Some(part) = self.hosts[host].part_mut() else { return };
            let session = SessionId(u64::MAX - other as u64);
            part.machine.on_hello(session, hello, ends(other), clock);
            let goodbye = NodeMessage::Leave { reason: "taken for gone".to_owned(), signal: None };
            part.machine.on_message(session, goodbye, clock);
            part.machine.on_disconnected(session, clock);
        }
    }

    /// How a node with workers introduces itself.
    fn introduction_of(&self, host: HostId) -> Option<Hello> {
        self.hosts[host].workers?;
        let process = self.hosts[host].process.as_ref()?;
        let placement = process.placement.as_ref()?;
        let began_with = placement.began_with();
        let Placement { round, rank, world_size, world, restart, host, .. } = *placement;
        let placed = Placed { round, rank, world_size, world, active: true, restart, host, began_with };
        Some(Hello { placed: Some(placed), ..process.hello.clone() })
    }

    fn obey(&mut self, host: HostId, command: Command) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        match command {
            Command::Send { session, message } => {
                self.told.on_message(host, &message)?;
                self.network.send(session, End::Coordinator, Payload::ToNode(Box::new(message)), &mut self.engine);
            }
            Command::End { session } => {
                self.network.close(session, End::Coordinator, false, &mut self.engine);
                if let Some(part) = self.hosts[host].part_mut() {
                    part.sessions.remove(&session);
                    part.machine.on_disconnected(session, clock);
                }
            }
            Command::Exclusions { hosts, .. } => self.told.on_exclusions(&hosts),
            Command::Record { record, .. } => {
                self.engine.remark(|| format!("n{host}: {}", record.text.unwrap_or_default()));
            }
            Command::Warn { .. }
            | Command::Tally { .. }
            | Command::Forget { .. }
            | Command::EmptyStore
            | Command::HandOver => {}
        }
        Ok(())
    }

    pub(super) fn coordinator_reads(
        &mut self,
        host: HostId,
        conn: SessionId,
        message: NodeMessage,
    ) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        let peer = self.network.holder(conn, End::Node);
        let Some(part) = self.hosts[host].part_mut() else { return Ok(()) };
        match message {
            NodeMessage::Hello(hello) => {
                if let Some(message) = part.succession.turns_away(Some(&hello.run_id), clock) {
                    let message = Payload::ToNode(Box::new(message));
                    self.network.send(conn, End::Coordinator, message, &mut self.engine);
                    self.network.close(conn, End::Coordinator, false, &mut self.engine);
                    return Ok(());
                }
                let Some((other, pid)) = peer else { return Ok(()) };
                let run = part.machine.run(RUN_ID);
                let is_known = run.is_some_and(|run| run.knows(hello.node));
                if run.is_none_or(|run| run.round() == Round(0)) {
                    self.told.on_member(&hello);
                }
                part.machine.on_hello(conn, *hello, ends(other), clock);
                let reached = travels(host, other, &mut self.engine).and(travels(other, host, &mut self.engine));
                let lives = self.hosts[other].process(pid).is_some();
                if let Some(part) = self.hosts[host].part_mut() {
                    part.sessions.insert(conn, reached.filter(|_| lives).map(|_| (other, pid)));
                }
                if let Some(workers) = self.hosts[other].workers.as_mut().filter(|_| lives && is_known) {
                    workers.is_torn = false;
                }
            }
            message => part.machine.on_message(conn, message, clock),
        }
        self.settle(host)
    }

    /// A session has ended at the coordinator.
    pub(super) fn on_node_gone(&mut self, host: HostId, conn: SessionId) -> Result<(), Violation> {
        let now = self.engine.now();
        let clock = self.hosts[host].clock(now);
        let Some(process) = &mut self.hosts[host].process else { return Ok(()) };
        let by = (host, process.pid);
        let Some(part) = &mut process.part else { return Ok(()) };
        let reached = part.sessions.remove(&conn);
        let who = part.machine.node_of(conn);
        part.machine.on_disconnected(conn, clock);
        if let (Some((_, node)), Some(reached)) = (who, reached) {
            let of_node = self.hosts.iter_mut().find(|at| at.process.as_ref().is_some_and(|it| it.id == node));
            of_node.and_then(|at| at.workers.as_mut()).into_iter().for_each(|workers| workers.is_torn = true);
            if let Some(at) = reached {
                self.knock(Knock { by, at, node, since: now, pause: KNOCKS.0 });
            }
        }
        self.settle(host)
    }

    /// Try the port of a process whose session has ended.
    pub(super) fn knock(&mut self, knock: Knock) {
        let now = self.engine.now();
        let Knock { by, at, node, since, pause } = knock;
        if now > since + KNOCKS.2 || self.hosts[by.0].process(by.1).is_none() {
            return;
        }
        let there = &mut self.hosts[at.0];
        let is_refused = there.is_on && there.process(at.1).is_none() && now >= there.closed_at;
        let travels =
            travels(by.0, at.0, &mut self.engine).and_then(|to| Some(to + travels(at.0, by.0, &mut self.engine)?));
        match travels.filter(|_| is_refused) {
            Some(after) => self.engine.push_after(after, Event::ProcessEnded(by.0, by.1, node)),
            None => {
                let next = if now > since + KNOCKS.1 { pause * 2 } else { pause };
                self.engine.push_after(pause, Event::Knock(Knock { pause: next, ..knock }));
            }
        }
    }

    /// The port of a node's process is refused.
    pub(super) fn on_process_ended(&mut self, host: HostId, node: NodeId) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        self.hosts[host].part_mut().into_iter().for_each(|part| part.machine.on_dead(RUN_ID, node, clock));
        self.settle(host)
    }

    /// A message of the process at another endpoint, over the connection of that one which counts.
    pub(super) fn on_peer_message(
        &mut self,
        host: HostId,
        conn: SessionId,
        message: PeerMessage,
    ) -> Result<(), Violation> {
        let clock = self.hosts[host].clock(self.engine.now());
        let Some(process) = &mut self.hosts[host].process else { return Ok(()) };
        let Some(part) = &mut process.part else { return Ok(()) };
        let from = part.incoming.iter().find(|(_, (counts, _))| *counts == conn).map(|(place, (_, id))| (*place, *id));
        let Some((place, from)) = from else { return Ok(()) };
        process.knows |= matches!(message, PeerMessage::Quorum(Message::Write(_)));
        part.succession.on_message(place, from, message, clock).map_err(Violation::contract)?;
        self.settle(host)
    }
}

/// The addresses of a connection from this host.
fn ends(from: HostId) -> Ends {
    Ends { peer: address(from), local: [10, 0, 0, 200].into() }
}

/// The address of a host.
pub(super) fn address(host: HostId) -> IpAddr {
    [10, 0, 0, host as u8 + 1].into()
}

/// The endpoint of a listed host.
pub(super) fn endpoint(host: HostId) -> String {
    format!("n{host}:29400")
}
