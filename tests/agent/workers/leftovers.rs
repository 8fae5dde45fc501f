//! Nothing that a worker has started outlives the worker or the agent.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use elastic_rs::workers::{Consoles, Deadline, FilterOptions, Group, Origin};

use super::support::{LIMIT, Traces, exit, grace, helper, shown, start, wait_for_all, within};

/// A child in the worker's process group, one more that ignores SIGTERM, and a daemon.
const FAMILY: &str = "child pause child stubborn daemon stubborn";

#[tokio::test]
async fn a_worker_that_ends_leaves_nothing_before_its_end_is_complete() {
    // PyTorch does not signal a group after its leader has ended: pytorch #8805, #26072.
    for end in ["exit 0", "exit 3", "raise 9", "raise 11"] {
        let traces = Traces::new();
        let (mut group, _shown) = start(vec![traces.worker(0, &format!("{FAMILY} {end}"))]).await.unwrap();
        assert_eq!(wait_for_all(&mut group).await.len(), 1);
        assert_eq!(traces.alive(), [0_u32; 0], "{end}");
    }
}

#[tokio::test]
async fn other_workers_and_their_daemons_live_on() {
    let traces = Traces::new();
    let workers =
        vec![traces.worker(0, &format!("{FAMILY} say ready pause")), traces.worker(1, &format!("{FAMILY} exit 1"))];
    let (mut group, shown) = start(workers).await.unwrap();
    assert_eq!(shown.line(), "ready");
    assert_eq!(exit(&mut group).await.local_rank, 1);
    within(group.next_event()).await;
    // The worker itself, two children and a daemon.
    assert_eq!(traces.alive().len(), 4);
    within(group.stop(grace(LIMIT))).await;
    assert_eq!(traces.alive(), [0_u32; 0]);
}

#[tokio::test]
async fn a_stop_ends_the_whole_family() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, &format!("{FAMILY} say ready pause"))]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    let outcome = within(group.stop(grace(LIMIT))).await;
    assert_eq!(outcome.exited[0].exit.to_string(), "SIGTERM");
    assert_eq!(traces.alive(), [0_u32; 0]);
}

#[tokio::test]
async fn a_group_that_is_dropped_ends_its_workers() {
    let traces = Traces::new();
    let (group, shown) = start(vec![traces.worker(0, &format!("{FAMILY} ignore 15 say ready pause"))]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    drop(group);
    traces.wait_until_none_is_left();
}

/// Without an order of the agent, which may be stopped.
#[tokio::test]
async fn a_deadline_that_passes_ends_the_whole_family() {
    let traces = Traces::new();
    let deadline = Deadline::new().unwrap();
    deadline.set(Some(Instant::now() + LIMIT));
    let (stdout, shown) = shown();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let specs = (0..2).map(|rank| traces.worker(rank, &format!("{FAMILY} ignore 15 say ready pause"))).collect();
    let origin = Origin { deadline: Some(deadline.clone()), ..Origin::default() };
    let mut group = Group::start_from(origin, specs, FilterOptions::default(), consoles).await.unwrap();
    assert_eq!([shown.line(), shown.line()], ["ready", "ready"]);
    assert!(!deadline.set(Some(Instant::now())));
    let exits = wait_for_all(&mut group).await;
    assert_eq!(exits.iter().map(|exited| exited.exit.to_string()).collect::<Vec<_>>(), ["SIGKILL", "SIGKILL"]);
    assert_eq!(traces.alive(), [0_u32; 0]);
    assert!(deadline.has_passed(), "the agent sees that they have not failed");
}

/// An agent in a separate process.
struct Agent {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Agent {
    fn start(traces: &Traces, script: &str) -> Agent {
        let mut child = Command::new(helper())
            .args(["agent", script])
            .envs([traces.variable()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Agent { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("a line").unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_agent_that_is_killed_takes_everything_along() {
    let traces = Traces::new();
    let mut agent = Agent::start(&traces, &format!("{FAMILY} ignore 15 say ready pause"));
    assert_eq!(agent.line(), "ready");
    // Agent, guard, worker, two children, daemon.
    assert_eq!(traces.alive().len(), 6);
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    traces.wait_until_none_is_left();
}

#[test]
fn an_agent_that_ends_well_leaves_no_guard() {
    let traces = Traces::new();
    let mut agent = Agent::start(&traces, &format!("{FAMILY} exit 5"));
    assert_eq!([agent.line(), agent.line()], ["worker: exit code 5", "gone"]);
    assert!(agent.child.wait().unwrap().success());
    assert_eq!(traces.alive(), [0_u32; 0]);
}

#[test]
fn a_signal_to_the_agents_group_reaches_the_agent_alone() {
    use std::os::unix::process::CommandExt;
    let traces = Traces::new();
    let mut command = Command::new(helper());
    command.args(["agent", "daemon pause say ready pause"]).envs([traces.variable()]).stdout(Stdio::piped());
    let mut child = command.process_group(0).spawn().unwrap();
    let mut agent = Agent { lines: BufReader::new(child.stdout.take().unwrap()).lines(), child };
    assert_eq!(agent.line(), "ready");
    let group = rustix::process::Pid::from_child(&agent.child);
    // The guard must ignore SIGINT, because it still has to end the daemon.
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    agent.child.wait().unwrap();
    traces.wait_until_none_is_left();
}

#[test]
fn a_foreign_orphan_is_reaped_and_own_children_are_not() {
    let traces = Traces::new();
    let done = Command::new(helper()).arg("adopt").envs([traces.variable()]).output().unwrap();
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "reaped; own child: 7\n");
}

#[test]
fn process_1_of_a_container_whose_session_began_outside_reaps_orphans() {
    let traces = Traces::new();
    let inside = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
    let unshare = |program: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(inside).args(program).envs([traces.variable()]).stdin(Stdio::null());
        command.output()
    };
    // Without the right to make namespaces, only the test above runs.
    if !unshare(&["true"]).is_ok_and(|done| done.status.success()) {
        return;
    }
    let done = unshare(&[helper().to_str().unwrap(), "adopt"]).unwrap();
    assert_eq!(
        String::from_utf8(done.stdout).unwrap(),
        "reaped; own child: 7\n",
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}
