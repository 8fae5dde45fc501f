//! Hostile connections over real sockets, beside a job of two honest nodes. The decisions about each claim are tested in `claims`.

use std::net::IpAddr;
use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::rendezvous::messages::codec::{decode_frame, decode_preamble, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, Join, JoinWorkers, NodeId, NodeMessage, Placed, Placement, Round,
    WorkerRanks,
};
use elastic_rs::rendezvous::messages::settings::{LONGEST_GRACE, LONGEST_LEASE, Settings};
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::store::server::ServerOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};

/// Time limit for a loaded machine, shorter than the times that unauthenticated peers ask for.
const PATIENCE: Duration = Duration::from_secs(45);

fn host() -> (EndpointServer, Runtime) {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap();
    (host, Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap())
}

fn honest(port: u16, number: u128) -> Session {
    let hello = Hello { process: number as u64, ..Hello::new("job", NodeId(number), "node:1", Settings::new(2, 2)) };
    Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, None)
}

async fn join_both(one: &Session, other: &Session) -> [Placement; 2] {
    let (one, other) = tokio::join!(one.join(1, None, None, PATIENCE), other.join(2, None, None, PATIENCE));
    [one.unwrap(), other.unwrap()]
}

/// Send these messages, wait for the first answer, and close the connection.
async fn attack(port: u16, hello: Hello, sent: &[NodeMessage]) -> CoordinatorMessage {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut bytes = BytesMut::new();
    encode_preamble(&mut bytes);
    encode_frame(&NodeMessage::Hello(Box::new(hello)), &mut bytes);
    sent.iter().for_each(|message| encode_frame(message, &mut bytes));
    stream.write_all(&bytes).await.unwrap();
    let mut answer = BytesMut::new();
    loop {
        if let Some(message) = decode_frame(&mut answer).unwrap() {
            return message;
        }
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "no answer");
    }
}

fn unknown_node(number: u128, settings: Settings) -> Hello {
    Hello { process: number as u64, ..Hello::new("job", NodeId(number), "stranger:1", settings) }
}

fn join() -> NodeMessage {
    NodeMessage::Join(Join {
        round: Round(0),
        store_port: 1,
        node_rank: None,
        workers: None,
        health: Default::default(),
    })
}

#[test]
fn unknown_nodes_before_a_job_do_not_hang_it() {
    let (host, runtime) = host();
    let longest = Settings {
        keep_alive_interval: LONGEST_LEASE,
        keep_alive_max_attempt: 1,
        reconnect_grace: LONGEST_GRACE,
        ..Settings::new(2, 2)
    };
    let years = Settings { reconnect_grace: Duration::from_secs(300_000_000), ..Settings::new(2, 2) };
    runtime.block_on(async {
        let answer = attack(host.port(), unknown_node(66, years), &[join()]).await;
        assert!(matches!(answer, CoordinatorMessage::Rejected { .. }), "{answer:?}");
        for (number, settings) in [(67, longest.clone()), (68, Settings { max_nodes: 9, ..longest.clone() })] {
            let answer = attack(host.port(), unknown_node(number, settings), &[join()]).await;
            assert!(matches!(answer, CoordinatorMessage::Welcome { .. }), "{answer:?}");
        }
        let placements = join_both(&honest(host.port(), 1), &honest(host.port(), 2)).await;
        assert!(placements.iter().all(|placement| (placement.world_size, placement.round) == (2, Round(1))));
    });
}

#[test]
fn unknown_nodes_beside_a_running_job_change_nothing_but_the_next_rounds_number() {
    let (host, runtime) = host();
    runtime.block_on(async {
        let sessions = [honest(host.port(), 1), honest(host.port(), 2)];
        join_both(&sessions[0], &sessions[1]).await;
        let mut next = 2;
        for number in 0..50 {
            // The largest number that is believed, and larger ones.
            let most = next + (1 << 20);
            let round = [most, u64::MAX, most + 1, 1 << 48][number as usize % 4];
            let placed = Placed {
                round: Round(round),
                rank: 0,
                world_size: 2,
                world: number,
                active: true,
                restart: u32::MAX,
                host: None,
                began_with: Generation::default(),
            };
            let hello = Hello { placed: Some(placed), ..unknown_node(66 + u128::from(number), Settings::new(2, 2)) };
            let answer = attack(host.port(), hello, &[]).await;
            assert_eq!(matches!(answer, CoordinatorMessage::Rejected { .. }), round > most, "{answer:?}");
            next = if round == most { most + 1 } else { next };
        }
        for session in &sessions {
            let view = session.view();
            assert_eq!((view.waiting, view.restart, view.failed), (0, 0, None));
        }
        let placements = join_both(&sessions[0], &sessions[1]).await;
        assert!(
            placements.iter().all(|placement| (placement.round, placement.restart) == (Round(next), 0)),
            "{placements:?}"
        );
    });
}

/// Whatever listens at the endpoint may send numbers with which a node and its workers would compute.
#[test]
fn a_node_believes_no_placement_with_impossible_numbers() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ranks = |first_rank, world_size, first_role_rank, role_world_size| WorkerRanks {
            first_rank,
            world_size,
            first_role_rank,
            role_world_size,
        };
        for (rank, world_size, workers, why) in [
            (2, 2, None, "the node's rank is `2`, must be below its size (`2`)"),
            (0, 0, None, "the size for the node's rank is `0`"),
            (0, u32::MAX, None, "the size for the node's rank is `4294967295`, must be from 1 to 2147483647"),
            (1, 2, Some(ranks(u32::MAX, 8, 0, 8)), "the rank of the node's last worker is `4294967295`"),
            (1, 2, Some(ranks(4, 8, 8, 8)), "the role rank of the node's last worker is `8`"),
            (1, 2, Some(ranks(4, 8, 4, 9)), "the number of workers of the role is `8`, must be below its size (`8`)"),
            (1, 9, Some(ranks(4, 8, 4, 8)), "the world has `9` nodes and `8` workers"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let session = {
                let port = listener.local_addr().unwrap().port();
                let hello = Hello::new("job", NodeId(1), "node:1", Settings::new(1, 2));
                Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, None)
            };
            let listening = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = BytesMut::new();
                let placement = placement(rank, world_size, workers);
                let addr = "127.0.0.1".to_owned();
                encode_frame(
                    &CoordinatorMessage::Welcome { addr, hosted: false, running: None, wants_replay: false },
                    &mut bytes,
                );
                stream.write_all(&bytes.split()).await.unwrap();
                let mut sent = BytesMut::new();
                while !decode_preamble(&mut sent).unwrap() {
                    stream.read_buf(&mut sent).await.unwrap();
                }
                loop {
                    match decode_frame::<NodeMessage>(&mut sent).unwrap() {
                        Some(NodeMessage::Join(_)) => break,
                        Some(_) => {}
                        None => _ = stream.read_buf(&mut sent).await.unwrap(),
                    }
                }
                encode_frame(&CoordinatorMessage::Complete(placement), &mut bytes);
                stream.write_all(&bytes).await.unwrap();
                // Until the node closes the connection.
                while stream.read_buf(&mut sent).await.is_ok_and(|count| count > 0) {}
            };
            let workers = Some(JoinWorkers::new("role", 4));
            let (joined, ()) = tokio::join!(session.join(1, None, workers, PATIENCE), listening);
            let error = joined.unwrap_err().to_string();
            assert!(error.contains("is not an elastic_rs coordinator") && error.contains(why), "{error}");
        }
    });
}

fn placement(rank: u32, world_size: u32, workers: Option<WorkerRanks>) -> Placement {
    Placement {
        round: Round(1),
        rank,
        world_size,
        world: 1,
        master_addr: "127.0.0.1".to_owned(),
        master_port: 1,
        reason: String::new(),
        restart: 0,
        workers,
        host: None,
        local_world_size: None,
        resume: None,
        members: None,
    }
}

/// The coordinator identifies nodes by the address of their connection, so a node with `local_addr` connects from that address.
#[test]
fn a_node_connects_from_its_local_addr_if_it_can() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        for (local_addr, seen) in [
            (Some("127.0.0.2"), "127.0.0.2"),
            (None, "127.0.0.1"),
            // An address of another machine, an address of another family, and a name cannot be a source.
            (Some("203.0.113.9"), "127.0.0.1"),
            (Some("::1"), "127.0.0.1"),
            (Some("node7.example"), "127.0.0.1"),
        ] {
            let hello = Hello::new("job", NodeId(1), "node:1", Settings::new(1, 1));
            let hello = Hello { local_addr: local_addr.map(str::to_owned), ..hello };
            let _session = Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, None);
            let (_stream, peer) = tokio::time::timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
            assert_eq!(peer.ip(), seen.parse::<IpAddr>().unwrap(), "{local_addr:?}");
        }
    });
}
