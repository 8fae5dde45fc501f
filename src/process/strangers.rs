//! What an agent that is process 1 of its container owes to processes that nobody else waits for.

use std::fs;

use rustix::process::{Pid, WaitId, WaitIdOptions, getsid, waitid};

/// Reaps children of this process that have ended and are in other sessions than it; returns how many.
///
/// Orphans become children of process 1: what `docker exec` started, say. (Descendants of workers are not among them: they
/// are their guards'.) Children in this process's own session are left to whoever started them and may ask for their exit
/// code; so one that was started in a session of its own must be waited for before this is called. Call it now and then if
/// this process is number 1, or a child subreaper; elsewhere it finds nothing.
pub fn reap_strangers() -> usize {
    let own = getsid(None).ok();
    let is_stranger = |pid: &Pid| getsid(Some(*pid)).is_ok_and(|session| Some(session) != own);
    let reap = |pid: Pid| {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_)))
    };
    children().into_iter().filter(is_stranger).filter(|pid| reap(*pid)).count()
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
