//! The end of the job: agents that are left get a grace period, and then are killed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Agent, AgentId, Command, Driver, End, Ending, Host, Meaning, Request, Stage, Verdict};
use crate::signals::Signal;

/// The job is over.
#[derive(Clone, Debug)]
pub(super) struct Over {
    end: End,
    /// When the agents that are left are killed; `None`: they were.
    kill_at: Option<Instant>,
    /// When the driver ends, even if agents are left.
    end_at: Instant,
    /// Number of signals so far.
    signals: u32,
    /// [`Command::End`] was given.
    reported: bool,
}

/// How long killed processes may take to be gone.
const KILL: Duration = Duration::from_secs(5);

/// The hosts of these agents, in words.
fn hosts_of(agents: &BTreeMap<AgentId, Agent>) -> String {
    agents.values().map(|agent| agent.host.name.as_str()).collect::<Vec<_>>().join(", ")
}

impl Driver {
    /// The driver got this signal: pass it on to all agents. Unless it is one that is only passed on, the job ends, and the third one kills
    /// what is left. `sender`: who has sent it, in words, or
    /// nothing.
    pub fn on_signal(&mut self, signal: i32, sender: &str, now: Instant) {
        let name = Signal(signal);
        let from = if sender.is_empty() { String::new() } else { format!("; it was {sender}") };
        if self.rules.passed_on.contains(&name) {
            self.log(false, format!("received {name}: passed on to all agents{from}"));
            return self.send(Request::Signal(signal));
        }
        let over = self.over.get_or_insert_with(|| Over {
            end: End { verdict: Verdict::Signal(signal), reason: format!("{name}") },
            kill_at: Some(now + self.rules.grace),
            end_at: now + self.rules.grace + KILL,
            signals: 0,
            reported: false,
        });
        over.signals += 1;
        if over.signals > 2 {
            over.kill_at = over.kill_at.map(|_| now);
        }
        let text = match over.signals {
            1 => format!(
                "received {name}: all agents are notified; a second signal kills workers, a third one the agents"
            ),
            2 => format!("received {name} again: agents kill what is left of their workers"),
            _ => format!("received {name} again: what is left is killed"),
        };
        self.log(true, text + &from);
        self.send_all(Request::Signal(signal));
        self.review(now);
    }

    /// An agent has reported how the job ended. The coordinator notifies the others.
    pub(super) fn on_job_ended(&mut self, ending: &Ending, host: &Host, now: Instant) {
        let name = &host.name;
        let (verdict, reason) = match ending.meaning() {
            Meaning::Succeeded => {
                (Verdict::Succeeded, format!("the job has succeeded, as the agent on {name} reports"))
            }
            _ => {
                let reason = format!("the job has failed; the agent on {name} has printed the report");
                (Verdict::Failed { code: ending.exit_code() }, reason)
            }
        };
        self.end(verdict, reason, now);
        self.kill_those_that_start();
    }

    /// The agent on this host has reported that the first failure was there. The agents of other hosts may have reported before it.
    pub(super) fn on_first_failure(&mut self, host: &Host) {
        if let Some(over) =
            self.over.as_mut().filter(|over| matches!(over.end.verdict, Verdict::Failed { .. }) && !over.reported)
        {
            over.end.reason = format!("the job has failed on host {}, whose agent has printed the report", host.name);
        }
    }

    /// The driver gives the job up: all agents leave.
    pub(super) fn give_up(&mut self, reason: String, now: Instant) {
        self.end_early(Verdict::GivenUp, reason, now);
    }

    /// The driver ends the job: all agents leave.
    pub(super) fn end_early(&mut self, verdict: Verdict, reason: String, now: Instant) {
        if self.over.is_none() {
            self.end(verdict, reason, now);
            self.send_all(Request::Leave);
        }
    }

    pub(super) fn end(&mut self, verdict: Verdict, reason: String, now: Instant) {
        let (kill_at, end_at) = (Some(now + self.rules.grace), now + self.rules.grace + KILL);
        self.over = Some(Over { end: End { verdict, reason }, kill_at, end_at, signals: 0, reported: false });
    }

    fn send_all(&mut self, request: Request) {
        self.send(request);
        self.kill_those_that_start();
    }

    /// Agents that start yet do not get it.
    fn send(&mut self, request: Request) {
        for (id, agent) in &self.agents {
            if matches!(agent.stage, Stage::Up | Stage::Leaving { kill_at: Some(_) }) {
                self.commands.push_back(Command::Send { agent: *id, request });
            }
        }
    }

    fn kill_those_that_start(&mut self) {
        self.kill_if(|agent| matches!(agent.stage, Stage::Starting { .. }));
    }

    fn kill_if(&mut self, which: impl Fn(&Agent) -> bool) {
        for (id, agent) in &mut self.agents {
            let killed = matches!(agent.stage, Stage::Leaving { kill_at: None } | Stage::Refused { .. });
            if !killed && which(agent) {
                agent.stage = Stage::Leaving { kill_at: None };
                self.commands.push_back(Command::Kill { agent: *id });
            }
        }
    }

    /// Carries the end on. True if the job is over.
    pub(super) fn review_end(&mut self, now: Instant) -> bool {
        let Some(over) = &mut self.over else { return false };
        let (left, end_at) = (self.agents.len(), over.end_at);
        let kills = over.kill_at.take_if(|at| *at <= now || left == 0).is_some() && left > 0;
        let ends = !over.reported && (left == 0 || end_at <= now);
        over.reported |= ends;
        let end = over.end.clone();
        if kills {
            let text = format!("agents that have not ended are killed: {}", hosts_of(&self.agents));
            self.log(true, text);
            self.kill_if(|_| true);
        }
        if ends {
            if left > 0 {
                let hosts = hosts_of(&self.agents);
                let text = format!(
                    "the driver waits no longer for {left} killed agents, whose connections have not ended; processes may be left on {hosts}"
                );
                self.log(true, text);
            }
            self.commands.push_back(Command::End(end));
        }
        true
    }

    /// The next time of the end, if the job is over and the end was not reported.
    pub(super) fn end_deadline(&self) -> Option<Option<Instant>> {
        let over = self.over.as_ref()?;
        Some((!over.reported).then(|| over.kill_at.unwrap_or(over.end_at)))
    }
}
