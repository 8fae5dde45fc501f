//! Finds workers that cannot leave a world that has ended, because a collective of theirs does not end. Part of [`super`].
//!
//! Their sockets are shut, so whatever they wait for fails at once. Gloo, though, forgets to end a send that it is writing when its
//! connection ends (`Pair::signalException` in `gloo/transport/tcp/pair.cc`), and waits until the group's time-out. Torch's flight
//! recorder shows that: a collective that has failed is recorded as ended, and this one is not. Also a worker whose main thread does not
//! wait for the collective will: leaving the process group joins gloo's threads.
//!
//! Workers that use a GPU are left out. There a collective waits until the kernels before it have run, which may take longer.

use std::collections::BTreeMap;
use std::fs;
use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::Runner;
use crate::agent::look::{self, Collective};
use crate::channel::sockets::QUIET_LIMIT;
use crate::channel::watch::agent::Asker;
use crate::rendezvous::messages::message::Round;

/// Time between two questions to the workers, once their sockets must be shut. A worker that names the same collective twice is late.
const EVERY: Duration = Duration::from_secs(1);

/// The workers of a world that has ended, until all have left it.
#[derive(Debug, Default)]
pub(super) struct Late(Option<(Round, JoinHandle<BTreeMap<u32, Collective>>)>);

impl Late {
    /// Wait until workers are late. Returns what they wait for, by local rank. May be dropped.
    pub async fn next(&mut self) -> BTreeMap<u32, Collective> {
        match &mut self.0 {
            Some((_, watching)) => {
                let found = watching.await.unwrap_or_default();
                self.forget();
                found
            }
            None => pending().await,
        }
    }

    fn forget(&mut self) {
        if let Some((_, watching)) = self.0.take() {
            watching.abort();
        }
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Runner {
    /// Ask the workers that are to leave their world, while they do. NCCL's collectives are aborted, which takes as long as it takes.
    pub(super) fn watch_late(&mut self) {
        let round = self.machine.round();
        let Some(watches) = self.watches.as_ref().filter(|_| self.machine.leaves_world()) else {
            return self.looking.late.forget();
        };
        let is_watching = self.looking.late.0.as_ref().is_some_and(|(of, _)| *of == round);
        if !is_watching && !self.workers.resizes_nccl {
            let cpu = self.pids().into_iter().filter(|(_, pid)| !uses_gpu(*pid));
            let slots = cpu.filter_map(|(local_rank, _)| Some((local_rank, self.slots.of(local_rank)?)));
            let watching = tokio::spawn(watch(slots.collect(), watches.asker()));
            self.looking.late.forget();
            self.looking.late.0 = Some((round, watching));
        }
    }

    pub(super) fn on_late(&mut self, found: BTreeMap<u32, Collective>) {
        for (local_rank, (group, seq)) in found {
            self.machine.on_worker_hung(local_rank, &format!("collective {seq} of group {group}"));
        }
    }
}

/// Ask these workers, given by local rank and slot, until some of them are late.
async fn watch(slots: BTreeMap<u32, u32>, asker: Asker) -> BTreeMap<u32, Collective> {
    let mut before = BTreeMap::new();
    sleep(QUIET_LIMIT).await;
    loop {
        sleep(EVERY).await;
        let mut asking = JoinSet::new();
        for (&local_rank, &slot) in &slots {
            let asker = asker.clone();
            asking.spawn(async move { Some((local_rank, look::pending(&asker, slot).await?)) });
        }
        let waits: BTreeMap<_, _> = asking.join_all().await.into_iter().flatten().collect();
        let late = still_waits(&before, &waits);
        if !late.is_empty() {
            return late;
        }
        before = waits;
    }
}

/// Whether a process has opened one of NVIDIA's or AMD's devices, or that cannot be known.
fn uses_gpu(pid: u32) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return true };
    let is_gpu =
        |path: PathBuf| ["/dev/nvidia", "/dev/kfd"].iter().any(|device| path.to_string_lossy().starts_with(device));
    open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).any(is_gpu)
}

/// The workers that have named the same collective in both answers.
fn still_waits(before: &BTreeMap<u32, Collective>, now: &BTreeMap<u32, Collective>) -> BTreeMap<u32, Collective> {
    let same = now.iter().filter(|(local_rank, collective)| before.get(local_rank) == Some(*collective));
    same.map(|(local_rank, collective)| (*local_rank, collective.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_goes_on_or_is_new_is_not_late() {
        let waits = |all: &[(u32, &str, u64)]| -> BTreeMap<u32, Collective> {
            all.iter().map(|(local_rank, group, seq)| (*local_rank, ((*group).to_owned(), *seq))).collect()
        };
        let before = waits(&[(0, "0", 7), (1, "0", 7), (2, "0", 7), (3, "0", 7)]);
        let now = waits(&[(0, "0", 7), (1, "0", 8), (2, "1", 7), (4, "0", 7)]);
        assert_eq!(still_waits(&before, &now), waits(&[(0, "0", 7)]));
        assert_eq!(still_waits(&BTreeMap::new(), &now), BTreeMap::new());
    }
}
