//! The TCP sockets that a worker's collectives wait for, and how they are freed.
//!
//! gloo cannot abort a collective. But the collective fails at once when its connections are shut down, which another thread can do.
//! Listening sockets are spared: gloo ends the process if one of them fails.
//!
//! gloo does not notice the end of a connection in the middle of a message that it receives, and the collective waits for ever. News of
//! a failure come within a millisecond, when the others still send to one another. So the sockets are shut down once nothing passes on
//! them any more: each waits for the one that has failed, or for one that does.
//!
//! gloo does not say which sockets are its own. They are those that were connected while it made a process group, and that it watches
//! through an epoll set, with its listening socket. A store's client and a user's connections are not in such a set.
//! Facts: `gloo/transport/tcp` (`loop.cc`, `pair.cc`, `listener.cc`), `proc_pid_fdinfo(5)`, `shutdown(2)`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{Shutdown, SocketType, getpeername, shutdown};

/// For how long nothing passes on the sockets before they are shut down.
const QUIET: Duration = Duration::from_millis(10);
/// How long that is waited for. They are shut down then in any case.
pub(super) const QUIET_LIMIT: Duration = Duration::from_secs(1);
/// How often that is looked at.
pub(super) const QUIET_INTERVAL: Duration = Duration::from_millis(4);
/// How often new sockets are looked for while a process group is made in a world in which a peer has failed.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Sockets by inode, which no two open sockets share.
type Inodes = BTreeMap<u64, Socket>;

/// A connected TCP socket.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Socket {
    fd: RawFd,
    peer: SocketAddr,
}

/// The sockets to shut down when a peer fails.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// The process groups that are being made, by the numbers of their marks: the sockets that were connected before.
    marks: BTreeMap<u64, BTreeSet<u64>>,
    last_mark: u64,
    guarded: Inodes,
    /// Since when they are to be shut down.
    failed_at: Option<Instant>,
}

impl Sockets {
    /// A process group is about to be made: sockets that are connected from now on may be its own. Returns the number of this mark.
    pub(super) fn mark(&mut self) -> io::Result<u64> {
        let connected = Open::look()?.connected();
        self.last_mark += 1;
        self.marks.insert(self.last_mark, connected.into_keys().collect());
        Ok(self.last_mark)
    }

    /// The process group of this mark was made, or could not be made. Guards its sockets, and the connections to the store at this port
    /// that are as new. Returns the number of its sockets: none if all were released meanwhile.
    pub(super) fn guard_new(&mut self, mark: u64, store_port: Option<u16>) -> io::Result<usize> {
        let Some(before) = self.marks.remove(&mark) else { return Ok(0) };
        let open = Open::look()?;
        let mut new = open.connected();
        self.guarded.retain(|inode, _| new.contains_key(inode)); // others are closed
        new.retain(|inode, _| !before.contains(inode));
        // A kernel may not show what is in an epoll set.
        let own = open.watched_with_listeners().unwrap_or_else(|| new.keys().copied().collect());
        Ok(self.guard(new, &own, store_port))
    }

    /// Guards the sockets of process groups that exist already, which are those that are watched together with a listening socket, and
    /// the connections to the store at this port. Returns the number of the groups' sockets.
    pub(super) fn guard_loops(&mut self, store_port: Option<u16>) -> io::Result<usize> {
        let open = Open::look()?;
        Ok(self.guard(open.connected(), &open.watched_with_listeners().unwrap_or_default(), store_port))
    }

    fn guard(&mut self, mut sockets: Inodes, own: &BTreeSet<u64>, store_port: Option<u16>) -> usize {
        let count = sockets.keys().filter(|inode| own.contains(inode)).count();
        sockets.retain(|inode, socket| own.contains(inode) || Some(socket.peer.port()) == store_port);
        self.guarded.extend(sockets);
        count
    }

    /// The worker leaves its world: all process groups are destroyed.
    pub(super) fn release(&mut self) {
        self.marks.clear();
        self.guarded.clear();
        self.failed_at = None;
    }

    /// Whether nothing has passed on the sockets for a while.
    pub(super) fn is_quiet(&self) -> bool {
        !self.guarded.iter().any(|(inode, socket)| is_busy(*inode, socket))
    }

    /// Shuts the sockets down. Returns whether any were, and when another call is needed: something still passes on them, or a process
    /// group is being made.
    pub(super) fn shut_down(&mut self, now: Instant) -> (bool, Option<Duration>) {
        let failed_at = *self.failed_at.get_or_insert(now);
        let waited = now.saturating_duration_since(failed_at);
        if waited < QUIET_LIMIT && !self.is_quiet() {
            return (false, Some(QUIET_INTERVAL));
        }
        let guarded = std::mem::take(&mut self.guarded);
        guarded.iter().for_each(|(inode, socket)| shut(*inode, socket));
        if self.marks.is_empty() {
            return (!guarded.is_empty(), None);
        }
        // Whatever fails here, such as a want of descriptors, may succeed in the next call.
        for (inode, socket) in Open::look().map(|open| open.connected()).unwrap_or_default() {
            if self.marks.values().any(|before| !before.contains(&inode)) {
                shut(inode, &socket);
            }
        }
        (!guarded.is_empty(), Some(LOOK_INTERVAL))
    }
}

/// Whether something has passed on a socket a moment ago.
fn is_busy(inode: u64, socket: &Socket) -> bool {
    let Some(info) = duplicate(socket.fd, inode).and_then(|same| tcp_info(&same)) else { return false };
    u128::from(info.tcpi_last_data_sent.min(info.tcpi_last_data_recv)) < QUIET.as_millis()
}

/// What `tcp(7)` says of a socket.
fn tcp_info(socket: &OwnedFd) -> Option<libc::tcp_info> {
    // SAFETY: numbers, of which all bits may be zero.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most so many bytes into it.
    let got = unsafe {
        let into = (&raw mut info).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &raw mut bytes)
    };
    (got == 0).then_some(info)
}

/// Shuts a socket down, unless it was closed meanwhile and its descriptor is another's.
fn shut(inode: u64, socket: &Socket) {
    // The duplicate is the same socket until it is closed, so nothing changes between the comparison and the shutdown.
    let Some(same) = duplicate(socket.fd, inode) else { return };
    if peer(&same) == Some(socket.peer) {
        // An error means that the connection has ended already.
        let _ = shutdown(&same, Shutdown::Both);
    }
}

/// The descriptors of this process that are sockets or epoll sets.
struct Open {
    sockets: BTreeMap<RawFd, u64>,
    epoll_sets: Vec<RawFd>,
}

impl Open {
    fn look() -> io::Result<Open> {
        let mut open = Open { sockets: BTreeMap::new(), epoll_sets: Vec::new() };
        for entry in fs::read_dir("/proc/self/fd")? {
            let entry = entry?;
            let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // It may have been closed meanwhile.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy();
            if let Some(inode) = target.strip_prefix("socket:[").and_then(|it| it.strip_suffix(']')?.parse().ok()) {
                open.sockets.insert(fd, inode);
            } else if target == "anon_inode:[eventpoll]" {
                open.epoll_sets.push(fd);
            }
        }
        Ok(open)
    }

    /// The connected TCP sockets.
    fn connected(&self) -> Inodes {
        let connected = |(fd, inode): (&RawFd, &u64)| {
            let peer = peer(&duplicate(*fd, *inode)?)?;
            Some((*inode, Socket { fd: *fd, peer }))
        };
        self.sockets.iter().filter_map(connected).collect()
    }

    /// The sockets that are in an epoll set with a listening TCP socket. `None`: the kernel does not show what is in these sets.
    ///
    /// gloo has epoll hand out the address of an object for each socket. Most servers have it hand out the descriptor, and are no groups.
    fn watched_with_listeners(&self) -> Option<BTreeSet<u64>> {
        let members =
            |set: &RawFd| members(&fs::read_to_string(format!("/proc/self/fdinfo/{set}")).unwrap_or_default());
        let sets: Vec<_> = self.epoll_sets.iter().map(members).filter(|set| !set.is_empty()).collect();
        let is_loop = |set: &&Vec<Member>| {
            set.iter().any(|member| {
                let inode = self.sockets.get(&member.fd).filter(|_| !member.is_by_descriptor);
                inode.and_then(|inode| duplicate(member.fd, *inode)).is_some_and(|socket| is_listener(&socket))
            })
        };
        let watched = sets.iter().filter(is_loop).flatten().filter_map(|member| self.sockets.get(&member.fd).copied());
        (!sets.is_empty()).then(|| watched.collect())
    }
}

/// A descriptor in an epoll set.
#[derive(Debug, PartialEq, Eq)]
struct Member {
    fd: RawFd,
    /// Whether epoll hands out the descriptor itself, in the lower half of its word.
    is_by_descriptor: bool,
}

/// The descriptors in an epoll set, by its `fdinfo`: lines such as
/// `tfd:        9 events:       19 data:         5621d767f410 pos:0 ...`.
fn members(fdinfo: &str) -> Vec<Member> {
    let member = |line: &str| {
        let mut fields = line.strip_prefix("tfd:")?.split_whitespace();
        let fd: RawFd = fields.next()?.parse().ok()?;
        let data = fields.skip_while(|word| *word != "data:").nth(1);
        let data = data.and_then(|data| u64::from_str_radix(data, 16).ok());
        Some(Member {
            fd,
            is_by_descriptor: data.is_some_and(|data| data & 0xffff_ffff == u64::from(fd.unsigned_abs())),
        })
    };
    fdinfo.lines().filter_map(member).collect()
}

/// A duplicate of the socket with this inode; `None` if the descriptor is no longer that socket.
///
/// Only sockets are duplicated: to close a duplicate of a file would release the process's record locks on it.
fn duplicate(fd: RawFd, inode: u64) -> Option<OwnedFd> {
    // SAFETY: another thread may close the number at any time, so it cannot be borrowed. The call takes any number, and what it
    // returns is ours.
    let same = unsafe {
        let same = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
        (same >= 0).then(|| OwnedFd::from_raw_fd(same))
    }?;
    fstat(&same).is_ok_and(|stat| stat.st_ino == inode).then_some(same)
}

fn is_tcp(socket: impl AsFd) -> bool {
    socket_type(&socket).is_ok_and(|kind| kind == SocketType::STREAM)
}

fn is_listener(socket: &OwnedFd) -> bool {
    is_tcp(socket) && socket_acceptconn(socket).unwrap_or(false)
}

/// The other end of a connected TCP socket. (Those of Unix sockets are no internet addresses, and of UDP sockets no streams.)
fn peer(socket: &OwnedFd) -> Option<SocketAddr> {
    let peer = getpeername(socket).ok()??;
    is_tcp(socket).then(|| peer.try_into().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    // `tests/agent/channel/sockets.rs` has the other tests. They shut sockets of their process down, so each has its own.

    #[test]
    fn a_socket_is_busy_until_nothing_has_passed_for_a_while() {
        use std::io::{Read, Write};

        let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        let inode = fstat(&other).unwrap().st_ino;
        let socket = Socket { fd: other.as_raw_fd(), peer: other.peer_addr().unwrap() };
        let until = Instant::now() + Duration::from_secs(60);
        // This thread may be held up for longer than that.
        while !is_busy(inode, &socket) {
            assert!(Instant::now() < until, "what passes is not seen");
            one.write_all(b"x").unwrap();
            other.read_exact(&mut [0]).unwrap();
        }
        while is_busy(inode, &socket) {
            assert!(Instant::now() < until, "it is never quiet");
        }
        assert!(!is_busy(inode + 1, &socket), "it was closed, and the descriptor is another's");
    }

    #[test]
    fn members_of_an_epoll_set_are_read_from_its_fdinfo() {
        let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1057\n\
                    tfd:        9 events:       19 data:     5621d767f410  pos:0 ino:2a sdev:8\ntfd:       10 events: 19\n\
                    tfd:       11 events:       19 data: 7ffc0000000b pos:0\ntfd: nonsense\n";
        let member = |fd, is_by_descriptor| Member { fd, is_by_descriptor };
        assert_eq!(members(text), [member(9, false), member(10, false), member(11, true)]);
        assert_eq!(members(""), []);
    }
}
