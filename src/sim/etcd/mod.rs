//! Jobs over a model of etcd: nodes of [`crate::rendezvous::cell::etcd`] with separate clocks, and PyTorch's agents. Requests and
//! answers may be lost, watches end, and revisions are compacted away.

mod server;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use self::server::Etcd;
use super::engine::dice::Dice;
use super::engine::history::{Failure, History};
use super::engine::paths::{End, HostId, Partition};
use super::engine::queue::Time;
use super::engine::{Engine, Happens, Model};
use super::shared::{self, Host, Joined, Node};
use super::worlds::Violation;
use crate::rendezvous::cell::blob::Blob;
use crate::rendezvous::cell::etcd::{EtcdEvent, EtcdNode, EtcdRequest, LeaseId};
use crate::rendezvous::cell::node::CellNode;
use crate::rendezvous::protocol::message::{Hello, NodeId, Round};
use crate::rendezvous::protocol::settings::Settings;

/// How long a caller waits for etcd's answer before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// Transit time of a message.
const TRANSIT: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));

/// What happens in it.
#[derive(Debug)]
enum Event {
    Start(HostId),
    Kill(HostId),
    Cut(HostId, Time),
    Compact,
    /// etcd ends leases, and notifies watches.
    Keeper,
    Tick(HostId, u64),
    /// A request of a process on the host arrives. If so drawn, its answer gets lost.
    Arrive(HostId, u32, EtcdRequest, bool),
    Answer(HostId, u32, EtcdEvent),
    Stopped(HostId, u32),
}

#[derive(Debug)]
struct Job {
    engine: Engine<Event>,
    settings: Settings,
    hosts: Vec<Host<EtcdNode>>,
    etcd: Etcd,
    worlds: BTreeMap<Round, Vec<NodeId>>,
}

/// The result of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EtcdReport {
    /// Rounds that completed.
    pub rounds: u64,
    /// Digest of all events.
    pub digest: u64,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<EtcdReport, Box<Failure>> {
    let mut job = Job::draw(seed);
    if keep_history {
        job.engine.record.keep_lines();
    }
    let calm_at = job.plan();
    let job = job.live(seed, calm_at)?;
    Ok(EtcdReport { rounds: job.worlds.len() as u64, digest: job.engine.record.digest().0 })
}

impl Job {
    fn draw(seed: u64) -> Job {
        let mut dice = Dice::new(seed);
        let hosts = dice.between(1, 6) as usize;
        let max_nodes = dice.between(1, hosts as u64 + 1) as u32;
        let mut settings = Settings::new(dice.between(1, u64::from(max_nodes)) as u32, max_nodes);
        settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(10)));
        Job {
            hosts: shared::draw_hosts(hosts, &mut dice),
            settings,
            etcd: Etcd::default(),
            worlds: BTreeMap::new(),
            engine: Engine::new(dice, TRANSIT),
        }
    }

    /// Draw starts and faults. Returns the time after which no fault happens.
    fn plan(&mut self) -> Time {
        let Engine { dice, queue, .. } = &mut self.engine;
        let mut calm_at = Duration::from_secs(20);
        for host in 0..self.hosts.len() {
            let at = dice.duration((Duration::ZERO, Duration::from_secs(20)));
            queue.push(at, Event::Start(host));
        }
        for _ in 0..dice.between(0, 8) {
            let host = dice.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = dice.duration((Duration::ZERO, Duration::from_secs(120)));
            let lasts = dice.duration((Duration::from_millis(10), Duration::from_secs(40)));
            match dice.between(0, 2) {
                0 => {
                    queue.push(at, Event::Kill(host));
                    queue.push(at + lasts, Event::Start(host));
                }
                1 => queue.push(at, Event::Cut(host, at + lasts)),
                _ => queue.push(at, Event::Compact),
            }
            calm_at = calm_at.max(at + lasts);
        }
        queue.push(Time::ZERO, Event::Keeper);
        calm_at
    }

    fn start(&mut self, number: HostId) {
        let [high, low] = [0; 2].map(|_| u128::from(self.engine.dice.number()));
        let (name, now) = (format!("host{number}"), self.engine.now());
        let hello = Hello::new("job", NodeId(high << 64 | low), name.clone(), self.settings.clone());
        let hello = Hello { local_addr: Some(name), ..hello };
        let host = &mut self.hosts[number];
        let node = EtcdNode::new(hello, host.clock_at(now));
        host.start(node, false, now);
        self.engine.push(now, Event::Tick(number, 0));
    }

    /// Plays the part of the driver and of the agent.
    fn pump(&mut self, number: HostId, event: Option<EtcdEvent>) -> Result<(), Violation> {
        let now = self.engine.now();
        let host = &mut self.hosts[number];
        let clock = host.clock_at(now);
        let Some(node) = &mut host.node else { return Ok(()) };
        if let Some(event) = event {
            node.on_event(event, clock);
        }
        node.on_tick(clock);
        let joined = host.take_outcome(number)?;
        if host.look(number)? {
            let takes = self.engine.dice.duration((Duration::from_millis(10), Duration::from_secs(2)));
            self.engine.push_after(takes, Event::Stopped(number, host.life));
        }
        let requests = host.node.as_mut().map(EtcdNode::take_requests).unwrap_or_default();
        if let Some((at, tick)) = host.arm(now) {
            self.engine.push(at, Event::Tick(number, tick));
        }
        let life = host.life;
        for request in requests {
            self.send(number, life, request);
        }
        if joined == Some(Joined::Again) {
            self.hosts[number].join(false, now);
            self.engine.push(now, Event::Tick(number, 0));
        }
        Ok(())
    }

    fn send(&mut self, host: HostId, life: u32, request: EtcdRequest) {
        if self.engine.paths.cut_now(host, End::Coordinator, self.engine.now()).is_some() {
            let event = match request {
                EtcdRequest::Watch { .. } => EtcdEvent::WatchEnded,
                // A lost renewal is made up for by the next one.
                EtcdRequest::KeepAlive { .. } => return,
                _ => EtcdEvent::Failed("etcd does not answer".into()),
            };
            return self.engine.push_after(PATIENCE, Event::Answer(host, life, event));
        }
        let takes = self.engine.transit();
        let lost = self.engine.dice.chance(1) && matches!(request, EtcdRequest::Txn { .. });
        self.engine.push_after(takes, Event::Arrive(host, life, request, lost));
    }

    fn arrive(&mut self, host: HostId, life: u32, request: EtcdRequest, lost: bool) -> Result<(), Violation> {
        let now = self.engine.now();
        self.etcd.expire(now);
        if let EtcdRequest::Txn { expect, state, lease } = &request
            && self.etcd.accepts(*expect, *lease)
        {
            self.check_write(state)?;
        }
        let of = &self.hosts[host];
        let node = of.node.as_ref().filter(|_| of.life == life).map(|node| node.node().id());
        let lease = || LeaseId(self.engine.dice.number());
        let Some(event) = self.etcd.answer((host, life), node, request, lease, now) else { return Ok(()) };
        let takes = self.engine.transit();
        let (takes, event) =
            if lost { (PATIENCE, EtcdEvent::Failed("the answer is lost".into())) } else { (takes, event) };
        self.engine.push_after(takes, Event::Answer(host, life, event));
        Ok(())
    }

    /// Judge a state that is about to be written.
    fn check_write(&mut self, state: &[u8]) -> Result<(), Violation> {
        let decode = |state: &[u8]| Blob::decode(state).map_err(|error| Violation::contract(error.to_string()));
        let (after, before) = (decode(state)?, self.etcd.state().map(decode).transpose()?);
        let last = before.as_ref().map_or(Round(0), Blob::round);
        let round = after.round();
        if round == last {
            return Ok(());
        }
        let (members, _) = after.world().ok_or_else(|| Violation::contract("a round without a world".into()))?;
        let closed = before.as_ref().is_some_and(|before| before.closed().is_some());
        let size = (self.settings.min_nodes as usize..=self.settings.max_nodes as usize).contains(&members.len());
        let (next, once) = (round == last.next(), !self.worlds.contains_key(&round));
        if closed || !size || !next || !once {
            let text = format!("round {round} after {last} with {members:?}, closed: {closed}");
            return Err(Violation::contract(text));
        }
        let now = self.engine.now();
        for (number, host) in self.hosts.iter_mut().enumerate() {
            if let Some(earlier) = host.runs_undisturbed(round, now) {
                return Err(Violation::contract(format!("host {number} runs round {earlier} undisturbed")));
            }
        }
        self.worlds.insert(round, members);
        Ok(())
    }
}

impl Node for EtcdNode {
    fn inner(&self) -> &CellNode {
        self.node()
    }

    fn inner_mut(&mut self) -> &mut CellNode {
        self.node_mut()
    }

    fn next_deadline(&self) -> Option<Instant> {
        EtcdNode::next_deadline(self)
    }
}

impl Model for Job {
    type Event = Event;
    type Broken = Violation;

    fn engine(&mut self) -> &mut Engine<Event> {
        &mut self.engine
    }

    /// No process stands still here.
    fn place(&self, _: &Event) -> Happens {
        Happens::Outside
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.engine.now();
        match event {
            Event::Start(host) => {
                if self.hosts[host].node.is_none() {
                    self.start(host);
                }
            }
            Event::Kill(host) => self.hosts[host].kill(),
            Event::Cut(host, until) => {
                self.engine.paths.cut(host, End::Coordinator, until, Partition::Lost);
                if let Some(life) = self.etcd.end_watch(host) {
                    self.engine.push(until, Event::Answer(host, life, EtcdEvent::WatchEnded));
                }
            }
            Event::Compact => self.etcd.compact(),
            Event::Keeper => {
                self.etcd.expire(now);
                for (host, life, event) in self.etcd.news() {
                    self.engine.push_after(Duration::from_millis(1), Event::Answer(host, life, event));
                }
                self.engine.push_after(Duration::from_millis(100), Event::Keeper);
            }
            Event::Arrive(host, life, request, lost) => return self.arrive(host, life, request, lost),
            Event::Tick(host, tick) => {
                if self.hosts[host].wants(tick) {
                    return self.pump(host, None);
                }
            }
            Event::Answer(host, life, event) => {
                if self.hosts[host].life == life {
                    return self.pump(host, Some(event));
                }
            }
            Event::Stopped(host, life) => {
                if self.hosts[host].life == life {
                    self.hosts[host].join(false, now);
                    return self.pump(host, None);
                }
            }
        }
        Ok(())
    }
}

impl History for Job {
    /// A lease that ends (15 s) twice, workers that stop (2 s), and two last calls (10 s each).
    const SETTLE_WITHIN: Duration = Duration::from_secs(90);
    const GONE_WITHIN: Duration = Duration::from_secs(20);

    fn calm(&mut self) {}

    fn check_settled(&mut self) -> Result<(), Violation> {
        shared::check_settled(&self.hosts, &self.settings)
    }

    fn close(&mut self) -> Vec<HostId> {
        let now = self.engine.now();
        let by = self.hosts.iter().position(|host| host.node.is_some());
        if let Some(by) = by {
            self.hosts[by].close(by, now);
        }
        (0..self.hosts.len()).for_each(|host| self.engine.push(now, Event::Tick(host, 0)));
        by.into_iter().collect()
    }

    fn check_ended(&mut self, _: &[HostId]) -> Result<(), Violation> {
        shared::check_all_done(&self.hosts)
    }
}
