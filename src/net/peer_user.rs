//! Which user is at the other end of a connection that comes from this machine.
//!
//! Owns asking the kernel: by `NETLINK_SOCK_DIAG`, which finds one socket in microseconds, or by `/proc/net/tcp` where that is not
//! available (gVisor, a kernel without `tcp_diag`). Leaves to its caller what follows from the answer.
//! `docs/decisions/0084-a-worker-store-refuses-other-users-of-its-machine.md` has the traps.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, netlink, recv, send};

use super::local::{is_exhausted, is_here};
use super::proc_net::{Row, SYN_SENT, TABLES};
use sock_diag::{Answer, Ends};

mod sock_diag;

/// The user of the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerUser {
    /// It is on another machine.
    Elsewhere,
    /// The user whose process opened it.
    Uid(u32),
    /// It has been closed, so that it belongs to nobody any more.
    Gone,
    /// This end is open, but no socket of this network namespace has these addresses: the other end is in another namespace, its
    /// address is translated on the way, or it has been closed to this end.
    NotFound,
    /// The system does not answer, for want of memory or of a descriptor.
    Unanswered,
}

/// Looks users up. Holds the descriptors for that, so that it also works when no descriptor is free.
#[derive(Debug)]
pub struct PeerUsers {
    way: Way,
    sequence: u32,
}

#[derive(Debug)]
enum Way {
    Netlink(OwnedFd),
    /// [`TABLES`], which are read anew for each question.
    Proc(Vec<File>),
}

impl PeerUsers {
    /// Choose the way in which the kernel names the user of a connection of this process's own. Its user is `own`. `near`: an address
    /// at which the server listens. `None`: the kernel does not name even that user.
    ///
    /// # Errors
    /// A descriptor, or memory, is not free.
    pub fn open(near: SocketAddr, own: u32) -> io::Result<Option<PeerUsers>> {
        let connection = found(own_connection(near))?;
        let open: [fn() -> io::Result<Way>; 2] = [Way::netlink, Way::proc];
        for open in open {
            let Some(way) = found(open())? else { continue };
            let mut users = PeerUsers { way, sequence: 0 };
            // Without a connection of our own nobody can connect from this machine either, as far as is known.
            let names = connection.as_ref().map_or(Ok(Some(true)), |(_listener, own_end)| {
                let ends = Ends { local: canonical(own_end.local_addr()?), remote: canonical(own_end.peer_addr()?) };
                found(users.ask(ends, zone(near)).map(|owner| owner == Some(Some(own))))
            });
            if names?.is_some_and(|names| names) {
                return Ok(Some(users));
            }
        }
        Ok(None)
    }

    /// The user of the other end of `stream`, a connected TCP socket with these addresses.
    pub fn find(&mut self, stream: impl AsFd, local: SocketAddr, peer: SocketAddr) -> PeerUser {
        match is_here(peer, local) {
            Ok(true) => {}
            Ok(false) => return PeerUser::Elsewhere,
            Err(_) => return PeerUser::Unanswered,
        }
        let its = Ends { local: canonical(peer), remote: canonical(local) };
        let found = self.search(its, zone(local), || is_over(&stream));
        // Asked after the search. Whoever has the address now may be another than the one that has reset this connection.
        if is_reset(&stream) {
            return PeerUser::Gone;
        }
        match found {
            Ok(Some(Some(uid))) => PeerUser::Uid(uid),
            Ok(Some(None)) => PeerUser::Gone,
            // It may have been closed meanwhile.
            Ok(None) if is_over(&stream) => PeerUser::Gone,
            Ok(None) => PeerUser::NotFound,
            Err(_) => PeerUser::Unanswered,
        }
    }

    /// The owner of a socket, if there is such a socket. `is_over`: there cannot be one any more.
    fn search(&mut self, of: Ends, zone: u32, is_over: impl Fn() -> bool) -> io::Result<Option<Owner>> {
        match self.ask(of, zone)? {
            None if !is_over() => self.search_again(of),
            found => Ok(found),
        }
    }

    /// Netlink finds a socket that is bound to an interface (`SO_BINDTODEVICE`, which every user may do) only by that interface. A
    /// table that changes while it is read may lack one of its sockets.
    fn search_again(&mut self, of: Ends) -> io::Result<Option<Owner>> {
        let socket = match &self.way {
            Way::Netlink(socket) => socket,
            Way::Proc(tables) => return search_proc(tables, of),
        };
        for interface in interfaces(socket)? {
            if let Some(owner) = self.ask(of, interface)? {
                return Ok(Some(owner));
            }
        }
        Ok(None)
    }

    fn ask(&mut self, of: Ends, interface: u32) -> io::Result<Option<Owner>> {
        let socket = match &self.way {
            Way::Netlink(socket) => socket,
            Way::Proc(tables) => return search_proc(tables, of),
        };
        self.sequence = self.sequence.wrapping_add(1);
        send(socket, &sock_diag::request(self.sequence, of, interface), SendFlags::empty())?;
        for _ in 0..EARLIER_ANSWERS {
            let mut bytes = [0; sock_diag::ANSWER];
            // The kernel has answered before `send` returns. The rest of an answer is cut off.
            let (count, _) = recv(socket, &mut bytes, RecvFlags::empty())?;
            match sock_diag::answer(&bytes[..count], self.sequence, of) {
                Answer::Socket(owner) => return Ok(Some(owner)),
                Answer::Missing => return Ok(None),
                Answer::Earlier => {}
                Answer::Unusable => break,
            }
        }
        Err(Errno::BADMSG.into())
    }
}

impl Way {
    fn netlink() -> io::Result<Way> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))?;
        Ok(Way::Netlink(socket))
    }

    fn proc() -> io::Result<Way> {
        let mut tables = Vec::new();
        for path in TABLES {
            tables.extend(found(File::open(path))?);
        }
        if tables.is_empty() { Err(Errno::NOENT.into()) } else { Ok(Way::Proc(tables)) }
    }
}

/// `None` if it cannot be had on this machine.
///
/// # Errors
/// It cannot be had at this moment.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_exhausted(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// A connection of this process's own. Nobody accepts it: the end that is looked up is the one that connects.
fn own_connection(near: SocketAddr) -> io::Result<(TcpListener, TcpStream)> {
    let mut at = near;
    at.set_port(0);
    if at.ip().is_unspecified() {
        at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    }
    let listener = TcpListener::bind(at)?;
    let stream = TcpStream::connect_timeout(&listener.local_addr()?, OWN_CONNECTION_LIMIT)?;
    Ok((listener, stream))
}

/// The kernel connects two sockets of a machine at once, unless a filter drops what they send.
const OWN_CONNECTION_LIMIT: Duration = Duration::from_secs(1);

/// The user of a socket, unless no process has it any more.
type Owner = Option<u32>;

/// Answers to earlier requests that may come first, if their reading failed.
const EARLIER_ANSWERS: usize = 8;

/// Interfaces that are tried for a socket that is bound to one. Only the machine's administrator can add one.
const INTERFACES: usize = 4096;

/// An IPv4 address as such, also if it is mapped into IPv6. Without its zone.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The interface of a link-local address.
fn zone(address: SocketAddr) -> u32 {
    if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 }
}

/// The indices of this network namespace's interfaces.
fn interfaces(socket: &OwnedFd) -> io::Result<Vec<u32>> {
    let table = BufReader::new(File::open("/proc/net/dev")?);
    let names = table.lines().skip(2).map_while(Result::ok).take(INTERFACES);
    Ok(names.filter_map(|line| netdevice::name_to_index(socket, line.split_once(':')?.0.trim()).ok()).collect())
}

/// The same by the kernel's tables. Takes as long as the machine has sockets.
fn search_proc(tables: &[File], of: Ends) -> io::Result<Option<Owner>> {
    for mut table in tables {
        table.rewind()?;
        for line in BufReader::new(table).lines() {
            if let Some(row) = Row::parse(&line?)
                && is_same(row.local, of.local)
                && is_same(row.remote, of.remote)
                && row.state != SYN_SENT
            {
                return Ok(Some((row.inode != 0).then_some(row.uid)));
            }
        }
    }
    Ok(None)
}

fn is_same(row: SocketAddr, canonical: SocketAddr) -> bool {
    row.port() == canonical.port() && row.ip().to_canonical() == canonical.ip()
}

/// Whether the other end of a connection has been closed, or was reset.
fn is_over(stream: &impl AsFd) -> bool {
    shows(stream, PollFlags::RDHUP)
}

/// Whether a connection was reset. One whose other end has only closed its sending side was not.
fn is_reset(stream: &impl AsFd) -> bool {
    shows(stream, PollFlags::empty())
}

/// Whether one of these is ready at once. `HUP` and `ERR` are always among them.
fn shows(stream: &impl AsFd, what: PollFlags) -> bool {
    let mut polled = [PollFd::new(stream, what)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests;
