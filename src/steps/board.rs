//! The agent's end: the memory of all workers of a node, and the pipe by which the first step of a round wakes the agent.
//!
//! The memory is a memfd whose length is sealed, so no worker can make the agent's access to it fail. Workers open both by their
//! paths below `/proc`, which the kernel grants to processes of the agent's user. So nothing is left in a file system when the agent
//! is killed, and it does not matter how a worker was started.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::deaths::Deaths;
use super::slot::{First, MUTEX_AT, Reached, SLOT_BYTES, Slot, Stepped};
use super::worker::variable;
use crate::clock::monotonic_ns;

/// The memory of all workers of a node.
#[derive(Debug)]
pub struct Board {
    memory: File,
    workers: u32,
    /// Readable once a worker has made its first step of a round.
    bell: AsyncFd<OwnedFd>,
    /// Workers open it for themselves. It is kept so that the bell does not end.
    button: OwnedFd,
    deaths: Arc<Deaths>,
    /// The memory of no worker.
    idle: BTreeSet<u32>,
    /// The round, and since when its workers can have made a step.
    round: u64,
    since_ns: u64,
}

impl Board {
    /// Memory for so many workers. Needs a tokio runtime.
    ///
    /// # Errors
    /// The system refuses a memfd or a pipe.
    pub fn open(workers: u32) -> io::Result<Self> {
        let memory = memfd_create("elastic_rs-steps", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let memory = File::from(memory);
        memory.set_len(u64::from(workers) * SLOT_BYTES as u64)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (bell, button) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // SAFETY: an owned descriptor stays open and the same for as long as it is owned, as required.
        let bell = unsafe { AsyncFd::register_with_interest(bell, Interest::READABLE) }?;
        let deaths = Arc::new(Deaths::map(&memory, workers)?);
        Ok(Self { memory, workers, bell, button, deaths, idle: BTreeSet::new(), round: 0, since_ns: u64::MAX })
    }

    /// Do not read the memory of these slots: they are free, or a standby holds them.
    pub fn set_idle(&mut self, idle: BTreeSet<u32>) {
        self.idle = idle;
    }

    /// By what the deaths of these workers are known early.
    pub fn deaths(&self) -> Arc<Deaths> {
        self.deaths.clone()
    }

    /// The value of the variable by which a worker finds its memory.
    pub fn variable(&self, local_rank: u32) -> String {
        variable(process::id(), self.memory.as_raw_fd(), self.button.as_raw_fd(), local_rank)
    }

    /// A round begins. No worker makes a step now. Forgets what was written in the round before.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn begin(&mut self, round: u64) -> io::Result<()> {
        (self.round, self.since_ns) = (round, monotonic_ns());
        let blank = Slot::blank(round);
        for worker in 0..u64::from(self.workers) {
            self.memory.write_all_at(&blank, worker * SLOT_BYTES as u64)?;
        }
        self.silence();
        Ok(())
    }

    /// Wait until a worker says that it has made its first step of a round. May be dropped and called again.
    pub async fn rung(&self) {
        match self.bell.readable().await {
            Ok(mut ready) => {
                self.silence();
                ready.clear_ready();
            }
            Err(_) => std::future::pending().await, // the runtime ends
        }
    }

    /// Forget who has rung. What they write means nothing.
    fn silence(&self) {
        let mut bytes = [0; 4096];
        // At most what fits into a pipe: a worker that goes on writing is not read for ever.
        for _ in 0..16 {
            if !rustix::io::read(&self.bell, &mut bytes).is_ok_and(|read| read == bytes.len()) {
                return;
            }
        }
    }

    /// The first step of the round on this node.
    pub fn first(&self) -> Option<First> {
        let within = self.since_ns..=monotonic_ns();
        self.slots().filter_map(|slot| slot.first(self.round, &within)).min_by_key(|first| first.at_ns)
    }

    /// How far the worker has come that is furthest in the round.
    pub fn reached(&self) -> Option<Reached> {
        let within = self.since_ns..=monotonic_ns();
        self.slots().filter_map(|slot| slot.reached(self.round, &within)).max_by_key(|reached| reached.step)
    }

    /// The steps of the worker that has made most in the round, of those that report steps if one does, and when any worker has made its
    /// last one.
    pub fn stepped(&self) -> Option<Stepped> {
        let within = self.since_ns..=monotonic_ns();
        let all: Vec<_> = self.slots().filter_map(|slot| slot.stepped(self.round, &within)).collect();
        let last_ns = all.iter().map(|stepped| stepped.last_ns).max()?;
        let most = all.into_iter().max_by_key(|stepped| (!stepped.of_optimizer, stepped.steps))?;
        Some(Stepped { last_ns, ..most })
    }

    /// When the last of the workers had its process group, and when the state of its world.
    pub fn formed(&self) -> [Option<u64>; 2] {
        let within = self.since_ns..=monotonic_ns();
        let all: Vec<_> = self.slots().map(|slot| slot.formed(&within)).collect();
        [0, 1].map(|which| all.iter().filter_map(|formed| formed[which]).max())
    }

    /// The section of the training in which the first worker is that is in one.
    pub fn section(&self) -> Option<u32> {
        self.slots().find_map(|slot| slot.section())
    }

    /// Whether a worker of this node is restarted when the world changes, because its process group uses NCCL.
    pub fn restarts_for_nccl(&self) -> bool {
        self.slots().any(|slot| slot.restarts_for_nccl())
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        (0..self.workers).filter(|worker| !self.idle.contains(worker)).map(u64::from).filter_map(|worker| {
            let mut bytes = [0; MUTEX_AT];
            // It is as long as it was made.
            self.memory.read_exact_at(&mut bytes, worker * SLOT_BYTES as u64).ok()?;
            Some(Slot::of(&bytes))
        })
    }
}
