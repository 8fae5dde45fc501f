//! A raw connection, and the messages of the protocol, whole and in parts.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use super::PATIENCE;

pub const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
const PING: [u8; 5] = [13, 1, 2, 3, 4];

pub struct Client(pub TcpStream);

impl Client {
    /// A connection that has sent nothing.
    pub fn silent(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client(stream)
    }

    /// A connection that has sent VALIDATE and got the answer to its PING.
    pub fn connect(address: SocketAddr) -> Client {
        let mut client = Client::silent(address);
        client.0.write_all(&[VALIDATE, PING].concat()).unwrap();
        client.expect(&PING[1..]);
        client
    }

    /// Send these bytes, as far as the server takes them before it closes.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    pub fn expect(&mut self, answer: &[u8]) {
        let mut got = vec![0; answer.len()];
        self.0.read_exact(&mut got).unwrap();
        assert_eq!(got, answer);
    }

    pub fn assert_served(&mut self) {
        self.0.write_all(&PING).unwrap();
        self.expect(&PING[1..]);
    }

    pub fn end(&self) {
        // The server may have closed first.
        let _ = self.0.shutdown(Shutdown::Write);
    }

    /// Wait until the server closes or resets the connection, and return the bytes that it sent.
    pub fn read_to_close(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Ok(_) => bytes,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
            Err(error) => panic!("not closed: {error}"),
        }
    }
}

/// Query codes and fields of all messages but VALIDATE: `k`ey, `v`alue, `i`64, `u`32, and `n`, a count of the fields after it.
/// Written by hand, so that the codec is not tested with itself.
pub const MESSAGES: [(u8, &str); 18] = [
    (1, "kv"),
    (2, "kvv"),
    (3, "k"),
    (4, "ki"),
    (5, "nk"),
    (6, "nk"),
    (7, ""),
    (8, "k"),
    (9, "kv"),
    (10, "nk"),
    (11, "nkv"),
    (12, ""),
    (13, "u"),
    (14, "kv"),
    (15, "k"),
    (16, "k"),
    (17, ""),
    (18, "ki"),
];

/// A message with short keys and values. A list has two elements.
pub fn whole(code: u8, fields: &str) -> Vec<u8> {
    let mut bytes = vec![code];
    let is_list = fields.starts_with('n');
    for field in fields.chars().chain(fields.chars().skip(1).filter(|_| is_list)) {
        match field {
            'n' => bytes.extend(2u64.to_le_bytes()),
            'u' => bytes.extend([9; 4]),
            'i' => bytes.extend(1i64.to_le_bytes()),
            'k' => bytes.extend([&3u64.to_le_bytes()[..], b"/ke"].concat()),
            'v' => bytes.extend([&2u64.to_le_bytes()[..], b"42"].concat()),
            other => unreachable!("{other}"),
        }
    }
    bytes
}

/// The prefixes of a message before each of its lengths and counts, each with the limit.
pub fn up_to_each_length(code: u8, fields: &str) -> Vec<(Vec<u8>, u64)> {
    let (bytes, mut at) = (whole(code, fields), 1);
    let mut found = Vec::new();
    for field in fields.chars() {
        let (limit, width) = match field {
            'n' => (131_072, 8),
            'k' => (8 * 1024, 8 + 3),
            'v' => (8 * 1024 * 1024, 8 + 2),
            _ => continue,
        };
        found.push((bytes[..at].to_vec(), limit));
        at += width;
    }
    found
}
