//! Histories of jobs that keep hosts out and whose worlds count workers: the plans of [`super::plan`] and [`super::agent_plan`] with such
//! rules, and with hosts that fail again and again.

use std::time::Duration;

use super::agent::worker_count;
use super::agent_plan;
use super::history::{Report, live_plan};
use super::options::{Action, Options};
use super::plan::Plan;
use crate::engine::dice::Dice;
use crate::engine::history::Failure;
use crate::engine::paths::HostId;
use elastic_rs::hosts::Cooldown;
use elastic_rs::rendezvous::messages::message::Placement;
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::messages::settings::{Rules, WorkerBounds};

/// What has happened to the hosts of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How often a host was put out.
    pub exclusions: u64,
    /// How many places were for fewer workers than the node has.
    pub cut: usize,
}

/// Draw a plan with such rules.
pub fn draw(seed: u64) -> Plan {
    let mut plan = match seed % 4 {
        0 => Plan::draw_with_host(seed),
        1 => agent_plan::draw(seed),
        _ => Plan::draw(seed),
    };
    // A separate generator, so that the rest of a seed's plan is the same as without these rules.
    let mut dice = Dice::new(seed ^ 0x0510);
    let hosts = plan.options.hosts;
    if dice.chance(70) {
        let rules = &mut plan.options.settings.rules;
        rules.host_failures = dice.between(1, 3) as u32;
        rules.host_failures_window = dice.duration((Duration::from_secs(10), Duration::from_secs(600)));
        // The job must have settled some time after the last fault.
        let range = (Duration::from_secs(1), Duration::from_secs(15));
        let (one, other) = (dice.duration(range), dice.duration(range));
        rules.cooldown = dice.chance(60).then(|| Cooldown { min: one.min(other), max: one.max(other) });
    }
    if dice.chance(60) {
        // Hosts have one to three workers.
        let max = dice.between(1, 2 * hosts as u64) as u32;
        let min = dice.between(1, max.into()) as u32;
        plan.options.settings.rules.workers = Some(WorkerBounds { min, max });
        (plan.options.settings.min_nodes, plan.options.settings.max_nodes) = (1, 2 * hosts as u32);
    }
    for _ in 0..dice.between(0, 3) {
        let host = dice.between(0, hosts as u64 - 1) as usize;
        draw_bad_host(&mut plan, host, &mut dice);
    }
    plan
}

/// A host whose workers fail, or that dies, every few seconds.
fn draw_bad_host(plan: &mut Plan, host: HostId, dice: &mut Dice) {
    let every = dice.duration((Duration::from_secs(3), Duration::from_secs(60)));
    let first = dice.duration((Duration::ZERO, Duration::from_secs(60)));
    let dies = dice.chance(50);
    for time in 1..=dice.between(1, 6) as u32 {
        let at = first + every * time;
        plan.add(at, if dies { Action::Kill(host) } else { Action::ReportFailure(host) }, Duration::ZERO);
        plan.add(at + every / 3, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
    }
}

/// A job on many hosts, of which one in a hundred fails in each minute. The same ten hosts have half of the failures.
pub fn many_hosts(seed: u64, hosts: usize, minutes: u64) -> Plan {
    let mut dice = Dice::new(seed);
    let bounds = WorkerBounds { min: hosts as u32 / 2, max: hosts as u32 * 3 / 2 };
    let settings = Settings {
        rules: Rules {
            workers: Some(bounds),
            host_failures: 1,
            host_failures_window: Duration::from_secs(3600),
            cooldown: Some(Cooldown { min: Duration::from_secs(30), max: Duration::from_secs(120) }),
            ..Rules::default()
        },
        rejoin_limit: 0,
        ..Settings::new(1, 2 * hosts as u32)
    };
    let options = Options { seed, stop: super::host::STOP, ..Options::exact(hosts, settings) };
    let mut plan = Plan { options, actions: Vec::new(), calm_at: Duration::ZERO };
    for host in 0..hosts {
        plan.add(Duration::from_millis(host as u64), Action::Start(host, Duration::from_secs(7200)), Duration::ZERO);
    }
    for _ in 0..minutes * hosts as u64 / 100 {
        let at = Duration::from_secs(60) + dice.duration((Duration::ZERO, Duration::from_secs(60 * minutes)));
        let among = if dice.chance(50) { 10 } else { hosts as u64 };
        let host = dice.between(0, among - 1) as usize;
        if dice.chance(50) {
            plan.add(at, Action::ReportFailure(host), Duration::ZERO);
        } else {
            plan.add(at, Action::Kill(host), Duration::ZERO);
            let again = at + Duration::from_secs(20);
            plan.add(again, Action::Start(host, Duration::from_secs(7200)), Duration::ZERO);
        }
    }
    // Whoever is out at the end has been let in before the job must have settled.
    plan.calm_at += Duration::from_secs(120);
    plan
}

/// Live through the history of a seed. Also returns what happened to hosts.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<(Report, Outcome), Box<Failure>> {
    live_as(seed, &draw(seed), keep_history)
}

/// The same for a plan that was drawn in another way.
///
/// # Errors
/// As [`live`].
pub fn live_as(seed: u64, plan: &Plan, keep_history: bool) -> Result<(Report, Outcome), Box<Failure>> {
    let (report, job) = live_plan(seed, plan, keep_history)?;
    let placements =
        job.hosts().iter().enumerate().flat_map(|(host, it)| it.placements.iter().map(move |it| (host, it)));
    let is_cut = |(host, placement): &(HostId, &Placement)| {
        placement.local_world_size.is_some_and(|size| size < worker_count(*host))
    };
    Ok((report, Outcome { exclusions: job.ledger().exclusions, cut: placements.filter(is_cut).count() }))
}
