//! Drives [`NodeMachine`]: a background task that keeps one connection to the coordinator.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::dial::{CONNECT_TIMEOUT, Dialled, dial};
use super::machine::{JoinError, NodeCommand, NodeMachine, View};
use super::report::{Reported, Reporter};
use crate::net::probe::speaks_c10d;
use crate::rendezvous::coordinator::driver::read_message;
use crate::rendezvous::protocol::codec;
use crate::rendezvous::protocol::message::{
    CoordinatorMessage, Failure, Hello, JoinWorkers, Placement, Round, Verdict,
};
use crate::wait::until;

/// A node's session with the coordinator. Dropping it ends the connection without a goodbye. [`Session::leave`] sends one.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    /// Held while a join is pending.
    turn: tokio::sync::Mutex<()>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    machine: Mutex<NodeMachine>,
    /// The machine has a new request: the driver has to look.
    asked: Notify,
    /// Counts the driver's steps, so that callers that wait for an outcome look again.
    steps: watch::Sender<u64>,
    /// The goodbye has been sent.
    gone: watch::Sender<bool>,
}

impl Session {
    /// Start a session with the coordinator at `host:port`. Connects in the background, at once and for as long as it takes.
    pub fn open(runtime: &Handle, hello: Hello, host: &str, port: u16, coordinator_timeout: Duration) -> Self {
        let endpoint = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        // The coordinator identifies nodes by the address of their connection, so a node with its own address connects from it.
        let source = hello.local_addr.as_deref().and_then(|addr| addr.parse().ok());
        let machine = NodeMachine::new(hello, endpoint, coordinator_timeout, Instant::now());
        let (steps, gone) = (watch::Sender::new(0), watch::Sender::new(false));
        let shared = Arc::new(Shared { machine: Mutex::new(machine), asked: Notify::new(), steps, gone });
        let task = runtime.spawn(drive(Arc::clone(&shared), host.to_owned(), port, source));
        Self { shared, turn: tokio::sync::Mutex::default(), task }
    }

    /// Take part in the next round. This node's empty worker store listens on `store_port`. With `workers`, the placement has their
    /// ranks. Dropping the future withdraws the join.
    ///
    /// # Errors
    /// [`JoinError`]. The session stays usable after `Timeout` and `Busy`.
    pub async fn join(
        &self,
        store_port: u16,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
    ) -> Result<Placement, JoinError> {
        let ask = |machine: &mut NodeMachine| machine.join(store_port, node_rank, workers, timeout, Instant::now());
        self.outcome_of(ask, |_| Ok(store_port)).await
    }

    /// As [`Session::join`], with a worker store that `open` opens once the address is known at which other nodes will look for this
    /// one. `open` gets that address and returns the store's port. It is called again if the address changes.
    ///
    /// # Errors
    /// As [`Session::join`]. `Connection` also if the store cannot be opened.
    pub async fn join_opening(
        &self,
        open: impl FnMut(&str) -> io::Result<u16> + Send,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
    ) -> Result<Placement, JoinError> {
        let ask = |machine: &mut NodeMachine| machine.join_with_new_store(node_rank, workers, timeout, Instant::now());
        self.outcome_of(ask, open).await
    }

    async fn outcome_of(
        &self,
        join: impl FnOnce(&mut NodeMachine),
        mut open: impl FnMut(&str) -> io::Result<u16>,
    ) -> Result<Placement, JoinError> {
        let Ok(_turn) = self.turn.try_lock() else { return Err(JoinError::Busy) };
        let mut steps = self.shared.steps.subscribe();
        self.ask(join);
        let _abandoned_when_dropped = Pending(self);
        loop {
            let (outcome, wanted) = {
                let mut machine = self.shared.machine.lock();
                (machine.take_outcome(), machine.wanted_store())
            };
            if let Some(outcome) = outcome {
                return outcome;
            }
            if let Some(addr) = wanted {
                let port = open(&addr)
                    .map_err(|error| JoinError::Connection(format!("cannot listen for workers: {error}")))?;
                self.ask(|machine| machine.on_store_opened(addr, port));
                continue;
            }
            // The sender lives in `shared`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }

    /// The present view, from memory.
    pub fn view(&self) -> View {
        let mut machine = self.shared.machine.lock();
        // The whole process may have stood still, and the driver may not have looked yet.
        machine.fence_if_due(Instant::now());
        machine.view().clone()
    }

    /// Waits until the view satisfies `wanted`, and returns it.
    pub async fn view_when(&self, wanted: impl Fn(&View) -> bool) -> View {
        let mut steps = self.shared.steps.subscribe();
        loop {
            let view = self.view();
            if wanted(&view) {
                return view;
            }
            // The sender lives in `shared`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }

    /// Report a failed worker of `round`. The answer is in the view: the world must re-form (its `failure` is the first one), or the
    /// job has ended.
    pub fn report_failure(&self, round: Round, failure: Failure) {
        self.ask(|machine| machine.report_failure(round, failure));
    }

    /// Report that all workers of `round` have succeeded. The view's `all_done` tells when those of the other live members have.
    pub fn report_done(&self, round: Round) {
        self.ask(|machine| machine.report_done(round));
    }

    /// For a node that waits: what it waits for.
    pub fn progress(&self) -> Option<String> {
        self.shared.machine.lock().waits().map(|(_, what)| what)
    }

    /// Whether the coordinator has ever welcomed this node.
    pub fn was_welcomed(&self) -> bool {
        self.shared.machine.lock().view().addr.is_some()
    }

    /// End the job on all nodes, once the coordinator gets the message.
    pub fn close(&self, verdict: Verdict) {
        self.ask(|machine| machine.close(verdict));
    }

    /// Send a goodbye and end the session. Earlier messages are sent first. Waits at most `limit`. A pending join ends. `signal` is
    /// the one that ended the agent, if any.
    pub async fn leave(&self, reason: String, signal: Option<i32>, limit: Duration) {
        let mut gone = self.shared.gone.subscribe();
        self.ask(|machine| machine.leave(reason, signal));
        if timeout(limit, gone.wait_for(|gone| *gone)).await.is_err() {
            self.task.abort();
            self.shared.steps.send_modify(|step| *step += 1);
        }
    }

    fn ask(&self, question: impl FnOnce(&mut NodeMachine)) {
        question(&mut self.shared.machine.lock());
        self.shared.asked.notify_one();
    }
}

/// A pending join.
struct Pending<'a>(&'a Session);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.ask(NodeMachine::abandon);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The open connection.
struct Connection {
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
    incoming: BytesMut,
    outgoing: BytesMut,
}

async fn drive(shared: Arc<Shared>, host: String, port: u16, mut source: Option<IpAddr>) {
    let mut connection: Option<Connection> = None;
    let mut connecting = None;
    let mut probing = None;
    let mut reporter = Reporter::default();
    loop {
        let (commands, deadline, left, news, run_id) = {
            let mut machine = shared.machine.lock();
            let now = Instant::now();
            machine.on_tick(now);
            let news = reporter.look(&*machine, now);
            let deadline = [machine.next_deadline(), reporter.next_deadline(&*machine)].into_iter().flatten().min();
            (machine.take_commands(), deadline, machine.has_left(), news, machine.run_id().to_owned())
        };
        for text in news {
            tracing::warn!("[{run_id}] {text}");
        }
        for command in commands {
            match command {
                NodeCommand::Connect => connecting = Some(Box::pin(dial(host.clone(), port, source))),
                NodeCommand::Disconnect => (connection, connecting) = (None, None),
                NodeCommand::Probe => probing = Some(Box::pin(speaks_c10d(&host, port, CONNECT_TIMEOUT))),
                NodeCommand::Send(message) => {
                    if let Some(connection) = &mut connection {
                        codec::encode_frame(&message, &mut connection.outgoing);
                    }
                }
            }
        }
        shared.steps.send_modify(|step| *step += 1);
        if left {
            if let Some(mut connection) = connection {
                let _ = connection.writer.write_all(&connection.outgoing).await;
                let _ = connection.writer.shutdown().await;
            }
            shared.gone.send_replace(true);
            return;
        }

        tokio::select! {
            biased;
            () = shared.asked.notified() => {}
            happened = step(&mut connection) => {
                let mut machine = shared.machine.lock();
                match happened {
                    Happened::Sent => {}
                    Happened::Received(message) => machine.on_message(message, Instant::now()),
                    Happened::Ended { cause, foreign } => {
                        connection = None;
                        machine.on_disconnected(cause, foreign, Instant::now());
                    }
                }
            }
            opened = wait_for(&mut connecting) => {
                connecting = None;
                let mut machine = shared.machine.lock();
                match opened {
                    Ok(Dialled { stream, from_source }) => {
                        // Where nothing comes back to that address, no later connection waits for it.
                        source = source.filter(|_| from_source);
                        let (reader, writer) = stream.into_split();
                        let mut outgoing = BytesMut::new();
                        codec::encode_preamble(&mut outgoing);
                        connection = Some(Connection { reader, writer, incoming: BytesMut::new(), outgoing });
                        machine.on_connected(Instant::now());
                    }
                    Err(error) if error.out_of_descriptors => machine.on_out_of_descriptors(error.text, Instant::now()),
                    Err(error) => machine.on_connect_failed(error.text, error.refused, Instant::now()),
                }
            }
            speaks_c10d = wait_for(&mut probing) => {
                probing = None;
                shared.machine.lock().on_probed(speaks_c10d);
            }
            () = until(deadline) => {}
        }
    }
}

enum Happened {
    Sent,
    Received(CoordinatorMessage),
    Ended { cause: String, foreign: bool },
}

/// Waits for the next event of the connection. Dropping the future loses nothing.
async fn step(connection: &mut Option<Connection>) -> Happened {
    let Some(Connection { reader, writer, incoming, outgoing }) = connection else {
        return std::future::pending().await;
    };
    let ended = |cause: String| Happened::Ended { cause, foreign: false };
    tokio::select! {
        message = read_message(reader, incoming) => match message {
            Ok(Some(message)) => Happened::Received(message),
            Ok(None) => ended("the coordinator closed the connection".to_owned()),
            Err(error) => Happened::Ended { cause: error.to_string(), foreign: true },
        },
        written = writer.write_buf(outgoing), if !outgoing.is_empty() => match written {
            Ok(_) => Happened::Sent,
            Err(error) => ended(error.to_string()),
        },
    }
}

async fn wait_for<F: Future + Unpin>(pending: &mut Option<F>) -> F::Output {
    match pending {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
