//! Workers of our agent: they start, fail, succeed, and end late or not at all when stopped. Part of [`super`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::event::Event;
use super::super::host::Agent;
use super::super::simulation::Simulation;
use super::in_place::Member;
use super::{Agents, WorkerGroup, WorkerGroupEvent, worker_count};
use crate::engine::paths::HostId;
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::{Placement, Resume};
use elastic_rs::signals::Signal;
use elastic_rs::workers::{self, StopPolicy, Stopping};

/// Killed processes are gone within this time.
pub(super) const KILLED_WITHIN: Duration = Duration::from_millis(50);

impl Simulation {
    pub(super) fn start_workers(
        &mut self,
        host: HostId,
        placement: Placement,
        missing: BTreeSet<u32>,
    ) -> Result<(), Violation> {
        self.check_start(host, &placement, &missing)?;
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        ours.first_rank = placement.workers.map_or(0, |ranks| ranks.first_rank);
        process.agent = Agent::Running(placement);
        let placement = process.held(host);
        self.begin_start(host, missing);
        self.hosts[host].worker_group.iter_mut().for_each(|worker_group| worker_group.placement = placement);
        Ok(())
    }

    /// All workers are started, and their node has not joined.
    pub(super) fn start_ahead(&mut self, host: HostId) {
        let workers = self.ours(host).map_or(0, |(_, ours)| ours.workers);
        self.begin_start(host, (0..workers).collect());
    }

    /// Missing workers are started while the others leave their world.
    pub(super) fn start_ahead_of_round(&mut self, host: HostId, missing: BTreeSet<u32>) {
        self.begin_start(host, missing.clone());
        let worker_group = self.hosts[host].worker_group.iter_mut().flat_map(|worker_group| &mut worker_group.left);
        worker_group.filter(|(rank, _)| missing.contains(*rank)).for_each(|(_, member)| member.ahead = true);
    }

    fn begin_start(&mut self, host: HostId, missing: BTreeSet<u32>) {
        self.generations += 1;
        let generation = self.generations;
        let Agents { bad_starts, bad_starts_until, .. } = self.options.agents;
        let bad = !missing.is_empty() && self.now() < bad_starts_until && self.engine.dice.chance(bad_starts);
        let at = self.now() + self.engine.dice.duration(self.options.agents.start);
        if let Some((_, ours)) = self.ours(host) {
            ours.succeeded = 0;
        }
        let none = || WorkerGroup { generation, up: false, left: BTreeMap::new(), stopping: None, placement: None };
        let worker_group = self.hosts[host].worker_group.get_or_insert_with(none);
        (worker_group.generation, worker_group.up) = (generation, false);
        for local_rank in missing {
            self.processes += 1;
            worker_group.left.insert(local_rank, Member::new(self.processes));
        }
        let happens = if bad { WorkerGroupEvent::NotStarted } else { WorkerGroupEvent::Started };
        self.engine.push(at, Event::WorkerGroup(host, generation, happens));
    }

    fn check_start(&mut self, host: HostId, placement: &Placement, missing: &BTreeSet<u32>) -> Result<(), Violation> {
        let others = self.hosts[host].worker_group.iter().flat_map(|worker_group| &worker_group.left);
        let goes_on = matches!(placement.resume, Some(Resume::Continue { .. }));
        let (ready, parked): (Vec<_>, Vec<_>) = others.partition(|(rank, member)| {
            let waits = member.parked.is_some() && placement.resume.is_some() || member.ahead && member.up && goes_on;
            waits && !missing.contains(rank)
        });
        if !parked.is_empty() {
            let text = format!("host{host} starts round {} while {parked:?} run in another world", placement.round);
            return Err(Violation::contract(text));
        }
        let allowed = self.options.settings.max_restarts;
        if allowed.is_some_and(|allowed| placement.restart > allowed) {
            let text = format!("host{host} makes restart {} of at most {allowed:?}", placement.restart);
            return Err(Violation::contract(text));
        }
        // Those that have no place are about to end.
        let count = placement.workers_of(worker_count(host));
        let ready = ready.iter().filter(|(rank, _)| **rank < count).count() as u32;
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        ours.workers = count;
        if ready + missing.len() as u32 != ours.workers {
            let text = format!("host{host} starts {missing:?} beside {ready} workers, of {}", ours.workers);
            return Err(Violation::contract(text));
        }
        let restarts = ours.machine.restarts();
        let left = self.options.agents.restarts_left;
        if left.map_or(restarts != placement.restart, |allowed| restarts > allowed) {
            let text = format!("host{host} notifies its workers of restart {restarts} in {placement:?}");
            return Err(Violation::contract(text));
        }
        Ok(())
    }

    /// A start that is not complete does not go on.
    pub(super) fn cancel_start(&mut self, host: HostId) {
        let Some(worker_group) = self.hosts[host].worker_group.as_mut().filter(|worker_group| !worker_group.up) else {
            return;
        };
        worker_group.left.retain(|_, member| member.up);
        (worker_group.up, worker_group.generation) = (true, 0);
        if worker_group.left.is_empty() {
            self.hosts[host].worker_group = None;
        }
    }

    /// Workers that do not run yet are not started any more.
    pub(super) fn begin_stop(&mut self, host: HostId, policy: StopPolicy) {
        let now = self.instant();
        self.cancel_start(host);
        match self.hosts[host].worker_group.as_mut() {
            Some(worker_group) => {
                let (stopping, commands) = Stopping::begin(policy, worker_group.left.keys().copied(), now);
                worker_group.stopping = Some(stopping);
                self.signal_workers(host, commands);
            }
            None => {
                if let Some((_, ours)) = self.ours(host) {
                    ours.machine.on_stopped();
                }
            }
        }
    }

    /// A worker is killed, alone.
    pub(super) fn kill_worker(&mut self, host: HostId, local_rank: u32) {
        self.kill_now(host, local_rank);
    }

    /// Workers react to signals, with a delay.
    pub(super) fn signal_workers(&mut self, host: HostId, commands: Vec<workers::Command>) {
        let Agents { grace, stop, stubborn, .. } = self.options.agents;
        for command in commands {
            let (local_rank, within) = match command {
                workers::Command::Signal { signal: Signal::CONT, .. } | workers::Command::Dump { .. } => continue,
                workers::Command::Signal { local_rank, .. } | workers::Command::SignalLeader { local_rank, .. }
                    if self.engine.dice.chance(stubborn) =>
                {
                    (local_rank, (Duration::ZERO, grace * 2))
                }
                workers::Command::Signal { local_rank, .. } | workers::Command::SignalLeader { local_rank, .. } => {
                    (local_rank, stop)
                }
                // Nobody here sleeps uninterruptibly, so none is given up.
                workers::Command::Kill { local_rank } | workers::Command::Abandon { local_rank } => {
                    self.kill_now(host, local_rank);
                    continue;
                }
            };
            let after = self.engine.dice.duration(within);
            self.push_end(host, local_rank, false, after);
        }
        self.arm_stop(host);
    }

    pub(super) fn push_end(&mut self, host: HostId, local_rank: u32, well: bool, after: Duration) {
        let Some(worker_group) = &self.hosts[host].worker_group else { return };
        let Some(Member { process, .. }) = worker_group.left.get(&local_rank) else { return };
        let event = WorkerGroupEvent::Ends { local_rank, process: *process, well };
        self.engine.push(self.now() + after, Event::WorkerGroup(host, worker_group.generation, event));
    }

    pub(super) fn arm_stop(&mut self, host: HostId) {
        let Some(worker_group) = &self.hosts[host].worker_group else { return };
        if let Some(deadline) = worker_group.stopping.as_ref().and_then(Stopping::next_deadline) {
            let at = self.engine.due(deadline);
            self.engine.push(at, Event::WorkerGroup(host, worker_group.generation, WorkerGroupEvent::Tick));
        }
    }

    pub(in crate::coordinator) fn on_worker_group(
        &mut self,
        host: HostId,
        generation: u64,
        event: WorkerGroupEvent,
    ) -> Result<(), Violation> {
        let now = self.instant();
        if matches!(event, WorkerGroupEvent::Ends { .. }) {
            self.receive_fence(host)?;
        }
        let state = &mut self.hosts[host];
        let Some(worker_group) = state.worker_group.as_mut() else { return Ok(()) };
        let Some(ours) = &mut state.ours else {
            return Err(Violation::contract(format!("workers on host{host} outlive their agent: {worker_group:?}")));
        };
        let last_start = worker_group.generation == generation;
        match event {
            WorkerGroupEvent::Started if last_start => {
                worker_group.up = true;
                worker_group.left.values_mut().for_each(|member| member.up = true);
                ours.machine.on_started();
                self.plan_to_attend(host);
            }
            WorkerGroupEvent::NotStarted if last_start => {
                let failure = ours.failure(host, 0, "a failure to start", 1);
                self.cancel_start(host);
                if let Some((_, ours)) = self.ours(host) {
                    ours.machine.on_worker_failed(failure, false, now);
                }
            }
            WorkerGroupEvent::Started | WorkerGroupEvent::NotStarted => return Ok(()),
            WorkerGroupEvent::Ends { local_rank, process, well } => {
                if worker_group.left.get(&local_rank).is_none_or(|member| member.process != process) {
                    return Ok(());
                }
                worker_group.left.remove(&local_rank);
                worker_group.stopping.iter_mut().for_each(|stopping| stopping.on_gone(local_rank));
                let over = worker_group.left.is_empty();
                if well {
                    ours.succeeded += 1;
                    ours.machine.on_worker_succeeded(local_rank, now);
                } else {
                    let failure = ours.failure(host, local_rank, "exit code 7", 7);
                    ours.machine.on_worker_exited_badly(failure, now);
                }
                // The agent reacts to this before it hears that nothing is left of it.
                self.after_node(host)?;
                if let Some((_, ours)) = self.ours(host) {
                    ours.machine.on_worker_gone(local_rank);
                }
                if over
                    && self.hosts[host].worker_group.as_ref().is_some_and(|worker_group| worker_group.left.is_empty())
                {
                    self.hosts[host].worker_group = None;
                    if let Some((_, ours)) = self.ours(host) {
                        ours.machine.on_stopped();
                    }
                }
            }
            WorkerGroupEvent::Does { local_rank, process, what } => self.carry_out(host, local_rank, process, what),
            WorkerGroupEvent::Tick => {
                let commands = worker_group.stopping.as_mut().map(|stopping| stopping.poll(now)).unwrap_or_default();
                if !commands.is_empty() {
                    self.signal_workers(host, commands);
                }
            }
        }
        self.after_node(host)
    }

    /// Some or all workers of a host end by themselves. Workers that are being stopped are not affected.
    pub(in crate::coordinator) fn end_workers(&mut self, host: HostId, well: bool) {
        let Some(worker_group) = self.hosts[host]
            .worker_group
            .as_ref()
            .filter(|worker_group| worker_group.up && worker_group.stopping.is_none())
        else {
            return;
        };
        let count = if well { worker_group.left.len() } else { 1 };
        let ranks: Vec<_> = worker_group.left.keys().copied().take(count).collect();
        for local_rank in ranks {
            let after = self.engine.dice.duration((Duration::ZERO, Duration::from_millis(300 * u64::from(well))));
            self.push_end(host, local_rank, well, after);
        }
    }
}
