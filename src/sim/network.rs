//! Connections between hosts and the coordinator: ordered streams that may be delayed, broken, or silent.
//!
//! Owns bytes in transit. Leaves both ends to [`super::host`] and [`super::coordinator`].

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::queue::{Dice, Queue, Time};
use super::simulation::Event;
use crate::rendezvous::decider::event::SessionId;

/// Number of a host.
pub type HostId = usize;

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The host's.
    Node = 0,
    /// The coordinator's.
    Coordinator = 1,
}

impl End {
    /// The opposite end.
    pub fn other(self) -> Self {
        match self {
            Self::Node => Self::Coordinator,
            Self::Coordinator => Self::Node,
        }
    }
}

/// What happens to messages sent into a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partition {
    /// They arrive once it is over, as with TCP's retransmission.
    Held,
    /// They are lost together with their connection. Neither end is told.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Sound,
    /// Broken: nothing more arrives. Both ends are told, each after a delay.
    Broken,
    /// Nothing arrives. An end that does not send is never told.
    Silent,
    /// As `Silent`, and an end that sends is not told either, because the other host is off.
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

/// All connections, and the state of the paths they take.
#[derive(Clone, Debug)]
pub struct Network {
    /// Shortest and longest transit time.
    delay: (Duration, Duration),
    connections: BTreeMap<SessionId, Connection>,
    opened: u64,
    opened_by: BTreeMap<HostId, u64>,
    /// Connections are numbered by host, so that the order in which hosts connect does not change the state.
    pub(super) numbered_by_host: bool,
    /// The end of the cut on the path to each end, by host.
    cut: BTreeMap<(HostId, usize), (Time, Partition)>,
}

impl Network {
    /// A network without connections.
    pub fn new(delay: (Duration, Duration)) -> Self {
        Self {
            delay,
            connections: BTreeMap::new(),
            opened: 0,
            opened_by: BTreeMap::new(),
            numbered_by_host: false,
            cut: BTreeMap::new(),
        }
    }

    /// Transit time of the next message.
    pub fn delay(&self, dice: &mut Dice) -> Duration {
        dice.duration(self.delay)
    }

    /// The path from `host` to the coordinator, or back, is cut until `until`.
    pub fn partition(&mut self, host: HostId, to: End, until: Time, kind: Partition) {
        self.cut.insert((host, to as usize), (until, kind));
    }

    /// The present cut on a path, if any.
    pub fn cut(&self, host: HostId, to: End, now: Time) -> Option<(Time, Partition)> {
        self.cut.get(&(host, to as usize)).copied().filter(|(until, _)| *until > now)
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
    pub fn send(&mut self, id: SessionId, from: End, bytes: Option<Bytes>, dice: &mut Dice, queue: &mut Queue<Event>) {
        let (now, delay) = (queue.now(), self.delay(dice));
        let to = from.other();
        let Some(host) = self.connections.get(&id).map(|c| c.host) else {
            return;
        };
        let cut = self.cut(host, to, now);
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
            // The path works again, but the connection does not: the sender is told.
            (Fate::Silent, None) => return queue.push(now + delay, Event::Eof { conn: id, to: from }),
            (Fate::Sound, Some((_, Partition::Held)) | None) => {}
        }
        let sent = cut.map_or(now, |(until, _)| until);
        let arrival = (sent + delay).max(connection.last_arrival[to as usize]);
        connection.last_arrival[to as usize] = arrival;
        let event = match bytes {
            Some(bytes) => Event::Deliver { conn: id, to, bytes },
            None => Event::Eof { conn: id, to },
        };
        queue.push(arrival, event);
    }

    /// One end closes its socket. The other end sees the end of the stream after all bytes that were sent.
    pub fn close(&mut self, id: SessionId, end: End, dice: &mut Dice, queue: &mut Queue<Event>) {
        self.send(id, end, None, dice, queue);
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

    /// The connection breaks. Bytes in transit are lost. Each end that still holds it is told within `told_within`.
    pub fn sever(&mut self, id: SessionId, told_within: Duration, dice: &mut Dice, queue: &mut Queue<Event>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.fate = Fate::Broken;
        for to in [End::Node, End::Coordinator] {
            if connection.open[to as usize] {
                let after = dice.duration((Duration::ZERO, told_within));
                queue.push(queue.now() + after, Event::Eof { conn: id, to });
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
    pub(super) fn describe(&self, now: Time, out: &mut impl fmt::Write) -> fmt::Result {
        for (id, connection) in &self.connections {
            write!(out, "\n{id:?} {:?} {:?}", connection.fate, connection.open)?;
        }
        let cuts = self.cut.iter().filter(|(_, (until, _))| *until > now);
        cuts.into_iter().try_for_each(|(path, (until, kind))| write!(out, "\n{path:?} {:?} {kind:?}", *until - now))
    }

    /// All connections whose coordinator's end is open.
    pub fn at_coordinator(&self) -> Vec<SessionId> {
        let open = |c: &Connection| c.open[End::Coordinator as usize];
        self.connections.iter().filter(|(_, c)| open(c)).map(|(id, _)| *id).collect()
    }
}
