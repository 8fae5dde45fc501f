//! The address of an agent's socket: a name in the kernel's abstract namespace, which is in no file system.
//!
//! Nothing is left behind when the agent is killed, and no cleaner of temporary folders can remove it. Any process of the network
//! namespace may connect, so both ends ask the kernel who the other one is before they read anything.

use std::io;
use std::process;

use rustix::net::SocketAddrUnix;
use rustix::net::sockopt::socket_peercred;

/// What begins an address that is a name, as in `/proc/net/unix`.
const ABSTRACT: char = '@';

/// A new address that nobody else has: `@elastic_rs-PID-RANDOM`.
pub(super) fn draw() -> String {
    format!("{ABSTRACT}elastic_rs-{}-{:032x}", process::id(), rand::random::<u128>())
}

/// The address for the kernel.
///
/// # Errors
/// It is not one that an agent draws.
pub(super) fn parse(address: &str) -> io::Result<SocketAddrUnix> {
    let name = address.strip_prefix(ABSTRACT).filter(|name| !name.is_empty()).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it is no address of an agent, which begins with `{ABSTRACT}`"),
        )
    })?;
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// Whether the process at the other end of a socket belongs to this process's user. `what` is that process.
///
/// # Errors
/// It does not, or the system does not say.
pub(super) fn check_user(socket: impl std::os::fd::AsFd, what: &str) -> io::Result<()> {
    let (theirs, own) = (socket_peercred(socket)?.uid.as_raw(), rustix::process::geteuid().as_raw());
    if theirs == own {
        return Ok(());
    }
    let text = format!("{what} belongs to user {theirs}, and this process to user {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_no_path_and_nobody_elses() {
        let (one, other) = (draw(), draw());
        assert_ne!(one, other);
        let address = parse(&one).unwrap();
        assert_eq!(address.abstract_name(), Some(&one.as_bytes()[1..]));
        assert_eq!(address.path_bytes(), None);
    }

    #[test]
    fn what_no_agent_draws_is_refused() {
        for wrong in ["", "@", "/tmp/agent", &format!("@{}", "x".repeat(200))] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
