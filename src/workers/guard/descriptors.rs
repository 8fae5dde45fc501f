//! Closing the descriptors that a guard does not need.
//!
//! The guard's rules apply: system calls alone, no allocation.

use std::os::fd::RawFd;

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
