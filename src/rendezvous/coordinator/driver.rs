//! Drives [`Machine`]: reads messages of nodes, passes them to the machine, and writes its messages.
//!
//! One task owns the machine. Each connection has a task that reads and one that writes. The task that owns the machine never
//! waits for a connection: messages that a node does not read are queued up to a bound, beyond which its session ends. The caller
//! passes the connections ([`Incoming`]), which share the store's port.

use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::machine::{Command, Machine};
use crate::bounded_log::BoundedLog;
use crate::rendezvous::decider::event::{Ends, SessionId};
use crate::rendezvous::decider::hosts::Exclusions;
use crate::rendezvous::protocol::codec::{self, CodecError};
use crate::rendezvous::protocol::frames::read_message;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeMessage};
use crate::secure::proof::Pass;
use crate::secure::{Halves, Reader, Writer};
use crate::wait::until;

/// A connection that has begun as a session.
#[derive(Debug)]
pub struct Incoming {
    /// The connection.
    pub halves: Halves,
    /// The bytes of the session read so far.
    pub first_bytes: BytesMut,
    /// What the peer has proven. `None`: the coordinator is not protected.
    pub pass: Option<Pass>,
    /// The node's end.
    pub peer: SocketAddr,
    /// Our end.
    pub local: SocketAddr,
    /// Dropped when the connection is closed, so that the acceptor can count the open ones.
    pub kept: Box<dyn Debug + Send>,
}

/// Messages that may wait for a node that does not read. Normally there are two or three per round.
const UNREAD_LIMIT: usize = 64;
/// Time for the last messages of an ended session to be written.
const FAREWELL: Duration = Duration::from_secs(5);
/// Time for the last messages to be written when the coordinator ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Time for a single message to be written while the session lives. A slow node may take long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Decisions of a run that are logged in a log period: far more than a job has that restarts every few seconds.
const RECORDS_PER_RUN: u64 = 200;
/// The additional number for each node of the run.
const RECORDS_PER_NODE: u64 = 10;
/// Decisions of all runs together that are logged in a log period: anybody who reaches the port can open runs.
const RECORDS_OF_ALL_RUNS: u64 = 10_000;

enum Event {
    Hello { session: SessionId, hello: Box<Hello>, ends: Ends, writer: mpsc::Sender<BytesMut> },
    Message { session: SessionId, message: NodeMessage },
    Gone { session: SessionId },
}

/// What others may want to know of a coordinator.
#[derive(Debug)]
pub struct Shown {
    /// The number of connected sessions.
    pub sessions: watch::Sender<usize>,
    /// The hosts that are kept out.
    pub exclusions: watch::Sender<Exclusions>,
}

/// Serve sessions until `incoming` is closed. `shown` is always up to date.
///
/// A connection without a `Hello` after `hello_timeout` is closed. Refused sessions, sessions that are ended for their messages,
/// and decisions are logged one by one up to a bound in each `log_period`, and then counted.
///
/// Messages to nodes are written before this returns, or have had [`LAST_WORDS`] for it: the process may end then.
pub async fn run(
    mut machine: Machine,
    mut incoming: mpsc::UnboundedReceiver<Incoming>,
    shown: Shown,
    hello_timeout: Duration,
    log_period: Duration,
) {
    let log = Arc::new(BoundedLog::new(log_period, |what, count| {
        tracing::warn!(what, count, "more of the same was not logged");
    }));
    let mut summarising = pin!(log.summarise());
    let mut writers: HashMap<SessionId, mpsc::Sender<BytesMut>> = HashMap::new();
    let (events_in, mut events) = mpsc::channel(1024);
    let mut next_session = 0;
    // Each writing task holds a sender, and drops it when it has written everything.
    let (writing, mut written) = mpsc::channel::<()>(1);
    loop {
        tokio::select! {
            // Messages that have arrived are handled before any node is dropped for silence.
            biased;
            connection = incoming.recv() => match connection {
                Some(connection) => {
                    next_session += 1;
                    let session = SessionId(next_session);
                    let serving = serve_connection(session, connection, events_in.clone(), writing.downgrade(), hello_timeout, log.clone());
                    tokio::spawn(serving);
                }
                None => break,
            },
            Some(event) = events.recv() => on_event(event, &mut machine, &mut writers),
            () = until(machine.next_deadline()) => machine.on_tick(Instant::now().into_std()),
            () = &mut summarising => {}
        }
        perform(&mut machine, &mut writers, &shown.exclusions, &log);
        shown
            .sessions
            .send_if_modified(|count| std::mem::replace(count, machine.session_count()) != machine.session_count());
    }
    drop((writers, events, writing));
    let _ = timeout(LAST_WORDS, written.recv()).await;
}

fn on_event(event: Event, machine: &mut Machine, writers: &mut HashMap<SessionId, mpsc::Sender<BytesMut>>) {
    let now = Instant::now().into_std();
    match event {
        Event::Hello { session, hello, ends, writer } => {
            writers.insert(session, writer);
            machine.on_hello(session, *hello, ends, now);
        }
        Event::Message { session, message } => machine.on_message(session, message, now),
        Event::Gone { session } => {
            writers.remove(&session);
            machine.on_disconnected(session, now);
        }
    }
}

fn perform(
    machine: &mut Machine,
    writers: &mut HashMap<SessionId, mpsc::Sender<BytesMut>>,
    exclusions: &watch::Sender<Exclusions>,
    log: &BoundedLog,
) {
    for command in machine.take_commands() {
        match command {
            Command::Send { session, message } => {
                if let CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason } = &message
                    && log.admits("turned_away")
                {
                    tracing::warn!(session = session.0, "a node is turned away: {reason}");
                }
                let Some(writer) = writers.get(&session) else { continue };
                let mut frame = BytesMut::new();
                codec::encode_frame(&message, &mut frame);
                if writer.try_send(frame).is_err() {
                    // The writer closes the connection. The machine gets that as the end of any other connection.
                    if log.admits("not_reading") {
                        tracing::warn!(session = session.0, "a node does not read its messages: its session ends");
                    }
                    writers.remove(&session);
                }
            }
            Command::End { session } => {
                writers.remove(&session);
            }
            Command::Exclusions { run_id, hosts } => {
                exclusions.send_if_modified(|all| match hosts.is_empty() {
                    true => all.remove(&run_id).is_some(),
                    false => all.insert(run_id, hosts.clone()).as_ref() != Some(&hosts),
                });
            }
            Command::Note { run_id, text } => {
                let nodes = machine.run(&run_id).map_or(0, |run| run.nodes().len());
                let of_run =
                    (format!("decisions of run {run_id}").into(), RECORDS_PER_RUN + RECORDS_PER_NODE * nodes as u64);
                if log.admits_both(of_run, ("decisions of all runs", RECORDS_OF_ALL_RUNS)) {
                    tracing::info!("[{run_id}] {text}");
                }
            }
        }
    }
}

/// Read one connection until it ends.
async fn serve_connection(
    session: SessionId,
    connection: Incoming,
    events: mpsc::Sender<Event>,
    writes: mpsc::WeakSender<()>,
    hello_timeout: Duration,
    log: Arc<BoundedLog>,
) {
    let Incoming { halves: Halves { mut reader, mut writer }, first_bytes: mut buffer, pass, peer, local, kept } =
        connection;
    let greeted = timeout(hello_timeout, read_hello(&mut reader, &mut buffer)).await;
    let greeted = greeted.map(|hello| match hello {
        Ok(hello) => may_speak(pass.as_ref(), &hello).map(|()| hello).map_err(Some),
        Err(error) => Err(error.map(|error| error.to_string())),
    });
    let hello = match greeted {
        Ok(Ok(hello)) => hello,
        Ok(Err(Some(error))) => {
            if log.admits("refused") {
                tracing::warn!(%peer, %error, "a session is refused");
            }
            refuse(&mut writer, error).await;
            return;
        }
        Ok(Err(None)) => return,
        Err(_) => {
            if log.admits("hello_timeout") {
                tracing::warn!(%peer, "a session is refused: no Hello within {hello_timeout:?}");
            }
            return;
        }
    };
    let Some(writes) = writes.upgrade() else { return };
    let (outbox, outgoing) = mpsc::channel(UNREAD_LIMIT);
    let writing = tokio::spawn(async move {
        write(writer, outgoing).await;
        drop((kept, writes));
    });
    let ends = Ends { peer: peer.ip(), local: local.ip() };
    if events.send(Event::Hello { session, hello, ends, writer: outbox }).await.is_err() {
        return;
    }
    let mut writing = writing;
    loop {
        tokio::select! {
            message = read_message::<NodeMessage>(&mut reader, &mut buffer) => match message {
                Ok(Some(message)) => {
                    if events.send(Event::Message { session, message }).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    if log.admits("malformed") {
                        tracing::warn!(%peer, %error, "a session ends: it sent a malformed message");
                    }
                    break;
                }
            },
            // The machine ended the session, or the connection cannot be written to.
            _ = &mut writing => break,
        }
    }
    let _ = events.send(Event::Gone { session }).await;
}

/// `Err(None)`: the connection ended first.
async fn read_hello(reader: &mut Reader, buffer: &mut BytesMut) -> Result<Box<Hello>, Option<CodecError>> {
    while !codec::decode_preamble(buffer)? {
        match reader.read_buf(buffer).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Err(None),
        }
    }
    match read_message::<NodeMessage>(reader, buffer).await?.map(NodeMessage::incoming) {
        Some(NodeMessage::Hello(hello)) => Ok(hello),
        Some(_) => Err(Some(CodecError::Malformed(0))),
        None => Err(None),
    }
}

/// Whether a peer that has proven this may introduce this node. The error says why not.
fn may_speak(pass: Option<&Pass>, hello: &Hello) -> Result<(), String> {
    let Some(pass) = pass else { return Ok(()) };
    hello.validate()?; // the reason may repeat what it says
    pass.admits_node_of(&hello.run_id)
}

async fn refuse(writer: &mut Writer, reason: String) {
    let mut frame = BytesMut::new();
    codec::encode_frame(&CoordinatorMessage::Rejected { reason }, &mut frame);
    let _ = timeout(FAREWELL, send(writer, &frame)).await;
}

async fn send(writer: &mut Writer, frame: &[u8]) -> io::Result<()> {
    writer.write_all(frame).await?;
    writer.flush().await
}

/// Write until the outbox is closed and empty, or the connection fails.
async fn write(mut writer: Writer, mut outgoing: mpsc::Receiver<BytesMut>) {
    while let Some(frame) = outgoing.recv().await {
        let limit = if outgoing.is_closed() { FAREWELL } else { PATIENCE };
        if !matches!(timeout(limit, send(&mut writer, &frame)).await, Ok(Ok(()))) {
            return;
        }
    }
    // TLS says goodbye, which a peer that reads nothing could hold up.
    let _ = timeout(FAREWELL, writer.shutdown()).await;
}
