//! A node that never reads its messages, over real sockets. It costs its own connection, and bounded memory.

use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::rendezvous::coordinator::driver::{self, DriversHosts, Incoming, Shown};
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::coordinator::readers::Readers;
use elastic_rs::rendezvous::messages::codec::{decode_frame, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, Join, NodeId, NodeMessage, Placement, Round,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::secure::Halves;
use elastic_rs::store::server::ServerOptions;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

/// Time limit for a loaded machine. A test that passes does not wait for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than the coordinator keeps for a node that does not read: 64 messages and the kernel's buffers. Far less than the answers to
/// all of the node's heartbeats.
const GROWTH_LIMIT_BYTES: u64 = 32 << 20;
/// Heartbeats in one write, fewer than the coordinator queues. Each answer has some hundred bytes.
const BEATS: usize = 32;
/// Writes after which the test fails. The session must end earlier, once the kernel's buffers and the queue are full.
const MOST_WRITES: usize = 200_000;

/// Writes within which a session must have ended that is stuck. What the coordinator keeps for it, and the heartbeats that are on their
/// way, are far fewer.
const WRITES_UNTIL_NOTICED: usize = 4096;

#[test]
fn a_session_that_never_reads_is_ended_with_bounded_memory_while_others_are_served() {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap();
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

/// It goes on sending heartbeats, which renew its lease. Its connections are pipes, so no kernel's buffer and no clock decides when
/// the coordinator notices.
#[tokio::test]
async fn a_node_that_does_not_read_is_placed_in_no_round() {
    let (to_coordinator, incoming) = mpsc::unbounded_channel();
    let (_questions, questions) = mpsc::channel(1);
    let (sessions, exclusions) = (watch::Sender::new(0), watch::Sender::default());
    let (_drivers, drivers) = watch::channel(DriversHosts::new());
    let (protection, readers, same_user) = (None, Readers::Members, None);
    let shown = Shown { sessions, exclusions, drivers, questions, protection, readers, same_user, list: None };
    tokio::spawn(driver::run(Machine::new(), incoming, shown, || (), PATIENCE, PATIENCE));
    let connect = || {
        let (ours, theirs) = duplex(4096);
        let (reader, writer) = split(theirs);
        let halves = Halves { reader: Box::new(reader), writer: Box::new(writer) };
        let (peer, local) = (([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into());
        let first_bytes = BytesMut::new();
        to_coordinator.send(Incoming { halves, first_bytes, identity: None, peer, local, kept: Box::new(()) }).unwrap();
        ours
    };
    let mut deaf = connect();
    deaf.write_all(&greeting("job", 1)).await.unwrap();
    let written = flood(deaf).await;
    assert!(written < WRITES_UNTIL_NOTICED, "the coordinator reads on from a node whose session has ended");
    let (mut one, mut other) = (connect(), connect());
    one.write_all(&greeting("job", 2)).await.unwrap();
    other.write_all(&greeting("job", 3)).await.unwrap();
    let placements =
        tokio::time::timeout(PATIENCE, async { tokio::join!(placement_of(one), placement_of(other)) }).await.unwrap();
    let mut ranks =
        [&placements.0, &placements.1].map(|placement| (placement.round, placement.world_size, placement.rank));
    ranks.sort_unstable();
    assert_eq!(ranks, [(Round(1), 2, 0), (Round(1), 2, 1)], "the two that read form the world");
}

async fn placement_of(mut node: DuplexStream) -> Placement {
    let mut received = BytesMut::new();
    loop {
        match decode_frame::<CoordinatorMessage>(&mut received).unwrap() {
            Some(message) => {
                if let Some(placement) = message.placement() {
                    return placement.clone();
                }
            }
            None => assert!(node.read_buf(&mut received).await.unwrap() > 0, "no place"),
        }
    }
}

/// A node that waits for a round that never forms. Each answer to a heartbeat carries the round's progress.
async fn deaf_node(port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    stream.write_all(&greeting("deaf", 2)).await.unwrap();
    stream
}

/// What a node sends that joins the first round, which needs two nodes.
fn greeting(run_id: &str, number: u128) -> BytesMut {
    let mut greeting = BytesMut::new();
    encode_preamble(&mut greeting);
    let hello = Hello::new(run_id, NodeId(number), format!("node{number}:1"), Settings::new(2, 2));
    encode_frame(&NodeMessage::Hello(Box::new(hello)), &mut greeting);
    let join = Join { round: Round(0), store_port: 1, node_rank: None, workers: None, health: Default::default() };
    encode_frame(&NodeMessage::Join(join), &mut greeting);
    greeting
}

/// Write heartbeats until the connection ends. Returns the number of writes.
async fn flood(mut stream: impl AsyncWrite + Unpin) -> usize {
    let mut beats = BytesMut::new();
    for _ in 0..BEATS {
        encode_frame(&NodeMessage::Heartbeat { rtt_us: None }, &mut beats);
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
