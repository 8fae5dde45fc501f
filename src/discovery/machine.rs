//! The driver's decisions: what it does when hosts come and go, when agents start, end or are lost, and when signals arrive.
//!
//! The driver keeps one agent on each listed host that is not kept out. When a host vanishes or gets another number of slots, its
//! agent is asked to leave. When an agent ends by itself, its host has had *trouble*: the driver tries again after a delay, and keeps
//! the host out after [`Rules::host_failures`] troubles within [`Rules::window`]. The coordinator counts failures of workers, and
//! the driver starts no agent on a host that the coordinator keeps out.
//!
//! The job is over when an agent reports it, when a signal comes, or when the driver gives up. From then on no agent is started, and
//! the agents that are left have [`Rules::grace`] to end. [`Command::End`] is the last command, and is given once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::endings::{Ending, Meaning, other_version};
use super::hosts::Host;
use super::manager::HostManager;
use crate::hosts::{Cooldown, Unused, WhyUnused};
use crate::signals::Signal;
use crate::wire::text::tidy;

mod over;
mod review;

#[cfg(test)]
mod tests;

/// The driver's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Fewest workers of a job. Above zero.
    pub min_slots: u32,
    /// The list of hosts cannot change.
    pub fixed: bool,
    /// Agents run on without the driver, which ends when all are started.
    pub detach: bool,
    /// The hosts with endpoints of a list, at which agents meet that run on without the driver. `None`: the first host's agent hosts the
    /// coordinator.
    pub listed: Option<Vec<String>>,
    /// Limit from an agent's start to its report that it runs.
    pub start_timeout: Duration,
    /// How long the running agents together may have fewer than `min_slots`.
    pub elastic_timeout: Duration,
    /// Limit for one answer of discovery.
    pub discovery_timeout: Duration,
    /// Limit for an agent that was asked to leave: its workers' grace period, and its goodbye to the coordinator.
    pub grace: Duration,
    /// Number of troubles within `window` after which a host is kept out. 0: it is tried again and again.
    pub host_failures: u32,
    /// Troubles before that do not count.
    pub window: Duration,
    /// How long a host is kept out. `None`: for the whole job.
    pub cooldown: Option<Cooldown>,
    /// Signals that do not end the job: agents get them.
    pub passed_on: BTreeSet<Signal>,
    /// The driver's version, which agents must have.
    pub version: String,
    /// The Python that agents are started with, for messages.
    pub python: String,
}

/// Identifies an agent from its start on. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u64);

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Start an agent. Report its end by [`Driver::on_ended`], also if it cannot be started.
    Start {
        /// Its identity.
        agent: AgentId,
        /// The host to start it on.
        host: Host,
        /// The host's number by age, which gives the order of ranks.
        age: u64,
        /// Whether the agent hosts the coordinator: the one on the first host of the first list, if the agents run on without the
        /// driver, and meet there.
        hosts_coordinator: bool,
    },
    /// Send an agent a request.
    Send {
        /// The agent.
        agent: AgentId,
        /// The request.
        request: Request,
    },
    /// End the connection with an agent at once. An agent on another host then leaves by itself.
    Kill {
        /// The agent.
        agent: AgentId,
    },
    /// Log a message for the operator.
    Log {
        /// Whether it is a warning.
        warns: bool,
        /// The message.
        text: String,
    },
    /// The driver has ended.
    End(End),
}

/// What the driver asks of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Leave the job, and end. Workers get their grace.
    Leave,
    /// Act as if this signal had been sent to the agent.
    Signal(i32),
}

/// How the driver's work ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The reason as the exit code has it.
    pub verdict: Verdict,
    /// The reason in words.
    pub reason: String,
}

/// Why the driver's work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The job has succeeded.
    Succeeded,
    /// The job has failed; its own report is in an agent's output.
    Failed {
        /// The exit code of the first agent that has said so. All agents of a job end with the same.
        code: i32,
    },
    /// The driver has given the job up.
    GivenUp,
    /// No agent accepts the command line.
    Refused,
    /// This signal has ended the job.
    Signal(i32),
}

/// The driver's decisions.
#[derive(Clone, Debug)]
pub struct Driver {
    rules: Rules,
    manager: HostManager,
    /// The first host of the first list.
    first_host: Option<String>,
    agents: BTreeMap<AgentId, Agent>,
    /// The hosts on which agents were started. Those of hosts that are gone are dropped when they are too many. What else is known of a
    /// host is in the manager's book.
    states: BTreeMap<String, HostState>,
    next_agent: u64,
    /// The hosts that the coordinator keeps out.
    excluded: BTreeMap<String, Unused>,
    discovery: Discovery,
    /// An agent can do what its command line says. What another one refuses is wrong on its host only.
    accepted: bool,
    /// Since when the agents that run have too few slots.
    short_since: Option<Instant>,
    /// That was logged, with its limit.
    logged_shortage: bool,
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
    /// It has not reported that it runs.
    Starting { until: Instant },
    /// It runs.
    Up,
    /// It was asked to leave, and is killed at this time; `None`: it was killed.
    Leaving { kill_at: Option<Instant> },
    /// It was killed for this reason, and its end has not been reported yet.
    Refused { why: String },
}

/// A host's agent.
#[derive(Clone, Debug, Default)]
struct HostState {
    agent: Option<AgentId>,
    /// An agent runs on there without the driver.
    detached: bool,
    /// Its last agent did not find the script, and the driver does not either.
    lacks_script: bool,
}

#[derive(Clone, Debug)]
struct Discovery {
    answered_at: Instant,
    /// It has given a list at least once.
    answered: bool,
    /// Its present silence was logged.
    logged_silence: bool,
    /// The failure that was logged last, and when. `None`: discovery works.
    failure: Option<(String, Instant)>,
}

/// The first delay after a trouble. It doubles with each further one.
/// When a host is tried again whose machine was to be taken away: EC2 says it two minutes before.
const AFTER_NOTICE: Duration = Duration::from_secs(120);
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Troubles of a host that are remembered, if its limit is not higher. The delays leave no room for more within an hour.
const MOST_TROUBLES: usize = 128;
/// How long an observer is shown that discovery does not list a host any longer.
const GONE_SHOWN: Duration = Duration::from_secs(3600);
/// How long too few slots are not worth a log line: agents are starting.
const SHORT_LOGGED_AFTER: Duration = Duration::from_secs(10);
/// How often a failure of discovery is logged whose text changes, because it has a time, say.
const FAILURE_INTERVAL: Duration = Duration::from_secs(30);

impl Driver {
    /// A driver that knows no host yet.
    pub fn new(rules: Rules, now: Instant) -> Self {
        Self {
            manager: HostManager::new(rules.cooldown),
            rules,
            first_host: None,
            agents: BTreeMap::new(),
            states: BTreeMap::new(),
            next_agent: 0,
            excluded: BTreeMap::new(),
            discovery: Discovery { answered_at: now, answered: false, logged_silence: false, failure: None },
            accepted: false,
            short_since: None,
            logged_shortage: false,
            over: None,
            commands: VecDeque::new(),
        }
    }

    /// Discovery has found these hosts. No host at all, after there were some, is taken for a failure of discovery.
    pub fn on_found(&mut self, found: &[Host], now: Instant) {
        if found.is_empty() && !self.manager.hosts().is_empty() {
            return self.on_discovery_failed("it names no host", now);
        }
        self.on_answer(now);
        if self.discovery.failure.take().is_some() {
            self.log(false, "host discovery works again".to_owned());
        }
        self.discovery.answered = true;
        if self.first_host.is_none() {
            self.first_host = found.first().map(|host| host.name.clone());
        }
        let update = self.manager.update(found, now);
        let mut changes: Vec<String> = update.added.iter().map(|name| format!("`{name}` is new")).collect();
        changes.extend(update.removed.iter().map(|name| format!("`{name}` has gone")));
        changes.extend(update.resized.iter().map(|(name, before)| format!("`{name}` had {before} slots")));
        if !changes.is_empty() {
            let hosts: Vec<String> = self.manager.hosts().iter().map(|known| known.host.to_string()).collect();
            self.log(false, format!("hosts: {} ({})", hosts.join(", "), changes.join(", ")));
        }
        self.review(now);
    }

    /// Discovery has failed. The last list stays; if there was none, the job ends.
    ///
    /// The reason may repeat what a script has printed.
    pub fn on_discovery_failed(&mut self, why: &str, now: Instant) {
        self.on_answer(now);
        let why = tidy(why);
        let is_known =
            |(logged, at): &(String, Instant)| *logged == why || now.saturating_duration_since(*at) < FAILURE_INTERVAL;
        if !self.discovery.answered {
            self.give_up(format!("host discovery failed at its first call: {why}"), now);
        } else if !self.discovery.failure.as_ref().is_some_and(is_known) {
            self.log(true, format!("host discovery failed, and the hosts of its last answer stay in use: {why}"));
            self.discovery.failure = Some((why, now));
        }
        self.review(now);
    }

    /// An agent runs.
    pub fn on_up(&mut self, agent: AgentId, version: &str, now: Instant) {
        let same = version == self.rules.version;
        if let Some(Agent { host, stage: stage @ Stage::Starting { .. } }) = self.agents.get_mut(&agent) {
            if same {
                *stage = Stage::Up;
                self.manager.on_up(&host.name);
                let text = format!("an agent runs on {host}");
                self.log(false, text);
            } else {
                *stage = Stage::Refused { why: other_version(version, &self.rules.version) };
                self.commands.push_back(Command::Kill { agent });
            }
        }
        self.review(now);
    }

    /// An agent can do what its command line says, and meets the others.
    pub fn on_accepted(&mut self) {
        self.accepted = true;
    }

    /// The connection with an agent has ended, or there was none.
    pub fn on_ended(&mut self, agent: AgentId, ending: &Ending, now: Instant) {
        let Some(Agent { host, stage }) = self.agents.remove(&agent) else { return };
        let state = self.states.entry(host.name.clone()).or_default();
        state.agent = None;
        let meaning = ending.meaning();
        state.detached |= meaning == Meaning::Detached;
        state.lacks_script = meaning == Meaning::LacksScript;
        let is_refused = meaning == Meaning::Refused || meaning == Meaning::LacksScript && self.all_lack_script();
        if self.over.is_none() && matches!(meaning, Meaning::Succeeded | Meaning::Failed) {
            self.on_job_ended(ending, &host, now);
        } else if self.over.is_none() && is_refused && !self.accepted {
            let why = ending.why(&self.rules.python, true);
            let others = if meaning == Meaning::Refused { "would end" } else { "has ended" };
            let reason = format!("host `{}`: {why}; every other agent {others} in the same way", host.name);
            self.end_early(Verdict::Refused, reason, now);
        } else if meaning == Meaning::Detached {
            self.log(false, format!("the agent on {host} runs on without the driver"));
        } else if self.over.is_none() && meaning == Meaning::TakenAway {
            let secs = AFTER_NOTICE.as_secs();
            self.log(
                true,
                format!("the agent on {host} has left, since its machine is taken away; next try in {secs} s"),
            );
            let standing = self.manager.standing(&host.name, now);
            standing.retry("its machine was taken away", now.checked_add(AFTER_NOTICE));
        } else if self.over.is_none() {
            match stage {
                Stage::Starting { .. } => self.on_trouble(&host, &ending.why(&self.rules.python, false), now),
                // Expected: its workers have failed, and the coordinator keeps the host out.
                Stage::Up if self.is_excluded(&host.name, now) || self.is_out_for_the_job(&host.name, now) => {}
                Stage::Up => self.on_trouble(&host, &ending.why(&self.rules.python, true), now),
                Stage::Refused { why } => self.on_trouble(&host, &(why + &ending.detail()), now),
                Stage::Leaving { .. } => self.log(false, format!("the agent on {host} has left")),
            }
        }
        if ending.was_first() {
            self.on_first_failure(&host);
        }
        self.review(now);
    }

    /// The coordinator keeps out these hosts, and no other.
    pub fn on_excluded(&mut self, excluded: BTreeMap<String, Unused>, now: Instant) {
        for (name, out) in &excluded {
            if self.excluded.get(name).is_none_or(|known| known.until != out.until) {
                self.log(true, format!("host `{name}` is out {}", out.text(now)));
            }
        }
        self.excluded = excluded;
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

    fn on_answer(&mut self, now: Instant) {
        self.discovery.answered_at = now;
        self.discovery.logged_silence = false;
    }

    /// A host's agent has ended by itself.
    fn on_trouble(&mut self, host: &Host, why: &str, now: Instant) {
        let (window, limit) = (self.rules.window, self.rules.host_failures as usize);
        let standing = self.manager.standing(&host.name, now);
        standing.fail(None, limit.max(MOST_TROUBLES), now);
        let count = standing.failed_within(window, now);
        if limit == 0 || count < limit {
            let doubling =
                u32::try_from(count - 1).map_or(u32::MAX, |step| 1_u32.checked_shl(step).unwrap_or(u32::MAX));
            let delay = FIRST_DELAY.saturating_mul(doubling).min(LONGEST_DELAY);
            standing.retry(why, now.checked_add(delay));
            let delay = delay.as_secs();
            let so_far = if limit == 0 { format!("{count} so far") } else { format!("{count} of {limit}") };
            return self.log(true, format!("host `{}`: {why}; next try in {delay} s ({so_far})", host.name));
        }
        standing.forget_failures();
        standing.retry(why, None);
        self.manager.blacklist(&host.name, WhyUnused::AgentsFailed { count, last: why.to_owned() }, now);
        let how_long = self.manager.out(&host.name, now).map_or_else(String::new, |out| out.how_long(now));
        self.log(
            true,
            format!("host `{}`: {why}; it is out {how_long} ({count} of {limit}, --host-failures)", host.name),
        );
    }

    /// Whether no host has the script.
    fn all_lack_script(&self) -> bool {
        let lacks = |name: &str| self.states.get(name).is_some_and(|state| state.lacks_script);
        self.manager.hosts().iter().all(|known| lacks(&known.host.name))
    }

    /// Whether a host can never be used again.
    fn is_out_for_the_job(&self, name: &str, now: Instant) -> bool {
        let own = self.manager.out(name, now);
        self.excluded.get(name).into_iter().chain(own).any(|out| out.until.is_none())
    }

    fn log(&mut self, warns: bool, text: String) {
        self.commands.push_back(Command::Log { warns, text });
    }
}
