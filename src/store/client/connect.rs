//! Reaching a store that may not be there yet.
//!
//! Owns resolving, trying every address, and waiting between attempts. Differs from PyTorch on purpose: the time limit
//! covers everything (resolver, handshake and last pause included), and pauses start short, since in a starting job the
//! store is usually a moment away.

use std::net::SocketAddr;
use std::time::Duration;

use rand::RngExt;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::error::StoreError;
use super::link::{Failure, Link};

/// Connects within `limit`, trying again and again. Tries once, and shortly, if the limit is zero.
pub(super) async fn connect(host: &str, port: u16, limit: Duration) -> Result<Link, StoreError> {
    let start = Instant::now();
    let deadline = start + limit.min(FOREVER);
    let mut pause = FIRST_PAUSE;
    for attempts in 1.. {
        let last = match attempt(host, port, deadline).await {
            Ok(link) => return Ok(link),
            Err(last) => last,
        };
        let now = Instant::now();
        if now >= deadline {
            let (host, elapsed) = (host.to_owned(), now - start);
            return Err(StoreError::ConnectTimeout { host, port, timeout: limit, elapsed, attempts, last });
        }
        tracing::debug!(target: "elastic_rs::store::client", host, port, attempts, error = last, "store not reached");
        // Drawn around the pause, so that the clients of a job do not knock all at once.
        let drawn = pause.mul_f64(rand::rng().random_range(0.5..1.5));
        pause = pause.mul_f64(1.5).min(LONGEST_PAUSE);
        sleep_until(deadline.min(now + drawn)).await;
    }
    unreachable!("attempts end with the time")
}

/// Tries every address the host has now. The error says what each of them met.
async fn attempt(host: &str, port: u16, deadline: Instant) -> Result<Link, String> {
    let grace = Instant::now() + SHORTEST_ATTEMPT;
    let addresses: Vec<SocketAddr> = match timeout_at(deadline.max(grace), lookup_host((host, port))).await {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => return Err(format!("cannot resolve `{host}`: {error}")),
        Err(_) => return Err(format!("cannot resolve `{host}`: the resolver does not answer")),
    };
    let mut met = Vec::new();
    for (at, &address) in addresses.iter().enumerate() {
        if addresses[..at].contains(&address) {
            continue;
        }
        // An address that swallows packets must leave time for those after it.
        let left = (addresses.len() - at) as u32;
        let share = (deadline.saturating_duration_since(Instant::now()) / left).max(SHORTEST_ATTEMPT);
        match timeout(share, reach(address)).await {
            Ok(Ok(link)) => return Ok(link),
            Ok(Err(error)) => met.push(format!("{address}: {error}")),
            Err(_) => met.push(format!("{address}: no answer within {share:?}")),
        }
    }
    Err(if met.is_empty() { format!("`{host}` has no address") } else { met.join("; ") })
}

async fn reach(address: SocketAddr) -> Result<Link, String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    // Torch's nonce is its process id too. It only has to come back.
    match Link::open(stream, std::process::id()).await {
        Ok(link) => Ok(link),
        Err(Failure::Lost(cause)) => Err(format!("connected, but it does not answer as a store: {cause}")),
        Err(Failure::Timeout(_)) => unreachable!("the handshake waits for no key"),
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What an attempt gets when the time is almost or altogether over.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);
