//! A load generator for TCP stores: speaks c10d to PyTorch's servers as to ours. `benches/store.py` alternates them.
//!
//! It keeps its connections from one command to the next: PyTorch's server looks up each peer's name when it accepts, so
//! connecting can cost more than what is to be measured. Commands are lines on standard input, and each is answered by
//! one line of JSON. Ends when standard input does.
//!
//! ```text
//! cargo run --release --example store_load -- PORT
//! connect CONNECTIONS                                   have so many that are greeted and idle
//! load OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS  keep DEPTH requests in flight on each
//! burst CONNECTIONS LIMIT_S                             new ones, until each has its first reply
//! release CONNECTIONS                                   they wait; one SET, until the last is released
//! fill KEYS                                             keys of 8 bytes with values of 64
//! beside VALUE_BYTES TOTAL_BYTES                        latency of a GET while another connection moves so much
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
