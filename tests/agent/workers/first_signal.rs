//! A stop whose first signal is for the worker alone.

use std::collections::BTreeSet;
use std::time::Duration;

use elastic_rs::signals::{FirstSignal, Signal};
use elastic_rs::workers::{Event, StopPolicy, WorkerSpec};

use super::support::{LIMIT, Traces, exit, grace, start, to_console, wait_for_all, within};

/// A child that says what it gets; the worker saves as long as the child has not said anything, and fails.
const SAVES: &str = r#"
    trap "echo saved; exit 3" TERM
    sh -c 'trap "echo child ends; exit" TERM; echo child; while :; do sleep 0.01; done' &
    while :; do wait; done
"#;

fn leader(for_at_most: Duration) -> StopPolicy {
    StopPolicy { to: FirstSignal::Leader, ..grace(for_at_most) }
}

#[tokio::test]
async fn what_a_worker_has_started_gets_sigterm_once_the_worker_has_ended() {
    let mut shell = WorkerSpec::new(0, "/bin/sh");
    shell.args = ["-c", SAVES].map(Into::into).to_vec();
    shell.env = std::env::vars_os().collect();
    shell.stdout = to_console();
    let (mut group, shown) = start(vec![shell]).await.unwrap();
    assert_eq!(shown.line(), "child");
    let outcome = within(group.stop(leader(LIMIT))).await;
    assert_eq!((outcome.exited[0].exit.to_string(), outcome.left.len()), ("exit code 3".to_owned(), 0));
    drop(group);
    assert_eq!(shown.rest(), ["saved", "child ends"], "and it is not killed at the worker's end");
}

/// The same with SIGUSR1, which a worker may get without a stop. A child that got it would say so.
const SAVES_MEANWHILE: &str = r#"
    trap "echo saved; exit 3" USR1
    sh -c 'trap "echo child got it" USR1; trap "echo child ends; exit" TERM; echo child; while :; do sleep 0.01; done' &
    while :; do wait; done
"#;

#[tokio::test]
async fn a_signal_that_is_passed_on_to_a_worker_alone_is_no_stop() {
    let mut shell = WorkerSpec::new(0, "/bin/sh");
    shell.args = ["-c", SAVES_MEANWHILE].map(Into::into).to_vec();
    shell.env = std::env::vars_os().collect();
    shell.stdout = to_console();
    let (mut group, shown) = start(vec![shell]).await.unwrap();
    assert_eq!(shown.line(), "child");
    group.pass_on(Signal(10), FirstSignal::Leader, &BTreeSet::new());
    let ended = exit(&mut group).await;
    assert_eq!((ended.exit.to_string(), ended.stopped), ("exit code 3".to_owned(), false));
    wait_for_all(&mut group).await;
    drop(group);
    assert_eq!(shown.rest(), ["saved"], "what a worker has started is killed when it fails, as ever");
}

/// Two of these ignore SIGTERM: a child in the worker's process group, and a daemon.
const FAMILY: &str = "child pause child stubborn daemon stubborn say ready pause";

#[tokio::test]
async fn what_ignores_sigterm_has_the_rest_of_the_grace() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, FAMILY)]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    group.begin_stop(leader(10 * LIMIT));
    let ended = exit(&mut group).await;
    assert_eq!((ended.exit.to_string(), ended.stopped), ("SIGTERM".to_owned(), true));
    traces.wait_until_left(2);
    group.kill();
    assert!(matches!(within(group.next_event()).await, Some(Event::Gone { local_rank: 0 })));
    assert_eq!(traces.alive(), [0_u32; 0]);

    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, FAMILY)]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    within(group.stop(leader(Duration::from_millis(100)))).await;
    assert_eq!(traces.alive(), [0_u32; 0], "it is killed then");
}

#[tokio::test]
async fn an_agent_that_goes_leaves_nothing_of_a_worker_that_has_ended() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, FAMILY)]).await.unwrap();
    assert_eq!(shown.line(), "ready");
    group.begin_stop(leader(10 * LIMIT));
    exit(&mut group).await;
    drop(group);
    traces.wait_until_none_is_left();
}
