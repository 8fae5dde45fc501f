//! The template's end of the socket: it receives spawn requests, and sends the descriptors of guards.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

use super::super::guard::{Descriptors, Hatching, block_signals};
use super::request::{Answer, Request};
use super::{socket, title};

/// The fork server's state: a process with one thread that has imported the workers' modules.
#[derive(Debug)]
pub struct Nest {
    socket: OwnedFd,
    /// For each guard that was forked here and not reaped yet: a descriptor that becomes readable when the guard ends.
    guards: BTreeMap<i32, OwnedFd>,
}

impl Nest {
    /// Takes the template's end of the socket.
    pub fn new(socket: OwnedFd) -> Nest {
        Nest { socket, guards: BTreeMap::new() }
    }

    /// Tells the agent that everything is imported.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn ready(&self) -> io::Result<()> {
        self.tell(&Answer::Ready, &[])
    }

    /// Tells the agent why no worker can be forked here. The caller ends the process then.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn refuse(&self, reason: &str) -> io::Result<()> {
        self.tell(&Answer::Refused(reason.to_owned()), &[])
    }

    /// Waits for the next spawn request; `None` once the agent has closed the socket. Reaps guards meanwhile.
    ///
    /// # Errors
    /// The request cannot be decoded.
    pub fn next_egg(&mut self) -> io::Result<Option<Egg>> {
        loop {
            if self.wait()? {
                let (bytes, fds) = socket::receive(&self.socket, 1)?;
                return if bytes.is_empty() { Ok(None) } else { Egg::lay(fds).map(Some) };
            }
        }
    }

    /// In the template, after it has forked a worker's guard: sends the guard's descriptor and releases the request.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn forked(&mut self, egg: &mut Egg, guard: i32) -> io::Result<()> {
        egg.stage = Stage::Over;
        let pid = Pid::from_raw(guard).ok_or(io::ErrorKind::InvalidInput)?;
        let end = match egg.end.take() {
            Some(end) => end,
            // The guard is not reaped yet, so its process id cannot have been reused.
            None => pidfd_open(pid, PidfdFlags::empty())?,
        };
        self.tell(&Answer::Forked, &[&end])?;
        self.guards.insert(guard, end);
        Ok(())
    }

    /// Waits for the socket or for the end of guards, which it reaps. True if the socket is readable.
    fn wait(&mut self) -> io::Result<bool> {
        let fds = std::iter::once(&self.socket).chain(self.guards.values());
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        retry_on_intr(|| poll(&mut fds, None))?;
        let asked = !fds[0].revents().is_empty();
        let ended = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>();
        for (guard, _) in self.guards.keys().copied().collect::<Vec<_>>().into_iter().zip(ended).filter(|(_, it)| *it) {
            // ECHILD: an imported module has reaped it.
            let _ = waitpid(Pid::from_raw(guard), WaitOptions::empty());
            self.guards.remove(&guard);
        }
        Ok(asked)
    }

    fn tell(&self, answer: &Answer, fds: &[&OwnedFd]) -> io::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        Ok(socket::send(&self.socket, &answer.encode(), &fds)?)
    }
}

/// A spawn request: a worker that is to be forked.
#[derive(Debug)]
pub struct Egg {
    request: Request,
    cwd: CString,
    stage: Stage,
    /// A pipe that ends with the guard. Only where the kernel has no pidfds.
    end: Option<OwnedFd>,
}

#[derive(Debug)]
enum Stage {
    Given(Descriptors),
    Hatching(Hatching),
    Over,
}

impl Egg {
    fn lay(fds: Vec<OwnedFd>) -> io::Result<Egg> {
        let garbled = || io::Error::new(io::ErrorKind::InvalidData, "the agent's spawn request cannot be decoded");
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(garbled);
        let [file, control, input, output, error, null] = [next()?, next()?, next()?, next()?, next()?, next()?];
        let agent = fds.next();
        let (end, life) = match agent {
            Some(_) => (None, None),
            None => pipe_with(PipeFlags::CLOEXEC).map(|(read, write)| (Some(read), Some(write)))?,
        };
        let mut file = File::from(file);
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        let request = Request::decode(&bytes).ok_or_else(garbled)?;
        let cwd = CString::new(request.cwd().into_os_string().into_vec())?;
        let given = Descriptors { control, agent, life, stdio: [input, output, error], null };
        Ok(Egg { request, cwd, stage: Stage::Given(given), end })
    }

    /// The worker's program and arguments.
    pub fn argv(&self) -> Vec<OsString> {
        self.request.argv()
    }

    /// The worker's whole environment.
    pub fn env(&self) -> BTreeMap<OsString, OsString> {
        self.request.env()
    }

    /// In a child of the template: becomes the worker's guard. The caller forks the worker next.
    ///
    /// # Errors
    /// The guard cannot be set up, which the agent has been told. The caller ends the process then.
    pub fn become_guard(&mut self, nest: Nest) -> io::Result<()> {
        block_signals();
        drop(nest);
        self.end = None;
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Given(given) => {
                self.stage = Stage::Hatching(Hatching::begin(given).map_err(io::Error::from_raw_os_error)?);
                Ok(())
            }
            Stage::Hatching(_) | Stage::Over => Err(out_of_turn()),
        }
    }

    /// In the guard: supervises its child `worker` until no process of it is left, and ends the process.
    ///
    /// # Errors
    /// This process is not a guard.
    pub fn watch(&mut self, worker: i32) -> io::Error {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Hatching(hatching) => hatching.watch(worker),
            Stage::Given(_) | Stage::Over => out_of_turn(),
        }
    }

    /// In the guard's child: becomes the worker, with its session, streams and folder. The caller sets its variables.
    ///
    /// # Errors
    /// This process is not a guard's child. Any other failure ends it, and the guard reports it.
    pub fn become_worker(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Hatching(hatching) => hatching.become_worker(&self.cwd),
            Stage::Given(_) | Stage::Over => return Err(out_of_turn()),
        }
        Ok(())
    }

    /// Makes `/proc` and `ps` show the command and environment of the worker, as far as they fit.
    ///
    /// # Safety
    /// Nothing may use the arguments of `main`, or the results of `getenv` since the process was executed.
    pub unsafe fn show(&self) {
        // SAFETY: as promised by the caller.
        unsafe { title::show(&self.argv(), &self.env()) };
    }
}

fn out_of_turn() -> io::Error {
    io::Error::other("a worker is forked in three steps: become_guard, fork, watch or become_worker")
}
