//! A load generator for TCP stores: speaks c10d, keeps `depth` requests in flight on each of `connections`.
//!
//! Knows the length of every reply beforehand, so it only counts bytes: it costs less than any server it drives. Works on
//! PyTorch's servers as on ours; `benches/store.py` alternates them. Prints one line of JSON.
//!
//! ```text
//! cargo run --release --example store_load -- PORT OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS
//! ```
#![allow(clippy::unwrap_used, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::proto::Request;
use rustix::event::epoll;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, operation, connections, depth, value_bytes, seconds] = &arguments[..] else {
        eprintln!("usage: store_load PORT OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS");
        std::process::exit(2);
    };
    let load = Load::new(operation, value_bytes.parse().unwrap());
    let port = port.parse().unwrap();
    let connections: usize = connections.parse().unwrap();
    let mut peers: Vec<Peer> = (0..connections).map(|_| Peer::connect(port, &load)).collect();
    let result = load.run(&mut peers, depth.parse().unwrap(), Duration::from_secs_f64(seconds.parse().unwrap()));
    println!("{result}");
}

/// What is sent again and again: one unit of requests, and how long its replies are together.
struct Load {
    setup: Vec<u8>,
    /// What the replies to `setup` come to.
    setup_reply_bytes: usize,
    unit: Vec<u8>,
    reply_bytes: usize,
    requests: usize,
}

/// How many `SET`s, which have no reply, are followed by a `PING`, which has one.
const SETS_PER_PING: usize = 16;
/// How many keys a `MULTI_GET` names.
const MULTI: usize = 100;

impl Load {
    fn new(operation: &str, value_bytes: usize) -> Self {
        let value = vec![b'v'; value_bytes];
        let keys: Vec<Vec<u8>> = (0..MULTI).map(|number| format!("/key/{number:03}").into_bytes()).collect();
        let key = &keys[0][..];
        let mut setup = vec![Request::Validate, Request::Ping { nonce: 7 }];
        setup.extend(keys.iter().map(|key| Request::Set { key: &key[..], value: &value[..] }));
        setup.push(Request::Ping { nonce: 8 });
        let ping = || Request::Ping { nonce: 9 };
        let (unit, reply_bytes, requests): (Vec<Request<&[u8]>>, usize, usize) = match operation {
            "ping" => (vec![ping()], 4, 1),
            "get" => (vec![Request::Get { key }], 8 + value_bytes, 1),
            "add" => (vec![Request::Add { key: b"/counter", amount: 1 }], 8, 1),
            "check" => (vec![Request::Check { keys: vec![key] }], 1, 1),
            "compare_set" => (vec![Request::CompareSet { key, expected: &value, desired: &value }], 8 + value_bytes, 1),
            "multi_get" => {
                let keys = keys.iter().map(|key| &key[..]).collect();
                (vec![Request::MultiGet { keys }], MULTI * (8 + value_bytes), 1)
            }
            "set" => {
                let mut unit: Vec<_> = (0..SETS_PER_PING).map(|_| Request::Set { key, value: &value[..] }).collect();
                unit.push(ping());
                (unit, 4, SETS_PER_PING)
            }
            other => panic!("unknown operation `{other}`"),
        };
        Self { setup: encode(&setup), setup_reply_bytes: 8, unit: encode(&unit), reply_bytes, requests }
    }

    /// Run until the time is over, and say what was achieved.
    fn run(&self, peers: &mut [Peer], depth: usize, duration: Duration) -> String {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for (number, peer) in peers.iter_mut().enumerate() {
            peer.stream.set_nonblocking(true).unwrap();
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(
                &poll,
                &peer.stream,
                data,
                epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET,
            )
            .unwrap();
        }
        let started = Instant::now();
        let warm_until = started + duration / 5;
        let until = warm_until + duration;
        let (mut measured_since, mut units, mut latencies) = (None, 0_usize, Vec::new());
        for peer in peers.iter_mut() {
            peer.send(self, depth);
        }
        let mut events = Vec::with_capacity(1024);
        let mut buffer = vec![0; 1 << 20];
        loop {
            events.clear();
            epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
            let now = Instant::now();
            if measured_since.is_none() && now >= warm_until {
                (measured_since, units) = (Some(now), 0);
                latencies.clear();
            }
            if now >= until {
                break;
            }
            for event in &events {
                let peer = &mut peers[event.data.u64() as usize];
                let done = peer.receive(self, &mut buffer);
                units += done;
                if depth == 1 && done == 1 {
                    latencies.push(peer.sent_at.elapsed());
                }
                peer.send(self, done);
            }
        }
        let elapsed = measured_since.unwrap_or(started).elapsed().as_secs_f64();
        latencies.sort();
        let quantile = |q: f64| match latencies.len() {
            0 => 0.0,
            length => latencies[((length as f64 * q) as usize).min(length - 1)].as_secs_f64() * 1e6,
        };
        let rate = (units * self.requests) as f64 / elapsed;
        format!(r#"{{"per_s": {rate:.0}, "p50_us": {:.2}, "p99_us": {:.2}}}"#, quantile(0.5), quantile(0.99))
    }
}

fn encode(requests: &[Request<&[u8]>]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    for request in requests {
        request.encode(&mut bytes);
    }
    bytes.to_vec()
}

struct Peer {
    stream: TcpStream,
    /// Bytes of units that were due but not taken by the socket yet.
    unsent: usize,
    /// Bytes of a reply that has arrived in part.
    partial: usize,
    sent_at: Instant,
}

impl Peer {
    fn connect(port: u16, load: &Load) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        // VALIDATE has to arrive in one piece, and alone (protocol page, section 2.2).
        let (validate, rest) = load.setup.split_at(5);
        stream.write_all(validate).unwrap();
        stream.write_all(rest).unwrap();
        stream.read_exact(&mut vec![0; load.setup_reply_bytes]).unwrap();
        Self { stream, unsent: 0, partial: 0, sent_at: Instant::now() }
    }

    /// Send further units, together with what is still due.
    fn send(&mut self, load: &Load, units: usize) {
        self.unsent += units * load.unit.len();
        if units > 0 {
            self.sent_at = Instant::now();
        }
        while self.unsent > 0 {
            // The rest of a unit that was cut, then whole ones.
            let offset = (load.unit.len() - self.unsent % load.unit.len()) % load.unit.len();
            let whole = self.unsent / load.unit.len();
            let bytes = if offset > 0 { load.unit[offset..].to_vec() } else { load.unit.repeat(whole.min(64)) };
            match self.stream.write(&bytes) {
                Ok(written) => self.unsent -= written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("cannot send: {error}"),
            }
        }
    }

    /// Read what has arrived; how many units it completes.
    fn receive(&mut self, load: &Load, buffer: &mut [u8]) -> usize {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => panic!("the store closed the connection"),
                Ok(count) => {
                    self.partial += count;
                    if count < buffer.len() {
                        // A short read has emptied the socket; the next bytes raise an edge of their own.
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("cannot receive: {error}"),
            }
        }
        let units = self.partial / load.reply_bytes;
        self.partial %= load.reply_bytes;
        units
    }
}
