//! Standbys: their processes, and which worker each process is. Part of [`super`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::PathBuf;

use super::{Programs, Runner, Start};
use crate::agent::environment::STANDBY;
use crate::agent::policy::AgentOptions;
use crate::agent::slots::{Holder, Slots};
use crate::channel::agent::FromWorker;
use crate::rendezvous::conf::InPlace;
use crate::rendezvous::messages::message::Placement;
use crate::workers::{Copies, ExitStatus, Group, Output, StderrEnd, WorkerExit, WorkerSpec};

/// The standbys of a node, by slot.
#[derive(Debug, Default)]
pub(super) struct Standbys {
    running: BTreeMap<u32, Standby>,
    /// Those that were called, and have not got the CPUs of their places.
    called: BTreeSet<u32>,
}

#[derive(Debug)]
struct Standby {
    pid: u32,
    error_file: Option<PathBuf>,
}

/// Say once what standbys cost, or why there are none.
pub(super) fn introduce(options: &AgentOptions, can_change_in_place: bool) {
    let AgentOptions { standbys, workers, in_place, .. } = options;
    let (run_id, most) = (&workers.run_id, workers.local_world_size);
    let memory = match in_place {
        InPlace::Nccl => {
            "memory of another worker, and on its GPU a context and whatever the script puts there before it calls its elastic.run"
        }
        _ => "memory of another worker",
    };
    match standbys {
        0 => {}
        _ if workers.virtual_local_rank => tracing::warn!(
            "[{run_id}] --standby={standbys} has no effect with --virtual-local-rank: a process sees the GPU of one worker alone, and a standby \
             could become any"
        ),
        _ if !can_change_in_place => tracing::warn!(
            "[{run_id}] --standby={standbys} has no effect: the workers of this node cannot change in place (--in-place, or another agent or \
             backend), so a standby could not take the place of one that fails"
        ),
        _ => {
            if *standbys > most {
                tracing::warn!(
                    "[{run_id}] --standby is {standbys}, and this node has {most} workers: it keeps {most} standbys"
                );
            }
            tracing::info!(
                target: "elastic_rs::job",
                "[{run_id}] {} of this node's processes will be standbys, which start once its workers run (--standby); each takes the {memory}",
                standbys.min(&most)
            );
        }
    }
}

impl Runner {
    /// The running workers' process ids, by local rank.
    pub(super) fn pids(&self) -> BTreeMap<u32, u32> {
        self.by_local_rank(self.worker_group.as_ref().map(|worker_group| worker_group.pids()).unwrap_or_default())
    }

    /// Those of workers, by local rank, of process ids by slot.
    pub(super) fn by_local_rank(&self, pids: BTreeMap<u32, u32>) -> BTreeMap<u32, u32> {
        let of_worker = |(slot, pid)| match self.slots.holder(slot) {
            Holder::Worker(local_rank) => Some((local_rank, pid)),
            Holder::Standby | Holder::Replaced => None,
        };
        pids.into_iter().filter_map(of_worker).collect()
    }

    /// The slots of processes of which anything is left.
    fn used_slots(&self) -> BTreeSet<u32> {
        self.worker_group.as_ref().map(|worker_group| worker_group.pids().into_keys().collect()).unwrap_or_default()
    }

    /// Change which worker each process is, given the slots that are used. The memory of a slot without a worker counts for nothing.
    pub(super) fn change_slots<T>(&mut self, change: impl FnOnce(&mut Slots, &BTreeSet<u32>) -> T) -> T {
        let used = self.used_slots();
        let done = change(&mut self.slots, &used);
        self.training.set_idle(self.slots.idle());
        done
    }

    /// Have a standby started.
    pub(super) fn ask_for_standby(&mut self, placement: Box<Placement>) {
        match self.change_slots(Slots::take_for_standby) {
            Some(slot) => self.ask_for_start(Start::Standby(slot), placement),
            None => self.machine.on_no_room_for_standby(),
        }
    }

    /// The slot of the standby that is to be started, if that is what the front end was asked for.
    fn standby_to_start(&self) -> Option<u32> {
        match self.start {
            Start::Standby(slot) => Some(slot),
            Start::Round | Start::Ahead => None,
        }
    }

    /// Whether the front end was asked to start a standby.
    pub fn starts_standby(&self) -> bool {
        self.standby_to_start().is_some()
    }

    /// The name of the start that was asked for in the names of log folders: the round's number from 0, and which standby it is.
    pub fn attempt(&self) -> String {
        let round = self.placement_to_start().map_or(0, |placement| placement.round.0.saturating_sub(1));
        self.standby_to_start().map_or_else(|| round.to_string(), |slot| format!("{round}.standby_{slot}"))
    }

    /// Start a standby.
    pub(super) async fn start_standby(&mut self, programs: Programs<'_>) {
        let Programs { specs, mut filters, consoles, mut error_files, template } = programs;
        let same = specs.windows(2).all(|pair| pair[0].args == pair[1].args);
        let Some((slot, spec)) = self.standby_to_start().zip(specs.into_iter().next_back()) else { return };
        if !same {
            self.start_answered();
            return self
                .machine
                .on_standby_not_started("the script's arguments have ${local_rank}, which it does not know yet");
        }
        let error_file = error_files.remove(&spec.local_rank);
        let spec = self.as_standby(slot, spec);
        filters.progress = self.training.progress_log();
        let origin = self.origin(template);
        match self.while_starting(Group::start_from(origin, vec![spec], filters, consoles)).await {
            Some(Ok(group)) => {
                let pid = group.pids().remove(&slot).unwrap_or_default();
                self.standbys.running.insert(slot, Standby { pid, error_file });
                self.start = Start::Round; // the slot is the standby's now
                self.start_answered();
                self.add(group.into());
                self.expect_workers();
                tracing::info!(target: "elastic_rs::agent", "{}a standby starts, with pid {pid}", self.log_prefix());
                self.machine.on_standby_started(slot);
            }
            Some(Err(error)) => {
                self.start_answered();
                self.machine.on_standby_not_started(&error.to_string());
            }
            None => {} // asked for again, if it is still wanted
        }
    }

    /// A worker without a place.
    fn as_standby(&self, slot: u32, mut spec: WorkerSpec) -> WorkerSpec {
        for output in [&mut spec.stdout, &mut spec.stderr] {
            if let Output::Copied(Copies { prefix: Some(prefix), .. }) = output {
                "[standby]:".clone_into(prefix);
            }
        }
        // The place of one more worker: some script does things as rank 0.
        let number = |name: &str| spec.env.get(name.as_ref() as &OsStr)?.to_str()?.parse::<u32>().ok();
        if let Some(world_size) = number("WORLD_SIZE") {
            spec.env.insert("RANK".into(), world_size.to_string().into());
            spec.env.insert("WORLD_SIZE".into(), world_size.saturating_add(1).to_string().into());
        }
        for name in ["MASTER_ADDR", "MASTER_PORT"] {
            spec.env.remove(name.as_ref() as &OsStr);
        }
        self.attend(&mut spec);
        self.take_slot(slot, &mut spec);
        spec.env.insert(STANDBY.into(), "1".into());
        spec
    }

    /// A standby takes the place of a worker.
    pub(super) fn call(&mut self, slot: u32, local_rank: u32) {
        self.change_slots(|slots, used| slots.call(slot, local_rank, used));
        let Some(Standby { pid, error_file }) = self.standbys.running.remove(&slot) else { return };
        self.standbys.called.insert(slot);
        self.note_ahead(pid, error_file.map(|file| (local_rank, file)));
        tracing::info!(
            target: "elastic_rs::agent",
            "{}the standby with pid {pid} takes the place of local rank {local_rank}",
            self.log_prefix()
        );
    }

    /// The end of a process, as the exit of the worker that it is.
    pub(super) fn on_slot_exited(&mut self, exited: WorkerExit) {
        match self.slots.holder(exited.local_rank) {
            Holder::Worker(local_rank) => self.on_exited(WorkerExit { local_rank, ..exited }),
            Holder::Standby => {
                let slot = exited.local_rank;
                let error_file = self.standbys.running.remove(&slot).and_then(|standby| standby.error_file);
                let log = error_file.as_deref().and_then(|file| file.parent());
                let log = log.map_or_else(String::new, |folder| format!("; its logs: {}", folder.display()));
                let how = format!("the standby with pid {} has ended ({}{log})", exited.pid, exited.exit);
                self.machine.on_standby_ended(slot, &how, !matches!(exited.exit, ExitStatus::Code(_)));
            }
            Holder::Replaced => {}
        }
    }

    /// Where to read a worker's last words.
    pub(super) fn stderr_end(&self, local_rank: u32) -> StderrEnd {
        let both = self.worker_group.as_ref().zip(self.slots.of(local_rank));
        both.map(|(worker_group, slot)| worker_group.stderr_end(slot)).unwrap_or_default()
    }

    /// A process that was asked to end has not.
    pub(super) fn on_slot_overdue(&self, slot: u32, pid: u32) {
        if let Holder::Worker(local_rank) = self.slots.holder(slot) {
            self.dump(local_rank, pid);
        }
    }

    /// Nothing is left of a process.
    pub(super) fn on_slot_gone(&mut self, slot: u32) {
        let holder = self.slots.holder(slot);
        self.change_slots(|slots, _| slots.free(slot));
        self.standbys.called.remove(&slot);
        self.expect_workers(); // what its connections still say is nobody's
        if let Holder::Worker(local_rank) = holder {
            self.machine.on_worker_gone(local_rank);
        }
    }

    /// What a process says, as the worker that it is.
    pub(super) fn on_from_slot(&mut self, mut received: FromWorker) {
        let slot = received.local_rank_mut();
        match self.slots.holder(*slot) {
            Holder::Worker(local_rank) => {
                *slot = local_rank;
                self.on_from_worker(received);
            }
            Holder::Standby => match received {
                FromWorker::Hello { local_rank } => self.machine.on_standby_waits(local_rank, true),
                FromWorker::Gone { local_rank } => self.machine.on_standby_waits(local_rank, false),
                _ => {}
            },
            Holder::Replaced => {}
        }
    }

    /// The work is over: nothing waits for standbys to end by themselves.
    pub(super) fn kill_standbys(&mut self) {
        let idle = self.slots.idle();
        self.worker_group.iter_mut().for_each(|worker_group| worker_group.kill_idle(&idle));
    }

    /// A process has the place of this spec. One that has just got it is bound to the CPUs of the place.
    pub(super) fn place(&mut self, slot: u32, spec: &WorkerSpec) {
        let binds = self.standbys.called.remove(&slot);
        self.worker_group.iter().for_each(|worker_group| worker_group.place(slot, spec, binds));
    }
}
