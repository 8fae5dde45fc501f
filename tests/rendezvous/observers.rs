//! Observers, over real sockets: they read a run's events and state, and change nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::events::record::Phase;
use elastic_rs::hang::view::View;
use elastic_rs::launcher::node::{Node, NodeOptions};
use elastic_rs::rendezvous::messages::codec::{CodecError, decode_frame, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    AskLook, CoordinatorMessage, Hello, JoinWorkers, NodeId, NodeMessage, Observe, Observed, PROTOCOL_VERSION, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::observer::Observer;
use elastic_rs::secure::refusals::Kind;
use elastic_rs::secure::token::Token;
use elastic_rs::secure::{Halves, Protection};
use elastic_rs::store::server::ServerOptions;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time limit for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

type Secured = Option<Arc<Protection>>;

fn host(protection: Secured) -> (EndpointServer, Runtime) {
    let listener = elastic_rs::net::listen::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let host = EndpointServer::start(vec![listener], ServerOptions::default(), protection).unwrap();
    (host, Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap())
}

fn by(token: &Token) -> Secured {
    Some(Arc::new(Protection::by_token(token.clone()).unwrap()))
}

/// A node that is alone in a world of this run.
async fn lonely(run: &str, port: u16, protection: Secured) -> Session {
    let hello = Hello::new(run, NodeId(1), "node:1", Settings::new(1, 1));
    let session = Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, protection);
    session.join(1, None, None, PATIENCE).await.unwrap();
    session
}

async fn observer(port: u16, secured: Option<(Arc<Protection>, &str)>) -> Observer {
    Observer::connect("127.0.0.1", port, secured, PATIENCE).await.unwrap()
}

fn ask(run_id: Option<&str>, after: u64) -> Observe {
    Observe { run_id: run_id.map(str::to_owned), after, waits: false, state: true }
}

fn types(observed: &Observed) -> Vec<String> {
    let of = |line: &String| serde_json::from_str::<Value>(line).unwrap()["type"].as_str().unwrap().to_owned();
    observed.lines.iter().map(of).collect()
}

#[test]
fn events_and_state_of_the_only_run_need_no_name() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let mut observer = observer(host.port(), None).await;
        let error = observer.ask(ask(None, 0)).await.unwrap_err();
        assert_eq!(error, "no node has come to this coordinator yet, so there is no run");

        let _node = lonely("job", host.port(), None).await;
        let mut observer = self::observer(host.port(), None).await;
        let seen = observer.ask(ask(None, 0)).await.unwrap();
        assert_eq!((seen.run_id.as_str(), seen.more), ("job", false));
        assert_eq!(types(&seen), ["run.opened", "round.waits", "node.joined", "round.completed"]);
        let state: Value = serde_json::from_str(seen.state.as_deref().unwrap()).unwrap();
        let facts = ["state", "round", "running", "waiting"].map(|fact| state[fact].clone());
        assert_eq!(facts, [Value::from("running"), 1.into(), 1.into(), 0.into()]);
        let last: Value = serde_json::from_str(seen.lines.last().unwrap()).unwrap();
        assert!(state["mono_us"].as_u64() >= last["mono_us"].as_u64(), "{state} {last}");
        // Nothing is sent twice, and no number is skipped.
        let seen = observer.ask(ask(Some("job"), seen.last)).await.unwrap();
        assert_eq!((seen.lines.len(), seen.last), (0, 4));
        assert_eq!(types(&observer.ask(ask(Some("job"), 3)).await.unwrap()), ["round.completed"]);
        // It is no node.
        assert!(!host.sessions().ended(Duration::ZERO).await);
    });
}

#[test]
fn an_observer_waits_for_the_next_event() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let node = lonely("job", host.port(), None).await;
        let mut observer = observer(host.port(), None).await;
        let last = observer.ask(ask(None, 0)).await.unwrap().last;
        let next = observer.ask(Observe { waits: true, ..ask(None, last) });
        let leaving = async { node.leave("done".into(), None, PATIENCE).await };
        let (seen, ()) = timeout(PATIENCE, async { tokio::join!(next, leaving) }).await.unwrap();
        assert!(types(&seen.unwrap()).contains(&"node.left".to_owned()));
    });
}

#[test]
fn an_observer_waits_until_the_agents_have_looked() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let hello = Hello { reports_steps: true, ..Hello::new("job", NodeId(1), "node:1", Settings::new(1, 1)) };
        let node = Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None);
        node.join(1, None, None, PATIENCE).await.unwrap();
        let mut observer = observer(host.port(), None).await;
        let looking = async {
            let look = node.view_when(|view| view.looks_asked == 1).await.look.unwrap();
            node.report_look(look.number, vec![View::new(0, look.round.0)], None, None);
        };
        let (seen, ()) =
            timeout(PATIENCE, async { tokio::join!(observer.look(AskLook::default()), looking) }).await.unwrap();
        let seen: Value = serde_json::from_str(&seen.unwrap().seen).unwrap();
        assert_eq!((&seen["ranks"], seen["silent"].as_array().map(Vec::len)), (&1.into(), Some(0)));
        // The same connection may ask for events after that.
        assert_eq!(observer.ask(ask(None, 0)).await.unwrap().run_id, "job");
        let refusal =
            observer.look(AskLook { run_id: Some("other".into()), rank: None, deep: false }).await.unwrap_err();
        assert_eq!(refusal, "there is no run `other` here; there are `job`");
    });
}

#[test]
fn a_look_has_the_ranks_of_64_nodes_but_those_of_a_silent_one() {
    let (host, runtime) = host(None);
    let port = host.port();
    runtime.block_on(async {
        let (mut nodes, joined) = (JoinSet::new(), Arc::new(Barrier::new(65)));
        for number in 0..64 {
            let settings = Settings::new(64, 64);
            let hello =
                Hello { reports_steps: true, ..Hello::new("job", NodeId(number), format!("node:{number}"), settings) };
            let joined = Arc::clone(&joined);
            nodes.spawn(async move {
                let node = Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, None);
                let first = node.join(1, None, None, PATIENCE).await.unwrap().rank * 8;
                joined.wait().await;
                let look = node.view_when(|view| view.looks_asked == 1).await.look.unwrap();
                let views = (first..first + 8).map(|rank| View::new(rank, look.round.0)).collect();
                if number != 7 {
                    node.report_look(look.number, views, None, None);
                }
                node // its connection lives on
            });
        }
        timeout(PATIENCE, joined.wait()).await.unwrap();
        let mut observer = observer(port, None).await;
        let (seen, nodes) = tokio::join!(observer.look(AskLook::default()), nodes.join_all());
        let seen: Value = serde_json::from_str(&seen.unwrap().seen).unwrap();
        assert_eq!((nodes.len(), &seen["ranks"], &seen["silent"]), (64, &(63 * 8).into(), &json!(["node:7"])));
    });
}

#[test]
fn of_several_runs_one_must_be_named() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let _nodes = (lonely("one", host.port(), None).await, lonely("other", host.port(), None).await);
        let refusal = async |run| observer(host.port(), None).await.ask(ask(run, 0)).await.unwrap_err();
        assert_eq!(refusal(None).await, "there are several runs here: `one`, `other`; name one");
        assert_eq!(refusal(Some("third")).await, "there is no run `third` here; there are `one`, `other`");
        assert_eq!(refusal(Some("\u{1b}[2J")).await, "the run id `\\u{1b}[2J` has control characters");
        assert_eq!(observer(host.port(), None).await.ask(ask(Some("other"), 0)).await.unwrap().run_id, "other");
    });
}

#[test]
fn with_a_token_an_observer_proves_itself_for_one_run() {
    let token = Token::parse(&"a".repeat(64)).unwrap();
    let (host, runtime) = host(by(&token));
    runtime.block_on(async {
        let _nodes = (lonely("one", host.port(), by(&token)).await, lonely("other", host.port(), by(&token)).await);
        let reading = by(&token.for_observers()).unwrap();
        let mut observer = observer(host.port(), Some((Arc::clone(&reading), "one"))).await;
        assert_eq!(observer.ask(ask(Some("one"), 0)).await.unwrap().run_id, "one");
        // A token may be good for several runs. What was proven is one.
        let error = observer.ask(ask(Some("other"), 0)).await.unwrap_err();
        assert!(error.ends_with("was proven for the run `one` alone"), "{error}");
        assert_eq!(host.refusals().unwrap().of(Kind::Forbidden), 1);
        let mut observer = self::observer(host.port(), Some((reading, "third"))).await;
        assert_eq!(observer.ask(ask(Some("third"), 0)).await.unwrap_err(), "there is no run `third` here");
        let other_user = Observer::connect("127.0.0.1", host.port(), None, PATIENCE).await;
        let error = other_user.unwrap().ask(ask(Some("one"), 0)).await.unwrap_err();
        assert!(error.starts_with("it is protected by a token"), "{error}");
    });
}

/// An observer may only ask. A node's message behind its question ends its connection, and nothing else.
#[test]
fn an_observer_that_sends_close_is_closed_and_the_job_goes_on() {
    let token = Token::parse(&"a".repeat(64)).unwrap();
    for protection in [None, by(&token)] {
        let (host, runtime) = host(protection.clone());
        let address = ("127.0.0.1", host.port());
        runtime.block_on(async {
            let session = lonely("job", host.port(), protection.clone()).await;
            let reading = protection.map(|_| by(&token.for_observers()).unwrap());
            let connection = match &reading {
                Some(reading) => reading.connect(address, "job", PATIENCE, |_| Ok(())).await.unwrap(),
                None => Halves::plain(TcpStream::connect(address).await.unwrap()),
            };
            let Halves { mut reader, mut writer } = connection;
            let mut bytes = BytesMut::new();
            encode_preamble(&mut bytes);
            encode_frame(&NodeMessage::Observe(ask(Some("job"), 0)), &mut bytes);
            writer.write_all(&bytes).await.unwrap();
            writer.flush().await.unwrap();
            let mut buffer = BytesMut::new();
            let answer = loop {
                if let Some(answer) = decode_frame::<CoordinatorMessage>(&mut buffer).unwrap() {
                    break answer;
                }
                assert!(timeout(PATIENCE, reader.read_buf(&mut buffer)).await.unwrap().unwrap() > 0);
            };
            assert!(matches!(answer, CoordinatorMessage::Observed(_)), "{answer:?}");
            bytes.clear();
            encode_frame(&NodeMessage::Close(Verdict::Succeeded { by: "me".into() }), &mut bytes);
            writer.write_all(&bytes).await.unwrap();
            writer.flush().await.unwrap();
            let mut rest = Vec::new();
            let _ = timeout(PATIENCE, reader.read_to_end(&mut rest)).await.expect("it is closed"); // it may be reset
            assert!(rest.is_empty(), "{rest:?}");
            let mut observer = observer(host.port(), reading.map(|reading| (reading, "job"))).await;
            let seen = observer.ask(ask(Some("job"), 0)).await.unwrap();
            assert!(!types(&seen).contains(&"run.closed".to_owned()), "{seen:?}");
            assert_eq!(session.view().closed, None);
        });
    }
}

mod for_root {
    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;

    use super::*;

    const OTHER_UID: u32 = 65_533;

    /// What `ask` gets, asked by a thread of another user.
    fn as_another<T: Send + 'static>(ask: impl AsyncFnOnce() -> T + Send + 'static) -> T {
        let asking = move || {
            let uid = Uid::from_raw(OTHER_UID);
            set_thread_res_uid(uid, uid, uid).expect("only root can become another user");
            Builder::new_current_thread().enable_all().build().unwrap().block_on(ask())
        };
        std::thread::spawn(asking).join().unwrap()
    }

    #[test]
    fn another_user_of_the_coordinators_machine_reads_no_job() {
        let (host, runtime) = host(None);
        let port = host.port();
        let _node = runtime.block_on(lonely("job", port, None));
        // At whichever of this machine's addresses, named or not.
        for run in [Some("job"), None] {
            let error = as_another(async move || observer(port, None).await.ask(ask(run, 0)).await.unwrap_err());
            assert!(error.starts_with("another user of the coordinator's node may not read its jobs: "), "{error}");
            assert!(error.contains("ELASTIC_RS_HTTP=all") && error.contains("elastic-rs token new"), "{error}");
        }
        for path in ["/metrics", "/", "/?run=job"] {
            let answer = as_another(async move || got(port, path).await);
            assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{path}: {answer}");
            assert!(answer.contains("another user of the coordinator's node"), "{path}: {answer}");
            assert!(
                answer.contains("ELASTIC_RS_HTTP=all") && answer.contains("elastic-rs token new"),
                "{path}: {answer}"
            );
        }
        let health = as_another(async move || got(port, "/healthz").await);
        assert!(health.starts_with("HTTP/1.1 200 OK\r\n"), "{health}");
        // Whose process it is reads all of it.
        runtime.block_on(async {
            assert_eq!(observer(port, None).await.ask(ask(None, 0)).await.unwrap().run_id, "job");
            assert!(got(port, "/metrics").await.starts_with("HTTP/1.1 200 OK\r\n"));
        });
    }

    async fn got(port: u16, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }
}

/// Who does not wait for the answer is closed, and so is whoever comes when all places are taken.
#[test]
fn observers_are_bounded() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let _node = lonely("job", host.port(), None).await;
        let mut all = Vec::new();
        for _ in 0..16 {
            let mut one = observer(host.port(), None).await;
            one.ask(ask(None, 0)).await.unwrap();
            all.push(one);
        }
        let error = observer(host.port(), None).await.ask(ask(None, 0)).await.unwrap_err();
        assert_eq!(error, "16 others observe this coordinator from 127.0.0.1 already");
        all.truncate(8);
        while let Err(error) = observer(host.port(), None).await.ask(ask(None, 0)).await {
            assert_eq!(error, "16 others observe this coordinator from 127.0.0.1 already"); // their ends are on their way
        }
        // The coordinator counts from 1, and a run that was opened again does, too.
        let error = observer(host.port(), None).await.ask(ask(None, 1000)).await.unwrap_err();
        assert_eq!(error, "run `job` was started again: its last event is 4, and 1000 was asked for");
        let mut hasty = TcpStream::connect(("127.0.0.1", host.port())).await.unwrap();
        let mut bytes = BytesMut::new();
        encode_preamble(&mut bytes);
        for _ in 0..2 {
            encode_frame(&NodeMessage::Observe(Observe { waits: true, ..ask(None, 4) }), &mut bytes);
        }
        hasty.write_all(&bytes).await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(PATIENCE, hasty.read_to_end(&mut answer)).await.unwrap(); // it may be reset
    });
}

/// The phases of a run, until there are so many.
async fn phases(observer: &mut Observer, count: usize) -> Vec<Value> {
    let (mut found, mut last) = (Vec::new(), 0);
    while found.len() < count {
        let seen = observer.ask(Observe { waits: true, ..ask(None, last) }).await.unwrap();
        let events = seen.lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
        found.extend(events.filter(|event| event["type"] == "phase").map(|event| event["data"].clone()));
        last = seen.last;
    }
    found
}

#[test]
fn rank_0s_node_reports_when_all_workers_have_connected_to_their_store() {
    let (host, runtime) = host(None);
    runtime.block_on(async {
        let hello = Hello::new("job", NodeId(1), "node:1", Settings::new(1, 1));
        let session = Arc::new(Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), PATIENCE, None));
        let (run_id, name) = ("job".to_owned(), "node:1".to_owned());
        let options = NodeOptions { run_id, name, join_timeout: PATIENCE, ..NodeOptions::default() };
        let node = Node::new(Arc::clone(&session), options, None);
        let placement = node.join(Some(JoinWorkers::new("role", 2))).await.unwrap();
        let mut observer = observer(host.port(), None).await;
        session.report_phases(placement.round, Phase { start_us: Some(5), ..Phase::default() });
        let started = timeout(PATIENCE, phases(&mut observer, 1)).await.unwrap();
        assert_eq!((&started[0]["start_us"], &started[0]["import_us"]), (&5.into(), &Value::Null));
        let mut workers = Vec::new();
        for _ in 0..2 {
            let mut worker = TcpStream::connect((placement.master_addr.as_str(), placement.master_port)).await.unwrap();
            worker.write_all(b"\x00\xce\xf7\x85\x3c").await.unwrap();
            workers.push(worker);
        }
        let imported = timeout(PATIENCE, phases(&mut observer, 2)).await.unwrap();
        assert!(imported[1]["import_us"].is_u64() && imported[1]["start_us"].is_null(), "{imported:?}");
        let (round, import) = session.view().imported.unwrap();
        assert_eq!((round, Some(import.as_micros() as u64)), (placement.round, imported[1]["import_us"].as_u64()));
    });
}

#[test]
fn an_error_to_an_observer_of_another_version_names_both_versions() {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let reason = CodecError::Version { theirs: PROTOCOL_VERSION, ours: 9 }.to_string();
        let refusal = CoordinatorMessage::Rejected { reason: reason.clone() };
        let answering = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut frame = BytesMut::new();
            encode_frame(&refusal, &mut frame);
            stream.write_all(&frame).await.unwrap();
            stream.read_to_end(&mut Vec::new()).await
        };
        let asking = async { observer(port, None).await.ask(ask(None, 0)).await.unwrap_err() };
        let (_, error) = tokio::join!(answering, asking);
        assert_eq!(error, reason);
        assert!(error.contains("version 4 is not spoken here, only version 9"), "{error}");
    });
}
