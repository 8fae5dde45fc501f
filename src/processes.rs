//! What is known of processes: whether this one was forked since some moment, whether others live, and from whom they descend. And how
//! programs of the user begin that are no workers.
//!
//! `getpid(2)` would show a fork too, at the price of a system call in each check. Instead the C library counts: it calls a handler in
//! every child of its `fork`, with which Python forks. The rest is what `/proc` says.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getpid, getppid, set_parent_process_death_signal, setrlimit, setsid};

/// Most generations between a process and its ancestor.
const GENERATIONS: usize = 64;

/// The forks between the first process and this one, since [`forks`] was called first.
static FORKS: AtomicU64 = AtomicU64::new(0);

// Declared here because the crate `libc` lacks it on Linux.
unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

/// The current count. In a child that is forked later, [`forks_now`] returns another.
pub(crate) fn forks() -> u64 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler may run in a forked child, since it changes one atomic number. It is never unloaded: Python does not
        // unload extension modules.
        let failed = unsafe { pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::warn!(
                "a child that is forked from this process will not notice it: pthread_atfork failed with {failed}"
            );
        }
    });
    forks_now()
}

/// The current count, after a call of [`forks`].
#[inline]
pub(crate) fn forks_now() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The kernel's letter for a process's state, as in `/proc`: `D` is uninterruptible sleep, `Z` has ended. `None` if it is gone.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    state_and_parent(pid).map(|(state, _)| state)
}

/// Whether a process has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// A process and its ancestors, nearest first.
pub(crate) fn lineage(pid: u32) -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| state_and_parent(*pid).map(|(_, parent)| parent).filter(|parent| *parent > 0);
    std::iter::successors(Some(pid), parent).take(GENERATIONS)
}

fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let fields = stat_fields(&fs::read(format!("/proc/{pid}/stat")).ok()?)?;
    Some((fields.first()?.chars().next()?, fields.get(1)?.parse().ok()?))
}

/// The fields of `/proc/PID/stat`, or of a thread's, after the name: the state is the first of them.
pub(crate) fn stat_fields(stat: &[u8]) -> Option<Vec<String>> {
    // The name precedes them and may contain anything, including parentheses.
    let text = String::from_utf8_lossy(stat);
    Some(text.rsplit_once(") ")?.1.split_whitespace().map(str::to_owned).collect())
}

/// For how long a program lives at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// As long as it likes.
    Own,
    /// The kernel kills it when the thread that starts it ends, and so with the process at the latest.
    UntilThreadEnds,
}

/// Start a program as a shell would: no signal is blocked, and the limit of descriptors is `limit`, or this process's. It leads a session
/// of its own, so a terminal's Ctrl-C does not reach it.
///
/// # Errors
/// It cannot be run.
pub(crate) fn start_session(made: &mut Command, limit: Option<Rlimit>, life: Life) -> io::Result<Child> {
    let starter = getpid();
    // SAFETY: system calls that a forked child may make. Nothing is allocated.
    unsafe {
        made.pre_exec(move || {
            // The threads that start programs block all signals, and a program begins with the mask of its starter.
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
            // Python ignores this signal, and programs inherit that.
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            if let Some(limit) = limit {
                setrlimit(Resource::Nofile, limit)?;
            }
            setsid()?;
            if life == Life::UntilThreadEnds {
                set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                if getppid() != Some(starter) {
                    return Err(io::ErrorKind::NotFound.into()); // the process was gone before the line above
                }
            }
            Ok(())
        });
    }
    made.spawn()
}

#[cfg(test)]
mod tests {
    use std::process::{self, Command};

    use super::*;

    #[test]
    fn a_process_descends_from_itself_and_from_its_parents_and_a_zombie_has_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(lineage(child.id()).take(2).collect::<Vec<_>>(), [child.id(), process::id()]);
        assert!(is_alive(child.id()));
        child.kill().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        // It is not reaped, so it stays a zombie.
        let ended = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), ended).unwrap();
        assert_eq!(state_of(child.id()), Some('Z'));
        assert!(!is_alive(child.id()));
        child.wait().unwrap();
        assert_eq!(lineage(u32::MAX).count(), 1, "nothing is known of it");
    }
}
