//! Many nodes of one job as real sessions, to measure a coordinator. `benches/rendezvous_scale.py` runs it.
//!
//! ```text
//! cargo run --release --example rendezvous_load -- serve
//! cargo run --release --example rendezvous_load -- nodes WHERE RUN_ID FIRST COUNT WORLD
//! ```
//!
//! WHERE is the port of a host, or the members of an etcd cluster: `HOST:PORT,HOST:PORT,...`.
//!
//! `serve` is a host. It prints its port, and ends when its standard input is closed. `nodes` opens the sessions FIRST … FIRST + COUNT − 1
//! of a job of WORLD nodes, and prints a line once all are connected. Then it performs one order per line of its standard input, and
//! answers each with a line of JSON. Times are nanoseconds of the monotonic clock, which all processes of a machine share.
//!
//! The nodes connect in random order, and join in a new random order each time: the ids of a job's nodes are random, too. If they
//! connected in the order of their ids, the coordinator would visit plain sessions in the order of their memory addresses. Protected
//! sessions would not have this advantage, because their handshakes end in any order.
//!
//! With `ELASTIC_RS_TOKEN_FILE`, host and sessions are protected by the token in that file.
//!
//! - `join`: every node joins at once. `began` is when the last one joins, `ended` when the last one has its place.
//! - `report`: every node reports the durations of its phases, as an agent does when its workers have started.
//! - `await-change`: `ended` is when the last node has been notified that the world must re-form.
//! - `leave`: every node leaves. `began` is just before.
#![allow(clippy::unwrap_used, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::io::{BufRead, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::endpoint::EndpointServer;
use elastic_rs::etcd_client::{Client, ClientOptions, parse_endpoints};
use elastic_rs::events::record::Phase;
use elastic_rs::rendezvous::conf::DEFAULT_KEY_PREFIX;
use elastic_rs::rendezvous::etcd::driver;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::secure::{Protection, TOKEN_FILE};
use elastic_rs::store::server::ServerOptions;
use rand::seq::SliceRandom;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinSet;

/// Time limit of an answer, far above the measured times.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve"] => {
            let host = EndpointServer::listen(Some("127.0.0.1"), 0, ServerOptions::default(), protection()).unwrap();
            say(&host.port().to_string());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        ["nodes", place, run_id, first, count, world] => {
            let number = |text: &str| text.parse::<u32>().unwrap();
            let (first, count, world) = (number(first), number(count), number(world));
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(nodes(place, run_id, first..first + count, world));
        }
        _ => {
            eprintln!("usage: rendezvous_load serve | nodes WHERE RUN_ID FIRST COUNT WORLD");
            std::process::exit(2);
        }
    }
}

/// Hold the sessions, and perform orders until standard input is closed.
async fn nodes(place: &str, run_id: &str, numbers: std::ops::Range<u32>, world: u32) {
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.shuffle(&mut rand::rng());
    let mut sessions: Vec<&'static Session> =
        numbers.into_iter().map(|number| &*Box::leak(Box::new(open(place, run_id, number, world)))).collect();
    // Over etcd a node connects when it joins.
    if place.parse::<u16>().is_ok() {
        for session in &sessions {
            tokio::time::timeout(PATIENCE, session.view_when(|view| view.addr.is_some())).await.unwrap();
        }
    }
    say(r#"{"connected": true}"#);
    let (orders, mut ordered) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            orders.send(line.unwrap()).unwrap();
        }
    });
    let mut round = Round(0);
    while let Some(order) = ordered.recv().await {
        let (began, ended) = match order.as_str() {
            "join" => {
                sessions.shuffle(&mut rand::rng());
                let (began, ended, joined) = join(&sessions).await;
                round = joined;
                (began, ended)
            }
            "report" => report(&sessions, round),
            "await-change" => (now(), all(&sessions, notified).await),
            "leave" => (now(), all(&sessions, |session| session.leave("asked to".to_owned(), None, PATIENCE)).await),
            other => panic!("unknown order `{other}`"),
        };
        say(&format!(r#"{{"began": {began}, "ended": {ended}}}"#));
    }
}

fn open(place: &str, run_id: &str, number: u32, world: u32) -> Session {
    let mut settings = Settings::new(world, world);
    settings.settle_timeout = Duration::from_secs(600); // no smaller world may form while a loss is measured
    let hello = Hello {
        local_addr: Some(format!("node{number}")),
        process: u64::from(number),
        ..Hello::new(run_id, NodeId(u128::from(number)), format!("node{number}:1"), settings)
    };
    if let Ok(port) = place.parse() {
        return Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, protection());
    }
    // As in a job, each node has a connection of its own.
    let client = Client::new(ClientOptions::new(parse_endpoints(place, None).unwrap())).unwrap();
    driver::open(&Handle::current(), hello, client, DEFAULT_KEY_PREFIX, PATIENCE)
}

fn protection() -> Option<Arc<Protection>> {
    let path = std::env::var_os(TOKEN_FILE)?;
    Some(Arc::new(Protection::by_file(path.as_ref()).unwrap()))
}

/// Let all join. Returns when the last one began, when the last one had its place, and the round.
async fn join(sessions: &[&'static Session]) -> (u64, u64, Round) {
    let mut joins = JoinSet::new();
    for session in sessions {
        joins.spawn(session.join(29_500, None, None, PATIENCE));
    }
    let began = now();
    let places: Vec<_> = joins.join_all().await.into_iter().map(Result::unwrap).collect();
    let ended = now();
    let mut ranks: Vec<u32> = places.iter().map(|placed| placed.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    assert_eq!(ranks.len(), sessions.len(), "two nodes have one rank");
    (began, ended, places[0].round)
}

/// Hand the phases to the sessions, which send them by and by.
fn report(sessions: &[&'static Session], round: Round) -> (u64, u64) {
    let phase =
        Phase { stop_us: Some(90_000), rendezvous_us: Some(30_000), start_us: Some(20_000), ..Phase::default() };
    let began = now();
    sessions.iter().for_each(|session| session.report_phases(round, phase));
    (began, now())
}

async fn notified(session: &Session) {
    tokio::time::timeout(PATIENCE, session.view_when(|view| view.waiting > 0)).await.unwrap();
}

/// Do something with every session at once. Returns when the last one has done it.
async fn all<F: Future<Output = ()> + Send + 'static>(
    sessions: &[&'static Session],
    what: impl Fn(&'static Session) -> F,
) -> u64 {
    let mut tasks = JoinSet::new();
    for session in sessions {
        tasks.spawn(what(session));
    }
    tasks.join_all().await;
    now()
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}
