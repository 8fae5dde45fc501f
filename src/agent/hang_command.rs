//! Runs the command of `--on-hang`: a thread starts it, waits for it, and kills it when its time is over.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use super::shell::{Ran, Shell};
use crate::threads;
use crate::wire::text::cut;

/// How long the command of `--on-hang` may take. Then it is killed, with all that it has started.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);
/// How much of the command a line of the log shows.
const SHOWN_BYTES: usize = 200;

/// A command, run at most once at a time.
#[derive(Debug)]
pub(super) struct HangCommand {
    command: OsString,
    limit: Duration,
    shell: Arc<Shell>,
    runs: Arc<AtomicBool>,
}

/// What a run is about.
#[derive(Clone, Debug, Default)]
pub(super) struct About {
    /// What lines of the log begin with.
    pub prefix: String,
    /// The standard input.
    pub text: String,
    pub variables: Vec<(&'static str, String)>,
}

impl HangCommand {
    pub fn new(command: OsString) -> Self {
        Self { command, limit: TIME_LIMIT, shell: Arc::default(), runs: Arc::default() }
    }

    /// Run it beside the agent, unless it runs already.
    pub fn run(&self, about: About) {
        let shown = cut(self.command.to_string_lossy().into_owned(), SHOWN_BYTES);
        let prefix = about.prefix.clone();
        if self.runs.swap(true, Ordering::Relaxed) {
            return tracing::info!(
                "{prefix}the command of --on-hang (`{shown}`) still runs for an earlier hang: it is not run for this one"
            );
        }
        let (command, limit) = (self.command.clone(), self.limit);
        let run = Run { command, limit, about, shown: shown.clone(), shell: self.shell.clone() };
        let runs = self.runs.clone();
        let report = move || {
            run.report(|text| tracing::warn!("{text}"));
            runs.store(false, Ordering::Relaxed);
        };
        if let Err(error) = threads::spawn("on-hang".to_owned(), report) {
            self.runs.store(false, Ordering::Relaxed);
            tracing::warn!("{prefix}the command of --on-hang (`{shown}`) is not run: no thread: {error}");
        }
    }

    /// The agent ends, and with it the command. It is not run again.
    pub fn end(&self) {
        self.shell.end();
    }
}

impl Drop for HangCommand {
    fn drop(&mut self) {
        self.end();
    }
}

/// One run, in its thread.
struct Run {
    command: OsString,
    limit: Duration,
    about: About,
    /// The command, in a line of the log.
    shown: String,
    shell: Arc<Shell>,
}

impl Run {
    /// Run it, and warn if it fails.
    fn report(&self, warn: impl Fn(String)) {
        let (prefix, shown) = (&self.about.prefix, &self.shown);
        match self.run(&warn) {
            Ok(Some(Ran { exit, after, late: false, .. })) if !exit.is_success() => warn(format!(
                "{prefix}the command of --on-hang (`{shown}`) ended with {exit} after {:.1} s: nobody may know of the hang; its output is above",
                after.as_secs_f64()
            )),
            Ok(_) => {}
            Err(error) => warn(format!("{prefix}the command of --on-hang (`{shown}`) cannot be run: {error}")),
        }
    }

    fn run(&self, warn: impl Fn(String)) -> io::Result<Option<Ran>> {
        // Not a pipe: a command that reads nothing holds nobody up.
        let mut text: File = memfd_create("hang", MemfdFlags::CLOEXEC)?.into();
        text.write_all(self.about.text.as_bytes())?;
        text.rewind()?;
        let stdout: OwnedFd = io::stderr().as_fd().try_clone_to_owned()?;
        let mut made = Command::new("sh");
        made.arg("-c").arg(&self.command).envs(self.about.variables.iter().map(|(name, value)| (name, value)));
        made.stdin(text).stdout(stdout).stderr(Stdio::inherit());
        self.shell.run(made, None, Some(self.limit), || {
            warn(format!(
                "{}the command of --on-hang (`{}`) has not ended after {:.1} s and was killed, with all that it had started: what takes \
                 longer needs a session of its own (setsid)",
                self.about.prefix,
                self.shown,
                self.limit.as_secs_f64()
            ));
        })
    }
}

#[cfg(test)]
mod tests;
