//! The runner with real workers and a real coordinator. The test is its front end.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use elastic_rs::agent::runner::{ErrorFiles, Step};
use elastic_rs::agent::worker_group::{Adopted, WorkerGroup};
use elastic_rs::agent::{Budget, Outcome};
use elastic_rs::signals::Signal;
use elastic_rs::workers::ExitStatus;

use crate::node::{Endless, Node, host, session, settings, two_placed};
use crate::workers::support::{Folder, LIMIT, Traces, helper, within};

#[tokio::test]
async fn workers_that_all_succeed_end_the_job_well() {
    let host = host();
    let mut node = Node::new(Some(session(&host, 1, &settings(1, 1, 0))), Budget::Job, 2);
    let placement = node.placed().await;
    assert_eq!((placement.rank, placement.world_size, placement.restart), (0, 1, 0));
    node.start(&["exit 0", "exit 0"]).await;
    assert_eq!(node.outcome().await, Outcome::Succeeded);
    assert_eq!(node.exits().len(), 2);
}

#[tokio::test]
async fn a_failure_restarts_all_workers_of_all_nodes_and_costs_one_restart() {
    let host = host();
    let settings = settings(2, 2, 1);
    let [mut one, mut two] = two_placed(&host, &settings, 2).await;
    one.start(&["complain boom exit 3", "say ready pause"]).await;
    two.start(&["say ready pause", "say ready pause"]).await;
    let (first, second) = tokio::join!(one.placed(), two.placed());
    assert_eq!((first.restart, second.restart, first.round), (1, 1, second.round));
    assert_eq!(one.exits(), [(0, "exit code 3".into()), (1, "SIGTERM".into())]);
    assert_eq!(two.exits().iter().map(|(_, exit)| exit.as_str()).collect::<Vec<_>>(), ["SIGTERM", "SIGTERM"]);
    assert_eq!((one.traces.alive().len(), two.traces.alive().len()), (0, 0));

    // No restart is left: every node names the cause.
    one.start(&["pause", "pause"]).await;
    two.start(&["pause", "complain again exit 4"]).await;
    let (reported, own) = tokio::join!(one.cause(), two.cause());
    assert_eq!(reported, own);
    assert_eq!(
        (reported.node.contains("node2"), reported.local_rank, reported.global_rank, reported.exit.as_str()),
        (true, 1, two.runner.first_rank() + 1, "exit code 4")
    );
    assert_eq!(reported.message, "again");
    assert_eq!(one.runner.restarts(), 1);
}

#[tokio::test]
async fn a_job_that_fails_while_a_node_prepares_its_start_ends_there_too() {
    let host = host();
    let [mut one, mut two] = two_placed(&host, &settings(2, 2, 0), 1).await;
    one.start(&["exit 3"]).await;
    // The other node prepares its start, and does not wait for its next step.
    let (cause, ()) = tokio::join!(one.cause(), within(two.runner.start_withdrawn()));
    assert_eq!(two.cause().await, cause);
    assert_eq!(two.exits(), []);
}

#[tokio::test]
async fn a_start_that_hangs_is_broken_off_when_the_job_has_failed() {
    let host = host();
    let [mut one, mut two] = two_placed(&host, &settings(2, 2, 0), 1).await;
    one.start(&["exit 3"]).await;
    let hangs = std::future::pending::<()>();
    let (cause, started) = tokio::join!(one.cause(), within(two.runner.while_starting(hangs)));
    assert_eq!(started, None);
    assert_eq!(two.cause().await, cause);
}

#[tokio::test]
async fn a_signalled_agent_leaves_at_once_and_the_others_restart() {
    let host = host();
    let settings = settings(1, 2, 0);
    let [mut one, mut two] = two_placed(&host, &settings, 1).await;
    one.start(&["ignore 15 say ready pause"]).await;
    two.start(&["say ready pause"]).await;
    assert_eq!((one.line(), two.line()), ("ready".into(), "ready".into()));
    one.signal(15).await;
    // Its worker ignores the signal, and the other node does not wait for it.
    let placement = tokio::select! {
        placement = two.placed() => placement,
        step = one.runner.next() => panic!("{step:?}"),
    };
    assert_eq!(placement.world_size, 1);
    two.start(&["exit 0"]).await;
    assert_eq!(two.outcome().await, Outcome::Succeeded);
    one.signal(15).await;
    assert_eq!(one.outcome().await, Outcome::Signal(15));
    assert_eq!(one.exits(), [(0, "SIGKILL".into())], "the second signal kills");
}

#[tokio::test]
async fn without_a_session_the_node_counts_its_own_restarts() {
    let mut node = Node::new(None, Budget::Node(1), 1);
    node.placed().await;
    node.start(&["exit 3"]).await;
    node.placed().await;
    assert_eq!(node.runner.restarts(), 1);
    node.start(&["complain boom exit 4"]).await;
    let cause = node.cause().await;
    assert_eq!((cause.exit.as_str(), cause.message.as_str()), ("exit code 4", "boom"));
}

#[tokio::test]
async fn without_a_session_the_front_end_waits_for_the_others() {
    let mut node = Node::new(None, Budget::Node(0), 1);
    node.placed().await;
    node.start(&["exit 0"]).await;
    assert!(matches!(node.next().await, Step::Barrier));
    assert!(matches!(node.next().await, Step::Barrier), "until it is answered");
    node.runner.all_done();
    assert_eq!(node.outcome().await, Outcome::Succeeded);
}

#[tokio::test]
async fn workers_that_cannot_be_started_have_failed() {
    let mut node = Node::new(None, Budget::Node(0), 1);
    node.placed().await;
    node.runner.not_started(0, "no such file");
    let cause = node.cause().await;
    assert_eq!((cause.exit.as_str(), cause.global_rank, cause.pid), ("a failure to start", 0, 0));
    assert_eq!(cause.message, "no such file");
}

#[tokio::test]
async fn a_runner_that_is_dropped_leaves_nothing() {
    let mut node = Node::new(None, Budget::Node(0), 1);
    node.placed().await;
    node.start(&["child stubborn daemon stubborn ignore 15 say ready pause"]).await;
    assert_eq!(node.line(), "ready");
    let Node { runner, traces, shown: _shown, .. } = node;
    drop(runner);
    traces.wait_until_none_is_left();
}

#[tokio::test]
async fn a_runner_that_is_closed_leaves_nothing() {
    let mut node = Node::new(None, Budget::Node(0), 1);
    node.placed().await;
    node.start(&["daemon stubborn ignore 15 say ready pause"]).await;
    assert_eq!(node.line(), "ready");
    within(node.runner.close()).await;
    assert_eq!(node.traces.alive(), [0_u32; 0]);
}

#[tokio::test]
async fn the_first_failure_is_the_cause_even_if_its_error_file_hangs() {
    let mut node = Node::new(None, Budget::Node(0), 3);
    let folder = Folder::new(&node.traces);
    let endless = Endless::new(&folder);
    node.error_files = BTreeMap::from([(1, endless.0.clone())]);
    node.placed().await;
    node.start(&["pause", "complain boom exit 3", "pause"]).await;
    let cause = node.cause().await;
    assert_eq!((cause.local_rank, cause.exit.as_str(), cause.message.as_str()), (1, "exit code 3", "boom"));
    let exits = node.exits();
    assert_eq!((exits.len(), &exits[0]), (3, &(1, "exit code 3".to_owned())));
    assert!(exits[1..].iter().all(|(_, exit)| exit == "SIGTERM"), "{exits:?}");
}

/// Children of this process, each the leader of a session, like the workers that `torch.multiprocessing` starts.
struct Children(Vec<Child>);

impl Children {
    fn new(traces: &Traces, scripts: &[&str]) -> Self {
        let child = |script: &&str| {
            let mut command = Command::new("setsid");
            command.arg(helper()).args(script.split(' ')).envs([traces.variable()]).spawn().unwrap()
        };
        Self(scripts.iter().map(child).collect())
    }

    fn adopted(&self) -> WorkerGroup {
        WorkerGroup::Adopted(Adopted::new(&(0..).zip(self.0.iter().map(Child::id)).collect()).unwrap())
    }

    fn reap(&mut self, local_rank: u32) -> ExitStatus {
        let status = self.0[local_rank as usize].wait().unwrap();
        match status.signal() {
            Some(signal) => ExitStatus::Signal { signal: Signal(signal), core_dumped: false },
            None => ExitStatus::Code(status.code().unwrap()),
        }
    }
}

#[tokio::test]
async fn adopted_workers_are_stopped_together_and_reaped_by_the_front_end() {
    let mut node = Node::new(None, Budget::Node(0), 2);
    node.placed().await;
    let mut children = Children::new(&node.traces, &["pause", "exit 3"]);
    node.runner.started(children.adopted(), ErrorFiles::new());
    let Step::Reap { local_rank: 1 } = node.next().await else { panic!("not the one that failed") };
    // The other worker is stopped before the first one's exit status is reported.
    assert_eq!(children.reap(0).to_string(), "SIGTERM");
    node.runner.reaped(1, children.reap(1), String::new());
    let Step::Reap { local_rank: 0 } = node.next().await else { panic!("not the other") };
    node.runner.reaped(0, ExitStatus::Signal { signal: Signal::TERM, core_dumped: false }, String::new());
    let cause = node.cause().await;
    assert_eq!((cause.local_rank, cause.exit.as_str()), (1, "exit code 3"));
    assert_eq!(node.exits().len(), 2);
}

/// Children of a fork server are reaped by it, at any time.
#[tokio::test]
async fn a_worker_that_has_gone_before_it_is_adopted_has_failed() {
    let mut node = Node::new(None, Budget::Node(0), 2);
    node.placed().await;
    let mut children = Children::new(&node.traces, &["pause", "exit 3"]);
    let exit = children.reap(1);
    node.runner.started(children.adopted(), ErrorFiles::new());
    let Step::Reap { local_rank: 1 } = node.next().await else { panic!("not the one that failed") };
    node.runner.reaped(1, exit, String::new());
    let Step::Reap { local_rank: 0 } = node.next().await else { panic!("not the other") };
    node.runner.reaped(0, children.reap(0), String::new());
    let cause = node.cause().await;
    assert_eq!((cause.local_rank, cause.exit.as_str()), (1, "exit code 3"));
}

#[tokio::test]
async fn adopted_workers_that_succeed_do_not_stop_the_others() {
    let mut node = Node::new(None, Budget::Node(0), 2);
    node.placed().await;
    let folder = Folder::new(&node.traces);
    let go = folder.0.join("go");
    let mut children = Children::new(&node.traces, &["exit 0", &format!("wait-file {}", go.display())]);
    node.runner.started(children.adopted(), ErrorFiles::new());
    let Step::Reap { local_rank: 0 } = node.next().await else { panic!("not the one that ended") };
    node.runner.reaped(0, children.reap(0), String::new());
    std::fs::write(&go, "").unwrap();
    let Step::Reap { local_rank: 1 } = node.next().await else { panic!("not the other") };
    node.runner.reaped(1, children.reap(1), String::new());
    assert!(matches!(node.next().await, Step::Barrier));
}

#[tokio::test]
async fn adopted_workers_are_killed_when_the_runner_is_dropped() {
    let mut node = Node::new(None, Budget::Node(0), 1);
    node.placed().await;
    let mut children = Children::new(&node.traces, &["ignore 15 pause"]);
    node.runner.started(children.adopted(), ErrorFiles::new());
    drop(node.runner);
    assert_eq!(children.reap(0).to_string(), "SIGKILL");
}

/// A control group with a memory limit. `None` if this machine allows none.
struct Limited(PathBuf);

impl Limited {
    fn new(mebibytes: u32) -> Option<Self> {
        let bytes = (mebibytes << 20).to_string();
        // The files of cgroup versions 1 and 2. Swap is limited too, if it can be.
        let files = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", bytes.as_str()),
            ("/sys/fs/cgroup", "memory.max", "memory.swap.max", "0"),
        ];
        files.into_iter().find_map(|(root, limit, swap, swap_bytes)| {
            let folder = PathBuf::from(format!("{root}/elastic_rs-{}", std::process::id()));
            std::fs::create_dir(&folder).ok()?;
            let limited = Self(folder);
            // With version 1, `/sys/fs/cgroup` is a plain folder, in which this write fails.
            std::fs::write(limited.0.join(limit), &bytes).ok()?;
            let _ = std::fs::write(limited.0.join(swap), swap_bytes);
            Some(limited)
        })
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // It can be removed once its last process is reaped.
        let began = std::time::Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && began.elapsed() < LIMIT {
            std::thread::yield_now();
        }
    }
}

#[test]
fn the_failure_of_a_worker_that_ran_out_of_memory_says_so() {
    let Some(limited) = Limited::new(64) else {
        return eprintln!("not tested: no control group of memory to write to");
    };
    let traces = Traces::new();
    let procs = limited.0.join("cgroup.procs");
    let mut agent = Command::new(helper());
    // The worker takes more memory than the group may have.
    agent.arg("agent-within").arg(procs).arg("eat 200 exit 0").envs([traces.variable()]);
    let reported = agent.output().unwrap();
    assert_eq!(
        String::from_utf8(reported.stdout).unwrap(),
        "SIGKILL\nkilled because memory ran out: its control group's limit was reached (OOM)\n",
        "{}",
        String::from_utf8_lossy(&reported.stderr)
    );
}
