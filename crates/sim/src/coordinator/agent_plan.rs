//! Histories of jobs with our agents: the plans of [`super::plan`] in which some or all hosts run our agent, with failures of
//! workers in addition.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::agent::{Agents, Ill, InPlace};
use super::history::{Report, live_plan};
use super::options::Action;
use super::plan::Plan;
use crate::engine::dice::Dice;
use crate::engine::history::Failure;
use elastic_rs::agent::Outcome;
use elastic_rs::agent::machine::RAISE_LIMIT;

/// Number of agents by how they ended, as of [`kind_of`], of those whose workers were started before the join,
/// and of workers that were started before their node had its next rank.
pub type Counts = BTreeMap<&'static str, usize>;

/// How an agent ended, in a word.
pub fn kind_of(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Succeeded => "succeeded",
        Outcome::NotNeeded => "not needed",
        Outcome::Failed { .. } => "failed",
        Outcome::Unfit { .. } => "unfit",
        Outcome::NoPlacement(_) => "no place",
        Outcome::Signal(_) => "signal",
    }
}

/// Draw a plan with agents of ours.
pub fn draw(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed);
    // A separate generator, so that the rest of a seed's plan is the same as without our agents.
    let mut dice = Dice::new(seed ^ 0xA6E7);
    draw_agents(&mut plan, &mut dice);
    draw_signals(&mut plan, &mut dice);
    draw_workers(&mut plan, &mut dice);
    plan.options.agents.bad_starts = if dice.chance(30) { 5 } else { 0 };
    plan.options.agents.bad_starts_until = plan.calm_at;
    draw_message_delay(&mut plan, &mut Dice::new(seed ^ 0x30BD5));
    draw_in_place(&mut plan, &mut Dice::new(seed ^ 0x1E1A5));
    draw_stuck(&mut plan, &mut Dice::new(seed ^ 0x57CC));
    if dice.chance(15) {
        // `restart_budget=node`: the coordinator counts no restarts.
        plan.options.agents.restarts_left = plan.options.settings.max_restarts.take();
    }
    if plan.options.agents.in_place.hang > 0 {
        // The last worker that hangs may be given so long before it is replaced.
        plan.calm_at += RAISE_LIMIT;
    }
    plan
}

/// Draw a plan with agents of ours, some of whose hosts are taken away, many of them at about the same time. In some jobs scripts save then.
pub fn draw_notices(seed: u64) -> Plan {
    let mut plan = draw(seed);
    let mut dice = Dice::new(seed ^ 0x707CE);
    let in_place = &mut plan.options.agents.in_place;
    in_place.saves = !in_place.no_process_group && dice.chance(40);
    let at = dice.duration((Duration::ZERO, plan.calm_at));
    for _ in 0..dice.between(1, 1 + plan.options.hosts as u64) {
        let apart = dice.duration((Duration::ZERO, Duration::from_secs(12)));
        let most = Duration::from_secs([3, 30, 120][dice.between(0, 2) as usize]);
        let left = dice.duration((Duration::ZERO, most));
        let host = dice.between(0, plan.options.hosts as u64 - 1) as usize;
        plan.add(at + apart, Action::Notice(host, left), Duration::ZERO);
        if dice.chance(20) {
            plan.add(at + apart + left / 2, Action::Notice(host, left), Duration::ZERO);
        }
        // Another machine has its place.
        plan.add(
            at + apart + left + Duration::from_secs(10),
            Action::Start(host, plan.options.join_timeout),
            Duration::ZERO,
        );
        plan.calm_at = plan.calm_at.max(at + apart + left + Duration::from_secs(11));
    }
    plan
}

/// Draw a plan with agents of ours, some of whose machines are ill for a while.
pub fn draw_ill(seed: u64) -> Plan {
    let mut plan = draw(seed);
    let mut dice = Dice::new(seed ^ 0x111);
    let longest = Duration::from_millis([0, 200, 5_000, 29_000][dice.between(0, 3) as usize]);
    let mut hosts = Vec::new();
    for _ in 0..dice.between(1, plan.options.hosts as u64) {
        let from = dice.duration((Duration::ZERO, plan.calm_at));
        let lasts = dice.duration((Duration::ZERO, Duration::from_secs(900)));
        hosts.push((dice.between(0, plan.options.hosts as u64 - 1) as usize, from, from + lasts));
    }
    plan.options.agents.health = Some(Ill { hosts, lasts: (Duration::ZERO, longest) });
    plan
}

fn draw_agents(plan: &mut Plan, dice: &mut Dice) {
    let hosts = 0..plan.options.hosts;
    let share = [100, 100, 50, 10][dice.between(0, 3) as usize];
    let ours: BTreeSet<_> = hosts.filter(|_| dice.chance(share)).collect();
    let start = Duration::from_millis([1, 100, 3_000][dice.between(0, 2) as usize]);
    plan.options.agents = Agents {
        hosts: ours,
        // Within the time that a plan allows for a stop.
        grace: dice.duration((Duration::ZERO, Duration::from_secs(4))),
        // A node that has finished and does not wait for all others is a separate scenario.
        exit_barrier_timeout: None,
        start: (Duration::ZERO, start),
        stop: (Duration::ZERO, Duration::from_millis(200)),
        stubborn: [0, 20, 100][dice.between(0, 2) as usize],
        ..Agents::default()
    };
    // The coordinator counts for our agents. In half of all jobs the budget is used up now and then.
    let budget = if dice.chance(50) { 1_000_000 } else { dice.between(0, 6) as u32 };
    plan.options.settings.max_restarts = Some(budget);
}

/// The words of failed workers are found at once, late, or not at all.
fn draw_message_delay(plan: &mut Plan, dice: &mut Dice) {
    let slowest = Duration::from_millis([0, 20, 1_500][dice.between(0, 2) as usize]);
    plan.options.agents.message_delay = (Duration::ZERO, slowest);
    plan.options.agents.hanging_files = [0, 0, 20, 100][dice.between(0, 3) as usize];
}

/// In most jobs all programs use the API, in some only those of some hosts.
fn draw_in_place(plan: &mut Plan, dice: &mut Dice) {
    let share = [0, 50, 100, 100][dice.between(0, 3) as usize];
    let slow = |dice: &mut Dice| Duration::from_millis([0, 50, 3_000][dice.between(0, 2) as usize]);
    plan.options.agents.in_place = InPlace {
        hosts: (0..plan.options.hosts).filter(|_| dice.chance(share)).collect(),
        attend: (Duration::ZERO, slow(dice)),
        park: (Duration::ZERO, slow(dice)),
        hang: [0, 0, 5][dice.between(0, 2) as usize],
        die: [0, 5, 20][dice.between(0, 2) as usize],
        step: Duration::from_millis([1, 100, 1_000][dice.between(0, 2) as usize]),
        no_process_group: false,
        ..InPlace::default()
    };
    // A worker that never gets to the library's function would keep its node from joining.
    let all = plan.options.agents.in_place.hosts.len() == plan.options.hosts;
    plan.options.agents.in_place.no_process_group = all && dice.chance(50);
}

/// Workers find that their world cannot be formed: a member hangs while the others wait for it.
fn draw_stuck(plan: &mut Plan, dice: &mut Dice) {
    plan.options.agents.in_place.stuck = [0, 0, 10][dice.between(0, 2) as usize];
    plan.options.agents.in_place.stuck_until = plan.calm_at;
}

/// SIGTERM, now and then twice.
fn draw_signals(plan: &mut Plan, dice: &mut Dice) {
    for _ in 0..[0, 1, 5][dice.between(0, 2) as usize] {
        let at = dice.duration((Duration::ZERO, plan.calm_at));
        let host = dice.between(0, plan.options.hosts as u64 - 1) as usize;
        plan.add(at, Action::Terminate(host), Duration::ZERO);
        if dice.chance(50) {
            let again = dice.duration((Duration::ZERO, plan.options.agents.grace));
            plan.add(at + again, Action::Terminate(host), Duration::ZERO);
        }
        if dice.chance(60) {
            let back = dice.duration((Duration::ZERO, Duration::from_secs(10)));
            plan.add(at + back, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
        }
    }
}

/// Workers fail on all hosts at once, or succeed on some or all.
fn draw_workers(plan: &mut Plan, dice: &mut Dice) {
    let hosts = plan.options.hosts;
    let calm_at = plan.calm_at;
    if dice.chance(30) {
        let at = dice.duration((Duration::ZERO, calm_at));
        add_for_all(plan, at, Action::FailWorkers);
    }
    if dice.chance(5) {
        let at = dice.duration((Duration::ZERO, calm_at));
        add_for_all(plan, at, Action::ReportDone);
    }
    if dice.chance(30) {
        for _ in 0..dice.between(1, 1 + hosts as u64 / 2) {
            let at = dice.duration((Duration::ZERO, calm_at));
            let host = dice.between(0, hosts as u64 - 1) as usize;
            plan.add(at, Action::ReportDone(host), Duration::ZERO);
        }
        // A node that has finished may go without being noticed. So the world is made to re-form before the calm. This happens
        // twice, because workers that are starting do not fail.
        for after in [0, 10] {
            add_for_all(plan, calm_at + Duration::from_secs(after), Action::FailWorkers);
        }
    }
}

fn add_for_all(plan: &mut Plan, at: Duration, action: fn(usize) -> Action) {
    (0..plan.options.hosts).for_each(|host| plan.add(at, action(host), Duration::ZERO));
}

/// Live through the history of a seed. Also returns how our agents ended.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<(Report, Counts), Box<Failure>> {
    live_through(seed, &draw(seed), keep_history)
}

/// The same, with notices.
///
/// # Errors
/// As [`live`].
pub fn live_with_notices(seed: u64, keep_history: bool) -> Result<(Report, Counts), Box<Failure>> {
    live_through(seed, &draw_notices(seed), keep_history)
}

/// The same, with machines that are ill.
///
/// # Errors
/// As [`live`].
pub fn live_ill(seed: u64, keep_history: bool) -> Result<(Report, Counts), Box<Failure>> {
    live_through(seed, &draw_ill(seed), keep_history)
}

fn live_through(seed: u64, plan: &Plan, keep_history: bool) -> Result<(Report, Counts), Box<Failure>> {
    let (report, job) = live_plan(seed, plan, keep_history)?;
    let mut counts = Counts::new();
    if job.ends().started_ahead > 0 {
        counts.insert("started ahead", job.ends().started_ahead);
    }
    if job.ends().replaced_ahead > 0 {
        counts.insert("replaced ahead", job.ends().replaced_ahead);
    }
    if job.ends().stuck > 0 {
        counts.insert("stuck", job.ends().stuck);
    }
    if job.ends().raised > 0 {
        counts.insert("raised", job.ends().raised);
    }
    for (_, outcome) in &job.ends().outcomes {
        *counts.entry(kind_of(outcome)).or_default() += 1;
    }
    Ok((report, counts))
}
