//! Workers of our agent: they start, fail, succeed, and end late or not at all when stopped. Part of [`super`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::event::Event;
use super::super::host::Agent;
use super::super::simulation::Simulation;
use super::in_place::Member;
use super::{Agents, Crew, CrewEvent, worker_count};
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
        let place = process.held(host);
        self.begin_start(host, missing);
        self.hosts[host].crew.iter_mut().for_each(|crew| crew.place = place);
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
        let crew = self.hosts[host].crew.iter_mut().flat_map(|crew| &mut crew.left);
        crew.filter(|(rank, _)| missing.contains(*rank)).for_each(|(_, member)| member.ahead = true);
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
        let none = || Crew { generation, up: false, left: BTreeMap::new(), stopping: None, place: None };
        let crew = self.hosts[host].crew.get_or_insert_with(none);
        (crew.generation, crew.up) = (generation, false);
        for local_rank in missing {
            self.processes += 1;
            crew.left.insert(local_rank, Member::new(self.processes));
        }
        let happens = if bad { CrewEvent::NotStarted } else { CrewEvent::Started };
        self.engine.push(at, Event::Crew(host, generation, happens));
    }

    fn check_start(&mut self, host: HostId, placement: &Placement, missing: &BTreeSet<u32>) -> Result<(), Violation> {
        let others = self.hosts[host].crew.iter().flat_map(|crew| &crew.left);
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
            let text = format!("host{host} tells its workers of restart {restarts} in {placement:?}");
            return Err(Violation::contract(text));
        }
        Ok(())
    }

    /// A start that is not complete does not go on.
    pub(super) fn cancel_start(&mut self, host: HostId) {
        let Some(crew) = self.hosts[host].crew.as_mut().filter(|crew| !crew.up) else { return };
        crew.left.retain(|_, member| member.up);
        (crew.up, crew.generation) = (true, 0);
        if crew.left.is_empty() {
            self.hosts[host].crew = None;
        }
    }

    /// Workers that do not run yet are not started any more.
    pub(super) fn begin_stop(&mut self, host: HostId, policy: StopPolicy) {
        let now = self.instant();
        self.cancel_start(host);
        match self.hosts[host].crew.as_mut() {
            Some(crew) => {
                let (stopping, commands) = Stopping::begin(policy, crew.left.keys().copied(), now);
                crew.stopping = Some(stopping);
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
                workers::Command::Signal { signal: Signal::CONT, .. } => continue,
                workers::Command::Signal { local_rank, .. } if self.engine.dice.chance(stubborn) => {
                    (local_rank, (Duration::ZERO, grace * 2))
                }
                workers::Command::Signal { local_rank, .. } => (local_rank, stop),
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
        let Some(crew) = &self.hosts[host].crew else { return };
        let Some(Member { process, .. }) = crew.left.get(&local_rank) else { return };
        let event = CrewEvent::Ends { local_rank, process: *process, well };
        self.engine.push(self.now() + after, Event::Crew(host, crew.generation, event));
    }

    pub(super) fn arm_stop(&mut self, host: HostId) {
        let Some(crew) = &self.hosts[host].crew else { return };
        if let Some(deadline) = crew.stopping.as_ref().and_then(Stopping::next_deadline) {
            let at = self.engine.due(deadline);
            self.engine.push(at, Event::Crew(host, crew.generation, CrewEvent::Tick));
        }
    }

    pub(in crate::coordinator) fn on_crew(
        &mut self,
        host: HostId,
        generation: u64,
        event: CrewEvent,
    ) -> Result<(), Violation> {
        let now = self.instant();
        if matches!(event, CrewEvent::Ends { .. }) {
            self.hear_of_fence(host)?;
        }
        let state = &mut self.hosts[host];
        let Some(crew) = state.crew.as_mut() else { return Ok(()) };
        let Some(ours) = &mut state.ours else {
            return Err(Violation::contract(format!("workers on host{host} outlive their agent: {crew:?}")));
        };
        let last_start = crew.generation == generation;
        match event {
            CrewEvent::Started if last_start => {
                crew.up = true;
                crew.left.values_mut().for_each(|member| member.up = true);
                ours.machine.on_started();
                self.plan_to_attend(host);
            }
            CrewEvent::NotStarted if last_start => {
                let failure = ours.failure(host, 0, "a failure to start", 1);
                self.cancel_start(host);
                if let Some((_, ours)) = self.ours(host) {
                    ours.machine.on_worker_failed(failure, false, now);
                }
            }
            CrewEvent::Started | CrewEvent::NotStarted => return Ok(()),
            CrewEvent::Ends { local_rank, process, well } => {
                if crew.left.get(&local_rank).is_none_or(|member| member.process != process) {
                    return Ok(());
                }
                crew.left.remove(&local_rank);
                crew.stopping.iter_mut().for_each(|stopping| stopping.on_gone(local_rank));
                let over = crew.left.is_empty();
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
                if over && self.hosts[host].crew.as_ref().is_some_and(|crew| crew.left.is_empty()) {
                    self.hosts[host].crew = None;
                    if let Some((_, ours)) = self.ours(host) {
                        ours.machine.on_stopped();
                    }
                }
            }
            CrewEvent::Does { local_rank, process, what } => self.do_as_told(host, local_rank, process, what),
            CrewEvent::Tick => {
                let commands = crew.stopping.as_mut().map(|stopping| stopping.poll(now)).unwrap_or_default();
                if !commands.is_empty() {
                    self.signal_workers(host, commands);
                }
            }
        }
        self.after_node(host)
    }

    /// Some or all workers of a host end by themselves. Workers that are being stopped are not affected.
    pub(in crate::coordinator) fn end_workers(&mut self, host: HostId, well: bool) {
        let Some(crew) = self.hosts[host].crew.as_ref().filter(|crew| crew.up && crew.stopping.is_none()) else {
            return;
        };
        let count = if well { crew.left.len() } else { 1 };
        let ranks: Vec<_> = crew.left.keys().copied().take(count).collect();
        for local_rank in ranks {
            let after = self.engine.dice.duration((Duration::ZERO, Duration::from_millis(300 * u64::from(well))));
            self.push_end(host, local_rank, well, after);
        }
    }
}
