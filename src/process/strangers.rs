//! What an agent that is process 1 of its container owes to processes that nobody else waits for.
//!
//! Orphans become children of process 1: what `docker exec` started, say. (Descendants of workers are not among them: they
//! are their guards'.) Which children are strangers cannot be asked, so it is told by their sessions:
//! - those in this process's own session are left to whoever started them here and may ask for their exit code;
//! - one that leads a session of its own may have been started so here, as guards, workers that are functions, and what
//!   `subprocess` starts with `start_new_session` are. Whoever waits for such a child has done so soon after its end, so
//!   it is reaped only if a minute later it is still there;
//! - others are members of sessions that began elsewhere, and are reaped at once.
//!
//! A thread waits for ends with `waitid(2)`, which leaves them as they are. A handler of SIGCHLD would say the same, but is the
//! program's to set: Python's `signal.signal` takes the place of any other. Pidfds do not tell of children that are new.

use std::collections::BTreeMap;
use std::fs;
use std::process;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::threads;

/// After its end, a child that leads its session is left for so long to whoever may have started it here.
const LEADER_GRACE: Duration = Duration::from_secs(60);
/// How often to look while there is an end that is not ours to take note of, or no child at all.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// If this process is number 1, reaps strangers from now on until it ends. May be called again.
pub fn reap_strangers_as_process_1() {
    static STARTED: Once = Once::new();
    if process::id() == 1 {
        STARTED.call_once(|| {
            if let Err(error) = threads::spawn("strangers".to_owned(), reap_for_ever) {
                tracing::warn!(%error, "no thread to reap orphans with; those that end stay as zombies");
            }
        });
    }
}

fn reap_for_ever() {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let mut strangers = Strangers::default();
    loop {
        // ECHILD: there are none at the moment.
        let ended = waitid(WaitId::All, look).is_ok();
        strangers.reap(Instant::now());
        let left = matches!(waitid(WaitId::All, look | WaitIdOptions::NOHANG), Ok(Some(_)));
        if left || !ended {
            thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Children of this process that others have started.
#[derive(Debug, Default)]
pub struct Strangers {
    /// Leaders of sessions that have ended, and when that was seen.
    leaders: BTreeMap<i32, Instant>,
}

impl Strangers {
    /// Reaps those that have ended, as the module's documentation has it; returns how many.
    pub fn reap(&mut self, now: Instant) -> usize {
        let own = session(None);
        let ended: Vec<Pid> = children().into_iter().filter(|pid| has_ended(*pid, WaitIdOptions::NOWAIT)).collect();
        self.leaders.retain(|number, _| ended.iter().any(|pid| pid.as_raw_nonzero().get() == *number));
        let mut reaped = 0;
        for pid in ended {
            let number = pid.as_raw_nonzero().get();
            let is_stranger = match session(Some(pid)) {
                None => false,
                session if session == own => false,
                Some(session) if session == number => {
                    now.saturating_duration_since(*self.leaders.entry(number).or_insert(now)) >= LEADER_GRACE
                }
                Some(_) => true,
            };
            if is_stranger && has_ended(pid, WaitIdOptions::empty()) {
                reaped += 1;
            }
        }
        reaped
    }
}

/// Whether a child has ended. Without `NOWAIT` it is reaped then.
fn has_ended(pid: Pid, options: WaitIdOptions) -> bool {
    let options = options | WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_)))
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
