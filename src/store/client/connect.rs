//! Connecting to a store that may not listen yet.
//!
//! Owns the pauses between attempts, and what makes a connection a store's. [`crate::net::connect`] races the addresses. Two
//! things differ from PyTorch on purpose. The time limit covers everything, including resolver, handshake and last pause. Pauses start short, because in a starting
//! job the store usually listens a moment later.

use std::time::Duration;

use rand::RngExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::error::StoreError;
use super::link::{Failure, Link};
use crate::net::connect::{race, resolve, to_text};

/// Connects within `limit`, with as many attempts as it takes. With a limit of zero, makes one short attempt.
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
        // Jitter, so that the clients of a job do not all connect at the same time.
        let drawn = pause.mul_f64(rand::rng().random_range(0.5..1.5));
        pause = pause.mul_f64(1.5).min(LONGEST_PAUSE);
        sleep_until(deadline.min(now + drawn)).await;
    }
    unreachable!("attempts end with the time")
}

/// Tries every address that the host has now. The error says how each of them failed.
async fn attempt(host: &str, port: u16, deadline: Instant) -> Result<Link, String> {
    let addresses = resolve(host, port, deadline).await.map_err(|error| error.to_string())?;
    // torch's nonce is its process id too. The server only has to return it.
    let open = async |stream| match Link::open(stream, std::process::id()).await {
        Ok(link) => Ok(link),
        Err(Failure::Lost(cause)) => Err(format!("it does not answer as a store: {cause}")),
        Err(Failure::Timeout(_)) => unreachable!("the handshake waits for no key"),
    };
    race(&addresses, deadline, TcpStream::connect, open).await.map_err(|met| to_text(host, &met))
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{IpAddr, SocketAddr};

    use socket2::Socket;

    use super::*;
    use crate::net::black_hole::{BlackHole, black_hole};
    use crate::store::server::{ServerOptions, StoreServer};

    /// The near end of a filler, as the kernel prints it: the address in the machine's byte order.
    fn near_end(filler: &Socket) -> String {
        printed(filler.local_addr().unwrap().as_socket().unwrap())
    }

    fn printed(address: SocketAddr) -> String {
        let IpAddr::V4(ip) = address.ip() else { panic!("{address}") };
        format!("{:08X}:{:04X}", u32::from_ne_bytes(ip.octets()), address.port())
    }

    /// The near ends of connections to this address of 127.0.0.0/8 whose first packet is not answered yet. The kernel may show
    /// one twice, or leave one out, while other tests' connections come and go.
    fn under_way(address: SocketAddr) -> HashSet<String> {
        let remote = printed(address);
        let rows = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let rows = rows.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
        // 02 is SYN_SENT.
        rows.filter(|row| row[2] == remote && row[3] == "02").map(|row| row[1].to_owned()).collect()
    }

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn peer(link: &Link) -> SocketAddr {
        link.addresses().unwrap().1
    }

    /// A store that listens but does not get to accepting, as in a storm of clients.
    #[tokio::test]
    async fn a_full_backlog_is_waited_out() {
        let BlackHole { address, listener, fillers } = black_hole(5);
        let before: HashSet<_> = fillers.iter().map(near_end).collect();
        let connecting = tokio::spawn(connect_to(address, Duration::from_secs(120)));
        let patience = in_a_minute();
        while under_way(address).is_subset(&before) {
            assert!(Instant::now() < patience && !connecting.is_finished(), "nobody waits to be accepted");
            tokio::task::yield_now().await;
        }
        drop(fillers);
        let server = StoreServer::start(vec![listener.into()], ServerOptions::default()).unwrap();
        let link = connecting.await.unwrap().unwrap();
        assert_eq!(peer(&link), server.local_addr());
    }

    /// As long as nobody accepts, attempts are few and the limit holds.
    #[tokio::test]
    async fn a_backlog_that_stays_full_is_an_error_in_time() {
        let hole = black_hole(6);
        let limit = Duration::from_secs(2);
        let start = Instant::now();
        let error = connect_to(hole.address, limit).await.unwrap_err();
        assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
        let StoreError::ConnectTimeout { attempts, last, .. } = &error else { panic!("{error}") };
        // The first waits until the end: the kernel retransmits by itself. A further one would only be another in the queue.
        assert!(*attempts <= 2, "{error}");
        assert!(last.contains("no answer within"), "{error}");
    }

    async fn connect_to(address: SocketAddr, limit: Duration) -> Result<Link, StoreError> {
        connect(&address.ip().to_string(), address.port(), limit).await
    }

    #[tokio::test]
    async fn what_does_not_answer_as_a_store_is_said() {
        let silent = std::net::TcpListener::bind("127.0.0.2:0").unwrap();
        let error = connect_to(silent.local_addr().unwrap(), Duration::ZERO).await.unwrap_err();
        assert!(error.to_string().contains("connected, but there was no answer within"), "{error}");
        let closes = tokio::net::TcpListener::bind("127.0.0.3:0").await.unwrap();
        let address = closes.local_addr().unwrap();
        tokio::spawn(async move { drop(closes.accept().await) });
        let error = connect_to(address, Duration::ZERO).await.unwrap_err();
        assert!(error.to_string().contains("connected, but it does not answer as a store"), "{error}");
    }
}
