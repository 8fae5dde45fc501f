use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use socket2::{Domain, SockRef, Socket, Type};

use super::*;
use crate::net::listen::bind_wildcard;

/// A user that no process has.
const OTHER_UID: u32 = 65533;

/// Runs `open` as another user: on a thread, since Linux has users of threads. `None` without the right to do so.
fn as_other_user<T: Send>(open: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let uid = Uid::from_raw(OTHER_UID);
        let thread = scope.spawn(move || set_thread_res_uid(uid, uid, uid).ok().map(|()| open()));
        thread.join().unwrap()
    })
}

/// A connection: its listener, the client's end, and ours.
struct Pair {
    _listener: TcpListener,
    client: Socket,
    server: TcpStream,
    /// The client's address. It cannot be read from a connection that was reset.
    peer: SocketAddr,
}

fn connected(to: IpAddr, zone: u32, prepare: impl FnOnce(&Socket)) -> Pair {
    let listener = bind_wildcard(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(false).unwrap();
    let address = match to {
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, zone).into(),
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), port),
    };
    let client = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
    prepare(&client);
    client.connect(&address.into()).unwrap();
    let (server, peer) = listener.accept().unwrap();
    Pair { _listener: listener, client, server, peer }
}

fn plainly(to: impl Into<IpAddr>) -> Pair {
    connected(to.into(), 0, |_| ())
}

impl Pair {
    fn user_by(&self, users: &mut PeerUsers) -> PeerUser {
        users.find(&self.server, self.server.local_addr().unwrap(), self.peer)
    }
}

/// As a server opens it that listens on all addresses.
fn opened() -> PeerUsers {
    let near = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 29400));
    PeerUsers::open(near, geteuid().as_raw()).unwrap().expect("this kernel names users")
}

/// Both ways of asking, each with its name.
fn ways() -> [(&'static str, PeerUsers); 2] {
    [("netlink", opened()), ("/proc", PeerUsers { way: Way::proc().unwrap(), sequence: 0 })]
}

/// Addresses of this machine, with zones: both loopbacks, a mapped one, and what its routes and interfaces have.
fn own_addresses() -> Vec<(IpAddr, u32)> {
    let mut addresses: Vec<(IpAddr, u32)> = vec![
        (Ipv4Addr::LOCALHOST.into(), 0),
        (Ipv4Addr::new(127, 0, 0, 9).into(), 0),
        (Ipv6Addr::LOCALHOST.into(), 0),
        (Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), 0),
    ];
    // For UDP this only chooses a route, if there is one.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    if socket.connect("198.51.100.1:9").is_ok() {
        addresses.push((socket.local_addr().unwrap().ip(), 0));
    }
    let table = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    for line in table.lines() {
        let mut columns = line.split_ascii_whitespace();
        let ip = Ipv6Addr::from(u128::from_str_radix(columns.next().unwrap(), 16).unwrap());
        let interface = u32::from_str_radix(columns.next().unwrap(), 16).unwrap();
        addresses.push((ip.into(), if ip.is_unicast_link_local() { interface } else { 0 }));
    }
    addresses
}

#[test]
fn our_own_connections_are_found_at_every_address_of_this_machine() {
    for (way, mut users) in ways() {
        for (ip, zone) in own_addresses() {
            let pair = connected(ip, zone, |_| ());
            assert_eq!(pair.user_by(&mut users), PeerUser::Uid(geteuid().as_raw()), "{way}: {ip}%{zone}");
        }
    }
    assert!(matches!(opened().way, Way::Netlink(_)), "this kernel answers");
}

/// Every address at which a server may listen.
#[test]
fn a_way_is_opened_near_every_address_and_not_for_a_user_that_the_kernel_does_not_name() {
    let own = geteuid().as_raw();
    for (ip, zone) in own_addresses() {
        let near = match ip {
            IpAddr::V6(ip) => SocketAddrV6::new(ip, 29400, 0, zone).into(),
            IpAddr::V4(ip) => SocketAddr::new(ip.into(), 29400),
        };
        assert!(PeerUsers::open(near, own).unwrap().is_some(), "{ip}%{zone}");
        assert!(PeerUsers::open(near, own + 1).unwrap().is_none(), "{ip}%{zone}");
    }
}

/// The same address and port, while somebody is about to connect from there.
#[test]
fn a_socket_that_is_not_connected_yet_is_nobodys_end() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A listener whose queue is full answers no more, so that the next client stays on its way.
    let at = listener.local_addr().unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let client = || {
        let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        client.set_nonblocking(true).unwrap();
        let begun = client.connect(&at.into());
        (client, begun)
    };
    let filling: Vec<_> = (0..8).map(|_| client()).collect();
    let late = &filling.last().unwrap().0;
    let its = Ends { local: late.local_addr().unwrap().as_socket().unwrap(), remote: at };
    for (way, mut users) in ways() {
        assert_eq!(users.ask(its, 0).unwrap(), None, "{way}");
    }
}

mod for_root {
    use super::*;

    #[test]
    fn another_users_connections_are_found_with_their_user() {
        for (way, mut users) in ways() {
            for (ip, zone) in own_addresses() {
                let pair = as_other_user(|| connected(ip, zone, |_| ())).expect("only root can be another user");
                assert_eq!(pair.user_by(&mut users), PeerUser::Uid(OTHER_UID), "{way}: {ip}%{zone}");
            }
        }
    }
}

/// The kernel finds such a socket only if it is asked for it by its interface.
#[test]
fn a_socket_that_is_bound_to_an_interface_hides_nobody() {
    let to_loopback = |client: &Socket| client.bind_device(Some(b"lo")).unwrap();
    for (way, mut users) in ways() {
        for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let pair = connected(ip, 0, to_loopback);
            assert_eq!(pair.user_by(&mut users), PeerUser::Uid(geteuid().as_raw()), "{way}: {ip}");
        }
    }
}

/// For a socket that is closed or reset, some kernels show root as its user, or none. What was sent before can still be read.
#[test]
fn a_socket_that_was_closed_belongs_to_nobody() {
    type Prepare = fn(&mut Pair);
    let closed: [(&str, Prepare); 3] = [
        ("closed", |_| ()),
        ("reset", |pair| pair.client.set_linger(Some(Duration::ZERO)).unwrap()),
        ("closed with more to send than fits", |pair| {
            pair.client.set_nonblocking(true).unwrap();
            while pair.client.send(&[0; 65536]).is_ok() {}
        }),
    ];
    for (how, prepare) in closed {
        for (way, mut users) in ways() {
            let mut pair = plainly(Ipv4Addr::LOCALHOST);
            prepare(&mut pair);
            pair.client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            // The reset is on its way through the loopback interface.
            let limit = std::time::Instant::now() + Duration::from_secs(20);
            while how == "reset" && !is_over(&pair.server) {
                assert!(std::time::Instant::now() < limit);
            }
            assert_eq!(pair.user_by(&mut users), PeerUser::Gone, "{how}, {way}");
        }
    }
}

#[test]
fn a_socket_that_is_half_closed_still_has_its_user() {
    for (way, mut users) in ways() {
        let pair = plainly(Ipv4Addr::LOCALHOST);
        SockRef::from(&pair.client).shutdown(Shutdown::Write).unwrap();
        assert_eq!(pair.user_by(&mut users), PeerUser::Uid(geteuid().as_raw()), "{way}");
    }
}

/// A reset may arrive while somebody else connects from the same address and port.
#[test]
fn a_connection_that_was_reset_has_no_user_although_its_address_has_one() {
    for (way, mut users) in ways() {
        let (reset, other) = (plainly(Ipv4Addr::LOCALHOST), plainly(Ipv4Addr::LOCALHOST));
        reset.client.set_linger(Some(Duration::ZERO)).unwrap();
        drop(reset.client);
        let limit = std::time::Instant::now() + Duration::from_secs(20);
        while !is_over(&reset.server) {
            assert!(std::time::Instant::now() < limit);
        }
        let local = other.server.local_addr().unwrap();
        assert_eq!(users.find(&reset.server, local, other.peer), PeerUser::Gone, "{way}");
    }
}

/// As for a peer in another network namespace whose address is translated to one of ours.
#[test]
fn a_socket_that_is_not_here_is_not_found() {
    let pair = plainly(Ipv4Addr::LOCALHOST);
    let local = pair.server.local_addr().unwrap();
    let nobodys = "127.0.0.77:1".parse().unwrap();
    for (way, mut users) in ways() {
        assert_eq!(users.find(&pair.server, local, nobodys), PeerUser::NotFound, "{way}");
    }
}

#[test]
fn a_peer_on_another_machine_is_not_looked_for() {
    let pair = plainly(Ipv4Addr::LOCALHOST);
    let local = pair.server.local_addr().unwrap();
    let mut users = opened();
    for elsewhere in ["198.51.100.7:4000", "[2001:db8::7]:4000"] {
        assert_eq!(users.find(&pair.server, local, elsewhere.parse().unwrap()), PeerUser::Elsewhere, "{elsewhere}");
    }
}
