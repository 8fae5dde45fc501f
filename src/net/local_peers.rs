//! Which users of this machine may connect to a server.
//!
//! Owns the decision, once for each connection, when it is accepted. Leaves finding a peer's user to [`super::peer_user`].
//! `docs/decisions/0084-a-worker-store-refuses-other-users-of-its-machine.md` has the reasons.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::process::geteuid;
use socket2::SockRef;

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
    /// It is admitted although its user is not known.
    Doubt(Doubt),
    /// It is another user's.
    Refuse(u32),
    /// Its client has closed it, and waits for no answer. Its requests must not be carried out: nobody knows whose they are.
    Gone,
}

/// Why a user is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doubt {
    Unmapped,
    NotFound,
    Untold,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Doubt::Unmapped => "its user has no number in this user namespace",
            Doubt::NotFound => {
                "its socket is not in this network namespace: it is in another one, or its address is translated on the way"
            }
            Doubt::Untold => "neither NETLINK_SOCK_DIAG nor /proc/net/tcp can be used here",
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
        PeerUser::Uid(OVERFLOW_UID) if !trusted.all_mapped => Verdict::Doubt(Doubt::Unmapped),
        PeerUser::Uid(uid) if uid == trusted.own || uid == ROOT => Verdict::Admit,
        PeerUser::Uid(uid) => Verdict::Refuse(uid),
        PeerUser::Gone => Verdict::Gone,
        PeerUser::NotFound => Verdict::Doubt(Doubt::NotFound),
        PeerUser::Untold => Verdict::Doubt(Doubt::Untold),
    }
}

/// A server's check of new connections.
#[derive(Debug)]
pub(crate) struct LocalPeerCheck {
    users: PeerUsers,
    trusted: Trusted,
    way_out: &'static str,
    /// A doubt has been logged.
    told: bool,
}

impl LocalPeerCheck {
    /// `None` if every user may connect.
    pub(crate) fn new(who: LocalPeers) -> Option<LocalPeerCheck> {
        let LocalPeers::SameUser { way_out } = who else { return None };
        let trusted = Trusted { own: geteuid().as_raw(), all_mapped: maps_all(&read_uid_map()) };
        Some(LocalPeerCheck { users: PeerUsers::default(), trusted, way_out, told: false })
    }

    /// Decides about a connection that has been accepted from `peer`.
    pub(crate) fn judge(&mut self, stream: &impl AsFd, peer: SocketAddr) -> Verdict {
        let local = SockRef::from(stream).local_addr().ok().and_then(|local| local.as_socket());
        let user = local.map_or(PeerUser::Gone, |local| self.users.find(stream, local, peer));
        decide(user, self.trusted)
    }

    /// Why the user with this number is refused, and what to do.
    pub(crate) fn refusal(&self, uid: u32) -> String {
        let (own, way_out) = (self.trusted.own, self.way_out);
        format!("uid {uid} is neither this process's user (uid {own}) nor root; {way_out}")
    }

    /// Logs the first doubt.
    pub(crate) fn tell_once(&mut self, peer: SocketAddr, doubt: Doubt) {
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                %peer,
                "a connection from this machine was admitted whose user is not known: {doubt}. Further ones are not logged"
            );
        }
    }
}

/// Whether a file or a socket of this user may be anybody's: users without a number in this user namespace are shown as one.
pub(crate) fn is_unmapped(uid: u32) -> bool {
    uid == OVERFLOW_UID && !maps_all(&read_uid_map())
}

fn read_uid_map() -> String {
    fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
}

/// Whether a user namespace with this `uid_map` has a number for every user of the machine.
fn maps_all(uid_map: &str) -> bool {
    uid_map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_user_and_root_are_admitted_and_others_refused() {
        const MAPPED: Trusted = Trusted { own: 1000, all_mapped: true };
        const NAMESPACE: Trusted = Trusted { all_mapped: false, ..MAPPED };
        const ROOTS: Trusted = Trusted { own: 0, ..MAPPED };
        const NOBODYS: Trusted = Trusted { own: OVERFLOW_UID, ..MAPPED };
        const UNMAPPED: Trusted = Trusted { own: OVERFLOW_UID, all_mapped: false };
        let cases = [
            (PeerUser::Uid(1000), MAPPED, Verdict::Admit),
            (PeerUser::Uid(0), MAPPED, Verdict::Admit),
            (PeerUser::Uid(1001), MAPPED, Verdict::Refuse(1001)),
            (PeerUser::Uid(u32::MAX), MAPPED, Verdict::Refuse(u32::MAX)),
            (PeerUser::Uid(1000), ROOTS, Verdict::Refuse(1000)),
            (PeerUser::Uid(0), ROOTS, Verdict::Admit),
            // An ordinary user, unless this is a user namespace.
            (PeerUser::Uid(OVERFLOW_UID), MAPPED, Verdict::Refuse(OVERFLOW_UID)),
            (PeerUser::Uid(OVERFLOW_UID), NOBODYS, Verdict::Admit),
            (PeerUser::Uid(OVERFLOW_UID), NAMESPACE, Verdict::Doubt(Doubt::Unmapped)),
            (PeerUser::Uid(OVERFLOW_UID), UNMAPPED, Verdict::Doubt(Doubt::Unmapped)),
            (PeerUser::Uid(1001), NAMESPACE, Verdict::Refuse(1001)),
            (PeerUser::Uid(0), NAMESPACE, Verdict::Admit),
            (PeerUser::Elsewhere, MAPPED, Verdict::Admit),
            (PeerUser::Gone, MAPPED, Verdict::Gone),
            (PeerUser::NotFound, MAPPED, Verdict::Doubt(Doubt::NotFound)),
            (PeerUser::Untold, MAPPED, Verdict::Doubt(Doubt::Untold)),
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
