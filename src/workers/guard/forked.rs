//! The guard of a worker that is forked from a fork server. The server has a single thread, and forks the guard with its own
//! `fork`. So this guard may do what any process may until [`watch`](ForkedGuard::watch).

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use super::super::message::GuardReport;
use super::calls::{close_all_but, errno, fail, send_report};
use super::plan::{bind, cpu_set, step};
use super::worker::{set_up_process, take_signals};
use super::{Ends, Guard, NAME, Senses, let_go_of_stdio, stand_apart};

/// The descriptors of a guard and its worker. None is below 3.
#[derive(Debug)]
pub(crate) struct GuardDescriptors {
    /// The guard's end of the socket that it shares with the agent.
    pub control: OwnedFd,
    /// A pidfd of the agent. `None` where the kernel has none: then the guard ends with the fork server's guard, which is above it.
    pub agent: Option<OwnedFd>,
    /// The timer that all guards of the agent share. `None`: they have no deadline.
    pub deadline: Option<OwnedFd>,
    /// Closed when the guard ends and not before. Only where the kernel has no pidfds.
    pub lifeline: Option<OwnedFd>,
    /// What becomes the worker's standard input, output and error.
    pub stdio: [OwnedFd; 3],
    /// `/dev/null`, for the guard's own.
    pub null: OwnedFd,
}

/// A guard whose worker is not forked yet.
#[derive(Debug)]
pub(crate) struct ForkedGuard {
    given: GuardDescriptors,
    senses: Senses,
    guard: i32,
}

/// Blocks all signals of the calling thread. Signals that arrive between the two forks are meant for neither guard nor worker.
pub(crate) fn block_signals() {
    // SAFETY: a mask on the stack, filled before it is read.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, ptr::null_mut());
    }
}

impl ForkedGuard {
    /// Makes the calling process a guard. The process should have one thread, and block all signals. It is bound to these CPUs, if there
    /// are any, as its worker is.
    ///
    /// # Errors
    /// An `errno`, which has been reported to the agent.
    pub fn begin(given: GuardDescriptors, cpus: &[u32]) -> Result<ForkedGuard, i32> {
        // SAFETY: any process may do what a freshly forked child may.
        unsafe {
            let senses = stand_apart().and_then(|()| bind(cpu_set(cpus).as_ref())).and_then(|()| Senses::open());
            let senses = senses.map_err(|(step, errno)| {
                send_report(given.control.as_raw_fd(), GuardReport::Failed { step, errno });
                errno
            })?;
            Ok(ForkedGuard { given, senses, guard: libc::getpid() })
        }
    }

    /// In the guard, after it has forked its worker: waits until no descendant is left, and ends the process. -1: no worker.
    pub fn watch(self, worker: i32) -> ! {
        let GuardDescriptors { control, agent, deadline, lifeline, null, .. } = &self.given;
        let [control, null] = [control, null].map(AsRawFd::as_raw_fd);
        let [agent, deadline, lifeline] =
            [agent, deadline, lifeline].map(|fd| fd.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        // SAFETY: nothing that owns one of the descriptors closed here runs again, since this never returns.
        unsafe {
            if worker == -1 {
                fail(control, (step::CLONE, errno()));
            }
            libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
            close_all_but([control, agent, deadline, lifeline, null, self.senses.signals, self.senses.executed]);
            let_go_of_stdio(null);
            let ends = Ends { control, agent, deadline, parent: 0 };
            Guard::new(ends, &self.senses, worker, false).watch()
        }
    }

    /// In the guard's child: takes the worker's session, streams and folder. Signal handlers are not reset: they are those of a
    /// program that was just executed and has imported its modules.
    ///
    /// On failure reports the cause to the guard and ends the process.
    pub fn become_worker(self, cwd: &CString) {
        // SAFETY: plain system calls on what this process owns.
        unsafe {
            let stdio = self.given.stdio.each_ref().map(AsRawFd::as_raw_fd);
            set_up_process(self.guard, stdio, cwd.as_ptr(), self.senses.failures);
            take_signals();
            libc::close(self.senses.signals);
            libc::close(self.senses.executed);
            // Last: this notifies the guard that the worker was started.
            libc::close(self.senses.failures);
        }
    }
}
