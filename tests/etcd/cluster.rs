//! A cluster of etcd on this machine, for one test. Its processes end with it, or with the thread that started them.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, ClientOptions, Endpoints, TlsFiles};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Time limit for a loaded machine. A test that passes does not wait for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How members speak with clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    Off,
    /// The server has a certificate.
    Server,
    /// Clients too must have one, and it names the user.
    Mutual,
}

pub struct Cluster {
    pub members: Vec<Member>,
    pub tls: Tls,
    program: PathBuf,
    folder: PathBuf,
    arguments: Vec<String>,
}

pub struct Member {
    pub port: u16,
    name: String,
    peer_port: u16,
    child: Option<Child>,
    /// Sockets that are bound and do not listen: nobody else gets the ports, also while etcd is down.
    _held: [TcpSocket; 2],
}

/// The folder with certificates for tests.
pub fn certificate(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/etcd").join(name)
}

fn program() -> Option<PathBuf> {
    static REPORTED: Once = Once::new();
    let program = std::env::var_os("ETCD").filter(|program| !program.is_empty()).map(PathBuf::from);
    if program.is_none() {
        REPORTED.call_once(|| {
            // Not by `eprintln`, which the harness hides.
            let _ = writeln!(
                std::io::stderr(),
                "tests with etcd are skipped: `ETCD` names no etcd (`python tools/find_tool.py etcd` gets one)"
            );
        });
    }
    program
}

impl Cluster {
    /// Start a cluster with more arguments for each member, and wait until it serves. `None` without an etcd.
    pub async fn start(size: usize, arguments: &[&str]) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let program = program()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let base =
            Some(Path::new("/dev/shm")).filter(|path| path.is_dir()).map_or_else(std::env::temp_dir, PathBuf::from);
        let folder = base.join(format!("elastic_rs-etcd-{}-{number}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let members = (0..size).map(|number| {
            let (port, held) = hold_port();
            let (peer_port, held_peer) = hold_port();
            Member { port, peer_port, name: format!("m{number}"), child: None, _held: [held, held_peer] }
        });
        let members = members.collect();
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let mut cluster = Self { members, tls: Tls::Off, program, folder, arguments };
        (0..size).for_each(|member| cluster.launch(member));
        cluster.until_served().await;
        Some(cluster)
    }

    /// Restart all members, with another way to speak with clients.
    pub async fn restart(&mut self, tls: Tls) {
        (0..self.members.len()).for_each(|member| self.kill(member));
        self.tls = tls;
        (0..self.members.len()).for_each(|member| self.launch(member));
    }

    /// Start a member that is not running.
    pub fn launch(&mut self, index: usize) {
        let scheme = if self.tls == Tls::Off { "http" } else { "https" };
        let peers: Vec<_> = self
            .members
            .iter()
            .map(|member| format!("{}=http://127.0.0.1:{}", member.name, member.peer_port))
            .collect();
        let member = &mut self.members[index];
        let client = format!("{scheme}://127.0.0.1:{}", member.port);
        let peer = format!("http://127.0.0.1:{}", member.peer_port);
        let log =
            File::options().create(true).append(true).open(self.folder.join(format!("{}.log", member.name))).unwrap();
        let mut command = Command::new(&self.program);
        command
            .arg(format!("--name={}", member.name))
            .arg(format!("--data-dir={}", self.folder.join(&member.name).display()))
            .args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")])
            .args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")])
            .arg(format!("--initial-cluster={}", peers.join(",")))
            .arg(format!("--initial-cluster-token={}", self.folder.display()))
            .args(["--logger=zap", "--log-level=error"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        if self.tls != Tls::Off {
            command.arg(format!("--cert-file={}", certificate("server.pem").display()));
            command.arg(format!("--key-file={}", certificate("server.key").display()));
        }
        if self.tls == Tls::Mutual {
            command.arg("--client-cert-auth").arg(format!("--trusted-ca-file={}", certificate("ca.pem").display()));
        }
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        member.child = Some(command.spawn().unwrap());
    }

    pub fn endpoints(&self) -> Endpoints {
        let members = self.members.iter().map(|member| ("127.0.0.1".to_owned(), member.port)).collect();
        Endpoints { tls: self.tls != Tls::Off, members }
    }

    /// Options of a client that the members trust.
    pub fn options(&self) -> ClientOptions {
        let mut options = ClientOptions::new(self.endpoints());
        if self.tls != Tls::Off {
            options.tls.ca = Some(certificate("ca.pem"));
        }
        if self.tls == Tls::Mutual {
            options.tls = TlsFiles {
                cert: Some(certificate("trainer.pem")),
                key: Some(certificate("trainer.key")),
                ..options.tls
            };
        }
        options
    }

    pub fn client(&self) -> Client {
        Client::new(self.options()).unwrap()
    }

    pub fn kill(&mut self, index: usize) {
        if let Some(mut child) = self.members[index].child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Stop a member, and wait until all its threads stand still: one of them may answer a request before that.
    pub fn pause(&self, index: usize) {
        self.signal(index, Signal::STOP);
        let child = self.members[index].child.as_ref().unwrap();
        waitpid(Some(Pid::from_child(child)), WaitOptions::UNTRACED).unwrap();
    }

    pub fn resume(&self, index: usize) {
        self.signal(index, Signal::CONT);
    }

    fn signal(&self, index: usize, signal: Signal) {
        let child = self.members[index].child.as_ref().unwrap();
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    /// Wait until all members serve and know a leader. Returns the leader's place.
    pub async fn until_served(&self) -> usize {
        let mut options = self.options();
        options.patience = Duration::from_secs(1);
        let client = Client::new(options).unwrap();
        let started = Instant::now();
        loop {
            let look = client.look().await;
            let leads: Vec<_> = look
                .endpoints
                .iter()
                .map(|(_, member)| member.as_ref().is_ok_and(|member| member.is_leader()))
                .collect();
            let serve = look.endpoints.iter().all(|(_, member)| member.as_ref().is_ok_and(|member| member.leader != 0));
            if let Some(leader) = leads.iter().position(|leads| *leads).filter(|_| serve) {
                return leader;
            }
            assert!(started.elapsed() < PATIENCE, "etcd does not serve: {look:?}\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What members have logged.
    fn logs(&self) -> String {
        let read =
            |member: &Member| fs::read_to_string(self.folder.join(format!("{}.log", member.name))).unwrap_or_default();
        self.members.iter().map(read).collect()
    }

    /// How often clients have called this method, at all members that run.
    pub async fn calls(&self, method: &str) -> u64 {
        let mut calls = 0;
        // HTTP/1.0, whose answers are not cut into chunks.
        for member in &self.members {
            let metrics = exchange(member.port, "GET /metrics HTTP/1.0\r\nHost: etcd\r\n\r\n").await;
            let counts = |line: &&str| {
                line.starts_with("grpc_server_handled_total{") && line.contains(&format!("grpc_method=\"{method}\""))
            };
            let counted = metrics.lines().filter(counts).filter_map(|line| line.rsplit(' ').next());
            calls += counted.map(|count| count.parse::<f64>().unwrap() as u64).sum::<u64>();
        }
        calls
    }

    /// Call etcd's JSON gateway at the first member, for what the client cannot do. Returns the answer's body.
    pub async fn gateway(&self, path: &str, body: &str, token: Option<&str>) -> String {
        let token = token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n{token}Content-Length: {length}\r\n\r\n{body}"
        );
        let answer = exchange(self.members[0].port, &request).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        body.to_owned()
    }
}

/// One request of HTTP/1.1, and its answer.
async fn exchange(port: u16, request: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A port of loopback that nobody else gets while the socket lives. A process that sets `SO_REUSEADDR`, as etcd does, can listen there.
fn hold_port() -> (u16, TcpSocket) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    (socket.local_addr().unwrap().port(), socket)
}
