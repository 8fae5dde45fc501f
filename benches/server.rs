//! Benchmark of the server with one client over loopback sockets: round trips, and many requests in one segment.
//!
//! `benches/store.py` compares it with PyTorch's server, with each side on a separate CPU and with many connections.

#![allow(clippy::unwrap_used, missing_docs, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use bytes::BytesMut;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use elastic_rs::net::listen;
use elastic_rs::store::protocol::Request;
use elastic_rs::store::server::{LocalPeers, ServerOptions, StoreServer};

fn start(options: ServerOptions) -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], options).unwrap()
}

/// A client and its server.
struct Client {
    stream: TcpStream,
    _server: StoreServer,
}

impl Client {
    fn new() -> Self {
        let server = start(ServerOptions::default());
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut client = Client { stream, _server: server };
        client.ask(&encode(&[Request::Validate, Request::Ping { nonce: 1 }]), &mut [0; 4]);
        client
    }

    fn ask(&mut self, requests: &[u8], replies: &mut [u8]) {
        self.stream.write_all(requests).unwrap();
        self.stream.read_exact(replies).unwrap();
    }
}

fn encode(requests: &[Request<&[u8]>]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes.to_vec()
}

fn round_trip(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round trip");
    group.throughput(Throughput::Elements(1));
    let mut client = Client::new();
    for value_bytes in [64, 64 << 10] {
        let value = vec![b'v'; value_bytes];
        client.ask(&encode(&[Request::Set { key: b"/k", value: &value }, Request::Ping { nonce: 2 }]), &mut [0; 4]);
        let (get, mut reply) = (encode(&[Request::Get { key: &b"/k"[..] }]), vec![0; 8 + value_bytes]);
        let id = BenchmarkId::from_parameter(format!("get of {value_bytes} B"));
        group.bench_function(id, |bencher| bencher.iter(|| client.ask(&get, &mut reply)));
    }
    let (add, mut reply) = (encode(&[Request::Add { key: &b"/n"[..], amount: 1 }]), [0; 8]);
    group.bench_function(BenchmarkId::from_parameter("add"), |bencher| bencher.iter(|| client.ask(&add, &mut reply)));
    group.finish();
}

fn in_one_segment(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("in one segment");
    let mut client = Client::new();
    for count in [16, 256] {
        group.throughput(Throughput::Elements(count as u64));
        let (adds, mut replies) =
            (encode(&vec![Request::Add { key: &b"/n"[..], amount: 1 }; count]), vec![0; 8 * count]);
        let id = BenchmarkId::from_parameter(format!("{count} adds"));
        group.bench_function(id, |bencher| bencher.iter(|| client.ask(&adds, &mut replies)));
    }
    group.finish();
}

/// Connect, send VALIDATE, wait for the first reply, and leave: at a store that every user may reach, and at one that looks at the
/// user of each connection.
fn connect(criterion: &mut Criterion) {
    let hello = encode(&[Request::Validate, Request::Ping { nonce: 1 }]);
    let mut group = criterion.benchmark_group("connect");
    group.sample_size(20).throughput(Throughput::Elements(1));
    let same_user = LocalPeers::SameUser { way_out: "" };
    for (name, local_peers) in [("to first reply", LocalPeers::Any), ("to first reply, same user", same_user)] {
        let server = start(ServerOptions { local_peers, ..ServerOptions::default() });
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut stream = TcpStream::connect(server.local_addr()).unwrap();
                stream.write_all(&hello).unwrap();
                stream.read_exact(&mut [0; 4]).unwrap();
                // End with a reset. After a close, the port would be in use for a minute, and there are only 28,000.
                socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = round_trip, in_one_segment, connect
}
criterion_main!(benches);
