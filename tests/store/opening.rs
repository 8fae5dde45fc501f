//! A server that accepts connections once it has the addresses from which they may come.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use elastic_rs::net::listen;
use elastic_rs::store::server::{Members, ServerOptions, StoreServer};

const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for a server to answer, and too long for a server that turns in circles.
const A_WHILE: Duration = Duration::from_millis(300);
const GREETING: &[u8] = b"\0\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04";

fn start() -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], ServerOptions { opens_on_request: true, ..ServerOptions::default() }).unwrap()
}

/// A client that has greeted the server, and waits for its answer.
fn greet(server: &StoreServer) -> TcpStream {
    let mut client = TcpStream::connect(server.local_addr()).unwrap();
    client.write_all(GREETING).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

fn answer(client: &mut TcpStream) -> [u8; 4] {
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    answer
}

/// Processor time of the thread that serves this port, in clock ticks.
fn ticks(port: u16) -> u64 {
    let name = format!("store-{port}\n");
    let find = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        tasks.into_iter().find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm == name))
    };
    // A thread takes its name when it has begun.
    let deadline = Instant::now() + PATIENCE;
    let task = loop {
        match find() {
            Some(task) => break task,
            None => assert!(Instant::now() < deadline, "no thread is called {name}"),
        }
    };
    let stat = std::fs::read_to_string(task.join("stat")).unwrap();
    stat.rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|ticks| ticks.parse::<u64>().unwrap())
        .sum()
}

#[test]
fn connections_wait_until_the_server_has_the_members_addresses() {
    for members in [None, Some(Members::new(&[], true, "")), Some(Members::new(&[[10, 0, 0, 1].into()], false, ""))] {
        let server = start();
        let mut early = greet(&server);
        early.set_read_timeout(Some(A_WHILE)).unwrap();
        let before = ticks(server.port());
        assert_eq!(early.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "nothing is answered yet");
        assert!(ticks(server.port()) - before < 10, "the server waits without turning");
        assert_eq!(server.stats().connections_accepted, 0);
        server.controller().open_to(members.clone());
        early.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(answer(&mut early), [1, 2, 3, 4], "this machine need not be named: {members:?}");
        assert_eq!(answer(&mut greet(&server)), [1, 2, 3, 4]);
        assert_eq!(server.stats().rejected_total(), 0);
    }
}

#[test]
fn a_server_that_was_never_opened_ends_when_it_is_stopped() {
    let server = start();
    let mut client = greet(&server);
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| server.stop());
        assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "closed");
    });
    assert!(begin.elapsed() < PATIENCE);
    drop(server);
    let server = start();
    server.drain(PATIENCE);
    assert!(begin.elapsed() < PATIENCE, "nobody was connected");
}
