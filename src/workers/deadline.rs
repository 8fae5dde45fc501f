//! The instant at which guards kill their workers, whatever the agent does: it may be stopped (SIGSTOP) by then.
//!
//! One timer for all guards of an agent, which they hold open and wait for. So the agent renews the deadline with one system call, and no
//! guard wakes up for that. It counts the time while the machine is suspended, where the kernel lets it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_gettime,
    timerfd_settime,
};

use crate::open_files::lifted;

/// A deadline for the workers of any number of groups. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Deadline(Arc<Timer>);

#[derive(Debug)]
struct Timer {
    descriptor: OwnedFd,
    /// Whether there is a deadline.
    armed: Mutex<bool>,
}

impl Deadline {
    /// Makes one that is not set.
    ///
    /// # Errors
    /// The system has no such timers, or refuses them.
    pub fn new() -> io::Result<Deadline> {
        let create = |clock| timerfd_create(clock, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK);
        let timer = create(TimerfdClockId::Boottime).or_else(|_| create(TimerfdClockId::Monotonic)).and_then(lifted)?;
        Ok(Deadline(Arc::new(Timer { descriptor: timer, armed: Mutex::new(false) })))
    }

    /// Replaces the deadline. `None`: withdraws it. Returns whether the one before has passed: then guards have killed workers, or are
    /// about to.
    pub fn set(&self, until: Option<Instant>) -> bool {
        let mut armed = self.0.armed.lock();
        // Zero would withdraw it.
        let left = until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let timer = Itimerspec { it_interval: zero(), it_value: left.map_or(zero(), time) };
        let before = timerfd_settime(&self.0.descriptor, TimerfdTimerFlags::empty(), &timer);
        std::mem::replace(&mut *armed, until.is_some()) && has_passed(before)
    }

    /// Whether the deadline has passed.
    pub fn has_passed(&self) -> bool {
        *self.0.armed.lock() && has_passed(timerfd_gettime(&self.0.descriptor))
    }

    pub(super) fn raw(&self) -> RawFd {
        self.0.descriptor.as_raw_fd()
    }
}

impl AsFd for Deadline {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }
}

/// No time is left of a timer that was set and never repeats.
fn has_passed(timer: Result<Itimerspec, Errno>) -> bool {
    timer.is_ok_and(|timer| timer.it_value == zero())
}

fn zero() -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: 0 }
}

fn time(left: Duration) -> Timespec {
    // A lease is far below the largest time.
    Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn fires(deadline: &Deadline, within: Duration) -> bool {
        let limit = time(within);
        poll(&mut [PollFd::new(deadline, PollFlags::IN)], Some(&limit)).unwrap() > 0
    }

    #[test]
    fn a_deadline_passes_unless_it_is_renewed_or_withdrawn() {
        let deadline = Deadline::new().unwrap();
        let after = |ms| Some(Instant::now() + Duration::from_millis(ms));
        assert!(!deadline.has_passed() && !fires(&deadline, Duration::ZERO), "it is not set");
        assert!(!deadline.set(after(3_600_000)) && !deadline.has_passed());
        assert!(!deadline.set(after(1)), "the one before has not passed");
        assert!(fires(&deadline, Duration::from_secs(10)) && deadline.has_passed());
        assert!(deadline.set(after(3_600_000)), "the one before has passed");
        assert!(!deadline.has_passed() && !fires(&deadline, Duration::ZERO));
        assert!(!deadline.set(None) && !fires(&deadline, Duration::ZERO));
        assert!(!deadline.set(None) && !deadline.has_passed(), "nothing was set");
    }

    #[test]
    fn a_deadline_that_is_over_passes_at_once() {
        let deadline = Deadline::new().unwrap();
        deadline.set(Some(Instant::now()));
        assert!(fires(&deadline, Duration::from_secs(10)));
    }
}
