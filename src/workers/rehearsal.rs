//! A trial run: whether a worker can be started and supervised on this machine.

use std::ffi::OsString;

use super::consoles::Consoles;
use super::event::Event;
use super::exit::ExitStatus;
use super::group::Group;
use super::logs::FilterOptions;
use super::spec::{Input, Output, WorkerSpec};

/// Starts a command as workers are started, and waits until no process of it is left. Needs a tokio runtime with I/O and time.
///
/// # Errors
/// In words: the system call that the machine refuses, or how the command ended.
pub async fn rehearse(command: Vec<OsString>) -> Result<(), String> {
    let mut command = command.into_iter();
    let program = command.next().ok_or("no command")?;
    let mut spec = WorkerSpec::new(0, program);
    spec.args = command.collect();
    (spec.stdin, spec.stdout, spec.stderr) = (Input::Null, Output::Null, Output::Null);
    let consoles = Consoles::own().map_err(|error| error.to_string())?;
    let started = Group::start(vec![spec], FilterOptions::default(), consoles).await;
    let mut group = started.map_err(|error| error.to_string())?;
    let mut exit = ExitStatus::Unseen;
    while let Some(event) = group.next_event().await {
        if let Event::Exited(exited) = event {
            exit = exited.exit;
        }
    }
    if exit.is_success() { Ok(()) } else { Err(format!("the trial process failed: {exit}")) }
}
