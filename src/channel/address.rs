//! The address of an agent's socket: a name in the kernel's abstract namespace, which is in no file system.
//!
//! Nothing is left behind when the agent is killed, and no cleaner of temporary folders can remove it. Any process of the network
//! namespace may connect, so both ends ask the kernel who the other one is before they read anything.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::process;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixListener;

/// What begins an address that is a name, as in `/proc/net/unix`.
const ABSTRACT: char = '@';

/// A new address that nobody else has: `@elastic_rs-PID-RANDOM`.
fn draw() -> String {
    format!("{ABSTRACT}elastic_rs-{}-{:032x}", process::id(), rand::random::<u128>())
}

/// A socket at a new address. Needs a tokio runtime.
///
/// # Errors
/// The system refuses a socket.
pub(super) fn listen() -> io::Result<(String, UnixListener)> {
    let address = draw();
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(&address[1..])?)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot listen at `{address}`: {error}")))?;
    listener.set_nonblocking(true)?;
    Ok((address, UnixListener::from_std(listener)?))
}

/// A connection to an address, within a limit, which is how long the agent may take to accept others first. Another user's process may
/// have taken the name of an agent that has ended, and is no agent.
///
/// # Errors
/// Nobody listens there, or another user's process.
pub(super) fn dial(address: &str, limit: Duration) -> io::Result<OwnedFd> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // To the kernel, zero is no limit.
    set_socket_timeout(&stream, Timeout::Send, Some(limit.max(Duration::from_millis(1))))?;
    let address = parse(address)?;
    retry_on_intr(|| connect(&stream, &address))?;
    check_user(&stream, "the process that listens there")?;
    Ok(stream)
}

/// The address for the kernel.
///
/// # Errors
/// It is not one that an agent draws.
fn parse(address: &str) -> io::Result<SocketAddrUnix> {
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
