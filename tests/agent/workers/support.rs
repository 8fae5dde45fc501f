//! Start helpers as workers, and find processes that they left behind.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use elastic_rs::workers::{
    Consoles, Copies, Event, ExitStatus, FilterOptions, Group, Output, StartError, StopPolicy, WorkerExit, WorkerSpec,
};

/// Time limit for a step that takes milliseconds on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn helper() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_process_helper"))
}

/// Finds a test's processes by a variable in their environment, which daemons keep too. Dropping it panics if a process is left.
pub struct Traces {
    token: String,
}

impl Traces {
    pub fn new() -> Traces {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Traces { token: format!("ELASTIC_RS_TEST_PROCESS={}-{number}-", std::process::id()) }
    }

    pub fn variable(&self) -> (OsString, OsString) {
        let (name, value) = self.token.split_once('=').unwrap();
        (name.into(), value.into())
    }

    /// A worker that performs `script`, with its output on the console.
    pub fn worker(&self, local_rank: u32, script: &str) -> WorkerSpec {
        let mut spec = WorkerSpec::new(local_rank, helper());
        spec.args = script.split(' ').filter(|word| !word.is_empty()).map(Into::into).collect();
        spec.env.extend([self.variable()]);
        spec.stdout = to_console();
        spec.stderr = to_console();
        spec
    }

    /// Processes that have not ended.
    pub fn alive(&self) -> Vec<u32> {
        let folders = fs::read_dir("/proc").unwrap().flatten();
        let pids = folders.filter_map(|folder| folder.file_name().to_str()?.parse().ok());
        pids.filter(|pid| self.is_alive(*pid)).collect()
    }

    fn is_alive(&self, pid: u32) -> bool {
        // A zombie has no environment.
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == self.token.as_bytes())
    }

    /// Wait for ends that are not reported, because the process that would report them is gone too.
    pub fn wait_until_none_is_left(&self) {
        self.wait_until_left(0);
    }

    pub fn wait_until_left(&self, count: usize) {
        let began = std::time::Instant::now();
        while self.alive().len() != count {
            assert!(began.elapsed() < LIMIT, "left: {:?}", self.alive());
            thread::yield_now();
        }
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        let left = self.alive();
        for pid in &left {
            if let Some(pid) = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw) {
                // The process may have ended meanwhile.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if !thread::panicking() {
            assert!(left.is_empty(), "processes left: {left:?}");
        }
    }
}

pub fn to_console() -> Output {
    Output::Copied(Copies { console: true, prefix: Some(String::new()), ..Copies::default() })
}

/// The lines on a console.
pub struct Shown {
    lines: Receiver<String>,
}

impl Shown {
    pub fn line(&self) -> String {
        self.lines.recv_timeout(LIMIT).expect("a line is shown")
    }

    /// All remaining lines, until the console is closed.
    pub fn rest(&self) -> Vec<String> {
        std::iter::from_fn(|| self.lines.recv_timeout(LIMIT).ok()).collect()
    }
}

pub fn shown() -> (OwnedFd, Shown) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (sender, lines) = channel();
    thread::spawn(move || {
        let mut read = BufReader::new(fs::File::from(read));
        let mut line = Vec::new();
        while read.read_until(b'\n', &mut line).unwrap() > 0 {
            let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line)).into_owned();
            if sender.send(text).is_err() {
                return;
            }
            line.clear();
        }
    });
    (write, Shown { lines })
}

/// Start workers, with stdout and stderr on one console.
pub async fn start(specs: Vec<WorkerSpec>) -> Result<(Group, Shown), StartError> {
    let (stdout, shown) = shown();
    let stderr = stdout.try_clone().unwrap();
    let group = Group::start(specs, FilterOptions::default(), Consoles { stdout, stderr }).await?;
    Ok((group, shown))
}

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.expect("it ends within the limit")
}

/// The next event, which must be an exit.
pub async fn exit(group: &mut Group) -> WorkerExit {
    match within(group.next_event()).await {
        Some(Event::Exited(exited)) => exited,
        other => panic!("{other:?}"),
    }
}

/// Wait until all workers have ended.
pub async fn wait_for_all(group: &mut Group) -> Vec<WorkerExit> {
    let mut exits = Vec::new();
    while let Some(event) = within(group.next_event()).await {
        match event {
            Event::Exited(exited) => exits.push(exited),
            Event::Gone { .. } | Event::Overdue { .. } => {}
            Event::Stuck(left) => panic!("{left:?}"),
        }
    }
    exits
}

pub fn signalled(exit: ExitStatus) -> String {
    exit.to_string().replace(" (core dumped)", "")
}

pub fn grace(grace: Duration) -> StopPolicy {
    StopPolicy { grace, ..StopPolicy::default() }
}

/// A temporary folder of one test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(traces: &Traces) -> Folder {
        let name = format!("elastic_rs-{}", traces.variable().1.display());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    pub fn read(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.0.join(name)).unwrap()).into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, only a folder is left.
        let _ = fs::remove_dir_all(&self.0);
    }
}
