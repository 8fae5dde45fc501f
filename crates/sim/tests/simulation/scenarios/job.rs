//! [`Job`]: a simulated job, and questions about it.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{EndClass, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs_sim::coordinator::host::{Agent, Exit};
use elastic_rs_sim::coordinator::{Action, Options, Simulation};

/// A duration or time in milliseconds.
pub fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

pub fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// A simulated job.
pub struct Job(pub Simulation);

impl Job {
    pub fn new(hosts: usize, min: u32, max: u32) -> Self {
        Self::with(Options::exact(hosts, Settings::new(min, max)))
    }

    pub fn with(options: Options) -> Self {
        let mut simulation = Simulation::new(options);
        simulation.keep_history();
        Self(simulation)
    }

    /// A job that keeps no history. A large job's history is long.
    pub fn quiet(hosts: usize, min: u32, max: u32) -> Self {
        Self(Simulation::new(Options::exact(hosts, Settings::new(min, max))))
    }

    pub fn started(hosts: usize, min: u32, max: u32) -> Self {
        let mut job = Self::new(hosts, min, max);
        job.0.start_all(Duration::ZERO);
        job
    }

    pub fn start(&mut self, at: Duration, host: usize) {
        self.0.at(at, Action::Start(host, seconds(600)));
    }

    pub fn at(&mut self, at: Duration, action: Action) {
        self.0.at(at, action);
    }

    /// Run to `at`. Returns the round, and the rank of each host (`None`: it runs no workers).
    pub fn world(&mut self, at: Duration) -> (u64, Vec<Option<u32>>) {
        if let Err(violation) = self.0.run_until(at) {
            let history = self.0.history();
            let last = history.len().saturating_sub(40);
            panic!("{}\n{}", violation, history[last..].join("\n"));
        }
        let hosts = 0..self.0.hosts().len();
        let ranks = hosts.clone().map(|host| self.0.running(host).map(|placement| placement.rank)).collect();
        let rounds: std::collections::BTreeSet<_> =
            hosts.filter_map(|host| Some(self.0.running(host)?.round.0)).collect();
        assert!(rounds.len() <= 1, "two worlds at {at:?}: rounds {rounds:?}");
        (rounds.first().copied().unwrap_or(0), ranks)
    }

    pub fn exits(&self, host: usize) -> &[Exit] {
        &self.0.hosts()[host].exits
    }

    pub fn join_error(&self, host: usize) -> &JoinError {
        match self.exits(host) {
            [Exit::Join(error)] => error,
            other => panic!("host{host} did not fail to join: {other:?}"),
        }
    }

    pub fn waits(&self, host: usize) -> bool {
        let process = self.0.hosts()[host].process.as_ref();
        process.is_some_and(|process| process.agent == Agent::Joining)
    }
}

pub fn ranks(of: &[u32]) -> Vec<Option<u32>> {
    of.iter().copied().map(Some).collect()
}

pub fn failed() -> Verdict {
    Verdict::Failed {
        by: "host1".into(),
        cause: "rank 3 (host1) exited with code 7".into(),
        failure: None,
        class: EndClass::Program,
    }
}

pub fn job_with_budget(hosts: usize, min: u32, max_restarts: Option<u32>) -> Job {
    let mut settings = Settings::new(min, hosts as u32);
    settings.max_restarts = max_restarts;
    let mut job = Job::with(Options::exact(hosts, settings));
    job.0.start_all(Duration::ZERO);
    job
}

pub fn restarts(job: &Job) -> Vec<u32> {
    (0..job.0.hosts().len()).filter_map(|host| job.0.running(host).map(|placement| placement.restart)).collect()
}
