//! What a guard gets before it is forked, and how it names a step that has failed.

use std::ffi::{CStr, c_char};
use std::os::fd::RawFd;
use std::{fs, io, ptr};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// The guard's data, prepared before the fork. No descriptor is below 3.
#[derive(Debug)]
pub(in super::super) struct Plan<'a> {
    /// The guard's end of the socket that it shares with the agent.
    pub control: RawFd,
    /// A pidfd of the agent; -1 where the kernel has none.
    pub agent: RawFd,
    /// The timer that all guards of the agent share; -1: they have no deadline.
    pub deadline: RawFd,
    /// The agent's process id.
    pub agent_pid: i32,
    /// The worker's standard input, output and error.
    pub stdio: [RawFd; 3],
    /// `/dev/null`, for the guard's own streams.
    pub null: RawFd,
    /// Paths to try to execute, in order.
    pub candidates: &'a [*const c_char],
    /// Ends with a null pointer, as does `envp`.
    pub argv: &'a [*const c_char],
    pub envp: &'a [*const c_char],
    /// Working directory of the worker. Null: the agent's.
    pub cwd: *const c_char,
    /// The CPUs of the worker. `None`: the agent's.
    pub cpus: Option<CpuSet>,
    /// The limit of open files that the worker starts with. `None`: the agent's.
    pub open_files: Option<libc::rlimit>,
    /// Whether processes that the child leaves behind may live on, until the agent orders otherwise or ends. True for fork servers.
    pub keeps: bool,
}

/// The steps at which starting a worker can fail, as `GuardReport::Failed` names them.
pub(in super::super) mod step {
    pub(in super::super::super) const CLONE: i32 = 1;
    pub(in super::super::super) const STREAMS: i32 = 2;
    pub(in super::super::super) const FOLDER: i32 = 3;
    pub(in super::super::super) const EXECUTE: i32 = 4;
    pub(in super::super::super) const SUBREAPER: i32 = 5;
    pub(in super::super::super) const SIGNALFD: i32 = 6;
    pub(in super::super::super) const PIPE: i32 = 7;
    pub(in super::super::super) const AFFINITY: i32 = 8;
}

/// A step that failed, and its `errno`.
pub(super) type Failure = (i32, i32);

/// The CPUs of these numbers, of which none is above 1,023. `None`: there is none.
pub(in super::super) fn cpu_set(numbers: &[u32]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    let known =
        numbers.iter().filter_map(|number| usize::try_from(*number).ok()).filter(|number| *number < CpuSet::MAX_CPU);
    known.for_each(|number| set.set(number));
    (set.count() > 0).then_some(set)
}

/// Binds the calling process, and what it forks, to these CPUs.
pub(super) fn bind(cpus: Option<&CpuSet>) -> Result<(), Failure> {
    cpus.map_or(Ok(()), |cpus| sched_setaffinity(None, cpus)).map_err(|errno| (step::AFFINITY, errno.raw_os_error()))
}

/// Binds all threads of another process to these CPUs, if there are any.
pub(in super::super) fn bind_threads(pid: u32, numbers: &[u32]) -> io::Result<()> {
    let Some(cpus) = cpu_set(numbers) else { return Ok(()) };
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?.file_name().to_str().and_then(|number| Pid::from_raw(number.parse().ok()?));
        match sched_setaffinity(thread, &cpus) {
            Ok(()) | Err(Errno::SRCH) => {} // or it has ended
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Pointers to these strings, followed by a null pointer.
pub(in super::super) fn pointers<S: AsRef<CStr>>(strings: &[S]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ref().as_ptr()).chain([ptr::null()]).collect()
}
