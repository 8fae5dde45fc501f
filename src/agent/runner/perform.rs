//! Carrying out the machine's commands. Part of [`super`].

use std::io::{self, IsTerminal};
use std::time::Instant;

use super::{Runner, Start, Step, recovery};
use crate::agent::command::{Command, farewell_reason};
use crate::agent::environment::Workers;
use crate::agent::failure_message::{FailureMessage, Hint, Sources};
use crate::agent::machine::LOOK_LIMIT;
use crate::agent::restart_of;
use crate::agent::worker_group::WorkerGroup;
use crate::events::record::{Ended, Kind, Phase, Started};
use crate::rendezvous::messages::message::{Failure, Placement};
use crate::rendezvous::node::session::FAREWELL;
use crate::signals::Signal;
use crate::workers::WorkerExit;

impl Runner {
    /// `exit`: how the worker ended, in words and as PyTorch's number.
    pub(super) fn failure(
        &self,
        local_rank: u32,
        pid: u32,
        (exit, returncode): (String, i32),
        message: String,
    ) -> Failure {
        Failure {
            node: String::new(), // the coordinator knows it
            role: self.workers.role.clone(),
            local_rank,
            global_rank: self.first_rank() + local_rank,
            pid,
            exit,
            returncode,
            message,
            counts: true,
            lived: self.training.lived(),
            step: self.training.step(),
        }
    }

    /// Carry out commands until none is left.
    pub(super) fn perform(&mut self) {
        loop {
            let commands = self.machine.take_commands();
            if commands.is_empty() {
                if !self.machine.leaves_world() {
                    self.looking.late.forget_all();
                }
                return;
            }
            if self.machine.leaves_world() {
                self.stopwatch.stop_ordered(Instant::now());
            }
            if commands.iter().any(recovery::is_overtaken_by) {
                self.log_recovery(None);
            }
            commands.into_iter().for_each(|command| self.perform_one(command));
        }
    }

    fn perform_one(&mut self, command: Command) {
        match command {
            Command::Look => self.looking_until = Some(Instant::now() + LOOK_LIMIT),
            Command::StartAhead(placement) => self.start_ahead(placement),
            Command::Replace { placement, missing } => self.replace(placement, missing),
            Command::StartStandby(placement) => self.ask_for_standby(placement),
            Command::Call { standby, local_rank } => self.call(standby, local_rank),
            Command::CheckHealth => self.check_health(),
            Command::Join { survival } => {
                self.stopwatch.join_asked(Instant::now());
                if let Some(session) = &self.session {
                    session.set_survivors(survival);
                }
                self.steps.push_back(Step::Join);
            }
            Command::Start { placement, missing } => {
                self.missing = missing;
                self.ask_for_start(Start::Round, placement);
            }
            Command::CancelStart => self.start_answered(),
            Command::SendPlacement { local_rank } => self.send_placement(local_rank),
            Command::Send { local_rank, message } => {
                if let (Some(exchange), Some(slot)) = (&self.exchange, self.slots.of(local_rank)) {
                    exchange.send(slot, *message);
                }
            }
            Command::KillWorker { local_rank } => {
                let slot = self.slots.of(local_rank);
                let both = self.worker_group.as_mut().zip(slot);
                both.into_iter().for_each(|(worker_group, slot)| worker_group.kill_slot(slot));
            }
            Command::Stop(policy) => {
                self.note_stop();
                self.start_answered();
                self.stopwatch.stop_ordered(Instant::now());
                match &mut self.worker_group {
                    Some(worker_group) => worker_group.begin_stop(policy),
                    None => self.machine.on_stopped(),
                }
            }
            Command::Kill => self.worker_group.iter_mut().for_each(WorkerGroup::kill),
            Command::Log(text) => tracing::info!("{}{text}", self.log_prefix()),
            Command::Warn(text) => tracing::warn!("{}{text}", self.log_prefix()),
            Command::End(outcome) => {
                // Only ended workers still have to be reaped.
                self.steps.retain(|step| matches!(step, Step::Reap { .. }));
                self.hangs.end();
                self.kill_standbys();
                self.ending = Some(outcome);
            }
            Command::Done(round) => match &self.session {
                Some(session) => session.report_done(round),
                None => self.steps.push_back(Step::Barrier),
            },
            Command::Attending(round) => self.session.iter().for_each(|session| session.attending(round)),
            Command::NoProcessGroup(round) => self.session.iter().for_each(|session| session.no_process_group(round)),
            Command::Saves(round) => self.session.iter().for_each(|session| session.saves(round)),
            Command::Counted { round, count } => {
                self.session.iter().for_each(|session| session.counted(round, count));
            }
            Command::Parked(round) => self.session.iter().for_each(|session| session.parked(round)),
            Command::WillLeave { round, signal } => {
                let reason = farewell_reason(signal);
                let session = self.session.as_ref();
                if !session.is_some_and(|session| session.will_leave(round, &reason, Some(signal))) {
                    self.machine.on_leave_unanswered();
                }
            }
            Command::Notice { round, left, reason } => self.announce(round, left, reason),
            Command::Listen { local_rank } => {
                self.note_stop();
                self.listen(local_rank);
            }
            Command::Report(failure) => {
                if let Some(session) = &self.session {
                    session.report_failure(self.machine.round(), *failure);
                }
            }
            Command::Close(verdict) => {
                if let Some(session) = &self.session {
                    session.close(verdict);
                }
            }
            Command::Leave { reason, signal } => {
                if let Some(session) = self.session.clone() {
                    self.farewell = Some(tokio::spawn(async move { session.leave(reason, signal, FAREWELL).await }));
                }
            }
        }
    }

    /// Let the session know that this round's workers do not run on.
    fn note_stop(&self) {
        self.session.iter().for_each(|session| session.stopping(self.machine.round()));
    }

    /// The beginning of a log line.
    pub(super) fn log_prefix(&self) -> String {
        let run_id = &self.workers.run_id;
        let Some((Placement { rank, .. }, since)) = &self.assignment else { return format!("[{run_id}] ") };
        let (round, after) = (self.machine.round(), since.elapsed().as_secs_f64());
        format!("[{run_id}] round {round}, node rank {rank}, after {after:.1} s: ")
    }

    /// Log which ranks and processes the workers are. On a terminal, the person who started this agent reads it once. After a recovery
    /// everybody reads what it has cost.
    pub(super) fn log_start(&mut self, phase: Phase) {
        let Some((placement, _)) = &self.assignment else { return };
        let Workers { run_id, role, local_world_size, max_restarts, .. } = &self.workers;
        let limit = self.session.is_some().then_some(*max_restarts);
        let recovered = self.disturbance.over(phase, placement, limit, Instant::now());
        let first = !std::mem::replace(&mut self.introduced, true);
        if let (Some(_), Some(ranks)) = (&self.worker_group, placement.workers) {
            let (round, rank, nodes) = (placement.round, placement.rank, placement.world_size);
            let (from, to) = (ranks.first_rank, ranks.first_rank + placement.workers_of(*local_world_size) - 1);
            let pids: Vec<String> = self.pids().values().map(u32::to_string).collect();
            let who = if first { self.introduction(nodes) } else { String::new() };
            let text = format!(
                "[{run_id}] round {round}, node rank {rank}{who}: {} runs as rank {from} to {to} of {}, role {role}, {}; pids {}",
                self.entrypoint,
                ranks.world_size,
                restart_of(self.restarts(), *max_restarts),
                pids.join(", "),
            );
            if first && io::stderr().is_terminal() {
                tracing::info!(target: "elastic_rs::job", "{text}");
            } else {
                tracing::info!(target: "elastic_rs::agent", "{text}");
            }
        }
        if let Some(recovered) = recovered.filter(|_| !first) {
            self.on_recovered(recovered);
        }
    }

    /// Who this node is, and where it has met the others.
    fn introduction(&self, nodes: u32) -> String {
        let met = self.session.as_ref().map(|session| {
            let hosted = if session.view().hosted { ", which this process hosts" } else { "" };
            format!(", by way of {}{hosted}", session.endpoint())
        });
        format!(" of {nodes} ({}){}", self.name, met.unwrap_or_default())
    }

    /// Record which workers were started.
    pub(super) fn record_start(&mut self) {
        let pids = self.pids();
        let Some(session) = &self.session else { return };
        let before = std::mem::replace(&mut self.recorded, pids.values().copied().collect());
        for (local_rank, pid) in pids.into_iter().filter(|(_, pid)| !before.contains(pid)) {
            let (rank, role) = (self.first_rank() + local_rank, self.workers.role.clone());
            session.record(Kind::WorkerStarted(Box::new(Started { rank, local_rank, role, pid })));
        }
    }

    /// Record how a worker has ended.
    pub(super) fn record_exit(&self, exited: &WorkerExit) {
        let Some(session) = &self.session else { return };
        session.record(Kind::WorkerEnded(Box::new(Ended {
            rank: self.first_rank() + exited.local_rank,
            local_rank: exited.local_rank,
            role: self.workers.role.clone(),
            pid: exited.pid,
            exit: exited.exit.to_string(),
            returncode: exited.exit.returncode(),
            stopped: exited.stopped,
        })));
    }

    /// Collect the words of a worker that has ended.
    fn listen(&mut self, local_rank: u32) {
        let exited = self.exits.iter().rfind(|exited| exited.local_rank == local_rank);
        let hint = exited.and_then(|exited| match Signal(-exited.exit.returncode()) {
            Signal::KILL => Some(Hint::Killed(self.kills_before)),
            Signal::BUS => Some(Hint::Bus),
            _ => None,
        });
        let sources = Sources {
            error_file: self.error_files.get(&local_rank).cloned(),
            stderr_end: self.stderr_ends.get(&local_rank).cloned().unwrap_or_default(),
            hint,
            front_end: matches!(self.worker_group, Some(WorkerGroup::Adopted(_))),
        };
        let mut failure_message = FailureMessage::new(local_rank, sources);
        if let Some(reported) = self.reported.get(&local_rank) {
            failure_message.on_reported(local_rank, reported.clone());
        }
        self.failure_message = Some(failure_message);
    }
}
