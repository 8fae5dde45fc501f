//! Connecting to a name: all its addresses race (`docs/decisions/0013-a-client-races-the-addresses-of-a-name.md`).

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::local::localhost;

/// Time after which the next address is tried while one has not answered. RFC 8305 recommends it.
pub const STAGGER: Duration = Duration::from_millis(250);

/// How long addresses that swallow packets are tried before the name should be resolved again: it may have another address by then.
const LONGEST_CONNECT: Duration = Duration::from_secs(10);

/// Time of an attempt when the limit is almost or entirely used up.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The resolver returned an error.
    #[error("cannot resolve `{host}`: {source}")]
    Failed {
        /// The name.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The resolver did not answer in time.
    #[error("cannot resolve `{host}`: the resolver does not answer")]
    Silent {
        /// The name.
        host: String,
    },
}

/// The addresses of a name, in the order in which to try them. Only a forward look-up: messages show addresses, so a slow
/// reverse zone delays nothing.
///
/// # Errors
/// The name has no address, or the resolver does not answer until `deadline`.
pub async fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>, ResolveError> {
    let end = deadline.max(Instant::now() + SHORTEST_ATTEMPT);
    let host_again = || host.to_owned();
    match timeout_at(end, lookup_host((host, port))).await {
        Ok(Ok(addresses)) => Ok(interleaved(&addresses.collect::<Vec<_>>())),
        Ok(Err(source)) => localhost(host, port).ok_or_else(|| ResolveError::Failed { host: host_again(), source }),
        Err(_) => Err(ResolveError::Silent { host: host_again() }),
    }
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

/// A failed attempt to connect.
#[derive(Debug)]
pub struct Met {
    /// The address.
    pub address: SocketAddr,
    /// Why it failed.
    pub obstacle: Obstacle,
}

/// Why an attempt to connect failed.
#[derive(Debug)]
pub enum Obstacle {
    /// The system's error.
    Failed(io::Error),
    /// No answer within this time.
    Silent(Duration),
    /// Not tried: the time was over.
    NotTried(Duration),
    /// The connection was accepted, but the peer is not the expected server.
    Unusable(String),
    /// The connection was accepted, but the peer did not answer in its share of the time.
    Mute(Duration),
}

impl Met {
    /// Whether a host answered that no process listens.
    pub fn is_refusal(&self) -> bool {
        matches!(&self.obstacle, Obstacle::Failed(error) if is_refusal(error))
    }

    /// Whether nobody listens there: it was refused. A reset may be that of a server whose queue is full, or of a proxy.
    pub fn is_absence(&self) -> bool {
        matches!(&self.obstacle, Obstacle::Failed(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Whether there was no answer in time, so that a server may still be there.
    pub fn is_silent(&self) -> bool {
        match &self.obstacle {
            Obstacle::Failed(error) => error.kind() == io::ErrorKind::TimedOut,
            Obstacle::Silent(_) | Obstacle::NotTried(_) => true,
            Obstacle::Unusable(_) | Obstacle::Mute(_) => false,
        }
    }
}

/// Whether the other host answered with this error.
pub fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

impl fmt::Display for Met {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.address)?;
        match &self.obstacle {
            Obstacle::Failed(error) => write!(f, "{error}"),
            Obstacle::Silent(elapsed) => write!(f, "no answer within {elapsed:?}"),
            Obstacle::NotTried(elapsed) => write!(f, "not tried within {elapsed:?}"),
            Obstacle::Unusable(why) => write!(f, "connected, but {why}"),
            Obstacle::Mute(share) => write!(f, "connected, but there was no answer within {share:?}"),
        }
    }
}

/// The failed attempts at the addresses of `host`, in one line.
pub fn to_text(host: &str, met: &[Met]) -> String {
    if met.is_empty() {
        return format!("`{host}` has no address");
    }
    met.iter().map(Met::to_string).collect::<Vec<_>>().join("; ")
}

/// Dials one address after the other, [`STAGGER`] apart or as soon as one has failed, while earlier attempts continue
/// (RFC 8305). The first connection that `open` accepts wins. An error of `open` says why a connection is unusable.
///
/// While `open` runs no further attempt starts, for its share of the time. A server under a storm of connections should not
/// get several from each client.
///
/// # Errors
/// How the attempt at each address failed. Empty if there are no addresses.
pub async fn race<S, T, D, O>(
    addresses: &[SocketAddr],
    deadline: Instant,
    dial: impl Fn(SocketAddr) -> D,
    open: impl Fn(S) -> O,
) -> Result<T, Vec<Met>>
where
    S: Send + 'static,
    D: Future<Output = io::Result<S>> + Send + 'static,
    O: Future<Output = Result<T, String>>,
{
    let start = Instant::now();
    let deadline = deadline.max(start + SHORTEST_ATTEMPT);
    let stagger = STAGGER.min((deadline - start) / addresses.len().max(1) as u32);
    let mut racing = JoinSet::new();
    let mut waiting = addresses.iter().copied();
    let mut dialled: Vec<SocketAddr> = Vec::new();
    let mut met = Vec::new();
    let (mut next_at, mut give_up_at) = (start, deadline);
    loop {
        if Instant::now() >= next_at
            && let Some(address) = waiting.next()
        {
            let dialling = dial(address);
            racing.spawn(async move { (address, dialling.await) });
            dialled.push(address);
            next_at = Instant::now() + stagger;
            give_up_at = deadline.min(Instant::now() + LONGEST_CONNECT);
        }
        if dialled.is_empty() && waiting.len() == 0 {
            return Err(met);
        }
        let (address, connected) = tokio::select! {
            biased;
            Some(connected) = racing.join_next() => connected.expect("connecting does not panic"),
            () = sleep_until(next_at), if waiting.len() > 0 => continue,
            () = sleep_until(give_up_at) => {
                let elapsed = start.elapsed();
                met.extend(dialled.iter().map(|&address| Met { address, obstacle: Obstacle::Silent(elapsed) }));
                met.extend(waiting.map(|address| Met { address, obstacle: Obstacle::NotTried(elapsed) }));
                return Err(met);
            }
        };
        dialled.retain(|&other| other != address);
        let obstacle = match connected {
            Err(error) => Obstacle::Failed(error),
            Ok(stream) => {
                let left = (dialled.len() + waiting.len() + 1) as u32;
                let share = (deadline.saturating_duration_since(Instant::now()) / left).max(SHORTEST_ATTEMPT);
                match timeout(share, open(stream)).await {
                    Ok(Ok(opened)) => return Ok(opened),
                    Ok(Err(why)) => Obstacle::Unusable(why),
                    Err(_) => Obstacle::Mute(share),
                }
            }
        };
        met.push(Met { address, obstacle });
        next_at = Instant::now();
    }
}

/// The address of this machine from which it reaches the first of these hosts that others may reach too. `None`: all are on
/// loopback, or none can be resolved until `deadline`. Sends nothing to the hosts.
pub async fn source_towards(hosts: &[(String, u16)], deadline: Instant) -> Option<IpAddr> {
    for (host, port) in hosts {
        let Ok(addresses) = resolve(host, *port, deadline).await else { continue };
        if let Some(source) = addresses.into_iter().find_map(source_for) {
            return Some(source);
        }
    }
    None
}

/// The address from which the kernel would send to this one, if machines elsewhere may know it.
pub(super) fn source_for(address: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // For UDP this only chooses a route.
    socket.connect(address).ok()?;
    let source = socket.local_addr().ok()?.ip();
    let has_zone = matches!(source, IpAddr::V6(ip) if ip.is_unicast_link_local());
    (!source.is_loopback() && !source.is_unspecified() && !has_zone).then_some(source)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    use super::super::black_hole::black_hole;
    use super::*;

    fn listener(last: u8) -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, last), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        (listener, address)
    }

    /// An address at which nobody listens.
    fn closed(last: u8) -> SocketAddr {
        listener(last).1
    }

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// Connects to the first address that accepts, and returns it.
    async fn reached(addresses: &[SocketAddr], deadline: Instant) -> Result<SocketAddr, Vec<Met>> {
        let connected = async |stream: TcpStream| Ok(stream.peer_addr().unwrap());
        race(addresses, deadline, TcpStream::connect, connected).await
    }

    #[tokio::test]
    async fn an_address_that_swallows_packets_costs_one_stagger() {
        let (hole, (_listener, address)) = (black_hole(2), listener(3));
        let start = Instant::now();
        assert_eq!(reached(&[hole.address, address], in_a_minute()).await.unwrap(), address);
        // The kernel itself would give the first address two minutes. Its share of the time would be thirty seconds.
        assert!(start.elapsed() >= STAGGER && start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn a_refused_address_costs_nothing() {
        let (_listener, address) = listener(3);
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            assert_eq!(reached(&[closed(2), closed(4), address], in_a_minute()).await.unwrap(), address);
            fastest = fastest.min(start.elapsed());
        }
        assert!(fastest < STAGGER, "{fastest:?}");
    }

    #[tokio::test]
    async fn the_first_address_is_preferred_and_the_others_left_alone() {
        let ((_first, first), (second, other)) = (listener(2), listener(3));
        assert_eq!(reached(&[first, other], in_a_minute()).await.unwrap(), first);
        assert_eq!(second.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn an_address_that_is_silent_once_connected_gets_its_share_of_the_time() {
        let ((_silent, silent), (talks, address)) = (listener(2), listener(3));
        let talks = tokio::net::TcpListener::from_std(talks).unwrap();
        let talking = tokio::spawn(async move {
            let (stream, _) = talks.accept().await.unwrap();
            stream.try_write(b"!").unwrap();
            stream
        });
        let responds = async |mut stream: TcpStream| match stream.read_u8().await {
            Ok(_) => Ok(stream.peer_addr().unwrap()),
            Err(error) => Err(error.to_string()),
        };
        let deadline = Instant::now() + Duration::from_secs(2);
        let first = race(&[silent, address], deadline, TcpStream::connect, responds).await.unwrap();
        assert_eq!(first, address);
        talking.await.unwrap();
    }

    #[tokio::test]
    async fn the_error_says_what_each_address_met() {
        let (hole, closed) = (black_hole(2), closed(3));
        let deadline = Instant::now() + Duration::from_millis(300);
        let met = reached(&[hole.address, closed], deadline).await.unwrap_err();
        assert_eq!((met.len(), met[0].is_refusal(), met[1].is_silent()), (2, true, true));
        let text = to_text("name", &met);
        assert!(text.starts_with(&format!("{closed}: Connection refused")), "{text}");
        assert!(text.contains(&format!("; {}: no answer within 3", hole.address)), "{text}");
        assert_eq!(to_text("name", &reached(&[], deadline).await.unwrap_err()), "`name` has no address");
        // With a limit of zero each is still tried.
        let (_listener, address) = listener(4);
        assert_eq!(reached(&[hole.address, address], Instant::now()).await.unwrap(), address);
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

    #[tokio::test]
    async fn hosts_on_loopback_and_names_of_nobody_have_no_address() {
        let hosts = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 2379)).collect::<Vec<_>>();
        let deadline = Instant::now() + Duration::from_secs(1);
        assert_eq!(source_towards(&hosts(&["127.0.0.1", "::1", "no-such-host.invalid"]), deadline).await, None);
        // TEST-NET-1 of RFC 5737. A machine without a route to other networks has no address towards it.
        if let Some(source) = source_towards(&hosts(&["127.0.0.1", "192.0.2.1"]), deadline).await {
            assert!(crate::net::local::is_local(source), "{source}");
        }
    }
}
