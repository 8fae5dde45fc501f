//! Whether a connection from this machine is of this process's own user, or of root.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use parking_lot::Mutex;

use super::local_peers::{Trusted, Verdict, decide, open_users};
use super::peer_user::{PeerUser, PeerUsers};

/// Looks users up. It holds what it needs for that, so that it never lacks a descriptor.
#[derive(Debug)]
pub struct SameUser {
    /// `None`: the system does not report the user of a connection.
    users: Option<Mutex<PeerUsers>>,
    trusted: Trusted,
    /// Stands for connections whose sockets are not at hand: one that has ended gets no answer anyway.
    open: File,
}

impl SameUser {
    /// Looks up a connection of its own, to see whether this system reports users.
    ///
    /// # Errors
    /// There is no descriptor for that.
    pub fn new() -> io::Result<Self> {
        let (users, trusted) = open_users((Ipv4Addr::LOCALHOST, 0).into())?;
        if let Err(why) = &users {
            tracing::warn!(
                "every user of this machine may read the state of this coordinator's jobs, because {why}; a token keeps them out \
                 (elastic-rs token new)"
            );
        }
        Ok(Self { users: users.ok().map(Mutex::new), trusted, open: File::open("/dev/null")? })
    }

    /// Whether the other end of a connection with these addresses, which is on this machine, is ours or root's. True if the system does
    /// not report any connection.
    pub fn has(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        let Some(users) = &self.users else { return true };
        match users.lock().find(&self.open, local, peer) {
            PeerUser::Elsewhere => false,
            user => decide(user, self.trusted) == Verdict::Admit,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_own_user_is_found_and_a_connection_that_is_none_is_nobodys() {
        let same = SameUser::new().unwrap();
        assert!(same.users.is_some());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, peer) = (listener.local_addr().unwrap(), client.local_addr().unwrap());
        assert!(same.has(local, peer));
        drop((client, listener));
        assert!(!same.has(local, peer));
    }
}
