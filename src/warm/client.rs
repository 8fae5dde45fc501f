//! Requests to a fork server, and what the agent knows of the server.

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
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::timeout_at;

use super::message::{Answer, MAX_ANSWER_BYTES, Request};
use super::socket;
use super::spec::TemplateSpec;
use crate::workers::{Deadline, ForkWorker, Guarded, Opened, Ties, WorkerSpec};

/// How long workers wait for the fork server's imports. Executed workers would import the same, and finish later.
const LOAD_LIMIT: Duration = Duration::from_secs(60);
/// How long the fork of one worker by a fork server may take.
const FORK_LIMIT: Duration = Duration::from_secs(10);

/// The agent's view of a fork server, shared by the server's users and its supervisor.
#[derive(Debug)]
pub(super) struct Client {
    spec: TemplateSpec,
    live: Mutex<Live>,
    state: watch::Sender<State>,
}

#[derive(Debug, Default)]
struct Live {
    /// The socket of a fork server that is ready.
    socket: Option<Arc<AsyncFd<OwnedFd>>>,
    /// Why workers are started cold, as last logged.
    logged: Option<String>,
}

/// The state of the fork server that is running, or ran last.
#[derive(Debug, Clone)]
pub(super) enum State {
    Loading {
        since: Instant,
    },
    Ready,
    /// There is no fork server any more, for this reason.
    Over(String),
}

impl Client {
    pub fn new(spec: TemplateSpec) -> Client {
        let state = State::Loading { since: Instant::now() };
        Client { spec, live: Mutex::default(), state: watch::Sender::new(state) }
    }

    pub fn spec(&self) -> &TemplateSpec {
        &self.spec
    }

    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    pub fn on_started(&self) {
        self.state.send_replace(State::Loading { since: Instant::now() });
    }

    /// The fork server accepts spawn requests at this socket.
    pub fn on_ready(&self, socket: Arc<AsyncFd<OwnedFd>>) {
        let mut live = self.live.lock();
        live.socket = Some(socket);
        live.logged = None;
        self.state.send_replace(State::Ready);
    }

    pub fn on_ended(&self) {
        self.live.lock().socket = None;
    }

    /// There will be no other fork server, for this reason.
    pub fn on_over(&self, reason: String) {
        self.state.send_replace(State::Over(reason));
    }

    /// Waits as [`Self::ready`] does, if any of these workers can be forked.
    pub async fn loaded(&self, specs: &[WorkerSpec]) {
        if specs.iter().any(|spec| self.spec.why_not(spec).is_none()) {
            self.ready().await;
        }
    }

    /// Waits while the fork server imports its modules, up to [`LOAD_LIMIT`] from its start.
    pub async fn ready(&self) {
        let mut states = self.state.subscribe();
        let since = match *states.borrow() {
            State::Loading { since } => since,
            State::Ready | State::Over(_) => return,
        };
        // Fails if the time is over, or if the supervisor has ended.
        let loaded = states.wait_for(|state| !matches!(state, State::Loading { .. }));
        let _ = timeout_at((since + LOAD_LIMIT).into(), loaded).await;
    }

    fn may_fork(&self, spec: &WorkerSpec) -> Result<(), String> {
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
            // The supervisor notices its end, and starts another.
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

impl ForkWorker for Client {
    /// A worker that cannot be forked is logged.
    fn fork_worker(&self, spec: &WorkerSpec, opened: &Opened, deadline: Option<&Deadline>) -> Option<Guarded> {
        // One at a time: answers come in the order of requests.
        let mut live = self.live.lock();
        let forked = self.may_fork(spec).and_then(|()| {
            let socket = live.socket.clone().ok_or_else(|| "the fork server has ended".to_owned())?;
            request(&socket, spec, opened, deadline).map_err(|failure| self.failed(&mut live, failure))
        });
        match forked {
            Ok(guarded) => Some(guarded),
            Err(why) => {
                if live.logged.as_ref() != Some(&why) {
                    tracing::warn!(
                        "workers are started cold, not forked from the fork server that has loaded {}: {why}",
                        self.spec.what
                    );
                    live.logged = Some(why);
                }
                None
            }
        }
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
fn request(
    socket: &AsyncFd<OwnedFd>,
    spec: &WorkerSpec,
    opened: &Opened,
    deadline: Option<&Deadline>,
) -> Result<Guarded, Failure> {
    let unasked = |error| Failure::Unasked(format!("a spawn request cannot be sent: {error}"));
    let content = written(spec, deadline.is_some()).map_err(unasked)?;
    let Ties { control, theirs, agent } = Ties::new().map_err(|errno| unasked(errno.into()))?;
    let [input, output, error] = &opened.stdio;
    let mut given =
        vec![content.as_fd(), theirs.as_fd(), input.as_fd(), output.as_fd(), error.as_fd(), opened.null.as_fd()];
    given.extend(deadline.map(AsFd::as_fd));
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
fn written(spec: &WorkerSpec, has_deadline: bool) -> io::Result<File> {
    let cwd = env::current_dir()
        .map_err(|error| io::Error::new(error.kind(), format!("its working directory is gone: {error}")))?;
    let mut file = File::from(memfd_create(c"worker", MemfdFlags::CLOEXEC)?);
    file.write_all(&Request::new(spec, &cwd, has_deadline).encode())?;
    Ok(file)
}

fn readable_until(socket: &AsyncFd<OwnedFd>, deadline: Instant) -> Result<bool, Errno> {
    let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).map_err(|_| Errno::INVAL)?;
    let mut fds = [PollFd::new(socket.get_ref(), PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut fds, Some(&left)))? > 0)
}
