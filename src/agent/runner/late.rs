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
const EVERY: Duration = Duration::from_millis(500);
/// How often it is asked.
const QUESTIONS: u32 = 10;

/// A worker that does not leave its world.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LateWorker {
    local_rank: u32,
    pid: u32,
    /// What it waits for.
    collective: Collective,
}

/// Workers whose sockets were shut, and that have not left their world yet.
#[derive(Debug, Default)]
pub(super) struct Late {
    asking: JoinSet<Option<LateWorker>>,
    of: BTreeMap<u32, AbortHandle>,
}

impl Late {
    /// Wait until one of them is late. May be dropped.
    pub async fn next(&mut self) -> LateWorker {
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

    /// Nobody is to leave a world.
    pub fn forget_all(&mut self) {
        self.of.clear();
        self.asking.abort_all();
    }
}

impl Runner {
    /// The sockets of this worker were shut, and it is to leave its world. NCCL's collectives are aborted, which takes as long as it takes.
    pub(super) fn watch_freed(&mut self, local_rank: u32) {
        self.looking.late.forget(local_rank);
        let (Some(watches), Some(slot)) = (&self.watches, self.slots.of(local_rank)) else { return };
        let Some(pid) = self.pids().get(&local_rank).copied() else { return };
        if self.machine.leaves_world() && !self.workers.resizes_nccl && !uses_gpu(pid) {
            let asker = watches.asker();
            let late = &mut self.looking.late;
            let asking = async move {
                let collective = forgotten(&asker, slot, EVERY).await?;
                Some(LateWorker { local_rank, pid, collective })
            };
            late.of.insert(local_rank, late.asking.spawn(asking));
        }
    }

    pub(super) fn on_late(&mut self, worker: &LateWorker) {
        let (group, seq) = &worker.collective;
        if self.pids().get(&worker.local_rank) == Some(&worker.pid) {
            self.machine.on_worker_hung(worker.local_rank, &format!("collective {seq} of group {group}"));
        }
    }
}

/// Ask a worker until it names the same collective twice.
async fn forgotten(asker: &Asker, slot: u32, every: Duration) -> Option<Collective> {
    let mut before = None;
    for _ in 0..QUESTIONS {
        sleep(every).await;
        match look::pending(asker, slot).await {
            Some(collective) if before.as_ref() == Some(&collective) => return Some(collective),
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

    /// The collective that was forgotten, if any. The worker's answers name these collectives in turn, and then the last one again and again.
    async fn forgotten_of(collectives: Vec<Option<u64>>) -> Option<Collective> {
        let watches = Watches::listen(1).unwrap();
        watches.expect(&BTreeMap::from([(0, process::id())])); // this process is the worker
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
        let asking = async {
            // Before it is connected, a question is answered by nobody.
            while look::pending(&watches.asker(), 0).await.is_none() {
                sleep(Duration::from_millis(1)).await;
            }
            forgotten(&watches.asker(), 0, Duration::from_millis(1)).await
        };
        timeout(Duration::from_secs(60), asking).await.expect("it is asked so often, and no more")
    }

    #[tokio::test]
    async fn a_collective_that_is_named_twice_was_forgotten() {
        let answers = vec![Some(6), Some(7), Some(8), None, Some(8)];
        assert_eq!(forgotten_of(answers).await, Some(("0".to_owned(), 8)));
    }

    #[tokio::test]
    async fn collectives_that_go_on_were_not_forgotten() {
        assert_eq!(forgotten_of((1..100).map(Some).collect()).await, None);
    }
}
