//! Sessions that a token protects, over real sockets: who gets in, who does not, and what unauthenticated peers change.
//!
//! What goes on inside TLS is tested beside the code (`src/secure`): a peer in between, and bytes that are no proof.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::rendezvous::messages::codec::{encode_frame, encode_preamble, is_protected_answer};
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, NodeMessage, Placement, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::secure::refusals::Kind;
use elastic_rs::secure::token::Token;
use elastic_rs::secure::{Protection, ProtectionOptions, TokenSource};
use elastic_rs::store::server::ServerOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;
use tokio::time::timeout;

/// Time limit for a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Time in which nothing may happen.
pub(crate) const MOMENT: Duration = Duration::from_millis(300);

pub(crate) fn token(digit: char) -> Token {
    Token::parse(&digit.to_string().repeat(64)).unwrap()
}

fn by(token: Token) -> Option<Arc<Protection>> {
    Some(Arc::new(Protection::by_token(token).unwrap()))
}

pub(crate) fn host(protection: Option<Arc<Protection>>) -> (EndpointServer, Runtime) {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), protection).unwrap();
    (host, Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap())
}

pub(crate) fn node_of(run: &str, number: u128, nodes: u32) -> Hello {
    Hello { process: number as u64, ..Hello::new(run, NodeId(number), "node:1", Settings::new(nodes, nodes)) }
}

pub(crate) fn open(port: u16, hello: Hello, protection: Option<Arc<Protection>>) -> Session {
    Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, protection)
}

pub(crate) async fn join(session: &Session) -> Result<Placement, JoinError> {
    session.join(1, None, None, PATIENCE).await
}

/// Wait until this node says why it is not in the job.
pub(crate) async fn reported(session: &Session, why: &str) {
    let joining = join(session);
    let looking = async {
        let mut sent = String::new();
        while !sent.contains(why) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            sent = session.progress().unwrap_or_default();
        }
    };
    tokio::select! {
        joined = joining => panic!("{joined:?}"),
        reported = timeout(PATIENCE, looking) => assert!(reported.is_ok(), "{why}: {:?}", session.progress()),
    }
}

/// A file with these tokens that is gone at the end.
struct TokenFile(PathBuf);

impl TokenFile {
    fn new(name: &str, tokens: &[Token]) -> Self {
        let path = std::env::temp_dir().join(format!("elastic_rs-protected-{}-{name}", std::process::id()));
        let file = Self(path);
        file.write(tokens);
        file
    }

    /// Replace the file by another, as `mv` does.
    fn write(&self, tokens: &[Token]) {
        let text = tokens.iter().map(|token| format!("{}\n", token.reveal())).collect::<String>();
        let new = self.0.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
        fs::rename(new, &self.0).unwrap();
    }

    fn protection(&self) -> Option<Arc<Protection>> {
        let token = Some(TokenSource::File(self.0.clone()));
        let options = ProtectionOptions { token, good_for: Duration::ZERO, ..ProtectionOptions::default() };
        Some(Arc::new(Protection::new(options).unwrap()))
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn nodes_with_the_token_form_a_world_and_end_it() {
    let (host, runtime) = host(by(token('a')));
    runtime.block_on(async {
        let sessions = [1, 2].map(|number| open(host.port(), node_of("job", number, 2), by(token('a'))));
        let (one, other) = tokio::join!(join(&sessions[0]), join(&sessions[1]));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!((one.world_size, one.rank + other.rank), (2, 1));
        sessions[0].close(Verdict::Succeeded { by: "node:1".into() });
        timeout(PATIENCE, sessions[1].view_when(|view| view.closed.is_some())).await.unwrap();
        for session in &sessions {
            session.leave("done".into(), None, PATIENCE).await;
        }
        assert!(host.sessions().ended(PATIENCE).await);
    });
}

/// Within a second: the fastest of a few, because other processes share the machine.
#[test]
fn a_token_on_one_side_only_is_reported() {
    let (protected, runtime) = host(by(token('a')));
    let plain = host(None).0;
    runtime.block_on(async {
        let mut fastest = [PATIENCE; 2];
        for number in 1..=5 {
            let began = Instant::now();
            let session = open(protected.port(), node_of("job", number, 1), None);
            let error = join(&session).await.unwrap_err().to_string();
            assert!(
                error.contains(
                    "it is protected by a token: name the file with the job's token in ELASTIC_RS_TOKEN_FILE"
                ),
                "{error}"
            );
            fastest[0] = fastest[0].min(began.elapsed());
            let began = Instant::now();
            let session = open(plain.port(), node_of("job", number, 1), by(token('a')));
            reported(&session, "this node has a token (ELASTIC_RS_TOKEN_FILE), and it seems to have none").await;
            fastest[1] = fastest[1].min(began.elapsed());
        }
        assert!(fastest.into_iter().all(|took| took < Duration::from_secs(1)), "{fastest:?}");
    });
}

#[test]
fn another_token_is_reported_and_is_no_verdict() {
    let (held, own) = (TokenFile::new("held", &[token('a')]), TokenFile::new("own", &[token('b')]));
    let (host, runtime) = host(held.protection());
    runtime.block_on(async {
        let session = open(host.port(), node_of("job", 1, 1), own.protection());
        let why = format!("no token with the id {} is accepted", token('b').id());
        reported(&session, &why).await;
        // The operator mends it, and the node gets in without a restart.
        own.write(&[token('a')]);
        assert_eq!(join(&session).await.unwrap().world_size, 1);
    });
}

/// Host and nodes have files of their own, which do not change at the same time. After each step all connections are cut.
#[test]
fn a_token_is_replaced_while_a_job_runs() {
    const NODES: u32 = 64;
    let (hosts, nodes) = (TokenFile::new("host", &[token('a')]), TokenFile::new("nodes", &[token('a')]));
    let (host, runtime) = host(hosts.protection());
    runtime.block_on(async {
        let relay = Relay::start(host.port()).await;
        let sessions: Vec<_> = (0..NODES)
            .map(|number| {
                let hello = node_of("job", u128::from(number) + 1, NODES);
                Arc::new(open(relay.port, hello, nodes.protection()))
            })
            .collect();
        let joins: Vec<_> =
            sessions.iter().cloned().map(|session| tokio::spawn(async move { join(&session).await })).collect();
        for joined in joins {
            assert_eq!(joined.await.unwrap().unwrap().world_size, NODES);
        }
        let steps: [(&TokenFile, &[char]); 4] =
            [(&hosts, &['a', 'b']), (&nodes, &['a', 'b']), (&nodes, &['b', 'a']), (&hosts, &['b'])];
        for (file, tokens) in steps {
            file.write(&tokens.iter().map(|digit| token(*digit)).collect::<Vec<_>>());
            let back = *relay.accepted.borrow() + NODES;
            relay.cut();
            let mut accepted = relay.accepted.subscribe();
            timeout(PATIENCE, accepted.wait_for(|count| *count >= back)).await.unwrap().unwrap();
            for session in &sessions {
                timeout(PATIENCE, session.view_when(|view| view.out_of_reach_since.is_none())).await.unwrap();
            }
        }
        for session in sessions {
            let view = session.view();
            assert_eq!((view.waiting, view.restart, view.failed), (0, 0, None));
        }
        // The old token is worth nothing any more.
        let old = Protection::by_token(token('a')).unwrap();
        assert!(old.try_at("127.0.0.1", host.port(), "127.0.0.1", "job", PATIENCE).await.is_err());
    });
}

/// Passes connections on to a port, until they are cut.
struct Relay {
    port: u16,
    cut: watch::Sender<u32>,
    /// Connections so far.
    accepted: watch::Sender<u32>,
}

impl Relay {
    async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (cut, accepted) = (watch::Sender::new(0), watch::Sender::new(0));
        let (cuts, count) = (cut.subscribe(), accepted.clone());
        tokio::spawn(async move {
            while let Ok((mut node, _)) = listener.accept().await {
                count.send_modify(|count| *count += 1);
                let mut cuts = cuts.clone();
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut host) = TcpStream::connect(("127.0.0.1", to)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut node, &mut host) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        Self { port, cut, accepted }
    }

    fn cut(&self) {
        self.cut.send_modify(|count| *count += 1);
    }
}

#[test]
fn a_runs_token_is_for_that_run_and_an_observers_for_no_node() {
    let master = TokenFile::new("master", &[token('f')]);
    let protection = Arc::new(Protection::by_master_file(&master.0).unwrap());
    let (host, runtime) = host(Some(protection));
    runtime.block_on(async {
        let session = open(host.port(), node_of("a", 1, 1), by(token('f').for_run("a")));
        assert_eq!(join(&session).await.unwrap().world_size, 1);
        for wrong in [token('f').for_run("b"), token('f')] {
            let session = open(host.port(), node_of("a", 2, 1), by(wrong));
            reported(&session, "is accepted for this run").await;
        }
        let session = open(host.port(), node_of("a", 3, 1), by(token('f').for_run("a").for_observers()));
        let error = join(&session).await.unwrap_err().to_string();
        assert!(error.contains("is an observer's: no node may join with it"), "{error}");
        assert!(host.refusals().unwrap().of(Kind::Forbidden) > 0);
    });
}

/// Unauthenticated peers of every kind, beside a job: what they say is never read, and the job does not notice.
#[test]
fn unauthenticated_peers_change_nothing() {
    let (host, runtime) = host(by(token('a')));
    runtime.block_on(async {
        let session = open(host.port(), node_of("job", 1, 1), by(token('a')));
        join(&session).await.unwrap();
        let address = ("127.0.0.1", host.port());
        // A forged introduction of the member, a verdict, a c10d client, a web browser, and half a handshake.
        let mut forged = BytesMut::new();
        encode_preamble(&mut forged);
        encode_frame(&NodeMessage::Hello(Box::new(node_of("job", 1, 1))), &mut forged);
        encode_frame(&NodeMessage::Close(Verdict::Succeeded { by: "me".into() }), &mut forged);
        let c10d = [&[0_u8][..], &0x3C85_F7CE_u32.to_le_bytes(), &[7; 64]].concat();
        let flood = [&[0x16, 0x03, 0x01, 0x40, 0x00][..], &[7; 64 << 10]].concat();
        let mut held = Vec::new();
        for (bytes, reported) in
            [(&forged[..], true), (&c10d, false), (b"GET / HTTP/1.1\r\n\r\n", false), (&flood, false)]
        {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(bytes).await; // it may be closed already
            let mut answer = Vec::new();
            let _ = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it is closed");
            assert_eq!(is_protected_answer(&answer), reported, "{answer:?}");
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&bytes[..3]).await.unwrap();
            held.push(stream);
        }
        // They say nothing, or not enough.
        for number in 0..300 {
            let Ok(mut stream) = TcpStream::connect(address).await else { continue };
            if number % 2 == 0 {
                stream.write_all(&[0x16, 0x03, 0x01]).await.unwrap();
            }
            held.push(stream);
        }
        // They complete the handshake, and hold another token.
        for _ in 0..20 {
            let another = by(token('b')).unwrap();
            let refused = another.connect(address, "job", PATIENCE, |_| Ok(())).await.map(drop).unwrap_err();
            assert!(refused.contains("no token with the id"), "{refused}");
        }
        let newcomer = open(host.port(), node_of("other", 2, 1), by(token('a')));
        assert_eq!(join(&newcomer).await.unwrap().world_size, 1);
        tokio::time::sleep(MOMENT).await;
        let view = session.view();
        assert_eq!((view.waiting, view.restart, view.failed, view.closed), (0, 0, None, None));
        drop(held);
    });
}

/// Whoever has recorded a node's connection cannot use it: every connection has a secret of its own.
#[test]
fn a_recorded_connection_is_worthless() {
    let (host, runtime) = host(by(token('a')));
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let session = open(listener.local_addr().unwrap().port(), node_of("job", 1, 1), by(token('a')));
        let relaying = async {
            let (node, _) = listener.accept().await.unwrap();
            let coordinator = TcpStream::connect(("127.0.0.1", host.port())).await.unwrap();
            let ((mut from_node, mut to_node), (mut from_host, mut to_host)) =
                (node.into_split(), coordinator.into_split());
            let back = tokio::spawn(async move { tokio::io::copy(&mut from_host, &mut to_node).await });
            let mut recorded = Vec::new();
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = from_node.read(&mut part).await {
                recorded.extend_from_slice(&part[..count]);
                to_host.write_all(&part[..count]).await.unwrap();
            }
            back.abort();
            recorded
        };
        let using = async {
            join(&session).await.unwrap();
            session.leave("done".into(), None, PATIENCE).await;
        };
        let (recorded, ()) = timeout(PATIENCE, async { tokio::join!(relaying, using) }).await.unwrap();
        assert!(recorded.len() > 300 && !recorded.windows(4).any(|part| part == b"ELRZ"), "it is encrypted");
        let mut again = TcpStream::connect(("127.0.0.1", host.port())).await.unwrap();
        again.write_all(&recorded).await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(PATIENCE, again.read_to_end(&mut answer)).await.expect("it is closed");
        assert_eq!(host.users().count().0, 0, "no session has begun");
    });
}
