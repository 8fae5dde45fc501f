//! Workers end with their node's lease, also if this process is stopped: their guards hold the deadline. Part of [`super`].

use std::time::Instant;

use crate::rendezvous::node::session::{Session, WorkersEnd};
use crate::workers::Deadline;

impl WorkersEnd for Deadline {
    fn set(&self, until: Option<Instant>) -> bool {
        Deadline::set(self, until)
    }

    fn has_passed(&self) -> bool {
        Deadline::has_passed(self)
    }
}

/// Make a deadline that follows the node's lease. `None`: the system refuses timers, so only this process can stop workers in time.
pub(super) fn hold(session: &Session) -> Option<Deadline> {
    match Deadline::new() {
        Ok(deadline) => {
            session.end_workers_by(Box::new(deadline.clone()));
            Some(deadline)
        }
        Err(error) => {
            tracing::warn!(
                "the system call `timerfd_create` failed ({error}): while this agent is frozen (SIGSTOP), nothing stops its workers \
                 when its lease ends; check the limit of open files and the container's seccomp profile"
            );
            None
        }
    }
}
