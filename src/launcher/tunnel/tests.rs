//! Both ends of a tunnel over real sockets, with a store at its end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::time::timeout;

use super::*;
use crate::net::listen::bind;
use crate::secure::fixtures::Folder;
use crate::secure::token::Token;
use crate::secure::{ProtectionOptions, TokenSource};
use crate::store::client::{ClientOptions, StoreClient};
use crate::store::server::{ServerOptions, StoreServer};

/// Time limit of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// A greeting, and a request that is answered with the last four bytes.
const GREETING: &[u8] = b"\0\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04";

fn token(digit: char) -> Token {
    Token::parse(&digit.to_string().repeat(64)).unwrap()
}

fn trust(token: Token, run_id: &str) -> Trust {
    Trust { protection: Arc::new(Protection::by_token(token).unwrap()), run_id: run_id.to_owned() }
}

fn listener() -> TcpListener {
    bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap()
}

fn entrance(trust: Trust, to: SocketAddr, who: LocalPeers) -> Tunnel {
    Tunnel::to_rank_0(listener(), (to.ip().to_string(), to.port()), trust, who).unwrap()
}

/// Rank 0's node and another one.
struct Nodes {
    entrance: Tunnel,
    acceptor: Tunnel,
    server: StoreServer,
}

fn nodes() -> Nodes {
    let server = StoreServer::start(vec![listener()], ServerOptions::default()).unwrap();
    let ours = trust(token('a'), "run");
    let acceptor = Arc::new(Acceptor::new(Arc::clone(&ours.protection)).unwrap());
    let acceptor = Tunnel::to_own_store(listener(), server.local_addr(), acceptor, "run".to_owned()).unwrap();
    let entrance = entrance(ours, acceptor.local_addr(), LocalPeers::Any);
    Nodes { entrance, acceptor, server }
}

async fn client(at: SocketAddr) -> StoreClient {
    let options = ClientOptions { connect_timeout: PATIENCE, timeout: Some(PATIENCE) };
    StoreClient::connect(&at.ip().to_string(), at.port(), options).await.unwrap()
}

fn raw(at: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// What somebody gets who says this, until the connection is closed.
fn answer_to(at: SocketAddr, sent: &[u8]) -> Vec<u8> {
    let (mut stream, mut got) = (raw(at), Vec::new());
    // It may be closed already.
    let _ = stream.write_all(sent);
    match stream.read_to_end(&mut got) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("neither answered nor closed"),
        _ => got,
    }
}

/// Wait until so many clients are connected to the store.
fn clients_are(server: &StoreServer, count: u64) {
    let deadline = Instant::now() + PATIENCE;
    while server.stats().connections_open != count {
        assert!(Instant::now() < deadline, "{:?}", server.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a thread of this process has this name.
fn runs(name: &str) -> bool {
    let comms = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().join("comm"));
    comms.into_iter().any(|comm| std::fs::read_to_string(comm).is_ok_and(|comm| comm.trim() == name))
}

#[tokio::test]
async fn what_workers_do_with_a_store_they_do_through_a_tunnel() {
    let nodes = nodes();
    let (near, far) = (client(nodes.server.local_addr()).await, client(nodes.entrance.local_addr()).await);
    near.set(b"a", b"1").await.unwrap();
    assert_eq!(far.get(b"a").await.unwrap(), "1");
    assert_eq!(far.add(b"count", 3).await.unwrap(), 3);
    assert_eq!(near.add(b"count", 4).await.unwrap(), 7);
    // A request that is answered once somebody else has set the key.
    let waiting = async { far.get(b"later").await.unwrap() };
    let setting = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        near.set(b"later", b"now").await.unwrap();
    };
    assert_eq!(tokio::join!(waiting, setting).0, "now");
    // Almost as large as a value may be.
    let value: Vec<u8> = (0..8_000_000u32).map(|number| (number.wrapping_mul(number) >> 7) as u8).collect();
    far.set(b"large", &value).await.unwrap();
    assert_eq!(near.get(b"large").await.unwrap(), value);
    assert_eq!(far.get(b"large").await.unwrap(), value);
    let more = client(nodes.entrance.local_addr()).await;
    assert_eq!(more.num_keys().await.unwrap(), near.num_keys().await.unwrap());
    clients_are(&nodes.server, 3);
}

#[tokio::test]
async fn a_worker_that_goes_is_seen_and_one_that_has_said_all_is_answered() {
    let nodes = nodes();
    let far = client(nodes.entrance.local_addr()).await;
    clients_are(&nodes.server, 1);
    drop(far);
    clients_are(&nodes.server, 0);
    let mut half = raw(nodes.entrance.local_addr());
    half.write_all(GREETING).unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    half.read_to_end(&mut got).unwrap();
    assert_eq!(got, [1, 2, 3, 4]);
    clients_are(&nodes.server, 0);
    // A reset.
    let rude = raw(nodes.entrance.local_addr());
    (&rude).write_all(GREETING).unwrap();
    clients_are(&nodes.server, 1);
    SockRef::from(&rude).set_linger(Some(Duration::ZERO)).unwrap();
    drop(rude);
    clients_are(&nodes.server, 0);
}

#[tokio::test]
async fn a_store_that_ends_is_seen() {
    let nodes = nodes();
    let far = client(nodes.entrance.local_addr()).await;
    let waiting = async { far.wait(&["never"]).await };
    let stopping = async { nodes.server.stop() };
    let (waited, ()) = timeout(PATIENCE, async { tokio::join!(waiting, stopping) }).await.unwrap();
    assert!(waited.unwrap_err().to_string().contains("closed"), "the store's end is the client's error");
}

#[test]
fn unauthenticated_peers_get_nothing() {
    let nodes = nodes();
    let at = nodes.acceptor.local_addr();
    for sent in [GREETING, b"GET / HTTP/1.1\r\n\r\n", b"ELRZ\x02\x00"] {
        assert_eq!(answer_to(at, sent), b"", "{sent:?}");
    }
    // A TLS client gets a refusal, and nothing of the store.
    for client in [trust(token('b'), "run"), trust(token('a'), "another"), trust(token('a').for_observers(), "run")] {
        let entrance = entrance(client, at, LocalPeers::Any);
        assert_eq!(answer_to(entrance.local_addr(), GREETING), b"");
    }
    assert_eq!(nodes.server.stats().connections_accepted, 0);
}

/// Certificates of one CA are as good as a token, and both may be asked for.
#[tokio::test]
async fn agents_with_certificates_meet_and_those_of_another_ca_do_not() {
    let (ours, theirs) = (Folder::new("node", &["ca"]), Folder::new("stranger", &["ca", "other-ca"]));
    let trust = |folder: &Folder, token: Option<Token>| {
        let token = token.map(TokenSource::Memory);
        let options = ProtectionOptions { token, certificates: Some(folder.files()), ..ProtectionOptions::default() };
        Trust { protection: Arc::new(Protection::new(options).unwrap()), run_id: "run".to_owned() }
    };
    for held in [None, Some(token('a'))] {
        let server = StoreServer::start(vec![listener()], ServerOptions::default()).unwrap();
        let own = trust(&ours, held.clone());
        let acceptor = Arc::new(Acceptor::new(Arc::clone(&own.protection)).unwrap());
        let acceptor = Tunnel::to_own_store(listener(), server.local_addr(), acceptor, "run".to_owned()).unwrap();
        let near = entrance(own, acceptor.local_addr(), LocalPeers::Any);
        client(near.local_addr()).await.set(b"a", b"1").await.unwrap();
        let accepted = server.stats().connections_accepted;
        let wrong = if held.is_some() { None } else { Some(token('a')) };
        let by_token = self::trust(token('a'), "run");
        for client in [trust(&theirs, held), trust(&ours, wrong), by_token] {
            let far = entrance(client, acceptor.local_addr(), LocalPeers::Any);
            assert_eq!(answer_to(far.local_addr(), GREETING), b"");
        }
        assert_eq!(server.stats().connections_accepted, accepted);
    }
}

#[tokio::test]
async fn unauthenticated_peers_that_send_nothing_hold_no_agent_up() {
    let nodes = nodes();
    let silent: Vec<TcpStream> = (0..700).map(|_| raw(nodes.acceptor.local_addr())).collect();
    let begin = Instant::now();
    client(nodes.entrance.local_addr()).await.set(b"a", b"1").await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    drop(silent);
}

/// Another address opens connections as fast as it can, and keeps the last of them. It begins to speak TLS, or says nothing.
#[tokio::test]
async fn an_address_that_floods_the_tunnel_keeps_no_agent_out() {
    let nodes = nodes();
    let at = nodes.acceptor.local_addr();
    let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let flooding = std::thread::spawn({
        let (stop, opened) = (Arc::clone(&stop), Arc::clone(&opened));
        move || {
            let mut held: Vec<Option<Socket>> = (0..2000).map(|_| None).collect();
            while !stop.load(Relaxed) {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                // So that it never runs out of ports.
                socket.set_linger(Some(Duration::ZERO)).unwrap();
                if socket.bind(&SocketAddr::from(([127, 6, 6, 6], 0)).into()).is_err()
                    || socket.connect(&at.into()).is_err()
                {
                    continue;
                }
                let number = opened.fetch_add(1, Relaxed);
                if number % 2 == 0 {
                    let _ = (&socket).write(&[0x16, 3, 1]); // it may be closed already
                }
                held[number % 2000] = Some(socket);
            }
        }
    });
    let until = Instant::now() + PATIENCE;
    while opened.load(Relaxed) < 3000 {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for number in 0..20 {
        // Nobody tries again for a worker whose connection is closed.
        client(nodes.entrance.local_addr()).await.set(b"a", format!("{number}").as_bytes()).await.unwrap();
    }
    stop.store(true, Relaxed);
    flooding.join().unwrap();
}

#[test]
fn a_tunnel_that_cannot_be_opened_closes_the_workers_connection() {
    let nobody = listener().local_addr().unwrap();
    let tunnel = entrance(trust(token('a'), "run"), nobody, LocalPeers::Any);
    assert_eq!(answer_to(tunnel.local_addr(), GREETING), b"");
    // A store without an acceptor.
    let server = StoreServer::start(vec![listener()], ServerOptions::default()).unwrap();
    let tunnel = entrance(trust(token('a'), "run"), server.local_addr(), LocalPeers::Any);
    assert_eq!(answer_to(tunnel.local_addr(), GREETING), b"");
}

mod for_root {
    use super::*;
    use crate::net::hidden_peer::{second_interface, send_and_hide};

    /// The agent would prove itself on behalf of whoever connects to its entrance.
    #[test]
    fn another_user_that_hides_its_socket_3000_times_does_not_get_in() {
        const TRIES: u64 = 3000;
        let Some(interface) = second_interface() else { return };
        let other_uid = Uid::from_raw(65533);
        let Nodes { acceptor, server, .. } = nodes();
        let tunnel = entrance(trust(token('a'), "run"), acceptor.local_addr(), LocalPeers::SameUser { way_out: "" });
        let at = tunnel.local_addr();
        let other_users = std::thread::spawn(move || {
            set_thread_res_uid(other_uid, other_uid, other_uid).expect("only root can be another user");
            (0..TRIES).for_each(|_| send_and_hide(at, &interface, GREETING));
        });
        other_users.join().unwrap();
        // Accepted behind all of them.
        let mut own = raw(at);
        own.write_all(GREETING).unwrap();
        own.read_exact(&mut [0; 4]).unwrap();
        clients_are(&server, 1);
        assert_eq!(server.stats().connections_accepted, 1);
    }

    #[test]
    fn other_users_of_the_machine_do_not_get_in() {
        let other_uid = Uid::from_raw(65533);
        let Nodes { acceptor, server, .. } = nodes();
        let tunnel = entrance(trust(token('a'), "run"), acceptor.local_addr(), LocalPeers::SameUser { way_out: "" });
        let at = tunnel.local_addr();
        let as_other_user = std::thread::spawn(move || {
            set_thread_res_uid(other_uid, other_uid, other_uid).expect("only root can be another user");
            answer_to(at, GREETING)
        });
        assert_eq!(as_other_user.join().unwrap(), b"");
        assert_eq!(server.stats().connections_accepted, 0);
        let mut own = raw(at);
        own.write_all(GREETING).unwrap();
        own.read_exact(&mut [0; 4]).unwrap();
    }
}

#[test]
fn nothing_is_left_of_a_tunnel_that_is_dropped() {
    for first in ["entrance", "acceptor"] {
        let Nodes { entrance, acceptor, server } = nodes();
        let addresses = [entrance.local_addr(), acceptor.local_addr()];
        let mut worker = raw(addresses[0]);
        worker.write_all(GREETING).unwrap();
        worker.read_exact(&mut [0; 4]).unwrap();
        let (one, other) = if first == "entrance" { (entrance, acceptor) } else { (acceptor, entrance) };
        drop(one);
        assert!(matches!(worker.read(&mut [0]), Ok(0) | Err(_)), "closed");
        clients_are(&server, 0);
        drop(other);
        for address in addresses {
            assert!(TcpStream::connect(address).is_err(), "{address} listens");
            // A thread that was joined stays in /proc for a moment.
            let began = Instant::now();
            while runs(&format!("tunnel-{}", address.port())) {
                assert!(began.elapsed() < Duration::from_secs(60), "a thread of {address} is left");
            }
        }
    }
}
