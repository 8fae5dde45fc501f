//! From which machines connections come that a server serves.
//!
//! Owns the decision, once for each connection, when it is accepted. It says where a connection comes from, not whose it is:
//! `docs/decisions/0085-the-coordinator-tells-rank-0-who-the-members-are.md`.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use mio::net::TcpStream;

use crate::net::local::is_here;

/// The machines of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members {
    /// Their addresses. Those of this machine need not be among them.
    addresses: HashSet<IpAddr>,
    /// Connections from other addresses are closed. Otherwise they are logged.
    pub(super) strict: bool,
    /// What the log advises if such a connection should be let in.
    pub(super) way_out: &'static str,
}

impl Members {
    /// The machines with these addresses, and this one. `strict`: connections from others are closed, and not only logged with `way_out`,
    /// which says what to do if they belong to the job.
    pub fn new(addresses: &[IpAddr], strict: bool, way_out: &'static str) -> Self {
        let addresses = addresses.iter().map(IpAddr::to_canonical).collect();
        Self { addresses, strict, way_out }
    }

    /// Whether the connection comes from one of them.
    pub(super) fn admit(&self, stream: &TcpStream, peer: SocketAddr) -> bool {
        self.has(peer.ip()) || stream.local_addr().and_then(|local| is_here(peer, local)).unwrap_or(false)
    }

    fn has(&self, ip: IpAddr) -> bool {
        self.addresses.contains(&ip.to_canonical())
    }

    /// Why a connection is closed, and what to do.
    pub(super) fn refusal(&self) -> String {
        format!(
            "no member of the round has this address ({} addresses are known); {}",
            self.addresses.len(),
            self.way_out
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_compared_without_their_form() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let members = Members::new(&[ip("10.0.0.1"), ip("::ffff:10.0.0.2"), ip("2001:db8::1")], true, "");
        for member in ["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2", "2001:db8:0::1"] {
            assert!(members.has(ip(member)), "{member}");
        }
        for other in ["10.0.0.3", "2001:db8::2", "127.0.0.1"] {
            assert!(!members.has(ip(other)), "{other}");
        }
    }
}
