//! Workers that change in place: their connections, and the messages to them. Part of [`super`].

use std::ffi::OsStr;
use std::future::pending;
use std::time::Instant;

use super::{Runner, Start};
use crate::agent::environment::{AGENT, AHEAD, IN_PLACE, KEEPS, VARIES};
use crate::agent::news::Seen;
use crate::agent::policy::AgentOptions;
use crate::agent::worker_group::WorkerGroup;
use crate::channel::agent::{Exchange, FromWorker};
use crate::channel::message::{ToWorker, World};
use crate::rendezvous::conf::InPlace;
use crate::rendezvous::messages::message::{Failure, Placement, Resume, STILL_ALIVE};
use crate::steps::STEPS;
use crate::workers::WorkerSpec;

const UNFORMED: &str = "its process group, a reset callback or the broadcast of the state has failed or takes too long; the workers leave \
    that world, and whoever hangs is replaced";

/// The socket for the workers' connections, if they may change in place. Without one they are restarted, as those of other agents.
pub(super) fn listen(options: &AgentOptions, has_session: bool) -> Option<Exchange> {
    if options.in_place == InPlace::Off || !has_session {
        return None;
    }
    match Exchange::listen(options.workers.local_world_size) {
        Ok(exchange) => Some(exchange),
        Err(error) => {
            let run_id = &options.workers.run_id;
            tracing::warn!(
                "[{run_id}] workers are restarted when the world changes, not changed in place: their agent's socket cannot be made: {error}"
            );
            None
        }
    }
}

pub(super) async fn next_of(exchange: &mut Option<Exchange>) -> FromWorker {
    match exchange {
        Some(exchange) => exchange.next().await,
        None => pending().await,
    }
}

impl Runner {
    pub(super) fn on_from_worker(&mut self, received: FromWorker) {
        match received {
            FromWorker::Hello { local_rank } => self.machine.on_worker_attends(local_rank),
            FromWorker::Ack { local_rank, seq, count } => self.machine.on_worker_counted(local_rank, seq, count),
            FromWorker::Freed { local_rank } => self.watch_freed(local_rank),
            FromWorker::Parked { local_rank, state } => {
                self.looking.late.forget(local_rank);
                self.machine.on_worker_parked(local_rank, state);
            }
            FromWorker::NoProcessGroup { .. } => self.machine.on_worker_without_process_group(),
            FromWorker::Saves { .. } => self.machine.on_worker_saves(),
            FromWorker::Stuck { local_rank } => self.on_stuck(local_rank),
            FromWorker::Unfit { local_rank, message } => self.on_unfit(local_rank, message),
            FromWorker::Raised { local_rank, error, message } => self.on_raised(local_rank, error, message),
            FromWorker::Gone { local_rank } => {
                self.looking.late.forget(local_rank);
                self.machine.on_worker_deaf(local_rank);
            }
        }
    }

    fn on_stuck(&mut self, local_rank: u32) {
        let exit = ("no progress towards its world".to_owned(), 1);
        let Some((failure, now)) = self.disturbed_by(local_rank, exit, UNFORMED.to_owned()) else { return };
        self.machine.on_worker_stuck(failure, now);
    }

    fn on_raised(&mut self, local_rank: u32, error: String, message: String) {
        let Some((failure, now)) = self.disturbed_by(local_rank, (error, STILL_ALIVE), message) else { return };
        self.machine.on_worker_raised(failure, now);
    }

    fn on_unfit(&mut self, local_rank: u32, message: String) {
        let Some(pid) = self.pids().remove(&local_rank) else { return };
        let exit = ("a state that it cannot take".to_owned(), STILL_ALIVE);
        self.machine.on_worker_unfit(self.failure(local_rank, pid, exit, message));
    }

    /// What a worker that lives has met in its world, as a failure.
    fn disturbed_by(&mut self, local_rank: u32, exit: (String, i32), message: String) -> Option<(Failure, Instant)> {
        let pid = self.pids().remove(&local_rank)?;
        let (failure, now) = (self.failure(local_rank, pid, exit, message), Instant::now());
        if self.machine.is_running() {
            self.disturbance.own(&failure, &self.name, now);
        }
        Some((failure, now))
    }

    /// Have the workers started in the place that this node will probably get.
    pub(super) fn start_ahead(&mut self, placement: Box<Placement>) {
        self.missing = (0..placement.workers_of(self.workers.local_world_size)).collect();
        self.seen = self.session.as_ref().map(|session| Seen::of(&session.view()));
        self.assignment = Some(((*placement).clone(), Instant::now()));
        self.ask_for_start(Start::Round, placement);
    }

    /// Keep the workers' places, and return those that are to be started, each with its slot as its number.
    pub(super) fn prepare(&mut self, mut specs: Vec<WorkerSpec>) -> Vec<WorkerSpec> {
        let replaces = self.start == Start::Ahead;
        for spec in &mut specs {
            self.attend(spec);
            if !(replaces || self.machine.is_new()) {
                spec.env.remove(AHEAD.as_ref() as &OsStr);
            }
        }
        if let (Some(_), Some((placement, _))) = (&self.exchange, &self.assignment) {
            self.worlds = specs.iter().map(|spec| (spec.local_rank, world_of(spec, placement))).collect();
        }
        let (mut started, survive): (Vec<_>, Vec<_>) =
            specs.into_iter().partition(|spec| self.missing.contains(&spec.local_rank));
        if !replaces {
            for spec in survive {
                let slot = self.slots.of(spec.local_rank);
                slot.into_iter().for_each(|slot| self.place(slot, &spec));
            }
        }
        let local_ranks: Vec<_> = started.iter().map(|spec| spec.local_rank).collect();
        let taken = self.change_slots(|slots, used| slots.take_all(&local_ranks, used));
        for (spec, slot) in started.iter_mut().zip(taken) {
            self.take_slot(slot, spec);
        }
        started
    }

    /// The variables by which a worker attends. Those of its place are provisional.
    pub(super) fn attend(&self, spec: &mut WorkerSpec) {
        let watched = self.watch_variables(|name| spec.env.contains_key(name.as_ref() as &OsStr));
        spec.env.extend(watched.into_iter().map(|(name, value)| (name.into(), value.into())));
        if let Some(exchange) = &self.exchange {
            spec.env.insert(AGENT.into(), exchange.address().into());
            spec.env.insert(IN_PLACE.into(), self.in_place.name().into());
            spec.env.insert(AHEAD.into(), "1".into());
        }
    }

    /// A process is started in this slot.
    pub(super) fn take_slot(&self, slot: u32, spec: &mut WorkerSpec) {
        spec.local_rank = slot;
        spec.env.remove(STEPS.as_ref() as &OsStr);
        let variable = self.steps_variable(slot);
        spec.env.extend(variable.map(|(name, value)| (name.into(), value.into())));
    }

    /// Tell a worker its place.
    pub(super) fn send_placement(&self, local_rank: u32) {
        let slot = self.slots.of(local_rank);
        if let (Some(exchange), Some(world), Some(slot)) = (&self.exchange, self.worlds.get(&local_rank), slot) {
            exchange.send(slot, ToWorker::World(Box::new(world.clone())));
        }
    }

    /// The workers that run now may connect.
    pub(super) fn expect_workers(&self) {
        let Some(worker_group) = &self.worker_group else { return };
        let pids = worker_group.pids();
        if let (Some(exchange), WorkerGroup::Spawned(_)) = (&self.exchange, worker_group) {
            exchange.expect(&pids);
        }
        if let Some(watches) = &self.watches {
            watches.expect(&pids);
        }
    }
}

fn world_of(spec: &WorkerSpec, placement: &Placement) -> World {
    let variable = |name: &str| {
        let value = spec.env.get(name.as_ref() as &OsStr)?.to_str()?;
        Some((name.to_owned(), value.to_owned()))
    };
    let (source, sync, survivors) = match placement.resume {
        Some(Resume::Continue { source, sync, survivors, .. }) => (source, sync, survivors),
        _ => (0, true, 0),
    };
    World {
        variables: VARIES.iter().filter(|name| !KEEPS.contains(name)).filter_map(|name| variable(name)).collect(),
        generation: placement.generation(),
        source,
        sync,
        equal: !sync || survivors == 0,
        reason: placement.reason.clone(),
    }
}
