//! What happens to a host, and what its agent does about its workers.

use std::time::Duration;

use super::checks::LEADS_WITHIN;
use super::event::Event;
use super::host::{Agent, Host, Part, Process, Workers};
use super::job::Job;
use super::peers::Peer;
use super::plan::{Action, Mutation};
use super::wiring::endpoint;
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::coordinator::succession::Succession;
use elastic_rs::rendezvous::messages::message::{Failure, Hello, NodeId, PeerHello, Round, Verdict};
use elastic_rs::rendezvous::node::{JoinError, NodeMachine};
use elastic_rs::rendezvous::run::CoordinatorInstance;

/// The run id of the job.
pub(super) const RUN_ID: &str = "job";
/// For how long an agent waits for a coordinator that it has lost.
pub(super) const COORDINATOR_TIMEOUT: Duration = Duration::from_secs(40);
/// For how long an agent waits for a place.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Shortest and longest time that a process takes to end after its agent has left. It serves meanwhile.
const DRAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Shortest and longest time after which an agent that has failed is started again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// How long the kernel takes at most to end the sockets of a process that was killed.
const CLOSES: Duration = Duration::from_millis(60);

impl Job {
    pub(super) fn act(&mut self, action: Action) -> Result<(), Violation> {
        let now = self.engine.now();
        self.faults += u64::from(!matches!(action, Action::Fail(_) | Action::Start(_)));
        if let Action::Terminate(host) | Action::Close(host) = action {
            let goes_on = self.engine.processes.stalled_until(Some(host));
            if goes_on > now {
                self.engine.push(goes_on, Event::Act(action));
                return Ok(());
            }
        }
        match action {
            Action::Start(host) => return self.start(host),
            Action::Kill(host) => {
                let promised = self.promises_a_leader(host);
                let alone = self.options.mutation == Some(Mutation::ThreadDiesAlone) && self.engine.dice.chance(50);
                if alone {
                    self.end_coordinator(host)?
                } else {
                    self.kill(host, false)
                }
                self.disturb(host, now);
                if promised {
                    self.engine.push(now + LEADS_WITHIN, Event::MustLead(self.faults));
                }
            }
            Action::KillLeader(back) => {
                let leader = self.leaders().first().copied();
                if let Some(host) = leader {
                    self.engine.push_after(back, Event::Act(Action::Start(host)));
                    self.act(Action::Kill(host))?;
                }
            }
            Action::PowerOff(host) => {
                self.kill(host, true);
                self.hosts[host].is_on = false;
                self.disturb(host, now);
            }
            Action::Terminate(host) => {
                self.hosts[host].process.iter_mut().for_each(|process| process.is_terminated = true);
                self.disturb(host, now + self.options.stop.1 + DRAIN.1);
                return self.leave(host, Some(15));
            }
            Action::Fail(host) => return self.fail(host),
            Action::Close(host) => {
                let verdict = Verdict::Succeeded { by: format!("n{host}") };
                self.hosts[host].process.iter_mut().for_each(|process| process.node.close(verdict.clone()));
                return self.settle(host);
            }
            Action::Stall(host, lasts) => {
                self.engine.processes.stall(Some(host), now + lasts);
                self.engine.push(now + lasts, Event::Resume(host));
                self.disturb(host, now + lasts);
            }
            Action::Sever(host) => {
                let within = self.options.delay.1 * 4;
                let all = self.network.beyond(host);
                all.into_iter().for_each(|conn| self.network.sever(conn, within, &mut self.engine));
                self.disturb(host, now);
            }
            Action::Cut(from, to, lasts, kind) => {
                self.engine.paths.cut_between(from, to, now + lasts, kind);
                [from, to].into_iter().for_each(|host| self.disturb(host, now + lasts));
            }
        }
        Ok(())
    }

    /// A fault disturbs a host until then.
    fn disturb(&mut self, host: HostId, until: Time) {
        let since = &mut self.hosts[host].steady_since;
        *since = until.max(*since);
    }

    pub(super) fn start(&mut self, number: HostId) -> Result<(), Violation> {
        let now = self.engine.now();
        let id = NodeId(u128::from(self.engine.dice.number()) << 64 | u128::from(self.engine.dice.number()));
        let host = &mut self.hosts[number];
        if host.process.is_some() {
            return Ok(());
        }
        self.pids += 1;
        let (pid, clock, listed) = (self.pids, host.clock(now), self.options.listed);
        if !std::mem::replace(&mut host.is_on, true) {
            self.network.on_switched_on(number);
        }
        let endpoints: Vec<_> = (0..listed).map(endpoint).collect();
        let settings = self.options.settings.clone();
        let hello = Hello {
            process: pid,
            hosts: number < listed,
            in_place: false,
            ..Hello::new(RUN_ID, id, format!("n{number}:{pid}"), settings)
        };
        let first_id = *host.first_id.get_or_insert(id);
        let part = (number < listed).then(|| {
            let process = if self.options.mutation == Some(Mutation::KeepsItsId) { first_id } else { id };
            let hello =
                PeerHello { run_id: RUN_ID.into(), endpoints: endpoints.clone(), place: number as u32, process };
            let instance = CoordinatorInstance { process: pid, instance_id: Some(number as u64), incarnation: pid };
            Part {
                machine: Machine::with_instance(instance),
                succession: Succession::new(hello, clock),
                peers: vec![Peer::default(); listed],
                incoming: Default::default(),
                sessions: Default::default(),
            }
        });
        let mut process = Process {
            pid,
            id,
            node: NodeMachine::among(hello.clone(), &endpoints, COORDINATOR_TIMEOUT, clock),
            hello,
            placement: None,
            session: None,
            agent: Agent::Joins,
            joins: 0,
            answers: 0,
            knows: false,
            is_terminated: false,
            is_over: false,
            alarm: Default::default(),
            ticks: (now, 0),
            part,
        };
        process.join(JOIN_TIMEOUT, clock);
        host.process = Some(process);
        if number < listed {
            self.disturb(number, now);
            let others = (0..listed).filter(|place| *place != number);
            others.for_each(|place| self.engine.push(now, Event::Dial(number, pid, place, 0)));
        }
        self.settle(number)
    }

    /// The process ends, with its workers: their guards see to that. `silently`: with its host.
    pub(super) fn kill(&mut self, number: HostId, silently: bool) {
        let Some(process) = self.hosts[number].process.take() else { return };
        let now = self.engine.now();
        self.hosts[number].workers = None;
        let reset = self.engine.dice.chance(30);
        for (conn, end) in self.network.held_by((number, process.pid)) {
            if silently {
                self.network.silence(conn, end);
            } else {
                self.network.close(conn, end, reset, &mut self.engine);
            }
        }
        self.hosts[number].closed_at = now + self.engine.dice.duration((Duration::ZERO, CLOSES));
        self.engine.processes.end(Some(number), now);
    }

    /// The thread of the coordinator ends, and its process does not: a mistake.
    fn end_coordinator(&mut self, number: HostId) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[number].process else { return Ok(()) };
        let Some(part) = process.part.take() else { return Ok(()) };
        let own: Vec<_> = part.peers.iter().filter_map(|peer| peer.conn).map(|conn| (conn, End::Node)).collect();
        process.knows = false;
        let pid = process.pid;
        let accepted = self.network.held_by((number, pid)).into_iter().filter(|(_, end)| *end == End::Coordinator);
        for (conn, end) in own.into_iter().chain(accepted) {
            self.network.close(conn, end, false, &mut self.engine);
        }
        self.settle(number)
    }

    /// A process that has left ends. An agent that has failed is started again by whoever looks after it.
    pub(super) fn exit(&mut self, number: HostId) {
        let process = self.hosts[number].process.as_ref();
        let is_wanted = process.is_some_and(|process| !process.is_over && (self.is_calm || !process.is_terminated));
        self.kill(number, false);
        self.faults += 1;
        self.disturb(number, self.engine.now());
        if is_wanted && !self.ends {
            let after = self.engine.dice.duration(AGAIN);
            self.engine.push_after(after, Event::Act(Action::Start(number)));
        }
    }

    /// The agent stops its workers, and leaves.
    fn leave(&mut self, number: HostId, by: Option<i32>) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[number].process else { return Ok(()) };
        if process.agent == Agent::HasLeft {
            return Ok(());
        }
        process.agent = Agent::StopsToLeave { by };
        self.stop_workers(number);
        let pid = self.hosts[number].process.as_ref().map_or(0, |process| process.pid);
        self.engine.push_after(Duration::ZERO, Event::WorkersEnded(number, pid));
        Ok(())
    }

    fn fail(&mut self, number: HostId) -> Result<(), Violation> {
        let Host { process: Some(process), workers: Some(workers), .. } = &mut self.hosts[number] else {
            return Ok(());
        };
        if process.agent == Agent::Runs && self.engine.processes.stalled_until(Some(number)) <= self.engine.now() {
            process.node.report_failure(Round(workers.round), failure_of(number));
        }
        self.settle(number)
    }

    /// The workers are asked to stop, which takes a while.
    fn stop_workers(&mut self, number: HostId) {
        if let Some(workers) = self.hosts[number].workers {
            let after = self.engine.dice.duration(self.options.stop);
            self.engine.push_after(after, Event::WorkersEnd(number, workers.number));
        }
    }

    pub(super) fn on_workers_end(&mut self, number: HostId, of: u64) {
        let host = &mut self.hosts[number];
        if host.workers.take_if(|workers| workers.number == of).is_some()
            && let Some(process) = &host.process
        {
            let pid = process.pid;
            self.engine.push_after(Duration::ZERO, Event::WorkersEnded(number, pid));
        }
    }

    /// The guards kill their workers if the deadline has passed, also while the agent stands still.
    pub(super) fn look_at_deadline(&mut self, number: HostId, of: u64) {
        let now = self.engine.now();
        let workers = self.hosts[number].workers.filter(|workers| workers.number == of);
        match workers.and_then(|workers| workers.until) {
            Some(until) if until <= now => {
                self.engine.remark(|| format!("n{number}: the guards kill the workers"));
                self.on_workers_end(number, of);
            }
            // A later deadline has an event of its own.
            Some(_) | None => {}
        }
    }

    /// Let the agent do what it has to. Returns whether it has done anything.
    pub(super) fn run_agent(&mut self, number: HostId) -> Result<bool, Violation> {
        let now = self.engine.now();
        let clock = self.hosts[number].clock(now);
        let mut did = self.take_outcome(number)?;
        let renewed = now < self.hosts[number].renewed_until;
        let Host { process: Some(process), workers, .. } = &mut self.hosts[number] else { return Ok(did) };
        let view = process.node.view();
        let is_fenced = view.fenced.is_some() && !renewed;
        let (runs, is_over) = (workers.is_some(), view.closed.is_some() || view.failed.is_some());
        match process.agent {
            Agent::Runs if is_over => {
                process.is_over |= view.closed.is_some();
                self.leave(number, None)?;
                did = true;
            }
            Agent::Runs if is_fenced || !runs || view.waiting > 0 && view.fenced.is_none() => {
                process.agent = Agent::StopsToJoin;
                self.stop_workers(number);
                did = true;
            }
            Agent::StopsToJoin | Agent::StopsToLeave { .. } if runs && is_fenced => {
                self.engine.remark(|| format!("n{number} kills its workers: its lease is over"));
                *workers = None;
                did = true;
            }
            Agent::StopsToJoin if !runs && is_over => {
                process.is_over |= view.closed.is_some();
                self.leave(number, None)?;
                did = true;
            }
            Agent::StopsToJoin if !runs => {
                process.join(JOIN_TIMEOUT, clock);
                did = true;
            }
            Agent::StopsToLeave { by } if !runs => {
                process.agent = Agent::HasLeft;
                process.node.leave("its agent ends".to_owned(), by);
                let pid = process.pid;
                let after = self.engine.dice.duration(DRAIN);
                self.engine.push_after(after, Event::Exit(number, pid));
                did = true;
            }
            _ => {}
        }
        self.set_deadline(number);
        Ok(did)
    }

    /// The answer to a join, if there is one.
    fn take_outcome(&mut self, number: HostId) -> Result<bool, Violation> {
        let Some(process) = &mut self.hosts[number].process else { return Ok(false) };
        let Some(outcome) = process.node.take_outcome() else { return Ok(false) };
        process.answers += 1;
        if process.answers > process.joins {
            return Err(Violation::contract(format!("n{number} has an answer to no join: {outcome:?}")));
        }
        if process.agent != Agent::Joins {
            return Ok(true); // it leaves
        }
        match outcome {
            Ok(placement) => {
                self.engine.remark(|| format!("n{number} starts workers of round {}", placement.round));
                process.agent = Agent::Runs;
                self.told.on_place(number, &placement, &self.options.settings)?;
                self.started += 1;
                let (round, world) = (placement.round.0, placement.world);
                let workers = Workers { number: self.started, round, world, until: None, is_torn: false };
                process.placement = Some(placement);
                self.hosts[number].workers = Some(workers);
            }
            Err(error) => {
                self.engine.remark(|| format!("n{number} gives up: {error}"));
                let is_final =
                    matches!(error, JoinError::Closed { .. } | JoinError::Over { .. } | JoinError::Rejected(_));
                process.is_over |= is_final;
                self.leave(number, None)?;
            }
        }
        Ok(true)
    }

    /// Give the guards the deadline that the node has now.
    fn set_deadline(&mut self, number: HostId) {
        let mutation = self.options.mutation;
        let host = &mut self.hosts[number];
        let until = host.process.as_ref().and_then(|process| process.node.workers_until());
        let until = until.map(|until| host.time_of(until).max(host.renewed_until));
        let until = until.filter(|_| mutation != Some(Mutation::NoDeadline));
        if let Some(workers) = host.workers.as_mut().filter(|workers| workers.until != until) {
            workers.until = until;
            let of = workers.number;
            match until {
                // A node that stood still with its place on the way to it: its workers are not started any more.
                Some(until) if until <= self.engine.now() => self.look_at_deadline(number, of),
                Some(until) => self.engine.push(until, Event::Guards(number, of)),
                None => {}
            }
        }
    }
}

fn failure_of(host: HostId) -> Failure {
    Failure {
        node: String::new(),
        role: "trainer".to_owned(),
        local_rank: 0,
        global_rank: 0,
        pid: 1000 + host as u32,
        exit: "exit code 7".to_owned(),
        returncode: 7,
        message: String::new(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    }
}
