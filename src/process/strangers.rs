//! What an agent that is process 1 of its container owes to processes that nobody else waits for.

use std::fs;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Reaps children of this process that have ended and are in other sessions than it; returns how many.
///
/// Orphans become children of process 1: what `docker exec` started, say. (Descendants of workers are not among them: they
/// are their guards'.) Children in this process's own session are left to whoever started them and may ask for their exit
/// code; so one that was started in a session of its own must be waited for before this is called. Call it now and then if
/// this process is number 1, or a child subreaper; elsewhere it finds nothing.
pub fn reap_strangers() -> usize {
    let own = session(None);
    let is_stranger = |pid: &Pid| session(Some(*pid)).is_some_and(|session| Some(session) != own);
    let reap = |pid: Pid| {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_)))
    };
    children().into_iter().filter(is_stranger).filter(|pid| reap(*pid)).count()
}

/// The session of a process, or of this one; `None` if it is gone. 0 is the session of a leader outside of this pid namespace,
/// which process 1 of a container often is in (`rustix::process::getsid` takes 0 for a bug).
fn session(pid: Option<Pid>) -> Option<i32> {
    // SAFETY: asks for a number.
    let session = unsafe { libc::getsid(pid.map_or(0, |pid| pid.as_raw_nonzero().get())) };
    (session >= 0).then_some(session)
}

/// The children of all threads, those that have ended too.
fn children() -> Vec<Pid> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids = |list: String| {
        list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect::<Vec<_>>()
    };
    lists.flat_map(pids).collect()
}
