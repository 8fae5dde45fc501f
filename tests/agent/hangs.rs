//! A console that is not read, and an error file that hangs, do not delay the report of a failure to other nodes. A worker that a device
//! holds is given up.

use std::fs::{self, File, OpenOptions};
use std::time::{Duration, Instant};

use elastic_rs::agent::machine::MESSAGE_LIMIT;
use elastic_rs::agent::runner::Runner;
use elastic_rs::agent::{AgentOptions, Budget};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokio::time::timeout;

use crate::node::{Endless, Node, host, options, settings, two_placed};
use crate::workers::support::{Folder, within};

/// A named pipe in `folder` that is not read.
fn unread_console(folder: &Folder) -> File {
    let path = folder.0.join("console");
    mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Wait until the console is full, so that a write to it blocks.
async fn until_full(console: &File) {
    let takes = || {
        let mut fds = [PollFd::new(console, PollFlags::OUT)];
        poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() > 0
    };
    while takes() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn other_nodes_hear_of_a_failure_while_console_and_error_file_hang() {
    let host = host();
    let [mut one, mut two] = two_placed(&host, &settings(2, 2, 0), 2).await;
    let folder = Folder::new(&one.traces);
    let (console, endless, go) = (unread_console(&folder), Endless::new(&folder), folder.0.join("go"));
    one.error_files.insert(1, endless.0.clone());
    let fails = format!("wait-file {} complain boom exit 3", go.display());
    one.start_on(console.try_clone().unwrap().into(), &["forever", &fails]).await;
    two.start(&["pause", "pause"]).await;
    within(until_full(&console)).await;

    let began = Instant::now();
    fs::write(&go, "").unwrap();
    // The error file hangs, so the failing node cannot have ended yet.
    let reported = tokio::select! {
        biased;
        reported = two.cause() => reported,
        step = one.runner.next() => panic!("{step:?}"),
    };
    assert!(reported.node.contains("node1"), "{reported:?}");
    assert_eq!((reported.global_rank, reported.exit.as_str()), (one.runner.first_rank() + 1, "exit code 3"));
    assert_eq!(reported.message, "boom", "the agent has read it, although the console is full");
    assert!(two.exits().iter().all(|(_, exit)| exit == "SIGTERM"), "{:?}", two.exits());

    // The agent still reads the error file, so the report has not waited for its whole limit. A loaded machine may reach that here.
    let is_early = began.elapsed() < MESSAGE_LIMIT - Duration::from_millis(200);
    fs::write(&endless.0, r#"{"message": "ValueError: late"}"#).unwrap();
    let own = one.cause().await;
    assert_eq!(own.global_rank, reported.global_rank);
    assert!(own.message == "ValueError: late" || !is_early && own.message == "boom", "{own:?}");
}

/// Others ask how far the training is, signals come, and so on: each ends the runner's wait, and it waits again.
#[tokio::test]
async fn a_worker_in_uninterruptible_sleep_is_given_up_whatever_else_happens() {
    let mut node = Node::new(None, Budget::Job, 2);
    let limit = Duration::from_millis(100);
    node.runner = Runner::new(AgentOptions { uninterruptible_sleep: limit, ..options(Budget::Job, 2) }, None);
    node.placed().await;
    node.start(&["pause", "sleep-uninterruptibly"]).await;
    let cause = within(async {
        loop {
            if let Ok(cause) = timeout(EVENTS_EVERY, node.cause()).await {
                return cause;
            }
        }
    });
    let cause = cause.await;
    assert!(cause.exit.starts_with("uninterruptible sleep for"), "{cause:?}");
    assert_eq!(cause.local_rank, 1);
}

/// More often than the agent looks at its workers.
const EVENTS_EVERY: Duration = Duration::from_millis(200);
