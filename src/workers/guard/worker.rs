//! The process that becomes the worker, until it is executed.
//!
//! The guard's rules apply: system calls alone, on memory that was prepared before.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;

use super::calls::{default_handler, errno, ignores};
use super::plan::{Plan, step};

/// The data of the process that is to become the worker.
pub(super) struct Birth<'a> {
    pub plan: &'a Plan<'a>,
    pub guard: i32,
    /// Write end of the pipe that reports why the program could not be executed.
    pub failures: RawFd,
}

/// Starts the worker in this process's memory, as `vfork` does. The guard is suspended until the worker is executed or has
/// given up. So the agent's page tables are copied for the guard, but not again for the worker, which does not need them.
///
/// SAFETY: only in the guard.
pub(super) unsafe fn start_worker(birth: &Birth<'_>) -> i32 {
    // A separate stack, because both processes return from here. In blocks as large as the strictest alignment.
    let mut stack = MaybeUninit::<[u128; WORKER_STACK_BYTES / size_of::<u128>()]>::uninit();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // glibc's `clone` is the system call and a jump; it runs no handlers.
    unsafe {
        let top = stack.as_mut_ptr().add(1);
        libc::clone(begin_worker, top.cast(), flags, ptr::from_ref(birth).cast_mut().cast())
    }
}

const WORKER_STACK_BYTES: usize = 64 << 10;

extern "C" fn begin_worker(birth: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `start_worker` passes a `Birth`, and is suspended.
    unsafe { become_worker(&*birth.cast()) }
}

/// SAFETY: only in the child that is to become the worker. It shares the guard's memory.
unsafe fn become_worker(birth: &Birth<'_>) -> ! {
    let Birth { plan, guard, failures } = *birth;
    unsafe {
        set_up_process(guard, plan.stdio, plan.cwd, failures);
        for signal in (1..=64).filter(|&signal| signal != libc::SIGHUP || !ignores(signal)) {
            default_handler(signal);
        }
        if let Some(limit) = &plan.open_files {
            libc::setrlimit(libc::RLIMIT_NOFILE, limit); // lowers the soft limit, which everybody may
        }
        take_signals();
        execute(plan);
        give_up(failures, step::EXECUTE)
    }
}

/// Becomes a session leader that dies with the guard, with the worker's streams and folder (null: the present one). On failure
/// ends the process. SAFETY: only in a child of the guard that is to become the worker, and blocks all signals.
pub(super) unsafe fn set_up_process(guard: i32, stdio: [RawFd; 3], cwd: *const c_char, failures: RawFd) {
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() != guard {
            libc::_exit(127); // the guard was gone before the line above
        }
        for (target, fd) in (0..).zip(stdio) {
            if libc::dup2(fd, target) == -1 {
                give_up(failures, step::STREAMS);
            }
        }
        if !cwd.is_null() && libc::chdir(cwd) == -1 {
            give_up(failures, step::FOLDER);
        }
    }
}

/// Unblocks all signals. SAFETY: as [`set_up_process`].
pub(super) unsafe fn take_signals() {
    unsafe {
        let mut nothing = std::mem::zeroed();
        libc::sigemptyset(&mut nothing);
        libc::sigprocmask(libc::SIG_SETMASK, &nothing, ptr::null_mut());
    }
}

/// Reports the failed step to the guard, and ends the process. SAFETY: only in the process that was to become the worker.
unsafe fn give_up(failures: RawFd, step: i32) -> ! {
    unsafe {
        let report = [step, errno()];
        libc::write(failures, report.as_ptr().cast(), size_of_val(&report));
        libc::_exit(127)
    }
}

/// Tries each candidate. Returns with the `errno` of the one that exists but cannot be executed, if there is one.
unsafe fn execute(plan: &Plan<'_>) {
    let mut first_errno = 0;
    for candidate in plan.candidates {
        unsafe { libc::execve(*candidate, plan.argv.as_ptr(), plan.envp.as_ptr()) };
        if first_errno == 0 && !matches!(errno(), libc::ENOENT | libc::ENOTDIR) {
            first_errno = errno();
        }
    }
    unsafe { *libc::__errno_location() = if first_errno == 0 { libc::ENOENT } else { first_errno } };
}
