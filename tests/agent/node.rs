//! [`Node`]: a node of a job with real workers and a real coordinator. The test is its front end.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::agent::environment::Workers;
use elastic_rs::agent::notices;
use elastic_rs::agent::runner::{Runner, Step};
use elastic_rs::agent::{AgentOptions, Budget, Outcome};
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::hang::judge;
use elastic_rs::rendezvous::conf::InPlace;
use elastic_rs::rendezvous::messages::message::{Failure, Hello, JoinWorkers, NodeId, Placement};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::signals::{FirstSignal, Meanings};
use elastic_rs::store::server::ServerOptions;
use elastic_rs::workers::{Consoles, FilterOptions, Group, WorkerSpec};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokio::runtime::Handle;

use crate::alone::alone;
use crate::workers::support::{Folder, LIMIT, Shown, Traces, shown, within};

/// Settings without waiting times.
pub fn settings(min_nodes: u32, max_nodes: u32, max_restarts: u32) -> Settings {
    let mut settings = Settings::new(min_nodes, max_nodes);
    (settings.reconnect_grace, settings.settle_timeout) = (Duration::from_millis(20), Duration::from_millis(20));
    settings.max_restarts = Some(max_restarts);
    settings
}

pub fn host() -> EndpointServer {
    EndpointServer::listen(Some("127.0.0.1"), 0, ServerOptions::default(), None).unwrap()
}

pub fn session(host: &EndpointServer, number: u128, settings: &Settings) -> Arc<Session> {
    let name = format!("node{number}");
    let hello = Hello::new("job", NodeId(number), name.clone(), settings.clone());
    let hello = Hello { local_addr: Some(name), ..hello };
    Arc::new(Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), LIMIT, None))
}

/// The options of an agent named `agent`, in the job `job`.
pub fn options(budget: Budget, workers: u32) -> AgentOptions {
    let workers = Workers {
        run_id: "job".into(),
        role: "role".into(),
        local_world_size: workers,
        max_restarts: 3,
        use_agent_store: true,
        virtual_local_rank: false,
        resizes_nccl: false,
    };
    AgentOptions {
        name: "agent".into(),
        entrypoint: "helper".into(),
        workers,
        budget,
        grace: LIMIT,
        first_signal: FirstSignal::default(),
        signals: Meanings::default(),
        notices: notices::Options::default(),
        health: None,
        exit_barrier_timeout: None,
        uninterruptible_sleep: Duration::ZERO,
        in_place: InPlace::Gloo,
        standbys: 0,
        hang: judge::Options::default(),
        on_hang: None,
        progress_log: None,
    }
}

/// A front end. Its workers are `process_helper` processes, which perform a script in each round.
pub struct Node {
    pub runner: Runner,
    pub session: Option<Arc<Session>>,
    pub traces: Traces,
    pub workers: u32,
    pub error_files: BTreeMap<u32, PathBuf>,
    /// The output of the last round's workers.
    pub shown: Option<Shown>,
}

impl Node {
    pub fn new(session: Option<Arc<Session>>, budget: Budget, workers: u32) -> Self {
        let runner = Runner::new(options(budget, workers), session.clone());
        Self { runner, session, traces: Traces::new(), workers, error_files: BTreeMap::new(), shown: None }
    }

    pub async fn next(&mut self) -> Step {
        within(self.runner.next()).await
    }

    /// Join, and return the place for which workers must be started.
    pub async fn placed(&mut self) -> Placement {
        assert!(matches!(self.next().await, Step::Join));
        match &self.session {
            Some(session) => {
                let workers = JoinWorkers::new("role", self.workers);
                let placement = within(session.join(1000, None, Some(workers), LIMIT)).await.unwrap();
                self.runner.placed(placement);
            }
            None => self.runner.placed(alone()),
        }
        match self.next().await {
            Step::Start(placement) => *placement,
            step => panic!("{step:?}"),
        }
    }

    fn specs(&self, scripts: &[&str]) -> Vec<WorkerSpec> {
        (0..).zip(scripts).map(|(rank, script)| self.traces.worker(rank, script)).collect()
    }

    pub async fn start(&mut self, scripts: &[&str]) {
        let (console, shown) = shown();
        self.shown = Some(shown);
        self.start_on(console, scripts).await;
    }

    /// As [`Node::start`], with the workers' output on `console`.
    pub async fn start_on(&mut self, console: OwnedFd, scripts: &[&str]) {
        let consoles = Consoles { stderr: console.try_clone().unwrap(), stdout: console };
        let group = Group::start(self.specs(scripts), FilterOptions::default(), consoles).await.unwrap();
        self.runner.started(group.into(), self.error_files.clone());
    }

    pub fn line(&self) -> String {
        self.shown.as_ref().unwrap().line()
    }

    /// The outcome, which must be the next step.
    pub async fn outcome(&mut self) -> Outcome {
        match self.next().await {
            Step::End(outcome) => *outcome,
            step => panic!("{step:?}"),
        }
    }

    pub async fn cause(&mut self) -> Failure {
        match self.outcome().await {
            Outcome::Failed { cause: Some(cause), .. } => *cause,
            outcome => panic!("{outcome:?}"),
        }
    }

    /// The exits of the last round's workers, in the order of their ends.
    pub fn exits(&self) -> Vec<(u32, String)> {
        self.runner.exits().iter().map(|exited| (exited.local_rank, exited.exit.to_string())).collect()
    }

    /// Deliver a signal during a wait, as a front end does: it drops the future of the wait, and waits again.
    pub async fn signal(&mut self, number: i32) {
        tokio::select! {
            biased;
            step = self.runner.next() => panic!("{step:?}"),
            () = std::future::ready(()) => self.runner.signal(number, ""),
        }
    }
}

/// Two nodes with `workers` each, in one world.
pub async fn two_placed(host: &EndpointServer, settings: &Settings, workers: u32) -> [Node; 2] {
    let [mut one, mut two] =
        [1, 2].map(|number| Node::new(Some(session(host, number, settings)), Budget::Job, workers));
    tokio::join!(one.placed(), two.placed());
    [one, two]
}

/// A named pipe without a writer, in place of a file on a file system that hangs. Dropping it releases its readers.
pub struct Endless(pub PathBuf);

impl Endless {
    pub fn new(folder: &Folder) -> Self {
        let path = folder.0.join("error.json");
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        Self(path)
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        // Opening a pipe for reading and writing does not block.
        drop(std::fs::OpenOptions::new().read(true).write(true).open(&self.0));
    }
}
