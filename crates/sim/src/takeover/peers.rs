//! The driver of a process's connections to the other endpoints of the list, as the product's is (`coordinator/peers.rs`).

use std::time::Duration;

use super::event::{Event, Payload, Pid};
use super::job::Job;
use super::network::Purpose;
use super::plan::Mutation;
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::rendezvous::coordinator::ensemble::Link;
use elastic_rs::rendezvous::messages::message::{NodeId, PeerHello};
use elastic_rs::rendezvous::run::SessionId;

/// How often a connection is tried at first, and for how long.
const AT_FIRST: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// How often it is tried then.
const EVERY: Duration = Duration::from_millis(250);
/// For how long a refusal proves the end of the process that was there.
const SAME_FOR: Duration = Duration::from_secs(20);

/// The connection to another endpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    /// The connection, or the attempt.
    pub conn: Option<SessionId>,
    /// The process at the other end has answered.
    pub is_up: bool,
    /// The process that was there last.
    last: Option<NodeId>,
    /// The same, when the attempt began, if its connection had not ended long before.
    same: Option<NodeId>,
    ended: Time,
    /// Number of the attempt that comes next. Earlier ones were replaced.
    attempt: u64,
    /// The process there has come: it is connected to at once.
    came: bool,
}

/// How a connection, or an attempt, has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nobody listens.
    Refused,
    /// There was no answer.
    Silent,
    /// It ended in order, or was reset.
    Ended { reset: bool },
}

impl Job {
    /// Connect, if this attempt is still wanted.
    pub(super) fn dial_peer(&mut self, host: HostId, pid: Pid, place: usize, attempt: u64) -> Result<(), Violation> {
        let Some(part) = self.hosts[host].process(pid).and_then(|process| process.part.as_mut()) else { return Ok(()) };
        let (peer, now) = (&mut part.peers[place], self.engine.now());
        if peer.attempt != attempt || peer.conn.is_some() {
            return Ok(());
        }
        peer.same = peer.last.filter(|_| now < peer.ended + SAME_FOR);
        self.link(host, place, Link::Begins);
        let conn = self.network.dial((host, pid), place, Purpose::Peer(place), &mut self.engine);
        self.peer(host, place).into_iter().for_each(|peer| peer.conn = Some(conn));
        self.settle(host)
    }

    pub(super) fn peer(&mut self, host: HostId, place: usize) -> Option<&mut Peer> {
        self.hosts[host].part_mut().map(|part| &mut part.peers[place])
    }

    /// Something has happened to the connection to an endpoint.
    fn link(&mut self, host: HostId, place: usize, link: Link) {
        let now = self.hosts[host].clock(self.engine.now());
        self.engine.remark(|| format!("n{host}: the connection to n{place}: {link:?}"));
        self.hosts[host].part_mut().into_iter().for_each(|part| part.succession.on_link(place, link, now));
    }

    /// The kernel there has accepted the connection: introduce this process.
    pub(super) fn on_peer_opened(&mut self, host: HostId, conn: SessionId) {
        let Some(part) = self.hosts[host].part_mut() else { return };
        let hello = Box::new(part.succession.hello().clone());
        self.network.send(conn, End::Node, Payload::Introduction(hello), &mut self.engine);
    }

    /// The process there has answered.
    pub(super) fn on_peer_here(&mut self, host: HostId, place: usize, process: NodeId) -> Result<(), Violation> {
        let Some(peer) = self.peer(host, place) else { return Ok(()) };
        peer.is_up = true;
        if let Some(before) = peer.last.replace(process).filter(|before| *before != process) {
            self.link(host, place, Link::Dead(before));
        }
        self.link(host, place, Link::Up(process));
        self.settle(host)
    }

    /// The process at an endpoint has introduced itself.
    pub(super) fn on_introduction(
        &mut self,
        host: HostId,
        conn: SessionId,
        hello: &PeerHello,
    ) -> Result<(), Violation> {
        let Some(part) = self.hosts[host].part_mut() else { return Ok(()) };
        let (place, answer) = (hello.place as usize, part.succession.admits(hello));
        let id = answer.map_err(|why| Violation::contract(format!("n{place} has no part in the list: {why}")))?;
        let before = part.incoming.insert(place, (conn, hello.process));
        let peer = &mut part.peers[place];
        peer.came = true;
        if let Some((before, _)) = before {
            self.network.close(before, End::Coordinator, false, &mut self.engine);
        }
        self.network.send(conn, End::Coordinator, Payload::Here(id), &mut self.engine);
        self.dial_if_come(host, place);
        Ok(())
    }

    /// A process that has come is connected to at once.
    fn dial_if_come(&mut self, host: HostId, place: usize) {
        let now = self.engine.now();
        let Some(process) = self.hosts[host].process.as_mut() else { return };
        let pid = process.pid;
        let Some(peer) = process.part.as_mut().map(|part| &mut part.peers[place]) else { return };
        if peer.conn.is_none() && std::mem::take(&mut peer.came) {
            peer.attempt += 1;
            self.engine.push(now, Event::Dial(host, pid, place, peer.attempt));
        }
    }

    /// The connection has ended, or was not opened.
    pub(super) fn on_peer_lost(&mut self, host: HostId, place: usize, how: Outcome) -> Result<(), Violation> {
        let now = self.engine.now();
        let Some(pid) = self.hosts[host].process.as_ref().map(|process| process.pid) else { return Ok(()) };
        let Some(peer) = self.peer(host, place) else { return Ok(()) };
        let was_up = std::mem::take(&mut peer.is_up);
        peer.conn = None;
        if was_up {
            peer.ended = now;
        }
        let is_proof = match self.options.mutation {
            Some(Mutation::EndIsProof) => matches!(how, Outcome::Ended { .. }),
            Some(Mutation::ResetIsProof) => how == Outcome::Ended { reset: true },
            _ => false,
        };
        let Some(peer) = self.peer(host, place) else { return Ok(()) };
        let proven = match how {
            Outcome::Refused => peer.same.and(peer.last.take()),
            _ => peer.last.filter(|_| is_proof),
        };
        let is_fresh = peer.last.is_some() && now < peer.ended + AT_FIRST.1;
        peer.attempt += 1;
        let attempt = peer.attempt;
        let silent_is_absent = self.options.mutation == Some(Mutation::SilenceIsAbsence) && !was_up;
        let link = if how == Outcome::Refused || silent_is_absent { Link::Refused } else { Link::Down };
        self.link(host, place, link);
        if let Some(dead) = proven {
            self.link(host, place, Link::Dead(dead));
        }
        let pause = if is_fresh { AT_FIRST.0 } else { EVERY };
        self.engine.push(now + pause, Event::Dial(host, pid, place, attempt));
        self.dial_if_come(host, place);
        self.settle(host)
    }
}
