//! Whether a connection from this machine is of this process's own user, or of root.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use parking_lot::Mutex;
use rustix::process::geteuid;

use super::peer_user::{PeerUser, PeerUsers};

const ROOT: u32 = 0;

/// Looks users up. It holds what it needs for that, so that it never lacks a descriptor.
#[derive(Debug)]
pub struct SameUser {
    users: Mutex<PeerUsers>,
    own: u32,
    /// The system tells whose a connection is.
    can_tell: bool,
    /// Stands for connections whose sockets are not at hand: one that has ended gets no answer anyway.
    open: File,
}

impl SameUser {
    /// Looks up a connection of its own, to see whether this system tells.
    ///
    /// # Errors
    /// There is no descriptor for that.
    pub fn new() -> io::Result<Self> {
        let (mut users, own, open) = (PeerUsers::default(), geteuid().as_raw(), File::open("/dev/null")?);
        // A system without loopback has no connections of its own.
        let can_tell = finds_its_own(&mut users).unwrap_or(false);
        if !can_tell {
            tracing::warn!(
                "neither NETLINK_SOCK_DIAG nor /proc/net/tcp tells whose a connection is: every user of this machine may read how the \
                 jobs do that this coordinator serves; a token keeps them out (elastic-rs token new)"
            );
        }
        Ok(Self { users: Mutex::new(users), own, can_tell, open })
    }

    /// Whether the other end of a connection with these addresses, which is on this machine, is ours or root's. True if the system does
    /// not tell of any connection.
    pub fn has(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        if !self.can_tell {
            return true;
        }
        match self.users.lock().find(&self.open, local, peer) {
            PeerUser::Uid(uid) => uid == self.own || uid == ROOT,
            _ => false,
        }
    }
}

fn finds_its_own(users: &mut PeerUsers) -> io::Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    let found = users.find(&server, server.local_addr()?, client.local_addr()?);
    Ok(matches!(found, PeerUser::Uid(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_is_told_and_a_connection_that_is_none_is_nobodys() {
        let same = SameUser::new().unwrap();
        assert!(same.can_tell);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, peer) = (listener.local_addr().unwrap(), client.local_addr().unwrap());
        assert!(same.has(local, peer));
        drop((client, listener));
        assert!(!same.has(local, peer));
    }
}
