//! The TCP sockets that a worker's collectives wait for, and how they are freed.
//!
//! gloo cannot abort a collective. But the collective fails at once when its connections are shut down, which another thread can do.
//! Listening sockets are spared: gloo ends the process if one of them fails.
//!
//! gloo does not say which sockets are its own. They are those that were connected while it made its process group. Of these it
//! watches its own through an epoll set, with its listening socket; a store's client and a user's connections are not in that set.
//!
//! A program may make further groups later, each with an epoll set of its own. A server of the program may look the same. They are told
//! apart by what epoll hands out with events of the listening socket. In gloo that is the address of a C++ object, whose first word is
//! the same for all objects of its class. Groups that exist already show which word it is.
//! Facts: `gloo/transport/tcp` (`loop.cc`, `pair.cc`, `listener.cc`), `proc_pid_fdinfo(5)`, `proc_pid_mem(5)`, `shutdown(2)`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::fstat;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{Shutdown, SocketType, getpeername, shutdown};

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
    /// The sockets that were connected before the process group was begun. `None`: none is being made.
    marked: Option<BTreeSet<u64>>,
    guarded: Inodes,
    /// The classes of the listeners of guarded groups. Sockets that are watched with another of their objects are a group's, too.
    listeners: BTreeSet<Class>,
}

impl Sockets {
    /// A process group is about to be made: sockets that are connected from now on may be its own.
    pub(super) fn mark(&mut self) -> io::Result<()> {
        self.marked = Some(Open::look()?.connected().into_keys().collect());
        Ok(())
    }

    /// The process group was made: guards its sockets. Returns their number, or `None` without a mark.
    pub(super) fn guard_new(&mut self) -> io::Result<Option<usize>> {
        let Some(marked) = &self.marked else { return Ok(None) };
        let open = Open::look()?;
        let mut new = open.connected();
        new.retain(|inode, _| !marked.contains(inode));
        let mut watched = open.watched_with_listeners();
        watched.retain_mut(|set| {
            set.connected.retain(|inode, _| new.contains_key(inode));
            !set.connected.is_empty()
        });
        self.marked = None;
        // A kernel may not show what is in an epoll set.
        Ok(Some(if watched.is_empty() { self.guard(new) } else { self.guard_sets(watched) }))
    }

    /// Guards the sockets of a process group that exists already: those that are watched together with a listening socket. Returns
    /// their number.
    pub(super) fn guard_loops(&mut self) -> io::Result<usize> {
        let watched = Open::look()?.watched_with_listeners();
        Ok(self.guard_sets(watched))
    }

    fn guard_sets(&mut self, sets: Vec<Watched>) -> usize {
        let mut sockets = Inodes::new();
        for set in sets {
            self.listeners.extend(set.listener);
            sockets.extend(set.connected);
        }
        self.guard(sockets)
    }

    fn guard(&mut self, sockets: Inodes) -> usize {
        let count = sockets.len();
        self.guarded.extend(sockets);
        count
    }

    /// The process group is destroyed, or was not made.
    pub(super) fn release(&mut self) {
        *self = Sockets::default();
    }

    /// Shuts the sockets down, and those of groups that the program has made since. Returns whether another call is needed soon, since a
    /// process group is being made or may be made.
    pub(super) fn shut_down(&mut self) -> bool {
        for (inode, socket) in std::mem::take(&mut self.guarded) {
            shut(inode, &socket);
        }
        if !self.listeners.is_empty() {
            let sets = Open::look().map(|open| open.watched_with_listeners()).unwrap_or_default();
            let groups = sets.iter().filter(|set| set.listener.is_some_and(|class| self.listeners.contains(&class)));
            for (inode, socket) in groups.flat_map(|set| &set.connected) {
                shut(*inode, socket);
            }
        }
        let Some(marked) = &self.marked else { return !self.listeners.is_empty() };
        // Whatever fails here, such as a want of descriptors, may succeed in the next call.
        for (inode, socket) in Open::look().map(|open| open.connected()).unwrap_or_default() {
            if !marked.contains(&inode) {
                shut(inode, &socket);
            }
        }
        true
    }
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

    /// The epoll sets with a listening TCP socket.
    fn watched_with_listeners(&self) -> Vec<Watched> {
        let connected = self.connected();
        let watched = |set: &RawFd| {
            let members = members(&fs::read_to_string(format!("/proc/self/fdinfo/{set}")).ok()?);
            let sockets = || members.iter().filter_map(|(fd, data)| Some((*fd, *self.sockets.get(fd)?, *data)));
            let (.., data) =
                sockets().find(|(fd, inode, _)| duplicate(*fd, *inode).is_some_and(|socket| is_listener(&socket)))?;
            let of_set = sockets().filter_map(|(_, inode, _)| Some((inode, connected.get(&inode)?.clone())));
            Some(Watched { connected: of_set.collect(), listener: data.and_then(class_of) })
        };
        self.epoll_sets.iter().filter_map(watched).collect()
    }
}

/// An epoll set with a listening TCP socket.
struct Watched {
    /// The connected TCP sockets in it.
    connected: Inodes,
    /// The class of what epoll hands out for the listening socket, if that is the address of an object.
    listener: Option<Class>,
}

/// The first word of an object with virtual functions: the address of its class's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Class(u64);

/// The class of the object at this address, if there is one. Other numbers are harmless: the kernel reads the memory, and may refuse.
fn class_of(address: u64) -> Option<Class> {
    let mut word = [0; 8];
    // Descriptors, which many programs have epoll hand out, are no addresses either.
    File::open("/proc/self/mem").ok()?.read_exact_at(&mut word, address).ok()?;
    let table = u64::from_ne_bytes(word);
    (table != 0).then_some(Class(table))
}

/// The descriptors in an epoll set and what it hands out for each, by its `fdinfo`: lines such as
/// `tfd:        9 events:       19 data:         5621d767f410 pos:0 ...`.
fn members(fdinfo: &str) -> Vec<(RawFd, Option<u64>)> {
    let member = |line: &str| {
        let mut words = line.strip_prefix("tfd:")?.split_whitespace();
        let fd = words.next()?.parse().ok()?;
        let data = words.skip_while(|word| *word != "data:").nth(1);
        Some((fd, data.and_then(|data| u64::from_str_radix(data, 16).ok())))
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
    fn members_of_an_epoll_set_are_read_from_its_fdinfo() {
        let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1057\n\
                    tfd:        9 events:       19 data:     5621d767f410  pos:0 ino:2a sdev:8\ntfd:       10 events: 19\n\
                    tfd: nonsense\n";
        assert_eq!(members(text), [(9, Some(0x5621_d767_f410)), (10, None)]);
        assert_eq!(members(""), []);
    }

    #[test]
    fn the_class_of_an_object_is_its_first_word_and_other_numbers_have_none() {
        let object = [7_u64, 8];
        assert_eq!(class_of(std::ptr::from_ref(&object).addr() as u64), Some(Class(7)));
        for number in [0, 9, u64::from(u32::MAX), u64::MAX] {
            assert_eq!(class_of(number), None);
        }
    }
}
