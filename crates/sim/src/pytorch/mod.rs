//! PyTorch's own rendezvous under the same virtual time, faults and invariants: proof that the invariants find real defects.
//!
//! The algorithm is that of `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py` (2.15) over its c10d backend. Every node
//! reads one blob in a store each second and rewrites it with compare-and-set. Liveness is a time stamp of the writer's wall clock,
//! compared with the reader's. Around it is the agent of `elastic/agent/server/api.py`, which only asks `num_nodes_waiting()`, ten
//! times a second. Not modelled: the steps after a round (ranks of workers, the cached master address of #147064), and budgets of
//! restarts.
//!
//! Faults are those of [`Action`]. A broken connection ends the agent, because PyTorch's client does not reconnect. A cut path delays
//! messages on it. Violations are collected and do not end the run, because one cause shows in several ways.

mod actions;
mod agent;
mod event;
mod executor;
mod ops;
mod state;
mod store;

use std::convert::Infallible;
use std::time::Duration;

pub use agent::{Agent, Host, Phase};

use self::event::Event;
use self::store::Store;
use super::coordinator::options::{Action, Options};
use super::coordinator::plan::Plan;
use super::engine::dice::Dice;
use super::engine::paths::HostId;
use super::engine::queue::Time;
use super::engine::{Engine, Happens, Model};
use super::worlds::{Held, Violation, check_noticed, check_one_world, check_settled, check_world};

/// A job of PyTorch's under virtual time.
#[derive(Debug)]
pub struct PyTorch {
    options: Options,
    engine: Engine<Event>,
    hosts: Vec<Host>,
    store: Store,
    violations: Vec<Violation>,
    pids: u64,
}

impl PyTorch {
    /// A job on hosts that have not been started.
    pub fn new(options: Options) -> Self {
        let clock = |host| Host { agent: None, clock_ahead: options.clocks.get(&host).copied().unwrap_or(0) };
        Self {
            hosts: (0..options.hosts).map(clock).collect(),
            engine: Engine::new(Dice::new(options.seed ^ 0x70AC), options.delay),
            store: Store::default(),
            violations: Vec::new(),
            pids: 0,
            options,
        }
    }

    /// Live through a plan's troubles and the calm after them, up to `calm`, and check that the job has settled.
    pub fn live(plan: &Plan, calm: Duration) -> Self {
        let mut job = Self::new(plan.options.clone());
        for (at, action) in &plan.actions {
            job.at(*at, action.clone());
        }
        job.at(plan.calm_at, Action::StartCoordinator);
        job.run_until(plan.calm_at + calm);
        job.check_settled();
        job
    }

    /// Add an action at `at`.
    pub fn at(&mut self, at: Time, action: Action) {
        self.engine.push(at, Event::Act(action));
    }

    /// Let all events up to and including `until` happen.
    pub fn run_until(&mut self, until: Time) {
        let Ok(()) = self.pass(until);
    }

    /// The violations so far.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// The place under which a host's workers run.
    pub fn running(&self, host: HostId) -> Option<Held> {
        self.hosts[host].agent.as_ref().and_then(Agent::running)
    }

    /// Check that the job has settled, now that no fault happens any more.
    pub fn check_settled(&mut self) {
        let agents: Vec<_> = self.hosts.iter().filter_map(|host| host.agent.as_ref()).collect();
        let running: Vec<_> = agents.iter().filter_map(|agent| agent.running()).collect();
        let stopping = agents.iter().filter(|a| matches!(a.phase, Phase::Stopping | Phase::Closing)).count();
        let judged = check_settled(agents.len(), stopping, &running, &self.options.settings);
        self.violations.extend(judged.err());
    }

    fn check_placement(&mut self, held: Held) {
        let now = self.engine.now();
        let is_awake = |host: HostId| {
            let stalled_until = self.engine.processes.stalled_until(Some(host));
            stalled_until < now || stalled_until == Time::ZERO
        };
        let awake = self.hosts.iter().enumerate().filter(|(number, _)| is_awake(*number));
        let running: Vec<_> = awake.filter_map(|(_, host)| host.agent.as_ref()?.running()).collect();
        let settings = &self.options.settings;
        let of_round: Vec<_> = running.iter().copied().filter(|other| other.round == held.round).collect();
        let judged = [
            check_world(held.round, &[held], settings),
            check_world(held.round, &of_round, settings),
            check_one_world(held.round, running),
        ];
        self.violations.extend(judged.into_iter().filter_map(Result::err));
    }

    fn check_noticed(&mut self, round: u64, at: Time, fault: Time) {
        let lease = self.options.settings.lease();
        let clear = |fault: Time| fault == Time::ZERO || fault + 3 * lease < at;
        let last_fault = |owner| self.engine.processes.last_fault(owner);
        if !clear(last_fault(None)) || !clear(fault) || !self.store.up {
            return;
        }
        let survivors = self.hosts.iter().enumerate().filter(|(number, _)| clear(last_fault(Some(*number))));
        let undisturbed = survivors.filter(|(_, host)| {
            let held = host.agent.as_ref().and_then(Agent::running);
            held.is_some_and(|held| held.round == round)
        });
        let judged = check_noticed(round, at, self.engine.now(), undisturbed.map(|(number, _)| number));
        self.violations.extend(judged.err());
    }
}

impl Model for PyTorch {
    type Event = Event;
    /// Violations are collected, so that a history goes on.
    type Broken = Infallible;

    fn engine(&mut self) -> &mut Engine<Event> {
        &mut self.engine
    }

    fn happens(&self, event: &Event) -> Happens {
        match event {
            Event::Ask(..) => Happens::In(None),
            Event::Answer(host, ..) | Event::Wake(host, ..) | Event::Lost(host, _) => Happens::In(Some(*host)),
            Event::Act(_) | Event::Resume(_) | Event::Noticed(..) => Happens::Outside,
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Infallible> {
        match event {
            Event::Act(action) => self.act(action),
            Event::Resume(owner) => return self.resume(owner),
            Event::Ask(host, pid, request) => {
                let answer = match self.store.answer(request) {
                    Some(reply) => Event::Answer(host, pid, reply),
                    None => Event::Lost(host, pid),
                };
                self.travel(host, answer);
            }
            Event::Answer(host, pid, reply) => self.on_answer(host, pid, reply),
            Event::Wake(host, pid, wake) => self.on_wake(host, pid, wake),
            Event::Lost(host, pid) => drop(self.hosts[host].agent.take_if(|agent| agent.pid == pid)),
            Event::Noticed(round, at, fault) => self.check_noticed(round, at, fault),
        }
        Ok(())
    }
}
