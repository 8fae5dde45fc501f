//! Which connections get one of few permits: a state machine for the connections at one listener.
//!
//! A connection waits until it is admitted, holds a permit until it ends, and may be closed before. Permits and waiting connections are
//! bounded. All rules compare addresses, so that one address can only take its own permits:
//!
//! - The address that holds most permits is the greediest. If there are no more, and a connection arrives from an address that holds and
//!   wants fewer, the greediest one loses the permit that it has had for longest.
//! - A free permit goes to the address that holds fewest, and there to the connection that arrived last: in a flood, most of those that
//!   have waited for long have given up.
//! - Nobody loses a permit to connections of its own address, or of one that holds as many, unless it has had it for
//!   [`Bounds::patience`].
//! - If too many wait, the longest waiting connection of the address with most of them is refused.
//! - An address that has authenticated before ([`Authenticated`]) keeps [`Bounds::kept`] permits, and as many that wait: only those above
//!   count as its own.
//!
//! [`Admission`] decides. Its caller owns the connections, passes what happens and the time, and carries out the [`Effect`]s. A permit is
//! free once the caller says that its connection has [ended](Admission::ended). So never more than [`Bounds::permits`] are in use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections that may be admitted at once.
    pub permits: usize,
    /// Connections that may wait.
    pub waiting: usize,
    /// Permits that an authenticated address keeps, whoever else wants them.
    pub kept: usize,
    /// How long an admitted connection keeps its permit although others wait that have no better claim.
    pub patience: Duration,
}

/// Names a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

/// What to do with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It has a permit now.
    Admit(ConnectionId),
    /// It waited, and gets no permit. It is forgotten.
    Refuse(ConnectionId),
    /// It loses its permit to another one: close it, and say when it has [ended](Admission::ended).
    Close(ConnectionId),
}

/// An address, as far as it identifies a peer. Whoever has an IPv6 address has all others of its /64 too, unless it is on this link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Source(IpAddr);

impl Source {
    fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_unicast_link_local() && !address.is_loopback() => {
                Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into()
            }
            other => other,
        })
    }
}

/// The connections at one listener.
#[derive(Debug)]
pub struct Admission {
    bounds: Bounds,
    connections: HashMap<ConnectionId, Connection>,
    sources: HashMap<Source, Entry>,
    /// The sources by their ranks ([`Entry::ranks`]): the last is the greediest, the first is admitted from next, the last is refused.
    by_held: BTreeSet<(Held, Source)>,
    by_claim: BTreeSet<(Claim, Source)>,
    by_queue: BTreeSet<(Queued, Source)>,
    /// Connections that arrived, and admissions, so far.
    next: u64,
    admitted: usize,
    waiting: usize,
    /// Connections that are to be closed, and have not ended yet.
    closing: usize,
    effects: VecDeque<Effect>,
}

#[derive(Debug)]
struct Connection {
    source: Source,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Waiting,
    /// By this number, which grows from one to the next.
    Admitted(u64),
    Closing,
}

/// How many above those that it keeps, and the oldest of them.
type Held = (usize, Reverse<u64>);
/// The same of those that wait.
type Queued = (usize, Reverse<u64>);
/// How many it holds above those that it keeps, whether it is unknown, and the newest that waits.
type Claim = (usize, bool, Reverse<u64>);

/// The connections of one source.
#[derive(Debug, Default)]
struct Entry {
    is_authenticated: bool,
    /// By the numbers of their admissions, with the time.
    admitted: BTreeMap<u64, (ConnectionId, Instant)>,
    waiting: BTreeSet<ConnectionId>,
}

impl Entry {
    fn above(&self, count: usize, kept: usize) -> usize {
        if self.is_authenticated { count.saturating_sub(kept) } else { count }
    }

    /// Its ranks in the three orders of [`Admission`]. `None`: it has nothing there.
    fn ranks(&self, kept: usize) -> (Option<Held>, Option<Claim>, Option<Queued>) {
        let held = self.above(self.admitted.len(), kept);
        let queued = self.above(self.waiting.len(), kept);
        (
            self.admitted.keys().next().map(|oldest| (held, Reverse(*oldest))),
            self.waiting.last().map(|newest| (held, !self.is_authenticated, Reverse(newest.0))),
            self.waiting.first().map(|oldest| (queued, Reverse(oldest.0))),
        )
    }
}

impl Admission {
    /// No connections yet.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            connections: HashMap::new(),
            sources: HashMap::new(),
            by_held: BTreeSet::new(),
            by_claim: BTreeSet::new(),
            by_queue: BTreeSet::new(),
            next: 0,
            admitted: 0,
            waiting: 0,
            closing: 0,
            effects: VecDeque::new(),
        }
    }

    /// A connection has arrived from this address, which has authenticated before or not.
    pub fn arrived(&mut self, address: IpAddr, is_authenticated: bool, now: Instant) -> ConnectionId {
        let (id, source) = (ConnectionId(self.number()), Source::of(address));
        self.connections.insert(id, Connection { source, state: State::Waiting });
        self.change(source, |entry| {
            entry.is_authenticated = is_authenticated;
            entry.waiting.insert(id);
        });
        self.waiting += 1;
        self.admit(now);
        if matches!(self.connections.get(&id), Some(Connection { state: State::Waiting, .. })) {
            self.displace_for(source);
            self.lose_patience(now);
        }
        self.refuse();
        id
    }

    /// A connection has ended, or its peer has authenticated and needs no permit any more. An unknown one is nothing.
    pub fn ended(&mut self, id: ConnectionId, now: Instant) {
        let Some(Connection { source, state }) = self.connections.remove(&id) else { return };
        match state {
            State::Waiting => {
                self.waiting -= 1;
                self.change(source, |entry| {
                    entry.waiting.remove(&id);
                });
                self.displace_for(source); // it wants fewer now
            }
            State::Admitted(number) => {
                self.admitted -= 1;
                self.change(source, |entry| {
                    entry.admitted.remove(&number);
                });
            }
            State::Closing => self.closing -= 1,
        }
        self.admit(now);
        self.refuse();
    }

    /// To be called when a connection has been admitted for [`Bounds::patience`], and so may lose its permit.
    pub fn tick(&mut self, now: Instant) {
        self.lose_patience(now);
    }

    /// What to do next.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Connections that hold a permit, those that are to be closed included, and connections that wait.
    pub fn counts(&self) -> (usize, usize) {
        (self.admitted + self.closing, self.waiting)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Change the entry of a source, and move it in the three orders.
    fn change(&mut self, source: Source, change: impl FnOnce(&mut Entry)) {
        let kept = self.bounds.kept;
        let entry = self.sources.entry(source).or_default();
        let before = entry.ranks(kept);
        change(entry);
        let after = entry.ranks(kept);
        if after == (None, None, None) {
            self.sources.remove(&source);
        }
        moved(&mut self.by_held, source, before.0, after.0);
        moved(&mut self.by_claim, source, before.1, after.1);
        moved(&mut self.by_queue, source, before.2, after.2);
    }

    /// Give free permits to those with the best claims.
    fn admit(&mut self, now: Instant) {
        while self.admitted + self.closing < self.bounds.permits
            && let Some(&(_, source)) = self.by_claim.first()
        {
            let number = self.number();
            let mut newest = None;
            self.change(source, |entry| {
                newest = entry.waiting.pop_last();
                entry.admitted.extend(newest.map(|id| (number, (id, now))));
            });
            let Some(id) = newest else { return };
            (self.waiting, self.admitted) = (self.waiting - 1, self.admitted + 1);
            self.set(id, State::Admitted(number));
            self.effects.push_back(Effect::Admit(id));
        }
    }

    /// Close a connection of the greediest source, if this one holds and wants fewer.
    fn displace_for(&mut self, source: Source) {
        let Some(entry) = self.sources.get(&source) else { return };
        let wanted = entry.above(entry.admitted.len() + entry.waiting.len(), self.bounds.kept);
        if let Some(&((held, _), greediest)) = self.by_held.last()
            && !entry.waiting.is_empty()
            && greediest != source
            && held > wanted
        {
            self.close_oldest(greediest);
        }
    }

    /// Close connections of the greediest sources that have had their permits for long, one for each that waits.
    fn lose_patience(&mut self, now: Instant) {
        while self.closing < self.waiting
            && let Some(&(_, greediest)) = self.by_held.last()
            && let Some((_, since)) = self.sources.get(&greediest).and_then(|entry| entry.admitted.values().next())
            && now.saturating_duration_since(*since) >= self.bounds.patience
        {
            self.close_oldest(greediest);
        }
    }

    fn close_oldest(&mut self, source: Source) {
        let mut oldest = None;
        self.change(source, |entry| oldest = entry.admitted.pop_first());
        let Some((_, (id, _))) = oldest else { return };
        (self.admitted, self.closing) = (self.admitted - 1, self.closing + 1);
        self.set(id, State::Closing);
        self.effects.push_back(Effect::Close(id));
    }

    /// Refuse those that wait and are too many. Those for whom a permit is about to be free are not.
    fn refuse(&mut self) {
        while self.waiting > self.bounds.waiting + self.closing
            && let Some(&(_, source)) = self.by_queue.last()
        {
            let mut oldest = None;
            self.change(source, |entry| oldest = entry.waiting.pop_first());
            let Some(id) = oldest else { return };
            self.waiting -= 1;
            self.connections.remove(&id);
            self.effects.push_back(Effect::Refuse(id));
            self.displace_for(source); // it wants fewer now
        }
    }

    fn set(&mut self, id: ConnectionId, state: State) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = state;
        }
    }
}

fn moved<R: Ord>(order: &mut BTreeSet<(R, Source)>, source: Source, before: Option<R>, after: Option<R>) {
    if before == after {
        return;
    }
    if let Some(before) = before {
        order.remove(&(before, source));
    }
    order.extend(after.map(|after| (after, source)));
}

/// Addresses that have authenticated, the last [`Authenticated::MOST`] of them.
#[derive(Debug, Default)]
pub struct Authenticated {
    last: HashMap<Source, u64>,
    oldest: BTreeMap<u64, Source>,
    next: u64,
}

impl Authenticated {
    /// Addresses that are remembered. Only those who have authenticated are.
    pub const MOST: usize = 16_384;

    /// Somebody at this address has authenticated.
    pub fn add(&mut self, address: IpAddr) {
        let source = Source::of(address);
        self.next += 1;
        if let Some(before) = self.last.insert(source, self.next) {
            self.oldest.remove(&before);
        }
        self.oldest.insert(self.next, source);
        if self.last.len() > Self::MOST
            && let Some((_, forgotten)) = self.oldest.pop_first()
        {
            self.last.remove(&forgotten);
        }
    }

    /// Whether somebody there has.
    pub fn has(&self, address: IpAddr) -> bool {
        self.last.contains_key(&Source::of(address))
    }
}

#[cfg(feature = "io")]
pub mod tasks;
#[cfg(test)]
mod tests;
