//! Measurements of a single operation.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use elastic_rs::store::protocol::Request;

use super::load::quantiles;
use super::peer::{PONG_BYTES, Peer, encode, greet};

pub enum Burst {
    /// Every connection had its reply.
    Done(Duration),
    /// The time limit ended it. This many connections had no reply, or could not connect.
    Unanswered(usize),
}

/// Open connections with a client's greeting, and measure the time until the last has its reply.
pub fn burst(port: u16, count: usize, limit: Duration) -> Burst {
    let started = Instant::now();
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count {
        match greet(port) {
            Ok(stream) => streams.push(stream),
            Err(error) => panic!("connection {}: {error}", streams.len()),
        }
        if started.elapsed() >= limit {
            return Burst::Unanswered(count);
        }
    }
    for (answered, stream) in streams.iter_mut().enumerate() {
        let Some(left) = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else {
            return Burst::Unanswered(count - answered);
        };
        stream.set_read_timeout(Some(left)).unwrap();
        if stream.read_exact(&mut [0; PONG_BYTES]).is_err() {
            return Burst::Unanswered(count - answered);
        }
    }
    Burst::Done(started.elapsed())
}

/// Let all peers but the first wait for one key. Returns the time from the first's `SET` to the release of the last.
pub fn release(peers: &mut [Peer]) -> Duration {
    let key = format!("/released/{:?}", Instant::now()).into_bytes();
    let (setter, waiters) = peers.split_first_mut().unwrap();
    let wait = encode(&[Request::Ping { nonce: 1 }, Request::Wait { keys: vec![&key[..]] }]);
    for waiter in waiters.iter_mut() {
        waiter.stream.write_all(&wait).unwrap();
    }
    for waiter in waiters.iter_mut() {
        // The wait follows the ping in the same segment, so the reply to the ping shows that it is registered.
        waiter.stream.read_exact(&mut [0; PONG_BYTES]).unwrap();
    }
    let set = encode(&[Request::Set { key: &key[..], value: b"x" }]);
    let started = Instant::now();
    setter.stream.write_all(&set).unwrap();
    for waiter in waiters.iter_mut() {
        waiter.stream.read_exact(&mut [0; 1]).unwrap();
    }
    started.elapsed()
}

pub fn fill(peer: &mut Peer, count: usize) -> Duration {
    let started = Instant::now();
    let value = [b'v'; 64];
    for first in (0..count).step_by(1000) {
        let keys: Vec<_> = (first..count.min(first + 1000)).map(|number| format!("{number:08}").into_bytes()).collect();
        let mut requests: Vec<_> = keys.iter().map(|key| Request::Set { key: &key[..], value: &value[..] }).collect();
        requests.push(Request::Ping { nonce: 2 });
        peer.ask(&encode(&requests), PONG_BYTES);
    }
    started.elapsed()
}

/// Measure the first connection's `GET` of a small value, first alone, then while the second one sets and gets big values.
pub fn beside(peers: &mut [Peer], value_bytes: usize, total_bytes: usize) -> String {
    let [probe, mover] = peers else { panic!("two connections are needed") };
    let (key, value) = (&b"/small"[..], [b'v'; 64]);
    probe.ask(&encode(&[Request::Set { key, value: &value }, Request::Ping { nonce: 3 }]), PONG_BYTES);
    let get = encode(&[Request::Get { key }]);
    let reply_bytes = 8 + value.len();
    let mut alone: Vec<_> = (0..PROBES_ALONE).map(|_| timed(|| probe.ask(&get, reply_bytes))).collect();
    let moved = AtomicBool::new(false);
    let mut meanwhile = Vec::new();
    let took = thread::scope(|scope| {
        let moving = scope.spawn(|| {
            // Both threads share a CPU, and the measured one has priority.
            rustix::process::nice(19).unwrap();
            let took = timed(|| move_bytes(mover, value_bytes, total_bytes));
            moved.store(true, Ordering::Relaxed);
            took
        });
        while !moved.load(Ordering::Relaxed) {
            meanwhile.push(timed(|| probe.ask(&get, reply_bytes)));
        }
        moving.join().unwrap()
    });
    let ([_, alone], [p50, p99]) = (quantiles(&mut alone), quantiles(&mut meanwhile));
    let mib_s = (total_bytes >> 20) as f64 / took.as_secs_f64();
    format!(r#"{{"alone_p99_us": {alone:.2}, "p50_us": {p50:.2}, "p99_us": {p99:.2}, "mib_s": {mib_s:.0}}}"#)
}

const PROBES_ALONE: usize = 20_000;

/// Move half of the bytes to the store, and half of them back.
fn move_bytes(mover: &mut Peer, value_bytes: usize, total_bytes: usize) {
    let (key, value) = (&b"/big"[..], vec![b'v'; value_bytes]);
    let set = encode(&[Request::Set { key, value: &value }, Request::Ping { nonce: 4 }]);
    let get = encode(&[Request::Get { key }]);
    for _ in 0..total_bytes / value_bytes / 2 {
        mover.ask(&set, PONG_BYTES);
        mover.ask(&get, 8 + value_bytes);
    }
}

fn timed(act: impl FnOnce()) -> Duration {
    let started = Instant::now();
    act();
    started.elapsed()
}
