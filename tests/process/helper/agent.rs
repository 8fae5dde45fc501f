//! A small agent: starts one worker, says so, and waits for its end.

use std::env;

use elastic_rs::process::{Consoles, Event, FilterOptions, Group, WorkerSpec};

/// The worker does what `script` says.
pub fn run(script: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut spec = WorkerSpec::new(0, env::current_exe().expect("a path"));
        spec.args = script.split(' ').map(Into::into).collect();
        spec.env = env::vars_os().collect();
        let consoles = Consoles::own().expect("streams");
        let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.expect("a worker");
        while let Some(event) = group.next_event().await {
            if let Event::Exited(exited) = event {
                println!("worker: {}", exited.exit);
            }
        }
        println!("gone");
    });
}
