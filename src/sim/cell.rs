//! Jobs over one shared cell: several nodes of [`crate::rendezvous::cell`] with separate clocks, a cell that delays and loses
//! operations, and PyTorch's agents. The invariants are those of jobs with a coordinator, checked on the cell's states.

mod checks;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::queue::{Dice, Queue, Time};
use super::worlds::Violation;
use crate::rendezvous::cell::node::{CellCommand, CellNode, Liveness};
use crate::rendezvous::node::machine::{JoinError, NodeMachine};
use crate::rendezvous::protocol::message::{Hello, NodeId, Placement, Round, Verdict};
use crate::rendezvous::protocol::settings::Settings;

/// How long a caller waits for the cell's answer before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time after the last fault within which the job settles. These may follow one another: a lease that is noticed late (twice
/// 15 s, because a node that was stopped charges others 2.5 s a look at most), workers that stop (5 s), and two last calls (30 s
/// each).
const SETTLE_WITHIN: Duration = Duration::from_secs(150);
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// The result of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CellReport {
    /// Nodes.
    pub hosts: usize,
    /// Rounds that completed.
    pub rounds: u64,
    /// Successful writes, and writes that were refused because another was first.
    pub writes: (u64, u64),
}

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    Tick(usize, u64),
    /// A node's request has arrived at the cell. If so drawn, its answer gets lost.
    Arrive(usize, u32, CellCommand, u64, bool),
    Answer(usize, u32, Answer),
    Stopped(usize, u32),
    Kill(usize),
    Stall(usize, Time),
    Cut(usize, Time),
    /// The agent gives up its join (Ctrl-C), and joins again after this time.
    Abandon(usize, Duration),
}

#[derive(Clone, Debug)]
enum Answer {
    State(Option<Vec<u8>>, u64),
    Written(u64),
    Conflict(Option<Vec<u8>>, u64),
    Failed,
}

#[derive(Clone, Debug)]
enum Agent {
    Joining,
    Running(Placement),
    Stopping,
    Done,
}

#[derive(Debug)]
struct Host {
    /// Its clock. No node reads another node's clock.
    clock: Instant,
    life: u32,
    node: Option<CellNode>,
    agent: Agent,
    /// The port of the store that this node has opened for workers. Each join opens a new one.
    store: u16,
    /// The last version of the cell that this node was told.
    token: u64,
    tick: u64,
    stalled_until: Time,
    cut_until: Time,
    held: Vec<Event>,
}

/// One job over one cell.
#[derive(Debug)]
struct Job {
    dice: Dice,
    /// Draws abandoned joins, apart from everything else.
    abandons: Dice,
    queue: Queue<Event>,
    settings: Settings,
    hosts: Vec<Host>,
    slowest: Duration,
    losses: u64,
    cell: Option<Vec<u8>>,
    version: u64,
    worlds: BTreeMap<Round, (Vec<NodeId>, (String, u16))>,
    report: CellReport,
    calm: bool,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks, with the virtual time.
pub fn live(seed: u64) -> Result<CellReport, (Time, Violation)> {
    let mut dice = Dice::new(seed);
    let hosts = dice.between(1, 8) as usize;
    let max_nodes = dice.between(1, hosts as u64 + 1) as u32;
    let mut settings = Settings::new(dice.between(1, u64::from(max_nodes)) as u32, max_nodes);
    settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(30)));
    settings.settle_timeout = dice.duration((Duration::ZERO, Duration::from_secs(3)));
    settings.keep_alive_interval = dice.duration((Duration::from_secs(3), Duration::from_secs(5)));
    let slowest = Duration::from_millis([2, 20, 200][dice.between(0, 2) as usize]);
    let losses = [0, 0, 2, 10][dice.between(0, 3) as usize];
    let base = Instant::now();
    let mut job = Job {
        queue: Queue::new(),
        hosts: (0..hosts)
            .map(|number| Host {
                clock: base + dice.duration((Duration::ZERO, Duration::from_secs(10_000_000))),
                life: 0,
                node: None,
                agent: Agent::Done,
                store: 1000 * (number as u16 + 1),
                token: 0,
                tick: 0,
                stalled_until: Time::ZERO,
                cut_until: Time::ZERO,
                held: Vec::new(),
            })
            .collect(),
        settings,
        slowest,
        losses,
        cell: None,
        version: 0,
        worlds: BTreeMap::new(),
        report: CellReport { hosts, ..CellReport::default() },
        calm: false,
        dice,
        abandons: Dice::new(!seed),
    };
    job.live().map_err(|violation| (job.queue.now(), violation))?;
    Ok(job.report)
}

impl Job {
    fn live(&mut self) -> Result<(), Violation> {
        let calm_at = self.plan_abandons().max(self.plan());
        self.pass(calm_at)?;
        (self.calm, self.losses) = (true, 0);
        self.pass(calm_at + SETTLE_WITHIN)?;
        self.check_settled()?;
        self.close();
        self.pass(calm_at + SETTLE_WITHIN + GONE_WITHIN)?;
        match self.hosts.iter().position(|host| host.node.is_some() && !matches!(host.agent, Agent::Done)) {
            Some(host) => Err(Violation::contract(format!("host {host} does not hear that the job was closed"))),
            None => Ok(()),
        }
    }

    /// Draw when agents give up a join. Returns the time after which none does.
    fn plan_abandons(&mut self) -> Time {
        let mut calm_at = Time::ZERO;
        for _ in 0..self.abandons.between(0, 4) {
            let host = self.abandons.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = self.abandons.duration((Duration::ZERO, Duration::from_secs(90)));
            let away = self.abandons.duration((Duration::ZERO, Duration::from_secs(2)));
            self.queue.push(at, Event::Abandon(host, away));
            calm_at = calm_at.max(at + away);
        }
        calm_at
    }

    /// Draw starts and faults. Returns the time after which no fault happens.
    fn plan(&mut self) -> Time {
        let spread = [0, 2_000, 60_000][self.dice.between(0, 2) as usize];
        let mut calm_at = Time::ZERO;
        for host in 0..self.hosts.len() {
            let at = Duration::from_millis(self.dice.between(0, spread));
            self.queue.push(at, Event::Start(host));
            calm_at = calm_at.max(at);
        }
        for _ in 0..self.dice.between(0, 12) {
            let host = self.dice.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = self.dice.duration((Duration::ZERO, Duration::from_secs(200)));
            let lasts = self.dice.duration((Duration::from_millis(10), Duration::from_secs(60)));
            match self.dice.between(0, 3) {
                0 => {
                    self.queue.push(at, Event::Kill(host));
                    if self.dice.chance(60) {
                        self.queue.push(at + lasts, Event::Start(host));
                    }
                }
                1 => self.queue.push(at, Event::Stall(host, at + lasts)),
                2 => self.queue.push(at, Event::Cut(host, at + lasts)),
                // The whole backend cannot be reached.
                _ => (0..self.hosts.len()).for_each(|host| self.queue.push(at, Event::Cut(host, at + lasts))),
            }
            calm_at = calm_at.max(at + lasts);
        }
        calm_at
    }

    fn pass(&mut self, until: Time) -> Result<(), Violation> {
        while let Some(event) = self.queue.pop(until) {
            self.happen(event)?;
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Start(host) if self.hosts[host].node.is_none() => self.start(host),
            Event::Kill(host) => {
                self.hosts[host].node = None;
                self.hosts[host].life += 1;
                self.hosts[host].held.clear();
                return Ok(());
            }
            Event::Stall(host, until) => {
                self.hosts[host].stalled_until = until;
                self.queue.push(until, Event::Tick(host, 0));
                return Ok(());
            }
            Event::Cut(host, until) => {
                self.hosts[host].cut_until = until;
                return Ok(());
            }
            Event::Abandon(host, away) => {
                self.abandon(host, away);
                return self.pump(host);
            }
            Event::Arrive(host, life, command, token, lost) => return self.at_cell(host, life, command, token, lost),
            Event::Start(_) => return Ok(()),
            // Another tick was requested since. Number 0 always counts.
            Event::Tick(host, number) if number != 0 && number != self.hosts[host].tick => return Ok(()),
            event @ (Event::Tick(host, _) | Event::Answer(host, ..) | Event::Stopped(host, _)) => {
                let now = self.queue.now();
                if self.hosts[host].stalled_until > now {
                    self.hosts[host].held.push(event);
                    return Ok(());
                }
                let held = std::mem::take(&mut self.hosts[host].held);
                for event in held.into_iter().chain([event]) {
                    self.hear(host, event);
                }
                return self.pump(host);
            }
        }
        Ok(())
    }

    fn start(&mut self, number: usize) {
        let mut id = [0; 2].map(|_| self.dice.number());
        id[1] |= 1;
        let node = NodeId(u128::from(id[0]) << 64 | u128::from(id[1]));
        let name = format!("host{number}:{}", self.hosts[number].life);
        let hello = Hello::new("job", node, name, self.settings.clone());
        let hello = Hello { local_addr: Some(format!("host{number}")), ..hello };
        let host = &mut self.hosts[number];
        host.life += 1;
        host.agent = Agent::Joining;
        let now = host.clock + self.queue.now();
        let mut node = CellNode::new(hello, Liveness::Counters, now);
        join(&mut node, now);
        host.node = Some(node);
        self.queue.push(self.queue.now(), Event::Tick(number, 0));
    }

    fn abandon(&mut self, number: usize, away: Duration) {
        let host = &mut self.hosts[number];
        let awake = host.stalled_until <= self.queue.now();
        let (now, life) = (host.clock + self.queue.now(), host.life);
        if let (Some(node), Agent::Joining, true) = (&mut host.node, &host.agent, awake) {
            node.ask(NodeMachine::abandon, now);
            host.agent = Agent::Stopping;
            self.queue.push(self.queue.now() + away, Event::Stopped(number, life));
        }
    }

    fn hear(&mut self, number: usize, event: Event) {
        let host = &mut self.hosts[number];
        let now = host.clock + self.queue.now();
        let Some(node) = &mut host.node else { return };
        match event {
            Event::Answer(_, life, answer) if life == host.life => match answer {
                Answer::State(value, version) => {
                    host.token = version;
                    node.on_state(value.as_deref(), now);
                }
                Answer::Written(version) => {
                    host.token = version;
                    node.on_written(now);
                }
                Answer::Conflict(value, version) => {
                    host.token = version;
                    node.on_conflict(value.as_deref(), now);
                }
                Answer::Failed => node.on_failed("the cell does not answer".into(), now),
            },
            Event::Stopped(_, life) if life == host.life && matches!(host.agent, Agent::Stopping) => {
                host.agent = Agent::Joining;
                join(node, now);
            }
            _ => {}
        }
    }

    /// Plays the part of the driver and of the agent.
    fn pump(&mut self, number: usize) -> Result<(), Violation> {
        loop {
            let host = &mut self.hosts[number];
            let now = host.clock + self.queue.now();
            let Some(node) = &mut host.node else { return Ok(()) };
            node.on_tick(now);
            if let Some(command) = node.take_command() {
                let (life, token) = (host.life, host.token);
                self.send(number, life, command, token);
                continue;
            }
            if let Some(outcome) = node.take_outcome() {
                match outcome {
                    Ok(placement) => {
                        host.agent = Agent::Running(placement);
                        self.check_place(number)?;
                        continue;
                    }
                    Err(JoinError::Closed { .. }) => host.agent = Agent::Done,
                    Err(JoinError::Connection(_) | JoinError::Timeout { .. }) => {
                        join(node, now);
                        continue;
                    }
                    Err(error) => return Err(Violation::contract(format!("host {number}: {error}"))),
                }
            }
            if let Some(addr) = node.machine().wanted_store() {
                host.store += 1;
                let port = host.store;
                node.ask(|node| node.on_store_opened(addr, port), now);
                continue;
            }
            if let Agent::Running(_) = host.agent {
                if node.view().closed.is_some() {
                    host.agent = Agent::Done;
                } else if node.view().waiting > 0 {
                    if node.view().reason.is_empty() {
                        return Err(Violation::contract(format!("host {number} is interrupted without a reason")));
                    }
                    host.agent = Agent::Stopping;
                    let life = host.life;
                    let takes = self.dice.duration((Duration::from_millis(10), Duration::from_secs(5)));
                    self.queue.push(self.queue.now() + takes, Event::Stopped(number, life));
                }
            }
            let host = &mut self.hosts[number];
            if let Some(at) = host.node.as_ref().and_then(CellNode::next_deadline) {
                host.tick += 1;
                let at = at.saturating_duration_since(host.clock);
                let tick = Event::Tick(number, host.tick);
                self.queue.push(at.max(self.queue.now() + Duration::from_micros(1)), tick);
            }
            return Ok(());
        }
    }

    fn send(&mut self, host: usize, life: u32, command: CellCommand, token: u64) {
        let now = self.queue.now();
        let cut = self.hosts[host].cut_until > now;
        let (lost, deaf) = (cut || self.dice.chance(self.losses), self.dice.chance(self.losses));
        if lost {
            self.queue.push(now + PATIENCE, Event::Answer(host, life, Answer::Failed));
            return;
        }
        let takes = self.dice.duration((Duration::from_micros(100), self.slowest));
        self.queue.push(now + takes, Event::Arrive(host, life, command, token, deaf));
    }

    fn at_cell(
        &mut self,
        host: usize,
        life: u32,
        command: CellCommand,
        token: u64,
        lost: bool,
    ) -> Result<(), Violation> {
        let answer = match command {
            CellCommand::Read => Answer::State(self.cell.clone(), self.version),
            CellCommand::Write(_) if token != self.version => {
                self.report.writes.1 += 1;
                Answer::Conflict(self.cell.clone(), self.version)
            }
            CellCommand::Write(bytes) => {
                self.check_write(&bytes)?;
                self.report.writes.0 += 1;
                self.version += 1;
                self.cell = Some(bytes);
                Answer::Written(self.version)
            }
        };
        let now = self.queue.now();
        if lost {
            self.queue.push(now + PATIENCE, Event::Answer(host, life, Answer::Failed));
        } else {
            let takes = self.dice.duration((Duration::from_micros(100), self.slowest));
            self.queue.push(now + takes, Event::Answer(host, life, answer));
        }
        Ok(())
    }

    /// One of the nodes ends the job.
    fn close(&mut self) {
        let now = self.queue.now();
        if let Some((number, host)) = self.hosts.iter_mut().enumerate().find(|(_, host)| host.node.is_some()) {
            if let Some(node) = &mut host.node {
                node.ask(|node| node.close(Verdict::Succeeded { by: format!("host{number}") }), host.clock + now);
            }
            self.queue.push(now, Event::Tick(number, 0));
        }
    }
}

fn join(node: &mut CellNode, now: Instant) {
    node.ask(|node| node.join_with_new_store(None, None, Duration::from_secs(3600), now), now);
}
