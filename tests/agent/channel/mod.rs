//! The channel between an agent and its workers.

mod checks;
mod exchange;
mod messages;
mod model;
mod other_peers;
mod sockets;
mod watch;

use std::collections::BTreeMap;
use std::process;
use std::time::Duration;

use elastic_rs::channel::agent::{Exchange, FromWorker};
use elastic_rs::channel::message::{ToWorker, World};
use elastic_rs::channel::worker::Channel;
use elastic_rs::rendezvous::messages::message::{Generation, Round};

use crate::workers::support::{LIMIT, within};

/// An exchange for which this process is the worker with local rank 0.
fn exchange() -> Exchange {
    let exchange = Exchange::listen(1).unwrap();
    exchange.expect(&workers(process::id()));
    exchange
}

/// The worker with local rank 0.
fn workers(pid: u32) -> BTreeMap<u32, u32> {
    BTreeMap::from([(0, pid)])
}

fn connect(exchange: &Exchange) -> Channel {
    Channel::connect(exchange.address(), LIMIT).unwrap()
}

/// Connects as the worker with local rank 0, whose hello is heard.
async fn connected(exchange: &mut Exchange) -> Channel {
    let channel = connect(exchange);
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    channel
}

/// Nothing is heard for a moment.
async fn silence(exchange: &mut Exchange) {
    let received = tokio::time::timeout(Duration::from_millis(50), exchange.next()).await;
    assert!(received.is_err(), "{received:?}");
}

fn of(round: u64) -> Generation {
    Generation { round: Round(round), world: 90 + round }
}

fn world(generation: u64) -> World {
    let variables = [("RANK", "3"), ("WORLD_SIZE", "4")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let generation = of(generation);
    World {
        variables: variables.into(),
        generation,
        source: 1,
        sync: true,
        equal: false,
        reason: "a node joins".into(),
    }
}

fn change(seq: u64) -> ToWorker {
    ToWorker::Change { seq, flags: 2, reason: "a node joins".to_owned() }
}

fn failure() -> ToWorker {
    ToWorker::PeerFailed { reason: "worker 1 was killed".to_owned(), rank: Some(1) }
}
