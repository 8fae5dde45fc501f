//! What the driver does about what happens: hosts come and go, agents start, end and are lost, signals arrive.
//!
//! There is one agent on each host of the list that is not kept out. A host that vanishes, or gets another number of slots, has its
//! agent leave first. A host whose agent ends by itself is tried again after a delay, and kept out after [`Rules::host_failures`]
//! troubles within [`Rules::window`]. Failures of workers are the coordinator's to count, whose exclusions are heeded here.
//!
//! The job is over when an agent says so, when a signal comes, or when the driver gives up. Then no agent is started any more, and
//! those that are left have [`Rules::grace`] to end. [`Command::End`] is the last command, and is given once.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::endings::{Ending, Meaning, other_version};
use super::hosts::Host;
use super::manager::HostManager;
use crate::rendezvous::protocol::cooldown::Cooldown;

mod over;
mod review;

#[cfg(test)]
mod tests;

/// What the driver decides by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Fewest workers of a job. Above zero.
    pub min_slots: u32,
    /// The list of hosts cannot change.
    pub fixed: bool,
    /// Agents run on without the driver, which ends when all are started.
    pub detach: bool,
    /// How long an agent may take to say that it runs.
    pub start_timeout: Duration,
    /// How long the agents that run may have fewer than `min_slots` together.
    pub elastic_timeout: Duration,
    /// How long discovery may be silent.
    pub discovery_timeout: Duration,
    /// How long an agent that has to leave may take: its workers' grace, and the goodbye.
    pub grace: Duration,
    /// After how many troubles a host is kept out. Above zero.
    pub host_failures: u32,
    /// Troubles longer ago than this do not count.
    pub window: Duration,
    /// For how long a host is kept out; for the whole job without it.
    pub cooldown: Option<Cooldown>,
    /// The driver's version, which agents must have.
    pub version: String,
    /// The Python that agents are started with, for messages.
    pub python: String,
}

/// An agent, or what is to become one. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u64);

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Start an agent. Its end, also if it cannot be started, is told by [`Driver::on_ended`].
    Start {
        /// What it is called.
        agent: AgentId,
        /// Where.
        host: Host,
        /// The host's number by age, which gives the order of ranks.
        age: u64,
    },
    /// Tell an agent something.
    Tell {
        /// Which.
        agent: AgentId,
        /// What.
        word: Word,
    },
    /// End the connection with an agent at once. On another host it leaves by itself then.
    Kill {
        /// Which.
        agent: AgentId,
    },
    /// Tell the operator.
    Say {
        /// Whether something is wrong.
        warns: bool,
        /// In words.
        text: String,
    },
    /// The driver has ended.
    End(End),
}

/// What an agent is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Leave the job, and end. Workers get their grace.
    Leave,
    /// Do as if this signal had come.
    Signal(i32),
}

/// How the driver's work ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Why, for the exit code.
    pub verdict: Verdict,
    /// Why, in words.
    pub reason: String,
}

/// Why the driver's work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The job has succeeded.
    Succeeded,
    /// The job has failed; its own report is in an agent's output.
    Failed,
    /// The driver has given the job up.
    GivenUp,
    /// This signal has ended the job.
    Signal(i32),
}

/// The driver's decisions.
#[derive(Clone, Debug)]
pub struct Driver {
    rules: Rules,
    manager: HostManager,
    agents: BTreeMap<AgentId, Agent>,
    places: BTreeMap<String, Place>,
    next_agent: u64,
    /// Hosts that the coordinator keeps out, and until when; for the whole job without a time.
    excluded: BTreeMap<String, Option<Instant>>,
    discovery: Discovery,
    /// Since when the agents that run have too few slots.
    short_since: Option<Instant>,
    over: Option<over::Over>,
    commands: VecDeque<Command>,
}

#[derive(Clone, Debug)]
struct Agent {
    host: Host,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing was heard of it yet.
    Starting { until: Instant },
    /// It runs.
    Up,
    /// It was told to leave, and is killed at this time; `None`: it was killed.
    Leaving { kill_at: Option<Instant> },
    /// It was killed for this reason, for which it has not ended yet.
    Refused { why: String },
}

/// What is remembered of a host.
#[derive(Clone, Debug, Default)]
struct Place {
    agent: Option<AgentId>,
    /// An agent runs on there without the driver.
    detached: bool,
    /// When its agents ended by themselves, within the window.
    troubles: VecDeque<Instant>,
    /// The last trouble, in words.
    last: Option<String>,
    not_before: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Discovery {
    heard_at: Instant,
    /// There was a list.
    answered: bool,
    /// Its silence was told.
    told_silent: bool,
    /// The failure that was told last.
    failure: Option<String>,
}

/// The first delay after a trouble. It doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);

impl Driver {
    /// A driver that knows no host yet.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            manager: HostManager::new(rules.cooldown),
            rules,
            agents: BTreeMap::new(),
            places: BTreeMap::new(),
            next_agent: 0,
            excluded: BTreeMap::new(),
            discovery: Discovery { heard_at: now, answered: false, told_silent: false, failure: None },
            short_since: None,
            over: None,
            commands: VecDeque::new(),
        }
    }

    /// Discovery has found these hosts. No host at all, after there were some, is taken for a failure of discovery.
    pub fn on_found(&mut self, found: &[Host], now: Instant) {
        if found.is_empty() && !self.manager.hosts().is_empty() {
            return self.on_discovery_failed("it names no host", now);
        }
        self.heard(now);
        if self.discovery.failure.take().is_some() {
            self.say(false, "host discovery works again".to_owned());
        }
        self.discovery.answered = true;
        let update = self.manager.update(found);
        let mut changes: Vec<String> = update.added.iter().map(|name| format!("`{name}` is new")).collect();
        changes.extend(update.removed.iter().map(|name| format!("`{name}` has gone")));
        changes.extend(update.resized.iter().map(|(name, before)| format!("`{name}` had {before} slots")));
        if !changes.is_empty() {
            let hosts: Vec<String> = self.manager.hosts().iter().map(|known| known.host.to_string()).collect();
            self.say(false, format!("hosts: {} ({})", hosts.join(", "), changes.join(", ")));
        }
        self.review(now);
    }

    /// Discovery has failed. The last list stays; if there was none, the job ends.
    pub fn on_discovery_failed(&mut self, why: &str, now: Instant) {
        self.heard(now);
        if !self.discovery.answered {
            self.give_up(format!("host discovery failed at its first call: {why}"), now);
        } else if self.discovery.failure.as_deref() != Some(why) {
            self.discovery.failure = Some(why.to_owned());
            self.say(true, format!("host discovery failed, and its last list stays: {why}"));
        }
        self.review(now);
    }

    /// An agent runs.
    pub fn on_up(&mut self, agent: AgentId, version: &str, now: Instant) {
        let same = version == self.rules.version;
        if let Some(Agent { host, stage: stage @ Stage::Starting { .. } }) = self.agents.get_mut(&agent) {
            if same {
                *stage = Stage::Up;
                let text = format!("an agent runs on {host}");
                self.say(false, text);
            } else {
                *stage = Stage::Refused { why: other_version(version, &self.rules.version) };
                self.commands.push_back(Command::Kill { agent });
            }
        }
        self.review(now);
    }

    /// The connection with an agent has ended, or there was none.
    pub fn on_ended(&mut self, agent: AgentId, ending: &Ending, now: Instant) {
        let Some(Agent { host, stage }) = self.agents.remove(&agent) else { return };
        let place = self.places.entry(host.name.clone()).or_default();
        place.agent = None;
        let meaning = ending.meaning();
        place.detached |= meaning == Meaning::Detached;
        if self.over.is_none() && matches!(meaning, Meaning::Succeeded | Meaning::Failed) {
            self.on_job_ended(meaning, &host, now);
        } else if meaning == Meaning::Detached {
            self.say(false, format!("the agent on {host} runs on without the driver"));
        } else if self.over.is_none() {
            match stage {
                Stage::Starting { .. } => self.on_trouble(&host, &ending.why(&host, &self.rules.python, false), now),
                Stage::Up if self.is_out_for_the_job(&host.name, now) => {}
                Stage::Up => self.on_trouble(&host, &ending.why(&host, &self.rules.python, true), now),
                Stage::Refused { why } => self.on_trouble(&host, &(why + &ending.said()), now),
                Stage::Leaving { .. } => self.say(false, format!("the agent on {host} has left")),
            }
        }
        self.review(now);
    }

    /// The coordinator keeps out these hosts, and no other, until these times; for the whole job without one.
    pub fn on_excluded(&mut self, excluded: BTreeMap<String, (Option<Instant>, String)>, now: Instant) {
        for (name, (until, why)) in &excluded {
            if self.excluded.get(name) != Some(until) {
                let how_long = until.map_or("for the job".to_owned(), |until| for_seconds(until, now));
                self.say(true, format!("host `{name}` is out {how_long}: {why}"));
            }
        }
        self.excluded = excluded.into_iter().map(|(name, (until, _))| (name, until)).collect();
        self.review(now);
    }

    /// A deadline has passed. Calling it early is harmless.
    pub fn on_tick(&mut self, now: Instant) {
        self.review(now);
    }

    /// What to do next.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// The agents that have not ended, with their hosts, and whether they run.
    pub fn agents(&self) -> impl Iterator<Item = (AgentId, &Host, bool)> {
        self.agents.iter().map(|(id, agent)| (*id, &agent.host, agent.stage == Stage::Up))
    }

    fn heard(&mut self, now: Instant) {
        self.discovery.heard_at = now;
        self.discovery.told_silent = false;
    }

    /// A host's agent has ended by itself.
    fn on_trouble(&mut self, host: &Host, why: &str, now: Instant) {
        let (window, limit) = (self.rules.window, self.rules.host_failures as usize);
        let place = self.places.entry(host.name.clone()).or_default();
        place.troubles.retain(|at| now.saturating_duration_since(*at) < window);
        place.troubles.push_back(now);
        place.last = Some(why.to_owned());
        let count = place.troubles.len();
        if count < limit {
            let doubling =
                u32::try_from(count - 1).map_or(u32::MAX, |step| 1_u32.checked_shl(step).unwrap_or(u32::MAX));
            let delay = FIRST_DELAY.saturating_mul(doubling).min(LONGEST_DELAY);
            place.not_before = now.checked_add(delay);
            let delay = delay.as_secs();
            return self.say(true, format!("host `{}`: {why}; next try in {delay} s ({count} of {limit})", host.name));
        }
        place.troubles.clear();
        place.not_before = None;
        self.manager.blacklist(&host.name, now);
        let how_long = match self.manager.back_at(&host.name, now) {
            Some(back) => for_seconds(back, now),
            None => "for the job".to_owned(),
        };
        self.say(
            true,
            format!("host `{}`: {why}; it is out {how_long} ({count} of {limit}, --host-failures)", host.name),
        );
    }

    /// Whether a host can never be used again.
    fn is_out_for_the_job(&self, name: &str, now: Instant) -> bool {
        let by_coordinator = matches!(self.excluded.get(name), Some(None));
        by_coordinator || self.manager.is_blacklisted(name, now) && self.manager.back_at(name, now).is_none()
    }

    fn say(&mut self, warns: bool, text: String) {
        self.commands.push_back(Command::Say { warns, text });
    }
}

fn for_seconds(until: Instant, now: Instant) -> String {
    format!("for {:.0} s", until.saturating_duration_since(now).as_secs_f64())
}
