//! One node of a job at work: carries out what the agent's [`Runner`] asks for, until it has ended.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;

use super::job::{Fixed, Job, LogFolder};
use super::signals::Receiver;
use crate::agent::Outcome;
use crate::agent::crew::Crew;
use crate::agent::runner::{Runner, START_PATIENCE, Started, Step};
use crate::host::Sessions;
use crate::process::{AttemptFolder, Consoles, Exited, Group, LogFolders, Template, is_full};
use crate::rendezvous::node::session::Session;
use crate::rendezvous::protocol::message::{JoinWorkers, Placement, Verdict};
use crate::store::server::StoreServer;
use crate::wait::{telling_if_slow, until};

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Why.
    pub outcome: Outcome,
    /// How the workers of the last round ended, in that order.
    pub exits: Vec<Exited>,
    /// Global rank of the last round's first worker.
    pub first_rank: u32,
    /// Where the workers of the last round may have recorded exceptions, by local rank.
    pub error_files: BTreeMap<u32, PathBuf>,
}

/// This node cannot go on, for a reason that concerns no other.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LaunchError(String);

/// Runs the workers of every round until the job, or this node's part, has ended. `host` are the sessions of the coordinator,
/// if this process is its host: it stays for them at the end. Nothing is left of the workers when this returns.
///
/// Needs the whole runtime: dropping the future kills workers without waiting for their ends.
///
/// # Errors
/// [`LaunchError`]; the others go on without this node.
pub async fn run(
    job: Job,
    session: Arc<Session>,
    host: Option<Sessions>,
    signals: Receiver,
) -> Result<Ended, LaunchError> {
    let mut node = Node::new(job, session, host, signals);
    let ended = node.work().await;
    if let Err(LaunchError(reason)) = &ended {
        node.runner.close().await;
        node.farewell(None, reason).await;
    }
    if let Some(template) = &node.template {
        template.end().await;
    }
    ended
}

struct Node {
    job: Job,
    session: Arc<Session>,
    host: Option<Sessions>,
    signals: Receiver,
    runner: Runner,
    /// Of this process: what workers inherit.
    env: BTreeMap<OsString, OsString>,
    /// Workers are forked from it.
    template: Option<Template>,
    folders: Option<Arc<LogFolders>>,
    /// The round's, if this node has rank 0.
    store: Option<StoreServer>,
    first_rank: u32,
    error_files: BTreeMap<u32, PathBuf>,
}

impl Node {
    fn new(job: Job, session: Arc<Session>, host: Option<Sessions>, signals: Receiver) -> Self {
        let (name, workers) = (job.name.clone(), &job.workers);
        let (run_id, role) = (workers.run_id.clone(), workers.role.clone());
        let mut runner = Runner::new(job.policy(), name, run_id, role, Some(Arc::clone(&session)));
        runner.limit_uninterruptible_sleep(job.uninterruptible_sleep);
        let env = env::vars_os().collect();
        // It loads while the nodes meet.
        let template = job.template(&env).map(Template::start);
        Self {
            job,
            session,
            host,
            signals,
            runner,
            env,
            template,
            folders: None,
            store: None,
            first_rank: 0,
            error_files: BTreeMap::new(),
        }
    }

    async fn work(&mut self) -> Result<Ended, LaunchError> {
        loop {
            let step = tokio::select! {
                biased;
                signal = self.signals.next() => {
                    self.runner.signal(signal);
                    continue;
                }
                step = self.runner.next() => step,
            };
            match step {
                Step::Join => self.join().await?,
                Step::Start(placement) => self.start(*placement).await?,
                // The session waits for the other nodes, and programs are reaped by their guards.
                Step::Barrier => self.runner.all_done(),
                Step::Reap { .. } => {
                    return Err(LaunchError("a worker is a function, which nobody here can reap".into()));
                }
                Step::End(outcome) => return Ok(self.end(*outcome).await),
            }
        }
    }

    async fn join(&mut self) -> Result<(), LaunchError> {
        let began = Instant::now();
        let Job { node_rank, join_timeout, .. } = self.job;
        let workers =
            JoinWorkers { role: self.job.workers.role.clone(), local_world_size: self.job.workers.local_world_size };
        // Every round has an empty store of its own: no key of an earlier attempt can be read.
        let (placement, store) = tokio::select! {
            biased;
            signal = self.signals.next() => {
                self.runner.signal(signal);
                return Ok(());
            }
            joined = self.job.reach.join(&self.session, node_rank, Some(workers), join_timeout) => match joined {
                Ok(joined) => joined,
                Err(error) => {
                    self.runner.no_place(error);
                    return Ok(());
                }
            },
        };
        self.check_rank(&placement)?;
        let serves = placement.rank == 0 && self.job.workers.use_agent_store && self.job.fixed.is_none();
        self.store = serves.then_some(store); // the one before ends here
        self.tell_place(&placement, began.elapsed());
        self.runner.placed(placement);
        Ok(())
    }

    /// With fixed ranks nobody else may have this node's.
    fn check_rank(&self, placement: &Placement) -> Result<(), LaunchError> {
        match self.job.node_rank {
            Some(asked) if self.job.fixed.is_some() && asked != placement.rank => Err(LaunchError(format!(
                "--node-rank is `{asked}`, but this is number {} of {} nodes by rank: give each node another rank, from 0 to {}",
                placement.rank,
                placement.world_size,
                placement.world_size - 1
            ))),
            _ => Ok(()),
        }
    }

    fn tell_place(&self, placement: &Placement, after: Duration) {
        let Placement { round, rank, world_size, master_addr, master_port, reason, .. } = placement;
        let (run_id, addr, after) = (&self.job.workers.run_id, self.addr(), after.as_secs_f64());
        tracing::info!(
            target: "elastic_rs::rendezvous",
            "[{run_id}] {addr}: round {round}: rank {rank} of {world_size}, master {master_addr}:{master_port}, \
             after {after:.1} s: {reason}"
        );
    }

    async fn start(&mut self, placement: Placement) -> Result<(), LaunchError> {
        self.first_rank = placement.workers.map_or(0, |ranks| ranks.first_rank);
        self.error_files.clear();
        let making = self.attempt(placement.round.0);
        let attempt = match heeding(&mut self.signals, &mut self.runner, making).await {
            None => return Ok(()),
            Some(Ok((folders, attempt))) => {
                self.folders = folders;
                attempt
            }
            // Nothing but recorded exceptions would be in it, which are no reason for workers not to run.
            Some(Err(error)) if is_full(&error) && !self.job.logs.fill_files() => {
                let run_id = &self.job.workers.run_id;
                tracing::warn!(target: "elastic_rs::agent", "[{run_id}] {error}; exceptions of workers are not recorded");
                None
            }
            Some(Err(error)) => {
                self.runner.not_started(0, self.first_rank, &error.to_string());
                return Ok(());
            }
        };
        let restarts = self.restarts(&placement);
        let specs = self.job.workers(&placement, restarts, attempt.as_ref(), &self.env).map_err(LaunchError)?;
        if let Some(attempt) = &attempt {
            self.error_files =
                specs.iter().map(|spec| (spec.local_rank, attempt.error_file(spec.local_rank))).collect();
        }
        let consoles = Consoles::own().map_err(|error| LaunchError(format!("no console: {error}")))?;
        if let Some(template) = &self.template {
            let loaded = heeding(&mut self.signals, &mut self.runner, template.loaded(&specs)).await;
            if loaded.is_none() {
                return Ok(());
            }
        }
        let filters = self.job.filters(attempt.as_ref());
        let starting = Group::start_from(self.template.as_ref(), specs, filters, consoles);
        let (started, signal) = finishing(&mut self.signals, self.runner.while_starting(starting)).await;
        match started {
            Some(Ok(group)) => {
                self.tell_start(&placement, restarts, &group);
                let started = Started { error_files: self.error_files.clone(), first_rank: self.first_rank };
                self.runner.started(Crew::Spawned(Box::new(group)), started);
            }
            Some(Err(error)) => self.runner.not_started(error.local_rank, self.first_rank, &error.to_string()),
            None => {} // the runner knows why, or is told below
        }
        if let Some(signal) = signal {
            self.runner.signal(signal);
        }
        Ok(())
    }

    /// What workers are told. Where one store serves all rounds, PyTorch's workers keep their keys apart by this number
    /// (`torch/distributed/rendezvous.py`), so it has to be another in each.
    fn restarts(&self, placement: &Placement) -> u32 {
        match self.job.fixed {
            Some(Fixed { .. }) => u32::try_from(placement.round.0.saturating_sub(1)).unwrap_or(u32::MAX),
            None => self.runner.restarts(),
        }
    }

    /// Make the folder of a round's logs, if there is to be one, and this node's folder of logs if it is the first. File systems
    /// may hang.
    fn attempt(
        &self,
        round: u64,
    ) -> impl Future<Output = io::Result<(Option<Arc<LogFolders>>, Option<AttemptFolder>)>> + use<> {
        let log_dir = match &self.job.log_folder {
            LogFolder::Nowhere => None,
            LogFolder::Temporary => Some(None),
            LogFolder::In(folder) => Some(Some(folder.clone())),
        };
        let (known, workers) = (self.folders.clone(), &self.job.workers);
        let (run_id, count) = (workers.run_id.clone(), workers.local_world_size);
        async move {
            let Some(log_dir) = log_dir else { return Ok((None, None)) };
            let made = spawn_blocking(move || {
                let folders = match known {
                    Some(folders) => folders,
                    None => Arc::new(LogFolders::create(log_dir.as_deref(), &run_id)?),
                };
                let attempt = folders.attempt(round.saturating_sub(1), count)?;
                Ok::<_, io::Error>((Some(folders), Some(attempt)))
            });
            made.await.map_err(io::Error::other)?
        }
    }

    fn tell_start(&self, placement: &Placement, restarts: u32, group: &Group) {
        let Some(ranks) = placement.workers else { return };
        let Job { entrypoint, workers, .. } = &self.job;
        let last = ranks.first_rank + workers.local_world_size - 1;
        let pids: Vec<String> = group.pids().values().map(u32::to_string).collect();
        tracing::info!(
            target: "elastic_rs::agent",
            "[{}] round {}, node rank {}: {entrypoint} runs as rank {} to {last} of {}, role {}, restart {restarts} of {}; \
             pids {}",
            workers.run_id,
            placement.round,
            placement.rank,
            ranks.first_rank,
            ranks.world_size,
            workers.role,
            workers.max_restarts,
            pids.join(", "),
        );
    }

    async fn end(&mut self, outcome: Outcome) -> Ended {
        let by = format!("{} ({})", self.addr(), self.job.name);
        let (verdict, reason) = match &outcome {
            Outcome::Succeeded | Outcome::NotNeeded => (Some(Verdict::Succeeded { by }), "the job is over".to_owned()),
            Outcome::Failed { cause, reason } => {
                let verdict = Verdict::Failed { by, cause: reason.clone(), failure: cause.clone() };
                (Some(verdict), "its workers failed".to_owned())
            }
            Outcome::NoPlace(error) => (None, error.to_string()),
            Outcome::Signal(_) => (None, "its process ended".to_owned()),
        };
        self.farewell(verdict, &reason).await;
        if outcome == Outcome::Succeeded {
            self.remove_folders();
        }
        Ended {
            outcome,
            exits: self.runner.exits().to_vec(),
            first_rank: self.first_rank,
            error_files: std::mem::take(&mut self.error_files),
        }
    }

    /// Tell the others, and stay for those whom this process serves. A signal ends the wait.
    async fn farewell(&mut self, verdict: Option<Verdict>, reason: &str) {
        if let Some(verdict) = verdict {
            self.session.close(verdict);
        }
        let Job { close_timeout, drain_timeout, .. } = self.job;
        let (session, store, host) = (&self.session, self.store.take(), self.host.clone());
        let farewell = async {
            session.leave(reason.to_owned(), None, close_timeout).await;
            // Clients that are still reading when their server vanishes print stack traces.
            if let Some(store) = store {
                let drained = spawn_blocking(move || store.drain(drain_timeout));
                let _ = telling_if_slow(drained, || {
                    format!(
                        "waiting up to {drain_timeout:.0?} for workers elsewhere to let go of the round's store, which is \
                         here; another signal ends the wait"
                    )
                })
                .await;
            }
            if let Some(host) = host {
                host.ended(drain_timeout).await;
            }
        };
        tokio::select! {
            () = farewell => {}
            _ = self.signals.next() => {}
        }
    }

    fn remove_folders(&self) {
        let Some(folders) = &self.folders else { return };
        if let Err(error) = folders.remove_if_temporary() {
            tracing::warn!("{error}");
        }
    }

    fn addr(&self) -> String {
        let addr = self.session.view().addr.or_else(|| self.job.reach.local_addr.clone());
        addr.unwrap_or_else(|| self.job.name.clone())
    }
}

/// Do what a start needs before any worker runs. `None`: a signal or the session has ended the round meanwhile, and the work was
/// dropped.
async fn heeding<T>(signals: &mut Receiver, runner: &mut Runner, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => runner.signal(signal),
            () = runner.start_withdrawn() => return None,
            done = &mut work => return Some(done),
        }
    }
}

/// Carry out a start to its end, so that workers that run already are asked to end before they are killed. Gives the signal that
/// came meanwhile as well. A second signal, or [`START_PATIENCE`] after the first, breaks it off.
async fn finishing<T>(signals: &mut Receiver, starting: impl Future<Output = Option<T>>) -> (Option<T>, Option<i32>) {
    let (mut starting, mut first, mut patience_ends) = (pin!(starting), None, None);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => {
                if first.is_some() {
                    return (None, first);
                }
                (first, patience_ends) = (Some(signal), Some(Instant::now() + START_PATIENCE));
            }
            started = &mut starting => return (started, first),
            () = until(patience_ends) => return (None, first),
        }
    }
}
