//! Jobs over one shared cell: several nodes of [`elastic_rs::rendezvous::cell`] with separate clocks, a cell that delays and loses
//! operations, and PyTorch's agents. The invariants are those of jobs with a coordinator, checked on the cell's states.

mod checks;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::engine::dice::Dice;
use super::engine::history::{Failure, History};
use super::engine::paths::{End, HostId, Partition};
use super::engine::queue::Time;
use super::engine::{Engine, Happens, Model};
use super::records::Records;
use super::shared::{self, Agent, Content, Host, Joined, Node};
use super::worlds::Violation;
use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Round};
use elastic_rs::rendezvous::messages::settings::Settings;

/// How long a caller waits for the cell's answer before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// The result of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CellReport {
    /// Nodes.
    pub hosts: usize,
    /// Rounds that completed.
    pub rounds: u64,
    /// Successful writes, and writes that were refused because another was first.
    pub writes: (u64, u64),
    /// Recorded events that say that a round was broken.
    pub breaks: usize,
    /// Whether no agent was killed and no answer was lost.
    pub lossless: bool,
    /// Digest of all events.
    pub digest: u64,
}

/// What happens in it.
#[derive(Clone, Debug)]
enum Event {
    Start(HostId),
    Kill(HostId),
    Stall(HostId, Time),
    Resume(HostId),
    Cut(HostId, Time),
    Tick(HostId, u64),
    /// A request of a process on the host, which knows this version of the cell, arrives at the cell: to write this, or to read. If so drawn, its answer gets lost.
    Arrive(HostId, u32, Option<Content>, u64, bool),
    Answer(HostId, u32, Answer),
    Stopped(HostId, u32),
    /// The agent gives up its join, and joins again after this time.
    Abandon(HostId, Duration),
    /// All workers of the host have succeeded.
    Done(HostId),
    /// The agent of a job that is over leaves.
    Leave(HostId, u32),
    /// The host whose process holds the cell is killed.
    KillServer,
}

#[derive(Clone, Debug)]
enum Answer {
    State(Option<Content>, u64),
    Written(u64),
    Conflict(Option<Content>, u64),
    Failed,
    /// Nobody serves the cell.
    Gone,
}

/// The end of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// It goes on.
    NotYet,
    /// It ends, and this host's process holds the cell.
    HeldBy(HostId),
    /// The cell has ended with that process, which was killed or has left.
    Gone { killed: bool },
}

/// One job over one cell.
#[derive(Debug)]
struct Job {
    engine: Engine<Event>,
    settings: Settings,
    hosts: Vec<Host<CellNode>>,
    /// The last version of the cell that each host got.
    tokens: Vec<u64>,
    /// Percentage of requests, and of answers, that get lost.
    losses: u64,
    cell: Option<Content>,
    version: u64,
    worlds: BTreeMap<Round, (Vec<NodeId>, (String, u16))>,
    records: Records,
    /// No agent was killed, and no answer was lost.
    lossless: bool,
    end: Ending,
    /// The process that holds the cell does not stay for the others: a test of the tests.
    impatient: bool,
    report: CellReport,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<CellReport, Box<Failure>> {
    live_as(seed, keep_history, false)
}

/// The same, with a process that holds the cell and leaves as soon as it knows that the job is over: a test of the tests.
///
/// # Errors
/// As for [`live`].
pub fn live_with_a_host_that_leaves(seed: u64, keep_history: bool) -> Result<CellReport, Box<Failure>> {
    live_as(seed, keep_history, true)
}

fn live_as(seed: u64, keep_history: bool, impatient: bool) -> Result<CellReport, Box<Failure>> {
    let mut job = Job { impatient, ..Job::draw(seed) };
    if keep_history {
        job.engine.record.keep_lines();
    }
    let calm_at = job.plan_abandons(seed).max(job.plan());
    job.live(seed, calm_at).map(|job| CellReport {
        digest: job.engine.record.digest().0,
        breaks: job.records.breaks(),
        lossless: job.lossless,
        ..job.report
    })
}

impl Job {
    fn draw(seed: u64) -> Job {
        let mut dice = Dice::new(seed);
        let hosts = dice.between(1, 8) as usize;
        let max_nodes = dice.between(1, hosts as u64 + 1) as u32;
        let mut settings = Settings::new(dice.between(1, u64::from(max_nodes)) as u32, max_nodes);
        settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(30)));
        settings.settle_timeout = dice.duration((Duration::ZERO, Duration::from_secs(3)));
        settings.keep_alive_interval = dice.duration((Duration::from_secs(3), Duration::from_secs(5)));
        let slowest = Duration::from_millis([2, 20, 200][dice.between(0, 2) as usize]);
        let losses = [0, 0, 2, 10][dice.between(0, 3) as usize];
        Job {
            hosts: shared::draw_hosts(hosts, &mut dice),
            tokens: vec![0; hosts],
            settings,
            losses,
            cell: None,
            version: 0,
            worlds: BTreeMap::new(),
            records: Records::default(),
            lossless: true,
            end: Ending::NotYet,
            impatient: false,
            report: CellReport { hosts, ..CellReport::default() },
            engine: Engine::new(dice, (Duration::from_micros(100), slowest)),
        }
    }

    /// Draw when agents give up a join, apart from everything else. Returns the time after which none does.
    fn plan_abandons(&mut self, seed: u64) -> Time {
        let (mut dice, mut calm_at) = (Dice::new(!seed), Time::ZERO);
        for _ in 0..dice.between(0, 4) {
            let host = dice.between(0, self.hosts.len() as u64 - 1) as usize;
            let at = dice.duration((Duration::ZERO, Duration::from_secs(90)));
            let away = dice.duration((Duration::ZERO, Duration::from_secs(2)));
            self.engine.push(at, Event::Abandon(host, away));
            calm_at = calm_at.max(at + away);
        }
        calm_at
    }

    /// Draw starts and faults. Returns the time after which no fault happens.
    fn plan(&mut self) -> Time {
        let Engine { dice, queue, .. } = &mut self.engine;
        let hosts = self.hosts.len();
        let spread = [0, 2_000, 60_000][dice.between(0, 2) as usize];
        let mut calm_at = Time::ZERO;
        for host in 0..hosts {
            let at = Duration::from_millis(dice.between(0, spread));
            queue.push(at, Event::Start(host));
            calm_at = calm_at.max(at);
        }
        for _ in 0..dice.between(0, 12) {
            let host = dice.between(0, hosts as u64 - 1) as usize;
            let at = dice.duration((Duration::ZERO, Duration::from_secs(200)));
            let lasts = dice.duration((Duration::from_millis(10), Duration::from_secs(60)));
            match dice.between(0, 3) {
                0 => {
                    queue.push(at, Event::Kill(host));
                    if dice.chance(60) {
                        queue.push(at + lasts, Event::Start(host));
                    }
                }
                1 => queue.push(at, Event::Stall(host, at + lasts)),
                2 => queue.push(at, Event::Cut(host, at + lasts)),
                // The whole backend cannot be reached.
                _ => (0..hosts).for_each(|host| queue.push(at, Event::Cut(host, at + lasts))),
            }
            calm_at = calm_at.max(at + lasts);
        }
        calm_at
    }

    fn start(&mut self, number: HostId) {
        let mut id = [0; 2].map(|_| self.engine.dice.number());
        id[1] |= 1;
        let node = NodeId(u128::from(id[0]) << 64 | u128::from(id[1]));
        let now = self.engine.now();
        let host = &mut self.hosts[number];
        let hello = Hello::new("job", node, format!("host{number}:{}", host.incarnation), self.settings.clone());
        let hello = Hello { local_addr: Some(format!("host{number}")), ..hello };
        let node = CellNode::new(hello, !self.impatient, host.clock_at(now));
        host.start(node, now);
        self.engine.push(now, Event::Tick(number, 0));
    }

    fn on_answer(&mut self, number: HostId, answer: Answer) {
        let host = &mut self.hosts[number];
        let now = host.clock_at(self.engine.now());
        let Some(node) = &mut host.node else { return };
        if let Answer::State(_, version) | Answer::Written(version) | Answer::Conflict(_, version) = answer {
            self.tokens[number] = version;
        }
        self.lossless &= !matches!(answer, Answer::Failed | Answer::Gone);
        match answer {
            Answer::State(value, _) => node.on_state(value.as_ref().map(Content::bytes), now),
            Answer::Written(_) => node.on_written(now),
            Answer::Conflict(value, _) => node.on_conflict(value.as_ref().map(Content::bytes), now),
            Answer::Failed => node.on_failed("the cell does not answer".into(), false, now),
            Answer::Gone => node.on_failed("nobody serves the cell".into(), true, now),
        }
    }

    /// Plays the part of the driver and of the agent.
    fn pump(&mut self, number: HostId) -> Result<(), Violation> {
        let now = self.engine.now();
        loop {
            let host = &mut self.hosts[number];
            let clock = host.clock_at(now);
            let Some(node) = &mut host.node else { return Ok(()) };
            node.on_tick(clock);
            if let Some(command) = node.take_command() {
                self.send(number, command);
                continue;
            }
            match host.take_outcome(number)? {
                Some(Joined::Placed) => {
                    self.check_placement(number)?;
                    continue;
                }
                Some(Joined::Again) if self.end == Ending::NotYet => {
                    host.join(now);
                    continue;
                }
                Some(Joined::Again) => host.agent = Agent::Done,
                Some(Joined::Closed) | None => {}
            }
            if host.open_store(now) {
                continue;
            }
            if host.look(number)? {
                let takes = self.engine.dice.duration((Duration::from_millis(10), Duration::from_secs(5)));
                self.engine.push_after(takes, Event::Stopped(number, host.incarnation));
            }
            if let Some((at, tick)) = host.arm(now) {
                self.engine.push(at, Event::Tick(number, tick));
            }
            host.node.as_mut().map_or(Ok(()), |node| self.records.take(node))?;
            return self.end_with_the_job(number);
        }
    }

    /// The agent of a job that is over leaves, and its process ends. Unless the process that held the cell was killed, it knows how the job
    /// ended.
    fn end_with_the_job(&mut self, number: HostId) -> Result<(), Violation> {
        let host = &mut self.hosts[number];
        let Some(node) = host.node.as_ref().filter(|_| self.end != Ending::NotYet) else {
            return Ok(());
        };
        if let Some(error) = &node.view().failed {
            if self.end == (Ending::Gone { killed: false }) {
                return Err(Violation::contract(format!(
                    "host {number} ends without knowing how the job ended: {error}"
                )));
            }
            host.agent = Agent::Done;
        }
        if node.has_left() {
            self.lose_process(number, false);
        } else if matches!(host.agent, Agent::Done) && !node.machine().has_left() {
            // Workers that have succeeded need no time to end.
            let most = Duration::from_secs(3) * u32::from(self.engine.dice.chance(50));
            let (incarnation, takes) = (host.incarnation, self.engine.dice.duration((Duration::ZERO, most)));
            self.engine.push_after(takes, Event::Leave(number, incarnation));
        }
        Ok(())
    }

    /// A process ends, perhaps with the cell.
    fn lose_process(&mut self, number: HostId, killed: bool) {
        self.hosts[number].kill();
        if self.end == Ending::HeldBy(number) {
            self.end = Ending::Gone { killed };
        }
    }

    /// Draw how the job ends: all workers succeed one after the other, or an agent declares how the job ended. The process that holds the
    /// cell may be killed meanwhile.
    fn draw_end(&mut self) -> Option<HostId> {
        let living: Vec<_> = (0..self.hosts.len()).filter(|host| self.hosts[*host].node.is_some()).collect();
        let last = living.len().checked_sub(1)? as u64;
        let Engine { dice, .. } = &mut self.engine;
        let server = living[dice.between(0, last) as usize];
        let by = living[dice.between(0, last) as usize];
        let (succeeds, killed) = (dice.chance(60), dice.chance(25));
        self.end = Ending::HeldBy(server);
        let runs: Vec<_> = living.into_iter().filter(|host| self.hosts[*host].running().is_some()).collect();
        let within = (Duration::ZERO, Duration::from_secs(3));
        if killed {
            let after = self.engine.dice.duration(within);
            self.engine.push_after(after, Event::KillServer);
        }
        if succeeds && !runs.is_empty() {
            for host in runs {
                let after = self.engine.dice.duration(within);
                self.engine.push_after(after, Event::Done(host));
            }
        } else {
            let now = self.engine.now();
            self.hosts[by].close(by, now);
            self.engine.push(now, Event::Tick(by, 0));
        }
        Some(by)
    }

    fn send(&mut self, number: HostId, command: CellCommand) {
        let (now, incarnation) = (self.engine.now(), self.hosts[number].incarnation);
        let cut = self.engine.paths.cut_now(number, End::Coordinator, now).is_some();
        let (lost, deaf) = (cut || self.engine.dice.chance(self.losses), self.engine.dice.chance(self.losses));
        if lost {
            return self.engine.push_after(PATIENCE, Event::Answer(number, incarnation, Answer::Failed));
        }
        let takes = self.engine.transit();
        if matches!(self.end, Ending::Gone { .. }) {
            return self.engine.push_after(takes, Event::Answer(number, incarnation, Answer::Gone));
        }
        let write = match command {
            CellCommand::Read => None,
            CellCommand::Write(bytes) => Some(Content::new(bytes)),
        };
        self.engine.push_after(takes, Event::Arrive(number, incarnation, write, self.tokens[number], deaf));
    }

    /// What the cell answers to a host that knows this version of it.
    fn answer(&mut self, write: Option<Content>, token: u64) -> Result<Answer, Violation> {
        Ok(match write {
            _ if matches!(self.end, Ending::Gone { .. }) => Answer::Gone,
            None => Answer::State(self.cell.clone(), self.version),
            Some(_) if token != self.version => {
                self.report.writes.1 += 1;
                Answer::Conflict(self.cell.clone(), self.version)
            }
            Some(content) => {
                self.check_write(content.bytes())?;
                self.report.writes.0 += 1;
                self.version += 1;
                self.cell = Some(content);
                Answer::Written(self.version)
            }
        })
    }
}

impl Node for CellNode {
    fn inner(&self) -> &CellNode {
        self
    }

    fn inner_mut(&mut self) -> &mut CellNode {
        self
    }

    fn next_deadline(&self) -> Option<Instant> {
        CellNode::next_deadline(self)
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
            Event::Tick(host, _)
            | Event::Answer(host, ..)
            | Event::Stopped(host, _)
            | Event::Abandon(host, _)
            | Event::Done(host)
            | Event::Leave(host, _) => Happens::In(Some(*host)),
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
                self.lossless = false;
                self.hosts[host].kill();
                self.engine.processes.end(Some(host), now);
            }
            Event::Stall(host, until) => {
                self.engine.processes.stall(Some(host), until);
                self.engine.push(until, Event::Resume(host));
            }
            Event::Resume(host) => return self.resume(Some(host)),
            Event::Cut(host, until) => self.engine.paths.cut(host, End::Coordinator, until, Partition::Lost),
            Event::Tick(host, tick) => {
                if self.hosts[host].wants(tick) {
                    return self.pump(host);
                }
            }
            Event::Arrive(host, incarnation, write, token, lost) => {
                let answer = self.answer(write, token)?;
                let (takes, answer) = if lost { (PATIENCE, Answer::Failed) } else { (self.engine.transit(), answer) };
                self.engine.push_after(takes, Event::Answer(host, incarnation, answer));
            }
            Event::Answer(host, incarnation, answer) => {
                if self.hosts[host].incarnation == incarnation {
                    self.on_answer(host, answer);
                }
                return self.pump(host);
            }
            Event::Abandon(host, away) => {
                if self.hosts[host].abandon(now) {
                    self.engine.push_after(away, Event::Stopped(host, self.hosts[host].incarnation));
                }
                return self.pump(host);
            }
            Event::Done(host) => {
                self.hosts[host].finish(now);
                return self.pump(host);
            }
            Event::Leave(host, incarnation) => {
                if self.hosts[host].incarnation == incarnation {
                    self.hosts[host].leave(now);
                }
                return self.pump(host);
            }
            Event::KillServer => {
                if let Ending::HeldBy(host) = self.end {
                    self.lose_process(host, true);
                    self.engine.processes.end(Some(host), now);
                }
            }
            Event::Stopped(host, incarnation) => {
                if self.hosts[host].incarnation == incarnation {
                    self.hosts[host].join(now);
                }
                return self.pump(host);
            }
        }
        Ok(())
    }
}

impl History for Job {
    /// A lease that is noticed late (twice 15 s, because a node that was stopped charges others 2.5 s a look at most), workers that
    /// stop (5 s), and two last calls (30 s each).
    const SETTLE_WITHIN: Duration = Duration::from_secs(150);
    /// Without the cell: a lease that ends, workers that stop (5 s), and a join that fails after a lease.
    const GONE_WITHIN: Duration = Duration::from_secs(60);

    fn calm(&mut self) {
        self.losses = 0;
    }

    fn check_settled(&mut self) -> Result<(), Violation> {
        shared::check_settled(&self.hosts, &self.settings)
    }

    fn close(&mut self) -> Vec<HostId> {
        self.draw_end().into_iter().collect()
    }

    /// Every node of a finished job ends.
    fn check_ended(&mut self, _: &[HostId]) -> Result<(), Violation> {
        shared::check_all_done(&self.hosts)?;
        if let Some(host) = self.hosts.iter().position(|host| host.node.is_some()) {
            return Err(Violation::contract(format!("host {host} does not end, though the job has: {:?}", self.end)));
        }
        self.records.check(self.lossless)
    }
}
