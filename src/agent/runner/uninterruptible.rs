//! Workers that sleep uninterruptibly for too long are given up. Part of [`super`].

use std::time::Instant;

use super::Runner;
use crate::agent::uninterruptible::UninterruptibleWorker;

impl Runner {
    pub(super) fn look_for_uninterruptible(&mut self) {
        if !self.machine.is_running() {
            return;
        }
        let pids = self.pids();
        for UninterruptibleWorker { local_rank, pid, slept } in self.uninterruptible.look(&pids, Instant::now()) {
            let exit = format!("uninterruptible sleep for {slept:.0?}");
            let message = "a hung device or file system holds it; a new worker on this host could not use it either";
            self.machine.on_worker_failed(
                self.failure(local_rank, pid, (exit, 1), message.to_owned()),
                true,
                Instant::now(),
            );
        }
    }
}
