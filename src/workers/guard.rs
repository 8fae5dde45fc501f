//! A worker's guard: the process between the agent and one worker. It ends shortly after either of them.
//!
//! A guard is forked and executes no program. So from the fork on it may do only what a signal handler may: system calls on
//! memory that was prepared before. It allocates nothing, takes no lock, and cannot panic.
//!
//! A separate process can promise this:
//! - It is its worker's parent for as long as the worker lives. So the worker's parent-death signal works as intended. (To the
//!   kernel "parent" is a thread, and threads of an agent come and go.)
//! - It is a child subreaper. Whatever the worker starts, however it detaches itself, is re-parented to the guard and to
//!   nothing else. So the guard knows that it was this worker's.
//! - It notices the agent's end through a pidfd. That works for SIGKILL too, and no forked child of the agent can keep the pidfd
//!   from reporting it. Where the kernel has no pidfds, the guard's own parent-death signal does the same.
//! - It holds the deadline of its node's lease ([`super::deadline`]), after which another world may run. An agent that is stopped cannot
//!   stop its workers then. So the guard kills them.
//!
//! `docs/decisions/0039-each-worker-has-a-guard.md` and `0040-…` have the reasons and alternatives.

use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::message::{GuardReport, MESSAGE_BYTES, Order};
use crate::clock::monotonic_ns;

mod calls;
pub(super) mod forked;
pub(super) mod plan;
mod worker;

use calls::{close_all_but, default_handler, errno, fail, send_report};
use plan::{Failure, Plan, bind, step};
use worker::{Birth, start_worker};

/// Forks a guard. Returns its process id and a pidfd of it, if the kernel has pidfds; or `errno`.
///
/// Uses the plain system call, because glibc's `fork` runs handlers that libraries registered with `pthread_atfork`, which do
/// not follow the rules above. Signals are blocked across the fork. Otherwise a signal to the agent's process group would run
/// the agent's handler in the guard (Python's writes into a pipe that it shares with the agent).
pub(super) fn fork(plan: &Plan<'_>) -> Result<(i32, Option<OwnedFd>), i32> {
    // SAFETY: plain system calls on valid, initialised memory; what runs in the child is bound by the rules above.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        // Kernels before 5.2 ignore the flag. gVisor and seccomp filters may refuse it.
        let forked = clone(libc::CLONE_PIDFD).or_else(|_| clone(0));
        if matches!(forked, Ok((0, _))) {
            run(plan);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
        forked.map(|(pid, pidfd)| (pid, (pidfd != -1).then(|| OwnedFd::from_raw_fd(pidfd))))
    }
}

/// SAFETY: as `fork(2)`.
unsafe fn clone(flags: libc::c_int) -> Result<(i32, RawFd), i32> {
    let mut pidfd: RawFd = -1;
    let flags = flags | libc::SIGCHLD;
    let (none, pointer) = (ptr::null_mut::<libc::c_void>(), &raw mut pidfd);
    // The order of the last two arguments differs between architectures; both are null.
    match unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(flags), none, pointer, none, none) } {
        -1 => Err(errno()),
        pid => Ok((pid as i32, pidfd)),
    }
}

struct Guard {
    control: RawFd,
    /// A pidfd of the agent. -1: there is none, or it has reported the end.
    agent: RawFd,
    /// The timer of the agent's deadline. -1: there is none, or it has passed.
    deadline: RawFd,
    /// Process id of the parent whose end means the agent's end. 0: the pidfd reports it, or the guard of this guard's parent.
    parent: i32,
    signals: RawFd,
    /// Readable once the worker was executed (then at its end) or could not be executed.
    executed: RawFd,
    leader: i32,
    leader_ended: bool,
    /// The end of the leader does not end its remaining descendants, however it was.
    keeps: bool,
    /// The leader has ended well. The agent says what becomes of its descendants, and has not been notified yet that there are any.
    reports_left: bool,
    /// The leader has got the first signal of a stop. What it leaves gets SIGTERM when it ends, and the agent says when it is killed.
    stops: bool,
    /// Everything below the guard is to be killed.
    ending: bool,
}

/// What ends a guard's worker from outside. As in [`Guard`].
struct Ends {
    control: RawFd,
    agent: RawFd,
    deadline: RawFd,
    parent: i32,
}

/// Runs the guard. SAFETY: only in a freshly forked child with all signals blocked.
unsafe fn run(plan: &Plan<'_>) -> ! {
    unsafe {
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        // The worker inherits it.
        if let Err(failure) = stand_apart().and_then(|()| bind(plan.cpus.as_ref())) {
            fail(plan.control, failure);
        }
        let parent = if plan.agent == -1 { plan.agent_pid } else { 0 };
        if parent != 0 {
            // The kernel sends this signal when the thread that forked ends, and when the next thread that is the parent does. So the
            // guard then compares its parent's process id. It uses SIGCHLD, because it waits for SIGCHLD anyway.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCHLD);
            if libc::getppid() != parent {
                libc::_exit(1); // the agent was gone before the line above
            }
        }
        close_all_but([
            plan.control,
            plan.agent,
            plan.deadline,
            plan.stdio[0],
            plan.stdio[1],
            plan.stdio[2],
            plan.null,
        ]);
        let senses = match Senses::open() {
            Ok(senses) => senses,
            Err(failure) => fail(plan.control, failure),
        };
        let leader = start_worker(&Birth { plan, guard: libc::getpid(), failures: senses.failures });
        if leader == -1 {
            fail(plan.control, (step::CLONE, errno()));
        }
        libc::close(senses.failures);
        let_go_of_stdio(plan.null);
        for fd in plan.stdio {
            libc::close(fd);
        }
        let ends = Ends { control: plan.control, agent: plan.agent, deadline: plan.deadline, parent };
        Guard::new(ends, &senses, leader, plan.keeps).watch()
    }
}

const NAME: &CStr = c"worker-guard";

/// Makes the guard a session leader, so that signals to the agent's process group do not reach it, and a child subreaper.
/// SAFETY: as [`run`].
unsafe fn stand_apart() -> Result<(), Failure> {
    unsafe {
        libc::setsid();
        if libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) == -1 {
            return Err((step::SUBREAPER, errno()));
        }
        // If SIGCHLD were ignored, the kernel would reap children, and the worker's exit status would be lost.
        default_handler(libc::SIGCHLD);
    }
    Ok(())
}

/// The descriptors through which a guard learns of its worker.
#[derive(Debug)]
struct Senses {
    /// A signalfd for SIGCHLD.
    signals: RawFd,
    /// Both ends of a pipe. The read end is at its end once the worker was executed, or has a report why it was not.
    executed: RawFd,
    failures: RawFd,
}

impl Senses {
    /// SAFETY: as [`run`].
    unsafe fn open() -> Result<Senses, Failure> {
        unsafe {
            let mut child_signal = std::mem::zeroed();
            libc::sigemptyset(&mut child_signal);
            libc::sigaddset(&mut child_signal, libc::SIGCHLD);
            let signals = libc::signalfd(-1, &child_signal, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if signals == -1 {
                return Err((step::SIGNALFD, errno()));
            }
            let mut pipe = [-1; 2];
            if libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) == -1 {
                return Err((step::PIPE, errno()));
            }
            Ok(Senses { signals, executed: pipe[0], failures: pipe[1] })
        }
    }
}

/// Releases the worker's streams, which must end with the worker, and its folder, which may be removed. SAFETY: as [`run`].
unsafe fn let_go_of_stdio(null: RawFd) {
    unsafe {
        for fd in 0..3 {
            libc::dup2(null, fd);
        }
        libc::chdir(c"/".as_ptr());
    }
}

impl Guard {
    fn new(ends: Ends, senses: &Senses, leader: i32, keeps: bool) -> Guard {
        let Senses { signals, executed, .. } = *senses;
        let Ends { control, agent, deadline, parent } = ends;
        Guard {
            control,
            agent,
            deadline,
            parent,
            signals,
            executed,
            leader,
            leader_ended: false,
            keeps,
            reports_left: false,
            stops: false,
            ending: false,
        }
    }

    /// Waits for the worker, the agent and its orders, until no descendant is left. SAFETY: as [`run`].
    unsafe fn watch(mut self) -> ! {
        loop {
            let poll = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut fds = [self.signals, self.executed, self.control, self.agent, self.deadline].map(poll);
            // Every death below wakes the guard, so this limit is a safety net. An idle guard has none.
            let limit_ms = if self.ending { 100 } else { -1 };
            let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit_ms) };
            if ready == -1 {
                continue;
            }
            let [signals, executed, control, agent, deadline] = fds.map(|fd| fd.revents != 0);
            unsafe {
                if executed {
                    self.on_executed();
                }
                if control {
                    self.on_order();
                }
                if agent {
                    self.agent = -1; // poll(2) ignores negative descriptors
                    self.ending = true;
                }
                if deadline {
                    self.deadline = -1;
                    self.ending = true;
                }
                if signals {
                    self.ending |= self.parent != 0 && libc::getppid() != self.parent;
                    self.reap();
                }
                if self.ending {
                    self.signal_children(libc::SIGKILL);
                    self.reap();
                }
            }
        }
    }

    unsafe fn on_executed(&mut self) {
        let mut failure = [0_i32; 2];
        let read = unsafe { libc::read(self.executed, failure.as_mut_ptr().cast(), size_of_val(&failure)) };
        unsafe { libc::close(self.executed) };
        self.executed = -1;
        self.send_report(match read {
            8 => GuardReport::Failed { step: failure[0], errno: failure[1] },
            _ => GuardReport::Started { pid: self.leader },
        });
    }

    unsafe fn on_order(&mut self) {
        let mut bytes = [0_u8; MESSAGE_BYTES];
        let read = unsafe { libc::recv(self.control, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        if read == -1 && matches!(errno(), libc::EAGAIN | libc::EINTR) {
            return;
        }
        match Order::decode(&bytes[..usize::try_from(read).unwrap_or(0)]) {
            // Until the leader is reaped, its process id cannot be reused.
            Some(Order::Signal(signal)) if !self.leader_ended => unsafe {
                libc::kill(-self.leader, signal);
            },
            Some(Order::SignalLeader(signal)) if !self.leader_ended => unsafe {
                self.stops = true;
                libc::kill(self.leader, signal);
            },
            Some(Order::PassOn(signal)) if !self.leader_ended => unsafe {
                libc::kill(self.leader, signal);
            },
            Some(Order::PassOn(_)) => {}
            Some(Order::Signal(_) | Order::SignalLeader(_)) if self.keeps => {}
            Some(Order::Signal(signal) | Order::SignalLeader(signal)) => unsafe { self.signal_children(signal) },
            Some(Order::Kill) => self.ending = true,
            // The agent has closed the socket.
            None => {
                self.control = -1;
                self.ending = true;
            }
        }
    }

    /// Handles every child that has ended. Ends the guard when no child is left.
    unsafe fn reap(&mut self) {
        unsafe {
            let mut drained: libc::signalfd_siginfo = std::mem::zeroed();
            libc::read(self.signals, (&raw mut drained).cast(), size_of_val(&drained));
            loop {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let options = libc::WEXITED | libc::WNOHANG | libc::__WALL;
                if libc::waitid(libc::P_ALL, 0, &mut info, options | libc::WNOWAIT) == -1 {
                    if errno() == libc::ECHILD {
                        self.send_report(GuardReport::Gone);
                        libc::_exit(0);
                    }
                    return;
                }
                let pid = info.si_pid();
                if pid == 0 {
                    if std::mem::take(&mut self.reports_left) && !self.ending {
                        self.send_report(GuardReport::Left { guard: libc::getpid() });
                    }
                    return;
                }
                if pid == self.leader && !self.leader_ended {
                    self.on_leader_ended(&info);
                }
                libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, options);
            }
        }
    }

    /// The leader has ended and is not reaped yet, so its process group id cannot have been reused. Kills the group now, unless the leader
    /// has ended well or in a stop: then what it has started may run on until the agent orders otherwise.
    unsafe fn on_leader_ended(&mut self, info: &libc::siginfo_t) {
        unsafe {
            let seen_ns = monotonic_ns();
            let succeeded = info.si_code == libc::CLD_EXITED && info.si_status() == 0;
            self.reports_left = !self.keeps && (succeeded || self.stops);
            if !self.reports_left {
                libc::kill(-self.leader, libc::SIGKILL);
            } else if self.stops {
                self.signal_children(libc::SIGTERM);
                self.signal_children(libc::SIGCONT);
            }
            if self.executed != -1 {
                self.on_executed();
            }
            self.send_report(GuardReport::Exited { code: info.si_code, status: info.si_status(), seen_ns });
        }
        self.leader_ended = true;
        self.ending |= !self.keeps && !self.reports_left;
    }

    /// Signals every child and its group. Grandchildren become children when their parents die: SIGKILL reaches all of them, since that
    /// leads here again.
    unsafe fn signal_children(&self, signal: i32) {
        unsafe {
            let list = libc::open(c"/proc/thread-self/children".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            if list == -1 {
                // A kernel without this list: processes that have left the worker's session cannot be found.
                if !self.leader_ended {
                    libc::kill(-self.leader, signal);
                }
                return;
            }
            let mut buffer = [0_u8; 4096];
            let mut pid = 0_i32;
            loop {
                let read = libc::read(list, buffer.as_mut_ptr().cast(), buffer.len());
                if read <= 0 {
                    break;
                }
                for byte in buffer.iter().take(read as usize) {
                    match byte {
                        b'0'..=b'9' => pid = pid.wrapping_mul(10).wrapping_add(i32::from(byte - b'0')),
                        _ => signal_with_group(std::mem::take(&mut pid), signal),
                    }
                }
            }
            libc::close(list);
        }
    }

    fn send_report(&self, report: GuardReport) {
        // SAFETY: a system call on a local buffer.
        unsafe { send_report(self.control, report) }
    }
}

/// Signals a child and its process group, or the child twice if it leads none. It is not reaped, so neither id can have been reused.
unsafe fn signal_with_group(pid: i32, signal: i32) {
    if pid <= 1 {
        return;
    }
    unsafe {
        let group = libc::getpgid(pid);
        // Between fork and `setsid` a worker is in its guard's group.
        if group > 1 && group != libc::getpgid(0) {
            libc::kill(-group, signal);
        } else {
            libc::kill(pid, signal);
        }
    }
}
