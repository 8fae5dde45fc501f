//! Handshakes of peers that have not authenticated yet: as many at once as there are permits. [`Admission`] decides whose.
//!
//! Connections arrive on the thread that accepts them, and those that get no permit are closed there. Handshakes run on
//! [`super::helpers`].

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

use super::Protection;
use super::refusals::{Kind, Refusal};
use crate::net::admission::{Admission, Bounds, ConnectionId, Effect};
use crate::open_files::{WAITING_TO_ONE, places_for_strangers};

/// How long a handshake keeps its permit while others wait for one. A handshake takes two or three times the way there and back.
const PATIENCE: Duration = Duration::from_millis(500);
/// Permits that an address keeps once somebody there has authenticated. A node needs one or two at a time.
const KEPT: usize = 4;

/// A handshake. True once its peer has authenticated.
pub type Handshake = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Is told that a connection from this address got no permit, or lost it.
type Lost = dyn Fn(IpAddr, &Refusal) + Send + Sync;

/// The handshakes at one listener. Dropping it ends them.
pub struct Handshakes<S>(Arc<Inner<S>>);

struct Inner<S> {
    state: Mutex<State<S>>,
    helpers: Handle,
    protection: Arc<Protection>,
    begin: Box<dyn Fn(S) -> Handshake + Send + Sync>,
    lost: Box<Lost>,
}

struct State<S> {
    admission: Admission,
    waiting: HashMap<ConnectionId, (S, IpAddr)>,
    /// Dropping the sender ends the handshake.
    running: HashMap<ConnectionId, (Option<oneshot::Sender<Infallible>>, IpAddr)>,
}

/// What follows from an event, to be carried out without the lock.
enum Act<S> {
    Begin(ConnectionId, S, oneshot::Receiver<Infallible>),
    Lose(IpAddr, Refusal, Option<S>),
}

impl<S> fmt::Debug for Handshakes<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshakes").finish_non_exhaustive()
    }
}

impl<S: Send + 'static> Handshakes<S> {
    /// `begin` makes a connection's handshake, which runs on `helpers`. `lost` is told of each that got no permit, or lost it. Addresses
    /// that have authenticated at any door of this `protection` keep permits. `begin` has to own the threads of `helpers`: if they ended
    /// first, each handshake would end as it begins, and begin the next one.
    pub fn new(
        helpers: Handle,
        protection: Arc<Protection>,
        begin: impl Fn(S) -> Handshake + Send + Sync + 'static,
        lost: impl Fn(IpAddr, &Refusal) + Send + Sync + 'static,
    ) -> Self {
        let permits = places_for_strangers();
        let bounds = Bounds { permits, waiting: WAITING_TO_ONE * permits, kept: KEPT, patience: PATIENCE };
        let state = State { admission: Admission::new(bounds), waiting: HashMap::new(), running: HashMap::new() };
        let (begin, lost) = (Box::new(begin), Box::new(lost));
        Self(Arc::new(Inner { state: Mutex::new(state), helpers, protection, begin, lost }))
    }

    /// A connection has arrived from this address.
    pub fn arrived(&self, connection: S, address: IpAddr) {
        let is_authenticated = self.0.protection.has_authenticated(address);
        Inner::with(&self.0, |state| {
            let id = state.admission.arrived(address, is_authenticated, Instant::now());
            state.waiting.insert(id, (connection, address));
        });
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
                    let (running, handshake) = (Running(Arc::downgrade(this), id), (this.begin)(connection));
                    this.helpers.spawn(running.run(handshake, closed));
                }
                Act::Lose(address, refusal, connection) => {
                    drop(connection);
                    (this.lost)(address, &refusal);
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
                    let refusal = Refusal::new(Kind::Crowded, "too many others wait to prove themselves");
                    acts.push(Act::Lose(address, refusal, Some(connection)));
                }
                Effect::Close(id) => {
                    let Some((close, address)) = self.running.get_mut(&id) else { continue };
                    *close = None;
                    acts.push(Act::Lose(*address, Refusal::new(Kind::Late, "no proof while others waited"), None));
                }
            }
        }
    }
}

/// A handshake that holds a permit, until this is dropped.
struct Running<S: Send + 'static>(Weak<Inner<S>>, ConnectionId);

impl<S: Send + 'static> Running<S> {
    async fn run(self, mut handshake: Handshake, mut closed: oneshot::Receiver<Infallible>) {
        let has_authenticated = tokio::select! {
            biased;
            _ = &mut closed => false,
            has = &mut handshake => has,
            () = sleep(PATIENCE) => {
                if let Some(inner) = self.0.upgrade() {
                    Inner::with(&inner, |state| state.admission.tick(Instant::now()));
                }
                let (mut handshake, mut closed) = (pin!(handshake), pin!(closed));
                tokio::select! {
                    biased;
                    _ = &mut closed => false,
                    has = &mut handshake => has,
                }
            }
        };
        if has_authenticated
            && let Some(inner) = self.0.upgrade()
            && let Some((_, address)) = inner.state.lock().running.get(&self.1)
        {
            inner.protection.note_authenticated(*address);
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;
    use crate::secure::helpers::Helpers;
    use crate::secure::token::Token;

    const PATIENT: Duration = Duration::from_secs(60);
    const GREEDY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    /// The address of a connection of this number that is not the greedy one's.
    fn address(number: usize) -> IpAddr {
        [10, 1, (number / 250) as u8, (number % 250) as u8].into()
    }

    /// A connection's number, and the thread on which its handshake ran.
    type Met = (usize, String);

    /// Handshakes of which those of the greedy address never end.
    fn handshakes(lost: Arc<Mutex<Vec<IpAddr>>>) -> (Handshakes<(usize, bool)>, mpsc::UnboundedReceiver<Met>) {
        let helpers = Helpers::shared().unwrap();
        let protection = Arc::new(Protection::by_token(Token::random().unwrap()).unwrap());
        let (to, met) = mpsc::unbounded_channel();
        let runs_on = helpers.handle().clone();
        let begin = move |(number, ends): (usize, bool)| -> Handshake {
            let _owned = &helpers; // as a door's handshakes own theirs, which end after them
            let to = to.clone();
            Box::pin(async move {
                if !ends {
                    std::future::pending::<()>().await;
                }
                let thread = std::thread::current().name().unwrap_or_default().to_owned();
                to.send((number, thread)).is_ok()
            })
        };
        let told = move |address, _: &Refusal| lost.lock().push(address);
        (Handshakes::new(runs_on, protection, begin, told), met)
    }

    #[tokio::test]
    async fn an_address_that_holds_and_wants_all_permits_keeps_nobody_out() {
        let lost = Arc::new(Mutex::new(Vec::new()));
        let (handshakes, mut met) = handshakes(Arc::clone(&lost));
        let (many, nodes) = (8 * places_for_strangers(), 200);
        for number in 0..many {
            handshakes.arrived((number, false), GREEDY);
        }
        for number in 0..nodes {
            handshakes.arrived((number, true), address(number));
            handshakes.arrived((number, false), GREEDY);
        }
        let mut served = HashSet::new();
        while served.len() < nodes {
            let (number, thread) = timeout(PATIENT, met.recv()).await.unwrap().unwrap();
            assert!(thread.starts_with("door-"), "{thread}");
            served.insert(number);
        }
        let until = Instant::now() + PATIENT;
        while !(0..nodes).all(|number| handshakes.0.protection.has_authenticated(address(number))) {
            assert!(Instant::now() < until, "addresses that have authenticated are noted");
            tokio::task::yield_now().await;
        }
        assert!(!handshakes.0.protection.has_authenticated(GREEDY));
        assert!(lost.lock().iter().all(|address| *address == GREEDY), "nobody else has lost anything");
        // Connections that are being closed hold permits for which others wait, beyond the bound, until they have ended.
        let until = Instant::now() + PATIENT;
        loop {
            let (held, waiting) = handshakes.0.state.lock().admission.counts();
            assert!(held <= places_for_strangers(), "{held}");
            if waiting <= WAITING_TO_ONE * held {
                break;
            }
            assert!(Instant::now() < until, "{held} {waiting}");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn whoever_is_slow_yields_to_the_next_of_the_same_address_and_all_end_with_the_listener() {
        let (handshakes, mut met) = handshakes(Arc::default());
        for number in 0..places_for_strangers() {
            handshakes.arrived((number, false), GREEDY);
        }
        handshakes.arrived((7, true), GREEDY);
        assert_eq!(timeout(PATIENT, met.recv()).await.unwrap().unwrap().0, 7);
        drop(handshakes);
        assert_eq!(timeout(PATIENT, met.recv()).await.unwrap(), None, "no handshake is left");
    }
}
