//! System calls by number, and which of their arguments says what they wait for. Pure.
//!
//! Only calls are named in which a program may wait. Others keep their number.

/// Whose numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// `x86_64`.
    X86_64,
    /// `aarch64`.
    Aarch64,
}

/// This program's. `None`: the numbers of its architecture are not known here.
pub const HERE: Option<Arch> = if cfg!(target_arch = "x86_64") {
    Some(Arch::X86_64)
} else if cfg!(target_arch = "aarch64") {
    Some(Arch::Aarch64)
} else {
    None
};

/// What an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// No argument says what the call waits for.
    Nothing,
    /// This argument is a file descriptor.
    Fd(usize),
    /// This argument is the address of a path.
    Path(usize),
    /// The first argument is a list of file descriptors to poll, the second their number.
    Polled,
    /// The first argument is one more than the highest file descriptor.
    Selected,
}

use Operand::{Fd, Nothing, Path, Polled, Selected};

type Table = &'static [(u64, &'static str, Operand)];

const X86_64: Table = &[
    (0, "read", Fd(0)),
    (1, "write", Fd(0)),
    (2, "open", Path(0)),
    (3, "close", Fd(0)),
    (4, "stat", Path(0)),
    (5, "fstat", Fd(0)),
    (6, "lstat", Path(0)),
    (7, "poll", Polled),
    (8, "lseek", Fd(0)),
    (11, "munmap", Nothing),
    (16, "ioctl", Fd(0)),
    (17, "pread64", Fd(0)),
    (18, "pwrite64", Fd(0)),
    (19, "readv", Fd(0)),
    (20, "writev", Fd(0)),
    (21, "access", Path(0)),
    (23, "select", Selected),
    (26, "msync", Nothing),
    (34, "pause", Nothing),
    (35, "nanosleep", Nothing),
    (40, "sendfile", Fd(1)),
    (42, "connect", Fd(0)),
    (43, "accept", Fd(0)),
    (44, "sendto", Fd(0)),
    (45, "recvfrom", Fd(0)),
    (46, "sendmsg", Fd(0)),
    (47, "recvmsg", Fd(0)),
    (56, "clone", Nothing),
    (57, "fork", Nothing),
    (58, "vfork", Nothing),
    (59, "execve", Path(0)),
    (61, "wait4", Nothing),
    (70, "msgrcv", Nothing),
    (72, "fcntl", Fd(0)),
    (73, "flock", Fd(0)),
    (74, "fsync", Fd(0)),
    (75, "fdatasync", Fd(0)),
    (76, "truncate", Path(0)),
    (77, "ftruncate", Fd(0)),
    (82, "rename", Path(0)),
    (83, "mkdir", Path(0)),
    (87, "unlink", Path(0)),
    (89, "readlink", Path(0)),
    (128, "rt_sigtimedwait", Nothing),
    (130, "rt_sigsuspend", Nothing),
    (137, "statfs", Path(0)),
    (138, "fstatfs", Fd(0)),
    (162, "sync", Nothing),
    (202, "futex", Nothing),
    (208, "io_getevents", Nothing),
    (217, "getdents64", Fd(0)),
    (219, "restart_syscall", Nothing),
    (220, "semtimedop", Nothing),
    (230, "clock_nanosleep", Nothing),
    (231, "exit_group", Nothing),
    (232, "epoll_wait", Nothing),
    (247, "waitid", Nothing),
    (257, "openat", Path(1)),
    (258, "mkdirat", Path(1)),
    (262, "newfstatat", Path(1)),
    (263, "unlinkat", Path(1)),
    (264, "renameat", Path(1)),
    (267, "readlinkat", Path(1)),
    (269, "faccessat", Path(1)),
    (270, "pselect6", Selected),
    (271, "ppoll", Polled),
    (275, "splice", Fd(0)),
    (277, "sync_file_range", Fd(0)),
    (281, "epoll_pwait", Nothing),
    (285, "fallocate", Fd(0)),
    (288, "accept4", Fd(0)),
    (295, "preadv", Fd(0)),
    (296, "pwritev", Fd(0)),
    (299, "recvmmsg", Fd(0)),
    (306, "syncfs", Fd(0)),
    (307, "sendmmsg", Fd(0)),
    (316, "renameat2", Path(1)),
    (326, "copy_file_range", Fd(0)),
    (332, "statx", Path(1)),
    (426, "io_uring_enter", Fd(0)),
    (437, "openat2", Path(1)),
    (441, "epoll_pwait2", Nothing),
];

const AARCH64: Table = &[
    (4, "io_getevents", Nothing),
    (22, "epoll_pwait", Nothing),
    (25, "fcntl", Fd(0)),
    (29, "ioctl", Fd(0)),
    (32, "flock", Fd(0)),
    (34, "mkdirat", Path(1)),
    (35, "unlinkat", Path(1)),
    (38, "renameat", Path(1)),
    (43, "statfs", Path(0)),
    (44, "fstatfs", Fd(0)),
    (45, "truncate", Path(0)),
    (46, "ftruncate", Fd(0)),
    (47, "fallocate", Fd(0)),
    (48, "faccessat", Path(1)),
    (56, "openat", Path(1)),
    (57, "close", Fd(0)),
    (61, "getdents64", Fd(0)),
    (62, "lseek", Fd(0)),
    (63, "read", Fd(0)),
    (64, "write", Fd(0)),
    (65, "readv", Fd(0)),
    (66, "writev", Fd(0)),
    (67, "pread64", Fd(0)),
    (68, "pwrite64", Fd(0)),
    (69, "preadv", Fd(0)),
    (70, "pwritev", Fd(0)),
    (71, "sendfile", Fd(1)),
    (72, "pselect6", Selected),
    (73, "ppoll", Polled),
    (76, "splice", Fd(0)),
    (78, "readlinkat", Path(1)),
    (79, "newfstatat", Path(1)),
    (80, "fstat", Fd(0)),
    (81, "sync", Nothing),
    (82, "fsync", Fd(0)),
    (83, "fdatasync", Fd(0)),
    (84, "sync_file_range", Fd(0)),
    (94, "exit_group", Nothing),
    (95, "waitid", Nothing),
    (98, "futex", Nothing),
    (101, "nanosleep", Nothing),
    (115, "clock_nanosleep", Nothing),
    (128, "restart_syscall", Nothing),
    (133, "rt_sigsuspend", Nothing),
    (137, "rt_sigtimedwait", Nothing),
    (188, "msgrcv", Nothing),
    (192, "semtimedop", Nothing),
    (202, "accept", Fd(0)),
    (203, "connect", Fd(0)),
    (206, "sendto", Fd(0)),
    (207, "recvfrom", Fd(0)),
    (211, "sendmsg", Fd(0)),
    (212, "recvmsg", Fd(0)),
    (215, "munmap", Nothing),
    (220, "clone", Nothing),
    (221, "execve", Path(0)),
    (227, "msync", Nothing),
    (242, "accept4", Fd(0)),
    (243, "recvmmsg", Fd(0)),
    (260, "wait4", Nothing),
    (267, "syncfs", Fd(0)),
    (269, "sendmmsg", Fd(0)),
    (276, "renameat2", Path(1)),
    (285, "copy_file_range", Fd(0)),
    (291, "statx", Path(1)),
    (426, "io_uring_enter", Fd(0)),
    (437, "openat2", Path(1)),
    (441, "epoll_pwait2", Nothing),
];

/// A call's name, and what it waits for. `None`: it is not in the table.
pub fn named(arch: Arch, number: u64) -> Option<(&'static str, Operand)> {
    let table = match arch {
        Arch::X86_64 => X86_64,
        Arch::Aarch64 => AARCH64,
    };
    let at = table.binary_search_by_key(&number, |(number, _, _)| *number).ok()?;
    Some((table[at].1, table[at].2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_the_numbers_of_the_kernel_and_are_in_order() {
        for table in [X86_64, AARCH64] {
            assert!(table.is_sorted_by(|(one, ..), (other, ..)| one < other));
        }
        let names: Vec<_> = X86_64.iter().map(|(_, name, operand)| (name, operand)).collect();
        for (_, name, operand) in AARCH64 {
            assert!(names.contains(&(name, operand)), "{name} is another call on x86-64");
        }
        assert_eq!(named(Arch::X86_64, 257), Some(("openat", Path(1))));
        assert_eq!(named(Arch::Aarch64, 63), Some(("read", Fd(0))));
        assert_eq!(named(Arch::X86_64, 9999), None);
    }

    #[cfg(feature = "io")]
    #[test]
    fn this_machines_numbers_are_those_of_the_c_library() {
        let here = HERE.expect("tests run on a known architecture");
        for (number, name) in [
            (libc::SYS_read, "read"),
            (libc::SYS_write, "write"),
            (libc::SYS_openat, "openat"),
            (libc::SYS_futex, "futex"),
            (libc::SYS_ppoll, "ppoll"),
            (libc::SYS_pselect6, "pselect6"),
            (libc::SYS_clock_nanosleep, "clock_nanosleep"),
            (libc::SYS_recvfrom, "recvfrom"),
            (libc::SYS_wait4, "wait4"),
            (libc::SYS_flock, "flock"),
            (libc::SYS_fsync, "fsync"),
            (libc::SYS_epoll_pwait, "epoll_pwait"),
            (libc::SYS_statx, "statx"),
            (libc::SYS_newfstatat, "newfstatat"),
            (libc::SYS_connect, "connect"),
            (libc::SYS_io_uring_enter, "io_uring_enter"),
        ] {
            let found = u64::try_from(number).ok().and_then(|number| named(here, number));
            assert_eq!(found.map(|(name, _)| name), Some(name));
        }
    }
}
