//! Who may connect, and what a connection may say.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{self, Child, Command, Stdio};

use bytes::BytesMut;
use elastic_rs::channel::agent::{Exchange, FromWorker};
use elastic_rs::channel::message::{HeldState, ToAgent, ToWorker, VERSION};
use elastic_rs::rendezvous::messages::codec::encode_frame;

use super::{connected, exchange, silence, workers, world};
use crate::workers::support::{LIMIT, Traces, helper, within};

/// A process that is killed at the end of the test.
struct Killed(Child);

impl Killed {
    fn start(command: &mut Command) -> Killed {
        Killed(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// What the process prints next, read beside this task.
    async fn line(&mut self) -> String {
        let mut out = BufReader::new(self.0.stdout.take().unwrap());
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            line
        });
        within(read).await.unwrap()
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn frame(message: ToAgent) -> BytesMut {
    let mut out = BytesMut::new();
    encode_frame(&message, &mut out);
    out
}

fn raw(exchange: &Exchange, bytes: &[u8]) -> UnixStream {
    let address = SocketAddr::from_abstract_name(&exchange.address()[1..]).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// What the agent says until it closes the connection.
async fn answer(mut stream: UnixStream) -> Option<ToWorker> {
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        // What the agent has not read resets the connection after what it has said.
        let _ = stream.read_to_end(&mut bytes);
        BytesMut::from(&bytes[..])
    });
    ToWorker::decode(&mut within(read).await.unwrap()).unwrap()
}

async fn refusal(stream: UnixStream) -> String {
    match answer(stream).await {
        Some(ToWorker::Refused { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_process_of_another_tree_is_refused_with_the_reason() {
    let traces = Traces::new();
    let (name, value) = traces.variable();
    let other = Killed::start(Command::new(helper()).arg("pause").env(name, value));
    let mut exchange = Exchange::listen(1).unwrap();
    // The worker is a child of this process, so this process is none of its descendants.
    exchange.expect(&workers(other.0.id()));
    let channel = super::connect(&exchange);
    let text = within(channel.world().unwrap()).await.unwrap_err().to_string();
    assert!(
        text.contains(&format!("process {} is neither a worker of this agent nor a descendant", process::id())),
        "{text}"
    );
    silence(&mut exchange).await;
    drop(other);
}

#[tokio::test]
async fn a_worker_and_a_descendant_of_one_are_known_by_their_process() {
    let traces = Traces::new();
    let (name, value) = traces.variable();
    let mut exchange = Exchange::listen(1).unwrap();
    let attend = format!("{} attend {}", helper().display(), exchange.address());
    // The second word keeps a shell from executing the helper in its own place.
    for script in [format!("exec {attend}"), format!("{attend}; true")] {
        let mut worker = Killed::start(Command::new("sh").arg("-c").arg(&script).env(&name, &value));
        exchange.expect(&workers(worker.0.id()));
        assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
        exchange.send(0, ToWorker::World(Box::new(world(7))));
        assert_eq!(worker.line().await, "world 7\n");
        // The helper ends.
        assert_eq!(within(exchange.next()).await, FromWorker::Gone { local_rank: 0 });
        assert!(worker.0.wait().unwrap().success());
    }
}

#[tokio::test]
async fn a_process_that_a_connected_worker_starts_is_refused() {
    let traces = Traces::new();
    let (name, value) = traces.variable();
    let mut exchange = exchange();
    let worker = connected(&mut exchange).await;
    let address = exchange.address().to_owned();
    let start = || Killed::start(Command::new(helper()).arg("attend").arg(&address).env(&name, &value));
    let mut child = start();
    let (reported, pids) = (child.line().await, (child.0.id(), process::id()));
    assert!(
        reported.contains(&format!("process {} descends from the worker of local rank 0", pids.0))
            && reported.contains(&format!("process {} is connected", pids.1))
            && reported.contains("elastic.init"),
        "{reported}"
    );
    // The worker hears its agent as before.
    exchange.send(0, ToWorker::World(Box::new(world(1))));
    assert_eq!(within(worker.world().unwrap()).await.unwrap().generation, super::of(1));
    silence(&mut exchange).await;
    // A connection that has ended is in nobody's way.
    drop(worker);
    assert_eq!(within(exchange.next()).await, FromWorker::Gone { local_rank: 0 });
    let mut child = start();
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    exchange.send(0, ToWorker::World(Box::new(world(7))));
    assert_eq!(child.line().await, "world 7\n");
}

/// Connections of this process, which descends from the agent and is none of its workers, are held: one for each worker, and 16 more.
#[tokio::test]
async fn a_worker_connects_while_others_hold_all_permits() {
    let traces = Traces::new();
    let (name, value) = traces.variable();
    let mut exchange = Exchange::listen(1).unwrap();
    let held: Vec<_> = (0..17).map(|_| raw(&exchange, b"")).collect();
    let reason = refusal(raw(&exchange, b"")).await;
    assert!(reason.contains("is not known as a worker, and 16 such processes are waiting already"), "{reason}");
    // It is executed once it is known, and has the place that is kept for it.
    let mut command = Command::new("sh");
    command.arg("-c").arg("read line; exec \"$@\"").arg("sh").arg(helper()).arg("attend").arg(exchange.address());
    command.env(&name, &value).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut worker = Killed(command.spawn().unwrap());
    exchange.expect(&workers(worker.0.id()));
    worker.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    exchange.send(0, ToWorker::World(Box::new(world(7))));
    assert_eq!(worker.line().await, "world 7\n");
    drop(held);
}

#[tokio::test]
async fn another_version_is_refused_and_both_are_named() {
    let mut exchange = exchange();
    let reason = refusal(raw(&exchange, &frame(ToAgent::Hello { version: 99 }))).await;
    assert!(
        reason.contains("version 99")
            && reason.contains(&format!("version {VERSION}:"))
            && reason.contains("same release"),
        "{reason}"
    );
    silence(&mut exchange).await;
}

#[tokio::test]
async fn what_is_no_hello_is_refused() {
    let mut exchange = exchange();
    let reason = refusal(raw(&exchange, &frame(ToAgent::Parked(HeldState::default())))).await;
    assert!(reason.contains("before Hello"), "{reason}");
    let reason = refusal(raw(&exchange, b"GET / HTTP/1.1\r\n\r\n")).await;
    assert!(reason.contains("did not send Hello: frame of"), "{reason}");
    let stream = raw(&exchange, b"\x02\0");
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(refusal(stream).await.contains("closed the connection before it sent Hello"));
    silence(&mut exchange).await;
}

#[tokio::test]
async fn bytes_that_are_no_message_end_their_connection_alone() {
    let mut exchange = exchange();
    for bytes in [&b"\xff\xff\xff\xff"[..], b"\x01\0\0\0\x63", &frame(ToAgent::Hello { version: VERSION })] {
        let mut stream = raw(&exchange, &frame(ToAgent::Hello { version: VERSION }));
        assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
        stream.write_all(bytes).unwrap();
        assert_eq!(within(exchange.next()).await, FromWorker::Gone { local_rank: 0 });
        assert_eq!(answer(stream).await, None);
    }
    let channel = connected(&mut exchange).await;
    exchange.send(0, ToWorker::World(Box::new(world(1))));
    within(channel.world().unwrap()).await.unwrap();
}

/// The tasks of the connection run when this one waits, so the queue is full before anything is written.
#[tokio::test]
async fn what_a_worker_says_that_does_not_read_counts_no_more() {
    let mut exchange = exchange();
    let mut stream = raw(&exchange, &frame(ToAgent::Hello { version: VERSION }));
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    stream.write_all(&frame(ToAgent::Parked(HeldState::default()))).unwrap();
    for _ in 0..100 {
        exchange.send(0, ToWorker::PeerFailed { reason: "x".repeat(4000), rank: None });
    }
    assert_eq!(within(exchange.next()).await, FromWorker::Gone { local_rank: 0 });
}

#[tokio::test]
async fn a_worker_that_does_not_read_is_disconnected() {
    let mut exchange = exchange();
    let stream = raw(&exchange, &frame(ToAgent::Hello { version: VERSION }));
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    let long = ToWorker::PeerFailed { reason: "x".repeat(4000), rank: None };
    let gone = async {
        loop {
            exchange.send(0, long.clone());
            if let Ok(received) = tokio::time::timeout(std::time::Duration::from_millis(1), exchange.next()).await {
                return received;
            }
        }
    };
    assert_eq!(within(gone).await, FromWorker::Gone { local_rank: 0 });
    drop(stream);
}
