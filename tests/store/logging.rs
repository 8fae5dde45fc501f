//! Log records of rejected connections and sessions. The subscriber is process-wide, so each test has a process.

use std::fmt::{Debug, Write as _};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::net::listen;
use elastic_rs::rendezvous::messages::codec::{encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{Hello, Join, MAGIC, NodeId, NodeMessage, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::store::TableLimits;
use elastic_rs::store::protocol::{Limits, Request};
use elastic_rs::store::server::{Cause, ServerOptions, StoreServer};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::alone::alone;
use crate::users::{ANSWER, OTHER_UID, SAME_USER, as_user, greeted};

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

/// Whether this process runs only this test. If so, records are kept from now on.
fn keeps_records(test: &str) -> bool {
    alone(test) && tracing::subscriber::set_global_default(Keep).is_ok()
}

fn start(options: ServerOptions) -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], options).unwrap()
}

/// Send these bytes, wait for the end of the connection, and return the client's address. The server logs before it closes.
fn visit(server: &StoreServer, bytes: &[u8]) -> SocketAddr {
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    // The server may close before all has been written.
    let _ = stream.write_all(bytes);
    let _ = stream.read_to_end(&mut Vec::new());
    stream.local_addr().unwrap()
}

#[test]
fn each_rejected_connection_is_one_record_without_keys_or_values() {
    if !keeps_records("logging::each_rejected_connection_is_one_record_without_keys_or_values") {
        return;
    }
    let server = start(ServerOptions::default());
    let cases: [(&[u8], &str); 3] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "cause=\"foreign_protocol\" detail=\"unknown query code 71\""),
        (b"\x01\x06\0\0\0\0\0\0\0SECRET\x06\0\0\0\0\0\0\0SECRET", "detail=\"first query is Set, not VALIDATE\""),
        (
            b"\0\xce\xf7\x85\x3c\x01\x06\0\0\0\0\0\0\0SECRET\x06\0\0\0\0\0\0\0SECRET\x04\x06\0\0\0\0\0\0\0SECRET\0\0\0\0\0\0\0\0",
            "cause=\"not_a_number\"",
        ),
    ];
    for (bytes, expected) in cases {
        let peer = visit(&server, bytes);
        let records = std::mem::take(&mut *RECORDS.lock().unwrap());
        let [record] = &records[..] else { panic!("{records:?}") };
        assert!(record.starts_with("elastic_rs::store::server "), "{record}");
        assert!(record.contains(&format!("peer={peer}")) && record.contains(expected), "{record}");
        assert!(!record.contains("SECRET"), "{record}");
        assert_eq!(record.contains("preview=\"GET / HTTP/1.1\""), bytes[0] == b'G', "{record}");
    }
    server.stop();
    assert_eq!(*RECORDS.lock().unwrap(), [""; 0], "ordinary events log nothing at INFO");
}

/// PyTorch's server closes the connection and logs nothing.
#[test]
fn a_rejection_for_size_names_key_size_and_limit_but_no_value() {
    if !keeps_records("logging::a_rejection_for_size_names_key_size_and_limit_but_no_value") {
        return;
    }
    let limits = Limits { key_bytes: 100, value_bytes: 1000, list_len: 2, message_bytes: 2000 };
    let table = TableLimits { keys: 2, stored_bytes: 5000 };
    let server = start(ServerOptions { limits, table, ..ServerOptions::default() });
    let secret = |size| Bytes::from("SECRET".repeat(size / 6 + 1)).slice(..size);
    let key = |name: &'static str| Bytes::from_static(name.as_bytes());
    let set = |name, size| Request::Set { key: key(name), value: secret(size) };
    let pairs = |names: &[&'static str], size| Request::MultiSet {
        pairs: names.iter().map(|name| (key(name), secret(size))).collect(),
    };
    let appends = || (0..5).map(|_| Request::Append { key: key("/a"), value: secret(999) });
    let cases: [(Vec<Request>, &str, Option<&str>); 7] = [
        (
            vec![set("/line\nbreak", 1001)],
            "Set announces 1001, above the limit value_bytes = 1000",
            Some("/line\\nbreak"),
        ),
        (
            vec![Request::Get { key: Bytes::from(vec![b'k'; 101]) }],
            "Get announces 101, above the limit key_bytes = 100",
            Some("kkk"),
        ),
        (vec![pairs(&["/a", "/b", "/c"], 1)], "MultiSet announces 3, above the limit list_len = 2", None),
        (vec![pairs(&["/a", "/b"], 990)], "MultiSet announces 2025, above the limit message_bytes = 2000", Some("/b")),
        (
            vec![pairs(&["/a", "/b"], 1), set("/c", 1)],
            "Set would bring the table to 3, above its limit keys = 2",
            Some("/c"),
        ),
        (
            vec![Request::Wait { keys: vec![key("/w"); 2] }, set("/x", 1)],
            "Set would bring the table to 3, above its limit keys = 2",
            Some("/x"),
        ),
        (appends().collect(), "above its limit stored_bytes = 5000", Some("/a")),
    ];
    for (requests, detail, key) in cases {
        let mut bytes = BytesMut::from(&b"\0\xce\xf7\x85\x3c"[..]);
        requests.iter().for_each(|request| request.encode(&mut bytes));
        let peer = visit(&server, &bytes);
        let records = std::mem::take(&mut *RECORDS.lock().unwrap());
        let [record] = &records[..] else { panic!("{records:?}") };
        assert!(record.contains(&format!("peer={peer}")) && record.contains(detail), "{record}");
        match key {
            // A long key is logged in part.
            Some("kkk") => assert!(!record.contains(&"k".repeat(65)), "{record}"),
            Some(key) => assert!(record.contains(&format!("key={key:?}")), "{record}"),
            None => assert!(!record.contains(" key="), "{record}"),
        }
        assert!(!record.contains("SECRET"), "{record}");
    }
    assert_eq!((server.stats().rejected(Cause::TooLong), server.stats().rejected(Cause::Full)), (4, 3));
}

#[test]
fn an_ipv4_client_of_a_dual_stack_listener_is_logged_with_its_ipv4_address() {
    if !keeps_records("logging::an_ipv4_client_of_a_dual_stack_listener_is_logged_with_its_ipv4_address") {
        return;
    }
    let server = StoreServer::start(vec![listen::bind_wildcard(0).unwrap()], ServerOptions::default()).unwrap();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    let records = RECORDS.lock().unwrap();
    assert!(records[0].contains(&format!("peer={} ", stream.local_addr().unwrap())), "{records:?}");
}

#[test]
fn the_number_of_omitted_records_is_logged_after_a_flood() {
    if !keeps_records("logging::the_number_of_omitted_records_is_logged_after_a_flood") {
        return;
    }
    let server = start(ServerOptions { log_period: Duration::from_millis(300), ..ServerOptions::default() });
    for _ in 0..50 {
        visit(&server, b"GET / HTTP/1.1\r\n\r\n");
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while !RECORDS.lock().unwrap().iter().any(|record| record.contains("further messages of this kind were not logged"))
    {
        assert!(Instant::now() < deadline, "{:?}", RECORDS.lock().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_flood_is_counted_in_full_and_logged_in_part() {
    const FLOOD: usize = 300;
    if !keeps_records("logging::a_flood_is_counted_in_full_and_logged_in_part") {
        return;
    }
    let server = start(ServerOptions::default());
    for _ in 0..FLOOD {
        visit(&server, b"GET / HTTP/1.1\r\n\r\n");
    }
    assert_eq!(server.stats().rejected(Cause::Foreign), FLOOD as u64);
    visit(&server, b"\0\xce\xf7\x85\x3c\xff");
    server.stop();
    let records = std::mem::take(&mut *RECORDS.lock().unwrap());
    // Twenty records a minute. On a slow machine each further minute adds twenty records and a summary.
    let of = |text: &str| records.iter().filter(|record| record.contains(text)).count();
    let (logged, summaries) = (of("unknown query code 71"), of("further messages of this kind were not logged"));
    assert!(logged >= 20 && logged <= 20 * summaries, "{logged} of {FLOOD}, {summaries} summaries");
    assert_eq!(of("protocol_violation"), 1, "another cause is not lost in the flood");
    if summaries == 1 {
        let last = records.last().unwrap();
        assert!(last.contains("cause=\"foreign_protocol\" count=280"), "{last}");
    }
}

/// The bound also holds for sessions, which the coordinator refuses.
#[test]
fn a_flood_of_refused_sessions_is_logged_in_part() {
    const FLOOD: usize = 100;
    if !keeps_records("logging::a_flood_of_refused_sessions_is_logged_in_part") {
        return;
    }
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap();
    let of_another_version = [MAGIC, &u16::MAX.to_le_bytes()].concat();
    for _ in 0..FLOOD {
        let mut stream = TcpStream::connect(host.addresses()[0]).unwrap();
        stream.write_all(&of_another_version).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    drop(host);
    let records = std::mem::take(&mut *RECORDS.lock().unwrap());
    // Twenty records a minute, as above.
    let of = |text: &str| records.iter().filter(|record| record.contains(text)).count();
    let (logged, summaries) = (of("connection refused"), of("further messages of this kind were not logged"));
    assert!(logged >= 20 && logged <= 20 * summaries, "{logged} of {FLOOD}, {summaries} summaries");
    if summaries == 1 {
        assert_eq!(of("what=\"refused\" count=80"), 1, "{:?}", records.last());
    }
}

/// A node that joins and withdraws in a loop does not fill the disk, and costs another job none of its lines.
#[test]
fn a_flood_of_decisions_is_logged_in_part_and_of_another_run_in_full() {
    const FLOOD: usize = 1_000;
    if !keeps_records("logging::a_flood_of_decisions_is_logged_in_part_and_of_another_run_in_full") {
        return;
    }
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap();
    let join = || {
        NodeMessage::Join(Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers: None,
            health: Default::default(),
        })
    };
    let leave = || NodeMessage::Leave { reason: "had enough".to_owned(), signal: None };
    let loops = (0..FLOOD).flat_map(|_| [join(), NodeMessage::Withdraw]).chain([leave()]);
    send(&host, Hello::new("restless", NodeId(1), "node1:1", Settings::new(2, 2)), loops);
    send(&host, Hello::new("calm", NodeId(2), "node2:1", Settings::new(2, 2)), [join(), leave()]);
    drop(host);
    let records = std::mem::take(&mut *RECORDS.lock().unwrap());
    let of = |text: &str| records.iter().filter(|record| record.contains(text)).count();
    // 210 lines a minute for a run with one node. On a slow machine each further minute adds as many.
    let (logged, summaries) = (of("[restless]"), of("what=\"decisions of run restless\""));
    assert!(logged >= 210 && logged <= 210 * summaries, "{logged} of {FLOOD}, {summaries} summaries");
    assert_eq!((of("[calm]"), of("run calm")), (4, 0), "{:?}", &records[records.len() - 5..]);
}

/// A bound for each run is not enough: unauthenticated peers can open many runs.
#[test]
fn a_flood_of_decisions_in_many_runs_is_bounded_for_all_of_them_together() {
    const RUNS: u64 = 300;
    const FLOOD: usize = 50;
    const MOST: usize = 10_000;
    if !keeps_records("logging::a_flood_of_decisions_in_many_runs_is_bounded_for_all_of_them_together") {
        return;
    }
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let options = ServerOptions { log_period: Duration::from_secs(3600), ..ServerOptions::default() };
    let host = EndpointServer::start(vec![listener], options, None).unwrap();
    let join = || {
        NodeMessage::Join(Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers: None,
            health: Default::default(),
        })
    };
    for run in 0..RUNS {
        let leave = NodeMessage::Leave { reason: "had enough".to_owned(), signal: None };
        let loops = (0..FLOOD).flat_map(|_| [join(), NodeMessage::Withdraw]).chain([leave]);
        send(&host, Hello::new(format!("run {run}"), NodeId(1), "node1:1", Settings::new(2, 2)), loops);
    }
    drop(host);
    let records = std::mem::take(&mut *RECORDS.lock().unwrap());
    let bytes: usize = records.iter().map(String::len).sum();
    println!("{} lines, {bytes} bytes for {RUNS} runs", records.len());
    assert!(records.len() <= MOST + 50, "{} lines", records.len());
    let of = |text: &str| records.iter().filter(|record| record.contains(text)).count();
    assert_eq!(of("what=\"decisions of all runs\""), 1, "omitted decisions are counted: {:?}", records.last());
}

/// Open a session, send these messages while the answers are read, and wait for the end.
fn send(host: &EndpointServer, hello: Hello, messages: impl IntoIterator<Item = NodeMessage>) {
    let mut bytes = BytesMut::new();
    encode_preamble(&mut bytes);
    for message in [NodeMessage::Hello(Box::new(hello))].into_iter().chain(messages) {
        encode_frame(&message, &mut bytes);
    }
    let mut stream = TcpStream::connect(host.addresses()[0]).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let reading = std::thread::spawn(move || reader.read_to_end(&mut Vec::new()));
    stream.write_all(&bytes).unwrap();
    let _ = reading.join().unwrap();
}

mod for_root {
    use super::*;

    #[test]
    fn another_users_connection_is_logged_with_the_user_and_the_way_out() {
        if !keeps_records("logging::for_root::another_users_connection_is_logged_with_the_user_and_the_way_out") {
            return;
        }
        let server = start(ServerOptions { local_peers: SAME_USER, ..ServerOptions::default() });
        let visits = as_user(OTHER_UID, || (0..30).map(|_| visit(&server, b"")).collect::<Vec<_>>());
        let records = std::mem::take(&mut *RECORDS.lock().unwrap());
        assert_eq!(records.len(), 20, "bounded: {records:?}");
        let detail = "detail=\"uid 65533 is neither this process's user (uid 0) nor root; ask for help\"";
        for (record, peer) in records.iter().zip(visits) {
            assert!(record.contains(&format!("peer={peer} cause=\"other_user\" {detail}")), "{record}");
        }
        assert_eq!(server.stats().rejected(Cause::OtherUser), 30);
    }
}

/// Set in the process that the next test starts in a user namespace.
const IN_A_NAMESPACE: &str = "ELASTIC_RS_TEST_IN_A_NAMESPACE";

/// There all users have the same number, which stands for "another". This process's own has it, too.
#[test]
fn where_users_cannot_be_known_all_are_served_and_one_record_says_so() {
    const NAME: &str = "logging::where_users_cannot_be_known_all_are_served_and_one_record_says_so";
    if std::env::var_os(IN_A_NAMESPACE).is_none() {
        let test = std::env::current_exe().unwrap();
        let mut command = Command::new("unshare");
        command.arg("--user").arg(test).args(["--exact", NAME, "--nocapture"]).env(IN_A_NAMESPACE, "1");
        match command.output() {
            Ok(output) if output.status.success() => {
                assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
            }
            Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare failed") => {
                println!("skipped: no user namespaces here");
            }
            Err(error) if error.kind() == ErrorKind::NotFound => println!("skipped: no unshare here"),
            other => panic!("{other:?}"),
        }
        return;
    }
    tracing::subscriber::set_global_default(Keep).unwrap();
    let server = start(ServerOptions { local_peers: SAME_USER, ..ServerOptions::default() });
    for _ in 0..3 {
        assert_eq!(greeted(server.local_addr()), ANSWER);
    }
    let records = std::mem::take(&mut *RECORDS.lock().unwrap());
    let [record] = &records[..] else { panic!("{records:?}") };
    assert!(record.contains("its own user has no number in this user namespace"), "{record}");
    assert!(record.contains("store_peers=any"), "{record}");
}
