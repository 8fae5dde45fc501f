//! Small agents: they start one worker and wait for its end.

use std::env;
use std::fs;
use std::time::Duration;

use elastic_rs::agent::environment::Workers;
use elastic_rs::agent::notices;
use elastic_rs::agent::runner::{ErrorFiles, Runner, Step};
use elastic_rs::agent::{AgentOptions, Budget, Outcome};
use elastic_rs::hang::judge;
use elastic_rs::rendezvous::conf::InPlace;
use elastic_rs::signals::{FirstSignal, Meanings};
use elastic_rs::workers::{Consoles, Event, FilterOptions, Group, WorkerSpec};

#[path = "../../alone.rs"]
mod alone;

async fn start(script: &str) -> Group {
    let mut spec = WorkerSpec::new(0, env::current_exe().expect("a path"));
    spec.args = script.split(' ').map(Into::into).collect();
    spec.env = env::vars_os().collect();
    let consoles = Consoles::own().expect("streams");
    Group::start(vec![spec], FilterOptions::default(), consoles).await.expect("a worker")
}

/// Start a worker that performs `script`, and print its end.
pub fn run(script: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut group = start(script).await;
        while let Some(event) = group.next_event().await {
            if let Event::Exited(exited) = event {
                println!("worker: {}", exited.exit);
            }
        }
        println!("gone");
    });
}

/// Run an agent with such a worker in a control group, and print the job's failure. `procs` is the group's `cgroup.procs`.
pub fn run_within(procs: &str, script: &str) {
    fs::write(procs, std::process::id().to_string()).expect("a control group");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let limit = Duration::from_secs(60);
        let workers = Workers {
            run_id: "job".to_owned(),
            role: "role".to_owned(),
            local_world_size: 1,
            max_restarts: 0,
            use_agent_store: true,
            virtual_local_rank: false,
            resizes_nccl: false,
        };
        let options = AgentOptions {
            name: "agent".to_owned(),
            entrypoint: "helper".to_owned(),
            workers,
            budget: Budget::Node(0),
            grace: limit,
            first_signal: FirstSignal::default(),
            signals: Meanings::default(),
            notices: notices::Options::default(),
            health: None,
            exit_barrier_timeout: Some(limit),
            uninterruptible_sleep: Duration::ZERO,
            in_place: InPlace::Gloo,
            standbys: 0,
            hang: judge::Options::default(),
            on_hang: None,
            progress_log: None,
        };
        let mut runner = Runner::new(options, None);
        loop {
            match runner.next().await {
                Step::Join => runner.placed(alone::alone()),
                Step::Start(_) => {
                    runner.started(start(script).await.into(), ErrorFiles::new());
                }
                Step::End(outcome) => match *outcome {
                    Outcome::Failed { cause: Some(cause), .. } => return println!("{}\n{}", cause.exit, cause.message),
                    outcome => return println!("{outcome:?}"),
                },
                step => panic!("{step:?}"),
            }
        }
    });
}
