//! The agent's end: starts the template, restarts it when it dies, and sends it spawn requests.

use std::collections::BTreeMap;
use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, retry_on_intr};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout_at;

use super::super::group::{Event, Member, Start};
use super::super::message::Order;
use super::super::spawn::{Guarded, Opened, Ties, message_socket, open_template, spawn_template};
use super::super::spec::WorkerSpec;
use super::request::{Answer, MAX_ANSWER_BYTES, Request};
use super::{TemplateSpec, socket};

/// How long workers wait for the template's imports. Executed workers would import the same, and finish later.
const LOAD_LIMIT: Duration = Duration::from_secs(60);
/// How long a fork may take.
const FORK_LIMIT: Duration = Duration::from_secs(10);
/// A template that has died this often is not restarted.
const MAX_DEATHS: u32 = 5;

/// A running template. Dropping it ends it and kills the workers that were forked from it, a moment later. To know when, use
/// [`end`](Self::end).
#[derive(Debug)]
pub struct Template {
    shared: Arc<Shared>,
    /// Closing the channel ends the keeper.
    keeper: Mutex<Option<(watch::Sender<()>, JoinHandle<()>)>>,
}

impl Template {
    /// Starts the template, and returns at once. Needs a tokio runtime with I/O and time.
    pub fn start(spec: TemplateSpec) -> Template {
        let (closing, closed) = watch::channel(());
        let state = State::Loading { since: Instant::now() };
        let shared = Arc::new(Shared { spec, live: Mutex::default(), state: watch::Sender::new(state) });
        let keeper = tokio::spawn(Keeper::new(shared.clone(), closed).run());
        Template { shared, keeper: Mutex::new(Some((closing, keeper))) }
    }

    /// Ends the template, kills the workers that were forked from it, and waits until no process of them is left.
    pub async fn end(&self) {
        let Some((closing, keeper)) = self.keeper.lock().take() else { return };
        drop(closing);
        if let Err(error) = keeper.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }

    /// Waits while the template imports the modules of these workers, up to a minute from its start. Executed workers would import
    /// them too, and be ready later.
    pub async fn loaded(&self, specs: &[WorkerSpec]) {
        self.shared.loaded(specs).await;
    }

    pub(in super::super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

/// The agent's view of a template, shared by its users.
#[derive(Debug)]
pub(in super::super) struct Shared {
    spec: TemplateSpec,
    live: Mutex<Live>,
    state: watch::Sender<State>,
}

#[derive(Debug, Default)]
struct Live {
    /// The socket of a template that is ready.
    socket: Option<Arc<AsyncFd<OwnedFd>>>,
    /// Why workers are started cold, as last logged.
    told: Option<String>,
}

#[derive(Debug, Clone)]
enum State {
    Loading {
        since: Instant,
    },
    Ready,
    /// There is no template any more, for this reason.
    Over(String),
}

impl Shared {
    async fn loaded(&self, specs: &[WorkerSpec]) {
        if specs.iter().all(|spec| self.spec.why_not(spec).is_some()) {
            return;
        }
        let mut states = self.state.subscribe();
        let since = match *states.borrow() {
            State::Loading { since } => since,
            State::Ready | State::Over(_) => return,
        };
        // Fails if the time is over, or if the keeper has ended.
        let loaded = states.wait_for(|state| !matches!(state, State::Loading { .. }));
        let _ = timeout_at((since + LOAD_LIMIT).into(), loaded).await;
    }

    /// Has the template fork a worker. `None` if the worker has to be executed, which is logged. May take a few ms.
    pub fn hatch(&self, spec: &WorkerSpec, opened: &Opened) -> Option<Guarded> {
        // One at a time: answers come in the order of requests.
        let mut live = self.live.lock();
        let hatched = self.may_hatch(spec).and_then(|()| {
            let socket = live.socket.clone().ok_or_else(|| "the template has ended".to_owned())?;
            hatch(&socket, spec, opened).map_err(|failure| self.failed(&mut live, failure))
        });
        match hatched {
            Ok(guarded) => Some(guarded),
            Err(why) => {
                if live.told.as_ref() != Some(&why) {
                    tracing::warn!(
                        "workers are started cold, not from the template that has loaded {}: {why}",
                        self.spec.what
                    );
                    live.told = Some(why);
                }
                None
            }
        }
    }

    fn may_hatch(&self, spec: &WorkerSpec) -> Result<(), String> {
        if let State::Over(reason) = &*self.state.borrow() {
            return Err(reason.clone());
        }
        if let Some(why) = self.spec.why_not(spec) {
            return Err(format!("worker of local rank {} differs: {why}", spec.local_rank));
        }
        match *self.state.borrow() {
            State::Loading { since } => Err(format!("it is still loading after {:.0?}", since.elapsed())),
            State::Ready | State::Over(_) => Ok(()),
        }
    }

    fn failed(&self, live: &mut Live, failure: Failure) -> String {
        let (reason, over) = match failure {
            Failure::Refused(reason) => (reason, true),
            Failure::Silent => (format!("it has not forked a worker within {FORK_LIMIT:.0?}"), true),
            // The keeper notices its end, and starts another.
            Failure::Lost(errno) => (format!("it does not answer: {errno}"), false),
            Failure::Unasked(reason) => return reason,
        };
        live.socket = None;
        if over {
            self.state.send_replace(State::Over(reason.clone()));
        }
        reason
    }
}

/// Why no worker was forked.
enum Failure {
    Refused(String),
    Silent,
    Lost(Errno),
    /// No request was sent, for a reason in this process. A later request may succeed.
    Unasked(String),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Lost(errno)
    }
}

/// Sends a spawn request. Any failure closes the control socket, so a worker that is forked all the same is killed by its guard.
fn hatch(socket: &AsyncFd<OwnedFd>, spec: &WorkerSpec, opened: &Opened) -> Result<Guarded, Failure> {
    let unasked = |error| Failure::Unasked(format!("a spawn request cannot be sent: {error}"));
    let request = written(spec).map_err(unasked)?;
    let Ties { control, theirs, agent } = Ties::new().map_err(|errno| unasked(errno.into()))?;
    let [input, output, error] = &opened.stdio;
    let mut given =
        vec![request.as_fd(), theirs.as_fd(), input.as_fd(), output.as_fd(), error.as_fd(), opened.null.as_fd()];
    given.extend(agent.as_ref().map(AsFd::as_fd));
    socket::send(socket.get_ref(), &[0], &given)?;
    let deadline = Instant::now() + FORK_LIMIT;
    while !readable_until(socket, deadline)? {
        if Instant::now() >= deadline {
            return Err(Failure::Silent);
        }
    }
    let (bytes, mut fds) = socket::receive(socket.get_ref(), MAX_ANSWER_BYTES)?;
    match (Answer::decode(&bytes), fds.pop()) {
        (Some(Answer::Forked), Some(end)) => Ok(Guarded { control, end: Some(end), child: None }),
        (Some(Answer::Refused(reason)), _) => Err(Failure::Refused(reason)),
        _ => Err(Failure::Lost(Errno::CONNRESET)),
    }
}

/// Writes the spawn request to a file, because it may be longer than a message can be.
fn written(spec: &WorkerSpec) -> io::Result<File> {
    let cwd = env::current_dir()
        .map_err(|error| io::Error::new(error.kind(), format!("its working directory is gone: {error}")))?;
    let mut file = File::from(memfd_create(c"worker", MemfdFlags::CLOEXEC)?);
    file.write_all(&Request::new(spec, &cwd).encode())?;
    Ok(file)
}

fn readable_until(socket: &AsyncFd<OwnedFd>, deadline: Instant) -> Result<bool, Errno> {
    let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).map_err(|_| Errno::INVAL)?;
    let mut fds = [PollFd::new(socket.get_ref(), PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut fds, Some(&left)))? > 0)
}

/// Starts templates, one after the other, and notices their ends.
struct Keeper {
    shared: Arc<Shared>,
    closed: watch::Receiver<()>,
    sender: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    /// Guards, by the number of the template. The guard of a template that has ended stays as long as it has orphans.
    guards: BTreeMap<u32, Member>,
}

/// Why the keeper stops attending to a template.
enum End {
    Closed,
    Died(String),
}

impl Keeper {
    fn new(shared: Arc<Shared>, closed: watch::Receiver<()>) -> Keeper {
        let (sender, events) = mpsc::unbounded_channel();
        Keeper { shared, closed, sender, events, guards: BTreeMap::new() }
    }

    async fn run(mut self) {
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
            if let Some(Event::Gone { local_rank }) = self.events.recv().await {
                self.guards.remove(&local_rank);
            }
        }
    }

    /// Starts a template, and returns this process's end of the socket.
    async fn begin(&mut self, number: u32) -> io::Result<Arc<AsyncFd<OwnedFd>>> {
        self.shared.state.send_replace(State::Loading { since: Instant::now() });
        let mut spec = self.shared.spec.process();
        spec.local_rank = number;
        let (ours, theirs) = message_socket()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        // SAFETY: an owned descriptor stays open and the same for as long as it is owned.
        let socket = Arc::new(unsafe { AsyncFd::register_with_interest(ours, Interest::READABLE) }?);
        let forking = spawn_blocking(move || {
            let opened = open_template(theirs)?;
            let guarded = spawn_template(&spec, &opened).map_err(io::Error::other)?;
            Ok::<_, io::Error>((spec, guarded))
        });
        let (spec, guarded) = forking.await.map_err(io::Error::other)??;
        let (guard, started) = Member::attend(&spec, guarded, None, self.sender.clone())?;
        self.guards.insert(number, guard);
        executed(started).await?;
        Ok(socket)
    }

    /// Runs until the template has ended. Receives its first answer here. Later answers are received by the senders of requests.
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
                event = self.events.recv() => match event {
                    Some(Event::Exited(exited)) if exited.local_rank == number => {
                        self.shared.live.lock().socket = None;
                        return End::Died(format!("its process has ended: {}", exited.exit));
                    }
                    Some(Event::Gone { local_rank }) => drop(self.guards.remove(&local_rank)),
                    _ => {}
                },
            }
        }
    }

    fn on_loaded(&self, answer: Option<Answer>, socket: &Arc<AsyncFd<OwnedFd>>) {
        let what = &self.shared.spec.what;
        match answer {
            Some(Answer::Ready) => {
                if let State::Loading { since } = *self.shared.state.borrow() {
                    let took = since.elapsed().as_secs_f64();
                    tracing::info!("a template has loaded {what} in {took:.1} s; workers are forked from it");
                }
                let mut live = self.shared.live.lock();
                live.socket = Some(socket.clone());
                live.told = None;
                self.shared.state.send_replace(State::Ready);
            }
            Some(Answer::Refused(reason)) => drop(self.shared.state.send_replace(State::Over(reason))),
            // Its guard reports how it ended.
            Some(Answer::Forked) | None => {}
        }
    }

    /// Whether another template is to replace one that has ended in this way.
    fn goes_on(&self, number: u32, how: String) -> bool {
        let state = self.shared.state.borrow().clone();
        match state {
            State::Over(_) => return false, // it reported the reason itself
            State::Ready if number + 1 < MAX_DEATHS => {
                tracing::warn!("the template that has loaded {} is restarted: {how}", self.shared.spec.what);
                return true;
            }
            State::Ready => {
                drop(self.shared.state.send_replace(State::Over(format!("{how}, for the {MAX_DEATHS}th time"))))
            }
            State::Loading { .. } => drop(self.shared.state.send_replace(State::Over(how))),
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
