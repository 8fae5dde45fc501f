//! Supervises the fork server: starts it, notices its end, and restarts it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;

use super::client::{Client, State};
use super::message::{Answer, MAX_ANSWER_BYTES};
use super::socket;
use crate::workers::{Event, Member, News, Order, Start, message_socket, open_fork_server, spawn_fork_server};

/// A fork server that has died this often is not restarted.
const MAX_DEATHS: u32 = 5;

/// Starts fork servers, one after the other, and notices their ends.
pub(super) struct Supervisor {
    client: Arc<Client>,
    closed: watch::Receiver<()>,
    sender: mpsc::UnboundedSender<News>,
    news: mpsc::UnboundedReceiver<News>,
    /// Guards, by the number of the fork server. The guard of a server that has ended stays as long as it has orphans.
    guards: BTreeMap<u32, Member>,
}

/// Why the supervisor stops attending to a fork server.
enum End {
    Closed,
    Died(String),
}

impl Supervisor {
    pub fn new(client: Arc<Client>, closed: watch::Receiver<()>) -> Supervisor {
        let (sender, news) = mpsc::unbounded_channel();
        Supervisor { client, closed, sender, news, guards: BTreeMap::new() }
    }

    /// Runs until the sender of `closed` is dropped, and until no process of the fork servers and their workers is left.
    pub async fn run(mut self) {
        for number in 0.. {
            let end = match self.begin(number).await {
                Ok(socket) => self.attend(number, socket).await,
                Err(error) => End::Died(format!("it could not be started: {error}")),
            };
            let End::Died(how) = end else { break };
            if !self.goes_on(number, how) {
                break;
            }
        }
        // Workers that were forked from it outlive it.
        while self.closed.changed().await.is_ok() {}
        self.guards.values().for_each(|guard| guard.order(Order::Kill));
        while !self.guards.is_empty() {
            if let Some(News::Reaped { local_rank }) = self.news.recv().await {
                self.guards.remove(&local_rank);
            }
        }
    }

    /// Starts a fork server, and returns this process's end of the socket.
    async fn begin(&mut self, number: u32) -> io::Result<Arc<AsyncFd<OwnedFd>>> {
        self.client.on_started();
        let mut spec = self.client.spec().process();
        spec.local_rank = number;
        let (ours, theirs) = message_socket()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        // SAFETY: an owned descriptor stays open and the same for as long as it is owned.
        let socket = Arc::new(unsafe { AsyncFd::register_with_interest(ours, Interest::READABLE) }?);
        let forking = spawn_blocking(move || {
            let opened = open_fork_server(theirs)?;
            let guarded = spawn_fork_server(&spec, &opened).map_err(io::Error::other)?;
            Ok::<_, io::Error>((spec, guarded))
        });
        let (spec, guarded) = forking.await.map_err(io::Error::other)??;
        let (guard, started) = Member::attend_silent(&spec, guarded, self.sender.clone())?;
        self.guards.insert(number, guard);
        executed(started).await?;
        Ok(socket)
    }

    /// Runs until the fork server has ended. Receives its first answer here. Later answers are received by the senders of requests.
    async fn attend(&mut self, number: u32, socket: Arc<AsyncFd<OwnedFd>>) -> End {
        let mut loading = true;
        loop {
            tokio::select! {
                biased;
                changed = self.closed.changed() => if changed.is_err() {
                    return End::Closed;
                },
                answer = next_answer(&socket), if loading => {
                    loading = false;
                    self.on_loaded(answer, &socket);
                }
                news = self.news.recv() => match news {
                    Some(News::Of(Event::Exited(exited))) if exited.local_rank == number => {
                        self.client.on_ended();
                        return End::Died(format!("its process has ended: {}", exited.exit));
                    }
                    Some(News::Reaped { local_rank }) => drop(self.guards.remove(&local_rank)),
                    _ => {}
                },
            }
        }
    }

    fn on_loaded(&self, answer: Option<Answer>, socket: &Arc<AsyncFd<OwnedFd>>) {
        let what = &self.client.spec().what;
        match answer {
            Some(Answer::Ready) => {
                if let State::Loading { since } = self.client.state() {
                    let seconds = since.elapsed().as_secs_f64();
                    tracing::info!("a fork server has loaded {what} in {seconds:.1} s; workers are forked from it");
                }
                self.client.on_ready(socket.clone());
            }
            Some(Answer::Refused(reason)) => self.client.on_over(reason),
            // Its guard reports how it ended.
            Some(Answer::Forked) | None => {}
        }
    }

    /// Whether another fork server is to replace one that has ended in this way.
    fn goes_on(&self, number: u32, how: String) -> bool {
        match self.client.state() {
            State::Over(_) => return false, // it reported the reason itself
            State::Ready if number + 1 < MAX_DEATHS => {
                tracing::warn!(
                    "the fork server that has loaded {} has ended and is started again; workers run on: {how}",
                    self.client.spec().what
                );
                return true;
            }
            State::Ready => self.client.on_over(format!("{how}, for the {MAX_DEATHS}th time")),
            State::Loading { .. } => self.client.on_over(how),
        }
        false
    }
}

async fn executed(started: oneshot::Receiver<Start>) -> io::Result<()> {
    match started.await {
        Ok(Start::Executed { .. }) => Ok(()),
        Ok(Start::Failed { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
        Err(_) => Err(io::Error::other("its guard process was killed")),
    }
}

/// `None` once the other end is closed.
async fn next_answer(socket: &AsyncFd<OwnedFd>) -> Option<Answer> {
    loop {
        let mut ready = socket.readable().await.ok()?;
        match socket::receive(socket.get_ref(), MAX_ANSWER_BYTES) {
            Ok((bytes, _)) => return Answer::decode(&bytes),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(_) => return None,
        }
    }
}
