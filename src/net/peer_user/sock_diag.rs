//! Messages of `NETLINK_SOCK_DIAG`: asking for one TCP socket, and the answer.
//!
//! Facts: `sock_diag(7)`, `netlink(7)`, the kernel's `inet_diag.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::SYN_SENT;

/// A socket, by its own address and the other end's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ends {
    pub local: SocketAddr,
    pub remote: SocketAddr,
}

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The user of the socket. `None`: no process has it any more, and the user shown may be root's.
    Socket(Option<u32>),
    /// There is no such socket that is connected, or the kernel cannot report TCP sockets.
    Missing,
    /// The kernel returned another error, or bytes that are no answer.
    Unusable,
    /// An answer to an earlier request.
    Earlier,
}

/// Length of a request.
pub(super) const REQUEST: usize = 72;
/// Length of an answer's fixed part.
pub(super) const ANSWER: usize = 88;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const ENOENT: i32 = 2;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;

/// Asks for exactly this socket. Both addresses are canonical and of one family. `interface`: the one that it is bound to, or 0.
pub(super) fn request(sequence: u32, of: Ends, interface: u32) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &(REQUEST as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    put(8, &sequence.to_ne_bytes());
    put(16, &[if of.local.is_ipv4() { AF_INET } else { AF_INET6 }, IPPROTO_TCP]);
    put(20, &u32::MAX.to_ne_bytes()); // all states
    put(24, &of.local.port().to_be_bytes());
    put(26, &of.remote.port().to_be_bytes());
    for (at, address) in [(28, of.local), (44, of.remote)] {
        match address.ip() {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    put(60, &interface.to_ne_bytes());
    put(64, &[0xFF; 8]); // no cookie
    bytes
}

/// Reads the answer to [`request`] with the same `sequence` and `of`.
pub(super) fn answer(bytes: &[u8], sequence: u32, of: Ends) -> Answer {
    match read(bytes, sequence, of) {
        Some(answer) => answer,
        None => Answer::Unusable,
    }
}

/// `None`: it is too short for what it says to be.
fn read(bytes: &[u8], sequence: u32, of: Ends) -> Option<Answer> {
    if number(bytes, 8)? != sequence {
        return Some(Answer::Earlier);
    }
    match u16::from_ne_bytes(field(bytes, 4)?) {
        NLMSG_ERROR if number(bytes, 16)? as i32 == -ENOENT => Some(Answer::Missing),
        SOCK_DIAG_BY_FAMILY => {
            let [family, state] = field(bytes, 16)?;
            let (local, remote) = (address(bytes, family, 20, 24)?, address(bytes, family, 22, 40)?);
            let (uid, inode) = (number(bytes, 80)?, number(bytes, 84)?);
            // For want of a connection, the kernel shows a socket that listens at this address.
            let is_it = Ends { local, remote } == of && state != SYN_SENT;
            Some(if is_it { Answer::Socket((inode != 0).then_some(uid)) } else { Answer::Missing })
        }
        _ => None,
    }
}

fn field<const LEN: usize>(bytes: &[u8], at: usize) -> Option<[u8; LEN]> {
    bytes.get(at..at + LEN)?.try_into().ok()
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_ne_bytes)
}

/// The canonical address whose port and IP address are at these places.
fn address(bytes: &[u8], family: u8, port: usize, ip: usize) -> Option<SocketAddr> {
    let ip = match family {
        AF_INET => Ipv4Addr::from(field::<4>(bytes, ip)?).into(),
        AF_INET6 => Ipv6Addr::from(field::<16>(bytes, ip)?).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes(field(bytes, port)?)))
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;

    fn ends(local: &str, remote: &str) -> Ends {
        Ends { local: local.parse().unwrap(), remote: remote.parse().unwrap() }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    // Recorded on Linux 6.18 with sockets of uid 65533.
    const V4_REQUEST: &str = "48000000 1400 0100 07000000 00000000 02060000 ffffffff ad7a 9d07 \
        7f000001 000000000000000000000000 7f000001 000000000000000000000000 00000000 ffffffffffffffff";
    const V6_REQUEST: &str = "48000000 1400 0100 07000000 00000000 0a060000 ffffffff c5a0 b5dd \
        00000000000000000000000000000001 00000000000000000000000000000001 00000000 ffffffffffffffff";
    const V4: &str = "7c000000 1400 0000 07000000 44260000 02010000 ad7a 9d07 7f000001000000000000000000000000 \
        7f000001000000000000000000000000 00000000 0400000000000000 00000000 00000000 00000000 fdff0000 f8c49c00 \
        0500080000000000 08000f0000000000 0c00150001000000000000000600160052000000";
    const CLOSED: &str = "7c000000 1400 0000 07000000 44260000 02040100 ad7a 9d07 7f000001000000000000000000000000 \
        7f000001000000000000000000000000 00000000 0400000000000000 cc000000 00000000 01000000 fdff0000 00000000 \
        0500080003000000 08000f0000000000 0c00150001000000000000000600160052000000";
    const MISSING: &str = "5c000000 0200 0000 07000000 44260000 feffffff 48000000 1400 0100 07000000 00000000 \
        02060000 ffffffff 0001 9d07 7f000001000000000000000000000000 7f000001000000000000000000000000 00000000 ffffffffffffffff";
    const LISTENER: &str = "7c000000 1400 0000 07000000 44260000 020a0000 b68b 0000 7f000001000000000000000000000000 \
        00000000000000000000000000000000 00000000 0500000000000000 00000000 00000000 80000000 00000000 fac49c00 \
        0500080000000000 08000f0000000000 0c00150001000000000000000600160052000000";
    const MAPPED: &str = "7c000000 1400 0000 07000000 82260000 0a010000 c70c b21b 00000000000000000000ffff7f000001 \
        00000000000000000000ffff7f000001 00000000 0800000000000000 00000000 00000000 00000000 fdff0000 55c59c00 \
        0500080000000000 08000f0000000000 0c00150001000000000000000600160012000000";
    const V6: &str = "7c000000 1400 0000 07000000 82260000 0a010000 c5a0 b5dd 00000000000000000000000000000001 \
        00000000000000000000000000000001 00000000 0900000000000000 00000000 00000000 00000000 fdff0000 59c59c00 \
        0500080000000000 08000f0000000000 0c00150001000000000000000600160012000000";

    #[test]
    fn requests_are_those_that_the_kernel_has_answered() {
        let v4 = ends("127.0.0.1:44410", "127.0.0.1:40199");
        assert_eq!(request(7, v4, 0).to_vec(), bytes(V4_REQUEST));
        assert_eq!(request(7, ends("[::1]:50592", "[::1]:46557"), 0).to_vec(), bytes(V6_REQUEST));
        assert_eq!(request(7, v4, 4)[60..64], [4, 0, 0, 0]);
    }

    #[test]
    fn answers_name_the_user_of_exactly_that_socket() {
        let v4 = ends("127.0.0.1:44410", "127.0.0.1:40199");
        let cases = [
            (V4, v4, Answer::Socket(Some(65533))),
            (V6, ends("[::1]:50592", "[::1]:46557"), Answer::Socket(Some(65533))),
            (MAPPED, ends("127.0.0.1:50956", "127.0.0.1:45595"), Answer::Socket(Some(65533))),
            (CLOSED, v4, Answer::Socket(None)),
            (MISSING, v4, Answer::Missing),
            (LISTENER, ends("127.0.0.1:46731", "127.0.0.1:40199"), Answer::Missing),
            (V4, ends("127.0.0.1:44410", "127.0.0.1:40198"), Answer::Missing),
            (V4, ends("127.0.0.2:44410", "127.0.0.1:40199"), Answer::Missing),
        ];
        for (recorded, of, expected) in cases {
            assert_eq!(answer(&bytes(recorded), 7, of), expected, "{recorded}");
            assert_eq!(answer(&bytes(recorded), 8, of), Answer::Earlier);
        }
    }

    #[test]
    fn what_is_cut_off_or_strange_is_no_answer() {
        let v4 = ends("127.0.0.1:44410", "127.0.0.1:40199");
        for recorded in [V4, V6, MISSING] {
            let whole = bytes(recorded);
            let needed = if recorded == MISSING { 20 } else { ANSWER };
            for end in 0..whole.len() {
                let answer = answer(&whole[..end], 7, v4);
                assert_eq!(answer == Answer::Unusable, end < needed, "{end}: {answer:?}");
            }
        }
        let changed = |at: usize, byte| {
            let mut bytes = bytes(V4);
            bytes[at] = byte;
            answer(&bytes, 7, v4)
        };
        assert_eq!(changed(16, 3), Answer::Unusable, "another family");
        assert_eq!(changed(4, 2), Answer::Unusable, "another error");
        assert_eq!(changed(4, 3), Answer::Unusable, "another message");
    }
}
