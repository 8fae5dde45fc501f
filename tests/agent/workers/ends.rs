//! Exits and stops of workers.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use elastic_rs::signals::{FirstSignal, Signal};
use elastic_rs::workers::{Event, ExitStatus, StopPolicy};

use super::support::{Folder, LIMIT, Traces, exit, grace, signalled, start, wait_for_all, within};

#[tokio::test]
async fn exits_are_reported_by_code_or_signal_name() {
    let traces = Traces::new();
    let scripts = ["exit 0", "exit 3", "raise 11", "raise 9"];
    let workers = (0..).zip(scripts).map(|(rank, script)| traces.worker(rank, script)).collect();
    let (mut group, _shown) = start(workers).await.unwrap();
    let mut exits = wait_for_all(&mut group).await;
    exits.sort_by_key(|exited| exited.local_rank);
    let found: Vec<String> = exits.iter().map(|exited| signalled(exited.exit)).collect();
    assert_eq!(found, ["exit code 0", "exit code 3", "SIGSEGV", "SIGKILL"]);
    assert!(exits[0].exit.is_success());
    assert_eq!(exits[2].exit.returncode(), -11);
}

#[tokio::test]
async fn an_exit_is_reported_while_other_workers_run() {
    let traces = Traces::new();
    let (mut group, _shown) = start(vec![traces.worker(0, "pause"), traces.worker(1, "exit 7")]).await.unwrap();
    let pids = group.pids();
    let exited = exit(&mut group).await;
    assert_eq!((exited.local_rank, exited.pid, exited.exit), (1, pids[&1], ExitStatus::Code(7)));
    assert!(matches!(within(group.next_event()).await, Some(Event::Gone { local_rank: 1 })));
    let outcome = within(group.stop(grace(LIMIT))).await;
    assert_eq!(outcome.exited.iter().map(|exited| exited.exit.to_string()).collect::<Vec<_>>(), ["SIGTERM"]);
}

#[tokio::test]
async fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "ignore 15 say ready pause")]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    let began = Instant::now();
    let outcome = within(group.stop(grace(Duration::from_millis(300)))).await;
    // It is not killed earlier. The upper bound leaves room for a busy machine, and is below PyTorch's 30 s.
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(outcome.exited[0].exit.to_string(), "SIGKILL");
}

#[tokio::test]
async fn a_second_interrupt_kills_at_once() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "ignore 15 ignore 2 say ready pause")]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    let policy = StopPolicy { signal: Signal::INT, ..grace(10 * LIMIT) };
    group.begin_stop(policy);
    group.kill();
    assert_eq!(signalled(exit(&mut group).await.exit), "SIGKILL");
    wait_for_all(&mut group).await;
}

#[tokio::test]
async fn a_worker_stopped_by_sigstop_gets_its_sigterm() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "say ready raise 19 pause")]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    let outcome = within(group.stop(grace(10 * LIMIT))).await;
    assert_eq!(outcome.exited[0].exit.to_string(), "SIGTERM");
}

#[tokio::test]
async fn a_signal_can_be_forwarded_without_a_stop() {
    let traces = Traces::new();
    let workers = vec![traces.worker(0, "ignore 10 say ready pause"), traces.worker(1, "say ready pause")];
    let (mut group, shown) = start(workers).await.unwrap();
    assert_eq!([shown.line(), shown.line()], ["ready", "ready"]);
    group.pass_on(Signal(10), FirstSignal::Group, &BTreeSet::new());
    let exited = exit(&mut group).await;
    assert_eq!((exited.local_rank, exited.exit.to_string()), (1, "SIGUSR1".into()));
    assert!(matches!(within(group.next_event()).await, Some(Event::Gone { local_rank: 1 })));
    assert_eq!(group.pids().into_keys().collect::<Vec<_>>(), [0]);
    group.kill();
    wait_for_all(&mut group).await;
}

#[tokio::test]
async fn a_guard_that_is_killed_takes_its_worker_along() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "say ready pause")]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    signal(parent_of(group.pids()[&0]), Signal::KILL);
    let exited = exit(&mut group).await;
    assert_eq!(exited.exit, ExitStatus::Unseen);
    wait_for_all(&mut group).await;
    traces.wait_until_none_is_left();
}

/// A worker may end at the same time as a stop begins. Orders that the guard has not read when it ends must not lose its last reports.
#[tokio::test]
async fn a_worker_that_ends_just_as_it_is_stopped_is_reported_with_its_own_end() {
    for (own_end, expected) in [("exit 0", "exit code 0"), ("exit 3", "exit code 3"), ("raise 15", "SIGTERM")] {
        let traces = Traces::new();
        let folder = Folder::new(&traces);
        let file = folder.0.join("end");
        let script = format!("say ready wait-file {} {own_end}", file.display());
        let (mut group, shown) = start(vec![traces.worker(0, &script)]).await.unwrap();
        assert_eq!(shown.line(), "ready");
        let worker = group.pids()[&0];
        let guard = parent_of(worker);
        // The guard sees the worker's end and the orders at once. The runtime has only this thread, so it sees nothing before the
        // guard has ended.
        signal(guard, Signal(libc::SIGSTOP));
        wait_for_state(guard, 'T');
        std::fs::write(file, "").unwrap();
        wait_for_state(worker, 'Z');
        group.begin_stop(grace(LIMIT));
        signal(guard, Signal::CONT);
        wait_for_state(guard, 'Z');
        assert_eq!(exit(&mut group).await.exit.to_string(), expected);
        wait_for_all(&mut group).await;
    }
}

fn parent_of(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap()
}

fn signal(pid: u32, signal: Signal) {
    // SAFETY: a signal to a process of this test, which has not been reaped.
    assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal.0) }, 0);
}

/// Wait until a process has this state in `/proc/PID/stat`: `T` is stopped, `Z` has ended.
fn wait_for_state(pid: u32, state: char) {
    let began = Instant::now();
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let found = stat.rsplit(") ").next().unwrap().chars().next().unwrap();
        if found == state {
            return;
        }
        assert!(began.elapsed() < LIMIT, "{pid} is in state {found}, not {state}");
        std::thread::yield_now();
    }
}

/// A freezer of cgroup version 1. A frozen process takes no signal, like one in uninterruptible sleep. `None` if this machine allows
/// none.
struct Freezer(std::path::PathBuf);

impl Freezer {
    fn new() -> Option<Freezer> {
        let folder = format!("/sys/fs/cgroup/freezer/elastic_rs-{}", std::process::id());
        let folder = std::path::PathBuf::from(folder);
        std::fs::create_dir(&folder).ok()?;
        Some(Freezer(folder))
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.write("freezer.state", "THAWED");
        // It can be removed once its last process is reaped.
        let began = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && began.elapsed() < LIMIT {
            std::thread::yield_now();
        }
    }
}

#[tokio::test]
async fn a_worker_that_no_signal_ends_is_reported_and_not_waited_for() {
    let Some(freezer) = Freezer::new() else {
        return eprintln!("not tested: no freezer cgroup of version 1 to write to");
    };
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "say ready pause"), traces.worker(1, "pause")]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    let pid = group.pids()[&0];
    freezer.write("cgroup.procs", &pid.to_string());
    freezer.write("freezer.state", "FROZEN");
    let kill_timeout = Duration::from_millis(200);
    let policy = StopPolicy { kill_timeout, ..grace(Duration::from_millis(100)) };
    let outcome = within(group.stop(policy)).await;
    assert_eq!(outcome.exited.iter().map(|exited| exited.local_rank).collect::<Vec<_>>(), [1]);
    let [left] = &outcome.left[..] else { panic!("{outcome:?}") };
    assert_eq!((left.local_rank, left.pid, left.state), (0, pid, Some('D')));
    assert!(left.waited >= Duration::from_millis(300), "{left:?}");
    assert!(within(group.next_event()).await.is_none());
    // Its guard is still there, and kills it as soon as it thaws.
    drop(freezer);
    traces.wait_until_none_is_left();
}
