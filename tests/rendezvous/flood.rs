//! An address that never proves anything, at a protected coordinator: what it costs the others, and the coordinator's thread.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use elastic_rs::secure::{Halves, Protection};
use rustix::process::setpriority_process;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::protected::{PATIENCE, host, token};

/// Connections that an unauthenticated peer holds.
const HELD: usize = 3000;

fn protection() -> Arc<Protection> {
    Arc::new(Protection::by_token(token('a')).unwrap())
}

/// What somebody says who connects, and then keeps the connection or closes it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Nothing,
    Hello,
    HelloAndClose,
}

/// A thread that opens connections from one address as fast as it can, until this is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Flood {
    fn start(port: u16, kind: Kind, hello: Vec<u8>) -> Self {
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&opened));
        let thread = thread::spawn(move || {
            // Of this thread alone.
            setpriority_process(None, 10).unwrap();
            let mut held: Vec<Option<socket2::Socket>> = (0..HELD).map(|_| None).collect();
            while !stopped.load(Relaxed) {
                let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
                // So that it never runs out of ports.
                socket.set_linger(Some(Duration::ZERO)).unwrap();
                let from = SocketAddr::from(([127, 6, 6, 6], 0));
                let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
                if socket.bind(&from.into()).is_err() || socket.connect(&to.into()).is_err() {
                    continue;
                }
                if !matches!(kind, Kind::Nothing) {
                    let _ = (&socket).write(&hello); // it may be closed already
                }
                let number = count.fetch_add(1, Relaxed);
                held[number % HELD] = Some(socket).filter(|_| !matches!(kind, Kind::HelloAndClose));
            }
        });
        let flood = Self { stop, opened, thread: Some(thread) };
        let until = Instant::now() + PATIENCE;
        while flood.opened.load(Relaxed) < HELD {
            assert!(Instant::now() < until, "{kind:?}");
            thread::sleep(Duration::from_millis(1));
        }
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// The first bytes of a node that begins a handshake.
async fn client_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut accepted, _) = listener.accept().await.unwrap();
    let mut hello = vec![0; 4096];
    tokio::select! {
        _ = async { Halves::begin(stream, "127.0.0.1", Some((&protection(), "job"))).await } => panic!("nobody answers"),
        count = tokio::io::AsyncReadExt::read(&mut accepted, &mut hello) => hello.truncate(count.unwrap()),
    }
    hello
}

/// `examples/door_load.rs` has 1,000 nodes, and figures.
#[test]
fn an_address_that_never_proves_anything_keeps_nobody_out() {
    const NODES: u32 = 200;
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let hello = runtime.block_on(client_hello());
    for kind in [Kind::Nothing, Kind::Hello, Kind::HelloAndClose] {
        let (host, _runtime) = host(Some(protection()));
        let port = host.port();
        let flood = Flood::start(port, kind, hello.clone());
        let failed: Vec<String> = runtime.block_on(async {
            let mut nodes = JoinSet::new();
            for number in 0..NODES {
                nodes.spawn(async move {
                    sleep(Duration::from_millis(5) * number).await;
                    let socket = TcpSocket::new_v4().unwrap();
                    let own = Ipv4Addr::from_bits(0x7f01_0000 + number);
                    socket.bind(SocketAddrV4::new(own, 0).into()).unwrap();
                    let stream =
                        socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.map_err(|why| why.to_string())?;
                    Halves::begin(stream, "127.0.0.1", Some((&protection(), "job"))).await.map(drop)
                });
            }
            nodes.join_all().await.into_iter().filter_map(Result::err).collect()
        });
        assert!(failed.len() <= 2, "{kind:?}: {} of {NODES} did not get in: {:?}", failed.len(), failed.first());
        let refused = host.refusals().unwrap().total();
        assert!(matches!(kind, Kind::Nothing) || refused > 0, "{kind:?}: nobody was refused");
        drop(flood);
    }
}

/// CPU time of this process's threads with this name, in nanoseconds.
fn cpu_of(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let of = |task: std::path::PathBuf| {
        let comm = std::fs::read_to_string(task.join("comm")).ok()?;
        let used = std::fs::read_to_string(task.join("schedstat")).ok()?;
        comm.trim().starts_with(name).then(|| used.split(' ').next()?.parse::<u64>().ok())?
    };
    tasks.filter_map(of).sum()
}

#[test]
fn whoever_asks_a_protected_coordinator_for_its_health_does_not_take_its_thread() {
    let (host, _runtime) = host(Some(protection()));
    let thread = format!("host-{}", host.port());
    let before = (cpu_of(&thread), cpu_of("handshake-"));
    for number in 0..3000 {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", host.port())).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{number}: {answer}");
    }
    let (coordinators, handshakes) = (cpu_of(&thread) - before.0, cpu_of("handshake-") - before.1);
    assert!(
        coordinators * 5 < handshakes,
        "{coordinators} ns of the coordinator's thread, and {handshakes} of the others"
    );
}

/// What a flood has taken is given back, and the address is named once.
#[test]
fn nothing_is_left_of_a_flood() {
    let (host, runtime) = host(Some(protection()));
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let hello = runtime.block_on(client_hello());
    // So that all that is begun once has begun.
    let stream = runtime.block_on(TcpStream::connect(("127.0.0.1", host.port()))).unwrap();
    drop(runtime.block_on(async { Halves::begin(stream, "127.0.0.1", Some((&protection(), "job"))).await }).unwrap());
    let before = (open(), threads());
    drop(Flood::start(host.port(), Kind::Hello, hello));
    let until = Instant::now() + PATIENCE;
    while open() > before.0 || threads() > before.1 {
        assert!(Instant::now() < until, "{before:?}: {} descriptors, {} threads", open(), threads());
        thread::sleep(Duration::from_millis(5));
    }
}
