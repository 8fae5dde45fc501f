//! Jobs over a model of etcd: nodes of [`elastic_rs::rendezvous::etcd`] with separate clocks, and PyTorch's agents. Requests and answers are
//! late or lost, processes stand still, watches lag and end, revisions are compacted away, and there are times without a leader.

mod server;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use self::server::{Etcd, Outage};
use super::engine::dice::Dice;
use super::engine::history::{Failure, History};
use super::engine::paths::{End, HostId, Partition};
use super::engine::queue::Time;
use super::engine::{Engine, Happens, Model};
use super::records::Records;
use super::shared::{self, Host, Joined, Node};
use super::worlds::Violation;
use elastic_rs::rendezvous::cell::blob::Blob;
use elastic_rs::rendezvous::cell::node::CellNode;
use elastic_rs::rendezvous::etcd::interface::{EtcdEvent, EtcdRequest, LeaseId};
use elastic_rs::rendezvous::etcd::machine::EtcdNode;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Round};
use elastic_rs::rendezvous::messages::settings::Settings;

/// How long a driver waits for etcd's answer before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long etcd holds a request for which there is no leader (`ReqTimeout`).
const HELD: Duration = Duration::from_secs(7);
/// Transit time of a message.
const TRANSIT: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));
/// Transit time of a message that is late.
const LATE: (Duration, Duration) = (Duration::ZERO, Duration::from_secs(10));
/// How often etcd ends leases and sends changes.
const BEAT: Duration = Duration::from_millis(20);
/// How long a node without etcd goes on (`coordinator_timeout`).
const TIMEOUT: Duration = Duration::from_secs(300);

/// A defect that is put back, to see whether the histories find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Defect {
    /// None.
    #[default]
    None,
    /// A renewal counts from the last asking, instead of its own.
    RenewalFromLastAsking,
    /// What members say of their leader is not heard.
    NoSurvey,
}

/// What happens in it.
#[derive(Debug)]
enum Event {
    Start(HostId),
    Kill(HostId),
    Stall(HostId, Time),
    Resume(HostId),
    Cut(HostId, Time),
    Compact,
    /// Somebody deletes the state.
    Delete,
    LoseLeader(Outage),
    /// The watch of a host says nothing until then.
    Lag(HostId, Time),
    /// etcd ends leases, and notifies watches.
    Keeper,
    Tick(HostId, u64),
    /// A request of a process on the host arrives: its number, and when it was sent.
    Arrive(HostId, u32, NodeId, EtcdRequest, (u64, Time)),
    /// The answer to the request with this number.
    Answer(HostId, u32, u64, EtcdEvent),
    Stopped(HostId, u32),
}

#[derive(Debug)]
struct Job {
    engine: Engine<Event>,
    settings: Settings,
    hosts: Vec<Host<EtcdNode>>,
    etcd: Etcd,
    worlds: BTreeMap<Round, Vec<NodeId>>,
    records: Records,
    defect: Defect,
    /// Percentage of messages that are late, and of requests whose answers get lost.
    late: u64,
    lost: u64,
    /// By host: until when its watch lags.
    lags: Vec<Time>,
    /// By host: the number of its request that is under way, and when its last renewal was requested.
    asked: Vec<(u64, Option<Instant>)>,
    /// Number of transactions.
    txns: u64,
}

/// The result of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EtcdReport {
    /// Nodes.
    pub hosts: usize,
    /// Rounds that completed.
    pub rounds: u64,
    /// Transactions that arrived.
    pub txns: u64,
    /// Digest of all events.
    pub digest: u64,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<EtcdReport, Box<Failure>> {
    live_with(Defect::None, seed, keep_history)
}

/// Live through the history of a seed, with a defect.
///
/// # Errors
/// As [`live`].
pub fn live_with(defect: Defect, seed: u64, keep_history: bool) -> Result<EtcdReport, Box<Failure>> {
    let mut job = Job::draw(seed);
    job.defect = defect;
    if keep_history {
        job.engine.record.keep_lines();
    }
    let calm_at = job.plan();
    Ok(job.live(seed, calm_at)?.report())
}

/// Live through the history of a job of so many nodes that start within two seconds, without faults.
///
/// # Errors
/// As [`live`].
pub fn live_quietly(seed: u64, hosts: usize) -> Result<EtcdReport, Box<Failure>> {
    let mut job = Job::of(hosts, Settings::new(hosts as u32, hosts as u32), Dice::new(seed));
    for host in 0..hosts {
        let at = job.engine.dice.duration((Duration::ZERO, Duration::from_secs(2)));
        job.engine.push(at, Event::Start(host));
    }
    job.engine.push(Time::ZERO, Event::Keeper);
    Ok(job.live(seed, Duration::from_secs(2))?.report())
}

/// Live through the history of a running job of three nodes whose etcd has no leader for longer than a lease, twice. The members say so.
/// No node is disturbed, and one that starts meanwhile is let in soon after.
///
/// # Errors
/// As [`live`].
pub fn live_without_leader(defect: Defect, seed: u64) -> Result<EtcdReport, Box<Failure>> {
    let mut settings = Settings::new(2, 3);
    settings.last_call_timeout = Duration::from_secs(1);
    let mut job = Job::of(4, settings, Dice::new(seed));
    job.defect = defect;
    (0..3).for_each(|host| job.engine.push(Time::ZERO, Event::Start(host)));
    job.engine.push(Time::ZERO, Event::Keeper);
    for at in [20, 110] {
        let from = Duration::from_secs(at) + job.engine.dice.duration((Duration::ZERO, Duration::from_secs(6)));
        let until = from + job.engine.dice.duration((Duration::from_secs(16), Duration::from_secs(60)));
        job.engine.push(from, Event::LoseLeader(Outage { from, until, reported: true }));
    }
    job.engine.push(Duration::from_secs(40), Event::Start(3));
    let calm_at = Duration::from_secs(180);
    let job = job.live(seed, calm_at)?;
    match job.worlds.len() {
        1 => Ok(job.report()),
        rounds => {
            let text = format!("{rounds} rounds formed, although only etcd's leader was away");
            Err(Failure::new(seed, &job.engine, Violation::contract(text)))
        }
    }
}

/// Live through the history of a job whose state somebody deletes. Its nodes form another world.
///
/// # Errors
/// As [`live`].
pub fn live_through_deletion(seed: u64) -> Result<EtcdReport, Box<Failure>> {
    let mut job = Job::of(3, Settings::new(3, 3), Dice::new(seed));
    (0..3).for_each(|host| job.engine.push(Time::ZERO, Event::Start(host)));
    job.engine.push(Time::ZERO, Event::Keeper);
    let at = job.engine.dice.duration((Duration::from_millis(1), Duration::from_secs(30)));
    job.engine.push(at, Event::Delete);
    Ok(job.live(seed, at)?.report())
}

impl Job {
    fn of(hosts: usize, settings: Settings, mut dice: Dice) -> Job {
        Job {
            hosts: shared::draw_hosts(hosts, &mut dice),
            settings,
            etcd: Etcd::default(),
            worlds: BTreeMap::new(),
            records: Records::default(),
            defect: Defect::None,
            late: 0,
            lost: 0,
            lags: vec![Time::ZERO; hosts],
            asked: vec![(0, None); hosts],
            txns: 0,
            engine: Engine::new(dice, TRANSIT),
        }
    }

    fn draw(seed: u64) -> Job {
        let mut dice = Dice::new(seed);
        let hosts = dice.between(1, 6) as usize;
        let max_nodes = dice.between(1, hosts as u64 + 1) as u32;
        let mut settings = Settings::new(dice.between(1, u64::from(max_nodes)) as u32, max_nodes);
        settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(10)));
        let (late, lost) = ([0, 0, 2, 20][dice.between(0, 3) as usize], [0, 1, 5][dice.between(0, 2) as usize]);
        Job { late, lost, ..Job::of(hosts, settings, dice) }
    }

    fn report(&self) -> EtcdReport {
        let digest = self.engine.record.digest().0;
        EtcdReport { hosts: self.hosts.len(), rounds: self.worlds.len() as u64, txns: self.txns, digest }
    }

    /// Draw starts and faults. Returns the time after which no fault happens.
    fn plan(&mut self) -> Time {
        let Engine { dice, queue, .. } = &mut self.engine;
        let mut calm_at = Duration::from_secs(20);
        for host in 0..self.hosts.len() {
            let at = dice.duration((Duration::ZERO, Duration::from_secs(20)));
            queue.push(at, Event::Start(host));
        }
        for _ in 0..dice.between(0, 10) {
            let host = dice.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = dice.duration((Duration::ZERO, Duration::from_secs(120)));
            let lasts = dice.duration((Duration::from_millis(10), Duration::from_secs(40)));
            let until = at + lasts;
            match dice.between(0, 7) {
                0 => {
                    queue.push(at, Event::Kill(host));
                    queue.push(until, Event::Start(host));
                }
                1 => queue.push(at, Event::Cut(host, until)),
                2 => queue.push(at, Event::Compact),
                3 => queue.push(at, Event::Stall(host, until)),
                4 => queue.push(at, Event::Lag(host, at + lasts / 8)),
                // A leader is usually replaced within seconds.
                5 | 6 => queue.push(
                    at,
                    Event::LoseLeader(Outage { from: at, until: at + lasts / 10, reported: dice.chance(50) }),
                ),
                _ => queue.push(at, Event::LoseLeader(Outage { from: at, until, reported: dice.chance(70) })),
            }
            calm_at = calm_at.max(until);
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
        let node = EtcdNode::new(hello, "etcd".to_owned(), TIMEOUT, host.clock_at(now));
        host.start(node, now);
        self.asked[number].1 = None;
        self.engine.push(now, Event::Tick(number, 0));
    }

    /// Plays the part of the driver and of the agent.
    fn pump(&mut self, number: HostId, event: Option<EtcdEvent>) -> Result<(), Violation> {
        let now = self.engine.now();
        let clock = self.hosts[number].clock_at(now);
        if let (Some(node), Some(event)) = (&mut self.hosts[number].node, event) {
            node.on_event(event, clock);
        }
        loop {
            let host = &mut self.hosts[number];
            let Some(node) = &mut host.node else { return Ok(()) };
            node.on_tick(clock);
            let (incarnation, id, requests) = (host.incarnation, node.node().id(), node.take_requests());
            for request in requests {
                self.send(number, incarnation, id, request);
            }
            let host = &mut self.hosts[number];
            if let Some(Joined::Again) = host.take_outcome(number)? {
                host.join(now);
                continue;
            }
            if host.open_store(now) {
                continue;
            }
            if host.look(number)? {
                let takes = self.engine.dice.duration((Duration::from_millis(10), Duration::from_secs(2)));
                self.engine.push_after(takes, Event::Stopped(number, host.incarnation));
            }
            if let Some((at, tick)) = host.arm(now) {
                self.engine.push(at, Event::Tick(number, tick));
            }
            return host.node.as_mut().map_or(Ok(()), |node| self.records.take(node.node_mut()));
        }
    }

    /// Draws the transit time of a message.
    fn transit(&mut self) -> Duration {
        let takes = self.engine.transit();
        match self.engine.dice.chance(self.late) {
            true => takes + self.engine.dice.duration(LATE),
            false => takes,
        }
    }

    fn send(&mut self, host: HostId, incarnation: u32, node: NodeId, request: EtcdRequest) {
        let now = self.engine.now();
        let is_main = is_main(&request);
        if is_main {
            // The driver gives up after its patience. The request may still be performed.
            self.asked[host].0 += 1;
            let failed = EtcdEvent::Failed { error: "etcd does not answer".into(), lease_gone: false };
            self.engine.push_after(PATIENCE, Event::Answer(host, incarnation, self.asked[host].0, failed));
        }
        if let EtcdRequest::KeepAlive { asked, .. } = request {
            self.asked[host].1 = Some(asked);
        }
        let cut = self.engine.paths.cut_now(host, End::Coordinator, now).is_some();
        match request {
            EtcdRequest::Watch { .. } if cut => {
                return self.engine.push_after(PATIENCE, Event::Answer(host, incarnation, 0, EtcdEvent::WatchEnded));
            }
            EtcdRequest::Survey { asked } => return self.survey(host, incarnation, asked, cut),
            _ if cut => return,
            _ => {}
        }
        // Watches of one connection do not overtake one another.
        let is_watch = matches!(request, EtcdRequest::Watch { .. });
        let takes = if is_watch { self.engine.transit() } else { self.transit() };
        let number = if is_main { self.asked[host].0 } else { 0 };
        self.engine.push_after(takes, Event::Arrive(host, incarnation, node, request, (number, now)));
    }

    /// The members are asked one after another.
    fn survey(&mut self, host: HostId, incarnation: u32, asked: Instant, cut: bool) {
        let now = self.engine.now();
        let mut at = now;
        let times = [0; 3].map(|_| {
            at += self.engine.dice.duration((Duration::ZERO, PATIENCE / 3));
            at
        });
        let leaderless = match (cut, self.etcd.knows_no_leader(times)) {
            (false, Some(leaderless)) => leaderless && self.defect != Defect::NoSurvey,
            _ => {
                at = now + PATIENCE;
                false
            }
        };
        self.engine.push(at, Event::Answer(host, incarnation, 0, EtcdEvent::Surveyed { asked, leaderless }));
    }

    fn arrive(
        &mut self,
        host: HostId,
        incarnation: u32,
        node: NodeId,
        request: EtcdRequest,
        (number, sent): (u64, Time),
    ) -> Result<(), Violation> {
        let now = self.engine.now();
        if let Some(outage) = self.etcd.outage(now) {
            // A driver notices that its watch says nothing by asking for its progress.
            if matches!(request, EtcdRequest::Watch { .. }) {
                self.engine.push_after(PATIENCE, Event::Answer(host, incarnation, 0, EtcdEvent::WatchEnded));
            } else if outage.until <= sent + HELD {
                self.engine.push(outage.until, Event::Arrive(host, incarnation, node, request, (number, sent)));
            }
            return Ok(());
        }
        self.etcd.expire(now);
        if let EtcdRequest::Txn { state, .. } = &request {
            self.txns += 1;
            if self.etcd.accepts(&request) {
                self.check_write(state)?;
            }
        }
        if matches!(request, EtcdRequest::Watch { .. }) && (self.hosts[host].incarnation != incarnation) {
            return Ok(());
        }
        let lease = || LeaseId(self.engine.dice.number() | 1);
        let Some(event) = self.etcd.answer((host, incarnation), node, request, lease, now) else { return Ok(()) };
        if !self.engine.dice.chance(self.lost) {
            let takes = self.transit();
            self.engine.push_after(takes, Event::Answer(host, incarnation, number, event));
        }
        Ok(())
    }

    /// The driver hands an event to the node, as it is or as a defective driver would.
    fn on_answer(&mut self, host: HostId, number: u64, mut event: EtcdEvent) -> Result<(), Violation> {
        if number != 0 {
            if number != self.asked[host].0 {
                return Ok(());
            }
            // What follows is no answer to this request.
            self.asked[host].0 += 1;
        }
        if let (EtcdEvent::Renewed { asked, .. }, Defect::RenewalFromLastAsking) = (&mut event, self.defect) {
            *asked = self.asked[host].1.unwrap_or(*asked);
        }
        self.pump(host, Some(event))
    }

    /// Judge a state that is about to be written.
    fn check_write(&mut self, state: &[u8]) -> Result<(), Violation> {
        let decode = |state: &[u8]| Blob::decode(state).map_err(|error| Violation::contract(error.to_string()));
        let (after, before) = (decode(state)?, self.etcd.state().map(decode).transpose()?);
        // Without a state, the nodes go on from the rounds that they have seen.
        let last = match &before {
            Some(before) => before.round(),
            None => self.worlds.last_key_value().map_or(Round(0), |(round, _)| *round),
        };
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
        // Once somebody has deleted the state, nobody knows whose workers are being stopped.
        let known = before.as_ref().is_some_and(|before| before.world().is_some());
        shared::check_alone(&mut self.hosts, &self.engine, round, known)?;
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

    fn happens(&self, event: &Event) -> Happens {
        match event {
            Event::Tick(host, _) | Event::Answer(host, ..) | Event::Stopped(host, _) => Happens::In(Some(*host)),
            _ => Happens::Outside,
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.engine.now();
        match event {
            Event::Start(host) => {
                if self.hosts[host].node.is_none() {
                    self.start(host);
                }
            }
            Event::Kill(host) => {
                self.hosts[host].kill();
                self.engine.processes.end(Some(host), now);
            }
            Event::Stall(host, until) => {
                self.engine.processes.stall(Some(host), until);
                self.engine.push(until, Event::Resume(host));
            }
            Event::Resume(host) => return self.resume(Some(host)),
            Event::Cut(host, until) => {
                self.engine.paths.cut(host, End::Coordinator, until, Partition::Lost);
                if let Some(incarnation) = self.etcd.end_watch(host) {
                    self.engine.push(until, Event::Answer(host, incarnation, 0, EtcdEvent::WatchEnded));
                }
            }
            Event::Compact => self.etcd.compact(),
            Event::Delete => self.etcd.delete_state(),
            Event::LoseLeader(outage) => {
                self.etcd.expire(now);
                self.etcd.lose_leader(outage);
                // Streams end after three elections without a leader.
                if outage.until > now + Duration::from_secs(3) {
                    for (host, incarnation) in self.etcd.end_watches() {
                        let ended = Event::Answer(host, incarnation, 0, EtcdEvent::WatchEnded);
                        self.engine.push_after(Duration::from_secs(3), ended);
                    }
                }
            }
            Event::Lag(host, until) => self.lags[host] = until,
            Event::Keeper => {
                if self.etcd.outage(now).is_none() {
                    self.etcd.expire(now);
                }
                for host in (0..self.hosts.len()).filter(|host| self.lags[*host] <= now) {
                    for (incarnation, event) in self.etcd.news(host) {
                        self.engine.push_after(Duration::from_millis(1), Event::Answer(host, incarnation, 0, event));
                    }
                }
                self.engine.push_after(BEAT, Event::Keeper);
            }
            Event::Arrive(host, incarnation, node, request, sent) => {
                return self.arrive(host, incarnation, node, request, sent);
            }
            Event::Tick(host, tick) => {
                if self.hosts[host].wants(tick) {
                    return self.pump(host, None);
                }
            }
            Event::Answer(host, incarnation, number, event) => {
                if self.hosts[host].incarnation == incarnation {
                    return self.on_answer(host, number, event);
                }
            }
            Event::Stopped(host, incarnation) => {
                if self.hosts[host].incarnation == incarnation {
                    self.hosts[host].join(now);
                    return self.pump(host, None);
                }
            }
        }
        Ok(())
    }
}

/// Whether a request is one of those of which one is under way at a time.
fn is_main(request: &EtcdRequest) -> bool {
    matches!(
        request,
        EtcdRequest::Grant { .. } | EtcdRequest::Range | EtcdRequest::PutWish { .. } | EtcdRequest::Txn { .. }
    )
}

impl History for Job {
    /// A lease that ends after a leader was lost (twice 15 s), workers that stop (2 s), two last calls (10 s each), and proposers that are
    /// gone (5 s each).
    const SETTLE_WITHIN: Duration = Duration::from_secs(120);
    const GONE_WITHIN: Duration = Duration::from_secs(20);

    fn calm(&mut self) {
        (self.late, self.lost) = (0, 0);
    }

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
        shared::check_all_done(&self.hosts)?;
        let now = self.engine.now();
        for number in 0..self.hosts.len() {
            self.hosts[number].leave(now);
            self.pump(number, None)?;
        }
        self.pass(now + PATIENCE)?;
        self.records.check(false)?;
        match self.etcd.left() {
            (0, 0) => Ok(()),
            (leases, keys) => {
                Err(Violation::contract(format!("all have left, but not {leases} leases and {keys} keys of nodes")))
            }
        }
    }
}
