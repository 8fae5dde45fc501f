//! Signals as messages: while [`Signals`] lives, those it has taken end nobody and interrupt nothing; they are read.
//!
//! A handler would be Python's to set, and could only be run by Python. Blocked signals are kept even where the kernel drops
//! what is not handled (process 1) or ignored (`nohup`), as torchrun's handlers have it.

use std::io;
use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;

use tokio::io::unix::AsyncFd;

use crate::process::Signal;

/// Signals of this process, taken by the thread that made this. It has to be the only one that does not block them, which
/// is so as long as all others are this library's ([`crate::threads`]).
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
    /// What SIGINT did, if it is not among them.
    interrupt: Option<libc::sigaction>,
    /// A mask is a thread's.
    _of_this_thread: PhantomData<*const ()>,
}

impl Signals {
    /// Take these. SIGKILL and SIGSTOP cannot be. SIGINT, if it is not among them, ends the process: Python's handler of it would
    /// not run before this is dropped.
    ///
    /// # Errors
    /// No descriptor is left, or the machine refuses the system call.
    pub fn take(signals: &[Signal]) -> io::Result<Signals> {
        // SAFETY: masks on the stack, filled before they are read; the descriptor is checked, and nobody else's.
        unsafe {
            let (mut mask, mut before) = (mem::zeroed(), mem::zeroed());
            libc::sigemptyset(&mut mask);
            for signal in signals {
                libc::sigaddset(&mut mask, signal.0);
            }
            let fd = libc::signalfd(-1, &mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd == -1 {
                let error = io::Error::last_os_error();
                let text = format!("cannot take signals: the system call `signalfd4` has failed: {error}");
                return Err(io::Error::new(error.kind(), text));
            }
            let fd = OwnedFd::from_raw_fd(fd);
            libc::pthread_sigmask(libc::SIG_BLOCK, &mask, &mut before);
            let interrupt = if signals.contains(&Signal(libc::SIGINT)) { None } else { end_by_interrupt() };
            Ok(Signals { fd, before, interrupt, _of_this_thread: PhantomData })
        }
    }

    /// Where to read them. Needs a tokio runtime.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn receiver(&self) -> io::Result<Receiver> {
        let fd = self.fd.try_clone()?;
        // SAFETY: an `OwnedFd` always refers to the same open descriptor until it is dropped.
        unsafe { AsyncFd::register(fd) }.map(Receiver).map_err(Into::into)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Whoever sent them was heard, or came too late: they must not end the process once they are let through.
        while let Ok(Some(_)) = read(&self.fd) {}
        // SAFETY: the mask is the one that this thread had, and the action the process's.
        unsafe {
            if let Some(action) = &self.interrupt {
                libc::sigaction(libc::SIGINT, action, ptr::null_mut());
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut());
        }
    }
}

/// Has SIGINT do what it does without a handler; where it is ignored (a background job of a shell), it stays so. Gives what it
/// did before.
fn end_by_interrupt() -> Option<libc::sigaction> {
    // SAFETY: actions on the stack, filled before they are read. All zero is the default action.
    unsafe {
        let mut before: libc::sigaction = mem::zeroed();
        libc::sigaction(libc::SIGINT, ptr::null(), &mut before);
        if before.sa_sigaction == libc::SIG_IGN {
            return None;
        }
        libc::sigaction(libc::SIGINT, &mem::zeroed(), ptr::null_mut());
        Some(before)
    }
}

/// The signals as they come.
#[derive(Debug)]
pub struct Receiver(AsyncFd<OwnedFd>);

impl Receiver {
    /// The next one's number. May be cancelled.
    pub async fn next(&mut self) -> i32 {
        loop {
            let Ok(mut ready) = self.0.readable().await else {
                return std::future::pending().await; // the runtime ends, and this future with it
            };
            match read(self.0.get_ref()) {
                Ok(Some(signal)) => return signal,
                Ok(None) => ready.clear_ready(),
                Err(error) => {
                    tracing::error!(%error, "signals cannot be read any longer; only SIGKILL ends this process");
                    return std::future::pending().await;
                }
            }
        }
    }
}

/// One signal, if there is one.
fn read(fd: impl AsFd) -> io::Result<Option<i32>> {
    let mut info = [MaybeUninit::<u8>::uninit(); size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(fd, &mut info) {
        // The number is the first of its fields.
        Ok((read, _)) => Ok(read.first_chunk::<4>().map(|number| i32::from_ne_bytes(*number))),
        Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn send_to_this_thread(signal: Signal) {
        // SAFETY: a signal to the calling thread, which blocks it.
        unsafe { libc::pthread_kill(libc::pthread_self(), signal.0) };
    }

    #[test]
    fn what_is_taken_is_read_and_ends_nobody() {
        let taken = Signals::take(&[Signal(10), Signal(12)]).unwrap();
        runtime().block_on(async {
            let mut receiver = taken.receiver().unwrap();
            for signal in [Signal(12), Signal(10), Signal(12)] {
                send_to_this_thread(signal);
                assert_eq!(receiver.next().await, signal.0);
            }
            // Nobody reads this one, and the thread lives on once it takes the signal again.
            send_to_this_thread(Signal(10));
        });
        drop(taken);
    }
}
