//! Sessions and a coordinator over real sockets. These tests are about the drivers. The simulator tests the decisions.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::rendezvous::coordinator::driver::{self, DriversHosts, Incoming, Shown};
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::coordinator::readers::Readers;
use elastic_rs::rendezvous::messages::codec;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, Failure, Hello, MAGIC, NodeId, PROTOCOL_VERSION, Placement, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::node::{JoinError, View};
use elastic_rs::rendezvous::run::Exclusions;
use elastic_rs::secure::Halves;
use elastic_rs::store::client::{ClientOptions, StoreClient};
use elastic_rs::store::server::ServerOptions;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Time limit for a loaded machine. A test that passes does not wait for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Coordinator {
    pub address: SocketAddr,
    sessions: watch::Receiver<usize>,
    pub exclusions: watch::Receiver<Exclusions>,
    task: JoinHandle<()>,
}

fn hello_of(number: u128, settings: Settings) -> Hello {
    let name = format!("node{number}");
    Hello { local_addr: Some(name.clone()), ..Hello::new("job", NodeId(number), name, settings) }
}

impl Coordinator {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    async fn start_at(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener = socket.listen(4096).unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, incoming) = mpsc::unbounded_channel();
        let (count, sessions) = watch::channel(0);
        let (excluded, exclusions) = watch::channel(Exclusions::new());
        let shown = Shown {
            sessions: count,
            exclusions: excluded,
            drivers: watch::channel(DriversHosts::new()).1,
            questions: mpsc::channel(1).1,
            protection: None,
            readers: Readers::Members,
            same_user: None,
            list: None,
        };
        let task = tokio::spawn(async move {
            let accepting = async {
                loop {
                    let (stream, peer) = listener.accept().await.unwrap();
                    let local = stream.local_addr().unwrap();
                    let incoming = Incoming {
                        halves: Halves::plain(stream),
                        first_bytes: BytesMut::new(),
                        identity: None,
                        peer,
                        local,
                        kept: Box::new(()),
                    };
                    sender.send(incoming).unwrap();
                }
            };
            tokio::select! {
                () = accepting => {}
                () = driver::run(Machine::new(), incoming, shown, || {}, PATIENCE, PATIENCE) => {}
            }
        });
        Self { address, sessions, exclusions, task }
    }

    pub fn session(&self, number: u128, settings: Settings) -> Session {
        self.open(hello_of(number, settings))
    }

    pub fn open(&self, hello: Hello) -> Session {
        Session::open(&Handle::current(), hello, "127.0.0.1", self.address.port(), PATIENCE, None)
    }

    async fn until_sessions(&mut self, count: usize) {
        tokio::time::timeout(PATIENCE, self.sessions.wait_for(|now| *now == count)).await.unwrap().unwrap();
    }
}

/// Wait until pushes have made the session's view satisfy a condition.
pub async fn until_view(session: &Session, wanted: impl Fn(&View) -> bool) -> View {
    tokio::time::timeout(PATIENCE, session.view_when(wanted)).await.unwrap()
}

async fn join_all(sessions: &[Session]) -> Vec<Placement> {
    let mut placements = Vec::new();
    let joins = sessions.iter().enumerate().map(|(i, session)| session.join(1000 + i as u16, None, None, PATIENCE));
    for placement in futures(joins).await {
        placements.push(placement.unwrap());
    }
    placements
}

/// Await all futures concurrently.
async fn futures<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut pending: Vec<_> = all.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in pending.iter_mut().filter(|(_, output)| output.is_none()) {
            if let std::task::Poll::Ready(value) = future.as_mut().poll(context) {
                *output = Some(value);
            }
        }
        if pending.iter().all(|(_, output)| output.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    pending.into_iter().map(|(_, output)| output.unwrap()).collect()
}

#[tokio::test]
async fn sixty_four_nodes_form_one_world() {
    let mut coordinator = Coordinator::start().await;
    let sessions: Vec<_> = (0..64).map(|n| coordinator.session(n, Settings::new(64, 64))).collect();
    let placements = join_all(&sessions).await;
    for (n, placement) in placements.iter().enumerate() {
        assert_eq!(placement.rank, n as u32, "ranks follow the natural order of addresses");
        assert_eq!((placement.world_size, placement.round), (64, Round(1)));
        assert_eq!((placement.master_addr.as_str(), placement.master_port), ("node0", 1000));
    }
    coordinator.until_sessions(64).await;
    for session in &sessions {
        session.leave("test is over".into(), None, PATIENCE).await;
    }
    coordinator.until_sessions(0).await;
}

#[tokio::test]
async fn a_lost_node_is_pushed_to_the_survivors_who_form_the_next_world() {
    let mut settings = Settings::new(1, 2);
    (settings.reconnect_grace, settings.settle_timeout) = (Duration::from_millis(20), Duration::from_millis(20));
    let coordinator = Coordinator::start().await;
    let mut sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, settings.clone())).collect();
    join_all(&sessions).await;
    drop(sessions.remove(0));
    let view = until_view(&sessions[0], |view| view.waiting > 0).await;
    assert!(view.reason.contains("node0 (node0) is lost: its connection ended"), "{}", view.reason);
    let placement = join_all(&sessions).await.remove(0);
    assert_eq!((placement.rank, placement.world_size, placement.round), (0, 1, Round(2)));
    assert_eq!(placement.master_addr, "node1");
}

/// Long before their time is over: newcomers need the places of 1,024 connections that say nothing.
#[tokio::test]
async fn connections_that_send_no_hello_lose_their_permits() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    // Of the address from which the node comes, and of another one.
    for from in ["127.0.0.1:0", "127.0.0.2:0"] {
        let coordinator = Coordinator::start().await;
        let mut silent = Vec::new();
        for _ in 0..1100 {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(from.parse().unwrap()).unwrap();
            silent.push(socket.connect(coordinator.address).await.unwrap());
        }
        let session = coordinator.session(1, Settings::new(1, 1));
        assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().world_size, 1);
        let first = tokio::time::timeout(PATIENCE / 2, silent[0].read(&mut [0])).await.expect("the oldest is closed");
        assert!(matches!(first, Ok(0) | Err(_)), "{first:?}");
    }
}

#[tokio::test]
async fn a_join_timeout_names_the_nodes_that_joined_and_the_number_missing() {
    let coordinator = Coordinator::start().await;
    let session = coordinator.session(7, Settings::new(3, 3));
    let error = session.join(1, None, None, Duration::from_millis(300)).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, JoinError::Timeout { .. }), "{error:?}");
    assert!(text.contains("round 1: 1 of 3 nodes have joined (node7 (node7)); 2 more needed"), "{text}");
}

#[tokio::test]
async fn a_second_join_at_the_same_time_is_rejected_and_a_dropped_one_is_withdrawn() {
    let coordinator = Coordinator::start().await;
    let sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, Settings::new(2, 2))).collect();
    let joining = sessions[0].join(1, None, None, PATIENCE);
    let busy = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        sessions[0].join(2, None, None, PATIENCE).await.unwrap_err()
    };
    tokio::select! {
        _ = joining => panic!("no other node has joined"),
        error = busy => assert_eq!(error, JoinError::Busy),
    }
    // The dropped join does not count for the next node.
    let error = sessions[1].join(1, None, None, Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(error, JoinError::Timeout { .. }), "{error:?}");
    assert!(error.to_string().contains("1 of 2 nodes have joined (node1 (node1))"), "{error}");
    assert_eq!(join_all(&sessions).await[0].world_size, 2);
}

#[tokio::test]
async fn a_spare_waits_longer_than_its_join_timeout_until_the_job_needs_it() {
    const JOIN_TIMEOUT: Duration = Duration::from_millis(300);
    let mut settings = Settings::new(1, 1);
    settings.keep_alive_interval = Duration::from_millis(50);
    settings.reconnect_grace = Duration::from_millis(20);
    let coordinator = Coordinator::start().await;
    let mut sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, settings.clone())).collect();
    join_all(&sessions[..1]).await;
    let spare = sessions.pop().unwrap();
    let running = sessions.pop().unwrap();
    let end = async {
        tokio::time::sleep(JOIN_TIMEOUT * 3).await;
        assert!(spare.progress().unwrap().contains("round 1 runs undisturbed (nodes: 1)"));
        drop(running);
    };
    let (placement, ()) = tokio::join!(spare.join(1, None, None, JOIN_TIMEOUT), end);
    assert_eq!(placement.unwrap().round, Round(2));
}

#[tokio::test]
async fn a_failed_verdict_reaches_running_nodes_with_its_cause() {
    let coordinator = Coordinator::start().await;
    let sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, Settings::new(2, 2))).collect();
    join_all(&sessions).await;
    let verdict = Verdict::Failed {
        by: "node1".into(),
        cause: "rank 3 ended with exit code 7".into(),
        failure: None,
        class: EndClass::Program,
    };
    sessions[1].close(verdict.clone());
    let view = until_view(&sessions[0], |view| view.closed.is_some()).await;
    assert_eq!(view.closed, Some(verdict.clone()));
    let error = sessions[0].join(1, None, None, PATIENCE).await.unwrap_err();
    assert_eq!(error, JoinError::Closed { verdict, spare: false });
}

fn failure() -> Failure {
    Failure {
        node: String::new(),
        role: "trainer".into(),
        local_rank: 0,
        global_rank: 1,
        pid: 77,
        exit: "exit code 3".into(),
        returncode: 3,
        message: "boom".into(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    }
}

#[tokio::test]
async fn a_reported_failure_reaches_all_nodes_and_the_second_one_ends_the_job() {
    let settings = Settings { max_restarts: Some(1), ..Settings::new(2, 2) };
    let coordinator = Coordinator::start().await;
    let sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, settings.clone())).collect();
    join_all(&sessions).await;
    sessions[1].report_failure(Round(1), failure());
    let own = until_view(&sessions[1], |view| view.waiting > 0).await;
    let others = until_view(&sessions[0], |view| view.waiting > 0).await;
    let expected = Failure { node: "node1 (node1)".into(), ..failure() };
    for view in [own, others] {
        assert_eq!((view.failure, view.restart), (Some(expected.clone()), 1));
    }
    assert!(join_all(&sessions).await.iter().all(|placement| (placement.round, placement.restart) == (Round(2), 1)));
    assert_eq!(sessions[0].view().failure, None);
    // A report about an earlier round has no effect.
    sessions[1].report_failure(Round(1), failure());
    assert_eq!(sessions[1].view().waiting, 0);
    sessions[1].report_failure(Round(2), failure());
    for session in &sessions {
        let view = until_view(session, |view| view.closed.is_some()).await;
        assert_eq!(view.failure, Some(expected.clone()));
    }
}

#[tokio::test]
async fn a_finished_node_waits_for_the_last_live_member() {
    let coordinator = Coordinator::start().await;
    let mut sessions: Vec<_> = (0..3).map(|n| coordinator.session(n, Settings::new(1, 3))).collect();
    join_all(&sessions).await;
    let lost = sessions.pop().unwrap();
    // A node that finishes and then leaves disturbs no other node. Its Done is sent before its Leave.
    lost.report_done(Round(1));
    lost.leave("finished".into(), None, PATIENCE).await;
    assert_eq!(sessions[0].view().waiting, 0);
    sessions[0].report_done(Round(1));
    sessions[1].report_done(Round(1));
    for session in &sessions {
        let view = until_view(session, |view| view.closed.is_some()).await;
        assert!(view.all_done, "{view:?}");
        assert_eq!(view.closed, Some(Verdict::AllDone { round: Round(1), nodes: 2 }));
    }
}

#[tokio::test]
async fn a_session_connects_to_a_coordinator_that_starts_late() {
    // No process serves this port during the session's first tries.
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let absent = Coordinator {
        address,
        sessions: watch::channel(0).1,
        exclusions: watch::channel(Exclusions::new()).1,
        task: tokio::spawn(async {}),
    };
    let session = absent.session(1, Settings::new(1, 1));
    let join = tokio::spawn(async move { session.join(1, None, None, PATIENCE).await });
    let _coordinator = Coordinator::start_at(address).await;
    assert_eq!(join.await.unwrap().unwrap().world_size, 1);
}

#[tokio::test]
async fn a_restarted_coordinator_disturbs_no_node_and_continues_the_round_numbers() {
    let coordinator = Coordinator::start().await;
    let sessions: Vec<_> = (0..2).map(|n| coordinator.session(n, Settings::new(2, 2))).collect();
    assert_eq!(join_all(&sessions).await[0].round, Round(1));
    let address = coordinator.address;
    coordinator.task.abort();
    let _ = coordinator.task.await;
    for session in &sessions {
        until_view(session, |view| view.out_of_reach_since.is_some()).await;
    }
    let mut coordinator = Coordinator::start_at(address).await;
    coordinator.until_sessions(2).await;
    for session in &sessions {
        let view = until_view(session, |view| view.out_of_reach_since.is_none()).await;
        assert_eq!((view.waiting, view.round), (0, Round(1)));
    }
    let placements = join_all(&sessions).await;
    assert_eq!(placements.iter().map(|p| (p.round, p.rank)).collect::<Vec<_>>(), [(Round(2), 0), (Round(2), 1)]);
}

#[tokio::test]
async fn the_error_names_a_server_that_is_no_coordinator() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let absent = Coordinator {
        address: listener.local_addr().unwrap(),
        sessions: watch::channel(0).1,
        exclusions: watch::channel(Exclusions::new()).1,
        task: tokio::spawn(async {}),
    };
    let mut servers = JoinSet::new();
    servers.spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        }
    });
    let session = absent.session(1, Settings::new(1, 1));
    let error = session.join(1, None, None, PATIENCE).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("the server at {} is not an elastic_rs coordinator", absent.address)), "{text}");
}

#[tokio::test]
async fn a_session_of_another_version_gets_both_versions() {
    let coordinator = Coordinator::start().await;
    let mut stream = TcpStream::connect(coordinator.address).await.unwrap();
    stream.write_all(&[MAGIC, &[9, 0]].concat()).await.unwrap();
    let mut answer = BytesMut::new();
    while stream.read_buf(&mut answer).await.unwrap() > 0 {}
    let message = codec::decode_frame::<CoordinatorMessage>(&mut answer).unwrap();
    let reason = "rendezvous protocol version 9 is not spoken here, only version 4: install one release of elastic_rs on every node".to_owned();
    assert_eq!(message, Some(CoordinatorMessage::Rejected { reason }));
}

#[tokio::test]
async fn a_giant_frame_ends_its_own_connection_only() {
    let coordinator = Coordinator::start().await;
    let mut rogue = TcpStream::connect(coordinator.address).await.unwrap();
    rogue.write_all(&[MAGIC, &PROTOCOL_VERSION.to_le_bytes(), &[0xff, 0xff, 0xff, 0x7f]].concat()).await.unwrap();
    let session = coordinator.session(1, Settings::new(1, 1));
    assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().world_size, 1);
    let mut rest = Vec::new();
    rogue.read_to_end(&mut rest).await.unwrap();
}

/// Sessions and store share the port. Half a greeting must disturb neither.
#[test]
fn half_a_greeting_costs_its_own_connection_and_disturbs_neither_sessions_nor_store() {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let hello_timeout = Duration::from_millis(200);
    let options = ServerOptions { hello_timeout, ..ServerOptions::default() };
    let host = elastic_rs::endpoint::EndpointServer::start(vec![listener], options, None).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let address: SocketAddr = format!("127.0.0.1:{}", host.port()).parse().unwrap();
        let frame = [MAGIC, &PROTOCOL_VERSION.to_le_bytes(), &100u32.to_le_bytes(), &[7; 50]].concat();
        let mut open = Vec::new();
        // Every prefix of magic, version, a frame's length and half its body; then silence.
        for end in 0..frame.len() {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&frame[..end]).await.unwrap();
            open.push(stream);
        }
        let store = StoreClient::connect("127.0.0.1", host.port(), ClientOptions::default()).await.unwrap();
        store.set(b"k", b"v").await.unwrap();
        let hello = hello_of(1, Settings::new(1, 1));
        let session = Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
        assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().world_size, 1);
        for (end, stream) in open.iter_mut().enumerate() {
            let closed = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
            assert!(closed.is_ok(), "{end} bytes of a greeting keep a connection open");
        }
        assert_eq!(store.get(b"k").await.unwrap()[..], b"v"[..], "a client that has sent a request may be silent");
        assert!(!host.sessions().ended(Duration::ZERO).await, "a session may be silent too");
    });
}

#[test]
fn sessions_count_towards_max_connections() {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let options = ServerOptions { max_connections: 2, ..ServerOptions::default() };
    let host = elastic_rs::endpoint::EndpointServer::start(vec![listener], options, None).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let connect = |limit| {
            let options = ClientOptions { connect_timeout: limit, ..ClientOptions::default() };
            StoreClient::connect("127.0.0.1", host.port(), options)
        };
        let store = connect(PATIENCE).await.unwrap();
        let hello = hello_of(1, Settings::new(1, 1));
        let session = Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
        assert_eq!(session.join(1, None, None, PATIENCE).await.unwrap().world_size, 1);
        let error = connect(Duration::ZERO).await.unwrap_err();
        assert!(error.to_string().contains("does not answer as a store"), "{error}");
        store.set(b"k", b"v").await.unwrap();
        // When the node goes, another connection is accepted.
        drop(session);
        connect(PATIENCE).await.unwrap();
        assert_eq!(store.get(b"k").await.unwrap()[..], b"v"[..]);
    });
}
