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

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::Runner;
use crate::agent::look::{self, Collective};
use crate::channel::watch::agent::Asker;

/// Time between two questions to a worker whose sockets are shut. If it names the same collective twice, that was forgotten. Its answers
/// need the GIL and time on a core, as does the end of a collective.
const EVERY: Duration = Duration::from_millis(250);
/// How often it is asked.
const QUESTIONS: u32 = 20;

/// Workers whose sockets were shut, and that have not left their world yet.
#[derive(Debug, Default)]
pub(super) struct Late {
    asking: JoinSet<Option<(u32, Collective)>>,
    of: BTreeMap<u32, AbortHandle>,
}

impl Late {
    /// Wait until one of them is late. Returns its local rank, and what it waits for. May be dropped.
    pub async fn next(&mut self) -> (u32, Collective) {
        while let Some(asked) = self.asking.join_next().await {
            if let Ok(Some(late)) = asked {
                return late;
            }
        }
        pending().await
    }

    /// This one has left its world, or has ended.
    pub fn forget(&mut self, local_rank: u32) {
        if let Some(asking) = self.of.remove(&local_rank) {
            asking.abort();
        }
    }
}

impl Runner {
    /// The sockets of this worker were shut, and it is to leave its world. NCCL's collectives are aborted, which takes as long as it takes.
    pub(super) fn watch_freed(&mut self, local_rank: u32) {
        self.looking.late.forget(local_rank);
        let (Some(watches), Some(slot)) = (&self.watches, self.slots.of(local_rank)) else { return };
        let Some(pid) = self.pids().get(&local_rank).copied() else { return };
        if !self.workers.resizes_nccl && !uses_gpu(pid) {
            let asking = asks(watches.asker(), local_rank, slot);
            let late = &mut self.looking.late;
            late.of.insert(local_rank, late.asking.spawn(asking));
        }
    }
}

/// Ask a worker until it names the same collective twice.
async fn asks(asker: Asker, local_rank: u32, slot: u32) -> Option<(u32, Collective)> {
    let mut before = None;
    for _ in 0..QUESTIONS {
        sleep(EVERY).await;
        match look::pending(&asker, slot).await {
            Some(collective) if before.as_ref() == Some(&collective) => return Some((local_rank, collective)),
            now => before = now,
        }
    }
    None
}

/// Whether a process has opened one of NVIDIA's or AMD's devices, or that cannot be known.
fn uses_gpu(pid: u32) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return true };
    let is_gpu =
        |path: PathBuf| ["/dev/nvidia", "/dev/kfd"].iter().any(|device| path.to_string_lossy().starts_with(device));
    open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).any(is_gpu)
}

#[cfg(test)]
mod tests {
    use std::process;

    use tokio::time::timeout;

    use super::*;
    use crate::channel::watch::agent::Watches;
    use crate::channel::watch::{Answer, worker};

    /// This process is the worker. It names the first collective at the first question, and the last one from its question on.
    async fn late_with(collectives: Vec<Option<u64>>) -> Option<(u32, Collective)> {
        let watches = Watches::listen(1).unwrap();
        watches.expect(&BTreeMap::from([(0, process::id())]));
        let mut named = collectives.into_iter();
        let mut last = None;
        worker::start(watches.address().to_owned(), move |has_gil| {
            has_gil();
            last = named.next().or(last);
            let recorder = last.flatten().map(|seq| {
                format!(
                    r#"{{"entries": [{{"process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": {seq},
                    "profiling_name": "gloo:all_reduce", "is_p2p": false, "state": "scheduled"}}]}}"#
                )
            });
            Some(Answer { recorders: recorder.iter().map(|it| it.as_bytes()).collect(), ..Answer::default() }.encode())
        });
        let limit = EVERY * (QUESTIONS + 20);
        timeout(limit, asks(watches.asker(), 0, 0)).await.expect("it is asked so often, and no more")
    }

    #[tokio::test]
    async fn a_worker_that_names_a_collective_twice_is_late() {
        assert_eq!(late_with(vec![None, Some(7), Some(8), None, Some(8)]).await, Some((0, ("0".to_owned(), 8))));
    }

    #[tokio::test]
    async fn a_worker_that_goes_on_is_not_late() {
        assert_eq!(late_with((0..).map(Some).take(100).collect()).await, None);
    }
}
