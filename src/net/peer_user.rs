//! Which user is at the other end of a connection that comes from this machine.
//!
//! Owns asking the kernel: by `NETLINK_SOCK_DIAG`, which finds one socket in microseconds, or by `/proc/net/tcp` where that is not
//! available (gVisor, a kernel without `tcp_diag`). Leaves to its caller what follows from the answer.
//! `docs/decisions/0084-a-worker-store-refuses-other-users-of-its-machine.md` has the traps.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, netlink, recv, send};

use super::local::is_here;
use super::proc_net::{Row, TABLES};
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
    /// It is open, but no socket of this network namespace has these addresses: it is in another one, or the addresses are
    /// translated on the way.
    NotFound,
    /// The system does not tell: neither `NETLINK_SOCK_DIAG` nor `/proc/net/tcp` can be used.
    Untold,
}

/// Looks users up. Holds a netlink socket from the first connection on that comes from this machine.
#[derive(Debug, Default)]
pub struct PeerUsers {
    way: Way,
    sequence: u32,
}

#[derive(Debug, Default)]
enum Way {
    #[default]
    Untried,
    Netlink(OwnedFd),
    Proc,
}

impl PeerUsers {
    /// The user of the other end of `stream`, a connected TCP socket with these addresses.
    pub fn find(&mut self, stream: impl AsFd, local: SocketAddr, peer: SocketAddr) -> PeerUser {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let (here, there) = (canonical(local), canonical(peer));
        if !is_here(peer, local) {
            return PeerUser::Elsewhere;
        }
        let zone = zone(local);
        let its = Ends { local: there, remote: here };
        if let Way::Untried = self.way {
            // A kernel that cannot tell about TCP sockets finds none, so the first question is one whose answer is known.
            let own = Ends { local: here, remote: there };
            self.way = netlink_socket().map_or(Way::Proc, Way::Netlink);
            match self.ask(own, zone) {
                Ok(Some(_)) => {}
                // Or not known: neither end of a connection that was reset exists any more. The next connection shows the way.
                Ok(None) if is_over(&stream) => {
                    self.way = Way::Untried;
                    return PeerUser::Gone;
                }
                _ => self.way = Way::Proc,
            }
        }
        match self.search(its, zone, || is_over(&stream)) {
            Ok(Some(Some(uid))) => PeerUser::Uid(uid),
            Ok(Some(None)) => PeerUser::Gone,
            // Asked after the search: it may have been closed meanwhile.
            Ok(None) if is_over(&stream) => PeerUser::Gone,
            Ok(None) => PeerUser::NotFound,
            Err(_) => PeerUser::Untold,
        }
    }

    /// The owner of a socket, if there is such a socket. `is_over`: there cannot be one any more.
    fn search(&mut self, of: Ends, zone: u32, is_over: impl Fn() -> bool) -> io::Result<Option<Owner>> {
        let found = match self.ask(of, zone) {
            Err(_) => return search_proc(of),
            Ok(None) if !is_over() => self.search_bound(of)?,
            Ok(found) => found,
        };
        Ok(found)
    }

    /// The same for a socket that is bound to an interface (`SO_BINDTODEVICE`, which every user may do). The kernel finds it only by
    /// that interface.
    fn search_bound(&mut self, of: Ends) -> io::Result<Option<Owner>> {
        let Way::Netlink(socket) = &self.way else { return Ok(None) };
        for interface in interfaces(socket)? {
            if let Some(owner) = self.ask(of, interface)? {
                return Ok(Some(owner));
            }
        }
        Ok(None)
    }

    fn ask(&mut self, of: Ends, interface: u32) -> io::Result<Option<Owner>> {
        let Way::Netlink(socket) = &self.way else { return search_proc(of) };
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

/// The user of a socket, unless no process has it any more.
type Owner = Option<u32>;

/// Answers to earlier requests that may come first, if their reading failed.
const EARLIER_ANSWERS: usize = 8;

/// Interfaces that are tried for a socket that is bound to one. Only the machine's administrator can add one.
const INTERFACES: usize = 4096;

/// The interface of a link-local address.
fn zone(address: SocketAddr) -> u32 {
    if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 }
}

fn netlink_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))?)
}

/// The indices of this network namespace's interfaces.
fn interfaces(socket: &OwnedFd) -> io::Result<Vec<u32>> {
    let table = BufReader::new(File::open("/proc/net/dev")?);
    let names = table.lines().skip(2).map_while(Result::ok).take(INTERFACES);
    Ok(names.filter_map(|line| netdevice::name_to_index(socket, line.split_once(':')?.0.trim()).ok()).collect())
}

/// The same by the kernel's tables. Takes as long as the machine has sockets.
fn search_proc(of: Ends) -> io::Result<Option<Owner>> {
    let mut is_told = false;
    for path in TABLES {
        let Ok(table) = File::open(path) else { continue };
        is_told = true;
        for line in BufReader::new(table).lines() {
            if let Some(row) = Row::parse(&line?)
                && is_same(row.local, of.local)
                && is_same(row.remote, of.remote)
            {
                return Ok(Some((row.inode != 0).then_some(row.uid)));
            }
        }
    }
    if is_told { Ok(None) } else { Err(Errno::NOENT.into()) }
}

fn is_same(row: SocketAddr, canonical: SocketAddr) -> bool {
    row.port() == canonical.port() && row.ip().to_canonical() == canonical.ip()
}

/// Whether the other end of a connection has been closed, or was reset.
fn is_over(stream: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // `HUP` and `ERR` are always told.
    poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests;
