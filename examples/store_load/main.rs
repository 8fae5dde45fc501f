//! A load generator for TCP stores. It speaks c10d with PyTorch's servers and with ours. `benches/store.py` runs it.
//!
//! It keeps its connections between commands. PyTorch's server looks up each peer's name when it accepts, so connecting can cost more
//! than the measured operation. Commands are lines on standard input, and each is answered by one line of JSON. It ends when standard
//! input is closed.
//!
//! ```text
//! cargo run --release --example store_load -- PORT
//! connect CONNECTIONS                                   open idle connections, up to this number
//! load OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS  keep DEPTH requests in flight on each connection
//! burst CONNECTIONS LIMIT_S                             time until each of this many new connections has a reply
//! release CONNECTIONS                                   time from one SET until the last waiting connection is released
//! fill KEYS                                             set keys of 8 bytes with values of 64 bytes
//! beside VALUE_BYTES TOTAL_BYTES                        latency of a GET while another connection moves this many bytes
//! ```
#![allow(clippy::unwrap_used, reason = "a measuring tool: it stops at the first thing that goes wrong")]

mod load;
mod once;
mod peer;

use std::time::Duration;

use load::Load;
use once::Burst;
use peer::Pool;

fn main() {
    let Some(port) = std::env::args().nth(1).and_then(|port| port.parse().ok()) else {
        eprintln!("usage: store_load PORT, then commands on standard input");
        std::process::exit(2);
    };
    let mut pool = Pool::new(port);
    for line in std::io::stdin().lines() {
        println!("{}", answer(&mut pool, &line.unwrap()));
    }
}

fn answer(pool: &mut Pool, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ms = |took: Duration| format!(r#"{{"ms": {:.3}}}"#, took.as_secs_f64() * 1e3);
    match words[..] {
        ["connect", count] => ms(pool.grow(count.parse().unwrap())),
        ["load", operation, connections, depth, value_bytes, seconds] => {
            let load = Load::new(operation, value_bytes.parse().unwrap());
            let peers = pool.peers(connections.parse().unwrap());
            load.run(peers, depth.parse().unwrap(), Duration::from_secs_f64(seconds.parse().unwrap()))
        }
        ["burst", count, limit_s] => {
            let limit = Duration::from_secs_f64(limit_s.parse().unwrap());
            match once::burst(pool.port(), count.parse().unwrap(), limit) {
                Burst::Done(took) => ms(took),
                Burst::Unanswered(left) => format!(r#"{{"over_ms": {}, "unanswered": {left}}}"#, limit.as_millis()),
            }
        }
        ["release", count] => ms(once::release(pool.peers(count.parse::<usize>().unwrap() + 1))),
        ["fill", count] => ms(once::fill(&mut pool.peers(1)[0], count.parse().unwrap())),
        ["beside", value_bytes, total] => {
            once::beside(pool.peers(2), value_bytes.parse().unwrap(), total.parse().unwrap())
        }
        _ => panic!("unknown command `{line}`"),
    }
}
