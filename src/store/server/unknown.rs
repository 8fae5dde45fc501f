//! Connections to a server of other protocols that have not said which one they speak.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::net::admission::{Admission, Bounds, ConnectionId, Effect};
use crate::store::table::ConnId;

/// Bounds for such connections ([`Admission`]).
#[derive(Clone)]
pub struct Unknown {
    /// How many there may be.
    pub most: usize,
    /// Whether somebody at this address has authenticated before. Must not wait.
    pub has_authenticated: Arc<dyn Fn(IpAddr) -> bool + Send + Sync>,
}

impl fmt::Debug for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unknown").field("most", &self.most).finish_non_exhaustive()
    }
}

/// How long such a connection keeps its permit while others of its address want one. A client that was just accepted is about to speak.
const SPEAKS_WITHIN: Duration = Duration::from_millis(100);
/// Permits that an address keeps once somebody there has authenticated.
const KEPT: usize = 4;

/// The connections of one server.
#[derive(Debug)]
pub(super) struct Unknowns {
    options: Unknown,
    admission: Admission,
    connections: HashMap<ConnectionId, ConnId>,
}

impl Unknowns {
    pub fn new(options: Unknown) -> Self {
        let bounds = Bounds { permits: options.most, waiting: 0, kept: KEPT, patience: SPEAKS_WITHIN };
        Self { options, admission: Admission::new(bounds), connections: HashMap::new() }
    }

    /// A connection has been accepted from this address.
    pub fn arrived(&mut self, address: IpAddr) -> ConnectionId {
        self.admission.arrived(address, (self.options.has_authenticated)(address), Instant::now())
    }

    /// What to do with one that has arrived. Nothing more: it is refused.
    pub fn next(&mut self) -> Option<Next> {
        match self.admission.poll_effect()? {
            Effect::Admit(id) => Some(Next::Serve(id)),
            Effect::Close(id) => Some(Next::Close(self.connections.get(&id).copied()?)),
            Effect::Refuse(_) => None,
        }
    }

    /// It is served by this name.
    pub fn serve(&mut self, id: ConnectionId, as_connection: ConnId) {
        self.connections.insert(id, as_connection);
    }

    /// It has been closed, or handed over.
    pub fn ended(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
        self.admission.ended(id, Instant::now());
    }
}

/// What to do for a connection that has arrived.
pub(super) enum Next {
    /// Serve it.
    Serve(ConnectionId),
    /// Close this one first.
    Close(ConnId),
}
