//! The addresses and names of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use tokio::time::Instant;

use super::connect::resolve;

/// Whether the address belongs to this machine, so that a socket can be bound to it.
pub fn is_local(ip: IpAddr) -> bool {
    is_bindable(SocketAddr::new(ip, 0))
}

/// The same for an address with its zone, without which a link-local one cannot be bound. The port must be 0.
fn is_bindable(address: SocketAddr) -> bool {
    // UDP: nothing listens meanwhile.
    !address.ip().is_unspecified() && UdpSocket::bind(address).is_ok()
}

/// Whether the other end of a connection has an address of this machine. `local` is this end's.
pub fn is_here(peer: SocketAddr, local: SocketAddr) -> bool {
    let ip = peer.ip().to_canonical();
    let with_zone = match (ip, local) {
        (IpAddr::V6(ip), SocketAddr::V6(local)) => SocketAddrV6::new(ip, 0, 0, local.scope_id()).into(),
        _ => SocketAddr::new(ip, 0),
    };
    ip.is_loopback() || ip == local.ip().to_canonical() || is_bindable(with_zone)
}

/// The addresses of this machine's interfaces, without those that mean another machine elsewhere: loopback and link-local ones.
pub fn interface_addresses() -> Vec<IpAddr> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `getifaddrs` fills in a list, which is freed below, or fails.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: the list ends with a null pointer, and lives until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null, or of the type that its family says.
        let ip: Option<IpAddr> = unsafe { entry.ifa_addr.as_ref() }.and_then(|addr| match i32::from(addr.sa_family) {
            // In network byte order.
            libc::AF_INET => Some(unsafe { *entry.ifa_addr.cast::<libc::sockaddr_in>() }.sin_addr.s_addr)
                .map(|addr| Ipv4Addr::from(addr.to_ne_bytes()).into()),
            libc::AF_INET6 => {
                let addr = unsafe { *entry.ifa_addr.cast::<libc::sockaddr_in6>() };
                Some(Ipv6Addr::from(addr.sin6_addr.s6_addr).into())
            }
            _ => None,
        });
        found.extend(ip.filter(|ip| !is_local_to_a_machine(*ip)));
    }
    // SAFETY: it is the list of `getifaddrs`, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    found
}

fn is_local_to_a_machine(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
    }
}

/// Whether the name is this machine's host name, with or without its domain.
pub fn is_own_name(host: &str) -> bool {
    let system = rustix::system::uname();
    let own = system.nodename().to_string_lossy();
    let own_label = own.split('.').next().unwrap_or_default();
    !own.is_empty() && (own == host || (own_label == host && !own_label.is_empty()))
}

/// The address of this machine from which it reaches the first of these hosts that others may reach too. `None`: all are on
/// loopback, or none can be resolved until `deadline`. Sends nothing to the hosts.
pub async fn source_towards(hosts: &[(String, u16)], deadline: Instant) -> Option<IpAddr> {
    for (host, port) in hosts {
        let Ok(addresses) = resolve(host, *port, deadline).await else { continue };
        if let Some(source) = addresses.into_iter().find_map(source_for) {
            return Some(source);
        }
    }
    None
}

/// The address from which the kernel would send to this one, if machines elsewhere may know it.
fn source_for(address: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // For UDP this only chooses a route.
    socket.connect(address).ok()?;
    let source = socket.local_addr().ok()?.ip();
    let has_zone = matches!(source, IpAddr::V6(ip) if ip.is_unicast_link_local());
    (!source.is_loopback() && !source.is_unspecified() && !has_zone).then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_local_and_an_address_of_nobody_is_not() {
        assert!(is_local([127, 0, 0, 1].into()));
        // TEST-NET-1 of RFC 5737: no machine has it.
        assert!(!is_local([192, 0, 2, 1].into()));
        assert!(!is_local([0, 0, 0, 0].into()));
    }

    #[test]
    fn a_peer_is_here_if_it_has_an_address_of_this_machine() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (peer, local) in [
            ("127.0.0.9:1", "127.0.0.1:2"),
            ("[::ffff:127.0.0.9]:1", "[::ffff:127.0.0.1]:2"),
            ("[::1]:1", "[::1]:2"),
            ("198.51.100.1:1", "[::ffff:198.51.100.1]:2"),
        ] {
            assert!(is_here(address(peer), address(local)), "{peer} at {local}");
        }
        for (peer, local) in [("198.51.100.2:1", "198.51.100.1:2"), ("[2001:db8::2]:1", "[2001:db8::1]:2")] {
            assert!(!is_here(address(peer), address(local)), "{peer} at {local}");
        }
    }

    #[test]
    fn the_addresses_of_interfaces_are_local_and_not_loopback() {
        let addresses = interface_addresses();
        for &ip in &addresses {
            assert!(is_local(ip) && !ip.is_loopback(), "{ip}");
        }
        if let Some(source) = source_for(address_of_nobody()) {
            assert!(addresses.contains(&source), "{source} of {addresses:?}");
        }
    }

    /// TEST-NET-1 of RFC 5737: no machine has it.
    fn address_of_nobody() -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], 9))
    }

    #[tokio::test]
    async fn hosts_on_loopback_and_names_of_nobody_tell_no_address() {
        let hosts = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 2379)).collect::<Vec<_>>();
        let deadline = Instant::now() + std::time::Duration::from_secs(1);
        assert_eq!(source_towards(&hosts(&["127.0.0.1", "::1", "no-such-host.invalid"]), deadline).await, None);
        // TEST-NET-1 of RFC 5737. A machine without a route to other networks has no address towards it.
        if let Some(source) = source_towards(&hosts(&["127.0.0.1", "192.0.2.1"]), deadline).await {
            assert!(is_local(source), "{source}");
        }
    }

    #[test]
    fn the_machines_name_is_its_own() {
        let system = rustix::system::uname();
        assert!(is_own_name(&system.nodename().to_string_lossy()));
        assert!(!is_own_name("") && !is_own_name("no-such-host.invalid"));
    }
}
