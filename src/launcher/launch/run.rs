//! One node of `elastic-run` at work: carries out what the agent's [`Runner`] asks for, until it has ended.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use super::job::{Job, LogFolder};
use crate::agent::Outcome;
use crate::agent::runner::{Programs, Runner, START_PATIENCE, Step};
use crate::clock::until;
use crate::launcher::node::Node;
use crate::rendezvous::messages::message::{EndClass, JoinWorkers, Placement, Verdict};
use crate::signals::{Meaning, Meanings, Received, Receiver, Signal};
use crate::threads;
use crate::warm::Template;
use crate::workers::{AttemptFolder, Consoles, LogFolders, WorkerExit, is_full, written};

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Why.
    pub outcome: Outcome,
    /// This machine is taken away: a notice had come.
    pub taken_away: bool,
    /// Whose fault it was, if that is known.
    pub class: Option<EndClass>,
    /// How the workers of the last round ended, in that order.
    pub exits: Vec<WorkerExit>,
    /// When the last round's first failure happened, or when this node learned of it. `None`: there was none.
    pub failed_at: Option<Instant>,
    /// Global rank of the last round's first worker.
    pub first_rank: u32,
    /// Where the workers of the last round may have recorded exceptions, by local rank.
    pub error_files: BTreeMap<u32, PathBuf>,
}

/// This node cannot go on, for a reason that concerns no other.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LaunchError(String);

/// Runs the workers of every round until the job, or this node's part, has ended. Nothing is left of the workers when this returns.
///
/// Needs the whole runtime: dropping the future kills workers without waiting for their ends.
///
/// # Errors
/// [`LaunchError`]; the others go on without this node.
pub async fn run(job: Job, node: Arc<Node>, signals: Receiver) -> Result<Ended, LaunchError> {
    let mut launch = Launch::new(job, node, signals);
    let ended = launch.work().await;
    if let Err(LaunchError(reason)) = &ended {
        launch.runner.close().await;
        launch.farewell(None, reason, None).await;
    }
    if let Some(template) = &launch.template {
        template.end().await;
    }
    // Whoever has sent a signal wants this process to end.
    if !matches!(&ended, Ok(Ended { outcome: Outcome::Signal(_), .. })) {
        tokio::select! {
            () = written() => {}
            () = end(&mut launch.signals, &launch.job.agent.signals) => {}
        }
    }
    ended
}

struct Launch {
    job: Job,
    node: Arc<Node>,
    signals: Receiver,
    runner: Runner,
    /// What workers inherit: this process's environment, and the variables of the job.
    env: BTreeMap<OsString, OsString>,
    /// Workers are forked from it.
    template: Option<Template>,
    folders: Option<Arc<LogFolders>>,
}

impl Launch {
    fn new(job: Job, node: Arc<Node>, signals: Receiver) -> Self {
        let runner = Runner::new(job.agent.clone(), Some(Arc::clone(node.session())));
        let env = env::vars_os().chain(job.variables.clone()).collect();
        let template = job.template(&env).map(Template::start);
        Self { job, node, signals, runner, env, template, folders: None }
    }

    async fn work(&mut self) -> Result<Ended, LaunchError> {
        loop {
            let step = tokio::select! {
                biased;
                signal = self.signals.next() => {
                    signalled(&mut self.runner, signal);
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
        let workers = &self.job.agent.workers;
        let workers =
            JoinWorkers::new(workers.role.clone(), workers.local_world_size).running(&self.job.agent.entrypoint);
        let is_new = self.runner.placement().is_none();
        let joining = async {
            // The other nodes of a running job train on while a newcomer's template loads.
            if let Some(template) = &self.template
                && is_new
            {
                template.ready().await;
            }
            self.node.join(Some(workers)).await
        };
        let mut joining = pin!(joining);
        let joined = loop {
            tokio::select! {
                biased;
                signal = self.signals.next() => signalled(&mut self.runner, signal),
                () = self.runner.hear() => {}
                joined = &mut joining => break joined,
            }
            if !self.runner.is_joining() {
                return Ok(());
            }
        };
        match joined {
            Ok(placement) => {
                self.check_rank(&placement)?;
                self.runner.placed(placement);
            }
            Err(error) => self.runner.no_placement(error),
        }
        Ok(())
    }

    /// With fixed ranks nobody else may have this node's.
    fn check_rank(&self, placement: &Placement) -> Result<(), LaunchError> {
        match self.node.options().node_rank {
            Some(asked) if self.job.fixed.is_some() && asked != placement.rank => Err(LaunchError(format!(
                "--node-rank is `{asked}`, but this is number {} of {} nodes by rank: give each node another rank, from 0 to {}",
                placement.rank,
                placement.world_size,
                placement.world_size - 1
            ))),
            _ => Ok(()),
        }
    }

    async fn start(&mut self, placement: Placement) -> Result<(), LaunchError> {
        let making = self.attempt(&placement);
        let attempt = match heeding(&mut self.signals, &mut self.runner, making).await {
            None => return Ok(()),
            Some(Ok((folders, attempt))) => {
                if let Some(folders) = &folders {
                    self.node.write_events(folders.run());
                }
                self.folders = folders;
                attempt
            }
            // Nothing but recorded exceptions would be in it, which are no reason for workers not to run.
            Some(Err(error)) if is_full(&error) && !self.job.logs.fill_files() => {
                let run_id = &self.job.agent.workers.run_id;
                tracing::warn!(target: "elastic_rs::agent", "[{run_id}] {error}; exceptions of workers are not recorded");
                None
            }
            Some(Err(error)) => {
                self.runner.not_started(0, &error.to_string());
                return Ok(());
            }
        };
        let restarts = self.runner.restarts_for_workers();
        let specs = self.job.workers(&placement, restarts, attempt.as_ref(), &self.env).map_err(LaunchError)?;
        let error_file = |attempt: &AttemptFolder, rank| (rank, attempt.error_file(rank));
        let error_files =
            attempt.iter().flat_map(|attempt| specs.iter().map(|spec| error_file(attempt, spec.local_rank))).collect();
        let consoles = Consoles::own().map_err(|error| LaunchError(format!("no console: {error}")))?;
        loop {
            tokio::select! {
                biased;
                signal = self.signals.next() => signalled(&mut self.runner, signal),
                loaded = self.runner.loaded(self.template.as_ref(), &specs) => match loaded {
                    true => break,
                    false => return Ok(()),
                },
            }
        }
        let filters = self.job.filters(attempt.as_ref());
        let programs = Programs { specs, filters, consoles, error_files, template: self.template.as_ref() };
        let meanings = &self.job.agent.signals;
        for signal in finishing(&mut self.signals, meanings, self.runner.start(programs)).await {
            signalled(&mut self.runner, signal);
        }
        Ok(())
    }

    /// Make the folder of a round's logs, if there is to be one, and this node's folder of logs if it is the first. File systems
    /// may hang.
    fn attempt(
        &self,
        placement: &Placement,
    ) -> impl Future<Output = io::Result<(Option<Arc<LogFolders>>, Option<AttemptFolder>)>> + use<> {
        let log_dir = match &self.job.log_folder {
            LogFolder::Nowhere => None,
            LogFolder::Temporary => Some(None),
            LogFolder::In(folder) => Some(Some(folder.clone())),
        };
        let (known, workers) = (self.folders.clone(), &self.job.agent.workers);
        let (run_id, count) = (workers.run_id.clone(), placement.workers_of(workers.local_world_size));
        let attempt = self.runner.attempt();
        async move {
            let Some(log_dir) = log_dir else { return Ok((None, None)) };
            let made = threads::aside("log-folders", move || {
                let folders = match known {
                    Some(folders) => folders,
                    None => Arc::new(LogFolders::create(log_dir.as_deref(), &run_id)?),
                };
                let attempt = folders.attempt(&attempt, count)?;
                Ok::<_, io::Error>((Some(folders), Some(attempt)))
            });
            made.await?
        }
    }

    async fn end(&mut self, outcome: Outcome) -> Ended {
        let by = self.node.label();
        let (verdict, reason, signal) = match &outcome {
            Outcome::Succeeded | Outcome::NotNeeded => {
                (Some(Verdict::Succeeded { by }), "the job is over".to_owned(), None)
            }
            Outcome::Failed { cause, reason, class } => {
                let verdict = Verdict::Failed { by, cause: reason.clone(), failure: cause.clone(), class: *class };
                (Some(verdict), "its workers failed".to_owned(), None)
            }
            // The others go on.
            Outcome::Unfit { reason, .. } => (None, reason.clone(), None),
            Outcome::NoPlacement(error) => (None, error.to_string(), None),
            Outcome::Signal(signal) => (None, "its process ended".to_owned(), Some(*signal)),
        };
        self.farewell(verdict, &reason, signal).await;
        if outcome == Outcome::Succeeded {
            self.remove_folders();
        }
        Ended {
            class: outcome.class(self.runner.was_in_world()),
            taken_away: self.runner.is_taken_away(),
            outcome,
            exits: self.runner.exits().to_vec(),
            failed_at: self.runner.failed_at(),
            first_rank: self.runner.first_rank(),
            error_files: self.runner.error_files().clone(),
        }
    }

    /// Tell the others, and stay for those whom this process serves. A signal ends the wait. `signal` is what ended the job here.
    async fn farewell(&mut self, verdict: Option<Verdict>, reason: &str, signal: Option<i32>) {
        if let Some(verdict) = verdict {
            self.node.session().close(verdict);
        }
        tokio::select! {
            () = self.node.leave(reason.to_owned(), signal, self.job.close_timeout) => {}
            () = end(&mut self.signals, &self.job.agent.signals) => {}
        }
        self.node.end_events().await;
    }

    fn remove_folders(&self) {
        let Some(folders) = &self.folders else { return };
        if let Err(error) = folders.remove_if_temporary() {
            tracing::warn!("{error}");
        }
    }
}

fn signalled(runner: &mut Runner, Received { signal, sender }: Received) {
    runner.signal(signal, &sender.text());
}

/// Do what a start needs before any worker runs. `None`: a signal or the session has ended the round meanwhile, and the work was
/// dropped.
async fn heeding<T>(signals: &mut Receiver, runner: &mut Runner, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => signalled(runner, signal),
            () = runner.start_withdrawn() => return None,
            done = &mut work => return Some(done),
        }
    }
}

/// Wait for a signal that ends this process. Others have no effect any more.
async fn end(signals: &mut Receiver, meanings: &Meanings) {
    while meanings.of(Signal(signals.next().await.signal)) != Meaning::Ends {}
}

/// Carry out a start to its end, so that workers that run already are asked to end before they are killed. Gives the signals that
/// came meanwhile. A second one that ends this process, or [`START_PATIENCE`] after the first, breaks it off.
async fn finishing<T>(signals: &mut Receiver, meanings: &Meanings, starting: impl Future<Output = T>) -> Vec<Received> {
    let (mut starting, mut received, mut patience_ends) = (pin!(starting), Vec::new(), None);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => {
                let ends = meanings.of(Signal(signal.signal)) == Meaning::Ends;
                if ends && patience_ends.is_some() {
                    return received;
                }
                received.push(signal);
                patience_ends = patience_ends.or(ends.then(|| Instant::now() + START_PATIENCE));
            }
            _ = &mut starting => return received,
            () = until(patience_ends) => return received,
        }
    }
}
