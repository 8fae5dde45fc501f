//! Connecting to the coordinator at the first of its addresses that answers.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};

use crate::net::connect::{Met, Obstacle, ResolveError, is_refusal, race, resolve, to_text};
use crate::secure::{Halves, Protection};

/// Time limit of one attempt to connect to the coordinator: one of its addresses, from one address of this machine.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of all attempts. An address is tried twice if it cannot be reached from the requested source address.
const DIAL_TIMEOUT: Duration = Duration::from_secs(15);

/// No connection could be opened.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::rendezvous) struct DialError {
    pub text: String,
    /// The host answered that no process listens, or ended the connection at once.
    pub refused: bool,
    /// Nobody listens at any of the addresses: all were refused, and none was reset, silent or unreachable.
    pub absent: bool,
    /// Somebody accepted the connection, and is not proven to be the job's coordinator: or this node is not, to it.
    pub unproven: bool,
    /// This process has reached its limit on open files.
    pub out_of_descriptors: bool,
}

/// A connection to the coordinator: a bare one, or one that carries the session.
#[derive(Debug)]
pub(in crate::rendezvous) struct Dialled<L = Halves> {
    pub link: L,
    /// Whether it comes from the requested source address, if there is one.
    pub from_source: bool,
    /// The address of this machine that it comes from.
    pub local: Option<IpAddr>,
    /// Where it leads.
    pub peer: Option<SocketAddr>,
}

/// Connect to the first of the host's addresses that answers, or to `at` if that is given. The connection comes from `source` if that is an address of this
/// machine from which the host can be reached. If it is protected, both ends have proven themselves for the run of this id.
/// It ends if what is sent has not arrived for `unheard`, or when the kernel gives up.
pub(in crate::rendezvous) async fn dial(
    host: String,
    port: u16,
    at: Option<SocketAddr>,
    source: Option<IpAddr>,
    secured: Option<(Arc<Protection>, String)>,
    unheard: Option<Duration>,
) -> Result<Dialled, DialError> {
    let deadline = Instant::now() + DIAL_TIMEOUT;
    let addresses = match at {
        Some(address) => Ok(vec![address]),
        None => resolve(&host, port, deadline).await,
    };
    match addresses {
        Ok(addresses) => {
            let secured = secured.as_ref().map(|(protection, run_id)| (protection.as_ref(), run_id.as_str()));
            let open = async |bare: Dialled<TcpStream>| {
                let local = bare.link.local_addr().ok().map(|local| local.ip());
                let peer = bare.link.peer_addr().ok();
                if unheard.is_some() {
                    let set = SockRef::from(&bare.link).set_tcp_user_timeout(unheard);
                    set.map_err(|error| error.to_string())?;
                }
                let link = Halves::begin(bare.link, &host, secured).await?;
                Ok(Dialled { link, from_source: bare.from_source, local, peer })
            };
            dial_any(&host, &addresses, source, deadline, open).await
        }
        Err(error) => {
            let out_of_descriptors = matches!(&error, ResolveError::Failed { source, .. } if lacks_descriptors(source));
            Err(DialError {
                text: error.to_string(),
                refused: false,
                absent: false,
                unproven: false,
                out_of_descriptors,
            })
        }
    }
}

async fn dial_any<L, O: Future<Output = Result<Dialled<L>, String>>>(
    host: &str,
    addresses: &[SocketAddr],
    source: Option<IpAddr>,
    deadline: Instant,
    open: impl Fn(Dialled<TcpStream>) -> O,
) -> Result<Dialled<L>, DialError> {
    let met = match race(addresses, deadline, |address| dial_one(address, source), open).await {
        Ok(dialled) => return Ok(dialled),
        Err(met) => met,
    };
    // If one of several addresses is silent, the coordinator may be at that one.
    let refused = met.iter().any(Met::is_refusal) && !met.iter().any(Met::is_silent);
    let out_of_descriptors =
        met.iter().any(|met| matches!(&met.obstacle, Obstacle::Failed(error) if lacks_descriptors(error)));
    let absent = !met.is_empty() && met.iter().all(Met::is_absence);
    let unproven = met.iter().any(|met| matches!(met.obstacle, Obstacle::Unusable(_)));
    Err(DialError { text: to_text(host, &met), refused, absent, unproven, out_of_descriptors })
}

async fn dial_one(address: SocketAddr, source: Option<IpAddr>) -> io::Result<Dialled<TcpStream>> {
    if let Some(source) = source.filter(|source| source.is_ipv4() == address.is_ipv4()) {
        match within_limit(connect_from(source, address)).await {
            Ok(stream) => return Ok(Dialled { link: stream, from_source: true, local: None, peer: None }),
            Err(error) if is_refusal(&error) => return Err(error),
            // The source is another machine's address, or no route leads back to it. Other nodes may still use it.
            Err(_) => {
                let stream = within_limit(TcpStream::connect(address)).await?;
                return Ok(Dialled { link: stream, from_source: false, local: None, peer: None });
            }
        }
    }
    let stream = within_limit(TcpStream::connect(address)).await?;
    Ok(Dialled { link: stream, from_source: true, local: None, peer: None })
}

async fn connect_from(source: IpAddr, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if source.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind((source, 0).into())?;
    socket.connect(address).await
}

async fn within_limit(connecting: impl Future<Output = io::Result<TcpStream>>) -> io::Result<TcpStream> {
    timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn lacks_descriptors(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::MFILE)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::net::black_hole::black_hole;
    use crate::net::connect::STAGGER;

    const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn listener(last: u8) -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 0, last), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    async fn bare(dialled: Dialled<TcpStream>) -> Result<Dialled<TcpStream>, String> {
        Ok(dialled)
    }

    fn deadline() -> Instant {
        Instant::now() + DIAL_TIMEOUT
    }

    #[tokio::test]
    async fn an_address_that_never_answers_does_not_hold_up_one_that_does() {
        let (hole, (_listener, coordinator)) = (black_hole(7), listener(8));
        let began = Instant::now();
        let dialled = dial_any("name", &[hole.address, coordinator], None, deadline(), bare).await.unwrap();
        assert_eq!(dialled.link.peer_addr().unwrap(), coordinator);
        // If the addresses were tried in turn, the first would take its whole time.
        assert!(began.elapsed() >= STAGGER && began.elapsed() < CONNECT_TIMEOUT, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_connection_comes_from_the_address_that_was_asked_for_if_it_can() {
        let (_listener, coordinator) = listener(8);
        let own = IpAddr::from([127, 0, 0, 9]);
        let dialled = dial_any("name", &[coordinator], Some(own), deadline(), bare).await.unwrap();
        assert_eq!((dialled.link.local_addr().unwrap().ip(), dialled.from_source), (own, true));
        // TEST-NET-1 of RFC 5737: no machine has it.
        let others = IpAddr::from([192, 0, 2, 1]);
        let dialled = dial_any("name", &[coordinator], Some(others), deadline(), bare).await.unwrap();
        assert!(dialled.link.local_addr().unwrap().ip().is_loopback() && !dialled.from_source);
        // An address of another family than the coordinator's cannot be the source.
        let dialled = dial_any("name", &[coordinator], Some("::1".parse().unwrap()), deadline(), bare).await.unwrap();
        assert!(dialled.from_source);
    }

    #[tokio::test]
    async fn a_refusal_counts_unless_another_address_is_silent() {
        let (_, closed) = listener(8);
        let error = dial_any("name", &[closed], Some(LOCALHOST), deadline(), bare).await.unwrap_err();
        assert!(
            error.refused && error.absent && error.text.starts_with(&format!("{closed}: Connection refused")),
            "{error:?}"
        );
        let hole = black_hole(7);
        let soon = Instant::now() + Duration::from_millis(300);
        let error = dial_any("name", &[closed, hole.address], None, soon, bare).await.unwrap_err();
        assert!(!error.refused && !error.absent && error.text.contains("no answer within"), "{error:?}");
        let error = dial_any("name", &[], None, soon, bare).await.unwrap_err();
        assert_eq!((error.refused, error.text.as_str()), (false, "`name` has no address"));
        let error = dial("no-such-host.invalid".to_owned(), 1, None, None, None, None).await.unwrap_err();
        assert!(!error.refused && error.text.starts_with("cannot resolve `no-such-host.invalid`"), "{error:?}");
    }

    /// As of a server whose queue is full, or of a proxy without a server behind it.
    #[test]
    fn a_reset_does_not_prove_that_nobody_listens() {
        let met =
            |kind: io::ErrorKind| Met { address: ([127, 0, 0, 1], 1).into(), obstacle: Obstacle::Failed(kind.into()) };
        let (refused, reset) = (met(io::ErrorKind::ConnectionRefused), met(io::ErrorKind::ConnectionReset));
        assert!(refused.is_refusal() && refused.is_absence());
        assert!(reset.is_refusal() && !reset.is_absence() && !met(io::ErrorKind::HostUnreachable).is_absence());
    }
}
