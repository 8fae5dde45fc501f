//! Who may read health, metrics and pages over HTTP.

use super::*;
use crate::events::open_metrics::OpenMetrics;
use crate::secure::refusals::Refusal;
use crate::secure::token::Token;
use crate::store::server::{ServerOptions, StoreServer};

/// What answers need of a coordinator whose questions the caller answers.
fn sources() -> (Sources, mpsc::Receiver<Question>, StoreServer) {
    let listener = crate::net::listen::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let store = StoreServer::start(vec![listener], ServerOptions::default()).unwrap();
    let (asks, questions) = mpsc::channel(64);
    let (pages, ..) = crate::endpoint::page::pages(asks.clone(), true);
    let shown = Visible { metrics: Readers::All, page: Readers::All };
    (Sources::new(asks, store.controller(), shown, pages, (None, None), None), questions, store)
}

fn request(query: &str, host: Option<&str>) -> Request {
    Request { path: "/".to_owned(), query: query.to_owned(), host: host.map(str::to_owned) }
}

#[tokio::test]
async fn metrics_are_made_one_after_the_other_however_many_ask() {
    let (sources, mut questions, _store) = sources();
    let mut readers: tokio::task::JoinSet<_> = (0..20)
        .map(|_| {
            let sources = sources.clone();
            async move { metrics(&sources).await.0 }
        })
        .collect();
    for _ in 0..20 {
        let Some(Question::Metrics(reply)) = questions.recv().await else { panic!("no question") };
        for _ in 0..100 {
            tokio::task::yield_now().await; // the others run
        }
        assert!(questions.try_recv().is_err(), "two at once");
        reply.send(OpenMetrics::default()).unwrap();
        assert_eq!(readers.join_next().await.unwrap().unwrap(), "200 OK");
    }
}

#[test]
fn a_query_names_the_page() {
    let page = |run: Option<&str>, still| Ok(Which { run: run.map(str::to_owned), still });
    let wrong = || Err("`run` in the address is no name of a run\n".to_owned());
    for (query, expected) in [
        ("", page(None, false)),
        ("x=1&run=job&y", page(Some("job"), false)),
        ("refresh=off", page(None, true)),
        ("run=a%20%2f%C3%A4&refresh=off", page(Some("a /ä"), true)),
        ("run=", wrong()),
        ("run=%", wrong()),
        ("run=%2", wrong()),
        ("run=%+1", wrong()),
        ("run=%FF", wrong()),
        ("run=%0A", wrong()),
    ] {
        assert_eq!(which(&request(query, None)), expected, "{query}");
    }
    assert_eq!(which(&request(&format!("run={}", "a".repeat(5_000)), None)), wrong());
}

#[tokio::test]
async fn refused_peers_are_counted_by_why() {
    let (mut sources, mut questions, store) = sources();
    tokio::spawn(async move {
        while let Some(Question::Metrics(reply)) = questions.recv().await {
            let _ = reply.send(OpenMetrics::default());
        }
    });
    let protection = Arc::new(Protection::by_token(Token::parse(&"a".repeat(64)).unwrap()).unwrap());
    sources.protection = Some(Arc::clone(&protection));
    // At whichever acceptor of the process.
    for kind in [Kind::Unproven, Kind::Late, Kind::Unproven, Kind::Forbidden] {
        protection.refuse(&Refusal::new(kind, "for a test"));
    }
    // One that does not even begin TLS. It is counted before it is closed.
    let mut client = TcpStream::connect(store.local_addr()).await.unwrap();
    client.write_all(b"SSH-2.0-scan\r\n").await.unwrap();
    let _ = client.read_to_end(&mut Vec::new()).await; // it may be reset
    let text = metrics(&sources).await.2;
    for (why, count) in
        [("no_tls", 1), ("certificate", 0), ("unproven", 2), ("late", 1), ("crowded", 0), ("forbidden", 1)]
    {
        let line = format!("elastic_rs_auth_failures_total{{why=\"{why}\"}} {count}");
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
}

#[test]
fn the_variable_says_who_may_read() {
    use Readers::{All, Loopback, Members, Nobody};
    let of = |value: Option<&str>, protected| {
        let (shown, observers) = Visible::of(value.map(OsStr::new), protected).unwrap();
        (shown.map(|Visible { metrics, page }| (metrics, page)), observers)
    };
    for (value, open, protected, observers) in [
        (None, Some((Members, Members)), Some((Nobody, Nobody)), Members),
        (Some("members"), Some((Members, Members)), Some((Nobody, Nobody)), Members),
        (Some("loopback"), Some((Loopback, Loopback)), Some((Nobody, Nobody)), Loopback),
        (Some("metrics"), Some((All, Members)), Some((All, Nobody)), Members),
        (Some("all"), Some((All, All)), Some((Nobody, Nobody)), All),
        (Some("off"), None, None, Members),
    ] {
        assert_eq!((of(value, false), of(value, true)), ((open, observers), (protected, observers)), "{value:?}");
    }
    for protected in [false, true] {
        let error = Visible::of(Some(OsStr::new("everyone")), protected).unwrap_err().to_string();
        assert_eq!(error, "ELASTIC_RS_HTTP is `everyone`, must be `members`, `loopback`, `metrics`, `all` or `off`");
    }
}

#[test]
fn a_host_header_is_an_address_or_a_name_of_this_machine() {
    use Readers::{All, Members};
    let (here, elsewhere): (IpAddr, IpAddr) = ([127, 0, 0, 9].into(), [10, 0, 0, 1].into());
    let misnamed =
        |host: Option<&str>, peer, readers| misnamed(&request("", host), peer, readers, Some("head.example"));
    let own = format!("{}:29400", rustix::system::uname().nodename().to_string_lossy());
    for host in [
        None,
        Some("localhost:29400"),
        Some("127.0.0.1"),
        Some("[::1]:29400"),
        Some("LOCALHOST"),
        Some("10.0.0.9:29400"),
    ] {
        for (peer, readers) in [(here, Members), (elsewhere, Members), (here, All), (elsewhere, All)] {
            assert_eq!(misnamed(host, peer, readers), None, "{host:?}");
        }
    }
    for host in ["HEAD.example:29400", &*own] {
        assert_eq!(misnamed(Some(host), elsewhere, Members), None, "{host:?}");
        assert_eq!(misnamed(Some(host), here, All), None, "{host:?}");
    }
    assert_eq!(
        misnamed(Some("head.example:29400"), here, Members),
        None,
        "another process of the list sends readers here"
    );
    for host in ["evil.example:29400", "localhost.evil.example", "", "[evil]", "127.0.0.1.evil.example"] {
        let why = misnamed(Some(host), here, Members).unwrap();
        assert!(why.ends_with("use localhost"), "{why}");
        for why in [misnamed(Some(host), elsewhere, Members), misnamed(Some(host), here, All)] {
            let why = why.unwrap();
            assert!(why.ends_with("use an address, its host name, or head.example"), "{why}");
        }
    }
}

#[tokio::test]
async fn a_protected_host_shows_neither_metrics_nor_page_whoever_asks() {
    let (mut sources, _questions, _store) = sources();
    sources.visible = Visible::NOTHING;
    let ends = (([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into());
    for (path, way) in [("/metrics", "ELASTIC_RS_HTTP=metrics"), ("/", "elastic-rs page ENDPOINT")] {
        let asked = Request { path: path.to_owned(), ..request("", None) };
        let Answer(status, _, why) = respond(&asked, ends, &sources).await;
        assert!(status.starts_with("403") && why.contains(way), "{why}");
    }
}
