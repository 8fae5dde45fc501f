//! The addresses and names of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs, UdpSocket};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::time::Instant;

/// Whether the address belongs to this machine.
pub fn is_local(ip: IpAddr) -> bool {
    is_own(SocketAddr::new(ip, 0)).unwrap_or(false)
}

/// The same for an address with its zone, without which a link-local one cannot be bound. The port must be 0.
///
/// A socket can be bound to an address of this machine: one of an interface, or one for which there is a local route. With the
/// sysctl `ip_nonlocal_bind` it can be bound to every address. Then only those of interfaces are this machine's.
///
/// # Errors
/// That cannot be known now, because no descriptor or no port is free.
fn is_own(address: SocketAddr) -> io::Result<bool> {
    Ok(!address.ip().is_unspecified()
        && is_bindable(address)?
        && (!binds_all_like(address)? || has_interface(address.ip())?))
}

fn is_bindable(address: SocketAddr) -> io::Result<bool> {
    match UdpSocket::bind(address) {
        Ok(_) => Ok(true), // UDP: nothing listens meanwhile
        // In use: another user may have taken all ports.
        Err(error) if is_exhausted(&error) || error.kind() == io::ErrorKind::AddrInUse => Err(error),
        Err(_) => Ok(false),
    }
}

/// Whether something has failed because descriptors or memory are used up, so that it may work later.
pub(super) fn is_exhausted(error: &io::Error) -> bool {
    let used_up = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| used_up.contains(&errno))
}

/// Whether sockets can be bound to addresses of this family that no machine has (RFC 5737, RFC 3849).
fn binds_all_like(address: SocketAddr) -> io::Result<bool> {
    let nobodys: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        SocketAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    };
    is_bindable(SocketAddr::new(nobodys, 0))
}

/// Whether an interface has the address, or it is a loopback address. The list of interfaces is read again if it does not have the
/// address and is older than [`LISTED_FOR`]: an unauthenticated peer's connections make that happen, and a machine may have many
/// interfaces.
fn has_interface(ip: IpAddr) -> io::Result<bool> {
    static LIST: Mutex<Option<(Instant, Vec<IpAddr>)>> = Mutex::new(None);
    let mut list = LIST.lock();
    let is_listed = |list: &Option<(Instant, Vec<IpAddr>)>| list.as_ref().is_some_and(|(_, all)| all.contains(&ip));
    if !is_listed(&list) && list.as_ref().is_none_or(|(since, _)| since.elapsed() >= LISTED_FOR) {
        *list = Some((Instant::now(), all_interface_addresses()?));
    }
    Ok(ip.is_loopback() || is_listed(&list))
}

/// How long an address that has been added to an interface may stay unknown.
const LISTED_FOR: Duration = Duration::from_millis(100);

/// Whether the other end of a connection has an address of this machine. `local` is this end's.
///
/// # Errors
/// That cannot be known now, because no descriptor or no port is free.
pub fn is_here(peer: SocketAddr, local: SocketAddr) -> io::Result<bool> {
    let ip = peer.ip().to_canonical();
    let with_zone = match (ip, local) {
        (IpAddr::V6(ip), SocketAddr::V6(local)) => SocketAddrV6::new(ip, 0, 0, local.scope_id()).into(),
        _ => SocketAddr::new(ip, 0),
    };
    Ok(ip.is_loopback() || ip == local.ip().to_canonical() || is_own(with_zone)?)
}

/// The addresses of this machine's interfaces, without those that mean another machine elsewhere: loopback and link-local ones.
pub fn interface_addresses() -> Vec<IpAddr> {
    all_interface_addresses().unwrap_or_default().into_iter().filter(|ip| !is_local_to_a_machine(*ip)).collect()
}

fn all_interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `getifaddrs` fills in a list, which is freed below, or fails.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
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
        found.extend(ip);
    }
    // SAFETY: it is the list of `getifaddrs`, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

fn is_local_to_a_machine(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
    }
}

/// The addresses of a name, by the system's resolver. `localhost` is loopback also where nothing resolves it (RFC 6761).
///
/// # Errors
/// The resolver's.
pub fn resolve_here(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match (host, port).to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        Err(error) => localhost(host, port).ok_or(error),
    }
}

/// The loopback addresses of this machine, if they are meant by the name.
pub(super) fn localhost(host: &str, port: u16) -> Option<Vec<SocketAddr>> {
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let here = || loopback.into_iter().filter(|ip| is_local(*ip)).map(|ip| SocketAddr::new(ip, port)).collect();
    (host == "localhost").then(here)
}

/// The addresses of a name or address, if all of them are on loopback: nodes on other machines cannot be meant by it there. Empty
/// otherwise, and if it cannot be resolved.
pub fn only_on_loopback(host: &str) -> Vec<IpAddr> {
    let found = resolve_here(host, 0).unwrap_or_default();
    let mut ips: Vec<IpAddr> = found.iter().map(|address| address.ip().to_canonical()).collect();
    ips.dedup();
    if ips.iter().all(IpAddr::is_loopback) { ips } else { Vec::new() }
}

/// Whether the name is this machine's host name, with or without its domain.
pub fn is_own_name(host: &str) -> bool {
    let system = rustix::system::uname();
    let own = system.nodename().to_string_lossy();
    let own_label = own.split('.').next().unwrap_or_default();
    !own.is_empty() && (own == host || (own_label == host && !own_label.is_empty()))
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
            assert!(is_here(address(peer), address(local)).unwrap(), "{peer} at {local}");
        }
        for (peer, local) in [("198.51.100.2:1", "198.51.100.1:2"), ("[2001:db8::2]:1", "[2001:db8::1]:2")] {
            assert!(!is_here(address(peer), address(local)).unwrap(), "{peer} at {local}");
        }
    }

    #[test]
    fn the_addresses_of_interfaces_are_local_and_not_loopback() {
        let addresses = interface_addresses();
        for &ip in &addresses {
            assert!(is_local(ip) && !ip.is_loopback(), "{ip}");
        }
        if let Some(source) = crate::net::connect::source_for(address_of_nobody()) {
            assert!(addresses.contains(&source), "{source} of {addresses:?}");
        }
    }

    /// Where sockets can be bound to every address, which the sysctl `ip_nonlocal_bind` of a network namespace allows.
    #[test]
    fn an_address_that_can_be_bound_is_not_local_for_that() {
        std::thread::spawn(|| {
            // SAFETY: it concerns this thread alone, which ends with the test.
            let alone = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
            let allow = |family: &str| std::fs::write(format!("/proc/sys/net/{family}/ip_nonlocal_bind"), "1");
            if !alone || allow("ipv4").is_err() {
                println!("not tested: network namespaces cannot be made here");
                return;
            }
            let foreign = SocketAddr::from(([198, 51, 100, 7], 0));
            assert!(is_bindable(foreign).unwrap(), "the sysctl works");
            assert!(!is_local(foreign.ip()) && !is_here(foreign, SocketAddr::from(([198, 51, 100, 1], 1))).unwrap());
            assert!(is_local([127, 0, 0, 1].into()) && is_local([127, 0, 0, 9].into()));
            if allow("ipv6").is_ok() {
                let foreign = SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 7], 0));
                assert!(is_bindable(foreign).unwrap() && !is_local(foreign.ip()));
            }
        })
        .join()
        .unwrap();
    }

    /// TEST-NET-1 of RFC 5737: no machine has it.
    fn address_of_nobody() -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], 9))
    }

    #[test]
    fn localhost_is_loopback_also_where_nothing_resolves_it() {
        let found = localhost("localhost", 7).unwrap();
        assert!(found.contains(&SocketAddr::from(([127, 0, 0, 1], 7))), "{found:?}");
        assert_eq!(localhost("localhost.example", 7), None);
        assert!(resolve_here("no-such-host.invalid", 7).is_err());
    }

    #[test]
    fn an_endpoint_on_loopback_alone_is_known() {
        assert_eq!(only_on_loopback("127.0.1.1"), [IpAddr::from([127, 0, 1, 1])]);
        assert!(!only_on_loopback("localhost").is_empty());
        for other in ["192.0.2.1", "0.0.0.0", "no-such-host.invalid"] {
            assert!(only_on_loopback(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn the_machines_name_is_its_own() {
        let system = rustix::system::uname();
        assert!(is_own_name(&system.nodename().to_string_lossy()));
        assert!(!is_own_name("") && !is_own_name("no-such-host.invalid"));
    }
}
