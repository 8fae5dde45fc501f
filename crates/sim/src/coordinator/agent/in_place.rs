//! Workers that change in place: they attend, say how far they are, and park. Part of [`super`].
//!
//! Time stands for progress: all workers of a world make their checks at the same times, one in each `step`.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::event::Event;
use super::super::host::Agent;
use super::super::simulation::Simulation;
use super::{Doing, WorkerGroupEvent};
use crate::engine::paths::HostId;
use crate::worlds::Violation;
use elastic_rs::channel::message::{HeldState, ToWorker};
use elastic_rs::rendezvous::messages::message::{Generation, Placement, Resume, Round, STILL_ALIVE};

/// How the workers of a job change in place.
#[derive(Clone, Debug, Default)]
pub struct InPlace {
    /// The hosts whose program uses the API.
    pub hosts: BTreeSet<HostId>,
    /// Shortest and longest time from a worker's start until it attends.
    pub attend: (Duration, Duration),
    /// Shortest and longest time from the end of its world until it has parked.
    pub park: (Duration, Duration),
    /// Percentage of workers that do not answer.
    pub hang: u64,
    /// Percentage of workers that end instead of parking.
    pub die: u64,
    /// Percentage of workers that find that their world cannot be formed, until [`Self::stuck_until`].
    pub stuck: u64,
    /// When that ends.
    pub stuck_until: Duration,
    /// Time between two checks.
    pub step: Duration,
    /// The library makes the workers' process groups, so that they can be started before their node joins.
    pub no_process_group: bool,
    /// The programs save at the check of a change, and are started anew.
    pub saves: bool,
}

/// A worker.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// Number of its process.
    pub process: u64,
    /// Whether it runs.
    pub up: bool,
    /// It was killed, and its agent does not know yet that it has ended.
    pub killed: bool,
    /// It is connected.
    pub attends: bool,
    /// It was started before its node had the place for it.
    pub ahead: bool,
    /// The world that it is in.
    pub world: Option<(Round, u64)>,
    /// The state that it has, while it is in no world.
    pub parked: Option<HeldState>,
    /// The state that it has.
    state: HeldState,
    /// Its answer to the last change: the number of its last check.
    counted: Option<u64>,
    /// It was notified that its world has failed.
    failed: bool,
}

impl Member {
    pub(super) fn new(process: u64) -> Self {
        Self {
            process,
            up: false,
            killed: false,
            attends: false,
            ahead: false,
            world: None,
            parked: None,
            state: HeldState::default(),
            counted: None,
            failed: false,
        }
    }
}

impl Simulation {
    fn member(&mut self, host: HostId, local_rank: u32) -> Option<&mut Member> {
        self.hosts[host].worker_group.as_mut()?.left.get_mut(&local_rank).filter(|member| member.up && !member.killed)
    }

    fn plan(&mut self, host: HostId, local_rank: u32, what: Doing, within: (Duration, Duration)) {
        let Some(Member { process, .. }) = self.member(host, local_rank) else { return };
        let event = WorkerGroupEvent::Does { local_rank, process: *process, what };
        let at = self.now() + self.engine.dice.duration(within);
        self.engine.push(at, Event::WorkerGroup(host, 0, event));
    }

    /// New workers begin to use the API.
    pub(super) fn plan_to_attend(&mut self, host: HostId) {
        if !self.options.agents.in_place.hosts.contains(&host) {
            return;
        }
        let Some(worker_group) = &self.hosts[host].worker_group else { return };
        let new: Vec<_> =
            worker_group.left.iter().filter(|(_, member)| !member.attends).map(|(rank, _)| *rank).collect();
        for local_rank in new {
            self.plan(host, local_rank, Doing::Attend, self.options.agents.in_place.attend);
        }
    }

    /// A worker may find that its world cannot be formed.
    fn plan_to_be_stuck(&mut self, host: HostId, local_rank: u32, world: (Round, u64)) {
        let InPlace { stuck, stuck_until, park, .. } = self.options.agents.in_place;
        if stuck > 0 && self.now() < stuck_until && self.engine.dice.chance(stuck) {
            self.plan(host, local_rank, Doing::BeStuck { world }, park);
        }
    }

    /// A worker gets its place.
    pub(super) fn send_placement(&mut self, host: HostId, local_rank: u32) -> Result<(), Violation> {
        let saves = self.options.agents.in_place.saves;
        let Some((process, _)) = self.ours(host) else { return Ok(()) };
        let Agent::Running(placement) = &process.agent else {
            return Err(Violation::contract(format!("host{host} places a worker while {:?}", process.agent)));
        };
        let Placement { round, world, resume, .. } = placement.clone();
        let Some(member) = self.member(host, local_rank) else { return Ok(()) };
        let survived = member.parked.take().is_some();
        if survived && saves {
            return Err(Violation::contract(format!(
                "a worker of host{host} that has saved is placed in round {round}"
            )));
        }
        let ahead = std::mem::take(&mut member.ahead);
        if member.world.is_some_and(|before| before != (round, world)) {
            let text = format!("local rank {local_rank} of host{host} is placed in round {round}: {member:?}");
            return Err(Violation::contract(text));
        }
        member.world = Some((round, world));
        (member.counted, member.failed) = (None, false);
        self.plan_to_be_stuck(host, local_rank, (round, world));
        let Some(member) = self.member(host, local_rank) else { return Ok(()) };
        let Some(Resume::Continue { sync, survivors, .. }) = resume else {
            return match survived || ahead {
                true => Err(Violation::contract(format!("a worker of host{host} survives into {resume:?}"))),
                false => Ok(()),
            };
        };
        if survived && survivors == 0 {
            return Err(Violation::contract(format!("a worker of host{host} survives into {resume:?}")));
        }
        let generation = Some(Generation { round, world });
        if sync {
            // Whatever the source has committed: the same for all.
            member.state = HeldState { generation, commit: Some(round.0 * 1000) };
            self.ends.replaced_ahead += usize::from(ahead);
            return Ok(());
        }
        let state = member.state;
        let first = *self.states.entry(world).or_insert(state);
        if !survived || state.commit.is_none() || state != first {
            let text = format!("local rank {local_rank} of host{host} goes on with {state:?}, others with {first:?}");
            return Err(Violation::contract(text));
        }
        if let Some(member) = self.member(host, local_rank) {
            member.state.generation = generation;
        }
        Ok(())
    }

    /// A worker gets a message.
    pub(super) fn send_to_worker(&mut self, host: HostId, local_rank: u32, message: ToWorker) -> Result<(), Violation> {
        let in_place = self.options.agents.in_place.clone();
        let hangs = self.engine.dice.chance(in_place.hang);
        let dies = self.engine.dice.chance(in_place.die);
        let Some(member) = self.member(host, local_rank) else { return Ok(()) };
        match message {
            ToWorker::Change { seq, .. } if !hangs => {
                self.plan(host, local_rank, Doing::Count { change: seq }, (Duration::ZERO, in_place.step));
            }
            ToWorker::RaiseAt { check, .. } => {
                // It waits at the check after the one that it has named.
                if member.counted.is_none_or(|counted| check <= counted) {
                    let text = format!("local rank {local_rank} of host{host} is to raise at {check}: {member:?}");
                    return Err(Violation::contract(text));
                }
                self.leave_world(host, local_rank, hangs, dies);
            }
            ToWorker::PeerFailed { reason, .. } if in_place.saves => {
                let text = format!("local rank {local_rank} of host{host} saves, and is to leave its world: {reason}");
                return Err(Violation::contract(text));
            }
            ToWorker::PeerFailed { .. } => {
                member.failed = true;
                self.leave_world(host, local_rank, hangs, dies);
            }
            // It fails.
            ToWorker::Refused { .. } => self.leave_world(host, local_rank, false, true),
            ToWorker::Change { .. } | ToWorker::World(_) => {}
        }
        Ok(())
    }

    fn leave_world(&mut self, host: HostId, local_rank: u32, hangs: bool, dies: bool) {
        let within = self.options.agents.in_place.park;
        if dies {
            let after = self.engine.dice.duration(within);
            self.push_end(host, local_rank, false, after);
        } else if !hangs {
            self.plan(host, local_rank, Doing::Park, within);
        }
    }

    pub(super) fn carry_out(&mut self, host: HostId, local_rank: u32, process: u64, what: Doing) {
        let (now, instant) = (self.now(), self.instant());
        let step = self.options.agents.in_place.step.max(Duration::from_millis(1));
        let ahead = self.engine.dice.between(0, 1);
        let InPlace { no_process_group, saves, .. } = self.options.agents.in_place;
        let joins = self.hosts[host].process.as_ref().is_some_and(|process| matches!(process.agent, Agent::Joining));
        let Some(member) = self.member(host, local_rank).filter(|member| member.process == process) else { return };
        match what {
            // Planned again in a later round, because it had not attended yet.
            Doing::Attend if member.attends => return,
            Doing::Attend => {
                member.attends = true;
                member.parked = (joins && !member.ahead).then_some(HeldState::default());
            }
            Doing::Count { .. } => {
                // Collectives keep all workers within one check of one another.
                member.counted = Some((now.as_millis() / step.as_millis()) as u64 + ahead);
            }
            Doing::BeStuck { world } if member.world != Some(world) || member.failed => return,
            Doing::BeStuck { .. } => {}
            Doing::Park if member.world.is_none() => return,
            Doing::Park => {
                // After a failure one may have committed what another has not.
                let more = if member.failed { ahead } else { 0 };
                member.state.commit = member.state.commit.map(|commit| commit + more);
                member.parked = Some(member.state);
                (member.world, member.counted) = (None, None);
            }
        }
        let (state, counted) = (member.state, member.counted);
        // Half of those whose world comes to nothing have raised one of the library's exceptions themselves.
        let raises = ahead == 1;
        if matches!(what, Doing::BeStuck { .. }) {
            *if raises { &mut self.ends.raised } else { &mut self.ends.stuck } += 1;
        }
        let Some((_, ours)) = self.ours(host) else { return };
        match what {
            Doing::Attend => {
                ours.machine.on_worker_attends(local_rank);
                if no_process_group {
                    ours.machine.on_worker_without_process_group();
                }
                if saves {
                    ours.machine.on_worker_saves();
                }
            }
            Doing::Count { change } => ours.machine.on_worker_counted(local_rank, change, counted.unwrap_or(0)),
            Doing::Park => ours.machine.on_worker_parked(local_rank, state),
            Doing::BeStuck { .. } if raises => {
                let failure = ours.failure(host, local_rank, "HorovodInternalError", STILL_ALIVE);
                ours.machine.on_worker_raised(failure, instant);
            }
            Doing::BeStuck { .. } => {
                let failure = ours.failure(host, local_rank, "no progress towards its world", 1);
                ours.machine.on_worker_stuck(failure, instant);
            }
        }
    }
}
