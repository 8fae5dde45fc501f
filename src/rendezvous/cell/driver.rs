//! A [`Session`] over a shared cell, and its driver.
//!
//! The driver makes no call to a backend. Its caller, a thread, takes each [`Step`], performs it on the backend, and reports the result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::node::{CellCommand, CellNode};
use crate::clock::until;
use crate::rendezvous::messages::message::Hello;
use crate::rendezvous::node::session::Session;
use crate::rendezvous::node::shared::{MachineSlot, Shared};
use crate::rendezvous::node::status_log::StatusLog;
use crate::rendezvous::node::{JoinError, NodeMachine, View};

/// The next task of the backend's caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Perform this command and report the result.
    Perform(CellCommand),
    /// The node has left. No step follows.
    Stop,
}

impl MachineSlot for CellNode {
    fn machine(&mut self) -> &mut NodeMachine {
        &mut self.machine
    }

    fn on_request(&mut self, now: Instant) {
        self.on_request(now);
    }
}

/// The backend's end of a session over a cell.
#[derive(Debug)]
pub struct CellDriver {
    node: Arc<Mutex<CellNode>>,
    shared: Arc<Shared>,
    status_log: Mutex<StatusLog>,
}

impl CellDriver {
    /// Create a node and its session. `hello` must have the node's address. `serves`: as for [`CellNode::new`]. The backend is not called
    /// before the first request.
    pub fn new(hello: Hello, serves: bool) -> (Session, Self) {
        let node = Arc::new(Mutex::new(CellNode::new(hello, serves, Instant::now())));
        let session = Session::of(Arc::clone(&node) as Arc<Mutex<dyn MachineSlot>>);
        let shared = Arc::clone(session.shared());
        (session, Self { node, shared, status_log: Mutex::default() })
    }

    /// Wait for the next step. Only one caller may use this.
    pub async fn next_step(&self) -> Step {
        loop {
            let (command, left, deadline, notes, news) = {
                let mut node = self.node.lock();
                let now = Instant::now();
                node.on_tick(now);
                let mut status_log = self.status_log.lock();
                let mut news = status_log.look(node.machine(), now);
                news.extend(node.take_warnings());
                let deadline =
                    [node.next_deadline(), status_log.next_deadline(node.machine())].into_iter().flatten().min();
                (node.take_command(), node.has_left(), deadline, node.take_notes(), news)
            };
            for text in news {
                tracing::warn!("{text}");
            }
            for text in notes {
                tracing::info!("{text}");
            }
            // A join may have timed out just now.
            self.shared.on_step();
            match command {
                Some(command) => return Step::Perform(command),
                None if left => {
                    self.shared.gone.send_replace(true);
                    return Step::Stop;
                }
                None => tokio::select! {
                    () = self.shared.requested.notified() => {}
                    () = until(deadline) => {}
                },
            }
        }
    }

    /// Report the result of a step.
    pub fn apply(&self, what: impl FnOnce(&mut CellNode, Instant)) {
        what(&mut self.node.lock(), Instant::now());
        self.shared.requested.notify_one();
        self.shared.on_step();
    }

    /// The view as of a read no longer than `age` ago. While the backend fails, the view of the last read is returned at once.
    ///
    /// # Errors
    /// [`JoinError::Connection`] if the backend fails and has never been read.
    pub async fn fresh_view(&self, age: Duration) -> Result<View, JoinError> {
        let since = Instant::now().checked_sub(age);
        let stale = |node: &CellNode| node.looked_at().is_none_or(|at| since.is_some_and(|since| at < since));
        let mut steps = self.shared.steps.subscribe();
        self.apply(|node, now| {
            if stale(node) && !node.has_left() {
                node.look(now);
            }
        });
        loop {
            {
                let node = self.node.lock();
                let known = node.looked_at().is_some();
                let over = node.has_left() || node.view().failed.is_some();
                match node.failing() {
                    Some(error) if !known && !over => return Err(JoinError::connection(error)),
                    None if stale(&node) && !over => {}
                    _ => return Ok(node.view().clone()),
                }
            }
            // The sender lives as long as `self`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }
}
