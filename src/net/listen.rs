//! Listening sockets.
//!
//! Owns binding, with the options that PyTorch's servers set, and an error that names the process which has the port. Leaves
//! accepting to the caller. Facts: `TCPServer` in PyTorch's `TCPStore.cpp` and `socket.cpp`,
//! `proc(5)`.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

mod owner;

pub use owner::{PortOwner, find_owner};

/// Listens on every address of the machine: `[::]` for IPv6 and IPv4 together, or `0.0.0.0` where that fails.
///
/// Port 0 lets the system choose. The error is that of the second attempt, as PyTorch's libuv server reports it.
pub fn bind_wildcard(port: u16) -> Result<TcpListener, BindError> {
    bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
        .or_else(|_| bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))))
}

/// Listens on one address; `[::]` also takes IPv4. Address reuse is on and the backlog is the system's maximum.
pub fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    let open = || -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        if address.ip() == IpAddr::from(Ipv6Addr::UNSPECIFIED) {
            socket.set_only_v6(false)?;
        }
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    open().map_err(|source| {
        let in_use = source.kind() == io::ErrorKind::AddrInUse;
        BindError { address, owner: in_use.then(|| find_owner(address)), source }
    })
}

/// Listens on each address. A port that the system chose for the first is used for all.
pub fn bind_all(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, BindError> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    for address in addresses {
        let chosen =
            listeners.first().and_then(|first| first.local_addr().ok()).map_or(address.port(), |first| first.port());
        listeners.push(bind(SocketAddr::new(address.ip(), chosen))?);
    }
    Ok(listeners)
}

/// Takes over a bound socket (`master_listen_fd`). It may or may not listen already.
///
/// # Errors
/// The descriptor is no TCP socket, or cannot listen.
pub fn adopt(fd: OwnedFd) -> io::Result<TcpListener> {
    let socket = SockRef::from(&fd);
    if socket.local_addr()?.as_socket().is_none() {
        return Err(Errno::OPNOTSUPP.into());
    }
    socket.listen(BACKLOG)?;
    let listener = TcpListener::from(fd);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The kernel cuts it down to `net.core.somaxconn`.
const BACKLOG: i32 = i32::MAX;

/// Why binding or listening failed.
#[derive(Debug)]
pub struct BindError {
    /// The requested address and port.
    pub address: SocketAddr,
    /// Which process has the port. Only for "address in use".
    pub owner: Option<PortOwner>,
    /// The system's error.
    pub source: io::Error,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ip, port) = (self.address.ip(), self.address.port());
        match &self.owner {
            Some(owner) => write!(f, "port {port} on {ip} is already in use by {owner}"),
            None => write!(f, "cannot listen on port {port} of {ip}: {}", self.source),
        }
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead, BufReader};
    use std::net::TcpStream;
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn loopback(port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    #[test]
    fn the_wildcard_takes_ipv4_and_the_system_chooses_port_0() {
        let listener = bind_wildcard(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_ne!(port, 0);
        TcpStream::connect(loopback(port)).unwrap();
    }

    #[test]
    fn the_error_names_this_process() {
        let taken = bind(loopback(0)).unwrap();
        let address = taken.local_addr().unwrap();
        let error = bind(address).unwrap_err();
        let message = error.to_string();
        let expected =
            format!("port {} on 127.0.0.1 is already in use by pid {} (", address.port(), std::process::id());
        assert!(message.starts_with(&expected), "{message}");
        assert_eq!(error.source.kind(), io::ErrorKind::AddrInUse);
        let wildcard = bind_wildcard(address.port()).unwrap_err().to_string();
        assert!(wildcard.contains(&format!("by pid {} (", std::process::id())), "{wildcard}");
    }

    /// Set in the process that [`the_error_names_another_process`] starts.
    const HOLD_A_PORT: &str = "ELASTIC_RS_TEST_HOLD_A_PORT";

    /// Ends the process, however the test ends.
    struct Holder(Child);

    impl Drop for Holder {
        fn drop(&mut self) {
            // It may have ended by itself.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Run by the other process of the next test. It ends with its standard input, so that it also ends when this process is
    /// killed.
    #[test]
    fn the_other_process() {
        if env::var_os(HOLD_A_PORT).is_some() {
            let taken = bind(loopback(0)).unwrap();
            println!("\nport {}", taken.local_addr().unwrap().port());
            io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
        }
    }

    #[test]
    fn the_error_names_another_process() {
        let this_program = env::current_exe().unwrap();
        let child = Command::new(&this_program)
            .args(["--exact", "net::listen::tests::the_other_process", "--nocapture"])
            .env(HOLD_A_PORT, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut holder = Holder(child);
        let mut lines = BufReader::new(holder.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        let port = lines.find_map(|line| line.strip_prefix("port ").map(|port| port.parse().unwrap()));
        let error = bind(loopback(port.expect("it says its port"))).unwrap_err();
        match error.owner {
            Some(PortOwner::Process { pid, name }) => {
                assert_eq!(pid, holder.0.id());
                let program = this_program.file_name().unwrap().to_string_lossy().into_owned();
                assert!(!name.is_empty() && program.starts_with(&name), "{name}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_errors_name_address_and_port() {
        // 192.0.2.1 is set aside for documentation (RFC 5737): no machine has it.
        let error = bind(SocketAddr::from(([192, 0, 2, 1], 4321))).unwrap_err();
        assert!(error.to_string().starts_with("cannot listen on port 4321 of 192.0.2.1: "), "{error}");
        assert_eq!(error.owner, None);
    }

    #[test]
    fn a_bound_socket_is_adopted_and_listens() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&loopback(0).into()).unwrap();
        let listener = adopt(socket.into()).unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(adopt(file.into()).unwrap_err().raw_os_error(), Some(Errno::NOTSOCK.raw_os_error()));
        let local = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert_eq!(adopt(local.into()).unwrap_err().raw_os_error(), Some(Errno::OPNOTSUPP.raw_os_error()));
    }
}
