//! A node that never reads its messages, over real sockets. It costs its own connection, and bounded memory.

use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::host::Host;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::protocol::codec::{encode_frame, encode_preamble};
use elastic_rs::rendezvous::protocol::message::{Hello, Join, NodeId, NodeMessage, Round};
use elastic_rs::rendezvous::protocol::settings::Settings;
use elastic_rs::store::server::ServerOptions;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::Handle;

/// Time limit for a loaded machine. A test that passes does not wait for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than the coordinator keeps for a node that does not read: 64 messages and the kernel's buffers. Far less than the answers to
/// all of the node's heartbeats.
const GROWTH_LIMIT_BYTES: u64 = 32 << 20;
/// Heartbeats in one write, fewer than the coordinator queues. Each answer has some hundred bytes.
const BEATS: usize = 32;
/// Writes after which the test fails. The session must end earlier, once the kernel's buffers and the queue are full.
const MOST_WRITES: usize = 200_000;

#[test]
fn a_session_that_never_reads_is_ended_with_bounded_memory_while_others_are_served() {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let host = Host::start(vec![listener], ServerOptions::default(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let hello = Hello::new("job", NodeId(1), "node1:1", Settings::new(1, 1));
        let session = Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
        assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().round, Round(1));
        let deaf = deaf_node(host.port()).await;
        let before = resident_bytes();
        let flood = tokio::spawn(flood(deaf));
        // Another session gets round after round meanwhile.
        let mut round = 1;
        while !flood.is_finished() {
            round += 1;
            assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().round, Round(round));
        }
        let written = tokio::time::timeout(PATIENCE, flood).await.unwrap().unwrap();
        assert!(written < MOST_WRITES, "the coordinator never ends the session");
        assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().round, Round(round + 1));
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < GROWTH_LIMIT_BYTES, "{grown} bytes more after {written} times {BEATS} heartbeats");
    });
}

/// A node that waits for a round that never forms. Each answer to a heartbeat carries the round's progress.
async fn deaf_node(port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    let mut greeting = BytesMut::new();
    encode_preamble(&mut greeting);
    let hello = Hello::new("deaf", NodeId(2), "node2:1", Settings::new(2, 2));
    encode_frame(&NodeMessage::Hello(Box::new(hello)), &mut greeting);
    let join = Join { round: Round(0), store_port: 1, node_rank: None, workers: None };
    encode_frame(&NodeMessage::Join(join), &mut greeting);
    stream.write_all(&greeting).await.unwrap();
    stream
}

/// Write heartbeats until the connection ends. Returns the number of writes.
async fn flood(mut stream: TcpStream) -> usize {
    let mut beats = BytesMut::new();
    for _ in 0..BEATS {
        encode_frame(&NodeMessage::Heartbeat, &mut beats);
    }
    for written in 0..MOST_WRITES {
        if stream.write_all(&beats).await.is_err() {
            return written;
        }
    }
    MOST_WRITES
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
