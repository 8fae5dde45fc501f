//! Jobs over a model of etcd, with revisions, transactions, leases that end, ordered watches, and compaction.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::queue::{Dice, Queue, Time};
use super::worlds::Violation;
use crate::rendezvous::cell::blob::Blob;
use crate::rendezvous::cell::etcd::{Change, EtcdEvent, EtcdNode, EtcdRequest, LeaseId, Revision, Snapshot};
use crate::rendezvous::node::machine::JoinError;
use crate::rendezvous::protocol::message::{Hello, NodeId, Placement, Round, Verdict};
use crate::rendezvous::protocol::settings::Settings;

const PATIENCE: Duration = Duration::from_secs(2);
/// These may follow one another: a lease that ends (15 s) twice, workers that stop (2 s), two last calls (10 s each).
const SETTLE_WITHIN: Duration = Duration::from_secs(90);

/// etcd, as far as the rendezvous uses it.
#[derive(Debug, Default)]
struct Model {
    revision: u64,
    compacted: u64,
    state: Option<(Vec<u8>, Revision)>,
    members: BTreeMap<NodeId, LeaseId>,
    leases: BTreeMap<LeaseId, (Duration, Time)>,
    log: Vec<(Revision, Vec<Change>)>,
    /// By host: the incarnation that watches, and the next revision to send.
    watches: BTreeMap<usize, (u32, u64)>,
}

impl Model {
    fn snapshot(&self) -> Snapshot {
        Snapshot { revision: Revision(self.revision), state: self.state.clone(), members: self.members.clone() }
    }

    fn commit(&mut self, changes: Vec<Change>) -> Revision {
        self.revision += 1;
        self.log.push((Revision(self.revision), changes));
        Revision(self.revision)
    }

    fn expire(&mut self, now: Time) {
        let over: Vec<_> = self.leases.iter().filter(|(_, (_, at))| *at <= now).map(|(lease, _)| *lease).collect();
        for lease in over {
            self.leases.remove(&lease);
            let gone: Vec<_> = self.members.iter().filter(|(_, of)| **of == lease).map(|(node, _)| *node).collect();
            self.members.retain(|_, of| *of != lease);
            if !gone.is_empty() {
                self.commit(gone.into_iter().map(|node| Change::Member(node, None)).collect());
            }
        }
    }
}

#[derive(Debug)]
enum Event {
    Start(usize),
    Kill(usize),
    Cut(usize, Time),
    Compact,
    /// Ends leases, and notifies watches.
    Keeper,
    Tick(usize, u64),
    Arrive(usize, u32, EtcdRequest, bool),
    Answer(usize, u32, EtcdEvent),
    Stopped(usize, u32),
}

#[derive(Debug)]
struct Host {
    clock: Instant,
    life: u32,
    tick: u64,
    cut_until: Time,
    node: Option<EtcdNode>,
    running: Option<Placement>,
    stopping: bool,
    done: bool,
}

#[derive(Debug)]
struct Job {
    dice: Dice,
    queue: Queue<Event>,
    settings: Settings,
    hosts: Vec<Host>,
    etcd: Model,
    worlds: BTreeMap<Round, Vec<NodeId>>,
}

/// Live through the history of a seed. Returns the number of rounds.
///
/// # Errors
/// The first invariant that breaks, with the virtual time.
pub fn live(seed: u64) -> Result<u64, (Time, Violation)> {
    let mut dice = Dice::new(seed);
    let hosts = dice.between(1, 6) as usize;
    let max_nodes = dice.between(1, hosts as u64 + 1) as u32;
    let mut settings = Settings::new(dice.between(1, u64::from(max_nodes)) as u32, max_nodes);
    settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(10)));
    let base = Instant::now();
    let hosts = (0..hosts).map(|_| Host {
        clock: base + dice.duration((Duration::ZERO, Duration::from_secs(10_000_000))),
        life: 0,
        tick: 0,
        cut_until: Time::ZERO,
        node: None,
        running: None,
        stopping: false,
        done: false,
    });
    let hosts = hosts.collect();
    let (queue, etcd, worlds) = (Queue::new(), Model::default(), BTreeMap::new());
    let mut job = Job { queue, settings, hosts, etcd, worlds, dice };
    job.live().map_err(|violation| (job.queue.now(), violation))?;
    Ok(job.worlds.len() as u64)
}

impl Job {
    fn live(&mut self) -> Result<(), Violation> {
        let mut calm_at = Duration::from_secs(20);
        for host in 0..self.hosts.len() {
            let at = self.dice.duration((Duration::ZERO, Duration::from_secs(20)));
            self.queue.push(at, Event::Start(host));
        }
        for _ in 0..self.dice.between(0, 8) {
            let host = self.dice.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = self.dice.duration((Duration::ZERO, Duration::from_secs(120)));
            let lasts = self.dice.duration((Duration::from_millis(10), Duration::from_secs(40)));
            match self.dice.between(0, 2) {
                0 => {
                    self.queue.push(at, Event::Kill(host));
                    self.queue.push(at + lasts, Event::Start(host));
                }
                1 => self.queue.push(at, Event::Cut(host, at + lasts)),
                _ => self.queue.push(at, Event::Compact),
            }
            calm_at = calm_at.max(at + lasts);
        }
        self.queue.push(Time::ZERO, Event::Keeper);
        self.pass(calm_at + SETTLE_WITHIN)?;
        self.check_settled()?;
        if let Some(host) = self.hosts.iter_mut().find(|host| host.node.is_some()) {
            let now = host.clock + self.queue.now();
            if let Some(node) = &mut host.node {
                node.node_mut().ask(|node| node.close(Verdict::Succeeded { by: "a test".into() }), now);
            }
        }
        (0..self.hosts.len()).for_each(|host| self.queue.push(self.queue.now(), Event::Tick(host, 0)));
        self.pass(calm_at + SETTLE_WITHIN + Duration::from_secs(20))?;
        let unheard = self.hosts.iter().position(|host| host.node.is_some() && !host.done);
        unheard.map_or(Ok(()), |host| {
            Err(Violation::contract(format!("host {host} does not hear that the job was closed")))
        })
    }

    fn pass(&mut self, until: Time) -> Result<(), Violation> {
        while let Some(event) = self.queue.pop(until) {
            self.happen(event)?;
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.queue.now();
        match event {
            Event::Start(host) if self.hosts[host].node.is_none() => self.start(host),
            Event::Start(_) => {}
            Event::Kill(host) => {
                let host = &mut self.hosts[host];
                (host.node, host.running, host.stopping) = (None, None, false);
                host.life += 1;
            }
            Event::Cut(host, until) => {
                self.hosts[host].cut_until = until;
                if let Some((life, _)) = self.etcd.watches.remove(&host) {
                    self.queue.push(until, Event::Answer(host, life, EtcdEvent::WatchEnded));
                }
            }
            Event::Compact => self.etcd.compacted = self.etcd.revision,
            Event::Keeper => {
                self.etcd.expire(now);
                self.tell();
                self.queue.push(now + Duration::from_millis(100), Event::Keeper);
            }
            Event::Arrive(host, life, request, lost) => self.at_etcd(host, life, request, lost)?,
            Event::Tick(host, number) if number != 0 && number != self.hosts[host].tick => {}
            Event::Tick(host, _) => self.pump(host, None)?,
            Event::Answer(host, life, event) if life == self.hosts[host].life => self.pump(host, Some(event))?,
            Event::Stopped(host, life) if life == self.hosts[host].life => {
                self.hosts[host].stopping = false;
                self.join(host);
                self.pump(host, None)?;
            }
            Event::Answer(..) | Event::Stopped(..) => {}
        }
        Ok(())
    }

    fn start(&mut self, number: usize) {
        let node = NodeId(u128::from(self.dice.number()) << 64 | u128::from(self.dice.number()));
        let name = format!("host{number}");
        let hello = Hello::new("job", node, name.clone(), self.settings.clone());
        let hello = Hello { local_addr: Some(name), ..hello };
        let host = &mut self.hosts[number];
        host.life += 1;
        host.node = Some(EtcdNode::new(hello, host.clock + self.queue.now()));
        self.join(number);
        self.queue.push(self.queue.now(), Event::Tick(number, 0));
    }

    fn join(&mut self, number: usize) {
        let host = &mut self.hosts[number];
        let now = host.clock + self.queue.now();
        if let Some(node) = &mut host.node {
            node.node_mut()
                .ask(|node| node.join(40_000 + number as u16, None, None, Duration::from_secs(3600), now), now);
        }
    }

    /// Plays the part of the driver and of the agent.
    fn pump(&mut self, number: usize, event: Option<EtcdEvent>) -> Result<(), Violation> {
        let host = &mut self.hosts[number];
        let (now, life) = (host.clock + self.queue.now(), host.life);
        let Some(node) = &mut host.node else { return Ok(()) };
        if let Some(event) = event {
            node.on_event(event, now);
        }
        node.on_tick(now);
        let mut again = false;
        match node.node_mut().take_outcome() {
            Some(Ok(placement)) => host.running = Some(placement),
            Some(Err(JoinError::Closed { .. })) => host.done = true,
            Some(Err(JoinError::Connection(_) | JoinError::Timeout { .. })) => again = true,
            Some(Err(error)) => return Err(Violation::contract(format!("host {number}: {error}"))),
            None => {}
        }
        let view = node.node().view();
        if view.closed.is_some() {
            host.done = true;
        } else if view.waiting > 0 && host.running.take().is_some() {
            host.stopping = true;
            let takes = self.dice.duration((Duration::from_millis(10), Duration::from_secs(2)));
            self.queue.push(self.queue.now() + takes, Event::Stopped(number, life));
        }
        let requests = node.take_requests();
        if let Some(at) = node.next_deadline() {
            host.tick += 1;
            let at = at.saturating_duration_since(host.clock).max(self.queue.now() + Duration::from_micros(1));
            self.queue.push(at, Event::Tick(number, host.tick));
        }
        for request in requests {
            self.send(number, life, request);
        }
        if again {
            self.join(number);
            self.queue.push(self.queue.now(), Event::Tick(number, 0));
        }
        Ok(())
    }

    fn send(&mut self, host: usize, life: u32, request: EtcdRequest) {
        let now = self.queue.now();
        if self.hosts[host].cut_until > now {
            let event = match request {
                EtcdRequest::Watch { .. } => EtcdEvent::WatchEnded,
                // A lost renewal is made up for by the next one.
                EtcdRequest::KeepAlive { .. } => return,
                _ => EtcdEvent::Failed("etcd does not answer".into()),
            };
            self.queue.push(now + PATIENCE, Event::Answer(host, life, event));
            return;
        }
        let takes = self.dice.duration((Duration::from_micros(100), Duration::from_millis(5)));
        let lost = self.dice.chance(1) && matches!(request, EtcdRequest::Txn { .. });
        self.queue.push(now + takes, Event::Arrive(host, life, request, lost));
    }

    fn at_etcd(&mut self, host: usize, life: u32, request: EtcdRequest, lost: bool) -> Result<(), Violation> {
        let now = self.queue.now();
        self.etcd.expire(now);
        let event = match request {
            EtcdRequest::Grant { ttl } => {
                let lease = LeaseId(self.dice.number());
                self.etcd.leases.insert(lease, (ttl, now + ttl));
                EtcdEvent::Granted(lease)
            }
            EtcdRequest::KeepAlive { lease } => {
                let held = self.etcd.leases.get_mut(&lease).map(|(ttl, at)| *at = now + *ttl).is_some();
                EtcdEvent::Renewed { held }
            }
            EtcdRequest::Range => EtcdEvent::Snapshot(self.etcd.snapshot()),
            EtcdRequest::Txn { expect, state, lease } => {
                let there = self.etcd.state.as_ref().map_or(Revision(0), |(_, revision)| *revision);
                if there != expect {
                    EtcdEvent::Refused(self.etcd.snapshot())
                } else if !self.etcd.leases.contains_key(&lease) {
                    // etcd refuses a put under a lease that has ended.
                    EtcdEvent::Failed("requested lease not found".into())
                } else {
                    self.check_write(&state)?;
                    let me = self.hosts[host].node.as_ref().map(|_| host);
                    let mut changes = vec![Change::State(state.clone())];
                    if let Some(node) = me.and_then(|_| self.id(host, life)) {
                        self.etcd.members.insert(node, lease);
                        changes.push(Change::Member(node, Some(lease)));
                    }
                    let revision = self.etcd.commit(changes);
                    self.etcd.state = Some((state, revision));
                    EtcdEvent::Written(revision)
                }
            }
            EtcdRequest::Watch { from } if from.0 <= self.etcd.compacted => EtcdEvent::WatchEnded,
            EtcdRequest::Watch { from } => {
                self.etcd.watches.insert(host, (life, from.0));
                return Ok(());
            }
        };
        let takes = self.dice.duration((Duration::from_micros(100), Duration::from_millis(5)));
        if lost {
            let failed = EtcdEvent::Failed("the answer is lost".into());
            self.queue.push(now + PATIENCE, Event::Answer(host, life, failed));
        } else {
            self.queue.push(now + takes, Event::Answer(host, life, event));
        }
        Ok(())
    }

    fn id(&self, host: usize, life: u32) -> Option<NodeId> {
        let host = &self.hosts[host];
        host.node.as_ref().filter(|_| host.life == life).map(|node| node.node().id())
    }

    /// Send the watches the revisions that they have not got.
    fn tell(&mut self) {
        let watches: Vec<_> = self.etcd.watches.iter().map(|(host, watch)| (*host, *watch)).collect();
        for (host, (life, from)) in watches {
            let news: Vec<_> = self.etcd.log.iter().filter(|(revision, _)| revision.0 >= from).cloned().collect();
            for (revision, changes) in news {
                self.etcd.watches.insert(host, (life, revision.0 + 1));
                let event = EtcdEvent::Changed(revision, changes);
                self.queue.push(self.queue.now() + Duration::from_millis(1), Event::Answer(host, life, event));
            }
        }
    }

    fn check_write(&mut self, state: &[u8]) -> Result<(), Violation> {
        let decode = |state: &[u8]| Blob::decode(state).map_err(|error| Violation::contract(error.to_string()));
        let (after, before) = (decode(state)?, self.etcd.state.as_ref().map(|(state, _)| decode(state)).transpose()?);
        let last = before.as_ref().map_or(Round(0), Blob::round);
        if after.round() == last {
            return Ok(());
        }
        let (members, _) = after.world().ok_or_else(|| Violation::contract("a round without a world".into()))?;
        let closed = before.as_ref().is_some_and(|before| before.closed().is_some());
        let size = (self.settings.min_nodes as usize..=self.settings.max_nodes as usize).contains(&members.len());
        let (next, once) = (after.round() == last.next(), !self.worlds.contains_key(&after.round()));
        if closed || !size || !next || !once {
            return Err(Violation::contract(format!(
                "round {} after {last} with {members:?}, closed: {closed}",
                after.round()
            )));
        }
        let now = self.queue.now();
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let (Some(node), Some(placement)) = (&mut host.node, &host.running) else { continue };
            node.node_mut().on_tick(host.clock + now);
            if placement.round < after.round() && node.node().view().waiting == 0 {
                return Err(Violation::contract(format!("host {number} runs round {} undisturbed", placement.round)));
            }
        }
        self.worlds.insert(after.round(), members);
        Ok(())
    }

    fn check_settled(&self) -> Result<(), Violation> {
        let alive = self.hosts.iter().filter(|host| host.node.is_some()).count();
        let expected = alive.min(self.settings.max_nodes as usize);
        let mut running = BTreeMap::new();
        for placement in self.hosts.iter().filter_map(|host| host.running.as_ref()) {
            *running.entry(placement.round).or_insert(0) += 1;
        }
        if alive < self.settings.min_nodes as usize || (running.len() == 1 && running.values().all(|n| *n == expected))
        {
            return Ok(());
        }
        let waits: Vec<_> = self.hosts.iter().filter_map(|host| host.node.as_ref()?.node().machine().waits()).collect();
        Err(Violation::contract(format!("{expected} nodes should run in one world: {running:?}; {waits:?}")))
    }
}
