//! The processes of a list over real sockets: two endpoint servers, honest nodes, observers, and hostile peers.

use std::net::TcpListener;
use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::endpoint::{Claim, EndpointServer, claim};
use elastic_rs::rendezvous::messages::codec::{decode_frame, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, NodeId, NodeMessage, Observe, PeerHello, Round,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::observer::Observer;
use elastic_rs::store::server::ServerOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);
const HOST: &str = "127.0.0.1";

/// Free ports, which were bound a moment ago.
fn ports(count: usize) -> Vec<u16> {
    let held: Vec<_> = (0..count).map(|_| TcpListener::bind((HOST, 0)).unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

fn list(ports: &[u16], place: u32) -> PeerHello {
    let endpoints = ports.iter().map(|port| format!("{HOST}:{port}")).collect();
    PeerHello { run_id: "job".into(), endpoints, place, process: NodeId(u128::from(place) + 1) }
}

fn serve(ports: &[u16], place: u32) -> EndpointServer {
    let port = ports[place as usize];
    match claim(HOST, port, None, ServerOptions::default(), None, Some(list(ports, place))).unwrap() {
        Claim::Serves(server) => server,
        Claim::Elsewhere(why) => panic!("{why}"),
    }
}

fn node(ports: &[u16], number: u128, nodes: u32) -> Session {
    let settings = Settings::new(nodes, nodes);
    let hello =
        Hello { process: number as u64, ..Hello::new("job", NodeId(number), format!("node:{number}"), settings) };
    let hosts = ports.iter().map(|port| (HOST.to_owned(), *port)).collect();
    Session::open_among(&Handle::current(), hello, hosts, None, PATIENCE, None)
}

/// The first answer to these messages, and the connection.
async fn answer(port: u16, sent: &[NodeMessage]) -> (Option<CoordinatorMessage>, TcpStream) {
    let mut stream = TcpStream::connect((HOST, port)).await.unwrap();
    let mut bytes = BytesMut::new();
    encode_preamble(&mut bytes);
    sent.iter().for_each(|message| encode_frame(message, &mut bytes));
    stream.write_all(&bytes).await.unwrap();
    let mut answer = BytesMut::new();
    loop {
        if let Some(message) = decode_frame(&mut answer).unwrap() {
            return (Some(message), stream);
        }
        if timeout(PATIENCE, stream.read_buf(&mut answer)).await.unwrap().unwrap_or(0) == 0 {
            return (None, stream);
        }
    }
}

async fn refusal(port: u16, hello: PeerHello) -> String {
    match answer(port, &[NodeMessage::Peer(Box::new(hello))]).await.0 {
        Some(CoordinatorMessage::Rejected { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_and_observers_find_the_leader_from_any_endpoint_also_the_next_one() {
    let ports = ports(2);
    let (second, first) = (serve(&ports, 1), serve(&ports, 0));
    let reversed: Vec<_> = ports.iter().rev().copied().collect();
    // The order in which a node tries them does not matter.
    let (one, other) = (node(&ports, 11, 2), node(&reversed, 12, 2));
    let (a, b) = tokio::join!(one.join(1, None, None, PATIENCE), other.join(2, None, None, PATIENCE));
    assert_eq!((a.unwrap().round, b.unwrap().round), (Round(1), Round(1)));
    for port in &ports {
        let mut observer = Observer::connect(HOST, *port, None, PATIENCE).await.unwrap();
        let ask = Observe { run_id: Some("job".into()), after: 0, waits: false, state: true };
        let state = observer.ask(ask).await.unwrap().state.unwrap();
        let leads = format!(r#""leader":"{HOST}:{}""#, ports[0]);
        assert!(state.contains(&leads), "{state}");
    }
    drop(first);
    // Both come back to the other one, which knows their world.
    let mut observer = Observer::connect(HOST, ports[1], None, PATIENCE).await.unwrap();
    let leads = format!(r#""leader":"{HOST}:{}""#, ports[1]);
    timeout(PATIENCE, async {
        loop {
            let ask = Observe { run_id: Some("job".into()), after: 0, waits: false, state: true };
            match observer.ask(ask).await {
                Ok(observed)
                    if observed.state.as_ref().is_some_and(|state| {
                        state.contains(&leads) && state.contains(r#""round":1"#) && state.contains(r#""running":2"#)
                    }) =>
                {
                    break;
                }
                Ok(_) => {}
                Err(_) => observer = Observer::connect(HOST, ports[1], None, PATIENCE).await.unwrap(),
            }
        }
    })
    .await
    .unwrap();
    assert_eq!((one.view().waiting, other.view().waiting), (0, 0), "their world goes on");
    for session in [one, other] {
        session.leave("the test is over".into(), None, PATIENCE).await;
    }
    drop(second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_peers_are_sent_away_and_disturb_nobody() {
    let ports = ports(2);
    let (first, _second) = (serve(&ports, 0), serve(&ports, 1));
    let (one, other) = (node(&ports, 11, 2), node(&ports, 12, 2));
    let (a, b) = tokio::join!(one.join(1, None, None, PATIENCE), other.join(2, None, None, PATIENCE));
    assert!(a.is_ok() && b.is_ok());
    let own = list(&ports, 1);
    let elsewhere = PeerHello { run_id: "other".into(), ..own.clone() };
    assert!(refusal(first.port(), elsewhere).await.contains("run `job`, not to run `other`"));
    let longer = PeerHello { endpoints: [own.endpoints.clone(), vec!["h:1".into()]].concat(), ..own.clone() };
    let why = refusal(first.port(), longer.clone()).await;
    assert!(why.contains(&own.endpoints.join(",")) && why.contains(&longer.endpoints.join(",")), "{why}");
    assert!(refusal(first.port(), list(&ports, 0)).await.contains("list each machine once"));
    let twice = PeerHello { process: NodeId(99), ..list(&ports, 0) };
    assert!(refusal(first.port(), twice).await.contains("two processes are at the endpoint"));
    assert!(refusal(first.port(), PeerHello { place: 9, ..own.clone() }).await.contains("must be below 2"));
    // A coordinator without a list has no part in one.
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let plain = EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap();
    assert!(refusal(plain.port(), own.clone()).await.contains("was not given the list of endpoints"));
    // A node of another job is told.
    let stranger = Hello::new("other", NodeId(77), "node:77", Settings::new(1, 1));
    let told = answer(first.port(), &[NodeMessage::Hello(Box::new(stranger))]).await.0;
    assert!(matches!(told, Some(CoordinatorMessage::Rejected { reason }) if reason.contains("serve run `job` alone")));
    // Bytes that are no message cost their own connection.
    let (told, mut stream) = answer(first.port(), &[NodeMessage::Peer(Box::new(own))]).await;
    assert!(matches!(told, Some(CoordinatorMessage::Peer { process }) if process == NodeId(1)));
    stream.write_all(&[5, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]).await.unwrap();
    let mut rest = BytesMut::new();
    assert_eq!(timeout(PATIENCE, stream.read_buf(&mut rest)).await.unwrap().unwrap_or(0), 0);
    assert_eq!((one.view().waiting, other.view().waiting), (0, 0));
    for session in [one, other] {
        session.leave("the test is over".into(), None, PATIENCE).await;
    }
}
