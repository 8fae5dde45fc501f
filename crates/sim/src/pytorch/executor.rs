//! A node's operations, one at a time: `_DistributedRendezvousOpExecutor`, the agent's loop, and the keep-alive thread.

use std::time::Duration;

use super::PyTorch;
use super::agent::{Op, Phase};
use super::event::{Event, Wake};
use super::ops::{Context, OpKind, Step, apply};
use super::state::WallTime;
use super::store::{Reply, Request};
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use crate::worlds::Held;

/// PyTorch's constants: the pause of a poll, the age up to which a copy is fresh, the agent's monitor interval, time limits of
/// keep-alive and close.
const POLL: Duration = Duration::from_secs(1);
const CACHED: Duration = Duration::from_secs(1);
const MONITOR_INTERVAL: Duration = Duration::from_millis(100);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

impl PyTorch {
    pub(super) fn wake(&mut self, host: HostId, after: Duration, wake: Wake) {
        if let Some(agent) = &self.hosts[host].agent {
            self.engine.push_after(after, Event::Wake(host, agent.pid, wake));
        }
    }

    pub(super) fn on_wake(&mut self, host: HostId, pid: u64, wake: Wake) {
        let Some(agent) = self.hosts[host].agent.as_mut().filter(|agent| agent.pid == pid) else { return };
        match wake {
            Wake::Poll => self.sync(host),
            Wake::Monitor if matches!(agent.phase, Phase::Running(_)) => self.want(host, OpKind::Look),
            Wake::Monitor => {}
            Wake::Beat(incarnation) if agent.beats == Some(incarnation) => self.want(host, OpKind::KeepAlive),
            Wake::Beat(_) => {}
            Wake::Join => {
                (agent.phase, agent.beats) = (Phase::Joining, None);
                self.want(host, OpKind::Exit);
            }
        }
    }

    /// Run an operation as soon as the lock is free.
    pub(super) fn want(&mut self, host: HostId, kind: OpKind) {
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
        agent.op = Some(Op { kind, deadline: self.engine.now() + limit });
        self.sync(host);
    }

    /// `sync()`: write the changed state, or read it unless the copy is fresh.
    fn sync(&mut self, host: HostId) {
        let now = self.engine.now();
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
    pub(super) fn travel(&mut self, host: HostId, event: Event) {
        let delay = self.engine.transit();
        self.engine.push(self.cut_until(host) + delay, event);
    }

    /// Until when messages on a host's path are held: now, if it is not cut.
    pub(super) fn cut_until(&self, host: HostId) -> Time {
        let now = self.engine.now();
        self.engine.paths.cut_now(host, End::Coordinator, now).map_or(now, |(until, _)| until)
    }

    fn wall(&self, host: HostId) -> WallTime {
        WallTime(self.engine.now().as_micros() as i64 + self.hosts[host].clock_ahead)
    }

    pub(super) fn on_answer(&mut self, host: HostId, pid: u64, reply: Reply) {
        let (now, wall) = (self.engine.now(), self.wall(host));
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
        let (now, wall) = (self.engine.now(), self.wall(host));
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
            (OpKind::Join, true) => self.take_rank(host),
            (OpKind::Exit | OpKind::Join, false) => self.close(host),
            (OpKind::Close, _) => {
                self.hosts[host].agent = None;
                return;
            }
            // A failed keep-alive is only logged.
            (OpKind::KeepAlive, _) => {
                if let Some(incarnation) = agent.beats {
                    self.wake(host, self.options.settings.keep_alive_interval, Wake::Beat(incarnation));
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
    fn take_rank(&mut self, host: HostId) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(rank) = agent.state.participants.get(&agent.desc).copied() else { return };
        let size = agent.state.participants.len() as u32;
        let held = Held { host, round: agent.state.round, world: agent.state.world(), rank, size };
        agent.phase = Phase::Running(held);
        agent.beat_incarnations += 1;
        let incarnation = agent.beat_incarnations;
        agent.beats = Some(incarnation);
        self.wake(host, self.options.settings.keep_alive_interval, Wake::Beat(incarnation));
        self.wake(host, MONITOR_INTERVAL, Wake::Monitor);
        self.check_placement(held);
    }
}
