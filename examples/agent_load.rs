//! Measures two agents, and prints one JSON object. `benches/process.py` runs it.
//!
//! `agent_load notify COUNT`: kill a worker, and measure the time until the other node is notified.
//! `agent_load notify-hanging COUNT`: the same while the first node's console is not read and its error file hangs.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, process};

use elastic_rs::agent::environment::Workers;
use elastic_rs::agent::notices;
use elastic_rs::agent::runner::{Runner, Step};
use elastic_rs::agent::{AgentOptions, Budget};
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::hang::judge;
use elastic_rs::rendezvous::conf::InPlace;
use elastic_rs::rendezvous::messages::message::{Hello, JoinWorkers, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::signals::{FirstSignal, Meanings};
use elastic_rs::store::server::ServerOptions;
use elastic_rs::workers::{Consoles, Copies, FilterOptions, Group, Output, WorkerSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokio::runtime::Handle;

const LIMIT: Duration = Duration::from_secs(60);

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let (count, hangs) = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["notify", count] => (count.parse().expect("a count"), false),
        ["notify-hanging", count] => (count.parse().expect("a count"), true),
        _ => {
            eprintln!("see the opening lines of examples/agent_load.rs");
            exit(2);
        }
    };
    let folder = env::temp_dir().join(format!("agent_load-{}", process::id()));
    let mut times: Vec<f64> = (0..count).map(|_| runtime.block_on(notify(&folder, hangs)).as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{{\"p50_s\": {:.6}, \"p99_s\": {:.6}, \"max_s\": {:.6}}}", at(0.5), at(0.99), at(1.0));
}

/// From the kill of a worker until the other node is notified that its world must end.
async fn notify(folder: &Path, hangs: bool) -> Duration {
    fs::create_dir_all(folder).expect("a folder");
    let host = EndpointServer::listen(Some("127.0.0.1"), 0, ServerOptions::default(), None).expect("a port");
    let (mut one, mut two) = (Node::new(&host, 1), Node::new(&host, 2));
    tokio::join!(one.place(), two.place());
    let files = Files::new(folder, hangs);
    let pid = one.start(&files).await;
    files.until_full().await;
    let other = tokio::spawn(async move {
        two.session.view_when(|view| view.closed.is_some()).await;
        Instant::now()
    });
    let agent = tokio::spawn(async move {
        let step = one.runner.next().await;
        assert!(matches!(step, Step::End(_)), "{step:?}");
    });
    let began = Instant::now();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    let notified = other.await.expect("it is notified") - began;
    files.release();
    agent.await.expect("it ends");
    fs::remove_dir_all(folder).expect("a folder");
    notified
}

struct Node {
    runner: Runner,
    session: Arc<Session>,
}

impl Node {
    fn new(host: &EndpointServer, number: u128) -> Self {
        let mut settings = Settings::new(2, 2);
        settings.max_restarts = Some(0);
        let hello = Hello {
            local_addr: Some(format!("node{number}")),
            ..Hello::new("job", NodeId(number), format!("node{number}"), settings)
        };
        let session = Arc::new(Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), LIMIT, None));
        let workers = Workers {
            run_id: "job".into(),
            role: "role".into(),
            local_world_size: 2,
            max_restarts: 0,
            use_agent_store: true,
            virtual_local_rank: false,
            resizes_nccl: false,
        };
        let options = AgentOptions {
            name: "agent".into(),
            entrypoint: "sleep".into(),
            workers,
            budget: Budget::Job,
            grace: LIMIT,
            first_signal: FirstSignal::default(),
            signals: Meanings::default(),
            notices: notices::Options::default(),
            health: None,
            exit_barrier_timeout: None,
            uninterruptible_sleep: Duration::ZERO,
            in_place: InPlace::Gloo,
            standbys: 0,
            hang: judge::Options::default(),
            on_hang: None,
            progress_log: None,
        };
        let runner = Runner::new(options, Some(session.clone()));
        Self { runner, session }
    }

    async fn place(&mut self) {
        assert!(matches!(self.runner.next().await, Step::Join));
        let workers = JoinWorkers::new("role", 2);
        let place = self.session.join(1000, None, Some(workers), LIMIT).await.expect("a place");
        self.runner.placed(place);
        assert!(matches!(self.runner.next().await, Step::Start(_)));
    }

    /// Start two workers: one prints without end if the files hang, the other sleeps. Returns the process id of the latter.
    async fn start(&mut self, files: &Files) -> rustix::process::Pid {
        let printing: &[&str] = if files.hang { &["yes"] } else { &["sleep", "1000"] };
        let specs = [printing, &["sleep", "1000"]].into_iter().zip(0..).map(|(command, rank)| {
            let mut spec = WorkerSpec::new(rank, command[0]);
            spec.args = command[1..].iter().map(Into::into).collect();
            spec.env = env::vars_os().collect();
            let to_console = Output::Copied(Copies { console: true, prefix: Some("[default0]:".into()), file: None });
            (spec.stdout, spec.stderr) = (to_console.clone(), to_console);
            spec
        });
        let console = files.console.try_clone().expect("a descriptor");
        let consoles = Consoles { stdout: console.try_clone().expect("a descriptor").into(), stderr: console.into() };
        let group = Group::start(specs.collect(), FilterOptions::default(), consoles).await.expect("workers");
        let pid = i32::try_from(group.pids()[&1]).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
        let error_files = BTreeMap::from([(1, files.error_file.clone())]);
        self.runner.started(group.into(), error_files);
        pid
    }
}

/// A console and an error file. If they are to hang, they are named pipes that are neither read nor written.
struct Files {
    hang: bool,
    console: File,
    error_file: PathBuf,
}

impl Files {
    fn new(folder: &Path, hang: bool) -> Self {
        let (console, error_file) = (folder.join("console"), folder.join("error.json"));
        let pipe = |path: &Path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if hang {
            pipe(&console);
            pipe(&error_file);
        } else {
            options.create(true).truncate(true);
        }
        Self { hang, console: options.open(console).expect("a console"), error_file }
    }

    async fn until_full(&self) {
        let takes = || poll(&mut [PollFd::new(&self.console, PollFlags::OUT)], Some(&Timespec::default()));
        while self.hang && takes().expect("a poll") > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Release the threads that wait for these files.
    fn release(&self) {
        if self.hang {
            drop(OpenOptions::new().read(true).write(true).open(&self.error_file));
            let mut console = self.console.try_clone().expect("a descriptor");
            // This thread ends with the process, because the pipe has a writer until then.
            std::thread::spawn(move || std::io::copy(&mut console, &mut std::io::sink()));
        }
    }
}
