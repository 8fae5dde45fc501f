//! The server, seen by its clients and its owner: clients that break the protocol or stay silent, and the server's end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use elastic_rs::net::listen;
use elastic_rs::store::TableLimits;
use elastic_rs::store::protocol::{Limits, Request};
use elastic_rs::store::server::{Cause, ServerOptions, StoreServer, Upgrade};
use tokio::sync::mpsc::unbounded_channel;

/// Time limit of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(20);

fn start(options: ServerOptions) -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], options).unwrap()
}

fn connect(server: &StoreServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connection that has sent VALIDATE and got the answer to its PING.
fn client(server: &StoreServer) -> TcpStream {
    let mut stream = connect(server);
    send(&mut stream, &[Request::Validate, Request::Ping { nonce: 0x0403_0201 }]);
    assert_eq!(read(&mut stream, 4), [1, 2, 3, 4]);
    stream
}

fn send(stream: &mut TcpStream, requests: &[Request]) {
    let mut bytes = BytesMut::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    stream.write_all(&bytes).unwrap();
}

fn read(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
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

fn key(name: &'static str) -> Bytes {
    Bytes::from_static(name.as_bytes())
}

fn set(name: &'static str, value: impl Into<Bytes>) -> Request {
    Request::Set { key: key(name), value: value.into() }
}

fn wait(name: &'static str) -> Request {
    Request::Wait { keys: vec![key(name)] }
}

/// Wait until a condition on the server's counters holds.
fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Assert that the server answers a PING.
fn assert_serves(stream: &mut TcpStream) {
    send(stream, &[Request::Ping { nonce: 7 }]);
    assert_eq!(read(stream, 4), [7, 0, 0, 0]);
}

#[test]
fn unknown_clients_are_closed_and_counted_and_disturb_nobody() {
    let server = start(ServerOptions::default());
    let mut friend = client(&server);
    let inputs: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03 a TLS client hello",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\0\0\0\x2a{\"length\":\"prefixed\"}",
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff a SET without VALIDATE",
        b"\xff\xfe\xfd\xfc",
    ];
    for (count, bytes) in (1..).zip(inputs) {
        let mut client = connect(&server);
        // The server may close before all has been written.
        let _ = client.write_all(bytes);
        assert_eq!(read_to_close(&mut client), b"", "{}", bytes.escape_ascii());
        until("counted", || server.stats().rejected(Cause::Foreign) == count);
        assert_serves(&mut friend);
    }
    let stats = server.stats();
    assert_eq!((stats.connections_open, stats.connections_accepted), (1, 1 + inputs.len() as u64));
    assert_eq!(stats.rejected_total(), inputs.len() as u64);
}

/// Set `count` keys with empty values, named `0/…` and `1/…`, and wait until they are set.
fn set_many(client: &mut TcpStream, count: usize) {
    for half in 0..2 {
        let pairs = (0..count / 2).map(|number| (Bytes::from(format!("{half}/{number:010}")), Bytes::new()));
        send(client, &[Request::MultiSet { pairs: pairs.collect() }]);
    }
    assert_serves(client);
}

/// Each list has several megabytes. The sockets' buffers hold the first ones while their client does not read.
#[test]
fn a_client_that_lists_many_keys_again_and_again_gives_others_their_turn() {
    const KEYS: usize = 200_000;
    const LISTS: usize = 14;
    let server = start(ServerOptions::default());
    let (mut lister, mut other) = (client(&server), client(&server));
    set_many(&mut other, KEYS);
    send(&mut lister, &vec![Request::ListKeys; LISTS]);
    let mut counts = vec![read(&mut lister, 8)];
    send(&mut other, &[set("3/more", "")]);
    assert_serves(&mut other);
    for list in 0..LISTS {
        let count = u64::from_le_bytes(counts[list][..].try_into().unwrap()) as usize;
        let listed = read(&mut lister, KEYS * (8 + 12) + (count - KEYS) * (8 + 6));
        assert_eq!(listed.ends_with(b"3/more"), count > KEYS);
        if list + 1 < LISTS {
            counts.push(read(&mut lister, 8));
        }
    }
    assert_eq!(counts[0], (KEYS as u64).to_le_bytes(), "the first list began before the other client's SET");
    assert_eq!(counts[LISTS - 1], (KEYS as u64 + 1).to_le_bytes(), "the SET was applied before the last list");
}

/// A reply to `LIST_KEYS` is written in several pieces. The reply that ends a wait must not come between them.
#[test]
fn a_wait_that_ends_while_keys_are_listed_is_answered_behind_the_list() {
    const KEYS: usize = 200_000;
    const LISTS: usize = 6;
    let server = start(ServerOptions::default());
    let (mut lister, mut other) = (client(&server), client(&server));
    set_many(&mut other, KEYS);
    // The protocol allows requests during a wait, although no client of PyTorch makes them.
    let lists = vec![Request::ListKeys; LISTS];
    send(&mut lister, &[&[wait("0/awaited")], &lists[..], &[Request::Ping { nonce: 7 }]].concat());
    let mut is_over = false;
    let mut first = read(&mut lister, 1);
    for _ in 0..LISTS {
        let count = [first, read(&mut lister, 7)].concat();
        let count = u64::from_le_bytes(count.try_into().unwrap()) as usize;
        if !is_over {
            // The sockets' buffers hold the first lists, which are not read yet.
            send(&mut other, &[set("0/awaited", "")]);
            assert_serves(&mut other);
        }
        let listed = read(&mut lister, KEYS * (8 + 12) + (count - KEYS) * (8 + 9));
        assert!(listed[..KEYS / 2 * 20].chunks_exact(20).is_sorted());
        first = read(&mut lister, 1);
        if first == [0] {
            assert!(!is_over, "the wait is answered once");
            is_over = true;
            first = read(&mut lister, 1);
        }
    }
    assert!(is_over, "the wait is answered after a list, and before the PING that follows the lists");
    assert_eq!([first, read(&mut lister, 3)].concat(), [7, 0, 0, 0]);
}

#[test]
fn a_connection_that_says_nothing_is_closed_after_the_hello_timeout() {
    let timeout = Duration::from_millis(100);
    let server = start(ServerOptions { hello_timeout: timeout, ..ServerOptions::default() });
    let start = Instant::now();
    let mut silent = connect(&server);
    let mut half = connect(&server);
    half.write_all(b"\0\xce").unwrap();
    let mut friend = client(&server);
    assert_eq!(read_to_close(&mut silent), b"");
    assert!(start.elapsed() >= timeout, "not before its time");
    assert_eq!(read_to_close(&mut half), b"");
    until("counted", || server.stats().rejected(Cause::HelloTimeout) == 2);
    // A client that has sent VALIDATE may stay silent. This one was silent for longer than the others.
    assert_serves(&mut friend);
}

/// The endpoint's store, where the job has no use for it. Its coordinator's sessions are upgrades.
#[test]
fn unknown_clients_fill_no_store_that_nothing_uses_and_keep_no_session_out() {
    const MIB: usize = 1 << 20;
    let (to, mut sessions) = unbounded_channel();
    let upgrades = vec![Upgrade { magic: b"ELRZ", to: to.into() }];
    let server = start(ServerOptions { max_clients: 8, upgrades, ..ServerOptions::for_unused_store() });
    let mut clients: Vec<TcpStream> = (0..8).map(|_| client(&server)).collect();
    let mut ninth = connect(&server);
    send(&mut ninth, &[Request::Validate, Request::Ping { nonce: 1 }]);
    assert_eq!(read_to_close(&mut ninth), b"");
    assert_eq!(server.stats().rejected(Cause::TooManyConnections), 1);
    connect(&server).write_all(b"ELRZ").unwrap();
    until("handed over", || sessions.try_recv().is_ok());
    // Keys.
    let mut keys = clients.pop().unwrap();
    for some in 0..20 {
        let pairs = (0..1000).map(|number| (Bytes::from(format!("{some} {number}")), Bytes::new())).collect();
        let mut bytes = BytesMut::new();
        Request::MultiSet { pairs }.encode(&mut bytes);
        // The server may have closed it already.
        let _ = keys.write_all(&bytes);
    }
    read_to_close(&mut keys);
    until("counted", || server.stats().rejected(Cause::Full) == 1);
    assert!((16_000..=16_384).contains(&server.stats().keys), "{:?}", server.stats());
    // Bytes: of one value, and of all.
    let mut large = clients.pop().unwrap();
    let mut bytes = BytesMut::new();
    set("large", vec![0; (64 << 10) + 1]).encode(&mut bytes);
    let _ = large.write_all(&bytes);
    assert_eq!(read_to_close(&mut large), b"");
    let mut many = clients.pop().unwrap();
    for number in 0..300 {
        let mut bytes = BytesMut::new();
        Request::Set { key: Bytes::from(number.to_string()), value: vec![0; 60 << 10].into() }.encode(&mut bytes);
        let _ = many.write_all(&bytes);
    }
    read_to_close(&mut many);
    until("counted", || server.stats().rejected(Cause::Full) == 2);
    assert!(server.stats().stored_bytes <= 16 * MIB as u64, "{:?}", server.stats());
    assert_serves(clients.last_mut().unwrap());
}

#[test]
fn each_violation_costs_its_own_connection_and_has_its_own_count() {
    let options = ServerOptions {
        table: TableLimits { keys: 3, ..TableLimits::default() },
        limits: Limits { value_bytes: 1000, ..Limits::default() },
        ..ServerOptions::default()
    };
    let server = start(options);
    let mut friend = client(&server);
    send(&mut friend, &[set("text", "abc")]);
    assert_serves(&mut friend);
    let many = (0..3).map(|number| (Bytes::from(format!("{number}")), Bytes::new())).collect();
    let cases: [(Cause, Vec<Request>); 5] = [
        (Cause::Protocol, vec![Request::Validate]),
        (Cause::TooLong, vec![set("k", vec![0; 1001])]),
        (Cause::NotANumber, vec![Request::Add { key: key("text"), amount: 1 }]),
        (Cause::AlreadyWaiting, vec![wait("never"), wait("never")]),
        (Cause::Full, vec![Request::MultiSet { pairs: many }]),
    ];
    for (cause, requests) in cases {
        let mut bad = client(&server);
        // The proper request before the violation is answered.
        send(&mut bad, &[Request::Ping { nonce: 5 }]);
        send(&mut bad, &requests);
        assert_eq!(read_to_close(&mut bad), [5, 0, 0, 0], "{cause:?}");
        until("counted", || server.stats().rejected(cause) == 1);
        assert_serves(&mut friend);
    }
    assert_eq!((server.stats().keys, server.stats().waiting), (1, 0));
}

#[test]
fn half_a_request_holds_up_nobody_and_vanishes_with_its_client() {
    let server = start(ServerOptions::default());
    let mut slow = client(&server);
    let mut bytes = BytesMut::new();
    set("big", vec![1; 1 << 20]).encode(&mut bytes);
    slow.write_all(&bytes[..bytes.len() - 1]).unwrap();
    let mut friend = client(&server);
    assert_serves(&mut friend);
    drop(slow);
    until("closed", || server.stats().connections_open == 1);
    assert_eq!(server.stats().keys, 0, "an incomplete request is dropped");
    assert_eq!(server.stats().rejected_total(), 0, "a client may leave at any time");
}

#[test]
fn a_client_that_vanishes_while_waiting_is_forgotten() {
    let server = start(ServerOptions::default());
    let mut friend = client(&server);
    for leave in [|stream: TcpStream| drop(stream), |stream: TcpStream| stream.shutdown(Shutdown::Write).unwrap()] {
        let mut waiter = client(&server);
        send(&mut waiter, &[wait("k")]);
        until("waiting", || server.stats().waiting == 1);
        leave(waiter);
        until("forgotten", || server.stats().waiting == 0 && server.stats().connections_open == 1);
    }
    send(&mut friend, &[set("k", "v")]);
    assert_serves(&mut friend);
}

#[test]
fn a_half_closed_client_gets_its_answers_first() {
    let server = start(ServerOptions::default());
    let mut stream = client(&server);
    // More than the socket's buffers hold, so that it cannot have been written before the end was noticed.
    let value = vec![7; 8 << 20];
    send(&mut stream, &[set("k", value.clone()), Request::Get { key: key("k") }, Request::GetNumKeys]);
    stream.shutdown(Shutdown::Write).unwrap();
    let got = read_to_close(&mut stream);
    assert_eq!(got.len(), 8 + value.len() + 8);
    assert_eq!(got[got.len() - 8..], 1i64.to_le_bytes());
}

#[test]
fn a_client_that_never_reads_is_bounded_and_then_closed() {
    let options = ServerOptions { reply_buffer_bytes: 1 << 20, ..ServerOptions::default() };
    let server = start(options);
    let mut friend = client(&server);
    send(&mut friend, &[set("k", vec![7; 4 << 20])]);
    assert_serves(&mut friend);
    let mut deaf = client(&server);
    // The socket's buffers take a small part of this.
    for _ in 0..100 {
        let mut get = BytesMut::new();
        Request::Get { key: key("k") }.encode(&mut get);
        if deaf.write_all(&get).is_err() {
            break;
        }
    }
    until("closed", || server.stats().rejected(Cause::NotReading) == 1);
    assert_serves(&mut friend);
    assert_eq!(server.stats().connections_open, 1);
}

#[test]
fn one_reply_may_be_larger_than_the_reply_buffer() {
    let server = start(ServerOptions { reply_buffer_bytes: 1000, ..ServerOptions::default() });
    let mut stream = client(&server);
    let value = vec![7; 8 << 20];
    let append = Request::Append { key: key("k"), value: Bytes::from_static(b"!") };
    send(&mut stream, &[set("k", value.clone()), append, Request::Get { key: key("k") }]);
    let got = read(&mut stream, 8 + value.len() + 1);
    assert_eq!(got[..8], (value.len() as u64 + 1).to_le_bytes());
    assert_eq!(got.last(), Some(&b'!'));
    assert_serves(&mut stream);
}

#[test]
fn a_connection_with_an_upgrades_magic_is_handed_over_with_all_its_bytes() {
    let (to, mut taken) = unbounded_channel();
    let upgrades = vec![Upgrade { magic: b"ERS/1\n", to: to.into() }];
    let server = start(ServerOptions { upgrades, ..ServerOptions::default() });
    let mut stream = connect(&server);
    stream.write_all(b"ERS/").unwrap();
    stream.write_all(b"1\nhello").unwrap();
    let upgraded = taken.blocking_recv().unwrap();
    assert_eq!(upgraded.peer, stream.local_addr().unwrap());
    assert_eq!(upgraded.local, server.local_addr());
    assert!(upgraded.first_bytes.starts_with(b"ERS/1\n"), "{:?}", upgraded.first_bytes);
    // The receiver of the upgrade owns the connection now. The server neither reads from it nor closes it.
    let mut theirs = upgraded.stream;
    theirs.set_nonblocking(false).unwrap();
    let mut rest = vec![0; b"ERS/1\nhello".len() - upgraded.first_bytes.len()];
    theirs.read_exact(&mut rest).unwrap();
    assert_eq!([&upgraded.first_bytes[..], &rest].concat(), b"ERS/1\nhello");
    theirs.write_all(b"welcome").unwrap();
    assert_eq!(read(&mut stream, 7), b"welcome");
    // The server counts an upgrade after it has handed the connection over.
    until("the upgrade is counted", || server.stats().connections_upgraded == 1);
    assert_eq!(server.stats().connections_open, 0);

    drop(taken);
    let mut late = connect(&server);
    late.write_all(b"ERS/1\n").unwrap();
    assert_eq!(read_to_close(&mut late), b"");
    until("counted", || server.stats().rejected(Cause::UpgradeGone) == 1);
}

#[test]
fn drain_waits_for_the_last_client_to_leave() {
    let server = start(ServerOptions::default());
    let mut stream = client(&server);
    let (sender, receiver) = mpsc::channel();
    let leaver = thread::spawn(move || {
        receiver.recv().unwrap();
        assert_serves(&mut stream);
        stream.shutdown(Shutdown::Write).unwrap();
        // The connection ends with a close, not with a reset.
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    });
    sender.send(()).unwrap();
    assert!(server.drain(PATIENCE), "all clients left");
    leaver.join().unwrap();
    assert!(TcpStream::connect(server.local_addr()).is_err(), "the server no longer listens");
    assert!(server.drain(PATIENCE), "a second call is harmless");
}

#[test]
fn drain_ends_in_time_although_clients_stay() {
    let server = start(ServerOptions::default());
    let mut stays = client(&server);
    let (start, timeout) = (Instant::now(), Duration::from_millis(50));
    assert!(!server.drain(timeout));
    assert!(start.elapsed() >= timeout);
    assert_eq!(read_to_close(&mut stays), b"");
}

#[test]
fn dropping_the_server_closes_everything_and_frees_the_port() {
    let server = start(ServerOptions::default());
    let address = server.local_addr();
    let mut stream = client(&server);
    send(&mut stream, &[wait("never")]);
    until("waiting", || server.stats().waiting == 1);
    drop(server);
    assert_eq!(read_to_close(&mut stream), b"");
    listen::bind(address).unwrap();
}

#[test]
fn a_released_server_ends_with_its_owners_connection() {
    let server = start(ServerOptions::default());
    let address = server.local_addr();
    let owner = client(&server);
    let mut other = client(&server);
    server.stop_when_closed(owner.local_addr().unwrap());
    drop(server);
    assert_serves(&mut other);
    TcpStream::connect(address).expect("it still listens");
    drop(owner);
    assert_eq!(read_to_close(&mut other), b"");
}

#[test]
fn a_server_lives_until_the_last_of_its_owners_has_gone() {
    let server = start(ServerOptions::default());
    let (first, second) = (client(&server), client(&server));
    let mut other = client(&server);
    server.stop_when_closed(first.local_addr().unwrap());
    server.stop_when_closed(second.local_addr().unwrap());
    drop(first);
    until("first owner gone", || server.stats().connections_open == 2);
    assert_serves(&mut other);
    assert!(!server.has_ended());
    drop(second);
    assert_eq!(read_to_close(&mut other), b"");
    until("ended", || server.has_ended());
}

#[test]
fn a_server_waits_for_an_expected_owner() {
    let server = start(ServerOptions::default());
    let first = client(&server);
    let mut other = client(&server);
    server.stop_when_closed(first.local_addr().unwrap());
    assert!(server.expect_owner());
    drop(first);
    until("first owner gone", || server.stats().connections_open == 1);
    assert_serves(&mut other);
    server.stop_when_closed(other.local_addr().unwrap());
    assert_serves(&mut other);
    drop(other);
    until("ended", || server.has_ended());
    assert!(!server.expect_owner(), "an ended server takes no further owner");
}

#[test]
fn a_server_ends_when_its_expected_owner_is_given_up() {
    let server = start(ServerOptions::default());
    assert!(server.expect_owner());
    server.give_up_owner();
    until("ended", || server.has_ended());
}

#[test]
fn an_expected_owner_does_not_keep_a_server_whose_handle_is_dropped() {
    let server = start(ServerOptions::default());
    let owner = client(&server);
    let mut other = client(&server);
    server.stop_when_closed(owner.local_addr().unwrap());
    assert!(server.expect_owner());
    drop(server);
    assert_serves(&mut other);
    drop(owner);
    assert_eq!(read_to_close(&mut other), b"");
}

#[test]
fn an_owner_is_known_by_its_address_in_either_family() {
    let server = StoreServer::start(vec![listen::bind_wildcard(0).unwrap()], ServerOptions::default()).unwrap();
    let mut owner = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).unwrap();
    send(&mut owner, &[Request::Validate, Request::Ping { nonce: 1 }]);
    read(&mut owner, 4);
    server.stop_when_closed(owner.local_addr().unwrap());
    assert_serves(&mut owner);
    assert!(!server.has_ended());
    drop(owner);
    until("ended", || server.has_ended());
}

#[test]
fn an_owner_that_has_gone_already_ends_the_server() {
    let server = start(ServerOptions::default());
    server.stop_when_closed(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    until("ended", || server.has_ended());
    server.stop();
}

#[test]
fn many_connections_wait_and_are_released_by_one_set() {
    let server = start(ServerOptions::default());
    let mut waiters: Vec<TcpStream> = (0..300).map(|_| client(&server)).collect();
    waiters.iter_mut().for_each(|waiter| send(waiter, &[wait("go")]));
    until("waiting", || server.stats().waiting == 300);
    let mut setter = client(&server);
    send(&mut setter, &[set("go", "")]);
    for waiter in &mut waiters {
        assert_eq!(read(waiter, 1), [0]);
        assert_serves(waiter);
    }
    assert_eq!(server.stats().connections_open, 301);
    drop(waiters);
    until("closed", || server.stats().connections_open == 1);
}

#[test]
fn connections_above_the_limit_are_turned_away() {
    let server = start(ServerOptions { max_connections: 2, ..ServerOptions::default() });
    let (mut first, second) = (client(&server), client(&server));
    let mut third = connect(&server);
    assert_eq!(read_to_close(&mut third), b"");
    assert_eq!(server.stats().rejected(Cause::TooManyConnections), 1);
    assert_serves(&mut first);
    drop(second);
    until("closed", || server.stats().connections_open == 1);
    client(&server);
}

#[test]
fn all_listeners_lead_to_one_table() {
    let listeners = vec![listen::bind_wildcard(0).unwrap(), listen::bind_wildcard(0).unwrap()];
    let ports = [0, 1].map(|at: usize| listeners[at].local_addr().unwrap().port());
    let server = StoreServer::start(listeners, ServerOptions::default()).unwrap();
    let mut streams = ports.map(|port| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap());
    send(&mut streams[0], &[Request::Validate, set("k", "v")]);
    send(&mut streams[1], &[Request::Validate, wait("k")]);
    assert_eq!(read(&mut streams[1], 1), [0]);
    until("counted", || server.stats().requests == 2);
}

#[test]
fn a_server_ends_when_its_handle_is_dropped_although_a_controller_is_left() {
    let server = start(ServerOptions::default());
    let address = server.local_addr();
    let mut other = client(&server);
    let controller = server.controller();
    drop(server);
    assert_eq!(read_to_close(&mut other), b"");
    assert!(TcpStream::connect(address).is_err());
    assert_eq!(controller.stats().connections_open, 0);
}
