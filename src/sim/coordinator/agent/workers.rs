//! Workers of our agent: they start, fail, succeed, and end late or not at all when stopped. Part of [`super`].

use std::time::Duration;

use super::super::event::Event;
use super::super::host::Agent;
use super::super::simulation::Simulation;
use super::{Agents, Crew, CrewEvent};
use crate::process::{self, Signal, StopPolicy, Stopping};
use crate::rendezvous::protocol::message::Placement;
use crate::sim::engine::paths::HostId;
use crate::sim::worlds::Violation;

/// Killed processes are gone within this time.
const KILLED_WITHIN: Duration = Duration::from_millis(50);

impl Simulation {
    pub(super) fn start_workers(&mut self, host: HostId, placement: Placement) -> Result<(), Violation> {
        if let Some(crew) = &self.hosts[host].crew {
            let text = format!("host{host} starts round {} while {crew:?} runs", placement.round);
            return Err(Violation::contract(text));
        }
        let allowed = self.options.settings.max_restarts;
        if allowed.is_some_and(|allowed| placement.restart > allowed) {
            let text = format!("host{host} makes restart {} of at most {allowed:?}", placement.restart);
            return Err(Violation::contract(text));
        }
        self.generations += 1;
        let generation = self.generations;
        let Agents { bad_starts, bad_starts_until, restarts_left, .. } = self.options.agents;
        let bad = self.now() < bad_starts_until && self.engine.dice.chance(bad_starts);
        let at = self.now() + self.engine.dice.duration(self.options.agents.start);
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let restarts = ours.machine.restarts();
        if restarts_left.map_or(restarts != placement.restart, |allowed| restarts > allowed) {
            let text = format!("host{host} tells its workers of restart {restarts} in {placement:?}");
            return Err(Violation::contract(text));
        }
        ours.first_rank = placement.workers.map_or(0, |ranks| ranks.first_rank);
        ours.succeeded = 0;
        let left = (0..ours.workers).collect();
        process.agent = Agent::Running(placement);
        self.hosts[host].crew = Some(Crew { generation, up: false, left, stopping: None });
        let happens = if bad { CrewEvent::NotStarted } else { CrewEvent::Started };
        self.engine.push(at, Event::Crew(host, generation, happens));
        Ok(())
    }

    /// Workers that do not run yet are not started any more.
    pub(super) fn begin_stop(&mut self, host: HostId, policy: StopPolicy) {
        let now = self.instant();
        match self.hosts[host].crew.as_mut().filter(|crew| crew.up) {
            Some(crew) => {
                let (stopping, commands) = Stopping::begin(policy, crew.left.iter().copied(), now);
                crew.stopping = Some(stopping);
                self.signal_workers(host, commands);
            }
            None => {
                self.hosts[host].crew = None;
                if let Some((_, ours)) = self.ours(host) {
                    ours.machine.on_stopped();
                }
            }
        }
    }

    /// Workers react to signals, with a delay.
    pub(super) fn signal_workers(&mut self, host: HostId, commands: Vec<process::Command>) {
        let Agents { grace, stop, stubborn, .. } = self.options.agents;
        for command in commands {
            let (local_rank, within) = match command {
                process::Command::Signal { signal: Signal::CONT, .. } => continue,
                process::Command::Signal { local_rank, .. } if self.engine.dice.chance(stubborn) => {
                    (local_rank, (Duration::ZERO, grace * 2))
                }
                process::Command::Signal { local_rank, .. } => (local_rank, stop),
                // Nobody here sleeps uninterruptibly, so none is given up.
                process::Command::Kill { local_rank } | process::Command::Abandon { local_rank } => {
                    (local_rank, (Duration::ZERO, KILLED_WITHIN))
                }
            };
            let after = self.engine.dice.duration(within);
            self.push_end(host, local_rank, false, after);
        }
        self.arm_stop(host);
    }

    pub(super) fn push_end(&mut self, host: HostId, local_rank: u32, well: bool, after: Duration) {
        let Some(crew) = &self.hosts[host].crew else { return };
        let event = Event::Crew(host, crew.generation, CrewEvent::Ends { local_rank, well });
        self.engine.push(self.now() + after, event);
    }

    pub(super) fn arm_stop(&mut self, host: HostId) {
        let Some(crew) = &self.hosts[host].crew else { return };
        if let Some(deadline) = crew.stopping.as_ref().and_then(Stopping::next_deadline) {
            let at = self.engine.due(deadline);
            self.engine.push(at, Event::Crew(host, crew.generation, CrewEvent::Tick));
        }
    }

    pub(in crate::sim::coordinator) fn on_crew(
        &mut self,
        host: HostId,
        generation: u64,
        event: CrewEvent,
    ) -> Result<(), Violation> {
        let now = self.instant();
        let state = &mut self.hosts[host];
        let Some(crew) = state.crew.as_mut().filter(|crew| crew.generation == generation) else { return Ok(()) };
        let Some(ours) = &mut state.ours else {
            return Err(Violation::contract(format!("workers on host{host} outlive their agent: {crew:?}")));
        };
        match event {
            CrewEvent::Started => crew.up = true,
            CrewEvent::NotStarted => {
                state.crew = None;
                let failure = ours.failure(host, 0, "a failure to start", 1);
                ours.machine.on_worker_failed(failure, false);
            }
            CrewEvent::Ends { local_rank, well } => {
                if !crew.left.remove(&local_rank) {
                    return Ok(());
                }
                crew.stopping.iter_mut().for_each(|stopping| stopping.on_gone(local_rank));
                let over = crew.left.is_empty();
                if well {
                    ours.succeeded += 1;
                    ours.machine.on_worker_succeeded(local_rank, now);
                } else {
                    let failure = ours.failure(host, local_rank, "exit code 7", 7);
                    ours.machine.on_worker_exited_badly(failure, now);
                }
                // The agent reacts to this before it hears that no worker is left.
                self.after_node(host)?;
                if over {
                    self.hosts[host].crew = None;
                    if let Some((_, ours)) = self.ours(host) {
                        ours.machine.on_stopped();
                    }
                }
            }
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
    pub(in crate::sim::coordinator) fn end_workers(&mut self, host: HostId, well: bool) {
        let Some(crew) = self.hosts[host].crew.as_ref().filter(|crew| crew.up && crew.stopping.is_none()) else {
            return;
        };
        let count = if well { crew.left.len() } else { 1 };
        for local_rank in crew.left.clone().into_iter().take(count) {
            let after = self.engine.dice.duration((Duration::ZERO, Duration::from_millis(300 * u64::from(well))));
            self.push_end(host, local_rank, well, after);
        }
    }
}
