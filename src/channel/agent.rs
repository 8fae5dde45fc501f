//! The agent's end of the channel: one socket for all workers and rounds.
//!
//! A worker is known by its process, not by what it says: the kernel names the process that has connected. It must belong to the
//! agent's user, and be a worker that the agent has named, or a descendant of one. Nothing is read from any other. One process is
//! connected for each worker: others are refused until it ends or closes its connection. A worker may connect before the agent has
//! named it, so unknown descendants of the agent are held for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::address;
use super::message::{HeldState, ToAgent, ToWorker, VERSION};
use super::peers::{self, HOLD_LIMIT, UNPROVEN};
use crate::bounded_log::BoundedLog;
use crate::processes::is_alive;
use crate::rendezvous::messages::codec::CodecError;
use crate::rendezvous::messages::frames::read_message;
use crate::wire::text::tidy;

/// Messages that may wait for a worker that does not read. Normally there are two or three per round.
const UNREAD_LIMIT: usize = 64;
/// Time for a message to be written.
const WRITE_LIMIT: Duration = Duration::from_secs(5);
/// Pause after an error of `accept`, such as a want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refusals are counted per period.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What the agent has heard from a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromWorker {
    /// It has connected, maybe not for the first time.
    Hello {
        /// The worker's.
        local_rank: u32,
    },
    /// Its answer to a change.
    Ack {
        /// The worker's.
        local_rank: u32,
        /// Number of the change.
        seq: u64,
        /// Number of its last check that did not wait.
        count: u64,
    },
    /// It has left its process group, and waits for its next world.
    Parked {
        /// The worker's.
        local_rank: u32,
        /// The state that it has.
        state: HeldState,
    },
    /// It lets the library make its process group.
    NoProcessGroup {
        /// The worker's.
        local_rank: u32,
    },
    /// Its program does not live through a change: it saves at the check, and is started anew.
    Saves {
        /// The worker's.
        local_rank: u32,
    },
    /// A peer has failed, and the sockets of its process groups were shut down: what waits for them fails at once.
    Freed {
        /// The worker's.
        local_rank: u32,
    },
    /// Its world is not formed: a step towards it has failed, or has taken longer than its limit.
    Stuck {
        /// The worker's.
        local_rank: u32,
    },
    /// Its program has raised one of the library's exceptions itself: it leaves its world, and lives.
    Raised {
        /// The worker's.
        local_rank: u32,
        /// The name of the exception's type.
        error: String,
        /// The exception's message, in one line.
        message: String,
    },
    /// Its program cannot take the state that the others have.
    Unfit {
        /// The worker's.
        local_rank: u32,
        /// What does not match, in one line.
        message: String,
    },
    /// Its connection has ended.
    Gone {
        /// The worker's.
        local_rank: u32,
    },
}

/// The agent's end of the channel. Dropping it closes all connections.
#[derive(Debug)]
pub struct Exchange {
    address: String,
    shared: Arc<Shared>,
    received: mpsc::Receiver<(ConnectionId, FromWorker)>,
    accepting: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    /// The process ids of the workers by local rank.
    workers: watch::Sender<BTreeMap<u32, u32>>,
    /// Locked before `workers` is changed, or compared with a connection.
    connections: Mutex<BTreeMap<u32, Connection>>,
    /// Places of connections that are not proven yet.
    unproven: Arc<Semaphore>,
    /// Workers whose own connections are not proven yet, and have got the place that is kept for them.
    kept: Mutex<BTreeSet<u32>>,
    log: BoundedLog,
}

/// What a connection holds until its process is proven to be a worker, and has said hello.
enum Permit {
    Any(#[expect(dead_code, reason = "it is held")] OwnedSemaphorePermit),
    /// The one that is kept for this worker's own process.
    Kept(Arc<Shared>, u32),
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Permit::Kept(shared, pid) = self {
            shared.kept.lock().remove(pid);
        }
    }
}

type ConnectionId = u64;

#[derive(Debug)]
struct Connection {
    id: ConnectionId,
    /// The worker that has connected, or whose descendant has.
    worker: u32,
    /// The process that has connected.
    pid: u32,
    messages: mpsc::Sender<ToWorker>,
    /// Ends the connection at once. `None`: that was done, and nothing that arrives counts any more.
    cut: Option<oneshot::Sender<()>>,
}

impl Exchange {
    /// Listen on a new socket, for so many workers.
    ///
    /// # Errors
    /// The system refuses a socket.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn listen(workers: u32) -> io::Result<Exchange> {
        let (address, listener) = address::listen()?;
        let shared = Arc::new(Shared {
            workers: watch::Sender::default(),
            connections: Mutex::default(),
            unproven: Arc::new(Semaphore::new(UNPROVEN + workers as usize)),
            kept: Mutex::default(),
            log: BoundedLog::new(LOG_PERIOD, |what, count| {
                tracing::warn!(what, count, "further messages of this kind were not logged");
            }),
        });
        let (sender, received) = mpsc::channel(256);
        let accepting = tokio::spawn(accept(listener, shared.clone(), sender)).abort_handle();
        Ok(Exchange { address, shared, received, accepting })
    }

    /// The address of the socket, which workers find in `ELASTIC_RS_AGENT`: `@` and a name that is in no file system.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// From now on these are the workers: process ids by local rank. Connections of others are closed, without [`FromWorker::Gone`].
    pub fn expect(&self, pids: &BTreeMap<u32, u32>) {
        let mut connections = self.shared.connections.lock();
        self.shared.workers.send_replace(pids.clone());
        connections.retain(|local_rank, connection| pids.get(local_rank) == Some(&connection.worker));
    }

    /// Send to a worker. Does nothing if it is not connected. A worker that does not read is disconnected.
    pub fn send(&self, local_rank: u32, message: ToWorker) {
        let mut connections = self.shared.connections.lock();
        let Some(connection) = connections.get_mut(&local_rank) else { return };
        if let Err(mpsc::error::TrySendError::Full(_)) = connection.messages.try_send(message)
            && let Some(cut) = connection.cut.take()
        {
            tracing::warn!(
                local_rank,
                "a worker does not read its agent's messages: its connection is closed, and it is restarted when the world changes"
            );
            let _ = cut.send(()); // it may have ended
        }
    }

    /// What was heard next. May be dropped and called again.
    pub async fn next(&mut self) -> FromWorker {
        while let Some((id, mut received)) = self.received.recv().await {
            if self.shared.is_current(id, &mut received) {
                return received;
            }
        }
        pending().await
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // It owns the tasks of all connections.
        self.accepting.abort();
    }
}

impl FromWorker {
    /// Which worker it is.
    pub fn local_rank_mut(&mut self) -> &mut u32 {
        match self {
            FromWorker::Hello { local_rank }
            | FromWorker::Ack { local_rank, .. }
            | FromWorker::Parked { local_rank, .. }
            | FromWorker::NoProcessGroup { local_rank }
            | FromWorker::Saves { local_rank }
            | FromWorker::Freed { local_rank }
            | FromWorker::Stuck { local_rank }
            | FromWorker::Raised { local_rank, .. }
            | FromWorker::Unfit { local_rank, .. }
            | FromWorker::Gone { local_rank } => local_rank,
        }
    }
}

impl Shared {
    /// Whether this was heard from a worker's latest connection. Forgets a connection that has ended.
    fn is_current(&self, id: ConnectionId, received: &mut FromWorker) -> bool {
        let mut connections = self.connections.lock();
        let local_rank = *received.local_rank_mut();
        let Some(connection) = connections.get(&local_rank).filter(|connection| connection.id == id) else {
            return false;
        };
        if matches!(received, FromWorker::Gone { .. }) {
            connections.remove(&local_rank);
            return true;
        }
        connection.cut.is_some()
    }

    /// A place for a connection of this process while it is not proven. `None`: too many are not.
    fn permit(self: &Arc<Self>, pid: u32) -> Option<Permit> {
        if let Ok(permit) = self.unproven.clone().try_acquire_owned() {
            return Some(Permit::Any(permit));
        }
        let is_worker = self.workers.borrow().values().any(|worker| *worker == pid);
        (is_worker && self.kept.lock().insert(pid)).then(|| Permit::Kept(self.clone(), pid))
    }

    /// Makes this the worker's connection, instead of an earlier one of the same process. An error is the reason for which it is refused.
    fn connect(&self, id: ConnectionId, admitted: &Admitted) -> Result<Outgoing, String> {
        let Admitted { local_rank, worker, pid, .. } = *admitted;
        let mut connections = self.connections.lock();
        if self.workers.borrow().get(&local_rank) != Some(&worker) {
            return Err("its worker was stopped meanwhile".to_owned());
        }
        // The end of a process may not have been read from its connection yet.
        if let Some(first) = connections.get(&local_rank)
            && first.worker == worker
            && first.pid != pid
            && is_alive(first.pid)
        {
            return Err(format!(
                "process {pid} descends from the worker of local rank {local_rank}, for which process {} is connected: a process that \
                 a worker starts is no worker, and must call none of elastic_rs.should_checkpoint, elastic.init and the functions of elastic.run",
                first.pid
            ));
        }
        let ((sender, messages), (cut, is_cut)) = (mpsc::channel(UNREAD_LIMIT), oneshot::channel());
        connections.insert(local_rank, Connection { id, worker, pid, messages: sender, cut: Some(cut) });
        Ok((messages, is_cut))
    }
}

/// Accepts connections until it is aborted, and with it the tasks that attend to them.
async fn accept(listener: UnixListener, shared: Arc<Shared>, received: mpsc::Sender<(ConnectionId, FromWorker)>) {
    let mut attending = JoinSet::new();
    let mut ids = 1..;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let id = ids.next().unwrap_or_default();
                    attending.spawn(attend(id, stream, shared.clone(), received.clone()));
                }
                Err(error) => {
                    if shared.log.admits("accept") {
                        tracing::warn!(%error, "cannot accept the connection of a worker; trying again");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = attending.join_next() => {}
            () = shared.log.summarise() => {}
        }
    }
}

async fn attend(
    id: ConnectionId,
    mut stream: UnixStream,
    shared: Arc<Shared>,
    received: mpsc::Sender<(ConnectionId, FromWorker)>,
) {
    let admitted = admit(&mut stream, &shared).await;
    let connected = admitted.and_then(|admitted| {
        let outgoing = shared.connect(id, &admitted)?;
        Ok((admitted, outgoing))
    });
    match connected {
        Ok((Admitted { local_rank, buffer, .. }, outgoing)) => {
            serve(id, local_rank, stream, buffer, outgoing, &received).await;
            // Fails if the agent has ended.
            let _ = received.send((id, FromWorker::Gone { local_rank })).await;
        }
        Err(reason) => {
            if shared.log.admits("refused") {
                tracing::warn!("a process that connects as a worker is refused: {reason}");
            }
            let _ = write(&mut stream, ToWorker::Refused { reason }).await;
        }
    }
}

/// A connection whose worker is known, and has said hello.
struct Admitted {
    local_rank: u32,
    worker: u32,
    /// The process that has connected.
    pid: u32,
    /// What has arrived after the hello.
    buffer: BytesMut,
}

/// Finds out whose connection this is. An error is the reason for which it is refused.
async fn admit(stream: &mut UnixStream, shared: &Arc<Shared>) -> Result<Admitted, String> {
    let pid = peers::process_at(stream)?;
    let _permit = shared.permit(pid).ok_or_else(|| {
        format!("process {pid} is not known as a worker, and {UNPROVEN} such processes are waiting already")
    })?;
    let (local_rank, worker) = peers::worker_of(pid, &shared.workers).await?;
    let mut buffer = BytesMut::new();
    let (mut reader, _) = stream.split();
    match timeout(HOLD_LIMIT, read_message(&mut reader, &mut buffer)).await {
        Ok(Ok(Some(ToAgent::Hello { version: VERSION }))) => Ok(Admitted { local_rank, worker, pid, buffer }),
        Ok(Ok(Some(ToAgent::Hello { version }))) => Err(format!(
            "process {pid} has a release of elastic_rs whose channel has version {version}, and its agent version {VERSION}: \
             install the same release in the worker's environment as in the agent's"
        )),
        Ok(Ok(Some(message))) => Err(format!("process {pid} sent {message:?} before Hello")),
        Ok(Ok(None)) => Err(format!("process {pid} closed the connection before it sent Hello")),
        Ok(Err(error)) => Err(format!("process {pid} did not send Hello: {error}")),
        Err(_) => Err(format!("process {pid} did not send Hello within {HOLD_LIMIT:.0?}")),
    }
}

/// The messages for a worker, and when its connection is cut.
type Outgoing = (mpsc::Receiver<ToWorker>, oneshot::Receiver<()>);

/// Passes messages on in both directions, until one ends.
async fn serve(
    id: ConnectionId,
    local_rank: u32,
    stream: UnixStream,
    buffer: BytesMut,
    (messages, cut): Outgoing,
    received: &mpsc::Sender<(ConnectionId, FromWorker)>,
) {
    let (reader, writer) = stream.into_split();
    // Fails if the agent has ended.
    let _ = received.send((id, FromWorker::Hello { local_rank })).await;
    tokio::select! {
        read = read_all(id, local_rank, reader, buffer, received) => if let Err(error) = read {
            tracing::warn!(local_rank, "the connection of a worker is closed, its message cannot be read: {error}; it is restarted when the world changes; install one version of elastic_rs for agent and worker");
        },
        written = write_all(writer, messages) => if let Err(error) = written {
            tracing::warn!(local_rank, "the connection of a worker is closed, its agent cannot send to it: {error}; it is restarted when the world changes");
        },
        Ok(()) = cut => {}
    }
}

async fn read_all(
    id: ConnectionId,
    local_rank: u32,
    mut reader: OwnedReadHalf,
    mut buffer: BytesMut,
    received: &mpsc::Sender<(ConnectionId, FromWorker)>,
) -> Result<(), String> {
    let error = |error: CodecError| error.to_string();
    while let Some(message) = read_message(&mut reader, &mut buffer).await.map_err(error)? {
        let what = match message {
            ToAgent::Ack { seq, count } => FromWorker::Ack { local_rank, seq, count },
            ToAgent::Parked(state) => FromWorker::Parked { local_rank, state },
            ToAgent::NoProcessGroup => FromWorker::NoProcessGroup { local_rank },
            ToAgent::Saves => FromWorker::Saves { local_rank },
            ToAgent::Freed => FromWorker::Freed { local_rank },
            ToAgent::Stuck => FromWorker::Stuck { local_rank },
            ToAgent::Unfit { message } => FromWorker::Unfit { local_rank, message: tidy(&message) },
            ToAgent::Raised { error, message } => {
                FromWorker::Raised { local_rank, error: tidy(&error), message: tidy(&message) }
            }
            ToAgent::Hello { .. } => return Err("it sent Hello twice".to_owned()),
        };
        if received.send((id, what)).await.is_err() {
            break; // the agent has ended
        }
    }
    Ok(())
}

/// Ends when the connection is replaced, or its worker is stopped.
async fn write_all(mut writer: OwnedWriteHalf, mut messages: mpsc::Receiver<ToWorker>) -> Result<(), String> {
    while let Some(message) = messages.recv().await {
        write(&mut writer, message).await?;
    }
    Ok(())
}

async fn write(writer: &mut (impl AsyncWriteExt + Unpin), message: ToWorker) -> Result<(), String> {
    let mut frame = BytesMut::new();
    message.encode(&mut frame).map_err(|error| error.to_string())?;
    match timeout(WRITE_LIMIT, writer.write_all(&frame)).await {
        // Whoever reads the connection sees its end.
        Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Ok(written) => written.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it was not read within {WRITE_LIMIT:.0?}")),
    }
}
