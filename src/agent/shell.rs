//! Runs commands beside the agent, one at a time, each in a session of its own.
//!
//! The kernel kills a command when the thread that has started it ends, so that it does not outlive the agent's process. What it leaves
//! in the background is killed when it ends, since a group of processes without an owner would be nobody's.

use std::ffi::OsStr;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{self, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal as Kill, kill_process_group, pidfd_open};

use crate::open_files;
use crate::processes::{Life, start_session};
use crate::signals::Signal;
use crate::workers::ExitStatus;

/// How much of a command's output is kept. The rest is read and dropped, so that whoever writes is not held up.
const KEPT_BYTES: usize = 4096;

/// Whoever runs commands, until the agent ends.
#[derive(Debug, Default)]
pub(super) struct Shell {
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Rests,
    Runs(Pid),
    /// The agent has ended.
    Over,
}

/// How a command has ended.
#[derive(Debug)]
pub(super) struct Ran {
    pub exit: ExitStatus,
    /// The beginning of what it has written, if that is read.
    pub output: String,
    pub after: Duration,
    /// It was killed when its time was over.
    pub late: bool,
}

impl Shell {
    /// Have `sh` run a command of the user's, for so long at most, and read what it writes. `errors`: also to standard error, which is the
    /// agent's own otherwise. `None`: the agent has ended.
    pub fn read(&self, command: &OsStr, errors: bool, limit: Option<Duration>) -> io::Result<Option<Ran>> {
        let (output, input) = io::pipe()?;
        let mut made = Command::new("sh");
        made.arg("-c").arg(command).stdin(Stdio::null());
        made.stderr(if errors { input.try_clone()?.into() } else { Stdio::inherit() }).stdout(input);
        self.run(made, Some(output), limit, || ())
    }

    /// Run a command, for so long at most. Its output is read from the pipe. `on_late`: it is killed now. `None`: the agent has ended.
    pub fn run(
        &self,
        mut command: Command,
        output: Option<PipeReader>,
        limit: Option<Duration>,
        on_late: impl FnOnce(),
    ) -> io::Result<Option<Ran>> {
        let began = Instant::now();
        if *self.stage.lock() == Stage::Over {
            return Ok(None);
        }
        let mut child = start_session(&mut command, open_files::limit_of_workers(), Life::UntilThreadEnds)?;
        drop(command); // and with it the pipe's other end
        let pid = Pid::from_child(&child);
        if !self.enter(Stage::Runs(pid)) {
            kill_group(pid);
        }
        let mut kept = Vec::new();
        let waited = pidfd_open(pid, PidfdFlags::empty())
            .and_then(|child| watch(&child.as_fd(), output, &mut kept, limit.map(|limit| began + limit)));
        // Until it is reaped, its number is the group's. From here on nobody else kills that.
        let is_on = self.enter(Stage::Rests);
        kill_group(pid);
        let late = is_on && waited == Ok(false);
        if late {
            // Said before the wait: a process that a file system holds does not end.
            on_late();
        }
        let exit = exit_of(child.wait()?);
        waited?;
        let output = String::from_utf8_lossy(&kept).into_owned();
        Ok(is_on.then(|| Ran { exit, output, after: began.elapsed(), late }))
    }

    /// Wait before the next command. False if the agent has ended.
    pub fn rest(&self, time: Duration) -> bool {
        let mut stage = self.stage.lock();
        if *stage != Stage::Over {
            self.changed.wait_for(&mut stage, time);
        }
        *stage != Stage::Over
    }

    /// The agent ends, and with it the command. None is run again.
    pub fn end(&self) {
        // Nobody reaps it meanwhile, so the number is still its own.
        let mut stage = self.stage.lock();
        if let Stage::Runs(pid) = std::mem::replace(&mut *stage, Stage::Over) {
            kill_group(pid);
        }
        self.changed.notify_all();
    }

    /// The command that runs.
    #[cfg(test)]
    pub fn runs(&self) -> Option<Pid> {
        match *self.stage.lock() {
            Stage::Runs(pid) => Some(pid),
            Stage::Rests | Stage::Over => None,
        }
    }

    /// False if the agent has ended.
    fn enter(&self, next: Stage) -> bool {
        let mut stage = self.stage.lock();
        let goes_on = *stage != Stage::Over;
        if goes_on {
            *stage = next;
        }
        goes_on
    }
}

/// Wait for the end of a process, and read what it writes meanwhile. False if it has not ended in time.
fn watch(
    pidfd: &impl AsFd,
    mut output: Option<PipeReader>,
    kept: &mut Vec<u8>,
    until: Option<Instant>,
) -> Result<bool, Errno> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
        let mut polled = vec![PollFd::new(pidfd, PollFlags::IN)];
        polled.extend(output.as_ref().map(|output| PollFd::new(output, PollFlags::IN)));
        match poll(&mut polled, left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
        }
        let is_late = until.is_some_and(|until| until <= Instant::now());
        let [ended, written] = [0, 1].map(|which| polled.get(which).is_some_and(|fd| !fd.revents().is_empty()));
        drop(polled);
        // One that writes without end is never quiet.
        if is_late && !ended {
            return Ok(false);
        }
        // What it has written before its end is read first, but not what a process writes that it has left.
        if written && !(ended && kept.len() >= KEPT_BYTES) {
            if !read_some(&mut output, kept) {
                output = None;
            }
        } else if ended {
            return Ok(true);
        }
    }
}

/// Read what is there. False if there will be no more.
fn read_some(output: &mut Option<PipeReader>, kept: &mut Vec<u8>) -> bool {
    let mut bytes = [0_u8; KEPT_BYTES];
    let Some(read) = output.as_mut().and_then(|output| output.read(&mut bytes).ok()) else { return false };
    let room = KEPT_BYTES.saturating_sub(kept.len());
    kept.extend_from_slice(&bytes[..read.min(room)]);
    read > 0
}

/// Kill a process that leads a session, with all that it has started in its group.
pub(super) fn kill_group(pid: Pid) {
    // Fails if nothing of it is left.
    let _ = kill_process_group(pid, Kill::KILL);
}

fn exit_of(status: process::ExitStatus) -> ExitStatus {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitStatus::Code(code),
        (None, signal) => {
            ExitStatus::Signal { signal: Signal(signal.unwrap_or_default()), core_dumped: status.core_dumped() }
        }
    }
}
