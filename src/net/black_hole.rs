//! An address that swallows packets, for tests.

use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// A listener that never accepts, with a full backlog: connection attempts get no answer.
pub(crate) struct BlackHole {
    pub address: SocketAddr,
    pub listener: Socket,
    /// The connections that fill the backlog.
    pub fillers: Vec<Socket>,
}

/// Makes a black hole on 127.0.0.`last`.
pub(crate) fn black_hole(last: u8) -> BlackHole {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap();
    let fillers = (0..4).map(|_| {
        let filler = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
        // Some never complete.
        let _ = filler.connect(&address);
        filler
    });
    let fillers = fillers.collect();
    BlackHole { address: address.as_socket().unwrap(), listener: socket, fillers }
}
