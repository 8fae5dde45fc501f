//! HTTP on the host's port: health, metrics, and requests that are none.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::host::Host;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::protocol::message::{Hello, NodeId};
use elastic_rs::rendezvous::protocol::settings::Settings;
use elastic_rs::secure::Protection;
use elastic_rs::secure::token::Token;
use elastic_rs::store::server::ServerOptions;
use tokio::runtime::Builder;

/// Time limit for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn host(protection: Option<Arc<Protection>>) -> Host {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    Host::start(vec![listener], ServerOptions::default(), protection).unwrap()
}

/// All that comes back, as text.
fn sent(port: u16, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes).unwrap();
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
        ("sessions", "1"),
        ("events_dropped_total", "0"),
        ("store_connections", "0"),
    ] {
        assert!(has(&answer, series, value), "{series}\n{answer}");
    }
    assert!(answer.ends_with("# EOF\n"));
    drop(session);
}

#[test]
fn what_is_no_such_request_is_told_and_closed() {
    let host = host(None);
    let long = format!("GET /healthz HTTP/1.1\r\nX: {}", "a".repeat(20_000));
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /healthz HTTP/7.7\r\n\r\n", "400 Bad Request"),
        ("GET \u{0}\r\n\r\n", "400 Bad Request"),
        (&long, "431 Request Header Fields Too Large"),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403 Forbidden"),
    ] {
        let answer = sent(host.port(), request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request:.40}: {answer}");
    }
    // A request that never ends holds one place for a while, and nobody else up.
    let mut slow: Vec<_> = (0..200).map(|_| TcpStream::connect(("127.0.0.1", host.port())).unwrap()).collect();
    slow.iter_mut().for_each(|stream| drop(stream.write_all(b"GET /healthz HTTP/1.1\r\n")));
    slow.iter_mut().for_each(|stream| drop(stream.read_to_end(&mut Vec::new()))); // closed, each in its time
    assert!(got(host.port(), "/healthz").starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn with_a_token_only_health_is_told() {
    let token = Token::parse(&"a".repeat(64)).unwrap();
    let host = host(Some(Arc::new(Protection::by_token(token).unwrap())));
    assert!(got(host.port(), "/healthz").starts_with("HTTP/1.1 200 OK"));
    let answer = got(host.port(), "/metrics");
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("protected by a token"), "{answer}");
}
