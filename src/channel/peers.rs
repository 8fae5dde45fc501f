//! Who has connected to a socket of the agent: the kernel names the process, and `/proc` its ancestors.

use std::collections::BTreeMap;
use std::process;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::address;
use crate::processes::lineage;

/// How long a process that is not known as a worker is held, and then has to say who it is.
pub(super) const HOLD_LIMIT: Duration = Duration::from_secs(5);
/// Most connections of processes that are not proven to be workers, beside one for each worker.
pub(super) const UNPROVEN: usize = 16;

/// The process at the other end. It belongs to the agent's user, and descends from the agent.
///
/// # Errors
/// The reason for which it is refused.
pub(super) fn process_at(stream: &UnixStream) -> Result<u32, String> {
    address::check_user(stream, "it").map_err(|error| error.to_string())?;
    let peer = stream.peer_cred().map_err(|error| format!("the kernel does not report its process id: {error}"))?;
    // 0: it is in another pid namespace, which this process cannot see.
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    let pid = pid.ok_or("it is in a pid namespace that its agent cannot see")?;
    match lineage(pid).any(|it| it == process::id()) {
        true => Ok(pid),
        false => Err(format!("process {pid} was not started by this agent, nor by a process that it has started")),
    }
}

/// The worker that a process is, or descends from: its local rank and its process id. Waits a while until the agent has named it.
///
/// # Errors
/// The reason for which the process is refused.
pub(super) async fn worker_of(pid: u32, workers: &watch::Sender<BTreeMap<u32, u32>>) -> Result<(u32, u32), String> {
    let mut workers = workers.subscribe();
    let find = async {
        loop {
            let found = named(pid, &workers.borrow_and_update());
            if let Some(found) = found {
                return Some(found);
            }
            workers.changed().await.ok()?;
        }
    };
    timeout(HOLD_LIMIT, find).await.ok().flatten().ok_or_else(|| {
        format!("process {pid} is neither a worker of this agent nor a descendant of one (looked for {HOLD_LIMIT:.0?})")
    })
}

fn named(pid: u32, workers: &BTreeMap<u32, u32>) -> Option<(u32, u32)> {
    lineage(pid).filter_map(|it| workers.iter().find(|(_, pid)| **pid == it)).map(|(rank, pid)| (*rank, *pid)).next()
}
