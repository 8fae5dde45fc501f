//! A table that is replaced by an empty one: no connection from before reads or writes the new one.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use elastic_rs::net::listen;
use elastic_rs::store::protocol::Request;
use elastic_rs::store::server::{ServerOptions, StoreServer, Upgrade};
use tokio::sync::mpsc::unbounded_channel;

const PATIENCE: Duration = Duration::from_secs(20);

fn start(options: ServerOptions) -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], options).unwrap()
}

fn connect(server: &StoreServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn send(stream: &mut TcpStream, requests: &[Request]) {
    let mut bytes = BytesMut::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    stream.write_all(&bytes).unwrap();
}

/// A connection that has greeted the server, and has had its answer.
fn client(server: &StoreServer) -> TcpStream {
    let mut stream = connect(server);
    send(&mut stream, &[Request::Validate, Request::Ping { nonce: 0x0403_0201 }]);
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [1, 2, 3, 4]);
    stream
}

fn set(name: &'static str) -> Request {
    Request::Set { key: Bytes::from_static(name.as_bytes()), value: Bytes::from_static(b"value") }
}

fn number_of_keys(client: &mut TcpStream) -> u64 {
    send(client, &[Request::GetNumKeys]);
    let mut count = [0; 8];
    client.read_exact(&mut count).unwrap();
    u64::from_le_bytes(count)
}

/// Read until the connection ends, by a close or a reset.
fn read_to_close(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("not closed: {error}"),
    }
}

#[test]
fn the_new_table_is_empty_and_waiters_of_the_old_one_are_closed() {
    let server = start(ServerOptions::default());
    let (mut writer, mut waiter, mut half) = (client(&server), client(&server), client(&server));
    send(&mut writer, &[set("old")]);
    assert_eq!(number_of_keys(&mut writer), 1);
    send(
        &mut waiter,
        &[Request::Wait { keys: vec![Bytes::from_static(b"new")] }, Request::QueueLen { key: Bytes::new() }],
    );
    waiter.read_exact(&mut [0; 8]).unwrap(); // the wait before it is open
    let mut request = BytesMut::new();
    set("new").encode(&mut request);
    half.write_all(&request[..request.len() - 1]).unwrap();
    assert_eq!(server.stats().waiting, 1);

    server.controller().replace_table();
    let stats = server.stats();
    assert_eq!((stats.keys, stats.stored_bytes, stats.waiting, stats.connections_open), (0, 0, 0, 0));
    // The other half would complete the request. The server may have reset the connection.
    let _ = half.write_all(&request[request.len() - 1..]);
    let mut later = client(&server);
    send(&mut later, &[set("new")]);
    assert_eq!(number_of_keys(&mut later), 1);
    for mut old in [writer, waiter, half] {
        assert_eq!(read_to_close(&mut old), b"", "nothing of the new table is answered, no release either");
    }
    assert_eq!(number_of_keys(&mut later), 1);
    assert_eq!(server.stats().rejected_total(), 0);
}

#[test]
fn connections_that_nobody_has_accepted_yet_do_not_reach_the_new_table() {
    let server = start(ServerOptions::default());
    for round in 0..20 {
        // More than are accepted before the server looks at anything else.
        let mut early: Vec<TcpStream> = (0..200).map(|_| connect(&server)).collect();
        for stream in &mut early {
            // The server may have closed it.
            send(stream, &[Request::Validate, set("early")]);
        }
        server.controller().replace_table();
        let mut later = client(&server);
        for stream in &mut early {
            assert_eq!(read_to_close(stream), b"");
        }
        assert_eq!(number_of_keys(&mut later), 0, "round {round}");
    }
}

#[test]
fn a_connection_that_has_not_spoken_yet_may_become_a_session_but_no_client() {
    let (to, mut sessions) = unbounded_channel();
    let upgrades = vec![Upgrade { magic: b"SESSION", to: to.into() }];
    let server = start(ServerOptions { upgrades, ..ServerOptions::default() });
    let (mut session, mut stale) = (connect(&server), connect(&server));
    server.controller().replace_table();
    send(&mut stale, &[Request::Validate, set("stale")]);
    assert_eq!(read_to_close(&mut stale), b"");
    session.write_all(b"SESSION").unwrap();
    assert_eq!(&sessions.blocking_recv().unwrap().first_bytes[..], b"SESSION");
    assert_eq!(number_of_keys(&mut client(&server)), 0);
}

#[test]
fn the_table_of_a_server_that_has_ended_needs_no_replacing() {
    let server = start(ServerOptions::default());
    let controller = server.controller();
    server.stop();
    controller.replace_table();
}
