//! The addresses and names of this machine.

use std::net::{IpAddr, TcpListener};

/// Whether the address belongs to this machine, so that a socket can be bound to it.
pub fn is_local(ip: IpAddr) -> bool {
    !ip.is_unspecified() && TcpListener::bind((ip, 0)).is_ok()
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
    fn the_machines_name_is_its_own() {
        let system = rustix::system::uname();
        assert!(is_own_name(&system.nodename().to_string_lossy()));
        assert!(!is_own_name("") && !is_own_name("no-such-host.invalid"));
    }
}
