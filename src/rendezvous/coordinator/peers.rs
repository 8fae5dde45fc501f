//! The connections to the processes at the other endpoints of a list, and this one's part among them.
//!
//! Each process sends over the connection that it has opened, and reads what others send over theirs. While one is broken it is opened
//! anew all the time: a process that is started again is found at once, and a port that is refused proves that its process has ended.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::connections::ConnectionEvent;
use super::ensemble::{Link, PeerMessage};
use super::machine::{Command, Machine};
use super::succession::Succession;
use crate::bounded_log::BoundedLog;
use crate::rendezvous::messages::codec;
use crate::rendezvous::messages::frames::read_message;
use crate::rendezvous::messages::ids::NodeId;
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeMessage, PeerHello};
use crate::rendezvous::messages::peer::host_and_port;
use crate::rendezvous::node::dial::dial;
use crate::secure::{Halves, Protection};

/// Messages that may wait for a process that does not read. Any may be lost.
const UNSENT: usize = 256;
/// Time for the answer to an introduction.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// A connection ends if what was sent over it has not arrived for so long. The kernel alone tries for a quarter of an hour, ever more seldom.
const UNHEARD: Duration = Duration::from_secs(5);
/// How often a connection is tried at first, and for how long: a process ends its sockets up to 0.1 s after its first connection.
const AT_FIRST: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// How often it is tried then.
const EVERY: Duration = Duration::from_millis(250);
/// How long it is tried at the address where the process was, and not by its name.
const SAME_FOR: Duration = Duration::from_secs(20);

/// This process's part among those at the endpoints of a list.
pub(super) struct Part {
    pub succession: Succession,
    outboxes: Vec<mpsc::Sender<BytesMut>>,
    tasks: Vec<AbortHandle>,
    /// For each endpoint: that its process has come, so that it is connected to at once.
    came: Vec<Arc<Notify>>,
    /// For each endpoint: held open as long as its last connection counts.
    incoming: HashMap<usize, oneshot::Sender<Infallible>>,
}

impl Part {
    /// Begin it: connect to the others.
    pub fn begin(
        hello: PeerHello,
        protection: Option<&Arc<Protection>>,
        events: &mpsc::Sender<ConnectionEvent>,
        log: &Arc<BoundedLog>,
    ) -> Self {
        let (mut outboxes, mut tasks, mut came) = (Vec::new(), Vec::new(), Vec::new());
        for (place, endpoint) in hello.endpoints.iter().enumerate() {
            let (outbox, outgoing) = mpsc::channel(UNSENT);
            outboxes.push(outbox);
            came.push(Arc::new(Notify::new()));
            if place != hello.place as usize {
                let other = Other {
                    place,
                    endpoint: endpoint.clone(),
                    hello: hello.clone(),
                    protection: protection.cloned(),
                    events: events.clone(),
                    log: Arc::clone(log),
                    came: came.last().cloned().unwrap_or_default(),
                };
                tasks.push(tokio::spawn(other.keep(outgoing)).abort_handle());
            }
        }
        let succession = Succession::new(hello, std::time::Instant::now());
        Self { succession, outboxes, tasks, came, incoming: HashMap::new() }
    }

    /// A process introduces itself. Returns which one is here, and until when its connection counts: until it connects anew.
    ///
    /// # Errors
    /// It has no part in this list.
    pub fn admit(&mut self, hello: &PeerHello) -> Result<(NodeId, oneshot::Receiver<Infallible>), String> {
        let process = self.succession.admits(hello)?;
        let place = hello.place as usize;
        let (counts, until) = oneshot::channel();
        self.incoming.insert(place, counts);
        self.came.get(place).into_iter().for_each(|came| came.notify_one());
        Ok((process, until))
    }

    /// As [`Succession::turns_away`].
    pub fn turns_away(&self, run_id: Option<&str>) -> Option<CoordinatorMessage> {
        self.succession.turns_away(run_id, std::time::Instant::now())
    }

    /// What the coordinator is to do now. Sends what the other processes are to know.
    pub fn take(&mut self, machine: &mut Machine) -> Vec<Command> {
        let todo = self.succession.take(machine, std::time::Instant::now());
        for (place, message) in &todo.peers {
            self.send(*place, message);
        }
        if todo.changed {
            let (run_id, leads) = (&self.succession.hello().run_id, self.succession.leads());
            tracing::info!("[{run_id}] this process {} the run", if leads { "leads" } else { "no longer leads" });
        }
        todo.commands
    }

    fn send(&self, place: usize, message: &PeerMessage) {
        let mut frame = BytesMut::new();
        if let Err(error) = codec::try_encode_frame(message, &mut frame) {
            tracing::error!("a message to another endpoint cannot be sent, which is a bug: {error}");
        } else if let Some(outbox) = self.outboxes.get(place) {
            let _ = outbox.try_send(frame); // it may be lost
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// Another endpoint of the list.
struct Other {
    place: usize,
    endpoint: String,
    hello: PeerHello,
    protection: Option<Arc<Protection>>,
    events: mpsc::Sender<ConnectionEvent>,
    log: Arc<BoundedLog>,
    came: Arc<Notify>,
}

impl Other {
    /// Keep a connection to it, and send over that.
    async fn keep(self, mut outgoing: mpsc::Receiver<BytesMut>) {
        let mut last: Option<(SocketAddr, NodeId)> = None;
        let mut ended = Instant::now();
        loop {
            if self.tell(Link::Begins).await.is_none() {
                return;
            }
            let same = last.filter(|_| ended.elapsed() < SAME_FOR);
            let link = match self.open(same.map(|(at, _)| at)).await {
                Ok((halves, at, process)) => {
                    let other = last.replace((at, process)).filter(|it| it.0 == at && it.1 != process);
                    if let Some((_, before)) = other {
                        self.tell(Link::Dead(before)).await;
                    }
                    while outgoing.try_recv().is_ok() {} // meant for the connection before
                    self.tell(Link::Up(process)).await;
                    carry(halves, &mut outgoing).await;
                    ended = Instant::now();
                    Link::Down
                }
                Err(link) => link,
            };
            self.tell(link).await;
            if link == Link::Refused
                && let Some((_, process)) = same
            {
                last = None;
                self.tell(Link::Dead(process)).await;
            }
            let is_fresh = last.is_some() && ended.elapsed() < AT_FIRST.1;
            let _ = timeout(if is_fresh { AT_FIRST.0 } else { EVERY }, self.came.notified()).await;
        }
    }

    /// `None`: the coordinator has ended.
    async fn tell(&self, link: Link) -> Option<()> {
        self.events.send(ConnectionEvent::Link { place: self.place, link }).await.ok()
    }

    /// Connect and introduce this process. Returns which process is there, and at which address.
    async fn open(&self, at: Option<SocketAddr>) -> Result<(Halves, SocketAddr, NodeId), Link> {
        let (host, port) = host_and_port(&self.endpoint).ok_or(Link::Down)?;
        let secured = self.protection.clone().map(|protection| (protection, self.hello.run_id.clone()));
        let dialled = dial(host.to_owned(), port, at, None, secured, Some(UNHEARD)).await;
        let dialled = dialled.map_err(|error| if error.absent { Link::Refused } else { Link::Down })?;
        let (mut halves, at) = (dialled.link, dialled.peer.ok_or(Link::Down)?);
        let mut outgoing = BytesMut::new();
        codec::encode_preamble(&mut outgoing);
        let hello = NodeMessage::Peer(Box::new(self.hello.clone()));
        codec::try_encode_frame(&hello, &mut outgoing).map_err(|_| Link::Down)?;
        let mut incoming = BytesMut::new();
        let answer = async {
            halves.writer.write_all(&outgoing).await.ok()?;
            halves.writer.flush().await.ok()?;
            read_message::<CoordinatorMessage>(&mut halves.reader, &mut incoming).await.ok()?
        };
        match timeout(ANSWER_LIMIT, answer).await {
            Ok(Some(CoordinatorMessage::Peer { process })) => Ok((halves, at, process)),
            Ok(Some(CoordinatorMessage::Rejected { reason })) => {
                if self.log.admits_once("peers", at.ip()) {
                    let (run_id, endpoint) = (&self.hello.run_id, &self.endpoint);
                    tracing::warn!(
                        "[{run_id}] the process at the endpoint {endpoint} has no part in this job: {reason}"
                    );
                }
                Err(Link::Down)
            }
            _ => Err(Link::Down),
        }
    }
}

/// Send until the connection ends.
async fn carry(halves: Halves, outgoing: &mut mpsc::Receiver<BytesMut>) {
    let Halves { mut reader, mut writer } = halves;
    let mut incoming = BytesMut::new();
    loop {
        let frame = tokio::select! {
            frame = outgoing.recv() => frame,
            // It says nothing here: either this connection has ended, or it is no process of this version.
            _ = reader.read_buf(&mut incoming) => None,
        };
        let Some(frame) = frame else { return };
        let written = async {
            writer.write_all(&frame).await?;
            writer.flush().await
        };
        if !matches!(timeout(ANSWER_LIMIT, written).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::net::TcpListener;

    use super::*;

    /// The first connection to a process, too: its end is looked at often, not as seldom as an endpoint where nobody has been.
    #[tokio::test]
    async fn the_end_of_a_process_is_proven_soon_after_its_connection_has_ended() {
        let mut took = Vec::new();
        // A busy machine may be late once.
        for _ in 0..3 {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let endpoints = vec!["127.0.0.1:1".to_owned(), listener.local_addr().unwrap().to_string()];
            let hello =
                PeerHello { run_id: "job".to_owned(), endpoints: endpoints.clone(), place: 0, process: NodeId(1) };
            let (events, mut told) = mpsc::channel(16);
            let log = Arc::new(BoundedLog::new(EVERY, |_, _| {}));
            let other = Other {
                place: 1,
                endpoint: endpoints[1].clone(),
                hello,
                protection: None,
                events,
                log,
                came: Arc::default(),
            };
            let (_outbox, outgoing) = mpsc::channel(1);
            let keeping = tokio::spawn(other.keep(outgoing));
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut answer = BytesMut::new();
            codec::try_encode_frame(&CoordinatorMessage::Peer { process: NodeId(2) }, &mut answer).unwrap();
            stream.write_all(&answer).await.unwrap();
            while !matches!(told.recv().await, Some(ConnectionEvent::Link { link: Link::Up(_), .. })) {}
            drop((stream, listener));
            let ended = Instant::now();
            while !matches!(told.recv().await, Some(ConnectionEvent::Link { link: Link::Dead(NodeId(2)), .. })) {}
            took.push(ended.elapsed());
            keeping.abort();
        }
        assert!(took.iter().any(|took| *took < EVERY - AT_FIRST.0), "{took:?}");
    }
}
