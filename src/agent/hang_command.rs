//! Runs the command of `--on-hang`: a thread starts it, waits for it, and kills it when its time is over.
//!
//! The kernel kills the command when the thread that has started it ends, so that it does not outlive the agent's process. What it
//! leaves in the background is killed when it ends, since a group of processes without an owner would be nobody's.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{self, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal as Kill, kill_process_group, pidfd_open};

use crate::open_files;
use crate::processes::{Life, start_session};
use crate::signals::Signal;
use crate::threads;
use crate::wire::text::cut;
use crate::workers::ExitStatus;

/// How long the command of `--on-hang` may take. Then it is killed, with all that it has started.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);
/// How much of the command a line of the log shows.
const SHOWN_BYTES: usize = 200;

/// A command, run at most once at a time.
#[derive(Debug)]
pub(super) struct HangCommand {
    command: OsString,
    limit: Duration,
    stage: Arc<Mutex<Stage>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Rests,
    /// A thread has it: the command is about to start, or has ended.
    Begun,
    Runs(Pid),
    /// The agent has ended.
    Over,
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
        Self { command, limit: TIME_LIMIT, stage: Arc::default() }
    }

    /// Run it beside the agent, unless it runs already.
    pub fn run(&self, about: About) {
        let shown = cut(self.command.to_string_lossy().into_owned(), SHOWN_BYTES);
        let prefix = about.prefix.clone();
        let mut stage = self.stage.lock();
        match *stage {
            Stage::Rests => *stage = Stage::Begun,
            Stage::Begun | Stage::Runs(_) => {
                return tracing::info!(
                    "{prefix}the command of --on-hang (`{shown}`) still runs for an earlier hang: it is not run for this one"
                );
            }
            Stage::Over => return,
        }
        let run = Run {
            command: self.command.clone(),
            limit: self.limit,
            about,
            shown: shown.clone(),
            stage: self.stage.clone(),
        };
        if let Err(error) = threads::spawn("on-hang".to_owned(), move || run.report(|text| tracing::warn!("{text}"))) {
            *stage = Stage::Rests;
            tracing::warn!("{prefix}the command of --on-hang (`{shown}`) is not run: no thread: {error}");
        }
    }

    /// The agent ends, and with it the command. It is not run again.
    pub fn end(&self) {
        // Nobody reaps it meanwhile, so the number is still its own.
        let mut stage = self.stage.lock();
        if let Stage::Runs(pid) = std::mem::replace(&mut *stage, Stage::Over) {
            kill_group(pid);
        }
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
    stage: Arc<Mutex<Stage>>,
}

impl Run {
    /// Run it, and warn if it fails.
    fn report(&self, warn: impl Fn(String)) {
        let (prefix, shown) = (&self.about.prefix, &self.shown);
        match self.run(&warn) {
            Ok(Ended::By(exit, after)) if !exit.is_success() => warn(format!(
                "{prefix}the command of --on-hang (`{shown}`) ended with {exit} after {:.1} s: nobody may know of the hang; its output is above",
                after.as_secs_f64()
            )),
            Ok(_) => {}
            Err(error) => warn(format!("{prefix}the command of --on-hang (`{shown}`) cannot be run: {error}")),
        }
        let mut stage = self.stage.lock();
        if *stage != Stage::Over {
            *stage = Stage::Rests;
        }
    }

    fn run(&self, warn: impl Fn(String)) -> io::Result<Ended> {
        let began = Instant::now();
        let mut child = self.start()?;
        let pid = Pid::from_child(&child);
        if !self.is_on(Stage::Runs(pid)) {
            kill_group(pid);
            child.wait()?;
            return Ok(Ended::WithTheAgent);
        }
        let waited = pidfd_open(pid, PidfdFlags::empty()).and_then(|child| ends(&child.as_fd(), began + self.limit));
        // Until it is reaped, its number is the group's. From here on nobody else kills that.
        let is_wanted = self.is_on(Stage::Begun);
        kill_group(pid);
        let is_late = is_wanted && waited == Ok(false);
        if is_late {
            // Said before the wait: a process that a file system holds does not end.
            warn(format!(
                "{}the command of --on-hang (`{}`) has not ended after {:.1} s and was killed, with all that it had started: what takes \
                 longer needs a session of its own (setsid)",
                self.about.prefix,
                self.shown,
                self.limit.as_secs_f64()
            ));
        }
        let status = child.wait()?;
        waited?;
        Ok(match (is_wanted, is_late) {
            (false, _) => Ended::WithTheAgent,
            (true, true) => Ended::Late,
            (true, false) => Ended::By(exit_of(status), began.elapsed()),
        })
    }

    fn start(&self) -> io::Result<process::Child> {
        // Not a pipe: a command that reads nothing holds nobody up.
        let mut text: File = memfd_create("hang", MemfdFlags::CLOEXEC)?.into();
        text.write_all(self.about.text.as_bytes())?;
        text.rewind()?;
        let stdout: OwnedFd = io::stderr().as_fd().try_clone_to_owned()?;
        let mut made = Command::new("sh");
        made.arg("-c").arg(&self.command).envs(self.about.variables.iter().map(|(name, value)| (name, value)));
        made.stdin(text).stdout(stdout).stderr(Stdio::inherit());
        start_session(&mut made, open_files::limit_of_workers(), Life::UntilThreadEnds)
    }

    /// Enter a stage. False if the agent has ended.
    fn is_on(&self, next: Stage) -> bool {
        let mut stage = self.stage.lock();
        let is_on = *stage != Stage::Over;
        if is_on {
            *stage = next;
        }
        is_on
    }
}

enum Ended {
    By(ExitStatus, Duration),
    Late,
    WithTheAgent,
}

/// Wait for the end of a process. False if it has not come in time.
fn ends(pidfd: &impl AsFd, until: Instant) -> Result<bool, Errno> {
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Kill a process that leads a session, with all that it has started in its group.
pub(super) fn kill_group(pid: Pid) {
    // Fails if nothing of it is left.
    let _ = kill_process_group(pid, Kill::KILL);
}

pub(super) fn exit_of(status: process::ExitStatus) -> ExitStatus {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitStatus::Code(code),
        (None, signal) => {
            ExitStatus::Signal { signal: Signal(signal.unwrap_or_default()), core_dumped: status.core_dumped() }
        }
    }
}

#[cfg(test)]
mod tests;
