//! The agent's end: one connection for each worker, and one question at a time.
//!
//! The worker's own process may always connect, another one that descends from it only while none is connected: a script that starts
//! the training is asked through the training. A worker that has not answered is not asked again: what it answers late is for whoever
//! asks then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::ReadHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{ANSWER_LIMIT_BYTES, ASK, GOT, VERSION};
use crate::bounded_log::BoundedLog;
use crate::channel::address;
use crate::channel::peers::{self, HOLD_LIMIT, UNPROVEN};
use crate::processes::is_alive;

/// Pause after an error of `accept`, such as a want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refusals are counted per period.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What came of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// No watch thread of the worker is connected.
    Nobody,
    /// One is, and does not get the GIL within the limit.
    Silent,
    /// It has the GIL, and has not answered within the limit.
    Late,
    /// The bytes of its answer.
    Answer(Vec<u8>),
}

/// How long to wait for a worker.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the GIL.
    pub gil: Duration,
    /// For all of the answer.
    pub answer: Duration,
}

/// The watch threads of a node's workers. Dropping it closes all connections.
#[derive(Debug)]
pub struct Watches {
    address: String,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

/// Asks them. It may be sent to a task.
#[derive(Debug, Clone)]
pub struct Asker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The process ids of the workers by local rank.
    workers: watch::Sender<BTreeMap<u32, u32>>,
    /// By local rank. Locked before `workers` is changed, or compared with a connection.
    connections: Mutex<BTreeMap<u32, Connection>>,
    /// Places of connections that are not proven yet.
    unproven: Arc<Semaphore>,
    log: BoundedLog,
}

#[derive(Debug)]
struct Connection {
    id: u64,
    /// The worker that has connected, or whose descendant has.
    worker: u32,
    /// The process that has connected.
    pid: u32,
    question: Arc<Question>,
    /// Dropping it ends the connection.
    _open: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct Question {
    state: Mutex<Pending>,
    asked: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    /// It was asked, and has not been answered.
    is: bool,
    /// The worker has the GIL.
    has_gil: bool,
    /// Told once the worker has the GIL.
    until_gil: Option<oneshot::Sender<()>>,
    /// Gets the answer.
    asker: Option<oneshot::Sender<Vec<u8>>>,
}

impl Watches {
    /// Listen on a new socket, for so many workers. Needs a tokio runtime.
    ///
    /// # Errors
    /// The system refuses a socket.
    pub fn listen(workers: u32) -> std::io::Result<Self> {
        let (address, listener) = address::listen()?;
        let shared = Arc::new(Shared {
            workers: watch::Sender::default(),
            connections: Mutex::default(),
            unproven: Arc::new(Semaphore::new(UNPROVEN + workers as usize)),
            log: BoundedLog::new(LOG_PERIOD, |what, count| {
                tracing::info!(what, count, "further messages of this kind were not logged");
            }),
        });
        let accepting = tokio::spawn(accept(listener, shared.clone())).abort_handle();
        Ok(Self { address, shared, accepting })
    }

    /// The value of the variable [`super::WATCH`].
    pub fn address(&self) -> &str {
        &self.address
    }

    /// From now on these are the workers: process ids by local rank. Connections of others are closed.
    pub fn expect(&self, pids: &BTreeMap<u32, u32>) {
        let mut connections = self.shared.connections.lock();
        self.shared.workers.send_replace(pids.clone());
        connections.retain(|local_rank, connection| pids.get(local_rank) == Some(&connection.worker));
    }

    /// What asks them.
    pub fn asker(&self) -> Asker {
        Asker(self.shared.clone())
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        // It owns the tasks of all connections.
        self.accepting.abort();
    }
}

impl Asker {
    /// Ask a worker, unless a question to it is unanswered, and wait for the answer within these limits.
    pub async fn ask(&self, local_rank: u32, limits: Limits) -> Asked {
        let until = Instant::now() + limits.answer;
        let ((until_gil, gil), (asker, answer)) = (oneshot::channel(), oneshot::channel());
        {
            let connections = self.0.connections.lock();
            let Some(connection) = connections.get(&local_rank) else { return Asked::Nobody };
            let mut pending = connection.question.state.lock();
            (pending.until_gil, pending.asker) = (Some(until_gil).filter(|_| !pending.has_gil), Some(asker));
            if !std::mem::replace(&mut pending.is, true) {
                connection.question.asked.notify_one();
            }
        }
        // An error here means that it had the GIL already, or that the connection has ended, which the answer shows.
        if timeout(limits.gil, gil).await.is_err() {
            return Asked::Silent;
        }
        match timeout_at(until, answer).await {
            Ok(Ok(answer)) => Asked::Answer(answer),
            // The connection has ended.
            Ok(Err(_)) => Asked::Nobody,
            Err(_) => Asked::Late,
        }
    }
}

impl Shared {
    /// Makes this the worker's connection. Returns its questions, and what ends when it is replaced. An error is the reason for which it
    /// is refused.
    fn connect(&self, id: u64, pid: u32, (local_rank, worker): (u32, u32)) -> Result<Outgoing, String> {
        let mut connections = self.connections.lock();
        if self.workers.borrow().get(&local_rank) != Some(&worker) {
            return Err("its worker was stopped meanwhile".to_owned());
        }
        // The end of a process may not have been read from its connection yet.
        if let Some(first) = connections.get(&local_rank)
            && ![first.pid, worker].contains(&pid)
            && is_alive(first.pid)
        {
            return Err(format!("process {} answers for the worker of local rank {local_rank}", first.pid));
        }
        let (question, (open, closed)) = (Arc::new(Question::default()), oneshot::channel());
        connections.insert(local_rank, Connection { id, worker, pid, question: question.clone(), _open: open });
        Ok((question, closed))
    }
}

type Outgoing = (Arc<Question>, oneshot::Receiver<()>);

/// Accepts connections until it is aborted, and with it the tasks that attend to them.
async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    let mut attending = JoinSet::new();
    let mut ids = 1..;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    attending.spawn(attend(ids.next().unwrap_or_default(), stream, shared.clone()));
                }
                Err(error) => {
                    if shared.log.admits("accept") {
                        tracing::warn!(%error, "cannot accept the connection of a worker's watch thread; trying again");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = attending.join_next() => {}
            () = shared.log.summarise() => {}
        }
    }
}

async fn attend(id: u64, mut stream: UnixStream, shared: Arc<Shared>) {
    let connected = async {
        let (pid, worker) = admit(&mut stream, &shared).await?;
        Ok::<_, String>((pid, worker.0, shared.connect(id, pid, worker)?))
    };
    let (pid, local_rank, (question, closed)) = match connected.await {
        Ok(connected) => connected,
        Err(reason) => {
            if shared.log.admits("refused") {
                tracing::info!("a process is not asked for its collectives: {reason}");
            }
            return;
        }
    };
    tokio::select! {
        served = serve(&mut stream, &question) => if let Err(error) = served && shared.log.admits("closed") {
            tracing::info!(
                "process {pid}, the worker of local rank {local_rank}, is not asked for its collectives any more: {error}"
            );
        },
        _ = closed => {}
    }
    let mut connections = shared.connections.lock();
    if connections.get(&local_rank).is_some_and(|connection| connection.id == id) {
        connections.remove(&local_rank);
    }
}

/// Finds out whose connection this is: the process, and its worker. An error is the reason for which it is refused.
async fn admit(stream: &mut UnixStream, shared: &Shared) -> Result<(u32, (u32, u32)), String> {
    let pid = peers::process_at(stream)?;
    let _permit = shared.unproven.try_acquire().map_err(|_| {
        format!("process {pid} is not known as a worker, and too many such processes are waiting already")
    })?;
    let worker = peers::worker_of(pid, &shared.workers).await?;
    match timeout(HOLD_LIMIT, stream.read_u8()).await {
        Ok(Ok(VERSION)) => Ok((pid, worker)),
        Ok(Ok(version)) => Err(format!(
            "process {pid} has a release of elastic_rs whose watch thread has version {version}, and its agent version {VERSION}: \
             install the same release in the worker's environment as in the agent's"
        )),
        Ok(Err(error)) => Err(format!("process {pid} did not say its version: {error}")),
        Err(_) => Err(format!("process {pid} did not say its version within {HOLD_LIMIT:.0?}")),
    }
}

/// Passes questions and answers on, until the connection ends.
async fn serve(stream: &mut UnixStream, question: &Question) -> Result<(), String> {
    let (mut reader, mut writer) = stream.split();
    let mut unasked = [0];
    loop {
        tokio::select! {
            () = question.asked.notified() => {}
            read = reader.read(&mut unasked) => match read {
                Ok(0) | Err(_) => return Ok(()),
                Ok(_) => return Err("it answers what nobody has asked".to_owned()),
            },
        }
        // One byte at a time has always room. An error is also found by the next read.
        let _ = writer.write_all(&[ASK]).await;
        match reader.read_u8().await {
            Ok(GOT) => {}
            Ok(_) => return Err("its answer does not begin as one".to_owned()),
            Err(_) => return Ok(()),
        }
        let until_gil = {
            let mut pending = question.state.lock();
            pending.has_gil = true;
            pending.until_gil.take()
        };
        let _ = until_gil.map(|until_gil| until_gil.send(()));
        let Some(answer) = read_answer(&mut reader).await? else { return Ok(()) };
        let asker = std::mem::take(&mut *question.state.lock()).asker;
        // The asker may have stopped waiting.
        let _ = asker.map(|asker| asker.send(answer));
    }
}

/// `None`: the connection has ended.
async fn read_answer(reader: &mut ReadHalf<'_>) -> Result<Option<Vec<u8>>, String> {
    let Ok(length) = reader.read_u32_le().await else { return Ok(None) };
    if length as usize > ANSWER_LIMIT_BYTES {
        return Err(format!("its answer has {length} bytes, must have at most {ANSWER_LIMIT_BYTES}"));
    }
    // Memory for what has arrived, not for what is announced.
    let mut answer = Vec::new();
    let read = reader.take(length.into()).read_to_end(&mut answer).await;
    Ok(read.is_ok_and(|read| read == length as usize).then_some(answer))
}
