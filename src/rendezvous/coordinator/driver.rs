//! Drives [`Machine`]: reads messages of nodes, passes them to the machine, and writes its messages.
//!
//! One task owns the machine. Each connection has a task that reads and one that writes. The task that owns the machine never
//! waits for a connection: messages that a node does not read are queued up to a bound, beyond which its session ends. A session
//! that ends is disconnected for the machine at once, whatever its node still sends. The caller passes the connections
//! ([`Incoming`]), which share the store's port.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

pub use super::book::Subject;
use super::book::{Answer, Book};
use super::machine::{Command, Machine};
use super::readers::{Asker, Readers, refusal};
use crate::bounded_log::BoundedLog;
use crate::clock::until;
use crate::events::file::EventFile;
use crate::events::open_metrics::OpenMetrics;
use crate::net::admission::Bounds;
use crate::net::admission::tasks::{BoundedTasks, Ending, Task};
use crate::net::local::is_here;
use crate::net::same_user::SameUser;
use crate::rendezvous::messages::codec::{self, CodecError};
use crate::rendezvous::messages::frames::read_message;
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, NodeMessage, OBSERVER_WAIT, Observe, Observed};
use crate::rendezvous::run::{Ends, Exclusions, SessionId};
use crate::secure::proof::Pass;
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
/// Time for all messages of an ended session to be written.
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

/// What others may ask of a coordinator that runs.
#[derive(Debug)]
pub enum Question {
    /// Whether new nodes are welcome: not once its process ends. That there is an answer says that its thread turns.
    Ready(oneshot::Sender<bool>),
    /// Why this one may not read this run, or all runs if none is named, of those who may. `None`: it may.
    MayRead {
        /// Who asks.
        asker: Asker,
        /// Who may.
        readers: Readers,
        /// The run's id.
        run: Option<String>,
        /// Where the answer goes.
        reply: oneshot::Sender<Option<String>>,
    },
    /// What was counted, and the state of its runs.
    Metrics(oneshot::Sender<OpenMetrics>),
    /// What the page of a run shows, or why there is none. Without a name the only run, or a list of them.
    Page {
        /// Its id.
        run: Option<String>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<Subject, String>>,
    },
    /// Write all events into this file, beginning with those that are kept.
    Write(EventFile),
}

/// Connections without a first message yet. Many nodes may come at the same moment. How long one may be silent if as many others are.
const UNGREETED: Bounds = Bounds { permits: 1024, waiting: 0, kept: 0, patience: Duration::from_millis(500) };
/// Observers at once.
const OBSERVERS: usize = 64;
/// Observers at once from one address.
const OBSERVERS_OF_ONE: usize = 16;
/// How long an observer may ask nothing.
const OBSERVER_IDLE: Duration = Duration::from_secs(300);

/// The first message of a connection.
enum Greeting {
    Hello(Box<Hello>),
    Observe(Observe),
}

enum Event {
    Hello { session: SessionId, hello: Box<Hello>, ends: Ends, writing: Writing },
    Observe { ask: Observe, asker: Option<Asker>, reply: oneshot::Sender<Answer> },
    Message { session: SessionId, message: NodeMessage },
    Gone { session: SessionId },
}

/// The task that writes to a node. Once it ends, the one that reads from the node ends too.
struct Writing {
    outbox: mpsc::Sender<BytesMut>,
    /// Dropped with `outbox` when the session ends.
    _open: oneshot::Sender<Infallible>,
    task: AbortHandle,
}

impl Writing {
    /// Queue a message, or end the connection at once. The error says why, unless the connection has ended already.
    fn queue(&self, message: &CoordinatorMessage) -> Result<(), Option<String>> {
        let mut frame = BytesMut::new();
        let queued = match codec::try_encode_frame(message, &mut frame) {
            Ok(()) => self.outbox.try_send(frame).map_err(|unsent| match unsent {
                TrySendError::Full(_) => Some("a node does not read its messages".to_owned()),
                TrySendError::Closed(_) => None,
            }),
            Err(error) => Err(Some(format!("a message to a node cannot be sent, which is a bug ({error})"))),
        };
        queued.inspect_err(|_| self.task.abort())
    }
}

type Sessions = HashMap<SessionId, Writing>;

/// What others may want to know of a coordinator.
#[derive(Debug)]
pub struct Shown {
    /// The number of connected sessions.
    pub sessions: watch::Sender<usize>,
    /// The hosts that are kept out.
    pub exclusions: watch::Sender<Exclusions>,
    /// What others ask. May be closed.
    pub questions: mpsc::Receiver<Question>,
    /// Counts the peers that have proven themselves, and ask for what their proof is not good for.
    pub protection: Option<Arc<Protection>>,
    /// Who may observe, if the coordinator is not protected.
    pub readers: Readers,
    /// Tells which user of this machine asks. `None`: the coordinator is protected, so nobody needs to know.
    pub same_user: Option<Arc<SameUser>>,
}

/// Serve sessions until `incoming` is closed. `shown` is always up to date.
///
/// A connection without a `Hello` after `hello_timeout` is closed. Refused sessions, sessions that are ended for their messages,
/// and decisions are logged one by one up to a bound in each `log_period`, and then counted.
///
/// `empty_store` replaces the table of the endpoint's store; it blocks until that is done.
///
/// Messages to nodes and the file of events are written before this returns, or have had [`LAST_WORDS`] and
/// [`LAST_LINES`](crate::events::file::LAST_LINES) for it: the process may end then.
pub async fn run(
    mut machine: Machine,
    mut incoming: mpsc::UnboundedReceiver<Incoming>,
    mut shown: Shown,
    empty_store: impl Fn(),
    hello_timeout: Duration,
    log_period: Duration,
) {
    let log = Arc::new(BoundedLog::new(log_period, |what, count| {
        tracing::warn!(what, count, "more of the same was not logged");
    }));
    let mut summarising = pin!(log.summarise());
    let mut writers = Sessions::new();
    let (events_in, mut events) = mpsc::channel(1024);
    let mut next_session = 0;
    let mut book = Book::new(rand::random(), Instant::now().into_std());
    // Each writing task holds a sender, and drops it when it has written everything.
    let (writing, mut written) = mpsc::channel::<()>(1);
    let shared = Shared {
        events: events_in,
        writes: writing.downgrade(),
        observers: Arc::default(),
        log: log.clone(),
        protection: shown.protection.clone(),
        same_user: shown.same_user.clone(),
        hello_timeout,
    };
    let greetings = greetings(shared);
    loop {
        tokio::select! {
            // Messages that have arrived are handled before any node is dropped for silence.
            biased;
            connection = incoming.recv() => match connection {
                Some(connection) => {
                    next_session += 1;
                    let address = connection.peer.ip();
                    greetings.arrived((SessionId(next_session), connection), address, false);
                }
                None => break,
            },
            // Few may wait, so they cannot hold nodes up.
            Some(question) = shown.questions.recv() => answer(question, &mut machine, &mut book),
            Some(event) = events.recv() => on_event(event, &mut machine, &mut writers, &mut book, shown.readers),
            () = until([machine.next_deadline(), book.next_deadline()].into_iter().flatten().min()) => {
                let now = Instant::now().into_std();
                machine.on_tick(now);
                book.on_tick(now);
            }
            () = &mut summarising => {}
        }
        perform(&mut machine, &mut writers, &mut book, &shown.exclusions, &empty_store, &log);
        shown
            .sessions
            .send_if_modified(|count| std::mem::replace(count, machine.session_count()) != machine.session_count());
    }
    // What has arrived is told, if not answered: a node's goodbye, say, and the file for events of a job that was short.
    while let Ok(question) = shown.questions.try_recv() {
        answer(question, &mut machine, &mut book);
    }
    while let Ok(event) = events.try_recv() {
        on_event(event, &mut machine, &mut writers, &mut book, shown.readers);
        perform(&mut machine, &mut writers, &mut book, &shown.exclusions, &empty_store, &log);
    }
    drop((writers, events, writing));
    let _ = timeout(LAST_WORDS, written.recv()).await;
    book.finish();
}

fn on_event(event: Event, machine: &mut Machine, writers: &mut Sessions, book: &mut Book, readers: Readers) {
    let now = Instant::now().into_std();
    match event {
        Event::Hello { session, hello, ends, writing } => {
            writers.insert(session, writing);
            machine.on_hello(session, *hello, ends, now);
        }
        Event::Observe { ask, asker, reply } => {
            let run_id = ask.run_id.as_deref();
            if let Some(why) = asker.and_then(|asker| refusal(asker, readers, run_id, machine)) {
                let _ = reply.send(Err(why)); // the observer may have gone
                return;
            }
            if ask.state {
                machine.on_watched(run_id, now);
            }
            book.ask(ask, asker.is_some(), reply, machine, now);
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
    writers: &mut Sessions,
    book: &mut Book,
    exclusions: &watch::Sender<Exclusions>,
    empty_store: impl Fn(),
    log: &BoundedLog,
) {
    let mut commands = VecDeque::from(machine.take_commands());
    while let Some(command) = commands.pop_front() {
        match command {
            Command::Send { session, message } => {
                if let CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason } = &message
                    && log.admits("turned_away")
                {
                    tracing::warn!(session = session.0, "a node is turned away: {reason}");
                }
                send_to(session, &message, writers, machine, log);
                commands.extend(machine.take_commands());
            }
            Command::End { session } => {
                writers.remove(&session);
                machine.on_disconnected(session, Instant::now().into_std());
                commands.extend(machine.take_commands());
            }
            Command::EmptyStore => empty_store(),
            Command::Exclusions { run_id, hosts } => {
                exclusions.send_if_modified(|all| match hosts.is_empty() {
                    true => all.remove(&run_id).is_some(),
                    false => all.insert(run_id, hosts.clone()).as_ref() != Some(&hosts),
                });
            }
            Command::Warn { run_id, text } => {
                if log.admits("warnings of runs") {
                    tracing::warn!("[{run_id}] {text}");
                }
            }
            Command::Tally { run_id, tally } => book.tally(&run_id, tally),
            Command::Record { run_id, record } => {
                if let Some(text) = &record.text {
                    let nodes = machine.run(&run_id).map_or(0, |run| run.nodes().len());
                    tell(&run_id, text, nodes, log);
                }
                book.keep(run_id, record, Instant::now().into_std());
            }
            Command::Forget { run_id, why } => {
                book.forget(&run_id, machine);
                if let Some(why) = why {
                    tell(&run_id, &why, 0, log);
                }
            }
        }
    }
    book.answer_waiting(machine);
}

/// Send a message to a node, or end its session.
fn send_to(
    session: SessionId,
    message: &CoordinatorMessage,
    writers: &mut Sessions,
    machine: &mut Machine,
    log: &BoundedLog,
) {
    let Some(Err(why)) = writers.get(&session).map(|writing| writing.queue(message)) else { return };
    if let Some(why) = why.filter(|_| log.admits("unsent")) {
        tracing::warn!(session = session.0, "{why}: the session ends");
    }
    writers.remove(&session);
    machine.on_disconnected(session, Instant::now().into_std());
}

/// Log a decision about a run with so many nodes.
fn tell(run_id: &str, text: &str, nodes: usize, log: &BoundedLog) {
    let of_run = (format!("decisions of run {run_id}").into(), RECORDS_PER_RUN + RECORDS_PER_NODE * nodes as u64);
    if log.admits_both(of_run, ("decisions of all runs", RECORDS_OF_ALL_RUNS)) {
        tracing::info!("[{run_id}] {text}");
    }
}

/// Answer a question. Who has asked may have gone. Metrics have the step that was told after the last time they were asked for.
fn answer(question: Question, machine: &mut Machine, book: &mut Book) {
    match question {
        Question::Ready(reply) => drop(reply.send(!machine.is_leaving())),
        Question::MayRead { asker, readers, run, reply } => {
            drop(reply.send(refusal(asker, readers, run.as_deref(), machine)));
        }
        Question::Metrics(reply) => {
            drop(reply.send(book.metrics(machine)));
            let now = Instant::now().into_std();
            book.runs().for_each(|run_id| machine.on_watched(Some(run_id), now));
        }
        Question::Page { run, reply } => drop(reply.send(book.subject(run.as_deref(), machine))),
        Question::Write(file) => book.write_into(file),
    }
}

/// The places of observers, by their address.
#[derive(Debug, Default)]
struct Places(Mutex<HashMap<IpAddr, usize>>);

/// A place that is taken.
struct Place(Arc<Places>, IpAddr);

impl Places {
    fn take(self: Arc<Self>, peer: IpAddr) -> Result<Place, String> {
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
        Ok(Place(self, peer))
    }
}

impl Drop for Place {
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
struct Shared {
    events: mpsc::Sender<Event>,
    writes: mpsc::WeakSender<()>,
    observers: Arc<Places>,
    /// Time for the first message.
    hello_timeout: Duration,
    log: Arc<BoundedLog>,
    protection: Option<Arc<Protection>>,
    same_user: Option<Arc<SameUser>>,
}

impl Shared {
    /// Count, log and tell that a peer may not do what it asks for.
    async fn forbid(&self, peer: SocketAddr, pass: Option<&Pass>, why: String, writer: &mut Writer) {
        let counted = self.protection.as_ref().filter(|_| pass.is_some());
        let counted = counted.map(|protection| protection.refuse(&Refusal::new(Kind::Forbidden, &*why)));
        if self.log.admits("refused") {
            let error = counted.as_deref().unwrap_or(&why);
            tracing::warn!(%peer, error, "a session is refused");
        }
        refuse(writer, why).await;
    }
}

/// Reads the first messages of connections.
fn greetings(shared: Shared) -> BoundedTasks<(SessionId, Incoming)> {
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
            tracing::warn!(%peer, "a session is refused: {most} others have not introduced themselves yet");
        }
    })
}

/// What a connection begins with. The outer error: it has not said anything in time.
type Greeted = Result<Result<Greeting, Option<CodecError>>, Elapsed>;

/// Read one connection from its first message until it ends.
async fn serve_connection(session: SessionId, connection: Incoming, greeted: Greeted, shared: Shared) {
    let Incoming { halves: Halves { mut reader, mut writer }, first_bytes: mut buffer, pass, peer, local, kept } =
        connection;
    if let Ok(Ok(greeting)) = &greeted
        && let Err(why) = may_speak(pass.as_ref(), greeting)
    {
        return shared.forbid(peer, pass.as_ref(), why, &mut writer).await;
    }
    let hello = match greeted {
        Ok(Ok(Greeting::Hello(hello))) => hello,
        Ok(Ok(Greeting::Observe(ask))) => {
            let _place = match Arc::clone(&shared.observers).take(peer.ip()) {
                Ok(place) => place,
                Err(reason) => return refuse(&mut writer, reason).await,
            };
            let who = shared.same_user.as_ref().filter(|_| pass.is_none()).map(|same| asker_of(same, local, peer));
            serve_observer(Halves { reader, writer }, buffer, ask, (peer, pass.as_ref(), who), &shared).await;
            return drop(kept);
        }
        Ok(Err(Some(error))) => {
            if shared.log.admits("refused") {
                tracing::warn!(%peer, %error, "a session is refused");
            }
            refuse(&mut writer, error.to_string()).await;
            return;
        }
        Ok(Err(None)) => return,
        Err(_) => {
            if shared.log.admits("hello_timeout") {
                tracing::warn!(%peer, "a session is refused: no Hello within {:?}", shared.hello_timeout);
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
    let writing = Writing { outbox, _open: open, task: written.abort_handle() };
    if events.send(Event::Hello { session, hello, ends, writing }).await.is_err() {
        return;
    }
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
            // The session has ended, or the connection cannot be written to.
            _ = &mut written => break,
        }
    }
    let _ = events.send(Event::Gone { session }).await;
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
        Some(NodeMessage::Observe(ask)) => Ok(Greeting::Observe(ask)),
        Some(_) => Err(Some(CodecError::Malformed(0))),
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

/// Whether a peer that has proven this may introduce this node, or observe. The error says why not.
fn may_speak(pass: Option<&Pass>, greeting: &Greeting) -> Result<(), String> {
    match (greeting, pass) {
        (Greeting::Observe(ask), pass) => may_observe(pass, ask),
        (Greeting::Hello(_), None) => Ok(()),
        (Greeting::Hello(hello), Some(pass)) => {
            hello.validate()?; // the reason may repeat what it says
            pass.admits_node_of(&hello.run_id)
        }
    }
}

/// Whether a peer that has proven this may ask this. The error says why not.
fn may_observe(pass: Option<&Pass>, ask: &Observe) -> Result<(), String> {
    ask.run_id.as_deref().map_or(Ok(()), validate_run_id)?;
    pass.map_or(Ok(()), |pass| pass.admits_observer_of(ask.run_id.as_deref()))
}

/// Answer an observer's questions until it goes. It may ask the next one when it has read the answer.
async fn serve_observer(
    halves: Halves,
    mut buffer: BytesMut,
    mut ask: Observe,
    (peer, pass, who): (SocketAddr, Option<&Pass>, Option<Asker>),
    shared: &Shared,
) {
    let Halves { mut reader, mut writer } = halves;
    loop {
        if let Err(why) = may_observe(pass, &ask) {
            return shared.forbid(peer, pass, why, &mut writer).await;
        }
        if !buffer.is_empty() {
            return; // it asks out of turn
        }
        let (run_id, last) = (ask.run_id.clone().unwrap_or_default(), ask.after);
        let (reply, answer) = oneshot::channel();
        if shared.events.send(Event::Observe { ask, asker: who, reply }).await.is_err() {
            return;
        }
        let answer = tokio::select! {
            answer = answer => answer,
            // It has gone, or asks out of turn.
            _ = reader.read_buf(&mut buffer) => return,
            // Nothing has happened. It may ask again.
            () = tokio::time::sleep(OBSERVER_WAIT) => Ok(Ok(Observed { run_id, state: None, lines: Vec::new(), last, more: false })),
        };
        let observed = match answer {
            Ok(Ok(observed)) => observed,
            Ok(Err(reason)) => return refuse(&mut writer, reason).await,
            Err(_) => return, // the coordinator ends
        };
        let mut frame = BytesMut::new();
        if let Err(error) = codec::try_encode_frame(&CoordinatorMessage::Observed(observed), &mut frame) {
            return refuse(&mut writer, format!("the answer is too long: {error}")).await;
        }
        if !matches!(timeout(PATIENCE, send(&mut writer, &frame)).await, Ok(Ok(()))) {
            return;
        }
        ask = match timeout(OBSERVER_IDLE, read_message(&mut reader, &mut buffer)).await {
            Ok(Ok(Some(NodeMessage::Observe(ask)))) => ask,
            _ => return,
        };
    }
}

async fn refuse(writer: &mut Writer, reason: String) {
    let mut frame = BytesMut::new();
    if codec::try_encode_frame(&CoordinatorMessage::Rejected { reason }, &mut frame).is_ok() {
        let _ = timeout(FAREWELL, send(writer, &frame)).await;
    }
}

async fn send(writer: &mut Writer, frame: &[u8]) -> io::Result<()> {
    writer.write_all(frame).await?;
    writer.flush().await
}

/// Write until the outbox is closed and empty, or the connection fails. Once the session has `ended`, for [`FAREWELL`] at most.
async fn write(mut writer: Writer, mut outgoing: mpsc::Receiver<BytesMut>, ended: oneshot::Receiver<Infallible>) {
    let all = async {
        while let Some(frame) = outgoing.recv().await {
            if !matches!(timeout(PATIENCE, send(&mut writer, &frame)).await, Ok(Ok(()))) {
                return;
            }
        }
        // TLS says goodbye, which a peer that reads nothing could hold up.
        let _ = timeout(FAREWELL, writer.shutdown()).await;
    };
    let mut all = pin!(all);
    tokio::select! {
        () = &mut all => {}
        _ = ended => drop(timeout(FAREWELL, all).await),
    }
}

#[cfg(test)]
mod tests;
