//! A task for each connection that [`Admission`] gives a permit.
//!
//! Connections arrive on the thread that accepts them, and those that get no permit are closed there. Tasks may run on other threads.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::{Admission, Bounds, ConnectionId, Effect};

/// What is done with a connection while it holds a permit. True: its peer has authenticated.
pub type Task = Pin<Box<dyn Future<Output = bool> + Send>>;

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It got no permit.
    Refused,
    /// It lost its permit.
    Displaced,
    /// Its peer has authenticated.
    Authenticated,
}

/// The tasks of the connections at one listener. Dropping it ends them.
pub struct BoundedTasks<S>(Arc<Inner<S>>);

struct Inner<S> {
    state: Mutex<State<S>>,
    runtime: Handle,
    patience: Duration,
    begin: Box<dyn Fn(S) -> Task + Send + Sync>,
    ended: Box<dyn Fn(IpAddr, Ending) + Send + Sync>,
}

struct State<S> {
    admission: Admission,
    waiting: HashMap<ConnectionId, (S, IpAddr)>,
    /// Dropping the sender ends the task.
    running: HashMap<ConnectionId, (Option<oneshot::Sender<Infallible>>, IpAddr)>,
}

/// What follows from an event, to be carried out without the lock.
enum Act<S> {
    Begin(ConnectionId, S, oneshot::Receiver<Infallible>),
    Lose(IpAddr, Ending, Option<S>),
}

impl<S> fmt::Debug for BoundedTasks<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundedTasks").finish_non_exhaustive()
    }
}

impl<S: Send + 'static> BoundedTasks<S> {
    /// `begin` makes a connection's task, which runs on `runtime`. `ended` gets the outcome of each connection. `begin` has to own the
    /// threads of `runtime` if they could end first: each task would end as it begins, and begin the next one.
    pub fn new(
        runtime: Handle,
        bounds: Bounds,
        begin: impl Fn(S) -> Task + Send + Sync + 'static,
        ended: impl Fn(IpAddr, Ending) + Send + Sync + 'static,
    ) -> Self {
        let state = State { admission: Admission::new(bounds), waiting: HashMap::new(), running: HashMap::new() };
        let (begin, ended) = (Box::new(begin), Box::new(ended));
        Self(Arc::new(Inner { state: Mutex::new(state), runtime, patience: bounds.patience, begin, ended }))
    }

    /// A connection has arrived from this address, where somebody has authenticated before or not.
    pub fn arrived(&self, connection: S, address: IpAddr, is_authenticated: bool) {
        Inner::with(&self.0, |state| {
            let id = state.admission.arrived(address, is_authenticated, Instant::now());
            state.waiting.insert(id, (connection, address));
        });
    }

    /// Connections that hold a permit, and connections that wait.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        self.0.state.lock().admission.counts()
    }
}

impl<S: Send + 'static> Inner<S> {
    fn with(this: &Arc<Self>, event: impl FnOnce(&mut State<S>)) {
        let mut acts = Vec::new();
        {
            let mut state = this.state.lock();
            event(&mut state);
            state.carry_out(&mut acts);
        }
        for act in acts {
            match act {
                Act::Begin(id, connection, closed) => {
                    let (running, task) = (Running(Arc::downgrade(this), id), (this.begin)(connection));
                    this.runtime.spawn(running.run(task, closed, this.patience));
                }
                Act::Lose(address, ending, connection) => {
                    drop(connection);
                    (this.ended)(address, ending);
                }
            }
        }
    }
}

impl<S> State<S> {
    fn carry_out(&mut self, acts: &mut Vec<Act<S>>) {
        while let Some(effect) = self.admission.poll_effect() {
            match effect {
                Effect::Admit(id) => {
                    let Some((connection, address)) = self.waiting.remove(&id) else { continue };
                    let (close, closed) = oneshot::channel();
                    self.running.insert(id, (Some(close), address));
                    acts.push(Act::Begin(id, connection, closed));
                }
                Effect::Refuse(id) => {
                    let Some((connection, address)) = self.waiting.remove(&id) else { continue };
                    acts.push(Act::Lose(address, Ending::Refused, Some(connection)));
                }
                Effect::Close(id) => {
                    let Some((close, address)) = self.running.get_mut(&id) else { continue };
                    *close = None;
                    acts.push(Act::Lose(*address, Ending::Displaced, None));
                }
            }
        }
    }
}

/// A task that holds a permit, until this is dropped.
struct Running<S: Send + 'static>(Weak<Inner<S>>, ConnectionId);

impl<S: Send + 'static> Running<S> {
    async fn run(self, mut task: Task, mut closed: oneshot::Receiver<Infallible>, patience: Duration) {
        let has_authenticated = tokio::select! {
            biased;
            _ = &mut closed => false,
            has = &mut task => has,
            () = sleep(patience) => {
                if let Some(inner) = self.0.upgrade() {
                    Inner::with(&inner, |state| state.admission.tick(Instant::now()));
                }
                let (mut task, mut closed) = (pin!(task), pin!(closed));
                tokio::select! {
                    biased;
                    _ = &mut closed => false,
                    has = &mut task => has,
                }
            }
        };
        if has_authenticated && let Some(inner) = self.0.upgrade() {
            let address = inner.state.lock().running.get(&self.1).map(|(_, address)| *address);
            address.into_iter().for_each(|address| (inner.ended)(address, Ending::Authenticated));
        }
        // Its connection is closed, or somebody else's, before the permit is free.
    }
}

impl<S: Send + 'static> Drop for Running<S> {
    fn drop(&mut self) {
        let Some(inner) = self.0.upgrade() else { return };
        Inner::with(&inner, |state| {
            state.running.remove(&self.1);
            state.admission.ended(self.1, Instant::now());
        });
    }
}
