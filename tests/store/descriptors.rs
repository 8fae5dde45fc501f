//! The server without free file descriptors. The test changes the limit of its process.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use elastic_rs::net::listen;
use elastic_rs::store::server::{ServerOptions, StoreServer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

use crate::alone::alone;

const HELLO: &[u8] = b"\0\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04";

#[test]
fn want_of_descriptors_is_waited_out_without_spinning() {
    if !alone("descriptors::want_of_descriptors_is_waited_out_without_spinning") {
        return;
    }
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let server = StoreServer::start(vec![listener], ServerOptions::default()).unwrap();
    let greet = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(HELLO).unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).unwrap();
    };
    let mut friend = TcpStream::connect(server.local_addr()).unwrap();
    greet(&mut friend);

    // This end's socket exists before descriptors run out; the server's end needs one more.
    let late = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum: limit.maximum }).unwrap();
    late.connect(&server.local_addr().into()).unwrap();
    let start = Instant::now();
    while server.stats().accept_errors < 3 {
        assert!(start.elapsed() < Duration::from_secs(20), "accepting does not fail");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The pauses before the third error were 5 and 10 ms.
    assert!(start.elapsed() >= Duration::from_millis(14), "{:?}", start.elapsed());
    friend.write_all(&HELLO[5..]).unwrap();
    friend.read_exact(&mut [0; 4]).unwrap();

    setrlimit(Resource::Nofile, limit).unwrap();
    let mut late = TcpStream::from(late);
    greet(&mut late);
    assert_eq!(server.stats().connections_open, 2);
}
