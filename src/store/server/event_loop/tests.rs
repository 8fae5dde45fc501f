//! What ends the event loop.

use std::io::{Read, Write};

use bytes::{Bytes, BytesMut};
use mio::Waker;

use super::super::control::control;
use super::*;
use crate::store::protocol::Request;

/// The request panics between two changes that belong together: the value is gone, and its bytes are not.
#[test]
fn a_server_whose_table_is_half_changed_ends_and_serves_nobody_any_more() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let poll = Poll::new().unwrap();
    let (_controller, control) = control(Waker::new(poll.registry(), Token(WAKE)).unwrap());
    let mut server = EventLoop::new(poll, vec![listener], ServerOptions::default(), control).unwrap();
    server.hub.miscount(b"/key");
    let server = std::thread::spawn(move || server.run());
    let connect = || {
        let mut client = std::net::TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        send(&mut client, &Request::Validate);
        client
    };
    let (mut other, mut client) = (connect(), connect());
    send(&mut other, &Request::GetNumKeys);
    other.read_exact(&mut [0; 8]).unwrap();
    send(&mut client, &Request::DeleteKey { key: Bytes::from_static(b"/key") });
    assert_eq!(server.join().unwrap(), Ended::HalfChanged);
    for mut it in [client, other] {
        assert_eq!(it.read(&mut [0; 8]).unwrap_or(0), 0, "it is closed without an answer");
    }
    assert!(std::net::TcpStream::connect(address).is_err());
}

fn send(client: &mut std::net::TcpStream, request: &Request) {
    let mut bytes = BytesMut::new();
    request.encode(&mut bytes);
    client.write_all(&bytes).unwrap();
}
