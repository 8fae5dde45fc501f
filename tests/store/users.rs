//! A server that admits its own user and root alone, among the processes of its machine.
//!
//! Linux has users of threads, so a thread is another user here. Only root can do that.

use std::env;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use elastic_rs::net::listen;
use elastic_rs::net::local::is_here;
use elastic_rs::store::protocol::Request;
use elastic_rs::store::server::{Cause, LocalPeers, ServerOptions, StoreServer};
use rustix::process::{Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::set_thread_res_uid;
use socket2::{Domain, SockRef, Socket, Type};

use crate::alone::alone;
use crate::hidden_peer::{second_interface, send_and_hide};

/// Time limit of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Users that no process has.
pub const OTHER_UID: u32 = 65533;
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
pub fn greeted(address: SocketAddr) -> Vec<u8> {
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

pub const ANSWER: [u8; 4] = [1, 2, 3, 4];

/// A greeting, and a request that sets a key.
fn set(key: String) -> BytesMut {
    let (key, value) = (Bytes::from(key), Bytes::from_static(b"v"));
    encode(&[Request::Validate, Request::Set { key, value }])
}

mod for_root {
    use super::*;

    #[test]
    fn another_users_connections_are_closed_at_every_address_of_this_machine() {
        let server = start(SAME_USER);
        let addresses = own_addresses(server.port());
        for (count, &address) in addresses.iter().enumerate() {
            assert_eq!(as_user(OTHER_UID, || greeted(address)), Vec::<u8>::new(), "{address}");
            // Counted before the close.
            assert_eq!(server.stats().rejected(Cause::OtherUser), count as u64 + 1, "{address}");
            assert_eq!(greeted(address), ANSWER, "our own at {address}");
        }
        assert_eq!(server.stats().rejected_total(), addresses.len() as u64);
    }

    #[test]
    fn the_servers_user_and_root_are_served() {
        // Its thread has the user of the thread that starts it.
        let server = as_user(OTHER_UID, || start(SAME_USER));
        for address in own_addresses(server.port()) {
            for (uid, answer) in [(OTHER_UID, &ANSWER[..]), (ROOT, &ANSWER), (ANOTHER, &[])] {
                assert_eq!(as_user(uid, || greeted(address)), answer, "user {uid} at {address}");
            }
        }
    }

    #[test]
    fn a_server_serves_every_user_by_default() {
        let server = start(LocalPeers::default());
        assert_eq!(as_user(OTHER_UID, || greeted((Ipv4Addr::LOCALHOST, server.port()).into())), ANSWER);
    }

    /// They are closed before their first request is read. A client that is quick to go may have no user any more when its connection is
    /// accepted, and some kernels show root for it.
    #[test]
    fn requests_of_another_user_are_not_carried_out_however_quickly_it_goes() {
        const TRIES: u64 = 300;
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        as_user(OTHER_UID, || {
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

    #[test]
    fn another_user_that_hides_its_socket_3000_times_writes_nothing_and_holds_no_descriptor() {
        const NAME: &str =
            "users::for_root::another_user_that_hides_its_socket_3000_times_writes_nothing_and_holds_no_descriptor";
        const TRIES: u64 = 3000;
        let Some(interface) = second_interface().filter(|_| alone(NAME)) else { return };
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let before = descriptors();
        as_user(OTHER_UID, || {
            (0..TRIES).for_each(|number| send_and_hide(address, &interface, &set(format!("/stranger/{number}"))))
        });
        let limit = Instant::now() + PATIENCE;
        while server.stats().connections_accepted < TRIES && server.stats().accept_errors == 0 {
            assert!(Instant::now() < limit, "{:?}", server.stats());
            thread::yield_now();
        }
        // Answered after the others: each of them has been judged by then.
        assert_eq!(greeted(address), ANSWER);
        let stats = server.stats();
        assert_eq!((stats.keys, stats.accept_errors), (0, 0), "{stats:?}");
        while descriptors() != before {
            assert!(Instant::now() < limit, "{} of {before}", descriptors());
            thread::yield_now();
        }
        assert_eq!(stats.rejected(Cause::OtherUser), TRIES, "{stats:?}");
    }

    /// Set in the process that the next test starts in a user namespace.
    const IN_A_NAMESPACE: &str = "ELASTIC_RS_TEST_USERS_IN_A_NAMESPACE";

    /// The server's namespace has a number for its own user alone.
    #[test]
    fn another_user_outside_the_servers_user_namespace_is_refused() {
        if env::var_os(IN_A_NAMESPACE).is_some() {
            let server = start(SAME_USER);
            println!("\nat {}", SocketAddr::from((Ipv4Addr::LOCALHOST, server.port())));
            // Until the visits are over.
            io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
            assert_eq!(server.stats().rejected(Cause::OtherUser), 1, "{:?}", server.stats());
            return;
        }
        const NAME: &str = "users::for_root::another_user_outside_the_servers_user_namespace_is_refused";
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]).arg(env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]).env(IN_A_NAMESPACE, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| line.strip_prefix("at ").map(|at| at.parse::<SocketAddr>().unwrap()));
        let answers = address.map(|at| (as_user(OTHER_UID, || greeted(at)), greeted(at)));
        // The process ends with its standard input.
        drop(child.stdin.take());
        let ended = child.wait().unwrap();
        let Some(answers) = answers else { return println!("not tested: no user namespaces here") };
        assert_eq!(answers, (Vec::new(), ANSWER.to_vec()));
        assert!(ended.success(), "{ended}");
    }

    /// The last free one is taken by the connection itself.
    #[test]
    fn another_user_is_refused_and_our_own_served_when_no_descriptor_is_free() {
        const NAME: &str = "users::for_root::another_user_is_refused_and_our_own_served_when_no_descriptor_is_free";
        if !alone(NAME) {
            return;
        }
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let limit = getrlimit(Resource::Nofile);
        for (uid, answer) in [(OTHER_UID, &[][..]), (ROOT, &ANSWER), (OTHER_UID, &[])] {
            let client = as_user(uid, || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap());
            // Descriptors are numbered from the lowest free one.
            let next = File::open("/dev/null").unwrap().as_raw_fd() as u64;
            setrlimit(Resource::Nofile, Rlimit { current: Some(next + 1), maximum: limit.maximum }).unwrap();
            client.connect(&address.into()).unwrap();
            let mut client = TcpStream::from(client);
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut got = vec![0; answer.len().max(1)];
            let _ = client.write_all(&encode(&[Request::Validate, Request::Ping { nonce: 0x0403_0201 }]));
            let count = client.read(&mut got).unwrap_or(0);
            assert_eq!(&got[..count], answer, "uid {uid}");
            // Addresses that are not loopback are tried out, for which no descriptor is left while the connection is open.
            if uid == ROOT {
                let [one, other] = ["198.51.100.1:1", "198.51.100.2:1"].map(|text| text.parse().unwrap());
                assert!(is_here(one, other).is_err());
            }
            setrlimit(Resource::Nofile, limit).unwrap();
        }
        assert_eq!(server.stats().rejected(Cause::OtherUser), 2, "{:?}", server.stats());
    }

    fn descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    /// Check 10 of the specification's part B. The fastest of many, because other processes share the machine.
    #[test]
    fn another_users_connection_is_closed_within_a_millisecond() {
        let server = start(SAME_USER);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let fastest = as_user(OTHER_UID, || {
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
