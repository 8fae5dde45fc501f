//! Which processes of nodes have ended, by their ports ([`crate::net::life`]).
//!
//! A port counts if the coordinator has reached it while its session lived, at the address from which the node has connected. So a
//! firewall that rejects, or an address that is translated, is no death.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::{Semaphore, mpsc};

use super::connections::ConnectionEvent;
use crate::net::life::{has_ended, is_reached};
use crate::rendezvous::messages::message::NodeId;
use crate::rendezvous::run::{Ends, SessionId};

/// Ports that are tried at once.
const AT_ONCE: usize = 128;

/// The ports of nodes, by their sessions.
pub(super) struct Lives {
    events: mpsc::Sender<ConnectionEvent>,
    reached: HashMap<SessionId, SocketAddr>,
    permits: Arc<Semaphore>,
}

impl Lives {
    pub fn new(events: mpsc::Sender<ConnectionEvent>) -> Self {
        Self { events, reached: HashMap::new(), permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// A node has named its port.
    pub fn on_hello(&self, session: SessionId, at: Option<SocketAddr>, ends: Ends) {
        let Some(at) = at.filter(|at| at.ip().to_canonical() == ends.peer.to_canonical() && at.port() > 0) else {
            return;
        };
        self.spawn(async move { is_reached(at).await.then_some(ConnectionEvent::Reached { session, at }) });
    }

    /// The port of a session that lives was reached.
    pub fn on_reached(&mut self, session: SessionId, at: SocketAddr) {
        self.reached.insert(session, at);
    }

    /// A session has ended. `who`: the node that had it, if the coordinator has not ended it.
    pub fn on_gone(&mut self, session: SessionId, who: Option<(String, NodeId)>) {
        if let Some((at, (run_id, node))) = self.reached.remove(&session).zip(who) {
            self.spawn(async move { has_ended(at).await.then_some(ConnectionEvent::Dead { run_id, node }) });
        }
    }

    fn spawn(&self, trying: impl Future<Output = Option<ConnectionEvent>> + Send + 'static) {
        let (events, permits) = (self.events.clone(), self.permits.clone());
        tokio::spawn(async move {
            let Ok(_permit) = permits.acquire_owned().await else { return };
            if let Some(event) = trying.await {
                let _ = events.send(event).await; // the coordinator may have ended
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::net::life::LifePort;

    const LIMIT: Duration = Duration::from_secs(60);
    const HERE: Ends =
        Ends { peer: std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), local: std::net::IpAddr::V4(Ipv4Addr::LOCALHOST) };

    /// A coordinator's ports, and the events that it gets.
    fn lives() -> (Lives, mpsc::Receiver<ConnectionEvent>) {
        let (events, received) = mpsc::channel(16);
        (Lives::new(events), received)
    }

    async fn next(received: &mut mpsc::Receiver<ConnectionEvent>) -> ConnectionEvent {
        timeout(LIMIT, received.recv()).await.unwrap().unwrap()
    }

    fn who() -> Option<(String, NodeId)> {
        Some(("job".to_owned(), NodeId(7)))
    }

    #[tokio::test]
    async fn a_process_whose_port_is_closed_after_its_session_is_dead() {
        let (mut lives, mut received) = lives();
        let life = LifePort::open(HERE.peer).unwrap();
        lives.on_hello(SessionId(1), Some(life.at()), HERE);
        let ConnectionEvent::Reached { session, at } = next(&mut received).await else { panic!() };
        assert_eq!((session, at), (SessionId(1), life.at()));
        lives.on_reached(session, at);
        lives.on_gone(session, who());
        drop(life);
        let ConnectionEvent::Dead { run_id, node } = next(&mut received).await else { panic!() };
        assert_eq!((run_id.as_str(), node), ("job", NodeId(7)));
    }

    #[tokio::test]
    async fn a_port_that_was_never_reached_proves_nothing() {
        let (mut lives, mut received) = lives();
        let life = LifePort::open(HERE.peer).unwrap();
        let at = life.at();
        let elsewhere = Ends { peer: Ipv4Addr::new(192, 0, 2, 1).into(), ..HERE };
        lives.on_hello(SessionId(1), Some(at), elsewhere);
        lives.on_hello(SessionId(2), Some((HERE.peer, 0).into()), HERE);
        drop(life);
        lives.on_hello(SessionId(3), Some(at), HERE); // as if a firewall rejected
        (1..=3).for_each(|session| lives.on_gone(SessionId(session), who()));
        // One that the coordinator has ended is nobody's loss.
        lives.on_reached(SessionId(4), at);
        lives.on_gone(SessionId(4), None);
        let permits = lives.permits.clone();
        drop(lives);
        let all = timeout(LIMIT, permits.acquire_many(AT_ONCE as u32)).await.unwrap();
        drop(all);
        assert!(timeout(LIMIT, received.recv()).await.unwrap().is_none());
    }
}
