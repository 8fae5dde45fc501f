//! The kernel's tables of TCP sockets: `/proc/net/tcp` and `/proc/net/tcp6`.
//!
//! Owns the format of a line. Facts: `proc_net_tcp` in the kernel's documentation.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The tables of the network namespace of this process.
pub(super) const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// The state of a socket that listens.
pub(super) const LISTEN: u8 = 0x0A;

/// The state of a socket that is about to connect, and is no end of a connection yet.
pub(super) const SYN_SENT: u8 = 0x02;

/// A socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Its own address, as the kernel has it: an IPv4 address may be mapped into IPv6.
    pub local: SocketAddr,
    /// The other end's.
    pub remote: SocketAddr,
    pub state: u8,
    /// Its user.
    pub uid: u32,
    /// Zero if no process has it any more.
    pub inode: u64,
}

impl Row {
    /// Parses a line. `None` for the head of a table.
    pub(super) fn parse(line: &str) -> Option<Row> {
        let mut columns = line.split_ascii_whitespace();
        let (local, remote) = (parse_address(columns.nth(1)?)?, parse_address(columns.next()?)?);
        let state = u8::from_str_radix(columns.next()?, 16).ok()?;
        let uid = columns.nth(3)?.parse().ok()?;
        let inode = columns.nth(1)?.parse().ok()?;
        Some(Row { local, remote, state, uid, inode })
    }
}

/// Parses `0100007F:1F90`. The kernel prints each 32-bit word of the address as a number in the host's byte order.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut octets = [0; 16];
            for at in 0..4 {
                octets[at * 4..at * 4 + 4].copy_from_slice(&word(at)?);
            }
            IpAddr::from(Ipv6Addr::from(octets))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn a_line_is_a_socket_and_a_head_is_none() {
        let line =
            "   1: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000 65533        0 222 1 0 20 4";
        let expected = Row {
            local: "127.0.0.1:8080".parse().unwrap(),
            remote: "127.0.0.1:49153".parse().unwrap(),
            state: 1,
            uid: 65533,
            inode: 222,
        };
        assert_eq!(Row::parse(line), Some(expected));
        let mapped = "0: 0000000000000000FFFF00000100007F:1F90 00000000000000000000000001000000:0 01 0:0 0:0 0 7 0 9";
        let row = Row::parse(mapped).unwrap();
        assert_eq!((row.local.ip().to_canonical(), row.uid, row.inode), ([127, 0, 0, 1].into(), 7, 9));
        assert_eq!(row.remote.to_string(), "[::1]:0");
        for other in ["  sl  local_address rem_address   st tx_queue", "", "0: 1:2 3 0A", &line[..line.len() - 13]] {
            assert_eq!(Row::parse(other), None, "{other}");
        }
    }
}
