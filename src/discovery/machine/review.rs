//! After every event: compare the agents that run with those that should.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Agent, AgentId, Command, Driver, GONE_SHOWN, Host, Request, SHORT_LOGGED_AFTER, Stage, Verdict};
use crate::discovery::endings::start_timed_out;
use crate::discovery::manager::{Known, MOST_GONE};
use crate::hosts::{Standing, Unused, UnusedHosts, WhyUnused};

impl Driver {
    /// Ask agents to leave, start missing ones, and act on limits that have passed.
    pub(super) fn review(&mut self, now: Instant) {
        if self.review_end(now) {
            return;
        }
        self.look_at_discovery(now);
        self.look_at_agents(now);
        self.start_missing(now);
        self.forget_hosts();
        self.look_at_size(now);
        self.review_end(now);
    }

    /// When to call [`Driver::on_tick`].
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        if let Some(deadline) = self.end_deadline() {
            return deadline;
        }
        let discovery = self.silent_at();
        let short = self.short_since.and_then(|since| {
            let timeout = self.rules.elastic_timeout;
            since.checked_add(if self.logged_shortage { timeout } else { timeout.min(SHORT_LOGGED_AFTER) })
        });
        let agents = self.agents.values().filter_map(|agent| match agent.stage {
            Stage::Starting { until } => Some(until),
            Stage::Leaving { kill_at } => kill_at,
            Stage::Up | Stage::Refused { .. } => None,
        });
        let waiting = self.manager.hosts().iter().filter(|known| self.agent_of(&known.host.name).is_none());
        let starts = waiting.filter_map(|known| {
            let name = &known.host.name;
            let delay = self.manager.known_of(name).and_then(Standing::retry_at);
            let outs = self.excluded.get(name).into_iter().chain(self.manager.out(name, now));
            outs.filter_map(|out| out.until).chain(delay).filter(|at| *at > now).min()
        });
        // An agent counts again when its host is let in.
        let let_in = self.excluded.values().filter_map(|out| out.until).filter(|until| *until > now);
        discovery.into_iter().chain(short).chain(agents).chain(starts).chain(let_in).min()
    }

    /// When discovery's silence is to be logged. A list that cannot change is given once.
    fn silent_at(&self) -> Option<Instant> {
        let known = self.discovery.logged_silence || self.rules.fixed && self.discovery.answered;
        self.discovery.answered_at.checked_add(self.rules.discovery_timeout).filter(|_| !known)
    }

    fn look_at_discovery(&mut self, now: Instant) {
        if self.silent_at().is_none_or(|at| at > now) {
            return;
        }
        self.discovery.logged_silence = true;
        let silent = self.rules.discovery_timeout.as_secs_f64();
        if self.discovery.answered {
            self.log(
                true,
                format!(
                    "host discovery has not answered for {silent:.0} s, and the hosts of its last answer stay in use"
                ),
            );
        } else {
            self.give_up(format!("host discovery has not answered within {silent:.0} s (--discovery-timeout)"), now);
        }
    }

    /// Ask agents to leave whose host has vanished or has other slots, and kill those whose time has passed.
    fn look_at_agents(&mut self, now: Instant) {
        if self.over.is_some() {
            return;
        }
        let kill_at = now.checked_add(self.rules.grace);
        let mut asked = Vec::new();
        let hosts = self.manager.hosts().iter();
        let wanted: BTreeMap<&str, u32> = hosts.map(|known| (&*known.host.name, known.host.slots)).collect();
        for (id, agent) in &mut self.agents {
            let wanted = wanted.get(&*agent.host.name) == Some(&agent.host.slots);
            match agent.stage {
                Stage::Starting { .. } if !wanted => {
                    agent.stage = Stage::Leaving { kill_at: None };
                    self.commands.push_back(Command::Kill { agent: *id });
                }
                Stage::Starting { until } if until <= now => {
                    agent.stage = Stage::Refused { why: start_timed_out(self.rules.start_timeout) };
                    self.commands.push_back(Command::Kill { agent: *id });
                }
                Stage::Up if !wanted => {
                    agent.stage = Stage::Leaving { kill_at };
                    self.commands.push_back(Command::Send { agent: *id, request: Request::Leave });
                    asked.push(agent.host.to_string());
                }
                Stage::Leaving { kill_at: Some(at) } if at <= now => {
                    agent.stage = Stage::Leaving { kill_at: None };
                    self.commands.push_back(Command::Kill { agent: *id });
                }
                _ => {}
            }
        }
        for host in asked {
            self.log(false, format!("the agent on {host} was asked to leave"));
        }
    }

    fn start_missing(&mut self, now: Instant) {
        if self.over.is_some() {
            return;
        }
        let may_start = |known: &&Known| {
            let name = &known.host.name;
            let state = self.states.get(name);
            let idle = state.is_none_or(|it| it.agent.is_none() && !it.detached);
            let retry_at = self.manager.known_of(name).and_then(Standing::retry_at);
            idle && retry_at.is_none_or(|at| at <= now) && !self.is_excluded(name, now)
        };
        let missing: Vec<(Host, u64)> =
            self.manager.available(now).filter(may_start).map(|known| (known.host.clone(), known.age)).collect();
        for (host, age) in missing {
            let agent = AgentId(self.next_agent);
            self.next_agent += 1;
            let until = now + self.rules.start_timeout;
            self.agents.insert(agent, Agent { host: host.clone(), stage: Stage::Starting { until } });
            self.states.entry(host.name.clone()).or_default().agent = Some(agent);
            self.manager.on_tried(&host.name);
            let is_first = self.first_host.as_ref() == Some(&host.name);
            let hosts_coordinator = self.rules.detach && self.rules.listed.is_none() && is_first;
            self.commands.push_back(Command::Start { agent, host, age, hosts_coordinator });
        }
    }

    /// Forget hosts that are in no list and have no agent, when they are too many.
    fn forget_hosts(&mut self) {
        let listed = self.manager.hosts();
        if self.states.len() <= listed.len() + MOST_GONE {
            return;
        }
        let listed: BTreeSet<&str> = listed.iter().map(|known| &*known.host.name).collect();
        self.states.retain(|name, state| listed.contains(&**name) || state.agent.is_some() || state.detached);
    }

    /// Give up if the running agents have had too few slots for too long, or can never have enough.
    fn look_at_size(&mut self, now: Instant) {
        if self.over.is_some() || !self.discovery.answered {
            return;
        }
        if self.rules.detach {
            return self.look_at_detached(now);
        }
        let min = self.rules.min_slots;
        // No round counts the workers of hosts that the coordinator keeps out.
        let counts = |agent: &&Agent| agent.stage == Stage::Up && !self.is_excluded(&agent.host.name, now);
        let up: u64 = self.agents.values().filter(counts).map(|agent| u64::from(agent.host.slots)).sum();
        if up >= u64::from(min) {
            (self.short_since, self.logged_shortage) = (None, false);
            return;
        }
        let since = *self.short_since.get_or_insert(now);
        let usable = self.manager.hosts().iter().filter(|known| !self.is_out_for_the_job(&known.host.name, now));
        let usable: u64 = usable.map(|known| u64::from(known.host.slots)).sum();
        // A host that is out for the job does not come back, and a discovery that names no other has nothing to wait for.
        let none_is_left = self.rules.fixed || usable == 0 && !self.manager.hosts().is_empty();
        if none_is_left && usable < u64::from(min) {
            let reason = format!("slots left: {usable}, must be at least {min} (--min-np): {}", self.troubles(now));
            return self.give_up(reason, now);
        }
        let waited = now.saturating_duration_since(since);
        if waited >= SHORT_LOGGED_AFTER && !self.logged_shortage {
            self.logged_shortage = true;
            let limit = self.rules.elastic_timeout.as_secs_f64();
            self.log(
                true,
                format!(
                    "slots with an agent: {up}, must be at least {min} (--min-np); waiting for more until {limit:.0} s have passed \
                     (--elastic-timeout), {:.0} s of them so far: {}",
                    waited.as_secs_f64(),
                    self.troubles(now)
                ),
            );
        }
        if waited >= self.rules.elastic_timeout {
            let waited = waited.as_secs_f64();
            let reason = format!(
                "slots with an agent for {waited:.0} s (--elastic-timeout): {up}, must be at least {min} (--min-np): {}",
                self.troubles(now)
            );
            self.give_up(reason, now);
        }
    }

    /// End once each host has its detached agent, or can never have one. Without an agent on each of the hosts where they meet they may wait
    /// for it: if such a host is silent, nobody knows whether its agent leads already.
    fn look_at_detached(&mut self, now: Instant) {
        let runs_on = |name: &str| self.states.get(name).is_some_and(|state| state.detached);
        let hosts = self.manager.hosts();
        let cannot_host = |name: &&String| !runs_on(name) && self.is_out_for_the_job(name, now);
        let meeting = self.rules.listed.as_deref().unwrap_or(self.first_host.as_slice());
        if let Some(name) = meeting.iter().find(cannot_host) {
            let which = if self.rules.listed.is_none() { "the first host" } else { "one of the list's hosts" };
            let reason = format!(
                "the agent on `{name}`, {which}, would have hosted the rendezvous (--detach), and cannot start; agents that \
                 run already end after their join_timeout: {}",
                self.troubles(now)
            );
            return self.give_up(reason, now);
        }
        if hosts.iter().any(|known| !runs_on(&known.host.name) && !self.is_out_for_the_job(&known.host.name, now)) {
            return;
        }
        let running = hosts.iter().filter(|known| runs_on(&known.host.name));
        let slots: u64 = running.map(|known| u64::from(known.host.slots)).sum();
        let (all, min) = (self.manager.hosts().len(), self.rules.min_slots);
        if slots >= u64::from(min) {
            let reason = format!("agents with {slots} slots run on without the driver");
            return self.end(Verdict::Succeeded, reason, now);
        }
        let reason = format!(
            "slots with an agent: {slots}, must be at least {min} (--min-np); the agents wait for more until their \
             join_timeout; of {all} hosts these have none: {}",
            self.troubles(now)
        );
        self.give_up(reason, now);
    }

    /// What is wrong with each host, in words.
    fn troubles(&self, now: Instant) -> String {
        let why = |known: &Known| {
            let name = &known.host.name;
            Some(format!("host `{name}`: {}", self.why_unused(name, now)?.why.text()))
        };
        let troubles: Vec<String> = self.manager.hosts().iter().filter_map(why).collect();
        match (troubles.is_empty(), self.manager.hosts().is_empty()) {
            (false, _) => troubles.join("; "),
            (true, true) => "there is no host".to_owned(),
            (true, false) => "no further host is known".to_owned(),
        }
    }

    /// Why a host is not used, and until when: it is kept out by the coordinator or the driver, discovery does not list it, it waits for its
    /// next try, or its agent starts or leaves. `None`: an agent runs there, or is about to be started.
    fn why_unused(&self, name: &str, now: Instant) -> Option<Unused> {
        let standing = self.manager.known_of(name);
        let stage = || {
            let (why, until) = match self.agents.get(&self.agent_of(name)?)?.stage {
                Stage::Starting { until } => {
                    let last = standing.and_then(Standing::last).map(str::to_owned);
                    (WhyUnused::Starting { last }, Some(until))
                }
                Stage::Leaving { kill_at } => (WhyUnused::Leaving, kill_at),
                Stage::Up | Stage::Refused { .. } => return None,
            };
            Some(Unused { why, until })
        };
        let excluded = self.excluded.get(name).filter(|out| out.holds(now)).cloned();
        excluded.or_else(|| standing?.unused(now)).or_else(stage)
    }

    /// The hosts that are not used, without those that the coordinator keeps out: it knows them. Hosts that discovery does not list any
    /// longer are among them for an hour.
    pub fn unused(&self, now: Instant) -> UnusedHosts {
        let went = |standing: &Standing| {
            let since = standing.unlisted_since();
            since.is_some_and(|since| now.saturating_duration_since(since) < GONE_SHOWN)
        };
        let gone = self.manager.book().iter().filter(|(_, standing)| went(standing)).map(|(name, _)| name);
        let all = self.manager.hosts().iter().map(|known| &known.host.name).chain(gone);
        let own = all.filter(|name| !self.is_excluded(name, now));
        own.filter_map(|name| Some((name, self.why_unused(name, now)?))).collect()
    }

    fn agent_of(&self, name: &str) -> Option<AgentId> {
        self.states.get(name)?.agent
    }

    pub(super) fn is_excluded(&self, name: &str, now: Instant) -> bool {
        self.excluded.get(name).is_some_and(|out| out.holds(now))
    }
}
