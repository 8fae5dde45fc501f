//! A server in a separate process, so that its memory and its descriptors can be measured and limited.

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elastic_rs::net::listen;
use elastic_rs::store::server::{Cause, ServerOptions, StoreServer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::PATIENCE;
use super::client::Client;

/// Variable with the server's options as `name=number` pairs. [`Server::start`] sets it.
const OPTIONS: &str = "ELASTIC_RS_TEST_STORE_OPTIONS";

/// The server's process, not a test by itself. It prints its counters for each line of standard input, and ends with standard input,
/// also when the test is killed.
#[test]
fn the_server_process() {
    let Ok(given) = env::var(OPTIONS) else { return };
    let mut options = ServerOptions::default();
    for (name, number) in given.split_whitespace().filter_map(|pair| pair.split_once('=')) {
        let number: usize = number.parse().unwrap();
        match name {
            "reply_buffer_bytes" => options.reply_buffer_bytes = number,
            "hello_timeout_ms" => options.hello_timeout = Duration::from_millis(number as u64),
            "descriptors" => {
                let maximum = getrlimit(Resource::Nofile).maximum;
                setrlimit(Resource::Nofile, Rlimit { current: Some(number as u64), maximum }).unwrap();
            }
            other => panic!("{other}"),
        }
    }
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let server = StoreServer::start(vec![listener], options).unwrap();
    println!("\nport {}", server.port());
    for _ in std::io::stdin().lines() {
        let stats = server.stats();
        let mut line = format!(
            "stats open={} accepted={} accept_errors={} keys={} waiting={} stored_bytes={}",
            stats.connections_open,
            stats.connections_accepted,
            stats.accept_errors,
            stats.keys,
            stats.waiting,
            stats.stored_bytes,
        );
        for cause in Cause::ALL {
            line += &format!(" {}={}", cause.name(), stats.rejected(cause));
        }
        println!("{line}");
    }
}

pub struct Server {
    child: Child,
    port: u16,
    console: Mutex<(ChildStdin, Lines<BufReader<ChildStdout>>)>,
}

impl Server {
    pub fn start(options: &str) -> Server {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "hostility::process::the_server_process", "--nocapture"])
            .env(OPTIONS, options)
            // Freed large blocks go back to the system. Otherwise the allocator's threshold grows, and it keeps them.
            .env("MALLOC_MMAP_THRESHOLD_", "131072")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stdin = child.stdin.take().unwrap();
        let found = lines.by_ref().map(Result::unwrap).find_map(|line| line.strip_prefix("port ").map(str::to_owned));
        let port = found.expect("a line with the port").parse().unwrap();
        Server { child, port, console: Mutex::new((stdin, lines)) }
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Counters by name. Rejections have the name of their cause.
    pub fn stats(&self) -> HashMap<String, u64> {
        let (stdin, lines) = &mut *self.console.lock().unwrap();
        stdin.write_all(b"\n").unwrap();
        let line = lines.map(Result::unwrap).find(|line| line.starts_with("stats ")).expect("a line of counters");
        let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
        pairs.map(|(name, number)| (name.to_owned(), number.parse().unwrap())).collect()
    }

    pub fn stat(&self, name: &str) -> u64 {
        self.stats()[name]
    }

    /// Wait until a counter has this value.
    pub fn until(&self, name: &str, value: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.stat(name) != value {
            assert!(Instant::now() < deadline, "{name} never became {value}: {:?}", self.stats());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Physical memory of the process, in KiB.
    pub fn resident_kib(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Peak of the physical memory, in KiB.
    pub fn peak_kib(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, what: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(what)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An ordinary client that sends requests throughout an attack, and measures its longest wait for an answer.
pub struct Friend {
    over: Arc<AtomicBool>,
    thread: JoinHandle<(u32, Duration)>,
}

impl Friend {
    pub fn of(server: &Server) -> Friend {
        let over = Arc::new(AtomicBool::new(false));
        let (seen, mut client) = (over.clone(), Client::connect(server.address()));
        let thread = thread::spawn(move || {
            let (mut count, mut longest) = (0, Duration::ZERO);
            while !seen.load(Ordering::Relaxed) {
                let start = Instant::now();
                client.assert_served();
                longest = longest.max(start.elapsed());
                count += 1;
                // The pause leaves the cores to the attack.
                thread::sleep(Duration::from_millis(1));
            }
            (count, longest)
        });
        Friend { over, thread }
    }

    /// The longest wait.
    pub fn finish(self) -> Duration {
        self.over.store(true, Ordering::Relaxed);
        let (count, longest) = self.thread.join().expect("it was served all the time");
        assert!(count > 0);
        longest
    }
}

/// Raise the descriptor limit of this process, and of processes that it starts, to the hard limit. Returns the limit.
pub fn raise_descriptor_limit() -> usize {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    maximum.map_or(usize::MAX, |maximum| maximum as usize)
}
