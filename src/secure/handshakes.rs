//! Handshakes of peers that have not authenticated yet: as many at once as there are permits, each a task ([`BoundedTasks`]) on
//! [`super::helpers`].

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use super::Protection;
use super::refusals::{Kind, Refusal};
use crate::net::admission::Bounds;
use crate::net::admission::tasks::{BoundedTasks, Ending, Task};
use crate::open_files::{WAITING_TO_ONE, pending_handshake_permits};

/// How long a handshake keeps its permit while others wait for one. A handshake takes two or three times the way there and back.
const PATIENCE: Duration = Duration::from_millis(500);
/// Permits that an address keeps once somebody there has authenticated. A node needs one or two at a time.
const KEPT: usize = 4;

/// The handshakes at one listener. Dropping it ends them.
pub struct Handshakes<S> {
    tasks: BoundedTasks<S>,
    protection: Arc<Protection>,
}

impl<S> fmt::Debug for Handshakes<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshakes").finish_non_exhaustive()
    }
}

impl<S: Send + 'static> Handshakes<S> {
    /// `begin` makes a connection's handshake, which runs on `helpers`, and has to own their threads. `lost` is called for each that got
    /// no permit, or lost it. Addresses that have authenticated at any acceptor of this `protection` keep permits.
    pub fn new(
        helpers: Handle,
        protection: Arc<Protection>,
        begin: impl Fn(S) -> Task + Send + Sync + 'static,
        lost: impl Fn(IpAddr, &Refusal) + Send + Sync + 'static,
    ) -> Self {
        let permits = pending_handshake_permits();
        let bounds = Bounds { permits, waiting: WAITING_TO_ONE * permits, kept: KEPT, patience: PATIENCE };
        let noted = Arc::clone(&protection);
        let ended = move |address, ending| match ending {
            Ending::Authenticated => noted.note_authenticated(address),
            Ending::Refused => {
                lost(address, &Refusal::new(Kind::Crowded, "too many other connections wait to authenticate"));
            }
            Ending::Displaced => {
                lost(address, &Refusal::new(Kind::Late, "it did not authenticate while others waited"))
            }
        };
        Self { tasks: BoundedTasks::new(helpers, bounds, begin, ended), protection }
    }

    /// A connection has arrived from this address.
    pub fn arrived(&self, connection: S, address: IpAddr) {
        self.tasks.arrived(connection, address, self.protection.has_authenticated(address));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Instant;

    use parking_lot::Mutex;
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
        let begin = move |(number, ends): (usize, bool)| -> Task {
            let _owned = &helpers; // as an acceptor's handshakes own theirs, which end after them
            let to = to.clone();
            Box::pin(async move {
                if !ends {
                    std::future::pending::<()>().await;
                }
                let thread = std::thread::current().name().unwrap_or_default().to_owned();
                to.send((number, thread)).is_ok()
            })
        };
        let record = move |address, _: &Refusal| lost.lock().push(address);
        (Handshakes::new(runs_on, protection, begin, record), met)
    }

    #[tokio::test]
    async fn an_address_that_holds_and_wants_all_permits_keeps_nobody_out() {
        let lost = Arc::new(Mutex::new(Vec::new()));
        let (handshakes, mut met) = handshakes(Arc::clone(&lost));
        let (many, nodes) = (8 * pending_handshake_permits(), 200);
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
            assert!(thread.starts_with("handshake-"), "{thread}");
            served.insert(number);
        }
        let until = Instant::now() + PATIENT;
        while !(0..nodes).all(|number| handshakes.protection.has_authenticated(address(number))) {
            assert!(Instant::now() < until, "addresses that have authenticated are noted");
            tokio::task::yield_now().await;
        }
        assert!(!handshakes.protection.has_authenticated(GREEDY));
        assert!(lost.lock().iter().all(|address| *address == GREEDY), "nobody else has lost anything");
        // Connections that are being closed hold permits for which others wait, beyond the bound, until they have ended.
        let until = Instant::now() + PATIENT;
        loop {
            let (held, waiting) = handshakes.tasks.counts();
            assert!(held <= pending_handshake_permits(), "{held}");
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
        for number in 0..pending_handshake_permits() {
            handshakes.arrived((number, false), GREEDY);
        }
        handshakes.arrived((7, true), GREEDY);
        assert_eq!(timeout(PATIENT, met.recv()).await.unwrap().unwrap().0, 7);
        drop(handshakes);
        assert_eq!(timeout(PATIENT, met.recv()).await.unwrap(), None, "no handshake is left");
    }
}
