//! Guards of workers: they hold the deadline of their node's lease, also while their agent stands still. Part of [`super`].

use std::time::Duration;

use super::super::event::Event;
use super::super::simulation::Simulation;
use super::WorkerGroup;
use super::workers::KILLED_WITHIN;
use crate::engine::paths::HostId;
use crate::worlds::Held;

impl WorkerGroup {
    /// The world that a worker of this node is in. A worker that is being stopped is in it until it is killed or ends.
    pub(in crate::coordinator) fn held(&self) -> Option<Held> {
        let runs =
            self.left.values().any(|member| member.up && !member.killed && member.parked.is_none() && !member.ahead);
        self.placement.filter(|_| runs)
    }
}

impl Simulation {
    /// The agent gives its guards the deadline, if that has changed.
    pub(super) fn arm_guards(&mut self, host: HostId) {
        let now = self.instant();
        let Some((process, ours)) = self.ours(host) else { return };
        let (pid, until) = (process.pid, process.machine.workers_until());
        if std::mem::replace(&mut ours.until, until) == until {
            return;
        }
        if let Some(until) = until {
            let at = self.engine.due(until.max(now));
            self.engine.push(at, Event::Guards(host, pid));
        }
    }

    /// Guards kill the workers once the deadline has passed, whether their agent stands still or not.
    pub(in crate::coordinator) fn look_at_guards(&mut self, host: HostId, pid: u64) {
        let now = self.instant();
        let Some((process, ours)) = self.ours(host) else { return };
        let over = process.pid == pid && ours.until.is_some_and(|until| until <= now);
        if !over || self.options.agents.without_deadlines {
            return;
        }
        let left: Vec<_> =
            self.hosts[host].worker_group.iter().flat_map(|worker_group| worker_group.left.keys().copied()).collect();
        for local_rank in left {
            self.engine.remark(|| format!("the guard of local rank {local_rank} on host{host} kills it"));
            self.kill_now(host, local_rank);
        }
    }

    /// A worker is dead from now on. Its agent is notified a little later.
    pub(super) fn kill_now(&mut self, host: HostId, local_rank: u32) {
        let after = self.engine.dice.duration((Duration::ZERO, KILLED_WITHIN));
        self.push_end(host, local_rank, false, after);
        let member =
            self.hosts[host].worker_group.as_mut().and_then(|worker_group| worker_group.left.get_mut(&local_rank));
        member.into_iter().for_each(|member| member.killed = true);
    }
}
