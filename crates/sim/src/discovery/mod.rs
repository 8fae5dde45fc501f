//! A driver under virtual time: hosts come and go, scripts flap, fail and hang, agents do not start, are lost or do not leave.
//!
//! Checked after every event: a host has one agent at most, agents are started only on hosts of the last list that are not kept
//! out, nothing is sent to an agent that was killed, and the next deadline lies ahead. Once faults have stopped every host of the
//! list has an agent with its slots, and no other has one. At the end the driver ends once, after all agents or their limits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::engine::alarm::Alarm;
use super::engine::dice::Dice;
use super::engine::history::Failure;
use super::engine::queue::Time;
use super::engine::{Engine, Happens, Model};
use super::worlds::{Violation, ensure_contract};
use elastic_rs::discovery::endings::Ending;
use elastic_rs::discovery::hosts::Host;
use elastic_rs::discovery::machine::{AgentId, Command, Driver, Request, Rules, Verdict};
use elastic_rs::hosts::{Cooldown, Unused, WhyUnused};

mod faults;

/// A cluster, and how many faults it has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Number of hosts.
    pub hosts: u64,
    /// How long faults happen.
    pub minutes: u64,
    /// Agents that are lost.
    pub losses: u64,
    /// Hosts that vanish from the list for a while, or get other slots.
    pub flaps: u64,
    /// Hosts on which no agent starts for a while: the connection is refused.
    pub refusals: u64,
    /// The same, but they send nothing.
    pub hangs: u64,
    /// Times in which the script fails, hangs, or names no host.
    pub script_faults: u64,
    /// Times in which the coordinator keeps a host out.
    pub exclusions: u64,
}

/// The result of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What was drawn.
    pub cluster: Cluster,
    /// Agents that were started.
    pub starts: u64,
    /// Agents that were asked to leave.
    pub leaves: u64,
    /// Agents that were killed.
    pub kills: u64,
    /// Digest of all events.
    pub digest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Good,
    Refuses,
    Hangs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    Good,
    Fails,
    Hangs,
    Empty,
}

#[derive(Clone, Debug)]
enum Event {
    Poll,
    Tick,
    Up(AgentId),
    Ended(AgentId, Ending),
    Lose(u64),
    Set(u64, Health),
    List(u64, bool, u32),
    Script(Script),
    Exclude(u64, Option<Duration>),
}

#[derive(Clone, Debug)]
struct Truth {
    host: Host,
    listed: bool,
    health: Health,
}

#[derive(Clone, Debug)]
struct Agent {
    host: Host,
    up: bool,
    leaving: bool,
    killed: bool,
}

struct Job {
    engine: Engine<Event>,
    driver: Driver,
    alarm: Alarm,
    hosts: Vec<Truth>,
    script: Script,
    /// What the driver received last.
    list: Vec<Host>,
    excluded: BTreeMap<String, Time>,
    agents: BTreeMap<AgentId, Agent>,
    /// The job is over: nobody is started.
    over: bool,
    ended: Option<Verdict>,
    report: Report,
}

const GRACE: Duration = Duration::from_secs(40);
const START_TIMEOUT: Duration = Duration::from_secs(30);
const LONGEST_OUT: Duration = Duration::from_secs(60);
/// The sum of what may have to follow one another: a silent start, the longest time out or delay, and a leave that takes its time.
const SETTLE_WITHIN: Duration = Duration::from_secs(30 + 60 + 60 + 40 + 20);
const ENDS_WITHIN: Duration = Duration::from_secs(40 + 5 + 1);

/// Lives through the history of a seed.
///
/// # Errors
/// The first invariant that breaks.
pub fn live(seed: u64, keep_history: bool) -> Result<Report, Box<Failure>> {
    live_in(seed, Cluster::draw(&mut Dice::new(seed ^ 0x6469_7363)), keep_history)
}

/// Lives through the history of a seed in this cluster.
///
/// # Errors
/// The first invariant that breaks.
pub fn live_in(seed: u64, cluster: Cluster, keep_history: bool) -> Result<Report, Box<Failure>> {
    let mut job = Job::new(seed, cluster);
    if keep_history {
        job.engine.record.keep_lines();
    }
    match job.live() {
        Ok(()) => Ok(Report { digest: job.engine.record.digest().0, ..job.report }),
        Err(violation) => Err(Failure::new(seed, &job.engine, violation)),
    }
}

impl Job {
    fn new(seed: u64, cluster: Cluster) -> Self {
        let mut engine = Engine::new(Dice::new(seed), (Duration::ZERO, Duration::ZERO));
        let host = |number: u64, dice: &mut Dice| Truth {
            host: Host { name: format!("h{number}"), slots: dice.between(1, 8) as u32 },
            listed: true,
            health: Health::Good,
        };
        let hosts = (0..cluster.hosts).map(|number| host(number, &mut engine.dice)).collect();
        let rules = Rules {
            min_slots: 1,
            fixed: false,
            detach: false,
            listed: None,
            start_timeout: START_TIMEOUT,
            // The end of a job that has too few hosts is a test of the machine.
            elastic_timeout: Duration::from_secs(1_000_000),
            discovery_timeout: Duration::from_secs(20),
            grace: GRACE,
            host_failures: engine.dice.between(1, 4) as u32,
            window: Duration::from_secs(3600),
            cooldown: Some(Cooldown { min: Duration::from_secs(5), max: LONGEST_OUT }),
            passed_on: BTreeSet::new(),
            version: "1".to_owned(),
            python: "python3".to_owned(),
        };
        let driver = Driver::new(rules, engine.instant());
        Self {
            engine,
            driver,
            alarm: Alarm::default(),
            hosts,
            script: Script::Good,
            list: Vec::new(),
            excluded: BTreeMap::new(),
            agents: BTreeMap::new(),
            over: false,
            ended: None,
            report: Report { cluster, ..Report::default() },
        }
    }

    fn live(&mut self) -> Result<(), Violation> {
        let calm_at = self.plan();
        self.engine.push(Time::ZERO, Event::Poll);
        self.pass(calm_at)?;
        self.calm();
        self.pass(calm_at + SETTLE_WITHIN)?;
        self.check_settled()?;
        self.finish();
        self.pass(calm_at + SETTLE_WITHIN + ENDS_WITHIN)?;
        ensure_contract(self.ended == Some(Verdict::Succeeded), || format!("the driver has ended: {:?}", self.ended))
    }

    fn check_settled(&self) -> Result<(), Violation> {
        for Truth { host, .. } in &self.hosts {
            let agents: Vec<_> = self.agents.values().filter(|agent| agent.host.name == host.name).collect();
            let well = matches!(&agents[..], [agent] if agent.up && !agent.leaving && agent.host.slots == host.slots);
            ensure_contract(well, || format!("{host} has these agents once it has settled: {agents:?}"))?;
        }
        ensure_contract(self.agents.len() == self.hosts.len(), || "an agent is on no host of the list".to_owned())
    }

    /// Checks that each listed host has an agent that runs, or one reason why it has none. Those that the coordinator keeps out are named by
    /// that. A killed agent's end will be the reason.
    fn check_reasons(&self) -> Result<(), Violation> {
        let (at, now) = (self.engine.now(), self.engine.instant());
        let unused = self.driver.unused(now);
        let named: Vec<_> = unused.shown(now).into_iter().map(|host| host.host).collect();
        let excluded = |name: &String| self.excluded.get(name).is_some_and(|until| at < *until);
        for Host { name, .. } in self.list.iter().filter(|host| !excluded(&host.name)) {
            let agent = self.agents.values().find(|agent| agent.host.name == *name);
            let runs = agent.is_some_and(|agent| agent.up && !agent.leaving);
            let is_killed = agent.is_some_and(|agent| agent.killed);
            let agrees = is_killed || unused.more() > 0 || named.contains(name) != runs;
            ensure_contract(agrees, || format!("{name} has {agent:?}, and these hosts are not used: {unused:?}"))?;
        }
        Ok(())
    }

    /// One agent says that the job has succeeded. The others end soon, or hang.
    fn finish(&mut self) {
        let agents: Vec<AgentId> = self.agents.keys().copied().collect();
        self.over = true;
        for (number, agent) in agents.into_iter().enumerate() {
            if number > 0 && self.engine.dice.chance(10) {
                continue;
            }
            let soon = if number == 0 {
                Duration::ZERO
            } else {
                self.engine.dice.duration((Duration::ZERO, Duration::from_secs(10)))
            };
            let ending = Ending { code: Some(0), outcome: Some("succeeded".to_owned()), ..Ending::default() };
            self.engine.push_after(soon, Event::Ended(agent, ending));
        }
    }

    fn poll(&mut self) {
        self.engine.push_after(Duration::from_secs(1), Event::Poll);
        let now = self.engine.instant();
        match self.script {
            Script::Hangs => {}
            Script::Fails => self.driver.on_discovery_failed("exit code 1", now),
            Script::Empty if !self.list.is_empty() => self.driver.on_found(&[], now),
            Script::Good | Script::Empty => {
                self.list = self.hosts.iter().filter(|truth| truth.listed).map(|truth| truth.host.clone()).collect();
                if self.list.is_empty() {
                    // The driver keeps the last list.
                    self.list = self.hosts.iter().take(1).map(|truth| truth.host.clone()).collect();
                }
                self.driver.on_found(&self.list, now);
            }
        }
    }

    fn perform(&mut self) -> Result<(), Violation> {
        while let Some(command) = self.driver.poll_command() {
            ensure_contract(self.ended.is_none(), || format!("{command:?} after the end"))?;
            match command {
                Command::Start { agent, host, .. } => self.start(agent, host)?,
                Command::Send { agent, request } => self.send(agent, request)?,
                Command::Kill { agent } => self.kill(agent)?,
                Command::Log { text, .. } => self.engine.remark(|| text),
                Command::End(end) => {
                    self.ended = Some(end.verdict);
                    self.engine.remark(|| end.reason);
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, agent: AgentId, host: Host) -> Result<(), Violation> {
        let now = self.engine.now();
        ensure_contract(!self.over, || format!("{host} gets an agent after the end of the job"))?;
        ensure_contract(self.list.contains(&host), || format!("{host} gets an agent and is not in the list"))?;
        let is_out = self.excluded.get(&host.name).is_some_and(|until| now < *until);
        ensure_contract(!is_out, || format!("{host} gets an agent while the coordinator keeps it out"))?;
        let twice = self.agents.values().any(|other| other.host.name == host.name);
        ensure_contract(!twice, || format!("{host} has two agents"))?;
        self.report.starts += 1;
        let health = self.hosts.iter().find(|truth| truth.host.name == host.name).map(|truth| truth.health);
        let soon = self.engine.dice.duration((Duration::from_millis(50), Duration::from_secs(3)));
        match health {
            Some(Health::Good) => self.engine.push_after(soon, Event::Up(agent)),
            Some(Health::Refuses) => self.engine.push_after(soon, Event::Ended(agent, lost())),
            _ => {}
        }
        self.agents.insert(agent, Agent { host, up: false, leaving: false, killed: false });
        Ok(())
    }

    fn send(&mut self, agent: AgentId, request: Request) -> Result<(), Violation> {
        // It may end at the same time.
        let Some(addressee) = self.agents.get_mut(&agent) else { return Ok(()) };
        ensure_contract(addressee.up && !addressee.killed && !addressee.leaving && request == Request::Leave, || {
            format!("{addressee:?} is sent {request:?}")
        })?;
        addressee.leaving = true;
        self.report.leaves += 1;
        let takes = self.engine.dice.duration((Duration::ZERO, Duration::from_secs(60)));
        let ending = Ending { code: Some(143), outcome: Some("signal".to_owned()), ..Ending::default() };
        self.engine.push_after(takes, Event::Ended(agent, ending));
        Ok(())
    }

    fn kill(&mut self, agent: AgentId) -> Result<(), Violation> {
        let Some(killed) = self.agents.get_mut(&agent) else { return Ok(()) };
        ensure_contract(!killed.killed, || format!("{killed:?} is killed twice"))?;
        killed.killed = true;
        self.report.kills += 1;
        let soon = self.engine.dice.duration((Duration::from_millis(1), Duration::from_millis(100)));
        self.engine.push_after(soon, Event::Ended(agent, Ending { signal: Some(9), ..Ending::default() }));
        Ok(())
    }

    fn exclude(&mut self, host: u64, time: Option<Duration>) {
        let name = format!("h{host}");
        let now = self.engine.now();
        match time {
            Some(time) => self.excluded.insert(name, now + time),
            None => self.excluded.remove(&name),
        };
        let origin = self.engine.origin;
        let why = WhyUnused::FailedFirst { count: 1, window: LONGEST_OUT };
        let out = |until| Unused { why: why.clone(), until: Some(origin + until) };
        let excluded = self.excluded.iter().map(|(name, until)| (name.clone(), out(*until)));
        self.driver.on_excluded(excluded.collect(), self.engine.instant());
    }

    /// `looked`: the driver has just looked at the time, and must not want to do so again.
    fn set_alarm(&mut self, looked: bool) -> Result<(), Violation> {
        let now = self.engine.instant();
        let Some(deadline) = self.driver.next_deadline(now) else { return Ok(()) };
        ensure_contract(deadline > now || !looked, || "the next deadline has passed already".to_owned())?;
        let due = self.engine.due(deadline);
        if let Some(at) = self.alarm.set(due) {
            self.engine.push(at, Event::Tick);
        }
        Ok(())
    }
}

fn lost() -> Ending {
    Ending { code: Some(255), ..Ending::default() }
}

impl Model for Job {
    type Event = Event;
    type Broken = Violation;

    fn engine(&mut self) -> &mut Engine<Event> {
        &mut self.engine
    }

    fn happens(&self, _: &Event) -> Happens {
        Happens::Outside
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.engine.instant();
        let (mut looked, polls) = (false, matches!(event, Event::Poll) && self.script == Script::Good && !self.over);
        match event {
            Event::Poll => self.poll(),
            Event::Tick => {
                let at = self.engine.now();
                if self.alarm.rings(at) {
                    self.driver.on_tick(now);
                    looked = true;
                }
            }
            Event::Up(agent) => {
                if let Some(known) = self.agents.get_mut(&agent).filter(|known| !known.killed) {
                    known.up = true;
                    self.driver.on_up(agent, "1", now);
                }
            }
            Event::Ended(agent, ending) => {
                if self.agents.remove(&agent).is_some() {
                    self.driver.on_ended(agent, &ending, now);
                }
            }
            Event::Lose(host) => {
                let name = format!("h{host}");
                let lost_one = self.agents.iter().find(|(_, agent)| agent.host.name == name).map(|(id, _)| *id);
                if let Some(agent) = lost_one {
                    self.agents.remove(&agent);
                    self.driver.on_ended(agent, &lost(), now);
                }
            }
            Event::Set(host, health) => self.hosts[host as usize].health = health,
            Event::List(host, listed, slots) => {
                let truth = &mut self.hosts[host as usize];
                (truth.listed, truth.host.slots) = (listed, slots);
            }
            Event::Script(script) => self.script = script,
            Event::Exclude(host, time) => self.exclude(host, time),
        }
        self.perform()?;
        if polls {
            self.check_reasons()?;
        }
        self.set_alarm(looked)
    }
}
