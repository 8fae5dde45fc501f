//! Sends recorded client bytes to our server.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::net::listen;
use elastic_rs::store::protocol::{Reply, ReplyDecoder, ReplyShape};
use elastic_rs::store::server::{ServerOptions, StoreServer};

use super::file::{File, Message, Step};

pub fn replay(file: &File, differences: &mut BTreeMap<(String, u64), Vec<Message>>) {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let server = StoreServer::start(vec![listener], ServerOptions::default()).unwrap();
    let mut open: HashMap<&str, TcpStream> = HashMap::new();
    for step in &file.steps {
        let at = format!("{}, step {} ({})", file.name, step.number, step.json["note"].as_str().unwrap_or(&step.op));
        let stream = open.entry(&step.conn).or_insert_with(|| connect(server.local_addr()));
        let other = differences.remove(&(file.name.clone(), step.number));
        let waiting_before = server.stats().waiting;
        for message in other.as_ref().unwrap_or(&step.exchange) {
            play(stream, message, &at);
        }
        if starts_waiting(step) {
            // A wait has no reply that shows that it was processed. The server's counter shows it.
            let deadline = Instant::now() + PATIENCE;
            while server.stats().waiting == waiting_before {
                assert!(Instant::now() < deadline, "{at}: the server does not wait");
                thread::yield_now();
            }
        }
    }
    // No connection carried more than the recorded bytes.
    for (conn, stream) in open {
        assert_silent(&stream, Duration::from_millis(1), &format!("{}, {conn} at the end", file.name));
    }
    server.stop();
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn starts_waiting(step: &Step) -> bool {
    step.json["phase"] == "start"
}

fn play(stream: &mut TcpStream, message: &Message, at: &str) {
    match message {
        Message::FromClient { data, alone, .. } => {
            stream.write_all(data).unwrap_or_else(|error| panic!("{at}: {error}"));
            if *alone {
                // The pause only makes it likely that the segment is read alone. The outcome must not depend on it.
                thread::sleep(Duration::from_millis(5));
            }
        }
        Message::FromServer { data, unordered, .. } => {
            let mut got = vec![0; data.len()];
            stream.read_exact(&mut got).unwrap_or_else(|error| panic!("{at}: {error}"));
            if *unordered {
                assert_eq!(keys(&got), keys(data), "{at}");
            } else {
                assert!(got == *data, "{at}: got {}, expected {}", short(&got), short(data));
            }
        }
        Message::ServerCloses => {
            let mut rest = Vec::new();
            match stream.read_to_end(&mut rest) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
                Err(error) => panic!("{at}: not closed: {error}"),
            }
            assert!(rest.is_empty(), "{at}: {} before the close", short(&rest));
        }
        Message::ClientCloses => stream.shutdown(Shutdown::Both).unwrap(),
        Message::ClientHalfCloses => stream.shutdown(Shutdown::Write).unwrap(),
        // Shorter than recorded: our server answers within a fraction of this time, if it answers.
        Message::Silence => assert_silent(stream, Duration::from_millis(50), at),
    }
}

fn assert_silent(stream: &TcpStream, time: Duration, at: &str) {
    stream.set_read_timeout(Some(time)).unwrap();
    let mut byte = [0];
    match stream.peek(&mut byte) {
        Ok(0) | Err(_) => {}
        Ok(_) => panic!("{at}: not silent but {byte:?}"),
    }
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
}

fn keys(reply: &[u8]) -> BTreeSet<Vec<u8>> {
    match ReplyDecoder::new(ReplyShape::Keys).decode(&mut BytesMut::from(reply)) {
        Ok(Some(Reply::Keys(keys))) => keys.into_iter().map(|key| key.to_vec()).collect(),
        other => panic!("{other:?}"),
    }
}

fn short(bytes: &[u8]) -> String {
    format!("{:02x?}… ({} bytes)", &bytes[..bytes.len().min(40)], bytes.len())
}

const PATIENCE: Duration = Duration::from_secs(10);
