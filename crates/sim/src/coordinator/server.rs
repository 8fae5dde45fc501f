//! The coordinator's process: a [`Machine`] with its driver. It may stand still, die, and come back with empty memory.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use bytes::BytesMut;

use crate::engine::alarm::Alarm;
use crate::engine::paths::HostId;
use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::decision_state::DecisionState;
use elastic_rs::rendezvous::messages::codec::{CodecError, decode_frame, decode_preamble};
use elastic_rs::rendezvous::messages::message::NodeMessage;
use elastic_rs::rendezvous::run::{CoordinatorInstance, Ends, SessionId};

/// One accepted connection.
#[derive(Clone, Debug)]
struct Peer {
    host: HostId,
    /// The host whose address the connection has.
    seen_as: HostId,
    buffer: BytesMut,
    opened: bool,
    introduced: bool,
}

/// The coordinator's process.
#[derive(Clone, Debug)]
pub(super) struct Coordinator {
    pub up: bool,
    /// Number of starts.
    pub incarnation: u32,
    pub machine: Machine,
    pub alarm: Alarm,
    /// The agent in its process has left, so it serves only for a moment longer.
    pub ends: bool,
    peers: BTreeMap<SessionId, Peer>,
}

impl Coordinator {
    pub fn new(up: bool) -> Self {
        Self {
            up,
            incarnation: 1,
            machine: Machine::new(),
            alarm: Alarm::default(),
            ends: false,
            peers: BTreeMap::new(),
        }
    }

    /// End the process. Its memory is lost.
    pub fn crash(&mut self) {
        self.up = false;
        self.machine = Machine::new();
        self.alarm = Alarm::default();
        self.ends = false;
        self.peers.clear();
    }

    /// Start again, in this process.
    pub fn restart(&mut self, instance: Option<CoordinatorInstance>) {
        self.up = true;
        self.incarnation += 1;
        self.machine = instance.map_or_else(Machine::new, Machine::with_instance);
    }

    pub fn accept(&mut self, conn: SessionId, host: HostId, seen_as: HostId) {
        let peer = Peer { host, seen_as, buffer: BytesMut::new(), opened: false, introduced: false };
        self.peers.insert(conn, peer);
    }

    /// The host at the other end of a connection.
    pub fn host_of(&self, conn: SessionId) -> Option<HostId> {
        self.peers.get(&conn).map(|peer| peer.host)
    }

    /// The address that a connection has.
    pub fn address_of(&self, conn: SessionId) -> Option<IpAddr> {
        self.peers.get(&conn).map(|peer| address(peer.seen_as))
    }

    pub fn forget(&mut self, conn: SessionId) {
        self.peers.remove(&conn);
    }

    /// Add bytes, and return the next whole message.
    ///
    /// # Errors
    /// The bytes are not a session's, though our own node has sent them.
    pub fn read(&mut self, conn: SessionId, bytes: &[u8]) -> Result<Option<NodeMessage>, CodecError> {
        let Some(peer) = self.peers.get_mut(&conn) else {
            return Ok(None);
        };
        peer.buffer.extend_from_slice(bytes);
        if !peer.opened {
            peer.opened = decode_preamble(&mut peer.buffer)?;
        }
        if !peer.opened {
            return Ok(None);
        }
        decode_frame(&mut peer.buffer)
    }

    /// The state that decides the future, for [`super::explore`].
    pub fn describe(&self, now: Instant, out: &mut impl fmt::Write) -> fmt::Result {
        let machine = self.machine.decision_state(now);
        write!(out, "{} {} {} {machine:?} {:?}", self.up, self.ends, self.incarnation, self.peers)
    }

    /// Pass a message to the machine as the driver does. The first one is a `Hello`.
    pub fn handle(&mut self, conn: SessionId, message: NodeMessage, now: Instant) {
        let Some(peer) = self.peers.get_mut(&conn) else { return };
        match message {
            NodeMessage::Hello(hello) if !peer.introduced => {
                peer.introduced = true;
                let ends = Ends { peer: address(peer.seen_as), local: address(usize::MAX) };
                self.machine.on_hello(conn, *hello, ends, now);
            }
            message => self.machine.on_message(conn, message, now),
        }
    }
}

/// The address of a host. `usize::MAX` is the coordinator's.
fn address(host: HostId) -> IpAddr {
    let number = (host.wrapping_add(1) % 65_000) as u16;
    let [high, low] = number.to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(10, 0, high, low))
}
