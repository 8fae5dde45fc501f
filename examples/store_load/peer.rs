//! A pool of connections, and their greeting.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::store::protocol::Request;

/// Connections to one server, greeted and idle between commands.
pub struct Pool {
    port: u16,
    peers: Vec<Peer>,
}

impl Pool {
    pub fn new(port: u16) -> Self {
        Self { port, peers: Vec::new() }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Open connections, up to this number. All send their greeting before a reply is read, so a slow accept is waited for once.
    pub fn grow(&mut self, count: usize) -> Duration {
        let started = Instant::now();
        let mut streams: Vec<_> = (self.peers.len()..count).map(|_| greet(self.port).unwrap()).collect();
        for stream in &mut streams {
            stream.read_exact(&mut [0; PONG_BYTES]).unwrap();
        }
        self.peers.extend(streams.into_iter().map(Peer::new));
        started.elapsed()
    }

    /// The first `count` connections.
    pub fn peers(&mut self, count: usize) -> &mut [Peer] {
        self.grow(count);
        &mut self.peers[..count]
    }
}

pub struct Peer {
    pub stream: TcpStream,
    /// Bytes that the socket has not taken yet.
    pub unsent: usize,
    /// Units whose replies have not arrived completely.
    pub due: usize,
    /// Bytes of a partly arrived reply.
    pub partial: usize,
    pub sent_at: Instant,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        Self { stream, unsent: 0, due: 0, partial: 0, sent_at: Instant::now() }
    }

    /// Send requests, and read this many bytes of replies.
    pub fn ask(&mut self, requests: &[u8], reply_bytes: usize) {
        self.stream.write_all(requests).unwrap();
        self.stream.read_exact(&mut vec![0; reply_bytes]).unwrap();
    }
}

/// Length of the reply to a `PING`.
pub const PONG_BYTES: usize = 4;

/// Connect, and send a client's first requests. The reply is not read.
pub fn greet(port: u16) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    // VALIDATE is in a separate segment, as with PyTorch's client.
    stream.write_all(&encode(&[Request::Validate]))?;
    stream.write_all(&encode(&[Request::Ping { nonce: 7 }]))?;
    Ok(stream)
}

pub fn encode(requests: &[Request<&[u8]>]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    for request in requests {
        request.encode(&mut bytes);
    }
    bytes.to_vec()
}
