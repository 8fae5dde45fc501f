//! What a tunnel adds to a request of a worker: two nodes of a job on this machine, with a client of each. The client of rank 0's node
//! connects to the store itself.
//!
//! Each iteration waits for its reply, as PyTorch's client does.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark may panic, and criterion's macros make functions")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::launcher::node::{Node, NodeOptions, Reach};
use elastic_rs::net::listen;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::secure::Protection;
use elastic_rs::secure::token::Token;
use elastic_rs::store::protocol::Request;
use elastic_rs::store::server::ServerOptions;
use tokio::runtime::{Builder, Runtime};

const LIMIT: Duration = Duration::from_secs(60);

/// A job of two nodes. Dropped in this order.
struct Job {
    _nodes: Vec<Node>,
    _host: EndpointServer,
    _runtime: Runtime,
}

/// A job, and where the workers of rank 0's node and of the other one look for the store.
fn job() -> (Job, [SocketAddr; 2]) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let protection = Arc::new(Protection::by_token(Token::random().unwrap()).unwrap());
    let listener = listen::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), Some(Arc::clone(&protection))).unwrap();
    let node = |number: u32| {
        let hello = Hello {
            process: u64::from(number),
            node_rank: Some(number),
            ..Hello::new("run", NodeId(number.into()), format!("node{number}"), Settings::new(2, 2))
        };
        let protected = Some(Arc::clone(&protection));
        let session = Session::open(runtime.handle(), hello, "127.0.0.1", host.port(), LIMIT, protected);
        let options = NodeOptions {
            run_id: "run".to_owned(),
            reach: Reach { on_one_machine: true, ..Reach::default() },
            tunnel: Some(Arc::clone(&protection)),
            node_rank: Some(number),
            join_timeout: LIMIT,
            ..NodeOptions::default()
        };
        Node::new(Arc::new(session), options, None)
    };
    let nodes = vec![node(0), node(1)];
    let placements = runtime.block_on(async { tokio::join!(nodes[0].join(None), nodes[1].join(None)) });
    let placements = [placements.0.unwrap(), placements.1.unwrap()].map(|placement| {
        assert_eq!(placement.master_addr, "127.0.0.1");
        SocketAddr::from((Ipv4Addr::LOCALHOST, placement.master_port))
    });
    (Job { _nodes: nodes, _host: host, _runtime: runtime }, placements)
}

fn encode(requests: &[Request]) -> BytesMut {
    let mut bytes = BytesMut::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

fn connect(to: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&encode(&[Request::Validate, Request::Ping { nonce: 1 }])).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    stream
}

fn requests(criterion: &mut Criterion) {
    let (job, placements) = job();
    let mut group = criterion.benchmark_group("get");
    group.throughput(Throughput::Elements(1));
    for (name, size) in [("100 B", 100), ("1 MB", 1_000_000)] {
        let (key, value) = (Bytes::from(name), Bytes::from(vec![7; size]));
        let set = encode(&[Request::Set { key: key.clone(), value }, Request::Ping { nonce: 2 }]);
        let get = encode(&[Request::Get { key }]);
        for (way, placement) in ["direct", "tunnel"].into_iter().zip(placements) {
            let mut stream = connect(placement);
            stream.write_all(&set).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            let mut reply = vec![0; 8 + size];
            group.bench_function(format!("{way}, {name}"), |bencher| {
                bencher.iter(|| {
                    stream.write_all(&get).unwrap();
                    stream.read_exact(&mut reply).unwrap();
                });
            });
        }
    }
    group.finish();
    let mut group = criterion.benchmark_group("connect");
    group.sample_size(20).throughput(Throughput::Elements(1));
    for (way, placement) in ["direct", "tunnel"].into_iter().zip(placements) {
        group.bench_function(format!("{way}, to first reply"), |bencher| {
            bencher.iter(|| {
                // End with a reset. After a close, the port would be in use for a minute, and there are only 28,000.
                socket2::SockRef::from(&connect(placement)).set_linger(Some(Duration::ZERO)).unwrap();
            });
        });
    }
    group.finish();
    drop(job);
}

criterion_group!(benches, requests);
criterion_main!(benches);
