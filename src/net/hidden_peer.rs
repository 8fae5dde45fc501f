//! A client that sends requests and then hides its socket. For tests.
//!
//! Any user can do this. The kernel then shows no socket at the client's end, although this machine's end of the connection is open.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// The name of an interface of this machine besides loopback.
pub fn second_interface() -> Option<String> {
    let table = fs::read_to_string("/proc/net/dev").unwrap();
    let mut names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim()));
    let found = names.find(|name| *name != "lo").map(str::to_owned);
    if found.is_none() {
        println!("not tested: this machine has loopback alone");
    }
    found
}

/// Send `requests` to `address` on loopback, and hide the socket.
pub fn send_and_hide(address: SocketAddr, interface: &str, requests: &[u8]) {
    let client = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
    // The client's end is established at once. Its acknowledgement, and so the server's end, comes with the requests.
    let on: libc::c_int = 1;
    let length = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `on`.
    let set = unsafe {
        libc::setsockopt(client.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, (&raw const on).cast(), length)
    };
    assert_eq!(set, 0);
    client.connect(&address.into()).unwrap();
    client.send(requests).unwrap();
    // The reset of the close leaves by the other interface, which has no way to loopback.
    client.bind_device(Some(interface.as_bytes())).unwrap();
    client.set_linger(Some(Duration::ZERO)).unwrap();
}
