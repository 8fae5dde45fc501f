//! The addresses and names of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use tokio::time::Instant;

use super::connect::resolve;

/// Whether the address belongs to this machine, so that a socket can be bound to it.
pub fn is_local(ip: IpAddr) -> bool {
    is_bindable(SocketAddr::new(ip, 0))
}

/// The same for an address with its zone, without which a link-local one cannot be bound. The port must be 0.
pub(super) fn is_bindable(address: SocketAddr) -> bool {
    // UDP: nothing listens meanwhile.
    !address.ip().is_unspecified() && UdpSocket::bind(address).is_ok()
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
