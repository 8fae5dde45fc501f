//! Which users of this machine may connect to a server.
//!
//! Owns the decision, once for each connection, when it is accepted. Leaves finding a peer's user to [`super::peer_user`].
//! `docs/decisions/0084-a-worker-store-refuses-other-users-of-its-machine.md` has the reasons.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;

use rustix::process::geteuid;
use socket2::SockRef;

use super::local::is_exhausted;
use super::peer_user::{PeerUser, PeerUsers};

/// Which users of this machine may connect. Connections from other machines are not concerned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LocalPeers {
    /// Every user.
    #[default]
    Any,
    /// The effective user of this process when the server starts, and root.
    SameUser {
        /// What the log advises if another user should be let in.
        way_out: &'static str,
    },
}

/// What happens to a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Admit,
    Refuse(RefusedUser),
    /// Its client has closed it, and waits for no answer. Its requests must not be carried out: their user is not known.
    Gone,
}

/// A user who is neither root nor this process's, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RefusedUser {
    Uid(u32),
    Unknown(Unknown),
}

/// Why a user is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unknown {
    Unmapped,
    NotFound,
    Unanswered,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unknown::Unmapped => "its user has no number in this user namespace",
            Unknown::NotFound => {
                "its socket is not in this network namespace: it is in another one, its address is translated on the way, \
                 or it has been closed"
            }
            Unknown::Unanswered => "the system does not answer, because no descriptor, port or memory is free",
        })
    }
}

/// The users that a server trusts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trusted {
    /// Besides root.
    pub own: u32,
    /// Every user has a number here: this is no user namespace in which [`OVERFLOW_UID`] stands for all others.
    pub all_mapped: bool,
}

/// The number that stands for users without one. In the initial user namespace it is an ordinary user, `nobody`.
const OVERFLOW_UID: u32 = 65534;
const ROOT: u32 = 0;

/// Decides about a connection.
pub(crate) fn decide(peer: PeerUser, trusted: Trusted) -> Verdict {
    match peer {
        PeerUser::Elsewhere => Verdict::Admit,
        PeerUser::Uid(OVERFLOW_UID) if !trusted.all_mapped => Verdict::Refuse(RefusedUser::Unknown(Unknown::Unmapped)),
        PeerUser::Uid(uid) if uid == trusted.own || uid == ROOT => Verdict::Admit,
        PeerUser::Uid(uid) => Verdict::Refuse(RefusedUser::Uid(uid)),
        PeerUser::Gone => Verdict::Gone,
        PeerUser::NotFound => Verdict::Refuse(RefusedUser::Unknown(Unknown::NotFound)),
        PeerUser::Unanswered => Verdict::Refuse(RefusedUser::Unknown(Unknown::Unanswered)),
    }
}

/// A server's check of new connections.
#[derive(Debug)]
pub(crate) struct LocalPeerCheck {
    /// `Err`: why the kernel does not even name the user of this process's own connections. Then every user is admitted.
    users: Result<PeerUsers, &'static str>,
    trusted: Trusted,
    way_out: &'static str,
}

impl LocalPeerCheck {
    /// The check of a server that listens at `near`. `None` if every user may connect.
    ///
    /// # Errors
    /// A descriptor that is needed to know users, or memory, is not free.
    pub(crate) fn new(who: LocalPeers, near: SocketAddr) -> io::Result<Option<LocalPeerCheck>> {
        let LocalPeers::SameUser { way_out } = who else { return Ok(None) };
        let (users, trusted) = open_users(near).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot look up who connects from this machine: {error}"))
        })?;
        Ok(Some(LocalPeerCheck { users, trusted, way_out }))
    }

    /// Log that every user is admitted, if that is so because users cannot be known.
    pub(crate) fn warn_if_off(&self) {
        if let Err(why) = &self.users {
            tracing::warn!(
                target: "elastic_rs::store::server",
                "every user of this machine may connect to the workers' store, because {why}; {REMEDY}"
            );
        }
    }

    /// Decides about a connection that has been accepted from `peer`.
    pub(crate) fn judge(&mut self, stream: &impl AsFd, peer: SocketAddr) -> Verdict {
        let Ok(users) = &mut self.users else { return Verdict::Admit };
        let local = SockRef::from(stream).local_addr().ok().and_then(|local| local.as_socket());
        let user = local.map_or(PeerUser::Gone, |local| users.find(stream, local, peer));
        decide(user, self.trusted)
    }

    /// Why this user is refused, and what to do.
    pub(crate) fn refusal(&self, refused: RefusedUser) -> String {
        let (own, way_out) = (self.trusted.own, self.way_out);
        match refused {
            RefusedUser::Uid(uid) => {
                format!("uid {uid} is neither this process's user (uid {own}) nor root; {way_out}")
            }
            RefusedUser::Unknown(why) => {
                format!("it is not known to be of this process's user (uid {own}) or root: {why}; {way_out}")
            }
        }
    }
}

/// What to do where users cannot be known.
pub const REMEDY: &str = "let the agents use NETLINK_SOCK_DIAG or read /proc/net/tcp, as a user with a number in their user \
                          namespace; or give --rdzv-conf store_peers=any if no other user has access to this machine";

/// Why a worker store of this process could not know which users connect to it from this machine. `None`: it could.
///
/// # Errors
/// A descriptor, or memory, is not free.
pub fn why_users_are_unknown() -> io::Result<Option<&'static str>> {
    open_users((Ipv4Addr::LOCALHOST, 0).into()).map(|(users, _)| users.err())
}

/// The way to know users, or why there is none; and whom to trust.
pub(super) fn open_users(near: SocketAddr) -> io::Result<(Result<PeerUsers, &'static str>, Trusted)> {
    let trusted = Trusted { own: geteuid().as_raw(), all_mapped: maps_all(&read_uid_map()?) };
    if trusted.own == OVERFLOW_UID && !trusted.all_mapped {
        return Ok((Err("its own user has no number in this user namespace, as all others"), trusted));
    }
    let users = PeerUsers::open(near, trusted.own)?;
    let why = "neither NETLINK_SOCK_DIAG nor /proc/net/tcp shows the user of its own connections";
    Ok((users.ok_or(why), trusted))
}

/// Whether a file or a socket of this user may be anybody's: users without a number in this user namespace are shown as one.
pub(crate) fn is_unmapped(uid: u32) -> bool {
    uid == OVERFLOW_UID && read_uid_map().is_ok_and(|map| !maps_all(&map))
}

/// This user namespace's map of users. Without `/proc` it has none.
fn read_uid_map() -> io::Result<String> {
    fs::read_to_string("/proc/self/uid_map")
        .or_else(|error| if is_exhausted(&error) { Err(error) } else { Ok(String::new()) })
}

/// Whether a user namespace with this `uid_map` has a number for every user of the machine.
fn maps_all(uid_map: &str) -> bool {
    uid_map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_user_and_root_are_admitted_and_all_others_refused_also_unknown_ones() {
        const MAPPED: Trusted = Trusted { own: 1000, all_mapped: true };
        const NAMESPACE: Trusted = Trusted { all_mapped: false, ..MAPPED };
        const ROOTS: Trusted = Trusted { own: 0, ..MAPPED };
        const NOBODYS: Trusted = Trusted { own: OVERFLOW_UID, ..MAPPED };
        const UNMAPPED: Trusted = Trusted { own: OVERFLOW_UID, all_mapped: false };
        let unknown = |why| Verdict::Refuse(RefusedUser::Unknown(why));
        let cases = [
            (PeerUser::Uid(1000), MAPPED, Verdict::Admit),
            (PeerUser::Uid(0), MAPPED, Verdict::Admit),
            (PeerUser::Uid(1001), MAPPED, Verdict::Refuse(RefusedUser::Uid(1001))),
            (PeerUser::Uid(u32::MAX), MAPPED, Verdict::Refuse(RefusedUser::Uid(u32::MAX))),
            (PeerUser::Uid(1000), ROOTS, Verdict::Refuse(RefusedUser::Uid(1000))),
            (PeerUser::Uid(0), ROOTS, Verdict::Admit),
            // An ordinary user, unless this is a user namespace.
            (PeerUser::Uid(OVERFLOW_UID), MAPPED, Verdict::Refuse(RefusedUser::Uid(OVERFLOW_UID))),
            (PeerUser::Uid(OVERFLOW_UID), NOBODYS, Verdict::Admit),
            (PeerUser::Uid(OVERFLOW_UID), NAMESPACE, unknown(Unknown::Unmapped)),
            (PeerUser::Uid(OVERFLOW_UID), UNMAPPED, unknown(Unknown::Unmapped)),
            (PeerUser::Uid(1001), NAMESPACE, Verdict::Refuse(RefusedUser::Uid(1001))),
            (PeerUser::Uid(0), NAMESPACE, Verdict::Admit),
            (PeerUser::Elsewhere, MAPPED, Verdict::Admit),
            (PeerUser::Gone, MAPPED, Verdict::Gone),
            (PeerUser::NotFound, MAPPED, unknown(Unknown::NotFound)),
            (PeerUser::Unanswered, MAPPED, unknown(Unknown::Unanswered)),
        ];
        for (peer, trusted, expected) in cases {
            assert_eq!(decide(peer, trusted), expected, "{peer:?}, {trusted:?}");
        }
    }

    #[test]
    fn only_the_initial_namespace_maps_all_users() {
        assert!(maps_all("         0          0 4294967295\n"));
        for other in ["", "0 1000 1\n", "0 0 65536\n", "0 1000 1\n1 100000 65536\n", "0 0 4294967295\n0 0 1\n"] {
            assert!(!maps_all(other), "{other:?}");
        }
    }
}
