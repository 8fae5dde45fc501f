//! The history that follows from a plan, and what must be true at its end.

use std::time::Duration;

use super::host::Host;
use super::ledger::{agree, check_settled};
use super::options::{Action, run_id};
use super::plan::Plan;
use super::simulation::Simulation;
use crate::engine::Model;
use crate::engine::history::{Failure, History};
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::{EndClass, SAVE_WITHIN, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::Run;

/// Silence is noticed at both ends (lease 15 s and last look, twice if a node comes back and is lost again). A connection attempt
/// gets no answer (5 s) and is repeated (2 s). Members of an unknown world are awaited (15 s). Workers stop (5 s). The last call
/// (30 s) starts again with a late node, which then makes the world re-form once more (5 s and 30 s).
pub const SETTLE_WITHIN: Duration = Duration::from_secs(150);
/// Workers stop (5 s), and messages travel.
pub const GONE_WITHIN: Duration = Duration::from_secs(30);

/// The result of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Digest of all events.
    pub digest: u64,
    /// Number of hosts.
    pub hosts: usize,
    /// Number of completed rounds.
    pub rounds: u64,
    /// Messages in both directions.
    pub messages: u64,
    /// Virtual time that it took.
    pub lived: Time,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<Report, Box<Failure>> {
    live_plan(seed, &Plan::draw(seed), keep_history).map(|(report, _)| report)
}

/// The same, with the coordinator in the process of the first host's agent.
///
/// # Errors
/// As [`live`].
pub fn live_with_host(seed: u64, keep_history: bool) -> Result<Report, Box<Failure>> {
    live_plan(seed, &Plan::draw_with_host(seed), keep_history).map(|(report, _)| report)
}

/// The same for a plan that was drawn from the seed in another way. Also returns the final state of the job.
pub fn live_plan(seed: u64, plan: &Plan, keep_history: bool) -> Result<(Report, Simulation), Box<Failure>> {
    let mut job = Simulation::new(plan.options.clone());
    if keep_history {
        job.keep_history();
    }
    for (at, action) in &plan.actions {
        job.at(*at, action.clone());
    }
    let job = job.live(seed, plan.calm_at)?;
    let report = Report {
        digest: job.digest().0,
        hosts: plan.options.hosts,
        rounds: job.ledger().rounds,
        messages: job.ledger().messages.0 + job.ledger().messages.1,
        lived: job.now(),
    };
    Ok((report, job))
}

impl History for Simulation {
    const SETTLE_WITHIN: Duration = SETTLE_WITHIN;
    const GONE_WITHIN: Duration = GONE_WITHIN;

    /// The coordinator runs, and so do enough nodes in most plans. Agents that died without a successor stay dead.
    fn calm(&mut self) {
        self.at(self.now(), Action::StartCoordinator);
    }

    fn check_settled(&mut self) -> Result<(), Violation> {
        self.outlast_those_that_are_let_in()?;
        let settled = self.look_whether_settled();
        if settled.is_ok() || !self.options.agents.in_place.saves {
            return settled;
        }
        // One that hangs while it saves is waited for.
        self.pass(self.now() + SAVE_WITHIN)?;
        self.look_whether_settled()
    }

    fn close(&mut self) -> Vec<HostId> {
        (0..self.options.odd_hosts.runs()).filter_map(|run| self.close_run(run)).collect()
    }

    fn check_ended(&mut self, closed_by: &[HostId]) -> Result<(), Violation> {
        if let Some(host) = self.hosts.iter().position(|host| host.process.is_some()) {
            return Err(Violation::contract(format!("host{host} has not gone {GONE_WITHIN:?} after the close")));
        }
        if self.options.coordinator_on.is_some() {
            return Ok(()); // its host has gone, and its memory with it
        }
        // A closed rendezvous rejects every node, with the reason.
        for by in closed_by {
            self.at(self.now(), Action::Start(*by, self.options.join_timeout));
        }
        self.pass(self.now() + GONE_WITHIN)?;
        if closed_by.iter().any(|by| self.hosts[*by].process.is_some()) {
            return Err(Violation::contract("a node that came after the close was not turned away".to_owned()));
        }
        Ok(())
    }
}

/// Whether a host is kept out of a run that it would join.
fn is_out(run: &Run, host: &Host) -> bool {
    host.process.as_ref().is_some_and(|it| run.is_out(it.id))
}

impl Simulation {
    fn look_whether_settled(&self) -> Result<(), Violation> {
        let mut runs = 0..self.options.odd_hosts.runs();
        runs.try_for_each(|run| {
            let of = self.machine().run(&run_id(run));
            let out = |host: &Host| of.is_some_and(|run| is_out(run, host));
            let hosts = self.hosts_of(run).filter(|(_, host)| !out(host));
            check_settled(hosts, &self.settings_in_force(run)?)
        })
    }

    /// A machine that was ill is let in later, which changes the world. The job has as long again to settle.
    fn outlast_those_that_are_let_in(&mut self) -> Result<(), Violation> {
        if self.options.agents.health.is_none() {
            return Ok(());
        }
        let mut before = None;
        loop {
            let run = self.machine().run(&run_id(0));
            let out: Vec<_> = self.hosts.iter().map(|host| run.is_some_and(|run| is_out(run, host))).collect();
            if before.as_ref() == Some(&out) {
                return Ok(());
            }
            before = Some(out);
            self.pass(self.now() + SETTLE_WITHIN)?;
        }
    }

    /// The settings of the nodes that live: others have been refused.
    fn settings_in_force(&self, run: usize) -> Result<Settings, Violation> {
        let (usual, odd_hosts) = (&self.options.settings, &self.options.odd_hosts);
        let live = self.hosts_of(run).filter(|(_, host)| host.process.is_some());
        let mut asked = live.map(|(host, _)| odd_hosts.settings_of(host).unwrap_or(usual));
        let first = asked.next().unwrap_or(usual);
        match asked.find(|other| !agree(first, other)) {
            None => Ok(first.clone()),
            Some(other) => Err(Violation::contract(format!("nodes live that ask for {first:?} and for {other:?}"))),
        }
    }

    /// Closes a run in one of the ways in which runs end. Returns the host that does it, if any lives.
    fn close_run(&mut self, run: usize) -> Option<HostId> {
        let now = self.now();
        let any = self.hosts_of(run).find(|(_, host)| host.process.is_some())?.0;
        let running = self.hosts_of(run).map(|(host, _)| host).filter(|host| self.running(*host).is_some());
        let running: Vec<_> = running.collect();
        let way = (self.options.seed + run as u64) % 3;
        // Only a node that has had a place can fail the job.
        let by = if way == 1 { running.first().copied().unwrap_or(any) } else { any };
        let verdict = match way {
            0 => Some(Verdict::Succeeded { by: format!("host{by}") }),
            1 if !running.is_empty() => Some(Verdict::Failed {
                by: format!("host{by}"),
                cause: "exit code 1".to_owned(),
                failure: None,
                class: EndClass::Program,
            }),
            // All workers succeed, if any run.
            _ => None,
        };
        match verdict.or_else(|| running.is_empty().then(|| Verdict::Succeeded { by: format!("host{by}") })) {
            Some(verdict) => {
                let failed = verdict.is_failure();
                self.at(now, Action::Close(by, verdict));
                // Our agents let their workers finish if nothing has failed.
                for host in running {
                    if !failed && self.hosts[host].ours.is_some() {
                        self.at(now + Duration::from_secs(1), Action::ReportDone(host));
                    }
                }
            }
            None => {
                for (i, host) in running.into_iter().enumerate() {
                    self.at(now + Duration::from_millis(10 * i as u64), Action::ReportDone(host));
                }
            }
        }
        Some(by)
    }
}
