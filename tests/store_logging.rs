//! What the server logs of connections it rejects. In a file of its own: the subscriber is the whole process's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::fmt::{Debug, Write as _};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Mutex;

use elastic_rs::store::listen;
use elastic_rs::store::server::{ServerOptions, StoreServer};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static RECORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps records of INFO and above as text.
struct Keep;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Subscriber for Keep {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().target().to_owned());
        event.record(&mut line);
        RECORDS.lock().unwrap().push(line.0);
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn each_rejected_connection_is_one_record_without_keys_or_values() {
    tracing::subscriber::set_global_default(Keep).unwrap();
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let server = StoreServer::start(vec![listener], ServerOptions::default()).unwrap();
    let cases: [(&[u8], &str); 3] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "cause=\"foreign_protocol\" detail=\"unknown query code 71\""),
        (b"\x01\x06\0\0\0\0\0\0\0SECRET\x06\0\0\0\0\0\0\0SECRET", "detail=\"first query is Set, not VALIDATE\""),
        (
            b"\0\xce\xf7\x85\x3c\x01\x06\0\0\0\0\0\0\0SECRET\x06\0\0\0\0\0\0\0SECRET\x04\x06\0\0\0\0\0\0\0SECRET\0\0\0\0\0\0\0\0",
            "cause=\"not_a_number\"",
        ),
    ];
    for (bytes, expected) in cases {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        let peer = stream.local_addr().unwrap();
        stream.write_all(bytes).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        // The record is written before the connection is closed.
        let records = std::mem::take(&mut *RECORDS.lock().unwrap());
        let [record] = &records[..] else { panic!("{records:?}") };
        assert!(record.starts_with("elastic_rs::store::server "), "{record}");
        assert!(record.contains(&format!("peer={peer}")) && record.contains(expected), "{record}");
        assert!(!record.contains("SECRET"), "{record}");
        assert_eq!(record.contains("preview=\"GET / HTTP/1.1\""), bytes[0] == b'G', "{record}");
    }
    server.stop();
    assert_eq!(*RECORDS.lock().unwrap(), [""; 0], "nothing at INFO for what is ordinary");
}
