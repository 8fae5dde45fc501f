//! Connecting to a store that may not listen yet.
//!
//! Owns resolving the name, racing its addresses, and the pauses between attempts. Two things differ from PyTorch on purpose.
//! The time limit covers everything, including resolver, handshake and last pause. Pauses start short, because in a starting
//! job the store usually listens a moment later.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rand::RngExt;
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::error::StoreError;
use super::link::{Failure, Link};

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
    // Only a forward look-up. Messages show addresses, so a slow reverse zone delays nothing.
    let end = deadline.max(Instant::now() + SHORTEST_ATTEMPT);
    let addresses: Vec<SocketAddr> = match timeout_at(end, lookup_host((host, port))).await {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => return Err(format!("cannot resolve `{host}`: {error}")),
        Err(_) => return Err(format!("cannot resolve `{host}`: the resolver does not answer")),
    };
    race(&interleaved(&addresses), deadline).await.map_err(|met| match met.is_empty() {
        true => format!("`{host}` has no address"),
        false => met.join("; "),
    })
}

/// The addresses in the resolver's order, without repetitions, with alternating families. A family that cannot be reached
/// therefore costs one [`STAGGER`], however many addresses it has.
fn interleaved(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut distinct: Vec<SocketAddr> = Vec::with_capacity(addresses.len());
    for &address in addresses {
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    let leads = distinct.first().is_some_and(SocketAddr::is_ipv6);
    let (mut first, mut second): (VecDeque<_>, VecDeque<_>) =
        distinct.into_iter().partition(|address| address.is_ipv6() == leads);
    let mut order = Vec::with_capacity(first.len() + second.len());
    while !(first.is_empty() && second.is_empty()) {
        order.extend(first.pop_front());
        order.extend(second.pop_front());
    }
    order
}

/// Connects to one address after the other, [`STAGGER`] apart or as soon as one has failed, while earlier attempts continue
/// (RFC 8305). The first connection that answers as a store wins. The error says how each address failed.
///
/// While a connection is accepted but not answered, no further attempt starts, for its share of the time. A store under a
/// storm of connections should not get several from each client (`docs/decisions/0013-a-client-races-the-addresses-of-a-name.md`).
async fn race(addresses: &[SocketAddr], deadline: Instant) -> Result<Link, Vec<String>> {
    let start = Instant::now();
    let deadline = deadline.max(start + SHORTEST_ATTEMPT);
    let stagger = STAGGER.min((deadline - start) / addresses.len().max(1) as u32);
    let mut racing = JoinSet::new();
    let mut waiting = addresses.iter().copied();
    let mut open: Vec<SocketAddr> = Vec::new();
    let mut met = Vec::new();
    let (mut next_at, mut give_up_at) = (start, deadline);
    loop {
        if Instant::now() >= next_at
            && let Some(address) = waiting.next()
        {
            racing.spawn(async move { (address, TcpStream::connect(address).await) });
            open.push(address);
            next_at = Instant::now() + stagger;
            give_up_at = deadline.min(Instant::now() + LONGEST_CONNECT);
        }
        if open.is_empty() && waiting.len() == 0 {
            return Err(met);
        }
        let (address, connected) = tokio::select! {
            biased;
            Some(connected) = racing.join_next() => connected.expect("connecting does not panic"),
            () = sleep_until(next_at), if waiting.len() > 0 => continue,
            () = sleep_until(give_up_at) => {
                let elapsed = start.elapsed();
                met.extend(open.iter().map(|address| format!("{address}: no answer within {elapsed:?}")));
                met.extend(waiting.map(|address| format!("{address}: not tried within {elapsed:?}")));
                return Err(met);
            }
        };
        open.retain(|&other| other != address);
        let failed = match connected {
            Err(error) => error.to_string(),
            Ok(stream) => {
                let left = (open.len() + waiting.len() + 1) as u32;
                let share = (deadline.saturating_duration_since(Instant::now()) / left).max(SHORTEST_ATTEMPT);
                // torch's nonce is its process id too. The server only has to return it.
                match timeout(share, Link::open(stream, std::process::id())).await {
                    Ok(Ok(link)) => return Ok(link),
                    Ok(Err(Failure::Lost(cause))) => format!("connected, but it does not answer as a store: {cause}"),
                    Ok(Err(Failure::Timeout(_))) => unreachable!("the handshake waits for no key"),
                    Err(_) => format!("connected, but there was no answer within {share:?}"),
                }
            }
        };
        met.push(format!("{address}: {failed}"));
        next_at = Instant::now();
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Time after which the next address is tried while one has not answered. RFC 8305 recommends it.
const STAGGER: Duration = Duration::from_millis(250);

/// How long addresses that swallow packets are tried before the name is resolved again: it may have another address by then.
const LONGEST_CONNECT: Duration = Duration::from_secs(10);

/// Time of an attempt when the limit is almost or entirely used up.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::store::listen;
    use crate::store::server::{ServerOptions, StoreServer};

    fn store(last: u8) -> StoreServer {
        let listener = listen::bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0))).unwrap();
        StoreServer::start(vec![listener], ServerOptions::default()).unwrap()
    }

    /// An address that swallows packets: a listener that accepts nobody, with a full backlog.
    struct BlackHole {
        address: SocketAddr,
        listener: Socket,
        fillers: Vec<Socket>,
    }

    fn black_hole(last: u8) -> BlackHole {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap();
        let fillers = (0..4).map(|_| {
            let filler = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
            // Some never complete.
            let _ = filler.connect(&address);
            filler
        });
        let fillers = fillers.collect();
        BlackHole { address: address.as_socket().unwrap(), listener: socket, fillers }
    }

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

    /// An address at which nobody listens.
    fn closed(last: u8) -> SocketAddr {
        TcpListener::bind((Ipv4Addr::new(127, 0, 0, last), 0)).unwrap().local_addr().unwrap()
    }

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn peer(link: &Link) -> SocketAddr {
        link.addresses().unwrap().1
    }

    #[tokio::test]
    async fn an_address_that_swallows_packets_costs_one_stagger() {
        let (hole, store) = (black_hole(2), store(3));
        let start = Instant::now();
        let link = race(&[hole.address, store.local_addr()], in_a_minute()).await.unwrap();
        assert_eq!(peer(&link), store.local_addr());
        // The kernel itself would give the first address two minutes. Its share of the time would be thirty seconds.
        assert!(start.elapsed() >= STAGGER && start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
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
    async fn a_refused_address_costs_nothing() {
        let store = store(3);
        let start = Instant::now();
        let link = race(&[closed(2), closed(4), store.local_addr()], in_a_minute()).await.unwrap();
        assert_eq!(peer(&link), store.local_addr());
        assert!(start.elapsed() < STAGGER, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn the_first_address_is_preferred_and_the_others_left_alone() {
        let (first, second) = (store(2), store(3));
        let link = race(&[first.local_addr(), second.local_addr()], in_a_minute()).await.unwrap();
        assert_eq!(peer(&link), first.local_addr());
        assert_eq!(second.stats().connections_accepted, 0);
    }

    #[tokio::test]
    async fn an_address_that_is_silent_once_connected_gets_its_share_of_the_time() {
        let silent = TcpListener::bind("127.0.0.2:0").unwrap();
        let store = store(3);
        let addresses = [silent.local_addr().unwrap(), store.local_addr()];
        let link = race(&addresses, Instant::now() + Duration::from_secs(2)).await.unwrap();
        assert_eq!(peer(&link), store.local_addr());
    }

    #[tokio::test]
    async fn the_error_says_what_each_address_met() {
        let (hole, closed) = (black_hole(2), closed(3));
        let met = race(&[hole.address, closed], Instant::now() + Duration::from_millis(300)).await.unwrap_err();
        assert_eq!(met.len(), 2);
        assert!(met[0].starts_with(&format!("{closed}: Connection refused")), "{met:?}");
        assert!(met[1].starts_with(&format!("{}: no answer within 3", hole.address)), "{met:?}");
        // With a limit of zero each is still tried.
        let store = store(4);
        let link = race(&[hole.address, store.local_addr()], Instant::now()).await.unwrap();
        assert_eq!(peer(&link), store.local_addr());
    }

    #[test]
    fn families_alternate_in_the_resolvers_order() {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let resolved = parse(&["[::1]:1", "[::2]:1", "[::1]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"]);
        let expected = parse(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"]);
        assert_eq!(interleaved(&resolved), expected);
        assert_eq!(interleaved(&parse(&["1.1.1.1:1", "[::1]:1"])), parse(&["1.1.1.1:1", "[::1]:1"]));
        assert_eq!(interleaved(&[]), []);
    }
}
