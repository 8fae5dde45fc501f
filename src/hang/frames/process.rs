//! A live process whose frames are read: its memory by `process_vm_readv(2)`, and a pidfd, so that no other process with a reused number
//! is taken for it.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;

use super::allowed::{Facts, Obstacle, OwnMemory, may_read_workers};
use super::find::{self, NotFound};
use super::{FramesError, Memory, Runtime, Stacks, Unreadable};

const CAP_SYS_PTRACE: u32 = 19;

/// A process whose memory is read.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

/// Why a process's frames cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// It has ended.
    #[error("pid {0} has ended")]
    Ended(u32),
    /// It belongs to somebody else.
    #[error(
        "pid {pid} belongs to user {user}, and this process to {own}: only its own user, or one with CAP_SYS_PTRACE, may read its stacks"
    )]
    OtherUser {
        /// The process.
        pid: u32,
        /// Its user.
        user: u32,
        /// This process's user.
        own: u32,
    },
    /// No process's memory can be read here.
    #[error("the stacks of pid {pid} are unknown: {why}")]
    Here {
        /// The process.
        pid: u32,
        /// What forbids it.
        why: Obstacle,
    },
    /// Yama lets only ancestors read it.
    #[error(
        "pid {0} is no descendant of this process, and kernel.yama.ptrace_scope is 1: ask the agent that started it, or set it to 0"
    )]
    NoDescendant(u32),
    /// The process does not let itself be read.
    #[error(
        "pid {0} has more privileges than this process, or has called prctl(PR_SET_DUMPABLE, 0): its stacks cannot be read"
    )]
    Protected(u32),
    /// The kernel said something else.
    #[error("the memory of pid {pid} cannot be read: {errno}")]
    Other {
        /// The process.
        pid: u32,
        /// What the kernel said.
        errno: Errno,
    },
    /// No `_PyRuntime` was found.
    #[error("pid {pid}: {why}")]
    NotFound {
        /// The process.
        pid: u32,
        /// What was looked at.
        why: NotFound,
    },
    /// Its Python cannot be read.
    #[error("pid {pid}: {why}")]
    Frames {
        /// The process.
        pid: u32,
        /// What is wrong with it.
        why: FramesError,
    },
}

impl Process {
    /// A process that is alive.
    ///
    /// # Errors
    /// It has ended, or the kernel has no pidfds.
    pub fn open(pid: u32) -> Result<Self, Refusal> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Refusal::Ended(pid))?;
        match pidfd_open(number, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd }),
            Err(Errno::SRCH) => Err(Refusal::Ended(pid)),
            Err(errno) => Err(Refusal::Other { pid, errno }),
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has not ended. Until then nobody else has its number.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    /// The frames of its threads. Without a `runtime` that is known already, its symbol is looked for.
    ///
    /// May hang if the process's executable is on a dead file system and no `runtime` is given.
    ///
    /// # Errors
    /// Why nothing can be read, and what to do.
    pub fn stacks(&self, runtime: Option<Runtime>) -> Result<Stacks, Refusal> {
        let pid = self.pid;
        let runtime = match runtime {
            Some(runtime) => runtime,
            None => find::runtime(pid, self).map_err(|why| self.ended_or(Refusal::NotFound { pid, why }))?,
        };
        // An address that is not mapped is found to be no interpreter.
        match read_memory(pid, runtime.address, &mut [0; 8]) {
            Ok(()) | Err(Errno::FAULT) => (),
            Err(errno) => return Err(self.refusal(errno)),
        }
        let stacks = super::read(self, pid, runtime).map_err(|why| self.ended_or(Refusal::Frames { pid, why }))?;
        // If it had ended, another process might have been read.
        if self.is_alive() { Ok(stacks) } else { Err(Refusal::Ended(pid)) }
    }

    fn ended_or(&self, refusal: Refusal) -> Refusal {
        if self.is_alive() { refusal } else { Refusal::Ended(self.pid) }
    }

    /// What the kernel's refusal means.
    fn refusal(&self, errno: Errno) -> Refusal {
        let pid = self.pid;
        if errno == Errno::SRCH || !self.is_alive() {
            return Refusal::Ended(pid);
        }
        let facts = facts();
        if errno == Errno::NOSYS {
            return Refusal::Here { pid, why: Obstacle::NoSuchCall };
        }
        if errno != Errno::PERM {
            return Refusal::Other { pid, errno };
        }
        if let Err(why) = may_read_workers(&facts) {
            return Refusal::Here { pid, why };
        }
        let own = rustix::process::geteuid().as_raw();
        match (user_of(pid), facts.ptrace_scope) {
            (Some(user), _) if user != own => Refusal::OtherUser { pid, user, own },
            (_, Some(1)) => Refusal::NoDescendant(pid),
            _ => Refusal::Protected(pid),
        }
    }
}

impl Memory for Process {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        read_memory(self.pid, address, into).map_err(|_| Unreadable)
    }
}

fn read_memory(pid: u32, address: u64, into: &mut [u8]) -> Result<(), Errno> {
    let pid = i32::try_from(pid).map_err(|_| Errno::SRCH)?;
    let address = usize::try_from(address).map_err(|_| Errno::FAULT)?;
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: into.len() };
    // SAFETY: the kernel writes at most `into.len()` bytes into `into`, and reads the other process's memory, which it checks.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(read) {
        Ok(read) if read == into.len() => Ok(()),
        Ok(_) => Err(Errno::FAULT),
        Err(_) => Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)),
    }
}

/// What decides whether this process may read its workers' memory.
pub fn facts() -> Facts {
    let here = [0_u8; 8];
    let own_memory = match read_memory(std::process::id(), here.as_ptr().addr() as u64, &mut [0; 8]) {
        Ok(()) => OwnMemory::Read,
        Err(Errno::NOSYS) => OwnMemory::NoSuchCall,
        Err(_) => OwnMemory::Refused,
    };
    let ptrace_scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let capabilities = status_field("/proc/self/status", "CapEff:").and_then(|hex| u64::from_str_radix(&hex, 16).ok());
    Facts {
        own_memory,
        ptrace_scope: ptrace_scope.and_then(|scope| scope.trim().parse().ok()),
        has_ptrace_capability: capabilities.is_some_and(|set| set >> CAP_SYS_PTRACE & 1 == 1),
    }
}

fn user_of(pid: u32) -> Option<u32> {
    status_field(&format!("/proc/{pid}/status"), "Uid:")?.parse().ok()
}

/// The first value of a field of `/proc/PID/status`.
fn status_field(path: &str, name: &str) -> Option<String> {
    // The process's name precedes the others, and may have any bytes.
    let status = String::from_utf8_lossy(&fs::read(path).ok()?).into_owned();
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next().map(str::to_owned)
}
