//! Lets callers wait for a [`CasNode`], and its backend's caller wait for work. Makes no call to a backend itself: whoever owns
//! it (a thread of the binding) takes each [`Step`], performs it, and reports how it ended.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::node::{CasCommand, CasNode, Liveness};
use crate::rendezvous::node::report::{Reported, Reporter};
use crate::rendezvous::node::view::{JoinError, View};
use crate::rendezvous::protocol::message::{Hello, Placement, Verdict};
use crate::wait::until;

/// What the backend's caller does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Perform this and report.
    Perform(CasCommand),
    /// Nothing more will come.
    Stop,
}

/// A node's place at a rendezvous over a shared cell.
#[derive(Debug)]
pub struct CasSession {
    node: Mutex<CasNode>,
    /// Something was asked or reported: the backend's caller has to look.
    asked: Notify,
    /// Counts what was asked and reported: whoever waits looks again.
    steps: watch::Sender<u64>,
    /// Held while a join is pending.
    turn: tokio::sync::Mutex<()>,
    reporter: Mutex<Reporter>,
}

impl CasSession {
    /// A node that introduces itself with `hello`, which has its address. Nothing is asked of the backend yet.
    pub fn new(hello: Hello) -> Self {
        let node = CasNode::new(hello, Liveness::Counters, Instant::now());
        let turn = tokio::sync::Mutex::default();
        let reporter = Mutex::default();
        Self { node: Mutex::new(node), asked: Notify::new(), steps: watch::Sender::new(0), turn, reporter }
    }

    /// Wait for what the backend has to do. For one caller only.
    pub async fn next_step(&self) -> Step {
        loop {
            let (command, left, deadline, notes, news) = {
                let mut node = self.node.lock();
                let now = Instant::now();
                node.on_tick(now);
                let mut reporter = self.reporter.lock();
                let news = reporter.look(&*node, now);
                let deadline = [node.next_deadline(), reporter.next_deadline(&*node)].into_iter().flatten().min();
                (node.take_command(), node.has_left(), deadline, node.take_notes(), news)
            };
            for text in news {
                tracing::warn!("{text}");
            }
            for text in notes {
                tracing::info!("{text}");
            }
            // A join may just have ended by its time.
            self.steps.send_modify(|step| *step += 1);
            match (command, deadline) {
                (Some(command), _) => return Step::Perform(command),
                (None, _) if left => return Step::Stop,
                (None, deadline) => {
                    tokio::select! {
                        () = self.asked.notified() => {}
                        () = until(deadline) => {}
                    }
                }
            }
        }
    }

    /// Ask or report something.
    pub fn tell<T>(&self, what: impl FnOnce(&mut CasNode, Instant) -> T) -> T {
        let told = what(&mut self.node.lock(), Instant::now());
        self.asked.notify_one();
        self.steps.send_modify(|step| *step += 1);
        told
    }

    /// Take part in the next round. `store_port` is where this node's empty worker store listens. Dropping the future gives
    /// the place up.
    ///
    /// # Errors
    /// [`JoinError`]; the session stays usable after `Timeout`, `Connection` and `Busy`.
    pub async fn join(
        &self,
        store_port: u16,
        node_rank: Option<u32>,
        timeout: Duration,
    ) -> Result<Placement, JoinError> {
        let Ok(_turn) = self.turn.try_lock() else { return Err(JoinError::Busy) };
        self.tell(|node, now| node.join(store_port, node_rank, timeout, now));
        let _abandoned_when_dropped = Pending(self);
        self.when(|node| node.take_outcome()).await
    }

    /// How things stand, from memory.
    pub fn view(&self) -> View {
        self.node.lock().view().clone()
    }

    /// How things stand, as read from the backend no longer than `age` ago. A backend that fails at the moment is no reason
    /// to wait once it has been read: what was read last holds until it is back, or this node must stop.
    ///
    /// # Errors
    /// [`JoinError::Connection`]: the backend fails and has never been read.
    pub async fn fresh_view(&self, age: Duration) -> Result<View, JoinError> {
        let since = Instant::now().checked_sub(age);
        let stale = |node: &CasNode| node.looked_at().is_none_or(|at| since.is_some_and(|since| at < since));
        self.tell(|node, now| {
            if stale(node) && !node.has_left() {
                node.look(now);
            }
        });
        self.when(|node| {
            let known = node.looked_at().is_some();
            match node.failing() {
                Some(error) if !known => Some(Err(JoinError::Connection(error.to_owned()))),
                Some(_) => Some(Ok(node.view().clone())),
                None if !stale(node) || node.has_left() || node.view().failed.is_some() => {
                    Some(Ok(node.view().clone()))
                }
                None => None,
            }
        })
        .await
    }

    /// For a node that waits: what for.
    pub fn progress(&self) -> Option<String> {
        self.node.lock().progress()
    }

    /// End the job for everybody. Waits until that is written, at most `limit`.
    ///
    /// # Errors
    /// [`JoinError`]: `Timeout`, or why this node can no longer take part.
    pub async fn close(&self, verdict: &Verdict, limit: Duration) -> Result<(), JoinError> {
        self.tell(|node, now| node.close(verdict, now));
        let written = self.when(|node| match &node.view().failed {
            Some(error) => Some(Err(error.clone())),
            None => node.view().closed.is_some().then_some(Ok(())),
        });
        timeout(limit, written).await.unwrap_or_else(|_| {
            let progress = match self.node.lock().failing() {
                Some(error) => format!("the rendezvous could not be closed: {error}"),
                None => "the rendezvous could not be closed: the backend does not answer".to_owned(),
            };
            Err(JoinError::Timeout { after: limit, progress })
        })
    }

    /// Say goodbye, waiting at most `limit` for it to be written. Whether it was. A pending join ends.
    pub async fn leave(&self, reason: &str, limit: Duration) -> bool {
        self.tell(|node, now| node.leave(reason, now));
        timeout(limit, self.when(|node| node.has_left().then_some(()))).await.is_ok()
    }

    /// Wait until the node has an answer.
    async fn when<T>(&self, mut answer: impl FnMut(&mut CasNode) -> Option<T>) -> T {
        let mut steps = self.steps.subscribe();
        loop {
            if let Some(answer) = answer(&mut self.node.lock()) {
                return answer;
            }
            // The sender lives as long as `self`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }
}

/// A join under way.
struct Pending<'a>(&'a CasSession);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.tell(CasNode::abandon);
    }
}

impl Reported for CasNode {
    fn waits(&self) -> Option<(Instant, String)> {
        let since = self.waits_since()?;
        let what = match (self.failing(), self.progress()) {
            (Some(error), _) => format!("the backend fails: {error}"),
            (None, Some(progress)) => progress,
            (None, None) => "the round is not complete".to_owned(),
        };
        Some((since, what))
    }

    fn does_without(&self) -> Option<(Instant, String)> {
        None
    }

    fn in_reach(&self) -> bool {
        self.failing().is_none()
    }
}
