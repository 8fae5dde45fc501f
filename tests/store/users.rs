//! A server that admits its own user and root alone, among the processes of its machine.
//!
//! Linux has users of threads, so a thread is another user here. Only root can do that.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use elastic_rs::net::listen;
use elastic_rs::proto::Request;
use elastic_rs::store::server::{Cause, LocalPeers, ServerOptions, StoreServer};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use socket2::SockRef;

/// Time limit of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Users that no process has.
pub const STRANGER: u32 = 65533;
const ANOTHER: u32 = 65532;
const ROOT: u32 = 0;

pub const SAME_USER: LocalPeers = LocalPeers::SameUser { way_out: "ask for help" };

/// Runs `what` as another user, on a thread. Only tests in modules named `for_root` may do that.
pub fn as_user<T: Send>(uid: u32, what: impl FnOnce() -> T + Send) -> T {
    let uid = Uid::from_raw(uid);
    let run = || {
        set_thread_res_uid(uid, uid, uid).expect("only root can be another user: leave tests in `for_root` out");
        what()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// A server on all addresses of this machine.
fn start(local_peers: LocalPeers) -> StoreServer {
    let listener = listen::bind_wildcard(0).unwrap();
    StoreServer::start(vec![listener], ServerOptions { local_peers, ..ServerOptions::default() }).unwrap()
}

/// Both loopbacks, and what the routes and interfaces of this machine have.
fn own_addresses(port: u16) -> Vec<SocketAddr> {
    let mut addresses = vec![
        SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        SocketAddr::from((Ipv4Addr::new(127, 0, 0, 9), port)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
    ];
    // For UDP this only chooses a route, if there is one.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    if socket.connect("198.51.100.1:9").is_ok() {
        addresses.push(SocketAddr::new(socket.local_addr().unwrap().ip(), port));
    }
    for line in std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default().lines() {
        let mut columns = line.split_ascii_whitespace();
        let ip = Ipv6Addr::from(u128::from_str_radix(columns.next().unwrap(), 16).unwrap());
        let interface = u32::from_str_radix(columns.next().unwrap(), 16).unwrap();
        let zone = if ip.is_unicast_link_local() { interface } else { 0 };
        addresses.push(SocketAddrV6::new(ip, port, 0, zone).into());
    }
    addresses
}

fn encode(requests: &[Request]) -> BytesMut {
    let mut bytes = BytesMut::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

/// What a client gets that greets the server at this address, and asks for an answer.
fn greeted(address: SocketAddr) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = vec![0; 4];
    let asked = stream.write_all(&encode(&[Request::Validate, Request::Ping { nonce: 0x0403_0201 }]));
    match asked.and_then(|()| stream.read_exact(&mut answer)) {
        Ok(()) => answer,
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("neither answered nor closed"),
        Err(_) => Vec::new(),
    }
}

const ANSWER: [u8; 4] = [1, 2, 3, 4];

mod for_root {
    use super::*;

    #[test]
    fn another_users_connections_are_closed_at_every_address_of_this_machine() {
        let server = start(SAME_USER);
        let addresses = own_addresses(server.port());
        for (count, &address) in addresses.iter().enumerate() {
            assert_eq!(as_user(STRANGER, || greeted(address)), Vec::<u8>::new(), "{address}");
            // Counted before the close.
            assert_eq!(server.stats().rejected(Cause::OtherUser), count as u64 + 1, "{address}");
            assert_eq!(greeted(address), ANSWER, "our own at {address}");
        }
        assert_eq!(server.stats().rejected_total(), addresses.len() as u64);
    }

    #[test]
    fn the_servers_user_and_root_are_served() {
        // Its thread has the user of the thread that starts it.
        let server = as_user(STRANGER, || start(SAME_USER));
        for address in own_addresses(server.port()) {
            for (uid, answer) in [(STRANGER, &ANSWER[..]), (ROOT, &ANSWER), (ANOTHER, &[])] {
                assert_eq!(as_user(uid, || greeted(address)), answer, "user {uid} at {address}");
            }
        }
    }

    #[test]
    fn a_server_serves_every_user_unless_it_is_told_otherwise() {
        let server = start(LocalPeers::default());
        assert_eq!(as_user(STRANGER, || greeted((Ipv4Addr::LOCALHOST, server.port()).into())), ANSWER);
    }

    /// They are closed before their first request is read. A client that is quick to go may have no user any more when its connection is
    /// accepted, and some kernels show root for it.
    #[test]
    fn requests_of_another_user_are_not_carried_out_however_quickly_it_goes() {
        const TRIES: u64 = 300;
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let set = |key: String| {
            let (key, value) = (Bytes::from(key), Bytes::from_static(b"v"));
            encode(&[Request::Validate, Request::Set { key, value }])
        };
        as_user(STRANGER, || {
            for number in 0..TRIES {
                let mut stream = TcpStream::connect(address).unwrap();
                // The server may have closed it already.
                let _ = stream.write_all(&set(format!("/stranger/{number}")));
                if number % 2 == 0 {
                    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                }
            }
        });
        // Accepted behind the others, of which some are gone before they are accepted.
        assert_eq!(greeted(address), ANSWER);
        assert_eq!(server.stats().keys, 0, "{:?}", server.stats());
        let mut friend = TcpStream::connect(address).unwrap();
        friend.write_all(&set("/friend".to_owned())).unwrap();
        friend.write_all(&encode(&[Request::Ping { nonce: 1 }])).unwrap();
        friend.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(server.stats().keys, 1);
    }

    /// Check 10 of the specification's part B. The fastest of many, because other processes share the machine.
    #[test]
    fn another_users_connection_is_closed_within_a_millisecond() {
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let fastest = as_user(STRANGER, || {
            let times = (0..100).map(|_| {
                let begin = Instant::now();
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
                begin.elapsed()
            });
            times.min().unwrap()
        });
        assert!(fastest < Duration::from_millis(1), "{fastest:?}");
        assert_eq!(server.stats().rejected(Cause::OtherUser), 100);
    }
}
