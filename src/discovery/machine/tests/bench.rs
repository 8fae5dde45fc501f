//! A driver under a clock that the test moves.

use super::*;

pub(super) const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) fn rules(min_slots: u32, fixed: bool) -> Rules {
    Rules {
        min_slots,
        fixed,
        detach: false,
        listed: None,
        start_timeout: s(30),
        elastic_timeout: s(600),
        discovery_timeout: s(20),
        grace: s(40),
        host_failures: 3,
        window: s(3600),
        cooldown: None,
        passed_on: BTreeSet::from([Signal(10)]),
        version: "1.0".to_owned(),
        python: "python3".to_owned(),
    }
}

/// A driver under a clock that the test moves.
pub(super) struct Bench {
    pub(super) driver: Driver,
    pub(super) now: Instant,
    pub(super) logged: Vec<String>,
    /// The commands, without log lines.
    waiting: Vec<Command>,
}

impl Bench {
    pub(super) fn new(rules: Rules) -> Self {
        let now = Instant::now();
        Self { driver: Driver::new(rules, now), now, logged: Vec::new(), waiting: Vec::new() }
    }

    pub(super) fn with(min_slots: u32, hosts: &str) -> (Self, Vec<AgentId>) {
        let mut bench = Self::new(rules(min_slots, false));
        let agents = bench.found(hosts);
        for agent in &agents {
            bench.driver.on_up(*agent, "1.0", bench.now);
        }
        assert_eq!(bench.commands(), []);
        (bench, agents)
    }

    /// The agents that are started because of this list.
    pub(super) fn found(&mut self, hosts: &str) -> Vec<AgentId> {
        let hosts = if hosts.is_empty() { Vec::new() } else { parse_list(hosts, 1).unwrap() };
        self.driver.on_found(&hosts, self.now);
        self.commands().iter().filter_map(started).collect()
    }

    pub(super) fn ended(&mut self, agent: AgentId, code: i32, outcome: Option<&str>, words: &[&str]) {
        let last_lines = words.iter().map(|&line| line.to_owned()).collect();
        let ending = Ending {
            code: Some(code),
            signal: None,
            outcome: outcome.map(str::to_owned),
            last_lines,
            ..Ending::default()
        };
        self.driver.on_ended(agent, &ending, self.now);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.driver.on_tick(self.now);
    }

    fn drain(&mut self) {
        while let Some(command) = self.driver.poll_command() {
            match command {
                Command::Log { text, .. } => self.logged.push(text),
                command => self.waiting.push(command),
            }
        }
    }

    /// What to do since the last call.
    pub(super) fn commands(&mut self) -> Vec<Command> {
        self.drain();
        std::mem::take(&mut self.waiting)
    }

    pub(super) fn has_logged(&mut self, part: &str) -> bool {
        self.drain();
        self.logged.iter().any(|text| text.contains(part))
    }

    /// How often a line says that discovery has failed and the last list stays.
    pub(super) fn stays(&mut self) -> usize {
        self.drain();
        self.logged.iter().filter(|text| text.contains("hosts of its last answer stay in use")).count()
    }

    pub(super) fn end(&mut self) -> Option<(Verdict, String)> {
        self.commands().into_iter().find_map(|command| match command {
            Command::End(End { verdict, reason }) => Some((verdict, reason)),
            _ => None,
        })
    }

    /// The driver has given the job up. Returns why.
    pub(super) fn given_up(&mut self) -> String {
        let (verdict, reason) = self.end().unwrap();
        assert_eq!(verdict, Verdict::GivenUp, "{reason}");
        reason
    }
}

pub(super) fn started(command: &Command) -> Option<AgentId> {
    match command {
        Command::Start { agent, .. } => Some(*agent),
        _ => None,
    }
}

pub(super) fn send(agent: AgentId, request: Request) -> Command {
    Command::Send { agent, request }
}
