//! Throughput and latency with requests in flight on many connections.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use elastic_rs::store::protocol::Request;
use rustix::event::epoll;

use super::peer::{PONG_BYTES, Peer, encode};

/// A load: a unit of requests that is sent repeatedly, and the total length of its replies.
///
/// The length of every reply is known in advance, so the client only counts bytes. This costs it less than any server spends.
pub struct Load {
    setup: Vec<u8>,
    unit: Vec<u8>,
    reply_bytes: usize,
    requests: usize,
}

/// Number of `SET`s, which have no reply, before a `PING`, which has one.
const SETS_PER_PING: usize = 16;
/// Number of keys of a `MULTI_GET`.
const MULTI: usize = 100;

impl Load {
    pub fn new(operation: &str, value_bytes: usize) -> Self {
        let value = vec![b'v'; value_bytes];
        let keys: Vec<Vec<u8>> = (0..MULTI).map(|number| format!("/key/{number:03}").into_bytes()).collect();
        let key = &keys[0][..];
        let mut setup: Vec<_> = keys.iter().map(|key| Request::Set { key: &key[..], value: &value[..] }).collect();
        setup.push(Request::Ping { nonce: 8 });
        let ping = || Request::Ping { nonce: 9 };
        let (unit, reply_bytes, requests): (Vec<Request<&[u8]>>, usize, usize) = match operation {
            "ping" => (vec![ping()], PONG_BYTES, 1),
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
                (unit, PONG_BYTES, SETS_PER_PING)
            }
            other => panic!("unknown operation `{other}`"),
        };
        Self { setup: encode(&setup), unit: encode(&unit), reply_bytes, requests }
    }

    /// Run for this time, and return the result as JSON. No request is in flight afterwards.
    pub fn run(&self, peers: &mut [Peer], depth: usize, duration: Duration) -> String {
        peers[0].ask(&self.setup, PONG_BYTES);
        let poll = watch(peers);
        let started = Instant::now();
        let warm_until = started + duration / 5;
        let until = warm_until + duration;
        let (mut measured_since, mut units, mut latencies) = (None, 0_usize, Vec::new());
        let mut rate = None;
        for peer in peers.iter_mut() {
            peer.send(self, depth);
        }
        let mut events = Vec::with_capacity(1024);
        let mut buffer = vec![0; 1 << 20];
        let mut busy = peers.len();
        while busy > 0 {
            events.clear();
            epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
            let now = Instant::now();
            if measured_since.is_none() && now >= warm_until {
                (measured_since, units) = (Some(now), 0);
                latencies.clear();
            }
            if now >= until && rate.is_none() {
                let elapsed = measured_since.unwrap_or(started).elapsed().as_secs_f64();
                rate = Some((units * self.requests) as f64 / elapsed);
            }
            for event in &events {
                let peer = &mut peers[event.data.u64() as usize];
                let was_busy = peer.due > 0;
                let done = peer.receive(self, &mut buffer);
                units += done;
                if depth == 1 && done == 1 && rate.is_none() {
                    latencies.push(peer.sent_at.elapsed());
                }
                // After the end, wait for the requests in flight, because the connections are used again.
                peer.send(self, if rate.is_none() { done } else { 0 });
                busy -= usize::from(was_busy && peer.due == 0);
            }
        }
        for peer in peers.iter() {
            peer.stream.set_nonblocking(false).unwrap();
        }
        let [p50, p99] = quantiles(&mut latencies);
        format!(r#"{{"per_s": {:.0}, "p50_us": {p50:.2}, "p99_us": {p99:.2}}}"#, rate.unwrap_or_default())
    }
}

fn watch(peers: &[Peer]) -> OwnedFd {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
    for (number, peer) in peers.iter().enumerate() {
        peer.stream.set_nonblocking(true).unwrap();
        epoll::add(&poll, &peer.stream, epoll::EventData::new_u64(number as u64), flags).unwrap();
    }
    poll
}

/// Median and 99th percentile in microseconds, or 0 without latencies.
pub fn quantiles(latencies: &mut [Duration]) -> [f64; 2] {
    latencies.sort_unstable();
    [0.5, 0.99].map(|q| match latencies.len() {
        0 => 0.0,
        length => latencies[((length as f64 * q) as usize).min(length - 1)].as_secs_f64() * 1e6,
    })
}

impl Peer {
    /// Send further units, after the bytes that are still unsent.
    fn send(&mut self, load: &Load, units: usize) {
        self.unsent += units * load.unit.len();
        self.due += units;
        if units > 0 {
            self.sent_at = Instant::now();
        }
        while self.unsent > 0 {
            // First the rest of a partly sent unit, then whole units.
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

    /// Read replies that have arrived. Returns the number of completed units.
    fn receive(&mut self, load: &Load, buffer: &mut [u8]) -> usize {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => panic!("the store closed the connection"),
                Ok(count) => {
                    self.partial += count;
                    if count < buffer.len() {
                        // A short read has emptied the socket. The next bytes raise another edge.
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("cannot receive: {error}"),
            }
        }
        let units = self.partial / load.reply_bytes;
        self.partial %= load.reply_bytes;
        self.due -= units;
        units
    }
}
