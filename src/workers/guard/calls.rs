//! System calls that a guard makes, some of them its worker too. The guard's rules apply: no allocation, no lock, no panic.

use std::os::fd::RawFd;
use std::ptr;

use super::super::message::GuardReport;
use super::plan::Failure;

pub(super) unsafe fn send_report(control: RawFd, report: GuardReport) {
    let bytes = report.encode();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // Four messages always fit into the socket. If the other end is closed, nobody reads them.
    unsafe { libc::send(control, bytes.as_ptr().cast(), bytes.len(), flags) };
}

pub(super) unsafe fn fail(control: RawFd, (step, errno): Failure) -> ! {
    unsafe {
        send_report(control, GuardReport::Failed { step, errno });
        libc::_exit(1)
    }
}

/// Resets a signal's handler. Uses the plain system call: glibc's refuses the two signals that it uses itself, and a parent
/// may have ignored those too.
pub(super) unsafe fn default_handler(signal: i32) {
    // `SIG_DFL`, no flags, an empty mask: all zero in the kernel's `struct sigaction` of every architecture.
    let action = [0_u64; 4];
    let mask_bytes: libc::size_t = 8;
    let signal = libc::c_long::from(signal);
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), ptr::null::<u64>(), mask_bytes) };
}

/// Whether this process ignores a signal. `nohup` has SIGHUP ignored, which holds for workers too.
pub(super) unsafe fn ignores(signal: i32) -> bool {
    let mut action = [0_u64; 4]; // the handler comes first in the kernel's `struct sigaction` of these architectures
    let mask_bytes: libc::size_t = 8;
    let signal = libc::c_long::from(signal);
    unsafe {
        libc::syscall(libc::SYS_rt_sigaction, signal, ptr::null::<u64>(), action.as_mut_ptr(), mask_bytes) == 0
            && action[0] == libc::SIG_IGN as u64
    }
}

pub(super) fn errno() -> i32 {
    // SAFETY: glibc and musl return a valid pointer to this thread's `errno`.
    unsafe { *libc::__errno_location() }
}

/// Closes all descriptors but these: the agent's sockets and files would otherwise stay open as long as the guard lives.
pub(super) unsafe fn close_all_but<const N: usize>(mut keep: [RawFd; N]) {
    // Insertion sort, because the standard library's sort does not promise that it allocates nothing.
    for end in 1..N {
        let mut at = end;
        while at > 0 && keep[at - 1] > keep[at] {
            keep.swap(at - 1, at);
            at -= 1;
        }
    }
    let mut from = 3;
    for fd in keep {
        if fd > from {
            unsafe { close_range(from, fd - 1) };
        }
        from = from.max(fd + 1);
    }
    unsafe { close_range(from, RawFd::MAX) };
}

unsafe fn close_range(first: RawFd, last: RawFd) {
    unsafe {
        if libc::syscall(libc::SYS_close_range, first as libc::c_uint, last as libc::c_uint, 0) == 0 {
            return;
        }
        // Kernels before 5.9.
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        let open_max = RawFd::try_from(limit.rlim_cur).unwrap_or(RawFd::MAX).min(1 << 20);
        for fd in first..=last.min(open_max) {
            libc::close(fd);
        }
    }
}
