//! The fork server's own end of the socket: it receives spawn requests, and sends the descriptors of guards.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

use super::message::Answer;
use super::socket;
use super::spawn_request::SpawnRequest;
use crate::workers::block_signals;

/// The state of a fork server: a process with one thread that has imported the workers' modules.
#[derive(Debug)]
pub struct ForkServer {
    socket: OwnedFd,
    /// For each guard that was forked here and not reaped yet: a descriptor that becomes readable when the guard ends.
    guards: BTreeMap<i32, OwnedFd>,
}

impl ForkServer {
    /// Takes the server's end of the socket.
    pub fn new(socket: OwnedFd) -> ForkServer {
        ForkServer { socket, guards: BTreeMap::new() }
    }

    /// Tells the agent that everything is imported.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn ready(&self) -> io::Result<()> {
        self.send(&Answer::Ready, &[])
    }

    /// Tells the agent why no worker can be forked here. The caller ends the process then.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn refuse(&self, reason: &str) -> io::Result<()> {
        self.send(&Answer::Refused(reason.to_owned()), &[])
    }

    /// Waits for the next spawn request; `None` once the agent has closed the socket. Reaps guards meanwhile.
    ///
    /// # Errors
    /// The request cannot be decoded.
    pub fn next_request(&mut self) -> io::Result<Option<SpawnRequest>> {
        loop {
            if self.wait()? {
                let (bytes, fds) = socket::receive(&self.socket, 1)?;
                return if bytes.is_empty() { Ok(None) } else { SpawnRequest::receive(fds).map(Some) };
            }
        }
    }

    /// In the server, after it has forked a worker's guard: sends the guard's descriptor and releases the request.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn forked(&mut self, request: &mut SpawnRequest, guard: i32) -> io::Result<()> {
        let pid = Pid::from_raw(guard).ok_or(io::ErrorKind::InvalidInput)?;
        let end = match request.release() {
            Some(end) => end,
            // The guard is not reaped yet, so its process id cannot have been reused.
            None => pidfd_open(pid, PidfdFlags::empty())?,
        };
        self.send(&Answer::Forked, &[&end])?;
        self.guards.insert(guard, end);
        Ok(())
    }

    /// In a child of the server: becomes the guard of the requested worker. The caller forks the worker next.
    ///
    /// # Errors
    /// The guard cannot be set up, and the agent was notified. The caller ends the process then.
    pub fn become_guard(self, request: &mut SpawnRequest) -> io::Result<()> {
        block_signals();
        drop(self);
        request.become_guard()
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

    fn send(&self, answer: &Answer, fds: &[&OwnedFd]) -> io::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        Ok(socket::send(&self.socket, &answer.encode(), &fds)?)
    }
}
