//! Starts of workers, and the environment that they find.

use std::io;
use std::sync::Arc;

use elastic_rs::secure::Protection;
use elastic_rs::secure::acceptor::Acceptor;
use elastic_rs::secure::token::Token;
use elastic_rs::workers::{Input, Output, Stage, StopPolicy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::support::{Folder, Traces, start, wait_for_all, within};

#[tokio::test]
async fn a_worker_leads_its_session_with_default_signals_and_three_descriptors() {
    let traces = Traces::new();
    let (mut group, shown) = start(vec![traces.worker(0, "dispositions")]).await.unwrap();
    wait_for_all(&mut group).await;
    drop(group);
    let expected = ["SigBlk: 0000000000000000", "SigIgn: 0000000000000000", "descriptors 3", "leads true"];
    let mut found = shown.rest();
    // Rust's runtime ignores SIGPIPE in the helper.
    found[1] = found[1].replace("0000001000", "0000000000");
    assert_eq!(found, expected);
}

/// A protected coordinator, or tunnel, raises this process's limit of open files for connections without a proof.
#[tokio::test]
async fn a_worker_has_the_limit_of_open_files_from_before_it_was_raised() {
    let limit = getrlimit(Resource::Nofile);
    let before = limit.maximum.map_or(1024, |hard| hard / 2).min(1024);
    setrlimit(Resource::Nofile, Rlimit { current: Some(before), ..limit }).unwrap();
    let token = Token::parse(&"a".repeat(64)).unwrap();
    let acceptor = Acceptor::new(Arc::new(Protection::by_token(token).unwrap())).unwrap();
    assert!(acceptor.permits() >= 16);
    assert!(getrlimit(Resource::Nofile).current > Some(before));
    let traces = Traces::new();
    let mut worker = traces.worker(0, "");
    (worker.program, worker.args) = ("/bin/sh".into(), vec!["-c".into(), "ulimit -n".into()]);
    let (mut group, shown) = start(vec![worker]).await.unwrap();
    wait_for_all(&mut group).await;
    drop(group);
    assert_eq!(shown.rest(), [before.to_string()]);
    setrlimit(Resource::Nofile, limit).unwrap(); // for the tests beside this one
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_named_and_nothing_runs() {
    let traces = Traces::new();
    let mut wrong = traces.worker(1, "");
    wrong.program = "/no/such/program".into();
    let error = start(vec![traces.worker(0, "pause"), wrong]).await.map(|_| ()).unwrap_err();
    assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
    let expected = "worker of local rank 1 could not be started: cannot execute `/no/such/program`: No such file";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[tokio::test]
async fn a_program_that_may_not_be_executed_says_so() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    std::fs::write(folder.0.join("program"), "").unwrap();
    let mut wrong = traces.worker(0, "");
    wrong.program = "program".into();
    wrong.env.insert("PATH".into(), format!("/no/such/folder:{}:/tmp", folder.0.display()).into());
    let error = start(vec![wrong]).await.map(|_| ()).unwrap_err();
    assert_eq!(error.stage, Stage::Execute("program".into()));
    assert_eq!(error.source.kind(), io::ErrorKind::PermissionDenied);
}

#[tokio::test]
async fn a_folder_that_does_not_exist_is_named() {
    let traces = Traces::new();
    let mut wrong = traces.worker(0, "pause");
    wrong.cwd = Some("/no/such/folder".into());
    let error = start(vec![wrong]).await.map(|_| ()).unwrap_err();
    assert_eq!(error.stage, Stage::Folder("/no/such/folder".into()));
}

#[tokio::test]
async fn a_log_that_cannot_be_opened_is_named() {
    let traces = Traces::new();
    let mut wrong = traces.worker(0, "pause");
    wrong.stdout = Output::File("/dev/null/log".into());
    let error = start(vec![wrong]).await.map(|_| ()).unwrap_err();
    assert_eq!(error.stage, Stage::Stream("/dev/null/log".into()));
}

#[tokio::test]
async fn folder_environment_input_and_cpus_are_those_of_the_spec() {
    let traces = Traces::new();
    let mut spec = traces.worker(0, "");
    spec.program = "sh".into();
    spec.args = vec!["-c".into(), "pwd; echo $GREETING; cat; grep Cpus_allowed_list /proc/self/status".into()];
    let last = *elastic_rs::devices::sysfs::allowed().last().unwrap();
    spec.cpus = vec![last];
    spec.env.insert("GREETING".into(), "hello".into());
    spec.env.insert("PATH".into(), "/usr/bin:/bin".into());
    spec.cwd = Some("/".into());
    spec.stdin = Input::Null;
    let (mut group, shown) = start(vec![spec]).await.unwrap();
    wait_for_all(&mut group).await;
    drop(group);
    assert_eq!(shown.rest(), ["/".to_owned(), "hello".to_owned(), format!("Cpus_allowed_list:\t{last}")]);
}

#[tokio::test]
async fn a_worker_that_cannot_be_bound_names_the_call() {
    let traces = Traces::new();
    let mut spec = traces.worker(0, "pause");
    spec.cpus = vec![1023]; // there is no such CPU here
    let error = start(vec![spec]).await.map(|_| ()).unwrap_err();
    assert_eq!(error.stage, Stage::Call("sched_setaffinity"));
}

#[tokio::test]
async fn the_same_local_rank_twice_is_refused() {
    let traces = Traces::new();
    let error = start(vec![traces.worker(3, "pause"), traces.worker(3, "pause")]).await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("local rank 3") && error.to_string().contains("same local rank"), "{error}");
}

#[tokio::test]
async fn a_start_that_is_cancelled_leaves_nothing() {
    let traces = Traces::new();
    let workers = (0..4).map(|rank| traces.worker(rank, "say ready pause")).collect();
    let (stdout, shown) = super::support::shown();
    let stderr = stdout.try_clone().unwrap();
    let consoles = elastic_rs::workers::Consoles { stdout, stderr };
    let starting = elastic_rs::workers::Group::start(workers, Default::default(), consoles);
    // Poll once: the start is under way.
    tokio::select! {
        biased;
        _ = starting => panic!("a start takes longer than one poll"),
        () = std::future::ready(()) => {}
    }
    // The console closes when the last worker is gone.
    let rest = within(tokio::task::spawn_blocking(move || shown.rest())).await.unwrap();
    assert!(rest.len() <= 4, "{rest:?}");
    traces.wait_until_none_is_left();
}

#[tokio::test]
async fn a_group_without_workers_has_ended() {
    let (mut group, _shown) = start(Vec::new()).await.unwrap();
    assert!(within(group.next_event()).await.is_none());
    assert!(within(group.stop(StopPolicy::default())).await.left.is_empty());
}
