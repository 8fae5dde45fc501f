//! The output of workers: files, consoles and filters.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::time::Duration;

use elastic_rs::workers::{Consoles, Copies, Filter, FilterOptions, Group, Output, StopPolicy, WorkerExit, WorkerSpec};

use super::support::{Folder, LIMIT, Traces, exit, grace, shown, wait_for_all, within};

fn tee(folder: &Folder, name: &str, prefix: &str) -> Output {
    Output::Copied(Copies { file: Some(folder.0.join(name)), console: true, prefix: Some(prefix.into()) })
}

/// Run workers to their ends. Returns their exits and the lines on the console.
async fn run(specs: Vec<WorkerSpec>, filters: FilterOptions) -> (Vec<WorkerExit>, Vec<String>) {
    let (exits, _, seen) = run_and_listen(specs, filters).await;
    (exits, seen)
}

/// As [`run`], and with the end of each worker's stderr.
async fn run_and_listen(specs: Vec<WorkerSpec>, filters: FilterOptions) -> (Vec<WorkerExit>, Vec<String>, Vec<String>) {
    let (stdout, seen) = shown();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let reading = tokio::task::spawn_blocking(move || seen.rest());
    let mut group = Group::start(specs, filters, consoles).await.unwrap();
    let ends: Vec<_> = group.pids().keys().map(|rank| group.stderr_end(*rank).unwrap()).collect();
    let exits = wait_for_all(&mut group).await;
    drop(group);
    let output = ends.iter().map(|end| String::from_utf8(end.read()).unwrap()).collect();
    (exits, output, within(reading).await.unwrap())
}

fn stderr_tail(group: &Group, local_rank: u32) -> String {
    String::from_utf8(group.stderr_end(local_rank).unwrap().read()).unwrap()
}

#[tokio::test]
async fn redirected_streams_are_the_workers_own_files() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let mut spec = traces.worker(0, "say out complain error-1 complain error-2 exit 1");
    spec.stdout = Output::File(folder.0.join("0/stdout.log"));
    spec.stderr = Output::File(folder.0.join("0/stderr.log"));
    let (_, output, seen) = run_and_listen(vec![spec], FilterOptions::default()).await;
    assert_eq!((folder.read("0/stdout.log"), seen), ("out\n".into(), vec![]));
    assert_eq!(output, ["error-1\nerror-2\n"]);
}

#[tokio::test]
async fn both_streams_may_share_a_file() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let mut spec = traces.worker(0, "say a complain b say c complain d");
    spec.stdout = Output::File(folder.0.join("log"));
    spec.stderr = Output::File(folder.0.join("log"));
    run(vec![spec], FilterOptions::default()).await;
    assert_eq!(folder.read("log"), "a\nb\nc\nd\n");
}

#[tokio::test]
async fn a_teed_stream_is_in_the_file_as_it_was_and_prefixed_on_the_console() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let mut spec = traces.worker(0, "say one whisper tail-without-end complain oh exit 1");
    spec.stdout = tee(&folder, "stdout.log", "[default0]:");
    spec.stderr = tee(&folder, "stderr.log", "[default0]:");
    let (_, output, mut seen) = run_and_listen(vec![spec], FilterOptions::default()).await;
    seen.sort();
    assert_eq!(seen, ["[default0]:oh", "[default0]:one", "[default0]:tail-without-end"]);
    assert_eq!(folder.read("stdout.log"), "one\ntail-without-end");
    assert_eq!(output, ["oh\n"]);
}

#[tokio::test]
async fn a_stream_without_prefix_is_copied_without_waiting_for_line_ends() {
    let traces = Traces::new();
    let mut spec = traces.worker(0, "");
    spec.args = ["whisper", "?\n>>> ", "pause"].map(Into::into).to_vec();
    spec.stdout = Output::Copied(Copies { console: true, ..Copies::default() });
    let (read, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.unwrap();
    // The worker pauses in the middle of a line.
    let reading = tokio::task::spawn_blocking(move || {
        let mut bytes = [0; 6];
        fs::File::from(read).read_exact(&mut bytes).unwrap();
        bytes
    });
    assert_eq!(&within(reading).await.unwrap(), b"?\n>>> ");
    group.kill();
    wait_for_all(&mut group).await;
}

#[tokio::test]
async fn floods_of_all_workers_arrive_whole_and_in_order() {
    const LINES: usize = 20_000;
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let worker = |rank: u32| {
        let mut spec = traces.worker(rank, &format!("flood {LINES}"));
        spec.stdout = tee(&folder, &format!("{rank}.log"), &format!("[{rank}]:"));
        spec
    };
    let (_, seen) = run((0..4).map(worker).collect(), FilterOptions::default()).await;
    let mut by_rank: BTreeMap<&str, String> = BTreeMap::new();
    for line in &seen {
        let (rank, text) = line.split_once(":").unwrap_or_else(|| panic!("torn: {line}"));
        let all = by_rank.entry(rank).or_default();
        all.push_str(text);
        all.push('\n');
    }
    assert_eq!(by_rank.len(), 4);
    for (rank, (prefix, text)) in by_rank.into_iter().enumerate() {
        assert_eq!(prefix, format!("[{rank}]"));
        assert_eq!(text.lines().count(), LINES);
        assert!(text.lines().enumerate().all(|(number, line)| line.starts_with(&format!("{number:08} the"))));
        assert!(text == folder.read(&format!("{rank}.log")));
    }
}

#[tokio::test]
async fn output_of_a_worker_is_complete_when_its_exit_is_reported() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let mut spec = traces.worker(0, "child pause flood 1000 complain last raise 9");
    spec.stdout = tee(&folder, "stdout.log", "");
    let (console, _seen) = shown();
    let consoles = Consoles { stderr: console.try_clone().unwrap(), stdout: console };
    let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.unwrap();
    exit(&mut group).await;
    assert_eq!(stderr_tail(&group, 0), "last\n");
    assert_eq!(folder.read("stdout.log").lines().count(), 1000);
    wait_for_all(&mut group).await;
}

#[tokio::test]
async fn a_line_without_end_is_bounded_and_complete() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let length = 3 << 20;
    let mut spec = traces.worker(0, &format!("long {length}"));
    spec.stdout = tee(&folder, "log", "P");
    let (_, seen) = run(vec![spec], FilterOptions::default()).await;
    assert_eq!(seen.len(), 3);
    assert!(seen.iter().all(|piece| piece.starts_with("Px")));
    assert_eq!(seen.iter().map(|piece| piece.len() - 1).sum::<usize>(), length);
    assert_eq!(fs::metadata(folder.0.join("log")).unwrap().len(), length as u64);
}

#[tokio::test]
async fn filters_collect_matching_lines_of_all_workers() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let worker = |rank: u32| {
        let mut spec = traces.worker(rank, &format!("say loss=1 say step complain loss=e whisper loss={rank}"));
        spec.stdout = tee(&folder, &format!("{rank}.log"), &format!("[{rank}]:"));
        spec
    };
    let filter = Filter { file: folder.0.join("filtered_stdout.log"), texts: vec!["none".into(), "loss=".into()] };
    let filters = FilterOptions { stdout: Some(filter), ..FilterOptions::default() };
    run(vec![worker(0), worker(1)], filters).await;
    let text = folder.read("filtered_stdout.log");
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0]:loss=0", "[0]:loss=1", "[1]:loss=1", "[1]:loss=1"]);
}

#[tokio::test]
async fn a_full_disk_does_not_block_the_worker() {
    let traces = Traces::new();
    let mut spec = traces.worker(0, "flood 5000 say done exit 0");
    spec.stdout = Output::Copied(Copies { file: Some("/dev/full".into()), console: true, prefix: Some("P".into()) });
    let (exits, seen) = run(vec![spec], FilterOptions::default()).await;
    assert_eq!(seen.last().map(String::as_str), Some("Pdone"));
    assert!(exits[0].exit.is_success());
}

#[tokio::test]
async fn an_unread_console_delays_neither_exits_nor_stops() {
    let traces = Traces::new();
    let (read, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let workers = vec![traces.worker(0, "forever"), traces.worker(1, "complain cause exit 4")];
    let mut group = Group::start(workers, FilterOptions::default(), consoles).await.unwrap();
    let exited = exit(&mut group).await;
    assert_eq!(exited.exit.returncode(), 4);
    assert_eq!(stderr_tail(&group, 1), "cause\n", "even if the console is full");
    let outcome = within(group.stop(grace(LIMIT))).await;
    assert_eq!(outcome.exited[0].exit.to_string(), "SIGTERM");
    assert!(outcome.left.is_empty());
    drop(read);
}

#[tokio::test]
async fn output_that_waits_for_a_full_console_is_not_taken_for_a_descendants() {
    let traces = Traces::new();
    let (read, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let mut spec = traces.worker(0, "flood 100000 exit 4");
    let folder = Folder::new(&traces);
    spec.stdout = tee(&folder, "log", "P");
    let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.unwrap();
    exit(&mut group).await;
    // A shorter time than an exit waits for a full console.
    let policy = StopPolicy { kill_timeout: Duration::from_secs(1), ..grace(Duration::ZERO) };
    let outcome = within(group.stop(policy)).await;
    assert_eq!(outcome.left, []);
    drop(read);
}

#[tokio::test]
async fn a_console_that_is_closed_leaves_the_file_complete() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let (read, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    drop(read);
    let mut spec = traces.worker(0, "flood 5000 say done");
    spec.stdout = tee(&folder, "log", "P");
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.unwrap();
    assert!(wait_for_all(&mut group).await[0].exit.is_success());
    assert!(folder.read("log").ends_with("den in the wood\ndone\n"));
}

#[tokio::test]
async fn an_unread_console_does_not_block_a_worker_that_has_a_file() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let (read, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let consoles = Consoles { stderr: stdout.try_clone().unwrap(), stdout };
    // Far more than the pipes can hold.
    let mut spec = traces.worker(0, "flood 100000 complain cause exit 6");
    spec.stdout = tee(&folder, "stdout.log", "P");
    spec.stderr = tee(&folder, "stderr.log", "P");
    let mut group = Group::start(vec![spec], FilterOptions::default(), consoles).await.unwrap();
    let exited = exit(&mut group).await;
    assert_eq!((exited.exit.returncode(), stderr_tail(&group, 0).as_str()), (6, "cause\n"));
    assert_eq!(folder.read("stdout.log").lines().count(), 100_000);
    wait_for_all(&mut group).await;
    drop(read);
}

#[tokio::test]
async fn teed_streams_may_share_a_file() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let mut spec = traces.worker(0, "say a complain b say c complain d");
    spec.stdout = tee(&folder, "log", "O");
    spec.stderr = tee(&folder, "log", "E");
    let (_, mut seen) = run(vec![spec], FilterOptions::default()).await;
    seen.sort();
    assert_eq!(seen, ["Eb", "Ed", "Oa", "Oc"]);
    let text = folder.read("log");
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["a", "b", "c", "d"]);
}
