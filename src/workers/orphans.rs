//! Reaping orphans when the agent is process 1 of its container.
//!
//! Orphans become children of process 1: processes that `docker exec` left behind, say. (Descendants of workers do not: they
//! become children of their guards.) The kernel does not say which children are orphans, so their sessions decide:
//! - A child in this process's session was started here. Code in this process may ask for its exit code, so it is left alone.
//! - A child that leads a session may have been started here too. Guards, workers that are functions, and processes of
//!   `subprocess` with `start_new_session` are. Code that waits for such a child does so soon after its end, so the child is
//!   reaped only if it is still there a minute later.
//! - Any other child belongs to a session that began elsewhere. It is reaped at once.
//!
//! A thread waits with `waitid(2)`, which does not reap. `docs/decisions/0042-process-1-tells-orphans-by-their-session.md` has the
//! alternatives.

use std::collections::BTreeMap;
use std::fs;
use std::process;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::threads;

/// How long a session leader that has ended stays a zombie, for code in the agent's process that may have started it and waits for it.
const LEADER_GRACE: Duration = Duration::from_secs(60);
/// How often to look while an ended child is not to be reaped here, or while there is no child.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// If this process is process 1, reaps orphans from now on until it ends. May be called again.
pub fn reap_orphans_as_process_1() {
    static STARTED: Once = Once::new();
    if process::id() == 1 {
        STARTED.call_once(|| {
            if let Err(error) = threads::spawn("orphans".to_owned(), reap_for_ever) {
                tracing::warn!(%error, "cannot start the thread that reaps orphans: those that end stay as zombies");
            }
        });
    }
}

fn reap_for_ever() {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let mut orphans = ForeignOrphans::default();
    loop {
        // ECHILD: there are no children at the moment.
        let ended = waitid(WaitId::All, look).is_ok();
        orphans.reap(Instant::now());
        let left = matches!(waitid(WaitId::All, look | WaitIdOptions::NOHANG), Ok(Some(_)));
        if left || !ended {
            thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Children of this process that were not started here.
#[derive(Debug, Default)]
pub struct ForeignOrphans {
    /// Session leaders that have ended, and when that was seen.
    leaders: BTreeMap<i32, Instant>,
}

impl ForeignOrphans {
    /// Reaps orphans that have ended, by the rules of the module's documentation. Returns their number.
    pub fn reap(&mut self, now: Instant) -> usize {
        let own = session(None);
        let ended: Vec<Pid> = children().into_iter().filter(|pid| has_ended(*pid, WaitIdOptions::NOWAIT)).collect();
        self.leaders.retain(|number, _| ended.iter().any(|pid| pid.as_raw_nonzero().get() == *number));
        let mut reaped = 0;
        for pid in ended {
            let number = pid.as_raw_nonzero().get();
            let is_foreign = match session(Some(pid)) {
                None => false,
                session if session == own => false,
                Some(session) if session == number => {
                    now.saturating_duration_since(*self.leaders.entry(number).or_insert(now)) >= LEADER_GRACE
                }
                Some(_) => true,
            };
            if is_foreign && has_ended(pid, WaitIdOptions::empty()) {
                reaped += 1;
            }
        }
        reaped
    }
}

/// Whether a child has ended. Without `NOWAIT` this also reaps it.
fn has_ended(pid: Pid, options: WaitIdOptions) -> bool {
    let options = options | WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_)))
}

/// The session of a process, or of this one; `None` if the process is gone. 0 is the session of a leader outside this pid
/// namespace. Process 1 of a container is often in such a session (`rustix::process::getsid` takes 0 for a bug).
fn session(pid: Option<Pid>) -> Option<i32> {
    // SAFETY: only queries a number.
    let session = unsafe { libc::getsid(pid.map_or(0, |pid| pid.as_raw_nonzero().get())) };
    (session >= 0).then_some(session)
}

/// The children of all threads, including those that have ended.
fn children() -> Vec<Pid> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids = |list: String| {
        list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect::<Vec<_>>()
    };
    lists.flat_map(pids).collect()
}
