//! A spawn request, as the fork server has received it: the steps in which its child becomes a worker's guard, and that child's
//! child the worker.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;

use rustix::pipe::{PipeFlags, pipe_with};

use super::message::Request;
use super::title;
use crate::workers::{ForkedGuard, GuardDescriptors};

/// A spawn request: a worker that is to be forked.
#[derive(Debug)]
pub struct SpawnRequest {
    request: Request,
    cwd: CString,
    stage: Stage,
    /// A pipe that ends with the guard. Only where the kernel has no pidfds.
    end: Option<OwnedFd>,
}

#[derive(Debug)]
enum Stage {
    /// In the server, or in a child of it that is not a guard yet.
    Received(GuardDescriptors),
    /// In the guard, or in its child.
    Guard(ForkedGuard),
    Done,
}

impl SpawnRequest {
    /// Reads a request whose message had these descriptors.
    pub(super) fn receive(fds: Vec<OwnedFd>) -> io::Result<SpawnRequest> {
        let garbled = || io::Error::new(io::ErrorKind::InvalidData, "the agent's spawn request cannot be decoded");
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(garbled);
        let [file, control, input, output, error, null] = [next()?, next()?, next()?, next()?, next()?, next()?];
        let mut file = File::from(file);
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        let request = Request::decode(&bytes).ok_or_else(garbled)?;
        let cwd = CString::new(request.cwd().into_os_string().into_vec())?;
        let deadline = if request.has_deadline { Some(fds.next().ok_or_else(garbled)?) } else { None };
        let agent = fds.next();
        let (end, lifeline) = match agent {
            Some(_) => (None, None),
            None => pipe_with(PipeFlags::CLOEXEC).map(|(read, write)| (Some(read), Some(write)))?,
        };
        let given = GuardDescriptors { control, agent, deadline, lifeline, stdio: [input, output, error], null };
        Ok(SpawnRequest { request, cwd, stage: Stage::Received(given), end })
    }

    /// In the server, once the guard is forked: closes the descriptors. Returns the pipe that ends with the guard, if there is one.
    pub(super) fn release(&mut self) -> Option<OwnedFd> {
        self.stage = Stage::Done;
        self.end.take()
    }

    /// The worker's program and arguments.
    pub fn argv(&self) -> Vec<OsString> {
        self.request.argv()
    }

    /// The worker's whole environment.
    pub fn env(&self) -> BTreeMap<OsString, OsString> {
        self.request.env()
    }

    /// In a child of the server that blocks all signals: becomes the worker's guard.
    pub(super) fn become_guard(&mut self) -> io::Result<()> {
        self.end = None;
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Received(given) => {
                self.stage =
                    Stage::Guard(ForkedGuard::begin(given, &self.request.cpus).map_err(io::Error::from_raw_os_error)?);
                Ok(())
            }
            Stage::Guard(_) | Stage::Done => Err(out_of_turn()),
        }
    }

    /// In the guard: supervises its child `worker` until no process of it is left, and ends the process.
    ///
    /// # Errors
    /// This process is not a guard.
    pub fn watch(&mut self, worker: i32) -> io::Error {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Guard(guard) => guard.watch(worker),
            Stage::Received(_) | Stage::Done => out_of_turn(),
        }
    }

    /// In the guard's child: becomes the worker, with its session, streams and folder. The caller sets its variables.
    ///
    /// # Errors
    /// This process is not a guard's child. Any other failure ends it, and the guard reports it.
    pub fn become_worker(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Guard(guard) => guard.become_worker(&self.cwd),
            Stage::Received(_) | Stage::Done => return Err(out_of_turn()),
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
