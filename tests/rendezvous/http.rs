//! HTTP on the host's port: health, metrics, the page, and requests that are none.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::endpoint::{EndpointServer, PageRequest, Subject};
use elastic_rs::rendezvous::messages::message::{Hello, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::secure::Protection;
use elastic_rs::secure::token::Token;
use elastic_rs::store::server::ServerOptions;
use socket2::{Domain, Socket, Type};
use tokio::runtime::Builder;

/// Time limit for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn host(protection: Option<Arc<Protection>>) -> EndpointServer {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    EndpointServer::start(vec![listener], ServerOptions::default(), protection).unwrap()
}

/// All that comes back, as text.
fn sent(port: u16, bytes: &[u8]) -> String {
    read(asking(port, bytes))
}

/// A connection on which something has been asked.
fn asking(port: u16, bytes: &[u8]) -> TcpStream {
    asking_from("127.0.0.1", port, bytes)
}

fn asking_from(address: &str, port: u16, bytes: &[u8]) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(address.parse().unwrap(), 0).into()).unwrap();
    socket.connect(&SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

fn read(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn got(port: u16, path: &str) -> String {
    sent(port, format!("GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n").as_bytes())
}

/// Where the line of a series ends in this value.
fn has(text: &str, series: &str, value: &str) -> bool {
    text.lines().any(|line| line == format!("elastic_rs_{series} {value}"))
}

#[test]
fn health_and_metrics_are_answered_on_the_endpoints_port() {
    let host = host(None);
    for path in ["/healthz", "/readyz?verbose"] {
        let answer = got(host.port(), path);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok\n"), "{answer}");
    }
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let session = runtime.block_on(async {
        let hello = Hello::new("job", NodeId(1), "node:1", Settings { max_restarts: Some(3), ..Settings::new(1, 1) });
        let session =
            Session::open(&tokio::runtime::Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
        session.join(1, None, None, PATIENCE).await.unwrap();
        session
    });
    let answer = got(host.port(), "/metrics");
    assert!(answer.contains("Content-Type: application/openmetrics-text; version=1.0.0"), "{answer}");
    for (series, value) in [
        ("rounds_total{run=\"job\",why=\"first\"}", "1"),
        ("run_state{run=\"job\",state=\"running\"}", "1"),
        ("run_state{run=\"job\",state=\"closed\"}", "0"),
        ("nodes{run=\"job\",state=\"running\"}", "1"),
        ("restarts_left{run=\"job\"}", "3"),
        ("still_seconds{run=\"job\"}", "0"),
        ("sessions", "1"),
        ("events_dropped_total", "0"),
        ("store_connections", "0"),
        ("store_rejects_total{cause=\"foreign_protocol\"}", "0"),
        ("auth_failures_total{why=\"unproven\"}", "0"),
        ("node_refusals_total{run=\"job\",why=\"settings\"}", "0"),
        ("fences_total{run=\"job\"}", "0"),
        ("heartbeat_rtt_seconds_count", "0"),
    ] {
        assert!(has(&answer, series, value), "{series}\n{answer}");
    }
    assert!(answer.ends_with("# EOF\n"));
    drop(session);
}

#[test]
fn what_is_no_such_request_is_answered_and_closed() {
    let host = host(None);
    let long = format!("GET /healthz HTTP/1.1\r\nX: {}", "a".repeat(20_000));
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /healthz HTTP/7.7\r\n\r\n", "400 Bad Request"),
        ("GET \u{0}\r\n\r\n", "400 Bad Request"),
        (&long, "431 Request Header Fields Too Large"),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403 Forbidden"),
        ("GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", "400 Bad Request"),
        ("GET /healthz HTTP/1.1\r\nHost: evil.example\r\nhost: localhost\r\n\r\n", "400 Bad Request"),
    ] {
        let answer = sent(host.port(), request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request:.40}: {answer}");
    }
}

/// Health is served at once, while 200 requests never end, and 200 more connections stay open behind their answers: of the address that
/// asks, and of another one.
#[test]
fn connections_that_are_slow_keep_health_from_nobody() {
    let token = Token::parse(&"a".repeat(64)).unwrap();
    for protection in [None, Some(Arc::new(Protection::by_token(token).unwrap()))] {
        let is_protected = protection.is_some();
        let host = host(protection);
        for request in [&b"GET /healthz HTTP/1.1\r\n"[..], b"GET /healthz HTTP/1.1\r\n\r\n"] {
            for from in ["127.0.0.1", "127.0.0.2"] {
                let slow: Vec<_> = (0..200).map(|_| asking_from(from, host.port(), request)).collect();
                for path in ["/readyz", "/healthz"] {
                    let answer = got(host.port(), path);
                    let refused = answer.starts_with("HTTP/1.1 200 OK\r\n");
                    assert!(refused, "{path} beside {from}, protected: {is_protected}: {answer:?}");
                }
                drop(slow);
            }
        }
    }
}

/// A session whose node waits for another one.
async fn waiting(host: &EndpointServer, run_id: &str, number: u128) -> Session {
    let hello = Hello::new(run_id, NodeId(number), format!("node:{number}"), Settings::new(2, 2));
    let session = Session::open(&tokio::runtime::Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
    session.view_when(|view| view.addr.is_some()).await;
    session
}

#[test]
fn where_nobody_makes_pages_it_is_said_who_does() {
    let host = host(None);
    let answer = got(host.port(), "/");
    assert!(
        answer.starts_with("HTTP/1.1 404 Not Found\r\n") && answer.contains("`elastic-rs page ENDPOINT"),
        "{answer}"
    );
}

#[test]
fn a_page_is_made_once_for_all_who_ask_and_says_what_it_may_load() {
    let mut host = host(None);
    let mut requests = host.take_page_requests().unwrap();
    assert!(host.take_page_requests().is_none(), "one makes them");
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let port = host.port();
    assert!(got(port, "/").contains("no node has come to this coordinator yet"));
    let one = runtime.block_on(waiting(&host, "one", 1));

    let all: Vec<_> = (0..8).map(|_| asking(port, b"GET / HTTP/1.1\r\n\r\n")).collect();
    let PageRequest { subject, which, reply } = requests.blocking_recv().unwrap();
    assert_eq!((which.run, which.still), (None, false));
    let Subject::Run { lines, state } = subject else { panic!("{subject:?}") };
    assert!(lines[0].contains("\"run.opened\"") && state.contains("\"run\":\"one\""), "{lines:?}\n{state}");
    reply.send("<p>page".to_owned()).unwrap();
    for answer in all {
        let answer = read(answer);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\n<p>page"), "{answer}");
        for header in [
            "Content-Type: text/html; charset=utf-8",
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cache-Control: no-store",
        ] {
            assert!(answer.contains(&format!("\r\n{header}\r\n")), "{header}\n{answer}");
        }
        assert!(!answer.contains("Access-Control"), "{answer}");
    }
    // As long as it is fresh nobody is asked to make it. A slow machine may have needed a second for the above.
    while let Ok(PageRequest { reply, .. }) = requests.try_recv() {
        reply.send("<p>page".to_owned()).unwrap();
    }

    let two = runtime.block_on(waiting(&host, "two <&>", 2));
    let asking = std::thread::spawn(move || got(port, "/?run=two%20%3C%26%3E&refresh=off"));
    let PageRequest { subject, which, reply } = requests.blocking_recv().unwrap();
    assert_eq!((which.run.as_deref(), which.still), (Some("two <&>"), true));
    assert!(matches!(subject, Subject::Run { .. }));
    drop(reply);
    let answer = asking.join().unwrap();
    assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("could not be made"), "{answer}");

    let asking = std::thread::spawn(move || got(port, "/?refresh=off"));
    let PageRequest { subject, reply, .. } = requests.blocking_recv().unwrap();
    assert_eq!(subject, Subject::Runs(vec!["one".to_owned(), "two <&>".to_owned()], 0));
    reply.send("list".to_owned()).unwrap();
    assert!(asking.join().unwrap().ends_with("list"));
    let answer = got(port, "/?run=three");
    assert!(
        answer.starts_with("HTTP/1.1 404 ") && answer.contains("there is no run `three` here; there are"),
        "{answer}"
    );
    let answer = sent(port, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    drop((one, two));
    drop(host);
    assert!(requests.blocking_recv().is_none(), "they end with the host");
}

#[test]
fn whoever_asks_while_many_wait_is_asked_to_come_back() {
    let mut host = host(None);
    let mut requests = host.take_page_requests().unwrap();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let one = runtime.block_on(waiting(&host, "one", 1));
    let port = host.port();
    let all: Vec<_> = (0..60).map(|_| asking(port, b"GET / HTTP/1.1\r\n\r\n")).collect();
    let request = requests.blocking_recv().unwrap();
    // It is not made as long as they wait. Health is served meanwhile.
    assert!(got(port, "/healthz").starts_with("HTTP/1.1 200 OK"));
    for answer in all {
        let answer = read(answer);
        let refused = answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nRetry-After: 2\r\n");
        assert!(refused || answer.is_empty(), "{answer}"); // empty: all places were taken
    }
    drop((request, one));
}

#[test]
fn with_a_token_only_health_is_served() {
    let token = Token::parse(&"a".repeat(64)).unwrap();
    let mut host = host(Some(Arc::new(Protection::by_token(token).unwrap())));
    assert!(host.take_page_requests().is_none(), "nobody may read pages");
    for path in ["/", "/?run=job"] {
        assert!(got(host.port(), path).starts_with("HTTP/1.1 403"), "{path}");
    }
    assert!(got(host.port(), "/healthz").starts_with("HTTP/1.1 200 OK"));
    let answer = got(host.port(), "/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 403") && answer.contains("is protected, and HTTP has no authentication"),
        "{answer}"
    );
}
