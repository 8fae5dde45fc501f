//! Many nodes of one job as real sessions, to measure a coordinator. `benches/rendezvous_scale.py` runs it.
//!
//! ```text
//! cargo run --release --example rendezvous_load -- serve [LIST PLACE]
//! cargo run --release --example rendezvous_load -- nodes WHERE RUN_ID FIRST COUNT WORLD
//! ```
//!
//! WHERE is the port of a host, or the members of an etcd cluster: `HOST:PORT,HOST:PORT,...`.
//!
//! `serve` is a host, or the process at a place of the run `job`'s list of endpoints. It prints its port, and ends when its standard input is
//! closed. `nodes` opens the sessions FIRST … FIRST + COUNT − 1
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
//! - `look`: an observer asks where the ranks stand, and every node says of eight ranks that they stand in a collective; one of all has not
//!   entered it. `ended` is when the observer has the answer, with all ranks.
#![allow(clippy::unwrap_used, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::io::{BufRead, Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::endpoint::{Claim, EndpointServer, claim};
use elastic_rs::etcd_client::{Client, ClientOptions, parse_endpoints};
use elastic_rs::events::record::Phase;
use elastic_rs::hang::view::{Class, Entry, Frame, Gil, Group, Signature, State, View, WORLD};
use elastic_rs::rendezvous::conf::DEFAULT_KEY_PREFIX;
use elastic_rs::rendezvous::etcd::driver;
use elastic_rs::rendezvous::messages::message::{AskLook, Hello, NodeId, PeerHello, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::observer::Observer;
use elastic_rs::secure::{Protection, TOKEN_FILE};
use elastic_rs::store::server::ServerOptions;
use rand::seq::SliceRandom;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinSet;

/// Time limit of an answer, far above the measured times.
const PATIENCE: Duration = Duration::from_secs(120);
/// Ranks of each node that a look shows.
const RANKS_SEEN: u32 = 8;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", ref list @ ..] => {
            let host = serve(list);
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
            "look" => look(&sessions, place.parse().unwrap()).await,
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
        reports_steps: true, // as agents do: they can be asked where their workers stand
        life_at: Some((Ipv4Addr::UNSPECIFIED, 0).into()),
        ..Hello::new(run_id, NodeId(u128::from(number)), format!("node{number}:1"), settings)
    };
    if let Ok(port) = place.parse() {
        return Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, protection());
    }
    // As in a job, each node has a connection of its own.
    let client = Client::new(ClientOptions::new(parse_endpoints(place, None).unwrap())).unwrap();
    driver::open(&Handle::current(), hello, client, DEFAULT_KEY_PREFIX, PATIENCE)
}

/// The process at a place of a list, or the only one.
fn serve(list: &[&str]) -> EndpointServer {
    let [list, place] = list else {
        return EndpointServer::listen(Some("127.0.0.1"), 0, ServerOptions::default(), protection()).unwrap();
    };
    let (endpoints, place): (Vec<String>, u32) = (list.split(',').map(str::to_owned).collect(), place.parse().unwrap());
    let port = endpoints[place as usize].rsplit(':').next().unwrap().parse().unwrap();
    let hello = PeerHello { run_id: "job".to_owned(), endpoints, place, process: NodeId(rand::random()) };
    match claim("127.0.0.1", port, None, ServerOptions::default(), protection(), Some(hello)).unwrap() {
        Claim::Serves(host) => host,
        Claim::Elsewhere(why) => panic!("{why}"),
    }
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

/// Let an observer ask where the ranks stand. Every node answers for eight ranks. Returns when it asked, and when it had the answer.
async fn look(sessions: &[&'static Session], port: u16) -> (u64, u64) {
    let mut observer = Observer::connect("127.0.0.1", port, None, PATIENCE).await.unwrap();
    let seen: Vec<u64> = sessions.iter().map(|session| session.view().looks_asked).collect();
    let mut looks = JoinSet::new();
    for (at, (&session, seen)) in sessions.iter().zip(seen).enumerate() {
        looks.spawn(async move {
            let look = session.view_when(|view| view.looks_asked > seen).await.look.unwrap();
            let first = at as u32 * RANKS_SEEN;
            let views = (first..first + RANKS_SEEN).map(|rank| seen_of(rank, look.round)).collect();
            session.report_look(look.number, views, None, None);
        });
    }
    let began = now();
    let answer = observer.look(AskLook::default()).await.unwrap();
    let ended = now();
    looks.join_all().await;
    let all = format!(r#""ranks":{},"#, sessions.len() * RANKS_SEEN as usize);
    assert!(answer.seen.contains(&all) && answer.seen.contains(r#""silent":[]"#), "{}", answer.seen);
    (began, ended)
}

/// What a look shows of a rank, in about 2 KiB: three groups with their last collectives, and ten frames.
fn seen_of(rank: u32, round: Round) -> View {
    let last = 5000 - u64::from(rank == 3);
    let entry = |seq: u64| Entry { seq, at: seq as u32, signature: (seq % 5) as u16 };
    let group = |name: &str, desc: &str| Group {
        name: name.to_owned(),
        desc: desc.to_owned(),
        ranks: None,
        last,
        oldest: last - 100,
        pending: (5000..=last).map(entry).collect(),
        tail: (last - 31..=last).map(entry).collect(),
    };
    let frame = |line: u32| Frame {
        function: format!("function_{line}"),
        file: "/opt/job/python/packages/torch/nn/modules/module.py".to_owned(),
        line,
        peer: None,
    };
    View {
        answered: true,
        gil: Gil::Free,
        state: State::Sleeping,
        class: Some(Class::Idle),
        frames: (1..=10).map(frame).collect(),
        signatures: (0..5)
            .map(|at| Signature { op: "all_reduce".to_owned(), shape: format!("[{at}] Float") })
            .collect(),
        groups: vec![group(WORLD, "default_pg"), group("1", "tp"), group("2", "dp")],
        ..View::new(rank, round.0)
    }
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
