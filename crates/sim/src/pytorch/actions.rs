//! Faults and other actions on a job of PyTorch's.

use std::time::Duration;

use super::PyTorch;
use super::agent::{Agent, Phase};
use super::event::{Event, Wake};
use super::ops::OpKind;
use super::store::Store;
use crate::coordinator::options::Action;
use crate::engine::paths::{End, HostId, Partition};
use crate::engine::processes::Owner;

/// The largest delay of the first join.
const FIRST_DELAY: (Duration, Duration) = (Duration::ZERO, Duration::from_millis(300));

impl PyTorch {
    pub(super) fn act(&mut self, action: Action) {
        let now = self.engine.now();
        match action {
            Action::Start(host, timeout) if self.hosts[host].agent.is_none() => {
                self.pids += 1;
                let addr = self.options.local_addrs.get(&host).cloned().unwrap_or_else(|| format!("host{host:04}"));
                self.hosts[host].agent = Some(Agent::new(self.pids, addr, timeout));
                let delay = self.engine.dice.duration(FIRST_DELAY);
                self.wake(host, delay, Wake::Join);
            }
            Action::Start(..) | Action::ReportDone(_) => {}
            // The other nodes cannot know how an agent ended: it sends no goodbye on SIGTERM either.
            Action::Kill(host)
            | Action::PowerOff(host)
            | Action::Terminate(host)
            | Action::Interrupt(host)
            | Action::AskToLeave(host)
            | Action::Notice(host, _) => {
                if let Some(held) = self.hosts[host].agent.take().and_then(|agent| agent.running()) {
                    let within = self.options.settings.lease() + Duration::from_secs(1) + self.options.delay.1 * 10;
                    let fault = self.engine.processes.last_fault(Some(host));
                    self.engine.push(now + within, Event::Noticed(held.round, now, fault));
                }
                self.engine.processes.note_fault(Some(host), now);
            }
            Action::Stall(host, time) => self.stall(Some(host), time),
            Action::Sever(host) => {
                self.engine.processes.note_fault(Some(host), now);
                if let Some(pid) = self.hosts[host].agent.as_ref().map(|agent| agent.pid) {
                    self.engine.push(now, Event::Lost(host, pid));
                }
            }
            // One direction or both: a request and its answer come to nothing without each other.
            Action::Cut(host, _, time, _) => {
                self.engine.processes.note_fault(Some(host), now + time);
                let until = self.cut_until(host).max(now + time);
                self.engine.paths.cut(host, End::Coordinator, until, Partition::Held);
            }
            Action::FailWorkers(host) | Action::LoseWorkers(host) | Action::ReportFailure(host) => {
                if self.running(host).is_some() {
                    self.stop_workers(host);
                }
            }
            Action::Close(host, _) => self.close(host),
            Action::StallCoordinator(time) => self.stall(None, time),
            Action::CrashCoordinator => {
                self.engine.processes.note_fault(None, now);
                self.store.up = false;
            }
            Action::StartCoordinator if !self.store.up => {
                self.engine.processes.wake(None, now);
                self.store = Store::default();
            }
            // Its store trusts every client, so intruders would show nothing.
            Action::StartCoordinator | Action::MoveCoordinator | Action::Intrude(..) => {}
        }
    }

    /// A process stands still for a while.
    fn stall(&mut self, owner: Owner, time: Duration) {
        let until = self.engine.now() + time;
        self.engine.processes.note_fault(owner, until);
        self.engine.processes.stall(owner, until);
        self.engine.push(until, Event::Resume(owner));
    }

    pub(super) fn stop_workers(&mut self, host: HostId) {
        let after = self.engine.dice.duration(self.options.stop);
        if let Some(agent) = &mut self.hosts[host].agent {
            agent.phase = Phase::Stopping;
        }
        self.wake(host, after, Wake::Join);
    }

    /// `shutdown()`: called by an agent at the job's end, and also when its own join has failed.
    pub(super) fn close(&mut self, host: HostId) {
        if let Some(agent) = &mut self.hosts[host].agent {
            (agent.phase, agent.beats) = (Phase::Closing, None);
            self.want(host, OpKind::Close);
        }
    }
}
