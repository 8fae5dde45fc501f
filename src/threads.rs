//! Threads of this library take no signals.
//!
//! The kernel delivers a process's signal to the main thread if that does not block it, else to any other thread. A program
//! may block signals to wait for them (`sigwait`). A thread of ours that does not block a signal would take it, and the
//! process would be ended by it. A signal that another thread takes does not interrupt a wait of the main thread either.

use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::thread::{Builder, JoinHandle};

use tokio::sync::oneshot;

/// Starts a thread that takes no signals.
///
/// # Errors
/// The system has no further thread.
pub fn spawn<T: Send + 'static>(name: String, run: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    without_signals(|| Builder::new().name(name).spawn(run))
}

/// Do work on a dedicated thread, and wait for it. For work that may hang for ever, such as opening a file: the runtime's own threads for
/// blocking calls are limited in number. Dropping the future detaches the thread.
///
/// # Errors
/// The system has no further thread.
pub(crate) async fn aside<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (sender, done) = oneshot::channel();
    // The caller may have stopped waiting.
    spawn(name.to_owned(), move || drop(sender.send(catch_unwind(AssertUnwindSafe(work)))))?;
    let done = done.await.map_err(|_| io::Error::other("a thread has ended without an answer"))?;
    Ok(done.unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Block all signals in the calling thread during this call. A thread begins with the mask of the one that starts it, so threads
/// that the call starts take no signals.
pub fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    let before = set_mask(libc::SIG_BLOCK, &all_but_faults());
    let done = call();
    set_mask(libc::SIG_SETMASK, &before);
    done
}

/// Block all signals in the calling thread. For threads that are not started by [`spawn`].
pub fn take_no_signals() {
    set_mask(libc::SIG_BLOCK, &all_but_faults());
}

/// All signals except faults of the thread itself, which cannot be blocked usefully.
fn all_but_faults() -> libc::sigset_t {
    // SAFETY: a mask on the stack, filled before it is read.
    unsafe {
        let mut mask = mem::zeroed();
        libc::sigfillset(&mut mask);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&mut mask, fault);
        }
        mask
    }
}

/// Change the calling thread's signal mask, and return the previous one.
fn set_mask(how: i32, mask: &libc::sigset_t) -> libc::sigset_t {
    // SAFETY: two masks that live as long as the call. It fails for a wrong `how` alone.
    unsafe {
        let mut before = mem::zeroed();
        libc::pthread_sigmask(how, ptr::from_ref(mask), &mut before);
        before
    }
}

/// The calling thread's signal mask, as the kernel shows it.
#[cfg(test)]
pub(crate) fn blocked() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("a /proc");
    let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
    line.trim().trim_start_matches('0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_hangs_takes_none_of_the_runtimes_threads() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime");
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        runtime.block_on(async {
            let hangs = tokio::spawn(aside("test", move || rustix::io::read(read, &mut [0; 8])));
            assert_eq!(aside("test", || 7).await.expect("a thread"), 7);
            rustix::io::write(write, b"four").expect("room");
            assert_eq!(hangs.await.expect("no panic").expect("a thread"), Ok(4));
        });
    }

    #[test]
    fn a_thread_of_ours_takes_faults_alone_and_its_starter_what_it_took() {
        let before = blocked();
        let inside = spawn("test".to_owned(), blocked).expect("a thread").join().expect("its mask");
        let mask = u64::from_str_radix(&inside, 16).expect("a number");
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGUSR1] {
            assert_ne!(mask & 1 << (signal - 1), 0, "{signal} in {inside}");
        }
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            assert_eq!(mask & 1 << (fault - 1), 0, "{fault} in {inside}");
        }
        assert_eq!(blocked(), before);
    }
}
