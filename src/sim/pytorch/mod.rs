//! PyTorch's own rendezvous under the same virtual time, faults and invariants: proof that the invariants find real defects.
//!
//! The algorithm is that of `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py` (2.15) over its c10d backend. Every node
//! reads one blob in a store each second and rewrites it with compare-and-set. Liveness is a time stamp of the writer's wall clock,
//! compared with the reader's. Around it is the agent of `elastic/agent/server/api.py`, which only asks `num_nodes_waiting()`, ten
//! times a second. Not modelled: the steps after a round (ranks of workers, the cached master address of pains row 1), and budgets
//! of restarts.
//!
//! Faults are those of [`Action`]. A broken connection ends the agent, because PyTorch's client does not reconnect. A cut path delays
//! messages on it. Violations are collected and do not end the run, because one cause shows in several ways.

mod agent;
mod ops;
mod state;
mod store;

use std::collections::BTreeMap;
use std::time::Duration;

pub use agent::{Agent, Host, Phase};

use self::agent::Op;
use self::ops::{Context, OpKind, Step, apply};
use self::state::WallTime;
use self::store::{Reply, Request, Store};
use super::network::HostId;
use super::plan::Plan;
use super::queue::{Dice, Queue, Time};
use super::simulation::{Action, Options};
use super::worlds::{Held, Violation, check_noticed, check_one_world, check_settled, check_world};

/// PyTorch's constants: the pause of a poll, the age up to which a copy is fresh, the agent's monitor interval, the largest delay of
/// the first join, time limits of keep-alive and close.
const POLL: Duration = Duration::from_secs(1);
const CACHED: Duration = Duration::from_secs(1);
const MONITOR_INTERVAL: Duration = Duration::from_millis(100);
const FIRST_DELAY: (Duration, Duration) = (Duration::ZERO, Duration::from_millis(300));
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
enum Event {
    Act(Action),
    /// A request reaches the store.
    Ask(HostId, u64, Request),
    /// Its answer reaches the agent.
    Answer(HostId, u64, Reply),
    /// The store can no longer be reached.
    Lost(HostId, u64),
    Wake(HostId, u64, Wake),
    Resume(Option<HostId>),
    /// A loss in a round, at a time, must have been noticed by now. Last field: the latest fault on its host before.
    Noticed(u64, Time, Time),
}

#[derive(Clone, Copy, Debug)]
enum Wake {
    /// The operation that holds the lock continues.
    Poll,
    /// The agent's monitor interval is over.
    Monitor,
    /// The keep-alive thread with this number runs.
    Beat(u32),
    /// The agent joins.
    Join,
}

/// A job of PyTorch's under virtual time.
#[derive(Debug)]
pub struct PyTorch {
    options: Options,
    queue: Queue<Event>,
    dice: Dice,
    hosts: Vec<Host>,
    store: Store,
    store_fault: Time,
    deferred: BTreeMap<Option<HostId>, Vec<Event>>,
    violations: Vec<Violation>,
    pids: u64,
}

impl PyTorch {
    /// A job on hosts that have not been started.
    pub fn new(options: Options) -> Self {
        let clock = |host| Host { clock_ahead: options.clocks.get(&host).copied().unwrap_or(0), ..Host::default() };
        Self {
            hosts: (0..options.hosts).map(clock).collect(),
            queue: Queue::new(),
            dice: Dice::new(options.seed ^ 0x70AC),
            store: Store::default(),
            store_fault: Time::ZERO,
            deferred: BTreeMap::new(),
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
        self.queue.push(at, Event::Act(action));
    }

    /// Let all events up to and including `until` happen.
    pub fn run_until(&mut self, until: Time) {
        while let Some(event) = self.queue.pop(until) {
            self.handle(event);
        }
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

    fn handle(&mut self, event: Event) {
        let whose = match &event {
            Event::Ask(..) => None,
            Event::Answer(host, ..) | Event::Wake(host, ..) | Event::Lost(host, _) => Some(*host),
            Event::Act(action) => return self.act(action.clone()),
            Event::Resume(whose) => return self.resume(*whose),
            Event::Noticed(round, at, fault) => return self.check_noticed(*round, *at, *fault),
        };
        let until = whose.map_or(self.store.stalled_until, |host| self.hosts[host].stalled_until);
        if until > self.queue.now() {
            return self.deferred.entry(whose).or_default().push(event);
        }
        match event {
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
            Event::Act(_) | Event::Resume(_) | Event::Noticed(..) => {}
        }
    }

    fn resume(&mut self, whose: Option<HostId>) {
        for event in self.deferred.remove(&whose).unwrap_or_default() {
            self.handle(event);
        }
    }

    // Actions on the job.

    fn act(&mut self, action: Action) {
        let now = self.queue.now();
        match action {
            Action::Start(host, timeout) if self.hosts[host].agent.is_none() => {
                self.pids += 1;
                let addr = self.options.local_addrs.get(&host).cloned().unwrap_or_else(|| format!("host{host:04}"));
                self.hosts[host].agent = Some(Agent::new(self.pids, addr, timeout));
                let delay = self.dice.duration(FIRST_DELAY);
                self.wake(host, delay, Wake::Join);
            }
            Action::Start(..) | Action::ReportDone(_) => {}
            // The other nodes cannot tell how an agent ended: it sends no goodbye on SIGTERM either.
            Action::Kill(host) | Action::PowerOff(host) | Action::Terminate(host) | Action::Interrupt(host) => {
                if let Some(held) = self.hosts[host].agent.take().and_then(|agent| agent.running()) {
                    let within = self.options.settings.lease() + Duration::from_secs(1) + self.options.delay.1 * 10;
                    self.queue.push(now + within, Event::Noticed(held.round, now, self.hosts[host].last_fault));
                }
                self.note_fault(host, now);
            }
            Action::Stall(host, time) => {
                self.note_fault(host, now + time);
                self.hosts[host].stalled_until = self.hosts[host].stalled_until.max(now + time);
                self.queue.push(now + time, Event::Resume(Some(host)));
            }
            Action::Sever(host) => {
                self.note_fault(host, now);
                if let Some(pid) = self.hosts[host].agent.as_ref().map(|agent| agent.pid) {
                    self.queue.push(now, Event::Lost(host, pid));
                }
            }
            Action::Cut(host, _, time, _) => {
                self.note_fault(host, now + time);
                self.hosts[host].cut_until = self.hosts[host].cut_until.max(now + time);
            }
            Action::FailWorkers(host) | Action::ReportFailure(host) => {
                if self.running(host).is_some() {
                    self.stop_workers(host);
                }
            }
            Action::Close(host, _) => self.close(host),
            Action::StallCoordinator(time) => {
                self.store_fault = self.store_fault.max(now + time);
                self.store.stalled_until = self.store.stalled_until.max(now + time);
                self.queue.push(now + time, Event::Resume(None));
            }
            Action::CrashCoordinator => {
                self.store_fault = self.store_fault.max(now);
                self.store.up = false;
            }
            Action::StartCoordinator if !self.store.up => self.store = Store::default(),
            // Its store trusts every client, so intruders would show nothing.
            Action::StartCoordinator | Action::MoveCoordinator | Action::Intrude(..) => {}
        }
    }

    fn note_fault(&mut self, host: HostId, until: Time) {
        let last = &mut self.hosts[host].last_fault;
        *last = until.max(*last);
    }

    fn stop_workers(&mut self, host: HostId) {
        let after = self.dice.duration(self.options.stop);
        if let Some(agent) = &mut self.hosts[host].agent {
            agent.phase = Phase::Stopping;
        }
        self.wake(host, after, Wake::Join);
    }

    /// `shutdown()`: called by an agent at the job's end, and also when its own join has failed.
    fn close(&mut self, host: HostId) {
        if let Some(agent) = &mut self.hosts[host].agent {
            (agent.phase, agent.beats) = (Phase::Closing, None);
            self.want(host, OpKind::Close);
        }
    }

    // Operations.

    fn wake(&mut self, host: HostId, after: Duration, wake: Wake) {
        if let Some(agent) = &self.hosts[host].agent {
            self.queue.push(self.queue.now() + after, Event::Wake(host, agent.pid, wake));
        }
    }

    fn on_wake(&mut self, host: HostId, pid: u64, wake: Wake) {
        let Some(agent) = self.hosts[host].agent.as_mut().filter(|agent| agent.pid == pid) else { return };
        match wake {
            Wake::Poll => self.sync(host),
            Wake::Monitor if matches!(agent.phase, Phase::Running(_)) => self.want(host, OpKind::Look),
            Wake::Monitor => {}
            Wake::Beat(life) if agent.beats == Some(life) => self.want(host, OpKind::KeepAlive),
            Wake::Beat(_) => {}
            Wake::Join => {
                (agent.phase, agent.beats) = (Phase::Joining, None);
                self.want(host, OpKind::Exit);
            }
        }
    }

    /// Run an operation as soon as the lock is free.
    fn want(&mut self, host: HostId, kind: OpKind) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        if agent.op.is_some() {
            agent.todo.push_back(kind);
            return;
        }
        let limit = match kind {
            OpKind::Exit | OpKind::Join => agent.join_timeout,
            OpKind::Close => CLOSE_TIMEOUT,
            OpKind::KeepAlive | OpKind::Look => HEARTBEAT_TIMEOUT,
        };
        agent.op = Some(Op { kind, deadline: self.queue.now() + limit });
        self.sync(host);
    }

    /// `sync()`: write the changed state, or read it unless the copy is fresh.
    fn sync(&mut self, host: HostId) {
        let now = self.queue.now();
        let Some(agent) = &self.hosts[host].agent else { return };
        if !agent.dirty && agent.last_sync.is_some_and(|at| at + CACHED >= now) {
            return self.step(host);
        }
        let request = match agent.dirty {
            true => Request::Set(agent.state.clone(), agent.token),
            false => Request::Get,
        };
        let event = Event::Ask(host, agent.pid, request);
        self.travel(host, event);
    }

    /// Sends a message to the store, or from it.
    fn travel(&mut self, host: HostId, event: Event) {
        let delay = self.dice.duration(self.options.delay);
        let from = self.hosts[host].cut_until.max(self.queue.now());
        self.queue.push(from + delay, event);
    }

    fn wall(&self, host: HostId) -> WallTime {
        WallTime(self.queue.now().as_micros() as i64 + self.hosts[host].clock_ahead)
    }

    fn on_answer(&mut self, host: HostId, pid: u64, reply: Reply) {
        let (now, wall) = (self.queue.now(), self.wall(host));
        let Some(agent) = self.hosts[host].agent.as_mut().filter(|agent| agent.pid == pid) else { return };
        (agent.state, agent.token) = match reply.0 {
            Some((state, version)) => (state, Some(version)),
            None => Default::default(),
        };
        (agent.dirty, agent.last_sync) = (false, Some(now));
        agent.state.sanitize(&self.options.settings, wall);
        self.step(host);
    }

    /// One turn of `_DistributedRendezvousOpExecutor.run`.
    fn step(&mut self, host: HostId) {
        let (now, wall) = (self.queue.now(), self.wall(host));
        let settings = &self.options.settings;
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(op) = &mut agent.op else { return };
        let Op { kind, deadline } = *op;
        let context = Context { node: &agent.desc, state: &agent.state, settings, now, wall, deadline };
        match context.decide(kind) {
            Step::Finish => self.finish(host, kind, true),
            Step::ErrorClosed | Step::ErrorTimeout => self.finish(host, kind, false),
            // A sleep is never shorter than requested, and some work follows it.
            Step::Sync => self.wake(host, POLL + Duration::from_millis(1), Wake::Poll),
            step => {
                if step == Step::RemoveFromRedundancyList {
                    op.deadline = now + agent.join_timeout;
                }
                apply(step, &mut agent.state, &agent.desc, settings, wall);
                agent.dirty = true;
                self.sync(host);
            }
        }
    }

    fn finish(&mut self, host: HostId, kind: OpKind, done: bool) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        agent.op = None;
        match (kind, done) {
            (OpKind::Exit, true) => agent.todo.push_front(OpKind::Join),
            (OpKind::Join, true) => self.place(host),
            (OpKind::Exit | OpKind::Join, false) => self.close(host),
            (OpKind::Close, _) => {
                self.hosts[host].agent = None;
                return;
            }
            // A failed keep-alive is only logged.
            (OpKind::KeepAlive, _) => {
                if let Some(life) = agent.beats {
                    self.wake(host, self.options.settings.keep_alive_interval, Wake::Beat(life));
                }
            }
            (OpKind::Look, _) if agent.running().is_none() => {}
            (OpKind::Look, _) if !agent.state.wait_list.is_empty() => self.stop_workers(host),
            (OpKind::Look, _) => self.wake(host, MONITOR_INTERVAL, Wake::Monitor),
        }
        let next = self.hosts[host].agent.as_mut().filter(|agent| agent.op.is_none()).and_then(|a| a.todo.pop_front());
        if let Some(next) = next {
            self.want(host, next);
        }
    }

    /// The join is over: workers and keep-alives start.
    fn place(&mut self, host: HostId) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(rank) = agent.state.participants.get(&agent.desc).copied() else { return };
        let size = agent.state.participants.len() as u32;
        let held = Held { host, round: agent.state.round, world: agent.state.world(), rank, size };
        agent.phase = Phase::Running(held);
        agent.beat_lives += 1;
        let life = agent.beat_lives;
        agent.beats = Some(life);
        self.wake(host, self.options.settings.keep_alive_interval, Wake::Beat(life));
        self.wake(host, MONITOR_INTERVAL, Wake::Monitor);
        self.check_place(held);
    }

    // The invariants.

    fn check_place(&mut self, held: Held) {
        let now = self.queue.now();
        let awake = self.hosts.iter().filter(|host| host.stalled_until < now || host.stalled_until == Time::ZERO);
        let running: Vec<_> = awake.filter_map(|host| host.agent.as_ref()?.running()).collect();
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
        if !clear(self.store_fault) || !clear(fault) || !self.store.up {
            return;
        }
        let survivors = self.hosts.iter().enumerate().filter(|(_, host)| clear(host.last_fault));
        let undisturbed = survivors.filter(|(_, host)| {
            let held = host.agent.as_ref().and_then(Agent::running);
            held.is_some_and(|held| held.round == round)
        });
        let judged = check_noticed(round, at, self.queue.now(), undisturbed.map(|(number, _)| number));
        self.violations.extend(judged.err());
    }
}
