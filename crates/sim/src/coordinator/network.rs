//! Connections between hosts and the coordinator: ordered streams that may be delayed, broken, or silent.
//!
//! Owns bytes in transit. Leaves both ends to [`super::host`] and [`super::server`], and cuts to the engine's paths.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::event::Event;
use crate::engine::Engine;
use crate::engine::paths::{End, HostId, Partition};
use crate::engine::queue::Time;
use elastic_rs::rendezvous::run::SessionId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Sound,
    /// Broken: nothing more arrives. Both ends are notified, each after a delay.
    Broken,
    /// Nothing arrives. An end that does not send is never notified.
    Silent,
    /// As `Silent`, and an end that sends is not notified either, because the other host is off.
    Dead,
}

#[derive(Clone, Debug)]
struct Connection {
    host: HostId,
    pid: u64,
    fate: Fate,
    /// Whether each end still holds its socket.
    open: [bool; 2],
    /// Latest arrival at each end. Later messages arrive no sooner.
    last_arrival: [Time; 2],
}

/// Factor of [`Network::numbered_by_host`].
const BY_HOST: u64 = 1_000_000;

/// All connections.
#[derive(Clone, Debug, Default)]
pub struct Network {
    connections: BTreeMap<SessionId, Connection>,
    opened: u64,
    opened_by: BTreeMap<HostId, u64>,
    /// Connections are numbered by host, so that the order in which hosts connect does not change the state.
    pub(super) numbered_by_host: bool,
}

impl Network {
    /// A network without connections.
    pub fn new() -> Self {
        Self::default()
    }

    /// Open a connection for the process `pid` on `host`.
    pub fn open(&mut self, host: HostId, pid: u64) -> SessionId {
        self.opened += 1;
        let connection = Connection { host, pid, fate: Fate::Sound, open: [true, true], last_arrival: [Time::ZERO; 2] };
        let of_host = self.opened_by.entry(host).or_insert(0);
        *of_host += 1;
        let by_host = (host as u64 + 1) * BY_HOST + *of_host;
        let id = SessionId(if self.numbered_by_host { by_host } else { self.opened });
        self.connections.insert(id, connection);
        id
    }

    /// The host and process at the node's end, while `end` still holds its socket.
    pub fn holder(&self, id: SessionId, end: End) -> Option<(HostId, u64)> {
        let connection = self.connections.get(&id)?;
        connection.open[end as usize].then_some((connection.host, connection.pid))
    }

    /// Whether bytes in transit still arrive.
    pub fn delivers(&self, id: SessionId, to: End) -> bool {
        self.connections.get(&id).is_some_and(|c| c.fate == Fate::Sound && c.open[to as usize])
    }

    /// Send bytes from one end to the other; `None` for the end of the stream.
    pub fn send(&mut self, id: SessionId, from: End, bytes: Option<Bytes>, engine: &mut Engine<Event>) {
        let (now, delay) = (engine.now(), engine.transit());
        let to = from.other();
        let Some(host) = self.connections.get(&id).map(|c| c.host) else {
            return;
        };
        let cut = engine.paths.cut_now(host, to, now);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if !connection.open[from as usize] {
            return;
        }
        match (connection.fate, cut) {
            (Fate::Broken | Fate::Dead, _) => return,
            (Fate::Sound, Some((_, Partition::Lost))) | (Fate::Silent, Some(_)) => {
                connection.fate = Fate::Silent;
                return;
            }
            // The path works again, but the connection does not: the sender is notified.
            (Fate::Silent, None) => return engine.push(now + delay, Event::Eof { conn: id, to: from }),
            (Fate::Sound, Some((_, Partition::Held)) | None) => {}
        }
        let sent = cut.map_or(now, |(until, _)| until);
        let arrival = (sent + delay).max(connection.last_arrival[to as usize]);
        connection.last_arrival[to as usize] = arrival;
        let event = match bytes {
            Some(bytes) => Event::Deliver { conn: id, to, bytes },
            None => Event::Eof { conn: id, to },
        };
        engine.push(arrival, event);
    }

    /// One end closes its socket. The other end sees the end of the stream after all bytes that were sent.
    pub fn close(&mut self, id: SessionId, end: End, engine: &mut Engine<Event>) {
        self.send(id, end, None, engine);
        self.release(id, end);
    }

    /// One end has noticed that the connection is over.
    pub fn release(&mut self, id: SessionId, end: End) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.open[end as usize] = false;
        if connection.open == [false, false] {
            self.connections.remove(&id);
        }
    }

    /// The connection breaks. Bytes in transit are lost. Each end that still holds it is notified within `noticed_within`.
    pub fn sever(&mut self, id: SessionId, noticed_within: Duration, engine: &mut Engine<Event>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.fate = Fate::Broken;
        for to in [End::Node, End::Coordinator] {
            if connection.open[to as usize] {
                let after = engine.dice.duration((Duration::ZERO, noticed_within));
                engine.push_after(after, Event::Eof { conn: id, to });
            }
        }
    }

    /// The host is switched off: nothing arrives from it any more, and no end of a stream does.
    pub fn silence(&mut self, id: SessionId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.fate = Fate::Dead;
        }
        self.release(id, End::Node);
    }

    /// The state that decides the future, for [`super::fingerprint`].
    pub(super) fn describe(&self, out: &mut impl fmt::Write) -> fmt::Result {
        let mut all = self.connections.iter();
        all.try_for_each(|(id, connection)| write!(out, "\n{id:?} {:?} {:?}", connection.fate, connection.open))
    }

    /// All connections whose coordinator's end is open.
    pub fn at_coordinator(&self) -> Vec<SessionId> {
        let open = |c: &Connection| c.open[End::Coordinator as usize];
        self.connections.iter().filter(|(_, c)| open(c)).map(|(id, _)| *id).collect()
    }
}
