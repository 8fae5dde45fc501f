//! The connections of a coordinator: each has a task that reads, and one that writes.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::ensemble::{Link, PeerMessage};
use super::event_log::Answer;
use super::look_askers;
use super::readers::Asker;
use super::writing::{PATIENCE, Writing, refuse, send, tell, write};
use crate::bounded_log::BoundedLog;
use crate::net::admission::Bounds;
use crate::net::admission::tasks::{BoundedTasks, Ending, Task};
use crate::net::local::is_here;
use crate::net::same_user::SameUser;
use crate::rendezvous::messages::codec::{self, CodecError};
use crate::rendezvous::messages::frames::read_message;
use crate::rendezvous::messages::message::{
    AskLook, CoordinatorMessage, Hello, NodeId, NodeMessage, OBSERVER_WAIT, Observe, Observed, PeerHello,
};
use crate::rendezvous::run::{Ends, SessionId};
use crate::secure::proof::Identity;
use crate::secure::refusals::{Kind, Refusal};
use crate::secure::{Halves, Protection, Reader, Writer};
use crate::wire::text::validate_run_id;

/// A connection that has begun as a session.
#[derive(Debug)]
pub struct Incoming {
    /// The connection.
    pub halves: Halves,
    /// The bytes of the session read so far.
    pub first_bytes: BytesMut,
    /// What the peer has proven. `None`: the coordinator is not protected.
    pub identity: Option<Identity>,
    /// The node's end.
    pub peer: SocketAddr,
    /// Our end.
    pub local: SocketAddr,
    /// Dropped when the connection is closed, so that the acceptor can count the open ones.
    pub kept: Box<dyn Debug + Send>,
}

/// Messages that may wait for a node that does not read. Normally there are two or three per round.
const UNREAD_LIMIT: usize = 64;

/// Connections without a first message yet. Many nodes may come at the same moment. How long one may be silent if as many others are.
const UNGREETED: Bounds = Bounds { permits: 1024, waiting: 0, kept: 0, patience: Duration::from_millis(500) };
/// Observers at once.
const OBSERVERS: usize = 64;
/// Observers at once from one address.
const OBSERVERS_OF_ONE: usize = 16;
/// How long an observer, such as `elastic-rs top`, may stay connected without a request.
const OBSERVER_IDLE: Duration = Duration::from_secs(300);

/// The first message of a connection.
enum Greeting {
    Hello(Box<Hello>),
    Observer(Question),
    Peer(Box<PeerHello>),
}

/// What an observer asks.
enum Question {
    Events(Observe),
    Look(AskLook),
}

impl Question {
    fn of(message: NodeMessage) -> Option<Self> {
        match message {
            NodeMessage::Observe(ask) => Some(Self::Events(ask)),
            NodeMessage::AskLook(ask) => Some(Self::Look(ask)),
            _ => None,
        }
    }

    fn run_id(&self) -> Option<&str> {
        match self {
            Self::Events(ask) => ask.run_id.as_deref(),
            Self::Look(ask) => ask.run_id.as_deref(),
        }
    }
}

/// What happens on a connection.
pub(super) enum ConnectionEvent {
    Hello {
        session: SessionId,
        hello: Box<Hello>,
        ends: Ends,
        writing: Writing,
    },
    Observe {
        ask: Observe,
        asker: Option<Asker>,
        reply: oneshot::Sender<Answer>,
    },
    AskLook {
        ask: AskLook,
        asker: Option<Asker>,
        reply: oneshot::Sender<look_askers::Answer>,
    },
    Message {
        session: SessionId,
        message: NodeMessage,
    },
    Gone {
        session: SessionId,
    },
    /// The port of a node's process was reached.
    Reached {
        session: SessionId,
        at: SocketAddr,
    },
    /// The process of a node has ended.
    Dead {
        run_id: String,
        node: NodeId,
    },
    /// Somebody is about to ask for this run. The answer is a message that sends the observer elsewhere, if the run is led there.
    Elsewhere {
        run_id: Option<String>,
        reply: oneshot::Sender<Option<CoordinatorMessage>>,
    },
    /// A process at another endpoint of the list introduces itself. The answer is which process is here, or why it is sent away.
    Peer {
        hello: Box<PeerHello>,
        reply: oneshot::Sender<Result<(NodeId, oneshot::Receiver<Infallible>), String>>,
    },
    /// What it says.
    PeerSays {
        place: usize,
        process: NodeId,
        message: PeerMessage,
    },
    /// Something has happened to this process's connection to another endpoint.
    Link {
        place: usize,
        link: Link,
    },
}

/// The permits of observers, by their address.
#[derive(Debug, Default)]
pub(super) struct Permits(Mutex<HashMap<IpAddr, usize>>);

/// A permit that is taken.
struct Permit(Arc<Permits>, IpAddr);

impl Permits {
    fn take(self: Arc<Self>, peer: IpAddr) -> Result<Permit, String> {
        let mut taken = self.0.lock();
        let own = taken.get(&peer).copied().unwrap_or(0);
        if taken.values().sum::<usize>() >= OBSERVERS {
            return Err(format!("{OBSERVERS} others observe this coordinator already"));
        }
        if own >= OBSERVERS_OF_ONE {
            return Err(format!("{OBSERVERS_OF_ONE} others observe this coordinator from {peer} already"));
        }
        taken.insert(peer, own + 1);
        drop(taken);
        Ok(Permit(self, peer))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.0.0.lock();
        match taken.get_mut(&self.1) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.1)),
        }
    }
}

/// What the tasks of all connections use.
#[derive(Clone)]
pub(super) struct Shared {
    pub events: mpsc::Sender<ConnectionEvent>,
    pub writes: mpsc::WeakSender<()>,
    pub observers: Arc<Permits>,
    /// Time for the first message.
    pub hello_timeout: Duration,
    pub log: Arc<BoundedLog>,
    pub protection: Option<Arc<Protection>>,
    pub same_user: Option<Arc<SameUser>>,
    /// The job has a list of endpoints.
    pub has_list: bool,
}

impl Shared {
    /// A message that sends an observer of this run elsewhere, if it is led there.
    async fn elsewhere(&self, run_id: Option<&str>) -> Option<CoordinatorMessage> {
        if !self.has_list {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        let run_id = run_id.map(str::to_owned);
        self.events.send(ConnectionEvent::Elsewhere { run_id, reply }).await.ok()?;
        answer.await.ok()?
    }

    /// Refuse what a peer asks for, count it, and log it.
    async fn forbid(&self, peer: SocketAddr, identity: Option<&Identity>, why: String, writer: &mut Writer) {
        let counted = self.protection.as_ref().filter(|_| identity.is_some());
        let counted = counted.map(|protection| protection.refuse(&Refusal::new(Kind::Forbidden, &*why)));
        if self.log.admits("refused") {
            let error = counted.as_deref().unwrap_or(&why);
            tracing::warn!(%peer, error, "connection refused");
        }
        refuse(writer, why).await;
    }
}

/// Reads the first messages of connections.
pub(super) fn greetings(shared: Shared) -> BoundedTasks<(SessionId, Incoming)> {
    let log = Arc::clone(&shared.log);
    let begin = move |(session, mut connection): (SessionId, Incoming)| -> Task {
        let shared = shared.clone();
        Box::pin(async move {
            let (reader, buffer) = (&mut connection.halves.reader, &mut connection.first_bytes);
            let greeted = timeout(shared.hello_timeout, read_hello(reader, buffer)).await;
            tokio::spawn(serve_connection(session, connection, greeted, shared));
            true
        })
    };
    BoundedTasks::new(Handle::current(), UNGREETED, begin, move |peer, ending| {
        if ending == Ending::Refused && log.admits("ungreeted") {
            let most = UNGREETED.permits;
            tracing::warn!(%peer, "connection refused for now: {most} connections that have not sent Hello are open, which is the limit; nodes try again");
        }
    })
}

/// The first message of a connection. The outer error: none came in time.
type Greeted = Result<Result<Greeting, Option<CodecError>>, Elapsed>;

/// Read one connection from its first message until it ends.
async fn serve_connection(session: SessionId, connection: Incoming, greeted: Greeted, shared: Shared) {
    let Incoming { halves: Halves { mut reader, mut writer }, first_bytes: mut buffer, identity, peer, local, kept } =
        connection;
    if let Ok(Ok(greeting)) = &greeted
        && let Err(why) = may_speak(identity.as_ref(), greeting)
    {
        return shared.forbid(peer, identity.as_ref(), why, &mut writer).await;
    }
    let hello = match greeted {
        Ok(Ok(Greeting::Hello(hello))) => hello,
        Ok(Ok(Greeting::Observer(ask))) => {
            let _permit = match Arc::clone(&shared.observers).take(peer.ip()) {
                Ok(permit) => permit,
                Err(reason) => return refuse(&mut writer, reason).await,
            };
            let who = shared.same_user.as_ref().filter(|_| identity.is_none()).map(|same| asker_of(same, local, peer));
            serve_observer(Halves { reader, writer }, buffer, ask, (peer, identity.as_ref(), who), &shared).await;
            return drop(kept);
        }
        Ok(Ok(Greeting::Peer(hello))) => {
            serve_peer(Halves { reader, writer }, buffer, *hello, peer, &shared).await;
            return drop(kept);
        }
        Ok(Err(Some(error))) => {
            if shared.log.admits("refused") {
                tracing::warn!(%peer, %error, "connection refused");
            }
            refuse(&mut writer, error.to_string()).await;
            return;
        }
        Ok(Err(None)) => return,
        Err(_) => {
            if shared.log.admits("hello_timeout") {
                tracing::warn!(%peer, "connection closed: no Hello within {:?}; nothing to do, unless a node of the job is there: then look for a proxy", shared.hello_timeout);
            }
            return;
        }
    };
    let Shared { events, writes, log, .. } = shared;
    let Some(writes) = writes.upgrade() else { return };
    let (outbox, outgoing) = mpsc::channel(UNREAD_LIMIT);
    let (open, ended) = oneshot::channel();
    let mut written = tokio::spawn(async move {
        write(writer, outgoing, ended).await;
        drop((kept, writes));
    });
    let ends = Ends { peer: peer.ip(), local: local.ip() };
    let writing = Writing::new(outbox, open, written.abort_handle());
    if events.send(ConnectionEvent::Hello { session, hello, ends, writing }).await.is_err() {
        return;
    }
    loop {
        tokio::select! {
            message = read_message::<NodeMessage>(&mut reader, &mut buffer) => match message {
                Ok(Some(message)) => {
                    if events.send(ConnectionEvent::Message { session, message }).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    if log.admits("malformed") {
                        tracing::warn!(%peer, %error, "the connection of a node is closed: its message cannot be read; the node connects again");
                    }
                    break;
                }
            },
            // The session has ended, or the connection cannot be written to.
            _ = &mut written => break,
        }
    }
    let _ = events.send(ConnectionEvent::Gone { session }).await;
}

/// `Err(None)`: the connection ended first.
async fn read_hello(reader: &mut Reader, buffer: &mut BytesMut) -> Result<Greeting, Option<CodecError>> {
    while !codec::decode_preamble(buffer)? {
        match reader.read_buf(buffer).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Err(None),
        }
    }
    match read_message::<NodeMessage>(reader, buffer).await? {
        Some(NodeMessage::Hello(hello)) => Ok(Greeting::Hello(hello)),
        Some(NodeMessage::Peer(hello)) => Ok(Greeting::Peer(hello)),
        Some(message) => Question::of(message).map(Greeting::Observer).ok_or(Some(CodecError::Malformed(0))),
        None => Err(None),
    }
}

/// Who is at the other end of a connection.
pub fn asker_of(same_user: &SameUser, local: SocketAddr, peer: SocketAddr) -> Asker {
    match is_here(peer, local) {
        Ok(false) => Asker::Elsewhere(peer.ip().to_canonical()),
        Ok(true) if same_user.has(local, peer) => Asker::Ours,
        // What cannot be known now is not ours.
        Ok(true) | Err(_) => Asker::OtherUser,
    }
}

/// Whether a peer that has proven this may introduce this node, or observe. The error is why not.
fn may_speak(identity: Option<&Identity>, greeting: &Greeting) -> Result<(), String> {
    match (greeting, identity) {
        (Greeting::Observer(question), identity) => may_observe(identity, question.run_id()),
        (Greeting::Hello(_) | Greeting::Peer(_), None) => Ok(()),
        (Greeting::Peer(hello), Some(identity)) => {
            hello.validate()?;
            identity.admits_node_of(&hello.run_id)
        }
        (Greeting::Hello(hello), Some(identity)) => {
            hello.validate()?; // the reason may repeat a part of it
            identity.admits_node_of(&hello.run_id)
        }
    }
}

/// Whether a peer that has proven this may ask this. The error is why not.
fn may_observe(identity: Option<&Identity>, run_id: Option<&str>) -> Result<(), String> {
    run_id.map_or(Ok(()), validate_run_id)?;
    identity.map_or(Ok(()), |identity| identity.admits_observer_of(run_id))
}

/// Read what a process at another endpoint of the list says, until it goes.
async fn serve_peer(halves: Halves, mut buffer: BytesMut, hello: PeerHello, peer: SocketAddr, shared: &Shared) {
    let Halves { mut reader, mut writer } = halves;
    let (place, process) = (hello.place as usize, hello.process);
    let (reply, answer) = oneshot::channel();
    if shared.events.send(ConnectionEvent::Peer { hello: Box::new(hello), reply }).await.is_err() {
        return;
    }
    let (answer, mut until) = match answer.await {
        Ok(Ok((process, until))) => (CoordinatorMessage::Peer { process }, until),
        Ok(Err(why)) => {
            if shared.log.admits_once("peer", peer.ip()) {
                tracing::warn!(%peer, "a process at another endpoint is sent away: {why}");
            }
            return refuse(&mut writer, why).await;
        }
        Err(_) => return, // the coordinator ends
    };
    tell(&mut writer, &answer).await;
    loop {
        let read = tokio::select! {
            read = read_message::<PeerMessage>(&mut reader, &mut buffer) => read,
            _ = &mut until => return, // it has connected anew
        };
        match read {
            Ok(Some(message)) => {
                if shared.events.send(ConnectionEvent::PeerSays { place, process, message }).await.is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(error) => {
                if shared.log.admits("malformed") {
                    tracing::warn!(%peer, %error, "the connection of a process at another endpoint is closed: its message cannot be read");
                }
                return;
            }
        }
    }
}

/// Answer an observer's questions until it goes. It may ask the next one when it has read the answer.
async fn serve_observer(
    halves: Halves,
    mut buffer: BytesMut,
    mut question: Question,
    (peer, identity, who): (SocketAddr, Option<&Identity>, Option<Asker>),
    shared: &Shared,
) {
    let Halves { mut reader, mut writer } = halves;
    loop {
        if let Err(why) = may_observe(identity, question.run_id()) {
            return shared.forbid(peer, identity, why, &mut writer).await;
        }
        if !buffer.is_empty() {
            return; // it asks out of turn
        }
        if let Some(elsewhere) = shared.elsewhere(question.run_id()).await {
            return tell(&mut writer, &elsewhere).await;
        }
        let answer = tokio::select! {
            answer = answer_to(question, who, shared) => answer,
            // It has gone, or asks out of turn.
            _ = reader.read_buf(&mut buffer) => return,
        };
        let message = match answer {
            Some(Ok(message)) => message,
            Some(Err(reason)) => return refuse(&mut writer, reason).await,
            None => return, // the coordinator ends
        };
        let mut frame = BytesMut::new();
        if let Err(error) = codec::try_encode_frame(&message, &mut frame) {
            return refuse(&mut writer, format!("the answer is too long: {error}")).await;
        }
        if !matches!(timeout(PATIENCE, send(&mut writer, &frame)).await, Ok(Ok(()))) {
            return;
        }
        question = match timeout(OBSERVER_IDLE, read_message(&mut reader, &mut buffer)).await {
            Ok(Ok(Some(message))) => match Question::of(message) {
                Some(question) => question,
                None => return,
            },
            _ => return,
        };
    }
}

/// The coordinator's answer, or why there is none. `None`: it ends.
async fn answer_to(
    question: Question,
    asker: Option<Asker>,
    shared: &Shared,
) -> Option<Result<CoordinatorMessage, String>> {
    match question {
        Question::Events(ask) => {
            let (run_id, last) = (ask.run_id.clone().unwrap_or_default(), ask.after);
            let (reply, answer) = oneshot::channel();
            shared.events.send(ConnectionEvent::Observe { ask, asker, reply }).await.ok()?;
            let observed = match timeout(OBSERVER_WAIT, answer).await {
                Ok(answer) => answer.ok()?,
                // Nothing has happened. It may ask again.
                Err(_) => Ok(Observed { run_id, state: None, lines: Vec::new(), last, more: false }),
            };
            Some(observed.map(CoordinatorMessage::Observed))
        }
        Question::Look(ask) => {
            let (reply, answer) = oneshot::channel();
            shared.events.send(ConnectionEvent::AskLook { ask, asker, reply }).await.ok()?;
            Some(answer.await.ok()?.map(CoordinatorMessage::Looked))
        }
    }
}
