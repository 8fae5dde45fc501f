//! Connections between any two hosts: ordered streams that may be delayed, broken, or silent.
//!
//! Of a connection, [`End::Node`] is the end that has connected, and [`End::Coordinator`] the end that listens.

use std::collections::BTreeMap;
use std::time::Duration;

use super::event::{Event, Payload, Pid};
use crate::engine::Engine;
use crate::engine::paths::{End, HostId, Partition};
use crate::engine::queue::Time;
use elastic_rs::rendezvous::run::SessionId;

/// How long an attempt to connect waits for an answer.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A message within one host takes so long.
const WITHIN_HOST: Duration = Duration::from_micros(50);

/// Who has opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A node, for its session.
    Session,
    /// A process of the list, which sends over it. The place is that of the endpoint it leads to.
    Peer(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Sound,
    /// Nothing more arrives. Both ends are notified.
    Broken,
    /// Nothing arrives. An end that does not send is never notified.
    Silent,
    /// As `Silent`, and an end that sends is not notified either, because the other host is off.
    Dead,
}

#[derive(Clone, Debug)]
struct Connection {
    purpose: Purpose,
    /// The host and the process at each end. Number 0: none has accepted it.
    ends: [(HostId, Pid); 2],
    is_established: bool,
    fate: Fate,
    /// Whether each end still holds its socket.
    open: [bool; 2],
    /// Latest arrival at each end. Later messages arrive no sooner.
    last_arrival: [Time; 2],
}

/// All connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Network {
    connections: BTreeMap<SessionId, Connection>,
    opened: u64,
}

impl Network {
    /// Begin to connect. The attempt arrives later, or times out.
    pub fn dial(&mut self, by: (HostId, Pid), to: HostId, purpose: Purpose, engine: &mut Engine<Event>) -> SessionId {
        self.opened += 1;
        let conn = SessionId(self.opened);
        let connection = Connection {
            purpose,
            ends: [by, (to, 0)],
            is_established: false,
            fate: Fate::Sound,
            open: [true, false],
            last_arrival: [Time::ZERO; 2],
        };
        self.connections.insert(conn, connection);
        if let Some(after) = travels(by.0, to, engine) {
            engine.push_after(after, Event::Arrives(conn));
        }
        engine.push_after(CONNECT_TIMEOUT, Event::TimedOut(conn));
        conn
    }

    /// The host that an attempt is meant for, if whoever tries has not given it up.
    pub fn target(&self, conn: SessionId) -> Option<HostId> {
        self.connections.get(&conn).filter(|it| it.open[0]).map(|it| it.ends[1].0)
    }

    /// The kernel of that host has an answer: a process accepts it, or nobody listens, or the one that has listened is ending.
    pub fn answer(&mut self, conn: SessionId, answer: Result<Pid, Event>, engine: &mut Engine<Event>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let [client, server] = connection.ends;
        let event = match answer {
            Ok(pid) => {
                (connection.ends[1].1, connection.open[1]) = (pid, true);
                Event::Opened(conn)
            }
            Err(event) => event,
        };
        match travels(server.0, client.0, engine) {
            Some(after) => {
                connection.last_arrival[0] = engine.now() + after;
                engine.push_after(after, event);
            }
            None => connection.fate = Fate::Silent,
        }
    }

    /// Who opened it.
    pub fn purpose(&self, conn: SessionId) -> Option<Purpose> {
        self.connections.get(&conn).map(|it| it.purpose)
    }

    /// The end that has connected knows that the connection is open.
    pub fn establish(&mut self, conn: SessionId) {
        self.connections.get_mut(&conn).into_iter().for_each(|it| it.is_established = true);
    }

    /// Whether it does.
    pub fn is_established(&self, conn: SessionId) -> bool {
        self.connections.get(&conn).is_some_and(|it| it.is_established)
    }

    /// The host and the process at an end that still holds its socket.
    pub fn holder(&self, conn: SessionId, end: End) -> Option<(HostId, Pid)> {
        let connection = self.connections.get(&conn)?;
        connection.open[end as usize].then_some(connection.ends[end as usize])
    }

    /// Whether what is in transit still arrives.
    pub fn delivers(&self, conn: SessionId, to: End) -> bool {
        self.connections.get(&conn).is_some_and(|it| it.fate == Fate::Sound && it.open[to as usize])
    }

    /// Send something from one end to the other.
    pub fn send(&mut self, conn: SessionId, from: End, payload: Payload, engine: &mut Engine<Event>) {
        self.pass(conn, from, engine, |to| Event::Deliver(conn, to, payload));
    }

    /// One end closes its socket. The other end sees the end of the stream after all that was sent. With a reset, what is in transit is
    /// lost.
    pub fn close(&mut self, conn: SessionId, end: End, reset: bool, engine: &mut Engine<Event>) {
        self.pass(conn, end, engine, |to| Event::Ended(conn, to, reset));
        if let Some(connection) = self.connections.get_mut(&conn).filter(|it| reset && it.fate == Fate::Sound) {
            connection.fate = Fate::Broken;
        }
        self.release(conn, end);
    }

    fn pass(&mut self, conn: SessionId, from: End, engine: &mut Engine<Event>, event: impl FnOnce(End) -> Event) {
        let to = from.other();
        let Some(connection) = self.connections.get_mut(&conn).filter(|it| it.open[from as usize]) else { return };
        let path = (connection.ends[from as usize].0, connection.ends[to as usize].0);
        let now = engine.now();
        let cut = engine.paths.cut_between_now(path.0, path.1, now).filter(|_| path.0 != path.1);
        let no_answer = engine.paths.cut_between_now(path.1, path.0, now).is_some();
        match (connection.fate, cut) {
            (Fate::Broken | Fate::Dead, _) => return,
            (Fate::Silent, None) if no_answer => return,
            (Fate::Sound, Some((_, Partition::Lost))) | (Fate::Silent, Some(_)) => {
                connection.fate = Fate::Silent;
                return;
            }
            // The path works again, but the connection does not: the sender is notified.
            (Fate::Silent, None) => {
                let after = delay(path, engine);
                return engine.push_after(after, Event::Ended(conn, from, true));
            }
            (Fate::Sound, Some((_, Partition::Held)) | None) => {}
        }
        let sent = cut.map_or(now, |(until, _)| until);
        let arrival = (sent + delay(path, engine)).max(connection.last_arrival[to as usize]);
        connection.last_arrival[to as usize] = arrival;
        engine.push(arrival, event(to));
    }

    /// One end has noticed that the connection is over.
    pub fn release(&mut self, conn: SessionId, end: End) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.open[end as usize] = false;
        if connection.open == [false, false] {
            self.connections.remove(&conn);
        }
    }

    /// The connection breaks. What is in transit is lost. Each end that still holds it is notified within this time.
    pub fn sever(&mut self, conn: SessionId, noticed_within: Duration, engine: &mut Engine<Event>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.fate = Fate::Broken;
        for to in [End::Node, End::Coordinator] {
            if connection.open[to as usize] {
                let after = engine.dice.duration((Duration::ZERO, noticed_within));
                engine.push_after(after, Event::Ended(conn, to, true));
            }
        }
    }

    /// A process of a host that is switched off holds it no more: nothing arrives from there.
    pub fn silence(&mut self, conn: SessionId, end: End) {
        self.connections.get_mut(&conn).into_iter().for_each(|it| it.fate = Fate::Dead);
        self.release(conn, end);
    }

    /// A host is on again. It answers whoever sends over an old connection with a reset.
    pub fn on_switched_on(&mut self, host: HostId) {
        let of_host = |it: &&mut Connection| it.fate == Fate::Dead && it.ends.iter().any(|(at, _)| *at == host);
        self.connections.values_mut().filter(of_host).for_each(|it| it.fate = Fate::Silent);
    }

    /// The ends that this process holds.
    pub fn held_by(&self, process: (HostId, Pid)) -> Vec<(SessionId, End)> {
        let ends = |(conn, it): (&SessionId, &Connection)| {
            let held = |end: &End| it.open[*end as usize] && it.ends[*end as usize] == process;
            [End::Node, End::Coordinator].into_iter().filter(held).map(|end| (*conn, end)).collect::<Vec<_>>()
        };
        self.connections.iter().flat_map(ends).collect()
    }

    /// The connections of a host with others.
    pub fn beyond(&self, host: HostId) -> Vec<SessionId> {
        let leads_away = |it: &Connection| it.ends.map(|(at, _)| at == host) != [true, true];
        let of_host = |it: &Connection| it.ends.iter().any(|(at, _)| *at == host);
        self.connections.iter().filter(|(_, it)| of_host(it) && leads_away(it)).map(|(conn, _)| *conn).collect()
    }
}

fn delay(path: (HostId, HostId), engine: &mut Engine<Event>) -> Duration {
    if path.0 == path.1 { WITHIN_HOST } else { engine.transit() }
}

/// How long a message from one host to another travels. `None`: it gets lost.
pub(super) fn travels(from: HostId, to: HostId, engine: &mut Engine<Event>) -> Option<Duration> {
    let now = engine.now();
    let cut = engine.paths.cut_between_now(from, to, now).is_some() && from != to;
    (!cut).then(|| delay((from, to), engine))
}
