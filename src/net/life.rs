//! A port by which it is known whether a process lives: once the process has ended, the kernel of its machine refuses connections to it.
//!
//! The port is of no other use, and who connects is sent away. Only a refusal says something. Silence may be a firewall's or a cut's, and
//! a reset that of a process that ends. A process that was forked from this one keeps the port open, so nothing is known of this one's end.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

/// Connections that wait to be sent away. The kernel drops more.
const BACKLOG: i32 = 128;
/// Pause between two that are sent away, so that nobody keeps this process busy.
const PAUSE: Duration = Duration::from_millis(1);
/// Time for a connection to be accepted or refused.
const KNOCK_LIMIT: Duration = Duration::from_secs(1);
/// How often it is tried at first: a process ends its sockets up to 0.1 s after its first connection.
const EVERY: Duration = Duration::from_millis(10);
/// For how long it is tried so often. Then the pauses double.
const OFTEN_FOR: Duration = Duration::from_millis(200);
/// For how long it is tried.
const TRY_FOR: Duration = Duration::from_secs(10);

/// The port of this process. Dropping it closes it.
#[derive(Debug)]
pub struct LifePort {
    at: SocketAddr,
    accepting: AbortHandle,
}

impl LifePort {
    /// Listen on this address of this machine, at a port of the system's choice. Needs a tokio runtime.
    ///
    /// # Errors
    /// It is no address of this machine, or a socket is refused.
    pub fn open(ip: IpAddr) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address((ip, 0).into()), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.bind(&SocketAddr::from((ip, 0)).into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from_std(socket.into())?;
        let at = listener.local_addr()?;
        let accepting = tokio::spawn(async move {
            loop {
                drop(listener.accept().await);
                sleep(PAUSE).await;
            }
        });
        Ok(Self { at, accepting: accepting.abort_handle() })
    }

    /// Its address.
    pub fn at(&self) -> SocketAddr {
        self.at
    }
}

impl Drop for LifePort {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// How an attempt to connect has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knocked {
    Accepted,
    Refused,
    /// Nothing is known.
    Other,
}

async fn knock(at: SocketAddr) -> Knocked {
    match timeout(KNOCK_LIMIT, TcpStream::connect(at)).await {
        Ok(Ok(_)) => Knocked::Accepted,
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Knocked::Refused,
        Ok(Err(_)) | Err(_) => Knocked::Other,
    }
}

/// Whether a port of a process that lives is reached from here: else a refusal would be a firewall's.
pub async fn is_reached(at: SocketAddr) -> bool {
    knock(at).await == Knocked::Accepted
}

/// Wait until a process that had this port has ended. False if that is not known after a while.
pub async fn has_ended(at: SocketAddr) -> bool {
    let began = Instant::now();
    let mut pause = EVERY;
    while began.elapsed() < TRY_FOR {
        if knock(at).await == Knocked::Refused {
            return true;
        }
        sleep(pause).await;
        if began.elapsed() > OFTEN_FOR {
            pause *= 2;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn a_port_is_refused_once_it_is_closed() {
        let life = LifePort::open(Ipv4Addr::LOCALHOST.into()).unwrap();
        let at = life.at();
        for _ in 0..100 {
            assert!(is_reached(at).await, "also if many knock");
        }
        let ended = tokio::spawn(has_ended(at));
        drop(life);
        assert!(ended.await.unwrap());
        assert!(!is_reached(at).await);
    }

    /// As a process does that was forked: it has the same socket.
    #[tokio::test]
    async fn nothing_is_known_while_another_process_holds_the_port() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        assert_eq!(knock(at).await, Knocked::Accepted);
    }

    #[tokio::test]
    async fn an_address_of_another_machine_is_an_error() {
        assert!(LifePort::open(Ipv4Addr::new(192, 0, 2, 1).into()).is_err());
    }
}
