//! Actions on a job: agents start, stop, die and leave; processes stand still; paths are cut.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::agent::{Ours, worker_count};
use super::event::{Event, Loss};
use super::host::{self, Agent, Exit, Process};
use super::ledger::Ledger;
use super::options::{Action, run_id};
use super::simulation::Simulation;
use crate::engine::paths::{End, HostId};
use crate::engine::processes::Owner;
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::{Failure, Hello, JoinWorkers, NodeId, NodeMessage, Placement};
use elastic_rs::rendezvous::node::NodeMachine;
use elastic_rs::rendezvous::run::{CoordinatorInstance, Ends, SessionId};
use elastic_rs::signals::Signal;

impl Simulation {
    pub(super) fn act(&mut self, action: Action) -> Result<(), Violation> {
        let now = self.now();
        match action {
            Action::Start(host, timeout) => return self.start(host, timeout),
            Action::Kill(host) => self.kill(host, false),
            Action::PowerOff(host) => self.kill(host, true),
            Action::Terminate(host) => return self.terminate(host, Signal::TERM),
            Action::Interrupt(host) => return self.terminate(host, Signal::INT),
            Action::AskToLeave(host) => return self.ask_to_leave(host),
            Action::Notice(host, left) => return self.take_away(host, left),
            Action::Stall(host, time) => {
                if self.options.coordinator_on == Some(host) {
                    self.act(Action::StallCoordinator(time))?;
                }
                self.stall(Some(host), time);
            }
            Action::Sever(host) => {
                self.engine.processes.note_fault(Some(host), now + Duration::from_secs(2));
                if let Some(conn) = self.hosts[host].process.as_ref().and_then(|p| p.conn) {
                    let noticed_within = self.options.delay.1 * 20;
                    self.network.sever(conn, noticed_within, &mut self.engine);
                }
            }
            Action::Cut(host, to, time, kind) => {
                let until = now + time + self.options.settings.lease();
                self.engine.processes.note_fault(Some(host), until);
                self.engine.paths.cut(host, to, now + time, kind);
            }
            Action::FailWorkers(host) | Action::LoseWorkers(host) | Action::ReportFailure(host)
                if self.hosts[host].ours.is_some() =>
            {
                self.end_workers(host, false);
            }
            Action::ReportDone(host) if self.hosts[host].ours.is_some() => self.end_workers(host, true),
            Action::LoseWorkers(host) => {
                if let Some(process) = self.hosts[host].process.as_mut().filter(|it| it.running().is_some()) {
                    process.workers.lose_all();
                    self.stop_workers(host, true);
                }
            }
            Action::FailWorkers(host) => {
                if self.running(host).is_some() {
                    self.lose_worker(host);
                    self.stop_workers(host, true);
                }
            }
            Action::ReportFailure(host) => {
                let Some(process) = &mut self.hosts[host].process else {
                    return Ok(());
                };
                if let Some(placement) = process.running().filter(|_| !process.done).cloned() {
                    process.machine.report_failure(placement.round, failure_of(host, &placement));
                    self.after_node(host)?;
                }
            }
            Action::ReportDone(host) => {
                let Some(process) = &mut self.hosts[host].process else {
                    return Ok(());
                };
                if let Some(placement) = process.running().cloned() {
                    process.machine.report_done(placement.round);
                    process.done = true;
                    self.after_node(host)?;
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
                self.stall(None, time);
            }
            Action::CrashCoordinator => self.crash_coordinator(),
            Action::StartCoordinator => {
                self.engine.processes.note_fault(None, now);
                if self.coordinator.ends {
                    // The earlier process has released the port, as when its host restarts.
                    self.crash_coordinator();
                }
                if !self.coordinator.up {
                    self.pids += 1;
                    self.start_coordinator(self.pids, INSTANCE_ID);
                }
            }
            Action::MoveCoordinator => {
                self.crash_coordinator();
                self.pids += 1;
                self.start_coordinator(self.pids, INSTANCE_ID + 1);
            }
            Action::Intrude(hello, reported) => return self.intrude(*hello, reported),
        }
        Ok(())
    }

    /// Opens a connection that belongs to no host.
    fn intrude(&mut self, hello: Hello, reported: Vec<NodeMessage>) -> Result<(), Violation> {
        if !self.coordinator.up || self.engine.processes.stalled_until(None) > self.now() {
            return Ok(());
        }
        self.intruders += 1;
        let (session, now) = (SessionId(u64::MAX - self.intruders), self.instant());
        let address = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));
        let machine = &mut self.coordinator.machine;
        let run = hello.run_id.clone();
        machine.on_hello(session, hello, Ends { peer: address, local: address }, now);
        reported.into_iter().for_each(|message| machine.on_message(session, message, now));
        machine.on_disconnected(session, now);
        self.after_coordinator()?;
        if let Some(number) = (0..self.ledgers.len()).find(|number| run_id(*number) == run) {
            self.ledgers[number].on_intruder(&self.coordinator.machine);
        }
        Ok(())
    }

    pub(super) fn crash_coordinator(&mut self) {
        let now = self.now();
        self.engine.processes.note_fault(None, now);
        self.coordinator.crash();
        self.engine.processes.end(None, now);
        for conn in self.network.at_coordinator() {
            let noticed_within = self.options.delay.1 * 20;
            self.network.release(conn, End::Coordinator);
            self.network.sever(conn, noticed_within, &mut self.engine);
        }
    }

    /// Starts the coordinator in a separate process, or in the process of its host's agent.
    fn start_coordinator(&mut self, pid: u64, instance_id: u64) {
        let hosted = self.options.coordinator_on.is_some();
        self.coordinator.restart(hosted.then_some(CoordinatorInstance {
            process: pid,
            instance_id: Some(instance_id),
            incarnation: pid,
        }));
        self.ledgers.iter_mut().for_each(Ledger::on_restart);
    }

    pub(super) fn terminate(&mut self, host: HostId, signal: Signal) -> Result<(), Violation> {
        let now = self.now();
        self.engine.processes.note_fault(Some(host), now);
        if self.hosts[host].ours.is_some() {
            return self.signal_agent(host, signal.0);
        }
        self.leave_by(host, &format!("its agent got {signal}"), Some(signal.0), Exit::Terminated)
    }

    /// A process stands still for a while.
    fn stall(&mut self, owner: Owner, time: Duration) {
        let until = self.now() + time;
        self.engine.processes.stall(owner, until);
        self.engine.processes.note_fault(owner, until);
        self.engine.push(until, Event::Resume(owner));
    }

    pub(super) fn start(&mut self, host: HostId, timeout: Duration) -> Result<(), Violation> {
        if self.hosts[host].process.is_some() {
            return Ok(());
        }
        self.pids += 1;
        let pid = self.pids;
        let hosts = self.options.coordinator_on == Some(host);
        if hosts {
            // The earlier agent, if it still serves, releases the port when its process ends.
            self.crash_coordinator();
            self.start_coordinator(pid, INSTANCE_ID);
        }
        let id = NodeId(u128::from(self.engine.dice.number()) << 64 | u128::from(self.engine.dice.number()));
        let odd_hosts = &self.options.odd_hosts;
        let settings = odd_hosts.settings_of(host).unwrap_or(&self.options.settings).clone();
        let name = odd_hosts.name(host).unwrap_or_else(|| host::name(host, pid));
        let members = self.options.members;
        let hello = Hello {
            interfaces: members.then(|| vec![host::interface(id)]),
            local_addr: self.options.local_addrs.get(&host).cloned(),
            process: pid,
            hosts,
            node_rank: self.options.node_ranks.get(&host).copied(),
            ..Hello::new(run_id(odd_hosts.run_of(host)), id, name, settings)
        };
        let endpoint = "coordinator:29400".to_owned();
        let timeouts = self.options.coordinator_timeout;
        let machine = NodeMachine::new(hello, endpoint, timeouts, self.instant());
        let process = Process::new(pid, id, machine, timeout);
        self.hosts[host].process = Some(process);
        let agents = &self.options.agents;
        if agents.hosts.contains(&host) {
            let max_restarts = self.options.settings.max_restarts;
            self.hosts[host].ours = Some(Ours::new(host, host::name(host, pid), agents, max_restarts));
            return self.after_node(host);
        }
        self.join(host)
    }

    pub(super) fn join(&mut self, host: HostId) -> Result<(), Violation> {
        self.ask(host);
        self.after_node(host)
    }

    /// Join the next round.
    pub(super) fn ask(&mut self, host: HostId) {
        let now = self.instant();
        let ours = self.hosts[host].ours.is_some();
        let last = self.hosts[host].placements.last().map(Placement::generation);
        let instead = last.filter(|_| self.options.elastic.by_number_alone);
        if let Some(process) = &mut self.hosts[host].process {
            process.agent = Agent::Joining;
            process.joins += 1;
            let node_rank = self.options.node_ranks.get(&host).copied();
            let workers = Some(JoinWorkers::new("default", worker_count(host)));
            if !ours {
                process.machine.set_survivors(process.workers.survival(instead));
            }
            process.done = false;
            process.machine.join_with_new_store(node_rank, workers, process.join_timeout, now);
            // Only the first join has a short time-out: later ones may happen in the calm.
            process.join_timeout = self.options.join_timeout;
        }
    }

    pub(super) fn kill(&mut self, host: HostId, silently: bool) {
        let now = self.now();
        let Some(process) = self.hosts[host].process.take() else {
            return;
        };
        // Guards end the workers of an agent that dies.
        (self.hosts[host].ours, self.hosts[host].worker_group) = (None, None);
        if self.options.coordinator_on == Some(host) {
            self.crash_coordinator();
        }
        let fault = self.engine.processes.last_fault(Some(host));
        self.expect_notice(host, &process, fault);
        if let Some(conn) = process.conn {
            if silently {
                self.network.silence(conn);
            } else if self.engine.dice.chance(50) {
                self.network.close(conn, End::Node, &mut self.engine);
            } else {
                self.network.release(conn, End::Node);
                let noticed_within = self.options.delay.1 * 4;
                self.network.sever(conn, noticed_within, &mut self.engine);
            }
        }
        self.engine.processes.note_fault(Some(host), now);
        self.engine.processes.end(Some(host), now);
        self.hosts[host].exits.push(Exit::Killed);
    }

    /// Schedules the check that survivors notice this loss in time, if no other fault happens meanwhile.
    pub(super) fn expect_notice(&mut self, host: HostId, process: &Process, fault: Time) {
        let Some(round) = process.running().filter(|_| !process.done).map(|placement| placement.round) else {
            return;
        };
        let loss = Loss { run: self.options.odd_hosts.run_of(host), round, at: self.now(), fault };
        let delay = self.options.delay.1;
        let within = self.ledger_of(host).notice_bound(delay);
        self.engine.push(self.now() + within, Event::Noticed(loss));
    }

    /// The agent sends a goodbye, closes its connection and ends.
    pub(super) fn leave(&mut self, host: HostId, reason: &str, exit: Exit) -> Result<(), Violation> {
        self.leave_by(host, reason, None, exit)
    }

    pub(super) fn leave_by(
        &mut self,
        host: HostId,
        reason: &str,
        signal: Option<i32>,
        exit: Exit,
    ) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[host].process else {
            return Ok(());
        };
        process.machine.leave(reason.to_owned(), signal);
        process.agent = Agent::Stopping { again: false };
        self.after_node(host)?;
        let Some(process) = self.hosts[host].process.take() else {
            return Ok(());
        };
        self.hosts[host].ours = None;
        self.ledger_of(host).check_answers(&process)?;
        if let Some(conn) = process.conn {
            self.network.close(conn, End::Node, &mut self.engine);
        }
        self.engine.remark(|| format!("host{host} exits: {exit:?}"));
        if self.options.coordinator_on == Some(host) {
            // Its coordinator serves for a moment longer, in which the other nodes get its last messages.
            self.coordinator.ends = true;
            self.engine.push(self.now() + DRAIN, Event::HostEnds(self.coordinator.incarnation));
        }
        self.hosts[host].exits.push(exit);
        Ok(())
    }

    pub(super) fn stop_workers(&mut self, host: HostId, again: bool) {
        let after = self.engine.dice.duration(self.options.stop);
        let at = self.now() + after;
        if let Some(process) = &mut self.hosts[host].process {
            process.agent = Agent::Stopping { again };
            let pid = process.pid;
            self.engine.push(at, Event::Stopped(host, pid));
        }
    }

    pub(super) fn on_stopped(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        match self.process(host, pid).map(|process| process.agent.clone()) {
            Some(Agent::Stopping { again: true }) => self.join(host),
            Some(Agent::Stopping { again: false }) => {
                let why = self.hosts[host].process.as_ref().map(|p| format!("{:?}", p.machine.view()));
                self.leave(host, "the job is over", Exit::Closed(why.unwrap_or_default()))
            }
            _ => Ok(()),
        }
    }
}

/// Digest of where a coordinator listens whose host belongs to the job.
const INSTANCE_ID: u64 = 29_400;
/// How long its process serves after its agent has left.
pub(super) const DRAIN: Duration = Duration::from_secs(5);

/// An agent's report of a failed worker.
fn failure_of(host: HostId, placement: &Placement) -> Failure {
    Failure {
        node: String::new(),
        role: "default".to_owned(),
        local_rank: 0,
        global_rank: placement.workers.map_or(0, |workers| workers.first_rank),
        pid: 1000 + host as u32,
        exit: "exit code 7".to_owned(),
        returncode: 7,
        message: String::new(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    }
}
